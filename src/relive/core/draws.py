"""Permutations as tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ._core import permute

__all__ = ["permutation"]


def permutation(n: int, seed: int, counter: int) -> Tensor:
    """0..n-1 (int64 ``[n]``, in RAM) in an order that depends on (seed, counter) alone, alike for every device."""
    order = np.empty(n, np.int64)
    permute(seed, counter, order)
    return torch.from_numpy(order)
