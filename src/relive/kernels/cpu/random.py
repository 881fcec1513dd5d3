"""Random draws that are functions of (seed, counter)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..reference.random import MASK
from .jit import jit, mix

__all__ = ["key", "masses", "permutation", "uniform", "uniforms"]

DRAWN = 256
"""How many numbers of a permutation are drawn at once."""


def permutation(n: int, seed: int, counter: int) -> Tensor:
    """See :func:`relive.kernels.reference.random.permutation`."""
    order = torch.empty(n, dtype=torch.int64)
    _permutation(np.uint64(seed & MASK), np.uint64(counter), order.numpy())
    return order


@jit
def key(seed: Any, counter: Any) -> Any:
    """See :func:`relive.kernels.reference.random.key`; ``seed`` is uint64."""
    return mix(mix(seed) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(counter))


@jit
def uniform(stream: Any, number: Any) -> Any:
    """See :func:`relive.kernels.reference.random.uniform`."""
    return np.float64(mix(stream + np.uint64(0x9E3779B97F4A7C15) * np.uint64(number)) >> np.uint64(11)) * 2.0**-53


@jit
def uniforms(stream: Any, out: NDArray[np.float64]) -> None:
    """Numbers 1, 2, ... of a stream, each as :func:`relive.kernels.reference.random.uniform`."""
    state = stream
    for i in range(out.size):
        state += np.uint64(0x9E3779B97F4A7C15)
        out[i] = np.float64(mix(state) >> np.uint64(11)) * 2.0**-53


@jit
def masses(stream: Any, stratified: bool, total: float, below: float, out: NDArray[np.float64]) -> None:
    """See :func:`relive.kernels.reference.random.masses`."""
    uniforms(stream, out)
    for i in range(out.size):
        u = (np.float64(i) + out[i]) / np.float64(out.size) if stratified else out[i]
        out[i] = min(u * total, below)


@jit
def _permutation(seed: Any, counter: Any, order: NDArray[np.int64]) -> None:
    """Draw number n - i is the place that swaps with place i; drawn in blocks, which LLVM vectorizes."""
    golden, picks = np.uint64(0x9E3779B97F4A7C15), np.empty(DRAWN, np.int64)
    for i in range(order.size):
        order[i] = i
    first, high = key(seed, counter), order.size
    while high > 1:  # the places below are still to be swapped, the last one first
        count = min(DRAWN, high - 1)
        for k in range(count):
            state = first + np.uint64(order.size - high + 1 + k) * golden
            picks[k] = np.int64(np.float64(mix(state) >> np.uint64(11)) * 2.0**-53 * np.float64(high - k))
        for k in range(count):
            i, j = high - 1 - k, picks[k]
            order[i], order[j] = order[j], order[i]
        high -= count
