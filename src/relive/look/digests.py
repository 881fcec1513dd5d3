"""Digests: a number for each row, to compare rows by."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..steps.arrays import Array

__all__ = ["digests", "words"]


def digests(columns: list[Array]) -> Array:
    """A 64-bit number for each row ``[S]``, the same for equal rows: a sum of random odd multiples of their words."""
    rng: Any = np.random.default_rng(1)
    total: Any = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        bits: Any = words(column)
        factors: Any = 2 * rng.integers(2**62, size=bits.shape[1], dtype=np.uint64) + 1
        for factor, numbers in zip(factors, bits.T, strict=True):
            word: Any = numbers.astype(np.uint64)
            total += (word ^ (word >> np.uint64(29))) * factor
    return total


def words(rows: Array) -> Array:
    """The bytes of rows ``[S, ...]`` as unsigned integers ``[S, W]``, of the widest kind that fits a row."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    size = next(size for size in (8, 4, 2, 1) if flat.shape[1] % size == 0)
    return flat.view(f"u{size}")
