"""LookAhead: brings rows of mapped files into memory before they are read."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread, get_ident
from typing import Any, cast
from weakref import finalize

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
"""So many times in a row nothing was missing: then all is in memory, and nobody asks until a read waits again."""


def can_look_ahead() -> bool:
    """Whether this system says how often a thread waited for the disk, and takes advice: Linux does."""
    return hasattr(resource, "RUSAGE_THREAD") and hasattr(mmap, "MADV_WILLNEED")


class LookAhead:
    """Asks the system for rows that will be read soon, in a thread that starts when first needed.

    While there is something to ask for, the system is told that reads are random. Then it reads no neighbours of a
    missing page, which would take the place of pages that are used.

    Args:
        keeper: the mapped files.
        arrays: what is read of a row: arrays ``[R, ...]`` in these files.
    """

    def __init__(self, keeper: MappedKeeper, arrays: Sequence[Array]) -> None:
        self._keeper = keeper
        self._work = work = _Work(arrays)
        self._seen = 0, 0
        self._thread: Thread | None = None
        self._end = finalize(self, work.asked.put, None)

    def is_wanted(self) -> bool:
        """Whether rows were missing lately: this thread waited for the disk, or the last questions found some."""
        waits = cast("Any", resource).getrusage(cast("Any", resource).RUSAGE_THREAD).ru_majflt
        (thread, before), self._seen = self._seen, (get_ident(), waits)
        if thread == self._seen[0] and waits > before:
            self._work.left = PATIENCE
        wanted = self._work.left > 0
        if wanted != self._keeper.random:
            self._keeper.expect_random(wanted)
        return wanted

    def ask(self, begins: Ints, ends: Ints) -> None:
        """Have rows ``begins`` up to ``ends``, int64 ``[K]`` each, come into memory. Returns at once.

        If the thread is still busy with earlier questions, this one is dropped.
        """
        work = self._work
        if work.busy:
            return
        if self._thread is None:
            thread = Thread(target=work.run, name="relive-look-ahead", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there are too many threads; rows then come when they are read
                work.left = 0
                return
            self._thread = thread
        work.busy = True
        work.asked.put((begins, ends))

    @property
    def is_busy(self) -> bool:
        """Whether rows that were asked for are still on their way."""
        return self._work.busy

    def close(self) -> None:
        """End the thread, and wait for what it does."""
        self._end()
        if self._thread is not None:
            self._thread.join()


class _Work:
    """What the thread has to know. It does not know the replay, so that a replay that is dropped is free at once."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = tuple(arrays)
        """They keep the memory mapped."""
        self.asked = SimpleQueue[tuple[Ints, Ints] | None]()
        self.busy = False
        """Whether there is a question without an answer."""
        self.left = 0
        """How many more questions may find nothing missing."""
        self._parts = np.array([(x.ctypes.data, x.nbytes // len(x)) for x in arrays], np.int64)
        here = ctypes.CDLL(None)
        functions = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (here.mincore, here.madvise)]
        self._calls = np.array(functions, np.int64)

    def run(self) -> None:
        """Ask until there is nobody left to ask for."""
        ask_for = kernels.fast().ask_for
        while (wanted := self.asked.get()) is not None:
            missing = ask_for(self._calls, self._parts, mmap.PAGESIZE, *wanted)
            self.left = PATIENCE if missing else max(self.left - 1, 0)
            self.busy = False
