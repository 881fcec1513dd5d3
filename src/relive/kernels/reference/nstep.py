"""The n-step rule: rewards up to a done are summed, rₜ + γrₜ₊₁ + ..., and γᵏ stands before what follows them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    "read",
    "write_window",
]

REWARD, TERMINATED, TRUNCATED, STAMP, STEP = range(5)
"""What the entries of ``at`` are the bytes of, in a row of memory: float32, uint8, uint8, int64, int32."""

INDEX, NEXT_INDEX, DISCOUNT, STEPS, SUM, TERMINAL, CUT = range(7)
"""What the entries of ``to`` are the bytes of, in a row of a batch of n-step windows: int64, int64, float32, int32,
float32, uint8, uint8."""


def read(row: NDArray[np.uint8], byte: Any, dtype: Any) -> Any:
    """The number at a byte of a packed row."""
    return row[byte : byte + np.dtype(dtype).itemsize].view(dtype)[0]


def add_reward(value: Any, discount: Any, reward: Any, gamma: float) -> tuple[Any, Any]:
    """One more reward of a window: its sum and γᵏ, from those before. They start at 0.0 and 1.0."""
    return value + discount * float(reward), discount * gamma


def bootstrap(discount: Any, terminal: Any) -> Any:
    """The factor of the value that follows a window: γᵏ, or 0 if its last step terminated."""
    return 0.0 if terminal else discount


def write_window(
    row: NDArray[np.uint8], to: Any, next_index: Any, k: int, value: Any, discount: Any, terminal: Any, cut: Any
) -> None:
    """Write to the bytes ``to`` of a row of a batch all that is known of its window, but the anchor's index."""
    for field, result, dtype in (
        (NEXT_INDEX, next_index, np.int64),
        (DISCOUNT, bootstrap(discount, terminal), np.float32),
        (STEPS, k, np.int32),
        (SUM, value, np.float32),
        (TERMINAL, terminal, np.uint8),
        (CUT, cut, np.uint8),
    ):
        row[to[field] : to[field] + np.dtype(dtype).itemsize].view(dtype)[0] = result
