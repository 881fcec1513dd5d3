"""Drawing and finding rows of rings: reference/draw.py's names and results."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.draw import PATIENCE
from ..ring_state import COMPLETED, COUNT, DRAWABLE, HEAD, HISTORY, LENGTH, RingArrays
from .handles import Ints, open_ring
from .jit import fetch, jit, mix
from .places import oldest, place_of, row_at
from .random import uniform
from .rule import can_draw

__all__ = ["anchors", "draw", "ids_of", "live", "window"]


@jit
def draw(ring_handle: Ints, key: Any, newest: int, places: Ints) -> bool:
    """See :func:`relive.kernels.reference.draw.draw`."""
    ring = open_ring(ring_handle)
    rows, stamp, memory = ring.rows, ring.stamp, ring.memory
    envs, inverse = ring.state.shape[0], 1.0 / rows
    first, until = np.empty(envs, np.int64), np.empty(envs, np.int64)
    total = window(ring_handle, newest, first, until)
    if total == 0:
        return False
    width, numbers = memory.shape[1], np.empty(places.size, np.int64)
    every = ring.counters[HISTORY] == 0 and ring.counters[LENGTH] == 1  # complete row can be drawn
    for i in range(places.size):
        e, numbers[i] = _point_at(key, 1 + i, total, first, until)
        places[i] = place_of(numbers[i], e, rows, inverse)
        fetch(memory, places[i] * width, 2 * width)
    # By now all of those rows are on their way, rather than one after another.
    for i in range(places.size):
        if every and stamp[places[i]] >= 0:
            continue
        e, number = places[i] // rows, numbers[i]
        attempt = 0
        while not can_draw(places[i], number, e, ring):
            attempt += 1
            if attempt == PATIENCE:
                if not _count_out(key, i, ring_handle, first, places):
                    return False
                break
            e, number = _point_at(key, 1 + i + places.size * attempt, total, first, until)
            places[i] = place_of(number, e, rows, inverse)
    return True


@jit
def _point_at(key: Any, nth: int, total: int, first: Ints, until: Ints) -> tuple[Any, Any]:
    """The env and number of a row of the window, by random number ``nth`` of a stream."""
    u = uniform(key, nth)  # below 1, so what follows is below ``total`` and the number of envs
    at = np.int64(u * np.float64(total))  # the row's place in line, if those of all envs stood in one
    e = np.int64(u * first.size)  # a guess: most often all envs have as many rows, and it is right
    while at >= until[e]:  # the last entry of ``until`` is ``total``
        e += 1
    while e > 0 and at < until[e - 1]:
        e -= 1
    return e, first[e] + at - (until[e - 1] if e > 0 else 0)


@jit
def _count_out(key: Any, i: int, ring_handle: Ints, first: Ints, places: Ints) -> bool:
    """Where anchors are rare among the rows: count them, and walk to one drawn by its number."""
    ring = open_ring(ring_handle)
    found, wanted, inverse = 0, -1, 1.0 / ring.rows
    for _ in range(2):
        for e in range(first.size):
            for number in range(first[e], ring.state[e, HEAD]):
                place = place_of(number, e, ring.rows, inverse)
                if can_draw(place, number, e, ring):
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
def window(ring_handle: Ints, newest: int, first: Ints, until: Ints) -> int:
    """See :func:`relive.kernels.reference.draw.window`."""
    ring = open_ring(ring_handle)
    counters = ring.counters
    single = counters[LENGTH] == 1
    history = counters[HISTORY] if single else 0
    if newest <= 0 or (single and newest >= counters[DRAWABLE]):
        _since(0, history, ring, first)
    elif single or newest < _since(0, history, ring, first):
        # Most often none of the newest has gone, and they have the last stamps; else they begin earlier.
        low, high = 0, counters[COMPLETED] - newest
        if _since(high, history, ring, first) != newest:
            while high - low > 1:
                middle = (low + high) // 2
                if _since(middle, history, ring, first) >= newest:
                    low = middle
                else:
                    high = middle
            _since(low, history, ring, first)
    total = 0
    for e in range(first.size):
        total += ring.state[e, HEAD] - first[e]
        until[e] = total
    return total


@jit
def _since(threshold: int, history: int, ring: RingArrays, first: Ints) -> int:
    """Of the rows stamped since ``threshold``: the first of each env that has its history, how many can be drawn."""
    rows, stamp, step = ring.rows, ring.stamp, ring.step
    count, inverse = 0, 1.0 / rows
    for e in range(first.size):
        least, head = oldest(e, ring), ring.state[e, HEAD]
        low, high = least, head
        while low < high:  # stamps grow with the number: halve
            middle = (low + high) // 2
            s = stamp[place_of(middle, e, rows, inverse)]
            if (s if s >= 0 else -1 - s) >= threshold:
                high = middle
            else:
                low = middle + 1
        while low < head and low - min(step[place_of(low, e, rows, inverse)], history) < least:
            low += 1
        first[e] = low
        if low < head:  # at most ``rows`` lie between, so the difference of two counts fits 32 bits
            count += (ring.state[e, COUNT] - ring.order[place_of(low, e, rows, inverse)]) & 0xFFFFFFFF
    return count


@jit
def ids_of(ring_handle: Ints, places: Ints, index: Any) -> int:
    """See :func:`relive.kernels.reference.draw.ids_of`."""
    ring = open_ring(ring_handle)
    envs, inverse = ring.state.shape[0], 1.0 / ring.rows
    for i in range(places.size):
        if not 0 <= places[i] < envs * ring.rows:
            return i
        e, _, number = row_at(places[i], inverse, ring)
        index[i] = number * envs + e
    return -1


@jit
def live(ring_handle: Ints, index: Ints, places: Ints) -> int:
    """See :func:`relive.kernels.reference.draw.live`."""
    ring = open_ring(ring_handle)
    envs, inverse = ring.state.shape[0], 1.0 / ring.rows
    for i in range(index.size):
        e, number = index[i] % envs, index[i] // envs
        if index[i] < 0 or number >= ring.state[e, HEAD]:
            places[i:] = -1  # so that no caller reads memory that was never written
            return i
        place, there = place_of(number, e, ring.rows, inverse), number >= oldest(e, ring)
        places[i] = place if there and can_draw(place, number, e, ring) else -1
    return -1


@jit
def anchors(ring_handle: Ints, out: Ints) -> int:
    """See :func:`relive.kernels.reference.draw.anchors`."""
    ring = open_ring(ring_handle)
    found, inverse = 0, 1.0 / ring.rows
    for e in range(ring.state.shape[0]):
        for number in range(oldest(e, ring), ring.state[e, HEAD]):
            place = place_of(number, e, ring.rows, inverse)
            if can_draw(place, number, e, ring):
                out[found] = place
                found += 1
    return found
