"""The directory of a save: who may save there now, what is in it, and how the rest of a failed save is removed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Container, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import FileFormatError
from .disk import make_directory, read_manifest
from .format import MANIFEST, OWN_NAME, Contents, parse, parse_kind

__all__ = ["advice", "remove_others", "replaceable", "require_there", "sync", "take_back", "turn"]


@contextmanager
def turn(path: Path) -> Generator[tuple[int | None, bool]]:
    """Wait for the exclusive right to save into a directory, which is created if missing.

    Yields its descriptor, for :func:`sync`, and whether it is new. A failed first save removes its directory. So after
    the wait, the path may be gone or name another directory; then the directory is created and locked once more.
    """
    created = make_directory(path)
    if sys.platform == "win32":  # directories have no descriptors there
        yield None, created
        return
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDONLY)
        _locked.add(descriptor)
        try:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):
                yield descriptor, created
                return
        finally:
            _locked.discard(descriptor)
            with suppress(OSError):  # to close is not enough while a forked child has the descriptor, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        created = make_directory(path)


_locked: set[int] = set()
"""Descriptors of the directories whose lock this process holds or waits for."""


def _let_go() -> None:
    """In a forked child, close the inherited descriptors. They would keep the lock of a killed parent."""
    while _locked:
        with suppress(OSError):
            os.close(_locked.pop())


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_let_go)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def sync(directory: int | None) -> None:
    """Write the directory's list of names to the disk."""
    if directory is not None:
        os.fsync(directory)


def replaceable(path: Path) -> Contents:
    """The intact part of the save in a directory that may be replaced; empty contents if there is no save.

    A tensor counts as intact if its file has the size that the manifest states.

    Raises:
        FileFormatError: the directory holds files that do not belong to a save; names one of them.
    """
    names = os.listdir(path)
    if MANIFEST in names:
        raw = read_manifest(path)
        parse_kind(path / MANIFEST, raw)
        with suppress(FileFormatError):  # a save that contradicts itself may be replaced; no part of it is kept
            _, found = parse(path / MANIFEST, raw)
            whole = {file for file, note in found.files.items() if _has_size(path / file, note.nbytes)}
            return found.of_tensors([name for name, spec in found.specs.items() if spec.file in whole])
    elif foreign := [name for name in names if not OWN_NAME.fullmatch(name)]:
        raise FileFormatError(
            f"'{path}': expected an empty directory or a save, got one with {min(foreign)!r} in it; "
            "give another path, or empty it yourself"
        )
    return Contents({}, {})


def _has_size(path: Path, size: int) -> bool:
    """Whether a regular file of this size is at the path."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def require_there(path: Path, directory: int | None) -> None:
    """Require that the directory of a save has not been removed meanwhile; ``directory`` is its descriptor.

    Raises:
        FileNotFoundError: the directory is gone, or another one is in its place.
    """
    if directory is not None and not _is_at(path, directory):
        raise FileNotFoundError(errno.ENOENT, "the directory was removed while a save was written into it", str(path))


def advice(path: Path, error: BaseException, size: int) -> str | None:
    """Advice for an error if the disk has no room for ``size`` more bytes; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    free = "an unknown number"
    with suppress(OSError):
        free = f"{shutil.disk_usage(path if path.exists() else path.parent).free:,}"
    return (
        f"the save needs {size:,} bytes besides those of the save in place, and the disk of '{path}' has {free} free, "
        "or allows no more; make room, or save to another disk"
    )


def take_back(path: Path, directory: int | None, generation: str, manifest: bytes, created: bool) -> str:
    """Remove the files of a failed save, unless its manifest is in place. Returns the outcome as a sentence.

    ``directory`` is the descriptor of the directory, and ``manifest`` is empty if it was not yet made.
    """
    if directory is not None and not _is_at(path, directory):
        with suppress(OSError):  # another directory may be in its place, and half a save there helps nobody
            if manifest and manifest == (path / MANIFEST).read_bytes():
                os.unlink(path / MANIFEST)
        _remove_own(path, generation)
        return "the directory was removed meanwhile, and any save in it; save again"
    try:
        if manifest and manifest == (path / MANIFEST).read_bytes():
            return "the new save is in place nevertheless, but a loss of power may destroy it; save again"
    except FileNotFoundError:
        pass
    except OSError as error:  # the next save removes them
        return f"the new save may or may not be in place ({error})"
    _remove_own(path, generation)
    if created:
        with suppress(OSError):
            path.rmdir()
    return "the previous save is unchanged"


def remove_others(path: Path, keep: Container[str]) -> None:
    """Remove the files of former saves."""
    with suppress(OSError):
        _remove(path, [name for name in os.listdir(path) if OWN_NAME.fullmatch(name) and name not in keep])


def _remove_own(path: Path, generation: str) -> None:
    """Remove the files that one save wrote."""
    with suppress(OSError):
        _remove(path, [name for name in os.listdir(path) if generation in name])


def _remove(path: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):  # a leftover file is harmless, and the next save tries again
            os.unlink(path / name)
