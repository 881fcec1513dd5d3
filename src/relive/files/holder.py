"""Holder: the right to write to a directory. One process has it at a time, and it ends with the process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from weakref import finalize

from ..errors import FileFormatError, LifecycleError
from . import disk

__all__ = ["LOCK", "Holder"]


LOCK = "lock"
"""The file that is locked. It holds the number of the process that has the lock."""


class Holder:
    """Takes the right to write to a directory. The system takes it back when the process ends, however it ends.

    Raises:
        LifecycleError: another process has the right, or another object of this process; names the process.
        FileFormatError: the lock is a link, or no regular file.
        OSError: the directory may not be written to, or its file system has no locks.
    """

    def __init__(self, directory: Path) -> None:
        if sys.platform == "win32":
            raise LifecycleError("a replay in files needs a POSIX system; on this one use save and load")
        import fcntl

        self._path, files = directory / LOCK, list[int]()
        self._close = finalize(self, _close_all, files)
        self._close.atexit = False  # the system takes the right back after the last thread and exit handler
        # The file is in the list before it is locked. So whenever an exception such as Ctrl-C comes, also one line
        # before the caller has this object, the right ends with the object.
        files.append(disk.open_to_write(self._path, create=True))
        self._descriptor = files[0]
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._taken(directory) from None
            if not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                raise self._taken(directory)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise

    def require(self) -> None:
        """Refuse to write if the right was given back, or if another directory is at the path now.

        Raises:
            LifecycleError: the right was given back.
            FileFormatError: another directory has taken the place of this one.
            NoSaveError: nothing is at the path.
        """
        if not self._close.alive:
            raise LifecycleError(
                f"'{self._path.parent}': this process does not hold it any more; open it again with ReplayBuffer.open"
            )
        if not disk.is_at(self._path, self._descriptor):
            raise FileFormatError(
                f"'{self._path.parent}': another directory has taken the place of the one that was opened; move that "
                "one back, or save to another path"
            )

    def _taken(self, directory: Path) -> LifecycleError:
        who = os.pread(self._descriptor, 20, 0).strip().decode("ascii", "replace")
        if who == str(os.getpid()):
            return LifecycleError(f"'{directory}' is open in this process already; use that replay, or close() it")
        name = f"process {who}" if who.isdigit() else "another process"
        return LifecycleError(
            f"'{directory}' is open in {name}, and only one may write to it; end that one, or give another path"
        )

    def release(self) -> None:
        """Give the right back. In a forked child, the parent keeps its right. A second call does nothing."""
        self._close()


def _close_all(files: list[int]) -> None:
    while files:
        with suppress(OSError):
            os.close(files.pop())
