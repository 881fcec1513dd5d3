# pyright: strict, reportUnknownMemberType=false
"""A user's program, which type checkers check in their strict modes: no value that relive gives is of an unknown type.

The one exception to pyright's strict mode is for torch and gymnasium, which leave parts of their methods' types open.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import relive
from relive.errors import ReliveError, SchemaError


def flags() -> dict[str, relive.Field]:
    return {"terminated": relive.Field((), torch.bool), "truncated": relive.Field((), torch.bool)}


def on_policy(folder: Path) -> float:
    schema = relive.Schema({"obs": (3,), "action": (2,), "reward": (), "value": (), "log_prob": (), **flags()})
    rollout = relive.RolloutBuffer(schema, num_steps=4, num_envs=2, seed=0)
    zeros, no = torch.zeros(2), torch.zeros(2, dtype=torch.bool)
    for _ in range(4):
        rollout.add(
            obs=torch.zeros(2, 3), action=torch.zeros(2, 2), reward=zeros, value=zeros, log_prob=zeros,
            terminated=no, truncated=no,
        )  # fmt: skip
    assert_type(rollout.is_full, bool)
    rollout.finish(relive.GAE(gamma=0.9, lam=0.95), last_value=zeros)
    critic, loss = nn.Linear(3, 1), 0.0
    for batch in rollout.minibatches(4, epochs=2):
        assert_type(batch, relive.Batch)
        loss += float(critic(batch["obs"]).detach().sum())
    rollout.save(folder / "rollout")
    assert_type(relive.RolloutBuffer.load(folder / "rollout"), relive.RolloutBuffer)
    return loss


def off_policy() -> int:
    schema = relive.Schema({"obs": (3,), "action": (2,), "reward": (), **flags()})
    sampler, view = relive.Prioritized(alpha=0.6), relive.NStep(3, gamma=0.99)
    replay = relive.ReplayBuffer(schema, 100, num_envs=2, sampler=sampler, view=view, seed=0)
    assert_type(replay, relive.ReplayBuffer[relive.Prioritized, relive.NStep])
    zeros, no = torch.zeros(2), torch.zeros(2, dtype=torch.bool)
    for _ in range(9):
        replay.add(obs=torch.zeros(2, 3), action=torch.zeros(2, 2), reward=zeros, terminated=no, truncated=no)
    assert_type(replay.batches(2, 8), Iterator[relive.Batch])
    batch = replay.sample(8)
    assert_type(batch, relive.Batch)
    replay.update_priorities(batch["index"], torch.zeros(8))
    windows = relive.ReplayBuffer(schema, 100, view=relive.Sequence(4))
    windows.extend({name: torch.zeros(9, 1, *field.shape, dtype=field.dtype) for name, field in fields(schema).items()})
    steps = windows.sample(2)
    assert_type(steps, relive.SequenceBatch)
    assert_type(steps["mask"], Tensor)
    assert_type(replay.capacity, int)
    return len(replay)


def fields(schema: relive.Schema) -> dict[str, relive.Field]:
    return {path[0]: field for path, field in schema.leaves.items()}


def refused() -> str:
    try:
        relive.Schema({"obs": (-1,)})
    except SchemaError as error:
        base: ReliveError = error
        return str(base)
    return ""
