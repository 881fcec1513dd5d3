"""ShardedReplay: the replays of all ranks, drawn from as one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ...errors import EmptyError
from ...parameters import COUNT_RULE, require
from ...replay.arguments import require_rows
from ...steps.arrays import Doubles
from ...views.contract import time_first_of
from ..plan import Plan, shard_key
from ..portion import Drawn, Portion
from .pace import NUMBERS, Pace
from .ranks import Ranks, Report

if TYPE_CHECKING:
    from ...processes.rate import RateLimit
    from ...replay.buffer import ReplayBuffer

__all__ = ["ShardedReplay"]

TOTALS = 3
"""How many of a rank's own numbers are its totals. They come first."""


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
        self._ranks = Ranks(group)
        self._pace = None if limit is None else Pace(limit, self._ranks.count, limit_timeout)
        self._ranks.exchange("ShardedReplay", lambda: self._opening(replay))

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

        Args:
            batch_size: B, over all ranks.

        Raises:
            EmptyError: no rank has a complete transition. All ranks raise it.
            ParameterError: ``batch_size`` is not positive, or ranks differ in what must be the same.
            LifecycleError: another rank raised an error.
            WaitTimeoutError: the limit did not allow the batch within ``limit_timeout``. All ranks raise it.
        """
        portion, ranks, pace = self._portion, self._ranks, self._pace
        while True:
            with portion.lock:
                table = ranks.exchange("sample", lambda: self._report(batch_size))
                if pace is None or pace.allows(table[:, TOTALS : TOTALS + NUMBERS], ranks.rank, batch_size):
                    return self._rows_of(table, batch_size)
            pace.wait()  # without the lock, so that steps can come

    def _rows_of(self, table: Doubles, batch_size: int) -> Any:
        """This rank's rows of a batch. ``table`` has the totals of all ranks. The caller holds the lock."""
        portion, ranks = self._portion, self._ranks
        seed, t, beta = portion.replay.seed, portion.t, portion.beta
        try:
            plan, key = portion.plan(table[:, 0], batch_size, seed, t), shard_key(seed, t, ranks.rank)
        except EmptyError:  # on all ranks
            if self._pace is not None:
                self._pace.take_back(batch_size)
            raise
        counts = plan.counts()
        if portion.prioritized is not None:
            portion.prioritized.largest_error = table[:, 2].max().item()
        portion.count_batch(counts.item(ranks.rank))  # from here on all ranks are at the next batch
        drawn, least = self._draw(plan, key, table[:, 1].min().item())
        rows = counts.max().item()
        extras = portion.weights(drawn, plan.ends.item(-1), least, beta)
        extras["weight"] *= np.float32(rows * ranks.count / batch_size)
        return portion.read(drawn, key, rows, extras)

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

    def _opening(self, replay: ReplayBuffer) -> Report:
        """What all ranks must agree on when this is made."""
        self._portion = Portion(replay)
        fields = sorted((path, leaf.shape, str(leaf.dtype)) for path, leaf in replay.schema.leaves.items())
        return Report({"the schema (as a checksum)": crc32(repr(fields).encode()), **self._same()}, ())

    def _report(self, batch_size: int) -> Report:
        """What all ranks must agree on before a batch, and this rank's totals."""
        require_rows(batch_size)
        paced = () if self._pace is None else self._pace.report(batch_size)
        return Report({"batch_size": batch_size, **self._same()}, (*self._portion.totals(), *paced))

    def _same(self) -> dict[str, float]:
        portion = self._portion
        seed = portion.replay.seed % 2**53  # a double has no more digits
        same = {"the seed": seed, "the number of batches drawn": portion.t, **portion.settings}
        if self._pace is not None:
            limit = self._pace.limit
            same["the number of rows drawn under the limit"] = limit.counted()[2]
            same["the limit (as a checksum)"] = crc32(repr(limit).encode())
        return same

    def _draw(self, plan: Plan, key: int, least: float) -> tuple[Drawn, float]:
        """This rank's rows, and the priority that gets the weight 1: the smallest of all rows, or of the batch."""
        portion, ranks = self._portion, self._ranks
        if not portion.compares_in_batch:
            return portion.draw(plan, ranks.rank, key), least
        found = list[Drawn]()

        def report() -> Report:
            found.append(portion.draw(plan, ranks.rank, key))
            priorities = found[0].priorities
            return Report({}, (math.inf if priorities is None else priorities.min(initial=math.inf),))

        least = ranks.exchange("sample: weights", report).min().item()
        return found[0], least


def _rows(values: Any, chosen: Tensor, axis: int) -> Any:
    """The chosen entries along an axis; None stays None."""
    return None if values is None else torch.as_tensor(values).index_select(axis, chosen.nonzero().squeeze(1))
