"""Batches in one call, or in two with functions of the user's in between: drawn, read, and made tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..ring_state import UNFIT, DirectBatch
from .draw import draw
from .fields import INTO, WIDTH, field_of, rows_at, split_rows
from .hindsight import OTHERS, RANDOM, STRATEGY, RelabelledSteps, plan_goals, relabel_windows
from .nstep import column
from .places import Ints
from .priorities import draw_weighted
from .random import key
from .windows import gather_pairs, stack_places, windows

__all__ = [
    "LINE",
    "ROWS",
    "SOURCE",
    "Draw",
    "finish_goals",
    "sample_goals",
    "sample_stacks",
    "sample_windows",
]

Draw = tuple[int, int, bool, float, float]
"""What is drawn: which draw of the seed this is; from how many of the newest transitions (0: from all), where there are
no priorities; and where there are, ``stratified``, ``beta`` and ``lowest`` as
:func:`relive.kernels.reference.priorities.draw_weighted` takes them."""

SOURCE, ROWS, LINE = range(3)
"""The entries of a line of ``stacks``: the address of the field's first frame, how many frames there are, and from here
on the field as a line of the table of :func:`relive.kernels.reference.fields.split_rows`."""


def _draw_rows(direct: DirectBatch, drawing: Draw, places: Ints, out: Any) -> bool:
    """Draw anchors, and write their weights and probabilities, if they have any, into the rows ``out`` of a batch."""
    (_, newest, stratified, beta, lowest), stream = drawing, _stream(direct, drawing)
    if not len(direct.weights):
        return draw(direct.ring, stream, newest, places)
    probability, weight = np.empty(len(places)), np.empty(len(places), np.float32)
    how = stratified, beta, lowest, direct.tops, direct.until
    if not draw_weighted(direct.weights, stream, *how, places, probability, weight):
        return False
    column(out, direct.weight_at, np.float32)[:] = weight
    column(out, direct.probability_at, np.float64)[:] = probability
    return True


def sample_windows(direct: DirectBatch, drawing: Draw, steps: int, gamma: float, rows: int, found: int) -> bool:
    """Draw n-step windows, read them, and make a tensor for each field of the batch. The GIL is held all the time.

    Args:
        direct: the rest.
        drawing: what is drawn.
        steps: see :func:`relive.kernels.reference.windows.windows`.
        gamma: likewise.
        rows: the address (``id``) of a tensor, uint8 ``[B, W]`` in one piece, which the batch will lie in.
        found: see :func:`relive.kernels.reference.fields.split_rows`.

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
    count, size = 0 if out is None else len(out), sum(direct.stacks[:, LINE + WIDTH].tolist())
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
        width = line[WIDTH]
        if i % 2 == 0:
            block = np.ctypeslib.as_array((ctypes.c_uint8 * (there * width)).from_address(source))
            both = large[start : start + frames.size * width]
            gather_pairs(block.reshape(there, width), frames, both.reshape(frames.size, width))
        dicts[line[INTO]][names[i]] = field_of(packed, start, [count, depth], [depth * width, width], line)
        start += count * depth * width
    return True


def sample_goals(
    direct: DirectBatch, drawing: Draw, n: int, gamma: float, ratio: float, rows: int, steps: RelabelledSteps,
    pairs: Any,
) -> int:  # fmt: skip
    """Draw n-step windows, read them, and plan other goals for some: :func:`plan_goals`. The GIL is held all the time.

    The arguments are those of :func:`sample_windows` and :func:`relive.kernels.reference.hindsight.plan_goals`.

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

    The arguments, and what is returned, are those of :func:`relive.kernels.reference.hindsight.relabel_windows` and
    :func:`sample_windows`.
    """
    out: Any = rows_at(rows)
    bad = relabel_windows(direct.ring, direct.batch, gamma, chosen, judged, out, steps.last, steps, rewards)
    if bad < 0:
        split_rows(direct.describe, direct.lend, direct.adopt, rows, direct.names, direct.table, found)
    return bad


def _stream(direct: DirectBatch, drawing: Draw) -> int:
    return key(int(direct.seed[0]), drawing[0])
