"""The rows of a replay in RAM. The small fields of a step lie side by side, so a step is read as one run of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import ParameterError, ShapeError
from ..steps.arrays import numpy_dtype, numpy_view
from ..steps.schema import Field
from ..steps.trees import Path, dotted
from .blocks import zeroed
from .layout import RowLayout, batch_layout, field_groups, row_layout, typed
from .store import Amend, Apart, Array, Ints, Where, WindowBytes, Windows, as_places, require_rows, vector

__all__ = ["ReplayRows", "first_beyond", "require_dump", "staged_leaves"]


READ = ("reward", "terminated", "truncated", "_stamp", "_step")
"""The fields of a step that the n-step kernel reads, in its order."""


WRITTEN = ("index", "next_index", "discount", "steps", "reward", "terminated", "truncated")
"""The fields of a batch's row that it writes, in its order."""


STAGES = 64
"""How many different row counts keep their staging memory."""


def _block(field: Field, num_rows: int) -> Array:
    # An array, not a tensor: moving a tensor to shared memory would move all tensors that share its storage.
    return zeroed(num_rows * field.nbytes).view(numpy_dtype(field.dtype)).reshape(num_rows, *field.shape)


def _window_bytes(source: RowLayout, groups: Sequence[Mapping[Path, Field]], given: bool) -> WindowBytes:
    """How kernels read and write n-step transitions of such rows; next observations may be ``given``."""
    batch = batch_layout(groups)
    at, to = (
        np.array([layout.offsets[name,] for name in names], np.int64)
        for layout, names in ((source, READ), (batch, WRITTEN))
    )
    starts = batch.starts
    copied = np.array([starts[3 if groups[2] else 2], starts[2], -1 if given else starts[1], 0, 0], np.int64)
    if given:
        begin, end = source.starts[2:4]
        copied[3:] = begin, end - begin
    return WindowBytes(batch, at, to, copied)


class ReplayRows:
    """The rows of a replay in RAM: packed small fields, a block for each large one, and the bookkeeping of the ring.

    Args:
        leaves: the fields of a step, including ``reward``, ``terminated`` and ``truncated``.
        num_rows: the number of rows.
        alone: each row has a next observation of its own, even if that is stored elsewhere.
    """

    def __init__(self, leaves: Mapping[Path, Field], num_rows: int, *, alone: bool = False) -> None:
        self.device = torch.device("cpu")
        self.leaves, self.num_rows = dict(leaves), num_rows
        self.layout, large = row_layout(leaves)
        self.large = tuple(path for path in leaves if path in large)
        self._bytes = zeroed(num_rows * self.layout.nbytes).reshape(num_rows, self.layout.nbytes)
        self.blocks = {path: _block(leaves[path], num_rows) for path in self.large}
        self.arrays = self.layout.arrays(self._bytes)
        self.sizes = np.array([self.layout.starts[3], self.layout.starts[1]], np.int64)
        self.flags = np.array([self.layout.offsets[name,] for name in ("terminated", "truncated", "reward")], np.int64)
        self._staged: dict[tuple[str, int], tuple[Array, list[Any]]] = {}
        self.groups = groups = field_groups(leaves, large)
        given = alone or any(path[0] == "next_obs" for path in leaves)
        self.planned = _window_bytes(self.layout, groups, given)

    def meta(self, name: str) -> Array:
        """See :class:`Store`."""
        array = self.arrays[name,]
        return array.view(np.uint8) if array.dtype == np.bool_ else array

    @property
    def target(self) -> Array:
        """All packed rows, uint8 ``[num_rows, W]``."""
        return self._bytes

    def stage(self, role: str, count: int, values: Sequence[Any]) -> tuple[Array, Apart]:
        """See :class:`Store`."""
        known = self._staged.get((role, count))
        if known is None:
            rows = np.zeros((count, self.layout.nbytes), np.uint8)
            arrays = self.layout.arrays(rows)
            if len(self._staged) > STAGES:
                self._staged.clear()
            known = self._staged[role, count] = rows, [arrays.get(path) for path in staged_leaves(self.leaves, role)]
        for staged, value in zip(known[1], values, strict=True):
            if staged is not None:
                staged[...] = numpy_view(value.detach()) if type(value) is Tensor else value
        if not self.large:
            return known[0], []
        wanted = zip(staged_leaves(self.leaves, role), values, strict=True)
        return known[0], [(path, value) for path, value in wanted if path in self.blocks]

    def write(self, apart: Apart, places: Ints) -> None:
        """See :class:`Store`."""
        for path, value in apart:
            array, block = numpy_view(value.detach()) if type(value) is Tensor else value, self.blocks[path]
            rows = np.ascontiguousarray(array, block.dtype).reshape(len(places), -1).view(np.uint8)
            kernels.fast().scatter_rows(rows, places, _bytes_of(block), rows.shape[1])

    def windows(
        self, places: Ints, rows: int, steps: int, gamma: float, state: Ints, amend: Amend | None = None
    ) -> Windows:
        """See :class:`Store`."""
        places, batch = vector(places), self.planned.batch
        out, last = np.empty((len(places), batch.nbytes), np.uint8), np.empty(len(places), np.int64)
        self.plan(places, rows, steps, gamma, state, out, last)
        if amend is not None:
            amend(out, last)
        return Windows(batch.tensors(out), last, places, last)

    def plan(self, places: Ints, rows: int, steps: int, gamma: float, state: Ints, out: Array, last: Ints) -> None:
        """Fill the rows of a batch ``out`` (uint8 ``[B, W]``) in one pass, and ``last`` of :class:`Windows`."""
        if len(state) * rows != self.num_rows:
            raise ParameterError(
                f"windows: expected the ring's own rows and state, got {len(state)} envs of {rows} rows"
            )
        _, at, to, copied = self.planned
        bad = kernels.fast().windows(places, rows, steps, gamma, state, self._bytes, at, out, to, copied, last)
        require_rows(places, bad, self.num_rows)

    def places(self, *arrays: Ints) -> tuple[Where, ...]:
        """See :class:`Store`."""
        return arrays

    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """See :class:`Store`."""
        places = as_places(where)
        return {path: self._gather(path, places) for path in paths}

    def _gather(self, path: Path, where: Ints) -> Tensor:
        field = self.leaves[path]
        if path not in self.blocks:
            require_rows(where.reshape(-1), first_beyond(where, self.num_rows), self.num_rows)
            picked: Any = self.arrays[path][where]
            picked[where < 0] = 0
            return typed(picked, field.dtype)
        source, target, rows = self._batch_of(path, where)
        flat = where.reshape(-1)
        require_rows(flat, kernels.fast().gather_rows(source, flat, rows, 0, field.nbytes), self.num_rows)
        return typed(target, field.dtype)

    def gather_stacks(self, path: Path, now: Where, then: Where) -> tuple[Tensor, Tensor]:
        """See :class:`Store`."""
        now, then = as_places(now), as_places(then)
        if path not in self.blocks:
            return self._gather(path, now), self._gather(path, then)
        if now.ndim != 2 or now.shape != then.shape:
            raise ShapeError(f"places: expected [B, depth] for both, got {now.shape} and {then.shape}")
        source, target, rows = self._batch_of(path, now)
        _, following, next_rows = self._batch_of(path, then)
        bad = kernels.fast().gather_pairs(source, now, then, rows, next_rows)
        require_rows(np.maximum(now, then).max(1, initial=0), bad, self.num_rows)
        dtype = self.leaves[path].dtype
        return typed(target, dtype), typed(following, dtype)

    def _batch_of(self, path: Path, where: Ints) -> tuple[Array, Array, Array]:
        """The rows of a block as bytes, an empty field of a batch, and its rows as bytes."""
        field = self.leaves[path]
        # NumPy asks for huge pages and torch does not; finding 4 kB pages would take as long as the copy
        target = np.empty((*where.shape, *field.shape), numpy_dtype(field.dtype))
        rows = target.reshape(-1).view(np.uint8).reshape(where.size, field.nbytes)
        return _bytes_of(self.blocks[path]), target, rows

    def read(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """See :class:`Store`."""
        places = as_places(places)
        rows, flat = np.empty((places.size, self.layout.nbytes), np.uint8), places.reshape(-1)
        bad = kernels.fast().gather_rows(self._bytes, flat, rows, 0, self.layout.nbytes)
        require_rows(flat, bad, self.num_rows)
        packed = self.layout.arrays(rows.reshape(*places.shape, self.layout.nbytes))
        return {
            path: self._gather(path, places) if path in self.blocks else typed(packed[path], self.leaves[path].dtype)
            for path in (self.leaves if paths is None else paths)
        }

    def views(self) -> dict[Path, Tensor]:
        """See :class:`Store`."""
        arrays = self.arrays | self.blocks
        return {path: typed(arrays[path], field.dtype) for path, field in self.leaves.items()}

    def tensors(self, *arrays: Array) -> list[Tensor]:
        """See :class:`Store`."""
        return [torch.from_numpy(array) for array in arrays]

    def dump(self, places: Ints) -> Array:
        """See :class:`Store`."""
        return self._bytes[_run(places)]

    def dump_large(self, path: Path, places: Ints) -> Tensor:
        """See :class:`Store`."""
        return typed(self.blocks[path][_run(places)], self.leaves[path].dtype)

    def restore(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> None:
        """See :class:`Store`."""
        require_dump(self.leaves, len(places), rows, self.layout.nbytes, large)
        self._bytes[places] = rows
        for path, block in self.blocks.items():
            block[places] = numpy_view(large[path])


def _bytes_of(block: Array) -> Array:
    """A block as rows of bytes."""
    return block.reshape(len(block), -1).view(np.uint8)


def first_beyond(places: Ints, rows: int) -> int:
    """The index in flattened ``places`` of the first place beyond the last row, or -1."""
    return -1 if places.max(initial=-1) < rows else int((places.reshape(-1) >= rows).argmax())


def _run(places: Ints) -> slice | Ints:
    """Consecutive places as a slice, so that reading them copies nothing; other places unchanged."""
    follow = len(places) and places[-1] - places[0] == len(places) - 1 and (np.diff(places) == 1).all()
    return slice(int(places[0]), int(places[-1]) + 1) if follow else places


def staged_leaves(leaves: Iterable[Path], role: str) -> list[Path]:
    """The fields of staged rows of a role, in order."""
    return [path for path in leaves if role == "step" or path[0] == "obs"]


def require_dump(
    leaves: Mapping[Path, Field], count: int, rows: Array, width: int, large: Mapping[Path, Tensor]
) -> None:
    """Require rows as :meth:`Store.dump` and :meth:`Store.dump_large` give them.

    Raises:
        ValueError: the rows or a large field have another shape or dtype.
    """
    if rows.shape != (count, width) or rows.dtype != np.uint8:
        raise ValueError(f"rows: expected uint8 {(count, width)}, got {rows.dtype} {rows.shape}")
    for path, block in large.items():
        shape, dtype = (count, *leaves[path].shape), leaves[path].dtype
        if tuple(block.shape) != shape or block.dtype is not dtype:
            raise ValueError(f"{dotted(path)}: expected {dtype} {shape}, got {block.dtype} {tuple(block.shape)}")
