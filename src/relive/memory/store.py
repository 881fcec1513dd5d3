"""Store: what a home of rows can do. A replay's ring knows no more of its memory than this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DTypeError, ShapeError
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
"""Places of rows as a store looks them up fastest: int64, an array or a tensor on its device."""


Apart = list[tuple[Any, Any]]
"""What of staged rows the kernels do not store: pairs that only the store understands."""


Amend = Callable[[Array, Ints], None]
"""Changes the windows of a batch, packed as :attr:`Store.planned` says (uint8 ``[B, W]``), and their last places,
before what depends on where they end is read."""


def as_places(places: Any) -> Ints:
    """Places ``[...]`` as kernels take them: int64, in one piece.

    Raises:
        DTypeError, ShapeError: they are no array of whole numbers.
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
        raise ShapeError(f"places: {given.max()} is none of any row; pass what a sampler drew, or ring.anchors()")
    return np.asarray(given, np.int64, order="C")


def vector(places: Any) -> Ints:
    """Places ``[B]`` as kernels take them.

    Raises:
        DTypeError, ShapeError: they are no whole numbers, or have not one axis.
    """
    found = as_places(places)
    if found.ndim != 1:
        raise ShapeError(f"places: expected one axis [B], got shape {found.shape}")
    return found


def require_rows(places: Ints, bad: int, rows: int) -> None:
    """Refuse what a kernel found among places, unless that is -1.

    Raises:
        ShapeError: entry ``bad`` is no place that can be read.
    """
    if bad >= 0:
        raise ShapeError(
            f"places: entry {bad} is {places[bad]}, which is none of the {rows} rows, or not one that such a batch can "
            "be read from; pass what a sampler drew, or ring.anchors()"
        )


class WindowBytes(NamedTuple):
    """How the kernels read and write n-step windows; see :func:`relive.kernels.reference.windows`."""

    batch: RowLayout
    """The rows that they write."""
    at: Ints
    """At which bytes of a row of ``target`` the reward, terminated, truncated and the stamp are."""
    to: Ints
    """To which bytes of a row of the batch they write index, next_index, discount, steps, reward and the flags."""
    copied: Ints
    """How many bytes of the step are copied; where the next observation goes, and how many bytes it has."""


class Windows(NamedTuple):
    """The n-step windows of a batch."""

    fields: dict[Path, Tensor]
    """All but the large fields, ``[B, ...]``."""
    last: Ints
    """The places of the rows that hold the next observations, unless those are stored as given."""
    now: Where
    """The places of the anchors."""
    then: Where
    """``last`` likewise."""


class Store(Protocol):
    """Where the rows of a replay lie. Rings and views know no more of it than this.

    Places are int64, the number of a row; a negative one reads as zeros. What kernels of the ring read and write,
    ``target``, is in RAM: the bookkeeping, rewards and flags at least. Batches are on ``device``.
    """

    device: torch.device
    leaves: dict[Path, Field]
    num_rows: int
    large: tuple[Path, ...]
    """The fields that are not packed with the others, in the schema's order."""
    layout: RowLayout
    """How the rows of ``target`` are packed, its ``groups`` and then the bookkeeping."""
    groups: tuple[dict[Path, Field], ...]
    """What of a step is in ``target``: of its observation, its other fields, and a next observation of its own."""
    flags: Ints
    """At which bytes of a row of ``target`` terminated, truncated and the reward are."""
    planned: WindowBytes
    """How windows are planned, in RAM."""
    sizes: Ints
    """Of how many bytes of ``target`` a step consists, and a final observation."""

    @property
    def target(self) -> Array:
        """The packed rows in RAM, uint8 ``[num_rows, W]``."""
        ...

    def meta(self, name: str) -> Array:
        """A bookkeeping field, the reward or a flag of all rows, ``[num_rows]``; flags as uint8."""
        ...

    def stage(self, role: str, count: int, values: Sequence[Any]) -> tuple[Array, Apart]:
        """Get ``count`` checked rows ready: all of a "step", or the observation alone ("final") of those that ended.

        Returns:
            rows for ``target``, good until the next call, and what else there is to :meth:`write`.
        """
        ...

    def write(self, apart: Apart, places: Ints) -> None:
        """Store the rest of staged rows at ``places``, once ``target`` has its part; negative ones are left out."""
        ...

    def windows(
        self, places: Ints, rows: int, steps: int, gamma: float, state: Ints, amend: Amend | None = None
    ) -> Windows:
        """The windows that start at ``places``; see :func:`relive.kernels.reference.windows`."""
        ...

    def places(self, *arrays: Ints) -> tuple[Where, ...]:
        """Places ``[...]`` as :meth:`gather` takes them."""
        ...

    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """Fields of the rows ``where`` ``[...]``, as ``[..., *shape]``, copied."""
        ...

    def gather_stacks(self, path: Path, now: Where, then: Where) -> tuple[Tensor, Tensor]:
        """One field of the rows ``now`` and ``then`` ``[B, depth]``, most of which are the same."""
        ...

    def read(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """The same (default: all fields) of the rows ``places`` ``[...]``."""
        ...

    def views(self) -> dict[Path, Tensor]:
        """All fields of all rows ``[num_rows, *shape]`` in the schema's order, where they lie."""
        ...

    def tensors(self, *arrays: Array) -> list[Tensor]:
        """Arrays as tensors on the device."""
        ...

    def dump(self, places: Ints) -> Array:
        """Rows as they are saved, in RAM, packed as ``row_layout`` says; perhaps where they lie."""
        ...

    def dump_large(self, path: Path, places: Ints) -> Tensor:
        """A large field of the same rows, ``[K, *shape]``, which is saved by itself."""
        ...

    def restore(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> None:
        """Put rows back as :meth:`dump` and :meth:`dump_large` gave them.

        Raises:
            ValueError: they are not such rows.
        """
        ...
