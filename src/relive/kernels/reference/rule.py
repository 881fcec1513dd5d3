"""Which rows of a ring can be drawn: those that are live, complete and the last of a window, with their history.

The windows of an episode start at its steps 0, stride, 2 stride, ...; each has ``length`` steps but the last, which has
what is left. So a window is known by the index ``at``, within the episode, of its last step. Every single row is a
window of length 1. The counters hold the rule: the number of rows ``history`` that must be live before a row, the
``length`` and ``stride`` of windows, and whether (``tails``) a shorter last one counts.
"""

from __future__ import annotations

from typing import Any

from ..ring_state import HEAD, HISTORY, LENGTH, NEXT, STRIDE, TAILS, RingArrays
from .places import oldest, place_after, place_of

__all__ = ["all_anchors", "ends_full", "ends_window", "window_start"]


def window_start(at: Any, length: int, stride: int) -> Any:
    """The index of the first step of the window whose last is step ``at`` of an episode; ints or arrays of them.

    The window is the last of the episode so far: a full one, or a tail.
    """
    beyond = at + 1 - length
    return (beyond + stride - 1) // stride * stride * (beyond > 0)


def ends_full(at: Any, length: int, stride: int) -> Any:
    """Whether step ``at`` of an episode is the last of a window of the whole ``length``; ints or arrays of them."""
    return (at + 1 >= length) & ((at + 1 - length) % stride == 0)


def ends_window(place: int, ring: RingArrays) -> bool:
    """Whether a complete row is the last of a window.

    It ends a full one, or, where tails count, it is the last complete row of an episode that ended or was interrupted:
    the next row is not complete, and the one after begins another episode, or will.
    """
    rows, counters = ring.rows, ring.counters
    if ends_full(int(ring.step[place]), int(counters[LENGTH]), int(counters[STRIDE])):
        return True
    e = place // rows
    after = place_after(place, e * rows, rows)
    if not counters[TAILS] or ring.stamp[after] >= 0:
        return False
    if after == place_of(int(ring.state[e, HEAD]) - 1, e, rows):
        return bool(ring.state[e, NEXT] == 0)
    return bool(ring.step[place_after(after, e * rows, rows)] == 0)


def all_anchors(ring: RingArrays) -> list[tuple[int, int]]:
    """The (env, number) of every row that can be drawn, env by env in the order of time."""
    found: list[tuple[int, int]] = []
    history = int(ring.counters[HISTORY])
    for e in range(len(ring.state)):
        first = oldest(e, ring)
        for number in range(first, int(ring.state[e, HEAD])):
            place = place_of(number, e, ring.rows)
            ready = ring.stamp[place] >= 0 and number - min(int(ring.step[place]), history) >= first
            if ready and ends_window(place, ring):
                found.append((e, number))
    return found
