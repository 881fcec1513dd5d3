"""CollectStats: what one call of collect() did."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CollectStats"]


@dataclass(frozen=True, slots=True)
class CollectStats:
    """What one call of :meth:`Collector.collect` did.

    ``num_steps`` counts real transitions of all envs; ``seconds`` is wall time. ``episode_returns`` (undiscounted) and
    ``episode_lengths`` describe the episodes that ended, in that order.
    """

    num_steps: int
    seconds: float
    episode_returns: list[float] = field(default_factory=list[float])
    episode_lengths: list[int] = field(default_factory=list[int])

    @property
    def num_episodes(self) -> int:
        """Episodes that ended."""
        return len(self.episode_returns)

    @property
    def steps_per_second(self) -> float:
        """Real transitions per second of wall time."""
        return self.num_steps / max(self.seconds, 1e-9)
