"""Sequences: what a batch of windows of a ring's episodes holds, in plain Python.

:mod:`relive.kernels.reference.rule` says where windows start and end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ring_state import LENGTH, STRIDE
from .nstep import REWARD, STAMP, TERMINATED, TRUNCATED, add_reward, bootstrap, read
from .places import Ints, place_of, row_at
from .rule import window_start

__all__ = ["read_sequences"]

INDEX, LENGTHS, BURN_IN, ENV, START, FIRST = range(6)
"""What the rows of ``per`` are, an entry a window: the public index of its anchor, its number of rows, how many of them
are burn-in, its env, the number of its first step within the env, and the place of row 0."""

SUM, TERMINAL, CUT, DISCOUNT, STEPS, NEXT_ROW, MASK = range(7)
"""What the entries of ``to`` are the bytes of, in a row of a batch of sequences: float32, uint8, uint8, float32, int32,
int64, uint8."""


def read_sequences(
    places: Ints, rows: int, burn_in: int, steps: int, gamma: float, state: Ints, counters: Ints, step: Any,
    source: Any, at: Ints, time_first: bool, out: Any, to: Ints, sizes: Ints, blank: Any, per: Ints, table: Ints,
) -> int:  # fmt: skip
    """The windows that end at anchors, as packed rows ``[T, B]``, or ``[B, T]`` unless ``time_first``, flattened.

    A window comes after up to ``burn_in`` steps before it, as far as its episode goes, and before as many rows as its
    n-step rewards (``steps`` at most, as :func:`relive.kernels.reference.ring.windows` has them) reach beyond it.

    ``at`` holds the bytes at which a row of ``source`` (uint8 ``[R, W]``) has its reward, terminated, truncated and
    stamp. The first ``sizes[0]`` bytes of each row are copied. An observation that an episode ended on is ``blank``
    with its first ``sizes[1]`` bytes written over; ``blank`` (uint8) is the row that stands where there is nothing. The
    bytes ``to`` get the reward, done bits, discount and number of rewards of the n-step window, and the row of the
    batch after it, 0 and -1 behind the last step; and whether the step belongs to the window. ``per`` ``[6, B]`` gets
    what is known of each window. ``table``, if not empty, gets the place of each row; -1 where there is none, and
    -2 - place for an observation that an episode ended on.

    Returns -1; or the first of ``places`` that is not a row's, or whose window would not be among the rows or not fit.
    """
    count, total = len(places), len(out) // max(len(places), 1)

    def write(row: int, values: list[tuple[Any, Any]]) -> None:
        for field, (value, dtype) in enumerate(values):
            out[row, to[field] : to[field] + np.dtype(dtype).itemsize].view(dtype)[0] = value

    for b, place in enumerate(places.tolist()):
        if not 0 <= place < len(source):
            return b
        (e, _, number), index = row_at(place, rows, state), int(step[place])
        start = int(window_start(index, int(counters[LENGTH]), int(counters[STRIDE])))
        first = max(start - burn_in, 0)
        if not 0 <= index - first < min(rows, total):
            return b
        episode = [place_of(number - index + k, e, rows) for k in range(index + steps + 1)]
        known = index + 1  # steps of the episode whose rewards are read
        while known < index + steps and read(source[episode[known]], at[STAMP], np.int64) >= 0:
            known += 1
        terminal, cut = (source[episode[known - 1], at[field]] for field in (TERMINATED, TRUNCATED))
        for t in range(total):
            row, i = (t * count + b if time_first else b * total + t), first + t
            bounds = i == known and bool(terminal or cut)
            if i > known or bounds:
                out[row] = blank
            if i <= known:
                nbytes = sizes[1] if bounds else sizes[0]
                out[row, :nbytes] = source[episode[i], :nbytes]
            if table.size:
                table[row] = -1 if i > known else -2 - episode[i] if bounds else episode[i]
            k = min(steps, known - i) if i <= index else 0
            value, discount = 0.0, 1.0
            for j in range(k):
                reward = read(source[episode[i + j]], at[REWARD], np.float32)
                value, discount = add_reward(value, discount, reward, gamma)
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
                    ],
                )
        per[:, b] = [
            number * len(state) + e,
            known - first + 1,
            start - first,
            e,
            number - index + start,
            episode[first],
        ]
    return -1
