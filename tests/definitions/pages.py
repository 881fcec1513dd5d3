"""What :class:`relive.core.Pages` asks the system for."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WILLNEED = 3
"""MADV_WILLNEED of ``madvise``, on Linux and macOS: start to read these pages."""


class Pages:
    """As :class:`relive.core.Pages`: arrays ``[R, ...]`` in mapped files, each in one piece."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.arrays = arrays

    def ask_for(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> int:
        """Ask for the pages of rows ``begins[k]`` up to ``ends[k]``; returns how many were not in memory."""
        here, missing, page = ctypes.CDLL(None), 0, mmap.PAGESIZE
        for array in self.arrays:
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                if begin == end:
                    continue
                start, width = array.ctypes.data, array.nbytes // len(array)
                first, last = start + begin * width, start + end * width
                low = ctypes.c_void_p(first - first % page)
                size = ctypes.c_size_t(last - first + first % page)
                there = np.zeros(-(-size.value // page), np.uint8)
                here.mincore(low, size, ctypes.c_void_p(there.ctypes.data))
                missing += int((there & 1 == 0).sum())
                here.madvise(low, size, WILLNEED)
        return missing
