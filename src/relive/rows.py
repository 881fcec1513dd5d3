"""Packed rows: all small fields of a step next to each other, so that a random step is one run of bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .checks import numpy_dtype, numpy_view
from .schema import Field, Path, dotted
from .store import Apart, Array, Ints, Where, Windows

__all__ = [
    "BOOKKEEPING",
    "PackedRows",
    "ReplayRows",
    "RowLayout",
    "batch_layout",
    "field_groups",
    "require_dump",
    "row_layout",
    "staged_leaves",
    "typed",
]

BOOKKEEPING: dict[Path, Field] = {
    ("_stamp",): Field((), torch.int64),
    ("_step",): Field((), torch.int32),
    ("_order",): Field((), torch.int32),
}
"""What the ring notes with every row; its docstring says what they mean."""

RESULTS: dict[Path, Field] = {
    ("index",): Field((), torch.int64),
    ("next_index",): Field((), torch.int64),
    ("discount",): Field((), torch.float32),
    ("steps",): Field((), torch.int32),
}
"""What a batch says of its windows, besides the fields of a step."""

READ = ("reward", "terminated", "truncated", "_stamp")
"""What the kernel of windows reads of a step, in its order."""

WRITTEN = ("index", "next_index", "discount", "steps", "reward", "terminated", "truncated")
"""What it notes with a window, in its order."""

HUGE = 2**21
"""Bytes of a huge page."""

STAGES = 64
"""Numbers of rows for which the memory to pack them in is kept."""

LARGE_FIELD = 1024
"""Bytes of a row's field from which packing it with the others gains nothing: it is a block of its own."""


class RowLayout:
    """Where each field lies inside a row of bytes.

    Groups of fields follow one another; each begins at a multiple of 16 and has its wide dtypes first, so that every
    field is aligned, and a group looks the same wherever it lies.
    """

    def __init__(self, *groups: Mapping[Path, Field]) -> None:
        self.fields: dict[Path, Field] = {}
        self.offsets: dict[Path, int] = {}
        self.starts: list[int] = []
        """Where each group begins, and where the row ends: it has that many bytes."""
        end = 0
        for group in groups:
            self.starts.append(end)
            for path, field in sorted(group.items(), key=lambda leaf: -leaf[1].dtype.itemsize):
                self.fields[path], self.offsets[path] = field, end
                end += field.nbytes
            end = -(-end // 16) * 16
        end = max(end, 16)  # rows without bytes have no views
        self.starts.append(end)
        self.nbytes = end
        self._dtype = np.dtype(
            {
                "names": [str(i) for i in range(len(self.fields))],
                "formats": [(numpy_dtype(field.dtype), field.shape) for field in self.fields.values()],
                "offsets": list(self.offsets.values()),
                "itemsize": max(end, 1),
            }
        )

    def arrays(self, rows: Array) -> dict[Path, Array]:
        """The fields of ``rows`` (uint8, ``[..., nbytes]``) as strided NumPy views ``[..., *shape]`` of their bits."""
        if not self.fields:
            return {}
        records = rows.view(self._dtype)[..., 0]
        return {path: records[str(i)] for i, path in enumerate(self.fields)}

    def views(self, rows: Tensor) -> dict[Path, Tensor]:
        """The fields of ``rows`` (uint8, ``[..., nbytes]``) as typed views ``[..., *shape]`` into the same memory."""
        if rows.is_cpu:  # a view by way of NumPy costs a third of one by way of torch
            arrays = self.arrays(rows.numpy())
            return {path: typed(arrays[path], field.dtype) for path, field in self.fields.items()}
        return {path: self.view(rows, path) for path in self.fields}  # elsewhere than in RAM

    def view(self, rows: Tensor, path: Path, start: int = 0) -> Tensor:
        """One field of ``rows`` (uint8, ``[..., bytes]``) that hold a row from byte ``start`` on, as a typed view."""
        field = self.fields[path]
        item, count = field.dtype.itemsize, field.nbytes // field.dtype.itemsize
        values: Any = rows.view(field.dtype).narrow(-1, (self.offsets[path] - start) // item, count)
        return values.unflatten(-1, field.shape) if field.shape else values.squeeze(-1)


def typed(array: Array, dtype: torch.dtype) -> Tensor:
    """An array as a tensor of the same memory; the dtype is one of the same size where NumPy lacks it."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


class PackedRows:
    """A snapshot of columns, packed row by row.

    Args:
        columns: path -> contiguous ``[T, N, ...]``; row ``t * N + n`` is step ``t`` of env ``n``. A field of more
            than LARGE_FIELD bytes is read where it lies.
        pack: False reads every field where it lies.
    """

    def __init__(self, columns: Mapping[Path, Tensor], pack: bool = True) -> None:
        flat = {path: column.flatten(0, 1) for path, column in columns.items()}
        fields = {path: Field(tuple(column.shape[1:]), column.dtype) for path, column in flat.items()}
        small = {path: field for path, field in fields.items() if pack and field.nbytes <= LARGE_FIELD}
        self._order = tuple(columns)
        self._blocks = {path: column for path, column in flat.items() if path not in small}
        self._layout = RowLayout(small)
        some = next(iter(flat.values()))
        self._rows = torch.empty((len(some), self._layout.nbytes), dtype=torch.uint8, device=some.device)
        for path, view in self._layout.views(self._rows).items():
            view.copy_(flat[path])

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        """The rows ``index`` (int64, ``[B]``) as fresh tensors ``[B, ...]``; small fields share one block."""
        batch = self._layout.views(self._rows.index_select(0, index)) if self._layout.fields else {}
        for path, block in self._blocks.items():
            batch[path] = block.index_select(0, index)
        return {path: batch[path] for path in self._order}


def row_layout(leaves: Mapping[Path, Field]) -> tuple[RowLayout, set[Path]]:
    """How the rows of a replay are packed, and which fields are blocks of their own."""
    large = {path for path, field in leaves.items() if field.nbytes > LARGE_FIELD}
    return RowLayout(*field_groups(leaves, large), BOOKKEEPING), large


def zeroed(nbytes: int) -> Array:
    """Zeroed memory, on huge pages where there are any: at random places most of a read is finding the page."""
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(nbytes, np.uint8)
    memory = mmap.mmap(-1, -(-nbytes // HUGE) * HUGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


def _block(field: Field, num_rows: int) -> Tensor:
    bits = zeroed(num_rows * field.nbytes).view(numpy_dtype(field.dtype))
    return typed(bits, field.dtype).view(num_rows, *field.shape)


def field_groups(leaves: Mapping[Path, Field], large: Iterable[Path]) -> tuple[dict[Path, Field], ...]:
    """The small fields: what an observation is made of, what else a step has, the next observation where given."""
    groups: tuple[dict[Path, Field], ...] = ({}, {}, {})
    for path, field in leaves.items():
        if path not in large:
            groups[{"obs": 0, "next_obs": 2}.get(path[0], 1)][path] = field
    return groups


def batch_layout(groups: Sequence[Mapping[Path, Field]]) -> RowLayout:
    """The rows of a batch: the small fields of a step, the next observation, and what the window came to."""
    obs, others, given = groups
    following = {("next_obs", *path[1:]): field for path, field in obs.items()}
    return RowLayout(obs, others, given or following, RESULTS)


def _window_bytes(source: RowLayout, batch: RowLayout) -> tuple[Ints, Ints]:
    """At which bytes of a stored row the kernel of windows reads, and to which of a row of the batch it writes."""
    at = np.array([source.offsets[name,] for name in READ], np.int64)
    return at, np.array([batch.offsets[name,] for name in WRITTEN], np.int64)


class ReplayRows:
    """The rows of a replay in RAM: packed small fields, a block for each large one, and the bookkeeping of the ring.

    Args:
        leaves: the fields of a step, ``reward``, ``terminated`` and ``truncated`` among them.
        num_rows: how many rows.
        alone: each row is complete with a next observation of its own, even if that lies elsewhere.
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
        self.flags = np.array([self.layout.offsets[name,] for name in ("terminated", "truncated")], np.int64)
        self._staged: dict[tuple[str, int], tuple[Array, list[Any]]] = {}
        groups = field_groups(leaves, large)
        self.batch = batch_layout(groups)
        """The rows of a batch."""
        self._at, self._to = _window_bytes(self.layout, self.batch)
        starts, given = self.batch.starts, alone or any(path[0] == "next_obs" for path in leaves)
        self._copied = np.array([starts[3 if groups[2] else 2], starts[2], -1 if given else starts[1]], np.int64)

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
        kept = places >= 0
        for path, value in apart:
            array = numpy_view(value.detach()) if type(value) is Tensor else value
            numpy_view(self.blocks[path])[places[kept]] = array[kept]

    def windows(self, places: Ints, rows: int, steps: int, gamma: float, state: Ints) -> Windows:
        """See :class:`Store`."""
        out, last = np.empty((len(places), self.batch.nbytes), np.uint8), np.empty(len(places), np.int64)
        self.plan(places, rows, steps, gamma, state, out, last)
        arrays = self.batch.arrays(out)
        fields = {path: typed(arrays[path], field.dtype) for path, field in self.batch.fields.items()}
        return Windows(fields, last, places, last)

    def plan(self, places: Ints, rows: int, steps: int, gamma: float, state: Ints, out: Array, last: Ints) -> None:
        """The rows of a batch, ``out`` (uint8 ``[B, W]``), made in one pass; and ``last`` of :class:`Windows`."""
        kernels.fast().windows(
            places, rows, steps, gamma, state, self._bytes, self._at, out, self._to, self._copied, last
        )

    def places(self, *arrays: Ints) -> tuple[Where, ...]:
        """See :class:`Store`."""
        return arrays

    def gather(self, paths: Iterable[Path], where: Where) -> dict[Path, Tensor]:
        """See :class:`Store`."""
        return {path: self._gather(path, where) for path in paths}

    def _gather(self, path: Path, where: Ints) -> Tensor:
        field = self.leaves[path]
        if path not in self.blocks:
            picked: Any = self.arrays[path][where]
            picked[where < 0] = 0
            return typed(picked, field.dtype)
        size, source = field.nbytes, numpy_view(self.blocks[path]).reshape(self.num_rows, -1).view(np.uint8)
        # NumPy asks for huge pages, torch does not: finding 4 kB pages would take as long as the copy
        target = np.empty((*where.shape, *field.shape), numpy_dtype(field.dtype))
        rows = target.reshape(-1).view(np.uint8).reshape(where.size, size)
        kernels.fast().gather_rows(source, where.reshape(-1), rows, 0, size)
        return typed(target, field.dtype)

    def read(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """See :class:`Store`."""
        rows = np.empty((places.size, self.layout.nbytes), np.uint8)
        kernels.fast().gather_rows(self._bytes, places.reshape(-1), rows, 0, self.layout.nbytes)
        packed = self.layout.arrays(rows.reshape(*places.shape, self.layout.nbytes))
        return {
            path: self._gather(path, places) if path in self.blocks else typed(packed[path], self.leaves[path].dtype)
            for path in (self.leaves if paths is None else paths)
        }

    def tensors(self, *arrays: Array) -> list[Tensor]:
        """See :class:`Store`."""
        return [torch.from_numpy(array) for array in arrays]

    def dump(self, places: Ints) -> tuple[Array, dict[Path, Tensor]]:
        """See :class:`Store`."""
        return self._bytes[places], self.gather(self.large, places)

    def restore(self, places: Ints, rows: Array, large: Mapping[Path, Tensor]) -> None:
        """See :class:`Store`."""
        require_dump(self.leaves, len(places), rows, self.layout.nbytes, large)
        self._bytes[places] = rows
        for path, block in self.blocks.items():
            numpy_view(block)[places] = numpy_view(large[path])


def staged_leaves(leaves: Iterable[Path], role: str) -> list[Path]:
    """The fields that come with staged rows of a role, in order."""
    return [path for path in leaves if role == "step" or path[0] == "obs"]


def require_dump(
    leaves: Mapping[Path, Field], count: int, rows: Array, width: int, large: Mapping[Path, Tensor]
) -> None:
    """Refuse rows that :meth:`Store.dump` did not give.

    Raises:
        ValueError: they are of another shape or dtype.
    """
    if rows.shape != (count, width) or rows.dtype != np.uint8:
        raise ValueError(f"rows: expected uint8 {(count, width)}, got {rows.dtype} {rows.shape}")
    for path, block in large.items():
        shape, dtype = (count, *leaves[path].shape), leaves[path].dtype
        if tuple(block.shape) != shape or block.dtype is not dtype:
            raise ValueError(f"{dotted(path)}: expected {dtype} {shape}, got {block.dtype} {tuple(block.shape)}")
