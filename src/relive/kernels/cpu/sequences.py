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
AHEAD = 8
"""How many rows before they are copied rows are asked for."""


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
) -> None:  # fmt: skip
    """See :func:`relive.kernels.reference.sequences.read_sequences`."""
    if places.size == 0:
        return
    count, total, width = places.size, out.shape[0] // places.size, source.shape[1]
    length, stride, inverse = counters[LENGTH], counters[STRIDE], 1.0 / rows
    for b in range(count):  # so that what tells where a window starts comes for all of them at once
        fetch(source, places[b] * width, width)
    for b in range(count):
        index = step[places[b]]
        offset = remainder(places[b], rows, inverse)
        back = index - max(window_start(index, length, stride) - burn_in, 0)
        first = places[b] - back + (rows if back > offset else 0)
        per[5, b], per[1, b] = first, back
        fetch(source, first * width, AHEAD // 2 * width)
    powers, rewards = np.ones(steps + 1), np.empty(total)
    for k in range(steps):
        powers[k + 1] = powers[k] * gamma
    for b in range(count):
        place, back, index = places[b], per[1, b], step[places[b]]
        offset = remainder(place, rows, inverse)
        begin = place - offset
        env = np.int64(np.float64(begin) * inverse + 0.5)
        newest = state[env, HEAD] - 1
        since = remainder(newest, rows, inverse) - offset
        number = newest - (since if since >= 0 else since + rows)
        start = window_start(index, length, stride)
        known = _known(place, back, begin, rows, steps, source, at)
        per[0, b], per[1, b], per[2, b] = number * state.shape[0] + env, known + 1, start - (index - back)
        per[3, b], per[4, b] = env, number - index + start
        row, stride_of_rows = (b, count) if time_first else (b * total, 1)
        _copy(per[5, b], begin, rows, known, source, at, out, row, stride_of_rows, sizes, blank, total, table, rewards)
        _note(back, known, per[2, b], steps, powers, rewards, source, place, begin, rows, at, out, row,
              stride_of_rows, to)  # fmt: skip


@jit
def _known(place: int, back: int, begin: int, rows: int, steps: int, source: Any, at: Ints) -> int:
    """How many steps there are from row 0 on whose rewards the window's steps, or those they look ahead to, have."""
    words, width, known = source.reshape(-1).view(np.int64), source.shape[1], back + 1
    for _ in range(steps - 1):
        place = place + 1 if place + 1 < begin + rows else begin
        if words[(place * width + at[3]) // 8] < 0:
            break
        known += 1
    return known


@jit
def _copy(
    place: int, begin: int, rows: int, known: int, source: Any, at: Ints, out: Any, row: int, stride: int, sizes: Ints,
    blank: Any, total: int, table: Ints, rewards: Any,
) -> None:  # fmt: skip
    """Copy a window's rows, from ``place`` on, and their rewards; blank ones come after the row behind the last."""
    bits, floats, width, wide = source.reshape(-1), source.reshape(-1).view(np.float32), source.shape[1], out.shape[1]
    here, there, nothing = source.ctypes.data, out.ctypes.data, blank.ctypes.data
    bounds = False
    for t in range(total):
        target = address_t(there + row * wide)
        if t > known or (t == known and bounds):
            memcpy(target, address_t(nothing), np.intp(wide))
        if t <= known:
            fetch(source, (place + AHEAD) * width, width)
            last = t == known and bounds
            memcpy(target, address_t(here + place * width), np.intp(sizes[1] if last else sizes[0]))
            rewards[t] = floats[(place * width + at[0]) // 4]
            bounds = (bits[place * width + at[1]] | bits[place * width + at[2]]) != 0
            if table.size:
                table[row] = -2 - place if last else place
            place = place + 1 if place + 1 < begin + rows else begin
        elif table.size:
            table[row] = -1
        row += stride


@jit
def _note(
    back: int, known: int, burn_in: int, steps: int, powers: Any, rewards: Any, source: Any, place: int, begin: int,
    rows: int, at: Ints, out: Any, row: int, stride: int, to: Ints,
) -> None:  # fmt: skip
    """What the rewards of each step of a window come to, and how they end."""
    wide, out_bits, out_words = out.shape[1], out.reshape(-1), out.reshape(-1).view(np.int64)
    out_ints, out_floats = out.reshape(-1).view(np.int32), out.reshape(-1).view(np.float32)
    last = place + known - 1 - back
    last = (last if last < begin + rows else last - rows) * source.shape[1]
    bits = source.reshape(-1)
    terminal, cut = bits[last + at[1]], bits[last + at[2]]
    for t in range(known + 1):
        k = min(steps, known - t) if t <= back else 0
        value = 0.0
        for j in range(k):
            value += powers[j] * rewards[t + j]
        ends = k > 0 and t + k == known
        base = row * wide
        out_floats[(base + to[0]) // 4] = value
        out_bits[base + to[1]] = terminal if ends else 0
        out_bits[base + to[2]] = cut if ends else 0
        out_floats[(base + to[3]) // 4] = 0.0 if k == 0 or (ends and terminal) else powers[k]
        out_ints[(base + to[4]) // 4] = k
        out_words[(base + to[5]) // 8] = t + k if k else -1
        out_bits[base + to[6]] = burn_in <= t <= back
        row += stride
