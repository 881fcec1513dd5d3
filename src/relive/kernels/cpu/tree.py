"""The sum tree: reference/tree.py's names and, to the bit, results.

Batches go through the tree level by level, all walkers before the next level, so that their cache misses overlap; the
next level's block is prefetched. What a walker does in a block has no branches, since each would be mispredicted half
the time, and places are unsigned, since numba tests signed ones for being negative.

A place counts nodes from the first leaf of the tree on; a node's number counts from the start of its level, at
``offsets[level]``. The children of node j are the nodes 8 j to 8 j + 7 of the level below, one cache line. All of these
are below the number of nodes, at most 8 / 7 of the leaves and a few blocks, so none overflows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.tree import FANOUT, heaviest
from .jit import jit, prefetch

__all__ = [
    "magnitudes",
    "tree_cover",
    "tree_find",
    "tree_get",
    "tree_lowest",
    "tree_set",
    "tree_shares",
]

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Offsets = NDArray[np.uint64]

_i64: Any = np.int64
_u64: Any = np.uint64
_WIDTH: Any = np.uint64(FANOUT)
_ZERO: Any = np.uint64(0)
heaviest_of = jit(heaviest)


@jit
def tree_set(nodes: Doubles, offsets: Offsets, minima: Doubles, size: int, positions: Ints, values: Doubles) -> int:
    """See :func:`relive.kernels.reference.tree.tree_set`."""
    limit, each = heaviest_of(size), _i64(values.size > 1)
    for i in range(positions.size):
        if not (0 <= positions[i] < size and 0.0 <= values[i * each] <= limit):
            return i
    walkers = np.empty(positions.size, np.uint64)
    count = _ZERO
    for i in range(_u64(positions.size)):
        place, weight = _u64(positions[i]), values[i * _u64(each)] + 0.0  # -0.0 becomes 0.0
        changed = nodes[place] != weight
        nodes[place] = weight
        walkers[count] = place
        count += _u64(changed)
    climb(nodes, offsets, minima, walkers, count)
    return -1


@jit
def climb(nodes: Doubles, offsets: Offsets, minima: Doubles, walkers: Any, count: Any) -> None:
    """Sum all nodes anew above ``count`` leaves that changed; ``walkers``, uint64, holds their places, and is used up.

    A walker goes from a node to its parent. One whose node keeps its value ends there, and so do all but the first of
    those that meet in one node.
    """
    for level in range(offsets.size - 1):
        below, above, staying = offsets[level], offsets[level + 1], _ZERO
        for i in range(count):
            node = walkers[i] // _WIDTH
            first, total = below + node * _WIDTH, 0.0
            for k in range(_WIDTH):
                total += nodes[first + k]
            changed = nodes[above + node] != total
            nodes[above + node] = total
            if minima.size:
                changed |= _note_minimum(nodes, minima, offsets[1], first, above + node)
            walkers[staying] = node
            staying += _u64(changed)
        count = staying


@jit
def _note_minimum(nodes: Doubles, minima: Doubles, inner: Any, first: Any, place: Any) -> bool:
    """Find a node's minimum from those of its children, which are leaves or have minima; whether it is a new one."""
    low = np.inf
    if first < inner:
        for k in range(_WIDTH):
            weight = nodes[first + k]
            weight = weight if weight > 0.0 else np.inf  # selected rather than jumped to: nobody can predict it
            low = weight if weight < low else low
    else:
        for k in range(_WIDTH):
            weight = minima[first - inner + k]
            low = weight if weight < low else low
    changed = minima[place - inner] != low
    minima[place - inner] = low
    return changed


@jit
def tree_get(nodes: Doubles, size: int, positions: Ints, out: Doubles) -> int:
    """See :func:`relive.kernels.reference.tree.tree_get`."""
    for i in range(positions.size):
        if not 0 <= positions[i] < size:
            return i
        out[i] = nodes[_u64(positions[i])]
    return -1


@jit
def tree_shares(nodes: Doubles, size: int, positions: Ints, total: float, out: Doubles) -> float:
    """See :func:`relive.kernels.reference.tree.tree_shares`."""
    tree_get(nodes, size, positions, out)
    lowest = np.inf
    for i in range(out.size):
        out[i] /= total
        lowest = min(lowest, out[i])
    return lowest


@jit
def tree_lowest(nodes: Doubles, offsets: Offsets, minima: Doubles, begins: Ints, ends: Ints) -> float:
    """See :func:`relive.kernels.reference.tree.tree_lowest`: whole blocks are looked up in the levels above."""
    lowest = np.inf
    for i in range(begins.size):
        low, high, level = _u64(begins[i]), _u64(max(ends[i], begins[i])), 0
        while low < high:
            while low < high and low % _WIDTH:
                lowest = min(lowest, _low_of(nodes, offsets, minima, level, low))
                low += _u64(1)
            while low < high and high % _WIDTH:
                high -= _u64(1)
                lowest = min(lowest, _low_of(nodes, offsets, minima, level, high))
            low, high, level = low // _WIDTH, high // _WIDTH, level + 1
    return lowest


@jit
def _low_of(nodes: Doubles, offsets: Offsets, minima: Doubles, level: int, node: Any) -> Any:
    """The smallest positive weight below a node of a level, or inf."""
    if level:
        return minima[offsets[level] - offsets[1] + node]
    return nodes[node] if nodes[node] > 0.0 else np.inf


@jit
def magnitudes(values: Doubles, limit: float, out: Any) -> int:
    """See :func:`relive.kernels.reference.tree.magnitudes`."""
    for i in range(values.size):
        size = abs(values[i])
        if not size <= limit:
            return i
        out[i] = size
    return -1


@jit
def tree_cover(nodes: Doubles, offsets: Offsets, begins: Ints, ends: Ints, places: Ints, until: Doubles) -> int:
    """See :func:`relive.kernels.reference.tree.tree_cover`: up the levels on the left of a range, down on its right."""
    count, total, root = 0, 0.0, offsets.size - 1
    for i in range(begins.size):
        begin, end, level, size = _u64(begins[i]), _u64(max(ends[i], begins[i])), 0, _u64(1)
        while begin < end:
            while level < root and begin % (size * _WIDTH) == _ZERO and begin + size * _WIDTH <= end:
                level, size = level + 1, size * _WIDTH
            while begin + size > end:
                level, size = level - 1, size // _WIDTH
            place = offsets[level] + begin // size
            total += nodes[place]
            places[count], until[count] = _i64(place), total
            count, begin = count + 1, begin + size
    return count


@jit
def tree_find(nodes: Doubles, offsets: Offsets, places: Ints, until: Doubles, masses: Doubles, out: Ints) -> int:
    """See :func:`relive.kernels.reference.tree.tree_find`."""
    total, root = until[until.size - 1] if until.size else 0.0, offsets.size - 1
    for i in range(masses.size):
        if not 0.0 <= masses[i] < total:
            return i
    partly = until.size > 1 or (until.size == 1 and places[0] < _i64(offsets[root]))
    starts, tops = np.zeros(masses.size), np.zeros(masses.size if partly else 0, np.int64)
    out[:] = 0
    if partly:
        for i in range(_u64(masses.size)):
            which = _i64(np.searchsorted(until, masses[i], side="right"))
            level = root
            while offsets[level] > _u64(places[which]):
                level -= 1
            starts[i] = until[which - 1] if which else 0.0
            out[i], tops[i] = places[which] - _i64(offsets[level]), level
    for level in range(root - 1, -1, -1):
        here, next_level = offsets[level], offsets[max(level - 1, 0)]
        # nodes from a file may hold anything: no walker leaves the nodes that have children, or the leaves
        most = (here - next_level) // _WIDTH - _u64(1) if level else offsets[1] - _u64(1)
        for i in range(_u64(masses.size)):
            if partly and level >= tops[i]:
                continue
            mass, edge = masses[i], starts[i]
            start, child = edge, _ZERO
            first = here + _u64(out[i]) * _WIDTH
            for k in range(_WIDTH):
                edge += nodes[first + k]
                passed = edge <= mass
                start = edge if passed else start
                child += _u64(passed)
            if child == _WIDTH:
                start, child = _last_child(nodes, first, starts[i])
            node = min(_u64(out[i]) * _WIDTH + child, most)
            starts[i], out[i] = start, _i64(node)
            prefetch(nodes, next_level + node * _WIDTH)
    return -1


@jit
def _last_child(nodes: Doubles, first: Any, start: Any) -> tuple[Any, Any]:
    """The start and the number of a block's last positive child, for a mass that rounding left beyond all of them."""
    last = 0
    for k in range(_WIDTH):
        if nodes[first + k] > 0.0:
            last = _i64(k)
    for k in range(_u64(last)):
        start += nodes[first + k]
    return start, _u64(last)
