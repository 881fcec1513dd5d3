"""The sum tree, spelt out: where its nodes lie, how they are summed, and which leaf a mass falls on.

All nodes lie in one array (float64), the leaves first, then level by level up to the root. Level l starts at
``offsets[l]``; node j of a level is the sum of nodes 8j .. 8j + 7 of the level below, added from left to right, to 0.
Levels are padded with zeros to whole blocks of 8. ``minima``, empty until somebody asks for it, holds the smallest
positive leaf under each node above the leaves, or infinity, in the same places counted from ``offsets[1]``.

A node stands for an interval of mass and its children cut it up, in order: the root's is [0, total), a child's starts
where the one before it ends, at (start + first child + second child + ...), except that the last positive child ends
where its parent does. So the intervals of the leaves cover [0, total) without gap or overlap whatever rounding does,
and only a leaf of positive weight has one that is not empty. Where only some ranges of leaves count, the nodes that
make them up take the place of the root: their intervals lie side by side, from 0 up to the sum of their weights.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FANOUT",
    "heaviest",
    "magnitudes",
    "tree_build",
    "tree_cover",
    "tree_find",
    "tree_get",
    "tree_lowest",
    "tree_offsets",
    "tree_set",
    "tree_shares",
]

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Offsets = NDArray[np.uint64]

FANOUT = 8
"""Children per node: one cache line of float64."""

_LARGEST = sys.float_info.max


def heaviest(size: int) -> float:
    """The largest weight that ``size`` leaves can all have without an infinite sum anywhere."""
    return _LARGEST / (2.0 * size)


def tree_offsets(size: int) -> Offsets:
    """Where each level of a tree of ``size`` leaves starts, ``[levels + 1]``; the last is the place of the root."""
    starts, nodes = [0], size
    while nodes > 1 or len(starts) == 1:
        nodes = -(-nodes // FANOUT)
        starts.append(starts[-1] + nodes * FANOUT)
    return np.array(starts, np.uint64)


def tree_build(nodes: Doubles, offsets: Offsets, minima: Doubles) -> None:
    """Sum every node anew from the leaves; the minima too, if there are any."""
    starts = [int(start) for start in offsets]
    for level, (below, above) in enumerate(pairwise(starts)):
        blocks = nodes[below:above].reshape(-1, FANOUT)
        sums = np.zeros(len(blocks))
        for k in range(FANOUT):
            sums += blocks[:, k]
        nodes[above : above + len(sums)] = sums
        if minima.size:
            lows = np.where(blocks > 0, blocks, np.inf)
            if level:
                lows = minima[below - starts[1] : above - starts[1]].reshape(-1, FANOUT)
            minima[above - starts[1] : above - starts[1] + len(sums)] = lows.min(1)


def tree_set(nodes: Doubles, offsets: Offsets, minima: Doubles, size: int, positions: Ints, values: Doubles) -> int:
    """Give leaves their weights, in order, so that the last of several for one leaf stays, and sum all parents anew.

    ``values`` has one entry per position, or one for all. Returns -1, or the index in ``positions`` of the first entry
    that is no leaf or has a weight that is not in [0, heaviest(size)]; then nothing is written.
    """
    weights = np.broadcast_to(values, positions.shape).tolist()
    for i, (position, weight) in enumerate(zip(positions.tolist(), weights, strict=True)):
        if not (0 <= position < size and 0.0 <= weight <= heaviest(size)):
            return i
    for position, weight in zip(positions.tolist(), weights, strict=True):
        nodes[position] = weight + 0.0  # -0.0 becomes 0.0
    tree_build(nodes, offsets, minima)
    return -1


def tree_get(nodes: Doubles, size: int, positions: Ints, out: Doubles) -> int:
    """The weights of leaves; returns -1, or the index of the first position that is none."""
    for i, position in enumerate(positions.tolist()):
        if not 0 <= position < size:
            return i
        out[i] = nodes[position]
    return -1


def tree_shares(nodes: Doubles, size: int, positions: Ints, total: float, out: Doubles) -> float:
    """The weights of leaves, which exist, as parts of ``total``; returns the smallest."""
    tree_get(nodes, size, positions, out)
    out /= total
    return float(out.min(initial=np.inf))


def tree_lowest(nodes: Doubles, offsets: Offsets, minima: Doubles, begins: Ints, ends: Ints) -> float:
    """The smallest positive weight among the leaves of some ranges, which exist, each from begin up to end; or inf."""
    assert minima.size == len(nodes) - int(offsets[1])  # read by the fast twin alone
    lows = [float("inf")]
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        lows += [weight for weight in nodes[begin:end].tolist() if weight > 0]
    return min(lows)


def magnitudes(values: Doubles, limit: float, out: NDArray[np.float32]) -> int:
    """|values|; returns -1, or the index of the first that is above ``limit`` or no number."""
    for i, value in enumerate(values.tolist()):
        if not abs(value) <= limit:
            return i
        out[i] = abs(value)
    return -1


def tree_cover(nodes: Doubles, offsets: Offsets, begins: Ints, ends: Ints, places: Ints, until: Doubles) -> int:
    """Cut ranges of leaves into as few nodes as possible, from left to right; returns how many.

    A range goes from ``begin`` up to, not including, ``end``; it takes at most 2 (FANOUT - 1) nodes of each level.
    ``places`` says where the nodes lie and ``until`` sums their weights up, so its last entry is that of all ranges.
    """
    count, total = 0, 0.0
    for at, end in zip(begins.tolist(), ends.tolist(), strict=True):
        begin = at
        while begin < end:
            level = max(
                level for level in range(len(offsets)) if begin % FANOUT**level == 0 and begin + FANOUT**level <= end
            )
            place = int(offsets[level]) + begin // FANOUT**level
            total += float(nodes[place])
            places[count], until[count] = place, total
            count, begin = count + 1, begin + FANOUT**level
    return count


def tree_find(nodes: Doubles, offsets: Offsets, places: Ints, until: Doubles, masses: Doubles, out: Ints) -> int:
    """The leaf whose interval holds each mass, among those below some nodes, as :func:`tree_cover` lists them.

    The intervals of these nodes lie side by side and start at 0: node i's ends at ``until[i]``. So the masses of a
    range go from 0 up to its own weight, and what lies outside it does not matter. Returns -1, or the index of the
    first mass that is not in [0, until[-1]).
    """
    starts = [0.0, *until.tolist()]
    for i, mass in enumerate(masses.tolist()):
        if not 0.0 <= mass < starts[-1]:
            return i
        which = next(which for which in range(len(until)) if mass < until[which])
        place, start = int(places[which]), starts[which]
        top = max(level for level in range(len(offsets)) if offsets[level] <= place)
        node = place - int(offsets[top])
        for level in range(top - 1, -1, -1):
            first = int(offsets[level]) + node * FANOUT
            weights = nodes[first : first + FANOUT].tolist()
            child, last = 0, max(k for k in range(FANOUT) if weights[k] > 0)
            while child < last and start + weights[child] <= mass:
                start += weights[child]
                child += 1
            node = node * FANOUT + child
        out[i] = node
    return -1
