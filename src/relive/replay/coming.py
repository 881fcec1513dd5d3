"""Coming: brings the rows of the next batch of a replay in files into memory while the learner has this batch."""

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
"""How many bytes of each env, after its newest row, are asked for before they are overwritten."""


FARTHEST = 4096
"""The most rows that are asked for before and after the row of a guess."""


class Coming:
    """Guesses the next batch, which is a function of the seed and its number, and asks the system for its rows.

    A guess is only a hint: no draw depends on it. The caller holds the replay's lock.

    Args:
        ring: the rows.
        sampler: the sampler that draws.
        progress: the seed, and the number of the next batch.
        ahead: asks the system for rows.
    """

    def __init__(self, ring: Ring, sampler: Any, progress: Progress, ahead: LookAhead) -> None:
        self._ring, self._sampler, self._progress, self.ahead = ring, sampler, progress, ahead
        self._last = 0, 1, 1
        """The last batch: its size, its number in its round, and the number of batches in the round."""
        self._rated = self._waits = False
        self._heads: Ints = ring.heads.copy()
        self._looked = -1
        """How many batches there had been at the last look, when the heads were these."""
        self._asked: Ints = np.full(ring.num_envs, -1, np.int64)
        self._batch_rows = max(WRITTEN // max(1, ahead.row_bytes), 1)

    def after_batch(self, view: View, batch_size: int, update: int, of: int) -> None:
        """Note that a batch was drawn, and look ahead.

        If priorities come after each batch, the next batch depends on them. Then the look waits for
        :meth:`after_rating`.
        """
        self._last, self._waits, self._rated = (batch_size, update, of), self._rated, False
        if not self._waits and self.ahead.is_wanted():
            self._look(view)

    def after_rating(self, view: View) -> None:
        """Note that priorities were updated, and look ahead if a look waits for them."""
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
        except ReliveError:  # if it is a real error, the next draw raises it
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
        """How many rows before and after the row of a guess to ask for.

        As steps come, the rows that can be drawn move on. The rows are expected to move on as far before the next batch
        as they did before the last one, if there was a look then.
        """
        ring, inner, draws = self._ring, getattr(view, "window", view), self._progress.draws
        added = int((ring.heads - self._heads).sum()) if draws == self._looked + 1 else 0
        moved = -(-added // ring.num_envs)
        self._heads, self._looked = ring.heads.copy(), draws
        back = 0 if not self._sampler.watches else 2 * added
        n = getattr(inner, "n", 1)  # in a user's own view, n may mean anything
        ahead = (n if is_count(n) else 1) + 1 + moved + back
        return min(rule_of(view).history + back, FARTHEST), min(ahead, FARTHEST)

    def _written(self) -> tuple[Ints, Ints]:
        """The rows that will be overwritten next, in each env that has reached a new part of its ring: begins, ends."""
        ring, part = self._ring, self._batch_rows
        envs = np.flatnonzero(ring.heads // part != self._asked)
        self._asked[envs] = ring.heads[envs] // part
        first = ring.heads[envs] % ring.rows
        begins = envs * ring.rows + first
        return begins, envs * ring.rows + np.minimum(first + 2 * part, ring.rows)


def coming_of(ring: Ring, sampler: Any, progress: Progress) -> Coming | None:
    """The look-ahead of a replay; None if the replay is not in files, or if this system takes no advice."""
    store = ring.store
    if not (isinstance(store, ReplayRows) and isinstance(store.keeper, MappedKeeper) and can_look_ahead()):
        return None
    arrays = [store.target, *cast("Any", store).blocks.values()]
    return Coming(ring, sampler, progress, LookAhead(store.keeper, arrays))
