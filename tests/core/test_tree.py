"""The sum tree of the compiled core, held to its definition to the bit; and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from definitions import tree as plain
from relive import core

SIZES = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 100, 511, 512, 513]))


class Pair:
    """The arrays of a tree twice, for the definition and for the core."""

    def __init__(self, leaves: int, minima: bool) -> None:
        self.leaves, self.offsets = leaves, plain.offsets_of(leaves)
        self.nodes, self.own = (np.zeros(self.offsets[-1] + 1) for _ in range(2))
        self.minima, self.lows = (np.full(len(self.nodes) - self.offsets[1] if minima else 0, np.inf) for _ in range(2))
        self.core = core.Tree(self.own, leaves, self.lows)

    def set(self, positions: Any, values: Any) -> int:
        """Set weights in both."""
        found = self.core.set(positions, values)
        assert found == plain.set_weights(self.nodes, self.offsets, self.minima, self.leaves, positions, values)
        self.agree()
        return found

    def agree(self) -> None:
        """Both have the same bits."""
        assert self.nodes.tobytes() == self.own.tobytes()
        assert self.minima.tobytes() == self.lows.tobytes()

    def find(self, places: Any, until: Any, masses: Any) -> int:
        """Look masses up in both."""
        found = np.full(len(masses), -7)
        bad = self.core.find(places, until, masses, found)
        want, known = plain.find(self.nodes, self.offsets, places, until.tolist(), masses)
        assert bad == known
        assert bad >= 0 or found.tolist() == want
        return bad


@given(SIZES, st.booleans(), st.integers(0, 2**32))
def test_it_agrees_with_its_definition_bit_for_bit(leaves: int, minima: bool, seed: int) -> None:
    rng, pair = np.random.default_rng(seed), Pair(leaves, minima)
    begins, ends = np.sort(rng.integers(0, leaves + 1, (2, int(rng.integers(0, 4)))), axis=0)
    for scale in (0, 3, 300):
        count = int(rng.integers(0, 40))
        positions = rng.integers(0, leaves, count)
        values = 10.0 ** rng.uniform(-scale, scale, count if rng.random() < 0.8 else 1) * rng.integers(0, 2)
        assert pair.set(positions, values) == -1
        pair.find(np.array(pair.offsets[-1:]), pair.nodes[-1:], rng.random(30) * pair.nodes[-1])
        places, until = np.full(600, -7), np.full(600, -7.0)
        many = pair.core.cover(begins, ends, places, until)
        assert (places[:many].tolist(), until[:many].tolist()) == plain.cover(pair.nodes, pair.offsets, begins, ends)
        pair.find(places[:many], until[:many], rng.random(30) * (until[many - 1] if many else 0.0))
        weights = np.empty(leaves)
        assert pair.core.get(np.arange(leaves), weights) == -1
        assert weights.tobytes() == pair.nodes[:leaves].tobytes()
        if minima:
            assert pair.core.lowest(begins, ends) == plain.lowest(pair.nodes, begins, ends)
    again = Pair(leaves, minima)
    again.own[:leaves] = pair.own[:leaves]
    again.core.build()
    assert again.own.tobytes() == pair.own.tobytes()
    assert again.lows.tobytes() == pair.lows.tobytes()


@given(SIZES, st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples // 2)
def test_a_mass_on_the_edge_of_two_leaves_is_of_the_right_one(leaves: int, seed: int) -> None:
    rng, pair = np.random.default_rng(seed), Pair(leaves, False)
    weights = rng.integers(0, 3, leaves).astype(float)
    weights[rng.integers(leaves)] = 1
    pair.set(np.arange(leaves), weights)
    total = int(weights.sum())
    found, masses = np.empty(total, np.int64), np.arange(total, dtype=float)
    assert pair.core.find(np.array(pair.offsets[-1:]), np.array([float(total)]), masses, found) == -1
    assert found.tolist() == np.searchsorted(weights.cumsum(), masses, side="right").tolist()
    cut = np.sort(rng.integers(0, leaves + 1, 4))
    begins, ends, places, until = cut[::2].copy(), cut[1::2].copy(), np.empty(600, np.int64), np.empty(600)
    many = pair.core.cover(begins, ends, places, until)
    inside = np.concatenate([np.arange(*each) for each in zip(begins, ends, strict=True)])
    masses = np.arange(weights[inside].sum())
    assert pair.core.find(places[:many], until[:many], masses, found[: len(masses)]) == -1
    right = np.searchsorted(weights[inside].cumsum(), masses, side="right")
    assert found[: len(masses)].tolist() == inside[right].tolist()


@given(SIZES, st.integers(0, 2**32))
@settings(max_examples=2 * settings.default.max_examples)
def test_a_mass_just_below_the_total_is_of_a_leaf_with_weight(leaves: int, seed: int) -> None:
    rng, pair = np.random.default_rng(seed), Pair(leaves, False)
    pair.set(np.arange(leaves), rng.random(leaves) * (rng.random(leaves) < 0.7))
    total = pair.nodes[-1]
    found, root = np.empty(1, np.int64), np.array(pair.offsets[-1:])
    masses = np.nextafter(pair.nodes[-1:], 0)
    if total > 0:
        assert pair.core.find(root, pair.nodes[-1:], masses, found) == -1
        assert pair.nodes[found[0]] > 0
        pair.find(root, pair.nodes[-1:], masses)


def test_weights_of_minus_zero_are_stored_as_zero() -> None:
    pair = Pair(9, True)
    pair.set(np.arange(9), np.full(9, -0.0))
    assert pair.own.tobytes() == np.zeros(25).tobytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-300, plain.heaviest(10) * 2])
def test_the_first_bad_entry_is_named_and_nothing_written(bad: float) -> None:
    pair, places, out = Pair(10, False), np.array([1, 2, 3]), np.empty(2)
    assert pair.set(places, np.array([1.0, bad, bad])) == 1
    assert pair.set(places, np.array([bad])) == 0
    assert pair.set(np.array([9, 0, 10]), np.ones(3)) == 2
    assert pair.set(np.array([-1, 0]), np.ones(2)) == 0
    assert not pair.own.any()
    assert pair.core.get(np.array([0, 10]), out) == 1
    assert pair.set(np.array([0]), np.ones(1)) == -1
    for mass in (-1e-300, 1.0, math.nan, math.inf):
        assert pair.find(np.array(pair.offsets[-1:]), pair.nodes[-1:], np.array([0.5, mass])) == 1


def test_levels_are_whole_blocks_of_eight() -> None:
    known = {1: [0, 8], 8: [0, 8], 9: [0, 16, 24], 513: [0, 520, 592, 608, 616]}
    assert {leaves: core.tree_offsets(leaves) for leaves in known} == known
    for leaves in (*range(1, 70), 511, 512, 4097, 10**6, 2**40):
        assert core.tree_offsets(leaves) == plain.offsets_of(leaves)


@given(SIZES, st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples // 2)
def test_whatever_the_nodes_hold_only_leaves_are_found(leaves: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes = rng.choice([math.nan, math.inf, -1.0, 0.0, 1e300, 5.0], plain.offsets_of(leaves)[-1] + 1)
    nodes[-1] = 1.0
    found = np.full(20, -7)
    tree = core.Tree(nodes, leaves, np.empty(0))
    cover = rng.integers(-(2**62), 2**62, 3), np.array([rng.choice([math.nan, -1.0, 0.5, 2.0]), 0.3, 1.0])
    for places, until in ((np.array([len(nodes) - 1]), np.ones(1)), (rng.integers(0, len(nodes), 3), cover[1]), cover):
        assert tree.find(places, until, rng.random(20), found) == -1
        assert found.min() >= 0
        assert found.max() < leaves


def test_arrays_that_do_not_fit_are_refused() -> None:
    pair = Pair(9, True)
    ints, some, two, none = np.zeros(1, np.int64), np.zeros(1), np.zeros(2, np.int64), np.empty(0)
    calls: list[Any] = [
        lambda: core.Tree(np.zeros(24), 9, none),
        lambda: core.Tree(np.zeros(1), 0, none),
        lambda: core.Tree(np.zeros(25), 9, np.zeros(3)),
        lambda: pair.core.set(two, np.zeros(3)),
        lambda: pair.core.get(two, some),
        lambda: pair.core.cover(ints, ints, ints, some),
        lambda: pair.core.cover(ints, ints + 10, np.zeros(99, np.int64), np.zeros(99)),
        lambda: pair.core.lowest(ints - 1, ints),
        lambda: pair.core.find(two, some, some, ints),
        lambda: pair.core.find(ints, some, some, two),
        lambda: core.Tree(np.zeros(25), 9, none).lowest(ints, ints),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"expected|at least"):
            call()
    for nodes in (np.zeros(25, np.float32), np.zeros(50)[::2], None):
        with pytest.raises(TypeError):
            core.Tree(nodes, 9, none)
    with pytest.raises(ValueError, match="no tree"):
        core.tree_offsets(2**60)


def test_a_copy_has_arrays_of_its_own() -> None:
    pair = Pair(20, True)
    pair.set(np.arange(20), np.arange(20.0))
    for make in (copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))):
        other = make(pair.core)
        other.set(np.array([0]), np.ones(1))
        assert other.minima[-1] == 1.0
        pair.agree()
