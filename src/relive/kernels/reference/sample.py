"""Batches in one call: drawn, read and made tensors. With goals it is two calls, the user's functions in between.

In order: the draw; windows; stacks of frames; sequences; goals.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..tables import UNFIT, DirectBatch
from .priorities import draw, draw_weighted, key, masses, tree_find
from .ring import Ints
from .rows import FIELD_DICT, FIELD_ROW_BYTES, field_of, rows_at, split_rows
from .windows import (
    FIRST,
    OTHERS,
    RANDOM,
    STRATEGY,
    RelabelledSteps,
    column,
    gather_pairs,
    plan_goals,
    read_sequences,
    relabel_windows,
    stack_places,
    windows,
)

__all__ = [
    "FIELD",
    "LAYERS",
    "ROWS",
    "SOURCE",
    "Draw",
    "finish_goals",
    "sample_goals",
    "sample_sequences",
    "sample_stacks",
    "sample_windows",
]

Draw = tuple[int, int, bool, float, float]
"""A draw: its number among the draws of the seed; from how many of the newest transitions (0: from all), where there
are no priorities; and where there are, ``stratified``, ``beta`` and ``lowest`` as
:func:`relive.kernels.reference.priorities.draw_weighted` takes them."""

SOURCE, ROWS, FIELD = range(3)
"""The entries of a line of ``stacks``: the address of the field's first frame, how many frames there are, and from here
on the field as a line of the table of :func:`relive.kernels.reference.rows.split_rows`."""
LAYERS = ROWS
"""In a line of a recurrent state, how many layers it has, 0 for one without that axis; the line is of one layer."""


def _draw_rows(direct: DirectBatch, drawing: Draw, places: Ints, out: Any) -> bool:
    """Draw anchors, and write their weights and probabilities, if they have any, into the rows ``out`` of a batch."""
    (_, newest, stratified, beta, lowest), stream = drawing, _stream(direct, drawing)
    if not len(direct.weights):
        if len(direct.nodes):
            return _draw_leaves(direct, stream, places)
        return draw(direct.ring, stream, newest, places)
    probability, weight = np.empty(len(places)), np.empty(len(places), np.float32)
    how = stratified, beta, lowest, direct.tops, direct.until
    if not draw_weighted(direct.weights, stream, *how, places, probability, weight):
        return False
    column(out, direct.weight_at, np.float32)[:] = weight
    column(out, direct.probability_at, np.float64)[:] = probability
    return True


def _draw_leaves(direct: DirectBatch, stream: int, places: Ints) -> bool:
    """Draw leaves of a tree of weights."""
    total, wanted = float(direct.until[-1]), np.empty(len(places))
    if not total > 0.0:
        return False
    masses(stream, False, total, float(np.nextafter(total, 0.0)), wanted)
    tree_find(direct.nodes, direct.offsets, direct.tops, direct.until, wanted, places)
    return True


def sample_windows(direct: DirectBatch, drawing: Draw, steps: int, gamma: float, rows: int, found: int) -> bool:
    """Draw n-step windows, read them, and make a tensor for each field of the batch. The GIL is held all the time.

    Args:
        direct: the rest.
        drawing: what is drawn.
        steps: see :func:`relive.kernels.reference.windows.windows`.
        gamma: likewise.
        rows: the address (``id``) of a tensor, uint8 ``[B, W]`` in one piece, which the batch will lie in.
        found: see :func:`relive.kernels.reference.rows.split_rows`.

    Returns:
        whether that was done. If not, the dicts are as they were: there is nothing to draw, or ``rows`` are not in RAM.
    """
    out = rows_at(rows)
    if out is None:
        return False
    places, last = np.empty(len(out), np.int64), np.empty(len(out), np.int64)
    if not _draw_rows(direct, drawing, places, out):
        return False
    windows(direct.ring, direct.batch, places, steps, gamma, out, last)
    return split_rows(direct.describe, direct.lend, direct.adopt, rows, direct.names, direct.table, found)


def sample_stacks(
    direct: DirectBatch, drawing: Draw, steps: int, gamma: float, depth: int, repeat: bool, rows: int, memory: int,
    found: int,
) -> bool:  # fmt: skip
    """:func:`sample_windows` with stacks of frames. The GIL is held, but not while the frames are copied.

    ``direct.stacks`` has two lines for each stacked field: of the observation, and of the next observation.

    Args:
        direct: see :func:`sample_windows`, as for the next three.
        drawing: likewise.
        steps: likewise.
        gamma: likewise.
        depth: frames per stack.
        repeat: see :func:`relive.kernels.reference.windows.stack_places`.
        rows: see :func:`sample_windows`.
        memory: the address of a tensor, uint8 ``[N]``, which gets the stacks line by line: N bytes in all.
        found: see :func:`sample_windows`.
    """
    out, large = rows_at(rows), rows_at(memory)
    count, size = 0 if out is None else len(out), sum(direct.stacks[:, FIELD + FIELD_ROW_BYTES].tolist())
    if not count or large is None or large.shape != (count * depth * size,):
        return False
    ends = np.empty(2 * count, np.int64)  # of the stacks before the steps, then of those after them
    places, last, frames = ends[:count], ends[count:], np.empty((2 * count, depth), np.int64)
    if not _draw_rows(direct, drawing, places, out):
        return False
    windows(direct.ring, direct.batch, places, steps, gamma, out, last)
    stack_places(direct.ring, ends, depth, repeat, frames)
    if not split_rows(direct.describe, direct.lend, direct.adopt, rows, direct.names, direct.table, found):
        return False
    packed, names, dicts = (ctypes.cast(at, ctypes.py_object).value for at in (memory, direct.stack_names, found))
    start = 0
    for i, (source, there, *line) in enumerate(direct.stacks.tolist()):
        width = line[FIELD_ROW_BYTES]
        if i % 2 == 0:
            block = _bytes_from(source, there * width)
            both = large[start : start + frames.size * width]
            gather_pairs(block.reshape(there, width), frames, both.reshape(frames.size, width))
        dicts[line[FIELD_DICT]][names[i]] = field_of(packed, start, [count, depth], [depth * width, width], line)
        start += count * depth * width
    return True


def sample_sequences(
    direct: DirectBatch, drawing: Draw, gamma: float, rows: int, steps: int, memory: int, found: int
) -> bool:
    """Draw windows of steps, read their sequences, and make their tensors. While rows are read, the GIL is not held.

    Args:
        direct: ``batch`` is the layout of a row as :mod:`relive.kernels.reference.windows` says, ``steps`` its fields
            and ``blank`` an empty one. ``stacks`` has a line for each recurrent state. ``table`` is of ``rows``.
        drawing: see :func:`sample_windows`.
        gamma: see :func:`relive.kernels.reference.windows.read_sequences`.
        rows: the address (``id``) of a tensor, uint8 ``[B, W]`` in one piece, for what is known of each sequence: its
            INDEX, LENGTHS, BURN_IN, ENV and START, int64, come first.
        steps: that of a tensor, uint8 ``[T, B, W']`` or ``[B, T, W']`` in one piece, for their rows.
        memory: that of a tensor, uint8 ``[N]``, for the states before their first rows, line by line: N bytes in all.
        found: see :func:`sample_windows`.
    """
    out, cut, large = rows_at(rows), rows_at(steps), rows_at(memory)
    if out is None or not len(out) or cut is None or cut.ndim != 3:
        return False
    states, count = direct.stacks.tolist(), len(out)
    size = sum(max(state[LAYERS], 1) * state[FIELD + FIELD_ROW_BYTES] for state in states)
    if cut.size % (count * cut.shape[2]) or _size(large) != count * size:
        return False
    places, per = np.empty(count, np.int64), np.empty((6, count), np.int64)
    if not _draw_rows(direct, drawing, places, out):
        return False
    flat, unlisted = cut.reshape(-1, cut.shape[2]), np.empty(0, np.int64)
    if read_sequences(direct.ring, direct.batch, gamma, places, flat, direct.blank, per, unlisted) >= 0:
        return False
    for k in range(FIRST):
        column(out, 8 * k, np.int64)[:] = per[k]
    calls = direct.describe, direct.lend, direct.adopt
    if not split_rows(*calls, steps, direct.step_names, direct.steps, found):
        return False
    if not split_rows(*calls, rows, direct.names, direct.table, found):
        return False
    packed, names, dicts = (ctypes.cast(at, ctypes.py_object).value for at in (memory, direct.stack_names, found))
    start = 0
    for name, (source, layers, *line) in zip(names, states, strict=True):
        width, many = line[FIELD_ROW_BYTES], max(layers, 1)
        for layer in range(many):
            for b, place in enumerate(per[FIRST].tolist()):
                to = start + (layer * count + b) * width
                large[to : to + width] = _bytes_from(source + (place * many + layer) * width, width)
        lead, apart = ([layers, count], [count * width, width]) if layers else ([count], [width])
        dicts[line[FIELD_DICT]][name] = field_of(packed, start, lead, apart, line)
        start += many * count * width
    return True


def _size(memory: Any) -> int:
    """The bytes of a vector; 0 if it is none, as a tensor without numbers has no address."""
    return 0 if memory is None or memory.ndim != 1 else memory.size


def _bytes_from(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def sample_goals(
    direct: DirectBatch, drawing: Draw, n: int, gamma: float, ratio: float, rows: int, steps: RelabelledSteps,
    pairs: Any,
) -> int:  # fmt: skip
    """Draw n-step windows, read them, and plan other goals for some: :func:`plan_goals`. The GIL is held all the time.

    The arguments are those of :func:`sample_windows` and :func:`relive.kernels.reference.windows.plan_goals`.

    Returns:
        the number of rows with another goal, or UNFIT where :func:`sample_windows` returns False.
    """
    out = rows_at(rows)
    if out is None:
        return UNFIT
    stream, places = _stream(direct, drawing), steps.places
    if not _draw_rows(direct, drawing, places, out):
        return UNFIT
    others = places
    if direct.batch[STRATEGY] == RANDOM:
        others = np.empty(len(out), np.int64)
        draw(direct.ring, key(stream, OTHERS), 0, others)
    return plan_goals(
        direct.ring, direct.batch, places, n, gamma, stream, ratio, others, out, steps.last, steps, pairs
    )  # fmt: skip


def finish_goals(
    direct: DirectBatch, gamma: float, chosen: int, judged: bool, rows: int, steps: RelabelledSteps, rewards: Any,
    found: int,
) -> int:  # fmt: skip
    """Rewrite ``chosen`` windows and make the tensors of the batch. The GIL is held all the time.

    The arguments, and what is returned, are those of :func:`relive.kernels.reference.windows.relabel_windows` and
    :func:`sample_windows`.
    """
    out: Any = rows_at(rows)
    bad = relabel_windows(direct.ring, direct.batch, gamma, chosen, judged, out, steps.last, steps, rewards)
    if bad < 0:
        split_rows(direct.describe, direct.lend, direct.adopt, rows, direct.names, direct.table, found)
    return bad


def _stream(direct: DirectBatch, drawing: Draw) -> int:
    return key(int(direct.seed[0]), drawing[0])
