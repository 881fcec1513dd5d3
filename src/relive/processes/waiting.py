"""Bell: lets processes sleep until another one has changed something in memory that they share.

A bell has no owner, so a process that is killed leaves nothing locked. On Linux its sleepers wait in the kernel, by the
system call futex(2). Elsewhere they look again every millisecond.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import kernels

__all__ = ["Bell"]

FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
"""The number of the system call, by machine; from the kernel's tables."""

WAIT, WAKE, EVERYBODY = 0, 1, 2**31 - 1
"""Operations of futex(2), and how many sleepers to wake."""

GLANCE = 0.25
"""Seconds after which a sleeper looks again even if no bell rang: the process that should ring may be dead."""

PAUSE = 0.001
"""Seconds between two looks where there is no futex."""


class Bell:
    """Wakes those who wait, in whichever process, for a condition over shared memory.

    Any number of processes and threads may wait, and any number may ring. A process that changes what others wait for
    rings afterwards: with :meth:`ring`, or with the kernel ``publish`` and then :meth:`wake`.

    Args:
        word: int32 ``[1]`` in shared memory, zeroed when it was made.
    """

    def __init__(self, word: NDArray[np.int32]) -> None:
        self.word = word
        self._address = word.ctypes.data
        self._mark = kernels.fast().mark_bell

    def ring(self) -> None:
        """Wake all who wait. It costs a system call only if somebody waits."""
        if kernels.fast().ring_bell(self.word, 0):
            self.wake()

    def wake(self) -> None:
        """Wake all who sleep on the word, which has changed."""
        call = _futex()
        if call is not None:
            call(self._address, WAKE, EVERYBODY, None)

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Sleep until ``ready()`` is true; returns False if the time is over before.

        Args:
            ready: called at the start, after each ring, and every quarter of a second. If it raises an error, for
                instance because the other process is dead, the wait ends with that error.
            timeout: seconds. None waits for ever, and 0 looks once.
        """
        if ready():
            return True
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            seen = self._mark(self.word, 0)
            if ready():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._sleep(seen, min(left, GLANCE))

    def _sleep(self, seen: int, seconds: float) -> None:
        """Sleep until the word is not ``seen``, a signal comes, or the time is over."""
        call = _futex()
        if call is None:
            time.sleep(min(seconds, PAUSE))
        else:
            call(self._address, WAIT, seen, seconds)


@cache
def _futex() -> Callable[[int, int, int, float | None], None] | None:
    """The system call, which lets other threads run meanwhile; None where there is none."""
    number = FUTEX.get(platform.machine())
    if sys.platform != "linux" or number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    syscall: Any = ctypes.CDLL(None, use_errno=True).syscall
    harmless = errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT  # the word had changed already; a signal; the time is over

    def call(address: int, operation: int, value: int, seconds: float | None) -> None:
        span = None
        if seconds is not None:
            whole = int(seconds)
            span = (ctypes.c_int64 * 2)(whole, int((seconds - whole) * 1e9))
        found = syscall(
            ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_int(operation), ctypes.c_int(value), span, None, 0
        )
        code = ctypes.get_errno()
        if found < 0 and code not in harmless:
            raise OSError(code, f"futex: {os.strerror(code)}")

    return call
