"""Readers of other libraries' rollouts, and of arrays as CleanRL keeps them. All is read by attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ...errors import ShapeError
from ...steps.arrays import as_host
from ..experience import Experience, from_arrays
from .order import as_blocks, in_time

__all__ = [
    "agilerl_rollout",
    "cleanrl_arrays",
    "embodichain_rollout",
    "is_cleanrl",
    "pytorchrl_rollout",
    "rsl_rl_rollout",
    "stable_baselines3_rollout",
]

IN_REWARDS = "its collector adds the value of a time limit's final observation to the reward there"


def stable_baselines3_rollout(buffer: Any) -> Experience:
    """Its rollout buffers: they keep where episodes start, not how they ended."""
    size, envs = (buffer.buffer_size if buffer.full else buffer.pos), buffer.n_envs

    def rows(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: rows(part) for name, part in cast("dict[str, Any]", values).items()}
        flat = values.shape[:1] == (buffer.buffer_size * envs,)  # get() flattens some columns, env by env
        ordered = values.reshape(envs, buffer.buffer_size, *values.shape[1:]).swapaxes(0, 1) if flat else values
        return ordered[:size]

    names = {
        "obs": "observations", "action": "actions", "reward": "rewards", "value": "values", "return": "returns",
        "advantage": "advantages", "log_prob": "log_probs",
    }  # fmt: skip
    fields = {ours: rows(getattr(buffer, theirs)) for ours, theirs in names.items()}
    numbers = {name: x.reshape(size, envs) for name, x in fields.items() if name not in ("obs", "action")}
    fields |= numbers | {"episode_start": np.asarray(buffer.episode_starts)[:size]}
    return _limits_in_rewards(from_arrays(fields, f"stable_baselines3 {type(buffer).__name__}", vector=True))


def _limits_in_rewards(found: Experience) -> Experience:
    """A rollout whose rewards hold the bootstrap values of time limits, so that each done counts as terminal."""
    found.judge_limits = False
    found.lacks += (IN_REWARDS,)
    return found


def rsl_rl_rollout(storage: Any) -> Experience:
    """Its rollout storage: ``dones`` are ends of both kinds. Time-outs are read where a storage keeps them."""
    size = storage.step
    names = {"rewards": "reward", "dones": "done", "values": "value", "returns": "return", "advantages": "advantage"}
    found = {ours: getattr(storage, theirs, None) for theirs, ours in names.items()}
    fields: dict[str, Any] = {name: as_blocks(x)[:size] for name, x in found.items() if x is not None}
    fields |= {"obs": in_time(storage.observations, size, False), "action": in_time(storage.actions, size, False)}
    time_outs = getattr(storage, "time_outs", None)
    if time_outs is not None and bool((as_host(time_outs)[:size] != 0).any()):
        fields["truncated"] = as_blocks(time_outs)[:size].astype(np.bool_)
        fields["final_value"] = as_blocks(storage.final_values)[:size]
        return from_arrays(fields, f"rsl_rl {type(storage).__name__}", vector=True)
    return _limits_in_rewards(from_arrays(fields, f"rsl_rl {type(storage).__name__}", vector=True))


def agilerl_rollout(buffer: Any) -> Experience:
    """Its rollout buffer: ``dones`` are ends of both kinds, and the next observation is what ``step()`` returned."""
    columns = {name: in_time(buffer.buffer[name], buffer.pos, buffer.full) for name in AGILERL if name in buffer.buffer}
    fields = {AGILERL[name]: column for name, column in columns.items()}
    found = from_arrays(fields, f"agilerl {type(buffer).__name__}", vector=True)
    found.begins = not (buffer.full and buffer.wrap_at_capacity)
    return found


AGILERL = {
    "observations": "obs", "next_observations": "next_obs", "actions": "action", "rewards": "reward", "dones": "done",
    "values": "value", "advantages": "advantage", "returns": "return", "log_probs": "log_prob",
}  # fmt: skip


def embodichain_rollout(buffer: Any) -> Experience:
    """Its rollout buffer ``[N, T + 1]``: the last slot holds the bootstrap value, and is no step."""
    rollout = buffer.buffer
    names = ["obs", "action", "reward", "terminated", "truncated", "value", "advantage", "return", "final_value"]
    fields = {name: in_time_major(rollout[name], buffer.rollout_len) for name in names if name in rollout.keys()}
    return from_arrays(fields, f"embodichain {type(buffer).__name__}", vector=True)


def in_time_major(values: Any, size: int) -> Any:
    """Columns ``[N, T + 1, ...]``, nested or not, as ``[T, N, ...]``."""
    if hasattr(values, "items"):
        return {name: in_time_major(part, size) for name, part in values.items()}
    return as_host(values).swapaxes(0, 1)[:size]


def pytorchrl_rollout(buffer: Any) -> Experience:
    """Its on-policy buffers: ``Done`` is the flag of the step before, so it marks an episode's first step."""
    data, size = buffer.data, buffer.step or buffer.size
    names = {"Reward": "reward", "Value": "value", "Advantage": "advantage", "ExternalReturn": "return"}
    fields = {ours: as_blocks(data[theirs])[:size] for theirs, ours in names.items() if data.get(theirs) is not None}
    fields |= {"obs": in_time(data["Observation"], size, False), "action": in_time(data["Action"], size, False)}
    starts = as_blocks(data["Done"])
    fields |= {"episode_start": starts[:size]}
    if len(starts) > size:
        fields["next_done"] = starts[size]
    return from_arrays(fields, f"pytorchrl {type(buffer).__name__}", vector=True)


# -- CleanRL --------------------------------------------------------------------------------------------------------


def is_cleanrl(fields: Mapping[str, Any]) -> bool:
    """Whether arrays have the names that CleanRL's PPO gives to its rollout."""
    return {"obs", "actions", "logprobs", "rewards", "dones", "values"} <= set(fields)


def cleanrl_arrays(fields: Mapping[str, Any]) -> Experience:
    """The rollout ``[T, N, ...]`` of CleanRL's PPO by its names: ``dones`` are the flags of the steps before.

    ``next_done`` ``[N]``, if it is given, has the flags of the last steps. ``next_obs``, the observations after them,
    is not read.

    Raises:
        ShapeError: rewards are not ``[T, N]``.
    """
    if as_host(fields["rewards"]).ndim != 2:
        raise ShapeError(
            f"rewards: expected [T, N] with CleanRL's names (obs, actions, logprobs, ...), got shape "
            f"{as_host(fields['rewards']).shape}; pass arrays as they are before they are flattened"
        )
    names = {"dones": "episode_start", "logprobs": "log_prob"}
    kept = {names.get(name, name): value for name, value in fields.items() if name not in ("next_obs", "next_value")}
    return from_arrays(kept, "CleanRL arrays", vector=True)
