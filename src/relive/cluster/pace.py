"""Pace: one limit of samples per insert over all shards of a replay, kept by its learner."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..parameters import TIMEOUT_RULE, require
from ..processes.rate import RateLimit
from .group import Group
from .shard import Allowance, Totals

__all__ = ["Pace"]


PAUSE = 0.02
"""Seconds between two checks whether the shards have enough steps."""


class Pace:
    """Holds the learner back, and gives each shard an allowance of steps, so that all together keep the limit.

    A shard stores steps up to its allowance. Allowances travel with the questions for totals. All allowances together
    stay within the limit. If a shard does not use its part, the part is taken away, and goes to other shards once that
    shard has answered. The allowance of a shard that does not answer any more is not counted, since the others would
    wait for it.

    Args:
        limit: counts the steps and rows of all shards.
        group: the shards.
        timeout: seconds that a batch may wait; None is for ever.
    """

    def __init__(self, limit: RateLimit, group: Group, timeout: float | None) -> None:
        require("Replay", TIMEOUT_RULE, limit_timeout=timeout)
        self.limit, self._group, self._timeout = limit, group, timeout
        self._before = limit.counted()[0]
        """Steps that the limit had counted when this began."""
        self._begun: list[int] | None = None
        self._bounds = [0] * group.count
        """The most steps that each shard may have stored by now, as the shard counts them."""
        self._told: list[Allowance | None] = [None] * group.count
        group.allowances, group.answered = self.allowances, self.answered

    @staticmethod
    def most_of_a_chunk(limit: RateLimit | None, shards: int) -> int | None:
        """The most steps that a shard may get at once, so that nobody waits for ever; None without a bound."""
        most = None if limit is None else limit.most_at_once
        return None if most is None else most // shards

    def allowances(self) -> list[Allowance | None]:
        """The allowance that each shard gets with the next question for its totals; None if the limit has no bound."""
        totals = [total for total in self._group.totals if total is not None]
        stored, up = [total.stored for total in totals], self._group.up
        room = self.limit.room(self._inserted(stored), self.limit.counted()[2])
        if room is None:
            return self._told
        bounds = [max(bound, have) for bound, have in zip(self._bounds, stored, strict=True)]
        free = room - sum(bounds[shard] - stored[shard] for shard in up)
        for shard in up:
            granted = min(stored[shard] + room // len(up), bounds[shard] + max(free, 0))
            free -= max(granted - bounds[shard], 0)
            self._told[shard] = Allowance(totals[shard].born, granted)
            bounds[shard] = max(bounds[shard], granted)
        self._bounds = bounds
        return self._told

    def answered(self, shard: int, totals: Totals) -> None:
        """Note the totals of a shard that has got its allowance."""
        told = self._told[shard]
        alive = told is not None and told.born == totals.born  # otherwise it was restarted, and may store nothing yet
        self._bounds[shard] = max(totals.stored, told.steps) if alive and told is not None else totals.stored

    def await_batch(self, batch_size: int) -> None:
        """Wait until the limit allows a batch, and count it. The caller has just read the totals.

        Raises:
            WaitTimeoutError: the wait takes longer than the timeout.
            ParameterError: batches of this size could make both sides wait for ever.
            LifecycleError: no shard answers.
        """
        limit, begin = self.limit, time.monotonic()
        limit.require_samples(batch_size)
        waited = False
        while not self._allows(batch_size):
            waited = True
            if self._timeout is not None and time.monotonic() - begin > self._timeout:
                limit.note_sample_wait(time.monotonic() - begin)
                raise limit.late_sample(batch_size, self._timeout)
            time.sleep(PAUSE)
            self._group.refresh()
        if waited:
            limit.note_sample_wait(time.monotonic() - begin)
        limit.count(samples=batch_size)

    def _allows(self, batch_size: int) -> bool:
        """Whether a batch may be drawn. First brings the limit's count of steps up to date."""
        limit, group = self.limit, self._group
        stored = [0 if total is None else total.stored for total in group.totals]
        inserts = self._inserted(stored)
        limit.count(inserts=inserts - limit.counted()[0])
        return limit.allows_samples(batch_size, inserts, limit.counted()[2])

    def _inserted(self, stored: Sequence[int]) -> int:
        """How many steps all shards have ever stored, with those that a shard has lost since."""
        if self._begun is None:
            self._begun = list(stored)
        return self._before + int(np.sum(stored)) + sum(self._group.forgotten) - sum(self._begun)
