"""Progress: how many batches a replay has drawn, and with which seed."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.data import get_worker_info

from ..kernels.reference.random import key as stream

__all__ = ["Progress", "stream_of"]


@dataclass(slots=True)
class Progress:
    """How far a replay has come, besides its rows. Saves hold all of it."""

    seed: int
    """What batches are drawn with."""
    first: int = 0
    """The number, among all batches ever drawn, of the first one drawn with this seed."""
    draws: int = 0
    """Batches drawn."""
    sampled: int = 0
    """Rows drawn."""
    late: int = 0
    """Priorities that came after their transition was overwritten."""


def stream_of(seed: int) -> int:
    """The seed of the batches; another one in each worker of a ``DataLoader``, which has a copy of the buffer."""
    worker = get_worker_info()
    return seed if worker is None else stream(seed, worker.seed)
