"""Sequences: what a batch of windows of a ring's episodes holds, in plain Python.

:mod:`relive.kernels.reference.rule` says where windows start and end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ring_state import LENGTH, STRIDE, RingArrays
from .nstep import add_reward, bootstrap
from .places import Ints, place_of, row_at
from .rule import window_start

__all__ = ["read_sequences"]

INDEX, LENGTHS, BURN_IN, ENV, START, FIRST = range(6)
"""What the rows of ``per`` are, an entry a window: the public index of its anchor, its number of rows, how many of them
are burn-in, its env, the number of its first step within the env, and the place of row 0."""

SUM, TERMINAL, CUT, DISCOUNT, STEPS, NEXT_ROW, MASK, IS_START = range(8)
"""The first entries of ``batch``, the layout of a row of a batch of sequences: the bytes of what is written for each
step, float32, uint8, uint8, float32, int32, int64, uint8 and uint8. Each is a multiple of the size of its type."""
STEP_BYTES, OBS_BYTES, BURN, REACH, TIME_FIRST = range(8, 13)
"""The others: the bytes at the start of a row that are copied of a step, and of an observation that an episode ended
on, multiples of 16; the steps of burn-in; the rewards of an n-step sum; 1 if the rows are ``[T, B]``, 0 if
``[B, T]``."""


def read_sequences(
    ring: RingArrays, batch: Ints, gamma: float, places: Ints, out: Any, blank: Any, per: Ints, table: Ints
) -> int:
    """The windows that end at anchors, as packed rows ``[T, B]``, or ``[B, T]``, flattened: uint8 ``[T * B, W]``.

    A window comes after up to ``batch[BURN]`` steps before it, as far as its episode goes, and before as many rows as
    its n-step rewards (as :func:`relive.kernels.reference.windows.windows` has them) reach beyond it.

    The row after an episode's last step is ``blank`` with the observation that it ended on; ``blank`` (uint8 ``[W]``)
    is the row that stands where there is nothing. Each step gets the reward, done bits, discount and number of rewards
    of its n-step window, and the row of the batch after that, 0 and -1 behind the last step; whether it belongs to the
    window; and whether it begins its episode. ``per`` ``[6, B]`` gets what is known of each window. ``table``, if not
    empty, gets the place of each row; -1 where there is none, and -2 - place for an observation that an episode ended
    on.

    Returns -1; or the first of ``places`` that is not a row's, or whose window would not be among the rows or not fit.
    """
    count, total = len(places), len(out) // max(len(places), 1)
    burn_in, steps = int(batch[BURN]), int(batch[REACH])

    def write(row: int, values: list[tuple[Any, Any]]) -> None:
        for field, (value, dtype) in enumerate(values):
            out[row, batch[field] : batch[field] + np.dtype(dtype).itemsize].view(dtype)[0] = value

    for b, place in enumerate(places.tolist()):
        if not 0 <= place < len(ring.memory):
            return b
        (e, _, number), index = row_at(place, ring), int(ring.step[place])
        start = int(window_start(index, int(ring.counters[LENGTH]), int(ring.counters[STRIDE])))
        first = max(start - burn_in, 0)
        if not 0 <= index - first < min(ring.rows, total):
            return b
        episode = [place_of(number - index + k, e, ring.rows) for k in range(index + steps + 1)]
        known = index + 1  # steps of the episode whose rewards are read
        while known < index + steps and ring.stamp[episode[known]] >= 0:
            known += 1
        terminal, cut = ring.terminated[episode[known - 1]], ring.truncated[episode[known - 1]]
        for t in range(total):
            row, i = (t * count + b if batch[TIME_FIRST] else b * total + t), first + t
            bounds = i == known and bool(terminal or cut)
            if i > known or bounds:
                out[row] = blank
            if i <= known:
                nbytes = batch[OBS_BYTES] if bounds else batch[STEP_BYTES]
                out[row, :nbytes] = ring.memory[episode[i], :nbytes]
            if table.size:
                table[row] = -1 if i > known else -2 - episode[i] if bounds else episode[i]
            k = min(steps, known - i) if i <= index else 0
            value, discount = 0.0, 1.0
            for j in range(k):
                value, discount = add_reward(value, discount, ring.reward[episode[i + j]], gamma)
            last = k > 0 and i + k == known
            if i <= known:
                write(
                    row,
                    [
                        (value, np.float32),
                        (terminal if last else 0, np.uint8),
                        (cut if last else 0, np.uint8),
                        (bootstrap(discount, k == 0 or (last and terminal)), np.float32),
                        (k, np.int32),
                        (t + k if k else -1, np.int64),
                        (start <= i <= index, np.uint8),
                        (i == 0, np.uint8),
                    ],
                )
        per[:, b] = [
            number * len(ring.state) + e,
            known - first + 1,
            start - first,
            e,
            number - index + start,
            episode[first],
        ]
    return -1
