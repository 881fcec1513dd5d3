"""What sequences are: windows of the steps of one episode, in plain Python."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from definitions.places import place_of, row_at
from definitions.windows import put, summed
from relive.core.words import LENGTH, STRIDE


def read_sequences(
    ring: Any, layout: Any, gamma: float, places: Any, out: Any, blank: Any, facts: Any, table: Any
) -> int:
    """The windows that end at anchors, as packed rows ``[T, B]``, or ``[B, T]``, flattened: uint8 ``[T * B, W]``.

    A window comes after up to ``burn_in`` steps before it, as far as its episode goes, and before as many rows as its
    n-step rewards (as :func:`definitions.windows.read_windows` has them) reach beyond it.

    Each row has the fields ``lasts`` of the step before, (first byte in the ring, in the row, bytes, stored): those of
    ``blank`` before an episode's first step. What is ``stored`` is so copied where an episode ended, and else as it is.

    The row after an episode's last step is ``blank`` with the observation that it ended on; ``blank`` (uint8 ``[W]``)
    is the row that stands where there is nothing. Each step gets the reward, done bits, discount and number of rewards
    of its n-step window, and the row of the batch after that, 0 and -1 behind the last step; whether it belongs to the
    window; and whether it begins its episode. ``facts`` ``[6, B]`` gets what is known of each window: the public index
    of its anchor, its number of rows, how many of them are burn-in, its env, the number of its first step within the
    env, and the place of row 0. ``table``, if not empty, gets the place of each row; -1 where there is none, and
    -2 - place for an observation that an episode ended on.

    Returns -1; or the first of ``places`` that is not a row's, or whose window would not be among the rows or not fit.
    """
    count, total = len(places), len(out) // max(len(places), 1)
    for b, place in enumerate(places.tolist()):
        window = window_of(ring, layout, place, total)
        if window is None:
            return b
        for t in range(total):
            row = t * count + b if layout.time_first else b * total + t
            at = copy_row(ring, layout, window, window.first + t, out[row], blank)
            copy_lasts(ring, layout, window, window.first + t, out[row], blank)
            if len(table):
                table[row] = at
            if window.first + t <= window.known:
                write_step(ring, layout, gamma, window, t, out[row])
        facts[:, b] = [
            window.number * len(ring.state) + window.env,
            window.known - window.first + 1,
            window.start - window.first,
            window.env,
            window.number - window.anchor + window.start,
            window.place(window.first, ring),
        ]
    return -1


class Window(NamedTuple):
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

    def place(self, i: int, ring: Any) -> int:
        """The place of a step of the episode."""
        return place_of(self.number - self.anchor + i, self.env, ring.rows)

    def ended(self, ring: Any) -> tuple[int, int]:
        """The terminated and the truncated flag of the last known step."""
        last = self.place(self.known - 1, ring)
        return ring.terminated[last], ring.truncated[last]


def window_start(at: int, length: int, stride: int) -> int:
    """The index of the first step of the window whose last is step ``at`` of an episode.

    The window is the last of the episode so far: a full one, or a tail.
    """
    beyond = max(at + 1 - length, 0)
    return -(-beyond // stride) * stride


def window_of(ring: Any, layout: Any, place: int, total: int) -> Window | None:
    """The window whose anchor lies at a place; None if there is no such row, or more than ``total`` rows before it."""
    if not 0 <= place < len(ring.memory):
        return None
    (env, number), index = row_at(place, ring), int(ring.step[place])
    start = window_start(index, int(ring.counters[LENGTH]), int(ring.counters[STRIDE]))
    first = max(start - layout.burn_in, 0)
    if not 0 <= index - first < min(ring.rows, total):
        return None
    window = Window(env, number, index, start, first, index + 1)
    while window.known < index + layout.n and ring.stamp[window.place(window.known, ring)] >= 0:
        window = window._replace(known=window.known + 1)
    return window


def copy_row(ring: Any, layout: Any, window: Window, i: int, row: Any, blank: Any) -> int:
    """Copy what the ring has of step ``i``, or of the observation after the last one; gives the entry of ``table``."""
    beyond, bounds = i > window.known, i == window.known and any(window.ended(ring))
    if beyond or bounds:
        row[:] = blank
    if beyond:
        return -1
    place = window.place(i, ring)
    nbytes = layout.obs_bytes if bounds else layout.step_bytes
    row[:nbytes] = ring.memory[place, :nbytes]
    return -2 - place if bounds else place


def copy_lasts(ring: Any, layout: Any, window: Window, i: int, row: Any, blank: Any) -> None:
    """Copy the fields of the step before step ``i``, or before the observation after the last one."""
    bounds = i == window.known and any(window.ended(ring))
    for source, target, size, stored in layout.lasts:
        if i > window.known or (stored and not bounds):
            continue
        before = ring.memory[window.place(i - 1, ring), source : source + size]
        row[target : target + size] = blank[target : target + size] if i == 0 else before


def write_step(ring: Any, layout: Any, gamma: float, window: Window, t: int, row: Any) -> None:
    """Write what is computed for row ``t`` of a window: its n-step sum and what goes with it."""
    i, (terminal, cut) = window.first + t, window.ended(ring)
    k = min(layout.n, window.known - i) if i <= window.anchor else 0
    value, discount = summed([ring.reward[window.place(i + j, ring)] for j in range(k)], gamma)
    last = k > 0 and i + k == window.known
    put(row, layout.reward, value, np.float32)
    put(row, layout.terminated, terminal if last else 0, np.uint8)
    put(row, layout.truncated, cut if last else 0, np.uint8)
    put(row, layout.discount, 0.0 if k == 0 or (last and terminal) else discount, np.float32)
    put(row, layout.steps, k, np.int32)
    put(row, layout.next, t + k if k else -1, np.int64)
    put(row, layout.mask, window.start <= i <= window.anchor, np.uint8)
    put(row, layout.is_start, i == 0, np.uint8)
