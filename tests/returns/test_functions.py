"""Advantages and returns: every pattern of ends, random blocks, any tensors, and what is refused."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from relive import errors, returns
from support.effort import first_of
from support.return_blocks import (
    COEFFICIENTS,
    DTYPES,
    ESTIMATORS,
    Block,
    Numbers,
    _ask,
    agree,
    block_of,
    drawn,
    envs_of,
    in_torch,
    library,
    patterns,
    tensor,
    truth,
)


def agree_everywhere(name: str, block: Block, numbers: Numbers) -> None:
    """Hold the function, in both precisions, and what other devices run against the oracle."""
    expected = truth(name, block, **numbers)
    for dtype in DTYPES:
        got = library(name, block, dtype, **numbers)
        assert all(out.dtype == dtype for out in got)
        agree(got, expected, block, numbers)
        agree(in_torch(name, block, dtype, **numbers), expected, block, numbers)


# Every pattern, small


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("length", first_of(4, range(1, 6)))
def test_every_pattern_of_ends_agrees_with_the_oracle(name: str, length: int) -> None:
    for numbers in COEFFICIENTS:
        agree_everywhere(name, patterns(length, masked=False), numbers)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_pattern_of_ends_and_unreal_steps_agrees_with_the_oracle(name: str, length: int) -> None:
    for numbers in COEFFICIENTS:
        agree_everywhere(name, patterns(length, masked=True), numbers)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("length", first_of(1, [4, 5]))
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
def test_a_grid_of_another_shape_is_refused(name: str, field: str) -> None:
    takes_value = field in ("value", "final_value") and name != "group_advantage"
    if field in ("terminated", "truncated", "mask") or takes_value or (field == "log_rho" and name == "vtrace"):
        flags = field in ("terminated", "truncated", "mask")
        for shape in [(4,), (4, 5), (3, 6), (6, 4), (4, 6, 1), (1, 1), ()]:
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
