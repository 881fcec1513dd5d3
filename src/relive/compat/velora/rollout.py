"""The rollout buffer that Velora removed, with what it lacked: the order of time, and the states of the network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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
    """``capacity`` steps of one policy, a block of ``num_envs`` at a time; to be emptied when it is full.

    Velora's computed advantages inside shuffled minibatches, kept no hidden states, and had new log-probabilities
    compared with those of other actions. Here the advantages are computed once, over the steps in the order of time
    (:meth:`finish`), and a batch has the state, the action and the log-probability that belong together. ``rollout``
    is the :class:`relive.RolloutBuffer` underneath: ``buffer.rollout.sequences(16)`` trains through time.

    Args:
        capacity: steps of all environments together; a multiple of ``num_envs``.
        state_dim: numbers of an observation.
        action_dim: numbers of an action.
        hidden_dim: numbers of the network's state.
        num_envs: N, rows of a block.
        gamma: discount per step.
        gae_lambda: λ.
        device: where the steps are; None is the CPU.
        seed: of the order of batches; None draws one from torch's default generator for each :meth:`sample`.

    Raises:
        ValueError: ``capacity`` is no multiple of ``num_envs``.
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
        if capacity < 1 or capacity % num_envs:
            raise ValueError(f"'{capacity=}' must be a multiple of '{num_envs=}', since steps come in blocks of those")
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
        """How many steps are stored, over all environments."""
        return self.rollout.steps * self.num_envs

    def __len__(self) -> int:
        """How many steps are stored, over all environments."""
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
            rewards: ``[N]`` or ``[N, 1]``, as all that follow but ``hiddens``.
            dones: whether the step ended its episode.
            hiddens: ``[N, hidden_dim]``, what the network was given with ``states``, before the step.
            log_probs: of the actions, as they are stored.
            values: V(states).
            truncated: which of the done steps were cut off rather than terminal; None of them by default.
            final_values: V(true final observation) of those.

        Raises:
            BufferError: the buffer is full.
            StepError: a shape does not fit. Nothing is stored.
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
        """Compute advantages and returns, once, in the order of time.

        Args:
            last_values: ``[N]`` or ``[N, 1]``, V of the states after the newest step.

        Raises:
            BufferError: the buffer is not full.
            FieldError: a step was truncated, and its final value is not known.
        """
        self._require_full()
        estimator = GAE(gamma=self.gamma, lam=self.gae_lambda)
        self.rollout.finish(estimator, last_value=self._rows("last_values", last_values, 1))

    def sample(self, batch_size: int) -> Iterator[RolloutBatch]:
        """All steps in random order, ``batch_size`` at a time, the last batch with what remains; each call a new order.

        Raises:
            BufferError: the buffer is not full, or :meth:`finish` was not called. From this call already.
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
