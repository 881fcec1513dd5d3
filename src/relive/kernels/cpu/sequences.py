"""Windows of a ring's episodes: reference/sequences.py's names and, to the bit, results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.sequences import HISTORY, LENGTH, STRIDE, TAILS
from .jit import address_t, fetch, jit, memcpy, remainder

__all__ = ["HISTORY", "LENGTH", "STRIDE", "TAILS", "ends_full", "ends_window", "read_sequences", "window_start"]

Ints = NDArray[np.int64]
HEAD = 0
LENGTHS, BURN_IN, FIRST = 1, 2, 5
AHEAD = 2
"""How many of its rows are asked for when it is known where a window starts."""
GROUP = 8
"""Windows that are written side by side."""
PLACE, LIMIT, OWN, KNOWN, TERMINAL, CUT = range(6)
"""What is noted of each of them: where its next row is and where the env's rows end, how many of its steps there are up
to the anchor and with those they look ahead to, and whether the last of all terminated and was truncated."""


@jit
def window_start(at: int, length: int, stride: int) -> int:
    """See :func:`relive.kernels.reference.sequences.window_start`."""
    beyond = at + 1 - length
    if beyond <= 0:
        return 0
    return beyond if stride == 1 else (beyond + stride - 1) // stride * stride


@jit
def ends_full(at: int, length: int, stride: int) -> bool:
    """See :func:`relive.kernels.reference.sequences.ends_full`."""
    return at + 1 >= length and (stride == 1 or (at + 1 - length) % stride == 0)


@jit
def ends_window(
    place: int, number: int, begin: int, rows: int, head: int, following: int, counters: Ints, step: Any, stamp: Any
) -> bool:
    """See :func:`relive.kernels.reference.sequences.ends_window`; row ``head`` will have the index ``following``."""
    if ends_full(step[place], counters[LENGTH], counters[STRIDE]):
        return True
    after = place + 1 if place + 1 < begin + rows else begin
    if not counters[TAILS] or stamp[after] >= 0:
        return False
    if number + 2 == head:
        return following == 0
    return step[after + 1 if after + 1 < begin + rows else begin] == 0


@jit
def read_sequences(
    places: Ints, rows: int, burn_in: int, steps: int, gamma: float, state: Ints, counters: Ints, step: Any,
    source: Any, at: Ints, time_first: bool, out: Any, to: Ints, sizes: Ints, blank: Any, per: Ints, table: Ints,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.sequences.read_sequences`; ``sizes`` and rows are multiples of 16 bytes."""
    if places.size == 0:
        return -1
    count, total, width = places.size, out.shape[0] // places.size, source.shape[1]
    for b in range(count):  # so that what tells where a window starts comes for all of them at once
        if not 0 <= places[b] < source.shape[0]:
            return b
        fetch(source, places[b] * width, width)
    _find(places, rows, burn_in, state, counters, step, per)
    for b in range(count):
        if not 0 < per[LENGTHS, b] <= min(rows, total):
            return b
    for b in range(count):
        fetch(source, per[FIRST, b] * width, AHEAD * width)
    powers, rewards = np.ones(steps + 1), np.empty((GROUP, total))
    for k in range(steps):
        powers[k + 1] = powers[k] * gamma
    marks = np.empty((GROUP, 6), np.int64)
    group = GROUP if time_first else 1
    for low in range(0, count, group):  # so that rows are written next to each other, and read one after another
        high = min(low + group, count)
        for b in range(low, high):
            _scan(per[FIRST, b], per[LENGTHS, b], rows, steps, source, at, rewards[b - low], marks[b - low])
            per[LENGTHS, b] = marks[b - low, KNOWN] + 1
        _write(
            low, high, total, rows, steps, powers, rewards, marks, source, time_first, out, to, sizes, blank, per, table
        )  # fmt: skip
    return -1


@jit
def _find(places: Ints, rows: int, burn_in: int, state: Ints, counters: Ints, step: Any, per: Ints) -> None:
    """All of ``per``, but that instead of the lengths there is how many rows end with the anchor."""
    length, stride, inverse = counters[LENGTH], counters[STRIDE], 1.0 / rows
    for b in range(places.size):
        index = step[places[b]]
        offset = remainder(places[b], rows, inverse)
        env = np.int64(np.float64(places[b] - offset) * inverse + 0.5)
        newest = state[env, HEAD] - 1
        since = remainder(newest, rows, inverse) - offset
        number = newest - (since if since >= 0 else since + rows)
        start = window_start(index, length, stride)
        first = max(start - burn_in, 0)
        per[0, b], per[LENGTHS, b], per[BURN_IN, b] = number * state.shape[0] + env, index - first + 1, start - first
        per[3, b], per[4, b] = env, number - index + start
        per[FIRST, b] = places[b] - (index - first) + (rows if index - first > offset else 0)


@jit
def _scan(first: int, own: int, rows: int, steps: int, source: Any, at: Ints, rewards: Any, marks: Ints) -> None:
    """Note a window's ``marks``, and the rewards of its ``own`` steps from ``first`` on and of those they look to."""
    bits, width, known, place = source.reshape(-1), source.shape[1], 0, first
    floats, words, last = bits.view(np.float32), bits.view(np.int64), first
    limit = first - remainder(first, rows, 1.0 / rows) + rows
    while known < own or (known < own + steps - 1 and words[(place * width + at[3]) // 8] >= 0):
        rewards[known] = floats[(place * width + at[0]) // 4]
        known, last = known + 1, place
        place = place + 1 if place + 1 < limit else limit - rows
    marks[PLACE], marks[LIMIT], marks[OWN], marks[KNOWN] = first, limit, own, known
    marks[TERMINAL], marks[CUT] = bits[last * width + at[1]], bits[last * width + at[2]]


@jit
def _write(
    low: int, high: int, total: int, rows: int, steps: int, powers: Any, rewards: Any, marks: Ints, source: Any,
    time_first: bool, out: Any, to: Ints, sizes: Ints, blank: Any, per: Ints, table: Ints,
) -> None:  # fmt: skip
    """Windows ``low`` to ``high``, row by row."""
    count, width, wide = per.shape[1], source.shape[1], out.shape[1]
    here, there, nothing = source.ctypes.data, out.ctypes.data, blank.ctypes.data
    out_bits, out_words = out.reshape(-1), out.reshape(-1).view(np.int64)
    out_ints, out_floats = out.reshape(-1).view(np.int32), out.reshape(-1).view(np.float32)
    for t in range(total):
        for b in range(low, high):
            g, row = b - low, t * count + b if time_first else b * total + t
            if b + high - low < count:  # so that the next windows' rows come while these are written
                fetch(source, (per[FIRST, b + high - low] + t) * width, width)
            known, base, place = marks[g, KNOWN], row * wide, marks[g, PLACE]
            bounds = t == known and (marks[g, TERMINAL] | marks[g, CUT]) != 0
            if t > known or bounds:
                _copy(there + base, nothing, wide)
            if table.size:
                table[row] = -1 if t > known else (-2 - place if bounds else place)
            if t > known:
                continue
            _copy(there + base, here + place * width, sizes[1] if bounds else sizes[0])
            marks[g, PLACE] = place + 1 if place + 1 < marks[g, LIMIT] else place + 1 - rows
            k = min(steps, known - t) if t < marks[g, OWN] else 0
            value, last = 0.0, k > 0 and t + k == known
            for j in range(k):
                value += powers[j] * rewards[g, t + j]
            terminal, cut = (marks[g, TERMINAL], marks[g, CUT]) if last else (0, 0)
            out_floats[(base + to[0]) // 4] = value
            out_bits[base + to[1]], out_bits[base + to[2]] = terminal, cut
            out_floats[(base + to[3]) // 4] = 0.0 if k == 0 or terminal else powers[k]
            out_ints[(base + to[4]) // 4] = k
            out_words[(base + to[5]) // 8] = t + k if k else -1
            out_bits[base + to[6]] = per[BURN_IN, b] <= t < marks[g, OWN]


@jit
def _copy(target: int, source: int, nbytes: int) -> None:
    """Copy a multiple of 16 bytes, which are too few for a call."""
    for byte in range(0, nbytes, 16):
        memcpy(address_t(target + byte), address_t(source + byte), np.intp(16))
