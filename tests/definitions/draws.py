"""What random numbers, permutations and uniform draws are, in plain Python.

A ring is a :class:`relive.core.words.RingArrays`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from definitions.places import oldest, place_after, place_of, row_at
from relive.core.words import ACROSS, HEAD, HISTORY, LENGTH, NEXT, STRIDE, TAILS

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio times 2**64, the increment of splitmix64."""


def mix(z: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key(seed: int, counter: int) -> int:
    """The stream of random numbers that belongs to draw number ``counter`` of a seed."""
    return mix(mix(seed) + counter * GOLDEN)


def uniform(stream: int, number: int) -> float:
    """Number ``number`` of a stream, in [0, 1), with 53 random bits."""
    return (mix(stream + number * GOLDEN) >> 11) * 2.0**-53


def masses(stream: int, stratified: bool, total: float, count: int) -> list[float]:
    """Numbers 1, 2, ... of a stream as masses in [0, total), one from each of ``count`` equal parts if ``stratified``.

    Rounding must not reach the total.
    """
    numbers = [uniform(stream, i + 1) for i in range(count)]
    parts = [(i + u) / count if stratified else u for i, u in enumerate(numbers)]
    return [min(part * total, float(np.nextafter(total, 0.0))) for part in parts]


def permutation(n: int, seed: int, counter: int) -> list[int]:
    """Fisher-Yates over 0..n-1, from the last place on."""
    order, stream = list(range(n)), key(seed, counter)
    for number, i in enumerate(range(n - 1, 0, -1)):
        j = int(uniform(stream, number + 1) * (i + 1))
        order[i], order[j] = order[j], order[i]
    return order


def ends_window(place: int, ring: Any) -> bool:
    """True if a complete row is the last of a window.

    It ends a full one, or, where tails count, it is the last complete row of an episode that ended or was interrupted:
    the next row is not complete, and the one after begins another episode, or will.
    """
    counters, at = ring.counters, int(ring.step[place])
    if at + 1 >= counters[LENGTH] and (at + 1 - counters[LENGTH]) % counters[STRIDE] == 0:
        return True
    e, after = place // ring.rows, place_after(place, ring.rows)
    if not counters[TAILS] % ACROSS or ring.stamp[after] >= 0:
        return False
    if after == place_of(int(ring.state[e, HEAD]) - 1, e, ring.rows):
        return bool(ring.state[e, NEXT] == 0)
    return bool(ring.step[place_after(after, ring.rows)] == 0)


def has_history(place: int, number: int, e: int, ring: Any, history: int) -> bool:
    """True if the ``history`` rows before a row, or as many as its episode has, are live.

    With ACROSS they are those of any episode, and the earliest need not be live if the row after it begins an episode.
    """
    least = oldest(e, ring)
    if ring.counters[TAILS] < ACROSS or history == 0:
        return number - min(int(ring.step[place]), history) >= least
    second = number - history + 1
    begins = second >= least and ring.step[place_of(second, e, ring.rows)] == 0
    return second - (not begins) >= least


def drawable(ring: Any) -> list[tuple[int, int]]:
    """The (env, number) of every row that can be drawn, env by env in the order of time.

    It is complete and ends a window, and its history, as far as its episode goes, is live.
    """
    found: list[tuple[int, int]] = []
    for e in range(len(ring.state)):
        for number in range(oldest(e, ring), int(ring.state[e, HEAD])):
            place = place_of(number, e, ring.rows)
            there = has_history(place, number, e, ring, int(ring.counters[HISTORY]))
            if ring.stamp[place] >= 0 and there and ends_window(place, ring):
                found.append((e, number))
    return found


def anchors(ring: Any) -> list[int]:
    """The places of all rows that can be drawn, env by env in the order of time."""
    return [place_of(number, e, ring.rows) for e, number in drawable(ring)]


def take_fresh(ring: Any, after: list[int], count: int) -> tuple[list[int], list[int]]:
    """Places of the rows that can be drawn, from row ``after[e]`` of env e on: the ``count`` first completed.

    Also the number of the row after the last of them in each env; ``after[e]`` where there is none.
    """
    rows = [(e, number) for e, number in drawable(ring) if number >= after[e]]
    rows.sort(key=lambda row: int(ring.stamp[place_of(row[1], row[0], ring.rows)]))
    taken, behind = rows[:count], list(after)
    for e, number in taken:
        behind[e] = number + 1
    return [place_of(number, e, ring.rows) for e, number in taken], behind


def window(ring: Any, newest: int) -> tuple[list[int], list[int]]:
    """The rows from the ``newest`` transitions on (0: from all): the first number in each env.

    Of transitions those count that can be drawn; where windows are longer, every complete one. Newest is in the order
    of completion, over all envs. The second list is the running sum over the envs of the number of rows from there to
    the head. Some of these rows cannot be drawn: boundary rows, the newest.
    """
    counted, history = ring, int(ring.counters[HISTORY])
    if ring.counters[LENGTH] > 1:
        counted, history = ring._replace(counters=np.array([*ring.counters[:HISTORY], 0, 1, 1, 1])), 0
    stamps = sorted((int(ring.stamp[place]) for place in anchors(counted)), reverse=True)
    threshold = stamps[newest - 1] if 0 < newest < len(stamps) else 0
    first, until = list[int](), list[int]()
    for e in range(len(ring.state)):
        least, head = oldest(e, ring), int(ring.state[e, HEAD])
        number = least
        while number < head:
            place = place_of(number, e, ring.rows)
            s = int(ring.stamp[place])  # of a row that is not complete -1 less the number of those completed before it
            if (s if s >= 0 else -1 - s) >= threshold and has_history(place, number, e, ring, history):
                break
            number += 1
        first.append(number)
        until.append((until[-1] if until else 0) + head - number)
    return first, until


PATIENCE = 100
"""Draws that may miss before the rows that can be drawn are counted out one by one."""


def draw(ring: Any, stream: int, newest: int, count: int) -> list[int] | None:
    """Places of ``count`` rows that can be drawn, with replacement, from the ``newest`` completed ones (0: from all).

    Draw i, attempt a, is number 1 + i + a * count of the stream, and points at a row of the window; rows that cannot be
    drawn are drawn again. None if the window has none that can.
    """
    first, _ = window(ring, newest)
    inside = [(e, n) for e in range(len(ring.state)) for n in range(first[e], int(ring.state[e, HEAD]))]
    known = set(drawable(ring))
    among, places = [row for row in inside if row in known], list[int]()
    if not among:
        return None
    for i in range(count):
        tries = (uniform(stream, 1 + i + count * attempt) for attempt in range(PATIENCE))
        hits = (row for row in (inside[int(u * len(inside))] for u in tries) if row in known)
        e, number = next(hits, (-1, -1))
        if e < 0:
            e, number = among[int(uniform(mix(stream) + i, 0) * len(among))]
        places.append(place_of(number, e, ring.rows))
    return places


def ids_of(ring: Any, places: list[int]) -> list[int]:
    """The public index, number * N + env, of the rows at places that exist."""
    rows = [row_at(place, ring) for place in places]
    return [number * len(ring.state) + e for e, number in rows]


def live(ring: Any, index: list[int]) -> tuple[list[int], int]:
    """Places of the given indices, -1 for those that can no longer be drawn; the first that was never issued, or -1.

    From that one on all places are -1.
    """
    known, places = set(drawable(ring)), [-1] * len(index)
    for i, given in enumerate(index):
        number, e = divmod(given, len(ring.state))
        if given < 0 or number >= ring.state[e, HEAD]:
            return places, i
        if (e, number) in known:
            places[i] = place_of(number, e, ring.rows)
    return places, -1
