"""Columns by name: those that are attached, overwritten and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import errors
from rollouts import filled, holds, same_data, stack, step

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
