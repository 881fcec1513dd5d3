"""The n-step rule: reference/nstep.py's names and, to the bit, results."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.nstep import (
    CUT,
    DISCOUNT,
    INDEX,
    NEXT_INDEX,
    REWARD,
    STAMP,
    STEP,
    STEPS,
    SUM,
    TERMINAL,
    TERMINATED,
    TRUNCATED,
)
from .jit import jit
from .places import Ints

__all__ = [
    "CUT",
    "DISCOUNT",
    "INDEX",
    "NEXT_INDEX",
    "REWARD",
    "STAMP",
    "STEP",
    "STEPS",
    "SUM",
    "TERMINAL",
    "TERMINATED",
    "TRUNCATED",
    "add_reward",
    "bootstrap",
    "typed",
    "write_window",
]


@jit
def typed(packed: Any) -> Any:
    """The bytes of packed rows ``[R, W]``, flat, as uint8, int32, int64 and float32.

    W and every field's byte are multiples of the field's size. So byte b of the memory, which holds a field of s bytes,
    is entry b // s of the array of its type, and b is below R * W.
    """
    flat = packed.reshape(-1)
    return flat, flat.view(np.int32), flat.view(np.int64), flat.view(np.float32)


@jit
def add_reward(value: Any, discount: Any, reward: Any, gamma: float) -> tuple[Any, Any]:
    """See :func:`relive.kernels.reference.nstep.add_reward`."""
    return value + discount * np.float64(reward), discount * gamma


@jit
def bootstrap(discount: Any, terminal: Any) -> Any:
    """See :func:`relive.kernels.reference.nstep.bootstrap`."""
    return 0.0 if terminal else discount


@jit
def write_window(
    out: Any, byte: int, to: Ints, next_index: Any, k: int, value: Any, discount: Any, terminal: Any, cut: Any
) -> None:
    """See :func:`relive.kernels.reference.nstep.write_window`; ``out`` is :func:`typed`, ``byte`` where the row is."""
    bits, ints, words, floats = out
    words[(byte + to[NEXT_INDEX]) // 8] = next_index
    floats[(byte + to[DISCOUNT]) // 4] = bootstrap(discount, terminal)
    ints[(byte + to[STEPS]) // 4] = k
    floats[(byte + to[SUM]) // 4] = value
    bits[byte + to[TERMINAL]], bits[byte + to[CUT]] = terminal, cut
