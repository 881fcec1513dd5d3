"""Samplers: what they draw, with which probability, and that every one of them works with every view."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relive import (
    Fresh,
    Prioritized,
    Recent,
    ReplayBuffer,
    Sequence,
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
from support import internals, oracle
from support.cases import covering
from support.twins import SAMPLERS, VIEWS, Twin, batch_leaves, contents, same_batches
from support.worlds import check_weights, drawn_from, uneven

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


@given(st.sampled_from(sorted(SAMPLERS)), st.sampled_from(sorted(VIEWS)), st.integers(1, 4), st.data())
@settings(max_examples=settings.default.max_examples // 2)
def test_every_sampler_draws_right_from_larger_worlds(
    sampler: str, view: str, num_envs: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(2, 40))
    twin = Twin(num_envs, rows, sampler=SAMPLERS[sampler](), view=VIEWS[view]())
    for kinds in data.draw(st.lists(st.text(".......TUB", min_size=num_envs, max_size=num_envs), max_size=80)):
        twin.add(kinds)
    check_draws(twin)


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


# One sampler for one buffer, parameters, and what is printed.


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_belongs_to_one_buffer(make: Callable[[], Any]) -> None:
    sampler = make()
    Twin(1, 5, sampler=sampler)
    with pytest.raises(LifecycleError, match="give each buffer a sampler of its own"):
        Twin(1, 5, sampler=sampler)


def test_the_ends_of_the_ranges_and_numbers_of_numpy_are_taken() -> None:
    Prioritized(0, 0, eps=np.float64(1e-9), default_error=0, eta=1)
    Prioritized(np.float32(0.5), (0, np.float64(1.5), np.int64(1)), eta=0)
    assert Recent(1, 1).eta == Recent(np.float64(1.0), np.int32(1)).eta == 1


@pytest.mark.parametrize("make", [*SAMPLERS.values(), lambda: Prioritized(beta=(0.4, 1.0, 100), default_error=0.5)])
def test_a_sampler_prints_as_the_call_that_makes_it_again(make: Callable[[], Any]) -> None:
    text = repr(make())
    assert repr(eval(text)) == text


def test_only_priorities_can_be_updated() -> None:
    for make in (Uniform, WithoutReplacement, Fresh, lambda: Recent(0.9, 2)):
        twin = Twin(1, 6, sampler=make()).play(".", ".")
        assert not twin.buffer.has_priorities
        with pytest.raises(LifecycleError, match=r"has no priorities; create the buffer with sampler=Prioritized\(\)"):
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
    internals.progress(other.buffer).draws = internals.progress(one.buffer).draws
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
    "fresh": [71, 150, 91, 74, 156, 94],
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
    before = internals.ring(twin.buffer).store.target.tobytes()
    for leaf in batch_leaves(batch).values():
        leaf[...] = 1
    assert internals.ring(twin.buffer).store.target.tobytes() == before
    assert isinstance(twin.buffer, ReplayBuffer)


# check() finds what is wrong.


@pytest.mark.parametrize("make", [Prioritized, lambda: Recent(inner=Prioritized(normalize="buffer"))])
@pytest.mark.parametrize("where", ["a weight", "an error", "a row that cannot be drawn", "a sum"])
def test_check_finds_priorities_that_are_not_those_of_what_can_be_drawn(where: str, make: Callable[[], Any]) -> None:
    twin = Twin(2, 6, sampler=make()).play("..", ".T", "..", "U.", "..")
    twin.buffer.sample(3)
    twin.buffer.check()
    sampler, ring = internals.prioritized(twin.buffer), internals.ring(twin.buffer)
    places = ring.anchors()
    if where == "a weight":
        internals.tree(sampler).set(places[:1], 0.0)
    elif where == "an error":
        internals.errors(sampler)[places[-1]] = 7.0
    elif where == "a row that cannot be drawn":
        internals.tree(sampler).set(ring.live_places(0)[-1:], 1.0)
    else:
        internals.nodes(internals.tree(sampler))[-1] += 1.0
    with pytest.raises(InvariantError):
        twin.buffer.check()


@pytest.mark.parametrize("weigh", ["windows", "steps", "episodes"])
def test_check_finds_sequences_that_are_weighed_wrongly(weigh: Any) -> None:
    twin = Twin(2, 9, view=Sequence(2, weigh=weigh)).play(*[".."] * 5, ".T", "..", "..")
    twin.buffer.check()
    windows = internals.windows(twin.buffer.sampler)
    internals.tree(windows).set(internals.ring(twin.buffer).anchors()[-1:], 5.0)
    with pytest.raises(InvariantError, match="sampler: place"):
        twin.buffer.check()


def test_check_finds_an_epoch_of_what_there_never_was() -> None:
    twin = Twin(1, 9, sampler=WithoutReplacement()).play(*["."] * 6)
    twin.buffer.sample(2)
    twin.buffer.check()
    twin.buffer.sampler._rest = np.array([0, 99])
    with pytest.raises(InvariantError, match="index 99"):
        twin.buffer.check()
