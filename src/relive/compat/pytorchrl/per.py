"""PERBuffer of PyTorchRL 3.2 over :class:`relive.Prioritized`."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...samplers.contract import Sampler
from ...samplers.prioritized import Prioritized
from ...samplers.recent import Recent
from ...steps.arrays import as_host
from ..attributes import alias
from .keys import ALGORITHM
from .replay import Data, Factory, NStepReplayBuffer

__all__ = ["PERBuffer"]

LEAST = 1e-6
"""What a transition without error is worth where ``epsilon`` is 0: with nothing it could never be drawn again."""


class PERBuffer(NStepReplayBuffer):
    """``pytorchrl.agent.storages.PERBuffer``: drawn in proportion to (|TD error| + epsilon)^alpha.

    Batches have ``per_weights``, float32 ``[B, 1]``, divided by the largest of the buffer, and ``idxs``;
    :meth:`after_gradients` takes the errors from ``info["Algorithm"]["errors"]``. With ``alpha=0`` draws are uniform,
    ``per_weights`` is 1.0 and no errors are wanted. A sequence's priority is 0.9 max + 0.1 mean of those of its steps.

    Args:
        size: as :class:`NStepReplayBuffer`, and so the others.
        epsilon: what a transition without error is worth; 0 counts as 1e-6.
        alpha: how much priorities matter.
        beta: how much the weights correct for it.
        default_error: the error of new transitions, also of those that take the place of old ones.
    """

    def __init__(
        self, size: int, device: Any, actor: Any, algorithm: Any, envs: Any, n_step: int = 1, epsilon: float = 0.0,
        alpha: float = 0.0, beta: float = 1.0, default_error: float = 1000000, *, seed: int | None = None,
    ) -> None:  # fmt: skip
        self._epsilon = epsilon
        self._priorities: Any = Prioritized(
            alpha, beta, eps=epsilon or LEAST, stratified=False, normalize="buffer", default_error=default_error
        )
        super().__init__(size, device, actor, algorithm, envs, n_step, seed=seed)

    @classmethod
    def create_factory(
        cls, size: int, n_step: int = 1, epsilon: float = 0.0, alpha: float = 0.0, beta: float = 1.0,
        default_error: float = 1000000, *, seed: int | None = None,
    ) -> Factory:  # fmt: skip
        """A function ``(device, actor, algorithm, envs)`` that makes such buffers."""
        options = n_step, epsilon, alpha, beta, default_error
        return lambda device, actor, algorithm, envs: cls(size, device, actor, algorithm, envs, *options, seed=seed)

    def _new_sampler(self) -> Sampler:
        return Prioritized(
            self.alpha, self.beta, eps=self._epsilon or LEAST, stratified=False, normalize="buffer",
            default_error=self.error,
        )  # fmt: skip

    def _adopt(self, sampler: Any) -> None:
        super()._adopt(sampler)
        self._priorities = sampler.inner if isinstance(sampler, Recent) else sampler

    @property
    def epsilon(self) -> float:
        """What a transition without error is worth; a change takes effect on everything stored."""
        return self._epsilon

    @epsilon.setter
    def epsilon(self, epsilon: float) -> None:
        self._priorities.eps = epsilon or LEAST
        self._epsilon = epsilon

    error = alias("_priorities.default_error", "The error of new transitions.")
    alpha = alias("_priorities.alpha", "How much priorities matter; a change takes effect on everything stored.")
    beta = alias("_priorities.beta", "How much the weights correct for it.")

    def get_priority(self, error: Any) -> Any:
        """(error + epsilon)^alpha of errors that are not negative; arrays, tensors or numbers."""
        return (error + self.epsilon) ** self.alpha

    def get_sequence_priority(self, sequence_data: Any, eta: float = 0.9) -> Any:
        """eta · max + (1 - eta) · mean over the first axis."""
        return eta * np.max(sequence_data, axis=0) + (1 - eta) * np.mean(sequence_data, axis=0)

    def _extras(self, extras: Data, number: int, of: int) -> Data:
        weights: Any = 1.0
        if self.alpha != 0.0:
            weights = extras["weight"].unsqueeze(1)
            if self.recurrent_actor:
                weights = weights.repeat_interleave(self.sequence_length, 0)
        common = super()._extras(extras, number, of)
        return {**common, "per_weights": weights, "idxs": extras["index"].numpy()}

    def after_gradients(self, batch: Data, info: Data) -> Data:
        """Give the transitions of the batch the errors that its update found.

        Raises:
            AssertionError: the algorithm reported none.
            ShapeError, NotFiniteError: they do not fit the batch, or are not finite. Nothing is changed.
        """
        if self.alpha != 0.0 and "idxs" in batch:
            weighted = isinstance(batch.get("per_weights"), Tensor)
            errors = info[ALGORITHM].get("errors")
            assert errors is not None or not weighted, "TD errors missing!"
            index = batch.pop("idxs")
            if errors is not None:
                found = as_host(errors).reshape(len(index), -1)
                found = self._joint(found) if self.recurrent_actor else found.reshape(-1)
                self._stored.replay.update_priorities(index, found)
        return info

    def _joint(self, errors: Any) -> Any:
        """The errors ``[S]`` that give sequences the priorities of the errors ``[S, K]`` of their steps."""
        priority = self.get_sequence_priority(self.get_priority(np.abs(errors.T.astype(np.float64))))
        return np.maximum(priority ** (1 / self.alpha) - self.epsilon, 0.0)
