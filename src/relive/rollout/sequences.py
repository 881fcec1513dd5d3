"""Sequences: windows of consecutive steps of a rollout, cut at episode ends and padded, with their recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import core
from ..batches import WHOLE, EnvBatch, SequenceBatch, as_batch, padding, swap_layers
from ..errors import FieldError, ParameterError
from ..memory.allocator import Recycled
from ..memory.layout import LARGE_FIELD, RowLayout
from ..returns import scale
from ..steps.arrays import Bools, Ints, Leaf, as_host
from ..steps.schema import Field, Path
from .columns import Columns
from .minibatches import parts, parts_by_steps

PerWindow = Ints | Tensor
"""Numbers of windows: an array for columns in RAM, else a tensor."""

ENDS = ("terminated", "truncated", "mask")
"""The columns that say where episodes end, and which steps are real."""

ENV, START, LENGTH, ORIGIN, BEGINS = range(5)
"""The columns of a table of windows: the env, the first step, how many steps, the episode's first step in this rollout
or 0, and 1 if the episode begins there."""


class Flags(NamedTuple):
    """Where the episodes of a rollout start and end: arrays of bools for columns in RAM, tensors for others.

    Args:
        done: ``[T, N]``, ``terminated | truncated``.
        real: ``[T, N]``, the rollout's mask.
        starts: ``[T, N]``, True at the first step of an episode.
        ended: ``[N]``, True where the newest episode has ended.
    """

    done: Bools | Tensor
    real: Bools | Tensor
    starts: Bools | Tensor
    ended: Bools | Tensor

    @classmethod
    def of(cls, columns: Sequence[Any], ended: Any) -> Flags:
        """The flags of the columns :data:`ENDS`, arrays or tensors ``[T, N]``; on a device without waiting for it.

        Args:
            columns: the columns.
            ended: ``[N]``, True if the episode before the first row had ended.
        """
        terminated, truncated, real = columns
        done = terminated | truncated
        if isinstance(done, Tensor):
            return cls(done, real, *core.episodes_on_device(done, real, ended))
        done, real = (np.ascontiguousarray(x) for x in (done, real))
        starts, ended = np.empty(real.shape, np.bool_), ended.copy()
        core.episode_starts(*(x.view(np.uint8) for x in (done, real, ended, starts)))
        return cls(done, real, starts, ended)

    def in_ram(self) -> list[NDArray[np.uint8]]:
        """``done``, ``real`` and ``starts`` as arrays; this waits for a device, once."""
        flags: Any = self.done, self.real, self.starts
        if isinstance(self.done, Tensor):
            flags = as_host(torch.stack(flags))
        return [flag.view(np.uint8) for flag in flags]


# A pass reads every window of a rollout, so one call lists them. A replay changes with every step, and computes where a
# window starts from its last step. Both share the rule: windows start at steps 0, s, 2s, ..., and only the last may be
# shorter.
def plan_windows(flags: Flags, length: int | None, stride: int, *, drop_tail: bool, complete: bool) -> Ints:
    """The windows of ``length`` steps, or of whole episodes if it is None, as a table ``[K, 5]``."""
    size, stride = WHOLE if length is None else min(length, WHOLE), min(stride, WHOLE)
    done, real, starts = flags.in_ram()
    return core.plan_windows(done, real, starts, size, stride, not drop_tail or length is None, complete)


Split = Callable[[Ints], list[tuple[int, int]]]
"""Splits an epoch's windows, in their order, into batches: (begin, end) of each."""


def splitter(total: int, batch_size: int | None, num_batches: int | None, batch_steps: int | None) -> Split:
    """Splits the windows of an epoch into batches; without a size, all into one.

    Raises:
        ParameterError: a size that is not positive, or more than one of them.
    """
    sizes = [size for size in (batch_size, num_batches, batch_steps) if size is not None]
    if len(sizes) > 1:
        raise ParameterError("sequences: pass at most one of batch_size, num_batches and batch_steps")
    if batch_steps is not None:
        parts_by_steps(np.zeros(0, np.int64), batch_steps)  # refuses a wrong size at once
        return lambda windows: parts_by_steps(windows[:, LENGTH], batch_steps)
    split = parts(max(total, 1), batch_size if sizes else total or 1, num_batches, items="sequences")
    return lambda _: split if total else []


# A pass packs the small fields first, and reads states where they lie. Small fields that are read where they lie take
# 21 to 24 ms to gather at 24 x 4096 instead of 14, and packing takes 4. Stores past the caches gain nothing there.
class WindowReader:
    """Reads windows of one rollout as padded batches.

    Args:
        columns: of the rollout.
        paths: which of them to read, without the hidden states.
        states: the hidden states, if there are any.
        pack: first pack the fields of at most this many bytes side by side, env by env. This costs one pass over them;
            each window is then one run of bytes. On a device all but large fields are packed, as calls are what counts.
        memory: gives the memory of batches, on the CPU.

    Raises:
        FieldError: a column has a name that batches of sequences use otherwise.
    """

    num_steps: int

    def __init__(self, columns: Columns, paths: list[Path], states: States | None, pack: int, memory: Recycled) -> None:
        self._columns, self._states, self._schema = columns.select(paths), states, columns.schema
        self.num_steps, self._envs, self._device = columns.count, columns.num_envs, columns.device
        self._on_host, self._memory = self._device.type == "cpu", memory
        for name in {path[0] for path in paths} & {"lengths", "burn_in", "env", "start", "done"}:
            raise FieldError(
                f"field '{name}': batches of sequences have another one of this name; pick others: fields=..."
            )
        self._fields = {path: Field(tuple(column.shape[2:]), column.dtype) for path, column in self._columns.items()}
        most = pack if self._on_host else LARGE_FIELD
        self._layout = RowLayout({path: field for path, field in self._fields.items() if field.nbytes <= most})
        self._unpacked = {path: self._source(path) for path in paths if path not in self._layout.fields}

    def _source(self, path: Path) -> WindowSource:
        """A column as it lies, time by time: the next step of an env is N rows further."""
        column = self._columns[path]
        pad = torch.full(column.shape[2:], padding(path), dtype=column.dtype, device=self._device)
        bits = column.reshape(self.num_steps * self._envs, -1).view(torch.uint8)
        layout = RowLayout({path: self._fields[path]})
        return WindowSource(bits, pad.reshape(1, -1).view(torch.uint8)[0], self._envs, layout, self._memory)

    @cached_property
    def _packed(self) -> WindowSource | None:
        """The fields of the layout side by side, env by env: the next step of an env is the next row."""
        layout, count = self._layout, self.num_steps * self._envs
        if not layout.fields:
            return None
        if self._on_host:
            rows = self._memory.empty((count, layout.nbytes))
            flat = {path: self._columns[path].flatten(0, 1).contiguous() for path in layout.fields}
            layout.pack(flat, rows.numpy(), self.num_steps)
        else:
            rows = torch.empty((count, layout.nbytes), dtype=torch.uint8, device=self._device)
            for path, view in layout.views(rows.view(self._envs, self.num_steps, layout.nbytes)).items():
                view.copy_(self._columns[path].transpose(0, 1))
        pad = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
        for path, view in layout.views(pad[None]).items():
            if padding(path):
                view.fill_(True)
        return WindowSource(rows, pad, 1, layout, self._memory)

    def batches(
        self,
        windows: Ints,
        bounds: list[tuple[int, int]],
        *,
        rows: int | None,
        time_first: bool,
        normalize_advantage: bool = False,
    ) -> Iterator[SequenceBatch]:
        """The batches of an epoch.

        Args:
            windows: a table of windows, as :func:`plan_windows` gives it, in the epoch's order.
            bounds: (begin, end) of the windows of each batch.
            rows: L; None for the rows that the longest window of the batch needs.
            time_first: batches are ``[L, B, ...]``; else ``[B, L, ...]``.
            normalize_advantage: normalise ``advantage`` over each batch's steps.
        """
        table = self._table(windows)
        lengths = table[0]
        # Compiled code takes arrays, and each row of this table is one.
        there = table if self._on_host else _sent(table, self._device)
        for low, high in bounds:
            most = rows or int(lengths[low:high].max())
            yield self._batch(there[:, low:high], most, time_first, normalize_advantage)

    def _table(self, windows: Ints) -> Ints:
        """Seven numbers of each window that batches need, ``[7, K]``: one slice of a table is quicker than seven."""
        env, start, length, origin, begins = windows.T
        # packed rows lie env by env, columns and states time by time
        packed, row = env * self.num_steps + start, start * self._envs + env
        # A row begins an episode only as that one's first step, if this rollout has it.
        is_start = (begins == 1) & (start == origin)
        return np.stack([length, np.zeros_like(length), env, start, is_start, packed, row])

    def _batch(self, table: PerWindow, rows: int, time_first: bool, normalize_advantage: bool) -> SequenceBatch:
        """The windows of some columns of :meth:`_table` as a batch."""
        lengths, burn_in, env, start, is_start, packed, row = table
        leaves = self._gather(packed, row, lengths, rows, time_first)
        flags = core.mark_windows(lengths, is_start, rows)
        for name, flag in zip(("is_start", "mask"), flags, strict=True):
            leaves[name,] = flag.T if time_first else flag
        if normalize_advantage:
            scale(leaves["advantage",], leaves["mask",])
        hidden = None if self._states is None else self._hidden(row)
        facts = {"lengths": lengths, "burn_in": burn_in, "env": env, "start": start}
        return SequenceBatch.of(leaves, {name: _tensor(x) for name, x in facts.items()}, hidden, time_first=time_first)

    def chunk(self, flags: Flags, low: int, high: int) -> SequenceBatch:
        """The steps from ``low`` up to, not including, ``high`` of all envs, ``[L, N, ...]``."""
        leaves = {path: column[low:high] for path, column in self._columns.items()}
        for name, flag in (("is_start", flags.starts), ("mask", flags.real), ("done", flags.done)):
            leaves[name,] = _tensor(flag[low:high])
        env = torch.arange(self._envs, device=self._device)
        numbers = {"lengths": high - low, "burn_in": 0, "start": low}
        facts = {name: torch.full_like(env, number) for name, number in numbers.items()} | {"env": env}
        hidden = None
        if self._states is not None:
            index = env + low * self._envs
            hidden = self._hidden(index.numpy() if self._on_host else index)
        return SequenceBatch.of(leaves, facts, hidden, time_first=True)

    def whole(self, envs: Ints | None) -> dict[Path, Tensor]:
        """A copy of all steps of some envs, ``[T, B, ...]``; None gives the columns of all envs, uncopied."""
        if envs is None:
            return dict(self._columns)
        env = _sent(envs, self._device)
        leaves: dict[Path, Tensor] = {}
        for path, column in self._columns.items():
            if self._on_host and column.dim() > 2:
                self._read(path, envs, envs * 0 + self.num_steps, self.num_steps, True, leaves)
            else:  # torch picks numbers time by time, so the row that it picks from is in the nearest cache
                leaves[path] = column.index_select(1, env)
        return leaves

    def _hidden(self, index: PerWindow) -> Any:
        assert self._states is not None
        return self._schema.rebuild("hidden", self._states.at(index, self._memory).__getitem__)

    def _gather(
        self, packed_row: PerWindow, row: PerWindow, lengths: PerWindow, rows: int, time_first: bool
    ) -> dict[Path, Any]:
        leaves: dict[Path, Any] = dict.fromkeys(self._columns)  # they keep this order
        if self._packed is not None:
            self._packed.read(packed_row, lengths, rows, time_first, leaves)
        for path in self._unpacked:
            self._read(path, row, lengths, rows, time_first, leaves)
        return leaves

    def _read(
        self, path: Path, row: PerWindow, lengths: PerWindow, rows: int, time_first: bool, into: dict[Path, Tensor]
    ) -> None:
        """Read windows of one column, packed elsewhere or not."""
        (self._unpacked.get(path) or self._source(path)).read(row, lengths, rows, time_first, into)


def _tensor(fact: Leaf) -> Tensor:
    return fact if isinstance(fact, Tensor) else torch.from_numpy(fact)


def _sent(array: Ints, device: torch.device) -> Tensor:
    """An array on a device. From page-locked memory it is sent while the caller goes on."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class WindowSource:
    """Rows of fields that windows are read from.

    A window is one run of bytes, and so is its padding. Time comes first by a view of that.

    Args:
        rows: uint8 ``[R, W]``, contiguous.
        pad: uint8 ``[W]``, the row that fills a window up.
        step: the distance in rows from one step of an env to its next one.
        layout: of the rows; those of one field may lack its padding.
        memory: gives the memory of windows, on the CPU.
    """

    def __init__(self, rows: Tensor, pad: Tensor, step: int, layout: RowLayout, memory: Recycled) -> None:
        self._rows, self._pad, self._step, self._layout, self._memory = rows, pad, step, layout, memory
        self._arrays = (rows.numpy(), pad.numpy()) if rows.is_cpu else None
        self._fields = layout.described(layout.fields, width=rows.shape[1])

    def read(self, first: Any, lengths: Any, count: int, time_first: bool, into: dict[Path, Tensor]) -> None:
        """Put windows of ``lengths`` rows from ``first`` on, ``[count, B, ...]`` or ``[B, count, ...]``, into a dict.

        Both are arrays for rows in RAM, and tensors for others.
        """
        if self._arrays is None:
            windows = core.gather_windows(self._rows, first, self._step, lengths, self._pad, count)
            into.update(self._layout.views(windows.transpose(0, 1) if time_first else windows))
            return
        rows, pad = self._arrays
        core.take_windows(rows, first, self._step, lengths, pad, count, self._fields, time_first, self._memory, into)


class States:
    """The recurrent states of a rollout, ``[T, N, ...]``.

    Args:
        columns: of the rollout.
    """

    def __init__(self, columns: Columns) -> None:
        states = columns.select(path for path in columns.paths if path[0] == "hidden")
        self._columns = {path: column.flatten(0, 1) for path, column in states.items()}
        self._rows: dict[Path, tuple[NDArray[np.uint8], tuple[core.Fields]]] = {}
        """The columns in RAM as bytes, ``[T * N, W]``, and their field."""
        for path, column in self._columns.items():
            if column.is_cpu:
                bits = column.reshape(len(column), -1).view(torch.uint8).numpy()
                field = core.Fields([(path, column.dtype, tuple(column.shape[1:]), 0)], bits.shape[1])
                self._rows[path] = bits, (field,)

    def at(self, index: Any, memory: Recycled) -> dict[Path, Tensor]:
        """The states before rows, ``[layers, B, size]`` or ``[B, size]``.

        Args:
            index: ``[B]``, the flat place of each row: number t * N + n is that of env n at step t. An array if the
                states are in RAM, and a tensor if they are on a device.
            memory: gives the memory of the results, on the CPU.
        """
        states: dict[Path, Tensor] = {}
        for path, column in self._columns.items():
            if path in self._rows:
                bits, field = self._rows[path]
                bad = core.take_fields(bits, index, field, (states,), memory)
                assert bad < 0, "a window begins outside the rollout"
            else:
                states[path] = column.index_select(0, index)
            states[path] = swap_layers(states[path]).contiguous()
        return states


# The envs are laid out once in a random order, as a circle, and each epoch divides it from another start. Five epochs
# at (24, 4096) take 11 ms; a new order each epoch takes 34. The price: two neighbours come together in most epochs of
# one pass.
def env_batches(
    trajectories: WindowReader,
    columns: WindowReader,
    windows: Ints,
    order: Ints | None,
    bounds: list[tuple[int, int]],
    epochs: int,
) -> Iterator[EnvBatch]:
    """Batches of whole envs: views of one copy of the steps, laid out in one order for all epochs.

    The order is a circle. Each epoch begins to divide it at another place: one batch and a fraction of a batch after
    the epoch before. If a batch has at least as many envs as there are epochs, no two epochs have the same batches.

    Args:
        trajectories: reads the columns that are wanted as sequences.
        columns: reads the columns that are wanted time by time.
        windows: of whole trajectories, env by env, as :func:`plan_windows` gives them.
        order: a permutation of the envs; None for their own order, which all epochs share.
        bounds: (begin, end) of the envs of each batch, as places in the order.
        epochs: passes over the rollout.
    """
    total, widest = bounds[-1][1], max(high - low for low, high in bounds)
    rotates = order is not None and epochs > 1 and len(bounds) > 1
    # The circle repeats its first envs behind its last, so that a batch across the seam is one slice.
    circle: Ints = np.arange(total) if order is None else np.append(order, order[: (widest - 1) * rotates])
    counts = np.bincount(windows[:, ENV], minlength=total)
    # Windows lie env by env: those of env e are the ``counts[e]`` from ``cumsum(counts)[e] - counts[e]`` on.
    mine = windows[_runs((np.cumsum(counts) - counts)[circle], counts[circle])]
    (sequences,) = trajectories.batches(mine, [(0, len(mine))], rows=trajectories.num_steps, time_first=True)
    steps, envs = columns.whole(None if order is None else circle), torch.from_numpy(circle)
    until: list[int] = np.append(0, np.cumsum(counts[circle])).tolist()
    for epoch in range(epochs):
        begin = epoch * widest * (epochs + 1) // epochs * rotates
        for low, high in bounds:
            first = (begin + low) % total
            last = first + high - low
            batch = as_batch({path: leaf[:, first:last] for path, leaf in steps.items()})
            yield EnvBatch(envs[first:last], batch, sequences.rows(slice(until[first], until[last])))


def _runs(begins: Ints, counts: Ints) -> Ints:
    """The whole numbers from each begin on, as many as its count, one run after another."""
    before: Ints = np.cumsum(counts) - counts
    shifts: Ints = np.repeat(begins - before, counts)
    return shifts + np.arange(len(shifts))
