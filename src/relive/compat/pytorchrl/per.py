"""PyTorchRL's PERBuffer (release 3.2), built on :class:`relive.Prioritized`."""

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
"""The epsilon used for ``epsilon=0``. With 0, a transition without error could never be drawn again."""


class PERBuffer(NStepReplayBuffer):
    """``pytorchrl.agent.storages.PERBuffer``: drawn in proportion to (|TD error| + epsilon)^alpha.

    Batches have ``idxs`` and the importance weights ``per_weights``, float32 ``[B, 1]``, divided by the largest one in
    the buffer. :meth:`after_gradients` reads the errors in ``info["Algorithm"]["errors"]``. With ``alpha=0`` draws are
    uniform, ``per_weights`` is 1.0 and errors are not read. A sequence's priority is 0.9 max + 0.1 mean over its steps.

    Args:
        size: this and the others as in :class:`NStepReplayBuffer`.
        epsilon: added to each |TD error|; 0 counts as 1e-6.
        alpha: the exponent of priorities; 0 is uniform.
        beta: the exponent of importance weights.
        default_error: the TD error that new transitions start with.
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
        """A function ``(device, actor, algorithm, envs)`` that creates such buffers."""
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
        """Added to each |TD error|; a change affects all stored transitions."""
        return self._epsilon

    @epsilon.setter
    def epsilon(self, epsilon: float) -> None:
        self._priorities.eps = epsilon or LEAST
        self._epsilon = epsilon

    error = alias("_priorities.default_error", "The TD error that new transitions start with.")
    alpha = alias("_priorities.alpha", "The exponent of priorities; a change affects all stored transitions.")
    beta = alias("_priorities.beta", "The exponent of importance weights.")

    def get_priority(self, error: Any) -> Any:
        """(error + epsilon)^alpha for errors of at least 0: arrays, tensors or numbers."""
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
        """Set the priorities of a batch from the TD errors that its update reported.

        Raises:
            AssertionError: the algorithm reported no errors.
            ShapeError, NotFiniteError: the errors do not fit the batch, or are not finite. Nothing is changed.
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
        """One error per sequence ``[S]`` that yields the joint priority of its steps' errors ``[S, K]``."""
        priority = self.get_sequence_priority(self.get_priority(np.abs(errors.T.astype(np.float64))))
        return np.maximum(priority ** (1 / self.alpha) - self.epsilon, 0.0)
