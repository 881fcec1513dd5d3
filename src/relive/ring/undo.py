"""Undo: takes back the change of a ring in files that a kill broke off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ..errors import InvariantError
from ..kernels.ring_state import COUNTERS, DRAWABLE, HEAD, HISTORY, LENGTH, NEXT, TAIL
from ..kernels.undo_note import (
    UNDO_ADDING,
    UNDO_AFTER,
    UNDO_COUNTERS,
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    UNDO_REBUILD,
    UNDO_ROW,
    UNDO_ROWS,
    UNDO_START,
    env_entries,
    first_row,
    packed,
    row_entries,
    unpacked,
)
from ..steps.arrays import Ints
from .invariants import LARGEST, check_cursors
from .state import RingState

__all__ = ["Undo", "note_mark"]


class Undo:
    """The note of a change (:mod:`relive.kernels.undo_note`): begun, ended, and after a kill taken back.

    Args:
        words: the memory of the note, of a ring whose memory outlives the process.
    """

    def __init__(self, words: Ints) -> None:
        self.words = words
        self.renew: Callable[[int], bool] | None = None
        """Puts more rows in reserve before so many are added; whether it did."""
        self._first = (
            memoryview(cast("Any", self.words)).cast("B").cast("q")
        )  # NumPy takes three times as long for one number

    @property
    def active(self) -> bool:
        """Whether a change is under way."""
        return self._first[UNDO_KIND] != UNDO_NONE

    def end(self) -> None:
        """The change is done."""
        self._first[UNDO_KIND] = UNDO_NONE

    def begin_rebuild(self, ring: RingState) -> None:
        """What can be drawn is about to change as a whole. A kill on the way leads back to before this call."""
        words = self.words
        if self.active:  # what was noted leads back further; only what can be drawn has to be found anew now
            self._first[UNDO_KIND] = UNDO_REBUILD
            return
        entries = env_entries(words, ring.num_envs)
        entries[:, 0], entries[:, 1:UNDO_AFTER], entries[:, UNDO_AFTER] = range(ring.num_envs), ring.state, ring.heads
        words[UNDO_COUNTERS:UNDO_START] = ring.counters
        words[UNDO_ENVS], words[UNDO_ROWS] = ring.num_envs, 0
        self._first[UNDO_KIND] = UNDO_REBUILD

    def restore(self, ring: RingState) -> Ints | None:
        """Put back what the change that a kill broke off found, and give up the rows that it was to overwrite.

        It may be called again after a kill on its way. The change stays noted until :meth:`end`.

        Returns:
            the places whose drawability may have changed, or None if that may be any.

        Raises:
            InvariantError: the note makes no sense.
        """
        kind, count, rows = (int(self.words[at]) for at in (UNDO_KIND, UNDO_ENVS, UNDO_ROWS))
        if kind == UNDO_NONE:
            return np.zeros(0, np.int64)
        words, most = self.words, len(self.words) - UNDO_START
        _require(kind in (UNDO_ADDING, UNDO_REBUILD) and 0 <= count <= ring.num_envs)
        _require(0 <= rows <= (len(words) - first_row(ring.num_envs)) // UNDO_ROW)
        entries, noted = env_entries(words, count), row_entries(words, ring.num_envs, rows)
        envs, places = entries[:, 0], noted[:, 0]
        _require(((envs >= 0) & (envs < ring.num_envs)).all() and len(np.unique(envs)) == count)
        _require(((places >= 0) & (places < ring.store.num_rows)).all())
        ring.stamp[places], (ring.step[places], ring.order[places]) = noted[:, 1], unpacked(noted[:, 2])
        ring.state[envs] = entries[:, 1:UNDO_AFTER]
        ring.counters[:COUNTERS] = words[UNDO_COUNTERS : UNDO_COUNTERS + COUNTERS]
        check_cursors(ring, LARGEST)
        after = entries[:, UNDO_AFTER]
        ahead = after - ring.state[envs, HEAD]
        _require(((ahead >= 0) & (ahead <= 2 * (most + ring.rows))).all())
        given_up = self._give_up(ring, envs, after - ring.rows)
        return None if kind == UNDO_REBUILD else np.concatenate([places, given_up])

    def end_episodes(self, ring: RingState) -> Ints:
        """End the episodes under way, whose process died: the envs are gone, so no step that comes goes on with one.

        Call it after :meth:`restore`. If a kill interrupts what follows, both are called again, up to :meth:`end`.

        Returns:
            the places that could not be drawn before and can be now. The last complete step of an episode that has
            ended is the last of a window, although the window may be shorter.
        """
        if ring.counters[LENGTH] == 1:
            ring.state[:, NEXT] = 0
            return np.zeros(0, np.int64)
        self.end()  # nothing is half done any more, and after a kill all windows are found anew
        self.begin_rebuild(ring)  # of all envs, so that a kill leads back to where their episodes go on
        last = ring.heads - 2  # the newest row of an episode under way waits for its next observation
        envs = np.flatnonzero(last >= ring.oldest)
        index = last[envs] * ring.num_envs + envs
        before = ring.find(index)[0]
        ring.state[:, NEXT] = 0
        after = ring.find(index)[0]
        return after[(before < 0) & (after >= 0)]

    def _give_up(self, ring: RingState, envs: Ints, until: Ints) -> Ints:
        """Rows of envs below these numbers are gone. Returns the places of all rows that this may concern."""
        history = int(ring.counters[HISTORY])
        found = list[Ints]()
        for e, tail in zip(envs.tolist(), until.tolist(), strict=True):
            oldest, head = int(ring.oldest[e]), int(ring.state[e, HEAD])
            if tail <= oldest:
                continue
            concerned = np.arange(oldest, min(tail + history + 1, head), dtype=np.int64) * ring.num_envs + e
            before = ring.find(concerned)[0]
            ring.state[e, TAIL] = min(tail, head)
            after = ring.find(concerned)[0]
            ring.counters[DRAWABLE] -= np.count_nonzero(before >= 0) - np.count_nonzero(after >= 0)
            found.append(e * ring.rows + concerned // ring.num_envs % ring.rows)
        return np.concatenate([np.zeros(0, np.int64), *found])


def note_mark(words: Ints, state: Ints, counters: Ints, after: Ints, places: Ints, newest: Ints) -> None:
    """Note a state to go back to, as if a change had been broken off that began there.

    Args:
        words: the note.
        state: ``[N, 4]``.
        counters: as the ring has them.
        after: ``[N]``: the number that each env's next row may have had meanwhile.
        places: ``[N]``: the place of each env's newest row, which means nothing where there is none.
        newest: ``[N, 3]``: stamp, step and order of these rows.
    """
    envs = np.flatnonzero(state[:, HEAD] > 0)
    words[:] = 0
    words[UNDO_COUNTERS:UNDO_START] = counters
    words[UNDO_ENVS], words[UNDO_ROWS] = len(state), len(envs)
    entries = env_entries(words, len(state))
    entries[:, 0], entries[:, 1:UNDO_AFTER] = range(len(state)), state
    entries[:, UNDO_AFTER] = np.maximum(after, state[:, HEAD])
    rows = row_entries(words, len(state), len(envs))
    rows[:, 0], rows[:, 1], rows[:, 2] = places[envs], newest[envs, 0], packed(newest[envs, 1], newest[envs, 2])
    words[UNDO_KIND] = UNDO_REBUILD


def _require(holds: Any) -> None:
    if not holds:
        raise InvariantError("undo: the note of what was being changed makes no sense")
