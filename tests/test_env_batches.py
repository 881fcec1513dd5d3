"""Rollouts in batches of whole envs, columns that no step brings, epochs alike, and memory that is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, RolloutBuffer, Schema
from relive.errors import SchemaError, ShapeError
from relive.memory import Recycled

T, N = 7, 5
FLAG = Field((), torch.bool)
SCHEMA = Schema({"obs": (2,), "reward": (), "terminated": FLAG, "truncated": FLAG, "hidden": (1, 3)})


def filled(**options: Any) -> RolloutBuffer:
    """``obs``, ``reward`` and ``hidden`` number the steps, ``t * N + n``."""
    buffer, rng = RolloutBuffer(SCHEMA, T, N, seed=0, **options), np.random.default_rng(1)
    for t in range(T):
        number = np.arange(N, dtype=np.float32) + t * N
        buffer.add(
            obs=np.repeat(number[:, None], 2, 1), reward=number, terminated=rng.random(N) < 0.3,
            truncated=np.zeros(N, bool), hidden=np.tile(number[:, None, None], (1, 1, 3)),
        )  # fmt: skip
    return buffer


@pytest.mark.parametrize("epochs", [1, 3])
def test_batches_of_whole_envs_have_all_steps_and_the_same_as_trajectories(epochs: int) -> None:
    buffer, seen = filled(), list[int]()
    for batch in buffer.env_batches(num_batches=2, epochs=epochs):
        envs = batch.envs.tolist()
        seen += envs
        assert torch.equal(batch.steps["reward"], buffer["reward"][:, envs])
        steps = batch.sequences.flat(batch.sequences["obs"]).view(len(envs), T, 2).transpose(0, 1)
        assert torch.equal(steps, buffer["obs"][:, envs])
        assert torch.equal(batch.sequences["hidden"][0, :, 0], batch.sequences["obs"][0, :, 0])
        ends = buffer["terminated"][:-1, envs].sum() + len(envs)
        assert batch.sequences["mask"].shape == (T, ends)
    assert sorted(seen) == sorted(list(range(N)) * epochs)
    orders = [tuple(seen[i : i + N]) for i in range(0, len(seen), N)]
    assert len(set(orders)) == epochs


def test_whole_envs_keep_their_order_without_shuffling_and_sizes_are_checked() -> None:
    buffer = filled()
    assert [batch.envs.tolist() for batch in buffer.env_batches(2, shuffle=False)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ShapeError, match="5 envs make 1 to 5"):
        buffer.env_batches(num_batches=6)


def test_epochs_are_alike_only_if_that_is_asked_for() -> None:
    for reshuffle in (True, False):
        first, second = (b["reward"] for b in filled().minibatches(num_batches=1, epochs=2, reshuffle=reshuffle))
        assert torch.equal(first, second) is not reshuffle


def test_a_further_column_is_there_from_the_start_stays_and_is_saved(tmp_path: Path) -> None:
    buffer = filled(columns={"weight": Field()})
    assert buffer["weight"].shape == (T, N)
    buffer["weight"] = torch.full((T, N), 2.0)
    buffer.block["weight"][0] = 3
    assert buffer["weight"].sum() == 2 * T * N + N
    again = RolloutBuffer.load(buffer.save(tmp_path / "save") or tmp_path / "save")
    assert torch.equal(again["weight"], buffer["weight"])
    with pytest.raises(SchemaError, match="'reward'"):
        filled(columns={"reward": Field()})


def test_memory_is_used_again_once_nothing_looks_into_it() -> None:
    memory = Recycled()
    first = memory.empty((1000, 1000), torch.float32)
    place, view = first.data_ptr(), first[3:5].view(-1)
    del first
    other = memory.empty((1000, 1000), torch.float32)
    assert other.data_ptr() != place
    del view
    assert memory.empty((900, 1000), torch.float32).data_ptr() == place
    assert memory.empty((0, 4), torch.float32).shape == (0, 4)


def test_what_autograd_saved_keeps_its_memory() -> None:
    memory, weight = Recycled(), torch.ones((), requires_grad=True)
    values = memory.empty((1_000_000,), torch.float32).fill_(2)
    loss = (values * weight).sum()
    del values
    memory.empty((1_000_000,), torch.float32).fill_(7)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 2_000_000
