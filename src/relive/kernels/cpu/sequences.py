"""Sequences: reference/sequences.py's names and, to the bit, results."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.sequences import (
    BURN_IN,
    CUT,
    DISCOUNT,
    ENV,
    FIRST,
    INDEX,
    LENGTHS,
    MASK,
    NEXT_ROW,
    START,
    STEPS,
    SUM,
    TERMINAL,
)
from ..ring_state import LENGTH, STRIDE
from .jit import address_t, fetch, jit, memcpy, remainder
from .nstep import REWARD, STAMP, TERMINATED, TRUNCATED, add_reward, bootstrap, typed
from .places import Ints, place_after, row_at
from .rule import window_start

__all__ = ["read_sequences"]

AHEAD = 2
"""How many of its rows are asked for when it is known where a window starts."""
GROUP = 8
"""Windows that are written side by side."""
PLACE, BEGIN, OWN, KNOWN, ENDS, CUTS = range(6)
"""What is noted of each of them: the places of its next row and of the env's first, how many steps it has up to the
anchor, how many with those that their rewards reach to, and whether the last of all terminated and was truncated."""


@jit
def read_sequences(
    places: Ints, rows: int, burn_in: int, steps: int, gamma: float, state: Ints, counters: Ints, step: Any,
    source: Any, at: Ints, time_first: bool, out: Any, to: Ints, sizes: Ints, blank: Any, per: Ints, table: Ints,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.sequences.read_sequences`; ``sizes`` and rows are multiples of 16 bytes."""
    if places.size == 0:
        return -1
    count, total, width = places.size, out.shape[0] // places.size, source.shape[1]
    for b in range(count):  # so that the indices, which say where windows start, come for all of them at once
        if not 0 <= places[b] < source.shape[0]:
            return b
        fetch(source, places[b] * width, width)
    _find(places, rows, burn_in, state, counters, step, per)
    for b in range(count):
        if not 0 < per[LENGTHS, b] <= min(rows, total):
            return b
    for b in range(count):
        fetch(source, per[FIRST, b] * width, AHEAD * width)
    rewards = np.empty((GROUP, total + steps))  # a window of at most ``total`` rows reaches ``steps`` - 1 further
    marks = np.empty((GROUP, 6), np.int64)
    group = GROUP if time_first else 1
    for low in range(0, count, group):  # so that rows are written next to each other, and read one after another
        high = min(low + group, count)
        for b in range(low, high):
            _scan(per[FIRST, b], per[LENGTHS, b], rows, steps, source, at, rewards[b - low], marks[b - low])
            per[LENGTHS, b] = marks[b - low, KNOWN] + 1
        window = low, high, total, time_first
        _write(window, rows, (steps, gamma), (rewards, marks), source, out, to, (sizes, blank), per, table)
    return -1


@jit
def _find(places: Ints, rows: int, burn_in: int, state: Ints, counters: Ints, step: Any, per: Ints) -> None:
    """Fill ``per``, with the number of rows up to the anchor in place of the lengths."""
    length, stride, inverse = counters[LENGTH], counters[STRIDE], 1.0 / rows
    for b in range(places.size):
        index = step[places[b]]
        env, begin, number = row_at(places[b], rows, inverse, state)
        start = window_start(index, length, stride)
        first = max(start - burn_in, 0)
        back = index - first  # how many rows before the anchor row 0 lies, less than ``rows`` if the window is live
        per[INDEX, b], per[LENGTHS, b], per[BURN_IN, b] = number * state.shape[0] + env, back + 1, start - first
        per[ENV, b], per[START, b] = env, number - index + start
        per[FIRST, b] = places[b] - back + (rows if places[b] - back < begin else 0)


@jit
def _scan(first: int, own: int, rows: int, steps: int, source: Any, at: Ints, rewards: Any, marks: Ints) -> None:
    """Note a window's ``marks``, and the rewards of its ``own`` steps from ``first`` on and of those they reach to."""
    bits, _, words, floats = typed(source)
    width, known, place, last = source.shape[1], 0, first, first
    begin = first - remainder(first, rows, 1.0 / rows)
    while known < own or (known < own + steps - 1 and words[(place * width + at[STAMP]) // 8] >= 0):
        rewards[known] = floats[(place * width + at[REWARD]) // 4]
        known, last = known + 1, place
        place = place_after(place, begin, rows)
    marks[PLACE], marks[BEGIN], marks[OWN], marks[KNOWN] = first, begin, own, known
    marks[ENDS], marks[CUTS] = bits[last * width + at[TERMINATED]], bits[last * width + at[TRUNCATED]]


@jit
def _write(
    window: Any, rows: int, nstep: Any, scanned: Any, source: Any, out: Any, to: Ints, copied: Any, per: Ints,
    table: Ints,
) -> None:  # fmt: skip
    """Windows ``low`` to ``high``, row by row: their steps, then the final observation if there is one, then blanks.

    Row t of window b is row t * B + b of ``out``, or b * T + t; its first byte is ``base``.
    """
    (low, high, total, time_first), (steps, gamma), (rewards, marks), (sizes, blank) = window, nstep, scanned, copied
    count, width, wide = per.shape[1], source.shape[1], out.shape[1]
    here, there, nothing = source.ctypes.data, out.ctypes.data, blank.ctypes.data
    bits, ints, words, floats = typed(out)
    for t in range(total):
        for b in range(low, high):
            g, row = b - low, t * count + b if time_first else b * total + t
            if b + high - low < count:  # so that the next windows' rows come while these are written
                fetch(source, (per[FIRST, b + high - low] + t) * width, width)
            known, base, place = marks[g, KNOWN], row * wide, marks[g, PLACE]
            bounds = t == known and (marks[g, ENDS] | marks[g, CUTS]) != 0
            if t > known or bounds:
                _copy(there + base, nothing, wide)
            if table.size:
                table[row] = -1 if t > known else (-2 - place if bounds else place)
            if t > known:
                continue
            _copy(there + base, here + place * width, sizes[1] if bounds else sizes[0])
            marks[g, PLACE] = place_after(place, marks[g, BEGIN], rows)
            k = min(steps, known - t) if t < marks[g, OWN] else 0  # so t + k <= known: within what was scanned
            value, discount, last = 0.0, 1.0, k > 0 and t + k == known
            for j in range(k):
                value, discount = add_reward(value, discount, rewards[g, t + j], gamma)
            terminal, cut = (marks[g, ENDS], marks[g, CUTS]) if last else (0, 0)
            floats[(base + to[SUM]) // 4] = value
            bits[base + to[TERMINAL]], bits[base + to[CUT]] = terminal, cut
            floats[(base + to[DISCOUNT]) // 4] = bootstrap(discount, k == 0 or terminal != 0)
            ints[(base + to[STEPS]) // 4] = k
            words[(base + to[NEXT_ROW]) // 8] = t + k if k else -1
            bits[base + to[MASK]] = per[BURN_IN, b] <= t < marks[g, OWN]


@jit
def _copy(target: int, source: int, nbytes: int) -> None:
    """Copy a multiple of 16 bytes, which are too few for a call."""
    for byte in range(0, nbytes, 16):
        memcpy(address_t(target + byte), address_t(source + byte), np.intp(16))
