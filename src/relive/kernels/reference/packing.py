"""Rows of several fields side by side: how they are packed, and how they are picked in any order."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_rows", "take_rows"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def pack_rows(columns: Ints, sizes: Ints, offsets: Ints, rows: Bytes, steps: int) -> None:
    """Copy columns side by side: bytes ``offset`` to ``offset + size`` of a packed row are a field of a step.

    Args:
        columns: the address of each column. Its row t * N + n is step t of env n.
        sizes: bytes of a row of each.
        offsets: the byte of a packed row at which each begins.
        rows: ``[N * T, W]``, written; row n * T + t becomes step t of env n.
        steps: T. With 1, packed rows come in the order of the columns' rows.
    """
    envs = len(rows) // steps
    for column, size, offset in zip(columns.tolist(), sizes.tolist(), offsets.tolist(), strict=True):
        for t in range(steps):
            for n in range(envs):
                target = rows.ctypes.data + (n * steps + t) * rows.shape[1] + offset
                ctypes.memmove(target, column + (t * envs + n) * size, size)


def take_rows(source: Bytes, index: Ints, out: Any) -> int:
    """Copy the rows ``index`` of ``source`` ``[R, W]`` to ``out`` ``[B, W]``, all contiguous.

    Returns:
        -1, or the first place in ``index`` whose number is no row; the rows before it are written.
    """
    for b, r in enumerate(index.tolist()):
        if not 0 <= r < len(source):
            return b
        out[b] = source[r]
    return -1
