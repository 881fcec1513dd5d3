"""Columns: a ring in time, their names, dtypes and nesting, and rollouts that wrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import GAE, Batch, Field, GroupAdvantage, MonteCarlo, RolloutBuffer, Schema, TDLambda, errors
from relive.batches import as_batch, leaves_by_path
from relive.rollout.columns import Columns
from support import internals
from support.effort import every_nth
from support.rollouts import NAN, SCHEMA, Step, filled, holds, ids, play, same_data, stack, step, write_rows

# Columns


def ring(num_steps: int = 3, wrap: bool = True, **leaves: Field) -> Columns:
    """Columns of two envs."""
    return Columns(Schema({**(leaves or {"x": Field()})}), {}, (num_steps, 2), torch.device("cpu"), wrap)


def write(columns: Columns, *values: Any) -> None:
    """Write one row and go on."""
    columns.write(columns.next_row, values, {})
    advance(columns)


def advance(columns: Columns) -> None:
    """Take in one row, as the writer does: of a full ring it replaces the oldest."""
    columns.detach()
    if columns.is_full:
        columns.start = (columns.start + 1) % columns.num_steps
    else:
        columns.count += 1


@pytest.mark.parametrize("total", range(9))
def test_rows_are_read_in_the_order_of_time_however_often_the_ring_came_round(total: int) -> None:
    columns = ring()
    for t in range(total):
        write(columns, np.full(2, t, np.float32))
    newest = list(range(max(0, total - 3), total))
    assert columns.count == len(newest)
    assert columns.is_full == (total >= 3)
    assert columns.ordered(("x",)).tolist() == [[t, t] for t in newest]
    columns.put(("x",), columns.last_row, torch.tensor([-1.0, -2.0]))
    assert columns.with_last(("x",)).tolist() == [*([t, t] for t in newest), [-1, -2]]
    assert columns.ordered(("x",)).tolist() == [[t, t] for t in newest]
    for i, t in enumerate(newest):
        assert columns.view(("x",))[columns.place(torch.tensor(i))].tolist() == [t, t]


def test_columns_that_do_not_wrap_refuse_what_is_too_much() -> None:
    columns = ring(num_steps=1, wrap=False)
    write(columns, np.ones(2, np.float32))
    with pytest.raises(errors.FullError, match=r"already has its 1 steps.*clear\(\).*wrap=True"):
        _ = columns.next_row


def test_arrays_and_tensors_may_be_mixed_in_a_row() -> None:
    columns = ring(
        a=Field((2,)), b=Field((), torch.int64), c=Field((), torch.bfloat16), d=Field((0,)), e=Field((3,), torch.uint8)
    )
    for t in range(2):
        row: list[Any] = [
            torch.full((2, 2), t + 0.5),
            np.full(2, t),
            torch.full((2,), t + 1.5, dtype=torch.bfloat16),
            torch.empty(2, 0),
            np.full((2, 3), t, np.uint8),
        ]
        write(columns, *row)
    assert columns.ordered(("a",))[:, :, 0].tolist() == [[0.5, 0.5], [1.5, 1.5]]
    assert columns.ordered(("b",)).tolist() == [[0, 0], [1, 1]]
    assert columns.ordered(("c",)).tolist() == [[1.5, 1.5], [2.5, 2.5]]
    assert columns.ordered(("e",))[:, :, 2].tolist() == [[0, 0], [1, 1]]


def test_a_row_of_arrays_after_one_of_tensors_does_not_copy_the_tensors_again() -> None:
    columns = ring(a=Field(), b=Field())
    write(columns, torch.ones(2), torch.ones(2))
    write(columns, np.full(2, 2, np.float32), torch.full((2,), 2.0))
    write(columns, np.full(2, 3, np.float32), np.full(2, 3, np.float32))
    for name in "ab":
        assert columns.ordered((name,)).tolist() == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("total", [2, 3, 4, 5])
def test_an_attached_column_is_in_the_order_of_time_and_goes_with_the_next_row(total: int) -> None:
    columns = ring()
    for t in range(total):
        write(columns, np.full(2, t, np.float32))
    column = columns.ordered(("x",)) * 10
    columns.attach({("y",): column})
    assert torch.equal(columns.ordered(("y",)), column)
    assert columns.present == [("x",), ("mask",), ("y",)]
    advance(columns)
    assert columns.present == [("x",), ("mask",)]


def test_an_attached_column_of_another_shape_or_dtype_replaces_the_old_one() -> None:
    columns = ring()
    write(columns, np.zeros(2, np.float32))
    for column in (torch.ones(1, 2), torch.ones(1, 2, 3), torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, 2)):
        columns.attach({("y",): column})
        assert columns.ordered(("y",)).dtype is column.dtype
        assert torch.equal(columns.ordered(("y",)), column)


def test_nested_leaves_become_a_nested_batch_of_the_same_memory() -> None:
    x = torch.zeros(2, 3)
    tree = as_batch({("a", "b", "0"): x, ("a", "c"): torch.ones(2), ("d",): torch.ones(2, 1)})
    assert tree["a", "b", "0"].data_ptr() == x.data_ptr()
    assert len(tree["a"]) == 2
    assert list(tree) == ["a", "d"]
    assert type(tree) is type(tree["a"]) is Batch
    assert tree.rows(1)["a", "c"] == 1


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


@pytest.mark.parametrize(
    ("total", "estimator", "masked"),
    every_nth(3, [3, 4, 5, 6, 7, 8, 11], [GAE(), MonteCarlo(), TDLambda(), GroupAdvantage(2)], [False, True]),
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


@pytest.mark.parametrize("apart", [{}, {"action": [3, 4]}], ids=["arrays", "lists"])
def test_a_step_that_takes_an_old_place_has_its_own_mask_and_no_old_final_value(apart: dict[str, Any]) -> None:
    rollout = filled([step(t) for t in range(4)], num_steps=4, wrap=True)
    rollout["mask"] = torch.tensor([[False, True], [True, True], [True, False], [True, True]])
    rollout["final_value"] = torch.full((4, 2), 7.0)
    for t in (4, 5, 6):
        rollout.add(step(t, truncated=[True, False]) | apart)
    assert rollout["mask"].all()
    assert rollout["final_value"][0].tolist() == [7, 7]
    assert rollout["final_value"][1:].isnan().all()


@pytest.mark.parametrize("wrong", [{"reward": [0.0, NAN]}, {"obs": np.zeros((2, 3))}], ids=["a NaN", "a shape"])
def test_a_step_that_a_full_ring_refuses_leaves_its_oldest_step_and_what_was_attached(wrong: dict[str, Any]) -> None:
    rollout = filled(play(6), num_steps=4, wrap=True, debug=True)
    rollout.finish(GAE(), last_value=[1, 2])
    before, starts = rollout.data().clone(), internals.flags(rollout)().starts
    with pytest.raises(errors.ReliveError):
        rollout.add(step(9) | wrong)
    assert same_data(rollout.data(), before)
    assert np.array_equal(internals.flags(rollout)().starts, starts)


def test_rows_are_reserved_up_to_the_seam_and_written_over_the_oldest() -> None:
    rollout = filled([step(t) for t in range(5)], num_steps=4, wrap=True)
    views = rollout.reserve()
    assert views["reward"].shape == (3, 2)
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
    batches = [rollout.flat(), Batch.joined([*rollout.minibatches(4)], [*rollout.flat()], {}), rollout.sample(6)]
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


ASKED = {
    "members": (
        (("obs", "body"), ("action", "1")),
        {("obs", "body", "0", "arm"), ("obs", "body", "1"), ("action", "1")},
    ),
    "a member and its field": ((("obs", "cam"), "obs"), {path for path in LEAVES if path[0] == "obs"}),
    "attached": ((("extra", "a"), ("terminated",)), {("extra", "a"), ("terminated",)}),
}


@pytest.mark.parametrize("kind", ASKED)
def test_members_of_nested_fields_are_asked_for_by_their_paths(kind: str) -> None:
    fields, leaves = ASKED[kind]
    flags = {name: np.zeros(2, bool) for name in ("terminated", "truncated")}
    rollout = RolloutBuffer(Schema.from_example(nested_step(0, 2) | flags, num_envs=2), 3, 2)
    for t in range(3):
        rollout.add(nested_step(t, 2) | flags)
    rollout["extra", "a"] = rollout["extra", "b"] = torch.ones(3, 2)
    for batch in (rollout.flat(fields), *rollout.minibatches(6, shuffle=False, fields=fields)):
        assert set(leaves_by_path(batch)) == {*leaves}
        assert all(torch.equal(batch[path], rollout.flat()[path]) for path in leaves)
    assert set(leaves_by_path(rollout.sample(1, fields))) == set(leaves_by_path(rollout.flat(fields)))
    whole = next(rollout.env_batches(2, shuffle=False, sequences=fields, fields=fields))
    assert all(torch.equal(whole.steps[path], rollout[path]) for path in leaves)
    assert ("obs", "cam") in next(rollout.env_batches(2, sequences=(("obs", "body"),))).steps
    for seq in (next(rollout.sequences(3, fields=fields, shuffle=False)), next(rollout.chunks(3, fields=fields))):
        assert all(torch.equal(seq[path], rollout[path]) for path in leaves)
        assert ("obs", "cam") in leaves or "cam" not in str(set(seq))
    with pytest.raises(errors.FieldError, match=r"unknown field 'body'.*named by its path, \('obs', 'body'\)"):
        rollout.flat(("obs", "body"))
    for wrong, message in (
        ((("obs", "arm"),), r"\('obs', 'arm'\)|obs.arm"),
        (((),), "path such as"),
        ((1,), "path such as"),
    ):
        with pytest.raises(errors.FieldError, match=message):
            rollout.flat(wrong)  # pyright: ignore[reportArgumentType]


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
