"""Rows of several fields side by side: how they are packed, and how they are picked in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_rows", "take_rows"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def pack_rows(columns: Ints, sizes: Ints, offsets: Ints, rows: Bytes) -> None:
    """Copy columns next to each other: ``rows[r, offset:offset + size]`` is row r of a column.

    Args:
        columns: the address of each, whose rows follow one another.
        sizes: bytes of a row of each.
        offsets: where they go in a packed row, in bytes.
        rows: ``[R, W]``.
    """
    from .rows import copy_row

    for r in range(len(rows)):
        targets = rows.ctypes.data + r * rows.shape[1] + offsets - r * sizes
        copy_row((columns + r * sizes).view(np.uint64), targets.view(np.uint64), sizes, r)


def take_rows(source: Bytes, index: Ints, out: Any) -> int:
    """Copy the rows ``index`` of ``source`` ``[R, W]`` to ``out`` ``[B, W]``, all contiguous.

    Returns:
        -1, or the first place in ``index`` that names no row; what comes before it is written.
    """
    for b, r in enumerate(index.tolist()):
        if not 0 <= r < len(source):
            return b
        out[b] = source[r]
    return -1
