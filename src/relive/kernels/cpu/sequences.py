"""Sequences: reference/sequences.py's names and, to the bit, results."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.sequences import (
    BURN,
    BURN_IN,
    CUT,
    DISCOUNT,
    ENV,
    FIRST,
    INDEX,
    IS_START,
    LENGTHS,
    MASK,
    NEXT_ROW,
    OBS_BYTES,
    REACH,
    START,
    STEP_BYTES,
    STEPS,
    SUM,
    TERMINAL,
    TIME_FIRST,
)
from ..ring_state import LENGTH, STRIDE, RingArrays
from .handles import Ints, open_ring
from .jit import address_t, copy_short, fetch, jit, remainder, strided
from .nstep import add_reward, bootstrap
from .places import place_after, row_at
from .rule import window_start

__all__ = ["notes_of", "read_sequences", "read_windows"]

AHEAD = 2
"""How many of its rows are asked for when it is known where a window starts."""
GROUP = 8
"""Windows that are written side by side."""
PLACE, BEGIN, OWN, KNOWN, OPENS, ENDS, CUTS = range(7)
"""What is noted of each of them: the places of its next row and of the env's first, how many steps it has up to the
anchor, how many with those that their rewards reach to, whether the first begins its episode, and whether the last of
all terminated and was truncated."""


@jit
def read_sequences(
    ring_handle: Ints, batch: Ints, gamma: float, places: Ints, out: Any, blank: Any, per: Ints, table: Ints
) -> int:
    """See :func:`relive.kernels.reference.sequences.read_sequences`."""
    if places.size == 0:
        return -1
    notes = notes_of(out.shape[0] // places.size, batch)
    return read_windows(open_ring(ring_handle), batch, gamma, places, out, blank, per, table, notes)


@jit
def notes_of(total: int, batch: Ints) -> Any:
    """Memory for what is noted of windows of ``total`` rows while they are read: their rewards, and their marks."""
    # the steps of a window, at most ``total``, have rewards that reach ``batch[REACH]`` - 1 further
    return np.empty((GROUP, total + batch[REACH])), np.empty((GROUP, 7), np.int64)


@jit
def read_windows(
    ring: RingArrays, batch: Ints, gamma: float, places: Ints, out: Any, blank: Any, per: Ints, table: Ints, notes: Any
) -> int:
    """:func:`read_sequences` of at least one place, in memory of the caller's. This raises nothing."""
    (rewards, marks), steps = notes, batch[REACH]
    count, total, width = places.size, out.shape[0] // places.size, ring.memory.shape[1]
    for b in range(count):  # so that the indices, which say where windows start, come for all of them at once
        if not 0 <= places[b] < ring.memory.shape[0]:
            return b
        fetch(ring.memory, places[b] * width, width)
    _find(places, batch[BURN], ring, per)
    for b in range(count):
        if not 0 < per[LENGTHS, b] <= min(ring.rows, total):
            return b
    for b in range(count):
        fetch(ring.memory, per[FIRST, b] * width, AHEAD * width)
    group = GROUP if batch[TIME_FIRST] else 1
    for low in range(0, count, group):  # so that rows are written next to each other, and read one after another
        high = min(low + group, count)
        for b in range(low, high):
            _scan(per[FIRST, b], per[LENGTHS, b], steps, ring, rewards[b - low], marks[b - low])
            per[LENGTHS, b] = marks[b - low, KNOWN] + 1
        _write((low, high, total, ring.rows), gamma, (rewards, marks), ring.memory, out, batch, blank, per, table)
    return -1


@jit
def _find(places: Ints, burn_in: int, ring: RingArrays, per: Ints) -> None:
    """Fill ``per``, with the number of rows up to the anchor in place of the lengths."""
    length, stride, inverse = ring.counters[LENGTH], ring.counters[STRIDE], 1.0 / ring.rows
    for b in range(places.size):
        index = np.int64(ring.step[places[b]])
        env, begin, number = row_at(places[b], inverse, ring)
        start = window_start(index, length, stride)
        first = max(start - burn_in, 0)
        back = index - first  # how many rows before the anchor row 0 lies, less than ``rows`` if the window is live
        per[INDEX, b], per[LENGTHS, b], per[BURN_IN, b] = number * ring.state.shape[0] + env, back + 1, start - first
        per[ENV, b], per[START, b] = env, number - index + start
        per[FIRST, b] = places[b] - back + (ring.rows if places[b] - back < begin else 0)


@jit
def _scan(first: int, own: int, steps: int, ring: RingArrays, rewards: Any, marks: Ints) -> None:
    """Note a window's ``marks``, and the rewards of its ``own`` steps from ``first`` on and of those they reach to."""
    known, place, last = 0, first, first
    begin = first - remainder(first, ring.rows, 1.0 / ring.rows)
    while known < own or (known < own + steps - 1 and ring.stamp[place] >= 0):
        rewards[known] = ring.reward[place]
        known, last = known + 1, place
        place = place_after(place, begin, ring.rows)
    marks[PLACE], marks[BEGIN], marks[OWN], marks[KNOWN] = first, begin, own, known
    marks[OPENS], marks[ENDS], marks[CUTS] = ring.step[first] == 0, ring.terminated[last], ring.truncated[last]


@jit
def _write(
    window: Any, gamma: float, scanned: Any, memory: Any, out: Any, batch: Ints, blank: Any, per: Ints, table: Ints
) -> None:
    """Windows ``low`` to ``high``, row by row: their steps, then the final observation if there is one, then blanks.

    Row t of window b is row t * B + b of ``out``, or b * T + t; its first byte is at the address ``base``. A row is
    ``wide`` bytes long, a multiple of 16, so the next one is ``wide`` // s elements of s bytes away.
    """
    (low, high, total, rows), (rewards, marks) = window, scanned
    count, width, wide, size = per.shape[1], memory.shape[1], out.shape[1], out.shape[0]
    here, there, nothing = memory.ctypes.data, out.ctypes.data, blank.ctypes.data
    sums = strided(there + batch[SUM], size, wide // 4, np.float32)
    terminals = strided(there + batch[TERMINAL], size, wide, np.uint8)
    cuts = strided(there + batch[CUT], size, wide, np.uint8)
    discounts = strided(there + batch[DISCOUNT], size, wide // 4, np.float32)
    counts = strided(there + batch[STEPS], size, wide // 4, np.int32)
    following = strided(there + batch[NEXT_ROW], size, wide // 8, np.int64)
    masks = strided(there + batch[MASK], size, wide, np.uint8)
    starts = strided(there + batch[IS_START], size, wide, np.uint8)
    step_bytes, obs_bytes, steps, time_first = batch[STEP_BYTES], batch[OBS_BYTES], batch[REACH], batch[TIME_FIRST]
    begin, listed = per[BURN_IN], table.size > 0
    for t in range(total):
        for b in range(low, high):
            g, row = b - low, t * count + b if time_first else b * total + t
            if b + high - low < count:  # so that the next windows' rows come while these are written
                fetch(memory, (per[FIRST, b + high - low] + t) * width, width)
            known, base, place = marks[g, KNOWN], there + row * wide, marks[g, PLACE]
            bounds = t == known and (marks[g, ENDS] | marks[g, CUTS]) != 0
            if t > known or bounds:
                copy_short(address_t(base), address_t(nothing), np.intp(wide))
            if listed:
                table[row] = -1 if t > known else (-2 - place if bounds else place)
            if t > known:
                continue
            nbytes = np.intp(obs_bytes if bounds else step_bytes)
            copy_short(address_t(base), address_t(here + place * width), nbytes)
            marks[g, PLACE] = place_after(place, marks[g, BEGIN], rows)
            k = min(steps, known - t) if t < marks[g, OWN] else 0  # so t + k <= known: within what was scanned
            value, discount, last = 0.0, 1.0, k > 0 and t + k == known
            for j in range(k):
                value, discount = add_reward(value, discount, rewards[g, t + j], gamma)
            terminal, cut = (marks[g, ENDS], marks[g, CUTS]) if last else (0, 0)
            sums[row] = value
            terminals[row], cuts[row] = terminal, cut
            discounts[row] = bootstrap(discount, k == 0 or terminal != 0)
            counts[row] = k
            following[row] = t + k if k else -1
            masks[row] = begin[b] <= t < marks[g, OWN]
            starts[row] = t == 0 and marks[g, OPENS] != 0
