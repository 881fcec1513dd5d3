"""Sequences: what a batch of windows of a ring's episodes holds, in plain Python.

:mod:`relive.kernels.reference.rule` says where windows start and end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    for b, place in enumerate(places.tolist()):
        window = _window_of(ring, batch, place, total)
        if window is None:
            return b
        for t in range(total):
            row = t * count + b if batch[TIME_FIRST] else b * total + t
            at = _copy_row(ring, batch, window, window.first + t, out[row], blank)
            if table.size:
                table[row] = at
            if window.first + t <= window.known:
                _write_step(ring, batch, gamma, window, t, out[row])
        per[:, b] = [
            window.number * len(ring.state) + window.env,
            window.known - window.first + 1,
            window.start - window.first,
            window.env,
            window.number - window.anchor + window.start,
            window.episode[window.first],
        ]
    return -1


class _Window(NamedTuple):
    """A window. Its steps are counted from its episode's first one."""

    env: int
    number: int
    """The number of the anchor's row in its env."""
    anchor: int
    """The last step of the window."""
    start: int
    """The window's first step."""
    first: int
    """The first step of burn-in."""
    known: int
    """How many steps of the episode have rewards that are read; row ``known`` has the last observation."""
    episode: list[int]
    """The places of the episode's steps."""

    def ended(self, ring: RingArrays) -> tuple[int, int]:
        """Whether the last known step is terminal, and whether it is cut."""
        last = self.episode[self.known - 1]
        return ring.terminated[last], ring.truncated[last]


def _window_of(ring: RingArrays, batch: Ints, place: int, total: int) -> _Window | None:
    """The window whose anchor lies at a place; None if there is no such row, or more than ``total`` rows before it."""
    if not 0 <= place < len(ring.memory):
        return None
    (env, _, number), index = row_at(place, ring), int(ring.step[place])
    start = int(window_start(index, int(ring.counters[LENGTH]), int(ring.counters[STRIDE])))
    first = max(start - int(batch[BURN]), 0)
    if not 0 <= index - first < min(ring.rows, total):
        return None
    reach = index + int(batch[REACH])
    episode = [place_of(number - index + k, env, ring.rows) for k in range(reach + 1)]
    known = index + 1
    while known < reach and ring.stamp[episode[known]] >= 0:
        known += 1
    return _Window(env, number, index, start, first, known, episode)


def _copy_row(ring: RingArrays, batch: Ints, window: _Window, i: int, row: Any, blank: Any) -> int:
    """Copy what the ring has of step ``i``, or of the observation after the last one; gives the entry of ``table``."""
    beyond, bounds = i > window.known, i == window.known and any(window.ended(ring))
    if beyond or bounds:
        row[:] = blank
    if beyond:
        return -1
    place = window.episode[i]
    nbytes = batch[OBS_BYTES] if bounds else batch[STEP_BYTES]
    row[:nbytes] = ring.memory[place, :nbytes]
    return -2 - place if bounds else place


def _write_step(ring: RingArrays, batch: Ints, gamma: float, window: _Window, t: int, row: Any) -> None:
    """Write what is computed for row ``t`` of a window: its n-step sum and what goes with it."""
    i, (terminal, cut) = window.first + t, window.ended(ring)
    k = min(int(batch[REACH]), window.known - i) if i <= window.anchor else 0
    value, discount = 0.0, 1.0
    for j in range(k):
        value, discount = add_reward(value, discount, ring.reward[window.episode[i + j]], gamma)
    last = k > 0 and i + k == window.known
    values: list[tuple[Any, Any]] = [
        (value, np.float32),
        (terminal if last else 0, np.uint8),
        (cut if last else 0, np.uint8),
        (bootstrap(discount, k == 0 or (last and terminal)), np.float32),
        (k, np.int32),
        (t + k if k else -1, np.int64),
        (window.start <= i <= window.anchor, np.uint8),
        (i == 0, np.uint8),
    ]
    for field, (entry, dtype) in enumerate(values):
        row[batch[field] : batch[field] + np.dtype(dtype).itemsize].view(dtype)[0] = entry
