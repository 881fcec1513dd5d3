"""Random draws that are functions of (seed, counter), in plain Python integers."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["permutation"]


def permutation(n: int, seed: int, counter: int) -> Tensor:
    """Fisher-Yates over 0..n-1 (int64) by splitmix64: a function of (seed, counter) alone, alike on every device."""
    order = list(range(n))
    state = _mix((_mix(seed & _MASK) + counter * _GOLDEN) & _MASK)
    for i in range(n - 1, 0, -1):
        state = (state + _GOLDEN) & _MASK
        j = int((_mix(state) >> 11) * 2.0**-53 * (i + 1))
        order[i], order[j] = order[j], order[i]
    return torch.tensor(order, dtype=torch.int64)


_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
