"""Rings of steps in plain Python: what an add does, which anchors are drawn, what an n-step window holds.

Env e owns the places e * rows .. e * rows + rows - 1; step number id lies at place e * rows + id % rows. ``state`` is
``[N, 4]``: the next id, the first id not cleared, the index that the next row has in its episode (0 starts one), how
many transitions were completed. ``order`` is how many of the env's were complete before a row, modulo 2**32.
``counters`` is [transitions completed ever, rows that can be drawn now, episodes ended], then the rule of what can be
drawn, [history, length, stride, tails], which :mod:`relive.kernels.reference.sequences` tells, and last how many
rewards were NaN or infinite. ``stamp`` of a complete transition is its number in the order of completion; of a row that
is none, -1 - (transitions completed when it was written), so that stamps order all rows of an env. An anchor is a row
that can be drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .random import MASK, uniform
from .sequences import HISTORY, LENGTH, ends_window

__all__ = [
    "add_rows",
    "anchors",
    "append",
    "draw",
    "gather_pairs",
    "gather_rows",
    "ids_of",
    "live",
    "plan_rows",
    "scatter_rows",
    "stack_places",
    "windows",
]

Ints = NDArray[np.int64]
PATIENCE = 100
LONGEST = 2**31 - 1
"""Steps after which an episode is cut as if it had been interrupted: what a row notes of its index is an int32."""


def _anchors(rows: int, state: Ints, counters: Ints, step: Any, stamp: Any) -> list[tuple[int, int]]:
    """(env, id) of every row that can be drawn: complete, with its history still there, and the end of a window."""
    found: list[tuple[int, int]] = []
    history = int(counters[HISTORY])
    for e in range(len(state)):
        oldest = max(int(state[e, 1]), int(state[e, 0]) - rows)
        for number in range(oldest, int(state[e, 0])):
            place = e * rows + number % rows
            ready = stamp[place] >= 0 and number - min(int(step[place]), history) >= oldest
            if ready and ends_window(place, rows, state, counters, step, stamp):
                found.append((e, number))
    return found


def _int32(count: int) -> int:
    """A count modulo 2**32, as the int32 of the same bits."""
    return (count + 2**31) % 2**32 - 2**31


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

    A row completes the transition before it, if that belongs to the same episode; a final observation (``ended`` 1)
    completes its own. A row with a next observation of its own completes itself: one that stands alone (``ended`` 2),
    one that the next row goes on from (3), one that ended its episode (4). After LONGEST steps an episode is cut.
    ``places`` tells where the rows go, ``finals`` where the final observations go, or -1. The rows that can be drawn
    from now on (1) or no more (0) are listed in order in ``event_places`` and ``event_opens``, unless that has size 0;
    the number of these events is returned.
    """
    events = 0

    def changed(before: set[int]) -> None:
        nonlocal events
        after = {e * rows + n % rows for e, n in _anchors(rows, state, counters, step, stamp)}
        counters[1] = len(after)
        closed, opened = sorted(before - after), sorted(after - before)
        for place, opens in [(p, 0) for p in closed] + [(p, 1) for p in opened]:
            if len(event_places):
                event_places[events], event_opens[events] = place, opens
                events += 1

    def write(e: int, index: int) -> int:
        number = int(state[e, 0])
        place = e * rows + number % rows
        before = {q * rows + n % rows for q, n in _anchors(rows, state, counters, step, stamp)}
        state[e, 0] = number + 1
        step[place], stamp[place] = index, -1 - counters[0]
        changed(before)
        return place

    def complete(e: int, number: int) -> None:
        place = e * rows + number % rows
        if number >= max(int(state[e, 1]), int(state[e, 0]) - rows):
            before = {q * rows + n % rows for q, n in _anchors(rows, state, counters, step, stamp)}
            stamp[place] = counters[0]
            counters[0] += 1
            order[place] = _int32(int(state[e, 3]))
            state[e, 3] += 1
            changed(before)

    for i, e in enumerate(envs.tolist()):
        index = int(state[e, 2]) if state[e, 2] < LONGEST else 0
        places[i], finals[i] = write(e, index), -1
        state[e, 2] = following = index + 1 if index + 1 < LONGEST else 0
        if index > 0 and ended[i] < 2:
            complete(e, int(state[e, 0]) - 2)
        order[places[i]] = _int32(int(state[e, 3]))
        if ended[i] >= 2:
            complete(e, int(state[e, 0]) - 1)
            state[e, 2] = following if ended[i] == 3 else 0
            counters[2] += int(ended[i] == 4)
        elif ended[i]:
            final = write(e, index + 1)
            state[e, 2] = 0
            complete(e, int(state[e, 0]) - 2)
            stamp[final] = -1 - counters[0]
            order[final] = _int32(int(state[e, 3]))
            counters[2] += 1
            finals[i] = final
    return events


def draw(
    key: int,
    rows: int,
    newest: int,
    state: Ints,
    counters: Ints,
    step: Any,
    stamp: Any,
    order: Any,
    memory: Any,
    places: Ints,
) -> bool:
    """Places of anchors drawn uniformly, with replacement, from the ``newest`` completed ones (0: from all).

    Draw i, attempt a, is number 1 + i + a * B of the stream ``key``, and points at a row of the window; rows that are
    no anchors are drawn again. False if the window has none. ``memory`` is all rows, which the fast twin fetches.
    """
    first, until = (np.zeros(len(state), np.int64) for _ in range(2))
    window(rows, newest, state, counters, step, stamp, order, first, until)
    inside = [(e, number) for e in range(len(state)) for number in range(int(first[e]), int(state[e, 0]))]
    anchors = set(_anchors(rows, state, counters, step, stamp))
    drawable = [row for row in inside if row in anchors]
    if not drawable:
        return False
    for i in range(len(places)):
        for attempt in range(PATIENCE):
            e, number = inside[int(uniform(key, 1 + i + len(places) * attempt) * len(inside))]
            if (e, number) in anchors:
                break
        else:
            from .random import mix

            z = mix((mix(key) + i) & MASK)
            e, number = drawable[int((z >> 11) * 2.0**-53 * len(drawable))]
        places[i] = e * rows + number % rows
    return True


def window(
    rows: int,
    newest: int,
    state: Ints,
    counters: Ints,
    step: Any,
    stamp: Any,
    order: Any,
    first: Ints,
    until: Ints,
) -> int:
    """The rows from the ``newest`` transitions on (0: from all): the first number in each env.

    Of transitions those count that can be drawn; where windows are longer, every complete one. Newest is in the order
    of completion, over all envs. ``until`` is the running sum over the envs of the number of rows from there to the
    head; the whole sum is returned. Some of them cannot be drawn: boundary rows, the newest.
    """
    counted, history = counters, int(counters[HISTORY])
    if counters[LENGTH] > 1:
        counted, history = np.array([*counters[:HISTORY], 0, 1, 1, 1]), 0
    transitions = _anchors(rows, state, counted, step, stamp)
    stamps = sorted((int(stamp[e * rows + n % rows]) for e, n in transitions), reverse=True)
    threshold = stamps[newest - 1] if 0 < newest < len(stamps) else 0
    total = 0
    for e in range(len(state)):
        oldest, head = max(int(state[e, 1]), int(state[e, 0]) - rows), int(state[e, 0])
        number = oldest
        while number < head:
            place = e * rows + number % rows
            s = int(stamp[place])
            if (s if s >= 0 else -1 - s) >= threshold and number - min(int(step[place]), history) >= oldest:
                break
            number += 1
        first[e] = number
        total += head - number
        until[e] = total
    return total


def ids_of(places: Ints, rows: int, state: Ints, index: Ints) -> int:
    """The public index, id * N + env, of the rows at live places; the first that is no place of any row, or -1."""
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(state) * rows:
            return i
        e = place // rows
        head = int(state[e, 0])
        (number,) = [n for n in range(head - rows, head) if n % rows == place % rows]
        index[i] = number * len(state) + e
    return -1


def live(index: Ints, rows: int, state: Ints, counters: Ints, step: Any, stamp: Any, places: Ints) -> int:
    """Places of the given indices, -1 for those that can no longer be drawn; the first that was never issued, or -1.

    From that one on all places are -1.
    """
    anchors = set(_anchors(rows, state, counters, step, stamp))
    for i, given in enumerate(index.tolist()):
        number, e = divmod(given, len(state))
        if given < 0 or number >= state[e, 0]:
            places[i:] = -1
            return i
        places[i] = e * rows + number % rows if (e, number) in anchors else -1
    return -1


def windows(
    places: Ints, rows: int, steps: int, gamma: float, state: Ints, source: Any, at: Ints, out: Any, to: Ints,
    sizes: Ints, last: Ints,
) -> int:  # fmt: skip
    """The n-step windows that start at anchors, rₜ + γrₜ₊₁ + ... with up to ``steps`` rewards, as packed rows.

    A window stops at a done, at the newest row, and where the next row is not complete or does not go on from it.
    ``last`` is the place of the row that holds the observation it bootstraps from.

    ``at`` says at which byte of a row of ``source`` (uint8 ``[R, W]``) its reward, terminated, truncated, stamp and
    step are. The first ``sizes[0]`` bytes of the anchor go to the start of the row of ``out``, the first ``sizes[2]``
    of the row ``last`` to its byte ``sizes[1]``; and to the bytes ``to`` the public indices of both, the discount, γᵏ
    or 0 after a terminal, the number of rewards k, their sum, and the done bits of the last transition.

    If ``sizes[2]`` is negative, rows have next observations of their own: ``last`` is then the last transition's row,
    of which ``sizes[4]`` bytes from ``sizes[3]`` on go to the byte ``sizes[1]``, unless it is the anchor's, of which
    they have been copied.

    Returns the first of ``places`` that is none of any row, or -1.
    """

    def read(place: int, field: int, dtype: Any) -> Any:
        return source[place, at[field] : at[field] + np.dtype(dtype).itemsize].view(dtype)[0]

    def write(i: int, field: int, value: Any, dtype: Any) -> None:
        out[i, to[field] : to[field] + np.dtype(dtype).itemsize].view(dtype)[0] = value

    own = sizes[2] < 0
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(source):
            return i
        out[i, : sizes[0]] = source[place, : sizes[0]]
        begin = place // rows * rows
        newest = begin + (int(state[place // rows, 0]) - 1) % rows
        here, value, factor, k = place, 0.0, 1.0, 0
        while True:
            value += factor * float(read(here, 0, np.float32))
            terminal, cut = read(here, 1, np.uint8), read(here, 2, np.uint8)
            factor *= gamma
            k += 1
            before, here = here, begin + (here - begin + 1) % rows
            if terminal or cut or k == steps or before == newest or read(here, 3, np.int64) < 0:
                break
            if own and read(here, 4, np.int32) == 0:
                break
        last[i] = before if own else here
        ids = np.empty(2, np.int64)
        ids_of(np.array([place, last[i]]), rows, state, ids)
        for field, (result, dtype) in enumerate(
            [
                (ids[0], np.int64),
                (ids[1], np.int64),
                (0.0 if terminal else factor, np.float32),
                (k, np.int32),
                (value, np.float32),
                (terminal, np.uint8),
                (cut, np.uint8),
            ]
        ):
            write(i, field, result, dtype)
        if sizes[2] > 0:
            out[i, sizes[1] : sizes[1] + sizes[2]] = source[here, : sizes[2]]
        elif own and before != place:
            out[i, sizes[1] : sizes[1] + sizes[4]] = source[before, sizes[3] : sizes[3] + sizes[4]]
    return -1


def gather_rows(source: Any, places: Ints, out: Any, start: int, nbytes: int) -> int:
    """The first ``nbytes`` bytes of rows of ``source`` (uint8 ``[R, W]``) to successive rows of ``out``, at ``start``.

    A negative place gives zeros. Returns the first place beyond the last row, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if place >= len(source):
            return i
        out[i, start : start + nbytes] = source[place, :nbytes] if place >= 0 else 0
    return -1


def gather_pairs(source: Any, now: Ints, then: Ints, out_now: Any, out_then: Any) -> int:
    """:func:`gather_rows` of whole rows for places ``[B, depth]``, twice, item by item; the first bad item, or -1.

    Stacks of frames before and after a step share all but one, which are still in the cache the second time.
    """
    depth = now.shape[1]
    bad = [
        gather_rows(source, places.reshape(-1), out, 0, source.shape[1])
        for places, out in ((now, out_now), (then, out_then))
    ]
    return min((place // depth for place in bad if place >= 0), default=-1)


def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """The first ``nbytes`` bytes of successive rows of ``source`` to rows of ``target``; a negative place to none."""
    for i, place in enumerate(places.tolist()):
        if place >= 0:
            target[place, :nbytes] = source[i, :nbytes]


def stack_places(places: Ints, rows: int, depth: int, repeat: bool, step: Any, out: NDArray[Any]) -> int:
    """Places ``[B, depth]`` of the frames that end at ``places``, oldest first, within their episode.

    Frames from before the episode are its first one if ``repeat``, else -1. Returns the first of ``places`` that is
    none of any row, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(step):
            return i
        begin = place // rows * rows
        for j in range(depth):
            back = depth - 1 - j
            reach = min(back, int(step[place]))
            out[i, j] = begin + (place - begin - reach) % rows if reach == back or repeat else -1
    return -1


def anchors(rows: int, state: Ints, counters: Ints, step: Any, stamp: Any, out: Ints) -> int:
    """The places of all rows that can be drawn, env by env in the order of time; how many there are."""
    found = [e * rows + number % rows for e, number in _anchors(rows, state, counters, step, stamp)]
    out[: len(found)] = found
    return len(found)


def plan_rows(
    envs: Ints, mode: int, staged: Any, flags: Ints, rows: int, state: Ints, places: Ints, finals: Ints, tails: Ints
) -> int:
    """Where :func:`add_rows` will store the same rows, and their final observations; nothing else is changed.

    Up to the number ``tails[i]`` rows of env i will have made way for all of them. What it returns is negative if
    :func:`add_rows` will refuse the rows, and then the same.
    """
    heads = state[:, 0].tolist()
    for i, e in enumerate(envs.tolist()):
        ended = bool(staged[i, flags[0]] | staged[i, flags[1]])
        if ended and mode == 0:
            return -1 - i
        places[i], finals[i] = e * rows + heads[e] % rows, -1
        heads[e] += 1
        if ended and mode == 1:
            finals[i] = e * rows + heads[e] % rows
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
    observations, of which the first ``sizes[1]`` bytes are stored where an episode ended; of the rows themselves the
    first ``sizes[0]``. ``mode`` is 0 where no final observation is given, 1 where they are, 2 where rows stand alone, 3
    where they are in order and each has a next observation of its own.

    Returns the number of events; or, if an episode ended and its final observation is not given, -1 - i for the first
    such row i, and nothing is changed.
    """
    ended = np.full(envs.size, mode, np.uint8)
    if mode != 2:
        for i in range(envs.size):
            ended[i] = staged[i, flags[0]] | staged[i, flags[1]]
            if ended[i] and mode == 0:
                return -1 - i
            if mode == 3:
                ended[i] += 3
    events = append(envs, ended, rows, state, counters, step, stamp, order, places, finals, event_places, event_opens)
    scatter_rows(staged, places, target, sizes[0])
    if mode == 1:
        scatter_rows(final, finals, target, sizes[1])
    for row in staged:
        counters[7] += not np.isfinite(row[flags[2] : flags[2] + 4].view(np.float32)[0])
    return events
