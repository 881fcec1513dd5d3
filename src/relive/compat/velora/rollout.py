"""The rollout buffer that Velora removed, with time order and recurrent states, which it lacked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import ParameterError
from ...parameters import is_count
from ...returns.estimators import GAE
from ...rollout.buffer import RolloutBuffer as Rollout
from ...steps.schema import Field, Schema
from ..seeds import renew
from .experience import RolloutBatch, rows

__all__ = ["RolloutBuffer"]

FIELDS = {
    "states": "obs",
    "actions": "action",
    "rewards": "reward",
    "dones": "ended",
    "hiddens": "hidden",
    "log_probs": "log_prob",
    "values": "value",
    "advantages": "advantage",
    "returns": "return",
}
FLAT = ("rewards", "dones", "log_probs", "values", "advantages", "returns")


class RolloutBuffer:
    """``capacity`` steps of one policy, added ``num_envs`` at a time. Empty it when it is full.

    Velora's buffer computed advantages within shuffled minibatches, kept no recurrent states, and paired
    log-probabilities with other actions. Here :meth:`finish` computes advantages once, in the order of time, and the
    state, action and log-probability of a row belong together. ``rollout`` is the :class:`relive.RolloutBuffer`
    underneath; ``buffer.rollout.sequences(16)`` gives sequences to train a recurrent network.

    Args:
        capacity: steps over all environments, a multiple of ``num_envs``.
        state_dim: numbers of an observation.
        action_dim: numbers of an action.
        hidden_dim: numbers of the network's recurrent state.
        num_envs: N.
        gamma: discount per step.
        gae_lambda: λ.
        device: of the storage; None is the CPU.
        seed: of the order of batches. None draws one from torch's default generator for each :meth:`sample`.

    Raises:
        ParameterError: ``num_envs`` is below 1, or ``capacity`` is no positive multiple of it.
    """

    def __init__(
        self,
        capacity: int,
        state_dim: int,
        action_dim: int,
        hidden_dim: int,
        *,
        num_envs: int = 1,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        if not is_count(num_envs, 1) or not is_count(capacity, 1) or capacity % num_envs:
            raise ParameterError(f"'{capacity=}' must be a multiple of '{num_envs=}', since that many come at a time")
        self.capacity, self.num_envs, self.device = capacity, num_envs, device
        self.state_dim, self.action_dim, self.hidden_dim = state_dim, action_dim, hidden_dim
        self.gamma, self.gae_lambda = gamma, gae_lambda
        flag = Field((), torch.bool)
        fields: dict[str, Any] = {"obs": (state_dim,), "action": (action_dim,), "reward": (), "ended": ()}
        fields |= {"terminated": flag, "truncated": flag, "value": (), "log_prob": (), "hidden": (hidden_dim,)}
        self.rollout = Rollout(Schema(fields), capacity // num_envs, num_envs, device=device or "cpu", seed=seed or 0)
        self._seed = seed

    @property
    def size(self) -> int:
        """The number of steps stored, over all environments."""
        return self.rollout.steps * self.num_envs

    def __len__(self) -> int:
        """The number of steps stored, over all environments."""
        return self.size

    def add(
        self,
        states: Any,
        actions: Any,
        rewards: Any,
        dones: Any,
        hiddens: Any,
        log_probs: Any,
        values: Any,
        *,
        truncated: Any = None,
        final_values: Any = None,
    ) -> None:
        """Store one step of each environment.

        Args:
            states: ``[N, state_dim]``.
            actions: ``[N, action_dim]``.
            rewards: ``[N]`` or ``[N, 1]``, like all others below except ``hiddens``.
            dones: whether the step ended its episode.
            hiddens: ``[N, hidden_dim]``, the network's input state at ``states``.
            log_probs: of these actions.
            values: V(states).
            truncated: which of the done steps were cut off rather than terminal; by default none.
            final_values: V(final observation), read where ``truncated``.

        Raises:
            BufferError: the buffer is full.
            StepShapeError: a shape does not fit. Nothing is stored.
        """
        if self.rollout.is_full:
            raise BufferError("Buffer full! Use the 'empty()' method first.")
        given = {"obs": (states, self.state_dim), "action": (actions, self.action_dim), "reward": (rewards, 1)}
        given |= {"ended": (dones, 1), "hidden": (hiddens, self.hidden_dim)}
        given |= {"log_prob": (log_probs, 1), "value": (values, 1)}
        step = {name: self._rows(name, *column) for name, column in given.items()}
        done = step["ended"] != 0
        cut = done & (False if truncated is None else self._rows("truncated", truncated, 1) != 0)
        if final_values is not None:
            step["final_value"] = self._rows("final_values", final_values, 1)
        self.rollout.add(step, terminated=done & ~cut, truncated=cut)

    def finish(self, last_values: Any) -> None:
        """Compute advantages and returns by GAE.

        Args:
            last_values: ``[N]`` or ``[N, 1]``, V of the states after the newest step.

        Raises:
            BufferError: the buffer is not full.
            FieldError: a truncated step has no final value.
        """
        self._require_full()
        estimator = GAE(gamma=self.gamma, lam=self.gae_lambda)
        self.rollout.finish(estimator, last_value=self._rows("last_values", last_values, 1))

    def sample(self, batch_size: int) -> Iterator[RolloutBatch]:
        """All steps in a new random order, ``batch_size`` at a time. The last batch may be smaller.

        Raises:
            BufferError: at this call, if the buffer is not full or :meth:`finish` was not called.
        """
        self._require_full()
        if "advantage" not in self.rollout:
            raise BufferError("Advantages are missing! Use the 'finish()' method first.")
        renew(self.rollout, self._seed)
        return map(self._batch, self.rollout.minibatches(batch_size, fields=tuple(FIELDS.values())))

    def empty(self) -> None:
        """Forget all steps."""
        self.rollout.clear()

    def _require_full(self) -> None:
        if not self.size:
            raise BufferError("Buffer is empty!")
        if not self.rollout.is_full:
            raise BufferError(f"Buffer is not full! {self.size} of {self.capacity} steps are stored.")

    def _rows(self, name: str, value: Any, size: int) -> Tensor:
        column = rows(name, value, self.num_envs, size, self.rollout.device)
        scalar = name not in ("obs", "action", "hidden")
        return column[:, 0] if scalar else column

    def _batch(self, batch: Any) -> RolloutBatch:
        columns = {name: batch[inner] for name, inner in FIELDS.items()}
        return RolloutBatch(**{name: x.unsqueeze(-1) if name in FLAT else x for name, x in columns.items()})
