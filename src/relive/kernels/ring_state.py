"""The columns of a ring's ``state``, the entries of its ``counters``, and the ways in which a row can come.

``state`` is int64 ``[N, 4]``, one line per env. ``counters`` is int64 ``[8]``: what was counted in the whole ring, and
from :data:`RULE` up to :data:`NOT_FINITE` the rule of what can be drawn.
"""

from __future__ import annotations

__all__ = [
    "ALONE",
    "COLUMNS",
    "COMPLETED",
    "COUNT",
    "COUNTERS",
    "DRAWABLE",
    "ENDED",
    "EPISODES",
    "FINALS",
    "GOES_ON",
    "HEAD",
    "HISTORY",
    "LAST",
    "LENGTH",
    "LINKED",
    "LONGEST",
    "NEXT",
    "NOT_FINITE",
    "NO_FINALS",
    "RULE",
    "STRIDE",
    "TAIL",
    "TAILS",
]

HEAD = 0
"""The number that the env's next row will have."""
TAIL = 1
"""The number of the env's first row that was not cleared."""
NEXT = 2
"""The index that the env's next row has within its episode; 0 starts an episode."""
COUNT = 3
"""How many transitions of the env were completed."""
COLUMNS = 4
"""The width of ``state``."""

COMPLETED = 0
"""How many transitions were ever completed, in all envs."""
DRAWABLE = 1
"""How many rows can be drawn now."""
EPISODES = 2
"""How many episodes have ended."""
HISTORY = 3
"""How many rows before a window's last must be live."""
LENGTH = 4
"""How many steps a window has."""
STRIDE = 5
"""How many steps lie between the starts of two windows."""
TAILS = 6
"""1 if a last window that is shorter counts, else 0."""
NOT_FINITE = 7
"""How many rewards were NaN or infinite."""
COUNTERS = 8
"""The length of ``counters``."""
RULE = HISTORY
"""Where the rule starts, up to :data:`NOT_FINITE`: history, length, stride, tails."""

NO_FINALS = 0
"""A way of adding rows: no final observations are given, so no row may end its episode."""
FINALS = 1
"""A way of adding rows: final observations are given, and are stored where an episode ended."""
ALONE = 2
"""A way of adding rows, and a kind of row: it has a next observation of its own, and is an episode of one step."""
LINKED = 3
"""A way of adding rows, and a kind of row: it has a next observation of its own, and the env's next row goes on."""

GOES_ON = 0
"""A kind of row: its episode goes on, and the next row holds its next observation."""
ENDED = 1
"""A kind of row: it ended its episode, whose final observation takes the row after it."""
LAST = 4
"""A kind of row: it has a next observation of its own, and ended its episode. Added as :data:`LINKED`."""

LONGEST = 2**31 - 1
"""Steps after which an episode is cut, as if it had been interrupted: a row's index within it is an int32."""
