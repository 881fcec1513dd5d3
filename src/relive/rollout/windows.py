"""The windows of a rollout: its episodes cut into sequences, and sequences read as padded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..batches.sequences import WHOLE, EnvBatch, SequenceBatch, padding
from ..batches.tensordicts import as_tensordict
from ..errors import FieldError, ParameterError
from ..memory.blocks import Recycled
from ..memory.layout import RowLayout
from ..returns.functions import normalize
from ..steps.schema import Field, Schema
from ..steps.trees import Path
from .minibatches import parts, parts_by_steps
from .states import ENV, LENGTH, START, Empty, Ints, States

__all__ = ["Flags", "WindowReader", "cut", "env_batches", "splitter"]


class Flags:
    """What cuts a rollout into episodes: ``done``, ``real`` and ``starts``, uint8 ``[T, N]``.

    Args:
        done: bool ``[T, N]``, ``terminated | truncated``.
        real: bool ``[T, N]``, the rollout's mask.
        ended: bool ``[N]``, whether the episode before the first row had ended.
    """

    def __init__(self, done: NDArray[Any], real: NDArray[Any], ended: NDArray[Any]) -> None:
        self.done, self.real = (np.ascontiguousarray(x).view(np.uint8) for x in (done, real))
        self.starts, self.ended = np.empty_like(self.done), ended.astype(np.uint8)
        """The first steps of episodes; and whether the last episodes have ended by now, ``[N]``."""
        kernels.fast().episode_starts(self.done, self.real, self.ended, self.starts)


def cut(flags: Flags, length: int | None, stride: int, drop_tail: bool, complete: bool) -> Ints:
    """The windows ``[K, 5]``: env, start, length, where the episode starts (or 0), whether it does start there."""
    size, stride = WHOLE if length is None else min(length, WHOLE), min(stride, WHOLE)
    arguments = flags.done, flags.real, flags.starts, size, stride, not drop_tail or length is None, complete
    room = np.empty((flags.done.size // min(stride, size) + flags.done.size // 8 + 8, 5), np.int64)
    found = kernels.fast().plan_windows(*arguments, room)
    if found > len(room):
        room = np.empty((found, 5), np.int64)
        kernels.fast().plan_windows(*arguments, room)
    return room[:found]


def splitter(
    total: int, batch_size: int | None, num_batches: int | None, batch_steps: int | None
) -> Callable[[Ints], list[tuple[int, int]]]:
    """How an epoch's windows, in their order, are split into batches: (begin, end) of each; by default all in one.

    Raises:
        ParameterError: sizes that make no sense.
    """
    given = [size for size in (batch_size, num_batches, batch_steps) if size is not None]
    if len(given) > 1:
        raise ParameterError("sequences: pass at most one of batch_size, num_batches and batch_steps")
    if batch_steps is not None:
        parts_by_steps(np.zeros(0, np.int64), batch_steps)
        return lambda windows: parts_by_steps(windows[:, LENGTH], batch_steps)
    split = parts(max(total, 1), batch_size if given else total or 1, num_batches, items="sequences")
    return lambda _: split if total else []


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
        pack: first copy the fields of at most so many bytes next to each other, env by env: this costs one pass over
            them, and each window is then one run of bytes.
        memory: what batches are made of, on the CPU.
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
        fields = {path: Field(tuple(column.shape[2:]), column.dtype) for path, column in columns.items()}
        small = {path: field for path, field in fields.items() if field.nbytes <= pack}
        self._layout = RowLayout(small)
        rows = self._empty((self._envs, self.num_steps, self._layout.nbytes), torch.uint8)
        for path, view in self._layout.views(rows).items():
            view.copy_(columns[path].transpose(0, 1))
        self._rows = rows.flatten(0, 1)
        self._pad = torch.zeros(self._layout.nbytes, dtype=torch.uint8, device=self._device)
        for path, view in self._layout.views(self._pad[None]).items():
            view.fill_(padding(path))

    def most_rows(self, windows: Ints, length: int) -> int:
        """Rows that any batch of these windows of up to ``length`` steps needs."""
        burn = self.burn_in(windows)
        return int((windows[:, LENGTH] + burn).max()) if burn.any() else length

    def burn_in(self, windows: Ints) -> Ints:
        """How many steps of each window are unrolled for their state alone."""
        return windows[:, START] - (windows[:, START] if self._states is None else self._states.first_rows(windows))

    def batches(
        self,
        windows: Ints,
        bounds: list[tuple[int, int]],
        rows: int | None,
        time_first: bool,
        normalize_advantage: bool = False,
    ) -> Iterator[SequenceBatch]:
        """The windows of an epoch, (begin, end) of them a batch, of ``rows`` rows each or as the longest needs."""
        table = self._table(windows)
        lengths = table[0]
        on_device = torch.from_numpy(table).to(self._device)
        for low, high in bounds:
            most = rows or int(lengths[low:high].max())
            yield self._batch(on_device[:, low:high], most, time_first, normalize_advantage)

    def _table(self, windows: Ints) -> Ints:
        """What batches need to know about their windows, ``[9, K]``: one slice of it is quicker than nine."""
        env, start, length, origin, begins = windows.T
        burn = self.burn_in(windows)
        first, every = start - burn, 1 if self._states is None else self._states.every
        packed, row, state = env * self.num_steps + first, first * self._envs + env, first // every * self._envs + env
        is_start = (begins == 1) & (first == origin)
        return np.stack([length + burn, burn, env, start, is_start, packed, row, state, first % every == 0])

    def _batch(self, table: Tensor, rows: int, time_first: bool, normalize_advantage: bool) -> SequenceBatch:
        lengths, burn_in, env, start, is_start, packed, row, state, kept = table.unbind()
        leaves = self._gather(packed, row, lengths, rows, time_first)
        for name, marks in zip(
            ("is_start", "mask"), kernels.mark_windows(lengths, burn_in, is_start, rows), strict=True
        ):
            leaves[name,] = marks.T if time_first else marks
        if normalize_advantage:
            leaves["advantage",] = normalize(leaves["advantage",], leaves["mask",])
        hidden = None if self._states is None else self._hidden(state, kept)
        facts = {"lengths": lengths, "burn_in": burn_in, "env": env, "start": start}
        return SequenceBatch(leaves, facts, hidden, time_first=time_first)

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
            hidden = self._hidden(index, torch.ones_like(index))
        return SequenceBatch(leaves, moved, hidden, time_first=True)

    def whole(self, envs: Ints | None) -> dict[Path, Tensor]:
        """All steps of some envs, ``[T, B, ...]``, copied; None gives those of all, as they lie."""
        if envs is None:
            return dict(self._columns)
        env = torch.from_numpy(envs).to(self._device)
        lengths = torch.full_like(env, self.num_steps)
        return {  # numbers are picked time by time: the row they are picked from is in the nearest cache by then
            path: self._read_column(path, env, lengths, self.num_steps, True)
            if column.dim() > 2
            else column.index_select(1, env)
            for path, column in self._columns.items()
        }

    def _hidden(self, index: Tensor, kept: Tensor) -> Any:
        assert self._states is not None
        return self._schema.rebuild("hidden", self._states.at(index, kept, self._empty).__getitem__)

    def _gather(
        self, packed_row: Tensor, row: Tensor, lengths: Tensor, rows: int, time_first: bool
    ) -> dict[Path, Tensor]:
        packed: dict[Path, Tensor] = {}
        if self._layout.fields:
            packed = self._layout.views(self._read(self._rows, packed_row, 1, self._pad, lengths, rows, time_first))
        return {
            path: packed[path] if path in packed else self._read_column(path, row, lengths, rows, time_first)
            for path in self._columns
        }

    def _read_column(self, path: Path, row: Tensor, lengths: Tensor, rows: int, time_first: bool) -> Tensor:
        column = self._columns[path]
        source = column.reshape(self.num_steps * self._envs, -1).view(torch.uint8)
        pad = torch.full(column.shape[2:], padding(path), dtype=column.dtype, device=self._device)
        bits = pad.reshape(1, -1).view(torch.uint8)[0]
        windows = self._read(source, row, self._envs, bits, lengths, rows, time_first).view(column.dtype)
        return windows.view(*windows.shape[:2], *column.shape[2:])

    def _read(
        self, source: Tensor, index: Tensor, step: int, pad: Tensor, lengths: Tensor, rows: int, time_first: bool
    ) -> Tensor:
        # A window is one run of bytes, and so is its padding. Time comes first by a view of that: fields that are
        # packed are strided in either order.
        out = self._empty((len(lengths), rows, source.shape[1]), torch.uint8)
        kernels.gather_windows(source, index, step, lengths, pad, rows, out)
        return out.transpose(0, 1) if time_first else out


def env_batches(
    trajectories: WindowReader,
    columns: WindowReader,
    windows: Ints,
    order: Ints | None,
    bounds: list[tuple[int, int]],
    epochs: int,
) -> Iterator[EnvBatch]:
    """Whole envs, (begin, end) of them a batch: views of what is laid out once, in one order, for all epochs.

    The order is a circle. Every epoch divides it from another place, a batch and a fraction of one further round. As
    long as batches have as many envs as there are epochs, no two epochs have the same ones, and nothing moves again.

    Args:
        trajectories: reads what is wanted as sequences.
        columns: reads what is wanted as it is.
        windows: whole trajectories, env by env, as :func:`cut` gives them.
        order: a permutation of the envs; None for their own order, which all epochs share.
        bounds: of the batches.
        epochs: passes over the rollout.
    """
    total, widest = bounds[-1][1], max(high - low for low, high in bounds)
    rotates = order is not None and epochs > 1 and len(bounds) > 1
    circle: Ints = np.arange(total) if order is None else np.append(order, order[: (widest - 1) * rotates])
    counts = np.bincount(windows[:, ENV], minlength=total)
    mine = windows[_runs((np.cumsum(counts) - counts)[circle], counts[circle])]
    (sequences,) = trajectories.batches(mine, [(0, len(mine))], trajectories.num_steps, time_first=True)
    steps, envs = columns.whole(None if order is None else circle), torch.from_numpy(circle)
    until: list[int] = np.append(0, np.cumsum(counts[circle])).tolist()
    for epoch in range(epochs):
        begin = epoch * widest * (epochs + 1) // epochs * rotates
        for low, high in bounds:
            first = (begin + low) % total
            last = first + high - low
            leaves = {path: leaf[:, first:last] for path, leaf in steps.items()}
            batch = as_tensordict(leaves, (trajectories.num_steps, high - low))
            yield EnvBatch(envs[first:last], batch, sequences.part(until[first], until[last]))


def _runs(begins: Ints, counts: Ints) -> Ints:
    """begin, begin + 1, ... of each, as many as it counts."""
    before: Ints = np.cumsum(counts) - counts
    shifts: Ints = np.repeat(begins - before, counts)
    return shifts + np.arange(len(shifts))
