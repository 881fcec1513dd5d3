"""The n-step rule: rewards up to a done are summed, rₜ + γrₜ₊₁ + ..., and γᵏ stands before what follows them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CUT",
    "DISCOUNT",
    "INDEX",
    "LAYOUT",
    "NEXT_AT",
    "NEXT_BYTES",
    "NEXT_INDEX",
    "OWN_AT",
    "OWN_BYTES",
    "STEPS",
    "STEP_BYTES",
    "SUM",
    "TERMINAL",
    "Results",
    "add_reward",
    "bootstrap",
    "column",
    "results",
    "write_window",
]

INDEX, NEXT_INDEX, DISCOUNT, STEPS, SUM, TERMINAL, CUT = range(7)
"""The first entries of ``batch``, the layout of a row of a batch of n-step windows: the bytes of its results, int64,
int64, float32, int32, float32, uint8 and uint8. Each is a multiple of the size of its type."""
STEP_BYTES, NEXT_AT, NEXT_BYTES, OWN_AT, OWN_BYTES = range(7, 12)
"""The others, in bytes: the step at the start of the row; where the next observation goes; how much of the row that
has it is copied there, or -1 if each row of the ring has a next observation of its own; where that lies in a row of
the ring, and its size."""
LAYOUT = 12
"""How many entries these are. The entries of a view may follow."""


class Results(NamedTuple):
    """The results of n-step windows, each a column ``[B]`` over the packed rows of a batch."""

    index: Any
    """int64: the public index of the anchor."""
    next_index: Any
    """int64: that of the row with the next observation."""
    discount: Any
    """float32: γᵏ, or 0 after a terminal."""
    steps: Any
    """int32: k, the number of rewards."""
    reward: Any
    """float32: their discounted sum."""
    terminated: Any
    """uint8: whether the last step terminated."""
    truncated: Any
    """uint8: whether it was truncated."""


def column(rows: NDArray[np.uint8], byte: int, dtype: Any) -> Any:
    """The field at a byte of packed rows ``[B, W]``, as a column ``[B]`` over the same memory."""
    return rows[:, byte : byte + np.dtype(dtype).itemsize].view(dtype)[:, 0]


def results(rows: NDArray[np.uint8], batch: Any) -> Results:
    """The columns of a batch's packed rows ``[B, W]``."""
    dtypes = np.int64, np.int64, np.float32, np.int32, np.float32, np.uint8, np.uint8
    return Results(*(column(rows, int(byte), dtype) for byte, dtype in zip(batch, dtypes, strict=False)))


# numba compiles the three below as they are: cpu/nstep.py


def add_reward(value: Any, discount: Any, reward: Any, gamma: float) -> tuple[Any, Any]:
    """One more reward of a window: its sum and γᵏ, from those before. They start at 0.0 and 1.0."""
    return value + discount * float(reward), discount * gamma


def bootstrap(discount: Any, terminal: Any) -> Any:
    """The factor of the value that follows a window: γᵏ, or 0 if its last step terminated."""
    return 0.0 if terminal else discount


def write_window(
    out: Results, i: int, next_index: Any, k: int, value: Any, discount: Any, terminal: Any, cut: Any
) -> None:
    """Write all that is known of the window of row i of a batch, but the anchor's index.

    ``discount`` is what :func:`bootstrap` makes of it.
    """
    out.next_index[i] = next_index
    out.discount[i] = discount
    out.steps[i] = k
    out.reward[i] = value
    out.terminated[i] = terminal
    out.truncated[i] = cut
