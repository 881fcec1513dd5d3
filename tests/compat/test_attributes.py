"""Attributes under a host's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from relive.compat.base import Column, StepError, alias, breaks, write_column


class Buffer:
    numbers, tensors, nested = Column("number"), Column("tensor"), Column("nested")
    gamma = alias("_replay.view.gamma", "Discount per step.")

    def __init__(self) -> None:
        self._replay = SimpleNamespace(view=SimpleNamespace(gamma=0.9))
        self.columns: dict[str, Any] = {
            "number": np.zeros((2, 3)),
            "tensor": torch.zeros(2, 3),
            "nested": {"a": np.zeros(2), "b": np.zeros(2)},
        }

    def column(self, name: str) -> Any:
        return self.columns[name]


def test_a_column_is_the_storage_and_assigning_to_it_writes_into_the_storage() -> None:
    buffer = Buffer()
    before = buffer.tensors
    buffer.tensors = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    buffer.numbers = 7
    buffer.nested = {"a": [1, 2], "b": 3}
    assert buffer.tensors is before
    assert before.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert (buffer.numbers == 7).all()
    assert buffer.nested["a"].tolist() == [1, 2]
    assert buffer.nested["b"].tolist() == [3, 3]
    assert isinstance(Buffer.tensors, Column)


def test_a_tensor_of_another_shape_is_refused_by_the_name_of_the_attribute_and_nothing_is_written() -> None:
    buffer = Buffer()
    with pytest.raises(StepError, match=r"tensors: expected \(2, 3\), got \(3,\); assign a whole column"):
        buffer.tensors = torch.ones(3)
    with pytest.raises(StepError, match=r"x\['a'\]: expected \(2,\), got \(\)"):
        write_column("x", {"a": torch.zeros(2)}, {"a": 1.0})
    assert not buffer.tensors.any()


def test_a_step_that_ends_its_episode_is_no_break_wherever_the_next_one_begins() -> None:
    obs, next_obs = np.array([[0.0], [1.0], [5.0], [9.0]]), np.array([[1.0], [2.0], [6.0], [10.0]])
    done = np.array([[False], [True], [False], [False]])
    assert breaks(obs, next_obs, done)[:, 0].tolist() == [False, False, True]
    assert breaks(obs, next_obs, ~done)[:, 0].tolist() == [False, True, False]


def test_gradients_stay_out_of_a_column() -> None:
    buffer = Buffer()
    buffer.tensors = torch.ones(2, 3, requires_grad=True)
    assert not buffer.tensors.requires_grad


def test_an_alias_reads_and_sets_the_attribute_of_a_part_however_deep() -> None:
    buffer = Buffer()
    assert buffer.gamma == 0.9
    buffer.gamma = 0.5
    assert buffer._replay.view.gamma == 0.5
    assert Buffer.gamma.__doc__ == "Discount per step."
