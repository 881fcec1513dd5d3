"""Mixtures: every buffer has its share of every batch, to the row, and gets back what is learned of its rows."""

from __future__ import annotations

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relive
from relive import (
    FrameStack,
    Hindsight,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    Sequence,
    SequenceBatch,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive.errors import EmptyError, FieldError, NotFiniteError, ParameterError, SchemaError, ShapeError
from support import internals
from support.cases import covering
from support.twins import SAMPLERS, SEQUENCES, VIEWS, Twin, contents, same_batches


def twin(steps: int, sampler: Any = None, num_envs: int = 2, **options: Any) -> Twin:
    """A buffer with this many steps of each env."""
    made = Twin(num_envs, 40, sampler=sampler, view=NStep(2, 0.5), **options)
    for t in range(steps):
        made.add("".join("T" if (t + env) % 7 == 6 else "." for env in range(num_envs)))
    return made


def mixed(
    shares: dict[str, float], samplers: dict[str, Any] | None = None, **options: Any
) -> tuple[Mixture, list[Twin]]:
    """A mixture of as many buffers as there are shares, each of another size."""
    twins = [twin(10 + 5 * i, (samplers or {}).get(name), seed=i, **options) for i, name in enumerate(shares)]
    return Mixture({name: t.buffer for name, t in zip(shares, twins, strict=True)}, shares), twins


def rows_of(batch: Any, source: int) -> Any:
    """The rows of one buffer, without the number of the buffer."""
    rows = batch.rows(batch["source"] == source)
    del rows["source"]
    return rows


def check(mixture: Mixture, twins: list[Twin], batch: Any, size: int) -> list[int]:
    """Every row is one of its source's transitions; returns how many rows each source has."""
    assert len(batch) == size
    assert batch["source"].dtype is torch.int64
    source = batch["source"]
    assert source.tolist() == sorted(source.tolist())  # one buffer after another
    for i, one in enumerate(twins):
        one.check_batch(rows_of(batch, i))
    return [int((source == i).sum()) for i in range(len(twins))]


@pytest.mark.parametrize(
    ("shares", "size", "rows"),
    [
        ({"offline": 0.5, "online": 0.5}, 256, [128, 128]),
        ({"offline": 1, "online": 3}, 8, [2, 6]),
        ({"a": 0.25, "b": 0.25, "c": 0.5}, 8, [2, 2, 4]),
        ({"a": 1.0}, 5, [5]),
        ({"a": 0.0, "b": 2.0}, 5, [0, 5]),
        ({"a": 3.0, "b": 0.0}, 5, [5, 0]),
        ({"a": 1, "b": 1, "c": 1}, 99, [33, 33, 33]),
        ({"a": 0.1, "b": 0.9}, 10, [1, 9]),
    ],
)
def test_shares_are_exact_where_they_come_to_whole_rows(shares: dict[str, float], size: int, rows: list[int]) -> None:
    mixture, twins = mixed(shares)
    for _ in range(3):
        assert check(mixture, twins, mixture.sample(size), size) == rows
    assert sum(mixture.shares.values()) == pytest.approx(1)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    st.integers(1, 60),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_every_batch_is_full_and_no_share_is_off_by_a_row_or_more(weights: list[int], size: int) -> None:
    shares = {str(i): float(weight) for i, weight in enumerate(weights)}
    mixture, twins = mixed(shares)
    rows = check(mixture, twins, mixture.sample(size), size)
    assert sum(rows) == size
    for share, count in zip(mixture.shares.values(), rows, strict=True):
        assert abs(count - share * size) <= 1
        assert share > 0 or count == 0


def test_a_mixture_of_one_hands_out_the_buffers_own_batches() -> None:
    mixture, _ = mixed({"a": 1.0})
    alone = twin(10, seed=0)
    for _ in range(3):
        assert same_batches(rows_of(mixture.sample(7), 0), alone.buffer.sample(7))


def test_the_repr_of_a_mixture_is_the_call_that_makes_it() -> None:
    mixture, _ = mixed({"a": 1.0, "b": 3.0})
    again = eval(repr(mixture), {**vars(relive), "torch": torch})
    assert again.shares == mixture.shares == {"a": 0.25, "b": 0.75}
    assert repr(again) == repr(mixture)


def test_each_buffer_draws_as_it_would_alone_with_its_own_sampler_and_view() -> None:
    samplers = {"a": Prioritized(alpha=1.0), "b": WithoutReplacement(), "c": Recent(0.5, 3)}
    mixture, twins = mixed({"a": 1, "b": 1, "c": 2}, samplers)
    again = {"a": Prioritized(alpha=1.0), "b": WithoutReplacement(), "c": Recent(0.5, 3)}
    alone = mixed({"a": 1, "b": 1, "c": 2}, again)[1]
    for _ in range(3):
        parts = [list(one.buffer.batches(4, rows)) for one, rows in zip(alone, (3, 3, 6), strict=True)]
        for k, batch in enumerate(mixture.batches(4, 12)):
            for i, part in enumerate(parts):
                mine = rows_of(batch, i)
                assert same_batches(mine, {name: part[k][name] for name in mine})
        assert len(mixture) == sum(len(one.buffer) for one in twins)
        for one in (*twins, *alone):
            one.add("..")


def test_a_round_of_updates_narrows_the_window_of_every_buffer() -> None:
    mixture, twins = mixed({"a": 1, "b": 1}, {"a": Recent(0.9, 1), "b": Recent(0.99, 1)})
    batches = list(mixture.batches(5, 400))
    for i, one in enumerate(twins):
        anchors = [one.truth.index(row) for row in one.anchors()]
        for k, batch in enumerate(batches, start=1):
            size = one.buffer.sampler.window(k, 5)
            drawn = set(batch["index"][batch["source"] == i].tolist())
            assert drawn <= set(anchors[-size:])
    assert len(set(batches[-1]["index"][batches[-1]["source"] == 1].tolist())) <= twins[1].buffer.sampler.window(5, 5)


def test_fields_that_not_all_buffers_have_are_left_out() -> None:
    both = mixed({"a": 1, "b": 1}, {"a": Prioritized(), "b": Recent(0.9, 5, inner=Prioritized())})[0].sample(6)
    assert {"weight", "probability"} <= set(both.keys())
    one = mixed({"a": 1, "b": 1}, {"a": Prioritized(), "b": Uniform()})[0].sample(6)
    assert not {"weight", "probability"} & set(one.keys())


@pytest.mark.parametrize(
    ("view", "shares"),
    covering(
        [*VIEWS, *SEQUENCES],
        [{"a": 1, "b": 3}, {"a": 3, "b": 1}, {"a": 1, "b": 0}, {"a": 0, "b": 1}],
        full=2,
        quick=1,
    ),
)
def test_the_fields_of_a_batch_follow_from_the_buffers_and_not_from_its_size(shares: Any, view: str) -> None:
    make = {**VIEWS, **SEQUENCES}[view]
    cases = [(Prioritized, Uniform), (Prioritized, lambda: Recent(0.9, 5, inner=Prioritized())), (Uniform, Uniform)]
    for samplers in cases:
        twins = [Twin(1, 40, sampler=sampler(), view=make()) for sampler in samplers]
        for one in twins:
            one.play(*"..T....U.........T")
        mixture = Mixture({"a": twins[0].buffer, "b": twins[1].buffer}, shares)
        want = set.intersection(*(set(one.buffer.sample(3).keys()) for one in twins)) | {"source"}
        assert want & {"weight"} == ({"weight"} if samplers[1] is not Uniform else set())
        for size in (1, 2, 5):
            assert set(mixture.sample(size).keys()) == want, size


@pytest.mark.parametrize("options", [{"ordered": False}, {"dress": "mixed"}])
def test_a_buffer_knows_the_fields_of_its_batches_before_it_has_any(options: dict[str, Any]) -> None:
    for make in SAMPLERS.values():
        one = Twin(2, 9, sampler=make(), view=NStep(1, 0.5), **options)
        before = one.buffer.batch_fields
        assert one.buffer.stats()["batches"] == 0
        one.play("..", "TU", "..")
        assert set(before) == set(one.buffer.batch_fields) == set(one.buffer.sample(2).keys())
        assert len(before) == len(set(before))


def test_a_buffer_with_hindsight_knows_the_fields_of_its_batches_as_well() -> None:
    view = Hindsight(lambda achieved, desired: (achieved - desired)[:, 0], gamma=0.5)
    one = Twin(1, 9, dress="goals", view=view)
    assert "relabelled" in one.buffer.batch_fields
    assert set(one.buffer.batch_fields) == set(one.play(*"...").buffer.sample(2).keys())


@pytest.mark.parametrize("dress", ["dict", "mixed", "image"])
def test_nested_and_large_observations_are_mixed_as_well(dress: str) -> None:
    mixture, twins = mixed({"a": 1, "b": 2}, dress=dress)
    assert check(mixture, twins, mixture.sample(9), 9) == [3, 6]


def test_priorities_go_back_to_the_buffers_that_the_rows_came_from() -> None:
    samplers = {"a": Prioritized(alpha=1.0), "b": Uniform(), "c": Recent(0.5, 3, inner=Prioritized(alpha=1.0))}
    mixture, twins = mixed({"a": 1, "b": 1, "c": 1}, samplers)
    batch = mixture.sample(15)
    errors = 10.0 + torch.arange(15)
    for wrap in (lambda x: x, lambda x: x.numpy(), lambda x: x.to(torch.bfloat16), lambda x: x.requires_grad_()):
        assert mixture.update_priorities(batch, wrap(errors.clone())) == 0
        for i in (0, 2):
            rows = batch["source"] == i
            want = dict(zip(batch["index"][rows].tolist(), errors[rows].tolist(), strict=True))
            ring = internals.ring(twins[i].buffer)
            places, unknown = ring.find(np.array(list(want), np.int64))
            assert unknown == -1
            inner = getattr(twins[i].buffer.sampler, "inner", twins[i].buffer.sampler)
            assert inner.state_dict()["errors"][places].tolist() == list(want.values())


def test_priorities_that_come_too_late_are_counted_over_all_buffers() -> None:
    mixture, twins = mixed({"a": 1, "b": 1}, {"a": Prioritized(), "b": Prioritized()})
    batch = mixture.sample(10)
    for _ in range(60):
        twins[1].add("..")
    assert mixture.update_priorities(batch, np.ones(10)) == 5
    assert [one.buffer.stats()["late_updates"] for one in twins] == [0.0, 5.0]


@pytest.mark.parametrize("time_first", [True, False])
@pytest.mark.parametrize("padding", [4.0, math.nan])
def test_errors_of_sequences_go_back_with_their_masks(time_first: bool, padding: float) -> None:
    twins = [Twin(1, 30, sampler=Prioritized(eta=0.5), view=Sequence(2, time_first=time_first)) for _ in range(2)]
    for one in twins:
        one.play(*"..........")
    mixture = Mixture({"a": twins[0].buffer, "b": twins[1].buffer}, {"a": 1, "b": 1})
    batch = mixture.sample(4)
    assert isinstance(batch, SequenceBatch)
    errors, mask = np.array([[2.0, 4.0], [2.0, padding]] * 2), np.array([[True, True], [True, False]] * 2)
    given_ = (errors.T, mask.T) if time_first else (errors, mask)
    assert mixture.update_priorities(batch, given_[0], torch.as_tensor(given_[1])) == 0
    want = {i: 3.5 if mask[row, 1] else 2.0 for row, i in enumerate(batch["index"].tolist()) if row < 2}
    places, _ = internals.ring(twins[0].buffer).find(np.array(list(want), np.int64))
    assert twins[0].buffer.sampler.state_dict()["errors"][places].tolist() == list(want.values())
    before = [contents(one.buffer) for one in twins]
    if padding != padding:
        with pytest.raises(NotFiniteError, match="td_error: entry 1 is"):
            mixture.update_priorities(batch, given_[0], torch.ones(4, 2, dtype=torch.bool).view(given_[0].shape))
    assert [contents(one.buffer) for one in twins] == before


@pytest.mark.parametrize(
    ("errors", "error", "message"),
    [
        (np.ones(3), ShapeError, "expected 4 errors"),
        (np.ones(5), ShapeError, "expected 4 errors"),
        (np.float64(1.0), ShapeError, "expected 4 errors"),
        (np.array([1.0, 2.0, 3.0, math.nan]), NotFiniteError, "td_error: entry 3 is nan"),
        (np.array([1.0, 2.0, 3.0, -math.inf]), NotFiniteError, "td_error: entry 3 is -inf"),
        (np.array([1.0, 2.0, 3.0, 1e300]), NotFiniteError, "td_error: entry 3 is 1e"),
    ],
)
def test_errors_that_do_not_fit_are_refused_before_any_buffer_is_changed(
    errors: Any, error: type[Exception], message: str
) -> None:
    mixture, twins = mixed({"a": 1, "b": 1}, {"a": Prioritized(), "b": Prioritized()})
    batch = mixture.sample(4)
    before = [contents(one.buffer) for one in twins]
    with pytest.raises(error, match=message):
        mixture.update_priorities(batch, errors)
    assert [contents(one.buffer) for one in twins] == before


@pytest.mark.filterwarnings("error")
def test_the_index_alone_is_refused_since_it_does_not_say_which_buffer_a_row_is_of() -> None:
    mixture, _ = mixed({"a": 1, "b": 1}, {"a": Prioritized(), "b": Prioritized()})
    with pytest.raises(FieldError, match="expected a batch with 'source' and 'index', got a Tensor; pass it whole"):
        mixture.update_priorities(mixture.sample(4)["index"], np.ones(4))


@pytest.mark.parametrize("size", [0, -3, 2.5, "4", None])
def test_batches_of_no_rows_are_refused_at_the_call(size: Any) -> None:
    mixture, twins = mixed({"a": 1, "b": 1})
    before = [contents(one.buffer) for one in twins]
    with pytest.raises(ParameterError, match="at least 1"):
        mixture.sample(size)
    for sizes in ((size, 4), (4, size)):
        with pytest.raises(ParameterError, match="at least 1"):
            mixture.batches(*sizes)
    assert [contents(one.buffer) for one in twins] == before


def test_an_empty_buffer_with_rows_in_the_batch_is_told_and_one_without_is_not_missed() -> None:
    full, empty = twin(9), twin(0)
    mixture = Mixture({"full": full.buffer, "empty": empty.buffer}, {"full": 3, "empty": 1})
    with pytest.raises(EmptyError):
        mixture.sample(8)
    with pytest.raises(EmptyError):
        mixture.batches(3, 8)  # at the call, not at the first batch
    assert len(Mixture({"full": full.buffer, "empty": empty.buffer}, {"full": 1, "empty": 0}).sample(8)) == 8


@pytest.mark.parametrize(
    "shares",
    [{}, {"a": 1.0}, {"a": 1.0, "c": 1.0}, {"a": 1.0, "b": -0.5}, {"a": 0.0, "b": 0.0}, {"a": 1, "b": 1, "c": 1}],
)
def test_shares_that_do_not_fit_the_buffers_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ParameterError, match="Mixture: expected"):
        Mixture({"a": twin(2).buffer, "b": twin(2).buffer}, shares)


@pytest.mark.parametrize("share", [math.nan, math.inf])
def test_shares_that_are_no_numbers_are_refused(share: float) -> None:
    with pytest.raises(ParameterError, match="Mixture: expected"):
        Mixture({"a": twin(2).buffer, "b": twin(2).buffer}, {"a": 1.0, "b": share})


def test_buffers_of_different_schemas_cannot_be_mixed_and_none_cannot_either() -> None:
    with pytest.raises(SchemaError, match="one schema"):
        Mixture({"a": twin(2).buffer, "b": twin(2, dress="mixed").buffer}, {"a": 1, "b": 1})
    with pytest.raises(ParameterError, match="Mixture"):
        Mixture({}, {})


def test_the_field_that_differs_between_the_schemas_is_named() -> None:
    flag = relive.Field((), torch.bool)
    step: dict[str, Any] = {"obs": {"a": (3,)}, "action": (2,), "reward": (), "terminated": flag, "truncated": flag}

    def refused(other: dict[str, Any]) -> str:
        schemas = {"data": step, "same": step, "new": step | other}
        buffers = {name: relive.ReplayBuffer(relive.Schema(fields), 10) for name, fields in schemas.items()}
        with pytest.raises(SchemaError) as error:
            Mixture(buffers, dict.fromkeys(buffers, 1))
        return str(error.value)

    wide = refused({"action": relive.Field((2,), torch.float64)})
    assert "action as Field((2,), torch.float32) in 'data' and as Field((2,), torch.float64) in 'new'" in wide
    assert "as_float32()" in wide
    assert "cost as no field in 'data' and as Field((), torch.float32) in 'new'" in refused({"cost": ()})
    assert "obs.a as Field((3,), torch.float32) in 'data' and as no field" in refused({"obs": {"b": (3,)}})


def test_buffers_may_have_other_envs_sizes_and_order() -> None:
    online = Twin(3, 9, view=Transition(0.5)).play("...", "..T", "...")
    offline = Twin(1, 50, ordered=False, view=Transition(0.5)).play(".", "T", "U")
    mixture = Mixture({"online": online.buffer, "offline": offline.buffer}, {"online": 1, "offline": 1})
    batch = mixture.sample(10)
    assert check(mixture, [online, offline], batch, 10) == [5, 5]
    stacked = Twin(1, 9, view=FrameStack(2, NStep(1, 0.5))).play(".", ".", ".")
    both = Mixture({"a": stacked.buffer, "b": stacked.buffer}, {"a": 1, "b": 1}).sample(4)
    assert both["obs"].shape == (4, 2, 4)


def test_a_mixture_is_a_function_of_the_seeds_of_its_buffers() -> None:
    one, other = (mixed({"a": 1, "b": 2}, {"a": Prioritized(), "b": Uniform()})[0] for _ in range(2))
    for _ in range(4):
        assert same_batches(one.sample(9), other.sample(9))


def test_a_mixture_goes_on_with_the_shares_of_its_state() -> None:
    mixture, _ = mixed({"a": 1.0, "b": 3.0})
    state = mixture.state_dict()
    other, _ = mixed({"b": 1.0, "a": 1.0})
    other.load_state_dict(state)
    assert other.shares == {"b": 0.75, "a": 0.25}
    assert (other.sample(8)["source"] == 0).sum() == 6
    other.shares["a"] = 9.0
    assert state == mixture.state_dict() == {"shares": {"a": 0.25, "b": 0.75}}
    for wrong in ({"a": 1.0}, {"a": 0.0, "b": 0.0}, {"a": -1.0, "b": 2.0}):
        with pytest.raises(ParameterError, match="a share of at least 0 for each"):
            mixture.load_state_dict({"shares": wrong})
        assert mixture.shares == state["shares"]


def sources(mixture: Mixture, sizes: list[int]) -> np.ndarray[Any, Any]:
    """How many rows each buffer has in batches of these sizes, ``[batches, buffers]``."""
    count = len(mixture.buffers)
    return np.array([np.bincount(mixture.sample(size)["source"], minlength=count) for size in sizes])


@pytest.mark.parametrize(
    ("shares", "size"),
    [
        ((0.01, 0.99), 32),
        ((0.1, 0.2, 0.7), 4),
        ((0.5, 0.5), 1),
        ((1, 2**20), 7),
        ((1 / 3, 2 / 3), 1),
        ((1, 0, 6), 3),
        ((2**-40, 0.3), 5),
    ],
)
def test_what_rounding_leaves_over_goes_to_later_batches(shares: tuple[float, ...], size: int) -> None:
    mixture, _ = mixed({str(i): share for i, share in enumerate(shares)})
    drawn = sources(mixture, [size] * 150)
    assert (drawn.sum(1) == size).all()
    so_far, wanted = drawn.cumsum(0), np.arange(1, 151)[:, None] * size * np.array(shares) / sum(shares)
    assert (abs(so_far - wanted) < 1 + 1e-9).all()
    ends, running = so_far.cumsum(1), wanted.cumsum(1)
    assert (ends == np.floor(running + 1e-9)).all()  # to the row: floor(t B S) of the running shares S


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.lists(st.integers(0, 30), min_size=2, max_size=4))
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_shares_hold_over_batches_of_any_sizes(sizes: list[int], weights: list[int]) -> None:
    weights[0] += not any(weights)
    mixture, _ = mixed({str(i): float(weight) for i, weight in enumerate(weights)})
    so_far = sources(mixture, sizes).cumsum(0)
    for rows, total in zip(so_far.cumsum(1).tolist(), np.cumsum(sizes).tolist(), strict=True):
        assert rows == [total * end // sum(weights) for end in np.cumsum(weights).tolist()]


def test_shares_do_not_drift_after_very_many_rows() -> None:
    for shares in ({"a": 0.1, "b": 0.2, "c": 0.7}, {"a": 1 / 7, "b": 6 / 7}, {"a": 0.3, "b": 0.6}):
        mixture, _ = mixed(shares)
        whole = {2: 21, 3: 10}[len(shares)]
        for rows in (0, whole * 10**15):
            mixture.load_state_dict({"shares": mixture.shares, "rows": rows})
            want = [round(share * whole) for share in mixture.shares.values()]
            assert sources(mixture, [whole]).tolist() == [want]


def test_a_mixture_goes_on_after_the_rows_of_its_state() -> None:
    shares = {"a": 0.09, "b": 0.21, "c": 0.7}
    one, _ = mixed(shares)
    want = sources(one, [3] * 40)
    half, _ = mixed(shares)
    sources(half, [3] * 17)
    state = half.state_dict()
    assert state == {"shares": half.shares, "rows": 51}
    other, _ = mixed(shares)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert (sources(other, [3] * 23) == want[17:]).all()
    other.load_state_dict({"shares": shares})  # as earlier releases wrote it
    assert (sources(other, [3] * 40) == want).all()
    for rows in (-1, 2.0, True, "3", None, 2**63):
        with pytest.raises(ParameterError, match="'rows'"):
            other.load_state_dict({"shares": {"a": 1, "b": 1, "c": 1}, "rows": rows})
        assert other.state_dict() == {"shares": half.shares, "rows": 120}


def test_one_round_and_many_calls_divide_their_rows_alike() -> None:
    shares = {"a": 0.03, "b": 0.97}
    one, other = mixed(shares)[0], mixed(shares)[0]
    for batch in one.batches(30, 5):
        assert same_batches(batch, other.sample(5))
    assert (one.shares, one.state_dict()["rows"]) == (shares, 150)


def test_an_empty_buffer_is_named_before_any_row_is_drawn_however_small_its_share() -> None:
    full, empty = twin(9), twin(0)
    mixture = Mixture({"demos": full.buffer, "own": empty.buffer}, {"demos": 0.99, "own": 0.01})
    before = contents(full.buffer)
    for call in (lambda: mixture.sample(4), lambda: mixture.batches(3, 4)):
        with pytest.raises(EmptyError, match="buffer 'own' has nothing to draw: there is no complete transition"):
            call()
    assert contents(full.buffer) == before
    assert mixture.state_dict() == {"shares": {"demos": 0.99, "own": 0.01}}


def test_a_batch_that_fails_does_not_count() -> None:
    mixture, twins = mixed({"a": 1, "b": 2})
    batches = mixture.batches(3, 2)
    next(batches)
    twins[1].buffer.clear()
    with pytest.raises(EmptyError, match="buffer 'b' has nothing to draw"):
        next(batches)
    assert mixture.state_dict()["rows"] == 2


def test_a_copy_of_a_mixture_counts_for_itself() -> None:
    mixture, _ = mixed({"a": 1, "b": 2})
    sources(mixture, [1, 1])
    again = pickle.loads(pickle.dumps(mixture))
    assert (sources(again, [1] * 6) == sources(mixture, [1] * 6)).all()
    assert again.state_dict() == mixture.state_dict()


def test_threads_that_share_a_mixture_count_every_batch_once() -> None:
    mixture, _ = mixed({"a": 0.3, "b": 0.7})
    with ThreadPoolExecutor(4) as threads:
        drawn = sum(threads.map(lambda _: sources(mixture, [1] * 50).sum(0), range(4)))
    assert (mixture.state_dict()["rows"], np.asarray(drawn).tolist()) == (200, [60, 140])
