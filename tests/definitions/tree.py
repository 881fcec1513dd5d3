"""What a sum tree is, in plain Python: each node is the sum of its 8 children, added from left to right from 0 on.

The nodes lie level by level, each level filled up with zeros to whole blocks: the leaves first, the root last.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Any

import numpy as np

from relive.core.words import FANOUT


def heaviest(leaves: int) -> float:
    """The largest weight that so many leaves can all have without an infinite sum anywhere."""
    return sys.float_info.max / (2.0 * leaves)


def offsets_of(leaves: int) -> list[int]:
    """Where each level starts; the last is the place of the root."""
    starts, nodes = [0], leaves
    while nodes > 1 or len(starts) == 1:
        nodes = -(-nodes // FANOUT)
        starts.append(starts[-1] + nodes * FANOUT)
    return starts


def build(nodes: Any, offsets: list[int], minima: Any) -> None:
    """Sum every node anew from the leaves.

    ``minima`` holds, of each node that is no leaf, the smallest positive leaf below it; it may be empty.
    """
    inner = offsets[1]
    for level, (below, above) in enumerate(pairwise(offsets)):
        for node in range((above - below) // FANOUT):
            first, total = below + node * FANOUT, 0.0
            for weight in nodes[first : first + FANOUT].tolist():
                total += weight
            nodes[above + node] = total
            if len(minima):
                lows = nodes if level == 0 else minima[first - inner :]
                start = first if level == 0 else 0
                some = [low for low in lows[start : start + FANOUT].tolist() if low > 0]
                minima[above - inner + node] = min(some, default=math.inf)


def set_weights(nodes: Any, offsets: list[int], minima: Any, leaves: int, positions: Any, values: Any) -> int:
    """Give leaves their weights, in order, so that the last of several for one leaf stays, and sum all parents anew.

    ``values`` has one entry per position, or one for all. -1, or the first entry that is no leaf or has a weight that
    is not in [0, heaviest(leaves)]; then nothing is written.
    """
    weights = np.broadcast_to(values, positions.shape).tolist()
    given = list(zip(positions.tolist(), weights, strict=True))
    for i, (position, weight) in enumerate(given):
        if not (0 <= position < leaves and 0.0 <= weight <= heaviest(leaves)):
            return i
    for position, weight in given:
        nodes[position] = weight + 0.0  # -0.0 becomes 0.0
    build(nodes, offsets, minima)
    return -1


def lowest(nodes: Any, begins: Any, ends: Any) -> float:
    """The smallest positive weight among the leaves of some ranges, each from begin up to end; or infinity."""
    ranges = zip(begins.tolist(), ends.tolist(), strict=True)
    return min((weight for b, e in ranges for weight in nodes[b:e].tolist() if weight > 0), default=math.inf)


def cover(nodes: Any, offsets: list[int], begins: Any, ends: Any) -> tuple[list[int], list[float]]:
    """Cut ranges of leaves into as few nodes as possible, from left to right: their places, and the running sum."""
    places, until, total = list[int](), list[float](), 0.0
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        at = begin
        while at < end:
            sizes = [FANOUT**level for level in range(len(offsets))]
            level = max(k for k, size in enumerate(sizes) if at % size == 0 and at + size <= end)
            places.append(offsets[level] + at // sizes[level])
            total += float(nodes[places[-1]])
            until.append(total)
            at += sizes[level]
    return places, until


def find(nodes: Any, offsets: list[int], places: Any, until: Any, masses: Any) -> tuple[list[int], int]:
    """The leaf whose interval holds each mass, among those below some nodes, as :func:`cover` lists them.

    The intervals of these nodes lie side by side and start at 0: node i's ends at ``until[i]``. So the masses of a
    range go from 0 up to its own weight, and what lies outside it does not matter. The second number is -1, or the
    index of the first mass that is not in [0, until[-1]).
    """
    starts, found = [0.0, *until], list[int]()
    for i, mass in enumerate(masses.tolist()):
        if not 0.0 <= mass < starts[-1]:
            return found, i
        which = next(which for which in range(len(until)) if mass < until[which])
        place, start = int(places[which]), starts[which]
        top = max(level for level in range(len(offsets)) if offsets[level] <= place)
        node = place - offsets[top]
        for level in range(top - 1, -1, -1):
            first = offsets[level] + node * FANOUT
            weights = nodes[first : first + FANOUT].tolist()
            child, last = 0, max(k for k in range(FANOUT) if weights[k] > 0)
            while child < last and start + weights[child] <= mass:
                start += weights[child]
                child += 1
            node = node * FANOUT + child
        found.append(node)
    return found, -1
