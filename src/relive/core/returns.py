"""Returns and advantages: compiled C++ for float32 in RAM, torch operations for all else and while torch compiles."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..errors import FieldError
from ._core import fill_gae, fill_returns, fill_vtrace, is_grid


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
        FieldError: in RAM, a truncated step has no final value. Elsewhere to look would wait: what comes of it is NaN.
    """
    reward = grid.reward
    if not is_known_grid(*grid):
        return _gae(grid, gamma, lam)
    advantage, ret = torch.empty_like(reward), torch.empty_like(reward)
    refuse_missing(fill_gae(*grid, advantage, ret, len(reward), gamma, lam), reward.shape[1])
    return advantage, ret


def gae_in_place(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, final_value: Tensor, mask: Tensor,
    advantage: Tensor, ret: Tensor, steps: int, is_real: bool, gamma: float, lam: float,
) -> None:  # fmt: skip
    """Write :func:`gae` of the first ``steps`` rows of columns ``[T + 1, N]`` on a device into two others.

    Torch operations of fixed shapes, on the same memory each time, so that a graph can hold them. ``mask`` is read
    unless ``is_real``.
    """
    reward, terminated, truncated, final_value, mask = (
        column[:steps] for column in (reward, terminated, truncated, final_value, mask)
    )
    grid = Grid(reward, value[: steps + 1], terminated, truncated, final_value, None if is_real else mask)
    for column, made in zip((advantage, ret), _gae(grid, gamma, lam), strict=True):
        column[:steps].copy_(made)


def discounted_return(grid: Grid, gamma: float) -> Tensor:
    """Gₜ = rₜ + γGₜ₊₁, where G after a terminal is 0, after a truncation final_value, after the last row value[T].

    Without values, what follows a truncation and the last row counts as 0.

    Raises:
        FieldError: as :func:`gae`, with values.
    """
    reward = grid.reward
    if not is_known_grid(*grid):
        return _discounted_return(grid, gamma)
    ret = torch.empty_like(reward)
    refuse_missing(fill_returns(*grid, ret, len(reward), gamma), reward.shape[1])
    return ret


def vtrace(
    log_rho: Tensor, grid: Grid, gamma: float, lam: float, rho_clip: float, c_clip: float
) -> tuple[Tensor, Tensor]:
    """Advantage and vs: vsₜ = vₜ + ρₜδₜ + γcₜ(vsₜ₊₁ - vₜ₊₁), and the advantage is ρₜ(rₜ + γvs'ₜ - vₜ).

    Raises:
        FieldError: in RAM, a truncated step has no final value. Elsewhere to look would wait: what comes of it is NaN.
    """
    reward, ratio = grid.reward, log_rho.exp()
    if not is_known_grid(*grid, ratio):
        return _vtrace(ratio, grid, gamma, lam, rho_clip, c_clip)
    advantage, target = torch.empty_like(reward), torch.empty_like(reward)
    found = fill_vtrace(*grid, ratio, advantage, target, len(reward), gamma, lam, rho_clip, c_clip)
    refuse_missing(found, reward.shape[1])
    return advantage, target


def is_known_grid(*columns: Tensor | None) -> bool:
    """True if compiled C++ takes these columns as they are. While torch compiles, what it sees has no memory."""
    return not is_compiling() and is_grid(*columns)


def require_final_values(grid: Grid) -> None:
    """Refuse truncated steps without a final value; waits for the device.

    Raises:
        FieldError: names the first.
    """
    missing = grid.truncated & ~grid.terminated
    if grid.mask is not None:
        missing &= grid.mask
    if grid.final_value is not None:  # with several heads, ``[T, N, K]``
        missing &= grid.final_value.isnan().reshape(*missing.shape, -1).any(-1)
    if bool(missing.any()):
        refuse_missing(int(missing.flatten().nonzero()[0]), missing.shape[1])


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


# In torch operations of fixed shapes, which never wait for a device. They add in another order than compiled C++.


def _gae(grid: Grid, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    _require_if_known(grid)
    zero = grid.reward.new_zeros(())  # made once: a number in `where` becomes a tensor each time
    delta = _delta(grid, grid.value[1:], gamma, zero)
    advantage = _scan(_real(grid, delta, zero), _ends(grid), gamma * lam, zero)
    return advantage, advantage + grid.value[:-1]


def _discounted_return(grid: Grid, gamma: float) -> Tensor:
    reward, value, terminated, truncated, final_value, _ = grid
    ends, zero = _ends(grid), reward.new_zeros(())
    if value is None:
        return _scan(_real(grid, reward.clone(), zero), ends, gamma, zero)
    _require_if_known(grid)
    final = zero * math.nan if final_value is None else final_value
    after = torch.where(truncated & ~terminated, final, zero)
    after[-1] += torch.where(terminated[-1] | truncated[-1], zero, value[-1])
    term = _real(grid, torch.add(reward, after, alpha=gamma), value[:-1])
    return _scan(term, ends, gamma, zero)


def _vtrace(
    ratio: Tensor, grid: Grid, gamma: float, lam: float, rho_clip: float, c_clip: float
) -> tuple[Tensor, Tensor]:
    _require_if_known(grid)
    value, rho, zero = grid.value, ratio.clamp(max=rho_clip), grid.reward.new_zeros(())
    term = _real(grid, rho * _delta(grid, value[1:], gamma, zero), zero)
    trace = ratio.clamp(max=c_clip) * (gamma * lam) if gamma * lam else 0.0  # 0 times NaN would come back
    target = _scan(term, _ends(grid), trace, zero) + value[:-1]
    advantage = rho * _delta(grid, torch.cat([target[1:], value[-1:]]), gamma, zero)
    return _real(grid, advantage, zero), target


def _require_if_known(grid: Grid) -> None:
    if grid.reward.is_cpu and not is_compiling():
        require_final_values(grid)


def _delta(grid: Grid, following: Tensor, gamma: float, zero: Tensor) -> Tensor:
    """rₜ - vₜ + γv'ₜ, where v' is 0 after a terminal and final_value after a truncation."""
    final = zero * math.nan if grid.final_value is None else grid.final_value
    after = torch.where(grid.terminated, zero, torch.where(grid.truncated, final, following))
    return (grid.reward - grid.value[:-1]).add_(after, alpha=gamma)


def _ends(grid: Grid) -> Tensor:
    """True where nothing comes back from the step after."""
    done = grid.terminated | grid.truncated
    return done if grid.mask is None else done | ~grid.mask


def _real(grid: Grid, x: Tensor, otherwise: Tensor) -> Tensor:
    return x if grid.mask is None else torch.where(grid.mask, x, otherwise)


def _scan(x: Tensor, ends: Tensor, trace: Any, zero: Tensor) -> Tensor:
    """xₜ + traceₜxₜ₊₁ from the last row to the first, in place; after an end nothing comes back, not even NaN.

    Before the pass of distance d, row t has the terms of d steps, ``ends`` says whether one of them is an end, and
    ``trace`` is their product. So there are as many passes as the number of steps has bits.

    Args:
        x: ``[T, N]``, overwritten.
        ends: bool ``[T, N]``.
        trace: a number, or ``[T, N]``.
        zero: 0 as a tensor of that device.
    """
    distance, steps, ends, varies = 1, len(x), ends[:-1], isinstance(trace, Tensor)
    trace = trace[:-1] if varies else trace
    while distance < steps and (varies or trace != 0):
        if varies:
            x[:-distance] += torch.where(ends, zero, trace * x[distance:])
        else:
            x[:-distance].add_(torch.where(ends, zero, x[distance:]), alpha=trace)
        if 2 * distance < steps:
            ends = ends[:-distance] | ends[distance:]
            trace = trace[:-distance] * trace[distance:] if varies else trace * trace
        distance *= 2
    return x
