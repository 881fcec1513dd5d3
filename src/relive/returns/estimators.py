"""Estimators: each names the columns that it reads, and computes columns to attach to a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from ..parameters import CLIP_RULE, COUNT_RULE, EPS_RULE, FLAG_RULE, GAMMA_RULE, LAM_RULE, checked
from .functions import PER_RULE, gae, group_advantage, lambda_returns, monte_carlo, scaled, vtrace

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

    def __call__(self, *_: Any, **columns: Any) -> dict[str, Tensor]:  # both stars: any keywords will do
        """Column -> ``[T, N, ...]``."""
        ...


_EPISODES = ("reward", "terminated", "truncated", "mask")
_CRITIC = (*_EPISODES, "value", "final_value")


class _Advantages(ABC):
    """What the estimators of advantages share: the columns they read, and how they attach what they compute."""

    __slots__ = ()
    normalize: bool
    """Whether the advantage is scaled over all real steps."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes."""
        return _CRITIC

    @abstractmethod
    def _compute(self, **columns: Any) -> tuple[Tensor, Tensor]:
        """Advantage and return, each ``[T, N]``."""

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        advantage, ret = self._compute(**columns)
        return {"advantage": scaled(advantage, columns["mask"]) if self.normalize else advantage, "return": ret}


@checked(gamma=GAMMA_RULE, lam=LAM_RULE, normalize=FLAG_RULE)
@dataclass(frozen=True, slots=True)
class GAE(_Advantages):
    """``finish(GAE(...))`` attaches ``advantage`` and ``return`` by :func:`gae`.

    Args:
        gamma: discount per step, from 0 to 1.
        lam: λ, from 0 (the TD error) to 1 (the Monte-Carlo advantage).
        normalize: scale the advantage over all real steps of the rollout: mean 0, standard deviation 1.

    Raises:
        ParameterError: a parameter is out of range.
    """

    gamma: float = 0.99
    lam: float = 0.95
    normalize: bool = False

    def _compute(self, **columns: Any) -> tuple[Tensor, Tensor]:
        return gae(**columns, gamma=self.gamma, lam=self.lam)


@checked(gamma=GAMMA_RULE, lam=LAM_RULE, normalize=FLAG_RULE)
@dataclass(frozen=True, slots=True)
class TDLambda(_Advantages):
    """``finish(TDLambda(...))`` attaches :func:`lambda_returns` as ``return``, and ``advantage`` = return - value.

    Args:
        gamma: discount per step, from 0 to 1.
        lam: λ, from 0 (one reward, then the value) to 1 (all rewards).
        normalize: scale the advantage over all real steps of the rollout: mean 0, standard deviation 1.

    Raises:
        ParameterError: a parameter is out of range.
    """

    gamma: float = 0.99
    lam: float = 0.95
    normalize: bool = False

    def _compute(self, **columns: Any) -> tuple[Tensor, Tensor]:
        ret = lambda_returns(**columns, gamma=self.gamma, lam=self.lam)
        return ret - columns["value"][:-1], ret


@checked(gamma=GAMMA_RULE, normalize=FLAG_RULE, critic=FLAG_RULE)
@dataclass(frozen=True, slots=True)
class MonteCarlo(_Advantages):
    """``finish(MonteCarlo(...))`` attaches :func:`monte_carlo` as ``return``, and ``advantage`` = return - value.

    Args:
        gamma: discount per step, from 0 to 1.
        normalize: scale the advantage over all real steps of the rollout: mean 0, standard deviation 1.
        critic: False needs no ``value``: the rest of a cut episode then counts as 0, and the advantage is the return.

    Raises:
        ParameterError: a parameter is out of range.
    """

    gamma: float = 0.99
    normalize: bool = False
    critic: bool = True

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes; ``value`` and ``final_value`` only with a critic."""
        return _CRITIC if self.critic else _EPISODES

    def _compute(self, **columns: Any) -> tuple[Tensor, Tensor]:
        ret = monte_carlo(**columns, gamma=self.gamma)
        return ret - columns["value"][:-1] if self.critic else ret, ret


@checked(gamma=GAMMA_RULE, lam=LAM_RULE, rho_clip=CLIP_RULE, c_clip=CLIP_RULE, normalize=FLAG_RULE)
@dataclass(frozen=True, slots=True)
class VTrace(_Advantages):
    """``finish(VTrace(...))`` attaches :func:`vtrace` from the columns ``log_prob`` and ``target_log_prob``.

    ``log_prob`` comes from the acting policy. Set ``rollout["target_log_prob"]`` to that of the learner's policy.

    Args:
        gamma: discount per step, from 0 to 1.
        lam: λ, from 0 to 1; it shortens the trace.
        rho_clip: ρ̄, the upper limit of the importance ratio of a step.
        c_clip: c̄, the upper limit of the ratio in the trace.
        normalize: scale the advantage over all real steps of the rollout: mean 0, standard deviation 1.

    Raises:
        ParameterError: a parameter is out of range.
    """

    gamma: float = 0.99
    lam: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    normalize: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes."""
        return (*_CRITIC, "log_prob", "target_log_prob")

    def _compute(self, *, log_prob: Tensor, target_log_prob: Tensor, **columns: Any) -> tuple[Tensor, Tensor]:
        clips: dict[str, Any] = {"rho_clip": self.rho_clip, "c_clip": self.c_clip}
        return vtrace(target_log_prob - log_prob, **columns, gamma=self.gamma, lam=self.lam, **clips)


@checked(group_size=COUNT_RULE, per=PER_RULE, gamma=GAMMA_RULE, until_first_done=FLAG_RULE, eps=EPS_RULE)
@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """``finish(GroupAdvantage(...))`` attaches ``advantage``, ``return`` and ``mask`` by :func:`group_advantage`.

    It needs no ``value``. The envs of a group start in the same state: ``collector.reset(seed=[0, 0, 1, 1])``.

    Args:
        group_size: consecutive envs of one group; divides N.
        per: "step" compares the returns of the envs at the same time, "episode" those of their whole episodes.
        gamma: discount per step, from 0 to 1.
        until_first_done: only the first episode of each env counts; ``mask`` is False elsewhere.
        eps: added to the standard deviation of a group.

    Raises:
        ParameterError: a parameter is out of range.
    """

    group_size: int
    per: Literal["step", "episode"] = "step"
    gamma: float = 1.0
    until_first_done: bool = True
    eps: float = 1e-8

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the call takes."""
        return _EPISODES

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage``, ``return`` and ``mask``, ``[T, N]``."""
        advantage, ret, mask = group_advantage(**columns, **asdict(self))  # its fields are that function's options
        return {"advantage": advantage, "return": ret, "mask": mask}
