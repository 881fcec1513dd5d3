"""Random numbers, permutations and uniform draws of the compiled core, held to their definition to the bit."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from definitions import draws as plain
from relive import FrameStack, NStep, core
from relive import Sequence as SequenceView
from relive.core.numbers import GOLDEN, signed
from relive.core.words import ACROSS, ALONE, DRAWABLE, HEAD, LINKED, RULE
from support import internals
from support.effort import often
from support.fit import deviation
from support.other_device import no_waiting
from support.ring_plays import RingPlay
from support.twins import Twin

SEEDS = [0, 1, 2, 12345, 2**31, 2**32 + 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("seed", [*SEEDS, -1, 2**64, 2**70 + 5])
def test_numbers_and_streams_are_those_of_the_definition(seed: int) -> None:
    numbers = np.empty(50)
    core.masses(seed, False, 1.0, numbers)
    assert numbers.tolist() == [plain.uniform(seed, n) for n in range(1, 51)]
    assert core.mix(seed) == plain.mix(seed)
    for counter in (0, 1, 7, 2**40, 2**64 - 1, -3):
        assert core.key(seed, counter) == plain.key(seed, counter)
    assert core.key(np.uint64(seed % 2**64), np.int64(3)) == plain.key(seed, 3)


def test_a_seed_is_a_whole_number() -> None:
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError):
            core.key(wrong, 0)


@given(st.integers(0, 2**64 - 1), st.booleans(), st.floats(1e-300, 1e300), st.integers(1, 40))
@settings(max_examples=settings.default.max_examples // 2)
def test_masses_are_those_of_the_definition_and_none_is_beyond_the_total(
    seed: int, stratified: bool, total: float, count: int
) -> None:
    found = np.empty(count)
    core.masses(seed, stratified, total, found)
    assert found.tolist() == plain.masses(seed, stratified, total, count)
    assert found.min() >= 0
    assert found.max() < total


def stream_with(number: int) -> int:
    """The stream of which this number is the largest below 1."""

    def unshifted(z: int, bits: int) -> int:
        found = z
        for _ in range(64 // bits):
            found = z ^ (found >> bits)
        return found

    z = unshifted(plain.MASK, 31) * pow(0x94D049BB133111EB, -1, 2**64) & plain.MASK
    z = unshifted(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & plain.MASK
    return (unshifted(z, 30) - number * plain.GOLDEN) & plain.MASK


@pytest.mark.parametrize(("count", "stratified", "total"), [(1, False, 5e-324), (3, True, 1.0), (40, True, 7e9)])
def test_the_largest_number_of_all_gives_no_mass_that_is_rounded_up_to_the_total(
    count: int, stratified: bool, total: float
) -> None:
    found, stream = np.empty(count), stream_with(count)
    assert plain.uniform(stream, count) == 1 - 2**-53
    core.masses(stream, stratified, total, found)
    assert found[-1] == np.nextafter(total, 0)
    assert found.tolist() == plain.masses(stream, stratified, total, count)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 100, 1000])
def test_permutations_are_those_of_the_definition(n: int, seed: int) -> None:
    for counter in (0, 1, 2, 1000, 2**40):
        found = core.permutation(n, seed, counter)
        assert found.dtype is torch.int64
        assert found.tolist() == plain.permutation(n, seed, counter)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 16, 17, 100, 1000, 40_000])
def test_a_device_makes_the_same_permutations_without_waiting(n: int) -> None:
    for seed, counter in itertools.product(SEEDS, range(often(3, 100) if n < 1000 else 1)):
        stream = torch.tensor(signed(core.key(seed, counter)))
        with no_waiting() as watch:
            found = core.permute_on_device(n, stream, torch.tensor([GOLDEN]))
        assert torch.equal(found, core.permutation(n, seed, counter))
        assert len(watch.launches) <= 42 + n.bit_length()


def test_permutations_of_four_on_a_device_are_the_same_in_all_their_orders() -> None:
    made = {
        tuple(core.permute_on_device(4, torch.tensor([signed(core.key(5, k))]), torch.tensor([GOLDEN])).tolist())
        for k in range(300)
    }
    assert len(made) == 24


def test_permutations_stay_the_same_in_every_version() -> None:
    assert core.permutation(10, 7, 3).tolist() == [6, 1, 2, 7, 3, 9, 8, 4, 0, 5]


def test_every_seed_and_every_counter_gives_a_permutation_of_its_own() -> None:
    drawn = {tuple(core.permutation(20, seed, k).tolist()) for seed in range(60) for k in range(60)}
    assert len(drawn) == 3600


def test_a_permutation_depends_on_nothing_but_its_arguments() -> None:
    first = core.permutation(50, 3, 4)
    torch.rand(3)
    core.permutation(50, 3, 5)
    assert torch.equal(core.permutation(50, 3, 4), first)


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
    return np.stack([core.permutation(M, 99, k).numpy() for k in range(DRAWS)])


def test_permutations_are_uniform_over_positions_order_and_time(orders: np.ndarray) -> None:
    assert {name: z for name, z in z_scores(orders).items() if abs(z) > 5} == {}


def test_permutations_are_uniform_over_seeds_as_well() -> None:
    by_seed = np.stack([core.permutation(M, seed, 0).numpy() for seed in range(often(40_000, DRAWS))])
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
    counts = Counter(tuple(core.permutation(4, 5, k).tolist()) for k in range(draws))
    chi2 = sum((counts[order] - draws / 24) ** 2 / (draws / 24) for order in itertools.permutations(range(4)))
    assert chi2 < 60  # 23 degrees of freedom: above 60 in 4 of 100,000 seeds


# Draws of rows of a ring

VIEWS: list[Callable[[], Any]] = [
    lambda: NStep(1),
    lambda: FrameStack(3),
    lambda: SequenceView(3, 1, "none", 2),
    lambda: SequenceView(4, 0, 2, 1, drop_tail=True),
]
"""Windows of one step and of more, with and without a history, of strides and tails."""


def played(rng: np.random.Generator) -> Any:
    """A ring after a random play."""
    num_envs, rows = int(rng.integers(1, 4)), int(rng.integers(2, 20))
    twin = Twin(num_envs, rows, view=VIEWS[int(rng.integers(len(VIEWS)))]())
    for _ in range(int(rng.integers(0, 60))):
        chance = rng.random()
        twin.play("x" if chance < 0.02 else "|" if chance < 0.07 else "".join(rng.choice(list("....TUB"), num_envs)))
    return internals.ring(twin.buffer)


def check_rows(rng: np.random.Generator, arrays: Any, ring: Any, live: Any) -> None:
    """The core says of a ring, and draws from it, what the definition does. ``live`` are places of live rows."""
    envs, rows, places = len(arrays.state), arrays.rows, np.full(len(arrays.step), -9)
    count = core.anchors(ring, places)
    anchors = plain.anchors(arrays)
    assert places[:count].tolist() == anchors
    for newest in (*range(len(anchors) + 3), -5, 2**62):
        first, until = (np.full(envs, -9) for _ in range(2))
        total = core.window(ring, newest, first, until)
        assert (first.tolist(), until.tolist()) == plain.window(arrays, newest)
        assert total == until[-1]
    for newest in (0, int(rng.integers(0, 20))):
        stream, places = int(rng.integers(0, 2**63)), np.full(int(rng.integers(1, 40)), -9)
        some, want = core.draw(ring, stream, newest, places), plain.draw(arrays, stream, newest, len(places))
        assert places.tolist() == want if some else want is None
    heads = arrays.state[:, HEAD]
    after = heads - rng.integers(-1, rows + 3, envs)
    wanted, behind = plain.take_fresh(arrays, after.tolist(), count := int(rng.integers(0, len(anchors) + 2)))
    assert core.count_fresh(ring, after) == len(plain.take_fresh(arrays, after.tolist(), len(anchors))[0])
    places = np.full(count, -9)
    taken = core.take_fresh(ring, after, places)
    assert (places[:taken].tolist(), after.tolist()) == (wanted, behind)
    assert (places[taken:] == -9).all()
    index = np.full(len(live) + 1, -9)
    assert core.ids_of(ring, live, index[1:]) == -1
    assert index[1:].tolist() == plain.ids_of(arrays, live.tolist())
    assert core.ids_of(ring, np.append(live, rng.choice([-1, envs * rows])), index) == len(live)
    index = rng.integers(max(int(heads.min()) - rows, 0), int(heads.max()) + 2, 12) * envs
    index += rng.integers(0, envs, 12)
    if rng.random() < 0.3:
        index[rng.integers(12)] = rng.choice([-1, -(2**40), 2**62])
    found = np.full(12, -9)
    bad = core.live(ring, index, found)
    assert (found.tolist(), bad) == plain.live(arrays, index.tolist())


@given(st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples)
def test_rows_of_a_ring_are_those_of_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ring = played(rng)
    check_rows(rng, ring.arrays, ring.core, ring.places())


LINED: list[Callable[[], Any]] = [lambda: NStep(1), lambda: FrameStack(2), lambda: FrameStack(5), VIEWS[-1]]
"""Views that differ in where the rows begin that draws point at."""


@given(st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples // 2)
def test_what_a_draw_finds_out_follows_the_ring_through_all_its_changes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs, rare = int(rng.integers(1, 12)), rng.choice([0.02, 0.2])
    twin = Twin(num_envs, int(rng.integers(2, 14)), view=LINED[int(rng.integers(len(LINED)))]())
    ring = internals.ring(twin.buffer)
    first, until, newest = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64), 3
    some = rng.permutation(num_envs)[: int(rng.integers(1, num_envs + 1))]  # envs that mostly step alone
    for _ in range(40):
        chance = rng.random()
        if chance < 0.03:
            twin.clear()
        elif chance < 0.1:
            twin.interrupt(some.tolist())
        elif chance < 0.2:
            twin.buffer.view = LINED[int(rng.integers(len(LINED)))]()
        elif chance < 0.25:
            twin.extend(["." * num_envs] * int(rng.integers(1, 30)))
        else:
            envs = some if chance < 0.7 else np.arange(num_envs)
            twin.add("".join(np.where(rng.random(len(envs)) < rare, "T", ".")), envs.tolist())
        if rng.random() < 0.6:
            newest = int(rng.integers(0, 2 * num_envs + 4)) if rng.random() < 0.6 else newest
            for asked in (newest, newest, 0):
                total = core.window(ring.core, asked, first, until)
                assert (first.tolist(), until.tolist()) == plain.window(ring.arrays, asked)
                assert total == until[-1]


def test_the_newest_are_found_if_most_rows_between_them_have_gone() -> None:
    # One env steps alone for very long, so that the stamps of nearly all transitions but its newest are gone.
    play = RingPlay(np.random.default_rng(1), num_envs=3, rows=8)
    ring = play.arrays
    ring.state[:], ring.counters[:] = 0, [0, 0, 0, 0, 1, 1, 1, 0, 0]
    for e in (0, 1, 2) * 6 + (1,) * 3000 + (0, 2):
        play.add(e)
    for newest in range(1, 20):
        first, until = np.zeros(3, np.int64), np.zeros(3, np.int64)
        ring.counters[DRAWABLE] = len(plain.anchors(ring))
        core.window(play.core, newest, first, until)
        assert (first.tolist(), until.tolist()) == plain.window(ring, newest)


RULES = [
    (0, 1, 1, 1), (1, 1, 1, 1), (3, 1, 1, 1), (7, 1, 1, 1), (1, 2, 1, 1), (4, 3, 1, 1), (4, 4, 2, 1), (3, 3, 2, 0),
    (8, 9, 9, 1), (1, 1, 1, 1 + ACROSS), (2, 1, 1, 1 + ACROSS), (5, 1, 1, ACROSS),
]  # fmt: skip
"""History, length, stride, and whether tails count, and rows of any episode."""


@given(st.integers(0, 2**32), st.sampled_from([0, 0, ALONE, LINKED]), st.sampled_from(RULES))
@settings(max_examples=settings.default.max_examples)
def test_so_are_those_of_rings_that_have_seen_very_many_rows_and_very_long_episodes(
    seed: int, kind: int, rule: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(seed)
    play = RingPlay(rng, kind)
    play.arrays.counters[RULE : RULE + 4] = rule if rule[1] == 1 or not kind else RULES[0]
    play.play(int(rng.integers(0, 60)))
    play.arrays.counters[DRAWABLE] = len(plain.anchors(play.arrays))
    check_rows(rng, play.arrays, play.core, play.live(complete=False))


def almost_without_anchors(rows: int, anchors: list[int]) -> RingPlay:
    """A ring of one env that is full, and whose rows can be drawn at these places alone."""
    play = RingPlay(np.random.default_rng(0), num_envs=1, rows=rows)
    ring, count = play.arrays, len(anchors)
    ring.state[0], ring.counters[:] = [rows, 0, 1, count], [count, count, 0, 0, 1, 1, 1, 0, 0]
    older = np.searchsorted(anchors, np.arange(rows))  # how many anchors come before each row
    ring.stamp[:], ring.order[:] = -1 - older, older
    ring.stamp[anchors] = np.arange(count)
    return play


def drawn(play: RingPlay, stream: int, newest: int, count: int) -> Any:
    """The places that the core draws."""
    places = np.full(count, -9)
    assert core.draw(play.core, stream, newest, places)
    return places


def test_where_anchors_are_so_rare_that_they_are_counted_out_draws_are_those_of_the_definition() -> None:
    # One anchor among 5,000 rows, and a stream by which a hundred draws in a row miss it.
    one, few = almost_without_anchors(5000, [3210]), almost_without_anchors(1000, [3, 400, 997])
    for newest in (0, 3000):
        assert drawn(one, 5, newest, 6).tolist() == plain.draw(one.arrays, 5, newest, 6) == [3210] * 6
        assert drawn(few, 5, newest, 200).tolist() == plain.draw(few.arrays, 5, newest, 200)


def test_anchors_that_are_counted_out_have_equal_chances() -> None:
    # Three draws in four are counted out. If an anchor loses 5 % of its draws to another, each is 670 of 13,300 off.
    # That adds 2 · 670² / 13,300 = 67 to the chi-square, whose standard deviation is 2.
    anchors = [3, 400, 997]
    places = drawn(almost_without_anchors(1000, anchors), 5, 0, 40_000)
    chances = dict.fromkeys(anchors, 1 / 3)
    assert deviation(places, chances) < 5
    places[np.flatnonzero(places == anchors[-1])[: len(places) // 60]] = anchors[0]
    assert deviation(places, chances) > 5


def test_arrays_that_do_not_fit_are_refused() -> None:
    ring = internals.ring(Twin(2, 10).play("..", "..", "..").buffer)
    more, ints = np.zeros(ring.num_envs + 1, np.int64), np.zeros(ring.num_envs, np.int64)
    for call in (
        lambda: core.window(ring.core, 0, more, ints),
        lambda: core.window(ring.core, 0, ints, more),
        lambda: core.take_fresh(ring.core, more, ints),
        lambda: core.count_fresh(ring.core, more),
        lambda: core.ids_of(ring.core, more, ints),
        lambda: core.live(ring.core, more, ints),
        lambda: core.anchors(ring.core, np.zeros(ring.rows_live - 1, np.int64)),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    for wrong in (ints.astype(np.int32), np.zeros((2, 2), np.int64), np.zeros(8, np.int64)[::2], [0, 1]):
        with pytest.raises(TypeError):
            core.draw(ring.core, 0, 0, wrong)
