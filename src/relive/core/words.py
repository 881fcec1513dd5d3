"""The memory that compiled code is handed: of a ring, of rows on their way into it, and of a lane.

First come the NamedTuples, then the numbers that name their columns, entries and words: a ring's ``state`` and
``counters``, kinds of rows, the note of how to undo a change (``undo``), and the counters and marks of a lane.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALL_RATED",
    "ALONE",
    "ALPHA",
    "COLUMNS",
    "COMMITTED",
    "COMPLETED",
    "COUNT",
    "COUNTERS",
    "CUT",
    "DRAINED",
    "DRAWABLE",
    "DRAWS",
    "ENDED",
    "EPISODE",
    "EPISODES",
    "EPS",
    "FACTS",
    "FANOUT",
    "FINAL",
    "FINALS",
    "FINISHED",
    "FOLLOWED",
    "FUTURE",
    "GOES_ON",
    "HEAD",
    "HISTORY",
    "INSERTS",
    "LANE_ALONE",
    "LANE_COUNTERS",
    "LARGEST",
    "LARGEST_ERROR",
    "LAST",
    "LENGTH",
    "LINKED",
    "LONGEST",
    "MASKED",
    "NEXT",
    "NOT_FINITE",
    "NO_FINALS",
    "OTHERS",
    "PAST",
    "PENDING",
    "RANDOM",
    "RATED",
    "RATED_LARGEST",
    "RATED_START",
    "RULE",
    "SAMPLES",
    "STRIDE",
    "TAIL",
    "TAILS",
    "UNDO_ADDING",
    "UNDO_AFTER",
    "UNDO_COUNTERS",
    "UNDO_ENV",
    "UNDO_ENVS",
    "UNDO_KIND",
    "UNDO_NONE",
    "UNDO_REBUILD",
    "UNDO_ROW",
    "UNDO_ROWS",
    "UNDO_START",
    "UNFIT",
    "UNUSUAL",
    "USED_UP",
    "WANTED",
    "WEIGH",
    "LaneArrays",
    "RingArrays",
    "StagedRows",
    "env_entries",
    "first_row",
    "packed",
    "row_entries",
    "undo_size",
    "unpacked",
]


_NOTHING = np.zeros(0, np.int64)


class RingArrays(NamedTuple):
    """All that compiled code reads and writes of a ring. None of these arrays moves while the ring lives.

    There are R = N * ``rows`` places. The columns ``[R]`` lie within ``memory``, so their strides are its width W.
    """

    rows: int
    """Rows per env."""
    step_bytes: int
    """The bytes at the start of a row that hold a step; bookkeeping follows."""
    obs_bytes: int
    """The bytes at the start of a row that hold its observation, which is all that a final observation has."""
    state: NDArray[np.int64]
    """int64 ``[N, 4]``: HEAD, TAIL, NEXT and COUNT of each env."""
    counters: NDArray[np.int64]
    """int64 ``[9]``: what was counted in the whole ring and, from RULE on, the rule of what can be drawn."""
    memory: NDArray[np.uint8]
    """uint8 ``[R, W]``, the packed rows. W is a multiple of 16 bytes."""
    step: Any
    """int32 ``[R]``: a row's index within its episode."""
    stamp: Any
    """int64 ``[R]``: the number of a complete transition, in the order of completion; else negative."""
    order: Any
    """int32 ``[R]``: how many transitions of the env are older than the row, modulo 2**32."""
    reward: Any
    """float32 ``[R]``."""
    terminated: Any
    """uint8 ``[R]``, 0 or 1."""
    truncated: Any
    """uint8 ``[R]``, 0 or 1."""
    ends: NDArray[np.int32]
    """int32 ``[R]``, or empty until it is asked for: the last rows of episodes, by their ordinal in the env."""
    seen: NDArray[np.int64]
    """int64 ``[N]``, or empty: the number up to which each env's rows are noted in ``ends``."""
    undo: NDArray[np.int64] = _NOTHING
    """int64 ``[U]`` of a ring in files, else empty: how to take back a change that a kill broke off, in the words from
    UNDO_KIND on."""
    reserve: NDArray[np.int64] = _NOTHING
    """int64 ``[N]``, or empty: of each env, rows below this number may be overwritten before the next flush."""


class StagedRows(NamedTuple):
    """K rows on their way into a ring, one of an env each, and what is noted while they are added."""

    envs: NDArray[np.int64]
    """int64 ``[K]``: their envs."""
    staged: NDArray[np.uint8]
    """uint8 ``[K, W]``: the rows, packed as in the ring."""
    final: NDArray[np.uint8]
    """uint8 ``[K, W]``: rows with the final observations, read where an episode ended."""
    reward: Any
    """float32 ``[K]``, in ``staged``."""
    terminated: Any
    """uint8 ``[K]``, in ``staged``."""
    truncated: Any
    """uint8 ``[K]``, in ``staged``."""
    places: NDArray[np.int64]
    """int64 ``[K]``: where the rows go."""
    finals: NDArray[np.int64]
    """int64 ``[K]``: where the final observations go, or -1."""
    tails: NDArray[np.int64]
    """int64 ``[K]``: the number up to which rows of the env make way."""
    where: NDArray[np.int64]
    """int64 ``[E]``: the places of events, rows that can be drawn from now on or no longer. Empty: not listed."""
    opens: NDArray[np.uint8]
    """uint8 ``[E]``: 1 if the row can be drawn from now on, 0 if no longer."""


# The columns of ``state``, and the entries of ``counters``. Saves hold them in this order: never renumber them.
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
WEIGH = 8
"""The unit that is drawn equally often, an index into :data:`relive.ring.ring.WEIGHS`."""
COUNTERS = 9
"""The length of ``counters``."""
RULE = HISTORY
"""Where the rule starts, up to :data:`NOT_FINITE`: history, length, stride, tails."""

# Ways of adding rows, and kinds of rows. 0 and 1 are also what ``terminated | truncated`` of a row gives
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

USED_UP = -(2**62)
"""Returned by adding rows if the rows that it would overwrite are not in reserve. Nothing is changed then."""

UNFIT = -(2**62) - 1
"""Returned by adding a step if it cannot be copied as it is. Nothing is changed then."""


# The words of ``undo``. Files hold them in this order: never renumber them.
UNDO_KIND = 0
"""The word with the kind: UNDO_NONE, UNDO_ADDING or UNDO_REBUILD. Written last, and cleared first."""
UNDO_ENVS = 1
"""How many envs have an entry."""
UNDO_ROWS = 2
"""How many rows have an entry."""
UNDO_COUNTERS = 3
"""Where the counters from before the change begin, COUNTERS words."""
UNDO_START = UNDO_COUNTERS + COUNTERS
"""Where the entries of envs begin. The entries of rows begin after room for N entries of envs."""
UNDO_ENV = 6
"""The words of an env's entry: the env; its HEAD, TAIL, NEXT and COUNT before the change; its HEAD after it."""
UNDO_AFTER = 5
"""The word of an env's entry with its HEAD after the change."""
UNDO_ROW = 3
"""The words of a row's entry: its place, ``stamp``, and ``step`` with ``order`` as :func:`packed`."""
UNDO_NONE = 0
"""A kind: nothing is being changed."""
UNDO_ADDING = 1
"""A kind: rows are being added."""
UNDO_REBUILD = 2
"""A kind: what can be drawn changes as a whole. After a kill it is found anew."""


def undo_size(num_envs: int, most: int) -> int:
    """The length of a note for a ring that gets up to ``most`` rows a call, each with a final observation."""
    # a row and its final observation take two entries; the row before the first one of each env takes one more
    return UNDO_START + UNDO_ENV * num_envs + UNDO_ROW * (2 * most + min(num_envs, most))


def first_row(num_envs: int) -> int:
    """Where the entries of rows begin, for a ring of ``num_envs`` envs."""
    return UNDO_START + UNDO_ENV * num_envs


def packed(step: Any, order: Any) -> Any:
    """A row's ``step`` in the upper and ``order`` in the lower 32 bits of one word."""
    # ``order`` may be negative: without the mask its sign would overwrite ``step``
    return (step << 32) | (order & 0xFFFFFFFF)


def unpacked(words: Any) -> tuple[Any, Any]:
    """``step`` and ``order``, int32 ``[K]``, of the words ``[K]`` that :func:`packed` made."""
    return (words >> 32).astype("int32"), words.astype("int32")  # a cast to int32 keeps the lower 32 bits


def env_entries(note: Any, count: int) -> Any:
    """The first ``count`` entries of envs as a view ``[count, UNDO_ENV]``."""
    return note[UNDO_START : first_row(count)].reshape(count, UNDO_ENV)


def row_entries(note: Any, num_envs: int, count: int) -> Any:
    """The first ``count`` entries of rows as a view ``[count, UNDO_ROW]``."""
    begin = first_row(num_envs)
    return note[begin : begin + UNDO_ROW * count].reshape(count, UNDO_ROW)


class LaneArrays(NamedTuple):
    """All that compiled code reads and writes of a lane, a ring of S vector steps of N envs. None of the arrays moves.

    A step's number counts the lane's steps from 0 on. Step ``number`` lies in row ``number % S``.
    """

    counters: NDArray[np.int64]
    """int64 ``[COUNTERS]``: COMMITTED and DRAINED."""
    bell: NDArray[np.int32]
    """int32 ``[2]``: a bell, and for how many steps in a lane it rings; 0 and 1 mean for each."""
    marks: NDArray[np.uint8]
    """uint8 ``[S]``: the marks of each step, a sum of those below."""
    terminated: NDArray[np.uint8]
    """uint8 ``[S, N]``, 0 or 1."""
    truncated: NDArray[np.uint8]
    """uint8 ``[S, N]``, 0 or 1."""
    mask: NDArray[np.uint8]
    """uint8 ``[S, N]``: 0 where a row is left out. Read only where the step is MASKED."""


# Entries of ``counters``, each in a cache line of its own, since each has another writer

COMMITTED = 0
"""How many steps the writer has committed."""
DRAINED = 8
"""How many of them the owner has taken. COMMITTED is never more than S ahead."""
LANE_COUNTERS = 16

WANTED = 1
"""The entry of ``bell`` that says how many steps a lane has to hold."""

# Marks of a step

CUT = 1
"""The step starts new episodes: those under way are interrupted before it."""
FOLLOWED = 2
"""The step came with its next observations."""
MASKED = 4
"""Some rows of the step are left out."""
FINISHED = 16
"""The step is none: its observations are what the newest steps led to, which become truncated."""
LANE_ALONE = 8
"""A row that is left out interrupts an episode: a replay takes the step by itself, in one piece."""


# Places of the counts of a limit, at the start of an int64 vector that processes share

INSERTS = 0
"""A side, and the place of its count: inserts so far."""
SAMPLES = 1
"""A side, and the place of its count: samples so far."""
PENDING = 2
"""The place of the number of inserts that are counted and not in the replay yet. No sample passes because of them."""
OTHERS = 3
"""The place of the number of inserts that others made, or may make, without counting them here. They take room."""
# Priorities: the entries of ``facts`` and of ``undo``. Files hold them in this order: never renumber them.

FANOUT = 8
"""Children per node of a sum tree: one cache line of float64."""

LARGEST_ERROR = float(np.finfo(np.float32).max)
"""The largest TD error, as errors are stored in float32."""

ALPHA = 0
"""The exponent of priorities, an entry of ``facts``."""
EPS = 1
"""The number that is added to every error, an entry of ``facts``."""
LARGEST = 2
"""The largest error that was ever set, an entry of ``facts``."""
DRAWS = 3
"""How many batches were drawn, an entry of ``facts``. Compiled code does not read it."""
FACTS = 4
"""The length of ``facts``."""

RATED = 0
"""How many errors of ``undo`` have to be put back, if a kill comes now; 0 for none, or ALL_RATED."""
RATED_LARGEST = 1
"""The largest error before, an entry of ``undo``. Pairs of a place and its error before follow."""
RATED_START = 2
"""Where these pairs begin in ``undo``."""
ALL_RATED = -1.0
"""In RATED: there were more errors than ``undo`` has room for, and none was noted."""

UNUSUAL = -1
"""Returned by ``Priorities.rate`` of compiled code for a batch that it does not take. Nothing is changed then."""


FUTURE, FINAL, EPISODE, PAST, RANDOM = range(5)
"""The strategies, which say where a goal may come from: the steps from the anchor on, the last, all of the episode,
those before the anchor; or any step of the whole replay."""
