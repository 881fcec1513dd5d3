"""Files that are on the disk when they are said to be, and files that are read as what they are."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import FileFormatError, NoSaveError
from .format import MANIFEST, MANIFEST_BYTES, OWN_NAME, FileNote, damaged, parse_kind

__all__ = [
    "Reader",
    "check_replaceable",
    "open_file",
    "read_manifest",
    "remove_others",
    "sync",
    "take_back",
    "turn",
    "usable",
    "write_file",
]


_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP, errno.EISDIR)
"""What the system says of links that lead in a circle, and of sockets."""


SMALL = 1 << 18
"""Bytes below which a part is put together with others, and is hashed without another thread."""


AHEAD = 1 << 23
"""Bytes written before the disk is set to work on them."""


_BINARY = getattr(os, "O_BINARY", 0)


_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def write_file(
    path: Path,
    parts: Iterable[memoryview],
    size: int,
    written: Callable[[], object] | None = None,
    last: Callable[[], tuple[int, bytes]] | None = None,
) -> FileNote:
    """Write a new file of ``size`` bytes to the disk, through all caches.

    ``written`` is called once no part is read any more, and before the wait for the disk; what ``last`` then gives is
    put in place of the bytes from there on, which could not be known before.
    """
    crc, start, end = 0, 0, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY | _SAFE, 0o666)
    try:
        _allocate(descriptor, size)
        with ThreadPoolExecutor(1) as other:  # starts no thread before it is given something
            for part in _gathered(parts):
                hashed = other.submit(zlib.crc32, part, crc) if len(part) > SMALL else None
                done = 0
                while done < len(part):
                    done += os.write(descriptor, part[done:])
                crc = hashed.result() if hashed is not None else zlib.crc32(part, crc)
                end += len(part)
                if end - start >= AHEAD:
                    start = _set_going(descriptor, start, end)
        if written is not None:
            written()
        if last is not None:
            place, late = last()
            os.lseek(descriptor, place, os.SEEK_SET)
            os.write(descriptor, late)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileNote(size, f"{crc:08x}")


def _set_going(descriptor: int, start: int, end: int) -> int:
    """Let the system write those bytes to the disk while others come, not all at the end."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
    return end


def _gathered(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes with small parts put together: each has a price of its own."""
    small = bytearray()
    for part in parts:
        if len(part) + len(small) > SMALL and small:
            yield memoryview(small)
            small = bytearray()
        if len(part) > SMALL:
            yield part
        else:
            small += part
    if small:
        yield memoryview(small)


def _allocate(descriptor: int, size: int) -> None:
    """Find out at once that the disk is full; writing is also several times faster where the blocks are known."""
    if sys.platform == "linux" and size:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise


def make_directory(path: Path) -> bool:
    """Make sure that ``path`` is a directory, and that its name is on the disk; whether it is new."""
    if path.is_dir():
        return False
    if os.path.lexists(path):
        raise FileFormatError(f"'{path}': expected a directory or nothing, got a file; give another path")
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    if sys.platform != "win32":
        parent = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    return True


def usable(path: str | os.PathLike[str]) -> Path:
    """A path, which can be one.

    Raises:
        FileFormatError: there are no such paths.
    """
    if "\0" in os.fspath(path):
        raise FileFormatError(f"{os.fspath(path)!r:.200}: expected a path, got a zero byte in it; give another path")
    return Path(path)


@contextmanager
def turn(path: Path) -> Generator[tuple[int | None, bool]]:
    """Be the only one who saves into the directory, after those before, and make it if there is none.

    Gives its descriptor, for :func:`sync`, and whether it is new. One whose first save fails removes it, and who waits
    for it meanwhile finds nothing there: a directory is the right one if it still has its name.
    """
    created = make_directory(path)
    if sys.platform == "win32":  # has no descriptors of directories
        yield None, created
        return
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):
                yield descriptor, created
                return
        finally:
            os.close(descriptor)
        created = make_directory(path)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def sync(directory: int | None) -> None:
    """Write to the disk which names the directory holds."""
    if directory is not None:
        os.fsync(directory)


def check_replaceable(path: Path) -> None:
    """Refuse to save into a directory that holds anything but a save, or what is left of one.

    Raises:
        FileFormatError: with the name of what is foreign.
    """
    names = os.listdir(path)
    if MANIFEST in names:
        parse_kind(path / MANIFEST, read_manifest(path))
    elif foreign := [name for name in names if not OWN_NAME.fullmatch(name)]:
        raise FileFormatError(
            f"'{path}': expected an empty directory or a save, got one with {min(foreign)!r} in it; "
            "give another path, or empty it yourself"
        )


def take_back(path: Path, generation: str, created: bool) -> str:
    """Remove the files of a save that failed, unless its manifest is in place already; what is there now, in words."""
    try:
        if generation.encode() in (path / MANIFEST).read_bytes():
            return "the new save is in place nevertheless, and may not outlast a loss of power before the next one"
    except FileNotFoundError:
        pass
    except OSError as error:  # the next save removes them
        return f"whether the new save is in place cannot be told ({error})"
    with suppress(OSError):
        _remove(path, [name for name in os.listdir(path) if generation in name])
        if created:
            path.rmdir()
    return "what was saved there before is as it was"


def remove_others(path: Path, keep: Container[str]) -> None:
    """Remove the files of former saves."""
    with suppress(OSError):
        _remove(path, [name for name in os.listdir(path) if OWN_NAME.fullmatch(name) and name not in keep])


def _remove(path: Path, names: Iterable[str]) -> None:
    for name in names:
        with suppress(OSError):  # it does no harm, and the next save tries again
            os.unlink(path / name)


def open_file(path: Path) -> io.FileIO:
    """A file for reading that really is one: no symbolic link, which may lead anywhere, no pipe, no directory.

    Raises:
        FileFormatError: it is something else.
        FileNotFoundError: there is nothing.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _BINARY | _SAFE)
    except OSError as error:
        if error.errno in _NO_FILE or path.is_symlink():
            raise _no_file(path, "a symbolic link" if path.is_symlink() else f"something else ({error})") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or (not _SAFE and path.is_symlink()):
            raise _no_file(path, "something else")
        return io.FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _no_file(path: Path, got: str) -> FileFormatError:
    return FileFormatError(f"'{path}': expected a regular file, got {got}; copy the save with its files, not links")


def read_manifest(path: Path) -> bytes:
    """The manifest in the directory ``path``, unchecked but for its size.

    Raises:
        NoSaveError: there is none.
        FileFormatError: ``path`` is no directory, or what is called the manifest is too large or no file.
    """
    try:
        with open_file(path / MANIFEST) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MANIFEST_BYTES:
                raise damaged(path / MANIFEST, f"at most {MANIFEST_BYTES} bytes", size)
            return stream.readall()
    except NotADirectoryError as error:
        raise FileFormatError(f"'{path}': expected the directory of a save, got a file; give that directory") from error
    except FileNotFoundError as error:
        got = f"a directory without {MANIFEST}" if path.is_dir() else "nothing"
        raise NoSaveError(f"'{path}': expected a save, got {got}; no save was ever completed there") from error


class Reader:
    """Reads a file once, from its start to its end, and adds up its CRC-32 on the way."""

    def __init__(self, stream: io.FileIO, path: Path, *, verify: bool) -> None:
        self._stream, self._path, self._verify, self._crc = stream, path, verify, 0
        stream.seek(0)

    def read_into(self, target: memoryview) -> None:
        """Fill ``target`` with the next bytes."""
        done = 0
        while done < len(target):
            count = self._stream.readinto(target[done:])
            if not count:
                raise damaged(self._path, f"{len(target) - done} more bytes", "its end")
            done += count
        if self._verify:
            self._crc = zlib.crc32(target, self._crc)

    def check_size(self, size: int) -> None:
        """Refuse a file of another size."""
        if size != (found := os.fstat(self._stream.fileno()).st_size):
            raise damaged(self._path, f"{size} bytes", found)

    def check_start(self, header: bytes) -> None:
        """Read the header, which can be but one."""
        start = bytearray(len(header))
        self.read_into(memoryview(start))
        if bytes(start) != header:
            raise damaged(self._path, "the header that follows from the manifest", "another")

    def check_crc32(self, crc32: str) -> None:
        """Refuse what was read if its checksum is another."""
        if self._verify and crc32 != f"{self._crc:08x}":
            raise damaged(self._path, f"the CRC-32 {crc32}", f"{self._crc:08x}")
