"""LookAhead: brings rows of mapped files into memory before they are read."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from threading import get_ident
from typing import Any, cast

import numpy as np

from .. import kernels
from ..steps.arrays import Array, Ints
from .mapped import MappedKeeper

try:
    import resource
except ImportError:  # Windows
    resource = None

__all__ = ["LookAhead", "can_look_ahead"]

PATIENCE = 32
"""After this many questions in a row that found nothing missing, no more are asked until a read waits for the disk."""


def can_look_ahead() -> bool:
    """Whether this system counts how often a thread waited for the disk, and takes advice: Linux does."""
    return hasattr(resource, "RUSAGE_THREAD") and hasattr(mmap, "MADV_WILLNEED")


class LookAhead:
    """Asks the system for rows that will be read soon. The rows then come from the disk while the caller goes on.

    While there is something to ask for, the system is told that reads are random. Then it reads no neighbours of a
    missing page, which would take the place of pages that are used.

    Args:
        keeper: the mapped files.
        arrays: what is read of a row: arrays ``[R, ...]`` in these files.
    """

    def __init__(self, keeper: MappedKeeper, arrays: Sequence[Array]) -> None:
        self._keeper = keeper
        self._arrays = tuple(arrays)  # they keep the memory mapped
        self._parts = np.array([(x.ctypes.data, x.nbytes // len(x)) for x in arrays], np.int64)
        self.row_bytes = int(self._parts[:, 1].sum())
        """The bytes of a row in all arrays."""
        here = ctypes.CDLL(None)
        functions = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (here.mincore, here.madvise)]
        self._calls = np.array(functions, np.int64)
        self._seen = 0, 0
        """The thread that drew the last batch, and how often it had waited for the disk by then."""
        self._left = 0
        """How many more questions may find nothing missing."""

    def is_wanted(self) -> bool:
        """Whether rows were missing lately: this thread waited for the disk, or the last questions found some."""
        waits = cast("Any", resource).getrusage(cast("Any", resource).RUSAGE_THREAD).ru_majflt
        (thread, before), self._seen = self._seen, (get_ident(), waits)
        if thread == self._seen[0] and waits > before:
            self._left = PATIENCE
        wanted = self._left > 0
        if wanted != self._keeper.random:
            self._keeper.expect_random(wanted)
        return wanted

    def ask(self, begins: Ints, ends: Ints) -> int:
        """Have rows ``begins`` up to ``ends``, int64 ``[K]`` each, come into memory; gives how many pages are missing.

        It does not wait for the disk, unless more pages are missing than the disk takes requests.
        """
        missing = kernels.fast().ask_for(self._calls, self._parts, mmap.PAGESIZE, begins, ends)
        self._left = PATIENCE if missing else max(self._left - 1, 0)
        return missing
