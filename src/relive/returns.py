"""Returns and advantages: pure functions on time-first grids ``[T, N]``, and the estimators for ``rollout.finish``.

All of them share one contract. ``terminated`` and ``truncated`` describe the transition of their own row. The value
after a terminal is 0; after a truncation it is ``final_value``, that of the observation the episode really ended on;
a transition that is both is a terminal. Recursions stop at either. ``value`` has a row more than the rest: the
bootstrap V(obs[T]) of the episodes under way. A step with ``mask`` False is not real: its advantage is 0, its return
its own value, so a trace that reaches it stops at V(obs) of that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from . import kernels
from .errors import DTypeError, SchemaError, ShapeError
from .parameters import require_discounts

__all__ = [
    "GAE",
    "Estimator",
    "GroupAdvantage",
    "MonteCarlo",
    "TDLambda",
    "VTrace",
    "gae",
    "group_advantage",
    "lambda_returns",
    "monte_carlo",
    "normalize",
    "vtrace",
]


def gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): Âₜ = δₜ + γλ(1 - doneₜ)Âₜ₊₁.

    Args:
        reward: ``[T, N]``, float.
        value: ``[T + 1, N]``; the last row is V(obs[T]).
        terminated: ``[T, N]``, bool.
        truncated: ``[T, N]``, bool.
        final_value: ``[T, N]``, V(true final observation); read only where a real step was truncated.
        mask: ``[T, N]``, bool, False for steps that are not real.
        gamma: discount per step.
        lam: λ; 0 gives the TD error, 1 the Monte-Carlo advantage.

    Returns:
        advantage and return (advantage + value), each ``[T, N]``, of the dtype of the input.

    Raises:
        ShapeError, DTypeError: an argument does not fit ``reward``.
        FieldError: a truncated step has no final value.
    """
    grid = _grid(reward, value, terminated, truncated, final_value, mask)
    return kernels.gae(*grid, gamma, lam)


def lambda_returns(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> Tensor:
    """TD(λ) returns (Sutton and Barto 2018, eq. 12.2), ``[T, N]``: Gₜ = rₜ + γ((1 - λ)v'ₜ + λGₜ₊₁).

    They are the value plus the GAE advantage of the same λ. Arguments and errors are those of :func:`gae`.
    """
    options: dict[str, Any] = {"final_value": final_value, "mask": mask, "gamma": gamma, "lam": lam}
    return gae(reward, value, terminated, truncated, **options)[1]


def monte_carlo(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    value: Tensor | None = None,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float = 0.99,
) -> Tensor:
    """Discounted returns to the end of each episode, ``[T, N]``: Gₜ = rₜ + γGₜ₊₁.

    Where an episode was cut, by truncation or by the end of the rollout, the rest is ``final_value`` or ``value[T]``.
    Without ``value`` there is no critic to ask, and the rest counts as 0, whatever ``final_value`` says.

    Raises:
        ShapeError, DTypeError: an argument does not fit ``reward``.
        FieldError: with ``value``, a truncated step has no final value.
    """
    grid = _grid(reward, value, terminated, truncated, None if value is None else final_value, mask)
    return kernels.discounted_return(*grid, gamma)


def vtrace(
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    final_value: Tensor | None = None,
    mask: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al. 2018, eq. 1): off-policy corrected values and policy-gradient advantages.

    vsₜ = vₜ + ρₜδₜ + γcₜ(1 - doneₜ)(vsₜ₊₁ - vₜ₊₁), Âₜ = ρₜ(rₜ + γvs'ₜ - vₜ), with ρ = min(ρ̄, π/μ), c = λ min(c̄, π/μ).

    Args:
        log_rho: ``[T, N]``, log π(a|s) - log μ(a|s): target policy against the one that acted.
        rho_clip: ρ̄, the fixed point's clip.
        c_clip: c̄, the trace's clip.

    Further arguments and errors are those of :func:`gae`.

    Returns:
        advantage and vs, each ``[T, N]``.
    """
    grid = _grid(reward, value, terminated, truncated, final_value, mask)
    ratio = _fit("log_rho", log_rho, grid[0].shape, grid[0].dtype, grid[0].device)
    return kernels.vtrace(ratio, *grid, gamma, lam, rho_clip, c_clip)


def group_advantage(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    group_size: int,
    per: Literal["step", "episode"] = "step",
    gamma: float = 1.0,
    mask: Tensor | None = None,
    until_first_done: bool = True,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages relative to a group of envs that started alike (GRPO, Shao et al. 2024, section 4.1).

    Args:
        reward: ``[T, N]``, float.
        terminated: ``[T, N]``, bool.
        truncated: ``[T, N]``, bool.
        group_size: consecutive envs of one group; divides N.
        per: "step" normalises the return-to-go of each step over the group's envs at the same time; "episode" gives
            every step its whole episode's return, normalised over the group's episodes.
        gamma: discount per step.
        mask: ``[T, N]``, bool, False for steps that are not real.
        until_first_done: leave out what comes after each env's first episode.
        eps: added to the (population) standard deviation.

    Returns:
        advantage, return and mask of the steps that count, each ``[T, N]``; the advantage is 0 elsewhere.

    Raises:
        ShapeError, DTypeError: an argument does not fit ``reward``, or ``group_size`` does not divide N.
    """
    reward, _, terminated, truncated, _, mask = _grid(reward, None, terminated, truncated, None, mask)
    steps, envs = reward.shape
    if group_size < 1 or envs % group_size:
        raise ShapeError(f"group_size={group_size} does not divide the {envs} envs into whole groups")
    if per not in ("step", "episode"):
        raise SchemaError(f"per is 'step' or 'episode', got {per!r}")
    done = terminated | truncated
    real = torch.ones_like(done) if mask is None else mask
    ended = (done & real).cumsum(0) - (done & real).to(torch.int64)  # episodes that ended before this step
    counted = real & (ended == 0) if until_first_done else real.clone()
    ret = monte_carlo(reward, terminated, truncated, mask=mask, gamma=gamma)
    if per == "episode":
        before = torch.zeros_like(done)
        before[1:] = real[:-1] & ~done[:-1]  # the step before belongs to the same episode
        start = real & ~before
        row = torch.arange(steps, device=reward.device).unsqueeze(1)
        first = torch.where(start, row, 0).cummax(0).values
        ret = torch.where(real, ret.gather(0, first), 0.0)
        entry, axes = start & counted, (0, 2)
    else:
        entry, axes = counted, (2,)
    shape = (steps, envs // group_size, group_size)
    x, entry = ret.view(shape).double(), entry.view(shape)  # as in normalize
    count = entry.sum(axes, keepdim=True).clamp(min=1)
    mean = torch.where(entry, x, 0.0).sum(axes, keepdim=True) / count
    variance = torch.where(entry, (x - mean).square(), 0.0).sum(axes, keepdim=True) / count
    advantage = ((x - mean) / (variance.sqrt() + eps)).view(steps, envs)
    return torch.where(counted, advantage, 0.0).to(ret.dtype), ret, counted


def normalize(x: Tensor, mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """(x - mean) / (std + eps) over the entries with ``mask`` True; 0 elsewhere.

    The standard deviation is the unbiased one, and 0 for fewer than two entries, so that one row gives 0 and not NaN.
    """
    wide = x.double()  # in float32 the mean of equal numbers is not that number, and eps would blow the rest up
    if mask is None:
        std = wide.std() if x.numel() > 1 else 0.0
        return ((wide - wide.mean()) / (std + eps)).to(x.dtype)
    count = mask.sum()
    mean = torch.where(mask, wide, 0.0).sum() / count.clamp(min=1)
    centred = torch.where(mask, wide - mean, 0.0)
    return (centred / ((centred.square().sum() / (count - 1).clamp(min=1)).sqrt() + eps)).to(x.dtype)


class Estimator(Protocol):
    """What ``rollout.finish`` takes: it names the columns it reads and returns the columns to attach.

    ``reads`` may name any column. ``value`` comes as ``[T + 1, N]``, all others as ``[T, N, ...]``; ``final_value``
    is None when no step was truncated, ``mask`` when every step is real. The result is column -> ``[T, N, ...]``.
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


@dataclass(frozen=True, slots=True)
class GAE:
    """``finish(GAE(...))`` attaches ``advantage`` and ``return`` by :func:`gae`; ``normalize`` over all real steps."""

    gamma: float = 0.99
    lam: float = 0.95
    normalize: bool = False

    __post_init__ = require_discounts

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return _CRITIC

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        return _attached(*gae(**columns, gamma=self.gamma, lam=self.lam), columns["mask"], self.normalize)


@dataclass(frozen=True, slots=True)
class TDLambda:
    """``finish(TDLambda(...))`` attaches :func:`lambda_returns` as ``return``, and ``advantage`` = return - value."""

    gamma: float = 0.99
    lam: float = 0.95
    normalize: bool = False

    __post_init__ = require_discounts

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return _CRITIC

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        ret = lambda_returns(**columns, gamma=self.gamma, lam=self.lam)
        return _attached(ret - columns["value"][:-1], ret, columns["mask"], self.normalize)


@dataclass(frozen=True, slots=True)
class MonteCarlo:
    """``finish(MonteCarlo(...))`` attaches :func:`monte_carlo` as ``return``, and ``advantage`` = return - value.

    ``critic=False`` needs no ``value``: cut episodes then end at 0, and the advantage is the return.
    """

    gamma: float = 0.99
    normalize: bool = False
    critic: bool = True

    __post_init__ = require_discounts

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed: with a critic also ``value``."""
        return _CRITIC if self.critic else ("reward", "terminated", "truncated", "mask")

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        ret = monte_carlo(**columns, gamma=self.gamma)
        advantage = ret - columns["value"][:-1] if self.critic else ret
        return _attached(advantage, ret, columns["mask"], self.normalize)


@dataclass(frozen=True, slots=True)
class VTrace:
    """``finish(VTrace(...))`` attaches :func:`vtrace` from the columns ``log_prob`` and ``target_log_prob``.

    ``log_prob`` is what the acting policy said; set ``rollout["target_log_prob"]`` to what the learner's says.
    """

    gamma: float = 0.99
    lam: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    normalize: bool = False

    __post_init__ = require_discounts

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


@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """``finish(GroupAdvantage(...))`` attaches ``advantage``, ``return`` and ``mask`` by :func:`group_advantage`."""

    group_size: int
    per: Literal["step", "episode"] = "step"
    gamma: float = 1.0
    until_first_done: bool = True
    eps: float = 1e-8

    __post_init__ = require_discounts

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


Grid = tuple[Tensor, Any, Tensor, Tensor, "Tensor | None", "Tensor | None"]


def _grid(
    reward: Tensor,
    value: Tensor | None,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    mask: Tensor | None,
) -> Grid:
    """The arguments as contiguous tensors of one shape, float dtype and device, or a clear error."""
    shape = reward.shape
    if len(shape) != 2 or not shape[0] or not shape[1]:
        raise ShapeError(f"field 'reward': expected a grid [T, N] of at least one step, got {tuple(shape)}")
    double = reward.dtype is torch.float64 or (value is not None and value.dtype is torch.float64)
    dtype = torch.float64 if double else torch.float32
    device = reward.device
    after = (shape[0] + 1, shape[1])
    return (
        _fit("reward", reward, shape, dtype, device),
        None if value is None else _fit("value", value, after, dtype, device),
        _fit("terminated", terminated, shape, torch.bool, device),
        _fit("truncated", truncated, shape, torch.bool, device),
        None if final_value is None else _fit("final_value", final_value, shape, dtype, device),
        None if mask is None else _fit("mask", mask, shape, torch.bool, device),
    )


def _fit(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if x.dtype is dtype and x.shape == shape and x.device == device and x.is_contiguous():
        return x.detach() if x.requires_grad else x
    if x.shape != shape or x.device != device:
        message = f"field '{name}': expected {tuple(shape)} on {device}, got {tuple(x.shape)} on {x.device}"
        if name == "value" and tuple(x.shape) == (shape[0] - 1, *shape[1:]):
            message += "; value has a row more than reward: append V(obs[T]), the bootstrap"
        raise ShapeError(message)
    if dtype is torch.bool and x.dtype is not torch.bool:
        raise DTypeError(f"field '{name}': expected torch.bool, got {x.dtype}; pass .bool()")
    return x.detach().to(dtype).contiguous()
