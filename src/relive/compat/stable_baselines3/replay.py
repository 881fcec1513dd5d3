"""Replay buffers of Stable-Baselines3 2.9 over :class:`relive.ReplayBuffer`."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ...checks import numpy_view
from ...replay import ReplayBuffer as Core
from ...samplers import Prioritized, Sampler
from ...schema import Field, Schema
from ...views import NStep, View
from ..continuity import Continuity
from ..trees import mapped
from .common import Array, action_field, as_flags, buffers, fitted, joined, obs_fields, obs_shapes, samples

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

    ``optimize_memory_usage=True`` stores each observation once. It goes together with
    ``handle_timeout_termination=True``, with several envs and with dictionaries, and the next observation at an
    episode's end is the one the episode ended on. Then a transition can be drawn once the next of its env has come,
    and an episode of k steps takes k + 1 of the ``buffer_size`` rows.

    Args:
        buffer_size: transitions over all envs.
        observation_space: of one env.
        action_space: of one env.
        device: where batches go; rows stay in RAM.
        n_envs: N.
        optimize_memory_usage: see above.
        handle_timeout_termination: do not count time limits (``info["TimeLimit.truncated"]``) as ends of the task.
        seed: batch t is a function of (seed, t); None draws one. NumPy's generator is never read.
    """

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
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._replay = self._core(seed, **parts)
        self._follows = self._stores_once or self._view.n > 1
        self._continuity = Continuity()
        self._shapes = obs_shapes(observation_space, self.obs_shape, n_envs), (n_envs, self.action_dim)
        self._never: Array = np.zeros(n_envs, np.bool_)
        self._done = ~self._never

    def _core(
        self, seed: int | None, sampler: Sampler | None = None, n_steps: int = 1, gamma: float = 0.99,
        view: View | None = None,
    ) -> Core:  # fmt: skip
        schema = Schema(
            {
                "obs": obs_fields(self.observation_space, self.obs_shape),
                "action": action_field(self.action_space, self.action_dim),
                "reward": Field((), torch.float32),
                "terminated": Field((), torch.bool),
                "truncated": Field((), torch.bool),
            }
        )
        return Core(
            schema,
            max(self.buffer_size, 2) * self.n_envs,
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

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: list[dict[str, Any]]
    ) -> None:
        """Append one step of every env; ``next_obs`` is the observation that an episode ended on, where one did."""
        obs_shape, action_shape = self._shapes
        obs, next_obs = fitted(obs, obs_shape), fitted(next_obs, obs_shape)
        done = terminated = as_flags(done)
        truncated = self._never
        if self.handle_timeout_termination and any(done.tobytes()):  # which is quicker than done.any()
            timeout = np.array([info.get("TimeLimit.truncated", False) for info in infos], np.bool_)
            terminated, truncated = done & ~timeout, done & timeout
        if self._follows:  # every call of `learn` resets the envs behind the buffer's back
            self._continuity.follow(self._replay, obs)
        self._replay.add(
            obs=obs,
            next_obs=next_obs,
            action=fitted(action, action_shape),
            reward=np.asarray(reward, np.float32),
            terminated=terminated,
            truncated=truncated,
        )
        self._done[:] = done
        if self._follows:
            self._continuity.note(next_obs, self._done)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def reset(self) -> None:
        """Forget everything stored."""
        super().reset()
        self._replay.clear()
        self._continuity.forget()

    def size(self) -> int:
        """Steps per env that can be drawn."""
        return len(self._replay) // self.n_envs

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """A random batch, as the host's named tuple of tensors on ``device``: rewards and dones ``[B, 1]``, float32.

        Args:
            batch_size: B.
            env: the ``VecNormalize`` to normalize observations and rewards with.

        Raises:
            EmptyError: there is nothing to draw yet.
        """
        return self._samples(dict(self._drawn(batch_size, env).items()), env)

    def _drawn(self, batch_size: int, env: Any) -> Any:
        self._view.each_reward = None if env is None else env.normalize_reward
        return self._replay.sample(batch_size)

    def _samples(self, batch: Any, env: Any) -> Any:
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = samples.DictReplayBufferSamples if nested else samples.ReplayBufferSamples
        return kind(*self._fields(batch, env))

    def _fields(self, batch: Any, env: Any) -> tuple[Any, ...]:
        return (
            self._observed(batch["obs"], env),
            self._sent(batch["action"]),
            self._observed(batch["next_obs"], env),
            self._sent(batch["terminated"].float().unsqueeze(1)),
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

    # What is stored, as the host keeps it: arrays [buffer_size, n_envs, ...], copied, zero where nothing is.

    def _column(self, name: str) -> Any:
        rows = [self._replay.slice(env) for env in range(self.n_envs)]
        rows = [env[_real(env, bool(done))] for env, done in zip(rows, self._done, strict=True)]

        def arrange(columns: list[Any]) -> Any:
            if not isinstance(columns[0], Tensor):
                return {key: arrange([c[key] for c in columns]) for key in self.observation_space.spaces}
            out = np.zeros((self.buffer_size, self.n_envs, *columns[0].shape[1:]), numpy_view(columns[0]).dtype)
            for env, column in enumerate(columns):
                out[(self.pos - len(column) + np.arange(len(column))) % self.buffer_size, env] = numpy_view(column)
            return out

        return arrange([env[name] for env in rows])

    @property
    def observations(self) -> Any:
        """``[buffer_size, n_envs, ...]``, or a dictionary of those."""
        return self._column("obs")

    @property
    def next_observations(self) -> Any:
        """The same after the step.

        Raises:
            AttributeError: with ``optimize_memory_usage`` they are not stored apart, here as there.
        """
        if self.optimize_memory_usage:
            raise AttributeError("next_observations: with optimize_memory_usage=True `observations` holds them")
        return self._column("next_obs")

    @property
    def actions(self) -> Array:
        """``[buffer_size, n_envs, action_dim]``."""
        return self._column("action")

    @property
    def rewards(self) -> Array:
        """``[buffer_size, n_envs]``, float32."""
        return self._column("reward")

    @property
    def dones(self) -> Array:
        """Whether an episode ended, in any way; ``[buffer_size, n_envs]``, float32."""
        return (self._column("terminated") | self._column("truncated")).astype(np.float32)

    @property
    def timeouts(self) -> Array:
        """Whether it ended by a time limit; ``[buffer_size, n_envs]``, float32."""
        return self._column("truncated").astype(np.float32)


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
            ShapeError: the shapes differ, or an index was never issued.
            NotFiniteError: a TD error is NaN or infinite. Nothing is changed in either case.
        """
        return self._replay.update_priorities(indices, torch.as_tensor(td_errors).reshape(-1))

    def _samples(self, batch: Any, env: Any) -> Any:
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = PrioritizedDictReplayBufferSamples if nested else PrioritizedReplayBufferSamples
        weights = self._sent(batch["weight"].unsqueeze(1))
        parts: Any = (*self._fields(batch, env), weights, numpy_view(batch["index"]))
        return kind(*parts)


def _real(rows: Any, done: bool) -> Tensor:
    """Of an env's rows those that are steps, its newest among them, and not observations that an episode ended on."""
    steps = rows["complete"].clone()
    if len(steps) and not done:
        steps[-1] = True
    return steps
