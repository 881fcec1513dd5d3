"""Batches in one or two calls: reference/sample.py's names and, to the bit, results.

In a training, code that is not in the processor's caches costs several times what it costs in a loop. So a batch takes
one call, rather than one for each of its parts with Python in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.hindsight import OTHERS, RANDOM, STRATEGY
from ..ring_state import UNFIT
from ..tensor_calls import CPU
from .draw import draw
from .fields import BYTES, split_rows
from .handles import ENTRIES, Ints, matrix_of, vector_of
from .hindsight import open_steps, plan_goals, relabel_windows
from .jit import addressed, inlined, jit, strided
from .priorities import draw_weighted
from .random import key
from .tensors import describe
from .windows import windows

__all__ = ["finish_goals", "sample_goals", "sample_windows"]

DESCRIBE, LEND, ADOPT, RING, SEED, WEIGHTS, TOPS, UNTIL, WEIGHT_AT, PROBABILITY_AT, BATCH, TABLE, NAMES = range(13)
"""The positions of :class:`relive.kernels.ring_state.DirectBatch`'s members."""


@jit
def _draw_rows(
    direct: Ints, stream: Any, newest: int, stratified: bool, beta: float, lowest: float, places: Ints, out: Any
) -> bool:
    """See :func:`relive.kernels.reference.sample._draw_rows`."""
    weights = vector_of(direct, WEIGHTS, np.int64)
    if weights.size == 0:
        return draw(vector_of(direct, RING, np.int64), stream, newest, places)
    tops, until = vector_of(direct, TOPS, np.int64), vector_of(direct, UNTIL, np.float64)
    probability, weight = np.empty(places.size), np.empty(places.size, np.float32)
    if not draw_weighted(weights, stream, stratified, beta, lowest, tops, until, places, probability, weight):
        return False
    there, wide = out.ctypes.data, out.shape[1]
    singles = strided(there + direct[ENTRIES * WEIGHT_AT], places.size, wide // 4, np.float32)
    doubles = strided(there + direct[ENTRIES * PROBABILITY_AT], places.size, wide // 8, np.float64)
    for i in range(places.size):
        singles[i], doubles[i] = weight[i], probability[i]
    return True


@inlined
def _rows_at(direct: Ints, rows: int) -> Any:
    """The memory of the tensor at an address; no rows if it is not in RAM."""
    failed, data, device, axes, sizes, _, offset = describe(direct[ENTRIES * DESCRIBE], rows)
    known = not failed and data != 0 and device == CPU and axes == BYTES << 32 | 2 and offset == 0
    shape = addressed(sizes, 2 if known else 0, np.int64)
    return addressed(data, (shape[0], shape[1]) if known else (0, 1), np.uint8)


@inlined
def _stream(direct: Ints, number: int) -> Any:
    """The stream of random numbers of a draw."""
    return key(vector_of(direct, SEED, np.uint64)[0], number)


@inlined
def _split(direct: Ints, rows: int, found: int) -> bool:
    """Make the tensors of a batch."""
    lend, adopt, names = direct[ENTRIES * LEND], direct[ENTRIES * ADOPT], direct[ENTRIES * NAMES]
    return split_rows(direct[ENTRIES * DESCRIBE], lend, adopt, rows, names, matrix_of(direct, TABLE, np.int64), found)


def _sample_windows(
    direct: Ints, number: int, newest: int, stratified: bool, beta: float, lowest: float, steps: int, gamma: float,
    rows: int, found: int,
) -> bool:  # fmt: skip
    """See :func:`relive.kernels.reference.sample.sample_windows`; ``direct`` is a handle. The caller holds ``rows``."""
    out, stream = _rows_at(direct, rows), _stream(direct, number)
    places, last = np.empty(out.shape[0], np.int64), np.empty(out.shape[0], np.int64)
    if not out.shape[0] or not _draw_rows(direct, stream, newest, stratified, beta, lowest, places, out):
        return False
    windows(vector_of(direct, RING, np.int64), vector_of(direct, BATCH, np.int64), places, steps, gamma, out, last)
    return _split(direct, rows, found)


def _sample_goals(
    direct: Ints, number: int, newest: int, stratified: bool, beta: float, lowest: float, n: int, gamma: float,
    ratio: float, rows: int, steps_handle: Ints, pairs: Any,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.sample.sample_goals`. The caller holds ``rows``."""
    out, steps, stream = _rows_at(direct, rows), open_steps(steps_handle), _stream(direct, number)
    places, ring, batch = steps.places, vector_of(direct, RING, np.int64), vector_of(direct, BATCH, np.int64)
    if not out.shape[0] or not _draw_rows(direct, stream, newest, stratified, beta, lowest, places, out):
        return UNFIT
    others = places
    if batch[STRATEGY] == RANDOM:
        others = np.empty(places.size, np.int64)
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
        _split(direct, rows, found)
    return bad


sample_windows = jit(_sample_windows, nogil=False)
sample_goals = jit(_sample_goals, nogil=False)
finish_goals = jit(_finish_goals, nogil=False)
