"""Advantages and returns at the ends of episodes: the traps, final values, steps that are not real."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relive import errors, returns
from support.return_blocks import COEFFICIENTS, DTYPES, ESTIMATORS, agree, drawn, library, tensor, truth


def one_env(**grids: Any) -> dict[str, Any]:
    """Lists as tensors [T, 1]: flags where they are bools, else float32."""
    out: dict[str, Any] = {}
    for name, numbers in grids.items():
        out[name] = torch.tensor(numbers, dtype=torch.bool if isinstance(numbers[0], bool) else torch.float32)[:, None]
    return out


def listed(*outs: Tensor) -> list[list[float]]:
    """Tensors [T, 1] as lists."""
    return [out[:, 0].tolist() for out in outs]


NO = False
YES = True

# Traps


def cut(dtype: torch.dtype, terminated: bool = False) -> dict[str, Any]:
    """One env, truncated at its only step: V(obs) 100, V(true final obs) 10, V(reset obs) 7."""
    grids = one_env(reward=[1.0], value=[100.0, 7], terminated=[terminated], truncated=[YES], final_value=[10.0])
    return grids | {name: grids[name].to(dtype) for name in ("reward", "value", "final_value")}


def every_return(grids: dict[str, Any], gamma: float) -> dict[str, float]:
    """The first step's return by each estimator; on policy they are all the same where one step is left."""
    log_rho = torch.zeros_like(grids["reward"])
    outs = {
        "gae": returns.gae(**grids, gamma=gamma)[1],
        "monte_carlo": returns.monte_carlo(**grids, gamma=gamma),
        "lambda_returns": returns.lambda_returns(**grids, gamma=gamma),
        "vtrace": returns.vtrace(log_rho, **grids, gamma=gamma)[1],
        "gae advantage": returns.gae(**grids, gamma=gamma)[0] + grids["value"][:-1],
        "vtrace advantage": returns.vtrace(log_rho, **grids, gamma=gamma)[0] + grids["value"][:-1],
    }
    return {name: out[0, 0].item() for name, out in outs.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_value_of_the_reset_observation_is_not_read_at_an_end(dtype: torch.dtype) -> None:
    # With V(reset obs) in its place: 1 + 0.5 * 7 = 4.5. Not even NaN or infinity there may come through.
    for reset_value in (7.0, float("nan"), float("inf"), -1e30):
        for terminated, expected in ((False, 6.0), (True, 1.0)):
            grids = cut(dtype, terminated)
            grids["value"][1] = reset_value
            assert set(every_return(grids, gamma=0.5).values()) == {expected}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_input_is_changed_by_a_call_or_shared_with_its_result(name: str, dtype: torch.dtype) -> None:
    block = drawn(8, 6, 5)
    grids = {key: tensor(grid, dtype) for key, grid in block.items() if key != "log_rho" or name == "vtrace"}
    before = {key: grid.clone() for key, grid in grids.items() if grid is not None}
    out = getattr(returns, name)(**grids)
    for result in out if isinstance(out, tuple) else (out,):
        result.fill_(123)
    for key, grid in before.items():
        assert torch.equal(grid.nan_to_num(), grids[key].nan_to_num()), f"{key} was written to"


@pytest.mark.parametrize("per", ["step", "episode"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_group_advantage_changes_no_input_and_shares_none(per: Any, dtype: torch.dtype) -> None:
    block = drawn(8, 6, 4)
    grids = {key: tensor(block[key], dtype) for key in ("reward", "terminated", "truncated", "mask")}
    before = {key: grid.clone() for key, grid in grids.items() if grid is not None}
    for until_first_done in (True, False):
        for result in returns.group_advantage(**grids, group_size=2, per=per, until_first_done=until_first_done):
            result.fill_(1)
    for key, grid in before.items():
        assert torch.equal(grid.nan_to_num(), grids[key].nan_to_num()), f"{key} was written to"


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_not_finite_stays_in_its_episode(name: str, dtype: torch.dtype) -> None:
    block = drawn(9, 9, 3, ends=0.0, unreal=None)
    block["terminated"][2], block["truncated"][5], block["final_value"][5] = True, True, 1.5
    clean = library(name, block, dtype, **COEFFICIENTS[0])
    for poison in (np.nan, np.inf):
        block["reward"][3:6], block["value"][3:6] = poison, -poison
        for got, expected in zip(library(name, block, dtype, **COEFFICIENTS[0]), clean, strict=True):
            assert not got[3:6].isfinite().any()
            assert torch.equal(got[:3], expected[:3])
            assert torch.equal(got[6:], expected[6:])


# Final values


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_truncated_step_without_its_final_value_is_refused(name: str, dtype: torch.dtype) -> None:
    block = drawn(10, 6, 5, ends=0.0, unreal=None)
    block["truncated"][4, 3] = True
    for final_value in (None, block["final_value"]):  # missing, and NaN where it is needed
        with pytest.raises(errors.FieldError, match=r"final_value.*step 4 of env 3"):
            library(name, block | {"final_value": final_value}, dtype)
    block["final_value"][4, 3] = 1.0
    library(name, block, dtype)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_final_values_may_be_left_out_where_none_is_needed(name: str, dtype: torch.dtype) -> None:
    block = drawn(11, 6, 5, ends=0.3, unreal=0.3)
    block["truncated"] = block["truncated"] & (block["terminated"] | ~block["mask"])
    assert block["truncated"].any()
    numbers = COEFFICIENTS[0]
    got = library(name, block | {"final_value": None}, dtype, **numbers)
    assert all(torch.equal(a, b) for a, b in zip(got, library(name, block, dtype, **numbers), strict=True))
    agree(got, truth(name, block, **numbers), block, numbers)


def test_without_a_critic_every_bootstrap_is_zero() -> None:
    grids = one_env(reward=[1.0, 2], terminated=[NO, NO], truncated=[YES, NO])
    assert listed(returns.monte_carlo(**grids, gamma=0.5)) == [[1, 2]]
    assert listed(returns.monte_carlo(**grids, final_value=torch.full((2, 1), 10.0), gamma=0.5)) == [[1, 2]]


# Unreal steps


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_but_the_value_of_an_unreal_step_is_read(name: str, dtype: torch.dtype) -> None:
    block = drawn(12, 12, 8, unreal=0.4)
    unreal = ~block["mask"]
    before = library(name, block, dtype)
    for key, garbage in (("reward", 1e9), ("log_rho", 50.0), ("final_value", -1e9)):
        block[key] = np.where(unreal, garbage, block[key])
    for key in ("terminated", "truncated"):
        block[key] = np.where(unreal, ~block[key], block[key])
    for one, other in zip(library(name, block, dtype), before, strict=True):
        assert torch.equal(one, other)
