"""Copying rows of bytes, in plain Python."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

__all__ = ["copy_row"]


def copy_row(sources: NDArray[np.uint64], targets: NDArray[np.uint64], nbytes: NDArray[np.int64], row: int) -> None:
    """Copy ``nbytes[i]`` bytes from address ``sources[i]`` to row ``row`` of the column at ``targets[i]``; 0: skip."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), nbytes.tolist(), strict=False):
        if source:
            ctypes.memmove(target + row * size, source, size)
