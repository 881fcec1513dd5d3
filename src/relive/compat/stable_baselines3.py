"""Stable-Baselines3's buffers on relive's core, for ``replay_buffer_class=`` and ``rollout_buffer_class=``.

They are compared with Stable-Baselines3 2.9. The algorithms require subclasses of Stable-Baselines3's own classes, so
Stable-Baselines3 must be installed. All are in one module, so that pickles name the module that users import.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ..batches import Batch
from ..replay.buffer import ReplayBuffer as Core
from ..returns import GAE
from ..rollout.buffer import RolloutBuffer as CoreRollout
from ..samplers.contract import Sampler
from ..samplers.prioritized import Prioritized
from ..steps.arrays import Array, Ints, numpy_view, to_tensor, torch_dtype
from ..steps.schema import Field, Schema
from ..views.contract import View
from ..views.hindsight import Hindsight
from ..views.transitions import NStep
from .base import (
    FLAG,
    NUMBER,
    Column,
    Continuity,
    Device,
    DropIn,
    Nested,
    Obs,
    Shape,
    Values,
    alias,
    contents_of,
    drawn_by_numpy,
    equal_rows,
    mapped,
    oldest_first,
    passes_on,
    sent,
    table_of,
    write_column,
)

__all__ = [
    "ConvertsReplays",
    "DictReplayBuffer",
    "DictRolloutBuffer",
    "HerReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "ReplayBuffer",
    "RolloutBuffer",
]

buffers: Any = import_module("stable_baselines3.common.buffers")
samples: Any = import_module("stable_baselines3.common.type_aliases")
her: Any = import_module("stable_baselines3.her.her_replay_buffer")
strategies: Any = import_module("stable_baselines3.her.goal_selection_strategy")

BOOL = np.dtype(np.bool_)
PIECE = 1024
"""Steps of all envs that are copied at a time."""
GATHERED = 2**20
"""Bytes of batches that are gathered at a time: a cache holds them until they are read."""
SERVED = ("obs", "action", "value", "log_prob", "advantage", "return")
STEP = "step"
"""The field that holds the place of a step's info dictionary in the flat ``infos``."""


W = TypeVar("W")


class Normalizer(Protocol):
    """The methods of a ``VecNormalize`` that are called."""

    def normalize_obs(self, obs: Obs) -> Obs:
        """Observations of a batch, normalized."""
        ...

    def normalize_reward(self, reward: Array) -> Array:
        """Rewards, normalized."""
        ...


class GoalEnv(Protocol):
    """The methods of a ``VecEnv`` with goals that are called."""

    def has_attr(self, attr_name: str) -> bool:
        """Whether the envs have an attribute."""
        ...

    def env_method(self, method_name: str, *args: object, indices: Sequence[int]) -> Sequence[Array]:
        """The result of a method of each of these envs."""
        ...


class HostReplay(Protocol):
    """The members of a host's replay that are read, besides its columns and the arguments of its constructor."""

    buffer_size: int
    n_envs: int
    optimize_memory_usage: bool
    pos: int
    full: bool


def set_pos(buffer: Any, pos: int) -> None:
    """Set ``buffer.pos``: rows before it were written in place and count as steps from now on.

    Raises:
        AttributeError: there are more steps already, or fewer rows.
    """
    if pos != buffer.pos:
        buffer._declare(pos)


def set_full(buffer: Any, full: bool) -> None:
    """Set ``buffer.full``: all rows were written in place and count as steps from now on.

    Raises:
        AttributeError: ``full`` is False, and the buffer is full.
    """
    if full != buffer.full:
        buffer._declare(buffer.buffer_size if full else -1)


class ReplayBuffer(DropIn, buffers.ReplayBuffer):
    """``stable_baselines3.common.buffers.ReplayBuffer`` with its arguments, and ``seed``.

    ``observations``, ``next_observations``, ``actions``, ``rewards``, ``dones`` and ``timeouts`` are the storage,
    ``[buffer_size, n_envs, ...]``; the last two are bool. You can write to them; if you write further rows, declare
    them by ``pos = k`` or ``full = True``.

    ``optimize_memory_usage=True`` stores each observation once. Unlike the host's, it works with
    ``handle_timeout_termination=True``, several envs and dictionaries, and keeps final observations. A transition can
    then be drawn once the next step of its env was added; an episode of k steps takes k + 1 of the ``buffer_size``
    rows; and the arrays are read-only copies.

    Args:
        buffer_size: transitions over all envs, at least 2 of each.
        observation_space: of one env.
        action_space: of one env.
        device: of the batches; rows stay in RAM.
        n_envs: N.
        optimize_memory_usage: see above.
        handle_timeout_termination: do not count time limits (``info["TimeLimit.truncated"]``) as terminals.
        seed: batch t is a function of (seed, t). None draws a seed for each batch from NumPy's global generator, as
            the host does.
        sampler: for subclasses; draws the batches, uniformly by default.
        view: for subclasses; reads the batches, as single transitions by default.
        further: for subclasses; fields to store besides.

    Raises:
        TypeError: a subclass overrides ``_get_samples``, and ``optimize_memory_usage`` is set.
    """

    observations: Column = Column("obs")
    next_observations: Column = Column("next_obs")
    actions: Column = Column("action")
    rewards: Column = Column("reward")
    dones: Column = Column("terminated")
    timeouts: Column = Column("truncated")
    _own_attribute = "_replay"
    _lacking = ("n_steps", "gamma", "alpha", "beta", "eps", "env")

    _replaced: tuple[str, ...] = ("_get_samples",)
    """Methods of the host that are not called here. A subclass that overrides one expects the host's arrays."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[object],
        action_space: spaces.Space[object],
        device: Device = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        seed: int | None = None,
        sampler: Sampler | None = None,
        view: View | None = None,
        further: Mapping[str, Field] | None = None,
    ) -> None:
        self._added, self._seed = 0, seed
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size: int = max(buffer_size // n_envs, 2)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        own = overridden(self, self._replaced)
        if own and self._stores_once:
            raise TypeError(
                f"{type(self).__name__}.{own[0]} would never be called: observations are stored once here, and rows "
                "are in another order than the host's; override sample() instead, or use ReplayBuffer without "
                "optimize_memory_usage"
            )
        self._by_row = bool(own)
        obs, action = obs_fields(observation_space, self.obs_shape), action_field(action_space, self.action_dim)
        fields = {"obs": obs, "reward": NUMBER, "terminated": FLAG, "truncated": FLAG, "action": action}
        schema, view = Schema(fields | dict(further or {})), NStep(1) if view is None else view
        size, own_next_obs = (self.buffer_size * n_envs, n_envs), not self._stores_once
        self._replay = Core(  # the host fills it, not the user, so ends are not checked
            schema, *size, own_next_obs=own_next_obs, check_ends=False, sampler=sampler, view=view, seed=seed or 0
        )
        self._follows = self._stores_once or isinstance(self, buffers.NStepReplayBuffer)
        self._continuity = Continuity()
        self._shapes = obs_shapes(self.obs_shape, n_envs), (n_envs, self.action_dim)
        self._never: Array = np.zeros(n_envs, np.bool_)
        self._done = ~self._never
        self._further: dict[str, Ints] | None = None
        self._arrays: dict[str, Nested[Array]] = {}

    @property
    def _stores_once(self) -> bool:
        """Whether each observation is stored once."""
        return self.optimize_memory_usage

    @property
    def _view(self) -> Any:
        return self._replay.view

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_arrays": {}}  # views, which a pickle would turn into copies

    # -- writing ------------------------------------------------------------------------------------------------

    def _pos(self) -> int:
        """The row of the next step. Set it after writing further rows in place."""
        return self._added % self.buffer_size

    def _full(self) -> bool:
        """Whether ``buffer_size`` steps were added. Set it after writing all rows in place."""
        return self._added >= self.buffer_size

    pos, full = property(_pos, set_pos), property(_full, set_full)

    def _declare(self, count: int) -> None:
        """Count the rows before ``count``, which were written in place, as steps.

        Raises:
            AttributeError: there are more steps already, or the arrays are not the storage.
        """
        if self._stores_once or not self._added <= count <= self.buffer_size:
            raise AttributeError(
                f"pos and full count the steps that were added, {self._added} so far: they can only say that further "
                "rows were written to the arrays, where those are the storage; otherwise use add(), extend() or reset()"
            )
        rows = slice(self._added, count)
        names = [column.name for column in FIELDS.values()]
        found = {name: mapped(lambda x: x[rows].copy(), self.column(name)) for name in names}
        self._extend(found)

    def add(
        self, obs: Obs, next_obs: Obs, action: Array, reward: Array, done: Array, infos: Sequence[Mapping[str, object]]
    ) -> None:
        """Append one step of every env. Where an episode ended, ``next_obs`` is its final observation."""
        obs_shape, action_shape = self._shapes
        obs, next_obs = fitted(obs, obs_shape), fitted(next_obs, obs_shape)
        if getattr(done, "dtype", None) is not BOOL:
            done = np.asarray(done).astype(BOOL)
        ended, timeout = done, self._never
        if self.handle_timeout_termination:
            timeouts = [info.get("TimeLimit.truncated", False) for info in infos]
            if any(timeouts):
                timeout = np.array(timeouts, np.bool_).reshape(self.n_envs)
                done, ended = self._terminated(done, timeout), done | timeout
        if self._follows:  # each call of `learn` resets the envs without telling the buffer
            self._continuity.follow(self._replay, obs)
        self._replay.add(
            self._further,
            obs=obs,
            next_obs=next_obs,
            action=fitted(action, action_shape),
            reward=np.asarray(reward, np.float32),
            terminated=done,
            truncated=timeout,
        )
        self._done[:] = ended
        if self._follows:
            self._continuity.note(next_obs, self._done)
        self._added += 1

    def _terminated(self, done: Array, timeout: Array) -> Array:
        """The column ``terminated``. Where the arrays are the storage, it holds the host's ``dones`` unchanged."""
        return done & ~timeout if self._stores_once else done

    def _extend(self, steps: dict[str, Any]) -> None:
        """Append several steps ``[T, N, ...]``, given as columns of the storage."""
        self._replay.extend(steps)
        self._added += len(steps["reward"])
        self._done[:] = steps["terminated"][-1] | steps["truncated"][-1]
        self._continuity.note(mapped(lambda x: x[-1], steps["next_obs"]), self._done)

    def reset(self) -> None:
        """Forget everything stored."""
        self._added = 0
        self._replay.clear(rewind=self._replay.own_next_obs)
        self._continuity.forget()

    @classmethod
    def _arguments_of(cls, original: HostReplay) -> dict[str, object]:
        return super()._arguments_of(original) | {"buffer_size": original.buffer_size * original.n_envs}

    def _take_over(self, original: HostReplay) -> None:
        """Add the steps, oldest first. Those after which an env was reset without an end become truncated."""
        for rows, steps in steps_of(original):
            steps["terminated"] = self._terminated(steps["terminated"], steps["truncated"])
            self._extend(steps | self._further_of(original, rows))

    def _further_of(self, original: Any, rows: Ints) -> dict[str, Ints]:
        """Further fields for these rows of an original."""
        return {}

    # -- reading ------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Steps per env that can be drawn."""
        return len(self._replay) // self.n_envs

    def sample(self, batch_size: int, env: Normalizer | None = None) -> Any:
        """A random batch, the host's named tuple of tensors on ``device``. Rewards and dones are float32 ``[B, 1]``.

        If a subclass overrides ``_get_samples``, rows are drawn as the host draws them and passed to it.

        Args:
            batch_size: B.
            env: the ``VecNormalize`` to normalize observations and rewards with.

        Raises:
            EmptyError: nothing can be drawn yet.
        """
        if self._by_row:
            return buffers.BaseBuffer.sample(self, batch_size, env)
        if self._seed is None:
            self._replay.seed = drawn_by_numpy()
        return self._samples(self._read(self._replay.sample, batch_size, env), env)

    def _read(self, read: Callable[[W], Batch], which: W, env: Normalizer | None) -> Batch:
        """The batch that ``read(which)`` returns, with each reward normalized before windows are summed."""
        if env is None:
            return read(which)
        self._view.each_reward = env.normalize_reward
        try:
            return read(which)
        finally:
            self._view.each_reward = None  # so that a copy of the buffer does not hold the env

    def _get_samples(self, batch_inds: Ints, env: Normalizer | None = None) -> Any:
        """The transitions in rows ``[B]``, like :meth:`sample`. NumPy's global generator chooses the envs.

        Raises:
            IndexError: a row holds no step.
            TypeError: observations are stored once, in another order than the host's.
        """
        if self._stores_once:
            raise TypeError("_get_samples: rows are stored in another order than the host's; use sample()")
        rows = np.arange(self.size())[batch_inds]
        envs = np.random.default_rng(drawn_by_numpy()).integers(self.n_envs, size=len(rows))
        return self._samples(self._read(self._replay.at, envs * self.buffer_size + rows, env), env)

    def _samples(self, batch: Batch, env: Normalizer | None) -> Any:
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = samples.DictReplayBufferSamples if nested else samples.ReplayBufferSamples
        return kind(*self._fields(batch, env))

    def _fields(self, batch: Batch, env: Normalizer | None) -> tuple[Nested[Tensor], ...]:
        ends = batch["terminated"]
        if not self._stores_once:
            ends = ends.gt(batch["truncated"])
        return (
            self._observed(batch["obs"], env),
            sent(batch["action"], self.device),
            self._observed(batch["next_obs"], env),
            sent(ends.float().unsqueeze(1), self.device),
            sent(batch["reward"].unsqueeze(1), self.device),
        )

    def _discounts(self, batch: Batch) -> Tensor:
        """The discount of each window's bootstrap value, γ to the number of its rewards, float32 ``[B, 1]``."""
        gamma = torch.tensor(self._view.gamma, dtype=torch.float32, device="cpu")
        return sent(torch.pow(gamma, batch["steps"].float()).unsqueeze(1), self.device)

    def _observed(self, obs: Nested[Tensor], env: Normalizer | None) -> Nested[Tensor]:
        found: Nested[Tensor | Array] = joined(self.observation_space, obs)
        if env is not None:
            found = env.normalize_obs(mapped(numpy_view, found))
        return mapped(partial(sent, device=self.device), found)

    # -- the arrays ---------------------------------------------------------------------------------------------

    def column(self, name: str) -> Nested[Array]:
        """A column ``[buffer_size, n_envs, ...]``, or a dictionary of these; copies where observations are stored once.

        Raises:
            AttributeError: next observations with ``optimize_memory_usage``, as with the host.
        """
        if self._stores_once:
            return self._copied(name)
        if name not in self._arrays:  # a subclass's own `_get_samples` reads them for each batch
            rows = joined(self.observation_space, self._replay.block[name], name)
            sizes = self.n_envs, self.buffer_size
            self._arrays[name] = mapped(lambda x: numpy_view(x.unflatten(0, sizes).transpose(0, 1)), rows)
        return self._arrays[name]

    def _copied(self, name: str) -> Nested[Array]:
        if name == "next_obs" and self.optimize_memory_usage:
            raise AttributeError("next_observations: with optimize_memory_usage=True `observations` holds them")
        if name == "terminated":  # the host's dones are ends of either kind
            found = copied(self._arranged("terminated") | self._arranged("truncated"))
            found.newest, found.cut_off = (self.pos - 1) % self.buffer_size, self._replay.interrupt
            return found
        return mapped(copied, self._arranged(name))

    def _arranged(self, name: str) -> Any:
        """A field of all steps in the host's rows ``[buffer_size, n_envs, ...]``, or a dictionary of these.

        Empty rows are zero. "next_obs" is the observation after each step.
        """

        def arrange(*columns: Array) -> Array:
            return np.stack([in_ring(column, self.buffer_size, self.pos) for column in columns], 1)

        return mapped(arrange, *[self._steps_of_env(name, env) for env in range(self.n_envs)])

    def _steps_of_env(self, name: str, env: int) -> Any:
        """A field of an env's steps, oldest first. Rows that hold only a final observation are left out."""
        rows, under_way, newest = self._replay.slice(env), not self._done[env], self._continuity.next_obs
        steps = numpy_view(cast("Tensor", rows["complete"])).copy()
        steps[-1:] |= under_way  # the newest step is never complete while its episode goes on

        def following(obs: Tensor, newest: Any = None) -> Array:
            after = np.roll(numpy_view(obs), -1, 0)  # stored once: the next row holds the observation after a step
            if under_way and len(after):
                after[-1] = newest[env]
            return after[steps]

        if name == "next_obs":
            return mapped(following, joined(self.observation_space, rows["obs"]), *([] if newest is None else [newest]))
        return mapped(lambda x: numpy_view(x)[steps], joined(self.observation_space, rows[name], name))


FIELDS = table_of(ReplayBuffer)


class DictReplayBuffer(ReplayBuffer, buffers.DictReplayBuffer):
    """``stable_baselines3.common.buffers.DictReplayBuffer``: a :class:`ReplayBuffer` for a Dict space.

    Args:
        buffer_size: transitions over all envs, at least 2 of each.
        observation_space: of one env, a Dict.
        args: see :class:`ReplayBuffer`.
        kwargs: see :class:`ReplayBuffer`.
    """

    @passes_on(ReplayBuffer.__init__)
    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        require_dict(observation_space, "DictReplayBuffer")
        super().__init__(buffer_size, observation_space, *args, **kwargs)


class NStepReplayBuffer(ReplayBuffer, buffers.NStepReplayBuffer):
    """``stable_baselines3.common.buffers.NStepReplayBuffer``, also with dictionaries and ``optimize_memory_usage``.

    Args:
        args: see :class:`ReplayBuffer`.
        n_steps: rewards per window, at most. A window ends at its episode's end and at the newest step.
        gamma: discount per step. Batches have ``discounts`` γᵏ, float32 ``[B, 1]``, for windows of k steps.
        kwargs: see :class:`ReplayBuffer`.
    """

    @passes_on(ReplayBuffer.__init__, "view")
    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, view=NStep(n_steps, gamma), **kwargs)

    n_steps: int = alias("_view.n", "Rewards per window, at most; may be changed at any time.")
    gamma: float = alias("_view.gamma", "Discount per step; may be changed at any time.")

    def _fields(self, batch: Batch, env: Normalizer | None) -> tuple[Nested[Tensor], ...]:
        return (*super()._fields(batch, env), self._discounts(batch))


class PrioritizedReplayBufferSamples(NamedTuple):
    """The host's ``ReplayBufferSamples`` with the fields of prioritized replay."""

    observations: Tensor
    actions: Tensor
    next_observations: Tensor
    dones: Tensor
    rewards: Tensor
    discounts: Tensor
    weights: Tensor
    """Importance weights, float32 ``[B, 1]``, to multiply each transition's loss by."""
    indices: Array
    """int64 ``[B]``, for :meth:`PrioritizedReplayBuffer.update_priorities`."""


class PrioritizedDictReplayBufferSamples(NamedTuple):
    """The host's ``DictReplayBufferSamples`` with the fields of prioritized replay."""

    observations: dict[str, Tensor]
    actions: Tensor
    next_observations: dict[str, Tensor]
    dones: Tensor
    rewards: Tensor
    discounts: Tensor
    weights: Tensor
    indices: Array


class PrioritizedReplayBuffer(NStepReplayBuffer):
    """Prioritized replay (Schaul et al. 2015) for Stable-Baselines3 2.9, which has none; n-step if asked for.

    The host's ``train`` methods neither use ``weights`` nor report TD errors. ``docs/migration/stable_baselines3.md``
    shows a DQN that does.

    Args:
        args: see :class:`ReplayBuffer`.
        alpha: the exponent of priorities; 0 is uniform.
        beta: the exponent of importance weights, or a schedule (first, last, draws).
        eps: added to the absolute value of each TD error.
        n_steps: see :class:`NStepReplayBuffer`; 1 is single transitions.
        kwargs: see :class:`NStepReplayBuffer`.
    """

    @passes_on(NStepReplayBuffer.__init__, "sampler")
    def __init__(
        self,
        *args: Any,
        alpha: float = 0.6,
        beta: float | tuple[float, float, int] = 0.4,
        eps: float = 1e-6,
        n_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, n_steps=n_steps, sampler=Prioritized(alpha, beta, eps=eps), **kwargs)

    def update_priorities(self, indices: Values, td_errors: Values) -> int:
        """Set priorities from the TD errors of a batch, ``[B]`` or ``[B, 1]``; returns how many came too late.

        Raises:
            ShapeError: the shapes differ.
            ParameterError: an index was never issued.
            NotFiniteError: a TD error is NaN or infinite. Nothing is changed in either case.
        """
        return self._replay.update_priorities(indices, to_tensor(td_errors).reshape(-1))

    def _samples(self, batch: Batch, env: Normalizer | None) -> Any:
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = PrioritizedDictReplayBufferSamples if nested else PrioritizedReplayBufferSamples
        weight = batch.get(
            "weight", torch.ones(len(batch["index"]), dtype=torch.float32, device="cpu")
        )  # rows read by position have none
        weights = sent(weight.unsqueeze(1), self.device)
        parts: Any = (*self._fields(batch, env), weights, numpy_view(batch["index"]))
        return kind(*parts)


class HerReplayBuffer(DictReplayBuffer, her.HerReplayBuffer):
    """``stable_baselines3.her.HerReplayBuffer`` with its arguments, and ``seed``.

    Each observation is stored once. Each row is relabelled independently with probability ``her_ratio``. Rows of
    unfinished episodes can be relabelled, too, with goals achieved so far. The env's ``compute_terminated(achieved,
    desired, info)``, if there is one, decides which relabelled rows are terminal; otherwise the recorded flag stays.

    Args:
        buffer_size: rows over all envs. An episode of k steps takes k + 1 rows.
        observation_space: of one env, with ``achieved_goal`` and ``desired_goal``.
        action_space: of one env.
        env: the training env. Its first member's ``compute_reward`` is called, with empty infos.
        device: of the batches.
        n_envs: N.
        optimize_memory_usage: has no effect.
        handle_timeout_termination: see :class:`ReplayBuffer`.
        n_sampled_goal: relabelled rows per original row.
        goal_selection_strategy: "future", "final" or "episode", or the host's enumeration.
        copy_info_dict: keep the infos of all steps and pass copies of them to ``compute_reward``.
        seed: see :class:`ReplayBuffer`.
        n_steps: rewards per window, each recomputed. Above 1, batches have ``discounts``.
        gamma: discount per step of windows.

    Raises:
        TypeError: a subclass overrides methods that are not called here, such as ``_sample_goals``.
    """

    goal_selection_strategy: Any
    n_sampled_goal: int
    her_ratio: float
    copy_info_dict: bool

    _replaced = (*DictReplayBuffer._replaced, "_get_real_samples", "_get_virtual_samples", "_sample_goals")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[object],
        env: GoalEnv | None,
        device: Device = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Any = "future",
        copy_info_dict: bool = False,
        *,
        seed: int | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
    ) -> None:
        if isinstance(goal_selection_strategy, str):
            goal_selection_strategy = strategies.KEY_TO_GOAL_STRATEGY[goal_selection_strategy.lower()]
        assert isinstance(goal_selection_strategy, strategies.GoalSelectionStrategy), (
            f"Invalid goal selection strategy, please use one of {list(strategies.GoalSelectionStrategy)}"
        )
        self.goal_selection_strategy, self.n_sampled_goal = goal_selection_strategy, n_sampled_goal
        self.her_ratio, self.copy_info_dict = 1 - 1.0 / (n_sampled_goal + 1), copy_info_dict
        shape = max(buffer_size // n_envs, 2), n_envs
        self.infos: Array | None = np.full(shape, None) if copy_info_dict else None
        further = {STEP: Field((), torch.int64)} if copy_info_dict else {}
        self._goals = _Goals(env, self.infos)
        ends = self._goals.terminated if env is not None and env.has_attr("compute_terminated") else None
        strategy, info = goal_selection_strategy.name.lower(), STEP if copy_info_dict else None
        view = Hindsight(
            self._goals.reward, strategy, k=n_sampled_goal, n=n_steps, gamma=gamma, terminated_fn=ends, info=info
        )
        common = device, n_envs, optimize_memory_usage, handle_timeout_termination
        super().__init__(buffer_size, observation_space, action_space, *common, seed=seed, view=view, further=further)

    @classmethod
    def _arguments_of(cls, original: HostReplay) -> dict[str, object]:
        return {"env": None} | super()._arguments_of(original)  # a pickled state has no env

    def _further_of(self, original: Any, rows: Ints) -> dict[str, Ints]:
        if self.infos is None:
            return {}
        steps = (self._added + np.arange(len(rows))) % self.buffer_size
        self.infos[steps] = original.infos[rows]
        return {STEP: steps[:, None] * self.n_envs + np.arange(self.n_envs)}

    def add(
        self, obs: Obs, next_obs: Obs, action: Array, reward: Array, done: Array, infos: Sequence[Mapping[str, object]]
    ) -> None:
        """Like :meth:`ReplayBuffer.add`. With ``copy_info_dict`` the infos are kept without a copy."""
        if self.infos is not None:
            self.infos[self.pos] = infos
            self._further = {STEP: self.pos * self.n_envs + np.arange(self.n_envs)}
        super().add(obs, next_obs, action, reward, done, infos)

    @property
    def _stores_once(self) -> bool:
        return True

    @property
    def env(self) -> GoalEnv | None:
        """The training env; None after unpickling, until :meth:`set_env`."""
        return self._goals.env

    def set_env(self, env: GoalEnv) -> None:
        """Set the training env after unpickling.

        Raises:
            ValueError: the buffer has one.
        """
        if self._goals.env is not None:
            raise ValueError("Trying to set env of already initialized environment.")
        self._goals.env = env

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in ("ep_start", "ep_length", "_current_ep_start"):
            text += ": rows are stored in another order than the host's; `dones` says where episodes end"
        raise AttributeError(text)

    def _restore(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._goals = self._view.reward_fn.__self__

    def truncate_last_trajectory(self) -> None:
        """Cut off the unfinished episodes. Their newest steps lack a next observation and are never drawn."""
        if not np.all(self._done):
            warnings.warn(
                "The last trajectory in the replay buffer will be truncated.\n"
                "If you are in the same episode as when the replay buffer was saved,\n"
                "you should use `truncate_last_trajectory=False` to avoid that issue.",
                stacklevel=2,
            )
            self._replay.interrupt()

    def _read(self, read: Callable[[W], Batch], which: W, env: Normalizer | None) -> Batch:
        return read(which)  # each reward is recomputed, and normalized afterwards

    def _fields(self, batch: Batch, env: Normalizer | None) -> tuple[Nested[Tensor], ...]:
        obs, action, next_obs, dones, reward = super()._fields(batch, env)
        if env is not None:
            reward = sent(self._normalize_reward(numpy_view(batch["reward"].unsqueeze(1)), env), self.device)
        return obs, action, next_obs, dones, reward, *([] if self._view.n == 1 else [self._discounts(batch)])


class _Goals:
    """Calls the training env about goals. The env is not pickled with the buffer.

    Args:
        env: the training env.
        infos: the info dictionaries of the steps, object ``[buffer_size, n_envs]``; None if they are not kept.
    """

    def __init__(self, env: GoalEnv | None, infos: Array | None) -> None:
        self.env, self.infos = env, infos

    def _ask(self, method: str, achieved: Array, desired: Array, steps: Array | None) -> Array:
        assert self.env is not None, (
            "You must initialize HerReplayBuffer with a VecEnv so it can compute rewards for virtual transitions"
        )
        infos: Array | list[object] = [{} for _ in range(len(achieved))]
        if self.infos is not None:
            infos = copy.deepcopy(self.infos.reshape(-1)[steps])  # the env may write to them
        return np.asarray(self.env.env_method(method, achieved, desired, infos, indices=[0])[0])

    def reward(self, achieved: Array, desired: Array, steps: Array | None = None) -> Array:
        """The first env's ``compute_reward``, float32 ``[M]``."""
        return self._ask("compute_reward", achieved, desired, steps).astype(np.float32)

    def terminated(self, achieved: Array, desired: Array, steps: Array | None = None) -> Array:
        """The first env's ``compute_terminated``, bool ``[M]``."""
        return self._ask("compute_terminated", achieved, desired, steps).astype(np.bool_)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "env": None}


class RolloutBuffer(DropIn, buffers.RolloutBuffer):
    """``stable_baselines3.common.buffers.RolloutBuffer`` with its arguments, and ``seed``.

    ``episode_start`` is the done flag of the previous step, as the host's collector passes it. ``observations``,
    ``actions``, ``rewards``, ``episode_starts``, ``values``, ``log_probs``, ``advantages`` and ``returns`` are the
    storage, ``[buffer_size, n_envs, ...]``, before and after :meth:`get`. You can write to them; if you write further
    rows, declare them by ``pos = k`` or ``full = True``.

    Args:
        buffer_size: T, steps per env.
        observation_space: of one env.
        action_space: of one env.
        device: of the batches; columns stay in RAM.
        gae_lambda: λ.
        gamma: discount per step.
        n_envs: N.
        seed: permutation k is a function of (seed, k). None draws a seed for each :meth:`get` from NumPy's global
            generator, as the host does.

    Raises:
        TypeError: a subclass overrides ``_get_samples``.
    """

    gae_lambda: float
    gamma: float

    observations: Column = Column("obs")
    actions: Column = Column("action")
    rewards: Column = Column("reward")
    episode_starts: Column = Column("episode_start")
    values: Column = Column("value")
    log_probs: Column = Column("log_prob")
    advantages: Column = Column("advantage")
    returns: Column = Column("return")
    _own_attribute = "_rollout"

    _served: tuple[str, ...] = SERVED
    """The columns of a batch, in the order of the host's named tuple."""
    _kinds: tuple[Any, Any] = (samples.RolloutBufferSamples, samples.DictRolloutBufferSamples)
    """The host's named tuples: for arrays, and for a Dict space."""
    _float_actions = True
    """Whether actions are float32 in batches. They are stored in the dtype of their space."""
    _step_only: tuple[str, ...] = ("rewards", "episode_starts")
    """Columns that the host's ``get`` leaves ``[T, N]``."""
    _further: dict[str, Any] | None = None
    """Columns of the next step that a subclass has stored besides."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[object],
        action_space: spaces.Space[object],
        device: Device = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        *,
        seed: int | None = None,
    ) -> None:
        if overridden(self, ["_get_samples"]):
            raise TypeError(
                f"{type(self).__name__}._get_samples would never be called: the columns stay [buffer_size, n_envs, "
                "...] here; override get() instead"
            )
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.gae_lambda, self.gamma, self._seed = gae_lambda, gamma, seed
        action = action_field(action_space, self.action_dim, narrow=False)
        fields = {"obs": obs_fields(observation_space, self.obs_shape), "reward": NUMBER, "episode_start": NUMBER}
        fields |= {"action": action, "value": NUMBER, "log_prob": NUMBER}
        # ends are computed from `episode_start` when the rollout is full
        further = {"terminated": FLAG, "truncated": FLAG, "advantage": NUMBER, "return": NUMBER}
        schema = Schema(fields | self._further_fields())
        self._rollout = CoreRollout(schema, buffer_size, n_envs, columns=further, seed=seed or 0)
        self._shapes = obs_shapes(self.obs_shape, n_envs), (n_envs, self.action_dim)
        served = [x.nbytes for path, x in schema.leaves.items() if path[0] in self._served]
        self._row_bytes = 2 * NUMBER.nbytes + sum(served)
        self.reset()

    def _further_fields(self) -> dict[str, Field]:
        """The fields that a subclass stores besides. The spaces are known already."""
        return {}

    def _take_over(self, original: Any) -> None:
        """Copy the columns. The host's ``get`` flattens those that it serves, env by env."""

        def arranged(column: Array, stored: Array) -> Array:
            return column.reshape(self.n_envs, self.buffer_size, *stored.shape[2:]).swapaxes(0, 1)

        table = self._table()
        for name, values in contents_of(original, table).items():
            if original.generator_ready and name not in self._step_only:
                stored = self.column(table[name].name)
                write_column(name, stored, mapped(arranged, values, stored))
            else:
                write_column(name, getattr(self, name), values)
        self._declare(self.buffer_size if original.full else int(original.pos))

    @classmethod
    def _table(cls) -> dict[str, Column]:
        """The columns by the host's names."""
        return {name: column for kind in reversed(cls.__mro__) for name, column in table_of(kind).items()}

    def _pos(self) -> int:
        """How many steps were added. Set it after writing further rows in place."""
        rollout: CoreRollout | None = getattr(self, "_rollout", None)  # the host counts before there is one
        return 0 if rollout is None else rollout.steps

    def _full(self) -> bool:
        """Whether ``buffer_size`` steps were added. Set it after writing all rows in place."""
        return self.pos == self.buffer_size

    pos, full = property(_pos, set_pos), property(_full, set_full)

    def _declare(self, count: int) -> None:
        """Count the rows before ``count``, which were written in place, as steps.

        Raises:
            AttributeError: there are more steps already.
        """
        if not self.pos <= count <= self.buffer_size:
            raise AttributeError(
                f"pos and full count the steps that were added, {self.pos} so far: they can only say that further rows "
                "were written to the columns; otherwise use add() or reset()"
            )
        if count > self.pos:
            self._rollout.reserve(count - self.pos)
            self._rollout.commit()

    def add(
        self, obs: Obs, action: Array, reward: Array, episode_start: Array, value: Tensor, log_prob: Tensor
    ) -> None:
        """Append one step of every env: arrays, and tensors ``value`` ``[N]`` or ``[N, 1]`` and ``log_prob`` ``[N]``.

        Raises:
            FullError: the buffer is full; call :meth:`reset`.
        """
        obs_shape, action_shape = self._shapes
        self._rollout.add(
            self._further,
            obs=fitted(obs, obs_shape),
            action=fitted(action, action_shape),
            reward=np.asarray(reward, np.float32),
            episode_start=np.asarray(episode_start, np.float32),
            value=value.numpy(force=True).ravel(),
            log_prob=log_prob.numpy(force=True).ravel(),
        )

    def reset(self) -> None:
        """Forget the rollout and keep the memory. Advantages and returns are zeros until they are computed."""
        self.generator_ready = False
        self._rollout.clear()
        self.advantages, self.returns = 0, 0

    def compute_returns_and_advantage(self, last_values: Tensor, dones: Array) -> None:
        """Compute advantages by GAE, and ``returns`` = advantages + values.

        The host's collector has already added γV(final observation) to the rewards of truncated steps, so every done
        counts as terminal here.

        Args:
            last_values: V of the observations after the last step, ``[N]`` or ``[N, 1]``.
            dones: whether the last step ended an episode, ``[N]``.
        """
        rollout, ended = self._rollout, to_tensor(np.asarray(dones).astype(np.bool_))
        rollout["terminated"] = torch.cat([rollout["episode_start"][1:] != 0, ended.reshape(1, self.n_envs)])
        last = last_values.numpy(force=True).ravel()
        rollout.finish(GAE(self.gamma, self.gae_lambda), last_value=last, partial=True)

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """All transitions once, in random order, as the host's named tuples. The last batch may be smaller.

        Args:
            batch_size: B; None is one batch of all.

        Raises:
            AssertionError: the rollout is not full.
        """
        assert self.full, "the rollout is not full; add the remaining steps first"
        self.generator_ready: bool = True
        if self._seed is None:
            self._rollout.seed = drawn_by_numpy()
        size = batch_size or self.buffer_size * self.n_envs
        together = max(GATHERED // (size * self._row_bytes), 1)  # small batches: several at a time
        blocks = self._rollout.minibatches(size * together, fields=self._served)
        return (batch for block in blocks for batch in self._split(block, size))

    def _split(self, block: Batch, size: int) -> Iterator[Any]:
        """Rows that were gathered together, as the host's batches of ``size`` rows."""
        obs = mapped(self._observed, joined(self.observation_space, block["obs"]))
        rest = [sent(block[name], self.device) for name in self._served[1:]]
        if self._float_actions:
            rest[0] = rest[0].float()
        kind = self._kinds[isinstance(self.observation_space, spaces.Dict)]
        leaves = [*obs.values()] if isinstance(obs, dict) else [obs]
        parts: list[Sequence[Tensor]] = [x.split(size) for x in (*leaves, *rest)]
        if isinstance(obs, dict):
            members = zip(*parts[: len(obs)], strict=True)
            return map(kind, (dict(zip(obs, member, strict=True)) for member in members), *parts[len(obs) :])
        return map(kind, *parts)

    def _observed(self, obs: Tensor) -> Tensor:
        """Observations of a batch; those that are single numbers have a last axis, as the host's have."""
        return sent(obs if obs.ndim > 1 else obs.unsqueeze(1), self.device)

    def column(self, name: str) -> Nested[Array]:
        """A column of the rollout as a view ``[T, N, ...]``, or a dictionary of views."""
        found = joined(self.observation_space, self._rollout.block[name], name)
        return mapped(lambda x: numpy_view(x[: self.buffer_size]), found)


class DictRolloutBuffer(RolloutBuffer, buffers.DictRolloutBuffer):
    """``stable_baselines3.common.buffers.DictRolloutBuffer``: a :class:`RolloutBuffer` for a Dict space.

    Args:
        buffer_size: steps of each env.
        observation_space: of one env, a Dict.
        args: see :class:`RolloutBuffer`.
        kwargs: see :class:`RolloutBuffer`.
    """

    @passes_on(RolloutBuffer.__init__)
    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        require_dict(observation_space, "DictRolloutBuffer")
        super().__init__(buffer_size, observation_space, *args, **kwargs)


class ConvertsReplays:
    """A mixin for the host's algorithms, listed before the algorithm: loaded replays become ``replay_buffer_class``.

    Without it, the host's ``load_replay_buffer`` replaces the buffer by one of the class in the pickle.
    """

    replay_buffer: Any
    replay_buffer_class: Any
    replay_buffer_kwargs: dict[str, Any]

    def load_replay_buffer(self, path: object, truncate_last_traj: bool = True) -> None:
        """Load as the host does, then convert by ``replay_buffer_class.from_original`` and ``replay_buffer_kwargs``."""
        host: Any = super()
        host.load_replay_buffer(path, truncate_last_traj)
        self.replay_buffer = self.replay_buffer_class.from_original(self.replay_buffer, **self.replay_buffer_kwargs)


def in_ring(steps: Array, capacity: int, position: int) -> Array:
    """Steps, oldest first, in the rows where a host's ring has them, the inverse of :func:`oldest_first`.

    Empty rows are zero.
    """
    out = np.zeros((capacity, *steps.shape[1:]), steps.dtype)
    out[(position - len(steps) + np.arange(len(steps))) % capacity] = steps
    return out


def steps_of(original: HostReplay) -> Iterator[tuple[Ints, dict[str, Any]]]:
    """The rows of the steps in one of the host's replays, oldest first, and their fields ``[K, N, ...]``.

    A step counts as truncated if its env was reset after it without an end: its next observation then differs from the
    observation of the following step.
    """
    size, once = int(original.buffer_size), bool(original.optimize_memory_usage)
    rows = oldest_first(size, int(original.pos), bool(original.full))
    if original.full and once:
        rows = rows[1:]  # the newest next observation overwrote the oldest step's observation
    for low in range(0, len(rows), PIECE):
        at = rows[low : low + PIECE]
        after = rows[np.minimum(np.arange(low, low + len(at)) + 1, len(rows) - 1)]
        steps = {FIELDS[name].name: column for name, column in contents_of(original, FIELDS, at).items()}
        if once:
            steps["next_obs"] = contents_of(original, ["observations"], (at + 1) % size)["observations"]
        done, timeout = steps["terminated"] != 0, steps["truncated"] != 0
        reset = ~equal_rows(steps["next_obs"], contents_of(original, ["observations"], after)["observations"], 2)
        reset[after == at] = False  # nothing follows the newest step
        yield at, steps | {"terminated": done, "truncated": timeout | (reset & ~done)}


def overridden(buffer: object, names: Sequence[str]) -> list[str]:
    """The methods among these that a user's subclass defines."""
    host = "relive.", "stable_baselines3.", "sb3_contrib."
    users = [cls for cls in type(buffer).__mro__ if not cls.__module__.startswith(host)]
    return [name for name in names if any(name in vars(cls) for cls in users)]


def require_dict(space: object, name: str) -> None:
    """Refuse a space that is not a Dict, as the host does.

    Raises:
        AssertionError: names the class.
    """
    if not isinstance(space, spaces.Dict):
        raise AssertionError(f"{name} must be used with Dict obs space only")


def obs_fields(space: spaces.Space[object], shape: Any) -> Nested[Field]:
    """The fields of an observation in the host's shapes; a Discrete one is ``(1,)``."""
    if isinstance(space, spaces.Dict):
        return {key: Field(tuple(shape[key]), torch_dtype(space[key].dtype)) for key in space.spaces}
    return Field(tuple(shape), torch_dtype(space.dtype))


def action_field(space: spaces.Space[object], dim: int, *, narrow: bool = True) -> Field:
    """The field ``(dim,)`` of an action. With ``narrow``, float64 becomes float32, as in the host's replays."""
    return Field((dim,), torch_dtype(np.float32 if narrow and space.dtype == np.float64 else space.dtype))


def obs_shapes(shape: Shape, num_envs: int) -> Shape:
    """The shapes ``(N, ...)`` of all envs' observations, for :func:`fitted`. ``shape`` is the host's, of one env."""
    return mapped(lambda inner: (num_envs, *inner), shape)


def fitted(values: Any, shape: Shape) -> Any:
    """Arrays in the host's shapes. An array that has its shape, as most do, is returned itself."""
    if isinstance(shape, tuple):
        return values if getattr(values, "shape", None) == shape else np.asarray(values).reshape(shape)
    return {key: fitted(values[key], inner) for key, inner in shape.items()}


def joined(space: spaces.Space[object], obs: Any, name: str = "obs") -> Any:
    """A field of a batch. Observations of a Dict space become a dictionary in the order of the space."""
    if isinstance(space, spaces.Dict) and name in ("obs", "next_obs"):
        return {key: obs[key] for key in space.spaces}
    return obs


class Copied(np.ndarray):
    """A read-only copy of what is stored in another form.

    One write is accepted: ``dones[i] = True`` for the newest step i. The host ends episodes by it before a reset.
    """

    newest: int | None = None
    cut_off: Callable[[], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.flags.writeable:  # a copy of this copy, or a result computed from it
            super().__setitem__(key, value)
        elif self.cut_off is not None and isinstance(key, int | np.integer) and key == self.newest and np.all(value):
            self.cut_off()
        else:
            raise ValueError(
                "this array is a copy, because observations are stored once here, and writing to it changes nothing; "
                "use ReplayBuffer without optimize_memory_usage, whose arrays are the storage"
            )


def copied(array: Array) -> Copied:
    """A fresh array as one that cannot be written to."""
    shown = array.view(Copied)
    shown.flags.writeable = False
    return shown
