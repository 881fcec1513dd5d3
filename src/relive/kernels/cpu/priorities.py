"""Drawing: the names of ``reference/priorities.py`` and, to the bit, its results.

In order: the sum tree; random numbers and permutations; draws by priority, and changes of priorities; uniform draws of
rows that can be drawn.

A batch takes one compiled call, and the memory is one handle (:mod:`relive.kernels.cpu.jit`). Most of the time goes
into cache misses. So a loop first asks for the cache lines of all rows of the batch, and the next loop uses them.

The place of a row is also the number of its leaf, and the position of its error. It is below N * R, which fits memory,
so products with 8 children or with the bytes of a row stay far below 2**63. No index here is ever negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..reference.priorities import (
    ALL_RATED,
    ALPHA,
    EPS,
    FANOUT,
    LARGEST,
    LARGEST_ERROR,
    MANY,
    MASK,
    PATIENCE,
    RATED,
    RATED_LARGEST,
    RATED_START,
    UNUSUAL,
    Floats,
    Priorities,
    heaviest,
)
from ..tables import COMPLETED, COUNT, DRAWABLE, HEAD, HISTORY, LENGTH, RingArrays
from .jit import addressed, f32, fence, fetch, jit, mix, open_ring, prefetch, strided, vector_of
from .ring import can_draw, oldest, place_of, row_at
from .rows import numbers_of

__all__ = [
    "anchors",
    "draw",
    "draw_weighted",
    "ids_of",
    "key",
    "live",
    "magnitudes",
    "masses",
    "note_drawable",
    "permutation",
    "powers",
    "rate",
    "rate_sequences",
    "rate_tensors",
    "reduce_errors",
    "set_errors",
    "tree_cover",
    "tree_find",
    "tree_get",
    "tree_lowest",
    "tree_set",
    "tree_shares",
    "uniform",
    "uniforms",
    "window",
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
    """See :func:`relive.kernels.reference.priorities.tree_set`."""
    # one value for all: i * 0 reads it again and again
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
            # summed from left to right, starting at 0: so a node depends on its leaves alone, and never drifts
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
    # leaves have no minima, so ``minima`` begins with the first inner node
    changed = minima[place - inner] != low
    minima[place - inner] = low
    return changed


@jit
def tree_get(nodes: Doubles, size: int, positions: Ints, out: Doubles) -> int:
    """See :func:`relive.kernels.reference.priorities.tree_get`."""
    for i in range(positions.size):
        if not 0 <= positions[i] < size:
            return i
        out[i] = nodes[_u64(positions[i])]
    return -1


@jit
def tree_shares(nodes: Doubles, size: int, positions: Ints, total: float, out: Doubles) -> float:
    """See :func:`relive.kernels.reference.priorities.tree_shares`."""
    tree_get(nodes, size, positions, out)
    lowest = np.inf
    for i in range(out.size):
        out[i] /= total
        lowest = min(lowest, out[i])
    return lowest


@jit
def tree_lowest(nodes: Doubles, offsets: Offsets, minima: Doubles, begins: Ints, ends: Ints) -> float:
    """See :func:`relive.kernels.reference.priorities.tree_lowest`: whole blocks are looked up in the levels above."""
    lowest = np.inf
    for i in range(begins.size):
        # an empty or inverted range becomes an empty one: unsigned numbers cannot go below 0
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
    """See :func:`relive.kernels.reference.priorities.magnitudes`."""
    for i in range(values.size):
        size = abs(values[i])
        if not size <= limit:
            return i
        out[i] = size
    return -1


@jit
def tree_cover(nodes: Doubles, offsets: Offsets, begins: Ints, ends: Ints, places: Ints, until: Doubles) -> int:
    """See :func:`relive.kernels.reference.priorities.tree_cover`: up on the left of a range, down on its right."""
    count, total, root = 0, 0.0, offsets.size - 1
    for i in range(begins.size):
        begin, end, level, size = _u64(begins[i]), _u64(max(ends[i], begins[i])), 0, _u64(1)
        while begin < end:
            # up while a larger node begins here and ends within the range
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
    """See :func:`relive.kernels.reference.priorities.tree_find`."""
    total, root = until[until.size - 1] if until.size else 0.0, offsets.size - 1
    for i in range(masses.size):
        if not 0.0 <= masses[i] < total:
            return i
    partly = until.size > 1 or (until.size == 1 and places[0] < _i64(offsets[root]))
    starts, tops = np.zeros(masses.size), np.zeros(masses.size if partly else 0, np.int64)
    out[:] = 0
    if partly:
        for i in range(_u64(masses.size)):
            # masses are below the total, so ``which`` is below the number of nodes
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
                # selected rather than jumped to: nobody can predict which child it is
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


DRAWN = 256
"""How many numbers of a permutation are drawn at once."""


def permutation(n: int, seed: int, counter: int) -> Tensor:
    """See :func:`relive.kernels.reference.priorities.permutation`."""
    order = torch.empty(n, dtype=torch.int64)
    _permutation(np.uint64(seed & MASK), np.uint64(counter), order.numpy())
    return order


@jit
def key(seed: Any, counter: Any) -> Any:
    """See :func:`relive.kernels.reference.priorities.key`; ``seed`` is uint64."""
    # the golden ratio times 2**64, the increment of splitmix64; uint64 wraps around
    return mix(mix(seed) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(counter))


@jit
def uniform(stream: Any, number: Any) -> Any:
    """See :func:`relive.kernels.reference.priorities.uniform`."""
    # the upper 53 bits, which a float64 holds exactly, times 2**-53: in [0, 1)
    return np.float64(mix(stream + np.uint64(0x9E3779B97F4A7C15) * np.uint64(number)) >> np.uint64(11)) * 2.0**-53


@jit
def uniforms(stream: Any, out: NDArray[np.float64]) -> None:
    """Numbers 1, 2, ... of a stream, each as :func:`relive.kernels.reference.priorities.uniform`."""
    state = stream
    for i in range(out.size):
        state += np.uint64(0x9E3779B97F4A7C15)
        out[i] = np.float64(mix(state) >> np.uint64(11)) * 2.0**-53


@jit
def masses(stream: Any, stratified: bool, total: float, below: float, out: NDArray[np.float64]) -> None:
    """See :func:`relive.kernels.reference.priorities.masses`."""
    uniforms(stream, out)
    for i in range(out.size):
        # mass i lies in part i of B; rounding must not reach the total, hence ``below``
        u = (np.float64(i) + out[i]) / np.float64(out.size) if stratified else out[i]
        out[i] = min(u * total, below)


@jit
def _permutation(seed: Any, counter: Any, order: NDArray[np.int64]) -> None:
    """Draw number n - i is the place that swaps with place i; drawn in blocks, which LLVM vectorizes."""
    golden, picks = np.uint64(0x9E3779B97F4A7C15), np.empty(DRAWN, np.int64)
    for i in range(order.size):
        order[i] = i
    first, high = key(seed, counter), order.size
    while high > 1:  # the places below are still to be swapped, the last one first
        count = min(DRAWN, high - 1)
        for k in range(count):
            state = first + np.uint64(order.size - high + 1 + k) * golden
            # high - k places are left, and uniform is below 1: so the pick is one of them
            picks[k] = np.int64(np.float64(mix(state) >> np.uint64(11)) * 2.0**-53 * np.float64(high - k))
        for k in range(count):
            i, j = high - 1 - k, picks[k]
            order[i], order[j] = order[j], order[i]
        high -= count


INT64, FLOAT32, FLOAT64, BOOL = 1 << 16 | 64 << 8, 1 << 16 | 32 << 8 | 2, 1 << 16 | 64 << 8 | 2, 1 << 16 | 8 << 8 | 6
"""DLPack's names of these dtypes: one number, of so many bits, kDLInt, kDLFloat or kDLBool."""
_UNUSUAL, _LARGEST_ERROR = UNUSUAL, LARGEST_ERROR


@jit
def _opened(handle: Ints) -> Priorities:
    """The memory behind a handle; the numbers are the positions of :class:`Priorities`'s members."""
    return Priorities(
        vector_of(handle, 0, np.float64),
        vector_of(handle, 1, np.uint64),
        vector_of(handle, 2, np.float64),
        vector_of(handle, 3, f32),
        vector_of(handle, 4, np.float64),
        open_ring(vector_of(handle, 5, np.int64)),
        vector_of(handle, 6, np.float64),
    )


@jit
def powers(errors: Floats, alpha: float, eps: float, out: Doubles) -> None:
    """See :func:`relive.kernels.reference.priorities.powers`."""
    for i in range(errors.size):
        out[i] = (np.float64(errors[i]) + eps) ** alpha


@jit
def draw_weighted(
    handle: Ints, key: Any, stratified: bool, beta: float, lowest: float, tops: Ints, until: Doubles,
    places: Ints, probability: Doubles, weight: Floats,
) -> bool:  # fmt: skip
    """See :func:`relive.kernels.reference.priorities.draw_weighted`."""
    total = until[until.size - 1] if until.size else 0.0
    if not total > 0.0:
        return False
    memory = _opened(handle)
    wanted = np.empty(places.size)
    masses(key, stratified, total, np.nextafter(total, 0.0), wanted)
    tree_find(memory.nodes, memory.offsets, tops, until, wanted, places)
    rows, width = memory.ring.memory, memory.ring.memory.shape[1]
    for i in range(places.size):  # a view reads two rows of each next; they come while the weights are computed
        fetch(rows, places[i] * width, 2 * width)
    # probabilities; the least of the batch, unless that of the whole buffer is given
    least = tree_shares(memory.nodes, memory.errors.size, places, total, probability)
    if lowest > 0.0:
        least = lowest / total
    for i in range(places.size):
        weight[i] = (probability[i] / least) ** -beta
    return True


@jit
def _set(memory: Priorities, places: Ints, sizes: Floats, weights: Doubles) -> None:
    """Write the errors and weights of rows, and all sums that follow from them. Of several for one row the last stays.

    The first ``count`` of the ``walkers`` are the places whose weight changed.
    """
    walkers, count = np.empty(places.size, np.uint64), _u64(0)
    if memory.undo.size:
        _note_rated(memory, places)
    for i in range(places.size):
        place = _u64(places[i])
        changed = memory.nodes[place] != weights[i]
        memory.nodes[place], memory.errors[place] = weights[i], sizes[i]
        # never lowered: new rows get the largest error that was ever set
        memory.facts[LARGEST] = max(memory.facts[LARGEST], np.float64(sizes[i]))
        walkers[count] = place
        count += _u64(changed)
    climb(memory.nodes, memory.offsets, memory.minima, walkers, count)
    if memory.undo.size:
        fence()  # all is changed before the notes are given up
        memory.undo[RATED] = 0.0


@jit
def _note_rated(memory: Priorities, places: Ints) -> None:
    """See :func:`relive.kernels.reference.priorities.note_rated`."""
    undo = memory.undo
    undo[RATED_LARGEST] = memory.facts[LARGEST]
    fits = RATED_START + 2 * places.size <= undo.size
    for i in range(places.size if fits else 0):
        place = _u64(places[i])
        # a place is below 2**53, so a float64 holds it
        undo[RATED_START + 2 * i], undo[RATED_START + 2 * i + 1] = np.float64(place), memory.errors[place]
    fence()  # the notes are whole before their number says that they count,
    undo[RATED] = np.float64(places.size) if fits else ALL_RATED
    fence()  # and it does so before anything changes


@jit
def _weigh(memory: Priorities, sizes: Floats, weights: Doubles) -> int:
    """The priorities of errors; -1, or the entry of the first that is too large."""
    limit = heaviest_of(memory.errors.size)
    powers(sizes, memory.facts[ALPHA], memory.facts[EPS], weights)
    for i in range(weights.size):
        if not weights[i] <= limit:
            return i
    return -1


@jit
def _expect(memory: Priorities, place: int) -> None:
    """Ask for the cache lines that :func:`_set` will change: a leaf, its error, and two levels of nodes above.

    Node place // 8 of level 1 is the leaf's parent, and node place // 64 of level 2 is the parent of that. A tree with
    fewer levels has a harmless request for a line near its root.
    """
    prefetch(memory.nodes, place)
    prefetch(memory.errors, place)
    last = memory.offsets.size - 1
    prefetch(memory.nodes, memory.offsets[min(1, last)] + _u64(place) // _WIDTH)
    prefetch(memory.nodes, memory.offsets[min(2, last)] + _u64(place) // (_WIDTH * _WIDTH))


@jit
def set_errors(handle: Ints, places: Ints, sizes: Floats) -> int:
    """See :func:`relive.kernels.reference.priorities.set_errors`."""
    memory = _opened(handle)
    for i in range(places.size):
        _expect(memory, places[i])
    weights = np.empty(places.size)
    bad = _weigh(memory, sizes, weights)
    if bad < 0:
        _set(memory, places, sizes, weights)
    return bad


@jit
def rate(
    handle: Ints, count: int, index_at: int, index_stride: int, errors_at: int, errors_stride: int, wide: bool
) -> int:
    """See :func:`relive.kernels.reference.priorities.rate`.

    ``index_at`` is the address of ``count`` int64, ``errors_at`` that of as many float64 if ``wide``, else float32.
    Strides count elements: 1 if they follow one another, 0 if all are the same one. Errors come from tensors of the
    caller, so element i lies within them, at i * stride.
    """
    memory = _opened(handle)
    indices = addressed(index_at, count * index_stride, np.int64)
    # both are views, made without reading
    doubles = addressed(errors_at, count * errors_stride, np.float64)  # only one of the two is what it seems
    singles = addressed(errors_at, count * errors_stride, f32)
    ring = memory.ring
    envs, inverse = ring.state.shape[0], 1.0 / ring.rows
    places, sizes, alive = np.empty(count, np.int64), np.empty(count, f32), 0  # the first ``alive`` entries count
    for i in range(count):
        index, at = indices[i * index_stride], i * errors_stride
        size = abs(doubles[at]) if wide else abs(np.float64(singles[at]))
        if index < 0 or not size <= _LARGEST_ERROR:
            return _UNUSUAL
        # an index is number * N + env, and unsigned divisions are quicker
        # index >= 0 was checked, so nothing changes by reading it as unsigned
        number, e = _i64(_u64(index) // _u64(envs)), _i64(_u64(index) % _u64(envs))
        if number >= ring.state[e, HEAD]:
            return _UNUSUAL
        if number < oldest(e, ring):
            continue
        places[alive], sizes[alive] = place_of(number, e, ring.rows, inverse), size
        _expect(memory, places[alive])
        alive += 1
    places, sizes, weights = places[:alive], sizes[:alive], np.empty(alive)
    if _weigh(memory, sizes, weights) >= 0:
        return _UNUSUAL
    for i in range(alive):
        # a leaf above 0 proves that the row can be drawn, so the row itself is not read
        if not memory.nodes[_u64(places[i])] > 0.0:
            return _UNUSUAL
    _set(memory, places, sizes, weights)
    return count - alive


def _rate_tensors(handle: Ints, describing: int, index: int, errors: int) -> int:
    """See :func:`relive.kernels.reference.priorities.rate_tensors`. The caller holds both tensors."""
    indices, whole, count, stride = numbers_of(describing, index)
    sizes, dtype, size, step = numbers_of(describing, errors)
    if indices == 0 or sizes == 0 or whole != INT64 or (dtype != FLOAT32 and dtype != FLOAT64):
        return _UNUSUAL
    if count.size != 1 or size.size != 1 or size[0] != count[0] or count[0] > MANY:
        return _UNUSUAL
    return rate(handle, count[0], indices, stride[0], sizes, step[0], dtype == FLOAT64)


rate_tensors = jit(_rate_tensors, nogil=False)


def _rate_sequences(
    handle: Ints, describing: int, index: int, errors: int, mask: int, time_first: bool, eta: float
) -> int:
    """See :func:`relive.kernels.reference.priorities.rate_sequences`. The caller holds the three tensors."""
    indices, whole, count, stride = numbers_of(describing, index)
    values, dtype, shape, apart = numbers_of(describing, errors)
    real, kind, marks, between = numbers_of(describing, mask)
    if indices == 0 or values == 0 or real == 0 or whole != INT64 or kind != BOOL:
        return _UNUSUAL
    if (dtype != FLOAT32 and dtype != FLOAT64) or count.size != 1 or shape.size != 2 or marks.size != 2:
        return _UNUSUAL
    # which axis is the batch, and which is time
    item, time = (1, 0) if time_first else (0, 1)
    if shape[item] != count[0] or count[0] > MANY or marks[0] != shape[0] or marks[1] != shape[1]:
        return _UNUSUAL
    sizes = np.empty(count[0], f32)
    for b in range(sizes.size):
        # bool has one byte, so strides in numbers are strides in bytes here; floats have 4 or 8
        counts = strided(real + b * between[item], shape[time], between[time], np.uint8)
        if dtype == FLOAT64:
            doubles = strided(values + 8 * b * apart[item], shape[time], apart[time], np.float64)
            size = _reduced(doubles, counts, eta)
        else:
            size = _reduced(strided(values + 4 * b * apart[item], shape[time], apart[time], np.float32), counts, eta)
        if not size <= _LARGEST_ERROR:
            return _UNUSUAL
        sizes[b] = size
    return rate(handle, count[0], indices, stride[0], sizes.ctypes.data, 1, False)


@jit
def _reduced(errors: Any, counts: Any, eta: float) -> float:
    """The error of a sequence: :func:`relive.kernels.reference.priorities.reduce_errors`; NaN if one is too large."""
    largest, total, count, bad = 0.0, 0.0, 0, False
    for t in range(errors.size):
        if counts[t]:
            size = abs(np.float64(errors[t]))
            bad |= not size <= _LARGEST_ERROR
            largest, total, count = max(largest, size), total + size, count + 1
    # the caller refuses NaN, as it refuses an error that is too large
    return np.nan if bad else eta * largest + (1 - eta) * (total / max(count, 1))


@jit
def reduce_errors(errors: Any, mask: Any, eta: float, out: Floats) -> None:
    """See :func:`relive.kernels.reference.priorities.reduce_errors`; no error is too large."""
    for b in range(out.size):
        out[b] = _reduced(errors[b], mask[b], eta)


rate_sequences = jit(_rate_sequences, nogil=False)


@jit
def note_drawable(handle: Ints, places: Ints, drawable: Any, error: float, weight: float) -> None:
    """See :func:`relive.kernels.reference.priorities.note_drawable`."""
    memory = _opened(handle)
    walkers, count = np.empty(places.size, np.uint64), _u64(0)
    for i in range(places.size):
        place, given = _u64(places[i]), np.float64(drawable[i]) * weight
        changed = memory.nodes[place] != given
        memory.nodes[place], memory.errors[place] = given, error
        walkers[count] = place
        count += _u64(changed)
    climb(memory.nodes, memory.offsets, memory.minima, walkers, count)


@jit
def draw(ring_handle: Ints, key: Any, newest: int, places: Ints) -> bool:
    """See :func:`relive.kernels.reference.priorities.draw`."""
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
        # attempt a of row i is number 1 + i + a * B of the stream, whatever the other rows do
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
        # another stream than that of the attempts, so that the row is not one that has missed
        z = mix(mix(key) + np.uint64(i))
        wanted = np.int64(np.float64(z >> np.uint64(11)) * 2.0**-53 * np.float64(found))
        found = 0
    return False


@jit
def window(ring_handle: Ints, newest: int, first: Ints, until: Ints) -> int:
    """See :func:`relive.kernels.reference.priorities.window`."""
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
            # a row that is not complete has the number of those completed before it, as -1 - s
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
    """See :func:`relive.kernels.reference.priorities.ids_of`."""
    ring = open_ring(ring_handle)
    envs, inverse = ring.state.shape[0], 1.0 / ring.rows
    for i in range(places.size):
        if not 0 <= places[i] < envs * ring.rows:
            return i
        e, _, number = row_at(places[i], inverse, ring)
        # the public index: it stays the same however often the ring wraps
        index[i] = number * envs + e
    return -1


@jit
def live(ring_handle: Ints, index: Ints, places: Ints) -> int:
    """See :func:`relive.kernels.reference.priorities.live`."""
    ring = open_ring(ring_handle)
    envs, inverse = ring.state.shape[0], 1.0 / ring.rows
    for i in range(index.size):
        # a negative index gives some env and a negative number, and is refused below
        e, number = index[i] % envs, index[i] // envs
        if index[i] < 0 or number >= ring.state[e, HEAD]:
            places[i:] = -1  # so that no caller reads memory that was never written
            return i
        place, there = place_of(number, e, ring.rows, inverse), number >= oldest(e, ring)
        places[i] = place if there and can_draw(place, number, e, ring) else -1
    return -1


@jit
def anchors(ring_handle: Ints, out: Ints) -> int:
    """See :func:`relive.kernels.reference.priorities.anchors`."""
    ring = open_ring(ring_handle)
    found, inverse = 0, 1.0 / ring.rows
    for e in range(ring.state.shape[0]):
        for number in range(oldest(e, ring), ring.state[e, HEAD]):
            place = place_of(number, e, ring.rows, inverse)
            if can_draw(place, number, e, ring):
                out[found] = place
                found += 1
    return found
