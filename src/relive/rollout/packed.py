"""PackedRows: the columns of a rollout, packed row by row for reading in random order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..memory.blocks import SMALL, Recycled
from ..memory.layout import LARGE_FIELD, RowLayout
from ..steps.schema import Field
from ..steps.trees import Path

__all__ = ["PackedRows"]


class PackedRows:
    """A snapshot of columns, packed row by row.

    Args:
        columns: path -> contiguous ``[T, N, ...]``; row ``t * N + n`` is step ``t`` of env ``n``. A field of more
            than LARGE_FIELD bytes is read where it lies.
        pack: False reads every field where it lies.
        memory: what batches are made of, on the CPU; by default fresh memory.
    """

    def __init__(self, columns: Mapping[Path, Tensor], pack: bool = True, memory: Recycled | None = None) -> None:
        flat = {path: column.flatten(0, 1) for path, column in columns.items()}
        some = next(iter(flat.values()))
        self._order = tuple(columns)
        self._memory = memory if some.is_cpu else None
        fields = {path: Field(tuple(x.shape[1:]), x.dtype) for path, x in flat.items()} if pack else {}
        small = {path: field for path, field in fields.items() if field.nbytes <= LARGE_FIELD}
        self._blocks = {path: column for path, column in flat.items() if path not in small}
        self._layout = RowLayout(small) if small else None
        if self._layout is not None:
            self._rows = self._empty((len(some), self._layout.nbytes), torch.uint8, some.device)
            for path, view in self._layout.views(self._rows).items():
                view.copy_(flat[path])

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        """The rows ``index`` (int64, ``[B]``) as fresh tensors ``[B, ...]``; small fields share one block."""
        batch = {} if self._layout is None else self._layout.views(self._taken(self._rows, index))
        for path, block in self._blocks.items():
            batch[path] = self._taken(block, index)
        return {path: batch[path] for path in self._order}

    def _taken(self, source: Tensor, index: Tensor) -> Tensor:
        if self._memory is None or source.nbytes < SMALL:  # no more than that, unless rows are named several times
            return source.index_select(0, index)
        out = self._empty((len(index), *source.shape[1:]), source.dtype, source.device)
        return torch.index_select(source, 0, index, out=out)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._memory is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return self._memory.empty(shape, dtype)
