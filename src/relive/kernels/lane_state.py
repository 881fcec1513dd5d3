"""The memory of a lane: its arrays, its counters, and the marks of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALONE", "COMMITTED", "COUNTERS", "CUT", "DRAINED", "FOLLOWED", "MASKED", "WANTED", "LaneArrays"]


class LaneArrays(NamedTuple):
    """All that kernels read and write of a lane, a ring of S vector steps of N envs. None of the arrays moves.

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
COUNTERS = 16

WANTED = 1
"""The entry of ``bell`` that says how many steps a lane has to hold."""

# Marks of a step

CUT = 1
"""The step starts new episodes: those under way are interrupted before it."""
FOLLOWED = 2
"""The step came with its next observations."""
MASKED = 4
"""Some rows of the step are left out."""
ALONE = 8
"""A row that is left out interrupts an episode: a replay takes the step by itself, in one piece."""
