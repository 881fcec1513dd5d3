"""ShardedReplay: the replays of all ranks, drawn from as one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ...errors import EmptyError
from ...parameters import COUNT_RULE, require
from ...replay.arguments import require_rows
from ...steps.arrays import Doubles
from ...views.contract import time_first_of
from ..plan import shard_key
from ..portion import Drawn, Portion
from .pace import NUMBERS, Pace
from .ranks import Ranks, Report

if TYPE_CHECKING:
    from ...processes.rate import RateLimit
    from ...replay.buffer import ReplayBuffer

__all__ = ["ShardedReplay"]

TOTALS = 3
"""How many of a rank's own numbers are its totals. They come first."""


class _Agreed(NamedTuple):
    """What was equal on all ranks when they met for a batch. Other calls may change it here while this rank waits."""

    seed: int
    t: int
    beta: float


class ShardedReplay:
    """The replays of all ranks of a process group, drawn from as one ring that has all of their rows.

    Each rank makes a ShardedReplay of its own replay, and goes on adding steps to that replay. :meth:`sample` and
    :meth:`batches` are collective calls: all ranks make them, in the same order and with the same arguments. If a rank
    raises an error before its rows are drawn, then all ranks raise one.

    Args:
        replay: this rank's replay. Its sampler is a :class:`relive.Uniform` or a :class:`relive.Prioritized`. All ranks
            have the same ``seed`` and the same parameters of the sampler. Capacities and numbers of envs may differ.
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
        group: Any = None,
        *,
        limit: RateLimit | None = None,
        limit_timeout: float | None = None,
    ) -> None:
        self._ranks, self._turn = Ranks(group), Lock()  # one collective call of this rank at a time
        self._pace: Pace | None = None
        self._ranks.exchange("ShardedReplay", lambda: self._opening(replay, limit, limit_timeout))

    @property
    def replay(self) -> ReplayBuffer:
        """This rank's replay."""
        return self._portion.replay

    def sample(self, batch_size: int) -> Any:
        """This rank's rows of one batch of all ranks, as a batch of the replay with a ``weight``.

        Every rank gets the same number of rows, m: as many as the rank with the most draws. The other ranks fill up
        with rows that do not count: their ``weight`` is 0, and their ``index`` is -1. The ``weight`` (float32 ``[m]``)
        of all other rows is the importance weight, times m R / B. So ``(batch["weight"] * loss).mean()``, averaged over
        the ranks as DistributedDataParallel averages gradients, is the mean over the batch of all ranks. ``index``
        names rows of this rank's replay. ``probability`` is the probability of a row among the rows of all ranks.

        Other threads can use the replay while this call waits for other ranks, unless the caller holds ``replay.lock``.
        The number of rows that a rank draws depends on the rows that it had when it came. It draws them from the rows
        that it has when all have come.

        Args:
            batch_size: B, over all ranks.

        Raises:
            EmptyError: no rank has a complete transition. All ranks raise it.
            ParameterError: ``batch_size`` is not positive, or ranks differ in what must be the same.
            LifecycleError: another rank raised an error.
            WaitTimeoutError: the limit did not allow the batch within ``limit_timeout``. All ranks raise it.
        """
        ranks, pace, agreed = self._ranks, self._pace, list[_Agreed]()
        while True:
            with self._turn:  # and not the replay's lock: steps can come while this rank waits for the others
                table = ranks.exchange("sample", lambda: self._report(batch_size, agreed))
                if pace is None or pace.allows(table[:, TOTALS : TOTALS + NUMBERS], ranks.rank, batch_size):
                    return self._rows_of(table, batch_size, agreed[-1])
            pace.wait()  # another thread may have its turn meanwhile

    def _rows_of(self, table: Doubles, batch_size: int, agreed: _Agreed) -> Any:
        """This rank's rows of a batch. ``table`` has the totals of all ranks, which may have changed since."""
        portion, ranks = self._portion, self._ranks
        try:
            plan = portion.plan(table[:, 0], batch_size, agreed.seed, agreed.t)
        except EmptyError:  # on all ranks
            if self._pace is not None:
                self._pace.take_back(batch_size)
            raise
        counts, key = plan.counts(), shard_key(agreed.seed, agreed.t, ranks.rank)
        rows = counts.max().item()

        def extras(drawn: Drawn, least: float) -> dict[str, Any]:
            found = portion.weights(drawn, plan.ends.item(-1), least, agreed.beta)
            found["weight"] *= np.float32(rows * ranks.count / batch_size)
            return found

        def read(least: float) -> tuple[Drawn, Any]:
            with portion.lock:  # for both, so that no row is overwritten between its draw and its read
                if portion.prioritized is not None:
                    portion.prioritized.largest_error = table[:, 2].max().item()
                portion.count_batch(counts.item(ranks.rank))  # from here on this rank is at the next batch
                drawn = portion.draw(plan, ranks.rank, key)
                return drawn, portion.read(drawn, key, rows, extras(drawn, least))

        if not portion.compares_in_batch:
            return read(table[:, 1].min().item())[1]
        found = list[tuple[Drawn, Any]]()

        def report() -> Report:
            found.append(read(1.0))  # the ranks do not know the least priority yet
            priorities = found[0][0].priorities
            return Report({}, (math.inf if priorities is None else priorities.min(initial=math.inf),))

        least = ranks.exchange("sample: weights", report).min().item()
        drawn, batch = found[0]
        batch["weight"][: len(drawn.places)] = torch.from_numpy(extras(drawn, least)["weight"])
        return batch

    def batches(self, count: int, batch_size: int) -> Iterator[Any]:
        """``count`` batches, each as :meth:`sample` gives it.

        Raises:
            ParameterError: ``count`` is not positive.
        """
        require("batches", COUNT_RULE, count=count)
        return (self.sample(batch_size) for _ in range(count))

    def update_priorities(self, index: Any, td_error: Any, mask: Any = None) -> int:
        """Set the priorities of this rank's rows of a batch; returns how many rows were overwritten meanwhile.

        Rows that only filled up the batch are left out. Arguments and errors are those of
        :meth:`relive.ReplayBuffer.update_priorities`. This is not a collective call.
        """
        real = torch.as_tensor(index) >= 0
        if not real.all():
            axis = 1 if torch.as_tensor(td_error).ndim > 1 and time_first_of(self.replay.view) else 0
            index, td_error, mask = _rows(index, real, 0), _rows(td_error, real, axis), _rows(mask, real, axis)
        return self.replay.update_priorities(index, td_error, mask)

    def _opening(self, replay: ReplayBuffer, limit: RateLimit | None, limit_timeout: float | None) -> Report:
        """What all ranks must agree on when this is made."""
        self._portion = Portion(replay)
        if limit is not None:
            self._pace = Pace(limit, self._ranks.count, limit_timeout)
        fields = sorted((path, leaf.shape, str(leaf.dtype)) for path, leaf in replay.schema.leaves.items())
        return Report({"the schema (as a checksum)": crc32(repr(fields).encode()), **self._same()}, ())

    def _report(self, batch_size: int, agreed: list[_Agreed]) -> Report:
        """What all ranks must agree on before a batch, and this rank's totals."""
        require_rows(batch_size)
        portion = self._portion
        with portion.lock:
            agreed.append(_Agreed(portion.replay.seed, portion.t, portion.beta))
            paced = () if self._pace is None else self._pace.report(batch_size)
            return Report({"batch_size": batch_size, **self._same()}, (*portion.totals(), *paced))

    def _same(self) -> dict[str, float]:
        portion = self._portion
        seed = portion.replay.seed % 2**53  # a double has no more digits
        limit = None if self._pace is None else self._pace.limit
        return {
            "the seed": seed,
            "the number of batches drawn": portion.t,
            "the limit (as a checksum)": crc32(repr(limit).encode()),
            "the number of rows drawn under the limit": 0 if limit is None else limit.counted()[2],
            **portion.settings,
        }


def _rows(values: Any, chosen: Tensor, axis: int) -> Any:
    """The chosen entries along an axis; None stays None."""
    return None if values is None else torch.as_tensor(values).index_select(axis, chosen.nonzero().squeeze(1))
