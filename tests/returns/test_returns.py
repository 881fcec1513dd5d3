"""``relive.returns`` and its kernels against the oracle, each other, and numbers worked out by hand.

Envs are independent, so one call on N = 4^T envs sees every pattern of terminated and truncated of length T.
Wherever a number must not be read, the blocks hold NaN: reading it would show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from relive import errors, returns
from relive.kernels import cpu, reference

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


def kernel(
    module: Any, name: str, block: Block, dtype: torch.dtype = torch.float32, **numbers: float
) -> tuple[Tensor, ...]:
    """What one implementation says, asked without the function in front of it."""
    names = ("reward", "value", "terminated", "truncated", "final_value", "mask")
    grid = reference.Grid(*(tensor(block[key], dtype) for key in names))
    gamma, lam = numbers["gamma"], numbers["lam"]
    if name == "monte_carlo":
        return (module.discounted_return(grid, gamma),)
    if name == "vtrace":
        log_rho = tensor(block["log_rho"], dtype)
        return module.vtrace(log_rho, grid, gamma, lam, numbers["rho_clip"], numbers["c_clip"])
    out = module.gae(grid, gamma, lam)
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


def agree_everywhere(name: str, block: Block, numbers: Numbers) -> None:
    """Hold the function, in both precisions, and both implementations of it against the oracle."""
    expected = truth(name, block, **numbers)
    for dtype in DTYPES:
        got = library(name, block, dtype, **numbers)
        assert all(out.dtype == dtype for out in got)
        agree(got, expected, block, numbers)
        agree(kernel(reference, name, block, dtype, **numbers), expected, block, numbers)
    agree(kernel(cpu, name, block, **numbers), expected, block, numbers)


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


# Every pattern, small


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_every_pattern_of_ends_agrees_with_the_oracle(name: str, length: int) -> None:
    for numbers in COEFFICIENTS:
        agree_everywhere(name, patterns(length, masked=False), numbers)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_pattern_of_ends_and_unreal_steps_agrees_with_the_oracle(name: str, length: int) -> None:
    for numbers in COEFFICIENTS:
        agree_everywhere(name, patterns(length, masked=True), numbers)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("length", [4, 5])
def test_a_slice_of_the_longer_patterns_with_unreal_steps_agrees_with_the_oracle(name: str, length: int) -> None:
    for i, numbers in enumerate(COEFFICIENTS):
        agree_everywhere(name, envs_of(patterns(length, masked=True), slice(200 * i, 200 * i + 200)), numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("length", [4, 5])
def test_every_longer_pattern_with_unreal_steps_agrees_with_the_oracle(name: str, length: int) -> None:
    for seed, numbers in enumerate(COEFFICIENTS):
        agree_everywhere(name, patterns(length, masked=True, seed=seed), numbers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_pattern_of_six_steps_agrees_with_the_oracle(name: str) -> None:
    for seed, numbers in enumerate(COEFFICIENTS):
        agree_everywhere(name, patterns(6, masked=False, seed=seed), numbers)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(("length", "num_envs"), [(1, 2), (1, 3), (2, 2)])
def test_every_pattern_of_several_envs_at_once_agrees_with_the_oracle(name: str, length: int, num_envs: int) -> None:
    numbers = COEFFICIENTS[0]
    rng = np.random.default_rng(0)
    for code in itertools.product(range(4), repeat=length * num_envs):
        digit = np.array(code).reshape(length, num_envs)
        block = block_of(rng, digit & 1 == 1, digit & 2 == 2)
        agree(library(name, block, **numbers), truth(name, block, **numbers), block, numbers)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 9, 16, 100])
def test_no_env_depends_on_its_neighbours_or_their_number(name: str, width: int) -> None:
    block, numbers = drawn(3, 9, 100), COEFFICIENTS[0]
    whole = library(name, block, **numbers)
    for start in range(0, 100, 5 * width):
        part = library(name, envs_of(block, slice(start, start + width)), **numbers)
        for one, other in zip(part, whole, strict=True):
            assert torch.equal(one, other[:, start : start + width])


# Random data


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Block, Numbers]:
    """A block of up to 24 steps of 12 envs, ending never to always, and the coefficients to ask with."""
    share = st.sampled_from([0.0, 0.1, 0.5, 1.0])
    block = drawn(
        seed=draw(st.integers(0, 2**32 - 1)),
        length=draw(st.integers(1, 24)),
        num_envs=draw(st.integers(1, 12)),
        ends=draw(share),
        unreal=draw(st.none() | share),
    )
    block["reward"] = block["reward"] * draw(st.sampled_from([0.0, 1.0, 1024.0]))
    fraction = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]) | st.floats(0.0, 1.0)
    numbers = {"gamma": draw(fraction), "lam": draw(fraction)}
    numbers |= {name: draw(st.sampled_from([0.25, 1.0, 1.5])) for name in ("rho_clip", "c_clip")}
    return block, numbers


@pytest.mark.parametrize("name", ESTIMATORS)
@given(world=worlds())
def test_random_blocks_agree_with_the_oracle(name: str, world: tuple[Block, Numbers]) -> None:
    agree_everywhere(name, *world)


@given(world=worlds())
def test_the_estimators_reduce_to_one_another(world: tuple[Block, Numbers]) -> None:
    block, numbers = world
    block["log_rho"] = np.zeros_like(block["reward"])
    gamma, lam = numbers["gamma"], numbers["lam"]
    on_policy = {"gamma": gamma, "lam": lam, "rho_clip": 1.0, "c_clip": 1.0}
    td = library("lambda_returns", block, torch.float64, **numbers)
    assert torch.equal(td[0], library("gae", block, torch.float64, **numbers)[1])
    torch.testing.assert_close(library("vtrace", block, torch.float64, **on_policy)[1], td[0], rtol=1e-9, atol=1e-9)
    whole = library("lambda_returns", block, torch.float64, gamma=gamma, lam=1.0)
    torch.testing.assert_close(whole, library("monte_carlo", block, torch.float64, gamma=gamma), rtol=1e-9, atol=1e-9)


# The two implementations


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("num_envs", [1, 2, 3, 7, 8, 9, 16, 64, 300])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 64])
def test_numba_agrees_with_torch_to_the_bit_at_every_shape(name: str, length: int, num_envs: int) -> None:
    for numbers, ends, unreal in zip(
        COEFFICIENTS, (0.0, 0.02, 0.15, 0.5, 1.0), (None, 0.01, None, 0.3, 1.0), strict=True
    ):
        block = drawn(1, length, num_envs, ends, unreal)
        ours = kernel(cpu, name, block, **numbers)
        assert all(torch.equal(a, b) for a, b in zip(ours, kernel(reference, name, block, **numbers), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, library(name, block, **numbers), strict=True))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("num_envs", [1, 2, 3, 7, 8, 9, 16, 64, 300])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 64])
def test_narrow_and_wide_blocks_agree_with_the_oracle(name: str, length: int, num_envs: int) -> None:
    numbers, block = COEFFICIENTS[0], drawn(2, length, num_envs, ends=0.1)
    some = np.random.default_rng(num_envs).permutation(num_envs)[:5]
    got = tuple(out[:, some] for out in library(name, block, **numbers))
    part = envs_of(block, some)
    agree(got, truth(name, part, **numbers), part, numbers)


def test_without_values_monte_carlo_agrees_with_the_oracle_and_numba_with_torch() -> None:
    for length in (1, 2, 3, 4):
        block = patterns(length, masked=True) | {"value": None, "final_value": None}
        for gamma in (0.0, 0.9, 1.0):
            numbers: Numbers = {"gamma": gamma, "lam": 1.0}
            (got,) = library("monte_carlo", block, **numbers)
            (expected,) = truth("monte_carlo", block, **numbers)
            np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-5)
            for module in (cpu, reference):
                assert torch.equal(got, kernel(module, "monte_carlo", block, **numbers)[0])


# What tensors may come


def awkward(x: Tensor, how: str) -> Tensor:
    """The same numbers, laid out otherwise in memory."""
    if how == "env-major":
        return x.t().contiguous().t()
    if how == "every other":
        wide = torch.full((2 * x.shape[0], 2 * x.shape[1] + 1), -99, dtype=torch.float64).to(x.dtype)
        wide[::2, 1::2] = x
        return wide[::2, 1::2]
    offset = torch.full((x.numel() + 1,), -99, dtype=torch.float64).to(x.dtype)
    offset[1:] = x.reshape(-1)
    return offset[1:].view(x.shape)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("how", ["env-major", "every other", "misaligned"])
def test_the_layout_in_memory_does_not_matter(name: str, how: str) -> None:
    block, numbers = drawn(4, 11, 6), COEFFICIENTS[0]

    def convert(grid: Any) -> Any:
        plain = tensor(grid)
        return None if plain is None else awkward(plain, how)

    for got, expected in zip(
        _ask(returns, name, block, convert, numbers), library(name, block, **numbers), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_flags_that_all_envs_share_may_be_expanded(name: str) -> None:
    block, numbers = drawn(5, 8, 4, ends=0.0, unreal=None), COEFFICIENTS[0]
    block["terminated"] = np.arange(8)[:, None] % 3 == np.full(4, 2)
    expected = library(name, block, **numbers)

    def convert(grid: Any) -> Any:
        shared = grid is block["terminated"]
        return torch.from_numpy(grid[:, :1].copy()).expand(8, 4) if shared else tensor(grid)

    for got, want in zip(_ask(returns, name, block, convert, numbers), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_integer_rewards_count_as_float32(name: str) -> None:
    block, numbers = drawn(6, 8, 4, unreal=None), COEFFICIENTS[0]
    block["reward"] = np.arange(32).reshape(8, 4) - 16.0
    expected = library(name, block, **numbers)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        wanted = (
            expected if dtype is not torch.uint8 else library(name, block | {"reward": block["reward"] + 16}, **numbers)
        )
        shift = 16 if dtype is torch.uint8 else 0

        def convert(grid: Any, dtype: torch.dtype = dtype, shift: int = shift) -> Any:
            return torch.from_numpy(grid + shift).to(dtype) if grid is block["reward"] else tensor(grid)

        for got, want in zip(_ask(returns, name, block, convert, numbers), wanted, strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_carry_a_graph_give_plain_numbers(name: str, dtype: torch.dtype) -> None:
    block, numbers = drawn(7, 5, 3), COEFFICIENTS[0]

    def convert(grid: Any) -> Any:
        out = tensor(grid, dtype)
        return out.requires_grad_() if out is not None and out.is_floating_point() else out

    for got, want in zip(
        _ask(returns, name, block, convert, numbers), library(name, block, dtype, **numbers), strict=True
    ):
        assert not got.requires_grad
        assert torch.equal(got, want)


# Traps


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_done_flag_is_read_at_its_own_step_and_not_one_late(dtype: torch.dtype) -> None:
    grids = one_env(
        reward=[0.0, 0, 1, 0, 0],
        value=[0.0, 0, 0, 5, 0, 0],
        terminated=[NO, NO, YES, NO, NO],
        truncated=[NO, NO, NO, NO, NO],
    )
    grids |= {name: grids[name].to(dtype) for name in ("reward", "value")}
    # Read a step late it gives [0, 0, 1.247, -5, 0]: the reward never gets back, the next episode leaks in.
    advantage, ret = listed(*returns.gae(**grids, gamma=0.99, lam=0.95))
    assert advantage == pytest.approx([0.88454025, 0.9405, 1, -5, 0], rel=1e-6)
    assert ret == pytest.approx([0.88454025, 0.9405, 1, 0, 0], rel=1e-6)
    (whole,) = listed(returns.monte_carlo(**grids, gamma=0.99))
    assert whole == pytest.approx([0.9801, 0.99, 1, 0, 0], rel=1e-6)
    _, targets = returns.vtrace(torch.zeros(5, 1, dtype=dtype), **grids, gamma=0.99)
    assert listed(targets)[0] == pytest.approx([0.9801, 0.99, 1, 0, 0], rel=1e-6)


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
def test_a_truncated_step_bootstraps_from_its_final_observation_and_not_its_own(
    dtype: torch.dtype,
) -> None:
    # With V(obs[t]) in its place: 1 + 0.5 * 100 = 51.
    assert every_return(cut(dtype), gamma=0.5) == dict.fromkeys(every_return(cut(dtype), 0.5), 6.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_truncation_is_no_termination(dtype: torch.dtype) -> None:
    # As a termination it would be 1; and a step that is both is a termination.
    assert set(every_return(cut(dtype), gamma=1.0).values()) == {11.0}
    assert set(every_return(cut(dtype, terminated=True), gamma=1.0).values()) == {1.0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_value_of_the_reset_observation_is_not_read_at_an_end(dtype: torch.dtype) -> None:
    # With V(reset obs) in its place: 1 + 0.5 * 7 = 4.5. Not even NaN or infinity there may come through.
    for reset_value in (7.0, float("nan"), float("inf"), -1e30):
        for terminated, expected in ((False, 6.0), (True, 1.0)):
            grids = cut(dtype, terminated)
            grids["value"][1] = reset_value
            assert set(every_return(grids, gamma=0.5).values()) == {expected}


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_advantage_flows_through_a_truncation_and_the_last_step_is_bootstrapped(
    dtype: torch.dtype,
) -> None:
    grids = one_env(
        reward=[0.0, 100, 1],
        value=[0.0, 0, 0, 8],
        terminated=[NO, NO, NO],
        truncated=[YES, NO, NO],
        final_value=[2.0, 0, 0],
    )
    grids |= {name: grids[name].to(dtype) for name in ("reward", "value", "final_value")}
    # Flowing through, the first would be 1 + 0.5 * 102.5 = 52.25; without a bootstrap the last would be 1.
    assert listed(*returns.gae(**grids, gamma=0.5, lam=1.0)) == [[1, 102.5, 5], [1, 102.5, 5]]
    assert listed(returns.monte_carlo(**grids, gamma=0.5)) == [[1, 102.5, 5]]
    assert listed(returns.lambda_returns(**grids, gamma=0.5, lam=1.0)) == [[1, 102.5, 5]]
    log_rho = torch.zeros(3, 1, dtype=dtype)
    assert listed(*returns.vtrace(log_rho, **grids, gamma=0.5)) == [[1, 102.5, 5], [1, 102.5, 5]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rewards_are_not_edited_to_hide_a_bootstrap(dtype: torch.dtype) -> None:
    grids = cut(dtype)
    returns.gae(**grids, gamma=0.9)
    assert grids["reward"].item() == 1.0  # edited in place it would be 1 + 0.9 * 10


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trace_that_reaches_an_unreal_step_stops_at_the_value_of_its_observation(
    dtype: torch.dtype,
) -> None:
    grids = one_env(
        reward=[1.0, 999, 4],
        value=[2.0, 8, 16, 32],
        terminated=[NO, YES, NO],
        truncated=[NO, YES, NO],
        mask=[YES, NO, YES],
    )
    grids |= {name: grids[name].to(dtype) for name in ("reward", "value")}
    assert listed(*returns.gae(**grids, gamma=0.5, lam=1.0)) == [[3, 0, 4], [5, 8, 20]]
    assert listed(returns.monte_carlo(**grids, gamma=0.5)) == [[5, 8, 20]]
    log_rho = torch.zeros(3, 1, dtype=dtype)
    assert listed(*returns.vtrace(log_rho, **grids, gamma=0.5)) == [[3, 0, 4], [5, 8, 20]]
    del grids["value"]
    assert listed(returns.monte_carlo(**grids, gamma=0.5)) == [[1, 0, 4]]


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


# Groups


def ask_groups(block: Block, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What ``group_advantage`` says of a block."""
    names = ("reward", "terminated", "truncated", "mask")
    reward, terminated, truncated, mask = (tensor(block[name], dtype) for name in names)
    return returns.group_advantage(reward, terminated, truncated, mask=mask, **options)


def agree_in_groups(block: Block, **options: Any) -> None:
    """Hold the group advantages of a block, in both precisions, against the oracle's."""
    names = ("reward", "terminated", "truncated", "mask")
    advantage, ret, mask = oracle.group_advantage(**{name: block[name] for name in names}, **options)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        got_advantage, got_ret, got_mask = ask_groups(block, dtype, **options)
        assert got_advantage.dtype == got_ret.dtype == dtype
        assert got_mask.dtype == torch.bool
        assert np.array_equal(got_mask.numpy(), mask)
        # Rewards are small integers and γ is 0, ½ or 1, so returns and ties are exact in either precision.
        assert np.array_equal(got_ret.numpy()[mask], ret[mask])
        np.testing.assert_allclose(got_advantage.numpy(), advantage, rtol=tolerance, atol=tolerance)


def whole_rewards(block: Block, seed: int = 0) -> Block:
    """The block with rewards from -2 to 2 (still NaN at unreal steps)."""
    reward = np.random.default_rng(seed).integers(-2, 3, block["reward"].shape).astype(np.float64)
    return block | {"reward": reward if block["mask"] is None else np.where(block["mask"], reward, np.nan)}


@pytest.mark.parametrize("per", ["step", "episode"])
@pytest.mark.parametrize("until_first_done", [True, False])
@pytest.mark.parametrize(
    ("length", "masked"), [(1, False), (2, False), (3, False), (4, False), (1, True), (2, True), (3, True)]
)
def test_every_pattern_in_groups_agrees_with_the_oracle(
    per: str, until_first_done: bool, length: int, masked: bool
) -> None:
    for seed, (group_size, gamma) in enumerate([(2, 1.0), (4, 0.5), (1, 1.0), (4, 0.0)]):
        block = whole_rewards(patterns(length, masked, seed), seed)
        agree_in_groups(block, group_size=group_size, per=per, gamma=gamma, until_first_done=until_first_done)


@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 20),
    num_groups=st.integers(1, 3),
    group_size=st.integers(1, 7),
    ends=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    unreal=st.none() | st.sampled_from([0.0, 0.3, 1.0]),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    per=st.sampled_from(["step", "episode"]),
    until_first_done=st.booleans(),
)
def test_random_groups_agree_with_the_oracle(
    seed: int,
    length: int,
    num_groups: int,
    group_size: int,
    ends: float,
    unreal: float | None,
    gamma: float,
    per: str,
    until_first_done: bool,
) -> None:
    block = whole_rewards(drawn(seed, length, num_groups * group_size, ends, unreal), seed)
    agree_in_groups(block, group_size=group_size, per=per, gamma=gamma, until_first_done=until_first_done)


def test_group_advantages_are_those_worked_out_by_hand() -> None:
    reward = torch.tensor([[1.0, 2, 0, 0], [1, 50, 3, 1]])
    terminated = torch.tensor([[False, True, False, False], [False, False, True, True]])
    truncated = torch.zeros(2, 4, dtype=torch.bool)
    advantage, ret, mask = returns.group_advantage(reward, terminated, truncated, group_size=2)
    assert mask.tolist() == [[True, True, True, True], [True, False, True, True]]
    assert ret[0].tolist() == [2, 2, 3, 1]
    assert advantage.tolist() == [[0, 0, 1, -1], [0, 0, 1, -1]]
    advantage, ret, mask = returns.group_advantage(
        reward, terminated, truncated, group_size=4, per="episode", until_first_done=False
    )
    # Five episodes: 2, then 2 and 50 of one env, 3, 1; mean 11.6, population deviation 19.21...
    assert mask.all()
    assert ret.tolist() == [[2, 2, 3, 1], [2, 50, 3, 1]]
    std = (sum((x - 11.6) ** 2 for x in (2, 2, 50, 3, 1)) / 5) ** 0.5
    expected = [[(x - 11.6) / std for x in row] for row in ([2, 2, 3, 1], [2, 50, 3, 1])]
    torch.testing.assert_close(advantage, torch.tensor(expected))


@pytest.mark.parametrize("per", ["step", "episode"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 6, 7, 11])
def test_a_group_of_equals_has_no_advantage_whatever_they_earn(per: Any, dtype: torch.dtype, group_size: int) -> None:
    # In float32 the mean of equals may be off by a rounding, as large as the eps of the divisor or larger.
    ends = torch.zeros(4, group_size, dtype=torch.bool)
    for reward in (0.1, -1 / 3, 1e3 + 0.1, 0.0):
        grid = torch.full((4, group_size), reward, dtype=dtype)
        advantage, _, _ = returns.group_advantage(grid, ends, ends, group_size=group_size, per=per, gamma=0.9)
        assert advantage.abs().max() < 1e-3


# Normalisation


@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 10),
    num_envs=st.integers(1, 10),
    kept=st.none() | st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    shift=st.sampled_from([0.0, 100.0]),
)
def test_normalized_numbers_agree_with_the_oracle(
    seed: int, length: int, num_envs: int, kept: float | None, shift: float
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(length, num_envs)).astype(np.float32).astype(np.float64) + shift
    mask = None if kept is None else rng.random(x.shape) < kept
    given_x = x if mask is None else np.where(mask, x, np.nan)
    expected = oracle.normalize(given_x, mask)
    # float32 leaves eps * |x| of an entry, and as much of the mean, before the division by the deviation.
    std = float(np.std(x if mask is None else x[mask], ddof=1)) if (x.size if mask is None else mask.sum()) > 1 else 1.0
    for dtype in DTYPES:
        got = returns.normalize(tensor(given_x, dtype), tensor(mask))
        assert got.dtype == dtype
        tolerance = 40 * torch.finfo(dtype).eps * (1 + float(np.abs(x).max()) / std + float(np.abs(expected).max()))
        np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalizing_fewer_than_two_entries_gives_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=dtype)
    assert returns.normalize(x[:, :1]).tolist() == [[0]]
    assert returns.normalize(x, torch.tensor([[True, False]])).tolist() == [[0, 0]]
    assert returns.normalize(x, torch.tensor([[False, False]])).tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_normalizing_equals_gives_zero_whatever_they_are(dtype: torch.dtype, masked: bool) -> None:
    for number, size in itertools.product((0.1, -1 / 3, 1e3 + 0.1), (3, 7, 100, 1000)):
        x = torch.full((size, 1), number, dtype=dtype)
        assert returns.normalize(x, torch.ones_like(x, dtype=torch.bool) if masked else None).abs().max() < 1e-3


# Refusals


def asked(name: str, **changed: Any) -> Any:
    """Ask a good question of ``returns.name``, but for what is changed."""
    block = drawn(13, 4, 6, ends=0.2, unreal=0.2)
    grids = {key: tensor(grid) for key, grid in block.items() if key != "log_rho" or name == "vtrace"}
    if name == "group_advantage":
        grids = {key: grids[key] for key in ("reward", "terminated", "truncated", "mask")} | {"group_size": 2}
    return getattr(returns, name)(**(grids | changed))


EVERY = [*ESTIMATORS, "group_advantage"]


@pytest.mark.parametrize("name", EVERY)
def test_a_good_question_is_answered(name: str) -> None:
    asked(name)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("field", ["terminated", "truncated", "mask", "final_value", "value", "log_rho"])
@pytest.mark.parametrize("shape", [(4,), (4, 5), (3, 6), (6, 4), (4, 6, 1), (1, 1), ()])
def test_a_grid_of_another_shape_is_refused(name: str, field: str, shape: tuple[int, ...]) -> None:
    takes_value = field in ("value", "final_value") and name != "group_advantage"
    if field in ("terminated", "truncated", "mask") or takes_value or (field == "log_rho" and name == "vtrace"):
        flags = field in ("terminated", "truncated", "mask")
        with pytest.raises(errors.ShapeError, match=f"'{field}'"):
            asked(name, **{field: torch.zeros(shape, dtype=torch.bool if flags else torch.float32)})


@pytest.mark.parametrize("name", EVERY)
def test_a_grid_on_another_device_is_refused(name: str) -> None:
    with pytest.raises(errors.DeviceError, match=r"'truncated': expected cpu.*got meta"):
        asked(name, truncated=torch.zeros(4, 6, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_values_without_the_bootstrap_row_are_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(errors.ShapeError, match=r"'value'.*\(5, 6\).*\(4, 6\).*bootstrap"):
        asked(name, value=torch.zeros(4, 6))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(4,), (0, 6), (4, 0), (4, 6, 1), ()])
def test_rewards_that_are_no_grid_of_steps_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(errors.ShapeError, match="'reward'"):
        asked(name, reward=torch.zeros(shape))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("field", ["terminated", "truncated", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_flags_that_are_not_bool_are_refused(name: str, field: str, dtype: torch.dtype) -> None:
    with pytest.raises(errors.DTypeError, match=f"'{field}'.*bool"):
        asked(name, **{field: torch.zeros(4, 6, dtype=dtype)})


def test_parameters_that_make_no_sense_are_refused() -> None:
    for estimator in (returns.GAE, returns.TDLambda, returns.VTrace):
        for wrong in ({"gamma": 1.1}, {"gamma": float("nan")}, {"lam": -0.1}, {"lam": float("nan")}):
            ((name, value),) = wrong.items()
            with pytest.raises(
                errors.ParameterError, match=rf"{estimator.__name__}\({name}={value}\): {name} is a number from 0 to 1"
            ):
                estimator(**wrong)
    for estimator in (returns.MonteCarlo, partial(returns.GroupAdvantage, 2)):
        with pytest.raises(errors.ParameterError, match=r"gamma=99"):
            estimator(gamma=99)
    with pytest.raises(errors.ParameterError, match=r"VTrace\(rho_clip=0\)"):
        returns.VTrace(rho_clip=0)
    assert returns.VTrace(rho_clip=float("inf"), c_clip=2.0).rho_clip == float("inf")


@pytest.mark.parametrize("group_size", [0, -2, 4, 5, 12])
def test_a_group_size_that_does_not_divide_the_envs_is_refused(group_size: int) -> None:
    with pytest.raises(errors.ParameterError, match="group_size"):
        asked("group_advantage", group_size=group_size)


def test_groups_are_compared_per_step_or_per_episode_only() -> None:
    with pytest.raises(errors.ParameterError, match="'step' or 'episode'"):
        asked("group_advantage", per="env")


# Estimators


def columns_of(estimator: Any, block: Block) -> dict[str, Any]:
    """The columns an estimator reads, as ``finish`` hands them over."""
    columns = block | {"log_prob": block["reward"] * 0, "target_log_prob": block["log_rho"]}
    return {name: tensor(columns[name]) for name in estimator.reads}


@pytest.mark.parametrize("normalized", [False, True])
def test_estimators_attach_what_their_functions_return(normalized: bool) -> None:
    block = drawn(14, 10, 6)
    mask, value = tensor(block["mask"]), tensor(block["value"])
    (whole,) = library("monte_carlo", block, gamma=0.9)
    (bare,) = library("monte_carlo", block | {"value": None, "final_value": None}, gamma=0.9)
    (td,) = library("lambda_returns", block, gamma=0.9, lam=0.5)
    clips: Numbers = {"rho_clip": 0.7, "c_clip": 0.6}
    expected = {
        returns.GAE(0.9, 0.5, normalize=normalized): library("gae", block, gamma=0.9, lam=0.5),
        returns.TDLambda(0.9, 0.5, normalize=normalized): (td - value[:-1], td),
        returns.MonteCarlo(0.9, normalize=normalized): (whole - value[:-1], whole),
        returns.MonteCarlo(0.9, normalize=normalized, critic=False): (bare, bare),
        returns.VTrace(0.9, 0.5, **clips, normalize=normalized): library("vtrace", block, gamma=0.9, lam=0.5, **clips),
    }
    for estimator, (advantage, ret) in expected.items():
        attached = estimator(**columns_of(estimator, block))
        assert attached.keys() == {"advantage", "return"}
        assert torch.equal(attached["return"], ret)
        assert torch.equal(attached["advantage"], returns.normalize(advantage, mask) if normalized else advantage)


def test_the_group_estimator_attaches_the_mask_of_the_steps_that_count() -> None:
    block = whole_rewards(drawn(15, 10, 6))
    estimator = returns.GroupAdvantage(3, per="episode", gamma=0.5, until_first_done=False, eps=0.25)
    attached = estimator(**columns_of(estimator, block))
    advantage, ret, mask = ask_groups(
        block, torch.float32, group_size=3, per="episode", gamma=0.5, until_first_done=False, eps=0.25
    )
    assert attached.keys() == {"advantage", "return", "mask"}
    assert torch.equal(attached["advantage"], advantage)
    assert torch.equal(attached["return"], ret)
    assert torch.equal(attached["mask"], mask)


@pytest.mark.parametrize(
    "estimator",
    [
        returns.GAE(0.9),
        returns.TDLambda(),
        returns.MonteCarlo(critic=False),
        returns.VTrace(),
        returns.GroupAdvantage(4),
    ],
)
def test_the_repr_of_an_estimator_is_the_call_that_rebuilds_it(estimator: Any) -> None:
    assert eval(repr(estimator), vars(returns).copy()) == estimator
