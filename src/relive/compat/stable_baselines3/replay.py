"""Replay buffers of Stable-Baselines3 2.9 over :class:`relive.ReplayBuffer`."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ...replay.buffer import ReplayBuffer as Core
from ...samplers.contract import Sampler
from ...samplers.prioritized import Prioritized
from ...steps.arrays import numpy_view
from ...steps.schema import Field, Schema
from ...views.contract import View
from ...views.transitions import NStep
from ..continuity import Continuity
from ..seeds import drawn_by_numpy
from ..trees import mapped, mapped_with
from .arrays import Column, copied
from .common import Array, action_field, as_flags, buffers, fitted, joined, obs_fields, obs_shapes, overridden, samples
from .originals import steps_of

__all__ = [
    "DictReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "ReplayBuffer",
]


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
        own = overridden(self, self._replaced)
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
        self._shapes = obs_shapes(observation_space, self.obs_shape, n_envs), (n_envs, self.action_dim)
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
                "obs": obs_fields(self.observation_space, self.obs_shape),
                "action": action_field(self.action_space, self.action_dim),
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

    @property
    def pos(self) -> int:
        """The row that the next step goes to; set it once rows up to there were written in place."""
        return self._added % self.buffer_size

    @pos.setter
    def pos(self, pos: int) -> None:
        if pos != self.pos:
            self._declare(pos)

    @property
    def full(self) -> bool:
        """Whether ``buffer_size`` steps were added; set it once all rows were written in place."""
        return self._added >= self.buffer_size

    @full.setter
    def full(self, full: bool) -> None:
        if full != self.full:
            self._declare(self.buffer_size if full else -1)

    def _declare(self, count: int) -> None:
        """The rows up to ``count``, which were written in place, are steps."""
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
        obs, next_obs = fitted(obs, obs_shape), fitted(next_obs, obs_shape)
        done = ended = as_flags(done)
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
            action=fitted(action, action_shape),
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
            self._sent(batch["action"]),
            self._observed(batch["next_obs"], env),
            self._sent(ends.float().unsqueeze(1)),
            self._sent(batch["reward"].unsqueeze(1)),
        )

    def _observed(self, obs: Any, env: Any) -> Any:
        found: Any = joined(self.observation_space, obs)
        if env is not None:
            found = env.normalize_obs(mapped(numpy_view, found))
        return mapped(self._sent, found)

    def _sent(self, values: Any) -> Tensor:
        if type(values) is Tensor and values.device == self.device:
            return values
        return torch.as_tensor(values).to(self.device)

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
            rows = joined(self.observation_space, self._replay.block[field], name)
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
        envs = [self._steps(env, name) for env in range(self.n_envs)]

        def arrange(columns: list[Array]) -> Array:
            out = np.zeros((self.buffer_size, self.n_envs, *columns[0].shape[1:]), columns[0].dtype)
            for env, column in enumerate(columns):
                out[(self.pos - len(column) + np.arange(len(column))) % self.buffer_size, env] = column
            return out

        return mapped_with(lambda first, others: arrange([first, *others]), envs[0], envs[1:])

    def _steps(self, env: int, name: str) -> Any:
        """A field of an env's steps, oldest first: its rows but those that hold what an episode ended on."""
        rows, under_way = self._replay.slice(env), not self._done[env]
        steps = numpy_view(cast("Tensor", rows["complete"])).copy()
        steps[-1:] |= under_way

        def following(obs: Tensor, newest: list[Any]) -> Array:
            after = np.roll(numpy_view(obs), -1, 0)
            if under_way and len(after):
                after[-1] = newest[0][env]
            return after[steps]

        if name == "next_obs":
            return mapped_with(following, joined(self.observation_space, rows["obs"]), [self._continuity.next_obs])
        return mapped(lambda x: numpy_view(x)[steps], joined(self.observation_space, rows[name], name))


class DictReplayBuffer(ReplayBuffer, buffers.DictReplayBuffer):
    """``stable_baselines3.common.buffers.DictReplayBuffer``: observations are dictionaries.

    Args and methods are those of :class:`ReplayBuffer`.
    """

    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cast("object", observation_space), spaces.Dict):
            raise AssertionError("DictReplayBuffer must be used with Dict obs space only")
        super().__init__(buffer_size, observation_space, *args, **kwargs)


class NStepReplayBuffer(ReplayBuffer, buffers.NStepReplayBuffer):
    """``stable_baselines3.common.buffers.NStepReplayBuffer``; dictionaries and ``optimize_memory_usage`` work, too.

    Args:
        args: as :class:`ReplayBuffer`.
        n_steps: rewards per window, cut at its own episode's end and at the newest step.
        gamma: discount per step; batches have ``discounts`` γᵏ, float32 ``[B, 1]``, of the k steps used.
        kwargs: as :class:`ReplayBuffer`.
    """

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)

    @classmethod
    def _options_of(cls, original: Any) -> dict[str, Any]:
        known = {name: getattr(original, name) for name in ("n_steps", "gamma") if hasattr(original, name)}
        return super()._options_of(original) | known

    @property
    def n_steps(self) -> int:
        """Rewards per window; may be changed at any time."""
        return self._view.n

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        self._view.n = n_steps

    @property
    def gamma(self) -> float:
        """Discount per step; may be changed at any time."""
        return self._view.gamma

    @gamma.setter
    def gamma(self, gamma: float) -> None:
        self._view.gamma = gamma

    def _fields(self, batch: Any, env: Any) -> tuple[Any, ...]:
        discounts = torch.pow(torch.tensor(self.gamma), batch["steps"].float()).unsqueeze(1)
        return (*super()._fields(batch, env), self._sent(discounts))


class PrioritizedReplayBufferSamples(NamedTuple):
    """The host's ``ReplayBufferSamples``, with what prioritized replay adds."""

    observations: Tensor
    actions: Tensor
    next_observations: Tensor
    dones: Tensor
    rewards: Tensor
    discounts: Tensor
    weights: Tensor
    """Importance weights, float32 ``[B, 1]``: multiply each transition's loss with its own."""
    indices: Array
    """int64 ``[B]``, for :meth:`PrioritizedReplayBuffer.update_priorities`."""


class PrioritizedDictReplayBufferSamples(NamedTuple):
    """The host's ``DictReplayBufferSamples``, likewise."""

    observations: dict[str, Tensor]
    actions: Tensor
    next_observations: dict[str, Tensor]
    dones: Tensor
    rewards: Tensor
    discounts: Tensor
    weights: Tensor
    indices: Array


class PrioritizedReplayBuffer(NStepReplayBuffer):
    """Prioritized replay (Schaul et al. 2015), which Stable-Baselines3 2.9 does not have, in its form; n-step if asked.

    The host's ``train`` methods neither use ``weights`` nor report TD errors; ``docs/migration/stable_baselines3.md``
    has a DQN that does.

    Args:
        args: as :class:`ReplayBuffer`.
        alpha: how much priorities matter.
        beta: how much the weights correct for it, or a schedule (first, last, draws).
        eps: what a transition without error is worth.
        n_steps: as :class:`NStepReplayBuffer`; 1 is single transitions.
        kwargs: as :class:`NStepReplayBuffer`.
    """

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

    def update_priorities(self, indices: Any, td_errors: Any) -> int:
        """Tell the TD errors of a batch, ``[B]`` or ``[B, 1]``; returns how many came too late.

        Raises:
            ShapeError: the shapes differ.
            ParameterError: an index was never issued.
            NotFiniteError: a TD error is NaN or infinite. Nothing is changed in either case.
        """
        return self._replay.update_priorities(indices, torch.as_tensor(td_errors).reshape(-1))

    def _samples(self, batch: Any, env: Any) -> Any:
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = PrioritizedDictReplayBufferSamples if nested else PrioritizedReplayBufferSamples
        weight = batch.get("weight", torch.ones(len(batch["index"])))  # rows that were not drawn have none
        weights = self._sent(weight.unsqueeze(1))
        parts: Any = (*self._fields(batch, env), weights, numpy_view(batch["index"]))
        return kind(*parts)
