"""Coming: has the rows of the next batch of a replay in files come into memory while the learner has this one."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ..errors import ReliveError
from ..kernels.reference.random import key as stream
from ..memory.lookahead import LookAhead, can_look_ahead
from ..memory.mapped import MappedKeeper
from ..memory.ram import ReplayRows
from ..parameters import is_count
from ..ring.ring import Ring
from ..samplers.guesses import guess
from ..steps.arrays import Ints
from ..views.contract import View, rule_of
from .progress import Progress, stream_of

__all__ = ["Coming", "coming_of"]


WRITTEN = 2**16
"""The bytes of each env, after its newest row, that are asked for before they are overwritten."""


FARTHEST = 4096
"""So many rows before and after that of a guess are asked for at most."""


class Coming:
    """Guesses the next batch, which is a function of the seed and its number, and asks for its rows.

    A guess is a hint: what is drawn never depends on it. The caller holds the replay's lock.

    Args:
        ring: the rows.
        sampler: what draws.
        progress: the seed, and the number of the next batch.
        ahead: asks the system.
    """

    def __init__(self, ring: Ring, sampler: Any, progress: Progress, ahead: LookAhead) -> None:
        self._ring, self._sampler, self._progress, self.ahead = ring, sampler, progress, ahead
        self._last = 0, 1, 1
        """The size of the last batch, and which of how many in its round it was."""
        self._rated = self._waits = False
        self._heads: Ints = ring.heads.copy()
        self._asked: Ints = np.full(ring.num_envs, -1, np.int64)
        self._batch_rows = max(WRITTEN // max(1, ring.store.layout.nbytes), 1)

    def after_batch(self, view: View, batch_size: int, update: int, of: int) -> None:
        """A batch was drawn. If priorities follow each batch, the next one depends on them, so this waits for them."""
        self._last, self._waits, self._rated = (batch_size, update, of), self._rated, False
        if not self._waits and self.ahead.is_wanted():
            self._look(view)

    def after_rating(self, view: View) -> None:
        """Priorities were updated."""
        self._rated = True
        if self._waits and self.ahead.is_wanted():
            self._waits = False
            self._look(view)

    def _look(self, view: View) -> None:
        """Ask for the rows of the next batch, and for those that will be overwritten next."""
        ring, come, (batch_size, update, of) = self._ring, self._progress, self._last
        key = stream(stream_of(come.seed), come.draws - come.first)
        try:
            places = guess(self._sampler, ring, batch_size, key, update % of + 1, of)
        except ReliveError:  # the next draw will raise it, if it has to
            places = None
        before, after = self._reach(view)
        begins, ends = self._written()
        if places is not None:
            places = places[(places >= 0) & (places < ring.store.num_rows)]  # an altered file can name others
            env_begins = places // ring.rows * ring.rows
            begins = np.concatenate([np.maximum(places - before, env_begins), begins])
            ends = np.concatenate([np.minimum(places + after, env_begins + ring.rows), ends])
        if len(begins):
            self.ahead.ask(begins, ends)

    def _reach(self, view: View) -> tuple[int, int]:
        """How many rows before the rows of a guess may be read, and up to which after them.

        As steps come, the rows that can be drawn move on. So the next batch is as far off as the last one moved on.
        """
        ring, inner = self._ring, getattr(view, "window", view)
        added = int((ring.heads - self._heads).sum())
        moved = -(-added // ring.num_envs)
        self._heads = ring.heads.copy()
        back = 0 if not self._sampler.watches else 2 * added
        n = getattr(inner, "n", 1)  # a view of the user may mean anything by it
        ahead = (n if is_count(n) else 1) + 1 + moved + back
        return min(rule_of(view).history + back, FARTHEST), min(ahead, FARTHEST)

    def _written(self) -> tuple[Ints, Ints]:
        """The next rows of each env that has come to a new part of its ring: begins and ends."""
        ring, part = self._ring, self._batch_rows
        envs = np.flatnonzero(ring.heads // part != self._asked)
        self._asked[envs] = ring.heads[envs] // part
        first = ring.heads[envs] % ring.rows
        begins = envs * ring.rows + first
        return begins, envs * ring.rows + np.minimum(first + 2 * part, ring.rows)


def coming_of(ring: Ring, sampler: Any, progress: Progress) -> Coming | None:
    """What looks ahead for a replay, if it is in files and this system takes advice."""
    store = ring.store
    if not (isinstance(store, ReplayRows) and isinstance(store.keeper, MappedKeeper) and can_look_ahead()):
        return None
    arrays = [store.target, *cast("Any", store).blocks.values()]
    return Coming(ring, sampler, progress, LookAhead(store.keeper, arrays))
