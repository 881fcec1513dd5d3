"""Pace: one limit of samples per insert over the replays of all ranks."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from ...parameters import TIMEOUT_RULE, require
from ...processes.rate import RateLimit
from ...steps.arrays import Doubles

__all__ = ["NUMBERS", "Pace"]

GLANCE = 0.1
"""Seconds after which a rank that may not draw asks the other ranks again, if no new step has come to it."""

NUMBERS = 3
"""How many numbers a rank reports."""


class _Waits(NamedTuple):
    """A batch that waits for the limit."""

    since: float
    """When it began to wait, in seconds of ``time.monotonic``."""
    ready: int
    """How many steps this rank had when it last asked."""


class Pace:
    """Keeps a limit with the other ranks: each counts its own steps, and all count the same batches.

    Before each batch the ranks exchange their counts. So all come to the same answer, and divide the room for further
    steps alike. A rank may use its part of the room until the next exchange. Together they never exceed the limit.

    Args:
        limit: this rank's limit. All that adds to this rank's replay asks it.
        ranks: R.
        timeout: seconds that a batch may wait; None is for ever.
    """

    def __init__(self, limit: RateLimit, ranks: int, timeout: float | None) -> None:
        require("ShardedReplay", TIMEOUT_RULE, limit_timeout=timeout)
        self.limit, self._ranks, self._timeout = limit, ranks, timeout
        limit.share(ranks)
        inserts, _, samples = limit.counted()
        # before the first exchange no rank knows the others' counts, so each may use an equal part of the room
        limit.grant(inserts, samples, max((limit.room(0, samples) or 0) // ranks, inserts))
        self._waits: _Waits | None = None

    def report(self, batch_size: int) -> tuple[int, int, bool]:
        """The steps that this rank has counted, those that are in its replay, and whether it has waited too long.

        Raises:
            ParameterError: batches of this size could make both sides wait for ever.
        """
        self.limit.require_samples(batch_size)
        inserts, ready, _ = self.limit.counted()
        waits = self._waits
        if waits is not None:
            self._waits = waits._replace(ready=ready)
        late = waits is not None and self._timeout is not None and time.monotonic() - waits.since >= self._timeout
        return inserts, ready, late

    def allows(self, table: Doubles, rank: int, batch_size: int) -> bool:
        """Whether all ranks may draw a batch, by their reports ``[R, 3]``. Divides the room for steps anew.

        Raises:
            WaitTimeoutError: they may not, and one of them has waited too long. All ranks raise it.
        """
        limit, samples = self.limit, self.limit.counted()[2]
        counted, ready = table[:, 0].astype(np.int64), int(table[:, 1].sum())
        inserts, allowed = int(counted.sum()), limit.allows_samples(batch_size, ready, samples)
        samples += batch_size * allowed
        room, mine = limit.room(inserts, samples), int(counted[rank])
        if room is None:
            limit.grant(inserts, samples, 0)
        else:
            more = room // self._ranks + (rank < room % self._ranks)
            limit.grant(inserts, samples, mine + more)
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
        if self._waits is None:
            self._waits = _Waits(time.monotonic(), self.limit.counted()[1])
        self.limit.wait_for_steps(self._waits.ready, GLANCE)

    def _end_wait(self) -> None:
        if self._waits is not None:
            self.limit.note_sample_wait(time.monotonic() - self._waits.since)
            self._waits = None
