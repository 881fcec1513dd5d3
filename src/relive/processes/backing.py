"""Shared memory as the operating system has it: an open file, a way for others to open it, and locks on its bytes."""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

__all__ = ["FLAGS", "IN_MEMORY", "is_locked", "is_that", "lock", "new_file", "path_of", "remove", "reserve", "source"]

IN_MEMORY = sys.platform == "linux"
"""Whether the system has files without a path. Such a file is gone when the last process that has it open ends."""

FLOCK = "hhqqi4x"
"""Linux's ``struct flock``: kind, from where, first byte, number of bytes, process."""

FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
"""How a file is opened."""


def new_file(token: str) -> int:
    """Make an empty file and return its descriptor.

    Raises:
        OSError: the system has no such files, as Windows.
    """
    if IN_MEMORY:
        return os.memfd_create(f"relive-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if sys.platform == "win32":
        raise OSError("shared memory of several processes needs Linux or macOS")
    _sweep()
    return os.open(_path(str(os.getpid()), token), FLAGS | os.O_CREAT | os.O_EXCL, 0o600)


def reserve(descriptor: int, nbytes: int) -> None:
    """Give a file its final size and reserve the memory. If memory is short, this call fails, and no later write does.

    Raises:
        OSError: there is no room.
    """
    os.ftruncate(descriptor, nbytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    if IN_MEMORY:  # now no process can shrink the file, which would take memory away from the others
        known: Any = fcntl
        known.fcntl(descriptor, known.F_ADD_SEALS, known.F_SEAL_SHRINK | known.F_SEAL_GROW | known.F_SEAL_SEAL)


def source(descriptor: int, token: str) -> str:
    """The place of this process's file. Any process can give it to :func:`path_of`, with the token."""
    if IN_MEMORY:
        return f"{os.getpid()}-{descriptor}"
    path = next(_folder().glob(f"relive-*-{token}"), None)
    return "0-0" if path is None else f"{path.name.split('-')[1]}-0"


def path_of(place: str, token: str) -> str:
    """The path by which any process can open the file that :func:`source` gave, while the file exists.

    Raises:
        ValueError: ``place`` does not come from :func:`source`.
    """
    process, number = map(int, place.split("-"))
    return f"/proc/{process}/fd/{number}" if IN_MEMORY else str(_path(str(process), token))


def is_that(descriptor: int, token: str) -> bool:
    """Whether an open file is the one with this token. If not, its descriptor has gone to another file meanwhile."""
    return not IN_MEMORY or os.readlink(f"/proc/self/fd/{descriptor}") == f"/memfd:relive-{token} (deleted)"


def remove(token: str) -> None:
    """Remove a file that has a path. Those who have it open keep its memory."""
    with suppress(OSError):
        _path(str(os.getpid()), token).unlink()


def lock(descriptor: int, byte: int) -> bool:
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


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether another open file has locked a byte."""
    if hasattr(fcntl, "F_OFD_GETLK"):
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        return struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK
    if not lock(descriptor, byte):
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, byte)
    return False


# Files with a path


def _folder() -> Path:
    return Path(tempfile.gettempdir())


def _path(process: str, token: str) -> Path:
    return _folder() / f"relive-{process}-{token}"


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
