"""Packed rows: all small fields of a step next to each other, so that a random step is one run of bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import kernels
from .checks import numpy_dtype, numpy_view
from .schema import Field, Path

__all__ = ["BOOKKEEPING", "PackedRows", "ReplayRows", "RowLayout", "row_layout", "typed"]

BOOKKEEPING: dict[Path, Field] = {
    ("_stamp",): Field((), torch.int64),
    ("_step",): Field((), torch.int32),
    ("_order",): Field((), torch.int32),
}
"""What the ring notes with every row; its docstring says what they mean."""

HUGE = 2**21
"""Bytes of a huge page."""

STAGES = 64
"""Numbers of rows for which the memory to pack them in is kept."""

LARGE_FIELD = 1024
"""Bytes of a row's field from which packing it with the others gains nothing: it is a block of its own."""

Array = NDArray[Any]
Ints = NDArray[np.int64]


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
        fields: dict[Path, Tensor] = {}
        for path, field in self.fields.items():
            item, count = field.dtype.itemsize, field.nbytes // field.dtype.itemsize
            view = rows.view(field.dtype).narrow(-1, self.offsets[path] // item, count)
            fields[path] = view.unflatten(-1, field.shape) if field.shape else view.squeeze(-1)
        return fields


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
    """How the rows of a replay are packed, and which fields are blocks of their own: large ones, and hidden states.

    Of those a sequence needs the first alone, so that all others would be read in vain.
    """
    limits = {path: 0 if path[0] == "hidden" else LARGE_FIELD for path in leaves}
    large = {path for path, field in leaves.items() if field.nbytes > limits[path]}
    groups = _groups({path: field for path, field in leaves.items() if path not in large})
    return RowLayout(*groups, BOOKKEEPING), large


def zeroed(nbytes: int) -> Array:
    """Zeroed memory, on huge pages where there are any: at random places most of a read is finding the page."""
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(nbytes, np.uint8)
    memory = mmap.mmap(-1, -(-nbytes // HUGE) * HUGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


def _groups(leaves: Mapping[Path, Field]) -> tuple[dict[Path, Field], ...]:
    """What an observation is made of, what else a step has, and the next observation where it is given."""
    groups: tuple[dict[Path, Field], ...] = ({}, {}, {})
    for path, field in leaves.items():
        groups[{"obs": 0, "next_obs": 2}.get(path[0], 1)][path] = field
    return groups


class ReplayRows:
    """The rows of a replay in RAM: packed small fields, a block for each large one, and the bookkeeping of the ring.

    Args:
        leaves: the fields of a step, ``reward``, ``terminated`` and ``truncated`` among them.
        num_rows: how many rows.
    """

    device = torch.device("cpu")

    def __init__(self, leaves: Mapping[Path, Field], num_rows: int) -> None:
        self.leaves, self.num_rows = dict(leaves), num_rows
        self.layout, large = row_layout(leaves)
        self.groups = _groups({path: field for path, field in leaves.items() if path not in large})
        self._bytes = zeroed(num_rows * self.layout.nbytes).reshape(num_rows, self.layout.nbytes)
        self.blocks = {
            path: typed(zeroed(num_rows * field.nbytes).view(numpy_dtype(field.dtype)), field.dtype).view(
                num_rows, *field.shape
            )
            for path, field in leaves.items()
            if path in large
        }
        self.arrays = self.layout.arrays(self._bytes)
        self.sizes = np.array([self.layout.starts[3], self.layout.starts[1]], np.int64)
        self.flags = np.array([self.layout.offsets[name,] for name in ("terminated", "truncated")], np.int64)
        self._staged: dict[tuple[str, int], tuple[Array, list[Any]]] = {}

    def meta(self, name: str) -> Array:
        """A bookkeeping or scalar field of all rows, ``[num_rows]``; flags as uint8."""
        array = self.arrays[name,]
        return array.view(np.uint8) if array.dtype == np.bool_ else array

    def stage(self, role: str, count: int, values: Iterable[Any]) -> Array:
        """Pack the small fields of ``count`` checked rows: all ("step"), or the observation alone ("final")."""
        known = self._staged.get((role, count))
        if known is None:
            rows = np.zeros((count, self.layout.nbytes), np.uint8)
            arrays = self.layout.arrays(rows)
            wanted = [path for path in self.leaves if role == "step" or path[0] == "obs"]
            if len(self._staged) > STAGES:
                self._staged.clear()
            known = self._staged[role, count] = rows, [arrays.get(path) for path in wanted]
        for staged, value in zip(known[1], values, strict=True):
            if staged is not None:
                staged[...] = numpy_view(value.detach()) if type(value) is Tensor else value
        return known[0]

    def write_blocks(self, role: str, places: Ints, values: Sequence[Any]) -> None:
        """Store the large fields of the same rows at ``places``; negative ones are left out."""
        wanted = [path for path in self.leaves if role == "step" or path[0] == "obs"]
        kept = places >= 0
        for path, value in zip(wanted, values, strict=True):
            if path in self.blocks:
                array = numpy_view(value.detach()) if type(value) is Tensor else value
                numpy_view(self.blocks[path])[places[kept]] = array[kept]

    @property
    def target(self) -> Array:
        """All packed rows, uint8 ``[num_rows, W]``."""
        return self._bytes

    def read(self, places: Ints) -> dict[Path, Tensor]:
        """The fields of rows ``[K, ...]`` as they are stored, copied."""
        packed = self.layout.arrays(self._bytes[places])
        blocks = {path: self.gather_block(path, places) for path in self.blocks}
        return {
            path: blocks[path] if path in blocks else typed(packed[path], field.dtype)
            for path, field in self.leaves.items()
        }

    def gather(self, places: Array, out: Array, start: int, nbytes: int) -> None:
        """The first ``nbytes`` bytes of the rows ``places`` into the rows of ``out``, from byte ``start`` on."""
        kernels.fast().gather_rows(self._bytes, places, out, start, nbytes)

    def gather_block(self, path: Path, places: Array) -> Tensor:
        """A large field of the rows ``places`` ``[...]``, as ``[..., *shape]``; zeros at negative places."""
        field = self.leaves[path]
        size, source = field.nbytes, numpy_view(self.blocks[path]).reshape(self.num_rows, -1).view(np.uint8)
        # NumPy asks for huge pages, torch does not: finding 4 kB pages would take as long as the copy
        target = np.empty((*places.shape, *field.shape), numpy_dtype(field.dtype))
        rows = target.reshape(-1).view(np.uint8).reshape(places.size, size)
        kernels.fast().gather_rows(source, places.reshape(-1), rows, 0, size)
        return typed(target, field.dtype)
