"""What :mod:`relive.core` computes for a rollout ``[T, N]``, in NumPy: one step of all envs after another.

Numbers stay in the dtype of the rewards, and sums are added in the order in which they are written here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Grid(NamedTuple):
    """Arrays ``[T, N]``, in the order in which :func:`relive.core.fill_gae` takes them."""

    reward: Array
    value: Any
    """``[T + 1, N]``, with the bootstrap row; None without a critic."""
    terminated: Array
    truncated: Array
    final_value: Any
    """Read where a step was truncated and not terminated; or None."""
    mask: Any
    """False at steps that are not real; or None."""


def first_missing(grid: Grid) -> int:
    """The first flat place of a real step that was truncated, not terminated, and lacks its final value; or -1."""
    T, N = grid.reward.shape
    for t in range(T):
        for n in range(N):
            cut = grid.truncated[t, n] and not grid.terminated[t, n]
            real = grid.mask is None or grid.mask[t, n]
            if cut and real and (grid.final_value is None or np.isnan(grid.final_value[t, n])):
                return t * N + n
    return -1


def gae(grid: Grid, gamma: float, lam: float) -> tuple[Array, Array]:
    """Advantage and return."""
    number = grid.reward.dtype.type
    g, decay, zero = number(gamma), number(gamma * lam), number(0)
    advantage, ret = np.empty_like(grid.reward), np.empty_like(grid.reward)
    after = np.zeros_like(grid.reward[0])  # the advantage of the step after
    for t in reversed(range(len(grid.reward))):
        v = grid.value[t]
        delta = (grid.reward[t] - v) + valued(grid, t, g, grid.value[t + 1])
        goes_on = ~(grid.terminated[t] | grid.truncated[t]) & (decay != 0)
        after = delta + np.where(goes_on, decay * after, zero)
        after = np.where(real(grid, t), after, zero)
        advantage[t], ret[t] = after, after + v
    return advantage, ret


def discounted_return(grid: Grid, gamma: float) -> Array:
    """Returns, of which those before a cut, and the last row's, go on with a value if there are values."""
    number = grid.reward.dtype.type
    g, zero = number(gamma), number(0)
    ret, none = np.empty_like(grid.reward), np.zeros_like(grid.reward[0])
    after = none if grid.value is None else grid.value[-1]
    for t in reversed(range(len(grid.reward))):
        term = grid.reward[t]
        if grid.value is not None and grid.final_value is not None:
            cut = grid.truncated[t] & ~grid.terminated[t]
            term = np.where(cut, term + g * grid.final_value[t], term)
        term = np.where(real(grid, t), term, none if grid.value is None else grid.value[t])
        goes_on = ~(grid.terminated[t] | grid.truncated[t]) & real(grid, t) & (g != 0)
        ret[t] = after = term + np.where(goes_on, g * after, zero)
    return ret


def vtrace(ratio: Array, grid: Grid, gamma: float, lam: float, rho_clip: float, c_clip: float) -> tuple[Array, Array]:
    """Advantage and vs, of ``ratio`` π/μ; a ratio that is NaN stays NaN."""
    number = grid.reward.dtype.type
    g, zero = number(gamma), number(0)
    advantage, target = np.empty_like(grid.reward), np.empty_like(grid.reward)
    correction, following = np.zeros_like(grid.reward[0]), grid.value[-1]  # vs - v and vs of the step after
    for t in reversed(range(len(grid.reward))):
        v = grid.value[t]
        rho = np.where(ratio[t] > number(rho_clip), number(rho_clip), ratio[t])
        trace = g * (number(lam) * np.where(ratio[t] > number(c_clip), number(c_clip), ratio[t]))
        gain = grid.reward[t] - v
        goes_on = ~(grid.terminated[t] | grid.truncated[t]) & (trace != 0)
        correction = rho * (gain + valued(grid, t, g, grid.value[t + 1])) + np.where(goes_on, trace * correction, zero)
        correction = np.where(real(grid, t), correction, zero)
        advantage[t] = np.where(real(grid, t), rho * (gain + valued(grid, t, g, following)), zero)
        target[t] = following = correction + v
    return advantage, target


def valued(grid: Grid, t: int, gamma: Any, following: Array) -> Array:
    """γ times the value after a step: 0 after a terminal, the final value, if there is one, after a truncation."""
    none = grid.terminated[t]
    if grid.final_value is None:
        none = none | grid.truncated[t]
    else:
        following = np.where(grid.truncated[t], grid.final_value[t], following)
    return np.where(none, np.zeros_like(following), gamma * following)


def real(grid: Grid, t: int) -> Any:
    """True where a step is real, ``[N]``."""
    return np.ones(grid.reward.shape[1], bool) if grid.mask is None else grid.mask[t]
