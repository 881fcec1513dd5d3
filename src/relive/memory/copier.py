"""StepCopier: copies the fields of a step to where they are stored, all of them in one compiled call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from struct import Struct
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..kernels.step_table import (
    ARRAY,
    ASKED,
    COUNT,
    DESCRIBE,
    DIMS,
    DTYPE,
    ITEM,
    KIND,
    NARROWED,
    NDIM,
    NEGATED,
    PAST,
    PITCH,
    POINTERS,
    SIZE,
    STRIDE,
    TARGET,
    TENSOR,
    TYPE,
    first_item,
)
from ..kernels.tensor_calls import dtype_code, tensor_calls
from ..steps.arrays import NO_DTYPE, NUMPY_DTYPES, Array, Ints, numpy_view

__all__ = ["SHORT", "BoundedCache", "Plan", "StepCopier"]


FLOAT64 = np.dtype(np.float64)


CACHES = 3 * 2**24
"""Bytes of all targets from which long rows are written past the caches. The oldest are not in a cache by the time
that they are read, and new ones would drive out all else. Below that, a copy by way of the caches is twice as fast."""
LONG = 2**17
"""Bytes of a long row."""
SHORT = 2**16
"""Up to so many bytes of a step are copied while no other thread of Python runs."""


class StepCopier:
    """Copies steps into rows, by address where their fields can be copied as they are.

    :meth:`accept` checks all fields of a step in one compiled call, and :meth:`write` copies them in another. Both
    follow a table that :meth:`learn` makes from a step that a StepChecker has checked. A step that is not accepted is
    checked field by field, and NumPy assigns it. If the row is free, one call does both: :meth:`take`, and
    :meth:`accept` if ``scratch`` is True. Other threads of Python run while a long step is copied.

    Args:
        dtypes: of the fields.
        targets: where the fields are stored, arrays ``[R, N, ...]`` whose rows' items are contiguous; None for a field
            that is only checked.
        count: N.
        shapes: of the fields, without N.
        scratch: True if there is only one row, which may hold any numbers between two steps.
    """

    def __init__(
        self,
        dtypes: Sequence[torch.dtype],
        targets: Sequence[Array | None],
        count: int,
        shapes: Sequence[tuple[int, ...]],
        *,
        scratch: bool = False,
    ) -> None:
        self._dtypes, self._targets, self._shapes = tuple(dtypes), tuple(targets), [(count, *shape) for shape in shapes]
        # a row that fits in no cache by the time that it is read need not go through one
        self._outgrows_caches = sum(target.nbytes for target in targets if target is not None) >= CACHES
        self.plan: Plan | None = None
        """The plan for the step before, if its fields can be copied as they are; for most loops, for all steps."""
        self._plans = BoundedCache[tuple[Kind, ...], Plan]()
        self._hold = sum(target[0].nbytes for target in targets if target is not None) <= SHORT
        self._accepted: Any = None
        """The step that was accepted last, until it is written. It keeps alive what the table points to."""
        self._copied: Any = None
        """The step that :meth:`accept` has copied, until it is written."""
        self._at_once = scratch

    def take(self, row: int, step: Mapping[str, Any], pick: Callable[[Any], tuple[Any, ...]]) -> bool:
        """Copy a step to a free row, if all of its fields can be copied as they are.

        After False the row is as it was, and the step may still be right.

        Args:
            row: the row.
            step: the fields by name.
            pick: gives the leaves of a step of the right fields.
        """
        plan = self.plan
        if plan is None:
            return False
        try:
            values = pick(step)  # `values` lives until the kernel returns, which reads it by its address
            if plan.tensor_check is not None and not plan.tensor_check.fit(values):
                return False
            return plan.take(id(values), plan.table, row, self._hold) < 0
        except Exception:  # the caller finds out what is wrong
            return False

    def accept(self, values: tuple[Any, ...]) -> bool:
        """True if all fields of a step can be copied as they are: :meth:`write` stores it, given the same tuple.

        After False the step may still be right: as a list, as an array of another dtype, or as a tensor with gaps.
        """
        plan = self.plan
        self._copied = None
        if plan is None or (plan.tensor_check is not None and not plan.tensor_check.fit(values)):
            return False
        if self._at_once:  # the row is free, so a step that does not fit may leave anything in it
            if plan.take(id(values), plan.table, 0, self._hold) >= 0:
                return False
            self._copied = values
        else:
            if plan.accept(id(values), plan.table) >= 0:
                return False
            self._accepted = values
        return True

    def write(self, row: int, values: Sequence[Any]) -> None:
        """Store a checked step in a row: arrays and tensors in RAM, one for each target or for the first of them."""
        if values is self._copied:  # the same tuple, not an equal one: the table has the addresses of its values
            self._copied = None
            return
        plan = self.plan
        if plan is not None and values is self._accepted:
            plan.copy(plan.table, row)
            self._accepted = None
            return
        for target, value in zip(self._targets, values, strict=False):
            if target is not None:
                target[row] = numpy_view(value.detach()) if type(value) is Tensor else value

    def learn(self, values: Sequence[Any]) -> None:
        """Prepare for steps like this one, which has a value for each field.

        Each combination of kinds keeps its table. A step with a field that cannot be copied as it is, or does not fit,
        changes nothing.
        """
        self._accepted = None
        kinds = [self._kind(i, value) for i, value in enumerate(values)]
        known = [kind for kind in kinds if kind is not None]
        if len(known) < len(kinds) or (self.plan is not None and known == self.plan.kinds):
            return
        key = tuple(known)
        self.plan = self._plans.get(key) or self._plans.keep(key, self._planned(known))

    def _kind(self, i: int, value: Any) -> Kind | None:
        """The kind of field ``i`` as it is given; None if it cannot be copied as it is."""
        kind: Any = value.__class__
        dtype = self._dtypes[i]
        if kind is np.ndarray and value.shape == self._shapes[i] and first_item():
            if value.dtype is self._numpy_dtype(i):  # by identity: a swapped byte order is another object
                return ARRAY
            if value.dtype is FLOAT64 and dtype is torch.float32 and self._targets[i] is not None:
                return NARROWED
        if kind is Tensor and value.dtype is dtype and value.shape == self._shapes[i] and not dtype.is_complex:
            return TENSOR if dtype_code(dtype) else ASKED  # complex ones may be conjugated lazily
        return None

    def _planned(self, kinds: list[Kind]) -> Plan:
        """The plan for steps of these kinds."""
        table, tensor_check = self._table(kinds), None
        if ASKED in kinds:
            places = [i for i, kind in enumerate(kinds) if kind == ASKED]
            tensor_check = TensorCheck(
                places, [self._dtypes[i] for i in places], [self._shapes[i] for i in places], table[POINTERS]
            )
        fast = kernels.fast()
        return Plan(kinds, table, tensor_check, fast.accept_step, fast.copy_step, fast.take_step)

    def _table(self, kinds: list[Kind]) -> Ints:
        """The table of fields of these kinds."""
        table = np.zeros((DIMS + max(map(len, self._shapes)), len(kinds)), np.int64)
        for i, (kind, shape) in enumerate(zip(kinds, self._shapes, strict=False)):
            target = self._targets[i]
            # item i of a tuple is a pointer of 8 bytes, from `first_item` bytes after its address on
            facts = kind, first_item() + 8 * i, *self._class_facts(kind, i), len(shape), *shape
            places = [KIND, ITEM, TYPE, DTYPE, DESCRIBE, NEGATED, NDIM, *range(DIMS, DIMS + len(shape))]
            table[places, i] = facts
            count, *inner = shape
            size = int(np.prod(inner, dtype=np.int64)) * self._dtypes[i].itemsize
            if target is None:
                table[SIZE, i] = count * size
                continue
            stride, pitch = target.strides[:2]
            # the items of a row follow one another, so that a row is a single copy
            if pitch == size or count == 1:  # a row is one run of bytes
                count, size = 1, count * size
            past = count == 1 and size >= LONG and self._outgrows_caches
            table[[TARGET, STRIDE, COUNT, PITCH, SIZE, PAST], i] = target.ctypes.data, stride, count, pitch, size, past
        return table

    def _class_facts(self, kind: Kind, i: int) -> tuple[int, int, int, int]:
        """TYPE, DTYPE, DESCRIBE and NEGATED of field ``i``."""
        dtype, calls = self._dtypes[i], tensor_calls()
        if kind == TENSOR and calls is not None:
            return id(Tensor), dtype_code(dtype), calls.describe, calls.is_negated if dtype.is_floating_point else 0
        return id(np.ndarray), id(FLOAT64 if kind == NARROWED else self._numpy_dtype(i)), 0, 0

    def _numpy_dtype(self, i: int) -> np.dtype[Any]:
        return NUMPY_DTYPES.get(self._dtypes[i], NO_DTYPE)


Kind = int
"""The kind of value that a field is given as; :mod:`relive.kernels.step_table` lists them."""


@dataclass(slots=True)
class Plan:
    """The table and the kernels for steps of one combination of kinds."""

    kinds: list[Kind]
    table: Ints
    tensor_check: TensorCheck | None
    """Checks the tensors that the kernel cannot; None if there are none."""
    accept: Callable[[int, Ints], int]
    """The kernel that checks."""
    copy: Callable[[Ints, int], None]
    """The kernel that copies."""
    take: Callable[[int, Ints, int, bool], int]
    """The kernel that checks and then copies."""


_facts = attrgetter("__class__", "dtype", "shape", "is_cpu")
_is_contiguous, _is_negated, _address = Tensor.is_contiguous, Tensor.is_neg, Tensor.data_ptr


class TensorCheck:
    """Asks the tensors of a step for class, dtype, shape, device and address, all of them in a few calls.

    Older versions of torch have no functions that compiled code can call: see :mod:`relive.kernels.tensor_calls`.

    Args:
        places: which items of a step are tensors.
        dtypes: theirs.
        shapes: theirs.
        pointers: an int64 array that gets their addresses.
    """

    def __init__(
        self,
        places: Sequence[int],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[tuple[int, ...]],
        pointers: Any,
    ) -> None:
        self._pick = _picker(places)
        self._pick_floats = _picker([k for k, dtype in enumerate(dtypes) if dtype.is_floating_point])
        self._wanted = [(Tensor, dtype, shape, True) for dtype, shape in zip(dtypes, shapes, strict=True)]
        self._memory, self._packed = memoryview(pointers).cast("B"), Struct(f"{len(places)}q")

    def fit(self, values: Sequence[Any]) -> bool:
        """Note the addresses of the tensors of a step. True if they are as expected, in RAM, and without gaps."""
        tensors = self._pick(values)
        try:
            if list(map(_facts, tensors)) != self._wanted or not all(map(_is_contiguous, tensors)):
                return False
            if any(map(_is_negated, self._pick_floats(tensors))):  # then their numbers are not what lies in memory
                return False
            self._packed.pack_into(self._memory, 0, *map(_address, tensors))
        except (AttributeError, RuntimeError):  # other things than tensors, or tensors without an address
            return False
        return True


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Gives the items at these places of a sequence, as a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0, 0))


K = TypeVar("K")
V = TypeVar("V")


LIMIT = 64
"""The most values kept. A loop adds and draws in a handful of sizes; one that never repeats a size gains nothing."""


class BoundedCache(dict[K, V]):
    """Keeps what was made for a key, such as a number of rows, to use it again. When it is full, it is emptied.

    It does not make the values itself. So it refers to no function, and thus to no owner, and the memory of a buffer is
    free as soon as the buffer is dropped.
    """

    def keep(self, key: K, value: V) -> V:
        """Keep ``value`` under ``key``, in place of all others if there are :data:`LIMIT`; returns it."""
        if len(self) >= LIMIT:
            self.clear()
        self[key] = value
        return value
