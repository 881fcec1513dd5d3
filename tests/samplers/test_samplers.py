"""Samplers: what they draw, with which probability, and that every one of them works with every view."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from covering import covering
from fit import check_fit, deviation, equal, many
from relive import (
    Field,
    FrameStack,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Sequence,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive.errors import (
    EmptyError,
    InvariantError,
    LifecycleError,
    NotFiniteError,
    ParameterError,
    ShapeError,
)
from relive.kernels import cpu, reference
from twins import SAMPLERS, VIEWS, Twin, batch_leaves, contents, same_batches

EPS = 1e-6
NAN, INF = float("nan"), float("inf")
FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}

# Every sampler with every view.


def world(num_envs: int, wrapped: bool, ending: str, **options: Any) -> Twin:
    """A buffer of episodes that all end in one way, or none, before or after its ring came round."""
    twin = Twin(num_envs, 7 if wrapped else 16, **options)
    for t in range(18 if wrapped else 6):
        kinds = "".join(ending if (t + env) % (3 + env) == 2 else "." for env in range(num_envs))
        twin.add(kinds)
    return twin


EVERY_WORLD = list(itertools.product((1, 3), (False, True), ".TUB"))


@pytest.mark.parametrize(("sampler", "view", "of"), covering(SAMPLERS, VIEWS, EVERY_WORLD, full=2))
def test_every_sampler_draws_what_every_view_reads_right(sampler: str, view: str, of: tuple[int, bool, str]) -> None:
    twin = world(*of, sampler=SAMPLERS[sampler](), view=VIEWS[view]())
    twin.check()
    check_draws(twin)


def check_draws(twin: Twin) -> None:
    """Batches, priorities, more steps and batches again; all of it as the oracle says."""
    buffer = twin.buffer
    inner = getattr(buffer.sampler, "inner", buffer.sampler)
    prioritized = isinstance(inner, Prioritized)
    known = oracle.Priorities() if prioritized else None
    for round_ in range(2):
        anchors = twin.anchors()
        if not anchors:
            with pytest.raises(EmptyError, match="no complete transition"):
                buffer.sample(1)
            return
        for k, batch in enumerate(buffer.batches(3, min(8, len(anchors))), start=1):
            among = drawn_from(twin, k, 3)
            twin.check_batch(batch, among=among)
            if known is not None:
                known.see([twin.truth.index(row) for row in anchors])
                check_weights(inner, batch, known, None if among is None else [twin.truth.index(row) for row in among])
                errors = np.float32(batch["index"].numpy() % 7 * (round_ + k - 2.5))
                late = buffer.update_priorities(batch["index"], errors)
                assert late == known.update(batch["index"].tolist(), errors.tolist()) == 0
        twin.add("." * twin.num_envs)
        twin.add("T" * twin.num_envs)
        if known is not None:  # one by one, since what is new is worth what was the largest then
            known.see([twin.truth.index(row) for row in twin.anchors()])


def drawn_from(twin: Twin, k: int, of: int) -> list[oracle.Row] | None:
    """The newest transitions that update k may draw from, if the sampler emphasises them."""
    sampler, anchors = twin.buffer.sampler, twin.anchors()
    if not isinstance(sampler, Recent):
        return None
    return anchors[-oracle.recent_count(len(anchors), sampler.eta, sampler.c_min, k, of) :]


def check_weights(sampler: Prioritized, batch: Any, known: oracle.Priorities, among: list[int] | None = None) -> None:
    """probability and weight are exactly those of the oracle's priorities."""
    chances = known.probabilities(sampler.alpha, sampler.eps, among)
    index = batch["index"].tolist()
    assert batch["probability"].dtype is torch.float64
    assert batch["weight"].dtype is torch.float32
    assert batch["probability"].tolist() == pytest.approx([chances[i] for i in index], rel=1e-9)
    smallest = min(chances.values() if sampler.normalize == "buffer" else (chances[i] for i in index))
    assert isinstance(sampler.beta, float)
    want = [(chances[i] / smallest) ** -sampler.beta for i in index]
    assert batch["weight"].tolist() == pytest.approx(want, rel=1e-5)


@given(st.sampled_from(sorted(SAMPLERS)), st.sampled_from(sorted(VIEWS)), st.integers(1, 4), st.data())
@settings(max_examples=40)
def test_every_sampler_draws_right_from_larger_worlds(
    sampler: str, view: str, num_envs: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(2, 40))
    twin = Twin(num_envs, rows, sampler=SAMPLERS[sampler](), view=VIEWS[view]())
    for kinds in data.draw(st.lists(st.text(".......TUB", min_size=num_envs, max_size=num_envs), max_size=80)):
        twin.add(kinds)
    check_draws(twin)


# Distributions. A test of n draws is a chi-square over the anchors, as a number of standard deviations; it fails from
# 5 on, which chance exceeds in less than one seed of a thousand even with few anchors, and the seeds are fixed. Of
# two biases each test must show that it sees them: 1 % of the draws going to the newest anchor, which adds about
# n / 10,000 times the number of anchors to the chi-square, and one half of them being 1 % likelier than the other.


def uneven(**options: Any) -> Twin:
    """Three envs whose episodes have 1, 4 and 29 steps: boundary rows take half of the first one's ring."""
    twin = Twin(3, 12, **options)
    for t in range(31):
        twin.add("".join("TUB"[e] if (t + 1) % length == 0 else "." for e, length in enumerate((1, 4, 29))))
    return twin


def asynchronous(**options: Any) -> Twin:
    """Three envs of which one steps always, one sometimes, and one stopped long ago."""
    twin = Twin(3, 14, **options)
    for _ in range(9):
        twin.add("...")
    for t in range(51):
        envs = [0] if t % 4 else [0, 1]
        twin.add("".join("U" if (t + env) % 9 == 8 else "." for env in envs), envs)
    return twin


def rare(**options: Any) -> Twin:
    """Almost all rows are of episodes that were interrupted after their first step."""
    twin = Twin(2, 400, **options)
    for t in range(400):
        twin.add("T." if t % 90 == 40 else "..")
        if t % 57:
            twin.interrupt()
    return twin


WORLDS: dict[str, Callable[..., Twin]] = {
    "not yet full": lambda **options: Twin(2, 30, **options).play(*["..", "..", ".T", "..", "U.", "..", "..", ".."]),
    "of uneven episodes": uneven,
    "asynchronous": asynchronous,
    "almost without anchors": rare,
}


@pytest.mark.parametrize("name", WORLDS)
def test_uniform_draws_every_anchor_equally_often_in_worlds(name: str) -> None:
    twin = WORLDS[name]()
    count = 300_000 if name == "almost without anchors" else 3_000_000
    drawn = many(twin, count)
    chances = equal([twin.truth.index(row) for row in twin.anchors()])
    if count < 1_000_000:
        assert set(drawn.tolist()) == set(chances)
        assert deviation(drawn, chances) < 5
    else:
        check_fit(drawn, chances)


def test_uniform_draws_of_successive_batches_are_equally_often_each_and_independent() -> None:
    twin = Twin(1, 9)
    for _ in range(20):
        twin.add(".")
    anchors = equal([twin.truth.index(row) for row in twin.anchors()])
    batches = [twin.buffer.sample(64)["index"].numpy() for _ in range(12_000)]
    drawn = np.concatenate(batches)
    check_fit_of_one_percent(drawn, anchors)
    first, second = (np.array([batch[i] for batch in batches]) for i in (0, 1))
    pairs = {a * 1000 + b: 1 / len(anchors) ** 2 for a in anchors for b in anchors}
    assert deviation(first * 1000 + second, pairs) < 5
    assert deviation(first[:-1] * 1000 + first[1:], pairs) < 5


def check_fit_of_one_percent(drawn: np.ndarray, chances: dict[int, float]) -> None:
    """Like check_fit, for fewer draws: only the bias of 1 % towards the newest need be seen."""
    assert deviation(drawn, chances) < 5
    biased = drawn.copy()
    biased[np.random.default_rng(0).random(len(drawn)) < 0.01] = max(chances)
    assert deviation(biased, chances) > 5


def test_frames_that_have_left_are_no_reason_to_draw_some_anchors_more_often() -> None:
    twin = uneven(view=FrameStack(4))
    check_fit(many(twin, 3_000_000), equal([twin.truth.index(row) for row in twin.anchors()]))


# Without replacement.


def test_an_epoch_holds_every_transition_exactly_once_whatever_the_batch_size() -> None:
    twin = uneven(sampler=WithoutReplacement())
    every = sorted(twin.truth.index(row) for row in twin.anchors())
    for size in (1, 2, 5, 7, len(every)):
        fresh = uneven(sampler=WithoutReplacement())
        drawn = torch.cat([fresh.buffer.sample(size)["index"] for _ in range(4 * len(every) // size + 1)]).tolist()
        for epoch in range(len(drawn) // len(every)):
            assert sorted(drawn[epoch * len(every) : (epoch + 1) * len(every)]) == every
    orders = [tuple(twin.buffer.sample(len(every))["index"].tolist()) for _ in range(50)]
    assert len(set(orders)) == 50


def test_epochs_are_uniform_permutations() -> None:
    twin = Twin(1, 9, sampler=WithoutReplacement())
    for _ in range(6):
        twin.add(".")
    orders = np.stack([twin.buffer.sample(5)["index"].numpy() for _ in range(40_000)])
    ranks = (orders * np.array([10_000, 1000, 100, 10, 1])).sum(1)
    chances = equal(sorted({int(rank) for rank in ranks}))
    assert len(chances) == 120
    check_fit_of_one_percent(ranks, chances)


def test_what_comes_during_an_epoch_waits_for_the_next_and_what_goes_is_passed_over() -> None:
    twin = Twin(1, 11, sampler=WithoutReplacement())
    for _ in range(11):
        twin.add(".")
    first = twin.buffer.sample(4)["index"].tolist()
    for _ in range(3):
        twin.add(".")  # three come, three go
    rest = [i for i in range(3, 10) if i not in first]
    drawn = twin.buffer.sample(len(rest))["index"].tolist()
    assert sorted(drawn) == rest
    assert sorted(twin.buffer.sample(10)["index"].tolist()) == list(range(3, 13))


def test_an_epoch_of_which_nothing_is_left_gives_way_to_the_next_at_once() -> None:
    for gone in (30, 300):
        twin = Twin(1, 30, sampler=WithoutReplacement())
        for _ in range(30):
            twin.add(".")
        twin.buffer.sample(1)
        for _ in range(gone):
            twin.add(".")
        for size in (1, 4, 24):
            batch = twin.buffer.sample(size)
            assert len(batch) == size
            twin.check_batch(batch)
        assert len(set(twin.buffer.sample(29)["index"].tolist())) == 29


def test_an_epoch_survives_a_clear_and_a_change_of_view() -> None:
    twin = Twin(1, 12, sampler=WithoutReplacement()).play(*[".."[0]] * 8)
    twin.buffer.sample(2)
    twin.clear()
    with pytest.raises(EmptyError):
        twin.buffer.sample(1)
    twin.play(".", ".", ".", "T")
    assert sorted(twin.buffer.sample(4)["index"].tolist()) == [8, 9, 10, 11]
    twin.play(*"." * 12)
    twin.buffer.sample(2)
    twin.buffer.view = FrameStack(5)
    for _ in range(6):
        twin.check_batch(twin.buffer.sample(3))


def test_more_than_there_is_cannot_be_drawn_without_replacement() -> None:
    twin = Twin(1, 12, sampler=WithoutReplacement()).play(".", ".", ".", "T")
    before = contents(twin.buffer)
    with pytest.raises(ParameterError, match=r"sample\(5\): there are 4 transitions"):
        twin.buffer.sample(5)
    assert contents(twin.buffer) == before
    assert sorted(twin.buffer.sample(4)["index"].tolist()) == [0, 1, 2, 3]


# Prioritized.


def rated(errors: list[float], **options: Any) -> Twin:
    """One env with this many transitions and these TD errors."""
    twin = Twin(1, len(errors) + 5, sampler=Prioritized(**options))
    for _ in range(len(errors) + 1):
        twin.add(".")
    twin.buffer.update_priorities(np.arange(len(errors)), np.array(errors))
    return twin


ERRORS = [0.0, 0.01, 0.5, 0.5, 1.0, 2.0, 3.5, 30.0, 100.0]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.7])
def test_probabilities_are_exactly_those_of_the_definition(alpha: float) -> None:
    twin = rated(ERRORS, alpha=alpha, eps=0.01)
    batch = twin.buffer.sample(200)
    weights = [(error + 0.01) ** alpha for error in ERRORS]
    total = math.fsum(weights)
    # errors are kept as float32, and there are the new ones of error 100, the largest seen
    want = [weights[i] / total for i in batch["index"].tolist()]
    assert batch["probability"].tolist() == pytest.approx(want, rel=1e-6)
    assert set(batch["index"].tolist()) <= set(range(len(ERRORS)))


@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_independent_draws_come_as_often_as_their_probabilities_say(alpha: float) -> None:
    twin = rated([0.5, 1.0, 2.0, 3.5, 0.7, 1.0, 0.9], alpha=alpha, stratified=False)
    known = oracle.Priorities()
    known.errors = dict(enumerate([0.5, 1.0, 2.0, 3.5, 0.7, 1.0, 0.9]))
    check_fit(many(twin, 3_000_000), known.probabilities(alpha, EPS))


def test_stratified_draws_of_many_batches_come_as_often_as_their_probabilities_say() -> None:
    # Within a batch strata make the counts steadier than chance; one row out of each of many batches is pure chance.
    twin = rated([0.5, 1.0, 2.0, 3.5, 0.7, 1.0, 0.9], alpha=1.0)
    known = oracle.Priorities()
    known.errors = dict(enumerate([0.5, 1.0, 2.0, 3.5, 0.7, 1.0, 0.9]))
    drawn = np.concatenate([many(twin, 1, key=key) for key in reference.permutation(60_000, 1, 1).tolist()])
    check_fit_of_one_percent(drawn, known.probabilities(1.0, EPS))


def test_a_stratified_batch_takes_one_draw_from_each_equal_part_of_the_total() -> None:
    twin = rated(ERRORS, alpha=0.6)
    weights = np.array([(error + EPS) ** 0.6 for error in ERRORS])
    edges = np.concatenate([[0], np.cumsum(weights / weights.sum())])
    for size in (1, 7, 64, 1000):
        drawn = twin.buffer.sample(size)["index"].numpy()
        assert (np.diff(drawn) >= 0).all()  # along the total, where the transitions of one env lie in order
        for part, i in enumerate(drawn.tolist()):
            assert edges[i] <= (part + 1) / size + 1e-9
            assert edges[i + 1] >= part / size - 1e-9
        counts = np.bincount(drawn, minlength=len(ERRORS))
        assert (np.abs(counts - size * np.diff(edges)) <= 2).all()


def test_the_place_within_each_part_is_uniform() -> None:
    size = 50
    fractions = np.empty((20_000, size))
    for key, row in enumerate(fractions):
        cpu.masses(np.uint64(key), True, 1.0, np.nextafter(1.0, 0.0), row)
    within = fractions * size - np.arange(size)
    assert within.min() >= 0
    assert within.max() < 1
    cells = (within * 40).astype(int)
    check_fit_of_one_percent(cells.ravel(), equal(list(range(40))))
    assert abs(np.corrcoef(within[:, 0], within[:, 1])[0, 1]) < 0.03
    independent = np.empty(100_000)
    cpu.masses(np.uint64(7), False, 1.0, np.nextafter(1.0, 0.0), independent)
    assert independent.min() >= 0
    assert independent.max() < 1
    check_fit_of_one_percent((independent * 40).astype(int), equal(list(range(40))))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63, 2**64 - 1])
def test_the_twins_make_the_same_uniform_numbers(seed: int) -> None:
    fast = np.empty(50)
    cpu.uniforms(np.uint64(seed), fast)
    assert fast.tolist() == [reference.random.uniform(seed, n) for n in range(1, 51)]


@given(st.integers(0, 2**64 - 1), st.booleans(), st.floats(1e-300, 1e300), st.integers(1, 40))
@settings(max_examples=30)
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
@settings(max_examples=30)
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
@settings(max_examples=30)
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


def test_weights_are_divided_by_the_largest_of_the_batch_or_of_the_buffer() -> None:
    for normalize in ("batch", "buffer"):
        twin = rated(ERRORS, alpha=0.6, beta=0.7, normalize=normalize)
        known = oracle.Priorities()
        known.errors = dict(enumerate(ERRORS))
        for size in (1, 3, 64):
            batch = twin.buffer.sample(size)
            check_weights(twin.buffer.sampler, batch, known)
            assert batch["weight"].max() <= 1
            if normalize == "batch":
                assert batch["weight"].max() == 1


def test_one_tiny_priority_squashes_no_weights_unless_that_is_asked_for() -> None:
    errors = [1.0] * 30 + [0.0]
    squashed = rated(errors, normalize="buffer", eps=1e-12).buffer.sample(16)["weight"]
    plain = rated(errors, normalize="batch", eps=1e-12).buffer.sample(16)["weight"]
    assert squashed.max() < 0.01
    assert plain.tolist() == [1.0] * 16


def test_alpha_0_and_beta_1_make_it_a_plain_buffer() -> None:
    twin = rated(ERRORS, alpha=0.0, beta=1.0, stratified=False)
    batch = twin.buffer.sample(100)
    assert batch["weight"].tolist() == [1.0] * 100
    assert batch["probability"].tolist() == pytest.approx([1 / len(ERRORS)] * 100)
    check_fit(many(twin, 3_000_000), equal(list(range(len(ERRORS)))))


def test_beta_goes_linearly_from_the_first_to_the_last_in_so_many_draws() -> None:
    twin = rated(ERRORS, alpha=1.0, beta=(0.25, 1.0, 3))
    for beta in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0):
        batch = twin.buffer.sample(20)
        chance = batch["probability"]
        want = (chance / chance.min()) ** -beta
        assert batch["weight"].double().tolist() == pytest.approx(want.tolist(), rel=1e-5)


def test_alpha_and_beta_can_be_changed_on_a_living_buffer() -> None:
    twin = rated(ERRORS, alpha=0.6, beta=0.4)
    known = oracle.Priorities()
    known.errors = dict(enumerate(ERRORS))
    sampler = twin.buffer.sampler
    for alpha, beta in ((1.0, 0.4), (0.0, 0.9), (2.0, 1.0), (0.6, 0.4)):
        sampler.alpha, sampler.beta = alpha, beta
        check_weights(sampler, twin.buffer.sample(30), known)


def test_new_transitions_have_the_largest_error_seen_so_far_or_the_given_one() -> None:
    for default in (None, 0.25):
        twin = Twin(1, 20, sampler=Prioritized(alpha=1.0, default_error=default))
        known = oracle.Priorities(default)
        for t, error in enumerate([0.5, 4.0, 2.0, -7.0, 0.0]):
            twin.add(".")
            twin.add(".")
            known.see([twin.truth.index(row) for row in twin.anchors()])
            check_weights(twin.buffer.sampler, twin.buffer.sample(30), known)
            assert twin.buffer.update_priorities([2 * t], [error]) == known.update([2 * t], [error]) == 0
        assert known.largest == 7.0


def test_of_an_index_that_comes_twice_the_last_error_counts() -> None:
    twin = rated([1.0, 1.0, 1.0], alpha=1.0)
    twin.buffer.update_priorities([0, 1, 0, 1, 0], [9.0, 8.0, 7.0, 2.0, -3.0])
    chances = twin.buffer.sampler.priorities()
    assert chances.tolist() == pytest.approx([3 + EPS, 2 + EPS, 1 + EPS])
    assert twin.buffer.sampler.state_dict()["largest"] == 9.0


@pytest.mark.parametrize("time_first", [True, False])
@pytest.mark.parametrize("padding", [100.0, NAN, INF])
def test_errors_of_sequences_come_to_eta_times_the_largest_and_the_rest_of_the_mean(
    time_first: bool, padding: float
) -> None:
    errors = np.array([[1.0, -3.0, 2.0], [4.0, 0.0, padding], [0.0, padding, padding]])
    mask = np.array([[True, True, True], [True, True, False], [True, False, False]])
    if time_first:
        errors, mask = errors.T, mask.T
    for eta in (0.0, 0.5, 0.9, 1.0):
        want = [eta * 3 + (1 - eta) * 2, eta * 4 + (1 - eta) * 2, 0.0]
        for wrap in (np.asarray, torch.as_tensor):
            view = Sequence(1, overlap="none", time_first=time_first)
            twin = Twin(1, 20, sampler=Prioritized(alpha=1.0, eta=eta), view=view).play(*"....")
            assert twin.buffer.update_priorities([0, 1, 2], wrap(errors), wrap(mask)) == 0
            assert twin.buffer.sampler.priorities().tolist() == pytest.approx([w + EPS for w in want], rel=1e-6)
            assert twin.buffer.update_priorities([0, 1, 2], [1.0, 2.0, 3.0]) == 0  # reduced already
            assert twin.buffer.sampler.priorities().tolist() == pytest.approx([1 + EPS, 2 + EPS, 3 + EPS])
    before = contents(twin.buffer)
    for wrong in (NAN, INF):
        counted = np.where(mask, wrong, errors)
        with pytest.raises(NotFiniteError, match="td_error: entry 0 is"):
            twin.buffer.update_priorities([0, 1, 2], counted, mask)
    assert contents(twin.buffer) == before


def test_priorities_follow_their_transitions_round_the_ring() -> None:
    twin = Twin(2, 6, sampler=Prioritized(alpha=1.0), view=NStep(2, 0.5))
    known, rng = oracle.Priorities(), np.random.default_rng(0)
    for t in range(60):
        twin.add("".join(rng.choice(list("...TU"), 2)))
        known.see([twin.truth.index(row) for row in twin.anchors()])
        if t > 2 and known.errors:
            batch = twin.buffer.sample(6)
            twin.check_batch(batch)
            check_weights(twin.buffer.sampler, batch, known)
            errors = np.float32(rng.exponential(size=6))
            twin.buffer.update_priorities(batch["index"], errors)
            known.update(batch["index"].tolist(), errors.tolist())
    assert twin.buffer.stats()["late_updates"] == 0


def test_transitions_that_a_wider_view_hid_come_back_as_new_ones() -> None:
    twin = Twin(1, 8, sampler=Prioritized(alpha=1.0, default_error=5.0))
    known = oracle.Priorities(5.0)

    def see() -> None:
        known.see([twin.truth.index(row) for row in twin.anchors()])
        check_weights(twin.buffer.sampler, twin.buffer.sample(20), known)

    for t in range(30):
        twin.add(".")
        if t > 1:
            see()
            index = twin.buffer.data()["index"]
            errors = np.float32(1 + index.numpy() % 3)
            twin.buffer.update_priorities(index, errors)
            known.update(index.tolist(), errors.tolist())
        if t % 7 == 6:
            twin.buffer.view = FrameStack(4) if twin.buffer.view.history == 0 else Transition()
            see()


def test_what_a_view_hid_without_a_step_in_between_comes_back_as_new_too() -> None:
    twin = Twin(1, 8, sampler=Prioritized(alpha=1.0, default_error=5.0)).play(*("." * 12))
    known = oracle.Priorities(5.0)

    def see() -> None:
        known.see([twin.truth.index(row) for row in twin.anchors()])
        assert len(twin.buffer) == len(known.errors)
        want = [error + EPS for _, error in sorted(known.errors.items())]
        assert twin.buffer.sampler.priorities().tolist() == pytest.approx(want)

    see()
    index = sorted(known.errors)
    twin.buffer.update_priorities(index, [0.5] * len(index))
    known.update(index, [0.5] * len(index))
    see()
    for view, new in ((FrameStack(4), 0), (Transition(), 3), (NStep(3), 3)):
        twin.buffer.view = view
        see()
        assert sum(error == 5.0 for error in known.errors.values()) == new


# The traps of prioritized replay, by name.


def test_what_float32_would_lose_beside_a_huge_priority_keeps_its_exact_chance() -> None:
    # The sums are those of SumTree, whose own tests go up to 2^25 rows.
    errors = [1.0] * 20 + [2.0**30] + [1.0] * 20
    twin = rated(errors, alpha=1.0, eps=1.0, stratified=False)
    known = oracle.Priorities()
    known.errors = dict(enumerate(errors))
    check_weights(twin.buffer.sampler, twin.buffer.sample(50), known)
    tree = twin.buffer.sampler._tree
    assert tree.total == 2.0**30 + 1 + 40 * 2
    assert tree.find([40.5 + 2.0**30, tree.total - 0.5]).tolist() == [20, 40]
    twin.buffer.update_priorities([20], [0.0])  # and nothing of it is left behind
    assert tree.total == 40 * 2 + 1
    check_fit_of_one_percent(many(twin, 3_000_000), {i: (1 if i == 20 else 2) / 81 for i in range(41)})


def test_one_error_that_is_no_number_is_refused_by_position_and_poisons_nothing() -> None:
    for poison in (math.nan, math.inf, -math.inf, 1e300, -1e39):
        for wrap in (np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float64)):
            twin = rated(ERRORS)
            before, chances = contents(twin.buffer), twin.buffer.sampler.priorities()
            with pytest.raises(NotFiniteError, match=r"td_error: entry 2 is "):
                twin.buffer.update_priorities([3, 4, 5], wrap([1.0, 2.0, poison]))
            assert contents(twin.buffer) == before
            assert twin.buffer.sampler.priorities().tolist() == chances.tolist()
            twin.buffer.sampler.alpha = 0.5  # weighs everything stored anew
            assert twin.buffer.sample(5)["weight"].isfinite().all()


def test_an_error_too_large_to_be_weighed_changes_nothing() -> None:
    twin = rated(ERRORS, alpha=9.0)
    before, chances = contents(twin.buffer), twin.buffer.sampler.priorities()
    with pytest.raises(NotFiniteError, match=r"td_error: .* of the error 3e\+38 would be too large .* alpha=9"):
        twin.buffer.update_priorities([0, 1], [1.0, 3e38])
    assert contents(twin.buffer) == before
    assert twin.buffer.sampler.priorities().tolist() == chances.tolist()


@pytest.mark.parametrize("bad", [-1, 10_000, 2**62])
def test_an_index_that_was_never_issued_is_refused_and_nothing_changes(bad: int) -> None:
    twin = rated(ERRORS)
    before = contents(twin.buffer)
    with pytest.raises(ParameterError, match=f"index: entry 1, {bad}, was never issued"):
        twin.buffer.update_priorities([0, bad], [5.0, 5.0])
    assert contents(twin.buffer) == before


def test_priorities_and_the_order_of_the_ring_are_those_before_the_save(tmp_path: Path) -> None:
    for make in (lambda: Prioritized(alpha=1.0), lambda: Recent(0.99, 3, inner=Prioritized(alpha=1.0))):
        twin = Twin(2, 7, sampler=make())
        for _ in range(11):  # the ring came round
            twin.add("..")
        index = twin.buffer.data()["index"]
        twin.buffer.update_priorities(index, torch.arange(1.0, len(index) + 1))
        twin.buffer.save(tmp_path / "save")
        again = ReplayBuffer.load(tmp_path / "save")
        assert again.sampler is not twin.buffer.sampler
        inner = [getattr(buffer.sampler, "inner", buffer.sampler) for buffer in (again, twin.buffer)]
        assert inner[0].priorities().tolist() == inner[1].priorities().tolist()
        assert len(set(inner[0].priorities().tolist())) == len(index)
        gone = index[:2]  # the oldest of each env are the next to go, and go first after a load as well
        for buffer in (again, twin.buffer):
            step = {name: x for name, x in buffer.slice(0, -1).items() if name in buffer.schema}
            buffer.add({name: x.expand(2, *x.shape[1:]) for name, x in step.items()})
            assert buffer.update_priorities(gone, torch.ones(2)) == 2
            assert buffer.update_priorities(index[2:], torch.ones(len(index) - 2)) == 0
        assert same_batches(again.sample(40), twin.buffer.sample(40))


def test_after_a_clear_only_what_came_since_is_drawn() -> None:
    for sampler in (Prioritized(alpha=1.0), Recent(0.99, 3, inner=Prioritized(alpha=1.0))):
        twin = Twin(2, 20, sampler=sampler)
        for _ in range(30):
            twin.add("..")
        old = twin.buffer.data()["index"]
        twin.buffer.update_priorities(old, torch.full((len(old),), 1000.0))
        twin.clear()
        with pytest.raises(EmptyError):
            twin.buffer.sample(4)
        twin.play("..", "..", "T.", "..")
        batch = twin.buffer.sample(200)
        twin.check_batch(batch)
        assert not set(batch["index"].tolist()) & set(old.tolist())
        drawable = len(twin.buffer) if isinstance(sampler, Prioritized) else 3
        assert batch["probability"].tolist() == pytest.approx([1 / drawable] * 200)
        assert twin.buffer.update_priorities(old, torch.ones(len(old))) == len(old)


def test_the_same_seed_and_the_same_steps_give_the_same_batches() -> None:
    for make in SAMPLERS.values():
        batches = []
        for seed in (3, 3, 4):
            twin = uneven(sampler=make(), seed=seed)
            batches.append([twin.buffer.sample(9) for _ in range(5)])
        same, other = ([same_batches(a, b) for a, b in zip(batches[0], batches[i], strict=True)] for i in (1, 2))
        assert all(same)
        assert not all(other)


def test_two_buffers_without_a_seed_do_not_draw_alike() -> None:
    one, other = uneven(seed=None), uneven(seed=None)
    assert one.buffer.seed != other.buffer.seed
    assert not same_batches(one.buffer.sample(20), other.buffer.sample(20))
    again = uneven(seed=one.buffer.seed)
    assert same_batches(uneven(seed=one.buffer.seed).buffer.sample(20), again.buffer.sample(20))


def test_no_global_generator_is_read_or_moved() -> None:
    numpys: Any = np.random.mtrand._rand

    def states() -> list[Any]:
        return [random.getstate(), numpys.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    before = random.getstate(), numpys.get_state(), torch.get_rng_state()
    try:
        for make in SAMPLERS.values():
            drawn = []
            for seed in (1, 2):
                random.seed(seed)
                numpys.seed(seed)
                torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
                twin = uneven(sampler=make(), seed=0)
                given_ = states()
                drawn.append([twin.buffer.sample(9) for _ in range(4)])
                assert states() == given_
            assert all(same_batches(a, b) for a, b in zip(*drawn, strict=True))
    finally:
        random.setstate(before[0])
        numpys.set_state(before[1])
        torch.set_rng_state(before[2])


def test_an_update_for_a_transition_that_was_overwritten_is_left_alone_and_counted() -> None:
    twin = Twin(2, 5, sampler=Prioritized(alpha=1.0))
    for _ in range(5):
        twin.add("..")
    batch = twin.buffer.sample(16)
    index = batch["index"].tolist()
    for _ in range(2):
        twin.add("..")  # the two oldest of each env go
    known = oracle.Priorities()
    known.see([twin.truth.index(row) for row in twin.anchors()])
    errors = np.linspace(2, 9, 16, dtype=np.float32)
    late = twin.buffer.update_priorities(index, errors)
    assert late == known.update(index, errors.tolist()) == sum(i // 2 < 2 for i in index) > 0
    assert twin.buffer.stats()["late_updates"] == late
    check_weights(twin.buffer.sampler, twin.buffer.sample(40), known)
    for _ in range(20):  # all gone: nothing is updated, all are counted, and the largest error is not theirs
        twin.add("..")
    assert twin.buffer.update_priorities(index, errors * 100) == 16
    assert twin.buffer.stats()["late_updates"] == late + 16
    assert twin.buffer.sampler.state_dict()["largest"] == known.largest
    twin.add("..")
    chances = twin.buffer.sample(8)["probability"]
    assert chances.tolist() == pytest.approx([1 / 8] * 8)


def test_a_draw_and_an_update_of_a_thousand_times_as_many_transitions_take_no_thousand_times_as_long() -> None:
    took = []
    for rows in (2**10, 2**20):
        buffer = ReplayBuffer(Schema({"obs": (1,), "reward": (), **FLAGS}), rows, sampler=Prioritized())
        steps = {"obs": np.zeros((rows, 1, 1), np.float32), "reward": np.zeros((rows, 1), np.float32)}
        flags = np.zeros((rows, 1), np.bool_)
        buffer.extend({**steps, "terminated": flags, "truncated": flags})
        assert len(buffer) == rows - 1
        rounds = []
        for _ in range(50):
            began = time.thread_time()
            for _ in range(10):
                buffer.update_priorities(buffer.sample(32)["index"], np.ones(32))
            rounds.append(time.thread_time() - began)
        took.append(min(rounds))
    assert took[1] < 20 * took[0]


def test_neither_the_newest_row_nor_one_that_starts_nothing_is_ever_drawn() -> None:
    for make in SAMPLERS.values():
        twin = Twin(2, 6, sampler=make())
        for kinds in ("..", "T.", "..", ".U", "..", "B.", "..", ".."):
            twin.add(kinds)
            anchors = {twin.truth.index(row) for row in twin.anchors()}
            for _ in range(20):
                if anchors:
                    assert set(twin.buffer.sample(min(2, len(anchors)))["index"].tolist()) <= anchors


# Recent experience.


@pytest.mark.parametrize("name", ["not yet full", "of uneven episodes", "asynchronous"])
@pytest.mark.parametrize("inner", [Uniform, lambda: Prioritized(alpha=0.0, stratified=False)])
def test_draws_are_uniform_over_the_newest_of_those_that_can_be_drawn_in_worlds(
    name: str, inner: Callable[[], Any]
) -> None:
    twin = WORLDS[name](sampler=Recent(0.997, 3, inner=inner()))
    stored = len(twin.anchors())
    sizes = set()
    for k in (1, 2, 4, 7, 10):
        newest = drawn_from(twin, k, 10)
        assert newest is not None
        assert len(newest) == max(int(stored * 0.997 ** (1000 * k / 10)), 3)
        sizes.add(len(newest))
        check_fit_of_one_percent(many(twin, 400_000, k, 10), equal([twin.truth.index(row) for row in newest]))
    assert len(sizes) >= 4


def test_windows_of_every_size_hold_exactly_the_newest_of_those_that_can_be_drawn() -> None:
    for view in (Transition, lambda: FrameStack(4)):
        for make in (*WORLDS.values(), lambda **options: Twin(2, 5, **options).play(*["T.", ".."] * 9)):
            twin = make(sampler=Recent(1e-300, 1), view=view())
            anchors = [twin.truth.index(row) for row in twin.anchors()]
            for size in {*range(1, min(len(anchors), 6) + 1), len(anchors) // 2, len(anchors) - 1, len(anchors)} - {0}:
                twin.buffer.sampler.c_min = size
                drawn = many(twin, 40 * len(anchors))
                assert set(drawn.tolist()) == set(anchors[-size:]), (size, len(anchors))


def test_recent_means_the_order_of_time_and_not_of_places_after_the_ring_has_wrapped() -> None:
    for num_envs in (1, 3):
        for steps in range(8, 30):
            twin = Twin(num_envs, 8, sampler=Recent(0.5, 2 * num_envs))
            for _ in range(steps):
                twin.add("." * num_envs)
            drawn = set(twin.buffer.sample(200)["index"].tolist())
            assert drawn == {(steps - back) * num_envs + env for back in (2, 3) for env in range(num_envs)}


def test_the_newest_are_those_completed_last_whichever_env_they_are_of() -> None:
    twin = Twin(3, 20, sampler=Recent(0.5, 4))
    for _ in range(5):
        twin.add("...")
    twin.add("..", [2, 0])
    twin.add(".", [2])
    twin.add("T", [2])
    newest = [twin.truth.index(row) for row in twin.anchors()[-4:]]
    assert [i % 3 for i in newest] == [0, 2, 2, 2]
    assert set(twin.buffer.sample(300)["index"].tolist()) == set(newest)


def test_a_round_of_updates_narrows_the_window_as_in_the_paper() -> None:
    twin = Twin(1, 400, sampler=Recent(0.996, 5))
    for _ in range(301):
        twin.add(".")
    for k, batch in enumerate(twin.buffer.batches(20, 2000), start=1):
        size = max(300 * 0.996 ** (1000 * k / 20), 5)
        assert twin.buffer.sampler.window(k, 20) == int(size)
        drawn = batch["index"]
        assert drawn.min() >= 300 - int(size)
        assert (drawn == 300 - int(size)).any()
        assert drawn.max() == 299


def test_eta_of_1_and_too_few_transitions_are_no_emphasis() -> None:
    for sampler in (Recent(1.0, 1), Recent(0.5, 5000), Recent(0.5, 5000, inner=Prioritized(stratified=False))):
        twin = uneven(sampler=sampler)
        check_fit(many(twin, 3_000_000), equal([twin.truth.index(row) for row in twin.anchors()]))


def test_recent_and_prioritized_together_draw_by_priority_within_the_window() -> None:
    twin = uneven(sampler=Recent(0.5, 9, inner=Prioritized(alpha=1.0, stratified=False)))
    every = [twin.truth.index(row) for row in twin.anchors()]
    errors = np.float32(1 + np.arange(len(every)) % 4)
    twin.buffer.update_priorities(every, errors)
    known = oracle.Priorities()
    known.errors = dict(zip(every, errors.tolist(), strict=True))
    chances = known.probabilities(1.0, EPS, every[-9:])
    check_fit(many(twin, 3_000_000), chances)
    check_weights(twin.buffer.sampler.inner, twin.buffer.sample(50), known, every[-9:])


@pytest.mark.parametrize("old", [30.0, 1e3, 1e30])
@pytest.mark.parametrize("name", ["in one env", "in three envs"])
def test_a_window_of_errors_of_0_is_drawn_right_beside_errors_of_any_size_before_it(name: str, old: float) -> None:
    make = {"in one env": lambda **options: Twin(1, 40, **options).play(*("." * 61)), "in three envs": uneven}[name]
    for normalize in ("batch", "buffer"):
        sampler = Recent(0.5, 4, inner=Prioritized(alpha=2.0, stratified=False, normalize=normalize))
        twin = make(sampler=sampler)
        every = [twin.truth.index(row) for row in twin.anchors()]
        errors = [old] * (len(every) - 4) + [0.0] * 4
        twin.buffer.update_priorities(every, errors)
        known = oracle.Priorities()
        known.errors = dict(zip(every, errors, strict=True))
        check_weights(sampler.inner, twin.buffer.sample(50), known, every[-4:])
        check_fit_of_one_percent(many(twin, 400_000), known.probabilities(2.0, EPS, every[-4:]))


def test_weights_within_a_window_are_divided_by_the_largest_that_any_transition_of_it_has() -> None:
    sampler = Recent(0.5, 9, inner=Prioritized(alpha=1.0, beta=0.5, normalize="buffer"))
    twin = uneven(sampler=sampler)
    every = [twin.truth.index(row) for row in twin.anchors()]
    window = every[-9:]
    errors = {index: 1e-3 if index not in window else 1.0 + i % 4 for i, index in enumerate(every)}
    twin.buffer.update_priorities(every, np.array(list(errors.values())))
    known = oracle.Priorities()
    known.errors = dict(zip(every, np.float32(list(errors.values())).tolist(), strict=True))
    weights = twin.buffer.sample(200)["weight"]
    assert weights.max() == 1  # the rarest of the window was drawn, and what is outside has no say
    assert weights.min() == pytest.approx(0.5)
    for size in (1, 3, 50):
        check_weights(sampler.inner, twin.buffer.sample(size), known, window)
    sampler.eta = 1.0
    check_weights(sampler.inner, twin.buffer.sample(50), known)  # from all


def test_eta_follows_the_progress_of_learning_between_its_sharpest_and_1() -> None:
    plain = Recent(0.9, 1)
    for _ in range(60):
        plain.observe(1.0)
    assert plain.eta == 0.9  # without adapt
    sampler = Recent(0.9, 1, adapt=True)
    etas = []
    rises, falls = 0.0, 0.0
    returns = [*np.linspace(0, 10, 25), *np.linspace(10, -3, 40), *np.linspace(-3, 5, 90)]
    for t, given_ in enumerate(returns):
        sampler.observe(given_)
        etas.append(sampler.eta)
        if t < 19:
            assert sampler.eta == 0.9
            continue
        slope = float(np.gradient(returns[t - 19 : t + 1]).mean())
        rises, falls = max(rises * 0.9999, slope), max(falls * 0.9999, -slope)
        fraction = slope / rises if slope > 0 else slope / falls if slope < 0 else 0.0
        assert sampler.eta == pytest.approx(np.interp(fraction, [-1, 1], [1.0, 0.9]))
    assert min(etas) == pytest.approx(0.9)
    assert max(etas) == pytest.approx(1.0)


def test_returns_that_do_not_change_are_neither_progress_nor_its_opposite() -> None:
    sampler = Recent(0.9, 1, adapt=True)
    for _ in range(25):
        sampler.observe(3.0)
    assert sampler.eta == pytest.approx(0.95)


# One sampler for one buffer, parameters, and what is printed.


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_belongs_to_one_buffer(make: Callable[[], Any]) -> None:
    sampler = make()
    Twin(1, 5, sampler=sampler)
    with pytest.raises(LifecycleError, match="give each buffer a sampler of its own"):
        Twin(1, 5, sampler=sampler)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alpha", alpha) for alpha in (-0.1, NAN, INF, "0.6", None, True)),
        *(("beta", beta) for beta in (-0.1, NAN, INF, "0.4", None, (), (0.4, 1.0), (0.4, 1.0, 0), (0.4, 1.0, -5))),
        *(("beta", beta) for beta in ((0.4, 1.0, 2.5), (0.4, -0.1, 9), (NAN, 1.0, 9), (0.4, INF, 9), (0, 1, 2, 3))),
        *(("eps", eps) for eps in (0.0, -1e-6, NAN, INF, None)),
        *(("stratified", stratified) for stratified in (None, "no", 1)),
        *(("normalize", normalize) for normalize in ("max", None, True)),
        *(("default_error", error) for error in (-1.0, NAN, INF, 1e39, "1")),
        *(("eta", eta) for eta in (-0.1, 1.5, NAN, None)),
    ],
)
def test_parameters_of_priorities_are_checked_when_they_are_given_and_when_they_are_set(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=rf"Prioritized\({name}=.*\): {name} is "):
        Prioritized(**{name: value})
    twin = rated(ERRORS, alpha=0.6, beta=0.4)
    sampler = twin.buffer.sampler
    before, known = repr(sampler), twin.buffer.data()
    chances = sampler.priorities()
    with pytest.raises(ParameterError, match=rf"Prioritized\({name}=.*\): {name} is "):
        setattr(sampler, name, value)
    assert repr(sampler) == before
    assert sampler.priorities().tolist() == chances.tolist()
    assert same_batches(twin.buffer.data(), known)
    twin.buffer.sample(8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("eta", eta) for eta in (0.0, -0.5, 1.1, NAN, None)),
        *(("c_min", c_min) for c_min in (0, -1, 2.5, NAN, None, True)),
        *(("adapt", adapt) for adapt in (None, 1)),
    ],
)
def test_parameters_of_the_window_are_checked_when_they_are_given_and_when_they_are_set(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=rf"Recent\({name}=.*\): {name} is "):
        Recent(**{name: value})
    sampler = uneven(sampler=Recent(0.9, 3)).buffer.sampler
    with pytest.raises(ParameterError, match=rf"Recent\({name}=.*\): {name} is "):
        setattr(sampler, name, value)
    assert repr(sampler) == "Recent(0.9, 3, inner=Uniform(), adapt=False)"


@pytest.mark.parametrize("make", [lambda: Recent(inner=WithoutReplacement()), lambda: Recent(inner=Recent())])
def test_a_window_is_drawn_from_uniformly_or_by_priority_and_in_no_other_way(make: Callable[[], Any]) -> None:
    with pytest.raises(ParameterError, match=r"Recent: inner is Uniform\(\) or Prioritized\(\)"):
        make()
    with pytest.raises(AttributeError):
        Recent().inner = Prioritized()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_ends_of_the_ranges_and_numbers_of_numpy_are_taken() -> None:
    Prioritized(0, 0, eps=np.float64(1e-9), default_error=0, eta=1)
    Prioritized(np.float32(0.5), (0, np.float64(1.5), np.int64(1)), eta=0)
    assert Recent(1, 1).eta == Recent(np.float64(1.0), np.int32(1)).eta == 1


@pytest.mark.parametrize("largest_is_stored", [True, False])
def test_an_exponent_that_makes_a_priority_infinite_is_refused_and_nothing_changes(largest_is_stored: bool) -> None:
    twin = rated([1e30, 1.0, 2.0], alpha=1.0)
    sampler = twin.buffer.sampler
    if not largest_is_stored:  # but it is what the next transition will be given
        twin.buffer.update_priorities([0], [0.0])
    chances = sampler.priorities()
    with pytest.raises(
        NotFiniteError, match=r"Prioritized\(alpha=11\.0, eps=1e-06\): .* choose a smaller alpha or eps"
    ):
        sampler.alpha = 11.0
    assert sampler.alpha == 1.0
    assert sampler.priorities().tolist() == chances.tolist()
    twin.buffer.sample(8)
    twin.play(".", ".")
    twin.check()


def test_eps_can_be_changed_on_a_living_buffer() -> None:
    sampler = rated(ERRORS, alpha=1.0, eps=1e-6).buffer.sampler
    sampler.eps = 0.5
    assert sampler.priorities().tolist() == pytest.approx([error + 0.5 for error in ERRORS], rel=1e-6)


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_a_return_that_is_no_number_is_refused_and_eta_stays(wrong: float) -> None:
    sampler = Recent(0.9, 1, adapt=True)
    for k in range(25):
        sampler.observe(k)
    before = sampler.eta
    with pytest.raises(NotFiniteError, match="episode_return"):
        sampler.observe(wrong)
    assert sampler.eta == before
    sampler.observe(25.0)
    assert sampler.eta == pytest.approx(0.9)


@pytest.mark.parametrize("make", [*SAMPLERS.values(), lambda: Prioritized(beta=(0.4, 1.0, 100), default_error=0.5)])
def test_a_sampler_prints_as_the_call_that_makes_it_again(make: Callable[[], Any]) -> None:
    text = repr(make())
    assert repr(eval(text)) == text


def test_only_priorities_can_be_updated() -> None:
    for make in (Uniform, WithoutReplacement, lambda: Recent(0.9, 2)):
        twin = Twin(1, 6, sampler=make()).play(".", ".")
        assert not twin.buffer.has_priorities
        with pytest.raises(
            LifecycleError, match=r"knows no priorities; create the buffer with sampler=Prioritized\(\)"
        ):
            twin.buffer.update_priorities([0], [1.0])
    assert Twin(1, 6, sampler=Recent(0.9, 2, inner=Prioritized())).buffer.has_priorities


# State.


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_loaded_state_goes_on_exactly_like_the_saved_sampler(name: str) -> None:
    rng = np.random.default_rng(0)
    one, other = uneven(sampler=SAMPLERS[name]()), uneven(sampler=SAMPLERS[name]())
    for _ in range(4):
        batch = one.buffer.sample(7)
        if one.buffer.has_priorities:
            one.buffer.update_priorities(batch["index"], rng.exponential(size=7))  # not numbers of float32
    for twin in (one, other):
        twin.add("...")
    other.buffer._progress.draws = one.buffer._progress.draws
    state = one.buffer.sampler.state_dict()
    other.buffer.sampler.load_state_dict(state)
    for value in state.values():  # the state is a copy: what is done to it touches neither
        if isinstance(value, np.ndarray):
            value[...] = 0
    for _ in range(6):
        batches = one.buffer.sample(7), other.buffer.sample(7)
        assert same_batches(*batches)
        if one.buffer.has_priorities:
            errors = rng.exponential(size=7)
            assert one.buffer.update_priorities(batches[0]["index"], errors) == 0
            assert other.buffer.update_priorities(batches[1]["index"], errors) == 0
        for twin in (one, other):
            twin.add(".T.")
    assert contents(one.buffer)[:-1] == contents(other.buffer)[:-1]  # all but how many rows were drawn before


def test_a_loaded_state_has_the_eta_the_returns_and_the_schedule_of_beta() -> None:
    samplers = [Recent(0.9, 2, inner=Prioritized(beta=(0.1, 1.0, 10)), adapt=True) for _ in range(2)]
    twins = [uneven(sampler=sampler) for sampler in samplers]
    index = twins[0].buffer.data()["index"]
    twins[0].buffer.update_priorities(index, 1 + index % 3)  # with equal ones all weights would be 1, whatever beta is
    for given_ in np.sin(np.arange(30)):
        samplers[0].observe(given_)
    for _ in range(4):
        twins[0].buffer.sample(5)
    samplers[1].load_state_dict(samplers[0].state_dict())
    assert samplers[1].eta == samplers[0].eta != 0.9
    for given_ in np.cos(np.arange(5)):
        for sampler in samplers:
            sampler.observe(given_)
    assert samplers[1].eta == samplers[0].eta
    batches = [twin.buffer.sampler.draw(20, 5, 1, 1) for twin in twins]
    for name in ("weight", "probability"):
        assert batches[0][1][name].tolist() == batches[1][1][name].tolist()
    probability = batches[0][1]["probability"]
    want = (probability / probability.min()) ** -(0.1 + 0.9 * 4 / 10)
    assert batches[1][1]["weight"].tolist() == pytest.approx(want.tolist())
    assert want.min() < 0.9
    assert batches[0][0].tolist() == batches[1][0].tolist()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"errors": np.ones(5, np.float32)}, ShapeError),
        ({"errors": np.full(36, np.nan, np.float32)}, NotFiniteError),
        ({"errors": np.full(36, -1, np.float32)}, NotFiniteError),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(
    change: dict[str, Any], error: type[Exception]
) -> None:
    twin = uneven(sampler=Prioritized())
    twin.buffer.update_priorities(twin.buffer.sample(5)["index"], torch.arange(5.0))
    before, chances = contents(twin.buffer), twin.buffer.sampler.priorities()
    with pytest.raises(error):
        twin.buffer.sampler.load_state_dict({**twin.buffer.sampler.state_dict(), **change})
    assert contents(twin.buffer) == before
    assert twin.buffer.sampler.priorities().tolist() == chances.tolist()


# Randomness.


def test_batch_number_t_is_a_function_of_the_seed_of_t_and_of_what_is_stored() -> None:
    for make in (Uniform, Prioritized, lambda: Recent(0.9, 2)):
        one, other = uneven(sampler=make()), uneven(sampler=make())
        drawn = [one.buffer.sample(12) for _ in range(4)]
        for size in (1, 5, 2):
            other.buffer.sample(size)  # of whatever size those before were
        assert same_batches(other.buffer.sample(12), drawn[3])


def test_a_seed_that_is_set_later_numbers_batches_from_0_again() -> None:
    for make in (Uniform, Prioritized):
        one, other = uneven(sampler=make(), seed=7), uneven(sampler=make(), seed=3)
        drawn = [one.buffer.sample(12) for _ in range(3)]
        other.buffer.sample(12)
        other.buffer.seed = 7
        again = pickle.loads(pickle.dumps(other.buffer))
        for batch in drawn:
            assert same_batches(other.buffer.sample(12), batch)
            assert same_batches(again.sample(12), batch)
        assert other.buffer.stats()["batches"] == 4
    with pytest.raises(ParameterError, match="seed is an int"):
        other.buffer.seed = 1.5
    assert other.buffer.seed == 7


@pytest.mark.parametrize("make", [Uniform, Prioritized, WithoutReplacement, lambda: Recent(1.0, 1)])
def test_a_round_of_batches_draws_what_as_many_single_ones_would(make: Callable[[], Any]) -> None:
    one, other = uneven(sampler=make()), uneven(sampler=make())
    singles = [one.buffer.sample(6) for _ in range(7)]
    rounds = [*other.buffer.batches(2, 6), *other.buffer.batches(4, 6), other.buffer.sample(6)]
    for single, batch in zip(singles, rounds, strict=True):
        assert same_batches(single, batch)


def test_what_is_asked_between_batches_does_not_change_them() -> None:
    for make in SAMPLERS.values():
        one, other = uneven(sampler=make()), uneven(sampler=make())
        for _ in range(3):
            other.buffer.stats()
            other.buffer.data()
            other.buffer.check()
            with pytest.raises(ParameterError):
                other.buffer.sample(0)
            assert same_batches(one.buffer.sample(6), other.buffer.sample(6))


def test_draws_never_change_between_versions() -> None:
    # A run that is resumed tomorrow must draw what it would have drawn today.
    drawn = {}
    for name, make in SAMPLERS.items():
        twin = uneven(sampler=make(), seed=7)
        drawn[name] = [twin.buffer.sample(6)["index"].tolist() for _ in range(2)][1]
    assert drawn == PINNED


PINNED = {
    "uniform": [68, 106, 100, 100, 79, 150],
    "without replacement": [83, 150, 168, 156, 174, 71],
    "prioritized, stratified": [162, 82, 91, 106, 80, 62],
    "prioritized, independent": [83, 68, 100, 100, 168, 109],
    "recent, uniform": [92, 109, 92, 92, 109, 109],
    "recent, prioritized": [109, 109, 109, 92, 92, 92],
}


def test_streams_of_neighbouring_seeds_and_batches_have_nothing_in_common() -> None:
    twins = [uneven(seed=seed) for seed in (0, 1)]
    rows = {tuple(twin.buffer.sample(12)["index"].tolist()) for twin in twins for _ in range(500)}
    assert len(rows) == 1000


def test_a_seed_may_be_any_integer() -> None:
    for seed in (0, -1, 2**63, 2**70):
        twin = uneven(seed=seed)
        assert twin.buffer.seed == seed
        twin.check_batch(twin.buffer.sample(10))


def test_batches_of_a_sampler_are_what_the_view_reads_and_no_view_of_storage() -> None:
    twin = uneven(sampler=Prioritized())
    batch = twin.buffer.sample(8)
    before = twin.buffer._ring.store.target.tobytes()
    for leaf in batch_leaves(batch).values():
        leaf[...] = 1
    assert twin.buffer._ring.store.target.tobytes() == before
    assert isinstance(twin.buffer, ReplayBuffer)


# check() finds what is wrong.


@pytest.mark.parametrize("make", [Prioritized, lambda: Recent(inner=Prioritized(normalize="buffer"))])
@pytest.mark.parametrize("where", ["a weight", "an error", "a row that cannot be drawn", "a sum"])
def test_check_finds_priorities_that_are_not_those_of_what_can_be_drawn(where: str, make: Callable[[], Any]) -> None:
    twin = Twin(2, 6, sampler=make()).play("..", ".T", "..", "U.", "..")
    twin.buffer.sample(3)
    twin.buffer.check()
    sampler, ring = twin.buffer._ratings.prioritized, twin.buffer._ring
    places = ring.anchors()
    if where == "a weight":
        sampler._tree.set(places[:1], 0.0)
    elif where == "an error":
        sampler._errors[places[-1]] = 7.0
    elif where == "a row that cannot be drawn":
        sampler._tree.set(ring.live_places(0)[-1:], 1.0)
    else:
        sampler._tree._nodes[-1] += 1.0
    with pytest.raises(InvariantError):
        twin.buffer.check()


@pytest.mark.parametrize("weigh", ["windows", "steps", "episodes"])
def test_check_finds_sequences_that_are_weighed_wrongly(weigh: Any) -> None:
    twin = Twin(2, 9, view=Sequence(2, weigh=weigh)).play(*[".."] * 5, ".T", "..", "..")
    twin.buffer.check()
    windows = twin.buffer.sampler._windows
    windows._tree.set(twin.buffer._ring.anchors()[-1:], 5.0)
    with pytest.raises(InvariantError, match="sampler: place"):
        twin.buffer.check()


def test_check_finds_an_epoch_of_what_there_never_was() -> None:
    twin = Twin(1, 9, sampler=WithoutReplacement()).play(*["."] * 6)
    twin.buffer.sample(2)
    twin.buffer.check()
    twin.buffer.sampler._rest = np.array([0, 99])
    with pytest.raises(InvariantError, match="index 99"):
        twin.buffer.check()
