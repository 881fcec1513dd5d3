"""The kernels of random numbers and of the sum tree, fast and plain, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
