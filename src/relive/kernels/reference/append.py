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
)
from .places import Ints, oldest, place_of
from .rule import all_anchors

__all__ = ["add_rows", "append", "plan_rows", "scatter_rows"]


def append(
    envs: Ints,
    ended: Any,
    rows: int,
    state: Ints,
    counters: Ints,
    step: Any,
    stamp: Any,
    order: Any,
    places: Ints,
    finals: Ints,
    event_places: Ints,
    event_opens: Any,
) -> int:
    """Issue an id for a new row of each env in turn, and one for the final observation where the episode ended.

    ``ended`` is the kind of each row. A row completes the transition before it, if that belongs to the same episode;
    the final observation of an ENDED row completes that row. A row with a next observation of its own (ALONE, LINKED,
    LAST) completes itself. After LONGEST steps an episode is cut. ``places`` gets where the rows go, ``finals`` where
    the final observations go, or -1. The rows that can be drawn from now on (1) or no longer (0) are listed in order in
    ``event_places`` and ``event_opens``, unless that has size 0; the number of these events is returned.
    """
    events = 0

    def changed(before: set[int]) -> None:
        nonlocal events
        after = {place_of(n, e, rows) for e, n in all_anchors(rows, state, counters, step, stamp)}
        counters[DRAWABLE] = len(after)
        closed, opened = sorted(before - after), sorted(after - before)
        for place, opens in [(p, 0) for p in closed] + [(p, 1) for p in opened]:
            if len(event_places):
                event_places[events], event_opens[events] = place, opens
                events += 1

    def write(e: int, index: int) -> int:
        number = int(state[e, HEAD])
        place = place_of(number, e, rows)
        before = {place_of(n, q, rows) for q, n in all_anchors(rows, state, counters, step, stamp)}
        state[e, HEAD] = number + 1
        step[place], stamp[place] = index, -1 - counters[COMPLETED]
        changed(before)
        return place

    def complete(e: int, number: int) -> None:
        place = place_of(number, e, rows)
        if number >= oldest(e, rows, state):
            before = {place_of(n, q, rows) for q, n in all_anchors(rows, state, counters, step, stamp)}
            stamp[place] = counters[COMPLETED]
            counters[COMPLETED] += 1
            order[place] = _int32(int(state[e, COUNT]))
            state[e, COUNT] += 1
            changed(before)

    for i, e in enumerate(envs.tolist()):
        index = int(state[e, NEXT]) if state[e, NEXT] < LONGEST else 0
        places[i], finals[i] = write(e, index), -1
        state[e, NEXT] = following = index + 1 if index + 1 < LONGEST else 0
        if index > 0 and ended[i] < ALONE:
            complete(e, int(state[e, HEAD]) - 2)
        order[places[i]] = _int32(int(state[e, COUNT]))
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
            finals[i] = final
    return events


def _int32(count: int) -> int:
    """A count modulo 2**32, as the int32 of the same bits."""
    return (count + 2**31) % 2**32 - 2**31


def plan_rows(
    envs: Ints, mode: int, staged: Any, flags: Ints, rows: int, state: Ints, places: Ints, finals: Ints, tails: Ints
) -> int:
    """Where :func:`add_rows` will store the same rows, and their final observations; nothing else is changed.

    Up to the number ``tails[i]`` rows of env i will have made way for all of them. What it returns is negative if
    :func:`add_rows` will refuse the rows, and then the same.
    """
    heads = state[:, HEAD].tolist()
    for i, e in enumerate(envs.tolist()):
        ended = bool(staged[i, flags[0]] | staged[i, flags[1]])
        if ended and mode == NO_FINALS:
            return -1 - i
        places[i], finals[i] = place_of(heads[e], e, rows), -1
        heads[e] += 1
        if ended and mode == FINALS:
            finals[i] = place_of(heads[e], e, rows)
            heads[e] += 1
    tails[:] = [heads[e] - rows for e in envs.tolist()]
    return 0


def add_rows(
    envs: Ints, mode: int, staged: Any, final: Any, flags: Ints, sizes: Ints, target: Any, rows: int, state: Ints,
    counters: Ints, step: Any, stamp: Any, order: Any, places: Ints,
    finals: Ints, event_places: Ints, event_opens: Any,
) -> int:  # fmt: skip
    """Append one staged row per env, and store it: :func:`append` and :func:`scatter_rows` in one call.

    ``staged`` (uint8 ``[K, W]``) holds the rows; the flags at bytes ``flags[0]`` and ``flags[1]`` of each say
    whether it terminated or truncated, and its reward is at byte ``flags[2]``. ``final`` holds the rows of the final
    observations. The first ``sizes[0]`` bytes of each row are stored, and the first ``sizes[1]`` of a final observation
    where an episode ended. ``mode`` is NO_FINALS, FINALS, ALONE or LINKED.

    Returns the number of events; or, if an episode ended and its final observation is not given, -1 - i for the first
    such row i, and nothing is changed.
    """
    ended = np.full(envs.size, mode, np.uint8)
    if mode != ALONE:
        for i in range(envs.size):
            ended[i] = staged[i, flags[0]] | staged[i, flags[1]]
            if ended[i] and mode == NO_FINALS:
                return -1 - i
            if mode == LINKED:
                ended[i] += LINKED  # a done makes it LAST
    events = append(envs, ended, rows, state, counters, step, stamp, order, places, finals, event_places, event_opens)
    scatter_rows(staged, places, target, sizes[0])
    if mode == FINALS:
        scatter_rows(final, finals, target, sizes[1])
    for row in staged:
        counters[NOT_FINITE] += not np.isfinite(row[flags[2] : flags[2] + 4].view(np.float32)[0])
    return events


def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """The first ``nbytes`` bytes of successive rows of ``source`` to rows of ``target``; a negative place to none."""
    for i, place in enumerate(places.tolist()):
        if place >= 0:
            target[place, :nbytes] = source[i, :nbytes]
