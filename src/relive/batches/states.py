"""Hidden states: layers first in networks, envs first in storage."""

from __future__ import annotations

from torch import Tensor

__all__ = ["swap_layers"]


def swap_layers(state: Tensor) -> Tensor:
    """Between [N, layers, ...], as stored, and [layers, N, ...], as recurrent modules take it; [N, size] stays."""
    return state.transpose(0, 1) if state.dim() > 2 else state
