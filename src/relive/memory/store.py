"""Store: the interface of a replay's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import DTypeError, LifecycleError, ParameterError, ShapeError
from ..steps.arrays import Array, Ints, numpy_view
from ..steps.schema import Field, Path
from .allocator import RAM, Allocator
from .copier import StepCopier
from .layout import BatchLayout, RowLayout, row_layout

_INT64 = np.dtype(np.int64)


LAST = np.iinfo(np.int64).max


_from_numpy = cast("Callable[[Array], Tensor]", torch.from_numpy)  # its stubs do not say which arrays it takes


Where = Any
"""Places of rows in the form that a store reads fastest: int64, an array or a tensor on its device."""


Remainder = list[tuple[Any, Any]]
"""The parts of staged rows that the kernels do not write: pairs that only the store understands."""


class Store(ABC):
    """The memory of a replay's rows: it stages, writes, plans and reads them, and gives and takes those of a save.

    A place is the position of a row (int64); a negative one reads as zeros. ``target``, the part that the ring's
    kernels read and write, is in RAM: at least the bookkeeping, rewards and flags. All other fields may be anywhere.
    Batches are on ``device``. A store defines ``stage``, ``write``, ``gather`` and ``restore``. The defaults of
    the rest are those of a store whose batches are in RAM. Users write less: see :class:`relive.memory.ram.UserStore`.
    """

    device: torch.device
    leaves: dict[Path, Field]
    num_rows: int
    large: tuple[Path, ...]
    """The fields that a save does not pack with the others, in the schema's order."""
    gathered: tuple[Path, ...]
    """The fields of a batch that :meth:`gather` reads, in the schema's order; the plan has the others."""
    layout: RowLayout
    """The layout of a row of ``target``: the ``groups``, then the bookkeeping."""
    groups: tuple[dict[Path, Field], ...]
    """The fields in ``target``: of the observation, of the rest of a step, and of a given next observation."""
    batch: BatchLayout
    """The layout of a row of a batch of n-step transitions, as far as it is planned in RAM."""

    apart: Mapping[Path, Array] | None = None
    """The rows of each large field as bytes, uint8 ``[num_rows, B]``, if all fields are in RAM; else None."""

    packed = False
    """True if all fields of a batch are in RAM, in the packed rows of :attr:`target`."""

    sends = False
    """True if batches are sent to a device, so that compiled code cannot make their tensors."""

    allocator: Allocator = RAM
    """The allocator that gives the replay the memory of its ring and of its sampler."""

    read_aside = True
    """True if another thread may read some rows while this one writes others."""
    target: Array
    """The packed rows in RAM, uint8 ``[num_rows, W]``."""
    arrays: dict[Path, Array]
    """The fields of ``target``, ``[num_rows, *shape]``, over the same memory."""

    def meta(self, name: str) -> Array:
        """A bookkeeping field, the reward or a flag of all rows, ``[num_rows]``; flags as uint8."""
        array = self.arrays[name,]
        return array.view(np.uint8) if array.dtype == np.bool_ else array

    @property
    def memory(self) -> list[Array | Tensor]:
        """All that a write may change, as arrays and tensors."""
        return [self.target]

    @abstractmethod
    def stage(self, role: str, count: int, values: Sequence[Array | Tensor]) -> tuple[Array, Remainder]:
        """Prepare ``count`` checked rows for writing.

        Role "step" has all fields of a step, role "final" only the last observations of ended episodes.

        Returns:
            rows for ``target``, valid until the next call, and the rest for :meth:`write`.
        """

    def stage_both(
        self, count: int, steps: Sequence[Array | Tensor], final: Sequence[Array | Tensor]
    ) -> tuple[tuple[Array, Remainder], tuple[Array, Remainder]]:
        """:meth:`stage` of steps and of their final observations, which may come again at the end of ``steps``."""
        return self.stage("step", count, steps[: len(self.leaves)]), self.stage("final", count, final)

    def staging(self, role: str, count: int) -> Staging | None:
        """The memory in which whole steps of ``count`` rows are staged; None if each field is copied by itself.

        Role "both" has all fields of a step, then those of the final observations, for :meth:`stage_both`.
        """
        return None

    @abstractmethod
    def write(self, remainder: Remainder, places: Ints) -> None:
        """Store the rest of staged rows at ``places``, after ``target`` has its part. Negative places are skipped."""

    def plan(self, places: Ints, batch: BatchLayout | None = None) -> Plan:
        """Memory for the n-step transitions that start at ``places`` ``[B]``; the ring's kernel fills it.

        ``batch`` is :attr:`batch`, or a layout with more fields.
        """
        count, layout = len(places), self.batch if batch is None else batch
        return Plan(layout, places, np.empty((count, layout.nbytes), np.uint8), np.empty(count, np.int64))

    def fields(self, plan: Plan) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of planned transitions."""
        fields = plan.batch.tensors(plan.rows)
        if self.gathered or plan.stacks is not None:
            self.add_gathered(plan, fields, plan.places, plan.last)
        return fields

    def add_gathered(self, plan: Plan, found: dict[Path, Tensor], now: Where, then: Where) -> None:
        """Add to the fields of a batch those of :attr:`gathered`, of the rows ``now`` and ``then``, and the stacks."""
        stacked, *frames = plan.stacks or ([],)
        first, later = _gathered_of(tuple(self.leaves), self.gathered, tuple(stacked))
        fields = self.gather(first, now) if first else {}
        after = self.gather(later, then) if later else {}
        frames = self.places(*frames) if frames else ()
        for path in self.leaves if stacked else self.gathered:
            if path in stacked:
                found[path], found[("next_obs", *path[1:])] = self.gather_stacks(path, *frames)
                continue
            if path in fields:
                found[path] = fields[path]
            if path in after:
                found[("next_obs", *path[1:])] = after[path]

    def places(self, *arrays: Ints) -> tuple[Where, ...]:
        """Places ``[...]`` in the form that :meth:`gather` takes."""
        return arrays

    @abstractmethod
    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """Fields of the rows ``where`` ``[...]``, copied as ``[..., *shape]``."""

    def gather_stacks(self, path: Path, frames: Where) -> tuple[Tensor, Tensor]:
        """One field of the rows ``frames`` ``[2 B, depth]``, copied as two tensors ``[B, depth, *shape]``.

        Item i and item B + i share most rows.
        """
        both, count = self.gather([path], frames)[path], len(frames) // 2
        return both[:count], both[count:]

    def read(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """Fields (default: all) of the rows ``places`` ``[...]``, copied as ``[..., *shape]``."""
        return self.gather(self.leaves if paths is None else paths, *self.places(places))

    def views(self) -> dict[Path, Tensor]:
        """All fields of all rows ``[num_rows, *shape]`` in the schema's order, as tensors over the storage.

        Raises:
            LifecycleError: there are no such tensors.
        """
        raise LifecycleError("block: a replay with a store of its own has no rows to share; read data() or slice()")

    def tensors(self, *arrays: Array) -> list[Tensor]:
        """Arrays as tensors on the device."""
        return list(map(_from_numpy, arrays))

    def dump(self, places: Ints) -> Array:
        """Packed rows for a save, in RAM, in the order of ``row_layout``; they may share memory with the storage."""
        layout, _ = row_layout(self.leaves)
        rows = np.zeros((len(places), layout.nbytes), np.uint8)
        packed = layout.arrays(rows)  # views: writing to them writes the rows
        for path, array in self.arrays.items():
            packed[path][:] = array[places]
        rest = [path for path in packed if path not in self.arrays]
        for path, field in self.gather(rest, *self.places(places)).items():
            packed[path][:] = numpy_view(field.cpu())
        return rows

    def dump_large(self, path: Path, places: Ints) -> Tensor:
        """A large field of the rows ``places``, ``[K, *shape]``, which is saved by itself."""
        return self.gather([path], *self.places(places))[path].cpu()

    @abstractmethod
    def restore(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> None:
        """Write back rows from :meth:`dump` and :meth:`dump_large`.

        Raises:
            ValueError: the rows or a large field have another shape or dtype.
        """


@lru_cache(maxsize=64)
def _gathered_of(
    leaves: tuple[Path, ...], gathered: tuple[Path, ...], stacked: tuple[Path, ...]
) -> tuple[list[Path], list[Path]]:
    """Of the fields ``gathered`` those that are no stacks: of a window's first row, and of the row after it."""
    following = "next_obs" if any(path[0] == "next_obs" for path in leaves) else "obs"
    rest = [path for path in gathered if path not in stacked]
    return [path for path in rest if path[0] != "next_obs"], [path for path in rest if path[0] == following]


@dataclass(slots=True, eq=False)
class Plan:
    """The n-step transitions of a batch, found in RAM. A view may change them before the batch is read.

    Args:
        batch: the layout of ``rows``.
        places: the places of the anchors ``[B]``.
        rows: uint8 ``[B, W]``: the small fields, packed.
        last: int64 ``[B]``: the places of the rows that hold the next observations, or of the last steps if each step
            has its own.
        memory: where a store keeps ``rows`` and the places, to send all of it at once.
    """

    batch: BatchLayout
    places: Ints
    rows: Array
    last: Ints
    memory: Any = None
    stacks: tuple[list[Path], Ints] | None = None
    """Fields of the observation that are read as stacks, and the places ``[2 B, depth]`` of their frames: of the
    stacks before the steps, then of those after them; None: no stacks."""

    def column(self, *path: str) -> Array:
        """A small field of the batch as an array ``[B, ...]`` over ``rows``, to be read or written."""
        return self.batch.arrays(self.rows)[path]


class Staging(NamedTuple):
    """The memory in which steps of K rows are staged, and what checks and copies them."""

    rows: Array
    """uint8 ``[K, W]``: the packed rows."""
    final: Array
    """uint8 ``[K, W]``: those of the final observations; ``rows`` if the role has none."""
    copier: StepCopier
    """Checks steps and copies them there, into its row 0."""
    large: list[tuple[int, Array, bool]]
    """The fields that are not packed: which leaf of a step each is, the rows of its block as bytes, uint8 ``[R, B]``,
    and True if it belongs to the final observation."""


def as_places(places: Any) -> Ints:
    """Places ``[...]`` as kernels take them: a contiguous int64 array.

    Raises:
        DTypeError, ShapeError, ParameterError: ``places`` is not an array of whole numbers.
    """
    if places.__class__ is np.ndarray and places.dtype is _INT64 and places.flags.c_contiguous:
        return places
    try:
        array = np.asarray(places)
    except ValueError as error:
        raise ShapeError(f"places: expected an array of int64 ({error})") from error
    # an empty list has a float dtype, and is no error
    if array.size and array.dtype.kind not in "iu":
        raise DTypeError(f"places: expected int64, got {array.dtype}; pass what a sampler drew, or ring.anchors()")
    # a cast to int64 would make a large uint64 negative, which reads as zeros
    if array.dtype.kind == "u" and array.max(initial=0) > LAST:
        raise ParameterError(f"places: {array.max()} is beyond any row; pass what a sampler drew, or ring.anchors()")
    return np.asarray(array, np.int64, order="C")


def vector(places: Any) -> Ints:
    """Places ``[B]`` as kernels take them.

    Raises:
        DTypeError, ShapeError, ParameterError: ``places`` is not an array of whole numbers with one axis.
    """
    if places.__class__ is np.ndarray and places.ndim == 1 and places.dtype is _INT64 and places.flags.c_contiguous:
        return places
    array = as_places(places)
    if array.ndim != 1:
        raise ShapeError(f"places: expected one axis [B], got shape {array.shape}")
    return array


def require_rows(places: Ints, bad: int, rows: int) -> None:
    """Refuse entry ``bad`` of ``places``, which a kernel could not read; -1 means that all are good.

    Raises:
        ParameterError: ``bad`` is not -1.
    """
    if bad >= 0:
        raise ParameterError(
            f"places: entry {bad} is {places[bad]}, which is not one of the {rows} rows, or not one that this batch "
            "can start from; pass what a sampler drew, or ring.anchors()"
        )
