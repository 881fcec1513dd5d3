"""Blocks of steps, and the returns that the oracle gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relive import returns
from relive.core import returns as recursions
from support import internals, oracle

Block = dict[str, Any]
Numbers = dict[str, Any]

DTYPES = [torch.float32, torch.float64]
ESTIMATORS = ["gae", "monte_carlo", "lambda_returns", "vtrace"]
USES = {
    "gae": {"gamma", "lam"},
    "monte_carlo": {"gamma"},
    "lambda_returns": {"gamma", "lam"},
    "vtrace": {"gamma", "lam", "rho_clip", "c_clip"},
}
COEFFICIENTS: list[Numbers] = [
    {"gamma": 0.99, "lam": 0.95, "rho_clip": 1.0, "c_clip": 1.0},
    {"gamma": 1.0, "lam": 1.0, "rho_clip": 1.0, "c_clip": 1.0},
    {"gamma": 0.0, "lam": 0.9, "rho_clip": 2.0, "c_clip": 1.0},
    {"gamma": 0.9, "lam": 0.0, "rho_clip": 0.5, "c_clip": 0.5},
    {"gamma": 1.0, "lam": 0.5, "rho_clip": 3.0, "c_clip": 2.0},
]


# Blocks


def block_of(rng: np.random.Generator, terminated: Any, truncated: Any, mask: Any = None) -> Block:
    """Random numbers, exact in float32, for these flags [T, N]; NaN at every place that must not be read."""
    shape = terminated.shape
    real = np.ones(shape, bool) if mask is None else mask

    def normal(rows: int) -> np.ndarray:
        return rng.normal(size=(rows, shape[1])).astype(np.float32).astype(np.float64)

    read = truncated & ~terminated & real
    return {
        "reward": np.where(real, normal(shape[0]), np.nan),
        "value": normal(shape[0] + 1),
        "terminated": terminated,
        "truncated": truncated,
        "final_value": np.where(read, normal(shape[0]), np.nan),
        "mask": mask,
        "log_rho": np.where(real, normal(shape[0]), np.nan),
    }


def patterns(length: int, masked: bool, seed: int = 0) -> Block:
    """Every pattern of terminated, truncated (and mask) of this length, one per env, in a shuffled order."""
    rng = np.random.default_rng([length, masked, seed])
    kinds = 8 if masked else 4
    code = rng.permutation(kinds**length)
    digit = code[None] // kinds ** np.arange(length)[:, None] % kinds
    return block_of(rng, digit & 1 == 1, digit & 2 == 2, digit & 4 == 0 if masked else None)


def drawn(seed: int, length: int, num_envs: int, ends: float = 0.15, unreal: float | None = 0.1) -> Block:
    """A random block; without a mask if ``unreal`` is None."""
    rng = np.random.default_rng([seed, length, num_envs])
    shape = (length, num_envs)
    mask = None if unreal is None else rng.random(shape) >= unreal
    return block_of(rng, rng.random(shape) < ends, rng.random(shape) < ends, mask)


def envs_of(block: Block, which: Any) -> Block:
    """The block of some of its envs."""
    return {name: None if grid is None else grid[:, which] for name, grid in block.items()}


# Questions


def _ask(module: Any, name: str, block: Block, convert: Callable[[Any], Any], numbers: Numbers) -> tuple[Any, ...]:
    grids = {key: convert(grid) for key, grid in block.items() if key != "log_rho" or name == "vtrace"}
    out = getattr(module, name)(**grids, **{key: numbers[key] for key in USES[name] if key in numbers})
    return out if isinstance(out, tuple) else (out,)


def tensor(grid: np.ndarray | None, dtype: torch.dtype = torch.float32) -> Any:
    """A grid as a tensor: flags as bool, numbers as ``dtype``; None as None."""
    if grid is None:
        return None
    return torch.from_numpy(np.ascontiguousarray(grid)).to(torch.bool if grid.dtype == bool else dtype)


def library(name: str, block: Block, dtype: torch.dtype = torch.float32, **numbers: float) -> tuple[Tensor, ...]:
    """What ``relive.returns`` says."""
    return _ask(returns, name, block, lambda grid: tensor(grid, dtype), numbers)


def truth(name: str, block: Block, **numbers: float) -> tuple[np.ndarray, ...]:
    """What the oracle says."""
    return _ask(oracle, name, block, lambda grid: grid, numbers)


def in_torch(name: str, block: Block, dtype: torch.dtype = torch.float32, **numbers: float) -> tuple[Tensor, ...]:
    """What torch operations say, as on devices other than the CPU."""
    grid = recursions.Grid(*(tensor(block[key], dtype) for key in recursions.Grid._fields))
    gamma, lam = numbers["gamma"], numbers["lam"]
    if name == "monte_carlo":
        return (internals.in_torch(recursions, "discounted_return")(grid, gamma),)
    if name == "vtrace":
        ratio = tensor(block["log_rho"], dtype).exp()
        return internals.in_torch(recursions, "vtrace")(ratio, grid, gamma, lam, numbers["rho_clip"], numbers["c_clip"])
    out = internals.in_torch(recursions, "gae")(grid, gamma, lam)
    return out if name == "gae" else out[1:]


def agree(got: tuple[Tensor, ...], expected: tuple[np.ndarray, ...], block: Block, numbers: Numbers) -> None:
    """Fail unless the two are equal up to rounding.

    A step of a recursion rounds fewer than eight times, each time by at most eps of the largest number about;
    the error of the step after it comes in times γλc, which is at most 1 unless c may exceed that.
    """
    length = len(block["reward"])
    growth = max(1.0, numbers["gamma"] * numbers.get("lam", 1.0) * numbers.get("c_clip", 1.0)) ** length
    largest = sum(float(np.nanmax(np.abs(grid), initial=0)) for grid in (block["reward"], block["value"], *expected))
    largest += float(np.nanmax(np.abs(block["final_value"]), initial=0)) if block["final_value"] is not None else 0.0
    for one, other in zip(got, expected, strict=True):
        tolerance = 8 * length * torch.finfo(one.dtype).eps * largest * max(1.0, numbers.get("rho_clip", 1.0)) * growth
        np.testing.assert_allclose(one.numpy(), other, rtol=0, atol=tolerance)


# Groups


def ask_groups(block: Block, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What ``group_advantage`` says of a block."""
    names = ("reward", "terminated", "truncated", "mask")
    reward, terminated, truncated, mask = (tensor(block[name], dtype) for name in names)
    return returns.group_advantage(reward, terminated, truncated, mask=mask, **options)


def whole_rewards(block: Block, seed: int = 0) -> Block:
    """The block with rewards from -2 to 2 (still NaN at unreal steps)."""
    reward = np.random.default_rng(seed).integers(-2, 3, block["reward"].shape).astype(np.float64)
    return block | {"reward": reward if block["mask"] is None else np.where(block["mask"], reward, np.nan)}
