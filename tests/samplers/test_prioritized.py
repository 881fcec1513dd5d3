"""Priorities: draws and weights are exactly those of the definition."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
    core,
)
from relive.errors import (
    EmptyError,
    NotFiniteError,
    ParameterError,
)
from support import internals, oracle
from support.fit import check_fit, equal, many
from support.twins import Twin, contents, same_batches
from support.worlds import EPS, INF, NAN, check_fit_of_one_percent, check_weights

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}

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
    drawn = np.concatenate([many(twin, 1, key=key) for key in core.permutation(60_000, 1, 1).tolist()])
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
        core.masses(key, True, 1.0, row)
    within = fractions * size - np.arange(size)
    assert within.min() >= 0
    assert within.max() < 1
    cells = (within * 40).astype(int)
    check_fit_of_one_percent(cells.ravel(), equal(list(range(40))))
    assert abs(np.corrcoef(within[:, 0], within[:, 1])[0, 1]) < 0.03
    independent = np.empty(100_000)
    core.masses(7, False, 1.0, independent)
    assert independent.min() >= 0
    assert independent.max() < 1
    check_fit_of_one_percent((independent * 40).astype(int), equal(list(range(40))))


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


def test_an_appended_env_brings_the_largest_error_of_its_buffer() -> None:
    twin, other = Twin(1, 16, sampler=Prioritized(alpha=1.0, eps=0.5)), Twin(2, 16, sampler=Prioritized())
    source, target = other.play("..", "..", "..", "..").buffer, twin.buffer
    index = source.data()["index"]
    source.update_priorities(index, torch.where(index % 2 == 0, 50.0, 2.0))
    target.append(source, envs={1: 0})  # the largest error is that of the other env
    assert target.priorities(target.data()["index"]).tolist() == [2.5] * 3
    for _ in range(2):
        target.add(twin.step("."))
    assert target.priorities(target.data()["index"]).tolist() == [2.5] * 3 + [50.5]


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
            twin.buffer.view = Transition() if isinstance(twin.buffer.view, FrameStack) else FrameStack(4)
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
    tree = internals.tree(twin.buffer.sampler)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alpha", alpha) for alpha in (-0.1, NAN, INF, "0.6", None, True)),
        *(("beta", beta) for beta in (-0.1, NAN, INF, "0.4", None, (), (0.4, 1.0), (0.4, 1.0, 0), (0.4, 1.0, -5))),
        *(("beta", beta) for beta in ((0.4, 1.0, 2.5), (0.4, -0.1, 9), (NAN, 1.0, 9), (0.4, INF, 9), (0, 1, 2, 3))),
        ("beta", (1.0, 0.4, 100)),  # it would fall
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
