"""Stable-Baselines3's uniform replay buffers (release 2.9), built on :class:`relive.ReplayBuffer`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from ...replay.buffer import ReplayBuffer as Core
from ...samplers.contract import Sampler
from ...steps.arrays import Array, numpy_view
from ...steps.schema import Field, Schema
from ...views.contract import View
from ...views.transitions import NStep
from ..arrays import sent
from ..attributes import Column
from ..continuity import Continuity
from ..seeds import drawn_by_numpy
from ..trees import mapped
from . import common
from .arrays import arranged, copied
from .common import buffers, samples
from .originals import steps_of

__all__ = ["DictReplayBuffer", "ReplayBuffer"]


class ReplayBuffer(buffers.ReplayBuffer):
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

    Raises:
        TypeError: a subclass overrides ``_get_samples``, and ``optimize_memory_usage`` is set.
    """

    observations, next_observations = Column("obs"), Column("next_obs")
    actions, rewards = Column("action"), Column("reward")
    dones, timeouts = Column("done"), Column("timeout")

    _replaced: tuple[str, ...] = ("_get_samples",)
    """Methods of the host that are not called here. A subclass that overrides one expects the host's arrays."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        seed: int | None = None,
        **parts: Any,
    ) -> None:
        self._added, self._seed = 0, seed
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 2)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        own = common.overridden(self, self._replaced)
        if own and self._stores_once:
            raise TypeError(
                f"{type(self).__name__}.{own[0]} would never be called: observations are stored once here, and rows "
                "are in another order than the host's; override sample() instead, or use ReplayBuffer without "
                "optimize_memory_usage"
            )
        self._by_row = bool(own)
        self._replay = self._core(seed or 0, **parts)
        self._follows = self._stores_once or isinstance(self, buffers.NStepReplayBuffer)
        self._continuity = Continuity()
        self._shapes = common.obs_shapes(self.obs_shape, n_envs), (n_envs, self.action_dim)
        self._never: Array = np.zeros(n_envs, np.bool_)
        self._done = ~self._never
        self._further: dict[str, Any] | None = None
        self._arrays: dict[str, Any] = {}

    def _core(
        self, seed: int, sampler: Sampler | None = None, n_steps: int = 1, gamma: float = 0.99,
        view: View | None = None, **further: Field,
    ) -> Core:  # fmt: skip
        schema = Schema(
            {
                "obs": common.obs_fields(self.observation_space, self.obs_shape),
                "action": common.action_field(self.action_space, self.action_dim),
                "reward": Field((), torch.float32),
                "terminated": Field((), torch.bool),
                "truncated": Field((), torch.bool),
                **further,
            }
        )
        return Core(
            schema,
            self.buffer_size * self.n_envs,
            self.n_envs,
            own_next_obs=not self._stores_once,
            check_ends=False,  # the host fills it, not the user
            sampler=sampler,
            view=view or NStep(n_steps, gamma),
            seed=seed,
        )

    @property
    def _stores_once(self) -> bool:
        """Whether each observation is stored once."""
        return self.optimize_memory_usage

    @property
    def _view(self) -> Any:
        return self._replay.view

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}  # views, which a pickle would turn into copies

    # -- writing ------------------------------------------------------------------------------------------------

    def _pos(self) -> int:
        """The row of the next step. Set it after writing further rows in place."""
        return self._added % self.buffer_size

    def _full(self) -> bool:
        """Whether ``buffer_size`` steps were added. Set it after writing all rows in place."""
        return self._added >= self.buffer_size

    pos, full = property(_pos, common.set_pos), property(_full, common.set_full)

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
        names = {"obs": "obs", "next_obs": "next_obs", "action": "action", "reward": "reward"}
        names |= {"terminated": "done", "truncated": "timeout"}
        found = {name: mapped(lambda x: x[rows].copy(), self.column(shown)) for name, shown in names.items()}
        self._extend(found)

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: list[dict[str, Any]]
    ) -> None:
        """Append one step of every env. Where an episode ended, ``next_obs`` is its final observation."""
        obs_shape, action_shape = self._shapes
        obs, next_obs = common.fitted(obs, obs_shape), common.fitted(next_obs, obs_shape)
        done = ended = common.as_flags(done)
        timeout = self._never
        if self.handle_timeout_termination:
            marks = [info.get("TimeLimit.truncated", False) for info in infos]
            if any(marks):
                timeout = np.array(marks, np.bool_).reshape(self.n_envs)
                done, ended = self._kept(done, timeout), done | timeout
        if self._follows:  # each call of `learn` resets the envs without telling the buffer
            self._continuity.follow(self._replay, obs)
        self._replay.add(
            self._further,
            obs=obs,
            next_obs=next_obs,
            action=common.fitted(action, action_shape),
            reward=np.asarray(reward, np.float32),
            terminated=done,
            truncated=timeout,
        )
        self._done[:] = ended
        if self._follows:
            self._continuity.note(next_obs, self._done)
        self._added += 1

    def _kept(self, done: Array, timeout: Array) -> Array:
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
    def from_original(cls, original: Any, *, seed: int | None = None, **options: Any) -> Any:
        """Convert one of the host's buffers. A buffer of this class is returned unchanged.

        Steps after which an env was reset without an end become truncated, so no window continues there.

        Args:
            original: such as the host's ``load_replay_buffer`` puts into a model.
            seed: see the class.
            options: arguments of the constructor that replace those of the original.
        """
        if isinstance(original, cls):
            return original
        sizes = original.buffer_size * original.n_envs, original.observation_space, original.action_space
        known = cls._options_of(original) | {"device": original.device, "n_envs": original.n_envs}
        made = cls(*sizes, seed=seed, **(known | options))
        for rows, steps in steps_of(original):
            done, timeout = steps.pop("done"), steps.pop("timeout")
            more = made._taken(original, rows)
            made._extend(steps | more | {"terminated": made._kept(done, timeout), "truncated": timeout})
        return made

    @classmethod
    def _options_of(cls, original: Any) -> dict[str, Any]:
        """The constructor's arguments of an original."""
        names = "optimize_memory_usage", "handle_timeout_termination"
        return {name: getattr(original, name) for name in names}

    def _taken(self, original: Any, rows: Array) -> dict[str, Any]:
        """Further fields for these rows of an original."""
        return {}

    # -- reading ------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Steps per env that can be drawn."""
        return len(self._replay) // self.n_envs

    def sample(self, batch_size: int, env: Any = None) -> Any:
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
        return self._samples(dict(self._drawn(batch_size, env).items()), env)

    def _drawn(self, batch_size: int, env: Any) -> Any:
        if env is None:
            return self._replay.sample(batch_size)
        self._view.each_reward = env.normalize_reward
        try:
            return self._replay.sample(batch_size)
        finally:
            self._view.each_reward = None  # so that a copy of the buffer does not hold the env

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Any:
        """The transitions in rows ``[B]``, like :meth:`sample`. NumPy's global generator chooses the envs.

        Raises:
            IndexError: a row holds no step.
            TypeError: observations are stored once, in another order than the host's.
        """
        if self._stores_once:
            raise TypeError("_get_samples: rows are stored in another order than the host's; use sample()")
        rows = np.arange(self.size())[batch_inds]
        envs = np.random.default_rng(drawn_by_numpy()).integers(self.n_envs, size=len(rows))
        self._view.each_reward = None if env is None else env.normalize_reward
        return self._samples(dict(self._replay.at(envs * self.buffer_size + rows).items()), env)

    def _samples(self, batch: Any, env: Any) -> Any:
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = samples.DictReplayBufferSamples if nested else samples.ReplayBufferSamples
        return kind(*self._fields(batch, env))

    def _fields(self, batch: Any, env: Any) -> tuple[Any, ...]:
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

    def _observed(self, obs: Any, env: Any) -> Any:
        found: Any = common.joined(self.observation_space, obs)
        if env is not None:
            found = env.normalize_obs(mapped(numpy_view, found))
        return mapped(partial(sent, device=self.device), found)

    # -- the arrays ---------------------------------------------------------------------------------------------

    def column(self, name: str) -> Any:
        """A column ``[buffer_size, n_envs, ...]``, or a dictionary of these; copies where observations are stored once.

        Raises:
            AttributeError: next observations with ``optimize_memory_usage``, as with the host.
        """
        if self._stores_once:
            return self._copied(name)
        if name not in self._arrays:
            field = {"done": "terminated", "timeout": "truncated"}.get(name, name)
            rows = common.joined(self.observation_space, self._replay.block[field], name)
            sizes = self.n_envs, self.buffer_size
            self._arrays[name] = mapped(lambda x: numpy_view(x.unflatten(0, sizes).transpose(0, 1)), rows)
        return self._arrays[name]

    def _copied(self, name: str) -> Any:
        if name == "next_obs" and self.optimize_memory_usage:
            raise AttributeError("next_observations: with optimize_memory_usage=True `observations` holds them")
        if name == "done":
            found = copied(self._arranged("terminated") | self._arranged("truncated"))
            found.newest, found.cut_off = (self.pos - 1) % self.buffer_size, self._replay.interrupt
            return found
        return mapped(copied, self._arranged("truncated" if name == "timeout" else name))

    def _arranged(self, name: str) -> Any:
        """A field of all steps in the host's rows; see :func:`arranged`."""
        rest = ~self._done, self._continuity.next_obs, self.buffer_size
        return arranged(self._replay, name, self.observation_space, self.pos, *rest)


class DictReplayBuffer(ReplayBuffer, buffers.DictReplayBuffer):
    """``stable_baselines3.common.buffers.DictReplayBuffer``: a :class:`ReplayBuffer` for a Dict space."""

    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        common.require_dict(observation_space, "DictReplayBuffer")
        super().__init__(buffer_size, observation_space, *args, **kwargs)
