"""Shards in this process, behind a link that can lose messages and kill them: what Ray does, without its seconds."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import relive
from relive.cluster.messages import Link
from relive.cluster.replay import Replay
from relive.cluster.shard import Shard, ShardPlan

SCHEMA = relive.Schema(
    {
        "obs": relive.Field((3,)),
        "action": relive.Field((), torch.int64),
        "reward": relive.Field(()),
        "terminated": relive.Field((), torch.bool),
        "truncated": relive.Field((), torch.bool),
    }
)


def sent(message: Any) -> Any:
    """What comes out at the other end: a copy, whose arrays are read-only as in Ray's object store."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


class LocalLink(Link):
    """Shards that answer at once, unless they are down. A call that is made while a shard is down fails."""

    def __init__(self, plans: list[ShardPlan]) -> None:
        self.plans = [sent(plan) for plan in plans]
        self.shards: list[Shard | None] = [Shard(plan) for plan in self.plans]
        self.calls: list[tuple[int, str]] = []
        self._one = threading.RLock()  # one call ends before the next begins
        self.lose_answers_of: set[str] = set()
        """Methods that are run, and whose answers are lost."""
        self.silent: set[int] = set()
        """Shards that do not answer for now; what they are asked is never run."""

    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        with self._one:
            return self._called(shard, method, *arguments)

    def _called(self, shard: int, method: str, *arguments: Any) -> Any:
        self.calls.append((shard, method))
        mine = self.shards[shard]
        if shard in self.silent:
            return "silence", None
        if mine is None:
            return "failure", None
        try:
            answer = sent(getattr(mine, method)(*sent(arguments)))
        except Exception as error:
            return "error", error
        return ("failure", None) if method in self.lose_answers_of else ("answer", answer)

    def answers(self, calls: Mapping[int, Any], timeout: float) -> tuple[dict[int, Any], set[int]]:
        for kind, error in calls.values():
            if kind == "error":
                raise error
        found = {key: answer for key, (kind, answer) in calls.items() if kind == "answer"}
        return found, {key for key, (kind, _) in calls.items() if kind == "failure"}

    def close(self) -> None:
        self.shards = [None] * len(self.shards)

    def kill(self, shard: int) -> None:
        """The shard dies with all it has, and stays down."""
        self.shards[shard] = None

    def restart(self, shard: int) -> None:
        """It begins another life, as Ray would begin it."""
        self.shards[shard] = Shard(self.plans[shard])


def local(**options: Any) -> tuple[Replay, LocalLink]:
    """A replay of local shards, and the link to them."""
    links: list[LocalLink] = []

    def connect(plans: list[ShardPlan]) -> Link:
        links.append(LocalLink(plans))
        return links[0]

    options = {"schema": SCHEMA, "capacity": 400, "num_envs": 4, "shards": 2, "seed": 0, "timeout": 0.3} | options
    return Replay(connect=connect, **options), links[0]


def steps(count: int, envs: Any = range(4), start: int = 0, length: int = 7) -> dict[str, Any]:
    """Steps ``[T, N]`` of envs whose episodes have ``length`` steps: an observation is (env, time, what it is)."""
    envs = np.asarray(list(envs))
    time = np.repeat(np.arange(start, start + count)[:, None], len(envs), 1)
    env = np.broadcast_to(envs, time.shape)
    obs = np.stack([env, time, np.zeros_like(time)], -1).astype(np.float32)
    last = (time + env) % length == length - 1
    return {
        "obs": obs,
        "action": (env * 1000 + time).astype(np.int64),
        "reward": (env + time / 1024).astype(np.float32),
        "terminated": last & (time % 2 == 0),
        "truncated": last & (time % 2 == 1),
        "next_obs": (obs + np.array([0, 1, 0]) + last[..., None] * np.array([0, 0, 1])).astype(np.float32),
    }


def check(batch: Any) -> None:
    """Every row of a batch of transitions is of one step, and so is its next observation."""
    env, time = batch["obs"][:, 0], batch["obs"][:, 1]
    assert torch.equal(batch["action"], (env * 1000 + time).long())
    assert torch.equal(batch["reward"], env + time / 1024)
    done = batch["terminated"] | batch["truncated"]
    assert torch.equal(batch["next_obs"], batch["obs"] + torch.stack([env * 0, env * 0 + 1, done.float()], 1))
