"""Estimators: each names the columns it reads and computes the columns to attach to a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from ..parameters import CLIP_RULE, COUNT_RULE, GAMMA_RULE, LAM_RULE, checked
from .functions import PER_RULE, gae, group_advantage, lambda_returns, monte_carlo, normalize, vtrace

__all__ = ["GAE", "Estimator", "GroupAdvantage", "MonteCarlo", "TDLambda", "VTrace"]


class Estimator(Protocol):
    """An argument of ``rollout.finish``: it names the columns it reads and returns the columns to attach.

    ``reads`` may name any column. ``value`` comes as ``[T + 1, N]``, all others as ``[T, N, ...]``. ``final_value``
    is None if no step was truncated, and ``mask`` is None if every step is real.
    """

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns, which are also the keywords of the call."""
        ...

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """Column -> ``[T, N, ...]``."""
        ...


_CRITIC = ("reward", "value", "terminated", "truncated", "final_value", "mask")


def _attached(advantage: Tensor, ret: Tensor, mask: Tensor | None, normalized: bool) -> dict[str, Tensor]:
    return {"advantage": normalize(advantage, mask) if normalized else advantage, "return": ret}


@checked(gamma=GAMMA_RULE, lam=LAM_RULE)
@dataclass(frozen=True, slots=True)
class GAE:
    """``finish(GAE(...))`` attaches ``advantage`` and ``return`` by :func:`gae`.

    ``normalize`` scales the advantage over all real steps.
    """

    gamma: float = 0.99
    lam: float = 0.95
    normalize: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return _CRITIC

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        return _attached(*gae(**columns, gamma=self.gamma, lam=self.lam), columns["mask"], self.normalize)


@checked(gamma=GAMMA_RULE, lam=LAM_RULE)
@dataclass(frozen=True, slots=True)
class TDLambda:
    """``finish(TDLambda(...))`` attaches :func:`lambda_returns` as ``return``, and ``advantage`` = return - value."""

    gamma: float = 0.99
    lam: float = 0.95
    normalize: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return _CRITIC

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        ret = lambda_returns(**columns, gamma=self.gamma, lam=self.lam)
        return _attached(ret - columns["value"][:-1], ret, columns["mask"], self.normalize)


@checked(gamma=GAMMA_RULE)
@dataclass(frozen=True, slots=True)
class MonteCarlo:
    """``finish(MonteCarlo(...))`` attaches :func:`monte_carlo` as ``return``, and ``advantage`` = return - value.

    ``critic=False`` needs no ``value``: cut episodes then bootstrap from 0, and the advantage is the return.
    """

    gamma: float = 0.99
    normalize: bool = False
    critic: bool = True

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed: with a critic also ``value``."""
        return _CRITIC if self.critic else ("reward", "terminated", "truncated", "mask")

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        ret = monte_carlo(**columns, gamma=self.gamma)
        advantage = ret - columns["value"][:-1] if self.critic else ret
        return _attached(advantage, ret, columns["mask"], self.normalize)


@checked(gamma=GAMMA_RULE, lam=LAM_RULE, rho_clip=CLIP_RULE, c_clip=CLIP_RULE)
@dataclass(frozen=True, slots=True)
class VTrace:
    """``finish(VTrace(...))`` attaches :func:`vtrace` from the columns ``log_prob`` and ``target_log_prob``.

    ``log_prob`` comes from the acting policy. Set ``rollout["target_log_prob"]`` to that of the learner's policy.
    """

    gamma: float = 0.99
    lam: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    normalize: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return (*_CRITIC, "log_prob", "target_log_prob")

    def __call__(self, *, log_prob: Tensor, target_log_prob: Tensor, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        options: dict[str, Any] = {"gamma": self.gamma, "lam": self.lam}
        options |= {"rho_clip": self.rho_clip, "c_clip": self.c_clip}
        advantage, ret = vtrace(target_log_prob - log_prob, **columns, **options)
        return _attached(advantage, ret, columns["mask"], self.normalize)


@checked(group_size=COUNT_RULE, per=PER_RULE, gamma=GAMMA_RULE)
@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """``finish(GroupAdvantage(...))`` attaches ``advantage``, ``return`` and ``mask`` by :func:`group_advantage`."""

    group_size: int
    per: Literal["step", "episode"] = "step"
    gamma: float = 1.0
    until_first_done: bool = True
    eps: float = 1e-8

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return ("reward", "terminated", "truncated", "mask")

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage``, ``return`` and ``mask``, ``[T, N]``."""
        advantage, ret, mask = group_advantage(
            **columns,
            group_size=self.group_size,
            per=self.per,
            gamma=self.gamma,
            until_first_done=self.until_first_done,
            eps=self.eps,
        )
        return {"advantage": advantage, "return": ret, "mask": mask}
