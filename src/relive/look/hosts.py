"""Readers of other libraries' live buffers. No library is imported: a buffer is known by the name of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ..steps.arrays import as_host
from .experience import Experience, from_arrays, leaves_of

__all__ = ["read_host"]


def read_host(source: Any) -> Experience | None:
    """A live buffer of another library as experience; None if it is of none that is known."""
    for kind in type(source).__mro__:
        read = READERS.get((kind.__module__.partition(".")[0], kind.__qualname__))
        if read is not None:
            return read(source)
    return None


def _in_time(values: Any, position: int, full: bool) -> Any:
    """Rows of a ring ``[R, ...]``, nested or not, from the oldest to the newest."""
    if isinstance(values, dict):
        members = cast("dict[str, Any]", values)
        return {name: _in_time(part, position, full) for name, part in members.items()}
    array = as_host(values)
    return np.concatenate([array[position:], array[:position]]) if full else array[:position]


# -- Stable-Baselines3 ----------------------------------------------------------------------------------------------


def stable_baselines3_replay(buffer: Any) -> Experience:
    """Its replay buffers: ``dones`` are ends of both kinds, ``timeouts`` say which were time limits."""

    def rows(values: Any) -> Any:
        return _in_time(values, buffer.pos, buffer.full)

    truncated = rows(buffer.timeouts).astype(np.bool_)
    fields = {
        "obs": rows(buffer.observations), "action": rows(buffer.actions), "reward": rows(buffer.rewards),
        "terminated": rows(buffer.dones).astype(np.bool_) & ~truncated,
    }  # fmt: skip
    known = getattr(buffer, "handle_timeout_termination", True)
    if known:
        fields["truncated"] = truncated
    if not getattr(buffer, "optimize_memory_usage", False):
        fields["next_obs"] = rows(buffer.next_observations)
    return from_arrays(fields, f"stable_baselines3 {type(buffer).__name__}", vector=True)


def stable_baselines3_rollout(buffer: Any) -> Experience:
    """Its rollout buffers, before minibatches flatten them: they keep where episodes start, not how they ended."""
    size = buffer.buffer_size if buffer.full else buffer.pos
    started = np.asarray(buffer.episode_starts)[:size].astype(np.bool_)
    done = np.append(started[1:], np.zeros((1, buffer.n_envs), np.bool_), 0)
    named = {"obs": buffer.observations, "action": buffer.actions, "reward": buffer.rewards, "value": buffer.values}
    fields = {name: _in_time(x, size, False) for name, x in named.items()} | {"done": done}
    return from_arrays(fields, f"stable_baselines3 {type(buffer).__name__}", vector=True)


# -- Tianshou -------------------------------------------------------------------------------------------------------


def tianshou_replay(buffer: Any) -> Experience:
    """Its buffers and vector buffers; ``ignore_obs_next`` keeps no observation after a step."""
    parts = [part for part in getattr(buffer, "buffers", [buffer]) if len(part)]
    order = [np.asarray(part.sample_indices(0)) for part in parts]  # 0 means all, from the oldest to the newest
    columns: dict[str, list[Any]] = {}
    for part, rows in zip(parts, order, strict=True):
        meta = part._meta
        for name, given in TIANSHOU.items():
            if given in meta.get_keys() and not (name == "next_obs" and getattr(part, "_save_obs_next", True) is False):
                columns.setdefault(name, []).append(_tianshou_leaf(meta[given], rows))
    return _joined(columns, [len(rows) for rows in order], f"tianshou {type(buffer).__name__}")


TIANSHOU = {"obs": "obs", "action": "act", "reward": "rew", "terminated": "terminated", "truncated": "truncated",
            "next_obs": "obs_next"}  # fmt: skip


def _tianshou_leaf(value: Any, rows: Any) -> Any:
    if hasattr(value, "get_keys"):
        return {name: _tianshou_leaf(value[name], rows) for name in value.get_keys()}
    return np.asarray(value)[rows]


def _joined(columns: dict[str, list[Any]], sizes: list[int], source: str) -> Experience:
    """Experience of several envs with different numbers of steps."""
    fields = {name: _concatenated(parts) for name, parts in columns.items()}
    found = from_arrays(fields, source, vector=False)
    found.env = np.repeat(np.arange(len(sizes)), sizes)
    found.follows = np.append(found.env[1:] == found.env[:-1], False)
    return found


def _concatenated(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        first = cast("dict[str, Any]", parts[0])
        return {name: _concatenated([part[name] for part in parts]) for name in first}
    return np.concatenate(parts)


# -- cpprb ----------------------------------------------------------------------------------------------------------


def cpprb_replay(buffer: Any) -> Experience:
    """Its replay buffers, in the names of its own documentation: obs, act, rew, next_obs, done."""
    rows = buffer.get_all_transitions()
    order = _cpprb_order(buffer, len(rows["rew"]))
    names = {"obs": "obs", "act": "action", "rew": "reward", "next_obs": "next_obs", "done": "done"}
    fields = {
        ours: np.asarray(rows[theirs])[order] for theirs, ours in names.items() if theirs in rows
    }  # fmt: skip
    fields["reward"], fields["done"] = (fields[name].reshape(-1) for name in ("reward", "done"))
    return from_arrays(fields, f"cpprb {type(buffer).__name__}", vector=False)


def _cpprb_order(buffer: Any, count: int) -> Any:
    """The stored rows from the oldest to the newest."""
    first = buffer.get_next_index() if count == buffer.get_buffer_size() else 0
    return (np.arange(count) + first) % max(count, 1)


# -- TorchRL --------------------------------------------------------------------------------------------------------


def torchrl_replay(buffer: Any) -> Experience:
    """TensorDicts with a "next", as its collectors make them: ``[T]``, or ``[T, N]`` or ``[N, T]`` blocks."""
    data = buffer[:]
    if data.batch_dims > 1:
        data = data.reshape(-1)
    return tensordict_steps(data, f"torchrl {type(buffer).__name__}")


def tensordict_steps(data: Any, source: str = "TensorDict") -> Experience:
    """A TensorDict ``[T]`` of steps with a "next"; the oldest first."""
    after = data.get("next")
    observed = [name for name in data.keys() if name in after.keys() and name not in FLAGS]
    fields = {
        "obs": {name: data.get(name) for name in observed},
        "next_obs": {name: after.get(name) for name in observed},
    }
    rest: dict[str, Any] = {name: _flat(after.get(name)) for name in FLAGS if name in after.keys()}
    if "truncated" not in rest or "terminated" not in rest:
        rest["done"] = rest.get("done", rest.get("terminated"))
    else:
        rest.pop("done", None)
    if "action" in data.keys():
        rest["action"] = data.get("action")
    return from_arrays({name: leaves if name not in ("obs", "next_obs") else _plain(leaves) for name, leaves in
                        {**fields, **rest}.items()}, source, vector=False)  # fmt: skip


FLAGS = ("reward", "terminated", "truncated", "done")


def _flat(value: Any) -> Any:
    return as_host(value).reshape(-1)


def _plain(tree: Any) -> dict[str, Any]:
    """A tree with TensorDicts in it as nested dicts of arrays."""
    return {".".join(path): leaf for path, leaf in leaves_of(tree).items()}


READERS: dict[tuple[str, str], Callable[[Any], Experience]] = {
    ("stable_baselines3", "ReplayBuffer"): stable_baselines3_replay,
    ("stable_baselines3", "RolloutBuffer"): stable_baselines3_rollout,
    ("tianshou", "ReplayBuffer"): tianshou_replay,
    ("cpprb", "ReplayBuffer"): cpprb_replay,
    ("torchrl", "ReplayBuffer"): torchrl_replay,
}
"""Package and class -> its reader; subclasses are read as their base class."""
