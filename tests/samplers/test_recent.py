"""Recent experience: exactly the newest transitions, and how many of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relive import (
    FrameStack,
    Prioritized,
    Recent,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive.errors import (
    NotFiniteError,
    ParameterError,
)
from support import oracle
from support.cases import covering
from support.effort import often
from support.fit import check_fit, equal, many
from support.twins import Twin
from support.worlds import EPS, INF, NAN, WORLDS, check_fit_of_one_percent, check_weights, drawn_from, uneven

# Recent experience.


@pytest.mark.parametrize(
    ("name", "inner"),
    covering(
        ["not yet full", "of uneven episodes", "asynchronous"],
        [Uniform, lambda: Prioritized(alpha=0.0, stratified=False)],
        full=2,
        quick=1,
    ),
)
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
    samplers = Recent(1.0, 1), Recent(0.5, 5000), Recent(0.5, 5000, inner=Prioritized(stratified=False))
    for sampler in samplers[:: often(2, 1)]:
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
