"""Writing a rollout: step by step, in place, the bootstrap row, clearing, and steps that are refused."""

from __future__ import annotations

import cProfile
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relive import GAE, RolloutBuffer, errors
from support import internals
from support.interrupts import broken_off
from support.rollouts import NAN, SCHEMA, Step, filled, holds, play, same_data, step, write_rows
from support.twins import UNEVEN, uneven


def test_rows_written_in_place_read_like_added_ones() -> None:
    steps = play(6, masked=True)
    rollout = RolloutBuffer(SCHEMA, 6, 2)
    rollout.add(steps[0])
    views = rollout.reserve(3)
    assert views["reward"].shape == (3, 2)
    write_rows(views, steps[1:4])
    assert holds(rollout, steps[:1])
    rollout.commit()
    assert holds(rollout, steps[:4])
    rollout.add(steps[4])
    write_rows(rollout.reserve(), steps[5:])
    rollout.commit(1)
    assert holds(rollout, steps)
    assert same_data(rollout.flat(), filled(steps).flat())


def test_reserved_rows_are_the_storage_itself() -> None:
    rollout = RolloutBuffer(SCHEMA, 4, 2)
    rollout.add(step(0))
    views = rollout.reserve(2)
    for name in SCHEMA.names:
        assert views[name].data_ptr() == rollout.block[name][1].data_ptr()


def test_reserved_rows_are_real_and_without_final_value_unless_written() -> None:
    rollout = filled([step(0, mask=[False, False], final_value=[1.0, 2.0])], num_steps=2)
    rollout.clear()
    views = rollout.reserve()
    assert views["mask"].all()
    assert views["final_value"].isnan().all()


def test_reserving_by_default_takes_all_rows_that_are_left() -> None:
    rollout = filled([step(0)], num_steps=4)
    assert rollout.reserve()["reward"].shape == (3, 2)
    for count in (0, -1, 4):
        with pytest.raises(errors.FullError, match=rf"reserve\({count}\): 3 rows are left.*reserve 1 to 3"):
            rollout.reserve(count)
    assert rollout.steps == 1


def test_rows_that_are_not_committed_are_given_back() -> None:
    rollout = RolloutBuffer(SCHEMA, 4, 2)
    write_rows(rollout.reserve(3), [step(0), step(55), step(66)])
    rollout.commit(1)
    assert holds(rollout, [step(0)])
    with pytest.raises(errors.LifecycleError):
        rollout.commit(1)
    rollout.add(step(1))
    assert holds(rollout, [step(0), step(1)])


@pytest.mark.parametrize("count", [0, -1, 3])
def test_more_rows_than_reserved_cannot_be_committed(count: int) -> None:
    rollout = RolloutBuffer(SCHEMA, 4, 2)
    write_rows(rollout.reserve(2), [step(0), step(1)])
    with pytest.raises(errors.LifecycleError, match=rf"commit\({count}\).* 2 rows"):
        rollout.commit(count)
    assert rollout.steps == 0
    rollout.commit(2)
    assert holds(rollout, [step(0), step(1)])


def test_nothing_can_be_committed_without_a_reservation() -> None:
    rollout = RolloutBuffer(SCHEMA, 4, 2)
    forget: list[Callable[[], Any]] = [lambda: None, lambda: rollout.add(step(0)), rollout.clear]
    for undo in forget:
        if undo is not forget[0]:
            rollout.reserve(1)
        undo()
        before = rollout.steps
        with pytest.raises(errors.LifecycleError, match=r"commit.* 0 rows"):
            rollout.commit()
        assert rollout.steps == before


def test_a_commit_with_last_says_that_the_bootstrap_row_is_written() -> None:
    steps = play(3)
    rollout, expected = RolloutBuffer(SCHEMA, 3, 2), filled(steps).finish(GAE(), last_value=[0.5, -0.5])
    write_rows(rollout.reserve(), steps)
    rollout.block["value"][3] = torch.tensor([0.5, -0.5])
    rollout.commit(last=True)
    rollout.finish(GAE())
    assert torch.equal(rollout["advantage"], expected["advantage"])
    rollout.clear()
    write_rows(rollout.reserve(), [step(t) for t in range(3)])
    rollout.commit()
    with pytest.raises(errors.UnfinishedError):
        rollout.finish(GAE())


@pytest.mark.parametrize("how", ["commit less", "add instead", "clear"])
def test_the_mask_and_final_value_of_rows_given_back_are_forgotten(how: str) -> None:
    rollout = RolloutBuffer(SCHEMA, 3, 2)
    views = rollout.reserve(2)
    write_rows(views, [step(0), step(1, mask=[False, False], final_value=[7.0, 7.0])])
    if how == "commit less":
        rollout.commit(1)
        steps = [step(0), step(1, truncated=[True, True]), step(2, mask=[False, True], final_value=[1.0, NAN])]
    else:
        views["mask"][0] = False
        views["final_value"][0] = 7
        if how == "clear":
            rollout.clear()
        steps = [step(0, truncated=[True, True]), step(1, mask=[False, True], final_value=[1.0, NAN])]
    for each in steps[rollout.steps :]:
        rollout.add(each)
    assert holds(rollout, steps)
    with pytest.raises(errors.FieldError, match="final_value"):
        rollout.finish(GAE(), last_value=[0, 0], partial=True)


def test_not_finite_rewards_are_found_at_the_commit_in_debug_mode_and_may_be_mended() -> None:
    rollout = RolloutBuffer(SCHEMA, 4, 2, debug=True)
    rollout.add(step(0))
    views = rollout.reserve(2)
    write_rows(views, [step(1), step(2, reward=[0, math.inf])])
    with pytest.raises(errors.NotFiniteError, match="step 2 of env 1 is inf"):
        rollout.commit()
    assert holds(rollout, [step(0)])
    write_rows(views, [step(1), step(2)])
    rollout.commit()
    assert holds(rollout, [step(0), step(1), step(2)])


# The bootstrap row


@pytest.mark.parametrize("count", [1, 3])
def test_the_bootstrap_row_follows_the_newest_step_and_is_overwritten_by_the_next(count: int) -> None:
    rollout = filled([step(t) for t in range(count)], num_steps=4)
    rollout.set_last(obs=[[5, 5], [6, 6]], value=torch.tensor([7.0, 8.0]))
    assert rollout.last["obs"].tolist() == rollout.block["obs"][count].tolist() == [[5, 5], [6, 6]]
    assert rollout.block["value"][count].tolist() == [7, 8]
    assert holds(rollout, [step(t) for t in range(count)])
    rollout.add(step(count))
    assert holds(rollout, [step(t) for t in range(count + 1)])


def test_a_value_belongs_to_the_step_it_was_set_after() -> None:
    rollout = filled([step(0)], num_steps=2)
    rollout.set_last(value=[1, 1])
    rollout.add(step(1))
    with pytest.raises(errors.UnfinishedError, match="bootstrap"):
        rollout.finish(GAE())


def test_an_observation_alone_is_no_bootstrap_value() -> None:
    rollout = filled([step(0)])
    rollout.set_last(obs=[[5, 5], [6, 6]])
    with pytest.raises(errors.UnfinishedError, match=r"env 0 goes on.*last_value"):
        rollout.finish(GAE())


@pytest.mark.parametrize("fields", [{"mask": [False, False]}, {"final_value": [9.0, 9.0]}], ids=str)
def test_the_bookkeeping_of_the_bootstrap_row_is_not_taken_for_that_of_the_next_step(fields: Any) -> None:
    rollout = filled([step(0)], num_steps=4)
    with pytest.raises(errors.FieldError):
        rollout.set_last(**fields)
    steps = [step(0), step(1), step(2, mask=[True, False], final_value=[NAN, 1.0])]
    for each in steps[1:]:
        rollout.add(each)
    assert holds(rollout, steps)


def test_next_observations_are_refused_with_the_place_where_they_are() -> None:
    with pytest.raises(errors.FieldError, match="leave it out: the next observation is in the next row"):
        filled([step(0)]).add(step(1) | {"next_obs": np.ones((2, 2))})


def test_a_field_of_the_bootstrap_row_that_does_not_exist_is_refused_before_any_is_written() -> None:
    rollout = filled([step(0)])
    with pytest.raises(errors.FieldError, match="did you mean 'value'"):
        rollout.set_last(obs=np.ones((2, 2)), valeu=[1, 1])
    assert rollout.last["obs"].count_nonzero() == 0


# Clearing


def test_nothing_of_the_last_rollout_can_be_read_after_clear() -> None:
    rollout = filled(play(4, masked=True)).finish(GAE(), last_value=[1, 2])
    rollout.clear()
    assert (rollout.steps, len(rollout), rollout.is_full) == (0, 0, False)
    assert rollout.keys() == (*SCHEMA.names, "mask", "final_value")
    for name in rollout.keys():
        assert len(rollout[name]) == 0
    for call in (lambda: rollout["advantage"], lambda: rollout.flat(("advantage",))):
        with pytest.raises((errors.FieldError, errors.EmptyError)):
            call()
    rollout.add(step(9))
    assert holds(rollout, [step(9)])
    assert len(rollout) == 2
    with pytest.raises(errors.UnfinishedError):
        rollout.finish(GAE(), partial=True)
    with pytest.raises(errors.FieldError, match="advantage"):
        _ = rollout["advantage"]


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("before", [1, 3, 4, 5, 9])
def test_a_cleared_rollout_is_like_a_new_one_with_what_a_step_leaves_out_at_its_default(
    before: int, wrap: bool
) -> None:
    used = RolloutBuffer(SCHEMA, 4, 2, wrap=wrap, seed=1)
    for each in play(before if wrap else min(before, 4), masked=True):
        used.add(each)
    used.clear()
    new = RolloutBuffer(SCHEMA, 4, 2, wrap=wrap, seed=1)
    for each in [step(0), step(1), step(2, truncated=[True, False], mask=[False, True])]:
        used.add(each)
        new.add(each)
        assert same_data(used.data(), new.data())
    used.finish(GAE(), last_value=[1, 2], partial=True)
    new.finish(GAE(), last_value=[1, 2], partial=True)
    assert same_data(used.flat(), new.flat())


@pytest.mark.parametrize("given", [np.zeros((2, 3)), torch.zeros(2), [("obs", 1)], "obs", 5])
@pytest.mark.parametrize("more", [(), (np.zeros(2), [True, False])])
def test_a_step_that_is_not_given_by_name_is_refused_with_the_call_that_does(given: Any, more: Any) -> None:
    rollout: Any = RolloutBuffer(SCHEMA, 2, 2)
    for arguments in ((given, *more), (None, given)):
        with pytest.raises(errors.FieldError, match=r"names of its fields.*add\(obs=\.\.\., action="):
            rollout.add(*arguments)
    assert rollout.steps == 0


@pytest.mark.parametrize("kind", UNEVEN)
def test_what_has_no_one_shape_is_refused_by_the_name_of_its_field(kind: str) -> None:
    rollout = filled([step(0), step(1)], num_steps=3)
    before = rollout.block.clone()
    for name, shape in (("obs", (2, 2)), ("value", (2,))):
        given, message = uneven(kind, shape)
        with pytest.raises(errors.SchemaError, match=rf"'{name}.*{message}"):
            rollout.add({**step(2), name: given})
        with pytest.raises(errors.SchemaError, match=rf"'{name}.*{message}"):
            rollout.set_last(**{name: given})
        with pytest.raises(errors.SchemaError, match="'extra'"):
            rollout["extra"] = given
    if "ragged" in kind:
        with pytest.raises(errors.SchemaError, match="final_value"):
            rollout.set_final_value([0], [0], uneven(kind, (2,))[0])
    assert same_data(rollout.block, before)


def widened(at: int) -> tuple[RolloutBuffer, bool]:
    """A rollout whose ``add_fields`` was broken off at event ``at``, and whether it had so many."""
    rollout = filled(play(2), num_steps=6)
    rollout["more"] = np.ones((2, 2), np.float32)
    rollout.add(step(2))  # "more" is gone, but not its memory
    return rollout, broken_off(lambda: rollout.add_fields(more=()), at)


def test_fields_whose_addition_is_interrupted_are_there_or_not() -> None:
    end = next(at for at in itertools.count(0, 25) if not widened(at)[1])
    for at in (*range(0, end, 25), *range(end - 40, end)):
        rollout, _ = widened(at)
        given = {"more": np.full(2, 5, np.float32)} if "more" in rollout.schema else {}
        for k, apart in enumerate(({}, {"mask": np.array([True, False])})):
            rollout.add({**step(3 + k), **given}, **apart)
        assert rollout["mask"].tolist() == [[True, True]] * 4 + [[True, False]]
        assert rollout["reward"][3:].tolist() == [step(3 + k)["reward"].tolist() for k in range(2)]
        assert not given or rollout["more"].tolist() == [[0, 0]] * 3 + [[5, 5]] * 2


ADDED: dict[str, Any] = {"mask": lambda envs: np.arange(envs) % 2 > 0, "final_value": lambda envs: np.full(envs, 7.0)}
ASKED = [(), ("mask",), ("final_value",), ("mask", "final_value")]


def given(rng: np.random.Generator, t: int, names: tuple[str, ...]) -> Step:
    """A step with some of the fields that the buffer adds, as arrays, tensors and float64 arrays."""
    whole = step(t, truncated=rng.random(2) < 0.5) | {
        name: rng.random(2) < 0.5 if name == "mask" else rng.normal(size=2).astype(np.float32) for name in names
    }
    for name in [*whole]:
        how = rng.integers(6)
        if how == 0:
            whole[name] = torch.from_numpy(whole[name])
        elif how == 1 and whole[name].dtype == np.float32:
            whole[name] = whole[name].astype(np.float64)
    return whole


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("names", ASKED)
@pytest.mark.parametrize("envs", [2, 4096])  # the steps of 4,096 are copied without the GIL
def test_adding_a_step_takes_at_most_twelve_calls(envs: int, names: tuple[str, ...], debug: bool) -> None:
    rollout = RolloutBuffer(SCHEMA, 4, envs, debug=debug)
    values = step(0, envs) | {name: ADDED[name](envs) for name in names}
    rollout.add(values)
    rollout.add(values)
    profile = cProfile.Profile()
    profile.enable()
    rollout.add(values)
    profile.disable()
    written = [entry for entry in profile.getstats() if not isinstance(entry.code, str)]
    assert sum(entry.callcount for entry in written) <= (12 if debug else 8)
    assert holds(rollout, [values] * 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wrap", [False, True])
def test_what_is_added_in_one_call_is_what_the_long_way_stores(wrap: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    quick, slow = (RolloutBuffer(SCHEMA, 6, 2, wrap=wrap) for _ in range(2))
    for t in range(60):
        if quick.steps == 6 and (not wrap or rng.random() < 0.2):
            if rng.random() < 0.5:
                for rollout in (quick, slow):
                    rollout.set_final_value([0, 5], [0, 1], [8.0, 9.0])
                    rollout.set_last(value=[1.0, 2.0])
                    rollout["advantage"] = np.ones((6, 2), np.float32)
            quick.clear()
            slow.clear()
        if rng.random() < 0.1:
            quick.reserve(1)  # and not committed
        values = given(rng, t, ASKED[rng.integers(4)])
        slow.add({name: value.tolist() for name, value in values.items()})
        quick.add(values)
        for name in (*SCHEMA.names, "mask", "final_value"):
            assert quick[name].numpy().tobytes() == slow[name].numpy().tobytes(), name
    again = pickle.loads(pickle.dumps(quick))
    if not again.is_full:
        again.add(step(60, mask=np.array([False, True])))
        assert again["mask"][-1].tolist() == [False, True]


def test_what_was_written_to_a_row_that_was_given_back_does_not_stay_there() -> None:
    rollout = filled([step(0)] * 2, 6)
    views = rollout.reserve(3)
    views["mask"][:], views["final_value"][:] = False, 7
    for t in range(2, 5):
        rollout.add(step(t))
    assert holds(rollout, [step(0), step(0), *map(step, range(2, 5))])


@pytest.mark.parametrize("names", ASKED)
def test_what_does_not_fit_is_refused_as_by_the_long_way(names: tuple[str, ...]) -> None:
    values = step(0) | {name: ADDED[name](2) for name in names}
    rollout = filled([values] * 2, 4)
    wrong: list[dict[str, Any]] = [
        values | {"mask": np.ones(2, np.int64)},
        values | {"mask": np.ones(3, bool)},
        values | {"final_value": np.full(2, 1e300)},
        values | {"final_value": np.zeros((2, 1), np.float32)},
        values | {"other": np.zeros(2)},
        {name: value for name, value in values.items() if name != "value"},
        {name: value for name, value in values.items() if name != "value"} | {"other": np.zeros(2)},
        values | {"obs": torch.zeros(2, 2).to_sparse()},
    ]
    for each in wrong:
        with pytest.raises(errors.ReliveError) as long_way:
            internals.add_checked(filled([values], 4))(dict(each))
        with pytest.raises(errors.ReliveError) as found:
            rollout.add(each)
        assert (type(found.value), str(found.value)) == (type(long_way.value), str(long_way.value))
        assert holds(rollout, [values] * 2)
    rollout.add(values)
    assert holds(rollout, [values] * 3)


@pytest.mark.parametrize("names", ASKED)
def test_rewards_that_are_not_finite_are_refused_in_debug_mode_and_leave_no_trace(names: tuple[str, ...]) -> None:
    values = step(0) | {name: ADDED[name](2) for name in names}
    rollout = filled([values] * 2, 4, debug=True)
    for value in (np.inf, np.nan):
        reward = np.array([0, value], np.float32)
        for given_reward in (reward, reward.astype(np.float64), torch.from_numpy(reward)):
            with pytest.raises(errors.NotFiniteError, match=f"step 2 of env 1 is {value}; fix the env"):
                rollout.add(values | {"reward": given_reward})
    assert holds(rollout, [values] * 2)
    rollout.add(step(0))
    assert holds(rollout, [values, values, step(0)])


@pytest.mark.parametrize("added", [2, 3, 5])
def test_a_step_over_the_bootstrap_row_or_an_old_one_that_is_broken_off_leaves_no_bootstrap_row(
    monkeypatch: pytest.MonkeyPatch, added: int
) -> None:
    rollout = RolloutBuffer(SCHEMA, 3, 2, wrap=True)
    for t in range(added):
        rollout.add(step(t))
    rollout.set_last(value=torch.full((2,), 99.0))

    def broken(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(internals.columns(rollout).copier, "take", broken)
    with pytest.raises(KeyboardInterrupt):
        rollout.add(step(5))
    monkeypatch.undo()
    assert rollout.steps == 2
    with pytest.raises(errors.UnfinishedError, match="last_value"):
        rollout.finish(GAE(), partial=True)
