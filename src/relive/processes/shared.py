"""Memory that processes share: zeroed blocks, places in them that one process claims, and bells to sleep on.

The file reads from the outside in: the block, the claim, the bell, and then the files and the locks of the system.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import platform
import secrets
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray

from .. import core
from ..errors import LifecycleError, ParameterError
from ..files.disk import close_all
from ..memory.allocator import ONLY_HERE
from ..memory.estimate import require_free
from ..parameters import COUNT_RULE, require

if sys.platform != "win32":
    import fcntl


CACHE_LINE = 64
"""Bytes of a cache line. Two processes that write to one line slow each other down, so their parts begin at others."""

IN_MEMORY = sys.platform == "linux"
"""True if the system has files without a path. Such a file is gone when the last process that has it open ends."""


# A named file in /dev/shm, with a lock that says who is still there, was tried and dropped: a forked child shares the
# open file, so nobody knows who is the last. In most containers /dev/shm has 64 MB.
class SharedBlock:
    """Zeroed memory that processes share. The memory is free again when the last of them ends, however it ends.

    Make one with :meth:`create`. A forked child has the block, too. A pickle of a block holds only its name, so a
    spawned process, or the reader of a queue, must load the pickle while the sender lives. A copy of a block is the
    same memory.

    On Linux the memory has no path: the size of ``/dev/shm`` does not matter, and a kill leaves nothing behind.
    Elsewhere the memory is a file in the folder for temporary files. The process that made the file removes it at its
    end. If that process is killed, the next one that makes a block removes it. Windows has neither.
    """

    token: str

    array: NDArray[np.uint8]
    """The memory, uint8 ``[nbytes]``. It is valid for as long as an array over it exists."""

    def __init__(self, descriptor: int, maker: int, token: str) -> None:
        """Map an open file that process ``maker`` made. Use :meth:`create` and :meth:`attach`, which call this."""
        self._descriptor, self._maker, self.token = descriptor, maker, token
        """Sixteen random hexadecimal digits, which no other block has."""
        # the array holds the map: the memory stays as long as an array over it, even after the descriptor is closed
        self.array = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, nbytes: int) -> SharedBlock:
        """A new block of zeros.

        Raises:
            ParameterError: ``nbytes`` is not a number of bytes, or more than the free memory.
            OSError: the system has no room, or no such memory.
        """
        require("SharedBlock.create", COUNT_RULE, nbytes=nbytes)
        require_free(nbytes, torch.device("cpu"), "the shared memory", "make it smaller")
        token = secrets.token_hex(8)
        descriptor = _new_file(token)
        try:
            _reserve(descriptor, nbytes)
            block = cls(descriptor, os.getpid(), token)
        except BaseException:
            os.close(descriptor)
            raise
        if not IN_MEMORY:
            finalize(block, _remove, block.name, os.getpid())
        return block

    @classmethod
    def attach(cls, name: str) -> SharedBlock:
        """The block of this name. A process that has the block must still be alive.

        Raises:
            ParameterError: this is not the name of a block.
            LifecycleError: the process that gave the name has ended, or has dropped the block.
        """
        gone = f"shared memory {name!r}: it is gone; send it while a process that has it is alive"
        try:
            path, maker, token = _path_of(name), int(name.partition("-")[0]), name.rpartition("-")[2]
        except (AttributeError, ValueError) as error:
            raise ParameterError(f"SharedBlock.attach(name={name!r}): expected the name of a block") from error
        try:
            descriptor = os.open(path, FLAGS)
        except OSError as error:
            raise LifecycleError(gone) from error
        if not _has_token(descriptor, token):  # after the open: before it, the number could still go to another file
            os.close(descriptor)
            raise LifecycleError(gone)
        return cls(descriptor, maker, token)

    @property
    def nbytes(self) -> int:
        """The size of the memory."""
        return self.array.nbytes

    @property
    def name(self) -> str:
        """The name that :meth:`attach` takes in another process, while this process lives and has the block."""
        return f"{os.getpid() if IN_MEMORY else self._maker}-{self._descriptor}-{self.token}"

    def __reduce__(self) -> tuple[Callable[[str], SharedBlock], tuple[str]]:
        return SharedBlock.attach, (self.name,)

    def claim(self, place: int) -> Claim | None:
        """Claim a place for this process, until the claim is dropped or the process ends; None if it is taken.

        Args:
            place: any whole number of at least 0; what it stands for is up to the caller.
        """
        claim = Claim(_path_of(self.name), place)
        return claim if claim.holds else None

    def is_claimed(self, place: int) -> bool:
        """True if a process that is alive has claimed a place."""
        return _is_locked(self._descriptor, place)


class Claim:
    """A place of a block that one process has. A child that is forked does not have it.

    The claim is a lock on one byte of an open file. The system drops it when the process ends, however it ends. A lock
    that has to be given back would stop all others once its owner has died.
    """

    def __init__(self, path: str, place: int) -> None:
        files = list[int]()
        self.drop: finalize[..., object] = finalize(self, close_all, files)
        """Lets others claim the place."""
        ONLY_HERE[self] = lambda claim: claim.drop()
        # opened anew, since the lock belongs to the open file, and a forked child shares the block's own
        # on one line: an exception such as Ctrl-C finds the file either not open, or in the list that is closed
        files.append(os.open(path, FLAGS))
        if not _lock(files[0], place):
            self.drop()

    @property
    def holds(self) -> bool:
        """True if this process has the place."""
        return self.drop.alive


# Waiting


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
    """The system call, which lets other threads run meanwhile; None where there is none."""
    number = FUTEX.get(platform.machine())
    if sys.platform != "linux" or number is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None  # the struct timespec below is that of systems of 64 bits
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

FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
"""Flags with which a file is opened."""


def _new_file(token: str) -> int:
    """Make an empty file and return its descriptor.

    Raises:
        OSError: the system has no such files, as Windows.
    """
    if IN_MEMORY:
        return os.memfd_create(f"relive-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if sys.platform == "win32":
        raise OSError("shared memory of several processes needs Linux or macOS")
    _sweep()
    return os.open(_path_of(f"{os.getpid()}-0-{token}"), FLAGS | os.O_CREAT | os.O_EXCL, 0o600)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give a file its final size and reserve the memory. If memory is short, this call fails, and no later write does.

    Raises:
        OSError: there is no room.
    """
    os.ftruncate(descriptor, nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)  # otherwise a write to a page without memory kills the process
    if IN_MEMORY:  # now no process can shrink the file, which would take memory away from the others
        linux: Any = fcntl
        linux.fcntl(descriptor, linux.F_ADD_SEALS, linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL)


def _path_of(name: str) -> str:
    """The path by which any process can open the file of the block of this name, while the file exists.

    Raises:
        ValueError: this is not the name of a block.
    """
    process, number, token = name.split("-")
    return f"/proc/{int(process)}/fd/{int(number)}" if IN_MEMORY else str(_folder() / f"relive-{int(process)}-{token}")


def _has_token(descriptor: int, token: str) -> bool:
    """True if an open file is the one with this token. Otherwise the descriptor has gone to another file meanwhile."""
    return not IN_MEMORY or os.readlink(f"/proc/self/fd/{descriptor}") == f"/memfd:relive-{token} (deleted)"


def _lock(descriptor: int, byte: int) -> bool:
    """Lock one byte of a file until the file is closed; False if somebody else has locked the byte.

    Some systems have no locks of open files. There the lock belongs to the process, so it does not keep out a second
    claim of the same process.
    """
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        else:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):  # POSIX allows either error for a byte that is locked
        return False
    return True


def _is_locked(descriptor: int, byte: int) -> bool:
    """True if another open file has locked a byte."""
    if hasattr(fcntl, "F_OFD_GETLK"):
        request = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        return struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request))[0] != fcntl.F_UNLCK
    if not _lock(descriptor, byte):
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)
    return False


# Files with a path, where the system has no others


def _folder() -> Path:
    return Path(tempfile.gettempdir())


def _remove(name: str, maker: int) -> None:
    """Remove the file of a block, in the process that made it. Those who have it open keep its memory."""
    if os.getpid() == maker:  # a forked child inherits the finalizer
        with suppress(OSError):
            os.unlink(_path_of(name))


def _sweep() -> None:
    """Remove the files that killed processes left behind."""
    for path in _folder().glob("relive-*-*"):
        with suppress(OSError, ValueError):
            if not _lives(int(path.name.split("-")[1])):
                path.unlink()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
