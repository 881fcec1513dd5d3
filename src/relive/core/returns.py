"""Returns and advantages: compiled for float32 in RAM, in torch operations for all else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FieldError
from ._core import fill_gae, fill_returns, fill_vtrace, is_grid

__all__ = ["Grid", "discounted_return", "gae", "refuse_missing", "vtrace"]


class Grid(NamedTuple):
    """The columns that every estimator reads: tensors ``[T, N]`` on one device."""

    reward: Tensor
    value: Any
    """``[T + 1, N]``, with the bootstrap row; None without a critic."""
    terminated: Tensor
    truncated: Tensor
    final_value: Tensor | None
    """Read where a step was truncated and not terminated."""
    mask: Tensor | None
    """False at steps that are not real."""


def gae(grid: Grid, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantage and return: Âₜ = δₜ + γλ(1 - doneₜ)Âₜ₊₁ with δₜ = rₜ - vₜ + γv'ₜ; the return is Âₜ + vₜ.

    Raises:
        FieldError: a truncated step has no final value.
    """
    reward = grid.reward
    if not is_grid(*grid):
        return _gae(grid, gamma, lam)
    advantage, ret = torch.empty_like(reward), torch.empty_like(reward)
    refuse_missing(fill_gae(*grid, advantage, ret, len(reward), gamma, lam), reward.shape[1])
    return advantage, ret


def discounted_return(grid: Grid, gamma: float) -> Tensor:
    """Gₜ = rₜ + γGₜ₊₁, where G after a terminal is 0, after a truncation final_value, after the last row value[T].

    Without values, what follows a truncation and the last row counts as 0.

    Raises:
        FieldError: with values, a truncated step has no final value.
    """
    reward = grid.reward
    if not is_grid(*grid):
        return _discounted_return(grid, gamma)
    ret = torch.empty_like(reward)
    refuse_missing(fill_returns(*grid, ret, len(reward), gamma), reward.shape[1])
    return ret


def vtrace(
    log_rho: Tensor, grid: Grid, gamma: float, lam: float, rho_clip: float, c_clip: float
) -> tuple[Tensor, Tensor]:
    """Advantage and vs: vsₜ = vₜ + ρₜδₜ + γcₜ(vsₜ₊₁ - vₜ₊₁), and the advantage is ρₜ(rₜ + γvs'ₜ - vₜ).

    Raises:
        FieldError: a truncated step has no final value.
    """
    reward, ratio = grid.reward, log_rho.exp()
    if not is_grid(*grid, ratio):
        return _vtrace(ratio, grid, gamma, lam, rho_clip, c_clip)
    advantage, target = torch.empty_like(reward), torch.empty_like(reward)
    found = fill_vtrace(*grid, ratio, advantage, target, len(reward), gamma, lam, rho_clip, c_clip)
    refuse_missing(found, reward.shape[1])
    return advantage, target


def refuse_missing(position: int, num_envs: int) -> None:
    """Refuse to guess what a truncated step led to.

    Raises:
        FieldError: unless ``position``, the first flat place without a final value, is negative.
    """
    if position >= 0:
        t, n = divmod(position, num_envs)
        raise FieldError(
            f"field 'final_value': step {t} of env {n} was truncated and has no value of its final observation, which "
            "step() returned, or info['final_obs'] under SAME_STEP autoreset; pass add(final_value=V(it)), or later "
            "set_final_value(steps, envs, values), or mask=False to leave the step out"
        )


# In torch operations, to the bit what compiled code gives


def _gae(grid: Grid, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    _require_final_values(grid)
    delta = _delta(grid, grid.value[1:], gamma)
    trace = torch.where(grid.terminated | grid.truncated, 0.0, torch.full_like(delta, gamma * lam))
    advantage = _scan(*_drop(delta, trace, grid.mask))
    return advantage, advantage + grid.value[:-1]


def _discounted_return(grid: Grid, gamma: float) -> Tensor:
    reward, value, terminated, truncated, final_value, mask = grid
    term = reward
    if value is not None:
        _require_final_values(grid)
        if final_value is not None:
            term = torch.where(truncated & ~terminated, reward + gamma * final_value, reward)
    trace = torch.where(terminated | truncated, 0.0, torch.full_like(reward, gamma))
    v = torch.zeros_like(reward) if value is None else value[:-1]
    if mask is not None:
        term, trace = torch.where(mask, term, v), torch.where(mask, trace, 0.0)
    return _scan(term, trace, None if value is None else value[-1])


def _vtrace(
    ratio: Tensor, grid: Grid, gamma: float, lam: float, rho_clip: float, c_clip: float
) -> tuple[Tensor, Tensor]:
    _require_final_values(grid)
    value, mask = grid.value, grid.mask
    rho, c = ratio.clamp(max=rho_clip), lam * ratio.clamp(max=c_clip)
    term = rho * _delta(grid, value[1:], gamma)
    trace = torch.where(grid.terminated | grid.truncated, 0.0, gamma * c)
    target = _scan(*_drop(term, trace, mask)) + value[:-1]
    advantage = rho * _delta(grid, torch.cat([target[1:], value[-1:]]), gamma)
    return (advantage if mask is None else torch.where(mask, advantage, 0.0)), target


def _require_final_values(grid: Grid) -> None:
    missing = grid.truncated & ~grid.terminated
    if grid.mask is not None:
        missing &= grid.mask
    if grid.final_value is not None:
        missing &= grid.final_value.isnan()
    if bool(missing.any()):  # the only line that waits for a device
        refuse_missing(int(missing.flatten().nonzero()[0]), missing.shape[1])


def _delta(grid: Grid, following: Tensor, gamma: float) -> Tensor:
    """rₜ - vₜ + γv'ₜ, where v' is 0 after a terminal and final_value after a truncation."""
    none = grid.terminated
    if grid.final_value is None:
        none = none | grid.truncated
    else:
        following = torch.where(grid.truncated, grid.final_value, following)
    return (grid.reward - grid.value[:-1]) + torch.where(none, 0.0, gamma * following)


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
