"""WindowReader: reads windows of a rollout, each of consecutive steps of one episode, as padded batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..batches.sequences import SequenceBatch, padding
from ..errors import FieldError
from ..memory.blocks import Recycled
from ..memory.layout import RowLayout
from ..returns.functions import scaled
from ..steps.arrays import Ints
from ..steps.schema import Field, Schema
from ..steps.trees import Path
from .episodes import LENGTH, START, Flags
from .packed import pack_columns
from .states import Empty, States

__all__ = ["WindowReader"]


def _fresh(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class WindowReader:
    """Reads windows of one rollout as padded batches.

    Args:
        columns: path -> contiguous ``[T, N, ...]``, without the hidden states.
        states: the hidden states, if there are any.
        schema: how they are nested.
        size: (T, N).
        device: where they lie.
        pack: first pack the fields of at most this many bytes side by side, env by env. This costs one pass over them;
            each window is then one run of bytes.
        memory: gives the memory of batches, on the CPU.
    """

    def __init__(
        self,
        columns: Mapping[Path, Tensor],
        states: States | None,
        schema: Schema,
        size: tuple[int, int],
        device: torch.device,
        pack: int,
        memory: Recycled,
    ) -> None:
        self._columns, self._states, self._schema = columns, states, schema
        (self.num_steps, self._envs), self._device = size, device
        self._empty: Empty = memory.empty if device.type == "cpu" else partial(_fresh, device)
        for name in {path[0] for path in columns} & {"lengths", "burn_in", "env", "start", "done"}:
            raise FieldError(
                f"field '{name}': batches of sequences have another one of this name; pick others: fields=..."
            )
        self._fields = {path: Field(tuple(column.shape[2:]), column.dtype) for path, column in columns.items()}
        self._layout = RowLayout({path: field for path, field in self._fields.items() if field.nbytes <= pack})
        self._apart = {path: self._source(path) for path in columns if path not in self._layout.fields}
        self._packed = self._pack() if self._layout.fields else None

    def _source(self, path: Path) -> WindowSource:
        """A column as it lies, time by time."""
        column = self._columns[path]
        pad = torch.full(column.shape[2:], padding(path), dtype=column.dtype, device=self._device)
        bits = column.reshape(self.num_steps * self._envs, -1).view(torch.uint8)
        return WindowSource(bits, pad.reshape(1, -1).view(torch.uint8)[0], self._envs, self._empty)

    def _pack(self) -> WindowSource:
        """The fields of the layout side by side, env by env."""
        layout, count = self._layout, self.num_steps * self._envs
        rows = self._empty((count, layout.nbytes), torch.uint8)
        if rows.is_cpu:
            flat = {path: self._columns[path].flatten(0, 1) for path in layout.fields}
            pack_columns(layout, flat, rows.numpy(), self.num_steps)
        else:
            for path, view in layout.views(rows.view(self._envs, self.num_steps, layout.nbytes)).items():
                view.copy_(self._columns[path].transpose(0, 1))
        pad = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
        for path, view in layout.views(pad[None]).items():
            view.fill_(padding(path))
        return WindowSource(rows, pad, 1, self._empty)

    def most_rows(self, windows: Ints, length: int) -> int:
        """Rows that any batch of these windows of up to ``length`` steps needs."""
        burn = self.burn_in(windows)
        return int((windows[:, LENGTH] + burn).max()) if burn.any() else length

    def burn_in(self, windows: Ints) -> Ints:
        """How many rows before each window are unrolled only for the state."""
        return windows[:, START] - (windows[:, START] if self._states is None else self._states.first_rows(windows))

    def batches(
        self,
        windows: Ints,
        bounds: list[tuple[int, int]],
        rows: int | None,
        time_first: bool,
        normalize_advantage: bool = False,
    ) -> Iterator[SequenceBatch]:
        """The batches of an epoch.

        Args:
            windows: a table of windows, as :func:`relive.rollout.episodes.cut` gives it, in the epoch's order.
            bounds: (begin, end) of the windows of each batch.
            rows: L; None for the rows that the longest window of the batch needs.
            time_first: batches are ``[L, B, ...]``; else ``[B, L, ...]``.
            normalize_advantage: normalise ``advantage`` over each batch's steps.
        """
        table = self._table(windows)
        lengths = table[0]
        # Kernels on the CPU take arrays, and each row of this table is one.
        there = table if self._device.type == "cpu" else torch.from_numpy(table).to(self._device)
        for low, high in bounds:
            most = rows or int(lengths[low:high].max())
            yield self._batch(there[:, low:high], most, time_first, normalize_advantage)

    def _table(self, windows: Ints) -> Ints:
        """Nine facts of each window that batches need, ``[9, K]``: one slice of a table is quicker than nine slices."""
        env, start, length, origin, begins = windows.T
        burn = self.burn_in(windows)
        first, every = start - burn, 1 if self._states is None else self._states.every
        packed, row, state = env * self.num_steps + first, first * self._envs + env, first // every * self._envs + env
        is_start = (begins == 1) & (first == origin)
        return np.stack([length + burn, burn, env, start, is_start, packed, row, state, first % every == 0])

    def _batch(self, table: Any, rows: int, time_first: bool, normalize_advantage: bool) -> SequenceBatch:
        lengths, burn_in, env, start, is_start, packed, row, state, kept = table
        leaves = self._gather(packed, row, lengths, rows, time_first)
        for name, marks in zip(
            ("is_start", "mask"), kernels.mark_windows(lengths, burn_in, is_start, rows), strict=True
        ):
            leaves[name,] = marks.T if time_first else marks
        if normalize_advantage:
            leaves["advantage",] = scaled(leaves["advantage",], leaves["mask",])
        hidden = None if self._states is None else self._hidden(state, kept)
        facts = {"lengths": lengths, "burn_in": burn_in, "env": env, "start": start}
        return SequenceBatch(leaves, {name: _tensor(x) for name, x in facts.items()}, hidden, time_first=time_first)

    def chunk(self, flags: Flags, low: int, high: int) -> SequenceBatch:
        """The steps from ``low`` up to, not including, ``high`` of all envs, ``[L, N, ...]``."""
        leaves = {path: column[low:high] for path, column in self._columns.items()}
        for name, flag in (("is_start", flags.starts), ("mask", flags.real), ("done", flags.done)):
            leaves[name,] = torch.from_numpy(flag[low:high].view(np.bool_)).to(self._device)
        envs, first = np.arange(self._envs), np.full(self._envs, low)
        facts = {
            "lengths": np.full(self._envs, high - low),
            "burn_in": np.zeros(self._envs, np.int64),
            "env": envs,
            "start": first,
        }
        moved = {name: torch.from_numpy(fact).to(self._device) for name, fact in facts.items()}
        hidden = None
        if self._states is not None:
            index = moved["env"] + low // self._states.every * self._envs
            on_host = self._device.type == "cpu"
            hidden = self._hidden(index.numpy() if on_host else index, index * 0 + 1)
        return SequenceBatch(leaves, moved, hidden, time_first=True)

    def whole(self, envs: Ints | None) -> dict[Path, Tensor]:
        """A copy of all steps of some envs, ``[T, B, ...]``; None gives the columns of all envs, uncopied."""
        if envs is None:
            return dict(self._columns)
        env = torch.from_numpy(envs).to(self._device)
        first: Any = envs if self._device.type == "cpu" else env
        lengths = first * 0 + self.num_steps
        return {  # torch picks numbers time by time, so the row that it picks from is in the nearest cache
            path: self._read_column(path, first, lengths, self.num_steps, True)
            if column.dim() > 2
            else column.index_select(1, env)
            for path, column in self._columns.items()
        }

    def _hidden(self, index: Any, kept: Any) -> Any:
        assert self._states is not None
        return self._schema.rebuild("hidden", self._states.at(index, kept, self._empty).__getitem__)

    def _gather(self, packed_row: Any, row: Any, lengths: Any, rows: int, time_first: bool) -> dict[Path, Tensor]:
        # A window is one run of bytes, and so is its padding. Time comes first by a view of that: fields that are
        # packed are strided in either order.
        packed: dict[Path, Tensor] = {}
        if self._packed is not None:
            found = self._packed.windows(packed_row, lengths, rows)
            packed = self._layout.views(found.transpose(0, 1) if time_first else found)
        return {
            path: packed[path] if path in packed else self._read_column(path, row, lengths, rows, time_first)
            for path in self._columns
        }

    def _read_column(self, path: Path, row: Any, lengths: Any, rows: int, time_first: bool) -> Tensor:
        source = self._apart.get(path) or self._source(path)
        field, found = self._fields[path], source.windows(row, lengths, rows)
        windows = found.reshape(-1).view(field.dtype).view(*found.shape[:2], *field.shape)  # fields may be empty
        return windows.transpose(0, 1) if time_first else windows


def _tensor(fact: Any) -> Tensor:
    return fact if isinstance(fact, Tensor) else torch.from_numpy(fact)


class WindowSource:
    """Rows of bytes that windows are read from.

    Args:
        rows: uint8 ``[R, W]``, contiguous.
        pad: uint8 ``[W]``, the row that fills a window up.
        step: the distance in rows from one step of an env to its next one.
        empty: makes the windows.
    """

    def __init__(self, rows: Tensor, pad: Tensor, step: int, empty: Empty) -> None:
        self._rows, self._pad, self._step, self._empty = rows, pad, step, empty
        self._arrays = (rows.numpy().reshape(-1), pad.numpy()) if rows.is_cpu else None

    def windows(self, first: Any, lengths: Any, count: int) -> Tensor:
        """Windows of ``lengths`` rows from ``first`` on, uint8 ``[B, count, W]``; both are arrays for rows in RAM."""
        if self._arrays is None:
            return kernels.reference.gather_windows(self._rows, first, self._step, lengths, self._pad, count)
        out = self._empty((len(first), count, self._rows.shape[1]), torch.uint8)
        source, pad = self._arrays
        kernels.fast().copy_windows(source, first, self._step, lengths, pad, out.numpy())
        return out
