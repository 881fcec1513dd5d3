"""Limits of samples per insert: two counts that processes share, and whether either may grow.

The rule is Reverb's (Cassirer et al. 2021), for several items at a time. With D = inserts · ratio - samples:

- n samples may pass if inserts >= min_size and D - n >= low;
- k inserts may pass if inserts + k <= min_size, or if D + k · ratio <= high.

The twin counts with atomic instructions, so that processes and threads may call it at any time. Inserts only make room
for samples, and samples for inserts. So with a count of the other side that is old by now, it allows less, never more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "INSERTS",
    "OTHERS",
    "PENDING",
    "SAMPLES",
    "add_count",
    "admit",
    "admit_noted",
    "allows",
    "confirm",
    "take_back",
]

Counts = NDArray[np.int64]

INSERTS, SAMPLES = 0, 1
"""The sides, and their places among the counts."""

PENDING = 2
"""The place of the number of inserts that are counted and not in the replay yet. No sample passes because of them."""

OTHERS = 3
"""The place of the number of inserts that others made, or may make, without counting them here. They take room."""


def allows(side: int, count: int, inserts: int, samples: int, rule: tuple[float, int, float, float]) -> bool:
    """Whether ``count`` more inserts or samples may pass.

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


def admit(counts: Counts, side: int, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
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


def admit_noted(counts: Counts, note: Counts, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
    """Count ``count`` more inserts as :func:`admit` does, and as pending; ``note``, int64 ``[1]``, gets as many more.

    Once they are in, :func:`confirm` them. If they do not go in, :func:`take_back`.
    """
    counts[PENDING] += count
    if not admit(counts, INSERTS, count, ratio, min_size, low, high):
        counts[PENDING] -= count
        return False
    note[0] += count
    return True


def confirm(counts: Counts, note: Counts) -> None:
    """The inserts of ``note`` are in: clear it."""
    counts[PENDING] -= note[0]
    note[0] = 0


def take_back(counts: Counts, note: Counts) -> None:
    """The inserts of ``note`` do not go in: clear it."""
    counts[INSERTS] -= note[0]
    confirm(counts, note)


def add_count(counts: Counts, place: int, amount: int) -> None:
    """Add to a count."""
    counts[place] += amount
