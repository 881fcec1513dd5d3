"""Drawing and finding rows of rings, in plain Python: anchors, windows of the newest, public indices.

:mod:`relive.kernels.reference.places` describes the memory of a ring.
"""

from __future__ import annotations

import numpy as np

from ..ring_state import HEAD, HISTORY, LENGTH, RingArrays
from .places import Ints, oldest, place_of, row_at
from .random import MASK, mix, uniform
from .rule import all_anchors

__all__ = ["PATIENCE", "anchors", "draw", "ids_of", "live", "window"]

PATIENCE = 100
"""Draws that may miss before the anchors are counted out one by one."""


def draw(ring: RingArrays, key: int, newest: int, places: Ints) -> bool:
    """Places of anchors drawn uniformly, with replacement, from the ``newest`` completed ones (0: from all).

    Draw i, attempt a, is number 1 + i + a * B of the stream ``key``, and points at a row of the window; rows that are
    no anchors are drawn again. False if the window has none.
    """
    first, until = (np.zeros(len(ring.state), np.int64) for _ in range(2))
    window(ring, newest, first, until)
    inside = [(e, n) for e in range(len(ring.state)) for n in range(int(first[e]), int(ring.state[e, HEAD]))]
    anchors = set(all_anchors(ring))
    drawable = [row for row in inside if row in anchors]
    if not drawable:
        return False
    for i in range(len(places)):
        for attempt in range(PATIENCE):
            e, number = inside[int(uniform(key, 1 + i + len(places) * attempt) * len(inside))]
            if (e, number) in anchors:
                break
        else:
            z = mix((mix(key) + i) & MASK)
            e, number = drawable[int((z >> 11) * 2.0**-53 * len(drawable))]
        places[i] = place_of(number, e, ring.rows)
    return True


def window(ring: RingArrays, newest: int, first: Ints, until: Ints) -> int:
    """The rows from the ``newest`` transitions on (0: from all): the first number in each env.

    Of transitions those count that can be drawn; where windows are longer, every complete one. Newest is in the order
    of completion, over all envs. ``until`` is the running sum over the envs of the number of rows from there to the
    head; the whole sum is returned. Some of them cannot be drawn: boundary rows, the newest.
    """
    counted, history = ring, int(ring.counters[HISTORY])
    if ring.counters[LENGTH] > 1:
        counted, history = ring._replace(counters=np.array([*ring.counters[:HISTORY], 0, 1, 1, 1])), 0
    stamps = sorted((int(ring.stamp[place_of(n, e, ring.rows)]) for e, n in all_anchors(counted)), reverse=True)
    threshold = stamps[newest - 1] if 0 < newest < len(stamps) else 0
    total = 0
    for e in range(len(ring.state)):
        least, head = oldest(e, ring), int(ring.state[e, HEAD])
        number = least
        while number < head:
            place = place_of(number, e, ring.rows)
            s = int(ring.stamp[place])
            if (s if s >= 0 else -1 - s) >= threshold and number - min(int(ring.step[place]), history) >= least:
                break
            number += 1
        first[e] = number
        total += head - number
        until[e] = total
    return total


def ids_of(ring: RingArrays, places: Ints, index: Ints) -> int:
    """The public index, number * N + env, of the rows at live places; the first that is no place of a row, or -1."""
    envs = len(ring.state)
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < envs * ring.rows:
            return i
        e, _, number = row_at(place, ring)
        index[i] = number * envs + e
    return -1


def live(ring: RingArrays, index: Ints, places: Ints) -> int:
    """Places of the given indices, -1 for those that can no longer be drawn; the first that was never issued, or -1.

    From that one on all places are -1.
    """
    anchors = set(all_anchors(ring))
    for i, given in enumerate(index.tolist()):
        number, e = divmod(given, len(ring.state))
        if given < 0 or number >= ring.state[e, HEAD]:
            places[i:] = -1
            return i
        places[i] = place_of(number, e, ring.rows) if (e, number) in anchors else -1
    return -1


def anchors(ring: RingArrays, out: Ints) -> int:
    """The places of all rows that can be drawn, env by env in the order of time; how many there are."""
    found = [place_of(number, e, ring.rows) for e, number in all_anchors(ring)]
    out[: len(found)] = found
    return len(found)
