"""Returns and advantages in plain torch: the definition that the fast twins must agree with.

Every function takes time-first tensors ``[T, N]`` of one device; ``value`` has a row more, the bootstrap. A step that
was truncated and not terminated reads ``final_value``; ``mask`` False marks a step that is not real.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import FieldError

__all__ = ["discounted_return", "gae", "refuse_missing", "vtrace"]


def gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    mask: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Âₜ = δₜ + γλ(1 - doneₜ)Âₜ₊₁ with δₜ = rₜ - vₜ + γv'ₜ; the return is Âₜ + vₜ."""
    _require_final_values(terminated, truncated, final_value, mask)
    v = value[:-1]
    delta = _delta(reward, v, value[1:], terminated, truncated, final_value, gamma)
    trace = torch.where(terminated | truncated, 0.0, torch.full_like(delta, gamma * lam))
    advantage = _scan(*_drop(delta, trace, mask))
    return advantage, advantage + v


def discounted_return(
    reward: Tensor,
    value: Tensor | None,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    mask: Tensor | None,
    gamma: float,
) -> Tensor:
    """Gₜ = rₜ + γGₜ₊₁, where G after a terminal is 0, after a truncation final_value, after the last row value[T]."""
    term = reward
    if value is not None:
        _require_final_values(terminated, truncated, final_value, mask)
        if final_value is not None:
            term = torch.where(truncated & ~terminated, reward + gamma * final_value, reward)
    trace = torch.where(terminated | truncated, 0.0, torch.full_like(reward, gamma))
    v = torch.zeros_like(reward) if value is None else value[:-1]
    if mask is not None:
        term, trace = torch.where(mask, term, v), torch.where(mask, trace, 0.0)
    return _scan(term, trace, None if value is None else value[-1])


def vtrace(
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    mask: Tensor | None,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """vsₜ = vₜ + ρₜδₜ + γcₜ(vsₜ₊₁ - vₜ₊₁); the advantage is ρₜ(rₜ + γvs'ₜ - vₜ)."""
    _require_final_values(terminated, truncated, final_value, mask)
    v, ratio = value[:-1], log_rho.exp()
    rho, c = ratio.clamp(max=rho_clip), lam * ratio.clamp(max=c_clip)
    term = rho * _delta(reward, v, value[1:], terminated, truncated, final_value, gamma)
    trace = torch.where(terminated | truncated, 0.0, gamma * c)
    target = _scan(*_drop(term, trace, mask)) + v
    following = torch.cat([target[1:], value[-1:]])
    advantage = rho * _delta(reward, v, following, terminated, truncated, final_value, gamma)
    return (advantage if mask is None else torch.where(mask, advantage, 0.0)), target


def refuse_missing(position: int, reward: Tensor) -> None:
    """Refuse to guess what a truncated step led to.

    Raises:
        FieldError: unless ``position``, the first flat place without a final value, is negative.
    """
    if position >= 0:
        t, n = divmod(position, reward.shape[1])
        raise FieldError(
            f"field 'final_value': step {t} of env {n} was truncated and has no value of its final observation; pass "
            "final_value=V(final obs) there (Gymnasium's info['final_obs']), or mask=False to leave the step out"
        )


def _require_final_values(
    terminated: Tensor, truncated: Tensor, final_value: Tensor | None, mask: Tensor | None
) -> None:
    missing = truncated & ~terminated
    if mask is not None:
        missing &= mask
    if final_value is not None:
        missing &= final_value.isnan()
    positions = missing.flatten().nonzero()
    refuse_missing(int(positions[0]) if len(positions) else -1, missing)


def _delta(
    reward: Tensor,
    v: Tensor,
    following: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    gamma: float,
) -> Tensor:
    """rₜ - vₜ + γv'ₜ, where v' is 0 after a terminal and final_value after a truncation."""
    if final_value is None:
        return (reward - v) + torch.where(terminated | truncated, 0.0, gamma * following)
    following = torch.where(truncated, final_value, following)
    return (reward - v) + torch.where(terminated, 0.0, gamma * following)


def _drop(term: Tensor, trace: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if mask is None:
        return term, trace
    return torch.where(mask, term, 0.0), torch.where(mask, trace, 0.0)


def _scan(term: Tensor, trace: Tensor, last: Tensor | None = None) -> Tensor:
    """xₜ = termₜ + traceₜxₜ₊₁; a trace of 0 cuts even where xₜ₊₁ is not finite."""
    out = torch.empty_like(term)
    following = torch.zeros_like(term[0]) if last is None else last
    for t in range(len(term) - 1, -1, -1):
        following = term[t] + torch.where(trace[t] == 0, 0.0, trace[t] * following)
        out[t] = following
    return out
