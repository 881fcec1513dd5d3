"""PackedRows: the columns of a rollout, packed row by row for reading in random order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..memory.blocks import SMALL, Recycled
from ..memory.layout import LARGE_FIELD, RowLayout, typed
from ..steps.arrays import Ints, numpy_dtype
from ..steps.schema import Field
from ..steps.trees import Path

__all__ = ["PackedRows", "pack_columns"]

Bytes = NDArray[np.uint8]

SHARED_WORK = 2**20
"""A batch of at least this many bytes is copied faster by torch's threads than by one thread."""
FEW_THREADS = 2
"""With at most this many threads, torch is slower than one thread that loads rows ahead."""


class PackedRows:
    """A snapshot of columns, packed row by row.

    Args:
        columns: path -> contiguous ``[T, N, ...]``; row ``t * N + n`` is step ``t`` of env ``n``. A field of more
            than LARGE_FIELD bytes is read where it lies.
        pack: False reads every field where it lies.
        memory: gives the memory of batches, on the CPU; by default fresh memory.
    """

    def __init__(self, columns: Mapping[Path, Tensor], pack: bool = True, memory: Recycled | None = None) -> None:
        flat = {path: column.flatten(0, 1) for path, column in columns.items()}
        fields, layout = _laid_out(tuple((path, x.shape[1:], x.dtype) for path, x in flat.items()), pack)
        on_host = all(x.is_cpu for x in flat.values())
        rows = _HostRows(flat, fields, layout, memory or Recycled()) if on_host else _DeviceRows(flat, layout)
        self.gather: Callable[[Tensor], dict[Path, Tensor]] = rows.gather
        """The rows of an index (int64, ``[B]``) as fresh tensors ``[B, ...]``; small fields share one block."""


@lru_cache(maxsize=64)
def _laid_out(
    leaves: tuple[tuple[Path, tuple[int, ...], torch.dtype], ...], pack: bool
) -> tuple[dict[Path, Field], RowLayout]:
    """The fields of columns with these shapes and dtypes, and the layout of a packed row; each pass asks again."""
    fields = {path: Field(tuple(shape), dtype) for path, shape, dtype in leaves}
    return fields, RowLayout({path: x for path, x in fields.items() if pack and x.nbytes <= LARGE_FIELD})


class _DeviceRows:
    """Rows on a device: torch packs the small fields, and picks all rows."""

    def __init__(self, flat: Mapping[Path, Tensor], layout: RowLayout) -> None:
        self._flat, self._layout, self._packed = flat, layout, None
        if layout.fields:
            some = flat[next(iter(layout.fields))]
            self._packed = torch.empty((len(some), layout.nbytes), dtype=torch.uint8, device=some.device)
            for path, view in layout.views(self._packed).items():
                view.copy_(flat[path])

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        packed = {} if self._packed is None else self._layout.views(self._packed.index_select(0, index))
        return {path: packed[path] if path in packed else x.index_select(0, index) for path, x in self._flat.items()}


class _HostRows:
    """Rows in RAM, as bytes: our kernels pack the small fields, and pick all rows."""

    def __init__(
        self, flat: Mapping[Path, Tensor], fields: Mapping[Path, Field], layout: RowLayout, memory: Recycled
    ) -> None:
        self._fields, self._layout, self._memory = fields, layout, memory
        self._take = kernels.fast().take_rows
        self._apart = {path: x for path, x in flat.items() if path not in layout.fields}
        if layout.fields:
            self._packed = self._empty(len(flat[next(iter(layout.fields))]), layout.nbytes)
            pack_columns(layout, flat, self._packed, 1)

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        places = index.numpy()
        packed = self._layout.tensors(self._taken(self._packed, places)) if self._layout.fields else {}
        return {path: packed[path] if path in packed else self._column(path, index) for path in self._fields}

    def _column(self, path: Path, index: Tensor) -> Tensor:
        """The rows of a field that is not packed; torch is quickest for a few."""
        field, rows = self._fields[path], self._apart[path]
        if len(index) * field.nbytes < SMALL:
            return rows.index_select(0, index)
        taken = self._taken(_bytes(rows, field.nbytes), index.numpy())
        return typed(taken.reshape(-1).view(numpy_dtype(field.dtype)).reshape(len(index), *field.shape), field.dtype)

    def _taken(self, source: Bytes, places: Ints) -> Bytes:
        count, width = places.size, source.shape[1]
        out = np.empty((count, width), np.uint8) if count * width < SMALL else self._empty(count, width)
        if out.size >= SHARED_WORK and torch.get_num_threads() > FEW_THREADS:
            torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(places), out=torch.from_numpy(out))
            return out
        bad = self._take(source, places, out)
        if bad >= 0:
            raise IndexError(f"index {places[bad]} at place {bad}: there are {len(source)} rows")
        return out

    def _empty(self, count: int, width: int) -> Bytes:
        return self._memory.take(count * width).reshape(count, width)


def pack_columns(layout: RowLayout, flat: Mapping[Path, Tensor], rows: Bytes, steps: int) -> None:
    """Pack columns in RAM, ``[T * N, ...]`` each, env by env: step ``t`` of env ``n`` goes to row ``n * steps + t``.

    Args:
        layout: of a packed row.
        flat: path -> column; row ``t * N + n`` is step ``t`` of env ``n``.
        rows: uint8 ``[N * T, bytes]``, to be written.
        steps: T; with 1, every row keeps its place.
    """
    columns = [flat[path].contiguous() for path in layout.fields]  # kept while the kernel reads them by address
    kernels.fast().pack_rows(
        np.array([x.data_ptr() for x in columns], np.int64),
        np.array([field.nbytes for field in layout.fields.values()], np.int64),
        np.array([*layout.offsets.values()], np.int64),
        rows,
        steps,
    )


def _bytes(rows: Tensor, nbytes: int) -> Bytes:
    """Rows of ``nbytes`` bytes as uint8 ``[R, bytes]``."""
    return rows.contiguous().view(-1).view(torch.uint8).numpy().reshape(len(rows), nbytes)
