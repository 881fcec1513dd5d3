"""Replay buffers of Stable-Baselines3 2.9 over :class:`relive.ReplayBuffer`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from ...replay.buffer import ReplayBuffer as Core
from ...samplers.contract import Sampler
from ...steps.arrays import numpy_view
from ...steps.schema import Field, Schema
from ...views.contract import View
from ...views.transitions import NStep
from ..arrays import Array, sent
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
    """``stable_baselines3.common.buffers.ReplayBuffer``; the arguments are its own, and ``seed``.

    ``observations``, ``next_observations``, ``actions``, ``rewards``, ``dones`` and ``timeouts`` are the storage,
    ``[buffer_size, n_envs, ...]``: what is written to them is sampled. The last two are bool. Once rows were written in
    place, ``pos = k`` or ``full = True`` says so.

    ``optimize_memory_usage=True`` stores each observation once. It goes together with
    ``handle_timeout_termination=True``, with several envs and with dictionaries, and the next observation at an
    episode's end is the one the episode ended on. Then a transition can be drawn once the next of its env has come,
    an episode of k steps takes k + 1 of the ``buffer_size`` rows, and the arrays are copies that cannot be written to.

    Args:
        buffer_size: transitions over all envs, at least 2 of each.
        observation_space: of one env.
        action_space: of one env.
        device: where batches go; rows stay in RAM.
        n_envs: N.
        optimize_memory_usage: see above.
        handle_timeout_termination: do not count time limits (``info["TimeLimit.truncated"]``) as ends of the task.
        seed: batch t is a function of (seed, t). None draws a seed for each batch from NumPy's global generator, which
            the host draws from.

    Raises:
        TypeError: a subclass has its own ``_get_samples``, and ``optimize_memory_usage`` is set.
    """

    observations, next_observations = Column("obs"), Column("next_obs")
    actions, rewards = Column("action"), Column("reward")
    dones, timeouts = Column("done"), Column("timeout")

    _replaced: tuple[str, ...] = ("_get_samples",)
    """Methods of the host that have no place here; a subclass that has its own expects the host's arrays."""

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
                "are not where the host has them; override sample() instead, or use ReplayBuffer without "
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
            check_ends=False,  # whoever fills it is not the user
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
        return self.__dict__ | {"_arrays": {}}  # views, which would come back as arrays of their own

    # -- writing ------------------------------------------------------------------------------------------------

    def _pos(self) -> int:
        """The row that the next step goes to; set it once rows up to there were written in place."""
        return self._added % self.buffer_size

    def _full(self) -> bool:
        """Whether ``buffer_size`` steps were added; set it once all rows were written in place."""
        return self._added >= self.buffer_size

    pos, full = property(_pos, common.set_pos), property(_full, common.set_full)

    def _declare(self, count: int) -> None:
        """The rows up to ``count``, which were written in place, are steps.

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
        """Append one step of every env; ``next_obs`` is the observation that an episode ended on, where one did."""
        obs_shape, action_shape = self._shapes
        obs, next_obs = common.fitted(obs, obs_shape), common.fitted(next_obs, obs_shape)
        done = ended = common.as_flags(done)
        timeout = self._never
        if self.handle_timeout_termination:
            marks = [info.get("TimeLimit.truncated", False) for info in infos]
            if any(marks):
                timeout = np.array(marks, np.bool_).reshape(self.n_envs)
                done, ended = self._kept(done, timeout), done | timeout
        if self._follows:  # every call of `learn` resets the envs behind the buffer's back
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
        """What is stored as terminated: where the arrays are the storage, the host's ``dones`` as they are."""
        return done & ~timeout if self._stores_once else done

    def _extend(self, steps: dict[str, Any]) -> None:
        """Append several steps ``[T, N, ...]``, as they are stored."""
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
        """A buffer of this class with all that one of the host's holds, oldest first; one of this class as it is.

        Steps after which an env was reset without an end come as time-outs, so that no window goes on there.

        Args:
            original: such as ``load_replay_buffer`` of the host puts into a model, whatever class that had before.
            seed: as the constructor's.
            options: other arguments of the constructor than the original had.
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
        """The arguments of the constructor that an original was made with."""
        names = "optimize_memory_usage", "handle_timeout_termination"
        return {name: getattr(original, name) for name in names}

    def _taken(self, original: Any, rows: Array) -> dict[str, Any]:
        """Further fields of an original's rows."""
        return {}

    # -- reading ------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Steps per env that can be drawn."""
        return len(self._replay) // self.n_envs

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """A random batch, as the host's named tuple of tensors on ``device``: rewards and dones ``[B, 1]``, float32.

        A subclass that has a ``_get_samples`` is asked for rows by that, as the host does it.

        Args:
            batch_size: B.
            env: the ``VecNormalize`` to normalize observations and rewards with.

        Raises:
            EmptyError: there is nothing to draw yet.
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
            self._view.each_reward = None  # copies of the buffer come without the env

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Any:
        """Rows ``[B]`` of envs that NumPy's global generator chooses, as :meth:`sample` gives them.

        Raises:
            IndexError: there is no such row.
            TypeError: observations are stored once, and rows are not where the host has them.
        """
        if self._stores_once:
            raise TypeError("_get_samples: rows are not where the host has them; use sample()")
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
        """What is stored of a field, ``[buffer_size, n_envs, ...]``, or a dictionary of those.

        Raises:
            AttributeError: next observations with ``optimize_memory_usage``, where the host has none either.
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
        """A field of all steps where the host has them, zero where nothing is."""
        rest = ~self._done, self._continuity.next_obs, self.buffer_size
        return arranged(self._replay, name, self.observation_space, self.pos, *rest)


class DictReplayBuffer(ReplayBuffer, buffers.DictReplayBuffer):
    """``stable_baselines3.common.buffers.DictReplayBuffer``: observations are dictionaries.

    Args and methods are those of :class:`ReplayBuffer`.
    """

    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        common.require_dict(observation_space, "DictReplayBuffer")
        super().__init__(buffer_size, observation_space, *args, **kwargs)
