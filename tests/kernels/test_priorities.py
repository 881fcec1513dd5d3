"""Random numbers, permutations and the sum tree: the twins agree to the bit, and permutations are uniform."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import often
from relive import kernels
from relive.kernels import cpu, reference


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63, 2**64 - 1])
def test_the_twins_make_the_same_uniform_numbers(seed: int) -> None:
    fast = np.empty(50)
    cpu.uniforms(np.uint64(seed), fast)
    assert fast.tolist() == [reference.priorities.uniform(seed, n) for n in range(1, 51)]


@given(st.integers(0, 2**64 - 1), st.booleans(), st.floats(1e-300, 1e300), st.integers(1, 40))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_twins_make_the_same_masses_and_none_beyond_the_total(
    seed: int, stratified: bool, total: float, count: int
) -> None:
    fast, plain = np.empty(count), np.empty(count)
    below = math.nextafter(total, 0.0)
    cpu.masses(np.uint64(seed), stratified, total, below, fast)
    reference.masses(seed, stratified, total, below, plain)
    assert fast.tobytes() == plain.tobytes()
    assert fast.min() >= 0
    assert fast.max() < total


@given(st.lists(st.floats(width=64), max_size=12), st.sampled_from([1.0, 1e30, float(np.finfo(np.float32).max)]))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_twins_take_the_same_magnitudes_and_find_the_same_one_that_is_none(
    values: list[float], limit: float
) -> None:
    poisoned = [i for i, value in enumerate(values) if not abs(value) <= limit]
    good = values[: poisoned[0]] if poisoned else values
    for twin in (cpu, reference):
        out = np.full(len(values), -7, np.float32)
        assert twin.magnitudes(np.array(values), limit, out) == (poisoned[0] if poisoned else -1)
        assert out[: len(good)].tolist() == [np.float32(abs(value)) for value in good]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_twins_take_the_same_shares_of_the_total(weights: list[float], seed: int) -> None:
    nodes = np.array(weights)
    positions = np.random.default_rng(seed).integers(0, len(weights), 9)
    total, results = math.fsum(weights), []
    for twin in (cpu, reference):
        out = np.empty(9)
        lowest = twin.tree_shares(nodes, len(weights), positions, total, out)
        assert out.tolist() == [weights[i] / total for i in positions]
        assert lowest == out.min()
        results.append(out.tobytes())
    assert results[0] == results[1]


SEEDS = [0, 1, 2, 12345, 2**31, 2**32 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 100, 1000])
def test_the_twins_draw_the_same_permutation(n: int, seed: int) -> None:
    for counter in (0, 1, 2, 1000, 2**40):
        fast, plain = cpu.permutation(n, seed, counter), reference.permutation(n, seed, counter)
        assert fast.dtype is plain.dtype is torch.int64
        assert torch.equal(fast, plain)


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 2**63))
def test_a_permutation_holds_every_number_once_whatever_the_seed(n: int, seed: int, counter: int) -> None:
    order = kernels.permutation(n, seed, counter)
    assert order.sort().values.tolist() == list(range(n))
    assert torch.equal(order, reference.permutation(n, seed, counter))


def test_permutations_never_change_between_versions() -> None:
    # A run that is resumed tomorrow must draw what it would have drawn today.
    assert kernels.permutation(10, 0, 0).tolist() == [4, 9, 2, 5, 1, 7, 6, 0, 3, 8]
    assert kernels.permutation(10, 7, 3).tolist() == [6, 1, 2, 7, 3, 9, 8, 4, 0, 5]


def test_every_seed_and_every_counter_gives_a_permutation_of_its_own() -> None:
    drawn = {tuple(kernels.permutation(20, seed, k).tolist()) for seed in range(60) for k in range(60)}
    assert len(drawn) == 3600


def test_a_permutation_depends_on_nothing_but_its_arguments() -> None:
    first = kernels.permutation(50, 3, 4)
    torch.rand(3)
    kernels.permutation(50, 3, 5)
    assert torch.equal(kernels.permutation(50, 3, 4), first)


# Uniformity. "positions" is a chi-square over the M x M table of how often number v came to position i, which has
# (M - 1)^2 degrees of freedom, as a number of standard deviations. A bias that brings one number to the front in 1 % of
# the draws adds draws / 10,000 * M to it, which is draws / 14,000 standard deviations for any M: 8.5 here, and the test
# fails from 5 on, which chance exceeds in less than one seed of a million. The other statistics see far less than 1 %.
M, DRAWS = 20, 120_000


def z_scores(orders: np.ndarray) -> dict[str, float]:
    """How many standard deviations each statistic of these permutations ``[draws, M]`` is off the uniform."""
    draws = len(orders)
    counts = np.stack([np.bincount(orders[:, i], minlength=M) for i in range(M)])
    expected, df = draws / M, (M - 1) ** 2
    # All rows and all columns of the table sum to the same: of its mass a part of (M - 1) / M is free.
    chi2 = float(((counts - expected) ** 2 / expected).sum()) * (M - 1) / M
    fixed = float((orders == np.arange(M)).sum())
    rising = float((orders[:, :-1] < orders[:, 1:]).sum())
    kept = float((orders[1:] == orders[:-1]).sum())
    return {
        "positions": (chi2 - df) / math.sqrt(2 * df),
        "fixed points": (fixed - draws) / math.sqrt(draws),
        "ascents": (rising - draws * (M - 1) / 2) / math.sqrt(draws * (M + 1) / 12),
        "same place as the draw before": (kept - (draws - 1)) / math.sqrt(draws - 1),
    }


@pytest.fixture(scope="module")
def orders() -> np.ndarray:
    """Permutations of one seed, by counter."""
    return np.stack([cpu.permutation(M, 99, k).numpy() for k in range(DRAWS)])


def test_permutations_are_uniform_over_positions_order_and_time(orders: np.ndarray) -> None:
    assert {name: z for name, z in z_scores(orders).items() if abs(z) > 5} == {}


def test_permutations_are_uniform_over_seeds_as_well() -> None:
    by_seed = np.stack([cpu.permutation(M, seed, 0).numpy() for seed in range(often(40_000, DRAWS))])
    assert {name: z for name, z in z_scores(by_seed).items() if abs(z) > 5} == {}


@pytest.mark.parametrize("statistic", ["positions", "fixed points", "ascents", "same place as the draw before"])
def test_the_test_of_uniformity_sees_a_bias_of_one_percent(orders: np.ndarray, statistic: str) -> None:
    biased, rng = orders.copy(), np.random.default_rng(0)
    hit = rng.random(DRAWS) < 0.01
    if statistic == "positions":  # in 1 % of the draws number 0 is swapped to the front
        rows = np.flatnonzero(hit)
        where = biased[rows].argmin(1)
        biased[rows, where], biased[rows, 0] = biased[rows, 0], 0
    elif statistic == "fixed points":
        biased[hit] = np.arange(M)
    elif statistic == "ascents":
        biased[hit] = np.sort(biased[hit], axis=1)
    else:  # in 1 % of the epochs the permutation is the last one's again, as trap M1 does in all
        again = np.flatnonzero(hit[1:]) + 1
        biased[again] = biased[again - 1]
    assert z_scores(biased)[statistic] > 5


def test_all_orders_of_four_come_equally_often() -> None:
    draws = 24_000
    counts = Counter(tuple(cpu.permutation(4, 5, k).tolist()) for k in range(draws))
    chi2 = sum((counts[order] - draws / 24) ** 2 / (draws / 24) for order in itertools.permutations(range(4)))
    assert chi2 < 60  # 23 degrees of freedom: above 60 in 4 of 100,000 seeds
