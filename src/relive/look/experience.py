"""Experience: stored steps in the one form that every rule of the audit reads.

In order: the class; comparing rows; experience from arrays; a table of episodes; fields and
distributions; numbers in words; .npz files.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import DTypeError, FieldError, FileFormatError, ReliveError, ShapeError
from ..files.disk import open_file
from ..memory.estimate import require_free, require_whole
from ..parameters import is_listing, is_mapping
from ..steps.arrays import NUMPY_DTYPES, Array, Bools, Ints, as_host
from ..steps.schema import Path, Schema, dotted, nest
from .findings import Finding, Sureness, finding, skip_if

Leaves = dict[Path, Array]
ArrayTree: TypeAlias = "Array | dict[str, ArrayTree] | tuple[ArrayTree, ...]"


@dataclass
class Experience:
    """S stored steps, env by env, each env in the order of time.

    Args:
        source: the name of the source, for the report.
        obs: the leaves of the observations ``[S, ...]``.
        next_obs: the leaves of the observations after each step ``[S, ...]``; None if the source keeps none. Then the
            observation of the following row has to serve.
        last_obs: the leaves of the observation after each env's last step ``[N, ...]``, env 0 first, if the source
            keeps that one and no other.
        action: the leaves of the actions ``[S, ...]``; empty if the source keeps none.
        reward: ``[S]``.
        terminated: bool ``[S]``.
        truncated: bool ``[S]``; None if the source has one flag for truncation and termination.
        env: int64 ``[S]``, the env of each step.
        follows: bool ``[S]``, True where the next row is the same env's next stored step.
        others: further leaves ``[S, ...]`` by path.
        priorities: ``[R]``, with ``drawable``: the priority of row r in a prioritized sampler.
        drawable: bool ``[R]``, True where row r holds a transition that may be drawn.
        lacks: sentences on what the source does not keep.
        place: int64 ``[S]``, the place of each step in the source, as its batches name it; None for 0, 1, ...
        step: int64 ``[S]``, the index of each step in its episode; None if the source does not keep it.
        age: int64 ``[S]``, how many transitions were completed later; None if the source does not keep it.
        draws: int64 ``[S]``, how often each step was drawn since a monitor began to count; -1 if the step can no longer
            be drawn; None if nobody counted.
        begins: True if the first step of each env is known to begin an episode, for sources without ``step``.
        ordered: True if steps have an order, so that they make up episodes.
        judge_limits: True if episodes that all end at one length are a mistake to look for. False if rewards hold the
            bootstrap values of time limits, or if nothing is bootstrapped.
        last_flags: True if the flag of each env's last step is known.
        odd_flags: bool ``[S]``, True where a flag was neither 0 nor 1; None if none was.
        max_episode_steps: the time limit of the env, if the source keeps it.
        schema: the fields as a buffer of relive declares them.
    """

    source: str
    obs: Leaves
    reward: Array
    terminated: Bools
    truncated: Bools | None
    env: Ints
    follows: Bools
    next_obs: Leaves | None = None
    last_obs: Leaves | None = None
    action: Leaves = field(default_factory=dict[Path, Array])
    others: Leaves = field(default_factory=dict[Path, Array])
    priorities: Array | None = None
    drawable: Bools | None = None
    lacks: tuple[str, ...] = ()
    place: Ints | None = None
    step: Ints | None = None
    age: Ints | None = None
    draws: Ints | None = None
    begins: bool = False
    ordered: bool = True
    judge_limits: bool = True
    last_flags: bool = True
    odd_flags: Bools | None = None
    max_episode_steps: int | None = None
    schema: Schema | None = None

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def dtypes(self) -> dict[Path, torch.dtype]:
        """The dtypes of leaves that NumPy lacks, such as bfloat16. These leaves are float32 here."""
        leaves = {} if self.schema is None else self.schema.leaves
        return {path: leaf.dtype for path, leaf in leaves.items() if leaf.dtype not in NUMPY_DTYPES}

    def finding(
        self, rule: str, sure: Sureness, what: str, mend: str, rows: Array | None = None, looked: int | None = None,
        *, field: str | None = None,
    ) -> Iterator[Finding]:  # fmt: skip
        """A finding as :func:`~relive.look.findings.finding` gives it; by default about all steps, of all steps."""
        rows, looked = np.arange(len(self)) if rows is None else rows, len(self) if looked is None else looked
        return finding(rule, sure, what, mend, rows, looked, place=self.place, field=field)

    @property
    def leaves(self) -> Leaves:
        """All leaves ``[S, ...]`` by path, in the order of a report."""
        groups = {"obs": self.obs, "next_obs": self.next_obs or {}, "action": self.action}
        leaves: Leaves = {(name, *path): leaf for name, group in groups.items() for path, leaf in group.items()}
        leaves |= {("reward",): self.reward, ("terminated",): self.terminated}
        return leaves | ({} if self.truncated is None else {("truncated",): self.truncated}) | self.others

    @cached_property
    def ended(self) -> Bools:
        """True where a step ended its episode, bool ``[S]``."""
        return self.terminated if self.truncated is None else self.terminated | self.truncated

    @cached_property
    def chained(self) -> Bools:
        """True where the observation after a step is that of the following row, bool ``[S]``; False if none follows.

        Rounding does not count: numbers may differ by a thousandth of a usual step, or by the rounding of float16, as
        where the one field was stored in another dtype than the other.
        """
        if self.next_obs is None:
            return self.follows.copy()
        chained = self.follows.copy()
        for path, leaf in self.played.items():
            chained[:-1] &= same_rows(self.next_obs[path][:-1], leaf[1:])
        rest = np.flatnonzero(self.follows & ~chained)
        close = np.ones(len(rest), np.bool_)
        for path, leaf in self.played.items():
            close &= _same_but_rounded(self.next_obs[path][rest], leaf[np.minimum(rest + 1, len(self) - 1)], leaf[rest])
        chained[rest[close]] = True
        return chained

    @cached_property
    def played(self) -> Leaves:
        """The observations without desired goals, which hindsight may have exchanged in each row for another one."""
        return {path: leaf for path, leaf in self.obs.items() if path[-1:] != ("desired_goal",)} or self.obs

    @cached_property
    def inner(self) -> Bools:
        """The steps that do not end their episode and whose following step is stored, bool ``[S]``."""
        return self.follows & ~self.ended

    @cached_property
    def window(self) -> int:
        """How many steps lie between a row's observation and its next observation, most often; 1 if that is the next.

        Rows of more than 20 steps are not known as such.
        """
        inside = self.inner & ~self.still
        if self.next_obs is None or not inside.any() or self.chained[inside].mean() > 0.5:
            return 1
        for n in range(2, min(LONGEST, len(self) - 1) + 1):
            known = inside[: len(self) - n]
            if known.any() and self.reaches(n)[known].mean() > 0.5:
                return n
        return 1

    def reaches(self, n: int) -> Bools:
        """True where row i leads to the observation of row i + n, in the same env, bool ``[S - n]``."""
        reached = self.env[:-n] == self.env[n:]
        for path, leaf in self.played.items():
            reached &= same_rows((self.next_obs or {})[path][:-n], leaf[n:])
        return reached

    def require_order(self) -> None:
        """Require that rows can be looked at in the order of time.

        Raises:
            Lack: they cannot.
        """
        skip_if(not self.ordered, "the transitions have no order")
        skip_if(not self.follows.any(), "no step is followed by another one of its env")
        if self.next_obs is not None and self.window == 1 and self.inner.any():
            why = "most rows do not lead to the observation of the following row, so their order in time is not known"
            skip_if(self.chained[self.inner].mean() <= 0.5, why)

    @cached_property
    def still(self) -> Bools:
        """True where a step left the observation as it was, bool ``[S]``; always False if that is not known."""
        if self.next_obs is None:
            return np.zeros(len(self), np.bool_)
        still = np.ones(len(self), np.bool_)
        for path, leaf in self.obs.items():
            still &= same_rows(self.next_obs[path], leaf)
        return still

    @cached_property
    def numbers(self) -> Array:
        """The small observations side by side, ``[S, D]``, in a dtype that holds them all; D is 0 for images alone."""
        return self._small(list(self.obs.values()))

    @cached_property
    def next_numbers(self) -> Array:
        """The small observations after the steps, ``[S, D]``; without these, those of the following rows."""
        if self.next_obs is None:
            return np.concatenate([self.numbers[1:], self.numbers[-1:]])
        return self._small([self.next_obs[path] for path in self.obs])

    def _small(self, leaves: list[Array]) -> Array:
        """Leaves ``[S, ...]`` side by side, without images."""
        flat = [real_numbers(leaf.reshape(len(self), -1)) for leaf in leaves]
        return np.concatenate([leaf for leaf in flat if leaf.shape[1] <= WIDE] or [np.empty((len(self), 0))], 1)

    @cached_property
    def jump(self) -> Array:
        """The distance that each step moved the observation, in usual steps, ``[S]``; zeros if nothing is known."""
        if not self.numbers.shape[1] or not len(self):
            return np.zeros(len(self))
        moved = np.abs(as_differences(self.next_numbers) - as_differences(self.numbers))
        usual = moved.mean(0)
        worth = np.zeros(len(usual), moved.dtype)
        np.divide(1.0, usual, out=worth, where=np.isfinite(usual) & (usual > 0), casting="same_kind")
        with np.errstate(invalid="ignore"):  # another rule reports numbers that are not finite
            return moved @ worth / max(np.count_nonzero(worth), 1)

    @cached_property
    def starts(self) -> Bools:
        """True where a row follows the end of an episode, and so is the first of the next one, bool ``[S]``."""
        first = np.zeros(len(self), np.bool_)
        first[1:] = self.ended[:-1] & self.follows[:-1]
        return first

    @property
    def begun(self) -> Bools:
        """True where a row is known to be its episode's first, also if it is the first of its env, bool ``[S]``."""
        if self.step is not None:
            return self.step == 0
        first_of_env = np.append(True, self.env[1:] != self.env[:-1])[: len(self)]
        return self.starts | (first_of_env & self.begins)


LONGEST = 20
"""The most steps of a ready-made n-step transition."""

WIDE = 512
"""A leaf of more numbers than this counts as an image. Distances mean little for images."""


def real_numbers(rows: Array) -> Array:
    """Rows ``[S, D]`` as they are, and complex ones as ``[S, 2 D]``, real parts beside imaginary ones."""
    return np.concatenate([np.real(rows), np.imag(rows)], 1) if rows.dtype.kind == "c" else rows


def as_differences(rows: Array) -> Array:
    """Numbers in a dtype in which their differences are right: bytes would come round, and flags have none."""
    return rows if rows.dtype.kind == "f" and rows.itemsize > 2 else rows.astype(np.float64)


# -- comparing rows ----------------------------------------------------------------------------------------------------


def same_rows(first: Array, second: Array) -> Bools:
    """True where the rows of two arrays are equal bit by bit, bool ``[S]``; so NaN equals itself."""
    count = len(first)
    if not count or not first.size:
        return np.ones(count, np.bool_)
    one, other = words(first), words(second)
    if one.shape != other.shape or one.dtype != other.dtype:
        return np.zeros(count, np.bool_)
    return (one == other).all(1)


HALF = 2.0**-10
"""The rounding of float16, as a share of a number."""


def _same_but_rounded(stored: Array, expected: Array, before: Array) -> Bools:
    """True where rows are equal, or differ by far less than a step from ``before`` to ``expected``, bool ``[K]``."""
    if stored.shape != expected.shape or not stored.size:
        return np.full(len(stored), stored.shape == expected.shape)
    if stored.dtype.kind != "f" or expected.dtype.kind != "f":
        return (stored == expected).reshape(len(stored), -1).all(1)
    one, other, old = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (stored, expected, before))
    with np.errstate(invalid="ignore", over="ignore"):
        usual = np.abs(other - old).mean(0)
        usual = np.where(np.isfinite(usual), usual, 0.0)
        tiny = np.maximum(1e-3 * usual, np.minimum(0.1 * usual, HALF * np.abs(other)))
        return ((np.abs(one - other) <= tiny) | (one == other) | (np.isnan(one) & np.isnan(other))).all(1)


def digests(columns: list[Array]) -> Array:
    """A 64-bit number for each row ``[S]``, the same for equal rows: a sum of random odd multiples of their words."""
    rng: Any = np.random.default_rng(1)
    total = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        bits = words(column)
        factors = 2 * rng.integers(2**62, size=bits.shape[1], dtype=np.uint64) + 1
        for factor, numbers in zip(factors, bits.T, strict=True):
            word = numbers.astype(np.uint64)
            total += (word ^ (word >> np.uint64(29))) * factor
    return total


def words(rows: Array) -> Array:
    """The bytes of rows ``[S, ...]`` as unsigned integers ``[S, W]``, of the widest kind that fits a row."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    size = next(size for size in (8, 4, 2, 1) if flat.shape[1] % size == 0)
    return flat.view(f"u{size}")


# -- from arrays -------------------------------------------------------------------------------------------------------


def from_arrays(
    fields: Mapping[str, object], source: str = "arrays", *, vector: bool | None = None, begins: bool = False
) -> Experience:
    """Arrays by name as experience.

    Args:
        fields: ``obs``, ``reward`` and ``terminated``; and, if there are any, ``action``, ``truncated``, ``next_obs``
            or ``final_obs``, which is read at ends only. Steps of one env are ``[T, ...]``, of N envs ``[T, N, ...]``.
            ``dones`` may stand for ``terminated``, and ``timeouts`` for ``truncated``. The plural forms and
            ``observations`` of data sets are known, too. Instead of all flags, ``episode_start`` may say whether a step
            is its episode's first; ``next_done`` ``[N]`` then has the flags of the last steps.
        source: the name of the source in reports.
        vector: True if arrays are ``[T, N, ...]``. None means that they are if rewards have two axes.
        begins: True if the first step of each env is known to begin an episode.

    Raises:
        FieldError: a field is missing.
        ShapeError: the arrays do not have one number of steps.
        DTypeError: flags or rewards are neither bools nor numbers.
        ParameterError: arrays that repeat their numbers would not fit into memory as a whole.
    """
    named = {ALIASES.get(name, name): value for name, value in fields.items() if value is not None}
    require_whole(named)
    known = bool({"terminated", "done", "next_done"} & set(named))
    missing = [name for name in ("obs", "reward") if name not in named]
    if missing or not {"terminated", "done", "episode_start"} & set(named):
        wanted = missing or ["terminated"]
        raise FieldError(f"the source lacks {', '.join(wanted)}; it has {', '.join(map(str, fields))}")
    rewards, vector = _rewards(named.pop("reward"), vector)
    reward = rewards[()]
    steps, envs = (reward.shape[0], reward.shape[1]) if vector else (len(reward), 1)
    last = named.pop("next_done", None)
    if not {"terminated", "done"} & set(named):
        named["done"] = _ends_before(as_host(named["episode_start"]), last)
    leaves = {name: leaves_of(value, name=str(name)) for name, value in named.items()}
    leaves["reward"] = rewards
    _require_numbers(leaves)
    fitted = {name: {path: _by_env(x, (steps, envs), vector, name, path) for path, x in part.items()}
              for name, part in leaves.items()}  # fmt: skip
    experience = _assembled(fitted, source, steps, envs)
    experience.last_flags, experience.begins = known, begins
    return experience


def _rewards(value: object, vector: bool | None) -> tuple[Leaves, bool]:
    """Rewards ``[T]`` or ``[T, N]`` under ``()``, and whether they are ``[T, N]``.

    If there are several numbers a step, these are their sums, and each of them comes under a path of its own.

    Raises:
        DTypeError: these are no numbers.
    """
    parts: Leaves = {}
    for path, leaf in leaves_of(value, name="field 'reward'").items():
        if not leaf.ndim or leaf.dtype.kind not in "biuf":
            raise DTypeError(f"field 'reward': expected numbers [T] or [T, N], got {leaf.dtype} {leaf.shape}")
        vector = leaf.ndim > 1 if vector is None else vector
        axes = leaf.shape[: 2 if vector else 1]
        numbers = leaf.reshape(*axes, math.prod(leaf.shape[len(axes) :]))
        several = numbers.shape[-1] > 1
        parts |= {(*path, str(k)) if several else path: numbers[..., k] for k in range(numbers.shape[-1])}
    if not parts:
        raise DTypeError("field 'reward': expected numbers [T] or [T, N], got none")
    if () not in parts:
        parts = {(): np.sum([part.astype(np.float64) for part in parts.values()], 0), **parts}
    return parts, bool(vector)


ALIASES = {
    "observations": "obs", "observation": "obs", "next_observations": "next_obs", "next_observation": "next_obs",
    "actions": "action", "rewards": "reward", "dones": "done", "terminals": "terminated", "terminations": "terminated",
    "terminateds": "terminated", "timeouts": "truncated", "truncations": "truncated", "truncateds": "truncated",
    "final_observations": "final_obs", "final_observation": "final_obs", "episode_starts": "episode_start",
    "values": "value", "advantages": "advantage", "returns": "return", "log_probs": "log_prob",
}  # fmt: skip
"""Names that data sets and loops use -> the names used here."""


def _ends_before(starts: Array, last: object) -> Array:
    """The flags ``[T, ...]`` of steps, found from the starts after them; 0 for the last steps if ``last`` is None."""
    if last is None:
        return np.concatenate([starts[1:], np.zeros_like(starts[:1])])
    after = as_host(last)
    if after.size != starts[:1].size:
        raise ShapeError(
            f"field 'next_done': expected {starts.shape[1:]}, the flag of each env's last step, got {after.shape}"
        )
    return np.concatenate([starts[1:], after.astype(starts.dtype).reshape(starts[:1].shape)])


def leaves_of(tree: Any, path: Path = (), *, name: str = "field") -> Leaves:
    """The arrays of nested mappings and tuples, by path. Errors call the whole ``name``."""
    if isinstance(tree, tuple):
        members = enumerate(cast("tuple[object, ...]", tree))
    elif hasattr(tree, "items") and not isinstance(tree, Tensor):  # a mapping, or a TensorDict
        members = tree.items()
    else:
        return {path: as_host(tree, dotted((name, *path)))}
    inner = [leaves_of(member, (*path, str(key)), name=name) for key, member in members]
    return {at: leaf for leaves in inner for at, leaf in leaves.items()}


def tree_of(leaves: Leaves) -> ArrayTree:
    """Leaves by path as nested dicts, or as the one array that they are."""
    return leaves[()] if () in leaves else nest(leaves)


def concatenated(*parts: Array) -> Array:
    """Arrays one after another, for ``map_leaves``."""
    return np.concatenate(parts)


def _require_numbers(fields: dict[str, Leaves]) -> None:
    """Require numbers or flags in the fields that rules compute with.

    Raises:
        DTypeError: a leaf is of something else, such as dates.
    """
    for name in ("obs", "next_obs", "final_obs", "action"):
        for path, leaf in fields.get(name, {}).items():
            if leaf.dtype.kind not in "biufc":
                where = dotted((name, *path))
                raise DTypeError(f"the source's field '{where}': expected numbers or flags, got {leaf.dtype}")


def _by_env(values: Array, size: tuple[int, int], vector: bool, name: str, path: Path) -> Array:
    """Steps ``[T, N, ...]`` or ``[T, ...]`` as ``[N * T, ...]``, env by env."""
    steps, envs = size
    if not vector:
        if values.shape[:1] != (steps,):
            raise ShapeError(
                f"the source's field '{dotted((name, *path))}' has {len(values) if values.ndim else 'no'} steps, "
                f"reward has {steps}"
            )
        return values
    if values.shape[:2] != size:
        raise ShapeError(
            f"field '{dotted((name, *path))}': expected {size} in front, as the source's reward has, got "
            f"{values.shape[:2]}"
        )
    return np.ascontiguousarray(values.swapaxes(0, 1)).reshape(steps * envs, *values.shape[2:])


def _assembled(fields: dict[str, Leaves], source: str, steps: int, envs: int) -> Experience:
    """Experience from leaves ``[N * T, ...]`` by field."""
    lacks: list[str] = []
    odd = np.zeros(steps * envs, np.bool_)

    def flag(name: str) -> Bools | None:
        part = fields.get(name)
        if part is None:
            return None
        flags = next(iter(part.values()), np.zeros(0)).reshape(-1)
        if flags.shape != odd.shape:
            raise ShapeError(f"the source's field '{name}': expected one flag for each step, got {flags.shape}")
        if flags.dtype.kind not in "biuf":
            raise DTypeError(f"the source's field '{name}': expected flags, bools or 0 and 1, got {flags.dtype}")
        if flags.dtype != np.bool_:
            odd[(flags != 0) & (flags != 1)] = True
        return flags.astype(np.bool_)

    terminated, truncated, done = flag("terminated"), flag("truncated"), flag("done")
    if terminated is None:
        ended = np.zeros_like(odd) if done is None else done  # a source without any flag is refused before
        terminated = ended if truncated is None else ended & ~truncated
    elif truncated is None and done is not None:
        truncated = done & ~terminated
    if truncated is None:
        lacks.append("it does not tell truncation from termination")
    after = fields.get("next_obs")
    follows = np.ones(steps * envs, np.bool_)
    follows[steps - 1 :: max(steps, 1)] = False
    known = {"obs", "next_obs", "final_obs", "action", "reward", "terminated", "truncated", "done"}
    experience = Experience(
        source,
        fields["obs"],
        fields["reward"][()].reshape(-1),
        terminated,
        truncated,
        np.repeat(np.arange(envs), steps),
        follows,
        next_obs=after,
        action=fields.get("action", {}),
        others={(name, *path): x for name, part in fields.items() if name not in known for path, x in part.items()},
    )
    if after is not None:
        _require_like_obs(experience, "next_obs", after)
    experience.odd_flags = odd if odd.any() else None
    if experience.next_obs is None and "final_obs" in fields:
        experience.next_obs = _with_finals(experience, fields["final_obs"])
    if experience.next_obs is None:
        lacks.append("it keeps no observation after a step but that of the following row")
    if len(fields["reward"]) > 1:
        lacks.append("its rewards have several numbers a step; what is looked at are their sums")
        experience.others |= {("reward", *path): x for path, x in fields["reward"].items() if path}
    experience.lacks = tuple(lacks)
    return experience


def _require_like_obs(experience: Experience, name: str, leaves: Leaves) -> None:
    """Require observations of another field to be like ``obs``.

    Raises:
        FieldError: a member is missing.
        ShapeError: a member has another shape.
    """
    for path, leaf in experience.obs.items():
        where = dotted((name, *path))
        if path not in leaves:
            got = ", ".join(dotted((name, *other)) for other in leaves)
            raise FieldError(f"field '{where}': expected what 'obs' has, got {got or 'nothing'}; give {name} like obs")
        if leaves[path].shape != leaf.shape:
            raise ShapeError(
                f"field '{where}': expected {leaf.shape}, as 'obs' has, got {leaves[path].shape}; give {name} like obs"
            )


def _with_finals(experience: Experience, finals: Leaves) -> Leaves:
    """The observation after each step: the final one if the episode ended, otherwise that of the following row."""
    _require_like_obs(experience, "final_obs", finals)
    joined: Leaves = {}
    for path, leaf in experience.obs.items():
        after = np.concatenate([leaf[1:], leaf[-1:]])
        after[experience.ended] = finals[path][experience.ended]
        joined[path] = after
    experience.follows &= np.append(experience.follows[:-1], False)
    return joined


def no_steps(source: str) -> Experience:
    """No step."""
    flags = np.zeros(0, np.bool_)
    return Experience(source, {}, np.zeros(0), flags, flags, np.zeros(0, np.int64), flags)


# -- a table of episodes -----------------------------------------------------------------------------------------------

COLUMNS = ("env", "start", "length", "return", "terminated", "truncated", "complete")
"""The columns of a table of episodes."""


def episodes_of(steps: Experience) -> dict[str, Array]:
    """A table of episodes, env by env in the order of time: a column ``[E]`` for each of :data:`COLUMNS`.

    ``start`` is the position of an episode's first stored step, among the steps as they were read. ``length`` counts
    its stored steps, and ``return`` is the sum of their rewards, without a discount. ``terminated`` and ``truncated``
    are the flags of its last stored step. ``complete`` (bool) is True if its real first step is stored and the episode
    has ended. Transitions without an order have no episodes.
    """
    size = len(steps) if steps.ordered else 0
    last = (steps.ended | ~steps.follows)[:size]
    last[-1:] = True
    ends: Ints = np.flatnonzero(last)
    starts = np.append(0, ends[:-1] + 1)[: len(ends)]
    truncated = np.zeros(len(steps), np.bool_) if steps.truncated is None else steps.truncated
    sums = np.add.reduceat(steps.reward[:size].astype(np.float64), starts) if size else np.empty(0)
    return {
        "env": steps.env[starts],
        "start": starts,
        "length": ends - starts + 1,
        "return": sums,
        "terminated": steps.terminated[ends],
        "truncated": truncated[ends],
        "complete": steps.begun[starts] & steps.ended[ends],
    }


# -- fields and distributions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldFacts:
    """One leaf of the stored steps.

    Args:
        name: its path, with dots.
        dtype: the name of its dtype.
        shape: the shape in one step.
        nbytes: bytes of all steps.
        min: the least finite number; None if there is none.
        mean: the mean of the finite numbers; for bools, the share that is True.
        max: the largest finite number.
        not_finite: how many numbers are NaN or infinite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    min: float | None
    mean: float | None
    max: float | None
    not_finite: int


def facts_of(path: Path, leaf: Array, dtype: torch.dtype | None = None) -> FieldFacts:
    """The facts about a leaf ``[S, ...]``, which is stored in ``dtype`` if NumPy lacks that."""
    finite = np.isfinite(leaf) if leaf.dtype.kind in "fc" else np.ones(1, np.bool_)
    numbers = leaf if finite.all() else leaf[finite]
    low, mean, high = ((float(numbers.min()), float(numbers.mean(dtype=np.float64)), float(numbers.max()))
                       if numbers.size and numbers.dtype.kind in "biuf" else (None, None, None))  # fmt: skip
    missing = int(finite.size - np.count_nonzero(finite))
    name = str(leaf.dtype if dtype is None else dtype).removeprefix("torch.")
    nbytes = leaf.nbytes if dtype is None else leaf.size * dtype.itemsize
    return FieldFacts(dotted(path), name, leaf.shape[1:], nbytes, low, mean, high, missing)


QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""The quantiles of each distribution; 0 is the least and 1 the most."""

Distribution = dict[str, float]
"""``mean``, and a quantile by its name, such as ``p50``."""


class Spreads(NamedTuple):
    """The numbers whose distributions are shown; None for what is not known."""

    returns: Array
    """Of complete episodes."""
    lengths: Array
    """Of complete episodes."""
    ages: Array | None
    priorities: Array | None
    draws: Array | None
    """Of the steps that can be drawn."""


def spreads_of(steps: Experience, table: dict[str, Array]) -> Spreads:
    """The numbers whose distributions are shown, of steps and their table of episodes."""
    whole, draws = table["complete"], None if steps.draws is None else steps.draws[steps.draws >= 0]
    return Spreads(table["return"][whole], table["length"][whole], steps.age, steps.priorities, draws)


def distribution(numbers: Array | None) -> Distribution | None:
    """The mean and the quantiles of numbers ``[K]``; None if there are none."""
    if numbers is None or not len(numbers):
        return None
    values = np.quantile(numbers, QUANTILES).tolist()
    names = ("min" if q == 0 else "max" if q == 1 else f"p{round(100 * q)}" for q in QUANTILES)
    return {"mean": float(np.mean(numbers)), **dict(zip(names, values, strict=True))}


# -- numbers in words --------------------------------------------------------------------------------------------------


def are_whole(numbers: Array) -> bool:
    """True if the numbers of a sample of rows are whole."""
    sample = numbers[:: max(len(numbers) // 1000, 1)]
    return bool(np.array_equal(sample, np.round(sample)))


def envs(count: int) -> str:
    """A number of envs in words."""
    return f"{count:,} env" if count == 1 else f"{count:,} envs"


def number(value: float | None) -> str:
    """A number for people."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 10_000 <= abs(value) < 1e9 else f"{value:.4g}"


def in_words(numbers: dict[str, float]) -> str:
    """A distribution in one line."""
    return ", ".join(f"{name} {number(value)}" for name, value in numbers.items())


def plain(value: object) -> Any:
    """Nested containers, with None for numbers that are not finite, and lists for tuples."""
    if is_mapping(value):
        return {name: plain(part) for name, part in value.items()}
    if is_listing(value):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- .npz files --------------------------------------------------------------------------------------------------------

MEMBERS = 4096
"""The most arrays of a file."""


def read_npz(path: FilePath) -> dict[str, Array]:
    """The arrays of a file that ``numpy.savez`` wrote, by name.

    Raises:
        FileFormatError: the file is another one, is damaged, or holds Python objects.
        ParameterError: less memory is free than the arrays take.
        OSError: the file may not be read, or nothing is there.
    """
    with open_file(FilePath(os.path.realpath(path))) as stream:  # a link that a user names is meant
        try:
            with zipfile.ZipFile(stream) as archive:
                return _arrays_of(archive, path)
        except ReliveError:
            raise
        except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, TypeError, LookupError,
                ArithmeticError, RuntimeError, MemoryError) as error:  # fmt: skip
            reason = str(error).partition(".")[0]
            if isinstance(error, MemoryError):
                reason = "an array of it claims more numbers than memory holds"
            raise FileFormatError(
                f"'{path}': expected an .npz file of arrays, as numpy.savez writes it, got something else "
                f"({reason:.200}); write it again, without Python objects"
            ) from error


def _arrays_of(archive: zipfile.ZipFile, path: FilePath) -> dict[str, Array]:
    members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if len(members) > MEMBERS:
        raise ValueError(f"{len(members)} arrays")
    size = sum(member.file_size for member in members)
    require_free(size, torch.device("cpu"), f"reading '{path}'", "read it on a larger machine, or a part of it")
    arrays: dict[str, Array] = {}
    for member in members:
        with archive.open(member) as stream:
            arrays[member.filename.removesuffix(".npy")] = np.lib.format.read_array(stream, allow_pickle=False)
    return arrays
