"""Store: the interface of a replay's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DTypeError, ParameterError, ShapeError
from ..steps.schema import Field
from ..steps.trees import Path
from .layout import RowLayout

__all__ = [
    "Amend",
    "Apart",
    "Array",
    "Ints",
    "Store",
    "Where",
    "WindowBytes",
    "Windows",
    "as_places",
    "require_rows",
    "vector",
]


Array = NDArray[Any]


Ints = NDArray[np.int64]


_INT64 = np.dtype(np.int64)


LAST = np.iinfo(np.int64).max


Where = Any
"""Places of rows in the form that a store reads fastest: int64, an array or a tensor on its device."""


Apart = list[tuple[Any, Any]]
"""The parts of staged rows that the kernels do not write: pairs that only the store understands."""


Amend = Callable[[Array, Ints], None]
"""Changes planned n-step transitions before they are read: the rows ``[B, W]`` (uint8, packed as
:attr:`Store.planned` says) and their last places ``[B]``."""


def as_places(places: Any) -> Ints:
    """Places ``[...]`` as kernels take them: a contiguous int64 array.

    Raises:
        DTypeError, ShapeError, ParameterError: ``places`` is not an array of whole numbers.
    """
    if places.__class__ is np.ndarray and places.dtype is _INT64 and places.flags.c_contiguous:
        return places
    try:
        given = np.asarray(places)
    except ValueError as error:
        raise ShapeError(f"places: expected an array of int64 ({error})") from error
    if given.size and given.dtype.kind not in "iu":
        raise DTypeError(f"places: expected int64, got {given.dtype}; pass what a sampler drew, or ring.anchors()")
    if given.dtype.kind == "u" and given.max(initial=0) > LAST:
        raise ParameterError(f"places: {given.max()} is beyond any row; pass what a sampler drew, or ring.anchors()")
    return np.asarray(given, np.int64, order="C")


def vector(places: Any) -> Ints:
    """Places ``[B]`` as kernels take them.

    Raises:
        DTypeError, ShapeError, ParameterError: ``places`` is not an array of whole numbers with one axis.
    """
    found = as_places(places)
    if found.ndim != 1:
        raise ShapeError(f"places: expected one axis [B], got shape {found.shape}")
    return found


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


class WindowBytes(NamedTuple):
    """Offsets for the kernels of n-step transitions; see :func:`relive.kernels.reference.windows`."""

    batch: RowLayout
    """The layout of the rows that they write."""
    at: Ints
    """Byte offsets in a row of ``target`` of reward, terminated, truncated, the stamp and the step."""
    to: Ints
    """Byte offsets in a row of the batch of index, next_index, discount, steps, reward and the flags."""
    copied: Ints
    """Bytes of the step; the offset and size of the next observation (-1: each row has its own); where that lies."""


class Windows(NamedTuple):
    """The n-step transitions of a batch."""

    fields: dict[Path, Tensor]
    """All but the large fields, ``[B, ...]``."""
    last: Ints
    """The places of the rows that hold the next observations, unless each step has its own."""
    now: Where
    """The places of the anchors, for :meth:`Store.gather`."""
    then: Where
    """The places ``last``, for :meth:`Store.gather`."""


class Store(Protocol):
    """The memory of a replay's rows, as rings and views use it.

    A place is the position of a row (int64); a negative one reads as zeros. ``target``, the part that the ring's
    kernels read and write, is in RAM: at least the bookkeeping, rewards and flags. Batches are on ``device``.
    """

    device: torch.device
    leaves: dict[Path, Field]
    num_rows: int
    large: tuple[Path, ...]
    """The fields that are not packed with the others, in the schema's order."""
    layout: RowLayout
    """The layout of a row of ``target``: the ``groups``, then the bookkeeping."""
    groups: tuple[dict[Path, Field], ...]
    """The fields in ``target``: of the observation, of the rest of a step, and of a given next observation."""
    flags: Ints
    """Byte offsets in a row of ``target`` of terminated, truncated and the reward."""
    planned: WindowBytes
    """Offsets for planning n-step transitions in RAM."""
    sizes: Ints
    """Bytes in ``target`` of a step, and of a final observation."""

    @property
    def target(self) -> Array:
        """The packed rows in RAM, uint8 ``[num_rows, W]``."""
        ...

    def meta(self, name: str) -> Array:
        """A bookkeeping field, the reward or a flag of all rows, ``[num_rows]``; flags as uint8."""
        ...

    def stage(self, role: str, count: int, values: Sequence[Any]) -> tuple[Array, Apart]:
        """Prepare ``count`` checked rows for writing.

        Role "step" has all fields of a step, role "final" only the last observations of ended episodes.

        Returns:
            rows for ``target``, valid until the next call, and the rest for :meth:`write`.
        """
        ...

    def write(self, apart: Apart, places: Ints) -> None:
        """Store the rest of staged rows at ``places``, after ``target`` has its part. Negative places are skipped."""
        ...

    def windows(
        self, places: Ints, rows: int, steps: int, gamma: float, state: Ints, amend: Amend | None = None
    ) -> Windows:
        """The n-step transitions from ``places`` on; see :func:`relive.kernels.reference.windows`."""
        ...

    def places(self, *arrays: Ints) -> tuple[Where, ...]:
        """Places ``[...]`` in the form that :meth:`gather` takes."""
        ...

    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """Fields of the rows ``where`` ``[...]``, copied as ``[..., *shape]``."""
        ...

    def gather_stacks(self, path: Path, now: Where, then: Where) -> tuple[Tensor, Tensor]:
        """One field of the rows ``now`` and ``then`` ``[B, depth]``, which share most rows."""
        ...

    def read(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """Fields (default: all) of the rows ``places`` ``[...]``, copied as ``[..., *shape]``."""
        ...

    def views(self) -> dict[Path, Tensor]:
        """All fields of all rows ``[num_rows, *shape]`` in the schema's order, as tensors over the storage."""
        ...

    def tensors(self, *arrays: Array) -> list[Tensor]:
        """Arrays as tensors on the device."""
        ...

    def dump(self, places: Ints) -> Array:
        """Packed rows for a save, in RAM, in the order of ``row_layout``; they may share memory with the storage."""
        ...

    def dump_large(self, path: Path, places: Ints) -> Tensor:
        """A large field of the rows ``places``, ``[K, *shape]``, which is saved by itself."""
        ...

    def restore(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> None:
        """Write back rows from :meth:`dump` and :meth:`dump_large`.

        Raises:
            ValueError: the rows or a large field have another shape or dtype.
        """
        ...
