"""Replay buffers of Stable-Baselines3 2.9: n-step and prioritized ones, beside the uniform ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from ...samplers.prioritized import Prioritized
from ...steps.arrays import numpy_view
from ..arrays import Array, sent
from ..attributes import alias
from .common import buffers
from .uniform import DictReplayBuffer, ReplayBuffer

__all__ = [
    "DictReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "ReplayBuffer",
]


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

    n_steps = alias("_view.n", "Rewards per window; may be changed at any time.")
    gamma = alias("_view.gamma", "Discount per step; may be changed at any time.")

    def _fields(self, batch: Any, env: Any) -> tuple[Any, ...]:
        discounts = torch.pow(torch.tensor(self.gamma), batch["steps"].float()).unsqueeze(1)
        return (*super()._fields(batch, env), sent(discounts, self.device))


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
        weights = sent(weight.unsqueeze(1), self.device)
        parts: Any = (*self._fields(batch, env), weights, numpy_view(batch["index"]))
        return kind(*parts)
