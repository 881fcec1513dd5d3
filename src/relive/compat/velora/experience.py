"""Velora's batches, and the shapes that its buffers accept."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arrays import array_of
from ..errors import StepShapeError

__all__ = ["BatchExperience", "RolloutBatch", "row", "rows"]


@dataclass
class BatchExperience:
    """Transitions ``[B, ...]``, all float32 and contiguous.

    Attributes:
        states: ``[B, state_dim]``.
        actions: ``[B, action_dim]``.
        rewards: ``[B, 1]``.
        next_states: ``[B, state_dim]``.
        dones: ``[B, 1]``.
        hiddens: ``[B, hidden_dim]``, the actor's recurrent states.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    dones: Tensor
    hiddens: Tensor


@dataclass
class RolloutBatch:
    """Steps of a rollout ``[B, ...]``, all float32.

    Attributes:
        states: ``[B, state_dim]``.
        actions: ``[B, action_dim]``.
        rewards: ``[B, 1]``, as are ``dones``, ``log_probs``, ``values``, ``advantages`` and ``returns``.
        dones: whether the step ended its episode.
        hiddens: ``[B, hidden_dim]``, the network's recurrent state before the step.
        log_probs: of the stored actions.
        values: V(states).
        advantages: by GAE over the whole rollout.
        returns: advantages + values.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    dones: Tensor
    hiddens: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def row(name: str, value: Any, size: int, device: torch.device) -> Any:
    """One step's value as float32 ``[1, size]``, an array if the device is the CPU. A single number is repeated.

    Raises:
        StepShapeError: it has another number of elements.
    """
    given: Any = array_of(name, value) if device.type == "cpu" else _placed(value, device)
    if given.shape == (1, size):
        return given
    count = prod(given.shape)
    if count == size:
        return given.reshape(1, size)
    if count != 1:
        raise StepShapeError(f"'{name}': expected {size} numbers, got {tuple(given.shape)}")
    one = given.reshape(1, 1)
    return one.repeat(size, 1) if device.type == "cpu" else one.expand(1, size)


def rows(name: str, value: Any, count: int, size: int, device: torch.device) -> Any:
    """Several steps' values as float32 ``[count, size]``, an array if the device is the CPU.

    Values of size 1 may be ``[count]``.

    Raises:
        StepShapeError: another shape.
    """
    given: Any = array_of(name, value) if device.type == "cpu" else _placed(value, device)
    if given.shape == (count, size):
        return given
    if given.shape == (count,) and size == 1:
        return given.reshape(count, 1)
    raise StepShapeError(f"'{name}': expected {(count, size)} (rows first), got {tuple(given.shape)}")


def _placed(value: Any, device: torch.device) -> Tensor:
    """As a float32 tensor on the device of the storage."""
    return torch.as_tensor(value, dtype=torch.float32, device=device).detach()
