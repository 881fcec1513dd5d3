"""Sequences: the windows, chunks and whole envs of a rollout, as batches of consecutive steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ..batches.sequences import WHOLE, EnvBatch, Overlap, SequenceBatch, stride_of
from ..batches.tensordicts import as_tensordict
from ..errors import ParameterError
from ..memory.blocks import Recycled
from ..memory.layout import LARGE_FIELD
from ..parameters import COUNT_RULE, FLAG_RULE, require
from ..steps.arrays import Ints
from ..steps.trees import Path
from .episodes import ENV, LENGTH, Episodes, cut
from .fields import Fields
from .minibatches import Permutations, parts, parts_by_steps, require_advantage
from .named import NamedColumns, unfinished
from .states import KeptStates
from .windows import WindowReader

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Sequences", "splitter"]

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
