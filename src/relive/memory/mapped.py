"""The memory of a replay in mapped files, which outlive the process: MappedAllocator; FileAllocator for a copy."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from weakref import finalize

from numpy.typing import DTypeLike

from .. import core
from ..files.format import MANIFEST, damaged
from ..files.mapped import MappedDirectory, MappedFiles
from ..steps.arrays import Array, Ints
from .allocator import ONLY_HERE, Allocator

if sys.platform != "win32":
    import resource


DRAINED = "drained"
"""The array with the notes of steps that came from elsewhere; see :class:`relive.replay.durable.Durable`."""


SETTINGS = "settings"
"""The array with the parameters of sampler and view; see :class:`relive.replay.durable.Settings`."""


LATER = frozenset(("errors", "nodes", "facts", "errors.undo", DRAINED, SETTINGS))
"""Arrays that a replay which is there may lack: its sampler had none, or nothing asked for them yet."""


class FileAllocator(Allocator):
    """Gives a replay arrays that lie in the files of a directory.

    Args:
        directory: the directory.
    """

    durable = True

    def __init__(self, directory: MappedFiles) -> None:
        self.directory = directory
        self.died = False

    def take(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """The array of this name in the directory. A new one takes its space on the disk at once.

        Raises:
            FileFormatError: an array of the ring is missing; only those of a sampler may come later.
        """
        directory = self.directory
        if directory.content is not None and name not in LATER and directory.spec(name) is None:
            raise damaged(directory.path / MANIFEST, f"the array {name!r}", f"{list(directory.known)}")
        return directory.take(name, shape, dtype)

    def has(self, name: str) -> bool:
        """True if the manifest names this array."""
        return name in self.directory.known

    def existing(self, name: str) -> Array | None:
        """An array that was taken or that an earlier process left, of any shape and dtype; None if there is none."""
        spec = self.directory.spec(name)
        return None if spec is None else self.take(name, spec.shape, spec.dtype)


class MappedAllocator(FileAllocator):
    """Gives a replay arrays in the files of a directory.

    A forked child has the same memory, not a copy. So there the allocator lets go of the directory, and calls
    :attr:`on_fork`, which has to see to it that nothing is written.

    Args:
        path: the directory; see :class:`relive.files.mapped.MappedDirectory`, and the errors there.
    """

    directory: MappedDirectory

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(MappedDirectory(path))
        self.on_fork: Callable[[], object] = bool
        self.random = False
        """True if the system was told that rows are read in random order."""
        # Dropped, as after a kill, it lets another process in. At the end of the process the system does, and not
        # before: threads and exit handlers may still add steps.
        finalize(self, self.directory.release).atexit = False
        ONLY_HERE[self] = MappedAllocator.let_go

    def let_go(self) -> None:
        """Let go of the directory, in a forked child."""
        self.on_fork()  # first: from here on every call in the child is an error
        self.directory.release()

    def expect_random(self, random: bool) -> None:
        """Tell the system how rows are read: in random order, or also one after another, as it assumes at first.

        In random order it reads no pages around a missing one. Linux reads 128 KB to 8 MB there, which are seldom
        needed, and put out pages that are used.
        """
        for name in self.directory.mapped:
            if name == "rows" or name.startswith("block."):
                self.directory.memory(name).memory.madvise(mmap.MADV_RANDOM if random else mmap.MADV_NORMAL)
        self.random: bool = random

    def expect_scan(self) -> None:
        """Let the system read ahead. The next draw looks again how rows are read."""
        if self.random:
            self.expect_random(False)


QUIET_LOOKS = 32
"""After this many questions in a row that found nothing missing, no more are asked until a read waits for the disk."""


def can_look_ahead() -> bool:
    """True if this system counts how often a thread waited for the disk, and takes advice: Linux does."""
    return sys.platform == "linux"


# It asks in the call that gives a batch. A thread that asked saved nothing on two idle cores, 4.72 ms against 4.71, and
# cost 5 ms beside a busy process.
class LookAhead:
    """Asks the system for rows that will be read soon. The rows then come from the disk while the caller goes on.

    While there is something to ask for, the system is told that reads are random. Then it reads no neighbours of a
    missing page, which would take the place of pages that are used.

    Args:
        allocator: the mapped files.
        arrays: what is read of a row: arrays ``[R, ...]`` in these files.
    """

    def __init__(self, allocator: MappedAllocator, arrays: Sequence[Array]) -> None:
        self._allocator = allocator
        self._pages = core.Pages(arrays)  # keeps the memory mapped
        self.row_bytes: int = self._pages.row_bytes
        """The bytes of a row in all arrays."""
        self._last_draw = 0, 0
        """The thread that drew the last batch, and how often it had waited for the disk by then."""
        self._left = 0
        """How many more questions may find nothing missing."""

    def is_wanted(self) -> bool:
        """True if rows were missing lately: this thread waited for the disk, or the last questions found some."""
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        (thread, before), self._last_draw = self._last_draw, (get_ident(), waits)
        # the count is of this thread, so it says nothing after a draw in another one
        if thread == self._last_draw[0] and waits > before:
            self._left = QUIET_LOOKS
        wanted = self._left > 0
        if wanted != self._allocator.random:
            self._allocator.expect_random(wanted)
        return wanted

    def ask(self, begins: Ints, ends: Ints) -> int:
        """Have rows ``begins`` up to ``ends``, int64 ``[K]`` each, come into memory; gives how many pages are missing.

        It does not wait for the disk, unless more pages are missing than the disk takes requests.
        """
        missing = self._pages.ask_for(begins, ends)
        self._left = QUIET_LOOKS if missing else max(self._left - 1, 0)
        return missing
