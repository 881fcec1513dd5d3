"""Readers of other libraries' replay buffers. No library is imported: all is read by attribute."""

from __future__ import annotations

from math import prod
from typing import Any, cast

import numpy as np

from ...errors import FieldError
from ...steps.arrays import as_host
from ...steps.trees import map_leaves
from ..experience import Experience, from_arrays, leaves_of, nothing
from .order import as_blocks, flat_steps, in_time

__all__ = [
    "agilerl_replay",
    "cpprb_replay",
    "fast_td3_replay",
    "lerobot_dataset",
    "lerobot_replay",
    "pytorchrl_replay",
    "stable_baselines3_replay",
    "tensordict_steps",
    "tianshou_replay",
    "torchrl_replay",
    "velora_replay",
]


# -- Stable-Baselines3 ----------------------------------------------------------------------------------------------


def stable_baselines3_replay(buffer: Any) -> Experience:
    """Its replay buffers: ``dones`` are ends of both kinds, ``timeouts`` say which were time limits.

    With ``optimize_memory_usage``, the observation after the newest step is written to the row after it, at ``pos``. In
    a full ring, that row's own observation is lost, and so its step is none any more.
    """
    slim = bool(getattr(buffer, "optimize_memory_usage", False))
    lost = int(slim and buffer.full)

    def kept(column: Any) -> Any:
        return column[lost:]

    def rows(values: Any) -> Any:
        return map_leaves(kept, in_time(values, buffer.pos, buffer.full))

    truncated = rows(buffer.timeouts).astype(np.bool_)
    fields = {
        "obs": rows(buffer.observations), "action": rows(buffer.actions), "reward": rows(buffer.rewards),
        "terminated": rows(buffer.dones).astype(np.bool_) & ~truncated,
    }  # fmt: skip
    known = getattr(buffer, "handle_timeout_termination", True)
    if known:
        fields["truncated"] = truncated
    if not slim:
        fields["next_obs"] = rows(buffer.next_observations)
    found = from_arrays(fields, f"stable_baselines3 {type(buffer).__name__}", vector=True)
    if slim and not known:  # if time limits are known, the final observations that the library overwrote are missed
        found.last_obs = {path: leaf[buffer.pos] for path, leaf in leaves_of(buffer.observations).items()}
    return found


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
    source = f"tianshou {type(buffer).__name__}"
    return _joined(columns, [len(rows) for rows in order], source) if parts else nothing(source)


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
    full = len(fields["done"]) == buffer.get_buffer_size()
    return flat_steps(fields, f"cpprb {type(buffer).__name__}", full=full)


def _cpprb_order(buffer: Any, count: int) -> Any:
    """The stored rows from the oldest to the newest."""
    first = buffer.get_next_index() if count == buffer.get_buffer_size() else 0
    return (np.arange(count) + first) % max(count, 1)


# -- TorchRL --------------------------------------------------------------------------------------------------------


def torchrl_replay(buffer: Any) -> Experience:
    """TensorDicts with a "next", as its collectors make them: ``[T]``, or ``[T, N]`` or ``[N, T]`` blocks.

    The first axis of a storage is the one that blocks are added along, which is time. If the storage counts more axes
    as its own, they are envs. Otherwise nothing says what they are.
    """
    storage, data = buffer._storage, buffer[:]
    along = getattr(buffer, "dim_extend", 0)
    if along:
        data = data.transpose(along, 0)
    full = len(storage) == storage.max_size
    if full:
        first = int(getattr(buffer._writer, "_cursor", 0))  # the oldest row is the next one to be overwritten
        data = data[(np.arange(len(data)) + first) % len(data)]
    if not along and getattr(storage, "ndim", 1) == 1:
        data = data.reshape(-1)
    return tensordict_steps(data, f"torchrl {type(buffer).__name__}", full=full)


def tensordict_steps(data: Any, source: str = "TensorDict", *, full: bool = False) -> Experience:
    """A TensorDict ``[T]`` of steps with a "next", the oldest first; ``[T, N]`` if it says which steps are of one env.

    Raises:
        FieldError: no observation is in both a step and its "next", or a field is missing.
    """
    envs = prod(data.batch_size[1:]) if data.batch_dims > 1 else None
    data = data.reshape(-1)
    after = data.get("next", None)
    if not hasattr(after, "keys"):
        raise FieldError(f'{source}: expected steps with a "next", got {", ".join(map(str, data.keys()))}')
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
    if "gamma" in data.keys():  # of its MultiStep: the discount of each window
        rest["discount"] = _flat(data.get("gamma"))
    plain = {name: _plain(leaves) for name, leaves in fields.items()}
    if not plain["obs"]:
        raise FieldError(
            f'{source}: expected an observation that a step and its "next" have under one name, got '
            f'{", ".join(map(str, data.keys()))} in steps and {", ".join(map(str, after.keys()))} in "next"; store both'
        )
    episode = data.get(("collector", "traj_ids"), None)
    return flat_steps(plain | rest, source, full=full, episode=None if episode is None else _flat(episode), envs=envs)


FLAGS = ("reward", "terminated", "truncated", "done")


def _flat(value: Any) -> Any:
    return as_host(value).reshape(-1)


def _plain(tree: Any) -> dict[str, Any]:
    """A tree with TensorDicts in it as nested dicts of arrays."""
    return {".".join(path): leaf for path, leaf in leaves_of(tree).items()}


# -- AgileRL --------------------------------------------------------------------------------------------------------


def agilerl_replay(buffer: Any) -> Experience:
    """Its replay buffers: a TensorDict of steps, in the names of its training functions; ``done`` is a terminal."""
    source = f"agilerl {type(buffer).__name__}"
    if buffer.storage is None:
        return nothing(source)
    rows = leaves_of(buffer.storage)
    full = len(buffer) == buffer.max_size
    ordered = {path: in_time(leaf, buffer._cursor, full)[: len(buffer)] for path, leaf in rows.items()}
    names = {"obs": "obs", "next_obs": "next_obs", "action": "action", "reward": "reward", "done": "terminated"}
    fields: dict[str, Any] = {}
    for theirs, ours in names.items():
        part = {".".join(path[1:]): leaf for path, leaf in ordered.items() if path[0] == theirs}
        if part:
            fields[ours] = part.get("", part)
    fields |= {name: fields[name].reshape(-1) for name in ("reward", "terminated") if name in fields}
    n = int(getattr(buffer, "n_step", 1))
    return flat_steps(fields, source, full=full, n=n)


# -- Velora ---------------------------------------------------------------------------------------------------------


def velora_replay(buffer: Any) -> Experience:
    """Its replay buffer: flat rows of any envs, whose ``dones`` are ends of both kinds."""
    full = buffer.size == buffer.capacity
    names = {"states": "obs", "next_states": "next_obs", "actions": "action", "rewards": "reward", "dones": "done"}
    fields = {ours: in_time(getattr(buffer, theirs), buffer.position, full) for theirs, ours in names.items()}
    fields |= {name: fields[name].reshape(-1) for name in ("reward", "done")}
    return flat_steps(fields, f"velora {type(buffer).__name__}", full=full)


# -- PyTorchRL ------------------------------------------------------------------------------------------------------


def pytorchrl_replay(buffer: Any) -> Experience:
    """Its off-policy buffers: ``NextDone`` is the flag of the step itself, for ends of both kinds."""
    if getattr(buffer, "recurrent_actor", False):
        raise FieldError(
            "a PyTorchRL buffer of a recurrent actor stores overlapping sequences, in which steps come twice; audit "
            "what its collector stores for an actor without memory"
        )
    source = f"pytorchrl {type(buffer).__name__}"
    data, full = buffer.data, buffer.size == buffer.max_size
    if not data:
        return nothing(source)
    names = {"Observation": "obs", "NextObservation": "next_obs", "Action": "action", "Reward": "reward",
             "NextDone": "done"}  # fmt: skip
    fields = {ours: in_time(data[theirs], buffer.step, full) for theirs, ours in names.items() if theirs in data}
    fields |= {name: as_blocks(fields[name]) for name in ("reward", "done")}
    found = from_arrays(fields, source, vector=True)
    found.begins = not full
    return found


# -- FastTD3 --------------------------------------------------------------------------------------------------------


def fast_td3_replay(buffer: Any) -> Experience:
    """Its ``SimpleReplayBuffer``: tensors ``[N, R, ...]``; ``dones`` are ends of both kinds, ``truncations`` limits."""
    full = buffer.ptr >= buffer.buffer_size
    position = buffer.ptr % buffer.buffer_size if full else buffer.ptr

    def rows(name: str) -> Any:
        return in_time(as_host(getattr(buffer, name)).swapaxes(0, 1), position, full)

    truncated = rows("truncations") > 0
    fields = {
        "obs": rows("observations"), "next_obs": rows("next_observations"), "action": rows("actions"),
        "reward": rows("rewards"), "terminated": (rows("dones") > 0) & ~truncated, "truncated": truncated,
    }  # fmt: skip
    found = from_arrays(fields, "FastTD3 SimpleReplayBuffer", vector=True)
    found.begins = not full
    return found


# -- LeRobot --------------------------------------------------------------------------------------------------------


def lerobot_dataset(dataset: Any) -> Experience:
    """A ``LeRobotDataset``: the columns of its table; videos and images are left where they are.

    ``next.reward`` and ``next.done`` are the reward and the end of a frame's own step. The last frame of an episode
    that is not done was cut off there. A data set without rewards is for imitation: each last frame is an end.
    """
    table = dataset.hf_dataset
    table = table.with_format("numpy") if hasattr(table, "with_format") else table
    kinds = {name: feature.get("dtype") for name, feature in dict(dataset.features).items()}
    numbers = [name for name in table.column_names if kinds.get(name) not in ("image", "video", "string")]
    column = {name: np.asarray(table[name][:]) for name in numbers if name in READ or name.startswith("observation.")}
    episode = column["episode_index"].reshape(-1)
    last = np.append(episode[1:] != episode[:-1], True)[: len(episode)]
    fields: dict[str, Any] = {
        "obs": {name.removeprefix("observation."): x for name, x in column.items() if name.startswith("observation.")},
        "reward": column.get("next.reward", np.zeros(len(episode))).reshape(-1),
    }
    if "action" in column:
        fields["action"] = column["action"]
    if "next.done" in column and "next.reward" in column:
        done = column["next.done"].reshape(-1).astype(np.bool_)
        fields |= {"terminated": done, "truncated": last & ~done}
    else:
        fields["done"] = last
    found = from_arrays(fields, f"lerobot {type(dataset).__name__}", vector=False)
    found.env, found.begins = np.zeros(len(episode), np.int64), True
    if "next.reward" not in column:
        found.lacks += ("it keeps no rewards",)
        found.judge_limits = False
    if "frame_index" in column:
        found.step = column["frame_index"].reshape(-1).astype(np.int64)
    return found


READ = ("action", "episode_index", "frame_index", "next.reward", "next.done")
"""The columns of a LeRobotDataset that are read, beside observations."""


def lerobot_replay(buffer: Any) -> Experience:
    """Its replay buffer; ``optimize_memory`` keeps no observation after a step."""
    source = f"lerobot {type(buffer).__name__}"
    if not buffer.size:
        return nothing(source)
    full = buffer.size == buffer.capacity
    names = {"states": "obs", "actions": "action", "rewards": "reward", "truncateds": "truncated"}
    fields = {ours: in_time(getattr(buffer, theirs), buffer.position, full) for theirs, ours in names.items()}
    fields["truncated"] = fields["truncated"].astype(np.bool_)
    fields["terminated"] = in_time(buffer.dones, buffer.position, full).astype(np.bool_) & ~fields["truncated"]
    if not getattr(buffer, "optimize_memory", False):
        fields["next_obs"] = in_time(buffer.next_states, buffer.position, full)
    found = from_arrays(fields, source, vector=False)
    found.begins = not full
    return found
