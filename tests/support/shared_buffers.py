"""Buffers that are sent, shared and copied."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from relive import (
    GAE,
    Batch,
    Field,
    Prioritized,
    Recent,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
    Uniform,
)
from support import internals

LARGE = Schema({"obs": (256,), "action": Field((), torch.int64), "reward": (), "terminated": Field((), torch.bool)})
LARGE = LARGE.extend(truncated=Field((), torch.bool), value=(), hidden=(2, 3), image=Field((4, 4), torch.uint8))
LARGE = LARGE.extend(half=Field((3,), torch.bfloat16))


def written(schema: Schema, envs: int, number: int, arrays: bool = False) -> dict[str, Any]:
    """A vector step in which every value says its number; every other field comes as a tensor, if not all as arrays."""
    step: dict[str, Any] = {}
    for i, (path, field) in enumerate(schema.leaves.items()):
        name = path[0]
        if name in ("terminated", "truncated"):
            step[name] = np.zeros(envs, np.bool_)
            continue
        value = torch.full((envs, *field.shape), number % 100, dtype=field.dtype)
        if arrays and field.dtype is torch.bfloat16:
            step[name] = value.to(torch.float32).numpy()
        else:
            step[name] = value.numpy() if (arrays or i % 2) and field.dtype is not torch.bfloat16 else value
    return step


def fill(rollout: RolloutBuffer, how: str, first: int) -> None:
    """One whole rollout whose steps are numbered from ``first`` on."""
    steps = [written(rollout.schema, rollout.num_envs, first + t) for t in range(rollout.num_steps)]
    if how == "add":
        for step in steps:
            rollout.add(step)
    else:
        rows = rollout.reserve()
        for t, step in enumerate(steps):
            for name, value in step.items():
                rows[name][t] = torch.as_tensor(value)
        rollout.commit()
    rollout.set_last(value=torch.zeros(rollout.num_envs))


def holds(rollout: RolloutBuffer, first: int) -> bool:
    """Whether columns, minibatches and advantages are those of the steps numbered from ``first`` on."""
    rollout.finish(GAE())
    batches = list(rollout.minibatches(num_batches=2))
    batch = Batch.joined(batches, set(batches[0]), {})
    for (name, *_), field in rollout.schema.leaves.items():
        if name in ("terminated", "truncated"):
            continue
        numbers = (torch.arange(first, first + rollout.num_steps) % 100).to(field.dtype)
        column, rows = rollout[name].flatten(1), batch[name].reshape(len(batch), -1)
        served = numbers.repeat_interleave(rollout.num_envs)
        if not torch.equal(column, numbers[:, None].expand_as(column)):
            return False
        if not torch.equal(rows.sort(0).values, served.sort().values[:, None].expand_as(rows)):
            return False
    return True


def sent(thing: Any) -> Any:
    """What a queue of torch.multiprocessing, or Process(args=...) that spawns, makes of it, on both of its sides."""
    return ForkingPickler.loads(ForkingPickler.dumps(thing))


IMAGES = Schema({"obs": Field((40, 32), torch.uint8), "small": (3,), "reward": (), "terminated": Field((), torch.bool)})
IMAGES = IMAGES.extend(truncated=Field((), torch.bool))


def replay_of(steps: int, rows: int = 64, schema: Schema = IMAGES, **options: Any) -> ReplayBuffer:
    """Two envs, each step with its number in every field."""
    replay = ReplayBuffer(schema, rows, 2, seed=0, **options)
    for t in range(steps):
        replay.add(written(schema, 2, t))
    return replay


# Copies


class Mine(Uniform):
    """A sampler of the user's that is one of relive's."""


class Wrapped:
    """One that has one of relive's, and keeps the ring in its own way."""

    per_row = ()

    def __init__(self, inner: Any = None) -> None:
        self.inner, self.rings, self.drawn = inner or Uniform(), {}, 0

    @property
    def watches(self) -> bool:
        return self.inner.watches

    def attach(self, ring: Any) -> None:
        self.rings["only"] = ring
        self.inner.attach(ring)

    def changed(self, places: Any, drawable: Any) -> None:
        self.inner.changed(places, drawable)

    def draw(self, count: int, key: int, update: int, of: int) -> Any:
        assert self.rings["only"] is internals.ring(self.inner)
        self.drawn += count
        return self.inner.draw(count, key, update, of)

    def nbytes(self, rows: int) -> int:
        return self.inner.nbytes(rows)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "Uniform": Uniform,
    "Mine": Mine,
    "Wrapped": Wrapped,
    "Wrapped(Prioritized)": lambda: Wrapped(Prioritized()),
    "Recent(Prioritized)": lambda: Recent(c_min=5, inner=Prioritized()),
}
