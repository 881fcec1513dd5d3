"""Which rows of a ring can be drawn: reference/rule.py's rule, asked of one row at a time."""

from __future__ import annotations

from typing import Any

from ..ring_state import HEAD, HISTORY, LENGTH, NEXT, STRIDE, TAILS
from .jit import jit
from .places import Ints, oldest, place_after

__all__ = ["can_draw", "ends_full", "ends_window", "window_start"]


@jit
def window_start(at: int, length: int, stride: int) -> int:
    """See :func:`relive.kernels.reference.rule.window_start`."""
    beyond = at + 1 - length
    if beyond <= 0:
        return 0
    return beyond if stride == 1 else (beyond + stride - 1) // stride * stride


@jit
def ends_full(at: int, length: int, stride: int) -> bool:
    """See :func:`relive.kernels.reference.rule.ends_full`."""
    return at + 1 >= length and (stride == 1 or (at + 1 - length) % stride == 0)


@jit
def ends_window(
    place: int, number: int, begin: int, rows: int, head: int, following: int, counters: Ints, step: Any, stamp: Any
) -> bool:
    """See :func:`relive.kernels.reference.rule.ends_window`.

    ``begin`` is the env's first place, ``head`` the number of its next row, which will have the index ``following``.
    """
    if ends_full(step[place], counters[LENGTH], counters[STRIDE]):
        return True
    after = place_after(place, begin, rows)
    if not counters[TAILS] or stamp[after] >= 0:
        return False
    if number + 2 == head:  # the row after is the newest, and none was written behind it
        return following == 0
    return step[place_after(after, begin, rows)] == 0


@jit
def can_draw(place: int, number: int, e: int, rows: int, state: Ints, counters: Ints, step: Any, stamp: Any) -> bool:
    """Whether a live row can be drawn."""
    history = counters[HISTORY]
    if stamp[place] < 0 or (history and number - min(step[place], history) < oldest(e, rows, state)):
        return False
    return ends_window(place, number, e * rows, rows, state[e, HEAD], state[e, NEXT], counters, step, stamp)
