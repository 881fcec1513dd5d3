"""Replay and rollouts over torch.distributed: each rank owns its ring, its rollout and its environments.

The file reads from the outside in: the replay, the minibatches and the sequences of all ranks, then the limit that they
keep together, and last how they exchange numbers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from .. import core
from ..batches import Batch, Overlap, SequenceBatch, as_batch, padding
from ..errors import EmptyError, FieldError, LifecycleError, ParameterError
from ..parameters import COUNT_RULE, TIMEOUT_RULE, is_count, require
from ..processes.limits import RateLimit
from ..replay.checks import require_rows
from ..returns import EPS
from ..rollout.columns import ADVANTAGE, Name
from ..rollout.minibatches import MANY, require_advantage
from ..steps.arrays import Array, Doubles, Ints, to_tensor
from ..steps.schema import Path
from ..views.contract import time_first_of
from .plan import ShardDraw, ShardSampler, shard_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..replay.buffer import ReplayBuffer
    from ..rollout.buffer import RolloutBuffer

__all__ = ["ShardedReplay", "minibatches", "sequences"]

TOTALS = 4
"""How many of a rank's own numbers are its totals. They come first."""


class ShardedReplay:
    """The replays of all ranks of a process group, drawn from as one ring that has all of their rows.

    Each rank makes a ShardedReplay of its own replay, and goes on adding steps to that replay. :meth:`sample` and
    :meth:`batches` are collective calls: all ranks make them, in the same order and with the same arguments. If a rank
    raises an error before its rows are drawn, then all ranks raise one.

    Args:
        replay: this rank's replay. Its sampler is a :class:`relive.Uniform`, a :class:`relive.Prioritized`, or a
            :class:`relive.Fresh` around one of them. All ranks have the same ``seed`` and the same parameters of the
            sampler. Capacities and numbers of envs may differ.
        group: the process group; None is the default one. If torch.distributed was not initialized, this process is
            the only rank.
        limit: how many rows of all ranks may be drawn for each step of all ranks, such as
            :class:`relive.SamplesPerInsert`. Each rank makes an equal limit. Ask it before you add to the replay.
        limit_timeout: seconds that :meth:`sample` waits for the limit; None is for ever.

    Raises:
        ParameterError: the sampler is another one, or ranks differ in their seed, their schema or their settings.
        LifecycleError: this process is not in the group, or another rank raised an error.
    """

    def __init__(
        self,
        replay: ReplayBuffer,
        group: ProcessGroup | None = None,
        *,
        limit: RateLimit | None = None,
        limit_timeout: float | None = None,
    ) -> None:
        self._ranks = Ranks(group)
        # one collective call of this rank at a time: two threads in two calls would mix up the messages of the ranks
        self._turn = Lock()
        self._limit: RankLimit | None = None
        self._ranks.exchange("ShardedReplay", lambda: self._opening(replay, limit, limit_timeout))

    @property
    def replay(self) -> ReplayBuffer:
        """This rank's replay."""
        return self._sampler.replay

    def sample(self, batch_size: int) -> Any:
        """This rank's rows of one batch of all ranks, as a batch of the replay with a ``weight``.

        Every rank gets the same number of rows, m: as many as the rank with the most draws. The other ranks fill up
        with rows that do not count: their ``weight`` is 0, and their ``index`` is -1. The ``weight`` (float32 ``[m]``)
        of all other rows is the importance weight, times m R / B. So ``(batch["weight"] * loss).mean()``, averaged over
        the ranks as DistributedDataParallel averages gradients, is the mean over the batch of all ranks. ``index``
        names rows of this rank's replay. ``probability`` is the probability of a row among the rows of all ranks.

        Other threads can use the replay while this call waits for other ranks. So do not call it with ``replay.lock``
        held. No other thread could add steps then, and with a limit the ranks may wait for them for ever. If another
        thread of this rank is in this call, the two threads wait for each other for ever.

        The number of rows that a rank draws depends on the rows that it had when it came. It draws them from the rows
        that it has when all have come. With :class:`relive.Fresh`, the new rows of a rank come first in its part, and
        their weight is 1, times m R / B.

        Args:
            batch_size: B, over all ranks.

        Raises:
            EmptyError: no rank has a complete transition. All ranks raise it.
            ParameterError: ``batch_size`` is not positive, or ranks differ in what must be the same.
            LifecycleError: another rank raised an error.
            WaitTimeoutError: the limit did not allow the batch within ``limit_timeout``. All ranks raise it.
        """
        # each rank keeps its own rows: to even them out would cost the bytes of the batch
        ranks, rate_limit, agreed = self._ranks, self._limit, list[_Agreed]()
        while True:
            with self._turn:  # and not the replay's lock: steps can come while this rank waits for the others
                table = ranks.exchange("sample", lambda: self._report(batch_size, agreed))
                if rate_limit is None or rate_limit.allows(table[:, TOTALS : TOTALS + NUMBERS], ranks.rank, batch_size):
                    return self._rows_of(table, batch_size, agreed[-1])
            rate_limit.wait()  # another thread may have its turn meanwhile

    def _rows_of(self, table: Doubles, batch_size: int, agreed: _Agreed) -> Batch | SequenceBatch:
        """This rank's rows of a batch. ``table`` has the totals of all ranks, which may have changed since."""
        sampler, ranks = self._sampler, self._ranks
        try:
            plan = sampler.plan(table[:, 0], batch_size, agreed.seed, agreed.t, table[:, 3])
        except EmptyError:  # on all ranks
            if self._limit is not None:
                self._limit.take_back(batch_size)
            raise
        counts, key = plan.counts(), shard_key(agreed.seed, agreed.t, ranks.rank)
        rows = counts.max().item()  # all ranks compute this plan, so all batches have this size

        def extras(drawn: ShardDraw, least: float) -> dict[str, Array]:
            columns = sampler.weights(drawn, plan.ends.item(-1), least, agreed.beta)
            columns["weight"] *= np.float32(rows * ranks.count / batch_size)
            return columns

        before = list[Any]()

        def read(least: float) -> tuple[ShardDraw, Batch | SequenceBatch]:
            with sampler.lock:  # for both, so that no row is overwritten between its draw and its read
                if sampler.prioritized is not None:
                    sampler.prioritized.largest_error = table[:, 2].max().item()
                # from here on this rank is at the next batch
                sampler.count_batch(counts.item(ranks.rank), len(plan.wanted) > 0)
                before.append(sampler.draw_state())
                drawn = sampler.draw(plan, ranks.rank, key)
                return drawn, sampler.read(drawn, key, rows, extras(drawn, least))

        # read before the exchange: rows may be overwritten while it waits
        results = list[tuple[ShardDraw, Batch | SequenceBatch]]()

        def report() -> RankReport:
            results.append(read(1.0))  # the ranks do not know the least priority yet
            priorities = results[0][0].priorities
            return RankReport({}, (math.inf if priorities is None else priorities.min(initial=math.inf),))

        try:
            if not sampler.compares_in_batch:
                return read(table[:, 1].min().item())[1]
            least = ranks.exchange("sample: weights", report).min().item()
        except BaseException:
            if before:  # new rows that nobody got are served again
                sampler.put_back(before[0])
            raise
        drawn, batch = results[0]
        # only the rows that were drawn: the others keep their weight of 0
        batch["weight"][: len(drawn.places)] = torch.from_numpy(extras(drawn, least)["weight"])
        return batch

    def batches(self, count: int, batch_size: int) -> Iterator[Any]:
        """``count`` batches, each ``batch_size`` rows of all ranks together, as :meth:`sample` gives them.

        Raises:
            ParameterError: ``count`` is not positive.
        """
        require("batches", COUNT_RULE, count=count)
        return (self.sample(batch_size) for _ in range(count))

    def update_priorities(
        self, index: ArrayLike | Tensor, td_error: ArrayLike | Tensor, mask: ArrayLike | Tensor | None = None
    ) -> int:
        """Set the priorities of this rank's rows of a batch; returns how many rows were overwritten meanwhile.

        Rows that only filled up the batch are left out. Arguments and errors are those of
        :meth:`relive.ReplayBuffer.update_priorities`. This is not a collective call.
        """
        real = to_tensor(index) >= 0
        if not real.all():
            axis = 1 if to_tensor(td_error).ndim > 1 and time_first_of(self.replay.view) else 0
            index, td_error = _rows(index, real, 0), _rows(td_error, real, axis)
            mask = None if mask is None else _rows(mask, real, axis)
        return self.replay.update_priorities(index, td_error, mask)

    def _opening(self, replay: ReplayBuffer, limit: RateLimit | None, limit_timeout: float | None) -> RankReport:
        """The values that all ranks must agree on when this is made."""
        self._sampler = ShardSampler(replay)
        if limit is not None:
            self._limit = RankLimit(limit, self._ranks.count, limit_timeout)
        fields = sorted((path, leaf.shape, str(leaf.dtype)) for path, leaf in replay.schema.leaves.items())
        return RankReport({"the schema (as a checksum)": crc32(repr(fields).encode()), **self._same()}, ())

    def _report(self, batch_size: int, agreed: list[_Agreed]) -> RankReport:
        """The values that all ranks must agree on before a batch, and this rank's totals."""
        require_rows(batch_size)
        sampler = self._sampler
        with sampler.lock:
            agreed.append(_Agreed(sampler.replay.seed, sampler.t, sampler.beta))
            limited = () if self._limit is None else self._limit.report(batch_size)
            return RankReport({"batch_size": batch_size, **self._same()}, (*sampler.totals(), *limited))

    def _same(self) -> dict[str, float]:
        sampler = self._sampler
        seed = sampler.replay.seed % 2**53  # a double has no more digits
        limit = None if self._limit is None else self._limit.limit
        return {
            "the seed": seed,
            "the number of batches drawn": sampler.t,
            "the limit (as a checksum)": crc32(repr(limit).encode()),
            "the number of rows drawn under the limit": 0 if limit is None else limit.counted()[2],
            **sampler.settings,
        }


class _Agreed(NamedTuple):
    """Values that were equal on all ranks when they met for a batch. Other calls may change them meanwhile."""

    seed: int
    t: int
    beta: float


def _rows(values: ArrayLike | Tensor, chosen: Tensor, axis: int) -> Tensor:
    """The chosen entries along an axis."""
    return to_tensor(values).index_select(axis, chosen.nonzero().squeeze(1))


# Minibatches of rollouts


WEIGHT: Path = ("weight",)


def minibatches(
    rollout: RolloutBuffer,
    batch_size: int | None = None,
    *,
    num_batches: int | None = None,
    epochs: int = 1,
    blocks: int | None = None,
    fields: tuple[Name, ...] | None = None,
    normalize_advantage: bool = False,
    group: ProcessGroup | None = None,
) -> Iterator[Batch]:
    """This rank's rows of the minibatches of all ranks. Every real transition of every rank comes once an epoch.

    This is a collective call: all ranks make it with the same arguments, and then each reads its own minibatches. All
    ranks have equally many minibatches, and minibatch number i has the same number of rows, m, on all ranks. So a loop
    that makes one backward pass of DistributedDataParallel for each of them never waits for a rank that has none left.

    Each batch has a ``weight`` (float32 ``[m]``). Average ``(batch["weight"] * loss).mean()`` over the ranks, as
    DistributedDataParallel averages gradients. The result is the mean over the rows that all ranks have in this
    minibatch. If all ranks have equally many real transitions, every weight is 1. Otherwise a rank with fewer repeats
    some of its rows, with weight 0.

    The envs of all ranks are divided into ``blocks`` of neighbouring envs. Each block is shuffled by itself, and every
    minibatch takes an equal share of each block. The order of a block depends on the rollout's seed, on the number of
    the block, and on how many permutations came before. So the minibatches do not depend on the number of ranks, if
    ``blocks`` stays the same.

    Args:
        rollout: this rank's rollout, complete and finished. All ranks have the same ``seed``; sizes may differ.
        batch_size: the most rows of a minibatch, over all ranks together.
        num_batches: the number of minibatches in an epoch, instead of ``batch_size``.
        epochs: passes over the rollouts, each in a new order.
        blocks: the number of blocks, a multiple of the number of ranks. The default is one block for each rank. The
            blocks of a rank must divide its envs evenly.
        fields: the columns wanted; default all but ``mask`` and ``final_value``.
        normalize_advantage: normalise ``advantage`` within each minibatch of all ranks.
        group: the process group; None is the default one. If torch.distributed was not initialized, this process is
            the only rank.

    Raises:
        EmptyError: no rank has a real transition.
        ParameterError: sizes do not fit the rollouts, or ranks differ in what must be the same.
        FieldError: an unknown column.
        LifecycleError: another rank raised an error. In each of these cases all ranks raise one.
    """
    ranks = Ranks(group)
    share = _RankMinibatches(rollout, ranks, blocks, epochs, normalize_advantage)
    ranks.exchange("minibatches", lambda: share.report(batch_size, num_batches, fields))
    return share.batches(batch_size, num_batches)


class _RankMinibatches:
    """This rank's share of the minibatches of all ranks."""

    def __init__(self, rollout: RolloutBuffer, ranks: Ranks, blocks: int | None, epochs: int, normalizes: bool) -> None:
        inside: Any = rollout
        self.rollout, self.ranks, self.blocks = rollout, ranks, ranks.count if blocks is None else blocks
        self.epochs, self.normalizes = epochs, normalizes
        self._columns, self._permutations = inside._columns, inside._permutations
        self._minibatches = inside._minibatches

    def report(self, batch_size: int | None, num_batches: int | None, fields: tuple[Name, ...] | None) -> RankReport:
        """The values that all ranks must agree on. Also finds the rows of this rank's blocks."""
        sizes = {"batch_size": batch_size, "num_batches": num_batches}
        sizes = {name: size for name, size in sizes.items() if size is not None}
        require("minibatches", COUNT_RULE, epochs=self.epochs, **sizes)
        each, rest = divmod(self.blocks, self.ranks.count) if is_count(self.blocks, 1) else (0, 1)
        if rest or self.rollout.num_envs % each:
            raise ParameterError(
                f"blocks={self.blocks!r}: expected a multiple of the {self.ranks.count} ranks, so that a rank's blocks "
                f"divide its {self.rollout.num_envs} envs"
            )
        self.paths: list[Path] = self._columns.select_paths(fields)
        require_advantage(self.normalizes, self.paths)
        if WEIGHT in self.paths:
            raise FieldError("field 'weight': minibatches of ranks have one of their own; name the others as fields")
        self._columns.require_steps()
        self.rows = self._rows_of_blocks(each)
        same = {
            "the seed": self._permutations.seed % 2**53,  # a double has no more digits
            "the number of permutations drawn": self._permutations.draws,
            "batch_size (or -1)": -1 if batch_size is None else batch_size,
            "num_batches (or -1)": -1 if num_batches is None else num_batches,
            "epochs": self.epochs,
            "blocks": self.blocks,
            "normalize_advantage": self.normalizes,
        }
        return RankReport(same, ())

    def _rows_of_blocks(self, each: int) -> list[Tensor]:
        """The flat rows ``t * N + n`` of the real transitions in each of this rank's blocks."""
        mask = self._columns["mask"]
        number = torch.arange(mask.numel(), device=mask.device).view(mask.shape)
        width = mask.shape[1] // each
        blocks = [slice(k * width, (k + 1) * width) for k in range(each)]
        return [number[:, block][mask[:, block]] for block in blocks]

    def batches(self, batch_size: int | None, num_batches: int | None) -> Iterator[Batch]:
        """The minibatches, once all ranks have agreed. At most two more exchanges come, both before the first one."""
        counts, mean = self._counted()
        number = number_of_batches(counts, batch_size, num_batches)
        bounds = bounds_of_parts(counts, number)
        first = self._permutations.reserve(self.epochs)  # at once: other calls of the rollout count on from here
        scales = self._scales(bounds, first, mean) if self.normalizes else None
        sizes = np.diff(bounds).reshape(self.ranks.count, len(self.rows), number).sum(1)
        pack = self.epochs > 1 or number >= MANY
        return self._read(bounds[self._own], sizes, first, pack, scales)

    @property
    def _own(self) -> slice:
        """The numbers of this rank's blocks."""
        begin = self.ranks.rank * len(self.rows)
        return slice(begin, begin + len(self.rows))

    def _counted(self) -> tuple[Ints, float]:
        """How many rows each block of all ranks has, int64 ``[S]``, and their mean advantage; 0 if it is not used."""

        def report() -> RankReport:
            sums = [float(self._advantage(rows).sum()) if self.normalizes else 0.0 for rows in self.rows]
            return RankReport({}, (*map(len, self.rows), *sums))

        table = self.ranks.exchange("minibatches: rows", report)
        counts, sums = np.split(table, 2, 1)
        entries = counts.sum() * self._width if self.normalizes else 1.0
        return counts.ravel().astype(np.int64), float(sums.ravel().sum() / max(entries, 1.0))

    @property
    def _width(self) -> int:
        """How many numbers the advantage of one transition has."""
        return self._columns["advantage"].shape[2:].numel()

    def _advantage(self, rows: Tensor) -> Doubles:
        """The advantages at flat rows, float64 ``[B, entries]``."""
        return self._columns["advantage"].flatten(0, 1)[rows].double().reshape(len(rows), self._width).cpu().numpy()

    def _order(self, number: int, k: int) -> Tensor:
        """The rows of the own block ``k`` in the order of permutation ``number``."""
        rows, block = self.rows[k], self._own.start + k
        order = core.permutation(len(rows), shard_key(self._permutations.seed, number, block), 0)
        return rows[order.to(rows.device)]

    def _scales(self, bounds: Ints, first: int, mean: float) -> tuple[Doubles, Doubles]:
        """The mean and the standard deviation of the advantages of each minibatch of all ranks, ``[epochs, K]`` each.

        The sums are taken around the mean of all advantages, so that they lose no digits. They are taken block by
        block, so that they are the same for any number of ranks.
        """
        number = bounds.shape[1] - 1
        shape = len(self.rows), 2, self.epochs, number

        def report() -> RankReport:
            sums = np.zeros(shape)
            for k, begins in enumerate(bounds[self._own]):
                some = int(np.count_nonzero(np.diff(begins)))  # the minibatches with rows of this block come first
                for epoch in range(self.epochs if some else 0):
                    centred = self._advantage(self._order(first + epoch, k)) - mean
                    # only up to ``some``: reduceat gives an entry, not 0, for a part without rows
                    sums[k, 0, epoch, :some] = np.add.reduceat(centred.sum(1), begins[:some])
                    sums[k, 1, epoch, :some] = np.add.reduceat(np.square(centred).sum(1), begins[:some])
            return RankReport({}, sums.ravel().tolist())

        table = self.ranks.exchange("minibatches: advantages", report)
        total, squares = table.reshape(-1, *shape[1:]).sum(0)
        entries = np.diff(bounds).sum(0) * self._width
        shift = total / entries
        variance = (squares - entries * np.square(shift)) / np.maximum(entries - 1, 1)
        return mean + shift, np.sqrt(np.maximum(variance, 0.0))

    def _read(
        self, bounds: Ints, sizes: Ints, first: int, pack: bool, scales: tuple[Doubles, Doubles] | None
    ) -> Iterator[Batch]:
        """The minibatches one after another. ``sizes`` has the rows of each rank in each minibatch, ``[R, K]``."""
        gather = self._minibatches.reader(self.paths, pack)
        for epoch in range(self.epochs):
            orders = [self._order(first + epoch, k) for k in range(len(self.rows))]
            for i, (rows, total) in enumerate(zip(sizes.max(0).tolist(), sizes.sum(0).tolist(), strict=True)):
                parts = [order[low:high] for order, (low, high) in zip(orders, bounds[:, i : i + 2], strict=True)]
                # the mean over ranks of sum / rows, times this weight, is the sum over all ranks / total
                leaves = self._gathered(gather, torch.cat(parts), rows, rows * self.ranks.count / total)
                if scales is not None:
                    mean, std = scales[0][epoch, i], scales[1][epoch, i]
                    advantage = leaves[ADVANTAGE]
                    leaves[ADVANTAGE] = ((advantage.double() - mean) / (std + EPS)).to(advantage.dtype)
                yield as_batch(leaves)

    def _gathered(
        self, gather: Callable[[Tensor], dict[Path, Tensor]], index: Tensor, rows: int, weight: float
    ) -> dict[Path, Tensor]:
        """The fields of the rows ``index``, filled up to ``rows`` rows, and their weights."""
        count, column = len(index), torch.full((rows,), weight, dtype=torch.float32, device=index.device)
        if count < rows:
            column[count:] = 0.0
            others = index if count else torch.cat([*self.rows, index.new_zeros(1)])[:1]
            index = others.repeat(-(-rows // len(others)))[:rows]
        leaves = gather(index)
        if not count and not any(len(rows) for rows in self.rows):  # no row of this rank may be read
            leaves = {path: torch.full_like(leaf, padding(path)) for path, leaf in leaves.items()}
        leaves[WEIGHT] = column
        return leaves


def number_of_batches(rows: Ints, batch_size: int | None, num_batches: int | None) -> int:
    """How many minibatches an epoch has, the same for all blocks.

    Args:
        rows: int64 ``[S]``, the real transitions of each block.
        batch_size: the most rows of a minibatch, over all blocks.
        num_batches: the number of minibatches, instead of ``batch_size``.

    Raises:
        EmptyError: no block has a real transition.
        ParameterError: both or neither are given; or a minibatch would have no row, or more than ``batch_size``.
    """
    if not rows.sum():
        raise EmptyError("minibatches: no rank has a real transition in its rollout; collect steps first")
    if (batch_size is None) == (num_batches is None):
        raise ParameterError(f"pass either batch_size or num_batches, got {batch_size=}, {num_batches=}")
    most = int(rows.max())
    if num_batches is not None:
        if not (is_count(num_batches, 1) and num_batches <= most):
            raise ParameterError(
                f"num_batches={num_batches!r}: the largest block has {most} transitions; ask for 1 to {most}"
            )
        return num_batches
    assert batch_size is not None
    blocks = np.count_nonzero(rows)
    if not (is_count(batch_size, 1) and batch_size >= blocks):
        raise ParameterError(
            f"batch_size={batch_size!r}: a minibatch has at least one row of each of the {blocks} blocks; ask for "
            f"{blocks} or more"
        )
    number = -int(-rows.sum() // batch_size)  # rounded up
    while int((-(-rows // number)).sum()) > batch_size:  # the first minibatch is the largest
        number += 1
    return number


def bounds_of_parts(rows: Ints, batches: int) -> Ints:
    """Where each minibatch begins in each block, and where the last one ends: int64 ``[S, batches + 1]``.

    A block's parts differ by at most one row, and the first ones are the larger ones. So blocks of equally many rows
    have equal parts in every minibatch.
    """
    size, more = np.divmod(rows[:, None], batches)
    number = np.arange(batches + 1)
    return number * size + np.minimum(number, more)


# Sequences of rollouts


def sequences(
    rollout: RolloutBuffer,
    length: int | None = None,
    *,
    num_batches: int = 1,
    overlap: Overlap = "none",
    complete: bool = False,
    drop_tail: bool = False,
    epochs: int = 1,
    shuffle: bool = True,
    fields: tuple[Name, ...] | None = None,
    time_first: bool = True,
    normalize_advantage: bool = False,
    group: ProcessGroup | None = None,
) -> Iterator[SequenceBatch]:
    """This rank's sequences, in equally many batches on all ranks.

    This is a collective call. So is the step to each next batch, which takes one small all-reduce. All ranks must read
    all of their batches.

    Each batch is one of :meth:`relive.RolloutBuffer.sequences` and has a ``weight`` (float32 ``[B]``), the same for all
    of its sequences. With a ``loss`` ``[L, B]``, average ``(seq["weight"] * loss * seq["mask"]).sum() /
    seq["mask"].sum()`` over the ranks, as DistributedDataParallel averages gradients. The result is the mean over the
    steps of all ranks in this batch.

    Args:
        rollout: this rank's rollout, complete and finished.
        length: steps of a window; None makes one window of each episode.
        num_batches: the number of batches in an epoch. Every rank must have at least as many sequences.
        overlap: how many steps successive windows share: "none", "half", "max" or a number.
        complete: leave out episodes whose first or last step is not in the rollout.
        drop_tail: leave out the windows that are shorter than ``length``.
        epochs: passes over the rollouts.
        shuffle: in a new order each epoch; False keeps the order of time.
        fields: the columns wanted; default all but ``mask`` and ``final_value``.
        time_first: ``[L, B, ...]``; False gives ``[B, L, ...]``.
        normalize_advantage: normalise ``advantage`` over the steps of all ranks in each batch.
        group: the process group; None is the default one. If torch.distributed was not initialized, this process is
            the only rank.

    Raises:
        EmptyError, ParameterError, FieldError: as that method, on any rank; or ranks differ in an argument.
        LifecycleError: another rank raised an error. In each of these cases all ranks raise one.
    """
    ranks, batches = Ranks(group), list[Iterator[SequenceBatch]]()

    def report() -> RankReport:
        require("sequences", COUNT_RULE, num_batches=num_batches, epochs=epochs)
        options: dict[str, Any] = {"overlap": overlap, "complete": complete, "drop_tail": drop_tail, "shuffle": shuffle}
        options |= {"num_batches": num_batches, "epochs": epochs, "fields": fields, "time_first": time_first}
        batches.append(rollout.sequences(length, **options))
        if normalize_advantage:
            rollout["advantage"]  # its error names the columns that there are
        same = {"num_batches": num_batches, "epochs": epochs, "normalize_advantage": normalize_advantage}
        return RankReport(same, ())

    ranks.exchange("sequences", report)
    return _weighted(ranks, batches[0], num_batches * epochs, normalize_advantage)


def _weighted(ranks: Ranks, batches: Iterator[SequenceBatch], count: int, normalize: bool) -> Iterator[SequenceBatch]:
    """The batches with their weights. Each is read within the exchange, so that all ranks raise an error of one."""
    for _ in range(count):
        read = list[SequenceBatch]()

        def report(read: list[SequenceBatch] = read) -> RankReport:
            read.append(next(batches))
            return RankReport({}, _moments(read[0], normalize))

        table = ranks.exchange("sequences: batch", report)
        batch, steps = read[0], table[:, 0]
        share = ranks.count * steps[ranks.rank] / steps.sum()
        weight = torch.full((len(batch),), float(share), dtype=torch.float32, device=batch["mask"].device)
        yield batch.changed({ADVANTAGE: _normalized(batch, table)} if normalize else {}, {"weight": weight})


def _moments(batch: SequenceBatch, normalize: bool) -> tuple[float, ...]:
    """Four numbers: steps; advantages; the mean of the advantages; the sum of their squared distances from it."""
    if not normalize:
        return float(batch.num_steps), 0.0, 0.0, 0.0
    entries = batch["advantage"][batch["mask"]].double()
    mean = entries.mean()
    return float(batch.num_steps), float(entries.numel()), mean.item(), (entries - mean).square().sum().item()


def _normalized(batch: SequenceBatch, table: Doubles) -> torch.Tensor:
    """The advantages of a batch, normalized over the steps of all ranks; 0 elsewhere.

    Moments of parts are joined as by Chan, Golub and LeVeque (1979), which loses no digits.
    """
    counts, means, squares = table[:, 1], table[:, 2], table[:, 3]
    mean = (counts * means).sum() / counts.sum()
    around = squares.sum() + (counts * np.square(means - mean)).sum()
    std = np.sqrt(around / max(counts.sum() - 1, 1))
    advantage, mask = batch["advantage"], batch["mask"]
    wide = mask.reshape(*mask.shape, *[1] * (advantage.dim() - 2))
    return torch.where(wide, (advantage.double() - mean) / (std + EPS), 0.0).to(advantage.dtype)


# A limit that all ranks keep


GLANCE = 0.1
"""Seconds after which a rank that may not draw asks the other ranks again, if no new step has come to it."""


NUMBERS = 3
"""How many numbers a rank reports."""


class RankLimit:
    """Keeps a limit with the other ranks: each counts its own steps, and all count the same batches.

    Before each batch, and ten times a second while one waits, the ranks exchange their counts. So all come to the same
    answer, and divide the room for further steps alike. A rank may use its part of the room until the next exchange.
    Together they never exceed the limit; if each used all of the room, they could exceed it R times.

    Args:
        limit: this rank's limit. All that adds to this rank's replay asks it.
        ranks: R.
        timeout: seconds that a batch may wait; None is for ever.
    """

    limit: RateLimit

    def __init__(self, limit: RateLimit, ranks: int, timeout: float | None) -> None:
        require("ShardedReplay", TIMEOUT_RULE, limit_timeout=timeout)
        self.limit, self._ranks, self._timeout = limit, ranks, timeout
        limit.share(ranks)
        inserts, _, samples = limit.counted()
        # before the first exchange no rank knows the others' counts, so each may use an equal part of the room
        limit.grant(inserts, samples, max((limit.room(0, samples) or 0) // ranks, inserts))
        self._waits: _Waits | None = None

    def report(self, batch_size: int) -> tuple[int, int, bool]:
        """The steps that this rank has counted, those that are in its replay, and True if it has waited too long.

        Raises:
            ParameterError: batches of this size could make both sides wait for ever.
        """
        self.limit.require_samples(batch_size)
        inserts, ready, _ = self.limit.counted()
        waits = self._waits
        if waits is not None:
            self._waits = waits._replace(ready=ready)  # steps from here on end the sleep of wait()
        late = waits is not None and self._timeout is not None and time.monotonic() - waits.since >= self._timeout
        return inserts, ready, late

    def allows(self, table: Doubles, rank: int, batch_size: int) -> bool:
        """True if all ranks may draw a batch, by their reports ``[R, 3]``. Divides the room for steps among the ranks.

        Raises:
            WaitTimeoutError: they may not, and one of them has waited too long. All ranks raise it.
        """
        limit, samples = self.limit, self.limit.counted()[2]
        counted, ready = table[:, 0].astype(np.int64), int(table[:, 1].sum())
        inserts, allowed = int(counted.sum()), limit.allows_samples(batch_size, ready, samples)
        samples += batch_size * allowed  # each rank counts the whole batch, so all have the same count
        room, own = limit.room(inserts, samples), int(counted[rank])
        if room is None:
            limit.grant(inserts, samples, 0)
        else:
            # all ranks compute this from one table, so their parts add up to the room
            more = room // self._ranks + (rank < room % self._ranks)
            limit.grant(inserts, samples, own + more)
        if allowed:
            self._end_wait()
        elif table[:, 2].any():
            self._end_wait()
            raise limit.late_sample(batch_size, self._timeout)
        return allowed

    def take_back(self, batch_size: int) -> None:
        """The batch that was allowed last was not drawn, on any rank."""
        self.limit.count(samples=-batch_size)

    def wait(self) -> None:
        """Sleep until this rank has got steps, or it is time to ask the others again."""
        waits = self._waits  # read once: another thread may end the wait meanwhile
        if waits is None:
            waits = self._waits = _Waits(time.monotonic(), self.limit.counted()[1])
        self.limit.wait_for_steps(waits.ready, GLANCE)

    def _end_wait(self) -> None:
        if self._waits is not None:
            self.limit.note_sample_wait(time.monotonic() - self._waits.since)
            self._waits = None


class _Waits(NamedTuple):
    """A batch that waits for the limit."""

    since: float
    """When it began to wait, in seconds of ``time.monotonic``."""
    ready: int
    """How many steps this rank had when it last asked."""


# How ranks exchange numbers


FAILED = 0
"""The column of a report that is 1 where a rank raised an error, else 0."""


CALL = 1
"""The column with a number for the name of the call."""


FIRST = 2
"""The first column of the values."""


WIDTH = 20
"""How many values the first message of every exchange has room for: as many as `sample` reports.

It is the same for all calls. The messages of ranks that are at different calls then have one size, so that each rank
can read where the others are. Gloo ends the process if the sizes differ.
"""


class Ranks:
    """The ranks of a process group; one rank alone if torch.distributed was not initialized.

    Settings that have to be equal, and failures, travel with the totals: so an error of one rank is an error of all
    ranks before anything is drawn.

    Args:
        group: of torch.distributed; None is the default group.

    Raises:
        LifecycleError: this process does not belong to the group; or it was started as one of several ranks, and
            ``torch.distributed.init_process_group`` was not called.
    """

    rank: int
    count: int

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.count, self._device = 0, 1, torch.device("cpu")
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise LifecycleError(
                    "torch.distributed is not initialized; call torch.distributed.init_process_group(...) first"
                )
            return
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise LifecycleError("this process is not a rank of the group; call this in its ranks only")
        backend = dist.get_backend(group)
        if "nccl" in backend and "gloo" not in backend:
            self._device = torch.device("cuda", torch.cuda.current_device())

    def exchange(self, call: str, report: Callable[[], RankReport]) -> Doubles:
        """Exchange the reports of all ranks. Either all ranks go on, or all raise an error.

        This takes one all-reduce, or two if a report has more than :data:`WIDTH` numbers.

        Returns the ``own`` numbers of all ranks, float64 ``[R, own]``.

        Args:
            call: the name of the call that the user made.
            report: makes this rank's report. An error that it raises is raised again once the others know of it. Its
                ``same`` fits into the first message. All ranks at this call report equally many numbers if these do
                not fit.

        Raises:
            LifecycleError: another rank raised an error, is at another call, has died, or did not come in time.
            ParameterError: a value that must be equal differs; names it, and the first rank that differs from rank 0.
        """
        sent, names, values, failure = np.zeros((self.count, FIRST + WIDTH)), list[str](), np.empty(0), None
        row = sent[self.rank]
        row[CALL] = crc32(call.encode())  # the name as a number
        try:
            same, own = report()
            names, values = list(same), np.array([*same.values(), *own], np.float64)
            row[FIRST : FIRST + len(values)] = values[:WIDTH]
        except Exception as error:  # raised after the exchange: the others would wait for this rank
            row[FAILED], failure = 1.0, error
        table = self._met(call, sent, failure)
        if failure is not None:
            raise failure
        self._require_no_failure(call, table)
        _require_equal(call, names, table[:, FIRST:])
        if len(values) > WIDTH:  # all ranks are at this call, so all of them send a rest, of one size
            rest = np.zeros((self.count, len(values) - WIDTH))
            rest[self.rank] = values[WIDTH:]
            table = np.concatenate([table, self._met(call, rest, None)], 1)
        return table[:, FIRST + len(names) : FIRST + len(values)]

    def _met(self, call: str, sent: Doubles, failure: Exception | None) -> Doubles:
        """The tables of all ranks in one, or an error if they cannot meet. ``failure`` is that of this rank."""
        try:
            return self._summed(sent)
        except RuntimeError as error:
            raise LifecycleError(
                f"{call}: the ranks cannot meet: one has died, or did not come within the timeout of the process group "
                f"({str(error).partition(chr(10))[0]:.200}); nothing happened here; start all ranks again"
            ) from (failure or error)

    def _summed(self, sent: Doubles) -> Doubles:
        """The sum of every rank's table. Each row is 0 on all ranks but its own, so the sum is exact."""
        if self.count == 1:
            return sent
        table = torch.from_numpy(sent).to(self._device)
        dist.all_reduce(table, group=self._group)
        return table.cpu().numpy()

    def _require_no_failure(self, call: str, table: Doubles) -> None:
        if table[:, FAILED].any():
            raise LifecycleError(
                f"{call}: rank {table[:, FAILED].argmax()} raised an error, which its own traceback shows; nothing "
                "happened on any rank"
            )
        elsewhere = table[:, CALL] != table[self.rank, CALL]
        if elsewhere.any():
            raise LifecycleError(
                f"{call}: rank {self.rank} is here, and rank {elsewhere.argmax()} is at another call; all ranks make "
                "the same calls in the same order"
            )


class RankReport(NamedTuple):
    """Numbers that a rank reports to the others."""

    same: Mapping[str, float]
    """Names and values that must be equal on all ranks."""
    own: Sequence[float]
    """Numbers of this rank."""


def _require_equal(call: str, names: list[str], table: Doubles) -> None:
    different = table[:, : len(names)] != table[0, : len(names)]
    if different.any():
        other, column = np.argwhere(different)[0]
        raise ParameterError(
            f"{call}: {names[column]} is {table[0, column]:.17g} on rank 0 and {table[other, column]:.17g} on rank "
            f"{other}; it must be the same on all ranks"
        )
