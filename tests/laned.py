"""Steps that come to a replay through lanes: plays that an oracle follows, and the processes that write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from relive import Field, Lanes, ReplayBuffer, Schema
from twins import Twin, stacked

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
COUNTED = Schema({"obs": (2,), "reward": (), **FLAGS})


def counted(number: int, num_envs: int = 1, end: bool = False) -> dict[str, Any]:
    """A step of which every value says its number; each env adds 1000."""
    values = np.arange(num_envs, dtype=np.float32) * 1000 + number
    flags = np.full(num_envs, end)
    step = {"obs": np.stack([values, -values], 1), "reward": values, "terminated": flags, "truncated": flags & False}
    return step | ({"next_obs": np.stack([values + 0.5, -values], 1)} if end else {})


def numbers(replay: ReplayBuffer, env: int = 0) -> list[float]:
    """The rewards of an env's rows, in the order of time; final observations are left out."""
    rows = replay.slice(env)
    kept = rows["obs"][:, 0] == rows["reward"]
    return rows["reward"][kept].tolist()


class LanedTwin(Twin):
    """A twin whose steps take a lane; ``check`` drains it first, and any other call may."""

    def __init__(self, *args: Any, steps: int = 5, drains: Sequence[bool] = (True,), **options: Any) -> None:
        super().__init__(*args, **options)
        self.lanes = Lanes(self.schema, 1, self.num_envs, steps=steps, own_next_obs=not self.ordered)
        self.writer, self.drains, self.turn = self.lanes.writer(0, timeout=0), list(drains), 0

    def add(self, kinds: str, envs: Sequence[int] | None = None, mask: Sequence[bool] | None = None) -> None:
        if self.lanes.waiting[0] == self.lanes.steps:
            self.drain()
        self.writer.add(self.step(kinds, envs, mask))
        self.turn += 1
        if self.drains[self.turn % len(self.drains)]:
            self.drain()

    def extend(self, plays: Sequence[str], masks: Sequence[Sequence[bool]] | None = None) -> None:
        self.drain()
        which = [None] * len(plays) if masks is None else masks
        self.writer.extend(stacked([self.step(k, mask=m, final=True) for k, m in zip(plays, which, strict=True)]))

    def interrupt(self, envs: Sequence[int] | None = None) -> None:
        for env in range(self.num_envs):
            self.truth.interrupt(env)
            self.lives[env].restart()
        self.writer.interrupt()

    def clear(self) -> None:
        self.drain()
        super().clear()

    def drain(self) -> None:
        self.lanes.drain(self.buffer)
        assert self.lanes.waiting == [0]

    def check(self) -> None:
        self.drain()
        super().check()


# What other processes do


def write_some(lanes: Lanes, lane: int, first: int, count: int) -> None:
    """Write so many numbered steps."""
    with lanes.writer(lane, timeout=30) as writer:
        for number in range(first, first + count):
            writer.add(counted(number, lanes.num_envs))


def own_and_end(lanes: Lanes) -> None:
    """Drain once, as the process with the replay, and end."""
    replay = ReplayBuffer(lanes.schema, 100, lanes.writers * lanes.num_envs)
    lanes.drain(replay)
