"""``relive.RolloutBuffer``: filled, finished, read as permutations; against a naive list of steps and the oracle."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict
from torch import Tensor

import oracle
import relive
from relive import GAE, Field, GroupAdvantage, MonteCarlo, RolloutBuffer, Schema, TDLambda, VTrace, errors
from relive.kernels import reference
from twins import UNEVEN, uneven

Step = dict[str, Any]

SCHEMA = Schema(
    {
        "obs": (2,),
        "action": Field((), torch.int64),
        "reward": (),
        "terminated": Field((), torch.bool),
        "truncated": Field((), torch.bool),
        "value": (),
        "log_prob": (),
    }
)
WITHOUT_VALUE = Schema({"reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)})
NAN = float("nan")


def step(t: int, envs: int = 2, **changed: Any) -> Step:
    """Step number ``t``, which every number in it tells, as does the env; no episode ends."""
    env = np.arange(envs)
    fields = {
        "obs": np.stack([np.full(envs, t), env], 1).astype(np.float32),
        "action": 100 * t + env,
        "reward": (t + env / 8).astype(np.float32),
        "terminated": np.zeros(envs, bool),
        "truncated": np.zeros(envs, bool),
        "value": (-t - env / 8).astype(np.float32),
        "log_prob": (t / 4 + env).astype(np.float32),
    }
    return fields | changed


def play(count: int, envs: int = 2, *, seed: int = 0, masked: bool = False) -> list[Step]:
    """Steps with random ends, final values where they are needed, and masks if asked."""
    rng = np.random.default_rng([count, envs, seed])
    steps = []
    for t in range(count):
        terminated, truncated = rng.random(envs) < 0.2, rng.random(envs) < 0.3
        final = np.where(truncated & ~terminated, rng.normal(size=envs), np.nan).astype(np.float32)
        more = {"mask": rng.random(envs) < 0.7} if masked else {}
        steps.append(step(t, envs, terminated=terminated, truncated=truncated, final_value=final, **more))
    return steps


def filled(steps: Iterable[Step], num_steps: int | None = None, **options: Any) -> RolloutBuffer:
    """A rollout that was given these steps, with T for all of them unless ``num_steps`` says otherwise."""
    steps = list(steps)
    rollout = RolloutBuffer(SCHEMA, num_steps or len(steps), len(steps[0]["reward"]), **options)
    for each in steps:
        rollout.add(each)
    return rollout


def stack(steps: list[Step], name: str) -> np.ndarray:
    """The column ``[T, N, ...]`` of these steps."""
    default = {"mask": True, "final_value": NAN}.get(name)
    return np.stack([x[name] if name in x else np.full(len(x["reward"]), default) for x in steps])


def holds(rollout: RolloutBuffer, steps: list[Step]) -> bool:
    """Whether a rollout reads exactly as these steps, in every column."""
    if rollout.steps != len(steps):
        return False
    if not steps:
        return all(len(column) == 0 for column in rollout.data().values())
    names = [*SCHEMA.names, "mask", "final_value"]
    return all(
        np.array_equal(rollout[name], stack(steps, name).astype(rollout[name].numpy().dtype), True) for name in names
    )


def same_data(a: Any, b: Any) -> bool:
    """Whether two tensordicts have equal keys and bits; NaN equals itself."""
    a, b = a.flatten_keys("."), b.flatten_keys(".")
    return set(a.keys()) == set(b.keys()) and all(
        x.dtype == b[name].dtype and np.array_equal(x, b[name], x.is_floating_point()) for name, x in a.items()
    )


def ids(batches: Any) -> list[int]:
    """The actions of batches, which name a step and its env, in the order they came."""
    batches = batches if isinstance(batches, list) else [batches]
    return [int(action) for batch in batches for action in batch["action"]]


def all_ids(count: int, envs: int = 2) -> list[int]:
    """The actions of a rollout of ``count`` steps, time first."""
    return [100 * t + env for t in range(count) for env in range(envs)]


# Adding, and the columns


def test_added_steps_are_read_back_time_first_from_columns_with_a_row_more() -> None:
    steps = play(4, 3, masked=True)
    rollout = filled(steps)
    assert holds(rollout, steps)
    assert rollout.block.batch_size == torch.Size([5, 3])
    assert rollout.data().batch_size == torch.Size([4, 3])
    assert rollout["obs"].shape == (4, 3, 2)
    assert same_data(rollout.data(), rollout.block[:4])


def test_a_step_may_come_as_a_mapping_as_keywords_or_as_both() -> None:
    rollout = RolloutBuffer(SCHEMA, 4, 2)
    given_ = step(3)
    rollout.add(given_)
    rollout.add(**given_)
    rollout.add({"obs": given_["obs"], "value": np.zeros(2)}, **{n: x for n, x in given_.items() if n != "obs"})
    rollout.add({name: torch.from_numpy(x) for name, x in given_.items()})
    assert holds(rollout, [given_] * 4)


def test_a_rollout_counts_its_steps_and_its_transitions() -> None:
    rollout = RolloutBuffer(SCHEMA, 3, 2)
    seen = []
    for t in range(3):
        seen.append((rollout.steps, len(rollout), rollout.is_full))
        rollout.add(step(t))
    seen.append((rollout.steps, len(rollout), rollout.is_full))
    assert seen == [(0, 0, False), (1, 2, False), (2, 4, False), (3, 6, True)]


def test_what_was_not_written_yet_is_not_read() -> None:
    rollout = filled([step(0), step(1)], num_steps=5)
    assert holds(rollout, [step(0), step(1)])
    assert ids(rollout.flat()) == all_ids(2)
    assert filled([step(0)], num_steps=5)["obs"].shape == (1, 2, 2)
    assert RolloutBuffer(SCHEMA, 5, 2)["obs"].shape == (0, 2, 2)


def test_columns_are_views_that_alias_the_storage_both_ways() -> None:
    rollout = filled([step(t) for t in range(3)])
    block, env_major, data = rollout.block, rollout.env_major, rollout.data()
    assert env_major.batch_size == torch.Size([2, 4])
    assert env_major["obs"].shape == (2, 4, 2)
    env_major["reward"][1, 2] = 50
    assert rollout["reward"][2, 1] == block["reward"][2, 1] == data["reward"][2, 1] == 50
    rollout["obs"][0] = -1
    assert env_major["obs"][:, 0].tolist() == [[-1, -1], [-1, -1]]
    block["value"][3] = torch.tensor([7.0, 8.0])
    assert rollout.last["value"].tolist() == [7, 8]
    assert env_major["value"][:, 3].tolist() == [7, 8]
    data["action"][1] = 5
    assert rollout["action"][1].tolist() == [5, 5]


def test_the_keys_are_those_of_the_schema_the_bookkeeping_and_what_was_attached() -> None:
    rollout = filled([step(0)])
    assert rollout.keys() == (*SCHEMA.names, "mask", "final_value")
    rollout["advantage"] = torch.zeros(1, 2)
    assert rollout.keys() == (*SCHEMA.names, "mask", "final_value", "advantage")
    assert set(rollout.data().keys()) == set(rollout.keys()) == set(rollout.block.keys())
    assert "advantage" in rollout
    assert "advantages" not in rollout
    assert "final_value" not in RolloutBuffer(WITHOUT_VALUE, 1, 1).keys()
    with pytest.raises(errors.FieldError, match=r"did you mean 'advantage'.*log_prob"):
        _ = rollout["advantages"]


def test_a_full_rollout_refuses_a_step_and_says_what_to_do() -> None:
    rollout = filled([step(0), step(1)])
    for call in (lambda: rollout.add(step(2)), rollout.reserve, lambda: rollout.reserve(1)):
        with pytest.raises(errors.FullError, match=r"2 steps; call finish\(\) and clear\(\).*wrap=True"):
            call()
        assert holds(rollout, [step(0), step(1)])


@pytest.mark.parametrize(("steps", "envs"), [(0, 2), (2, 0), (-1, 2), (4.0, 2), (4, True)])
def test_a_rollout_without_room_is_refused(steps: int, envs: int) -> None:
    with pytest.raises(errors.ParameterError, match=r"RolloutBuffer\(num_(steps|envs)=.*at least 1"):
        RolloutBuffer(SCHEMA, steps, envs)


@pytest.mark.parametrize("name", ["mask", "final_value"])
def test_a_schema_that_uses_the_buffers_own_names_is_refused(name: str) -> None:
    with pytest.raises(errors.SchemaError, match=rf"'{name}'.*leave it out"):
        RolloutBuffer(SCHEMA.extend(**{name: ()}), 1, 1)


def test_the_repr_of_a_rollout_is_the_call_that_rebuilds_it() -> None:
    rollout = RolloutBuffer(SCHEMA, 3, 2, wrap=True, debug=True)
    again = eval(repr(rollout), vars(relive) | {"torch": torch})
    assert repr(again) == repr(rollout)
    for each in (rollout, again):
        each.add(step(0))
    assert ids(rollout.sample(2)) == ids(again.sample(2))


# Writing in place


def write_rows(views: Any, steps: list[Step]) -> None:
    """Write steps into reserved rows, as a simulator would; what a step does not have stays as it is preset."""
    for i, each in enumerate(steps):
        for name, x in each.items():
            views[name][i] = torch.as_tensor(x)


def test_rows_written_in_place_read_like_added_ones() -> None:
    steps = play(6, masked=True)
    rollout = RolloutBuffer(SCHEMA, 6, 2)
    rollout.add(steps[0])
    views = rollout.reserve(3)
    assert views.batch_size == torch.Size([3, 2])
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
    assert rollout.reserve().batch_size == torch.Size([3, 2])
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


# Attached columns


def test_an_attached_column_is_kept_overwritten_and_dropped_with_its_steps() -> None:
    rollout = filled([step(0), step(1)], num_steps=4)
    column = torch.arange(4.0).reshape(2, 2)
    rollout["extra"] = column
    column += 100
    assert rollout["extra"].tolist() == [[0, 1], [2, 3]]
    assert sorted(rollout.flat(("extra",))["extra"].tolist()) == [0, 1, 2, 3]
    rollout["extra"] = np.ones((2, 2, 3), np.int32)
    assert rollout["extra"].dtype is torch.int32
    assert rollout.flat()["extra"].shape == (4, 3)
    rollout.add(step(2))
    assert "extra" not in rollout
    rollout["extra"] = torch.zeros(3, 2)
    rollout.reserve(1)
    assert "extra" in rollout
    rollout.commit()
    assert "extra" not in rollout
    rollout["extra"] = torch.zeros(4, 2)
    rollout.clear()
    assert "extra" not in rollout


def test_a_column_of_the_schema_is_overwritten_in_its_own_dtype() -> None:
    rollout = filled([step(0), step(1)])
    rollout["reward"] = np.arange(4).reshape(2, 2)
    rollout["value"] = [[1, 2], [3, 4]]
    assert rollout["reward"].dtype is rollout["value"].dtype is torch.float32
    assert rollout["reward"].tolist() == [[0, 1], [2, 3]]
    assert rollout["value"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("name", "column", "error", "says"),
    [
        ("extra", torch.zeros(3, 2), errors.ShapeError, r"'extra'.*\(2, 2\).*\(3, 2\)"),
        ("extra", torch.zeros(2), errors.ShapeError, r"'extra'"),
        ("extra", 1.0, errors.ShapeError, r"'extra'"),
        ("reward", torch.zeros(2, 2, 1), errors.ShapeError, r"'reward'.*\(2, 2\).*\(2, 2, 1\)"),
        ("action", torch.zeros(2, 2), errors.DTypeError, r"'action'.*int64.*float32"),
        ("mask", torch.ones(2, 2), errors.DTypeError, r"'mask'.*bool.*float32"),
        ("extra", torch.zeros(2, 2, device="meta"), errors.DeviceError, r"'extra'.*cpu.*meta"),
        (("obs", "a"), torch.zeros(2, 2), errors.FieldError, r"obs"),
        (("held", "a"), torch.zeros(2, 2), errors.FieldError, r"held"),
        ("tree", torch.zeros(2, 2), errors.FieldError, r"'tree' is nested"),
    ],
)  # fmt: skip
def test_a_column_that_does_not_fit_is_refused_and_the_rollout_stays_readable(
    name: Any, column: Any, error: type[Exception], says: str
) -> None:
    steps = [step(0), step(1)]
    rollout = filled(steps, num_steps=3)
    rollout["held"] = torch.ones(2, 2)
    rollout["tree", "leaf"] = torch.ones(2, 2)
    before = rollout.data().clone()
    with pytest.raises(error, match=says):
        rollout[name] = column
    assert same_data(rollout.data(), before)
    assert holds(rollout, steps)


def test_attached_members_of_a_tree_are_read_together() -> None:
    rollout = filled([step(0), step(1)])
    rollout["tree", "a"] = torch.ones(2, 2)
    rollout["tree", "b"] = torch.zeros(2, 2, 3)
    assert rollout["tree"]["b"].shape == (2, 2, 3)
    assert rollout.flat(("tree",))["tree", "a"].tolist() == [1] * 4


def test_a_column_may_be_set_from_itself_or_another_view() -> None:
    rollout = filled([step(0), step(1)])
    rollout["obs"] = rollout["obs"]
    rollout["extra"] = rollout["reward"]
    rollout["reward"] = rollout["reward"] * 2
    assert rollout["obs"].tolist() == stack([step(0), step(1)], "obs").tolist()
    assert (rollout["extra"] * 2).tolist() == rollout["reward"].tolist()


# Reading all, some, and in minibatches


def test_all_data_flat_are_time_first_and_a_copy() -> None:
    steps = play(3)
    rollout = filled(steps)
    batch = rollout.flat()
    assert batch.batch_size == torch.Size([6])
    assert set(batch.keys()) == set(SCHEMA.names)
    assert ids(batch) == all_ids(3)
    for x in batch.values():
        x.zero_()
    assert holds(rollout, steps)


@pytest.mark.parametrize("masked", [False, True])
def test_batches_are_copies(masked: bool) -> None:
    steps = play(4, masked=masked)
    rollout = filled(steps)
    clean = rollout.flat().clone()
    for batch in (rollout.flat(), rollout.sample(2), *rollout.minibatches(3, epochs=2)):
        assert len(set(ids(batch)) - set(ids(clean))) == 0
        for x in batch.values():
            x.zero_()
    assert holds(rollout, steps)


def test_only_the_columns_asked_for_are_in_a_batch() -> None:
    rollout = filled(play(3))
    fields = ("obs", "mask", "final_value")
    for batch in (rollout.flat(fields), rollout.sample(2, fields), next(rollout.minibatches(2, fields=fields))):
        assert tuple(batch.keys()) == fields
    for call in (rollout.flat, lambda f: rollout.sample(2, f), lambda f: rollout.minibatches(2, fields=f)):
        with pytest.raises(errors.FieldError, match="did you mean 'obs'"):
            call(("obbs",))


def test_a_minibatch_without_columns_is_refused_or_empty() -> None:
    rollout = filled([step(0)])
    try:
        batches = list(rollout.minibatches(1, fields=()))
    except errors.ReliveError:
        return
    assert [tuple(batch.keys()) for batch in batches] == [(), ()]


@pytest.mark.parametrize("masked", [False, True])
def test_every_row_of_a_batch_is_one_transition_whole(masked: bool) -> None:
    rollout = filled(play(8, 3, masked=masked)).finish(GAE(), last_value=[1, 2, 3])
    rows = {int(row["action"]): row for row in rollout.flat().unbind(0)}
    for batch in (rollout.sample(5), *rollout.minibatches(4, epochs=2)):
        for row in batch.unbind(0):
            assert same_data(row, rows[int(row["action"])])


def test_a_sample_is_drawn_without_replacement_by_the_next_permutation() -> None:
    rollout = filled([step(t) for t in range(5)], seed=8)
    flat = all_ids(5)
    for counter, size in enumerate([1, 4, 10, 3]):
        order = reference.permutation(10, 8, counter)[:size]
        assert ids(rollout.sample(size)) == [flat[i] for i in order]


@pytest.mark.parametrize("size", [0, -1, 11])
def test_a_sample_larger_than_the_rollout_is_refused(size: int) -> None:
    with pytest.raises(errors.ParameterError, match=rf"sample\({size}\).*holds 10 transitions; ask for 1 to 10"):
        filled([step(t) for t in range(5)]).sample(size)


def test_every_epoch_has_a_new_permutation_and_serves_every_row_once() -> None:
    rollout = filled([step(t) for t in range(16)])  # 32 rows, of which four batches of seven would use 28
    epochs = [ids(list(rollout.minibatches(7))) for _ in range(4)]
    batches = list(rollout.minibatches(7, epochs=4))
    assert [len(batch) for batch in batches] == [7, 7, 7, 7, 4] * 4
    epochs += [ids(batches[5 * k : 5 * k + 5]) for k in range(4)]
    assert all(sorted(order) == all_ids(16) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 8


@given(st.integers(1, 9), st.integers(1, 3), st.data())
def test_an_epoch_serves_every_real_row_once_whatever_the_sizes(steps: int, envs: int, data: st.DataObject) -> None:
    played = play(steps, envs, masked=data.draw(st.booleans()), seed=data.draw(st.integers(0, 9)))
    rollout = filled(played, seed=3)
    real = [i for i, m in zip(all_ids(steps, envs), stack(played, "mask").flatten(), strict=True) if m]
    assert len(rollout) == len(real)
    assert ids(rollout.flat()) == real
    size = data.draw(st.integers(1, steps * envs + 2))
    sizes = [len(batch) for batch in rollout.minibatches(size)]
    assert sizes == [size] * (len(real) // size) + [len(real) % size] * (len(real) % size > 0)
    assert sorted(ids(list(rollout.minibatches(size)))) == real
    if real:
        count = data.draw(st.integers(1, len(real)))
        batches = list(rollout.minibatches(num_batches=count))
        assert sorted(ids(batches)) == real
        assert len(batches) == count
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        whole = list(rollout.minibatches(num_batches=count, drop_last=True))
        assert [len(batch) for batch in whole] == [len(real) // count] * count
        assert len(set(ids(whole))) == len(real) // count * count


def test_dropping_the_last_batch_drops_other_rows_each_epoch() -> None:
    rollout = filled([step(t) for t in range(5)])
    rollout.seed = 0
    batches = list(rollout.minibatches(4, epochs=30, drop_last=True))
    assert [len(batch) for batch in batches] == [4, 4] * 30
    dropped = [frozenset(all_ids(5)) - set(ids([a, b])) for a, b in zip(batches[::2], batches[1::2], strict=True)]
    assert all(len(rows) == 2 for rows in dropped)
    assert set().union(*dropped) == set(all_ids(5))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "either batch_size or num_batches"),
        ({"batch_size": 2, "num_batches": 2}, "either batch_size or num_batches"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -2}, "batch_size=-2"),
        ({"batch_size": 7, "drop_last": True}, "batch_size=7.*ask for 1 to 6"),
        ({"num_batches": 0}, "num_batches=0"),
        ({"num_batches": 7}, "num_batches=7.*1 to 6"),
        ({"batch_size": 2.0}, r"batch_size=2\.0"),
        ({"num_batches": "2"}, "num_batches='2'"),
        ({"batch_size": 2, "epochs": 0}, "epochs=0"),
        ({"batch_size": 2, "epochs": 1.5}, r"epochs=1\.5"),
    ],
    ids=str,
)
def test_minibatches_that_do_not_fit_are_refused_at_the_call(options: Any, says: str) -> None:
    with pytest.raises(errors.ParameterError, match=says):
        filled([step(t) for t in range(3)]).minibatches(**options)


def test_an_empty_rollout_refuses_to_be_read_or_finished() -> None:
    rollout = RolloutBuffer(SCHEMA, 2, 2)
    calls = [rollout.flat, lambda: rollout.sample(1), lambda: rollout.minibatches(1), lambda: rollout.finish(GAE())]
    for call in calls:
        with pytest.raises(errors.EmptyError, match=r"no steps; call add\(\)"):
            call()


# Steps that are not real


def test_unreal_steps_are_counted_and_served_nowhere_but_stay_in_their_columns() -> None:
    masks = [[True, False], [False, False], [True, True]]
    rollout = filled(step(t, mask=mask) for t, mask in enumerate(masks))
    assert len(rollout) == 3
    assert ids(rollout.flat()) == [0, 200, 201]
    assert sorted(ids(list(rollout.minibatches(2)))) == [0, 200, 201]
    assert sorted(ids(rollout.sample(3))) == [0, 200, 201]
    assert rollout["action"].tolist() == [[0, 1], [100, 101], [200, 201]]
    with pytest.raises(errors.ParameterError, match="3 transitions"):
        rollout.sample(4)


@pytest.mark.parametrize("how", ["whole", "through a view", "through data", "through env_major"])
def test_a_mask_may_also_be_set_later(how: str) -> None:
    rollout = filled([step(0), step(1)])
    if how == "whole":
        rollout["mask"] = [[True, False], [True, True]]
    elif how == "through a view":
        rollout["mask"][0, 1] = False
    elif how == "through data":
        rollout.data()["mask"][0, 1] = False
    else:
        rollout.env_major["mask"][1, 0] = False
    assert rollout["mask"].tolist() == [[True, False], [True, True]]
    assert len(rollout) == 3
    assert ids(rollout.flat()) == [0, 100, 101]


def test_a_rollout_of_unreal_steps_alone_serves_nothing() -> None:
    rollout = filled([step(0, mask=[False, False])]).finish(GAE(), last_value=[1, 1])
    assert len(rollout) == 0
    assert list(rollout.minibatches(4, epochs=2)) == []
    assert len(rollout.flat()) == 0
    assert rollout["advantage"].tolist() == [[0, 0]]


# Dtypes and nesting


def test_images_stay_uint8_and_actions_int64() -> None:
    schema = Schema(
        {
            "obs": Field((3, 12, 12), torch.uint8),
            "small": Field((4,), torch.uint8),
            "action": Field((), torch.int64),
            "choice": Field((2,), torch.int16),
            "flag": Field((), torch.bool),
            "half": Field((2,), torch.bfloat16),
            "mass": Field((), torch.float64),
        }
    )
    rollout = RolloutBuffer(schema, 3, 2)
    rng = np.random.default_rng(0)
    steps = [
        {
            "obs": rng.integers(0, 256, (2, 3, 12, 12), np.uint8),
            "small": rng.integers(0, 256, (2, 4), np.uint8),
            "action": np.array([2**53 + 1 + t, -(2**62) - t]),
            "choice": rng.integers(-9, 9, (2, 2), np.int16),
            "flag": rng.random(2) < 0.5,
            "half": torch.tensor(rng.normal(size=(2, 2)), dtype=torch.bfloat16),
            "mass": rng.normal(size=2),
        }
        for t in range(3)
    ]
    for each in steps:
        rollout.add(each)
    assert rollout.block["obs"].element_size() == 1
    batches = [rollout.flat(), torch.cat(list(rollout.minibatches(4))), rollout.sample(6)]
    for name, field in schema.leaves.items():
        stored = torch.stack([torch.as_tensor(each[name[0]]) for each in steps])
        assert rollout[name].dtype is stored.dtype is field.dtype
        assert torch.equal(rollout[name], stored)
        for batch in batches:
            assert batch[name].dtype is field.dtype
    want = stack_of(steps, "obs")[np.argsort(stack_of(steps, "action").ravel())]
    for batch in batches:
        assert np.array_equal(batch["obs"][batch["action"].argsort()], want)


def stack_of(steps: list[Step], name: str) -> np.ndarray:
    """A column of these steps, flat."""
    return np.concatenate([each[name] for each in steps])


def nested_step(t: int, envs: int) -> Step:
    """A step of nested observations, actions and hidden states."""

    def full(*shape: int, at: float, dtype: Any = np.float32) -> np.ndarray:
        return np.full((envs, *shape), t * 10 + at, dtype)

    return {
        "obs": {"cam": full(2, 2, at=1, dtype=np.uint8), "body": ({"arm": full(3, at=2)}, full(at=3, dtype=np.int64))},
        "action": (full(at=4, dtype=np.int64), full(2, at=5)),
        "hidden": (full(1, 4, at=6), {"c": full(1, 4, at=7)}),
    }


LEAVES = {
    ("obs", "cam"): 1, ("obs", "body", "0", "arm"): 2, ("obs", "body", "1"): 3, ("action", "0"): 4,
    ("action", "1"): 5, ("hidden", "0"): 6, ("hidden", "1", "c"): 7,
}  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, True])
def test_nested_fields_are_nested_in_columns_views_and_batches(wrapped: bool) -> None:
    schema = Schema.from_example(nested_step(0, 2), num_envs=2)
    assert set(schema.leaves) == set(LEAVES)
    rollout = RolloutBuffer(schema, 3, 2, wrap=True)
    times = [0, 1, 2, 3] if wrapped else [0, 1, 2]
    for t in times:
        rollout.add(nested_step(t, 2))
    times = times[-3:]
    for path, at in LEAVES.items():
        column = rollout[path]
        assert column.dtype is schema.leaves[path].dtype
        assert column.shape == (3, 2, *schema.leaves[path].shape)
        assert column.flatten(1)[:, -1].tolist() == [10 * t + at for t in times]
        assert torch.equal(rollout[path[0]][path[1:]], column)
        assert torch.equal(rollout.data()[path], column)
        for batch in (rollout.flat(), rollout.sample(6), *rollout.minibatches(6, fields=(path[0],))):
            assert sorted(
                batch[path].flatten(1)[:, -1].tolist() if column.dim() > 2 else batch[path].tolist()
            ) == sorted([10 * t + at for t in times] * 2)
    assert rollout.env_major["hidden", "1", "c"].shape == (2, 4, 1, 4)
    rollout.set_last(obs=nested_step(9, 2)["obs"])
    assert rollout.last["obs", "body", "1"].tolist() == [93, 93]


def test_nested_rows_are_written_in_place_and_their_members_overwritten() -> None:
    schema = Schema.from_example(nested_step(0, 2), num_envs=2)
    rollout = RolloutBuffer(schema, 2, 2)
    rollout.reserve(1)["hidden", "1", "c"][0] = 5
    rollout.commit()
    rollout["hidden", "0"] = torch.full((1, 2, 1, 4), 6.0)
    assert rollout["hidden"]["1", "c"].unique().tolist() == [5]
    assert rollout["hidden", "0"].unique().tolist() == [6]
    with pytest.raises(errors.FieldError, match="nested"):
        rollout["hidden"] = torch.zeros(1, 2)


# Wrapping


@pytest.mark.parametrize("total", range(1, 14))
def test_a_wrapping_rollout_holds_the_newest_steps_in_the_order_of_time(total: int) -> None:
    steps = play(total, masked=True)
    rollout = RolloutBuffer(SCHEMA, 4, 2, wrap=True)
    for t, each in enumerate(steps):
        rollout.add(each)
        assert holds(rollout, steps[: t + 1][-4:])
    newest = steps[-4:]
    assert rollout.is_full == (total >= 4)
    assert ids(rollout.flat()) == stack(newest, "action")[stack(newest, "mask")].tolist()
    assert sorted(ids(list(rollout.minibatches(3)))) == ids(rollout.flat())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("total", [3, 4, 5, 6, 7, 8, 11])
@pytest.mark.parametrize(
    "estimator", [GAE(), MonteCarlo(), TDLambda(), GroupAdvantage(2)], ids=lambda e: type(e).__name__
)
def test_finishing_a_wrapped_rollout_equals_finishing_a_fresh_one_of_the_same_steps(
    estimator: Any, total: int, masked: bool
) -> None:
    steps = play(total, masked=masked, seed=2)
    wrapped, fresh = filled(steps, num_steps=4, wrap=True, seed=5), filled(steps[-4:], num_steps=4, seed=5)
    for rollout in (wrapped, fresh):
        rollout.finish(estimator, last_value=np.array([0.25, -3]), partial=True)
    assert same_data(wrapped.data(), fresh.data())
    assert same_data(wrapped.flat(), fresh.flat())
    for a, b in zip(wrapped.minibatches(3, epochs=2), fresh.minibatches(3, epochs=2), strict=True):
        assert same_data(a, b)


@pytest.mark.parametrize("total", [4, 5, 6, 9])
def test_columns_are_attached_and_overwritten_in_the_order_of_time_after_wrapping(total: int) -> None:
    rollout = filled([step(t) for t in range(total)], num_steps=4, wrap=True)
    column = torch.arange(8.0).reshape(4, 2)
    rollout["extra"] = column
    rollout["reward"] = column
    assert torch.equal(rollout["extra"], column)
    assert torch.equal(rollout["reward"], column)
    assert rollout.flat()["extra"].tolist() == list(range(8))
    rollout.add(step(total))
    assert "extra" not in rollout
    assert rollout["reward"][:3].tolist() == column[1:].tolist()


@pytest.mark.parametrize("total", [2, 4, 5, 7])
def test_final_values_known_later_find_their_steps_after_wrapping(total: int) -> None:
    steps = [step(t, truncated=[True, True]) for t in range(total)]
    rollout = filled(steps, num_steps=4, wrap=True)
    kept = min(total, 4)
    rollout.set_final_value(np.arange(kept), np.zeros(kept, int), torch.arange(kept) + 0.5)
    rollout.set_final_value([kept - 1], [1], [9.0])
    assert rollout["final_value"][:, 0].tolist() == [t + 0.5 for t in range(kept)]
    assert rollout["final_value"][-1, 1] == 9
    assert rollout["final_value"][:-1, 1].isnan().all()


def test_rows_are_reserved_up_to_the_seam_and_written_over_the_oldest() -> None:
    rollout = filled([step(t) for t in range(5)], num_steps=4, wrap=True)
    views = rollout.reserve()
    assert views.batch_size == torch.Size([3, 2])
    write_rows(views, [step(5), step(6, mask=[True, False]), step(7)])
    rollout.commit()
    assert holds(rollout, [step(4), step(5), step(6, mask=[True, False]), step(7)])
    write_rows(rollout.reserve(2), [step(8), step(9)])
    rollout.commit()
    assert holds(rollout, [step(6, mask=[True, False]), step(7), step(8), step(9)])


@pytest.mark.parametrize("committed", [0, 1])
def test_rows_given_back_by_a_wrapped_rollout_leave_no_half_written_step_behind(committed: int) -> None:
    steps = [step(t, mask=[False, True], truncated=[False, True], final_value=[NAN, t]) for t in range(6)]
    rollout = filled(steps, num_steps=4, wrap=True)
    views = rollout.reserve(2)
    write_rows(views, [step(6), step(77)])
    if committed:
        rollout.commit(1)
        steps.append(step(6))
    if not committed:
        rollout.add(step(6))
        steps.append(step(6))
    # However many of the oldest are gone: what is there are real steps, whole, the newest last.
    assert 1 <= rollout.steps <= 4
    assert holds(rollout, steps[-rollout.steps :])


# Finishing


ESTIMATORS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "gae": (GAE(gamma=0.9, lam=0.8), lambda c, **k: oracle.gae(**c, **k, gamma=0.9, lam=0.8)),
    "td lambda": (TDLambda(gamma=0.9, lam=0.7), lambda c, **k: oracle.lambda_returns(**c, **k, gamma=0.9, lam=0.7)),
    "monte carlo": (MonteCarlo(gamma=0.9), lambda c, **k: oracle.monte_carlo(**c, **k, gamma=0.9)),
    "vtrace": (
        VTrace(gamma=0.9, lam=0.9, rho_clip=1.5, c_clip=0.8),
        lambda c, **k: oracle.vtrace(**c, **k, gamma=0.9, lam=0.9, rho_clip=1.5, c_clip=0.8),
    ),
}
LAST = np.array([0.5, -1.25, 3.0])


def block_of(steps: list[Step]) -> dict[str, np.ndarray]:
    """The arguments of the oracle's estimators for these steps and LAST."""
    names = ["reward", "terminated", "truncated", "final_value", "mask"]
    value = np.concatenate([stack(steps, "value"), LAST[None, : len(steps[0]["value"])]])
    return {name: stack(steps, name) for name in names} | {"value": value}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_attaches_what_the_oracle_says_of_the_same_steps(name: str, seed: int, masked: bool) -> None:
    estimator, slow = ESTIMATORS[name]
    steps = play(12, 3, seed=seed, masked=masked)
    rollout = filled(steps)
    more = {}
    if name == "vtrace":
        rng = np.random.default_rng(seed)
        target = rollout["log_prob"].numpy() + rng.normal(size=(12, 3)).astype(np.float32)
        rollout["target_log_prob"] = target
        more = {"log_rho": target - rollout["log_prob"].numpy()}
    assert rollout.finish(estimator, last_value=LAST) is rollout
    expected = slow(block_of(steps), **more)
    if isinstance(expected, tuple):
        advantage, ret = expected
    else:
        ret, real = expected, stack(steps, "mask")
        advantage = np.where(real, expected - stack(steps, "value"), 0)
    assert rollout["return"].dtype is rollout["advantage"].dtype is torch.float32
    np.testing.assert_allclose(rollout["return"], ret, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(rollout["advantage"], advantage, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_finishing_is_the_pure_function_on_the_columns(masked: bool) -> None:
    steps = play(9, 3, masked=masked)
    rollout = filled(steps).finish(GAE(), last_value=LAST)
    block = {name: torch.from_numpy(x) for name, x in block_of(steps).items()}
    block = {name: x.float() if x.is_floating_point() else x for name, x in block.items()}
    advantage, ret = relive.returns.gae(**block)
    assert torch.equal(rollout["advantage"], advantage)
    assert torch.equal(rollout["return"], ret)


def test_monte_carlo_without_a_critic_needs_no_value() -> None:
    rollout = RolloutBuffer(WITHOUT_VALUE, 3, 1)
    for t in range(3):
        rollout.add(reward=1.0 + t, terminated=False, truncated=t == 1)
    rollout.finish(MonteCarlo(gamma=0.5, critic=False))
    assert rollout["return"].tolist() == [[2.0], [2.0], [3.0]]


def test_the_group_estimator_narrows_the_mask_that_the_batches_follow() -> None:
    rollout = filled([step(0, terminated=[True, False]), step(1), step(2)]).finish(GroupAdvantage(2))
    assert rollout["mask"].tolist() == [[True, True], [False, True], [False, True]]
    assert len(rollout) == 4
    assert sorted(ids(list(rollout.minibatches(3)))) == [0, 1, 101, 201]
    rollout.clear()
    for t in range(3):
        rollout.add(step(t))
    assert len(rollout) == 6


def test_an_estimator_of_ones_own_is_given_the_columns_it_names_and_none_for_what_is_unused() -> None:
    seen: dict[str, Any] = {}

    class Mine:
        reads = ("obs", "value", "mask", "final_value", "extra")

        def __call__(self, **columns: Any) -> dict[str, Tensor]:
            seen.update(columns)
            return {"score": columns["obs"].sum(-1), "deep": columns["obs"][..., None, :]}

    rollout = filled([step(t) for t in range(3)])
    rollout["extra"] = torch.ones(3, 2, 5)
    rollout.finish(Mine(), last_value=[7, 8])
    assert list(seen) == ["obs", "value", "mask", "final_value", "extra"]
    assert (seen["mask"], seen["final_value"]) == (None, None)
    assert seen["value"].tolist() == [*stack([step(t) for t in range(3)], "value").tolist(), [7, 8]]
    assert rollout["score"].tolist() == [[t, t + 1] for t in range(3)]
    assert rollout.sample(1)["deep"].shape == (1, 1, 2)
    rollout["mask"] = np.array([[True, False]] * 3)
    rollout["truncated"][1, 1] = True
    rollout.set_final_value([1], [1], [4.0])
    rollout.finish(Mine())
    assert seen["mask"].tolist() == [[True, False]] * 3
    assert seen["final_value"][1, 1] == 4


def test_an_estimator_that_returns_a_column_of_another_shape_attaches_nothing() -> None:
    class Wrong:
        reads = ("reward",)

        def __call__(self, **columns: Any) -> dict[str, Tensor]:
            return {"advantage": columns["reward"] * 0, "return": columns["reward"][:-1]}

    rollout = filled([step(0), step(1)])
    with pytest.raises(errors.ShapeError, match="'return'"):
        rollout.finish(Wrong())
    assert "advantage" not in rollout


def test_steps_that_are_interrupted_are_worth_what_the_bootstrap_row_was_set_to_and_nothing_that_lay_there() -> None:
    rollout = filled([step(t) for t in range(4)], num_steps=4)
    rollout.clear()  # the values of four steps are still in the memory
    rollout.add(step(0))
    rollout.interrupt()
    assert rollout["truncated"].all()
    assert rollout["final_value"].isnan().all()
    rollout.add(step(1))
    with pytest.raises(errors.FieldError, match="step 0 of env 0 was truncated and has no value"):
        rollout.finish(GAE(), last_value=[0.0, 0.0], partial=True)
    rollout.set_last(value=[3.0, 4.0])
    rollout.interrupt()
    assert rollout["final_value"][1].tolist() == [3.0, 4.0]


def test_an_unfinished_rollout_is_refused_unless_a_part_will_do() -> None:
    rollout = filled(play(3), num_steps=5)
    with pytest.raises(errors.UnfinishedError, match=r"3 of 5 steps.*partial=True"):
        rollout.finish(GAE(), last_value=[1, 2])
    assert "advantage" not in rollout
    rollout.finish(GAE(), last_value=[1, 2], partial=True)
    assert same_data(rollout.flat(), filled(play(3)).finish(GAE(), last_value=[1, 2]).flat())


def test_a_missing_bootstrap_value_is_refused_by_the_env_that_goes_on() -> None:
    rollout = filled([step(0), step(1, terminated=[True, False])])
    with pytest.raises(errors.UnfinishedError, match=r"env 1 goes on after the last step.*last_value=V\(obs\[T\]\)"):
        rollout.finish(GAE())
    assert "advantage" not in rollout


def test_no_bootstrap_value_is_needed_where_every_env_has_just_ended_or_is_not_real() -> None:
    last = step(1, terminated=[True, False, False], truncated=[False, True, False], envs=3)
    last |= {"mask": [True, True, False], "final_value": [NAN, 4.0, NAN]}
    rollout = filled([step(0, 3), last])
    rollout.block["value"][2] = NAN
    rollout.finish(GAE(gamma=0.5, lam=1.0))
    want, _ = oracle.gae(
        stack([step(0, 3), last], "reward"),
        np.concatenate([stack([step(0, 3), last], "value"), [[0, 0, 0]]]),
        stack([step(0, 3), last], "terminated"),
        stack([step(0, 3), last], "truncated"),
        final_value=stack([step(0, 3), last], "final_value"),
        mask=stack([step(0, 3), last], "mask"),
        gamma=0.5,
        lam=1.0,
    )
    np.testing.assert_allclose(rollout["advantage"], want, rtol=1e-6)


def test_a_truncated_step_without_its_final_value_is_refused_by_its_place() -> None:
    rollout = filled([step(0), step(1, truncated=[False, True]), step(2)])
    with pytest.raises(errors.FieldError, match=r"'final_value': step 1 of env 1 was truncated.*final_obs"):
        rollout.finish(GAE(), last_value=[0, 0])
    assert "advantage" not in rollout
    rollout.set_final_value([1], [1], [2.0])
    rollout.finish(GAE(gamma=1.0, lam=0.0))
    assert rollout["advantage"][1, 1] == (1 + 1 / 8) + 2.0 - (-1 - 1 / 8)


def test_a_final_value_may_be_given_with_its_step_or_written_in_place() -> None:
    steps = play(6)
    added, placed, viewed = filled(steps), RolloutBuffer(SCHEMA, 6, 2), filled([step(t) for t in range(6)])
    write_rows(placed.reserve(), steps)
    placed.commit()
    for name in ("terminated", "truncated", "final_value"):
        viewed[name][:] = torch.from_numpy(stack(steps, name))
    for rollout in (added, placed, viewed):
        rollout.finish(GAE(), last_value=[1, 2])
        assert same_data(rollout.flat(), added.flat())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([0], [0], [1.0, 2.0]), errors.ShapeError),
        (([0, 1], [0], [1.0, 2.0]), errors.ShapeError),
        (([2], [0], [1.0]), errors.ParameterError),
        (([-1], [0], [1.0]), errors.ParameterError),
        (([0], [2], [1.0]), errors.ParameterError),
        (([0], [-1], [1.0]), errors.ParameterError),
        (([0], [0], [[1.0]]), errors.ShapeError),
        (([0], [0], np.array([1j])), errors.DTypeError),
        (([0.7], [0], [1.0]), errors.SchemaError),
    ],
    ids=str,
)
def test_final_values_that_do_not_fit_are_refused_and_nothing_is_written(
    arguments: Any, error: type[Exception]
) -> None:
    rollout = filled([step(0), step(1)], num_steps=3)
    with pytest.raises(error):
        rollout.set_final_value(*arguments)
    assert holds(rollout, [step(0), step(1)])


def test_a_single_final_value_is_written_whole_or_not_at_all() -> None:
    rollout = filled([step(0, truncated=[True, False])])
    try:
        rollout.set_final_value(0, 0, 1.5)
    except errors.ShapeError:
        assert rollout["final_value"].isnan().all()
    else:
        rollout.finish(GAE(gamma=1.0), last_value=[0, 0])
        assert rollout["advantage"][0, 0] == 1.5


def test_without_values_there_are_no_final_values() -> None:
    rollout = RolloutBuffer(WITHOUT_VALUE, 1, 1)
    row = {"reward": 1.0, "terminated": False, "truncated": True}
    with pytest.raises(errors.FieldError, match="final_value"):
        rollout.add(row, final_value=1.0)
    assert rollout.steps == 0
    rollout.add(row)
    with pytest.raises(errors.FieldError, match=r"add value=\(\)"):
        rollout.set_final_value([0], [0], [1.0])


@pytest.mark.parametrize("estimator", [GAE(), VTrace()], ids=lambda e: type(e).__name__)
def test_a_column_that_an_estimator_reads_and_the_rollout_lacks_is_named(estimator: Any) -> None:
    rollout = RolloutBuffer(WITHOUT_VALUE, 1, 1)
    rollout.add(reward=1.0, terminated=False, truncated=False)
    with pytest.raises(errors.FieldError, match="value"):
        rollout.finish(estimator)
    full = filled([step(0)])
    if isinstance(estimator, VTrace):
        with pytest.raises(errors.FieldError, match="target_log_prob"):
            full.finish(estimator, last_value=[0, 0])


def test_values_may_be_float64_from_end_to_end() -> None:
    double = SCHEMA.extend(value=Field((), torch.float64), reward=Field((), torch.float64))
    rng = np.random.default_rng(0)
    steps = [
        each | {"value": rng.normal(size=3), "reward": rng.normal(size=3), "final_value": rng.normal(size=3)}
        for each in play(20, 3)
    ]
    rollout = RolloutBuffer(double, 20, 3)
    for each in steps:
        rollout.add(each)
    rollout.finish(GAE(gamma=0.97, lam=0.9), last_value=LAST)
    want, ret = oracle.gae(**block_of(steps), gamma=0.97, lam=0.9)
    assert rollout["final_value"].dtype is rollout["advantage"].dtype is rollout["return"].dtype is torch.float64
    assert np.array_equal(rollout["final_value"], stack(steps, "final_value"))
    np.testing.assert_allclose(rollout["advantage"], want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rollout["return"], ret, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_may_be_half_precision_and_advantages_are_float32(dtype: torch.dtype) -> None:
    rollout = RolloutBuffer(SCHEMA.extend(value=Field((), dtype)), 2, 2)
    for t in range(2):
        rollout.add(step(t, value=torch.tensor([t, t + 0.5], dtype=dtype)))
    rollout.finish(GAE(gamma=1.0, lam=1.0), last_value=torch.tensor([2.0, 4.0], dtype=dtype))
    assert rollout["advantage"].dtype is torch.float32
    assert rollout["return"].tolist() == [[0 + 1 + 2, 1 / 8 + 9 / 8 + 4], [1 + 2, 9 / 8 + 4]]


# Advantages normalised per minibatch


@pytest.mark.parametrize("masked", [False, True])
def test_advantages_are_normalised_within_each_minibatch(masked: bool) -> None:
    raw, normal = (filled(play(8, 3, masked=masked), seed=4).finish(GAE(), last_value=LAST) for _ in range(2))
    before = normal["advantage"].clone()
    sizes = []
    for a, b in zip(
        raw.minibatches(5, epochs=2), normal.minibatches(5, epochs=2, normalize_advantage=True), strict=True
    ):
        assert ids(a) == ids(b)
        np.testing.assert_allclose(b["advantage"], oracle.normalize(a["advantage"]), atol=1e-5)
        assert torch.equal(a["return"], b["return"])
        sizes.append(len(a))
    assert torch.equal(normal["advantage"], before)
    assert len(sizes) > 4


def test_a_minibatch_of_one_has_advantage_zero_when_normalised() -> None:
    rollout = filled(play(3)).finish(GAE(), last_value=[1, 2])
    assert [batch["advantage"].item() for batch in rollout.minibatches(1, normalize_advantage=True)] == [0] * 6


def test_advantages_that_are_not_there_cannot_be_normalised() -> None:
    rollout = filled(play(3))
    with pytest.raises(errors.FieldError, match=r"no 'advantage'; call finish"):
        rollout.minibatches(2, normalize_advantage=True)
    rollout.finish(GAE(), last_value=[1, 2])
    with pytest.raises(errors.FieldError, match="advantage"):
        rollout.minibatches(2, normalize_advantage=True, fields=("obs",))


# Randomness


def test_the_same_seed_gives_the_same_batches_and_another_seed_others() -> None:
    def served(seed: int | None) -> list[int]:
        rollout = filled([step(t) for t in range(20)], seed=seed)
        return ids([*rollout.minibatches(7, epochs=2), rollout.sample(5), *rollout.minibatches(num_batches=3)])

    assert served(1) == served(1)
    assert len({tuple(served(seed)) for seed in range(10)}) == 10


def test_a_seed_that_was_not_given_is_drawn_and_told() -> None:
    steps = [step(t) for t in range(20)]
    first, other = filled(steps), filled(steps)
    assert first.seed != other.seed
    again = filled(steps, seed=first.seed)
    assert ids(first.sample(40)) == ids(again.sample(40)) != ids(other.sample(40))


def test_batches_neither_read_nor_touch_the_global_generators() -> None:
    def served() -> list[int]:
        rollout = filled([step(t) for t in range(9)], seed=3)
        return ids([*rollout.minibatches(4, epochs=2), rollout.sample(3)])

    numpys: Any = np.random.mtrand._rand
    torch.manual_seed(0)
    before = torch.get_rng_state(), numpys.get_state()[1].tolist()
    first = served()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numpys.get_state()[1].tolist() == before[1]
    torch.manual_seed(1)
    assert served() == first


def test_permutation_number_k_depends_on_the_seed_and_k_alone() -> None:
    flat = all_ids(6)
    rollout = filled([step(t) for t in range(6)], seed=11)
    rollout.sample(2)
    list(rollout.minibatches(5, epochs=3))
    rollout.clear()
    for t in range(6):
        rollout.add(step(t))
    assert ids(list(rollout.minibatches(5))) == [flat[i] for i in reference.permutation(12, 11, 4)]


@pytest.mark.parametrize("seed", [-1, 2**64, 2**70], ids=repr)
def test_a_seed_may_be_any_integer(seed: int) -> None:
    rollout = filled([step(t) for t in range(6)], seed=seed)
    flat = ids([rollout.flat()])
    assert ids(list(rollout.minibatches(5))) == [flat[i] for i in reference.permutation(12, seed, 0)]
    rollout.seed = 11  # from here on as a new one with that seed
    assert ids(list(rollout.minibatches(5))) == [flat[i] for i in reference.permutation(12, 11, 0)]


@pytest.mark.parametrize("seed", [True, 1.5, "7"], ids=repr)
def test_a_seed_that_cannot_be_used_is_refused_at_once(seed: Any) -> None:
    with pytest.raises(errors.ReliveError, match="seed"):
        RolloutBuffer(SCHEMA, 2, 2, seed=seed)


def test_a_seed_that_is_not_given_is_one_number_of_torchs_default_generator() -> None:
    seeds: list[list[int]] = []
    for _ in range(2):
        torch.manual_seed(42)
        seeds.append([RolloutBuffer(SCHEMA, 2, 2).seed for _ in range(3)])
        after = torch.rand(1)
        torch.manual_seed(42)
        drawn = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(3)]
        assert seeds[-1] == drawn
        assert torch.equal(after, torch.rand(1))
        before = torch.get_rng_state()
        RolloutBuffer(SCHEMA, 2, 2, seed=3)
        assert torch.equal(torch.get_rng_state(), before)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    with torch.device("meta"):  # wherever tensors are made by default
        assert isinstance(RolloutBuffer(SCHEMA, 2, 2, device="cpu").seed, int)


@pytest.mark.parametrize("estimator", ["gae", None, 5, {}], ids=str)
def test_what_is_no_estimator_is_refused_with_one_that_is(estimator: Any) -> None:
    with pytest.raises(errors.ParameterError, match=r"finish\(.*expected an estimator, such as relive\.GAE\("):
        filled([step(0), step(1)]).finish(estimator)


def test_a_batch_without_an_advantage_says_that_finish_has_to_be_called() -> None:
    rollout = filled([step(0), step(1)])
    batches: list[Any] = [
        next(rollout.minibatches(2)), rollout.flat(), rollout.sample(2), rollout.data(), rollout.block, rollout,
        next(rollout.sequences(2)), next(rollout.chunks(1)), next(rollout.env_batches(1)).steps,
    ]  # fmt: skip
    for batch in batches:
        for name in ("advantage", "return"):
            with pytest.raises((KeyError, errors.FieldError), match=rf"'{name}'.*finish\(relive\.GAE"):
                batch[name]
    for batch in (batches[0], pickle.loads(pickle.dumps(batches[0]))):
        assert type(batch) is TensorDict
        assert batch.get("advantage") is None
        assert batch.get("advantage", 5) == 5
        assert "advantage" not in batch.keys()
        with pytest.raises(KeyError, match=r"'rewards'.*did you mean 'reward'"):
            batch["rewards"]
    rollout.finish(GAE(), last_value=torch.zeros(2))
    assert next(rollout.minibatches(2))["advantage"].shape == (2,)


def test_an_advantage_that_the_user_attached_is_one() -> None:
    rollout = filled([step(0), step(1)])
    rollout["advantage"] = torch.ones(2, 2)
    assert next(rollout.minibatches(2))["advantage"].tolist() == [1, 1]


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


def test_lengths_beyond_all_episodes_are_whole_episodes() -> None:
    rollout = filled([step(0), step(1)])
    for length, overlap in ((2**70, "none"), (2**70, 2**69), (2**40, "half")):
        (seq,) = rollout.sequences(length, overlap=cast("Any", overlap), shuffle=False)
        (whole,) = rollout.sequences(shuffle=False)
        assert torch.equal(seq.flat(seq["value"]), whole.flat(whole["value"]))


def test_a_class_in_place_of_an_estimator_is_refused() -> None:
    with pytest.raises(
        errors.ParameterError, match=r"estimator=GAE: expected an object, got its class; pass GAE\(\.\.\.\)"
    ):
        filled([step(0), step(1)]).finish(cast("Any", GAE))


def test_sizes_and_seeds_of_numpy_are_saved(tmp_path: Path) -> None:
    rollout = RolloutBuffer(SCHEMA, cast("Any", np.int64(2)), cast("Any", np.int32(2)), seed=cast("Any", np.uint8(3)))
    rollout.save(tmp_path / "rollout")
    assert (rollout.num_steps, rollout.num_envs, rollout.seed) == (2, 2, 3)
    assert repr(RolloutBuffer.load(tmp_path / "rollout")) == repr(rollout)


# Everything at once, beside a naive twin


BOOLS = st.lists(st.booleans(), min_size=2, max_size=2)
ROWS = st.tuples(BOOLS, BOOLS, st.none() | BOOLS)  # terminated, truncated, mask


class RolloutBesideAList(RuleBasedStateMachine):
    """Random operations on a rollout of two envs and on a list of steps; both must always read alike."""

    @initialize(num_steps=st.integers(1, 4), wrap=st.booleans(), seed=st.integers(0, 3))
    def start(self, num_steps: int, wrap: bool, seed: int) -> None:
        self.rollout = RolloutBuffer(SCHEMA, num_steps, 2, wrap=wrap, debug=True, seed=seed)
        self.capacity, self.wrap, self.seed = num_steps, wrap, seed
        self.steps: list[Step] = []
        self.attached: dict[str, np.ndarray] = {}
        self.last: np.ndarray | None = None
        self.played = self.draws = 0

    def next_step(self, terminated: list[bool], truncated: list[bool], mask: list[bool] | None, final: bool) -> Step:
        self.played += 1
        more: Step = {} if mask is None else {"mask": np.array(mask)}
        if final:
            cut = np.array(truncated) & ~np.array(terminated)
            more["final_value"] = np.where(cut, self.played + 0.25, np.nan)
        return step(self.played, terminated=np.array(terminated), truncated=np.array(truncated), **more)

    def took(self, steps: list[Step]) -> None:
        self.steps = (self.steps + steps)[-self.capacity :]
        self.attached, self.last = {}, None

    def room(self) -> bool:
        return self.wrap or len(self.steps) < self.capacity

    @rule(rows=st.lists(ROWS, min_size=1, max_size=6), final=st.booleans(), as_torch=st.booleans())
    def add(self, rows: list[Any], final: bool, as_torch: bool) -> None:
        for row in rows:
            new = self.next_step(*row, final)
            given_ = {name: torch.from_numpy(x) for name, x in new.items()} if as_torch else new
            if not self.room():
                with pytest.raises(errors.FullError):
                    self.rollout.add(given_)
                return
            self.rollout.add(given_)
            self.took([new])

    @rule(
        bad=st.sampled_from([
            {"reward": np.array([1, NAN])}, {"obs": np.zeros((2, 3))}, {"value": torch.zeros(2, device="meta")},
            {"action": np.zeros(2)}, {"extra": 1}, {"mask": np.zeros(3, bool)}, {"final_value": "x"},
        ]),
        mask=BOOLS,
    )  # fmt: skip
    def add_what_does_not_fit(self, bad: Step, mask: Any) -> None:
        with pytest.raises(errors.ReliveError):
            self.rollout.add(step(99, mask=np.array(mask), final_value=np.full(2, 99.0)) | bad)

    @rule(data=st.data(), final=st.booleans(), last=st.booleans())
    def write_in_place(self, data: st.DataObject, final: bool, last: bool) -> None:
        if not self.room():
            with pytest.raises(errors.FullError):
                self.rollout.reserve()
            return
        full = len(self.steps) == self.capacity
        views = self.rollout.reserve(None if full else data.draw(st.integers(1, self.capacity - len(self.steps))))
        count = len(views) if full else data.draw(st.integers(0, len(views)))
        new = [self.next_step(*data.draw(ROWS), final) for _ in range(count)]
        garbage = step(99, mask=np.zeros(2, bool), final_value=np.full(2, 99.0))
        write_rows(views, new + [garbage] * (len(views) - count))
        if not count:
            return  # the rows are given back by whatever comes next
        end = self.rollout.num_steps if full or len(self.steps) + count == self.capacity else len(self.steps) + count
        if last:
            self.rollout.block["value"][end] = torch.tensor([5.0, 6.0])
        self.rollout.commit(count, last=last)
        self.took(new)
        self.last = np.array([5.0, 6.0]) if last else None

    @rule(value=st.floats(-9, 9, width=32), obs=st.booleans())
    def set_last(self, value: float, obs: bool) -> None:
        self.rollout.set_last(value=[value, -value], **({"obs": np.full((2, 2), value)} if obs else {}))
        self.last = np.array([value, -value])

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), env=st.integers(0, 1), value=st.floats(-9, 9, width=32))
    def set_final_value(self, data: st.DataObject, env: int, value: float) -> None:
        t = data.draw(st.integers(0, len(self.steps) - 1))
        self.rollout.set_final_value([t], [env], [value])
        final = self.steps[t].get("final_value", np.full(2, np.nan)).copy()
        final[env] = value
        self.steps[t] = self.steps[t] | {"final_value": final}

    @rule(name=st.sampled_from(["extra", "reward"]), seed=st.integers(0, 99))
    def attach(self, name: str, seed: int) -> None:
        column = np.random.default_rng(seed).normal(size=(len(self.steps), 2)).astype(np.float32)
        self.rollout[name] = column
        if name == "extra":
            self.attached[name] = column
        else:
            self.steps = [each | {"reward": row} for each, row in zip(self.steps, column, strict=True)]

    @rule(masks=st.lists(BOOLS, min_size=4, max_size=4))
    def set_mask(self, masks: Any) -> None:
        masks = np.array(masks)[: len(self.steps)]
        self.rollout["mask"] = masks
        self.steps = [each | {"mask": row} for each, row in zip(self.steps, masks, strict=True)]

    @rule()
    def clear(self) -> None:
        self.rollout.clear()
        self.steps, self.attached, self.last = [], {}, None

    @rule(partial=st.booleans())
    def finish(self, partial: bool) -> None:
        if not self.steps:
            with pytest.raises(errors.EmptyError):
                self.rollout.finish(GAE(), partial=partial)
            return
        newest = self.steps[-1]
        real = stack(self.steps, "mask")
        missing = stack(self.steps, "truncated") & ~stack(self.steps, "terminated") & real
        missing &= np.isnan(stack(self.steps, "final_value"))
        if not (partial or self.wrap or len(self.steps) == self.capacity) or (
            self.last is None and (~(newest["terminated"] | newest["truncated"]) & real[-1]).any()
        ):
            with pytest.raises(errors.UnfinishedError):
                self.rollout.finish(GAE(), partial=partial)
        elif missing.any():
            with pytest.raises(errors.FieldError, match="final_value"):
                self.rollout.finish(GAE(), partial=partial)
        else:
            self.rollout.finish(GAE(), partial=partial)
            block = block_of(self.steps)
            block["value"][-1] = np.zeros(2) if self.last is None else self.last
            advantage, ret = oracle.gae(**block)
            np.testing.assert_allclose(self.rollout["advantage"], advantage, rtol=1e-4, atol=1e-3)
            np.testing.assert_allclose(self.rollout["return"], ret, rtol=1e-4, atol=1e-3)
            for name in ("advantage", "return"):
                self.attached[name] = self.rollout[name].numpy().copy()

    @rule(size=st.integers(1, 9), epochs=st.integers(1, 2))
    def minibatches(self, size: int, epochs: int) -> None:
        if not self.steps:
            with pytest.raises(errors.EmptyError):
                self.rollout.minibatches(size)
            return
        rows = stack(self.steps, "action")[stack(self.steps, "mask")].tolist()
        batches = list(self.rollout.minibatches(size, epochs=epochs))
        per_epoch = math.ceil(len(rows) / size)
        assert len(batches) == per_epoch * epochs
        for k in range(epochs):
            order = reference.permutation(len(rows), self.seed, self.draws)
            assert ids(batches[k * per_epoch : (k + 1) * per_epoch]) == [rows[i] for i in order]
            self.draws += 1

    @invariant()
    def both_read_alike(self) -> None:
        if not hasattr(self, "rollout"):
            return
        rollout, steps = self.rollout, self.steps
        assert holds(rollout, steps)
        assert rollout.is_full == (len(steps) == self.capacity)
        assert sorted(rollout.keys()) == sorted([*SCHEMA.names, "mask", "final_value", *self.attached])
        for name, column in self.attached.items():
            assert np.array_equal(rollout[name], column)
        if steps:
            real = stack(steps, "mask")
            assert len(rollout) == real.sum()
            flat = rollout.flat()
            assert ids(flat) == stack(steps, "action")[real].tolist()
            for name, column in self.attached.items():
                assert flat[name].tolist() == column[real].tolist()
        else:
            assert len(rollout) == 0


RolloutBesideAList.TestCase.settings = settings(
    max_examples=max(200, settings.default.max_examples if settings.default else 0), stateful_step_count=30
)
TestRolloutBesideAList = RolloutBesideAList.TestCase


# -- fields that come later, and copies ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("before", [0, 2, 5])
def test_a_field_that_comes_later_is_zero_before_and_moves_nothing_else(before: int, wrap: bool) -> None:
    first, later = play(before, seed=1), play(5 - before + 3 * wrap, seed=2)
    rollout = RolloutBuffer(SCHEMA, 5, 2, wrap=wrap, seed=0)
    for each in first:
        rollout.add(each)
    if first:
        rollout["extra"] = torch.arange(2.0 * before).view(before, 2)
    where = rollout.block["obs"].data_ptr()
    rollout.add_fields(more={"a": (3,), "b": Field((), torch.int64)})
    assert rollout.block["obs"].data_ptr() == where
    assert not first or torch.equal(rollout["extra"], torch.arange(2.0 * before).view(before, 2))
    extended = [{**each, "more": {"a": np.full((2, 3), t + 1.0), "b": [t + 1, 0]}} for t, each in enumerate(later)]
    for each in extended:
        rollout.add(each)
    kept = [*first, *later][-5:]
    assert holds(rollout, kept)
    numbers = [*[0] * before, *range(1, len(later) + 1)][-5:]
    assert rollout["more", "b"][:, 0].tolist() == numbers
    assert rollout["more", "a"][:, 1, 2].tolist() == numbers
    assert rollout.schema.names[-1] == "more"
    if not rollout.is_full or wrap:
        with pytest.raises(errors.FieldError, match="lacks 'more'"):
            rollout.add(later[0])
    for taken in ("obs", "mask", "final_value", "more"):
        with pytest.raises(errors.SchemaError, match="such a column already"):
            rollout.add_fields(**{taken: ()})


@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_pickled_rollout_is_one_of_its_own_that_goes_on_alike(count: int) -> None:
    rollout = RolloutBuffer(SCHEMA, 5, 2, wrap=True, seed=0)
    for each in play(count):
        rollout.add(each)
    if count:
        rollout["extra"] = torch.arange(2.0 * rollout.steps).view(-1, 2)
        list(rollout.minibatches(3))
    for again in (pickle.loads(pickle.dumps(rollout)), copy.deepcopy(rollout)):
        original = copy.deepcopy(rollout)
        assert same_data(again.block, original.block)
        for each in play(2, seed=7):
            again.add(each)
            original.add(each)
        assert same_data(again.data(), original.data())
        assert holds(again, [*play(count), *play(2, seed=7)][-5:])
        assert [ids(x) for x in again.minibatches(3)] == [ids(x) for x in original.minibatches(3)]
    assert holds(rollout, play(count)[-5:])
