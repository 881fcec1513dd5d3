"""Rings of steps: bookkeeping of adds, drawing anchors, planning n-step windows, copying rows and frames.

Env e owns the places e * rows .. e * rows + rows - 1; step number id lies at place e * rows + id % rows. ``state`` is
``[N, 4]``: the next id, the first id not cleared, the index that the next row has in its episode (0 starts one), how
many transitions were completed. ``order`` is how many of the env's were complete before a row, modulo 2**32.
``counters`` is [anchors completed ever, anchors that can be drawn now, episodes ended]. ``stamp`` of a complete
transition, an anchor, is its number in the order of completion; of a row that is none, -1 - (anchors completed when it
was written), so that stamps order all rows of an env.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import address_t, jit, memcpy, mix, prefetch

__all__ = [
    "add_rows",
    "anchors",
    "append",
    "draw",
    "gather_rows",
    "ids_of",
    "live",
    "plan",
    "scatter_rows",
    "stack_places",
]

Ints = NDArray[np.int64]
Bools = NDArray[np.uint8]
HEAD, TAIL, NEXT, DONE = 0, 1, 2, 3
COMPLETED, DRAWABLE, EPISODES = 0, 1, 2
ALONE = 2
PATIENCE = 100
"""Draws that may miss before the anchors are counted out one by one."""


@jit
def append(
    envs: Ints,
    ended: Bools,
    rows: int,
    history: int,
    state: Ints,
    counters: Ints,
    step: Any,
    stamp: Any,
    order: Any,
    places: Ints,
    finals: Ints,
    event_places: Ints,
    event_opens: Bools,
) -> int:
    """See :func:`relive.kernels.reference.ring.append`."""
    events = 0
    for i in range(envs.size):
        e = envs[i]
        number = state[e, HEAD]
        events = _claim(e, number, rows, history, state, counters, step, stamp, event_places, event_opens, events)
        place = e * rows + number % rows
        step[place] = state[e, NEXT]
        stamp[place] = -1 - counters[COMPLETED]
        state[e, HEAD] = number + 1
        if state[e, NEXT] > 0:
            events = _open(
                e, number - 1, rows, history, state, counters, step, stamp, order, event_places, event_opens, events
            )
        order[place] = state[e, DONE]
        state[e, NEXT] += 1
        places[i], finals[i] = place, -1
        if ended[i] == ALONE:
            events = _open(
                e, number, rows, history, state, counters, step, stamp, order, event_places, event_opens, events
            )
            state[e, NEXT] = 0
        elif ended[i]:
            events = _claim(
                e, number + 1, rows, history, state, counters, step, stamp, event_places, event_opens, events
            )
            final = e * rows + (number + 1) % rows
            state[e, HEAD] = number + 2
            events = _open(
                e, number, rows, history, state, counters, step, stamp, order, event_places, event_opens, events
            )
            order[final] = state[e, DONE]
            step[final] = state[e, NEXT]
            stamp[final] = -1 - counters[COMPLETED]
            state[e, NEXT] = 0
            counters[EPISODES] += 1
            finals[i] = final
    return events


@jit
def _oldest(e: int, rows: int, state: Ints) -> int:
    return max(state[e, TAIL], state[e, HEAD] - rows)


@jit
def _claim(
    e: int, number: int, rows: int, history: int, state: Ints, counters: Ints, step: Any, stamp: Any,
    event_places: Ints, event_opens: Bools, events: int,
) -> int:  # fmt: skip
    """The row ``number - rows`` makes way; it and those that need it for their history can be drawn no more."""
    old = number - rows
    if old < state[e, TAIL]:
        return events
    for other in range(old, min(old + history, number - 1) + 1):
        place = e * rows + other % rows
        if stamp[place] >= 0 and other - min(step[place], history) == old:
            counters[DRAWABLE] -= 1
            if event_places.size:
                event_places[events], event_opens[events] = place, 0
                events += 1
    return events


@jit
def _open(
    e: int, number: int, rows: int, history: int, state: Ints, counters: Ints, step: Any, stamp: Any, order: Any,
    event_places: Ints, event_opens: Bools, events: int,
) -> int:  # fmt: skip
    """The next observation of ``number`` is known: it is a complete transition now."""
    place = e * rows + number % rows
    oldest = _oldest(e, rows, state)
    if number < oldest:
        return events
    stamp[place] = counters[COMPLETED]
    counters[COMPLETED] += 1
    order[place] = state[e, DONE]
    state[e, DONE] += 1
    if number - min(step[place], history) >= oldest:
        counters[DRAWABLE] += 1
        if event_places.size:
            event_places[events], event_opens[events] = place, 1
            events += 1
    return events


@jit
def _drawable(e: int, number: int, rows: int, history: int, oldest: int, step: Any, stamp: Any) -> bool:
    place = e * rows + number % rows
    return stamp[place] >= 0 and (history == 0 or number - min(step[place], history) >= oldest)


@jit
def draw(
    key: Any, rows: int, history: int, newest: int, state: Ints, counters: Ints, step: Any, stamp: Any, order: Any,
    memory: Any, places: Ints,
) -> bool:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.draw`."""
    envs = state.shape[0]
    first, until = np.empty(envs, np.int64), np.empty(envs, np.int64)
    total = window(rows, history, newest, state, counters, step, stamp, order, first, until)
    if total == 0:
        return False
    width = memory.shape[1]
    for i in range(places.size):
        e, number = _point_at(key, 1 + i, total, first, until)
        places[i] = e * rows + number % rows
        _fetch(memory, places[i] * width, 2 * width)
    # By now all of those rows are on their way, rather than one after another.
    for i in range(places.size):
        e = places[i] // rows
        number = _number_at(places[i], e, rows, state)
        attempt = 0
        while not _drawable(e, number, rows, history, _oldest(e, rows, state), step, stamp):
            attempt += 1
            if attempt == PATIENCE:
                if not _count_out(key, i, rows, history, first, state, step, stamp, places):
                    return False
                break
            e, number = _point_at(key, 1 + i + places.size * attempt, total, first, until)
            places[i] = e * rows + number % rows
    return True


@jit
def _point_at(key: Any, nth: int, total: int, first: Ints, until: Ints) -> tuple[int, int]:
    """The env and number of a row of the window, by random number ``nth`` of a stream."""
    z = mix(key + np.uint64(0x9E3779B97F4A7C15) * np.uint64(nth))
    at = np.int64(np.float64(z >> np.uint64(11)) * 2.0**-53 * np.float64(total))
    envs = first.size
    # most often all envs have as many rows: the guess is then right
    e = int(min(at * envs // total, envs - 1))
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
def _fetch(memory: Any, start: int, nbytes: int) -> None:
    """Ask for the cache lines of ``nbytes`` bytes of packed rows; past their end that does no harm."""
    for byte in range(start, start + nbytes, 64):
        prefetch(memory, byte)


@jit
def window(
    rows: int, history: int, newest: int, state: Ints, counters: Ints, step: Any, stamp: Any, order: Any,
    first: Ints, until: Ints,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.window`."""
    high = counters[COMPLETED]
    if newest <= 0 or newest >= counters[DRAWABLE]:
        _since(0, rows, history, state, step, stamp, order, first)
    else:
        # Most often none of the newest has gone, and their stamps are the last ones; else the threshold is lower.
        low, threshold = 0, high - newest
        while _since(threshold, rows, history, state, step, stamp, order, first) != newest:
            if threshold == high - newest:
                high = threshold
            middle = (low + high) // 2
            if _since(middle, rows, history, state, step, stamp, order, first) >= newest:
                low = middle
            else:
                high = middle
            threshold = low
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
    key: Any, i: int, rows: int, history: int, first: Ints, state: Ints, step: Any, stamp: Any, places: Ints
) -> bool:
    """Where anchors are rare among the rows: count them, and walk to one drawn by its number."""
    found, wanted = 0, -1
    for _ in range(2):
        for e in range(first.size):
            for number in range(first[e], state[e, HEAD]):
                if _drawable(e, number, rows, history, _oldest(e, rows, state), step, stamp):
                    if found == wanted:
                        places[i] = e * rows + number % rows
                        return True
                    found += 1
        if found == 0:
            return False
        z = mix(mix(key) + np.uint64(i))
        wanted = np.int64(np.float64(z >> np.uint64(11)) * 2.0**-53 * np.float64(found))
        found = 0
    return False


@jit
def ids_of(places: Ints, rows: int, state: Ints, index: Any) -> None:
    """See :func:`relive.kernels.reference.ring.ids_of`."""
    envs = state.shape[0]
    for i in range(places.size):
        e = places[i] // rows
        index[i] = _number_at(places[i], e, rows, state) * envs + e


@jit
def live(index: Ints, rows: int, history: int, state: Ints, step: Any, stamp: Any, places: Ints) -> int:
    """See :func:`relive.kernels.reference.ring.live`."""
    envs = state.shape[0]
    for i in range(index.size):
        e, number = index[i] % envs, index[i] // envs
        if index[i] < 0 or number >= state[e, HEAD]:
            return i
        oldest = _oldest(e, rows, state)
        alive = number >= oldest and _drawable(e, number, rows, history, oldest, step, stamp)
        places[i] = e * rows + number % rows if alive else -1
    return -1


@jit
def plan(
    places: Ints, rows: int, steps: int, gamma: float, reward: Any, terminated: Any, truncated: Any, stamp: Any,
    last: Ints, total: Any, discount: Any, used: Any, terminal: Any, cut: Any,
) -> None:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.plan`."""
    for i in range(places.size):
        here = places[i]
        begin = here // rows * rows
        value, factor, k, stop = 0.0, 1.0, 0, False
        while True:
            value += factor * reward[here]
            factor *= gamma
            k += 1
            total[i], terminal[i], cut[i] = value, terminated[here], truncated[here]
            stop = terminated[here] | truncated[here]
            here += 1
            if here == begin + rows:
                here = begin
            if stop or k == steps or stamp[here] < 0:
                break
        last[i], used[i] = here, k
        discount[i] = 0.0 if terminal[i] else factor


@jit
def gather_rows(source: Any, places: Ints, out: Any, start: int, nbytes: int) -> None:
    """See :func:`relive.kernels.reference.ring.gather_rows`."""
    here, there = source.ctypes.data, out.ctypes.data + start
    for i in range(places.size):
        target = there + i * out.shape[1]
        if places[i] >= 0:
            memcpy(address_t(target), address_t(here + places[i] * source.shape[1]), np.intp(nbytes))
        else:
            out[i, start : start + nbytes] = 0


@jit
def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """See :func:`relive.kernels.reference.ring.scatter_rows`."""
    here, there = source.ctypes.data, target.ctypes.data
    for i in range(places.size):
        if places[i] >= 0:
            row = address_t(there + places[i] * target.shape[1])
            memcpy(row, address_t(here + i * source.shape[1]), np.intp(nbytes))


@jit
def stack_places(places: Ints, rows: int, depth: int, repeat: bool, step: Any, out: NDArray[Any]) -> None:
    """See :func:`relive.kernels.reference.ring.stack_places`."""
    for i in range(places.size):
        place = places[i]
        begin = place // rows * rows
        for back in range(depth):
            reach = min(back, step[place])
            offset = (place - begin - reach) % rows
            out[i, depth - 1 - back] = begin + offset if reach == back or repeat else -1


@jit
def anchors(rows: int, history: int, state: Ints, step: Any, stamp: Any, out: Ints) -> int:
    """See :func:`relive.kernels.reference.ring.anchors`."""
    found = 0
    for e in range(state.shape[0]):
        oldest = _oldest(e, rows, state)
        for number in range(oldest, state[e, HEAD]):
            if _drawable(e, number, rows, history, oldest, step, stamp):
                out[found] = e * rows + number % rows
                found += 1
    return found


@jit
def add_rows(
    envs: Ints, mode: int, staged: Any, final: Any, flags: Ints, sizes: Ints, target: Any, rows: int, history: int,
    state: Ints, counters: Ints, step: Any, stamp: Any, order: Any, places: Ints,
    finals: Ints, event_places: Ints, event_opens: Any,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.ring.add_rows`."""
    ended = np.full(envs.size, mode, np.uint8)
    if mode != 2:
        for i in range(envs.size):
            ended[i] = staged[i, flags[0]] | staged[i, flags[1]]
            if ended[i] and mode == 0:
                return -1 - i
    events = append(
        envs, ended, rows, history, state, counters, step, stamp, order, places, finals, event_places, event_opens
    )
    scatter_rows(staged, places, target, sizes[0])
    if mode == 1:
        scatter_rows(final, finals, target, sizes[1])
    return events
