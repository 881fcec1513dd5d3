"""Rollouts of random steps, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from relive import Field, RolloutBuffer, Schema
from relive.batches import leaves_by_path

Step = dict[str, Any]

SCHEMA = Schema(
    {
        "obs": (2,),
        "action": Field((), torch.int64),
        "reward": (),
        "terminated": Field((), torch.bool),
        "truncated": Field((), torch.bool),
        "value": (),
        "log_prob": (),
    }
)
WITHOUT_VALUE = Schema({"reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)})
NAN = float("nan")


def step(t: int, envs: int = 2, **changed: Any) -> Step:
    """Step number ``t``, which every number in it tells, as does the env; no episode ends."""
    env = np.arange(envs)
    fields = {
        "obs": np.stack([np.full(envs, t), env], 1).astype(np.float32),
        "action": 100 * t + env,
        "reward": (t + env / 8).astype(np.float32),
        "terminated": np.zeros(envs, bool),
        "truncated": np.zeros(envs, bool),
        "value": (-t - env / 8).astype(np.float32),
        "log_prob": (t / 4 + env).astype(np.float32),
    }
    return fields | changed


def play(count: int, envs: int = 2, *, seed: int = 0, masked: bool = False) -> list[Step]:
    """Steps with random ends, final values where they are needed, and masks if asked."""
    rng = np.random.default_rng([count, envs, seed])
    steps = []
    for t in range(count):
        terminated, truncated = rng.random(envs) < 0.2, rng.random(envs) < 0.3
        final = np.where(truncated & ~terminated, rng.normal(size=envs), np.nan).astype(np.float32)
        more = {"mask": rng.random(envs) < 0.7} if masked else {}
        steps.append(step(t, envs, terminated=terminated, truncated=truncated, final_value=final, **more))
    return steps


def filled(steps: Iterable[Step], num_steps: int | None = None, **options: Any) -> RolloutBuffer:
    """A rollout that was given these steps, with T for all of them unless ``num_steps`` says otherwise."""
    steps = list(steps)
    rollout = RolloutBuffer(SCHEMA, num_steps or len(steps), len(steps[0]["reward"]), **options)
    for each in steps:
        rollout.add(each)
    return rollout


def stack(steps: list[Step], name: str) -> np.ndarray:
    """The column ``[T, N, ...]`` of these steps."""
    default = {"mask": True, "final_value": NAN}.get(name)
    return np.stack([x[name] if name in x else np.full(len(x["reward"]), default) for x in steps])


def holds(rollout: RolloutBuffer, steps: list[Step]) -> bool:
    """Whether a rollout reads exactly as these steps, in every column."""
    if rollout.steps != len(steps):
        return False
    if not steps:
        return all(len(column) == 0 for column in rollout.data().values())
    names = [*SCHEMA.names, "mask", "final_value"]
    return all(
        np.array_equal(rollout[name], stack(steps, name).astype(rollout[name].numpy().dtype), True) for name in names
    )


def same_data(a: Any, b: Any) -> bool:
    """Whether two batches have equal fields and bits; NaN equals itself."""
    a, b = leaves_by_path(a), leaves_by_path(b)
    return set(a) == set(b) and all(
        x.dtype == b[name].dtype and np.array_equal(x, b[name], x.is_floating_point()) for name, x in a.items()
    )


def ids(batches: Any) -> list[int]:
    """The actions of batches, which name a step and its env, in the order they came."""
    batches = batches if isinstance(batches, list) else [batches]
    return [int(action) for batch in batches for action in batch["action"]]


def all_ids(count: int, envs: int = 2) -> list[int]:
    """The actions of a rollout of ``count`` steps, time first."""
    return [100 * t + env for t in range(count) for env in range(envs)]


# Writing in place


def write_rows(views: Any, steps: list[Step]) -> None:
    """Write steps into reserved rows, as a simulator would; what a step does not have stays as it is preset."""
    for i, each in enumerate(steps):
        for name, x in each.items():
            views[name][i] = torch.as_tensor(x)


LAST = np.array([0.5, -1.25, 3.0])


def block_of(steps: list[Step]) -> dict[str, np.ndarray]:
    """The arguments of the oracle's estimators for these steps and LAST."""
    names = ["reward", "terminated", "truncated", "final_value", "mask"]
    value = np.concatenate([stack(steps, "value"), LAST[None, : len(steps[0]["value"])]])
    return {name: stack(steps, name) for name in names} | {"value": value}
