"""What adding rows to a ring means, in plain Python: bookkeeping, events, and the note of how to undo it.

A ring is a :class:`relive.core.words.RingArrays`, rows on their way a :class:`relive.core.words.StagedRows`. Which rows
can be drawn is found anew after each change, as :func:`definitions.draws.anchors` says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from definitions.draws import anchors
from definitions.places import oldest, place_of
from relive.core.words import (
    ALONE,
    COMPLETED,
    COUNT,
    COUNTERS,
    DRAWABLE,
    EPISODES,
    FINALS,
    HEAD,
    LINKED,
    LONGEST,
    NEXT,
    NO_FINALS,
    NOT_FINITE,
    UNDO_ADDING,
    UNDO_AFTER,
    UNDO_COUNTERS,
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    UNDO_ROWS,
    USED_UP,
    env_entries,
    packed,
    row_entries,
    undo_size,
)

ENDED, LAST = 1, LINKED + 1
"""Kinds of rows: a final observation takes the row after it; as LINKED, but the row ended its episode."""


def kinds_of(given: Any, mode: int) -> list[int]:
    """The kind of each row, of rows that are added in this way."""
    done = [int(a | b) for a, b in zip(given.terminated, given.truncated, strict=True)]
    if mode == ALONE:
        return [ALONE] * len(done)
    return [LINKED + ended for ended in done] if mode == LINKED else done  # a done makes it LAST


def note_undo(ring: Any, given: Any, kinds: list[int]) -> bool:
    """Note in ``undo`` what will change when rows of these kinds are added; a note that is there is kept.

    True if rows would be overwritten that are not in reserve, or if there is no room for the entries: nothing is noted.
    """
    undo, state, rows = ring.undo, ring.state, ring.rows
    if undo[UNDO_KIND] != UNDO_NONE:
        return False
    heads, places = dict[int, int](), list[int]()
    if len(undo) < undo_size(len(state), len(kinds)):
        return True
    entries = env_entries(undo, len(state))
    for e, kind in zip(given.envs.tolist(), kinds, strict=True):
        if e not in heads:
            number = heads[e] = int(state[e, HEAD])
            entries[len(heads) - 1, :UNDO_AFTER] = e, *state[e]
            if number > 0:  # this call completes the row before
                places.append(place_of(number - 1, e, rows))
        for _ in range(1 + (kind == ENDED)):
            places.append(place_of(heads[e], e, rows))
            heads[e] += 1
    for entry, place in zip(row_entries(undo, len(state), len(places)), places, strict=True):
        entry[:] = place, ring.stamp[place], packed(int(ring.step[place]), int(ring.order[place]))
    for i, (e, head) in enumerate(heads.items()):
        if head - rows > ring.reserve[e]:  # rows below head - rows are overwritten
            return True
        entries[i, UNDO_AFTER] = head
    undo[UNDO_COUNTERS : UNDO_COUNTERS + COUNTERS] = ring.counters
    undo[UNDO_ENVS], undo[UNDO_ROWS] = len(heads), len(places)
    undo[UNDO_KIND] = UNDO_ADDING
    return False


class Adding:
    """Rows that are written, transitions that are completed, and the events that follow from them."""

    def __init__(self, ring: Any, given: Any) -> None:
        self.ring, self.given, self.events = ring, given, 0

    def write(self, e: int, index: int) -> int:
        """Issue the env's next id, for a row of this index in its episode; gives its place."""
        ring, number = self.ring, int(self.ring.state[e, HEAD])
        place, before = place_of(number, e, ring.rows), set(anchors(ring))
        ring.state[e, HEAD] = number + 1
        ring.step[place], ring.stamp[place] = index, -1 - ring.counters[COMPLETED]
        self.note(before)
        return place

    def complete(self, e: int, number: int) -> None:
        """Complete the transition of a row, unless the row has made way."""
        ring, place = self.ring, place_of(number, e, self.ring.rows)
        if number < oldest(e, ring):
            return
        before = set(anchors(ring))
        ring.stamp[place] = ring.counters[COMPLETED]
        ring.counters[COMPLETED] += 1
        ring.order[place] = int32(int(ring.state[e, COUNT]))
        ring.state[e, COUNT] += 1
        self.note(before)

    def note(self, before: set[int]) -> None:
        """Count the rows that can be drawn, and list those that changed: first those that no longer can."""
        after = set(anchors(self.ring))
        self.ring.counters[DRAWABLE] = len(after)
        changed = [(place, 0) for place in sorted(before - after)] + [(place, 1) for place in sorted(after - before)]
        for place, opens in changed if len(self.given.where) else []:
            self.given.where[self.events], self.given.opens[self.events] = place, opens
            self.events += 1


def int32(count: int) -> int:
    """A count modulo 2**32, as the int32 of the same bits."""
    return (count + 2**31) % 2**32 - 2**31


def append(ring: Any, given: Any, kinds: list[int]) -> int:
    """Issue an id for a new row of each env in turn, and one for the final observation where the episode ended.

    A row completes the transition before it, if that belongs to the same episode; the final observation of an ENDED row
    completes that row. A row with a next observation of its own (ALONE, LINKED, LAST) completes itself. After LONGEST
    steps an episode is cut. Returns the number of events.
    """
    adding = Adding(ring, given)
    state, counters, order = ring.state, ring.counters, ring.order
    for i, e in enumerate(given.envs.tolist()):
        index = int(state[e, NEXT]) if state[e, NEXT] < LONGEST else 0
        given.places[i], given.finals[i] = adding.write(e, index), -1
        state[e, NEXT] = following = index + 1 if index + 1 < LONGEST else 0
        if index > 0 and kinds[i] < ALONE:
            adding.complete(e, int(state[e, HEAD]) - 2)
        order[given.places[i]] = int32(int(state[e, COUNT]))
        if kinds[i] >= ALONE:
            adding.complete(e, int(state[e, HEAD]) - 1)
            state[e, NEXT] = following if kinds[i] == LINKED else 0
            counters[EPISODES] += int(kinds[i] == LAST)
        elif kinds[i] == ENDED:
            final = adding.write(e, index + 1)
            state[e, NEXT] = 0
            adding.complete(e, int(state[e, HEAD]) - 2)
            ring.stamp[final] = -1 - counters[COMPLETED]
            order[final] = int32(int(state[e, COUNT]))
            counters[EPISODES] += 1
            given.finals[i] = final
    return adding.events


def plan_rows(ring: Any, given: Any, mode: int) -> int:
    """Where :func:`add_rows` will store rows and final observations: ``places``, ``finals``, ``tails``.

    Of the ring, only ``undo`` is changed, where there is one. Negative if :func:`add_rows` will refuse the rows.
    """
    heads, kinds = ring.state[:, HEAD].tolist(), kinds_of(given, mode)
    for i, e in enumerate(given.envs.tolist()):
        if mode == NO_FINALS and kinds[i]:
            return -1 - i
        given.places[i], given.finals[i] = place_of(heads[e], e, ring.rows), -1
        heads[e] += 1
        if mode == FINALS and kinds[i]:
            given.finals[i] = place_of(heads[e], e, ring.rows)
            heads[e] += 1
    given.tails[:] = [heads[e] - ring.rows for e in given.envs.tolist()]
    return USED_UP if len(ring.undo) and note_undo(ring, given, kinds) else 0


def add_rows(ring: Any, given: Any, mode: int) -> int:
    """Append one staged row per env in turn and store it; returns the number of events.

    If an episode ended and its final observation is not given, -1 - i for the first such row i; USED_UP if rows would
    be overwritten that are not in reserve. In both cases nothing is changed.
    """
    kinds = kinds_of(given, mode)
    if mode == NO_FINALS and any(kinds):
        return -1 - kinds.index(ENDED)
    if len(ring.undo) and note_undo(ring, given, kinds):
        return USED_UP
    events = append(ring, given, kinds)
    scatter_rows(given.staged, given.places, ring.memory, ring.step_bytes)
    if mode == FINALS:
        scatter_rows(given.final, given.finals, ring.memory, ring.obs_bytes)
    ring.counters[NOT_FINITE] += np.count_nonzero(~np.isfinite(given.reward))
    return events


def scatter_rows(source: Any, places: Any, target: Any, nbytes: int) -> None:
    """The first ``nbytes`` bytes of successive rows of ``source`` to rows of ``target``; a negative place to none."""
    for i, place in enumerate(places.tolist()):
        if place >= 0:
            target[place, :nbytes] = source[i, :nbytes]
