"""Adding rows to rings, in plain Python: where they go, what they complete, which rows can be drawn afterwards.

:mod:`relive.kernels.reference.places` describes the memory of a ring.
"""

from __future__ import annotations

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
    USED_UP,
    RingArrays,
    StagedRows,
)
from .places import Ints, oldest, place_of
from .rule import all_anchors
from .undo import note_undo

__all__ = ["add_rows", "append", "kinds_of", "plan_rows", "scatter_rows"]


def append(ring: RingArrays, given: StagedRows, ended: Any) -> int:
    """Issue an id for a new row of each env in turn, and one for the final observation where the episode ended.

    ``ended`` is the kind of each row. A row completes the transition before it, if that belongs to the same episode;
    the final observation of an ENDED row completes that row. A row with a next observation of its own (ALONE, LINKED,
    LAST) completes itself. After LONGEST steps an episode is cut. ``places`` gets where the rows go, ``finals`` where
    the final observations go, or -1. The rows that can be drawn from now on (1) or no longer (0) are listed in order in
    ``where`` and ``opens``, unless these have size 0; the number of these events is returned.
    """
    state, counters, stamp, order, rows = ring.state, ring.counters, ring.stamp, ring.order, ring.rows
    events = 0

    def drawable() -> set[int]:
        return {place_of(n, e, rows) for e, n in all_anchors(ring)}

    def changed(before: set[int]) -> None:
        nonlocal events
        after = drawable()
        counters[DRAWABLE] = len(after)
        closed, opened = sorted(before - after), sorted(after - before)
        for place, opens in [(p, 0) for p in closed] + [(p, 1) for p in opened]:
            if len(given.where):
                given.where[events], given.opens[events] = place, opens
                events += 1

    def write(e: int, index: int) -> int:
        number = int(state[e, HEAD])
        place, before = place_of(number, e, rows), drawable()
        state[e, HEAD] = number + 1
        ring.step[place], stamp[place] = index, -1 - counters[COMPLETED]
        changed(before)
        return place

    def complete(e: int, number: int) -> None:
        place = place_of(number, e, rows)
        if number >= oldest(e, ring):
            before = drawable()
            stamp[place] = counters[COMPLETED]
            counters[COMPLETED] += 1
            order[place] = _int32(int(state[e, COUNT]))
            state[e, COUNT] += 1
            changed(before)

    for i, e in enumerate(given.envs.tolist()):
        index = int(state[e, NEXT]) if state[e, NEXT] < LONGEST else 0
        given.places[i], given.finals[i] = write(e, index), -1
        state[e, NEXT] = following = index + 1 if index + 1 < LONGEST else 0
        if index > 0 and ended[i] < ALONE:
            complete(e, int(state[e, HEAD]) - 2)
        order[given.places[i]] = _int32(int(state[e, COUNT]))
        if ended[i] >= ALONE:
            complete(e, int(state[e, HEAD]) - 1)
            state[e, NEXT] = following if ended[i] == LINKED else 0
            counters[EPISODES] += int(ended[i] == LAST)
        elif ended[i]:
            final = write(e, index + 1)
            state[e, NEXT] = 0
            complete(e, int(state[e, HEAD]) - 2)
            stamp[final] = -1 - counters[COMPLETED]
            order[final] = _int32(int(state[e, COUNT]))
            counters[EPISODES] += 1
            given.finals[i] = final
    return events


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


def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """The first ``nbytes`` bytes of successive rows of ``source`` to rows of ``target``; a negative place to none."""
    for i, place in enumerate(places.tolist()):
        if place >= 0:
            target[place, :nbytes] = source[i, :nbytes]
