"""Progress: how many batches a replay has drawn, and with which seed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress"]


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
