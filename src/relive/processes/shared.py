"""Memory that processes share: zeroed blocks, places in them that one process claims, and bells to sleep on.

The file reads from the outside in: the block, the claim, the bell, and then the files and the locks of the system.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import platform
import secrets
import struct
import time
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet, finalize

import numpy as np
import torch
from numpy.typing import NDArray

from .. import core
from ..errors import LifecycleError, ParameterError
from ..memory.estimate import require_free
from ..parameters import COUNT_RULE, require

__all__ = ["CACHE_LINE", "Bell", "Claim", "SharedBlock"]

CACHE_LINE = 64
"""Bytes of a cache line. Two processes that write to one line slow each other down, so their parts begin at others."""


class SharedBlock:
    """Zeroed memory that processes share. The memory is free again when the last of them ends, however it ends.

    Make one with :meth:`create`. A forked child has the block, too. A pickle of a block holds only its name, so a
    spawned process, or the reader of a queue, must load the pickle while the sender lives. A copy of a block is the
    same memory.

    The memory has no path: the size of ``/dev/shm`` does not matter, and a kill leaves nothing behind.
    """

    array: NDArray[np.uint8]
    """The memory, uint8 ``[nbytes]``. It is valid for as long as an array over it exists."""

    def __init__(self, descriptor: int, token: str) -> None:
        """Map an open file. Use :meth:`create` and :meth:`attach`, which call this."""
        self._descriptor, self.token = descriptor, token
        """Sixteen random hexadecimal digits, which no other block has."""
        # the array holds the map: the memory stays as long as an array over it, even after the descriptor is closed
        self.array = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, nbytes: int) -> SharedBlock:
        """A new block of zeros.

        Raises:
            ParameterError: ``nbytes`` is not a number of bytes, or more than the free memory.
            OSError: the system has no room.
        """
        require("SharedBlock.create", COUNT_RULE, nbytes=nbytes)
        require_free(nbytes, torch.device("cpu"), "the shared memory", "make it smaller")
        token = secrets.token_hex(8)
        descriptor = os.memfd_create(f"relive-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _reserve(descriptor, nbytes)
            return cls(descriptor, token)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, name: str) -> SharedBlock:
        """The block of this name. A process that has the block must still be alive.

        Raises:
            ParameterError: this is not the name of a block.
            LifecycleError: the process that gave the name has ended, or has dropped the block.
        """
        gone = f"shared memory {name!r}: it is gone; send it while a process that has it is alive"
        try:
            process, number, token = name.split("-")
            path = f"/proc/{int(process)}/fd/{int(number)}"
        except (AttributeError, ValueError) as error:
            raise ParameterError(f"SharedBlock.attach(name={name!r}): expected the name of a block") from error
        try:
            descriptor = os.open(path, FLAGS)
        except OSError as error:
            raise LifecycleError(gone) from error
        # after the open: before it, the number could still go to another file
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:relive-{token} (deleted)":
            os.close(descriptor)
            raise LifecycleError(gone)
        return cls(descriptor, token)

    @property
    def nbytes(self) -> int:
        """The size of the memory."""
        return self.array.nbytes

    @property
    def name(self) -> str:
        """The name that :meth:`attach` takes in another process, while this process lives and has the block."""
        return f"{os.getpid()}-{self._descriptor}-{self.token}"

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedBlock.attach, (self.name,)

    def claim(self, place: int) -> Claim | None:
        """Claim a place for this process, until the claim is dropped or the process ends; None if it is taken.

        Args:
            place: any whole number of at least 0; what it stands for is up to the caller.
        """
        claim = Claim(f"/proc/self/fd/{self._descriptor}", place)
        return claim if claim.holds else None

    def is_claimed(self, place: int) -> bool:
        """True if a process that is alive has claimed a place."""
        return _is_locked(self._descriptor, place)


class Claim:
    """A place of a block that one process has. A child that is forked does not have it.

    The claim is a lock on one byte of an open file. The system drops it when the process ends, however it ends.
    """

    def __init__(self, path: str, place: int) -> None:
        files = list[int]()
        self.drop = finalize(self, _close_all, files)
        """Lets others claim the place."""
        _claims.add(self)
        # opened anew, since the lock belongs to the open file, and a forked child shares the block's own
        # on one line: an exception such as Ctrl-C finds the file either not open, or in the list that is closed
        files.append(os.open(path, FLAGS))
        if not _lock(files[0], place):
            self.drop()

    @property
    def holds(self) -> bool:
        """True if this process has the place."""
        return self.drop.alive


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())


_claims = WeakSet[Claim]()


def _drop_claims() -> None:
    """In a forked child, close the inherited files. They would keep the parent's claims after the parent's end."""
    for claim in list(_claims):
        claim.drop()


os.register_at_fork(after_in_child=_drop_claims)


# Waiting


FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
"""The number of the system call, by machine; from the kernel's tables."""

WAIT, WAKE, EVERYBODY = 0, 1, 2**31 - 1
"""Operations of futex(2), and how many sleepers to wake."""

GLANCE = 0.25
"""Seconds after which a sleeper looks again even if no bell rang: the process that should ring may be dead."""

PAUSE = 0.001
"""Seconds between two looks where the number of the call is not known."""


class Bell:
    """Wakes those who wait, in whichever process, for a condition over shared memory.

    Any number of processes and threads may wait, and any number may ring. A process that changes what others wait for
    rings afterwards: with :meth:`ring`, or with ``core.publish`` and then :meth:`wake`.

    Args:
        word: int32 ``[1]`` in shared memory, zeroed when it was made.
    """

    def __init__(self, word: NDArray[np.int32]) -> None:
        self.word = word
        self._address = word.ctypes.data

    def ring(self) -> None:
        """Wake all who wait. It costs a system call only if somebody waits."""
        if core.ring_bell(self.word, 0):
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
            # mark, then look: a change before the mark is seen by ready(), one after it changes the word
            value = core.mark_bell(self.word, 0)
            if ready():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._sleep(value, min(left, GLANCE))

    def _sleep(self, value: int, seconds: float) -> None:
        """Sleep until the word is not ``value``, a signal comes, or the time is over."""
        call = _futex()
        if call is None:
            time.sleep(min(seconds, PAUSE))
        else:
            call(self._address, WAIT, value, seconds)  # returns at once if the word has changed since the mark


@cache
def _futex() -> Callable[[int, int, int, float | None], None] | None:
    """The system call, which lets other threads run meanwhile; None where its number is not known."""
    number = FUTEX.get(platform.machine())
    if number is None:
        return None
    syscall: Any = ctypes.CDLL(None, use_errno=True).syscall
    harmless = errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT  # the word had changed already; a signal; the time is over

    def call(address: int, operation: int, value: int, seconds: float | None) -> None:
        timespec = None
        if seconds is not None:
            whole = int(seconds)
            timespec = (ctypes.c_int64 * 2)(whole, int((seconds - whole) * 1e9))
        # a variadic function: without these types, ctypes would pass each number as a C int of 32 bits
        arguments = ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_int(operation), ctypes.c_int(value)
        result = syscall(*arguments, timespec, None, 0)
        code = ctypes.get_errno()
        if result < 0 and code not in harmless:
            raise OSError(code, f"futex: {os.strerror(code)}")

    return call


# Files, which hold the memory of blocks


FLOCK = "hhqqi4x"
"""Linux's ``struct flock``: kind, from where, first byte, number of bytes, process."""

FLAGS = os.O_RDWR | os.O_CLOEXEC
"""Flags with which a file is opened."""


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a file its final size and reserve the memory. If memory is short, this call fails, and no later write does.

    Raises:
        OSError: there is no room.
    """
    os.ftruncate(descriptor, nbytes)
    os.posix_fallocate(descriptor, 0, nbytes)  # otherwise a write to a page without memory kills the process
    # now no process can shrink the file, which would take memory away from the others
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _lock(descriptor: int, byte: int) -> bool:
    """Lock one byte of a file until the file is closed; False if somebody else has locked the byte."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(byte))
    except (BlockingIOError, PermissionError):  # POSIX allows either error for a byte that is locked
        return False
    return True


def _is_locked(descriptor: int, byte: int) -> bool:
    """True if another open file has locked a byte."""
    return struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(byte)))[0] != fcntl.F_UNLCK


def _request(byte: int) -> bytes:
    """A request for the lock of one byte."""
    return struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
