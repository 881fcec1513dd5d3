"""CollectStats: what one call of collect() did."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

__all__ = ["CollectStats"]


@dataclass(frozen=True, slots=True, repr=False)
class CollectStats:
    """What one call of :meth:`Collector.collect` did.

    ``num_steps`` counts real transitions of all envs; ``seconds`` is wall time. ``episode_returns`` (undiscounted) and
    ``episode_lengths`` describe the episodes that ended, in that order.
    """

    num_steps: int
    seconds: float
    episode_returns: list[float] = field(default_factory=list[float])
    episode_lengths: list[int] = field(default_factory=list[int])

    def __repr__(self) -> str:
        """One line without the lists: with thousands of envs, thousands of episodes may end in one call."""
        text = f"{self.num_steps:,} steps in {self.seconds:.3g} s, {self.num_episodes:,} episodes ended"
        if self.num_episodes:
            mean_return, mean_length = fmean(self.episode_returns), fmean(self.episode_lengths)
            text += f" with a mean return of {mean_return:.4g} and a mean length of {mean_length:.4g}"
        return f"CollectStats: {text}"

    @property
    def num_episodes(self) -> int:
        """Episodes that ended."""
        return len(self.episode_returns)

    @property
    def steps_per_second(self) -> float:
        """Real transitions per second of wall time."""
        return self.num_steps / max(self.seconds, 1e-9)
