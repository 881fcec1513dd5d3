"""Asking the system for pages of mapped files before they are read, so that they come from the disk side by side."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MINCORE", "PAGES", "WILLNEED", "ask_for"]

Ints = NDArray[np.int64]

PAGES = 256
"""The most pages of one question to the system."""

WILLNEED = 3
"""What ``madvise`` calls MADV_WILLNEED: start to read these pages. So on Linux and macOS."""

MINCORE = 0
"""Entry of ``calls`` with the address of the C function ``mincore``; that of ``madvise`` follows it."""


def ask_for(calls: Ints, parts: Ints, page: int, begins: Ints, ends: Ints) -> int:
    """Ask for the pages of some rows that are not in memory. Nothing is read and nothing is changed.

    The pages come while others are asked for, and after the call. A page that two runs share and that is on its way
    counts as missing for each of them.

    Args:
        calls: int64 ``[2]``: the addresses of the C functions ``mincore`` and ``madvise``.
        parts: int64 ``[P, 2]``: the address of the first row of an array, and the bytes of a row.
        page: the bytes of a page, a power of two.
        begins: int64 ``[K]``: the first row of each run, which exists in all parts.
        ends: int64 ``[K]``: the row after its last, at most the number of rows.

    Returns:
        how many pages were not in memory.
    """
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    mincore = ctypes.CFUNCTYPE(number, address, size, address)(int(calls[MINCORE]))
    madvise = ctypes.CFUNCTYPE(number, address, size, number)(int(calls[MINCORE + 1]))
    there, missing = np.zeros(PAGES, np.uint8), 0
    for first, last in _spans(parts, page, begins, ends):
        for low in range(first, last, PAGES * page):
            nbytes = min(last - low, PAGES * page)
            count = -(-nbytes // page)
            there[:count] = 0
            mincore(low, nbytes, there.ctypes.data)
            absent = count - int((there[:count] & 1).sum())
            if absent:
                madvise(low, nbytes, WILLNEED)
            missing += absent
    return missing


def _spans(parts: Ints, page: int, begins: Ints, ends: Ints) -> list[tuple[int, int]]:
    """The addresses of each run of rows in each part: of its first page, and after its last byte."""
    spans: list[Any] = []
    for start, width in parts.tolist():
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if end > begin:
                first = start + begin * width
                spans.append((first - first % page, start + end * width))
    return spans
