"""Rings of steps: bookkeeping of adds, drawing anchors, planning n-step windows, copying rows and frames.

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

from ..reference.ring import LONGEST
from .jit import address_t, fetch, jit, memcpy, mix, remainder
from .random import uniform
from .sequences import HISTORY, LENGTH, STRIDE, TAILS, ends_full, ends_window

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
Bools = NDArray[np.uint8]
HEAD, TAIL, NEXT, DONE = 0, 1, 2, 3
COMPLETED, DRAWABLE, EPISODES, NOT_FINITE = 0, 1, 2, 7
ALONE, LINKED, LAST = 2, 3, 4
PATIENCE = 100
"""Draws that may miss before the anchors are counted out one by one."""


@jit
def append(
    envs: Ints, ended: Bools, rows: int, state: Ints, counters: Ints, step: Any, stamp: Any,
    order: Any, places: Ints, finals: Ints, event_places: Ints, event_opens: Bools,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.append`.

    What is counted stays in variables: reading it back at once would wait for the rows written before, one by one.
    """
    events, inverse = 0, 1.0 / rows
    completed, drawable, episodes = counters[COMPLETED], counters[DRAWABLE], counters[EPISODES]
    history, length, stride, tails = counters[HISTORY], counters[LENGTH], counters[STRIDE], counters[TAILS] > 0
    for i in range(envs.size):
        e = envs[i]
        number, tail, index, count, begin = state[e, HEAD], state[e, TAIL], state[e, NEXT], state[e, DONE], e * rows
        index = index if index < LONGEST else 0
        place, cut = begin + remainder(number, rows, inverse), index + 1 >= LONGEST and ended[i] == 0
        old, oldest = number - rows, max(tail, number + 1 - rows)
        if old >= tail:
            closed = _close(
                place, old, number, begin, index, counters, step, stamp, event_places, event_opens, events
            )  # fmt: skip
            drawable, events = drawable - closed, events + (closed if event_places.size else 0)
        step[place], stamp[place] = index, -1 - completed
        if index > 0 and ended[i] < ALONE:
            before = (place if place > begin else begin + rows) - 1
            stamp[before], order[before] = completed, count
            completed, count = completed + 1, count + 1
            opens = number - 1 - min(index - 1, history) >= oldest
            opens = opens and ((cut and tails) or ends_full(index - 1, length, stride))
            opened = _open(before, opens, event_places, event_opens, events)
            drawable, events = drawable + opened, events + (opened if event_places.size else 0)
        order[place] = count
        number, index, finals[i] = number + 1, 0 if cut else index + 1, -1
        if ended[i] == 1:
            final = place + 1 if place + 1 < begin + rows else begin
            old, oldest = number - rows, max(tail, number + 1 - rows)
            if old >= tail:
                closed = _close(
                    final, old, number, begin, index, counters, step, stamp, event_places, event_opens, events
                )  # fmt: skip
                drawable, events = drawable - closed, events + (closed if event_places.size else 0)
            # this transition is complete before it
            step[final], stamp[final], order[final] = index, -2 - completed, count + 1
            number, finals[i] = number + 1, final
            episodes += 1
        if ended[i]:
            stamp[place] = completed
            completed, count = completed + 1, count + 1
            own = number - 1 - int(finals[i] >= 0)
            opens = own - min(index - 1, history) >= oldest and (tails or ends_full(index - 1, length, stride))
            opened = _open(place, opens, event_places, event_opens, events)
            drawable, events = drawable + opened, events + (opened if event_places.size else 0)
            index = index if ended[i] == LINKED and index < LONGEST else 0
            episodes += int(ended[i] == LAST)
        places[i] = place
        state[e, HEAD], state[e, NEXT], state[e, DONE] = number, index, count
    counters[COMPLETED], counters[DRAWABLE], counters[EPISODES] = completed, drawable, episodes
    return events


@jit
def _oldest(e: int, rows: int, state: Ints) -> int:
    return max(state[e, TAIL], state[e, HEAD] - rows)


@jit
def _close(
    place: int, old: int, number: int, begin: int, following: int, counters: Ints, step: Any, stamp: Any,
    event_places: Ints, event_opens: Bools, events: int,
) -> int:  # fmt: skip
    """Row ``old`` makes way for ``number``: how many can be drawn no more, itself and those whose history it was.

    Those are the row ``history`` after it, or all up to that one of an episode of which it is the first. ``following``
    is the index in its episode of the row ``number``.
    """
    rows, closed, history = number - old, 0, counters[HISTORY]
    other = old if step[place] == 0 else old + history
    while other <= min(old + history, number - 1):
        at = place + (other - old)
        at = at if at < begin + rows else at - rows
        if other - min(step[at], history) != old:
            break
        if stamp[at] >= 0 and ends_window(at, other, begin, rows, number, following, counters, step, stamp):
            if event_places.size:
                event_places[events + closed], event_opens[events + closed] = at, 0
            closed += 1
        other += 1
    return closed


@jit
def _open(place: int, opens: bool, event_places: Ints, event_opens: Bools, events: int) -> int:
    """A transition is complete: 1 if it can be drawn now."""
    if opens and event_places.size:
        event_places[events], event_opens[events] = place, 1
    return int(opens)


@jit
def _drawable(place: int, number: int, e: int, rows: int, state: Ints, counters: Ints, step: Any, stamp: Any) -> bool:
    """Whether a live row can be drawn."""
    history = counters[HISTORY]
    if stamp[place] < 0 or (history and number - min(step[place], history) < _oldest(e, rows, state)):
        return False
    return ends_window(place, number, e * rows, rows, state[e, HEAD], state[e, NEXT], counters, step, stamp)


@jit
def draw(
    key: Any, rows: int, newest: int, state: Ints, counters: Ints, step: Any, stamp: Any, order: Any,
    memory: Any, places: Ints,
) -> bool:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.draw`."""
    envs, inverse = state.shape[0], 1.0 / rows
    first, until = np.empty(envs, np.int64), np.empty(envs, np.int64)
    total = window(rows, newest, state, counters, step, stamp, order, first, until)
    if total == 0:
        return False
    width, numbers = memory.shape[1], np.empty(places.size, np.int64)
    every = counters[HISTORY] == 0 and counters[LENGTH] == 1  # complete row can be drawn
    for i in range(places.size):
        e, numbers[i] = _point_at(key, 1 + i, total, first, until)
        places[i] = e * rows + remainder(numbers[i], rows, inverse)
        fetch(memory, places[i] * width, 2 * width)
    # By now all of those rows are on their way, rather than one after another.
    for i in range(places.size):
        if every and stamp[places[i]] >= 0:
            continue
        e, number = places[i] // rows, numbers[i]
        attempt = 0
        while not _drawable(places[i], number, e, rows, state, counters, step, stamp):
            attempt += 1
            if attempt == PATIENCE:
                if not _count_out(key, i, rows, first, state, counters, step, stamp, places):
                    return False
                break
            e, number = _point_at(key, 1 + i + places.size * attempt, total, first, until)
            places[i] = e * rows + remainder(number, rows, inverse)
    return True


@jit
def _point_at(key: Any, nth: int, total: int, first: Ints, until: Ints) -> tuple[Any, Any]:
    """The env and number of a row of the window, by random number ``nth`` of a stream."""
    u = uniform(key, nth)
    at = np.int64(u * np.float64(total))
    e = np.int64(u * first.size)  # most often all envs have as many rows, and that is right
    while at >= until[e]:
        e += 1
    while e > 0 and at < until[e - 1]:
        e -= 1
    return e, first[e] + at - (until[e - 1] if e > 0 else 0)


@jit
def _number_at(place: int, e: int, rows: int, state: Ints) -> int:
    """The number of the live row at a place."""
    newest = state[e, HEAD] - 1
    back = newest % rows - (place - e * rows)
    return newest - (back if back >= 0 else back + rows)


@jit
def window(
    rows: int, newest: int, state: Ints, counters: Ints, step: Any, stamp: Any, order: Any,
    first: Ints, until: Ints,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.window`."""
    single = counters[LENGTH] == 1
    history = counters[HISTORY] if single else 0
    if newest <= 0 or (single and newest >= counters[DRAWABLE]):
        _since(0, rows, history, state, step, stamp, order, first)
    elif single or newest < _since(0, rows, history, state, step, stamp, order, first):
        # Most often none of the newest has gone, and they have the last stamps; else they begin earlier.
        low, high = 0, counters[COMPLETED] - newest
        if _since(high, rows, history, state, step, stamp, order, first) != newest:
            while high - low > 1:
                middle = (low + high) // 2
                if _since(middle, rows, history, state, step, stamp, order, first) >= newest:
                    low = middle
                else:
                    high = middle
            _since(low, rows, history, state, step, stamp, order, first)
    total = 0
    for e in range(first.size):
        total += state[e, HEAD] - first[e]
        until[e] = total
    return total


@jit
def _since(threshold: int, rows: int, history: int, state: Ints, step: Any, stamp: Any, order: Any, first: Ints) -> int:
    """The first row per env that can be drawn or comes after such, of those stamped since; how many can be drawn."""
    count = 0
    for e in range(first.size):
        oldest, head = _oldest(e, rows, state), state[e, HEAD]
        low, high = oldest, head
        while low < high:
            middle = (low + high) // 2
            s = stamp[e * rows + middle % rows]
            if (s if s >= 0 else -1 - s) >= threshold:
                high = middle
            else:
                low = middle + 1
        while low < head and low - min(step[e * rows + low % rows], history) < oldest:
            low += 1
        first[e] = low
        if low < head:
            count += (state[e, DONE] - order[e * rows + low % rows]) & 0xFFFFFFFF
    return count


@jit
def _count_out(
    key: Any, i: int, rows: int, first: Ints, state: Ints, counters: Ints, step: Any, stamp: Any, places: Ints
) -> bool:
    """Where anchors are rare among the rows: count them, and walk to one drawn by its number."""
    found, wanted = 0, -1
    for _ in range(2):
        for e in range(first.size):
            for number in range(first[e], state[e, HEAD]):
                place = e * rows + number % rows
                if _drawable(place, number, e, rows, state, counters, step, stamp):
                    if found == wanted:
                        places[i] = place
                        return True
                    found += 1
        if found == 0:
            return False
        z = mix(mix(key) + np.uint64(i))
        wanted = np.int64(np.float64(z >> np.uint64(11)) * 2.0**-53 * np.float64(found))
        found = 0
    return False


@jit
def ids_of(places: Ints, rows: int, state: Ints, index: Any) -> int:
    """See :func:`relive.kernels.reference.ring.ids_of`."""
    envs = state.shape[0]
    for i in range(places.size):
        if not 0 <= places[i] < envs * rows:
            return i
        e = places[i] // rows
        index[i] = _number_at(places[i], e, rows, state) * envs + e
    return -1


@jit
def live(index: Ints, rows: int, state: Ints, counters: Ints, step: Any, stamp: Any, places: Ints) -> int:
    """See :func:`relive.kernels.reference.ring.live`."""
    envs, inverse = state.shape[0], 1.0 / rows
    for i in range(index.size):
        e, number = index[i] % envs, index[i] // envs
        if index[i] < 0 or number >= state[e, HEAD]:
            places[i:] = -1  # whoever goes on reads no memory that was never written
            return i
        place, there = e * rows + remainder(number, rows, inverse), number >= _oldest(e, rows, state)
        places[i] = place if there and _drawable(place, number, e, rows, state, counters, step, stamp) else -1
    return -1


@jit
def windows(
    places: Ints, rows: int, steps: int, gamma: float, state: Ints, source: Any, at: Ints, out: Any, to: Ints,
    sizes: Ints, last: Ints,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.windows`."""
    envs, inverse = state.shape[0], 1.0 / rows
    width, wide = source.shape[1], out.shape[1]
    bits, words, floats = source.reshape(-1), source.reshape(-1).view(np.int64), source.reshape(-1).view(np.float32)
    ints, own = source.reshape(-1).view(np.int32), sizes[2] < 0
    out_bits, out_words = out.reshape(-1), out.reshape(-1).view(np.int64)
    out_ints, out_floats = out.reshape(-1).view(np.int32), out.reshape(-1).view(np.float32)
    here, there = source.ctypes.data, out.ctypes.data
    for i in range(places.size):
        if not 0 <= places[i] < source.shape[0]:
            return i
        fetch(source, places[i] * width, 2 * width)
    for i in range(places.size):
        place, row = places[i], i * wide
        memcpy(address_t(there + row), address_t(here + place * width), np.intp(sizes[0]))
        offset = remainder(place, rows, inverse)
        begin = place - offset
        env = np.int64(np.float64(begin) * inverse + 0.5)
        newest = state[env, HEAD] - 1
        back = remainder(newest, rows, inverse) - offset
        number = newest - (back if back >= 0 else back + rows)
        value, factor, k, terminal, cut = 0.0, 1.0, 0, np.uint8(0), np.uint8(0)
        while True:
            base = place * width
            value += factor * floats[(base + at[0]) // 4]
            terminal, cut = bits[base + at[1]], bits[base + at[2]]
            factor *= gamma
            k += 1
            before, place = place, place + 1 if place + 1 < begin + rows else begin
            if terminal | cut or k == steps or words[(place * width + at[3]) // 8] < 0:
                break
            if own and (number + k > newest or ints[(place * width + at[4]) // 4] == 0):
                break
        last[i] = before if own else place
        out_words[(row + to[0]) // 8] = number * envs + env
        out_words[(row + to[1]) // 8] = (number + k - int(own)) * envs + env
        out_floats[(row + to[2]) // 4] = 0.0 if terminal else factor
        out_ints[(row + to[3]) // 4] = k
        out_floats[(row + to[4]) // 4] = value
        out_bits[row + to[5]], out_bits[row + to[6]] = terminal, cut
        if sizes[2] > 0:
            memcpy(address_t(there + row + sizes[1]), address_t(here + place * width), np.intp(sizes[2]))
        elif own and k > 1:
            memcpy(address_t(there + row + sizes[1]), address_t(here + before * width + sizes[3]), np.intp(sizes[4]))
    return -1


@jit
def gather_rows(source: Any, places: Ints, out: Any, start: int, nbytes: int) -> int:
    """See :func:`relive.kernels.reference.ring.gather_rows`."""
    here, there = source.ctypes.data, out.ctypes.data + start
    for i in range(places.size):
        target = there + i * out.shape[1]
        if places[i] >= source.shape[0]:
            return i
        if places[i] >= 0:
            memcpy(address_t(target), address_t(here + places[i] * source.shape[1]), np.intp(nbytes))
        else:
            out[i, start : start + nbytes] = 0
    return -1


@jit
def gather_pairs(source: Any, now: Ints, then: Ints, out_now: Any, out_then: Any) -> int:
    """See :func:`relive.kernels.reference.ring.gather_pairs`."""
    depth = now.shape[1]
    for i in range(now.shape[0]):
        item = slice(i * depth, (i + 1) * depth)
        bad = max(
            gather_rows(source, now[i], out_now[item], 0, source.shape[1]),
            gather_rows(source, then[i], out_then[item], 0, source.shape[1]),
        )
        if bad >= 0:
            return i
    return -1


@jit
def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """See :func:`relive.kernels.reference.ring.scatter_rows`."""
    here, there = source.ctypes.data, target.ctypes.data
    for i in range(places.size):
        if places[i] >= 0:
            row = address_t(there + places[i] * target.shape[1])
            memcpy(row, address_t(here + i * source.shape[1]), np.intp(nbytes))


@jit
def stack_places(places: Ints, rows: int, depth: int, repeat: bool, step: Any, out: NDArray[Any]) -> int:
    """See :func:`relive.kernels.reference.ring.stack_places`."""
    for i in range(places.size):
        place = places[i]
        if not 0 <= place < step.size:
            return i
        begin = place // rows * rows
        for back in range(depth):
            reach = min(back, step[place])
            offset = (place - begin - reach) % rows
            out[i, depth - 1 - back] = begin + offset if reach == back or repeat else -1
    return -1


@jit
def anchors(rows: int, state: Ints, counters: Ints, step: Any, stamp: Any, out: Ints) -> int:
    """See :func:`relive.kernels.reference.ring.anchors`."""
    found = 0
    for e in range(state.shape[0]):
        for number in range(_oldest(e, rows, state), state[e, HEAD]):
            place = e * rows + number % rows
            if _drawable(place, number, e, rows, state, counters, step, stamp):
                out[found] = place
                found += 1
    return found


@jit
def plan_rows(
    envs: Ints, mode: int, staged: Any, flags: Ints, rows: int, state: Ints, places: Ints, finals: Ints, tails: Ints
) -> int:
    """See :func:`relive.kernels.reference.ring.plan_rows`."""
    heads, inverse = state[:, HEAD].copy(), 1.0 / rows
    for i in range(envs.size):
        e, ended = envs[i], staged[i, flags[0]] | staged[i, flags[1]]
        if ended and mode == 0:
            return -1 - i
        places[i], finals[i] = e * rows + remainder(heads[e], rows, inverse), -1
        heads[e] += 1
        if ended and mode == 1:
            finals[i] = e * rows + remainder(heads[e], rows, inverse)
            heads[e] += 1
    for i in range(envs.size):
        tails[i] = heads[envs[i]] - rows
    return 0


@jit
def add_rows(
    envs: Ints, mode: int, staged: Any, final: Any, flags: Ints, sizes: Ints, target: Any, rows: int, state: Ints,
    counters: Ints, step: Any, stamp: Any, order: Any, places: Ints,
    finals: Ints, event_places: Ints, event_opens: Any,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.add_rows`."""
    ended = np.full(envs.size, mode, np.uint8)
    if mode != ALONE:
        for i in range(envs.size):
            ended[i] = staged[i, flags[0]] | staged[i, flags[1]]
            if ended[i] and mode == 0:
                return -1 - i
            if mode == LINKED:
                ended[i] += LINKED
    if envs.size > 1:  # so that those rows come while the first are written; of all envs in turn, most often
        inverse = 1.0 / rows
        for i in range(envs.size):
            place = envs[i] * rows + remainder(state[envs[i], HEAD] + i // state.shape[0], rows, inverse)
            fetch(target, place * target.shape[1], target.shape[1])
    events = append(envs, ended, rows, state, counters, step, stamp, order, places, finals, event_places, event_opens)
    scatter_rows(staged, places, target, sizes[0])
    if mode == 1:
        scatter_rows(final, finals, target, sizes[1])
    floats, wide = staged.reshape(-1).view(np.float32), staged.shape[1]
    for i in range(envs.size):
        if not np.isfinite(floats[(i * wide + flags[2]) // 4]):
            counters[NOT_FINITE] += 1
    return events
