"""StepCopier and copy_all: the fields of a step are copied to where they are stored in as few calls as can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import core
from ..steps.arrays import Array, apart, numpy_view
from ..steps.schema import Field, Path

COPY_AT_ONCE: Any = vars(torch).get("_foreach_copy_")
"""Takes a list of targets and one of sources, of one dtype. The name is not public: None where torch has no such."""

AT_ONCE = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
"""Dtypes of which torch copies several tensors at once. It does not keep the bits of a NaN in float16 or bfloat16."""


class StepCopier:
    """Copies steps into rows, in one compiled call where all fields can be read there.

    A step is a dict of its fields, nested as their paths say, or a tuple of its leaves. A field can be read if it is an
    array or a tensor in RAM of the right shape, with or without gaps, or a list or number that NumPy makes an array of;
    with one env, the env axis may be left out. Its dtype is the field's, or is converted as ``check_castable`` allows.
    Other threads of Python run while a long step is copied.

    Args:
        leaves: the fields of a step.
        targets: where they are stored, arrays ``[R, N, ...]`` whose rows' items are contiguous; None for a field that
            is only checked.
        count: N.
        finite: the paths that have to be finite in debug mode.
        defaults: the values ``[N, ...]`` of the last fields, as many as a step may leave out.
    """

    def __init__(
        self,
        leaves: Mapping[Path, Field],
        targets: Sequence[Array | None],
        count: int,
        finite: Collection[Path] = (),
        defaults: Sequence[Array] = (),
    ) -> None:
        fields = leaves.values()
        self._targets = tuple(targets)
        self.fields: core.StepFields = core.StepFields(
            list(leaves), [x.dtype for x in fields], [x.shape for x in fields], count, self._targets, finite, defaults
        )
        """The fields, as compiled code takes them."""
        self.take: Callable[[int, object, bool], bool] = self.fields.take
        """Takes a row and a step, and True for debug mode. Copies the step there if all of its fields can be read, and
        are finite in debug mode where they have to be.

        After False the row is as it was, and the step may still be right.
        """
        self.leaves: Callable[[object], tuple[Array | Tensor, ...] | None] = self.fields.leaves
        """Takes a step. Returns its leaves as arrays and tensors that are stored as they are, or None if one cannot be
        read here."""

    def write(self, row: int, values: Sequence[Array | Tensor]) -> None:
        """Store a checked step in a row: arrays and tensors in RAM, one for each target."""
        if self.take(row, tuple(values), False):
            return
        rows = [target[row] for target in self._targets if target is not None]
        for target, value in zip(self._targets, apart(values, rows), strict=True):
            if target is not None:
                target[row] = numpy_view(value.detach()) if type(value) is Tensor else value


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy tensors to others of the same shapes on one device, all that are of one dtype at once.

    There may be more targets than sources: the last ones stay as they are.
    """
    at_once = AT_ONCE if callable(COPY_AT_ONCE) else ()
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=False):
        if target.dtype in at_once:
            pair = alike.setdefault(target.dtype, ([], []))
            pair[0].append(target)
            pair[1].append(source)
        else:
            target.copy_(source, non_blocking=True)
    for pair in alike.values():
        COPY_AT_ONCE(*pair, non_blocking=True)


K = TypeVar("K")
V = TypeVar("V")


LIMIT = 64
"""The most values kept. A loop adds and draws in a handful of sizes; one that never repeats a size gains nothing."""


class BoundedCache(dict[K, V]):
    """Keeps what was made for a key, such as a number of rows, to use it again. When it is full, it is emptied.

    It does not make the values itself. So it refers to no function, and thus to no owner, and the memory of a buffer is
    free as soon as the buffer is dropped.
    """

    def keep(self, key: K, value: V, most: int = LIMIT) -> V:
        """Keep ``value`` under ``key``, in place of all others if there are ``most``; returns it."""
        if len(self) >= most:
            self.clear()
        self[key] = value
        return value
