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

__all__ = ["INSERTS", "SAMPLES", "add_count", "admit"]

Counts = NDArray[np.int64]

INSERTS, SAMPLES = 0, 1
"""The sides, and their places among the counts."""


def admit(counts: Counts, side: int, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
    """Count ``count`` more inserts or samples, if the limit allows them; returns whether it did.

    Args:
        counts: int64 vector, inserts and samples so far, each below 2⁵³.
        side: ``INSERTS`` or ``SAMPLES``.
        count: how many, all or none.
        ratio: samples per insert.
        min_size: inserts before the first sample.
        low: the least D after samples.
        high: the largest D after inserts.
    """
    inserts, samples = int(counts[INSERTS]), int(counts[SAMPLES])
    if side == SAMPLES:
        allowed = inserts >= min_size and inserts * ratio - (samples + count) >= low
    else:
        allowed = inserts + count <= min_size or (inserts + count) * ratio - samples <= high
    if allowed:
        counts[side] += count
    return allowed


def add_count(counts: Counts, place: int, amount: int) -> None:
    """Add to a count."""
    counts[place] += amount
