"""Sequences: the windows, chunks and whole envs of a rollout, as batches of consecutive steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..batches import WHOLE, EnvBatch, Overlap, SequenceBatch, as_tensordict, padding, stride_of
from ..errors import FieldError, ParameterError
from ..memory.keeper import Recycled
from ..memory.layout import LARGE_FIELD, RowLayout
from ..parameters import COUNT_RULE, FLAG_RULE, require
from ..returns import scaled
from ..steps.arrays import Ints
from ..steps.schema import Field, Path, Schema
from .columns import Fields, NamedColumns, unfinished
from .minibatches import Permutations, pack_columns, parts, parts_by_steps, require_advantage
from .writer import ENV, LENGTH, START, Empty, Episodes, Flags, KeptStates, States, cut

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Sequences", "WindowReader", "splitter"]


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
            windows: a table of windows, as :func:`relive.rollout.writer.cut` gives it, in the epoch's order.
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


Split = Callable[[Ints], list[tuple[int, int]]]
"""How an epoch's windows, in their order, are split into batches: (begin, end) of each."""


class Sequences:
    """Reads the consecutive steps of a rollout, as batches with their recurrent states.

    Args:
        fields: of the rollout.
        columns: of the rollout.
        episodes: of the rollout.
        states: of the rollout.
        permutations: the orders in which sequences come.
        memory: gives the memory of batches, on the CPU.
    """

    def __init__(
        self,
        fields: Fields,
        columns: NamedColumns,
        episodes: Episodes,
        states: KeptStates,
        permutations: Permutations,
        memory: Recycled,
    ) -> None:
        self._fields, self._columns, self._episodes, self._states = fields, columns, episodes, states
        self._permutations, self._memory = permutations, memory

    def cut(self, length: int | None, overlap: Overlap, complete: bool, drop_tail: bool, epochs: int) -> Ints:
        """The windows of a rollout that is not empty."""
        self._columns.require_steps()
        require("sequences", COUNT_RULE, epochs=epochs)
        require("sequences", FLAG_RULE, complete=complete, drop_tail=drop_tail)
        return cut(self._episodes.flags(), length, stride_of(length, overlap), drop_tail, complete)

    def read(
        self,
        windows: Ints,
        split: Split,
        length: int | None,
        epochs: int,
        shuffle: bool,
        fields: tuple[str, ...] | None,
        time_first: bool,
        normalize_advantage: bool,
    ) -> Iterator[SequenceBatch]:
        """Epoch after epoch, all windows; columns are checked at once."""
        flags = {"shuffle": shuffle, "time_first": time_first, "normalize_advantage": normalize_advantage}
        require("sequences", FLAG_RULE, **flags)
        wanted = self._columns.wanted_of_steps(fields)
        require_advantage(normalize_advantage, wanted)
        reader = self._reader(wanted, LARGE_FIELD if epochs > 1 else 0)
        rows = None if length is None else reader.most_rows(windows, min(length, reader.num_steps))
        epoch = partial(reader.batches, rows=rows, time_first=time_first, normalize_advantage=normalize_advantage)
        orders = (windows[self._order(len(windows), shuffle)] for _ in range(epochs))
        return (batch for order in orders for batch in epoch(order, split(order)))

    def env_batches(
        self,
        batch_size: int | None,
        num_batches: int | None,
        epochs: int,
        shuffle: bool,
        sequences: tuple[str, ...],
        fields: tuple[str, ...] | None,
    ) -> Iterator[EnvBatch]:
        """Batches of whole envs, with some columns cut into trajectories as well."""
        self._columns.require_steps()
        require("env_batches", COUNT_RULE, epochs=epochs)
        bounds = parts(self._fields.num_envs, batch_size, num_batches, items="envs")
        windows = cut(self._episodes.flags(), None, WHOLE, drop_tail=False, complete=False)
        padded = self._columns.wanted_of_steps(sequences)
        own = self._columns.wanted_of_steps(fields)
        if fields is None:
            own = [path for path in own if path not in padded]
        readers = self._reader(padded, 0), self._reader(own, 0, with_states=False)
        order = self._order(self._fields.num_envs, shuffle) if shuffle else None
        batches = _env_batches(*readers, windows, order, bounds, epochs)
        return batches if self._columns.is_finished else _without_advantage(batches)

    def chunks(self, length: int | None, fields: tuple[str, ...] | None) -> Iterator[SequenceBatch]:
        """All envs in the order of time, ``length`` steps at a time."""
        self._columns.require_steps()
        stride_of(length, "none")
        steps, every = self._columns.steps, self._fields.every
        size = steps if length is None else length
        if size % every and size < steps:
            raise ParameterError(f"chunks({size}): states are kept every {every} steps; ask for a multiple of them")
        wanted = self._columns.wanted_of_steps(fields)
        reader = self._reader(wanted, 0)
        flags = self._episodes.flags()
        return (reader.chunk(flags, low, min(low + size, steps)) for low in range(0, steps, size))

    def _reader(self, wanted: list[Path], pack: int, with_states: bool = True) -> WindowReader:
        columns = self._columns.ordered(wanted)
        states = self._states.reader() if with_states else None
        size = self._columns.steps, self._fields.num_envs
        return WindowReader(columns, states, self._fields.schema, size, self._fields.device, pack, self._memory)

    def _order(self, count: int, shuffle: bool) -> Ints:
        """The next permutation of ``count`` items, or their own order."""
        return self._permutations.next(count).numpy() if shuffle else np.arange(count)


def _without_advantage(batches: Iterator[EnvBatch]) -> Iterator[EnvBatch]:
    for batch in batches:
        unfinished(cast("TensorDict", batch.steps))
        yield batch


def splitter(total: int, batch_size: int | None, num_batches: int | None, batch_steps: int | None) -> Split:
    """How to split the windows of an epoch into batches; without a size, all into one.

    Raises:
        ParameterError: a size that is not positive, or more than one of them.
    """
    given = [size for size in (batch_size, num_batches, batch_steps) if size is not None]
    if len(given) > 1:
        raise ParameterError("sequences: pass at most one of batch_size, num_batches and batch_steps")
    if batch_steps is not None:
        parts_by_steps(np.zeros(0, np.int64), batch_steps)
        return lambda windows: parts_by_steps(windows[:, LENGTH], batch_steps)
    split = parts(max(total, 1), batch_size if given else total or 1, num_batches, items="sequences")
    return lambda _: split if total else []


def _env_batches(
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
        windows: of whole trajectories, env by env, as :func:`cut` gives them.
        order: a permutation of the envs; None for their own order, which all epochs share.
        bounds: (begin, end) of the envs of each batch, as places in the order.
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
    """The whole numbers from each begin on, as many as its count, one run after another."""
    before: Ints = np.cumsum(counts) - counts
    shifts: Ints = np.repeat(begins - before, counts)
    return shifts + np.arange(len(shifts))
