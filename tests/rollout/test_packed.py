"""Packed rows: what is gathered of them equals the columns at the same places."""

from __future__ import annotations

import cProfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import inside
import relive
from fields import DTYPES, LEAVES, bits, noise
from relive import Field, RolloutBuffer
from relive.memory.layout import LARGE_FIELD
from relive.rollout import buffer
from relive.rollout.minibatches import rows_of
from relive.steps.schema import Path

FIELDS = ("obs", "action", "reward", "value")


def filled(steps: int, envs: int) -> RolloutBuffer:
    flag = relive.Field((), torch.bool)
    schema = {"obs": (5,), "action": (2,), "reward": (), "terminated": flag, "truncated": flag, "value": ()}
    rollout, rng = RolloutBuffer(relive.Schema(schema), steps, envs, seed=1), np.random.default_rng(0)
    for _ in range(steps):
        numbers = {name: rng.standard_normal((envs, *schema[name])).astype(np.float32) for name in FIELDS}
        rollout.add(numbers, terminated=np.zeros(envs, bool), truncated=np.zeros(envs, bool))
    return rollout


@pytest.mark.parametrize("many", [1, 10**9])
def test_packing_does_not_change_a_batch(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = filled(40, 3)
    expected = [
        rollout.flat()[order] for order in torch.from_numpy(inside.permutations(rollout).next(120).numpy()).split(7)
    ]
    rollout.seed = 1
    monkeypatch.setattr(buffer, "MANY", many)
    for batch, want in zip(rollout.minibatches(7), expected, strict=True):
        assert all(torch.equal(batch[name], want[name]) for name in FIELDS)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_small_minibatch_takes_at_most_forty_calls(epochs: int) -> None:
    rollout = filled(512, 8)
    run = lambda: sum(1 for _ in rollout.minibatches(64, epochs=epochs, fields=FIELDS))  # noqa: E731
    run()
    profile = cProfile.Profile()
    profile.enable()
    count = run()
    profile.disable()
    assert count == 64 * epochs
    assert sum(entry.callcount for entry in profile.getstats()) <= 40 * count


def columns_of(leaves: dict[Path, Field], steps: int, envs: int) -> dict[Path, Tensor]:
    """A column ``[T, N, ...]`` of noise for each leaf."""
    return {
        path: noise((steps, envs, *field.shape), field.dtype, seed) for seed, (path, field) in enumerate(leaves.items())
    }


# Rows


@given(LEAVES, st.integers(1, 4), st.integers(1, 3), st.data())
def test_gathered_rows_equal_the_columns_at_their_index(
    leaves: dict[Path, Field], steps: int, envs: int, data: st.DataObject
) -> None:
    columns = columns_of(leaves, steps, envs)
    index = torch.tensor(data.draw(st.lists(st.integers(0, steps * envs - 1), max_size=8)), dtype=torch.int64)
    batch = rows_of(columns).gather(index)
    assert list(batch) == list(columns)
    for path, column in columns.items():
        want = column.flatten(0, 1)[index]
        assert (batch[path].shape, batch[path].dtype) == (want.shape, want.dtype)
        assert bits(batch[path]) == bits(want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_fields_at_the_limit_of_packing_are_gathered_exactly(dtype: torch.dtype, over: int) -> None:
    length = LARGE_FIELD // dtype.itemsize + over
    columns = columns_of({("a",): Field((3,), torch.uint8), ("large",): Field((length,), dtype), ("b",): Field()}, 3, 2)
    index = torch.tensor([5, 0, 0, 3])
    batch = rows_of(columns).gather(index)
    assert list(batch) == list(columns)
    for path, column in columns.items():
        assert bits(batch[path]) == bits(column.flatten(0, 1)[index])


def test_large_fields_alone_are_gathered_too() -> None:
    columns = columns_of({("image",): Field((84, 84, 4), torch.uint8), ("scan",): Field((300,))}, 2, 2)
    batch = rows_of(columns).gather(torch.tensor([3, 1]))
    for path, column in columns.items():
        assert bits(batch[path]) == bits(column.flatten(0, 1)[[3, 1]])


@pytest.mark.parametrize("length", [2, LARGE_FIELD])
def test_gathered_rows_are_a_copy(length: int) -> None:
    columns = {("x",): torch.ones(2, 2, length)}
    packed = rows_of(columns)
    packed.gather(torch.arange(4))["x",].zero_()
    assert packed.gather(torch.arange(4))["x",].min() == 1
    assert columns["x",].min() == 1
