"""The memory that compiled code is handed: of a ring, of rows on their way into it, and of a lane, as NamedTuples.

The numbers that name their columns, entries and words are defined in ``src/core``, beside the code that reads them:
those of ``state`` and ``counters`` in ``ring.hpp``, ways and kinds of rows in ``adding.hpp``, the note of how to undo a
change (``undo``) in ``adding.cpp``, lanes and limits in ``counters.cpp``, priorities in ``priorities.hpp``. Files and
saves hold them: never renumber them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._core import (
    ACROSS,
    ALL_RATED,
    ALONE,
    ALPHA,
    COLUMNS,
    COMMITTED,
    COMPLETED,
    COUNT,
    COUNTERS,
    CUT,
    DRAINED,
    DRAWABLE,
    DRAWS,
    EPISODE,
    EPISODES,
    EPS,
    FACTS,
    FANOUT,
    FINAL,
    FINALS,
    FINISHED,
    FOLLOWED,
    FUTURE,
    HEAD,
    HISTORY,
    INSERTS,
    LANE_ALONE,
    LANE_COUNTERS,
    LARGEST,
    LARGEST_ERROR,
    LENGTH,
    LINKED,
    LONGEST,
    MASKED,
    MOST_ATTEMPTS,
    NEXT,
    NO_FINALS,
    NOT_FINITE,
    OTHERS,
    PAST,
    PENDING,
    RANDOM,
    RATED,
    RATED_LARGEST,
    RATED_START,
    SAMPLES,
    STRIDE,
    TAIL,
    TAILS,
    UNDO_ADDING,
    UNDO_AFTER,
    UNDO_COUNTERS,
    UNDO_ENV,
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    UNDO_REBUILD,
    UNDO_ROW,
    UNDO_ROWS,
    UNDO_START,
    UNFIT,
    UNUSUAL,
    USED_UP,
    WANTED,
    WEIGH,
)

__all__ = [
    "ACROSS",
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
    "HEAD",
    "HISTORY",
    "INSERTS",
    "LANE_ALONE",
    "LANE_COUNTERS",
    "LARGEST",
    "LARGEST_ERROR",
    "LENGTH",
    "LINKED",
    "LONGEST",
    "MASKED",
    "MOST_ATTEMPTS",
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
    step: NDArray[np.int32]
    """int32 ``[R]``: a row's index within its episode."""
    stamp: NDArray[np.int64]
    """int64 ``[R]``: the number of a complete transition, in the order of completion; else negative."""
    order: NDArray[np.int32]
    """int32 ``[R]``: how many transitions of the env are older than the row, modulo 2**32."""
    reward: NDArray[np.float32]
    """float32 ``[R]``."""
    terminated: NDArray[np.uint8]
    """uint8 ``[R]``, 0 or 1."""
    truncated: NDArray[np.uint8]
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
    reward: NDArray[np.float32]
    """float32 ``[K]``, in ``staged``."""
    terminated: NDArray[np.uint8]
    """uint8 ``[K]``, in ``staged``."""
    truncated: NDArray[np.uint8]
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


RULE = HISTORY
"""Where the rule starts, up to :data:`NOT_FINITE`: history, length, stride, and tails, plus ACROSS in the same word."""


def undo_size(num_envs: int, most: int) -> int:
    """The length of a note for a ring that gets up to ``most`` rows a call, each with a final observation."""
    # a row and its final observation take two entries; the row before the first one of each env takes one more
    return UNDO_START + UNDO_ENV * num_envs + UNDO_ROW * (2 * most + min(num_envs, most))


def first_row(num_envs: int) -> int:
    """Where the entries of rows begin, for a ring of ``num_envs`` envs."""
    return UNDO_START + UNDO_ENV * num_envs


def packed(step: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """A row's ``step`` in the upper and ``order`` in the lower 32 bits of one word."""
    # ``order`` may be negative: without the mask its sign would overwrite ``step``
    return (step << 32) | (order & 0xFFFFFFFF)


def unpacked(words: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """``step`` and ``order``, int32 ``[K]``, of the words ``[K]`` that :func:`packed` made."""
    return (words >> 32).astype(np.int32), words.astype(np.int32)  # a cast to int32 keeps the lower 32 bits


def env_entries(note: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The first ``count`` entries of envs as a view ``[count, UNDO_ENV]``."""
    return note[UNDO_START : first_row(count)].reshape(count, UNDO_ENV)


def row_entries(note: NDArray[np.int64], num_envs: int, count: int) -> NDArray[np.int64]:
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
