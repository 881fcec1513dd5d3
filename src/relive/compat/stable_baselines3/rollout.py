"""Rollout buffers of Stable-Baselines3 2.9 over :class:`relive.RolloutBuffer`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ...checks import numpy_view
from ...returns import GAE
from ...rollout import RolloutBuffer as Core
from ...schema import Field, Schema
from ..trees import mapped
from .common import Array, action_field, as_flags, buffers, fitted, joined, obs_fields, obs_shapes, samples

__all__ = ["DictRolloutBuffer", "RolloutBuffer"]

SERVED = ("obs", "action", "value", "log_prob", "advantage", "return")
GATHERED = 2**20
"""Bytes of batches that are gathered at once: what a cache holds until they are read."""


class RolloutBuffer(buffers.RolloutBuffer):
    """``stable_baselines3.common.buffers.RolloutBuffer``; the arguments are its own, and ``seed``.

    ``episode_start`` is, as the host's collector passes it, the done flag of the previous step. The columns
    ``observations``, ``actions``, ``rewards``, ``episode_starts``, ``values``, ``log_probs``, ``advantages`` and
    ``returns`` are views ``[buffer_size, n_envs, ...]``, before and after :meth:`get`; the last two may be assigned.

    Args:
        buffer_size: T, steps per env.
        observation_space: of one env.
        action_space: of one env.
        device: where batches go; columns stay in RAM.
        gae_lambda: λ.
        gamma: discount per step.
        n_envs: N.
        seed: of the permutations; None draws one. NumPy's generator is never read.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        gae_lambda: float = 1,
        gamma: float = 0.99,
        n_envs: int = 1,
        *,
        seed: int | None = None,
    ) -> None:
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.gae_lambda, self.gamma, self.generator_ready = gae_lambda, gamma, False
        number, flag = Field((), torch.float32), Field((), torch.bool)
        schema = Schema(
            {
                "obs": obs_fields(observation_space, self.obs_shape),
                "action": action_field(action_space, self.action_dim, narrow=False),
                "reward": number,
                "episode_start": flag,
                "value": number,
                "log_prob": number,
            }
        )
        flags = {"terminated": flag, "truncated": flag}  # found in `episode_start`, once all steps are there
        self._rollout = Core(schema, buffer_size, n_envs, columns=flags, seed=seed)
        self._shapes = obs_shapes(observation_space, self.obs_shape, n_envs), (n_envs, self.action_dim)
        self._row_bytes = 2 * number.nbytes + sum(x.nbytes for path, x in schema.leaves.items() if path[0] in SERVED)

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """Append one step of every env: arrays, and tensors ``value`` ``[N]`` or ``[N, 1]`` and ``log_prob`` ``[N]``.

        Raises:
            FullError: ``buffer_size`` steps are there; call :meth:`reset`.
        """
        obs_shape, action_shape = self._shapes
        self._rollout.add(
            obs=fitted(obs, obs_shape),
            action=fitted(action, action_shape),
            reward=np.asarray(reward, np.float32),
            episode_start=as_flags(episode_start),
            value=value.numpy(force=True).ravel(),
            log_prob=log_prob.numpy(force=True).ravel(),
        )
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def reset(self) -> None:
        """Forget the rollout; the memory stays."""
        self.pos, self.full, self.generator_ready = 0, False, False
        self._rollout.clear()

    def compute_returns_and_advantage(self, last_values: Any, dones: Array) -> None:
        """GAE, compiled; ``returns`` are advantages + values.

        The host's collector has added γV(final observation) to the rewards of truncated steps already, so that here
        every done is a terminal.

        Args:
            last_values: V of the observations after the last step, ``[N]`` or ``[N, 1]``.
            dones: whether the last step ended an episode, ``[N]``.
        """
        rollout, ended = self._rollout, torch.as_tensor(np.asarray(dones).astype(np.bool_))
        rollout["terminated"] = torch.cat([rollout["episode_start"][1:], ended.reshape(1, self.n_envs)])
        last = last_values.numpy(force=True).ravel()
        rollout.finish(GAE(self.gamma, self.gae_lambda), last_value=last, partial=True)

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """All transitions once, in random order, as the host's named tuples; the last batch takes what remains.

        Args:
            batch_size: B; None is all in one.

        Raises:
            AssertionError: the rollout is not full.
            FieldError: :meth:`compute_returns_and_advantage` was not called.
        """
        assert self.full, "the rollout is not full; add the remaining steps first"
        self.generator_ready = True
        size = batch_size or self.buffer_size * self.n_envs
        together = max(GATHERED // (size * self._row_bytes), 1)  # small batches: several at a time
        blocks = self._rollout.minibatches(size * together, fields=SERVED)
        return (batch for block in blocks for batch in self._split(block, size))

    def _split(self, block: Any, size: int) -> Iterator[Any]:
        """What was gathered together, as batches ``[size]`` of the host's."""
        found = dict(block.items())
        obs: Any = mapped(self._sent, joined(self.observation_space, found["obs"]))
        rest: list[Any] = [self._sent(found[name]) for name in SERVED[1:]]
        rest[0] = rest[0].float()
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = samples.DictRolloutBufferSamples if nested else samples.RolloutBufferSamples
        if len(rest[0]) <= size:
            return iter([kind(obs, *rest)])
        parts: list[Any] = [x.split(size) for x in rest]
        if nested:
            members = zip(*mapped(lambda x: x.split(size), obs).values(), strict=True)
            return map(kind, (dict(zip(obs, member, strict=True)) for member in members), *parts)
        return map(kind, obs.split(size), *parts)

    def _sent(self, values: Tensor) -> Tensor:
        return values if values.device == self.device else values.to(self.device)

    # The columns, views [T, N, ...].

    def _column(self, name: str) -> Any:
        found = self._rollout.block[name][: self.buffer_size]
        return mapped(numpy_view, joined(self.observation_space, found) if name == "obs" else found)

    def _attached(self, name: str) -> Array:
        if name in self._rollout:
            return numpy_view(self._rollout[name])
        return np.zeros((self.buffer_size, self.n_envs), np.float32)

    @property
    def observations(self) -> Any:
        """``[T, N, ...]``, or a dictionary of those."""
        return self._column("obs")

    @property
    def actions(self) -> Array:
        """``[T, N, action_dim]``."""
        return self._column("action")

    @property
    def rewards(self) -> Array:
        """``[T, N]``, float32."""
        return self._column("reward")

    @property
    def episode_starts(self) -> Array:
        """Whether the step before ended an episode, float32 ``[T, N]``; a copy."""
        return self._column("episode_start").astype(np.float32)

    @property
    def values(self) -> Array:
        """``[T, N]``, float32."""
        return self._column("value")

    @property
    def log_probs(self) -> Array:
        """``[T, N]``, float32."""
        return self._column("log_prob")

    @property
    def advantages(self) -> Array:
        """``[T, N]``, float32; zero until they are computed."""
        return self._attached("advantage")

    @advantages.setter
    def advantages(self, advantages: Any) -> None:
        self._rollout["advantage"] = torch.as_tensor(advantages)

    @property
    def returns(self) -> Array:
        """``[T, N]``, float32; zero until they are computed."""
        return self._attached("return")

    @returns.setter
    def returns(self, returns: Any) -> None:
        self._rollout["return"] = torch.as_tensor(returns)


class DictRolloutBuffer(RolloutBuffer, buffers.DictRolloutBuffer):
    """``stable_baselines3.common.buffers.DictRolloutBuffer``: observations are dictionaries.

    Args and methods are those of :class:`RolloutBuffer`.
    """

    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        if not isinstance(cast("object", observation_space), spaces.Dict):
            raise AssertionError("DictRolloutBuffer must be used with Dict obs space only")
        super().__init__(buffer_size, observation_space, *args, **kwargs)
