"""The axes of recurrent states: layers first in networks and batches, envs first in storage."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["blank_state", "joined_states", "state_part", "swap_layers"]


def swap_layers(state: Tensor) -> Tensor:
    """Swap ``[N, layers, ...]``, as stored, and ``[layers, N, ...]``, as torch expects; ``[N, size]`` is unchanged."""
    return state.transpose(0, 1) if state.dim() > 2 else state


def state_part(state: Tensor, low: int, high: int) -> Tensor:
    """The states of sequences ``low`` to ``high - 1`` of a batch; a copy if there are layers, as torch expects."""
    return state[:, low:high].contiguous() if state.dim() > 2 else state[low:high]


def joined_states(*states: Tensor) -> Tensor:
    """States ``[layers, B, size]`` or ``[B, size]`` of several batches, one after another along B."""
    return torch.cat(states, 1 if states[0].dim() > 2 else 0)


def blank_state(state: Tensor, count: int) -> Tensor:
    """Zeros for the states of ``count`` sequences, with the layers and sizes of these."""
    return state.new_zeros((state.shape[0], count, *state.shape[2:]) if state.dim() > 2 else (count, *state.shape[1:]))
