"""Counters that processes share: one writes them, others see them and may sleep until they change.

The twins use atomic instructions, which plain Python lacks. So these definitions say what the results are for one
process at a time, and :mod:`relive.kernels.cpu.counters` says in which order other processes see them.

A bell is an int32 that a process sleeps on. Its lowest bit is 1 while somebody may sleep, the others count how often it
rang. It wraps around.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..lane_state import ALONE, COMMITTED, CUT, DRAINED, FOLLOWED, MASKED, WANTED, LaneArrays

__all__ = ["commit_step", "mark_bell", "publish", "published", "ring_bell"]

Ints = NDArray[np.int64]
Bells = NDArray[np.int32]


def publish(counters: Ints, place: int, value: int, bells: Bells, bell: int) -> bool:
    """Set a counter, after all that was written before, and ring a bell.

    Args:
        counters: int64 vector.
        place: which of them.
        value: what others see from now on.
        bells: int32 vector.
        bell: which of them.

    Returns:
        whether to wake those who sleep on the bell.
    """
    counters[place] = value
    return ring_bell(bells, bell)


def published(counters: Ints, place: int) -> int:
    """A counter. What is read afterwards is at least as new, and what was read before is no newer."""
    return int(counters[place])


def mark_bell(bells: Bells, place: int) -> int:
    """Note that somebody may sleep on a bell; returns its value, which any ring from now on changes."""
    bells[place] |= 1
    return int(bells[place])


def ring_bell(bells: Bells, place: int) -> bool:
    """Count a ring and clear the mark, if the bell is marked; returns whether it was."""
    value = int(bells[place])
    if value & 1 == 0:
        return False
    bells[place] = np.array(value + 1, np.int64).astype(np.int32)  # 2 for the ring, less 1 for the mark
    return True


def commit_step(lane: LaneArrays, number: int, marks: int) -> int:
    """Let others see step ``number``, which was written to its row; the marks other than ALONE are given.

    Args:
        lane: where it is.
        number: of the step; as many were committed before.
        marks: CUT, FOLLOWED and MASKED, as far as they hold.

    Returns:
        1 if somebody sleeps on the bell and the lane holds as many steps as it rings for, else 0. Or ``-1 - n``, if the
        episode of env n ended and the step is not FOLLOWED; then nothing is committed.
    """
    size = len(lane.marks)
    row, before = number % size, (number - 1) % size
    for n in range(lane.mask.shape[1]):
        kept = not marks & MASKED or lane.mask[row, n]
        if kept and not marks & FOLLOWED and (lane.terminated[row, n] or lane.truncated[row, n]):
            return -1 - n
        if not kept and not marks & CUT:  # then there is a step before
            was_kept = not lane.marks[before] & MASKED or lane.mask[before, n]
            if was_kept and not (lane.terminated[before, n] or lane.truncated[before, n]):
                marks |= ALONE
    lane.marks[row] = marks
    lane.counters[COMMITTED] = number + 1
    return int(number + 1 - lane.counters[DRAINED] >= lane.bell[WANTED] and ring_bell(lane.bell, 0))
