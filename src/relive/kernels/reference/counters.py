"""Counters that processes share: one writes them, others see them and may sleep until they change.

The twins use atomic instructions, which plain Python lacks. So these definitions say what the results are for one
process at a time, and :mod:`relive.kernels.cpu.counters` says in which order other processes see them.

A bell is an int32 that a process sleeps on. Its lowest bit is 1 while somebody may sleep, the others count how often it
rang. It wraps around.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..tables import COMMITTED, CUT, DRAINED, FOLLOWED, LANE_ALONE, MASKED, WANTED, LaneArrays

__all__ = [
    "INSERTS",
    "OTHERS",
    "PENDING",
    "SAMPLES",
    "add_count",
    "admit",
    "admit_noted",
    "allows",
    "commit_step",
    "confirm",
    "mark_bell",
    "publish",
    "published",
    "ring_bell",
    "take_back",
]


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
    """Let others see step ``number``, which was written to its row; the marks other than LANE_ALONE are given.

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
                marks |= LANE_ALONE
    lane.marks[row] = marks
    lane.counters[COMMITTED] = number + 1
    return int(number + 1 - lane.counters[DRAINED] >= lane.bell[WANTED] and ring_bell(lane.bell, 0))


INSERTS, SAMPLES = 0, 1
"""The sides, and their places among the counts."""

PENDING = 2
"""The place of the number of inserts that are counted and not in the replay yet. No sample passes because of them."""

OTHERS = 3
"""The place of the number of inserts that others made, or may make, without counting them here. They take room."""


def allows(side: int, count: int, inserts: int, samples: int, rule: tuple[float, int, float, float]) -> bool:
    """True if ``count`` more inserts or samples may pass.

    Args:
        side: ``INSERTS`` or ``SAMPLES``.
        count: how many, all or none.
        inserts: so far.
        samples: so far.
        rule: ``ratio``, ``min_size``, ``low`` and ``high`` of :func:`admit`.
    """
    ratio, min_size, low, high = rule
    if side == SAMPLES:
        return inserts >= min_size and inserts * ratio - (samples + count) >= low
    return inserts + count <= min_size or (inserts + count) * ratio - samples <= high


def admit(counts: Ints, side: int, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
    """Count ``count`` more inserts or samples, if the limit allows them; returns whether it did.

    Args:
        counts: int64 vector: inserts and samples so far, then pending inserts and those of others; all together
            below 2⁵³.
        side: ``INSERTS`` or ``SAMPLES``.
        count: how many, all or none.
        ratio: samples per insert.
        min_size: inserts before the first sample.
        low: the least D after samples.
        high: the largest D after inserts.
    """
    inserts, samples = int(counts[INSERTS]), int(counts[SAMPLES])
    inserts += int(counts[OTHERS]) if side == INSERTS else -int(counts[PENDING])
    allowed = allows(side, count, inserts, samples, (ratio, min_size, low, high))
    if allowed:
        counts[side] += count
    return allowed


def admit_noted(counts: Ints, note: Ints, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
    """Count ``count`` more inserts as :func:`admit` does, and as pending; ``note``, int64 ``[1]``, gets as many more.

    Once they are in, :func:`confirm` them. If they do not go in, :func:`take_back`.
    """
    counts[PENDING] += count
    if not admit(counts, INSERTS, count, ratio, min_size, low, high):
        counts[PENDING] -= count
        return False
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
