"""Stable-Baselines3's rollout buffers (release 2.9), built on :class:`relive.RolloutBuffer`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from ...returns.estimators import GAE
from ...rollout.buffer import RolloutBuffer as Core
from ...steps.arrays import Array, numpy_view
from ...steps.schema import Field, Schema
from ..arrays import sent
from ..attributes import Column
from ..seeds import drawn_by_numpy
from ..trees import mapped
from . import common
from .common import buffers, samples

__all__ = ["DictRolloutBuffer", "RolloutBuffer"]

SERVED = ("obs", "action", "value", "log_prob", "advantage", "return")
GATHERED = 2**20
"""Bytes of batches that are gathered at a time: a cache holds them until they are read."""


class RolloutBuffer(buffers.RolloutBuffer):
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

    observations, actions, rewards = Column("obs"), Column("action"), Column("reward")
    episode_starts, values, log_probs = Column("episode_start"), Column("value"), Column("log_prob")
    advantages, returns = Column("advantage"), Column("return")

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
        if common.overridden(self, ["_get_samples"]):
            raise TypeError(
                f"{type(self).__name__}._get_samples would never be called: the columns stay [buffer_size, n_envs, "
                "...] here; override get() instead"
            )
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.gae_lambda, self.gamma, self._seed = gae_lambda, gamma, seed
        number, flag = Field((), torch.float32), Field((), torch.bool)
        schema = Schema(
            {
                "obs": common.obs_fields(observation_space, self.obs_shape),
                "action": common.action_field(action_space, self.action_dim, narrow=False),
                "reward": number,
                "episode_start": number,
                "value": number,
                "log_prob": number,
            }
        )
        further = {"terminated": flag, "truncated": flag}  # computed from `episode_start` when the rollout is full
        further |= {"advantage": number, "return": number}
        self._rollout = Core(schema, buffer_size, n_envs, columns=further, seed=seed or 0)
        self._arrays: dict[str, Any] = {}
        self._shapes = common.obs_shapes(self.obs_shape, n_envs), (n_envs, self.action_dim)
        self._row_bytes = 2 * number.nbytes + sum(x.nbytes for path, x in schema.leaves.items() if path[0] in SERVED)
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}  # views, which a pickle would turn into copies

    def _pos(self) -> int:
        """How many steps were added. Set it after writing further rows in place."""
        rollout: Core | None = getattr(self, "_rollout", None)  # the host counts before there is one
        return 0 if rollout is None else rollout.steps

    def _full(self) -> bool:
        """Whether ``buffer_size`` steps were added. Set it after writing all rows in place."""
        return self.pos == self.buffer_size

    pos, full = property(_pos, common.set_pos), property(_full, common.set_full)

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
        self._rollout.reserve(count - self.pos)
        self._rollout.commit()

    def add(self, obs: Any, action: Any, reward: Any, episode_start: Any, value: Any, log_prob: Any) -> None:
        """Append one step of every env: arrays, and tensors ``value`` ``[N]`` or ``[N, 1]`` and ``log_prob`` ``[N]``.

        Raises:
            FullError: the buffer is full; call :meth:`reset`.
        """
        obs_shape, action_shape = self._shapes
        self._rollout.add(
            obs=common.fitted(obs, obs_shape),
            action=common.fitted(action, action_shape),
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

    def compute_returns_and_advantage(self, last_values: Any, dones: Array) -> None:
        """Compute advantages by GAE, and ``returns`` = advantages + values.

        The host's collector has already added γV(final observation) to the rewards of truncated steps, so every done
        counts as terminal here.

        Args:
            last_values: V of the observations after the last step, ``[N]`` or ``[N, 1]``.
            dones: whether the last step ended an episode, ``[N]``.
        """
        rollout, ended = self._rollout, torch.as_tensor(np.asarray(dones).astype(np.bool_))
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
        self.generator_ready = True
        if self._seed is None:
            self._rollout.seed = drawn_by_numpy()
        size = batch_size or self.buffer_size * self.n_envs
        together = max(GATHERED // (size * self._row_bytes), 1)  # small batches: several at a time
        blocks = self._rollout.minibatches(size * together, fields=SERVED)
        return (batch for block in blocks for batch in self._split(block, size))

    def _split(self, block: Any, size: int) -> Iterator[Any]:
        """Rows that were gathered together, as the host's batches of ``size`` rows."""
        found = dict(block.items())
        obs: Any = mapped(self._observed, common.joined(self.observation_space, found["obs"]))
        rest: list[Any] = [sent(found[name], self.device) for name in SERVED[1:]]
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

    def _observed(self, obs: Any) -> Any:
        """Observations of a batch; those that are single numbers have a last axis, as the host's have."""
        return sent(obs if obs.ndim > 1 else obs.unsqueeze(1), self.device)

    def column(self, name: str) -> Any:
        """A column of the rollout as a view ``[T, N, ...]``, or a dictionary of views."""
        if name not in self._arrays:
            found = common.joined(self.observation_space, self._rollout.block[name][: self.buffer_size], name)
            self._arrays[name] = mapped(numpy_view, found)
        return self._arrays[name]


class DictRolloutBuffer(RolloutBuffer, buffers.DictRolloutBuffer):
    """``stable_baselines3.common.buffers.DictRolloutBuffer``: a :class:`RolloutBuffer` for a Dict space."""

    def __init__(self, buffer_size: int, observation_space: spaces.Dict, *args: Any, **kwargs: Any) -> None:
        common.require_dict(observation_space, "DictRolloutBuffer")
        super().__init__(buffer_size, observation_space, *args, **kwargs)
