"""Which rows of a ring can be drawn: those that are live, complete and the last of a window, with their history.

The windows of an episode start at its steps 0, stride, 2 stride, ...; each has ``length`` steps but the last, which has
what is left. So a window is known by the index ``at``, within the episode, of its last step. Every single row is a
window of length 1. The counters hold the rule: the number of rows ``history`` that must be live before a row, the
``length`` and ``stride`` of windows, and whether (``tails``) a shorter last one counts.
"""

from __future__ import annotations

from typing import Any

from ..ring_state import HEAD, HISTORY, LENGTH, NEXT, STRIDE, TAILS
from .places import Ints, oldest, place_after, place_of

__all__ = ["all_anchors", "ends_full", "ends_window", "window_start"]


def window_start(at: Any, length: int, stride: int) -> Any:
    """The index of the first step of the window whose last is step ``at`` of an episode, which ends one."""
    beyond = at + 1 - length
    return (beyond + stride - 1) // stride * stride * (beyond > 0)


def ends_full(at: Any, length: int, stride: int) -> Any:
    """Whether step ``at`` of an episode is the last of a window of the whole ``length``."""
    return (at + 1 >= length) & ((at + 1 - length) % stride == 0)


def ends_window(place: int, rows: int, state: Ints, counters: Ints, step: Any, stamp: Any) -> bool:
    """Whether a complete row is the last of a window.

    It ends a full one, or, where tails count, it is the last complete row of an episode that ended or was interrupted:
    the next row is not complete, and the one after begins another episode, or will.
    """
    if ends_full(int(step[place]), int(counters[LENGTH]), int(counters[STRIDE])):
        return True
    e = place // rows
    after = place_after(place, e * rows, rows)
    if not counters[TAILS] or stamp[after] >= 0:
        return False
    if after == place_of(int(state[e, HEAD]) - 1, e, rows):
        return bool(state[e, NEXT] == 0)
    return bool(step[place_after(after, e * rows, rows)] == 0)


def all_anchors(rows: int, state: Ints, counters: Ints, step: Any, stamp: Any) -> list[tuple[int, int]]:
    """The (env, number) of every row that can be drawn, env by env in the order of time."""
    found: list[tuple[int, int]] = []
    history = int(counters[HISTORY])
    for e in range(len(state)):
        first = oldest(e, rows, state)
        for number in range(first, int(state[e, HEAD])):
            place = place_of(number, e, rows)
            ready = stamp[place] >= 0 and number - min(int(step[place]), history) >= first
            if ready and ends_window(place, rows, state, counters, step, stamp):
                found.append((e, number))
    return found
