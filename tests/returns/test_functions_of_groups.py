"""Advantages relative to a group, and normalised ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relive import returns
from support import oracle
from support.effort import every_nth
from support.return_blocks import DTYPES, Block, ask_groups, drawn, patterns, tensor, whole_rewards


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


@pytest.mark.parametrize(
    ("size", "per", "until_first_done"),
    every_nth(
        3,
        [(1, False), (2, False), (3, False), (4, False), (1, True), (2, True), (3, True)],
        ["step", "episode"],
        [True, False],
    ),
)
def test_every_pattern_in_groups_agrees_with_the_oracle(
    size: tuple[int, bool], per: str, until_first_done: bool
) -> None:
    length, masked = size
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
