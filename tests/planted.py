"""Loops that store experience rightly, and the same with one mistake each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, Any]


def walk(
    episodes: int = 60, seed: int = 0, limit: int = 40, stop: float = 0.03, dims: int = 3, goal: bool = False
) -> list[Arrays]:
    """Episodes of a drifting point that starts near 0: some terminate by themselves, others at a time limit."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(episodes):
        obs = [rng.normal(0, 0.1, dims)]
        action, reward, terminated, truncated = [], [], [], []
        for t in range(limit):
            a = rng.uniform(-1, 1, 2)
            obs.append(obs[-1] + 0.5 + 0.1 * a[0] + rng.normal(0, 0.05, dims))
            action.append(a)
            reward.append(1.0 + a[1] ** 2 - 0.05 * obs[-2][0])
            terminated.append(bool(rng.random() < stop))
            truncated.append(not terminated[-1] and t == limit - 1)
            if terminated[-1]:
                break
        found.append({
            "obs": np.array(obs, np.float32), "action": np.array(action, np.float32),
            "reward": np.array(reward, np.float32), "terminated": np.array(terminated),
            "truncated": np.array(truncated),
        })  # fmt: skip
    return found


def stored(episodes: list[Arrays]) -> Arrays:
    """Episodes as a loop should store them: flat, with the true observation after each step."""
    one = {
        name: np.concatenate([e[name] for e in episodes]) for name in ("action", "reward", "terminated", "truncated")
    }
    one["obs"] = np.concatenate([e["obs"][:-1] for e in episodes])
    one["next_obs"] = np.concatenate([e["obs"][1:] for e in episodes])
    return one


def reset_as_final(episodes: list[Arrays]) -> Arrays:
    """SAME_STEP autoreset: the observation that step() returned at an end is the next episode's first."""
    found = stored(episodes)
    ends = np.flatnonzero(found["terminated"] | found["truncated"])[:-1]
    found["next_obs"][ends] = found["obs"][ends + 1]
    return found


def ignored_steps(episodes: list[Arrays]) -> Arrays:
    """NEXT_STEP autoreset: after each end, the step that the env ignored."""
    parts: dict[str, list[Any]] = {name: [] for name in stored(episodes)}
    for this, following in zip(episodes, [*episodes[1:], None], strict=True):
        rows = stored([this])
        for name, rows_of in rows.items():
            parts[name].append(rows_of)
        if following is not None:
            parts["obs"].append(this["obs"][-1:])
            parts["next_obs"].append(following["obs"][:1])
            parts["action"].append(np.zeros((1, 2), np.float32))
            parts["reward"].append(np.zeros(1, np.float32))
            for name in ("terminated", "truncated"):
                parts[name].append(np.zeros(1, np.bool_))
    return {name: np.concatenate(rows) for name, rows in parts.items()}


def without_next_obs(arrays: Arrays) -> Arrays:
    """The following row has to serve as the next observation."""
    return {name: x for name, x in arrays.items() if name != "next_obs"}


def shifted(name: str, by: int) -> Callable[[list[Arrays]], Arrays]:
    """A field one row off."""

    def loop(episodes: list[Arrays]) -> Arrays:
        found = stored(episodes)
        for field in (name,) if name != "flags" else ("terminated", "truncated"):
            found[field] = np.roll(found[field], by)
        return found

    return loop


def truncated_as_terminal(episodes: list[Arrays]) -> Arrays:
    """done = terminated | truncated, stored as terminated."""
    found = stored(episodes)
    found["terminated"] |= found["truncated"]
    found["truncated"] = np.zeros_like(found["truncated"])
    return found


def n_step(episodes: list[Arrays], n: int = 3, gamma: float = 0.99, own_flags: bool = False) -> Arrays:
    """n-step transitions that run over ends; with ``own_flags`` they stop there, and keep the first step's flag."""
    found = stored(episodes)
    size = len(found["reward"]) - n
    out = {name: x[:size].copy() for name, x in found.items()}
    ended = found["terminated"] | found["truncated"]
    for i in range(size):
        k = 0
        while k < n - 1 and not (own_flags and ended[i + k]):
            k += 1
        out["reward"][i] = sum(gamma**j * found["reward"][i + j] for j in range(k + 1))
        out["next_obs"][i] = found["next_obs"][i + k]
    return out
