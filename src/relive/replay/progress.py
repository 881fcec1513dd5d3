"""Progress: how many batches a replay has drawn, and with which seed."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.data import get_worker_info

from ..kernels.reference.random import key as stream
from .progress_slots import ProgressSlots

__all__ = ["Progress", "stream_of"]


@dataclass(slots=True)
class Progress:
    """Counts of what a replay has drawn, and its seed. Saves contain all of it."""

    seed: int
    """The seed of the batches."""
    first: int = 0
    """How many batches were drawn before this seed was set."""
    draws: int = 0
    """Batches drawn."""
    sampled: int = 0
    """Rows drawn."""
    late: int = 0
    """Priorities that came after their transition was overwritten."""
    slots: ProgressSlots | None = None
    """Where the counts are kept for the next process, of a replay in files."""


def stream_of(seed: int) -> int:
    """The seed of the batches. Each worker of a ``DataLoader`` has a copy of the buffer, and a seed of its own."""
    worker = get_worker_info()
    return seed if worker is None else stream(seed, worker.seed)
