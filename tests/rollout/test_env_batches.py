"""Rollouts in batches of whole envs, columns that no step brings, epochs alike, and memory that is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, RolloutBuffer, Schema
from relive.errors import ParameterError, SchemaError
from relive.memory.allocator import Recycled

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
    with pytest.raises(ParameterError, match="5 envs make 1 to 5"):
        buffer.env_batches(num_batches=6)


def test_each_epoch_puts_other_envs_together_and_each_call_finds_a_new_order() -> None:
    buffer = RolloutBuffer(SCHEMA, 1, 40, seed=0)
    zeros = np.zeros(40, np.float32)
    flags = np.zeros(40, bool)
    buffer.add(obs=zeros[:, None].repeat(2, 1), reward=zeros, terminated=flags, truncated=flags,
               hidden=np.zeros((40, 1, 3), np.float32))  # fmt: skip
    calls = []
    for _ in range(2):
        batches = [frozenset(batch.envs.tolist()) for batch in buffer.env_batches(num_batches=4, epochs=5)]
        assert len(set(batches)) == 20
        assert all(frozenset().union(*batches[i : i + 4]) == set(range(40)) for i in range(0, 20, 4))
        calls.append(batches)
    assert not set(calls[0]) & set(calls[1])


def test_batches_of_whole_envs_are_views_and_of_the_storage_only_without_shuffling() -> None:
    buffer = filled()
    for shuffle in (True, False):
        first, _, again, _ = buffer.env_batches(num_batches=2, epochs=2, shuffle=shuffle)
        places = [
            {x.untyped_storage().data_ptr() for x in (b.steps["reward"], b.sequences["obs"])} for b in (first, again)
        ]
        assert places[0] == places[1]
        stored = buffer["reward"].untyped_storage().data_ptr()
        assert (first.steps["reward"].untyped_storage().data_ptr() == stored) is not shuffle


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
    again = RolloutBuffer.load(buffer.save(tmp_path / "save").path)
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


@pytest.mark.parametrize("time_first", [True, False])
def test_a_part_of_a_batch_of_sequences_has_all_that_is_known_of_them(time_first: bool) -> None:
    (whole,) = filled().sequences(3, shuffle=False, time_first=time_first)
    part = whole.rows(slice(2, 5))
    assert len(part) == 3
    assert set(part) == set(whole)
    for name in whole:
        value, sliced = whole[name], part[name]
        axis = 1 if name == "hidden" or (value.dim() > 1 and time_first) else 0
        assert torch.equal(sliced, value.narrow(axis, 2, 3)), name
    assert part["hidden"].is_contiguous()
    assert torch.equal(
        part.flat(part["reward"]), whole.flat(whole["reward"])[whole["lengths"][:2].sum() :][: part.num_steps]
    )


def test_columns_without_numbers_are_read() -> None:
    empty = SCHEMA.extend(nothing=(0,), memory={"none": (0, 4)})
    buffer = RolloutBuffer(empty, 2, N, seed=0)
    for _ in range(2):
        zeros = {name: np.zeros((N, *field.shape), bool) for (name, *_), field in empty.leaves.items()}
        buffer.add({**zeros, "memory": {"none": np.zeros((N, 0, 4))}, "obs": np.zeros((N, 2)), "reward": np.zeros(N),
                    "hidden": np.zeros((N, 1, 3)), "nothing": np.zeros((N, 0))})  # fmt: skip
    for batch in buffer.env_batches(num_batches=2):
        assert batch.steps["nothing"].shape == (2, len(batch.envs), 0)
        assert batch.steps["memory", "none"].shape == (2, len(batch.envs), 0, 4)
