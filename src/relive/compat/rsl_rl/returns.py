"""GAE with rsl_rl's single done flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...returns.estimators import GAE

__all__ = ["Returns"]


@dataclass(frozen=True, slots=True)
class Returns:
    """GAE for a column ``terminated`` that holds every done, time-outs included, as rsl_rl stores it."""

    gamma: float
    lam: float
    normalize: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return GAE().reads

    def __call__(self, *, terminated: Tensor, truncated: Tensor, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        ends = {"terminated": terminated & ~truncated, "truncated": truncated}
        return GAE(self.gamma, self.lam, self.normalize)(**ends, **columns)
