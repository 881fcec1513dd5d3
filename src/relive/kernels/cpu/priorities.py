"""Drawing by priority and changing priorities: reference/priorities.py's names and, to the bit, results.

A batch takes one compiled call, and the memory is one handle (:mod:`relive.kernels.cpu.handles`). Most of the time goes
into cache misses. So a loop first asks for the cache lines of all rows of the batch, and the next loop uses them.

The place of a row is also the number of its leaf, and the position of its error. It is below N * R, which fits memory,
so products with 8 children or with the bytes of a row stay far below 2**63. No index here is ever negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.priorities import (
    ALL_RATED,
    ALPHA,
    EPS,
    LARGEST,
    LARGEST_ERROR,
    MANY,
    RATED,
    RATED_LARGEST,
    RATED_START,
    UNUSUAL,
    Floats,
    Priorities,
)
from ..reference.tree import FANOUT
from ..ring_state import HEAD
from .handles import Ints, open_ring, vector_of
from .jit import addressed, f32, fence, fetch, jit, prefetch, strided
from .places import oldest, place_of
from .random import masses
from .tensors import numbers_of
from .tree import Doubles, climb, heaviest_of, tree_find, tree_shares

__all__ = [
    "draw_weighted",
    "note_drawable",
    "powers",
    "rate",
    "rate_sequences",
    "rate_tensors",
    "reduce_errors",
    "set_errors",
]

INT64, FLOAT32, FLOAT64, BOOL = 1 << 16 | 64 << 8, 1 << 16 | 32 << 8 | 2, 1 << 16 | 64 << 8 | 2, 1 << 16 | 8 << 8 | 6
"""What DLPack calls these dtypes: one number, of so many bits, kDLInt, kDLFloat or kDLBool."""
_i64: Any = np.int64
_u64: Any = np.uint64
_WIDTH: Any = np.uint64(FANOUT)
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
    item, time = (1, 0) if time_first else (0, 1)
    if shape[item] != count[0] or count[0] > MANY or marks[0] != shape[0] or marks[1] != shape[1]:
        return _UNUSUAL
    sizes = np.empty(count[0], f32)
    for b in range(sizes.size):
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
