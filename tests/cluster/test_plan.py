"""Shards divide a batch as one ring of all their rows would: counts, masses and weights, computed from totals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relive import core
from relive.cluster.plan import BatchPlan, global_weights, shard_counts, shard_key, shard_masses
from relive.errors import EmptyError, NotFiniteError, ParameterError, ShapeError
from relive.samplers.sumtree import SumTree
from support.fit import spread

MASSES = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=6).filter(any)


def counts_of(masses: list[float], batch_size: int, draws: int, stratified: bool = False) -> np.ndarray:
    """The counts of this many batches, ``[draws, K]``."""
    return np.stack([shard_counts(masses, batch_size, 3, t, stratified=stratified) for t in range(draws)])


@given(masses=MASSES, batch_size=st.integers(1, 300), seed=st.integers(-9, 2**64), stratified=st.booleans())
def test_the_shards_draw_the_batch_between_them_and_each_in_its_own_mass(
    masses: list[float], batch_size: int, seed: int, stratified: bool
):
    t = seed % 100
    counts = shard_counts(masses, batch_size, seed, t, stratified=stratified)
    assert counts.sum() == batch_size
    for shard, mass in enumerate(masses):
        mine = shard_masses(masses, shard, batch_size, seed, t, stratified=stratified)
        assert len(mine) == counts[shard]
        assert ((mine >= 0) & (mine < mass)).all()
        if stratified:
            assert abs(counts[shard] - batch_size * mass / sum(masses)) < 2 + 1e-6


def test_a_mass_at_the_very_end_of_a_shard_stays_within_it_where_the_difference_rounds_up():
    # With ulp = 2^-52: 1.5 + 1.5 ulp rounds to 1.5 + 2 ulp. The number below, less 1.5 ulp, is halfway below 1.5.
    masses = np.array([3 * 2.0**-53, 1.5])
    ends = masses.cumsum()
    wanted = np.array([math.nextafter(ends[1], 0.0)])
    assert wanted - masses[0] == masses[1]
    assert BatchPlan(masses, ends, wanted, np.zeros(2, np.int64)).of(1).tolist() == [math.nextafter(1.5, 0.0)]


@pytest.mark.parametrize("stratified", [False, True])
def test_the_shards_draw_the_rows_that_one_tree_of_all_draws(stratified: bool):
    rng = np.random.default_rng(0)
    priorities = rng.random(4 * 100) ** 4
    priorities[rng.random(400) < 0.3] = 0.0  # rows that cannot be drawn
    priorities[100:200] = 0.0  # nor any of this shard
    whole, shards = SumTree(400), [SumTree(100) for _ in range(4)]
    whole.set(np.arange(400), priorities)
    for k, tree in enumerate(shards):
        tree.set(np.arange(100), priorities[100 * k : 100 * (k + 1)])
    masses = [tree.total for tree in shards]
    for t in range(50):
        wanted = np.empty(64)
        core.masses(core.key(11, t), stratified, whole.total, wanted)
        mine = [shard_masses(masses, k, 64, 11, t, stratified=stratified) for k in range(4)]
        found = [100 * k + tree.find(mine[k]) for k, tree in enumerate(shards) if len(mine[k])]
        assert sorted(np.concatenate(found)) == sorted(whole.find(wanted))


def test_counts_have_the_chances_of_the_masses_and_a_bias_of_one_percent_would_show():
    # 3.2 M draws: a standard deviation of the smallest share, 0.1, is 1.7e-4, and 1 % more of its mass moves it by
    # 9e-4; of the largest, 0.6, 2.7e-4 and 2.4e-3. With 3 degrees of freedom the chi-square gains 29 and more.
    masses = [1.0, 2.0, 0.0, 6.0, 1.0]
    counts = counts_of(masses, 8192, 400).sum(0)
    some = np.flatnonzero(masses)
    assert counts[2] == 0
    assert spread(counts[some], chances(masses)) < 5
    for shard in some:
        biased = list(masses)
        biased[shard] *= 1.01
        assert spread(counts[some], chances(biased)) > 5


def chances(masses: list[float]) -> dict[int, float]:
    return {shard: mass / sum(masses) for shard, mass in enumerate(masses) if mass}


def test_counts_vary_and_vary_together_as_multinomial_ones_do():
    shares, batch_size, draws = np.array([0.2, 0.3, 0.5]), 32, 20_000
    counts = counts_of([2.0, 3.0, 5.0], batch_size, draws)
    expected = batch_size * (np.diag(shares) - np.outer(shares, shares))
    found = np.cov(counts.T)
    # A variance of n draws is off by a factor of sqrt(2 / n) or so: 1 %. Stratified counts have less than a tenth.
    assert np.abs(found / expected - 1).max() < 0.05
    assert np.cov(counts_of([2.0, 3.0, 5.0], batch_size, 500, stratified=True).T).max() < 0.1 * expected.max()


def test_stratified_counts_have_the_right_means():
    masses = [1.0, 2.0, 3.55]
    counts = counts_of(masses, 17, 20_000, stratified=True)
    error = counts.mean(0) / 17 / (np.array(masses) / sum(masses)) - 1
    assert np.abs(error).max() < 0.0025  # of at most 0.5 / sqrt(20,000) / 17 / 0.15 = 0.0014; 1 % would show
    assert len(np.unique(counts[:, 0])) > 1


def test_a_plan_is_a_function_of_the_seed_and_the_number():
    one, again = (shard_counts([1, 2, 3], 500, 7, 5) for _ in range(2))
    assert one.tolist() == again.tolist()
    others = [shard_counts([1, 2, 3], 500, seed, t) for seed, t in ((7, 6), (8, 5))]
    assert all(one.tolist() != other.tolist() for other in others)
    keys = {shard_key(seed, t, shard) for seed in range(5) for t in range(20) for shard in range(20)}
    assert len(keys) == 5 * 20 * 20


def test_weights_are_those_of_one_ring():
    rng = np.random.default_rng(1)
    shards = [rng.random(size) + 0.01 for size in (3, 20, 7)]
    every = np.concatenate(shards)
    shares = every / every.sum()
    weights = (len(every) * shares) ** -0.4
    found = [global_weights(shard, every.min(), 0.4) for shard in shards]
    assert found[0].dtype == np.float32
    assert np.concatenate(found) == pytest.approx(weights / weights.max(), rel=1e-6)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(EmptyError, match="no shard has a row to draw"):
        shard_counts([0.0, 0.0], 8, 0, 0)
    for bad in ([1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [1e308, 1e308]):
        with pytest.raises(NotFiniteError, match="masses: shard 1"):
            shard_counts(bad, 8, 0, 0)
    for shape in ([], [[1.0]], 1.0):
        with pytest.raises(ShapeError, match="one number per shard"):
            shard_counts(shape, 8, 0, 0)
    with pytest.raises(ParameterError, match="batch_size=0"):
        shard_counts([1.0], 0, 0, 0)
    with pytest.raises(ParameterError, match="t=-1"):
        shard_counts([1.0], 8, 0, -1)
    with pytest.raises(ParameterError, match="shard=2"):
        shard_masses([1.0, 2.0], 2, 8, 0, 0)
    with pytest.raises(ParameterError, match="least=0"):
        global_weights([1.0], 0.0, 0.4)
    with pytest.raises(ParameterError, match="beta=-1"):
        global_weights([1.0], 1.0, -1)
