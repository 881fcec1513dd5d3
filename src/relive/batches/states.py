"""The axes of hidden states: layers first in networks, envs first in storage."""

from __future__ import annotations

from torch import Tensor

__all__ = ["swap_layers"]


def swap_layers(state: Tensor) -> Tensor:
    """Swap [N, layers, ...], as stored, and [layers, N, ...], as recurrent modules expect. [N, size] is unchanged."""
    return state.transpose(0, 1) if state.dim() > 2 else state
