"""Counters that processes share: one writes them, others see them and may sleep until they change.

The twins use atomic instructions, which plain Python lacks. So these definitions say what the results are for one
process at a time, and :mod:`relive.kernels.cpu.counters` says in which order other processes see them.

A bell is an int32 that a process sleeps on. Its lowest bit is 1 while somebody may sleep, the others count how often it
rang. It wraps around.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["mark_bell", "publish", "published", "ring_bell"]

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
    """A counter; what is read afterwards is at least as new."""
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
