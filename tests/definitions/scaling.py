"""What :func:`relive.core.scale` computes, in plain numbers: sums are added in the order in which they are written."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 8


def scaled(x: NDArray[np.float32], mask: Any, eps: float) -> NDArray[np.float32]:
    """(x - mean) / (std + eps) of the numbers whose mask is True, in their order; 0 for the others."""
    counted = [float(x[at]) for at in np.ndindex(x.shape) if mask is None or mask[at]]
    count = len(counted)
    mean = total(counted) / count if count else 0.0
    squares = total([(number - mean) * (number - mean) for number in counted])
    width = sqrt(squares / (count - 1) if count > 1 else 0.0) + eps
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        if mask is None or mask[at]:
            out[at] = (float(x[at]) - mean) / width
    return out


def total(numbers: list[float]) -> float:
    """Eight sums of every eighth number, which are then added from the first on."""
    lanes = [0.0] * LANES
    for i, number in enumerate(numbers):
        lanes[i % LANES] += number
    result = 0.0
    for lane in lanes:
        result += lane
    return result
