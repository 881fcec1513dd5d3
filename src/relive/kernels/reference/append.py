"""Adding rows to rings, in plain Python: where they go, what they complete, which rows can be drawn afterwards.

:mod:`relive.kernels.reference.places` describes the memory of a ring.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..ring_state import (
    ALONE,
    COMPLETED,
    COUNT,
    DRAWABLE,
    EPISODES,
    FINALS,
    HEAD,
    LAST,
    LINKED,
    LONGEST,
    NEXT,
    NO_FINALS,
    NOT_FINITE,
    UNFIT,
    USED_UP,
    DirectStep,
    RingArrays,
    StagedRows,
)
from ..step_table import SOURCE
from .places import Ints, oldest, place_of
from .rows import accept_step, copy_step
from .rule import all_anchors
from .undo import note_undo

__all__ = ["add_rows", "add_step", "append", "kinds_of", "plan_rows", "scatter_rows"]


def append(ring: RingArrays, given: StagedRows, ended: Any) -> int:
    """Issue an id for a new row of each env in turn, and one for the final observation where the episode ended.

    ``ended`` is the kind of each row. A row completes the transition before it, if that belongs to the same episode;
    the final observation of an ENDED row completes that row. A row with a next observation of its own (ALONE, LINKED,
    LAST) completes itself. After LONGEST steps an episode is cut. ``places`` gets where the rows go, ``finals`` where
    the final observations go, or -1. The rows that can be drawn from now on (1) or no longer (0) are listed in order in
    ``where`` and ``opens``, unless these have size 0; the number of these events is returned.
    """
    adding = _Adding(ring, given)
    state, counters, order = ring.state, ring.counters, ring.order
    for i, e in enumerate(given.envs.tolist()):
        index = int(state[e, NEXT]) if state[e, NEXT] < LONGEST else 0
        given.places[i], given.finals[i] = adding.write(e, index), -1
        state[e, NEXT] = following = index + 1 if index + 1 < LONGEST else 0
        if index > 0 and ended[i] < ALONE:
            adding.complete(e, int(state[e, HEAD]) - 2)
        order[given.places[i]] = _int32(int(state[e, COUNT]))
        if ended[i] >= ALONE:
            adding.complete(e, int(state[e, HEAD]) - 1)
            state[e, NEXT] = following if ended[i] == LINKED else 0
            counters[EPISODES] += int(ended[i] == LAST)
        elif ended[i]:
            final = adding.write(e, index + 1)
            state[e, NEXT] = 0
            adding.complete(e, int(state[e, HEAD]) - 2)
            ring.stamp[final] = -1 - counters[COMPLETED]
            order[final] = _int32(int(state[e, COUNT]))
            counters[EPISODES] += 1
            given.finals[i] = final
    return adding.events


class _Adding:
    """Rows that are written, transitions that are completed, and the events that follow from them."""

    def __init__(self, ring: RingArrays, given: StagedRows) -> None:
        self.ring, self.given, self.events = ring, given, 0

    def write(self, e: int, index: int) -> int:
        """Issue the env's next id, for a row of this index in its episode; gives its place."""
        ring, number = self.ring, int(self.ring.state[e, HEAD])
        place, before = place_of(number, e, ring.rows), self._drawable()
        ring.state[e, HEAD] = number + 1
        ring.step[place], ring.stamp[place] = index, -1 - ring.counters[COMPLETED]
        self._note(before)
        return place

    def complete(self, e: int, number: int) -> None:
        """Complete the transition of a row, unless the row has made way."""
        ring, place = self.ring, place_of(number, e, self.ring.rows)
        if number < oldest(e, ring):
            return
        before = self._drawable()
        ring.stamp[place] = ring.counters[COMPLETED]
        ring.counters[COMPLETED] += 1
        ring.order[place] = _int32(int(ring.state[e, COUNT]))
        ring.state[e, COUNT] += 1
        self._note(before)

    def _drawable(self) -> set[int]:
        return {place_of(n, e, self.ring.rows) for e, n in all_anchors(self.ring)}

    def _note(self, before: set[int]) -> None:
        """Count the rows that can be drawn, and list those that changed."""
        after = self._drawable()
        self.ring.counters[DRAWABLE] = len(after)
        changed = [(place, 0) for place in sorted(before - after)] + [(place, 1) for place in sorted(after - before)]
        for place, opens in changed if len(self.given.where) else []:
            self.given.where[self.events], self.given.opens[self.events] = place, opens
            self.events += 1


def _int32(count: int) -> int:
    """A count modulo 2**32, as the int32 of the same bits."""
    return (count + 2**31) % 2**32 - 2**31


def plan_rows(ring: RingArrays, given: StagedRows, mode: int) -> int:
    """Where :func:`add_rows` will store the same rows, and their final observations: ``places``, ``finals``, ``tails``.

    Of the ring, only ``undo`` is changed, where there is one. Up to the number ``tails[i]`` rows of env i will have
    made way for all of them. What it returns is negative if :func:`add_rows` will refuse the rows, and then the same.
    """
    heads, envs = ring.state[:, HEAD].tolist(), given.envs.tolist()
    for i, e in enumerate(envs):
        ended = bool(given.terminated[i] | given.truncated[i])
        if ended and mode == NO_FINALS:
            return -1 - i
        given.places[i], given.finals[i] = place_of(heads[e], e, ring.rows), -1
        heads[e] += 1
        if ended and mode == FINALS:
            given.finals[i] = place_of(heads[e], e, ring.rows)
            heads[e] += 1
    given.tails[:] = [heads[e] - ring.rows for e in envs]
    if len(ring.undo) and note_undo(ring, given, kinds_of(given, mode)):
        return USED_UP
    return 0


def kinds_of(given: StagedRows, mode: int) -> Any:
    """The kind of each row, uint8 ``[K]``, of rows that are added in this way."""
    ended = np.full(given.envs.size, mode, np.uint8)
    if mode != ALONE:
        for i in range(given.envs.size):
            ended[i] = given.terminated[i] | given.truncated[i]
            if mode == LINKED:
                ended[i] += LINKED  # a done makes it LAST
    return ended


def add_rows(ring: RingArrays, given: StagedRows, mode: int) -> int:
    """Append one staged row per env, and store it: :func:`append` and :func:`scatter_rows` in one call.

    ``mode`` is NO_FINALS, FINALS, ALONE or LINKED. The ring's ``step_bytes`` of each row are stored, and its
    ``obs_bytes`` of a final observation where an episode ended.

    Returns the number of events; or, if an episode ended and its final observation is not given, -1 - i for the first
    such row i; or USED_UP, if rows would be overwritten that are not in reserve. In both cases nothing is changed.
    """
    ended = kinds_of(given, mode)
    if mode == NO_FINALS and ended.any():
        return -1 - int(ended.argmax())
    if len(ring.undo) and note_undo(ring, given, ended):
        return USED_UP
    events = append(ring, given, ended)
    scatter_rows(given.staged, given.places, ring.memory, ring.step_bytes)
    if mode == FINALS:
        scatter_rows(given.final, given.finals, ring.memory, ring.obs_bytes)
    ring.counters[NOT_FINITE] += np.count_nonzero(~np.isfinite(given.reward))
    return events


def add_step(step: int, direct: DirectStep) -> int:
    """Check a step, stage it and add its rows: :func:`accept_step`, :func:`copy_step` and :func:`add_rows` in one call.

    Large fields are not staged: they are copied to their blocks. The GIL is held while the step is checked.

    Args:
        step: the address (``id``) of a tuple with an item for each column of ``direct.table``.
        direct: the rest.

    Returns:
        what :func:`add_rows` returns, or UNFIT if the step cannot be copied as it is. If it is negative, nothing that
        is stored has changed.
    """
    table, given = direct.table, direct.given
    if accept_step(step, table) >= 0:
        return UNFIT
    copy_step(table, 0)
    events = add_rows(direct.ring, given, direct.mode)
    if events >= 0:
        for column, block, nbytes, is_final in direct.large.tolist():
            for i, place in enumerate((given.finals if is_final else given.places).tolist()):
                if place >= 0:
                    ctypes.memmove(block + place * nbytes, int(table[SOURCE, column]) + i * nbytes, nbytes)
    return events


def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """The first ``nbytes`` bytes of successive rows of ``source`` to rows of ``target``; a negative place to none."""
    for i, place in enumerate(places.tolist()):
        if place >= 0:
            target[place, :nbytes] = source[i, :nbytes]
