"""Keepers of a replay in mapped files, which outlive the process: MappedKeeper, and CopiedKeeper for a copy of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, finalize

from ..files.format import MANIFEST
from ..files.mapped import MappedDirectory
from ..files.mapped_copy import MappedCopy
from ..files.sealed import damaged
from ..steps.arrays import Array
from .keeper import Keeper

__all__ = ["DRAINED", "SETTINGS", "CopiedKeeper", "FileKeeper", "MappedKeeper"]


DRAINED = "drained"
"""The array with the notes of steps that came from elsewhere; see :class:`relive.replay.durable.Durable`."""


SETTINGS = "settings"
"""The array with the parameters of sampler and view; see :class:`relive.replay.durable.Settings`."""


LATER = frozenset(("errors", "nodes", "facts", "errors.undo", DRAINED, SETTINGS))
"""Arrays that a replay which is there may lack: its sampler had none, or nothing asked for them yet."""


class FileKeeper(Keeper):
    """Gives a replay arrays that lie in the files of a directory.

    Args:
        directory: the directory.
    """

    durable = True

    def __init__(self, directory: MappedDirectory | MappedCopy) -> None:
        self.directory = directory
        self.died = False

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """See :class:`Keeper`. A new array takes its space on the disk at once.

        Raises:
            FileFormatError: an array of the ring is missing; only those of a sampler may come later.
        """
        directory = self.directory
        if directory.content is not None and name not in LATER and directory.spec(name) is None:
            raise damaged(directory.path / MANIFEST, f"the array {name!r}", f"{directory.names}")
        return directory.take(name, shape, dtype)

    def has(self, name: str) -> bool:
        """See :class:`Keeper`."""
        return self.directory.has(name)

    def kept(self, name: str) -> Array | None:
        """An array that was taken or that was kept before, of whatever shape and dtype; None if there is none."""
        spec = self.directory.spec(name)
        return None if spec is None else self.take(name, spec.shape, spec.dtype)


class CopiedKeeper(FileKeeper):
    """Gives a replay a copy of the files, in private memory. Another process may have the directory open.

    Args:
        path: the directory; see :class:`relive.files.mapped_copy.MappedCopy`, and the errors there.
    """

    directory: MappedCopy

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(MappedCopy(path))


class MappedKeeper(FileKeeper):
    """Gives a replay arrays in the files of a directory.

    A forked child has the same memory, not a copy. So there the keeper lets go of the directory, and calls
    :attr:`on_fork`, which has to see to it that nothing is written.

    Args:
        path: the directory; see :class:`relive.files.mapped.MappedDirectory`, and the errors there.
    """

    directory: MappedDirectory

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(MappedDirectory(path))
        self.on_fork: Callable[[], object] = bool
        self.random = False
        """Whether the system was told that rows are read in random order."""
        # Dropped, as after a kill, it lets another process in. At the end of the process the system does, and not
        # before: threads and exit handlers may still add steps.
        finalize(self, self.directory.release).atexit = False
        _KEEPERS.add(self)

    def expect_random(self, random: bool) -> None:
        """Tell the system how rows are read: in random order, or also one after another, as it assumes at first.

        In random order it reads no pages around a missing one, which most often nobody needs.
        """
        for name in self.directory.mapped:
            if name == "rows" or name.startswith("block."):
                self.directory.memory(name).memory.madvise(mmap.MADV_RANDOM if random else mmap.MADV_NORMAL)
        self.random = random

    def expect_scan(self) -> None:
        """See :class:`Keeper`. The next draw looks anew how rows are read."""
        if self.random:
            self.expect_random(False)


_KEEPERS: WeakSet[MappedKeeper] = WeakSet()


def _let_go() -> None:
    for keeper in list(_KEEPERS):
        keeper.on_fork()
        keeper.directory.release()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_let_go)
