"""Advantages and returns with AgileRL's single done flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import returns

__all__ = ["Ends"]


@dataclass(frozen=True, slots=True)
class Ends:
    """An estimator for ``finish`` that computes advantages and returns from AgileRL's arguments.

    The column ``terminated`` holds AgileRL's ``done``, which is also True for truncated steps. The column ``truncated``
    is True only where ``add`` was given it. ``newest`` is AgileRL's ``last_done``, whether the newest step was
    terminal. A newest step that is done but not terminal was truncated; its bootstrap value is ``last_value``.

    Args:
        newest: bool ``[N]``, see above.
        gamma: discount per step.
        lam: λ of GAE; None for Monte-Carlo returns.
        follows: True if the step after a done step is the reset. Its value is that of the final observation.
    """

    newest: Tensor
    gamma: float
    lam: float | None
    follows: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return ("reward", "value", "terminated", "truncated", "final_value", "mask")

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        done, truncated, value = columns["terminated"], columns["truncated"].clone(), columns["value"]
        truncated[-1] |= done[-1]
        truncated[-1] &= ~self.newest
        terminated = done & ~truncated
        terminated[-1] |= self.newest
        final = columns["final_value"]
        final = torch.full_like(value[1:], float("nan")) if final is None else final.clone()
        after = slice(None) if self.follows else slice(-1, None)
        unknown = final[after].isnan()
        final[after] = torch.where(unknown, value[1:][after], final[after])
        options: dict[str, Any] = {"final_value": final, "mask": columns["mask"], "gamma": self.gamma}
        reward = columns["reward"]
        if self.lam is None:
            ret = returns.monte_carlo(reward, terminated, truncated, value=value, **options)
            return {"advantage": ret - value[:-1], "return": ret}
        advantage, ret = returns.gae(reward, value, terminated, truncated, lam=self.lam, **options)
        return {"advantage": advantage, "return": ret}
