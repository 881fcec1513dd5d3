"""Loops that store experience rightly, and the same with one mistake each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from support.effort import often

Arrays = dict[str, Any]


def walk(
    episodes: int = often(20, 60), seed: int = 0, limit: int = 40, stop: float = 0.03, dims: int = 3
) -> list[Arrays]:
    """Episodes of a drifting point that starts near 0: some terminate by themselves, others at a time limit."""
    return [{name: x.copy() for name, x in episode.items()} for episode in _walk(episodes, seed, limit, stop, dims)]


@cache
def _walk(episodes: int, seed: int, limit: int, stop: float, dims: int) -> list[Arrays]:
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


def blocks(loop: Callable[[list[Arrays]], Arrays] = stored, envs: int = 3, seed: int = 0,
           episodes: int = often(7, 20)) -> Arrays:  # fmt: skip
    """Steps ``[T, N, ...]`` of a loop over N envs, cut to one length."""
    parts = [loop(walk(episodes, seed=envs * seed + i)) for i in range(envs)]
    size = min(len(part["reward"]) for part in parts)
    return {name: np.stack([part[name][:size] for part in parts], 1) for name in parts[0]}


def value_of(obs: Any) -> Any:
    """What a critic might say of observations ``[..., D]``."""
    return 10 + 3 * np.sin(obs).sum(-1)


def rollout(mistake: str = "", gamma: float = 0.99, lam: float = 0.9, seed: int = 0) -> Arrays:
    """A rollout ``[T, N, ...]`` with values and advantages, right or with one mistake in how these were computed."""
    rows = blocks(envs=often(4, 6), seed=seed)
    reward, terminated, truncated = (rows[name] for name in ("reward", "terminated", "truncated"))
    value, final, done = value_of(rows["obs"]), value_of(rows["next_obs"]), terminated | truncated
    after = np.append(value[1:], final[-1:], 0)  # V of the following row
    flags = {"late": np.append(done[1:], done[-1:], 0), "through": terminated}.get(mistake, done)
    worth = np.where(truncated, final, 0.0)
    worth = {"terminal": 0 * worth, "before": np.where(truncated, value, 0.0),
             "next": np.where(truncated, after, 0.0)}.get(mistake, worth)  # fmt: skip
    if mistake == "open":
        after[-1] = 0
    advantage, next_one = np.zeros_like(value), np.zeros(value.shape[1])
    for t in reversed(range(len(reward))):
        bootstrap = np.where(flags[t], 0.0 if mistake == "late" else worth[t], after[t])
        next_one = reward[t] + gamma * bootstrap - value[t] + gamma * lam * ~flags[t] * next_one
        advantage[t] = next_one
    if mistake == "edited":
        rows["reward"] = (reward + gamma * worth).astype(np.float32)
    columns = {"value": value, "advantage": advantage, "final_value": np.where(truncated, final, np.nan)}
    del rows["next_obs"]
    return rows | {name: x.astype(np.float32) for name, x in columns.items()}


def final_of_all(envs: int = 3) -> Arrays:
    """``info["final_obs"]`` is stored for every env as soon as one of them ended; it holds zeros for the others."""
    rows = blocks(envs=envs)
    ended = rows["terminated"] | rows["truncated"]
    wrong = ended.any(1, keepdims=True) & ~ended
    return {**rows, "next_obs": np.where(wrong[..., None], 0, rows["next_obs"]).astype(np.float32)}


def windows(mistake: str, n: int = 3, gamma: float = 0.99) -> Arrays:
    """n-step transitions ``[T, N, ...]``, right or with one mistake at ends.

    ``first``: the flag of the window's first step is not looked at. ``others``: one env's end cuts all windows.
    ``tails``: the last n - 1 steps of an episode begin no window. ``sums``: flags are added up, since windows go on.
    """
    rows = blocks(episodes=20)
    size, ended = len(rows["reward"]) - n, rows["terminated"] | rows["truncated"]
    out = {name: x[:size].copy() for name, x in rows.items()}
    out["terminated"] = out["terminated"].astype(np.float32)
    keep = np.ones((size, ended.shape[1]), bool)
    for t in range(size):
        for i in range(ended.shape[1]):
            cut = ended.any(1) if mistake == "others" else ended[:, i]
            k = 0
            while k < n - 1 and (mistake == "sums" or not cut[t + k] or (mistake == "first" and k == 0)):
                k += 1
            out["reward"][t, i] = sum(gamma**j * rows["reward"][t + j, i] for j in range(k + 1))
            out["next_obs"][t, i] = rows["next_obs"][t + k, i]
            flags = rows["terminated"][t : t + k + 1, i]
            out["terminated"][t, i] = flags.sum() if mistake == "sums" else flags[-1]
            out["truncated"][t, i] = rows["truncated"][t + k, i]
            keep[t, i] = k == n - 1
    if mistake == "tails":
        count = keep.sum(0).min()
        return {name: np.stack([x[keep[:, i], i][:count] for i in range(keep.shape[1])], 1) for name, x in out.items()}
    return out


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


def ring_of(steps: int, envs: int, values: int, rows: int) -> TensorDict:
    """TensorDicts ``[rows, envs]`` as TorchRL's storage keeps the newest of ``steps`` steps that do not end.

    Observations are independent, out of ``values`` different ones. The reward and the action are 100 times the env plus
    the step.
    """
    obs = torch.from_numpy(np.random.default_rng(0).integers(values, size=(steps + 1, envs, 1)).astype(np.float32))
    reward = torch.arange(steps)[:, None, None] + 100.0 * torch.arange(envs)[None, :, None]
    never = torch.zeros(steps, envs, 1, dtype=torch.bool)
    after = {"observation": obs[1:], "reward": reward, "done": never, "terminated": never, "truncated": never}
    ring = TensorDict({"observation": obs[:-1], "action": reward.clone(), "next": TensorDict(after)})
    ring.auto_batch_size_(2)
    kept = torch.arange(steps)[-rows:]
    found = ring[:1].expand(rows, envs).clone()
    found[kept % rows] = ring[kept]
    return found
