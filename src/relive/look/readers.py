"""Readers: any source as experience.

In order: which reader a source has; relive's own buffers, saves and files; its drop-ins; flat stores, whose rows have
to be put in order first; the buffers of other libraries, each by its attributes; and the table of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path as FilePath
from typing import Any, cast

import numpy as np
from torch import Tensor

from ..batches import Batch
from ..errors import FieldError, FileFormatError, ParameterError, ReliveError, ShapeError
from ..files.disk import read_manifest, usable
from ..files.mapped import is_of_mapped
from ..files.save import Save
from ..parameters import is_mapping
from ..replay.buffer import ReplayBuffer
from ..replay.durable import copied, stand_ins
from ..replay.mixture import Mixture
from ..ring.ring import Ring
from ..rollout.buffer import RolloutBuffer
from ..rollout.saving import KIND
from ..steps.arrays import Array, Bools, Ints, as_host
from ..steps.schema import map_leaves
from .experience import (
    ALIASES,
    ArrayTree,
    Experience,
    Leaves,
    as_differences,
    concatenated,
    digests,
    from_arrays,
    leaves_of,
    no_steps,
    read_npz,
    tree_of,
)
from .monitor import Monitor, counts_in, is_state


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
    for read in (of_drop_in, read_host):
        if (experience := read(source)) is not None:
            return experience
    if isinstance(source, Mapping) or hasattr(source, "items"):
        fields = dict(cast("Mapping[str, object]", source).items())
        if is_cleanrl(fields):
            experience = cleanrl_arrays(fields)
        else:
            experience = of_own_rows(fields) or taking_turns(fields, "arrays") or from_arrays(fields)
        experience.begins = experience.begins or (experience.step is None and "index" not in fields)
        return experience
    raise FieldError(
        f"a {type(source).__module__}.{type(source).__qualname__} is not known; pass a relive buffer, the path "
        "of a save or of a replay in files, a dict of arrays (obs, action, reward, terminated, ...), or a live buffer "
        f"of one of these classes, or of a copy of one ({readable_hosts()})"
    )


# -- relive ------------------------------------------------------------------------------------------------------------


def of_path(path: FilePath) -> Experience:
    """The arrays of an .npz file, a save, or a replay in files.

    A replay in files may be open in another process. What that one overwrites meanwhile is left out.
    """
    if path.suffix.lower() == ".npz" and not path.is_dir():
        experience = experience_of(read_npz(path))
    elif path.is_file():
        raise FileFormatError(
            f"'{path}': expected the directory of a save or of a replay in files, or an .npz file of arrays by name, "
            "got another file; numpy.savez writes such arrays, and relive convert reads the files of other libraries"
        )
    elif is_of_mapped(read_manifest(path)):
        experience = of_replay(copied(ReplayBuffer, path))
        experience.source += " in files"
    else:
        experience = of_save(path)
    experience.source = f"'{path}', {experience.source}"
    return experience


def of_save(path: FilePath) -> Experience:
    """A saved replay or rollout. Priorities are read if relive's own samplers made them."""
    with Save(path) as save:
        content = save.content
    if content.get("kind") == KIND:
        experience = of_rollout(RolloutBuffer.load(path))
    else:  # a sampler or view that a user wrote is not needed to read the rows
        sampler, view = stand_ins(content)
        replay = ReplayBuffer.load(path, sampler=sampler, view=view)
        state = monitor_state_in(replay.extra)
        experience = of_replay(replay) if state is None else of_monitor(restored_monitor(replay, state))
    return experience


def monitor_state_in(extra: object) -> Mapping[str, object] | None:
    """The state of a monitor that was saved as ``extra``, or in it at any depth of dicts; None if there is none."""
    if is_state(extra):
        return extra
    members = extra.values() if is_mapping(extra) else ()
    return next((found for found in map(monitor_state_in, members) if found is not None), None)


def restored_monitor(replay: ReplayBuffer, state: Mapping[str, object]) -> Monitor:
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
        experience = of_replay(monitor.replay)
        if monitor.counts:
            experience.draws = monitor.draws(experience.place)
    return experience


def of_replay(replay: ReplayBuffer) -> Experience:
    """The transitions of a replay, each with the observation after it."""
    with replay.lock:
        inside: Any = replay
        inside._writer.repair()  # what a call that was broken off left half done, and what a device knows
        ring: Ring = inside._ring
        envs, numbers = ring.live_rows()
        places = ring.places()
        leaves = {path: as_host(tensor) for path, tensor in ring.store.read(places).items()}
        complete = ring.stamp[places] >= 0
        index = numbers * ring.num_envs + envs
        step, age = ring.step[places].astype(np.int64), ring.completed - 1 - ring.stamp[places]
        read_priorities = getattr(replay.sampler, "priorities", None) if replay.has_priorities else None
        priorities = None if read_priorities is None else read_priorities()
    own, selected = replay.own_next_obs, np.flatnonzero(complete)
    stored = {path: leaf[selected] for path, leaf in leaves.items()}
    parts = {name: {path[1:]: leaf for path, leaf in stored.items() if path[0] == name}
             for name in ("obs", "next_obs", "action")}  # fmt: skip
    if not own:
        after = np.minimum(selected + 1, len(places) - 1)
        parts["next_obs"] = {path: leaves[("obs", *path)][after] for path in parts["obs"]}
    # two kept rows follow each other if no step of the same env that was not completed lies between
    done = leaves["terminated",] | leaves["truncated",]
    follows = np.zeros(len(selected), np.bool_)
    if replay.ordered and len(selected):
        here, there = selected[:-1], selected[1:]
        gap = there - here - 1
        follows[:-1] = (envs[here] == envs[there]) & ((gap == 0) | ((gap == 1) & (done[here] != 0) & (not own)))
        if own:  # an episode that was interrupted leaves no row of its own: the next one counts its steps anew
            follows[:-1] &= (done[here] != 0) | (step[there] == step[here] + 1)
    named = (*parts, "reward", "terminated", "truncated")
    return Experience(
        f"relive {type(replay).__name__}",
        parts["obs"],
        stored["reward",],
        stored["terminated",].astype(np.bool_),
        stored["truncated",].astype(np.bool_),
        envs[selected],
        follows,
        next_obs=parts["next_obs"],
        action=parts["action"],
        others={path: leaf for path, leaf in stored.items() if path[0] not in named},
        priorities=priorities,
        drawable=None if priorities is None else np.ones(len(priorities), np.bool_),
        place=index[selected],
        step=step[selected],
        age=age[selected],
        ordered=replay.ordered,
        max_episode_steps=replay.schema.max_episode_steps,
        schema=replay.schema,
    )


def of_rollout(rollout: RolloutBuffer) -> Experience:
    """The real steps of a rollout. The value of what comes after a truncated step is in ``final_value``."""
    columns = {name: rollout[name] for name in rollout.keys()}
    real = leaves_of(columns.pop("mask"))[()].swapaxes(0, 1).reshape(-1)
    experience = from_arrays(columns, f"relive {type(rollout).__name__}", vector=True)
    experience = experience if real.all() else _selected(experience, real)
    experience.max_episode_steps, experience.schema = rollout.schema.max_episode_steps, rollout.schema
    return experience


def _selected(steps: Experience, selected: Bools) -> Experience:
    """Some of the steps. One follows another if only steps that are left out lie between them."""
    rows = np.flatnonzero(selected)
    follows = np.append(steps.env[rows[1:]] == steps.env[rows[:-1]], False)
    obs, action, others, after = (
        {path: leaf[rows] for path, leaf in leaves.items()}
        for leaves in (steps.obs, steps.action, steps.others, steps.next_obs or {})
    )
    truncated = None if steps.truncated is None else steps.truncated[rows]
    return Experience(steps.source, obs, steps.reward[rows], steps.terminated[rows], truncated, steps.env[rows],
                      follows, next_obs=after or None, action=action, others=others, lacks=steps.lacks,
                      place=rows)  # fmt: skip


INSIDE = {"agilerl": "_rollout", "fasttd3": "_replay", "pytorchrl": "_rows", "stable_baselines3": "_replay",
          "velora": "rollout"}  # fmt: skip
"""Drop-in -> the attribute with relive's buffer, where that knows more than the attributes of the host's class."""


def of_drop_in(source: object) -> Experience | None:
    """A drop-in of ``relive.compat``, by the buffer inside it; None if the attributes of its host say as much."""
    package, _, name = type(source).__module__.partition("relive.compat.")
    host = name.partition(".")[0]
    inside = None if package or host not in INSIDE else getattr(source, INSIDE[host], None)
    inside = getattr(inside, "replay", inside)
    if isinstance(inside, RolloutBuffer):
        experience = of_rollout(inside)
    elif isinstance(inside, ReplayBuffer) and (
        host in ("fasttd3", "pytorchrl") or getattr(source, "optimize_memory_usage", False)
    ):
        experience = of_replay(cast("ReplayBuffer", inside))
    else:
        return None
    experience.source = f"relive.compat.{host} {type(source).__name__}"
    if host == "fasttd3":
        return experience
    # the host has one flag for ends of both kinds, which is stored as `terminated`
    if experience.truncated is not None and experience.truncated.any():
        experience.terminated &= ~experience.truncated
    else:
        experience.truncated = None
        experience.lacks += ("it does not tell truncation from termination",)
    return experience


OF_A_BATCH = ("index", "next_index", "steps", "complete", "discount", "weight")
"""Fields that a replay adds to those of a step."""


def of_own_rows(fields: Mapping[str, object]) -> Experience | None:
    """Rows that ``ReplayBuffer.data()`` or ``slice()`` returned, in the order of time; None if it is something else.

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
        selected = np.ones(len(index), np.bool_)
    elif "complete" in fields:
        num_envs, selected = int(np.diff(index).min()), as_host(fields["complete"]).astype(np.bool_)
        following = {path: np.append(x[1:], x[-1:], 0) for path, x in leaves_of(fields["obs"]).items()}
        fields = {**fields, "next_obs": tree_of(following)}
    else:
        return None
    if num_envs < 1 or not selected.any():
        return None
    order = np.lexsort((index // num_envs, index % num_envs))
    order = order[selected[order]]
    named = {name: value for name, value in fields.items() if name not in OF_A_BATCH}
    experience = from_arrays(_rows_of(named, order), "rows of a relive ReplayBuffer", vector=False)
    experience.env, number = index[order] % num_envs, index[order] // num_envs
    gap = np.diff(number) - 1
    experience.follows = np.append(
        (np.diff(experience.env) == 0) & ((gap == 0) | ((gap == 1) & experience.ended[:-1])), False
    )
    experience.place = index[order]
    return experience


def _rows_of(fields: Mapping[str, object], rows: Ints) -> dict[str, ArrayTree]:
    """Rows of fields ``[S, ...]``, nested or not."""
    return {name: tree_of({path: leaf[rows] for path, leaf in leaves_of(x).items()}) for name, x in fields.items()}


# -- flat stores -------------------------------------------------------------------------------------------------------


def flat_steps(
    fields: Mapping[str, object],
    source: str,
    *,
    full: bool,
    n: int = 1,
    episode: Array | None = None,
    envs: int | None = None,
) -> Experience:
    """Experience of a flat store ``[S, ...]``, oldest first, that may not say which rows are of one env.

    If it says so, by ``envs``, its order is kept, unless observations show that the rows lie env by env instead.
    Otherwise, rows that follow each other stay as they are. Where most of those that do not lead to a later row
    instead, rows are sorted into :func:`threads`.

    Args:
        fields: as :func:`~relive.look.experience.from_arrays` takes them, with ``next_obs``.
        source: the name of the source, for the report.
        full: True if old rows were overwritten, so that the first episodes may have lost their first steps.
        n: how many steps lie between a row's observation and its next one, if the library says so.
        episode: int ``[S]``, the number of each row's episode, if the library keeps it.
        envs: how many envs have rows in turns, if the library says so.
    """
    experience = from_arrays(fields, source, vector=False, begins=not full)
    if envs:
        order = np.arange(len(experience)).reshape(-1, envs).T.reshape(-1)
        stated = interleaved(fields, source, order, order % envs, begins=experience.begins)
        if episode is not None:
            stated.follows[:-1] &= (np.diff(episode[order]) == 0) | stated.ended[:-1]
        if _goes_on(stated) or not _goes_on(experience):
            return stated
    broken = experience.follows & ~experience.chained & ~experience.ended
    if len(experience) < 2 or experience.next_obs is None or not broken.any():
        return experience
    if episode is not None:
        order = np.argsort(episode, kind="stable")
        return interleaved(fields, source, order, episode[order], begins=experience.begins)
    stride = stride_of(experience, broken)
    if n > 1 or _is_n_step(experience, stride):
        env = np.arange(len(experience)) % max(stride // n, 1)
        order = np.argsort(env, kind="stable")
        return interleaved(fields, source, order, env[order], begins=experience.begins) if n > 1 else experience
    ordered_rows = threads(experience.obs, experience.next_obs)
    if ordered_rows is not None:
        order, env = ordered_rows
        goes_on = np.zeros(len(experience), np.bool_)
        goes_on[order[:-1]] = env[1:] == env[:-1]
        if goes_on[broken].mean() > MATCHED:  # rows that lead to no other are no matter of order
            return interleaved(fields, source, order, env, begins=experience.begins)
    elif broken.sum() > len(experience) * MATCHED:
        why = "it does not say which rows are of one environment, nor do their observations"
        return _without_order(experience, why)
    return experience


def _without_order(experience: Experience, why: str) -> Experience:
    """Steps of which none is known to follow another."""
    experience.follows[:], experience.ordered = False, False
    experience.lacks += (why,)
    return experience


def _goes_on(steps: Experience) -> bool:
    """True if most rows that have not ended lead to the following one."""
    looked = steps.follows & ~steps.ended
    return bool(steps.chained[looked].sum() >= looked.sum() * MATCHED)


def _is_n_step(steps: Experience, stride: int) -> bool:
    """True if rows are windows of one env: neighbours then lie nearer to each other than rows a window apart."""
    if stride < 2 or not steps.numbers.shape[1]:
        return False
    numbers = as_differences(steps.numbers)
    near, far = (np.median(np.abs(numbers[k:] - numbers[:-k]).mean(1)) for k in (1, stride))
    return bool(near < far)


TURNS, ALL_TURNS, CLOSER = 20, 0.98, 0.8
"""The fewest rows that show turns; the share of them that must lead to the env's next one; and how much closer these
must lie than neighbours."""


def taking_turns(fields: Mapping[str, object], source: str) -> Experience | None:
    """Arrays ``[S, ...]`` in which the steps of N envs take turns, as experience; None if they do not."""
    experience = from_arrays(fields, source)
    inner = np.flatnonzero(~experience.ended)
    if experience.next_obs is None or len(experience) < TURNS or experience.env.any() or not len(inner):
        return None
    if experience.chained[inner].mean() > MATCHED:
        return None
    stride = stride_of(experience, ~experience.ended)
    if stride < 2 or not experience.numbers.shape[1]:
        return None
    numbers = experience.numbers.astype(np.float64)
    near, far = (np.abs(numbers[k:] - numbers[:-k]).mean() for k in (1, stride))
    if not far < CLOSER * near:
        return None  # n-step transitions lead as far, but neighbours among them are near to each other
    env = np.arange(len(experience)) % stride
    order = np.argsort(env, kind="stable")
    env = env[order]
    reached = inner[inner < len(experience) - stride]
    if experience.reaches(stride)[reached].mean() < ALL_TURNS:  # in turns, but not always in the same
        ordered_rows = threads(experience.obs, experience.next_obs)
        if ordered_rows is None:
            return _without_order(
                experience, "rows take turns between envs, and neither they nor their observations say which is whose"
            )
        order, env = ordered_rows
    sorted_ = interleaved(fields, source, order, env, begins=True)
    sorted_.lacks += (f"rows take turns between about {stride} envs, as their observations show; they were read so",)
    return sorted_


def interleaved(fields: Mapping[str, object], source: str, order: Ints, env: Ints, *, begins: bool) -> Experience:
    """Experience of flat rows ``[S, ...]`` in another order: rows of equal ``env`` follow each other."""
    experience = from_arrays(_rows_of(fields, order), source, vector=False, begins=begins)
    experience.env, experience.place = env, order
    experience.follows = np.append(env[1:] == env[:-1], False)
    return experience


MATCHED = 0.5
"""The share of rows that must lead to a later one, before rows are said to be threads."""

ALIKE = 4
"""The most rows with one observation for which the first later one is found."""


def threads(obs: Leaves, next_obs: Leaves) -> tuple[Ints, Ints] | None:
    """The rows ``[S]`` thread by thread, and the number of each one's thread; None if observations do not say.

    A row is followed by the first later row whose observation is the one it led to. Under ``NEXT_STEP`` autoreset, and
    where a reset observation is stored as the next one, a thread runs on through all episodes of an env. Where final
    observations are stored, it is one episode.
    """
    size = len(next(iter(obs.values())))
    before = digests([obs[path].reshape(size, -1) for path in obs])
    after = digests([next_obs[path].reshape(size, -1) for path in obs])
    order: Ints = np.argsort(before, kind="stable")  # rows with one observation lie side by side, in the order of time
    known = before[order]
    if np.count_nonzero(known[1:] != known[:-1]) + 1 < size * MATCHED:
        return None  # observations that come again and again name no row
    at, row = np.searchsorted(known, after), np.arange(size)
    following: Ints = np.zeros(size, np.int64)
    matched = np.zeros(size, np.bool_)
    for _ in range(ALIKE):
        place = np.minimum(at, size - 1)
        later = ~matched & (at < size) & (known[place] == after) & (order[place] > row)
        following[later] = order[place[later]]
        matched |= later
        at += 1
    if matched.mean() < MATCHED:
        return None
    rows = np.flatnonzero(matched)
    previous: Ints = np.arange(size)
    previous[following[rows]] = rows  # of several that lead to one row, the last one, which is nearest, is kept
    head, further = previous, previous[previous]
    while not np.array_equal(head, further):  # twice as many steps back each time, so log2(S) rounds at most
        head, further = further, further[further]
    order = np.argsort(head, kind="stable")  # rows of a thread stay in the order of time
    return order, head[order]


LONGEST, SAMPLE = 512, 2000
"""Rows that are looked at for the next one of the same env, and rows for which that is done."""


def stride_of(steps: Experience, rows: Array) -> int:
    """How many rows after most of ``rows`` (bool ``[S]``, some are True) the row lies that begins with the observation
    they led to; 0 if unknown.
    """
    size, after = len(steps), steps.next_obs or {}
    one = digests([leaf.reshape(size, -1) for leaf in steps.obs.values()])
    other = digests([after[path].reshape(size, -1) for path in steps.obs])
    looked = np.flatnonzero(rows)[:SAMPLE]
    after_end = np.append(one, other[:1] ^ np.uint64(1))  # a place for rows beyond the newest, equal to none of these
    shares = [(other[looked] == after_end[np.minimum(looked + k, size)]).mean() for k in range(1, LONGEST)]
    best = int(np.argmax(shares))
    return best + 1 if shares[best] > MATCHED else 0


# -- columns of other libraries ----------------------------------------------------------------------------------------


def in_time(values: object, position: int, full: bool, lost: int = 0) -> ArrayTree:
    """Rows of a ring ``[R, ...]``, nested or not, from the oldest to the newest, without the ``lost`` oldest ones."""
    leaves = {path: [leaf[position + lost :], leaf[:position]] for path, leaf in leaves_of(values).items()}
    return tree_of({path: np.concatenate(parts) if full else parts[1] for path, parts in leaves.items()})


def as_blocks(values: object) -> Array:
    """``[T, N, 1]`` as ``[T, N]``, for numbers that a library keeps with a last axis of 1."""
    array = as_host(values)
    return array.reshape(array.shape[:2])


def _flat(value: object) -> Array:
    return as_host(value).reshape(-1)


# -- Stable-Baselines3 ---------------------------------------------------------------------------------------------
def stable_baselines3_replay(buffer: Any) -> Experience:
    """Its replay buffers: ``dones`` are ends of both kinds, ``timeouts`` say which were time limits.

    With ``optimize_memory_usage``, the observation after the newest step is written to the row after it, at ``pos``. In
    a full ring, that row's own observation is lost, and so its step is none any more.
    """
    slim = bool(getattr(buffer, "optimize_memory_usage", False))
    known = getattr(buffer, "handle_timeout_termination", True)
    names = ["observations", "actions", "rewards", "dones"]
    names += ["timeouts"] if known else []
    names += [] if slim else ["next_observations"]
    fields = {name: in_time(getattr(buffer, name), buffer.pos, buffer.full, slim and buffer.full) for name in names}
    experience = from_arrays(fields, f"stable_baselines3 {type(buffer).__name__}", vector=True)
    if slim and not known:  # if time limits are known, the final observations that the library overwrote are missed
        experience.last_obs = {path: leaf[buffer.pos] for path, leaf in leaves_of(buffer.observations).items()}
    return experience


def stable_baselines3_rollout(buffer: Any) -> Experience:
    """Its rollout buffers: they keep where episodes start, not how they ended."""
    size, envs = (buffer.buffer_size if buffer.full else buffer.pos), buffer.n_envs

    def ordered(values: Array) -> Array:
        flat = values.shape[:1] == (buffer.buffer_size * envs,)  # get() flattens some columns, env by env
        rows = values.reshape(envs, buffer.buffer_size, *values.shape[1:]).swapaxes(0, 1) if flat else values
        return rows[:size]

    def column(name: str) -> Any:
        return map_leaves(ordered, getattr(buffer, name))

    fields = {name: column(name) for name in ("observations", "actions")}
    for name in ("rewards", "values", "returns", "advantages", "log_probs"):
        fields[name] = column(name).reshape(size, envs)
    fields["episode_starts"] = np.asarray(buffer.episode_starts)[:size]
    return _limits_in_rewards(from_arrays(fields, f"stable_baselines3 {type(buffer).__name__}", vector=True))


IN_REWARDS = "its collector adds the value of a time limit's final observation to the reward there"


def _limits_in_rewards(experience: Experience) -> Experience:
    """A rollout whose rewards hold the bootstrap values of time limits, so that each done counts as terminal."""
    experience.judge_limits = False
    experience.lacks += (IN_REWARDS,)
    return experience


# -- Tianshou ------------------------------------------------------------------------------------------------------
def tianshou_replay(buffer: Any) -> Experience:
    """Its buffers and vector buffers; ``ignore_obs_next`` keeps no observation after a step."""
    parts = [part for part in getattr(buffer, "buffers", [buffer]) if len(part)]
    order = [np.asarray(part.sample_indices(0)) for part in parts]  # 0 means all, from the oldest to the newest
    columns: dict[str, list[ArrayTree]] = {}
    for part, rows in zip(parts, order, strict=True):
        meta = part._meta
        for name, given in TIANSHOU.items():
            if given in meta.get_keys() and not (name == "next_obs" and getattr(part, "_save_obs_next", True) is False):
                columns.setdefault(name, []).append(_tianshou_leaf(meta[given], rows))
    source = f"tianshou {type(buffer).__name__}"
    if not parts:
        return no_steps(source)
    fields = {name: map_leaves(concatenated, *parts) for name, parts in columns.items()}
    env = np.repeat(np.arange(len(order)), [len(rows) for rows in order])
    return interleaved(fields, source, np.arange(len(env)), env, begins=False)


TIANSHOU = {"obs": "obs", "action": "act", "reward": "rew", "terminated": "terminated", "truncated": "truncated",
            "next_obs": "obs_next"}  # fmt: skip


def _tianshou_leaf(value: Any, rows: Array) -> ArrayTree:
    if hasattr(value, "get_keys"):
        return {name: _tianshou_leaf(value[name], rows) for name in value.get_keys()}
    return np.asarray(value)[rows]


# -- cpprb ---------------------------------------------------------------------------------------------------------
def cpprb_replay(buffer: Any) -> Experience:
    """Its replay buffers, in the names of its own documentation: obs, act, rew, next_obs, done."""
    rows = buffer.get_all_transitions()
    count = len(rows["rew"])
    full = count == buffer.get_buffer_size()
    position = buffer.get_next_index() if full else count
    names = {"obs": "obs", "act": "action", "rew": "reward", "next_obs": "next_obs", "done": "done"}
    fields = {ours: in_time(rows[theirs], position, full) for theirs, ours in names.items() if theirs in rows}
    return flat_steps(fields, f"cpprb {type(buffer).__name__}", full=full)


# -- TorchRL -------------------------------------------------------------------------------------------------------
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
    """A TensorDict ``[T]`` of steps with a "next", the oldest first, or ``[T, N]`` if its axes say their envs."""
    envs = prod(data.batch_size[1:]) if data.batch_dims > 1 else None
    return steps_with_next(data.reshape(-1), source, full=full, envs=envs)


def steps_with_next(data: Any, source: str, *, full: bool, envs: int | None) -> Experience:
    """Steps ``[T * N]`` by name, with what came after each in their "next"; ``envs`` is N, if it is known.

    Raises:
        FieldError: no observation is in both a step and its "next", or a field is missing.
    """
    after = data.get("next", None)
    if not hasattr(after, "keys"):
        raise FieldError(f'{source}: expected steps with a "next", got {", ".join(map(str, data.keys()))}')
    observed = [name for name in data.keys() if name in after.keys() and name not in FLAGS]
    obs, next_obs = (tree_of(leaves_of({name: x.get(name) for name in observed})) for x in (data, after))
    rest: dict[str, object] = {name: _flat(after.get(name)) for name in FLAGS if name in after.keys()}
    if "truncated" not in rest or "terminated" not in rest:
        rest["done"] = rest.get("done", rest.get("terminated"))
    else:
        rest.pop("done", None)
    if "action" in data.keys():
        rest["action"] = data.get("action")
    known = {*observed, *FLAGS, *OF_TORCHRL}
    entries = {name: part.get(name) for part in (after, data) for name in part.keys()
               if name not in known and not name.startswith("_")}  # fmt: skip
    further = {name: _numbers_in(entry) for name, entry in entries.items() if ALIASES.get(name, name) not in OF_A_STEP}
    rest = {name: numbers for name, numbers in further.items() if numbers is not None} | rest
    if "gamma" in data.keys():  # of its MultiStep: the discount of each window
        rest["discount"] = _flat(data.get("gamma"))
    if not obs:
        raise FieldError(
            f'{source}: expected an observation that a step and its "next" have under one name, got '
            f'{", ".join(map(str, data.keys()))} in steps and {", ".join(map(str, after.keys()))} in "next"; store both'
        )
    episode = data.get(("collector", "traj_ids"), None)
    episode = None if episode is None else _flat(episode)
    fields = {"obs": obs, "next_obs": next_obs, **rest}
    experience = flat_steps(fields, source, full=full, episode=episode, envs=envs)
    experience.lacks += tuple(f"'{name}' was not read" for name in entries if name not in rest)
    return experience


FLAGS = ("reward", "terminated", "truncated", "done")
OF_TORCHRL = ("next", "action", "gamma", "collector", "index")
"""Entries of a step that have a meaning in TorchRL. Those that begin with "_" are its own."""
OF_A_STEP = ("obs", "next_obs", "final_obs", "action", "reward", "terminated", "truncated", "done", "episode_start",
             "next_done")  # fmt: skip
"""The names that no further entry may have here."""


def _numbers_in(entry: Any) -> object:
    """The tensors of an entry, nested as it is; None if there are none, as in text."""
    if isinstance(entry, Tensor):
        return entry
    is_nested = isinstance(entry, Batch) or hasattr(entry, "batch_dims")
    members = dict(entry.items()) if is_nested else {}
    return {name: x for name, part in members.items() if (x := _numbers_in(part)) is not None} or None


# -- AgileRL -------------------------------------------------------------------------------------------------------
def agilerl_replay(buffer: Any) -> Experience:
    """Its replay buffers: a TensorDict of steps, in the names of its training functions; ``done`` is a terminal."""
    source = f"agilerl {type(buffer).__name__}"
    if buffer.storage is None:
        return no_steps(source)
    rows, full = buffer.storage, len(buffer) == buffer.max_size
    position = buffer._cursor if full else min(buffer._cursor, len(buffer))
    names = {"obs": "obs", "next_obs": "next_obs", "action": "action", "reward": "reward", "done": "terminated"}
    fields = {ours: in_time(rows[theirs], position, full) for theirs, ours in names.items() if theirs in rows.keys()}
    return flat_steps(fields, source, full=full, n=int(getattr(buffer, "n_step", 1)))


def agilerl_rollout(buffer: Any) -> Experience:
    """Its rollout buffer: ``dones`` are ends of both kinds, and the next observation is what ``step()`` returned."""
    columns, computed = buffer.buffer, ("values", "advantages", "returns", "log_probs")
    names = ("observations", "next_observations", "actions", "rewards", "dones", *computed)
    fields = {name: in_time(columns[name], buffer.pos, buffer.full) for name in names if name in columns}
    begins = not (buffer.full and buffer.wrap_at_capacity)
    return from_arrays(fields, f"agilerl {type(buffer).__name__}", vector=True, begins=begins)


# -- Velora --------------------------------------------------------------------------------------------------------
def velora_replay(buffer: Any) -> Experience:
    """Its replay buffer: flat rows of any envs, whose ``dones`` are ends of both kinds."""
    full = buffer.size == buffer.capacity
    names = {"states": "obs", "next_states": "next_obs", "actions": "action", "rewards": "reward", "dones": "done"}
    fields = {ours: in_time(getattr(buffer, theirs), buffer.position, full) for theirs, ours in names.items()}
    return flat_steps(fields, f"velora {type(buffer).__name__}", full=full)


# -- PyTorchRL -----------------------------------------------------------------------------------------------------
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
        return no_steps(source)
    names = {"Observation": "obs", "NextObservation": "next_obs", "Action": "action", "Reward": "reward",
             "NextDone": "done"}  # fmt: skip
    fields = {ours: in_time(data[theirs], buffer.step, full) for theirs, ours in names.items() if theirs in data}
    return from_arrays(fields, source, vector=True, begins=not full)


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


# -- FastTD3 -------------------------------------------------------------------------------------------------------
def fast_td3_replay(buffer: Any) -> Experience:
    """Its ``SimpleReplayBuffer``: tensors ``[N, R, ...]``; ``dones`` are ends of both kinds, ``truncations`` limits."""
    full = buffer.ptr >= buffer.buffer_size
    position = buffer.ptr % buffer.buffer_size if full else buffer.ptr

    names = ("observations", "next_observations", "actions", "rewards", "dones", "truncations")
    fields = {name: in_time(as_host(getattr(buffer, name)).swapaxes(0, 1), position, full) for name in names}
    return from_arrays(fields, "FastTD3 SimpleReplayBuffer", vector=True, begins=not full)


# -- LeRobot -------------------------------------------------------------------------------------------------------
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
    fields: dict[str, ArrayTree] = {
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
    experience = from_arrays(fields, f"lerobot {type(dataset).__name__}", vector=False, begins=True)
    if "next.reward" not in column:
        experience.lacks += ("it keeps no rewards",)
        experience.judge_limits = False
    if "frame_index" in column:
        experience.step = column["frame_index"].reshape(-1).astype(np.int64)
    return experience


READ = ("action", "episode_index", "frame_index", "next.reward", "next.done")
"""The columns of a LeRobotDataset that are read, beside observations."""


def lerobot_replay(buffer: Any) -> Experience:
    """Its replay buffer; ``optimize_memory`` keeps no observation after a step."""
    source = f"lerobot {type(buffer).__name__}"
    if not buffer.size:
        return no_steps(source)
    full = buffer.size == buffer.capacity
    names = {"states": "obs", "actions": "action", "rewards": "reward", "dones": "done", "truncateds": "truncated"}
    if not getattr(buffer, "optimize_memory", False):
        names["next_states"] = "next_obs"
    fields = {ours: in_time(getattr(buffer, theirs), buffer.position, full) for theirs, ours in names.items()}
    return from_arrays(fields, source, vector=False, begins=not full)


# -- rsl_rl ----------------------------------------------------------------------------------------------------------


def rsl_rl_rollout(storage: Any) -> Experience:
    """Its rollout storage: ``dones`` are ends of both kinds. Time-outs are read where a storage keeps them."""
    size = storage.step
    names = ("rewards", "dones", "values", "returns", "advantages")
    columns = {name: getattr(storage, name, None) for name in names}
    fields: dict[str, ArrayTree] = {name: as_blocks(x)[:size] for name, x in columns.items() if x is not None}
    fields |= {name: in_time(getattr(storage, name), size, False) for name in ("observations", "actions")}
    time_outs = getattr(storage, "time_outs", None)
    if time_outs is not None and bool((as_host(time_outs)[:size] != 0).any()):
        fields["truncated"] = as_blocks(time_outs)[:size]
        fields["final_value"] = as_blocks(storage.final_values)[:size]
    experience = from_arrays(fields, f"rsl_rl {type(storage).__name__}", vector=True)
    return experience if "truncated" in fields else _limits_in_rewards(experience)


# -- EmbodiChain -----------------------------------------------------------------------------------------------------


def embodichain_rollout(buffer: Any) -> Experience:
    """Its rollout buffer ``[N, T + 1]``: the last slot holds the bootstrap value, and is no step."""
    rollout = buffer.buffer
    names = ["obs", "action", "reward", "terminated", "truncated", "value", "advantage", "return", "final_value"]
    fields: dict[str, ArrayTree] = {}
    for name in names:
        if name in rollout.keys():
            steps = {path: x.swapaxes(0, 1)[: buffer.rollout_len] for path, x in leaves_of(rollout[name]).items()}
            fields[name] = tree_of(steps)
    return from_arrays(fields, f"embodichain {type(buffer).__name__}", vector=True)


# -- CleanRL -------------------------------------------------------------------------------------------------------
def is_cleanrl(fields: Mapping[str, object]) -> bool:
    """True if arrays have the names that CleanRL's PPO gives to its rollout."""
    return {"obs", "actions", "logprobs", "rewards", "dones", "values"} <= set(fields)


def cleanrl_arrays(fields: Mapping[str, object]) -> Experience:
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
    columns = {names.get(name, name): x for name, x in fields.items() if name not in ("next_obs", "next_value")}
    return from_arrays(columns, "CleanRL arrays", vector=True)


# -- the table of readers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostReader:
    """A function that reads the buffers of one class, and of its subclasses.

    Args:
        package: the first part of the module of the class.
        name: of the class.
        read: the buffer -> experience.
        attributes: a class of that name in another package is read, too, if it has all of these: it is a copy in the
            user's own code, or relive's drop-in. None means that such a class is not known.
    """

    package: str
    name: str
    read: Callable[[Any], Experience]
    attributes: tuple[str, ...] | None = None

    def reads(self, kind: type, source: object) -> bool:
        """True if a source, one of whose classes is ``kind``, is for this reader."""
        if kind.__qualname__ != self.name:
            return False
        if kind.__module__.partition(".")[0] == self.package:
            return True
        return self.attributes is not None and all(hasattr(source, name) for name in self.attributes)


RING = ("observations", "actions", "rewards", "dones", "timeouts", "pos", "full")
"""The attributes of Stable-Baselines3's replay buffers, and of CleanRL's copy of them."""

READERS = (
    HostReader("stable_baselines3", "ReplayBuffer", stable_baselines3_replay, RING),
    HostReader("stable_baselines3", "RolloutBuffer", stable_baselines3_rollout,
               ("observations", "actions", "rewards", "episode_starts", "values", "pos", "full")),
    HostReader("tianshou", "ReplayBuffer", tianshou_replay),
    HostReader("cpprb", "ReplayBuffer", cpprb_replay),
    HostReader("torchrl", "ReplayBuffer", torchrl_replay),
    HostReader("agilerl", "ReplayBuffer", agilerl_replay, ("storage", "_cursor", "max_size")),
    HostReader("agilerl", "RolloutBuffer", agilerl_rollout, ("buffer", "pos", "full", "wrap_at_capacity")),
    HostReader("embodichain", "RolloutBuffer", embodichain_rollout, ("buffer", "rollout_len", "num_envs")),
    HostReader("pytorchrl", "ReplayBuffer", pytorchrl_replay, ("data", "step", "size", "max_size")),
    HostReader("pytorchrl", "VanillaOnPolicyBuffer", pytorchrl_rollout, ("data", "step", "size")),
    HostReader("rsl_rl", "RolloutStorage", rsl_rl_rollout, ("observations", "rewards", "dones", "step")),
    HostReader("velora", "ReplayBuffer", velora_replay, ("states", "next_states", "hiddens", "position", "size")),
    HostReader("lerobot", "ReplayBuffer", lerobot_replay, ("states", "truncateds", "position", "size")),
    HostReader("lerobot", "LeRobotDataset", lerobot_dataset, ("hf_dataset", "features")),
    HostReader("fast_td3", "SimpleReplayBuffer", fast_td3_replay, ("truncations", "next_observations", "ptr")),
)  # fmt: skip


def read_host(source: object) -> Experience | None:
    """A live buffer of another library, a copy of one, or a drop-in for one, as experience; None if none is known.

    Raises:
        FieldError: it looks like one that is known, and cannot be read as that.
    """
    reader = next((x for kind in type(source).__mro__ for x in READERS if x.reads(kind, source)), None)
    if reader is None:
        return None
    try:
        return reader.read(source)
    except ReliveError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FieldError(
            f"a {type(source).__module__}.{type(source).__qualname__} could not be read as {reader.package}'s "
            f"{reader.name} ({type(error).__name__}: {error}); pass its steps as a dict of arrays"
        ) from error


def readable_hosts() -> str:
    """The buffers that are known, for an error."""
    names: dict[str, list[str]] = {}
    for reader in READERS:
        names.setdefault(reader.package, []).append(reader.name)
    return "; ".join(f"{package}: {', '.join(classes)}" for package, classes in names.items())
