"""Random draws that are functions of (seed, counter), in plain Python integers."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MASK", "key", "masses", "mix", "permutation", "uniform"]

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key(seed: int, counter: int) -> int:
    """The stream of random numbers that belongs to draw number ``counter`` of a seed."""
    return mix((_first(seed) + counter * GOLDEN) & MASK)


@lru_cache(maxsize=64)
def _first(seed: int) -> int:
    """The stream of draw number 0, from which the others follow; kept, as every draw needs it."""
    return mix(seed & MASK)


def uniform(stream: int, number: int) -> float:
    """Number ``number`` of a stream, in [0, 1), with 53 random bits."""
    return (mix((stream + number * GOLDEN) & MASK) >> 11) * 2.0**-53


def masses(stream: int, stratified: bool, total: float, below: float, out: NDArray[np.float64]) -> None:
    """Numbers 1, 2, ... of a stream as masses in [0, total), one from each of B equal parts if ``stratified``.

    ``below`` is the largest number below ``total``, which rounding must not pass.
    """
    for i in range(len(out)):
        u = uniform(stream, i + 1)
        out[i] = min(((i + u) / len(out) if stratified else u) * total, below)


def permutation(n: int, seed: int, counter: int) -> Tensor:
    """Fisher-Yates over 0..n-1 (int64) by splitmix64: a function of (seed, counter) alone, alike on every device."""
    order = list(range(n))
    stream = key(seed, counter)
    for number, i in enumerate(range(n - 1, 0, -1)):
        j = int(uniform(stream, number + 1) * (i + 1))
        order[i], order[j] = order[j], order[i]
    return torch.tensor(order, dtype=torch.int64)
