"""The sum tree against a naive twin, and the traps that other trees fall into."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relive.errors import DTypeError, EmptyError, NotFiniteError, ParameterError, ShapeError
from relive.samplers.sumtree import SumTree
from support import internals
from support.effort import in_ci

WEIGHTS = st.one_of(
    st.sampled_from([0.0, -0.0, 5e-324, 1e-310, 0.1, 1.0, 3.0, 2.0**53, 1e300]),
    st.floats(0, 1e300),
    st.floats(0, 10),
)
SIZES = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 100, 511, 512, 513]))


def tree_of(weights: Any) -> SumTree:
    tree = SumTree(len(weights))
    tree.set(np.arange(len(weights)), weights)
    return tree


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def starts_of(tree: SumTree) -> np.ndarray:
    """Where the intervals of all leaves start, and at last the total, by the definition of a node's interval."""
    edges = [0.0, tree.total]
    for below in reversed(internals.offsets(tree)[:-1].tolist()):
        cuts: list[float] = []
        for node, (start, end) in enumerate(itertools.pairwise(edges)):
            weights = internals.nodes(tree)[below + 8 * node : below + 8 * node + 8].tolist()
            last = max((k for k, weight in enumerate(weights) if weight > 0), default=-1)
            for k, weight in enumerate(weights):
                cuts.append(start if k <= last or k == 0 else end)
                start = min(start + weight, end)
        edges = [*cuts, tree.total]
    return np.array([*edges[: len(tree)], tree.total])


def edges(tree: SumTree) -> np.ndarray:
    """Masses where a leaf's interval starts, and those just below."""
    starts = starts_of(tree)
    masses = np.concatenate([starts, np.nextafter(starts, 0), [0.0]])
    return masses[masses < tree.total]


def check_tiling(tree: SumTree, more: Any = ()) -> None:
    """The intervals of the leaves cover [0, total) without gap or overlap, and find tells whose a mass is."""
    starts = starts_of(tree)
    assert starts[0] == 0
    assert starts[-1] == tree.total
    assert (np.diff(starts) >= 0).all()
    masses = np.concatenate([edges(tree), np.asarray(more, np.float64)])
    masses = masses[masses < tree.total]
    found = tree.find(masses)
    assert (tree.get(found) > 0).all()
    assert (starts[found] <= masses).all()
    assert (masses < starts[found + 1]).all()


# Against the naive twin


@pytest.mark.parametrize("size", range(1, 21))
def test_tiny_trees_find_what_a_running_sum_finds_at_every_mass(size: int) -> None:
    rng = np.random.default_rng(size)
    for pattern in range(min(2**size, 200)):
        used = (pattern >> np.arange(size) & 1) if size < 8 else rng.integers(0, 2, size)
        weights = used * rng.integers(1, 5, size).astype(float)
        tree, sums = tree_of(weights), np.concatenate([[0.0], np.cumsum(weights)])
        tree.check()
        assert tree.total == sums[-1]
        assert starts_of(tree).tolist() == sums.tolist()
        assert tree.get(np.arange(size)).tolist() == weights.tolist()
        masses = np.arange(0, sums[-1], 0.5)
        assert tree.find(masses).tolist() == (np.searchsorted(sums, masses, side="right") - 1).tolist()


@pytest.mark.parametrize("size", range(1, 21))
def test_each_leaf_of_a_tiny_tree_can_be_the_only_one(size: int) -> None:
    tree = SumTree(size)
    for leaf in range(size):
        tree.set([leaf], 0.3)
        tree.check()
        assert tree.find([0.0, 0.15, np.nextafter(0.3, 0)]).tolist() == [leaf] * 3
        assert tree.minimum_positive() == tree.total == 0.3
        tree.set([leaf], 0.0)
        assert tree.total == 0.0


@given(st.lists(WEIGHTS, min_size=1, max_size=150), st.lists(st.floats(0, 1, exclude_max=True), max_size=20))
def test_every_mass_falls_on_the_leaf_whose_interval_holds_it_and_never_on_one_of_weight_zero(
    weights: list[float], parts: list[float]
) -> None:
    tree = tree_of(weights)
    assert tree.total == pytest.approx(math.fsum(weights))
    check_tiling(tree, np.array(parts) * tree.total)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_intervals_are_as_long_as_weights_to_within_rounding(weights: list[float]) -> None:
    tree = tree_of(weights)
    lengths = np.diff(starts_of(tree))
    assert np.abs(lengths - weights).max() <= 64 * np.spacing(tree.total)


RANGES = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6)


def bounds(ranges: list[tuple[float, float]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of so many leaves, given as parts of them."""
    found = np.array([sorted((round(a * size), round(b * size))) for a, b in ranges], np.int64).reshape(-1, 2)
    begins, ends = np.ascontiguousarray(found.T)
    return begins, ends


@given(SIZES, RANGES, st.integers(0, 2**32))
def test_masses_among_ranges_fall_on_what_a_running_sum_over_their_leaves_finds(
    size: int, ranges: list[tuple[float, float]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 4, size) * 1.0
    begins, ends = bounds(ranges, size)
    cover = tree_of(weights).cover(begins, ends)
    leaves = np.concatenate([np.arange(0), *map(np.arange, begins, ends)])
    sums = np.cumsum(weights[leaves])
    assert cover.total == weights[leaves].sum()
    masses = np.arange(0, cover.total, 0.5)
    tree = tree_of(weights)
    assert tree.find(masses, cover).tolist() == leaves[np.searchsorted(sums, masses, side="right")].tolist()
    for wrong in (cover.total, -0.5, math.nan):
        with pytest.raises(EmptyError if not tree.total else NotFiniteError):
            tree.find([*masses, wrong], cover)


@pytest.mark.parametrize("size", [9, 100, 513, 5000])
def test_a_range_is_exact_whatever_the_leaves_beside_it_weigh(size: int) -> None:
    rng = np.random.default_rng(size)
    for scale in (1e3, 1e17, 1e200):
        weights = scale * rng.random(size)
        low, high = np.sort(rng.choice(size + 1, 2, replace=False))
        weights[low:high] = rng.random(high - low) + 0.5
        cover = tree_of(weights).cover(np.array([low]), np.array([high]))
        assert cover.total == pytest.approx(math.fsum(weights[low:high]), rel=1e-14)
        assert len(cover.until) <= 14 * 5  # and no more than a few nodes of each level
        masses = (np.arange(20_000) + 0.5) / 20_000 * cover.total
        found = np.bincount(tree_of(weights).find(masses, cover), minlength=size)
        assert not found[:low].any()
        assert not found[high:].any()
        assert np.abs(found[low:high] - 20_000 * weights[low:high] / cover.total).max() <= 2


class AgainstTheTwin(RuleBasedStateMachine):
    """Random calls; after each, the tree's own check and everything a plain list of weights can tell."""

    @initialize(size=SIZES, track=st.booleans())
    def create(self, size: int, track: bool) -> None:
        self.tree, self.twin = SumTree(size), np.zeros(size)
        if track:  # from the start, so that no rule depends on the call that begins to keep minima
            self.minimum(first=1.0)

    @rule(data=st.data())
    def set_many(self, data: st.DataObject) -> None:
        positions = data.draw(st.lists(st.integers(0, len(self.twin) - 1), max_size=40))
        values = data.draw(st.lists(WEIGHTS, min_size=len(positions), max_size=len(positions)))
        self.tree.set(positions, values)
        for position, value in zip(positions, values, strict=True):
            self.twin[position] = value

    @rule(data=st.data(), value=WEIGHTS)
    def set_alike(self, data: st.DataObject, value: float) -> None:
        start = data.draw(st.integers(0, len(self.twin)))
        run = np.arange(start, min(start + 30, len(self.twin)))
        self.tree.set(run, value)
        self.twin[run] = value

    @rule(data=st.data(), bad=st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1.7e308]))
    def refuse(self, data: st.DataObject, bad: float) -> None:
        count = data.draw(st.integers(1, 10))
        values = np.ones(count)
        values[data.draw(st.integers(0, count - 1))] = bad
        with pytest.raises(NotFiniteError):
            self.tree.set(np.arange(count) % len(self.twin), values)

    @rule()
    def clear(self) -> None:
        self.tree.set(np.arange(len(self.twin)), 0.0)
        self.twin[:] = 0

    @rule()
    def copy(self) -> None:
        same, other = SumTree(len(self.twin)), SumTree(len(self.twin))
        same.set(np.arange(len(self.twin)), self.twin)  # all at once
        other.become(self.tree)
        assert bits(internals.nodes(same)) == bits(internals.nodes(other)) == bits(internals.nodes(self.tree))
        self.tree = other

    @rule(first=st.just(0.0))
    def minimum(self, first: float) -> None:
        if first:
            self.tree.set([0], first)
            self.twin[0] = first
        if self.twin.any():
            assert self.tree.minimum_positive() == self.twin[self.twin > 0].min()
        else:
            with pytest.raises(EmptyError):
                self.tree.minimum_positive()

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert bits(self.tree.get(np.arange(len(self.twin)))) == bits(np.abs(self.twin))
        assert self.tree.total == pytest.approx(math.fsum(self.twin))
        check_tiling(self.tree)


AgainstTheTwin.TestCase.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=20)
test_a_random_walk_keeps_every_invariant = AgainstTheTwin.TestCase


def test_levels_are_whole_blocks_of_eight_on_cache_lines() -> None:
    for size in (1, 9, 1000, 100_000):
        assert internals.nodes(SumTree(size)).ctypes.data % 64 == 0


# Traps


def test_a_row_behind_as_much_mass_as_float32_can_count_is_found_as_often_as_it_should() -> None:
    # P1: 2^24 is where float32 stops to count in ones; here that much, and twice and 2^20 times that, lies before.
    for before in (2.0**24, 2.0**25, 2.0**44):
        tree = SumTree(1001)
        tree.set(np.arange(1001), 1.0)
        tree.set([0], before)
        rows = np.arange(1, 1001)
        assert tree.find(before + rows - 1).tolist() == rows.tolist()
        assert tree.find(before + rows - 0.5).tolist() == rows.tolist()


@pytest.mark.parametrize("size", [2**21, in_ci(2**25)])
def test_every_one_of_the_newest_of_very_many_equal_rows_can_be_drawn(size: int) -> None:
    chunk = 2**21
    tree = SumTree(size)
    for start in range(0, size, chunk):
        tree.set(np.arange(start, start + chunk), 1.0)
    assert tree.total == size
    newest = np.arange(size - 100_000, size)
    for part in (0.0, 0.5, 1 - 2**-20):
        assert np.array_equal(tree.find(newest + part), newest)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -5e-324, 1e308])
def test_a_poisoned_weight_is_refused_by_position_and_nothing_is_written(bad: float) -> None:  # P2
    tree = tree_of([1.0, 2.0, 3.0, 4.0])
    tree.minimum_positive()
    before = bits(internals.nodes(tree)) + bits(internals.minima(tree))
    with pytest.raises(NotFiniteError, match=r"entry 2, for position 3, is .*; pass 0 to"):
        tree.set([0, 1, 3], [9.0, 9.0, bad])
    with pytest.raises(NotFiniteError, match=r"entry 0, for position 2, is"):
        tree.set([2, 1], bad)
    assert bits(internals.nodes(tree)) + bits(internals.minima(tree)) == before


@pytest.mark.parametrize("position", [-1, 4, 7, 8, 2**40, -(2**63)])
def test_a_position_outside_is_refused_by_name_and_nothing_is_written(position: int) -> None:  # P3
    tree = tree_of([1.0, 2.0, 3.0, 4.0])
    before = bits(internals.nodes(tree))
    calls: list[Callable[[], Any]] = [lambda: tree.set([0, position], 9.0), lambda: tree.get([0, position])]
    for call in calls:
        with pytest.raises(ParameterError, match=rf"entry 1 is {position}, not in 0\.\.3"):
            call()
    assert bits(internals.nodes(tree)) == before


def test_a_tree_with_the_weights_of_another_gives_its_draws_and_owns_them() -> None:  # P4
    tree, other = tree_of(np.random.default_rng(0).random(1000)), tree_of([1.0] * 1000)
    masses = np.random.default_rng(1).random(500) * tree.total
    found, lowest = tree.find(masses), tree.minimum_positive()
    assert other.minimum_positive() == 1.0
    other.become(tree)
    tree.set(np.arange(1000), 0.0)
    assert np.array_equal(other.find(masses), found)
    assert other.minimum_positive() == lowest


def test_once_all_weights_are_zero_nothing_can_be_drawn_until_something_is_set() -> None:  # P5
    tree = tree_of([1.0] * 100)
    assert tree.minimum_positive() == 1.0
    tree.set(np.arange(100), 0.0)
    tree.check()
    for call in (lambda: tree.find([0.0]), tree.minimum_positive):
        with pytest.raises(EmptyError, match="set some before"):
            call()
    tree.set([70], 2.0)
    assert set(tree.find(np.linspace(0, 1.99, 50))) == {70}
    assert tree.minimum_positive() == 2.0


def test_a_million_updates_leave_no_drift() -> None:
    rng = np.random.default_rng(0)
    tree = SumTree(5000)
    tree.set([0], 1.0)
    tree.minimum_positive()
    for _ in range(2000):
        values = 10.0 ** rng.uniform(-12, 12, 500) * (rng.random(500) < 0.9)
        tree.set(rng.integers(0, 5000, 500), values)
    fresh = tree_of(tree.get(np.arange(5000)))
    fresh.minimum_positive()
    assert bits(internals.nodes(fresh)) == bits(internals.nodes(tree))
    assert bits(internals.minima(fresh)) == bits(internals.minima(tree))
    tree.set(np.arange(5000), 0.0)
    assert tree.total == 0.0


# Rounding and range


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-300, 1.0, 1e300])
def test_draws_are_the_same_at_every_scale(scale: float) -> None:
    weights = np.array([3.0, 0.0, 1.0, 2.0, 0.0, 5.0, 1.0, 0.0, 4.0, 0.0]) * scale
    tree, sums = tree_of(weights), np.cumsum(weights)
    masses = np.arange(16) * scale
    assert tree.find(masses).tolist() == np.searchsorted(sums, masses, side="right").tolist()
    assert tree.minimum_positive() == scale


def test_the_heaviest_weights_allowed_never_add_up_to_infinity() -> None:
    for size in (1, 7, 8, 9, 1000):
        tree = tree_of([sys.float_info.max / (2.0 * size)] * size)
        assert math.isfinite(tree.total)
        assert tree.find(np.array([0.0, 0.5, 1 - 2**-53]) * tree.total)[-1] == size - 1


def test_a_mass_that_rounding_leaves_beyond_every_child_falls_on_the_last_positive_one() -> None:
    # Behind 2^53 no addition of 1 or less is seen, though the sum of eight of them is: the walk passes all children.
    weights = np.zeros(24)
    weights[0], weights[8:16] = 2.0**53, [0.9, 0.9, 0.9, 0.9, 0.9, 0.0, 0.0, 0.0]
    tree = tree_of(weights)
    masses = np.arange(2.0**53, tree.total, 2.0)
    assert len(masses) >= 2
    assert tree.find(masses).tolist() == [12] * len(masses)
    assert starts_of(tree)[[8, 12, 13, 16, 24]].tolist() == [2.0**53, 2.0**53, *[tree.total] * 3]


def test_children_that_rounding_pushes_beyond_their_parent_end_where_it_does() -> None:
    # Behind 2^53 each 1.5 counts as 2, so that the children seem to reach 2^53 + 16, but their sum of 12 is exact.
    weights = np.zeros(128)
    weights[0], weights[64::8], weights[65::8] = 2.0**53, 0.75, 0.75
    tree = tree_of(weights)
    assert tree.total == 2.0**53 + 12
    check_tiling(tree, np.arange(2.0**53, tree.total, 2.0))


@given(SIZES, RANGES, st.integers(0, 2**32))
def test_the_minimum_of_any_ranges_is_that_of_their_leaves(
    size: int, ranges: list[tuple[float, float]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random(size) * (rng.random(size) < 0.3)
    weights[rng.integers(size)] = 1.0
    tree = tree_of(weights)
    assert tree.minimum_positive() == weights[weights > 0].min()
    begins, ends = bounds(ranges, size)
    among = np.concatenate([weights[:0], *(weights[begin:end] for begin, end in zip(begins, ends, strict=True))])
    want = among[among > 0].min(initial=np.inf)
    if want < np.inf:
        assert tree.minimum_positive(begins, ends) == want
    else:
        with pytest.raises(EmptyError, match="these leaves"):
            tree.minimum_positive(begins, ends)


def test_a_minimum_is_kept_even_where_the_sums_do_not_feel_it() -> None:
    tree = tree_of([1e300] + [1.0] * 99)
    assert tree.minimum_positive() == 1.0
    for value in (0.5, 0.25, 2.0):
        tree.set([1], value)
        assert tree.minimum_positive() == min(value, 1.0)
        tree.check()


# Distribution. The statistic is a chi-square over the leaves, as a number of standard deviations. A leaf of a part p of
# the mass whose weight is 1 % too large adds draws * p * (1 - p) / 10,000 to it, 14 standard deviations for p = 0.1
# here. The test fails from 5 on, which chance exceeds in less than one seed of ten thousand.
DRAWS = 12_000_000
SHARES = np.repeat([0.1, 0.05, 0.02, 0.01, 0.0], [4, 6, 10, 10, 10])[np.random.default_rng(3).permutation(40)]


def chi_square(tree: SumTree) -> float:
    """How many standard deviations the draws of a tree are off ``SHARES``."""
    rng, counts = np.random.default_rng(7), np.zeros(len(SHARES))
    for _ in range(DRAWS // 500_000):
        counts += np.bincount(tree.find(rng.random(500_000) * tree.total), minlength=len(SHARES))
    used = SHARES > 0
    assert not counts[~used].any()
    expected, df = SHARES[used] * DRAWS, used.sum() - 1
    return float((((counts[used] - expected) ** 2 / expected).sum() - df) / math.sqrt(2 * df))


def test_leaves_are_drawn_in_proportion_to_their_weights() -> None:
    assert sum(SHARES) == pytest.approx(1)
    assert chi_square(tree_of(SHARES * 17.3)) < 5


def test_the_test_of_proportions_sees_a_weight_that_is_one_percent_off() -> None:
    weights = SHARES * 17.3
    weights[SHARES.argmax()] *= 1.01
    assert chi_square(tree_of(weights)) > 5


# What may be passed


def test_positions_of_any_integers_and_values_of_any_numbers_are_taken() -> None:
    tree = SumTree(10)
    for positions in ([3, 4], (3, 4), np.array([3, 4], np.uint8), np.array([3, 9, 4])[::2]):
        for values in ([1, 2], np.array([1.0, 2.0], np.float32), np.array([1.0, 9.0, 2.0])[::2]):
            tree.set(range(10), 0)
            tree.set(positions, values)
            assert tree.get(positions).tolist() == [1.0, 2.0]
    tree.set(5, 7)
    tree.set([], 3.0)
    tree.set([], [])
    assert (tree.get(5).item(), tree.total, len(tree), repr(tree)) == (7.0, 10.0, 10, "SumTree(10)")
    assert tree.find([]).size == tree.get([]).size == 0


def test_of_several_weights_for_one_leaf_the_last_stays() -> None:
    tree = SumTree(100)
    tree.set([42, 7, 42, 42, 7], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert tree.get([42, 7]).tolist() == [4.0, 5.0]
    assert tree.total == 9.0
    tree.set([42, 42], [6.0, 4.0])  # away and back
    tree.check()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.set([0.5], 1.0), DTypeError, "expected integers, got float64"),
        (lambda t: t.get([True, False]), DTypeError, "expected integers, got bool"),
        (lambda t: t.get([[1, 2]]), ShapeError, r"positions: expected one axis, got shape \(1, 2\)"),
        (lambda t: t.find([[0.5]]), ShapeError, r"masses: expected one axis, got shape \(1, 1\)"),
        (lambda t: t.set([1, 2], [1.0]), ShapeError, r"values: expected shape \(2,\), one per position, got \(1,\)"),
        (lambda t: t.set([1], [[1.0]]), ShapeError, r"values: expected shape \(1,\)"),
        (lambda t: t.find([0.5, 10.0]), NotFiniteError, r"entry 1 is 10.0, not in \[0, 10.0\)"),
        (lambda t: t.find([-0.5]), NotFiniteError, "entry 0 is -0.5"),
        (lambda t: t.find([math.nan]), NotFiniteError, "entry 0 is nan"),
        (lambda t: t.set(range(4), [1.0, 1.0, -1.0, 1.0]), NotFiniteError, "entry 2, for position 2"),
        (lambda t: SumTree(0), ParameterError, "at least 1 leaf"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(call: Any, error: type[Exception], message: str) -> None:
    tree = tree_of([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(error, match=message):
        call(tree)
    assert tree.get(range(4)).tolist() == [1.0, 2.0, 3.0, 4.0]
    tree.check()


def test_check_names_the_broken_invariant() -> None:
    tree = tree_of([1.0] * 100)
    tree.minimum_positive()
    for array, place, value, message in (
        (internals.nodes(tree), 5, math.nan, "finite and not negative: place 5 holds nan"),
        (internals.nodes(tree), 7, -1.0, "finite and not negative: place 7"),
        (internals.nodes(tree), 101, 1.0, "sum of its children, from left to right: place 101"),
        (internals.nodes(tree), 106, np.nextafter(8.0, 9), "sum of its children, from left to right: place 106"),
        (internals.minima(tree), 3, 0.5, "smallest positive one below it: place 3"),
    ):
        kept = array[place]
        array[place] = value
        with pytest.raises(AssertionError, match=message):
            tree.check()
        array[place] = kept
    tree.check()
