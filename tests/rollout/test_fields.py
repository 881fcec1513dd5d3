"""The fields of a rollout: their dtypes, and how they are nested."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, RolloutBuffer, Schema, errors
from rollouts import Step

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
