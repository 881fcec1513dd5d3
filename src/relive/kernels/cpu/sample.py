"""Batches in one or two calls: the names of ``reference/sample.py`` and, to the bit, its results.

In a training, code that is not in the processor's caches costs several times what it costs in a loop. So a batch takes
one call, rather than one for each of its parts with Python in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.rows import FIELD_ROW_BYTES
from ..reference.sample import FIELD, LAYERS, ROWS, SOURCE, Draw
from ..reference.windows import FIRST, OTHERS, RANDOM, STRATEGY
from ..tables import UNFIT, DirectBatch
from .jit import (
    ENTRIES,
    Ints,
    address_t,
    addressed,
    fetch,
    inlined,
    jit,
    matrix_of,
    memcpy,
    open_ring,
    strided,
    vector_of,
)
from .priorities import draw, draw_weighted, key, masses, tree_find
from .rows import BYTES, adopt_field, numbers_of, release_gil, rows_at, split_rows, take_gil
from .windows import (
    gather_pairs,
    notes_of,
    open_steps,
    plan_goals,
    read_windows,
    relabel_windows,
    stack_places,
    windows,
)

__all__ = ["finish_goals", "sample_goals", "sample_sequences", "sample_stacks", "sample_windows"]

(
    DESCRIBE, LEND, ADOPT, RING, SEED, WEIGHTS, TOPS, UNTIL, WEIGHT_AT, PROBABILITY_AT, BATCH, TABLE, NAMES, STACKS,
    STACK_NAMES, NODES, OFFSETS, STEPS, STEP_NAMES, BLANK,
) = range(len(DirectBatch._fields))  # fmt: skip
"""The positions of :class:`relive.kernels.tables.DirectBatch`'s members."""


FORESEEN = 256
"""Bytes of a state that are loaded ahead; the processor itself loads what follows."""


@jit
def _draw_rows(direct: Ints, drawing: Draw, places: Ints, out: Any) -> bool:
    """See :func:`relive.kernels.reference.sample._draw_rows`."""
    _, newest, stratified, beta, lowest = drawing
    stream = _stream(direct, drawing)
    weights = vector_of(direct, WEIGHTS, np.int64)
    if weights.size == 0:
        if vector_of(direct, NODES, np.float64).size:
            return _draw_leaves(direct, stream, places)
        return draw(vector_of(direct, RING, np.int64), stream, newest, places)
    tops, until = vector_of(direct, TOPS, np.int64), vector_of(direct, UNTIL, np.float64)
    probability, weight = np.empty(places.size), np.empty(places.size, np.float32)
    if not draw_weighted(weights, stream, stratified, beta, lowest, tops, until, places, probability, weight):
        return False
    there, wide = out.ctypes.data, out.shape[1]
    # a row of the batch is ``wide`` bytes, a multiple of 16, so strides in numbers are exact
    singles = strided(there + direct[ENTRIES * WEIGHT_AT], places.size, wide // 4, np.float32)
    doubles = strided(there + direct[ENTRIES * PROBABILITY_AT], places.size, wide // 8, np.float64)
    for i in range(places.size):
        singles[i], doubles[i] = weight[i], probability[i]
    return True


@jit
def _draw_leaves(direct: Ints, stream: Any, places: Ints) -> bool:
    """See :func:`relive.kernels.reference.sample._draw_leaves`."""
    until, wanted = vector_of(direct, UNTIL, np.float64), np.empty(places.size)
    if not until[until.size - 1] > 0.0:
        return False
    total = until[until.size - 1]
    # the largest number below the total: a mass equal to it would belong to no leaf
    masses(stream, False, total, np.nextafter(total, 0.0), wanted)
    nodes, offsets = vector_of(direct, NODES, np.float64), vector_of(direct, OFFSETS, np.uint64)
    tree_find(nodes, offsets, vector_of(direct, TOPS, np.int64), until, wanted, places)
    return True


@inlined
def _rows_at(direct: Ints, rows: int) -> Any:
    """The memory of the tensor of bytes at an address."""
    return rows_at(direct[ENTRIES * DESCRIBE], rows)


@inlined
def _bytes_at(direct: Ints, memory: int) -> Any:
    """The memory of the tensor of bytes at an address, with one axis; empty if it is not in RAM."""
    data, dtype, shape, _ = numbers_of(direct[ENTRIES * DESCRIBE], memory)
    known = data != 0 and dtype == BYTES and shape.size == 1
    return addressed(data, shape[0] if known else 0, np.uint8)


@inlined
def _stream(direct: Ints, drawing: Draw) -> Any:
    """The stream of random numbers of a draw."""
    return key(vector_of(direct, SEED, np.uint64)[0], drawing[0])


@inlined
def _split(direct: Ints, rows: int, table: int, names: int, found: int) -> bool:
    """Make the tensors of packed rows, whose fields are the members ``table`` and ``names``."""
    describe, lend, adopt = direct[ENTRIES * DESCRIBE], direct[ENTRIES * LEND], direct[ENTRIES * ADOPT]
    return split_rows(describe, lend, adopt, rows, direct[ENTRIES * names], matrix_of(direct, table, np.int64), found)


def _sample_windows(direct: Ints, drawing: Draw, steps: int, gamma: float, rows: int, found: int) -> bool:
    """See :func:`relive.kernels.reference.sample.sample_windows`; ``direct`` is a handle. The caller holds ``rows``."""
    out = _rows_at(direct, rows)
    places, last = np.empty(out.shape[0], np.int64), np.empty(out.shape[0], np.int64)
    if not out.shape[0] or not _draw_rows(direct, drawing, places, out):
        return False
    windows(vector_of(direct, RING, np.int64), vector_of(direct, BATCH, np.int64), places, steps, gamma, out, last)
    return _split(direct, rows, TABLE, NAMES, found)


def _sample_stacks(
    direct: Ints, drawing: Draw, steps: int, gamma: float, depth: int, repeat: bool, rows: int, memory: int, found: int,
) -> bool:  # fmt: skip
    """See :func:`relive.kernels.reference.sample.sample_stacks`. The caller holds ``rows`` and ``memory``."""
    out, large, stacks = _rows_at(direct, rows), _bytes_at(direct, memory), matrix_of(direct, STACKS, np.int64)
    count = out.shape[0]
    # checked before anything is drawn: what follows writes by address
    if not count or large.size != count * depth * stacks[:, FIELD + FIELD_ROW_BYTES].sum():
        return False
    # all memory first: nothing may fail once the GIL is let go of
    ends, ring = np.empty(2 * count, np.int64), vector_of(direct, RING, np.int64)
    places, last, frames = ends[:count], ends[count:], np.empty((2 * count, depth), np.int64)
    if not _draw_rows(direct, drawing, places, out):
        return False
    windows(ring, vector_of(direct, BATCH, np.int64), places, steps, gamma, out, last)
    stack_places(ring, ends, depth, repeat, frames)
    if not _split(direct, rows, TABLE, NAMES, found):
        return False
    thread = release_gil()  # until the next call of a Python object, which is in _split_stacks
    _gather_stacks(stacks, frames, large.ctypes.data)
    take_gil(thread)
    _split_stacks(direct, stacks, count, depth, memory, found)
    return True


@jit
def _gather_stacks(stacks: Ints, frames: Ints, target: int) -> None:
    """Copy the stacks of all fields to the memory at ``target``. This raises nothing, so the GIL is taken again."""
    # two lines a field, obs and next_obs, which are gathered together
    for i in range(0, stacks.shape[0], 2):
        width = stacks[i, FIELD + FIELD_ROW_BYTES]
        source = addressed(stacks[i, SOURCE], (stacks[i, ROWS], width), np.uint8)
        gather_pairs(source, frames, addressed(target, (frames.size, width), np.uint8))
        # frames holds 2 * count * depth places: both stacks of the field
        target += frames.size * width


@inlined
def _split_stacks(direct: Ints, stacks: Ints, count: int, depth: int, memory: int, found: int) -> None:
    """Make the tensors of stacks."""
    lend, adopt, names, start = direct[ENTRIES * LEND], direct[ENTRIES * ADOPT], direct[ENTRIES * STACK_NAMES], 0
    lead, apart, both = np.array([count, depth]), np.empty(2, np.int64), np.empty((2, 2 + stacks.shape[1]), np.int64)
    for i in range(stacks.shape[0]):
        line = stacks[i, FIELD:]
        apart[0], apart[1] = depth * line[FIELD_ROW_BYTES], line[FIELD_ROW_BYTES]
        adopt_field(lend, adopt, memory, start, lead, apart, names, i, line, both, found)
        start += count * depth * line[FIELD_ROW_BYTES]


def _sample_sequences(
    direct: Ints, drawing: Draw, gamma: float, rows: int, steps: int, memory: int, found: int
) -> bool:
    """See :func:`relive.kernels.reference.sample.sample_sequences`. The caller holds the three tensors."""
    out, cut, large = _rows_at(direct, rows), _steps_at(direct, steps), _bytes_at(direct, memory)
    states, count = matrix_of(direct, STACKS, np.int64), out.shape[0]
    # as many rows for each window, and states of exactly the expected size
    if not count or not cut.shape[0] or cut.shape[0] % count or large.size != count * _bytes_of(states):
        return False
    ring, batch = open_ring(vector_of(direct, RING, np.int64)), vector_of(direct, BATCH, np.int64)
    places, per, blank = np.empty(count, np.int64), np.empty((6, count), np.int64), vector_of(direct, BLANK, np.uint8)
    if not _draw_rows(direct, drawing, places, out):
        return False
    notes, unlisted = notes_of(cut.shape[0] // count, batch), np.empty(0, np.int64)
    thread = release_gil()  # until the next call of a Python object
    bad = read_windows(ring, batch, gamma, places, cut, blank, per, unlisted, notes)
    if bad < 0:
        _gather_states(states, per[FIRST], large.ctypes.data)
    take_gil(thread)
    if bad >= 0:
        return False
    for k in range(FIRST):
        # the first entries of ``per`` are the first int64 of a batch's row
        column = strided(out.ctypes.data + 8 * k, count, out.shape[1] // 8, np.int64)
        for b in range(count):
            column[b] = per[k, b]
    made = _split(direct, steps, STEPS, STEP_NAMES, found) and _split(direct, rows, TABLE, NAMES, found)
    if not made:
        return False
    _split_states(direct, states, count, memory, found)
    return True


@inlined
def _steps_at(direct: Ints, steps: int) -> Any:
    """The memory of the tensor of bytes at an address, with three axes, as rows; none if it is not in RAM."""
    data, dtype, shape, _ = numbers_of(direct[ENTRIES * DESCRIBE], steps)
    known = data != 0 and dtype == BYTES and shape.size == 3
    return addressed(data, (shape[0] * shape[1], shape[2]) if known else (0, 1), np.uint8)


@inlined
def _bytes_of(states: Ints) -> int:
    """The bytes of the states of one sequence."""
    total = 0
    for i in range(states.shape[0]):
        total += max(states[i, LAYERS], 1) * states[i, FIELD + FIELD_ROW_BYTES]
    return total


@jit
def _gather_states(states: Ints, first: Ints, target: int) -> None:
    """Copy the states of rows to the memory at ``target``, field by field and layer by layer. This raises nothing."""
    for i in range(states.shape[0]):
        source, layers, width = states[i, SOURCE], max(states[i, LAYERS], 1), states[i, FIELD + FIELD_ROW_BYTES]
        for place in first:
            fetch(addressed(source, 0, np.uint8), place * layers * width, FORESEEN)
        for b in range(first.size):
            for layer in range(layers):
                # stored row by row, each with all layers; layers come first in the batch, as torch wants them
                state, there = source + (first[b] * layers + layer) * width, target + (layer * first.size + b) * width
                memcpy(address_t(there), address_t(state), np.intp(width))
        target += layers * first.size * width


@inlined
def _split_states(direct: Ints, states: Ints, count: int, memory: int, found: int) -> None:
    """Make the tensors of states."""
    lend, adopt, names, start = direct[ENTRIES * LEND], direct[ENTRIES * ADOPT], direct[ENTRIES * STACK_NAMES], 0
    lead, apart, both = np.empty(2, np.int64), np.empty(2, np.int64), np.empty((2, 2 + states.shape[1]), np.int64)
    for i in range(states.shape[0]):
        layers, line, axes = states[i, LAYERS], states[i, FIELD:], 0 if states[i, LAYERS] else 1
        # without layers the first of these axes is left out: ``axes`` is 1 then
        lead[0], lead[1], apart[0], apart[1] = layers, count, count * line[FIELD_ROW_BYTES], line[FIELD_ROW_BYTES]
        adopt_field(lend, adopt, memory, start, lead[axes:], apart[axes:], names, i, line, both, found)
        start += max(layers, 1) * count * line[FIELD_ROW_BYTES]


def _sample_goals(
    direct: Ints, drawing: Draw, n: int, gamma: float, ratio: float, rows: int, steps_handle: Ints, pairs: Any,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.sample.sample_goals`. The caller holds ``rows``."""
    out, steps, stream = _rows_at(direct, rows), open_steps(steps_handle), _stream(direct, drawing)
    places, ring, batch = steps.places, vector_of(direct, RING, np.int64), vector_of(direct, BATCH, np.int64)
    if not out.shape[0] or not _draw_rows(direct, drawing, places, out):
        return UNFIT
    others = places
    if batch[STRATEGY] == RANDOM:
        others = np.empty(places.size, np.int64)
        # a stream of its own, so that goals do not change which rows are drawn
        draw(ring, key(stream, OTHERS), 0, others)
    return plan_goals(ring, batch, places, n, gamma, stream, ratio, others, out, steps.last, steps_handle, pairs)


def _finish_goals(
    direct: Ints, gamma: float, chosen: int, judged: bool, rows: int, steps_handle: Ints, rewards: Any, found: int
) -> int:
    """See :func:`relive.kernels.reference.sample.finish_goals`. The caller holds ``rows``."""
    out, last = _rows_at(direct, rows), open_steps(steps_handle).last
    ring, batch = vector_of(direct, RING, np.int64), vector_of(direct, BATCH, np.int64)
    bad = relabel_windows(ring, batch, gamma, chosen, judged, out, last, steps_handle, rewards)
    if bad < 0:
        _split(direct, rows, TABLE, NAMES, found)
    return bad


sample_windows = jit(_sample_windows, nogil=False)
sample_stacks = jit(_sample_stacks, nogil=False)
sample_sequences = jit(_sample_sequences, nogil=False)
sample_goals = jit(_sample_goals, nogil=False)
finish_goals = jit(_finish_goals, nogil=False)
