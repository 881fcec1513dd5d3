"""Readers: relive's own buffers and saves, as experience."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, cast

import numpy as np

from ..errors import FieldError, FileFormatError, ParameterError
from ..files.disk import read_manifest, usable
from ..files.mapped_manifest import is_of_mapped
from ..files.save import Save
from ..replay.buffer import ReplayBuffer
from ..replay.copied import copied
from ..replay.mixture import Mixture
from ..rollout.buffer import RolloutBuffer
from ..rollout.saving import KIND
from ..samplers.uniform import Uniform
from ..steps.arrays import Bools, Ints, as_host, numpy_view
from ..steps.trees import dotted
from ..views.transitions import Transition
from .experience import Experience, from_arrays, leaves_of
from .hosts import cleanrl_arrays, is_cleanrl, read_host, readable_hosts, taking_turns
from .monitor import Monitor, counts_in, is_state
from .npz import read_npz

__all__ = ["experience_of"]


def experience_of(source: Any) -> Experience:
    """Any source that an audit takes, as experience.

    Raises:
        FieldError: relive cannot read it, or it lacks a field.
        FileFormatError: it is a path with neither a save, nor a replay in files, nor arrays (.npz).
    """
    if isinstance(source, Experience):
        return source
    if isinstance(source, str | os.PathLike):
        return of_path(usable(cast("str", source)))
    if isinstance(source, Monitor):
        return of_monitor(source)
    if isinstance(source, ReplayBuffer):
        return of_replay(cast("ReplayBuffer", source))
    if isinstance(source, RolloutBuffer):
        return of_rollout(source)
    if isinstance(source, Mixture):
        raise FieldError(f"a Mixture has several replays; pass one of its buffers: {', '.join(source.buffers)}")
    read = of_drop_in(source) or read_host(source)
    if read is not None:
        return read
    if isinstance(source, Mapping) or hasattr(source, "items"):
        fields = dict(cast("Mapping[str, Any]", source).items())
        if is_cleanrl(fields):
            found = cleanrl_arrays(fields)
        else:
            found = of_own_rows(fields) or taking_turns(fields, "arrays") or from_arrays(fields)
        found.begins = found.begins or (found.step is None and "index" not in fields)
        return found
    raise FieldError(
        f"a {type(source).__module__}.{type(source).__qualname__} is not known; pass a relive buffer, the path "
        "of a save or of a replay in files, a dict of arrays (obs, action, reward, terminated, ...), or a live buffer "
        "of one of these classes, "
        f"or of a copy of one ({readable_hosts()})"
    )


def of_own_rows(fields: dict[str, Any]) -> Experience | None:
    """What ``ReplayBuffer.data()`` or ``slice()`` returned, in the order of time; None if it is something else.

    An index is ``step number * num_envs + env``. The row of a final observation takes a number of its own.
    """
    if not {"obs", "reward", "terminated", "truncated", "index"} <= set(fields):
        return None
    index = as_host(fields["index"])
    if index.ndim != 1 or index.dtype.kind != "i" or len(index) < 2 or len(np.unique(index)) != len(index):
        return None
    if {"next_index", "steps", "next_obs"} <= set(fields):
        ahead, steps = as_host(fields["next_index"]), as_host(fields["steps"])
        if ahead.shape != index.shape or steps.shape != index.shape or (steps < 1).any():
            return None
        num_envs = int(np.max((ahead - index) // steps))
        kept = np.ones(len(index), np.bool_)
    elif "complete" in fields:
        num_envs, kept = int(np.diff(index).min()), as_host(fields["complete"]).astype(np.bool_)
        following = {path: np.append(x[1:], x[-1:], 0) for path, x in leaves_of(fields["obs"]).items()}
        fields = {**fields, "next_obs": _joined(following)}
    else:
        return None
    if num_envs < 1 or not kept.any():
        return None
    order = np.lexsort((index // num_envs, index % num_envs))
    order = order[kept[order]]
    named = {name: _joined({path: x[order] for path, x in leaves_of(value).items()})
             for name, value in fields.items() if name not in OF_A_BATCH}  # fmt: skip
    found = from_arrays(named, "rows of a relive ReplayBuffer", vector=False)
    found.env, number = index[order] % num_envs, index[order] // num_envs
    gap = np.diff(number) - 1
    found.follows = np.append((np.diff(found.env) == 0) & ((gap == 0) | ((gap == 1) & found.ended[:-1])), False)
    found.place = index[order]
    return found


OF_A_BATCH = ("index", "next_index", "steps", "complete", "discount", "weight")
"""Fields that a replay adds to those of a step."""


def _joined(leaves: Any) -> Any:
    """Leaves by path as one array, or as a dict of them by dotted names."""
    return leaves[()] if list(leaves) == [()] else {dotted(path): leaf for path, leaf in leaves.items()}


def of_path(path: FilePath) -> Experience:
    """The arrays of an .npz file, a save, or a replay in files.

    A replay in files may be open in another process. What that one overwrites meanwhile is left out.
    """
    if path.suffix.lower() == ".npz" and not path.is_dir():
        found = experience_of(read_npz(path))
    elif path.is_file():
        raise FileFormatError(
            f"'{path}': expected the directory of a save or of a replay in files, or an .npz file of arrays by name, "
            "got another file; numpy.savez writes such arrays, and relive convert reads the files of other libraries"
        )
    elif is_of_mapped(read_manifest(path)):
        found = of_replay(copied(ReplayBuffer, path))
        found.source += " in files"
    else:
        found = of_save(path)
    found.source = f"'{path}', {found.source}"
    return found


def of_save(path: FilePath) -> Experience:
    """A saved replay or rollout. Priorities are read if relive's own samplers made them."""
    with Save(path) as save:
        content = save.content
    if content.get("kind") == KIND:
        found = of_rollout(RolloutBuffer.load(path))
    else:  # a sampler or view that a user wrote is not needed to read the rows
        sampler, view = (Uniform() if content.get("sampler") is None else None), None
        if content.get("view") is None:
            view = Transition()
        replay = ReplayBuffer.load(path, sampler=sampler, view=view)
        found = of_replay(replay) if (state := state_in(replay.extra)) is None else of_monitor(counted(replay, state))
    return found


def state_in(extra: Any) -> Any:
    """The state of a monitor that was saved as ``extra``, or in it at any depth of dicts; None if there is none."""
    if is_state(extra):
        return extra
    members = cast("dict[Any, Any]", extra).values() if isinstance(extra, dict) else ()
    return next((found for found in map(state_in, members) if found is not None), None)


def counted(replay: ReplayBuffer, state: Any) -> Monitor:
    """A monitor of a replay that was loaded, with the counts that were saved with it.

    Raises:
        FileFormatError: the counts are those of another replay, or damaged.
    """
    try:
        monitor = Monitor(replay, counts=counts_in(state) is not None)
        monitor.load_state_dict(state)
    except ParameterError as error:
        raise FileFormatError(f"the counts of a monitor in the save's extra do not fit its steps: {error}") from error
    return monitor


def of_monitor(monitor: Monitor) -> Experience:
    """The transitions of a monitor's replay, with their draws if it counts."""
    with monitor.replay.lock:
        found = of_replay(monitor.replay)
        if monitor.counts:
            found.draws = monitor.draws(found.place)
    return found


def of_replay(replay: ReplayBuffer) -> Experience:
    """The transitions of a replay, each with the observation after it."""
    with replay.lock:
        len(replay)  # mends what a call that was broken off left half done
        inside: Any = replay
        ring: Any = inside._ring
        envs, numbers = ring.live()
        places: Ints = ring.places()
        leaves = {path: numpy_view(tensor.cpu()) for path, tensor in ring.store.read(places).items()}
        complete: Bools = ring.stamp[places] >= 0
        index = numbers * ring.num_envs + envs
        step, age = ring.step[places].astype(np.int64), ring.completed - 1 - ring.stamp[places]
        weights = _weights(replay, places)
    own = replay.own_next_obs
    after = np.minimum(np.arange(1, len(places) + 1), len(places) - 1)
    obs = {path[1:]: leaf for path, leaf in leaves.items() if path[0] == "obs"}
    finals = {path[1:]: leaf for path, leaf in leaves.items() if path[0] == "next_obs"} if own else {
        path: leaf[after] for path, leaf in obs.items()
    }  # fmt: skip
    # two kept rows follow each other if no step of the same env that was not completed lies between
    kept = np.flatnonzero(complete)
    done = leaves["terminated",] | leaves["truncated",]
    follows = np.zeros(len(kept), np.bool_)
    if replay.ordered and len(kept):
        here, there = kept[:-1], kept[1:]
        gap = there - here - 1
        follows[:-1] = (envs[here] == envs[there]) & ((gap == 0) | ((gap == 1) & (done[here] != 0) & (not own)))
        if own:  # an episode that was interrupted leaves no row of its own: the next one counts its steps anew
            follows[:-1] &= (done[here] != 0) | (step[there] == step[here] + 1)
    named = ("obs", "next_obs", "action", "reward", "terminated", "truncated")
    return Experience(
        f"relive {type(replay).__name__}",
        {path: leaf[kept] for path, leaf in obs.items()},
        leaves["reward",][kept],
        leaves["terminated",][kept].astype(np.bool_),
        leaves["truncated",][kept].astype(np.bool_),
        envs[kept],
        follows,
        next_obs={path: leaf[kept] for path, leaf in finals.items()},
        action={path[1:]: leaf[kept] for path, leaf in leaves.items() if path[0] == "action"},
        others={path: leaf[kept] for path, leaf in leaves.items() if path[0] not in named},
        priorities=None if weights is None else weights[0],
        live=None if weights is None else weights[1],
        place=index[kept],
        step=step[kept],
        age=age[kept],
        ordered=replay.ordered,
        max_episode_steps=replay.schema.max_episode_steps,
    )


def _weights(replay: ReplayBuffer, places: Ints) -> tuple[Any, Bools] | None:
    """The priorities of a replay's transitions, which may all be drawn; None if there are no priorities."""
    sampler: Any = replay.sampler
    if not replay.has_priorities or not hasattr(sampler, "priorities"):
        return None
    found = sampler.priorities()
    return found, np.ones(len(found), np.bool_)


def of_rollout(rollout: RolloutBuffer) -> Experience:
    """The real steps of a rollout. The value of what comes after a truncated step is in ``final_value``."""
    columns = {name: rollout[name] for name in rollout.keys() if name != "hidden"}
    real = leaves_of(columns.pop("mask"))[()].swapaxes(0, 1).reshape(-1)
    found = from_arrays(columns, f"relive {type(rollout).__name__}", vector=True)
    found = found if real.all() else _only(found, real)
    found.max_episode_steps = rollout.schema.max_episode_steps
    return found


INSIDE = {"agilerl": "_rollout", "pytorchrl": "_rows", "stable_baselines3": "_replay", "velora": "rollout"}
"""Drop-in -> the attribute with relive's buffer, where that knows more than the attributes of the host's class."""


def of_drop_in(source: Any) -> Experience | None:
    """A drop-in of ``relive.compat``, by the buffer inside it; None if the attributes of its host say as much."""
    package, _, name = type(source).__module__.partition("relive.compat.")
    host = name.partition(".")[0]
    inside = None if package or host not in INSIDE else getattr(source, INSIDE[host], None)
    inside = getattr(inside, "replay", inside)
    if isinstance(inside, RolloutBuffer):
        found = of_rollout(inside)
    elif isinstance(inside, ReplayBuffer) and (host == "pytorchrl" or getattr(source, "optimize_memory_usage", False)):
        found = of_replay(cast("ReplayBuffer", inside))
    else:
        return None
    found.source = f"relive.compat.{host} {type(source).__name__}"
    # the host has one flag for ends of both kinds, which is stored as `terminated`
    if found.truncated is not None and found.truncated.any():
        found.terminated &= ~found.truncated
    else:
        found.truncated = None
        found.lacks += ("it does not tell truncation from termination",)
    return found


def _only(steps: Experience, kept: Bools) -> Experience:
    """Some of the steps. One follows another if only steps that are left out lie between them."""
    rows = np.flatnonzero(kept)
    follows = np.append(steps.env[rows[1:]] == steps.env[rows[:-1]], False)
    obs, action, others, after = (
        {path: leaf[rows] for path, leaf in leaves.items()}
        for leaves in (steps.obs, steps.action, steps.others, steps.next_obs or {})
    )
    truncated = None if steps.truncated is None else steps.truncated[rows]
    return Experience(steps.source, obs, steps.reward[rows], steps.terminated[rows], truncated, steps.env[rows],
                      follows, next_obs=after or None, action=action, others=others, lacks=steps.lacks,
                      place=rows)  # fmt: skip
