"""What :mod:`relive.core` does to counters that processes share, for one process at a time.

A bell is an int32 that a process sleeps on. Its lowest bit is 1 while somebody may sleep, the others count how often it
rang. It wraps around.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relive.core.words import (
    COMMITTED,
    CUT,
    DRAINED,
    FOLLOWED,
    INSERTS,
    LANE_ALONE,
    MASKED,
    OTHERS,
    PENDING,
    SAMPLES,
    WANTED,
    LaneArrays,
)

Ints = NDArray[np.int64]
Bells = NDArray[np.int32]


def publish(counters: Ints, place: int, value: int, bells: Bells, bell: int) -> bool:
    """Set a counter and ring a bell; returns whether to wake those who sleep on it."""
    counters[place] = value
    return ring_bell(bells, bell)


def published(counters: Ints, place: int) -> int:
    """A counter."""
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


class Lane:
    """As :class:`relive.core.Lane`."""

    def __init__(self, arrays: LaneArrays) -> None:
        self.arrays = arrays

    def commit(self, number: int, marks: int) -> int:
        """Let others see step ``number``, of which all marks other than LANE_ALONE are given.

        Returns:
            1 if somebody sleeps on the bell and the lane holds as many steps as it rings for, else 0. Or ``-1 - n``,
            if the episode of env n ended and the step is not FOLLOWED; then nothing is committed.
        """
        lane = self.arrays
        size = len(lane.marks)
        row, before = number % size, (number - 1) % size
        for n in range(lane.mask.shape[1]):
            kept = not marks & MASKED or lane.mask[row, n]
            if kept and not marks & FOLLOWED and (lane.terminated[row, n] or lane.truncated[row, n]):
                return -1 - n
            if not kept and not marks & CUT:  # then there is a step before
                was_kept = not lane.marks[before] & MASKED or lane.mask[before, n]
                if was_kept and not (lane.terminated[before, n] or lane.truncated[before, n]):
                    marks |= LANE_ALONE
        lane.marks[row] = marks
        lane.counters[COMMITTED] = number + 1
        return int(number + 1 - lane.counters[DRAINED] >= lane.bell[WANTED] and ring_bell(lane.bell, 0))


Rule = Any
"""``ratio``, ``min_size``, ``low`` and ``high``: samples per insert, inserts before the first sample, the least
``inserts * ratio - samples`` after samples, and the largest after inserts."""


def admit(counts: Ints, side: int, count: int, *rule: Rule) -> bool:
    """Count ``count`` more inserts or samples, all or none, if the limit allows them; returns whether it did."""
    ratio, min_size, low, high = rule
    inserts, samples = int(counts[INSERTS]), int(counts[SAMPLES])
    if side == INSERTS:
        after = inserts + int(counts[OTHERS]) + count
        allowed = after <= min_size or after * ratio - samples <= high
    else:
        ready = inserts - int(counts[PENDING])
        allowed = ready >= min_size and ready * ratio - (samples + count) >= low
    if allowed:
        counts[side] += count
    return allowed


def admit_noted(counts: Ints, note: Ints, count: int, *rule: Rule) -> bool:
    """Count ``count`` more inserts as :func:`admit` does, and as pending; ``note``, int64 ``[1]``, gets as many more.

    Once they are in, :func:`confirm` them. If they do not go in, :func:`take_back`.
    """
    if not admit(counts, INSERTS, count, *rule):
        return False
    counts[PENDING] += count
    note[0] += count
    return True


def confirm(counts: Ints, note: Ints) -> None:
    """The inserts of ``note`` are in: clear it."""
    counts[PENDING] -= note[0]
    note[0] = 0


def take_back(counts: Ints, note: Ints) -> None:
    """The inserts of ``note`` do not go in: clear it."""
    counts[INSERTS] -= note[0]
    confirm(counts, note)


def add_count(counts: Ints, place: int, amount: int) -> None:
    """Add to a count."""
    counts[place] += amount
