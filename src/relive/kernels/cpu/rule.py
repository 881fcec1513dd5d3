"""Which rows of a ring can be drawn: reference/rule.py's rule, asked of one row at a time."""

from __future__ import annotations

from typing import Any

from ..reference import rule as plain
from ..ring_state import HEAD, HISTORY, LENGTH, NEXT, STRIDE, TAILS, RingArrays
from .jit import inlined, jit
from .places import oldest, place_after

__all__ = ["can_draw", "ends_full", "ends_window", "window_start"]

window_start = jit(plain.window_start)


@inlined
def ends_full(at: int, length: int, stride: int) -> bool:
    """See :func:`relive.kernels.reference.rule.ends_full`. A stride of 1, the most common, needs no division."""
    return at + 1 >= length and (stride == 1 or (at + 1 - length) % stride == 0)


@inlined
def ends_window(place: int, number: int, begin: int, head: int, following: int, ring: RingArrays) -> bool:
    """See :func:`relive.kernels.reference.rule.ends_window`.

    ``begin`` is the env's first place, ``head`` the number of its next row, which will have the index ``following``.
    """
    if ends_full(ring.step[place], ring.counters[LENGTH], ring.counters[STRIDE]):
        return True
    after = place_after(place, begin, ring.rows)
    if not ring.counters[TAILS] or ring.stamp[after] >= 0:
        return False
    if number + 2 == head:  # the row after is the newest, and none was written behind it
        return following == 0
    return ring.step[place_after(after, begin, ring.rows)] == 0


@inlined
def can_draw(place: Any, number: Any, e: Any, ring: RingArrays) -> bool:
    """Whether a live row can be drawn."""
    history = ring.counters[HISTORY]
    if ring.stamp[place] < 0 or (history and number - min(ring.step[place], history) < oldest(e, ring)):
        return False
    return ends_window(place, number, e * ring.rows, ring.state[e, HEAD], ring.state[e, NEXT], ring)
