"""Stable-Baselines3's replay buffers: n-step and prioritized ones, and the names of the uniform ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from ...samplers.prioritized import Prioritized
from ...steps.arrays import Array, numpy_view
from ..arrays import sent
from ..attributes import alias
from .common import buffers
from .uniform import ReplayBuffer

__all__ = [
    "NStepReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
]


class NStepReplayBuffer(ReplayBuffer, buffers.NStepReplayBuffer):
    """``stable_baselines3.common.buffers.NStepReplayBuffer``, also with dictionaries and ``optimize_memory_usage``.

    Args:
        args: see :class:`ReplayBuffer`.
        n_steps: rewards per window, at most. A window ends at its episode's end and at the newest step.
        gamma: discount per step. Batches have ``discounts`` γᵏ, float32 ``[B, 1]``, for windows of k steps.
        kwargs: see :class:`ReplayBuffer`.
    """

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)

    @classmethod
    def _options_of(cls, original: Any) -> dict[str, Any]:
        known = {name: getattr(original, name) for name in ("n_steps", "gamma") if hasattr(original, name)}
        return super()._options_of(original) | known

    n_steps = alias("_view.n", "Rewards per window, at most; may be changed at any time.")
    gamma = alias("_view.gamma", "Discount per step; may be changed at any time.")

    def _fields(self, batch: Any, env: Any) -> tuple[Any, ...]:
        discounts = torch.pow(torch.tensor(self.gamma), batch["steps"].float()).unsqueeze(1)
        return (*super()._fields(batch, env), sent(discounts, self.device))


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
        eps: added to each |TD error|.
        n_steps: see :class:`NStepReplayBuffer`; 1 is single transitions.
        kwargs: see :class:`NStepReplayBuffer`.
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
        """Set priorities from the TD errors of a batch, ``[B]`` or ``[B, 1]``; returns how many came too late.

        Raises:
            ShapeError: the shapes differ.
            ParameterError: an index was never issued.
            NotFiniteError: a TD error is NaN or infinite. Nothing is changed in either case.
        """
        return self._replay.update_priorities(indices, torch.as_tensor(td_errors).reshape(-1))

    def _samples(self, batch: Any, env: Any) -> Any:
        nested = isinstance(self.observation_space, spaces.Dict)
        kind = PrioritizedDictReplayBufferSamples if nested else PrioritizedReplayBufferSamples
        weight = batch.get("weight", torch.ones(len(batch["index"])))  # rows read by position have none
        weights = sent(weight.unsqueeze(1), self.device)
        parts: Any = (*self._fields(batch, env), weights, numpy_view(batch["index"]))
        return kind(*parts)
