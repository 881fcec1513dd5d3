"""Files written through to the disk, files read only if they are regular ones, and the lock of a directory.

The last part checks what the JSON of a save states: counts, shapes and dtypes.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import FileFormatError, LifecycleError, NoSaveError, ParameterError, ReliveError
from ..printable import shown
from .format import MANIFEST, MOST_BYTES, FileNote, damaged

T = TypeVar("T")


# -- writing --------------------------------------------------------------------------------------------------

SMALL = 1 << 18
"""Parts of up to this many bytes are joined with others and hashed in the same thread."""


AHEAD = 1 << 23
"""Bytes written before the system is asked to move them to the disk."""


WAITERS = 8
"""How many files are synced at once."""


FILE_ENDINGS = frozenset((".pt", ".pth", ".pkl", ".npz", ".safetensors"))
"""Endings of the files in which others keep arrays. A new directory gets no such name."""


THREAD_ROOM = 1 << 20
"""Bytes that must be free before a thread is started, its stack apart."""


def write_file(
    path: Path,
    parts: Iterable[memoryview],
    size: int,
    last: Callable[[], tuple[int, bytes]] | None = None,
) -> FileNote:
    """Write a new file of ``size`` bytes to the disk, through all caches.

    ``last`` gives a position and bytes to write there, for content that is known only at the end.
    """
    descriptor = create_file(path)
    try:
        note = _fill(descriptor, parts, size)
        if last is not None:
            place, late = last()
            os.lseek(descriptor, place, os.SEEK_SET)
            os.write(descriptor, late)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return note


def replace_file(path: Path, temporary: Path, data: bytes) -> None:
    """Put a file with these bytes in the place of the one at ``path``. There is the old one or the new one, whole.

    ``temporary`` is its path until then. A file that is there was left by a process that died. If this call raises, as
    on a full disk, it leaves none.
    """
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        write_file(temporary, [memoryview(data)], len(data))
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_path(path.parent)


def write_files(
    files: Mapping[Path, tuple[Iterable[memoryview], int]],
    written: Callable[[], object] | None = None,
) -> list[FileNote]:
    """Write new files to the disk, through all caches. ``files`` has the parts of each, and its size in bytes.

    ``written`` is called once all parts of all files have been read, before the first wait for the disk.
    """
    descriptors, notes = list[int](), list[FileNote]()
    try:
        for path, (parts, size) in files.items():
            descriptors.append(create_file(path))  # in the list at once, so that it is closed whatever comes
            notes.append(_fill(descriptors[-1], parts, size))
        if written is not None:  # all bytes are in the system's cache: the memory that they came from is free
            written()
        # the disk syncs many files at once in little more time than one: 18 of 350 kB in 21 ms, and one by one in 124
        with ThreadPoolExecutor(WAITERS) as others:
            synced = [_begin_call(others, os.fsync, descriptor) for descriptor in descriptors[1:]]
            for descriptor in descriptors[:1]:  # here: one file needs no thread
                os.fsync(descriptor)
            for wait in synced:
                wait()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return notes


def _begin_call(others: ThreadPoolExecutor, function: Callable[..., T], *args: object) -> Callable[[], T]:
    """Begin a call in another thread. Returns a function that waits for the result and returns it.

    An interpreter that is ending starts no threads, and others may lack the memory. Then this thread makes the call.
    """
    with suppress(RuntimeError):
        if has_room_for_thread():
            return others.submit(function, *args).result
    result = function(*args)
    return lambda: result


def has_room_for_thread() -> bool:
    """True if there is memory in which a new thread can begin.

    Without it, the thread may end before it says that it has begun, and Python waits for that for ever.
    """
    try:
        mmap.mmap(-1, THREAD_ROOM).close()
    except (OSError, MemoryError):
        return False
    return True


def start_thread(thread: Thread, otherwise: str) -> None:
    """Start a thread.

    Raises:
        MemoryError: there is too little memory for it; says ``otherwise``.
        RuntimeError: the system allows no more threads, or the interpreter is ending.
    """
    if not has_room_for_thread():
        raise MemoryError(f"no memory is left to start the thread '{thread.name}'; free some, or {otherwise}")
    thread.start()


def create_file(path: Path) -> int:
    """Create a file that is not there yet, to be written; returns its descriptor."""
    # O_EXCL: never into a file, or through a link, that somebody else put there
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY | _SAFE, 0o666)


def _fill(descriptor: int, parts: Iterable[memoryview], size: int) -> FileNote:
    """Write all parts, ``size`` bytes together, to a new file. They may still be in the system's cache."""
    crc, start, end = 0, 0, 0
    _allocate(descriptor, size)
    with ThreadPoolExecutor(1) as other:  # its thread starts with the first task
        for part in _gathered(parts):
            # the checksum in another thread while the disk writes; its result is awaited before the next part
            hashed = _begin_call(other, zlib.crc32, part, crc) if len(part) > SMALL else None
            done = 0
            while done < len(part):  # a write may take a part of the bytes
                done += os.write(descriptor, part[done:])
            # each checksum goes on from the one before, so it is awaited before the next part
            crc = hashed() if hashed is not None else zlib.crc32(part, crc)
            end += len(part)
            if end - start >= AHEAD and sys.platform == "linux":
                with suppress(OSError):  # the disk may begin with these bytes, while further ones come
                    os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
                start = end
    return FileNote(size, f"{crc:08x}")


def _gathered(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Join small parts, because each write has a fixed cost. The bytes stay as they are."""
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
    """Reserve disk space. A full disk fails here at once, and writing to reserved blocks is several times faster."""
    if sys.platform == "linux" and size:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise


# -- directories and paths ------------------------------------------------------------------------------------


def make_directory(path: Path) -> bool:
    """Create the directory ``path`` and write its name to the disk. Returns True if it is new."""
    if path.is_dir():
        return False
    make_directory(path.parent)
    try:
        path.mkdir()
        is_new = True
    except FileExistsError as error:
        if not path.is_dir():  # else somebody has made it just now
            problem = f"'{path}': expected a directory or nothing, got a file; give another path"
            raise FileFormatError(problem) from error
        is_new = False
    sync_path(path.parent)  # its name is in the parent's list: without this, a power cut takes the directory away
    return is_new


def sync_path(directory: Path) -> None:
    """Write a directory's list of names to the disk, where directories can be opened."""
    if sys.platform != "win32":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def usable(path: str | os.PathLike[str]) -> Path:
    """``path`` as a Path.

    Raises:
        FileFormatError: the path contains a zero byte.
        ParameterError: this is no path, or empty text, which is hardly meant for the directory of the process.
    """
    if not isinstance(cast("object", path), str | os.PathLike) or not os.fspath(path):
        raise ParameterError(f"path={path!r:.200}: expected text or a pathlib.Path; pass '.' for this directory")
    if "\0" in os.fspath(path):
        raise FileFormatError(f"{os.fspath(path)!r:.200}: expected a path, got a zero byte in it; give another path")
    return Path(path)


def target(path: str | os.PathLike[str]) -> Path:
    """The directory of a save as a Path, whether it is there or not.

    Raises:
        FileFormatError, ParameterError: as :func:`usable`.
        ParameterError: nothing is there, and the name is that of a file.
    """
    found = usable(path)
    if found.suffix.lower() in FILE_ENDINGS and not os.path.lexists(found):
        raise ParameterError(
            f"path={os.fspath(path)!r:.200}: a save is a directory, expected a name without {found.suffix!r}, that of "
            f"a file; pass {os.fspath(found.with_suffix(''))!r:.200}"
        )
    return found


def is_at(path: Path, descriptor: int) -> bool:
    """True if an open file is the one at a path; False if another one is there, or none."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def require_at(path: Path, descriptor: int, otherwise: str) -> None:
    """Require that an open file is still the one at a path: what is written to it would not be found again.

    Whoever writes by name asks this first: another replay may have taken the place. It costs one ``stat``.

    Raises:
        NoSaveError: nothing is at the path.
        FileFormatError: another file is there; ``otherwise`` is the text of the error.
    """
    if is_at(path, descriptor):
        return
    if os.path.exists(path):
        raise FileFormatError(otherwise)
    gone = path if path.parent.is_dir() else path.parent
    raise NoSaveError(
        f"'{gone}' was removed or moved while it was open, so nothing that is written now would be found again; "
        "move it back, or save to another path"
    )


# -- reading --------------------------------------------------------------------------------------------------

_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP, errno.EISDIR)
"""Error numbers for paths that are not regular files, such as circular links and sockets."""


_BINARY = getattr(os, "O_BINARY", 0)


_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""No link is followed, no pipe waited for, and no descriptor given to a child process, where the system can do so."""


CACHED = 1 << 18
"""Bytes that are read at once: they are still in the processor's cache when they are hashed."""


LOOKED_AT = 1000
"""How many names of a directory are looked at to find the saves in it."""


def open_file(path: Path) -> io.FileIO:
    """Open a regular file for reading. Pipes, directories and symbolic links, which may lead anywhere, are refused.

    Raises:
        FileFormatError: the path is not a regular file.
        FileNotFoundError: nothing is at the path.
    """
    return io.FileIO(open_to_read(path))


def open_to_write(path: Path, *, create: bool = False) -> int:
    """Open a regular file for reading and writing; returns its descriptor. With ``create`` a missing one is made.

    Raises:
        FileFormatError: the path is not a regular file; or the file has a second name (a hard link), and would change
            under that name, too.
        FileNotFoundError: nothing is at the path.
    """
    descriptor = open_to_read(path, os.O_RDWR | (os.O_CREAT if create else 0))
    if (names := os.fstat(descriptor).st_nlink) > 1:
        os.close(descriptor)
        raise _no_file(path, f"one with {names} names (hard links)")
    return descriptor


def open_to_read(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file for reading, as :func:`open_file` does; returns its descriptor, which the caller closes."""
    try:
        descriptor = os.open(path, flags | _BINARY | _SAFE, 0o666)
    except OSError as error:
        if error.errno in _NO_FILE or path.is_symlink():
            raise _no_file(path, "a symbolic link" if path.is_symlink() else f"something else ({error})") from None
        raise
    # of the open file, not of the path: the path may lead elsewhere by now
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or (not _SAFE and path.is_symlink()):
        os.close(descriptor)
        raise _no_file(path, "something else")
    return descriptor


def _no_file(path: Path, got: str) -> FileFormatError:
    return FileFormatError(f"'{path}': expected a regular file, got {got}; copy the save with its files, not links")


def read_manifest(path: Path) -> bytes:
    """The manifest in the directory ``path``. Only its size is checked.

    Raises:
        NoSaveError: the directory has no manifest.
        FileFormatError: ``path`` is not a directory, or the manifest is too large or not a regular file.
    """
    try:
        with open_file(path / MANIFEST) as stream:
            # before it is read: a file of any size may be there
            size = os.fstat(stream.fileno()).st_size
            if size > MOST_BYTES:
                raise damaged(path / MANIFEST, f"at most {MOST_BYTES} bytes", size)
            return stream.readall()
    except NotADirectoryError as error:
        raise FileFormatError(f"'{path}': expected the directory of a save, got a file; give that directory") from error
    except FileNotFoundError as error:
        got = f"a directory without {MANIFEST}" if path.is_dir() else "nothing"
        raise NoSaveError(
            f"'{path}': expected a save, got {got}; no save was ever completed there{_others(path)}"
        ) from error


def _others(path: Path) -> str:
    """A word on the saves in a directory of saves; empty if there is none."""
    saves: list[str] = []
    with suppress(OSError), os.scandir(path) as entries:
        saves += [entry.name for entry in islice(entries, LOOKED_AT) if (path / entry.name / MANIFEST).is_file()]
    return f", but in it: give {' or '.join(repr(str(path / name)) for name in sorted(saves)[:3])}" if saves else ""


class FileReader:
    """Reads a file once from start to end and computes its CRC-32 on the way."""

    def __init__(self, stream: io.FileIO, path: Path) -> None:
        self._stream, self._path, self._crc = stream, path, 0
        stream.seek(0)

    def read_into(self, target: memoryview) -> None:
        """Fill ``target`` with the next bytes, and hash them while they are in the processor's cache."""
        done = 0
        while done < len(target):
            count = self._stream.readinto(target[done : done + CACHED])
            if not count:
                raise damaged(self._path, f"{len(target) - done} more bytes", "its end")
            self._crc = zlib.crc32(target[done : done + count], self._crc)
            done += count

    def check_size(self, size: int) -> None:
        """Refuse a file of another size."""
        if size != (got := os.fstat(self._stream.fileno()).st_size):
            raise damaged(self._path, f"{size} bytes", got)

    def check_start(self, header: bytes) -> None:
        """Read the header and require these bytes."""
        start = bytearray(len(header))
        self.read_into(memoryview(start))
        if bytes(start) != header:
            raise damaged(self._path, "the header that follows from the manifest", "another")

    def check_crc32(self, crc32: str) -> None:
        """Require this checksum of the bytes read."""
        if crc32 != f"{self._crc:08x}":
            raise damaged(self._path, f"the CRC-32 {crc32}", f"{self._crc:08x}")


# -- the lock of a directory ----------------------------------------------------------------------------------

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
        self._close = finalize(self, close_all, files)
        self._close.atexit = False  # the system takes the right back after the last thread and exit handler
        # The file is in the list before it is locked. So whenever an exception such as Ctrl-C comes, also one line
        # before the caller has this object, the right ends with the object.
        files.append(open_to_write(self._path, create=True))
        self._descriptor = files[0]
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._held_elsewhere(directory) from None
            if not is_at(self._path, self._descriptor):  # removed since it was opened: another may lock a new one
                raise self._held_elsewhere(directory)
            os.ftruncate(self._descriptor, 0)  # a longer number of the process before would leave digits behind
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
        require_at(
            self._path,
            self._descriptor,
            f"'{self._path.parent}': another directory has taken the place of the one that was opened; move that "
            "one back, or save to another path",
        )

    def _held_elsewhere(self, directory: Path) -> LifecycleError:
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


def close_all(files: list[int]) -> None:
    """Close the descriptors in a list, and empty it."""
    while files:
        with suppress(OSError):
            os.close(files.pop())


# -- the JSON of a save ---------------------------------------------------------------------------------------

MOST = 2**62
"""The largest count in a save. Counting on from it still fits into 64 bits."""


def entry(content: Mapping[str, object], name: str, kind: type) -> Any:
    """One entry of a save's JSON, of the expected type.

    Raises:
        FileFormatError: the entry is missing, or of another type.
    """
    value = content.get(name)
    if type(value) is not kind:  # not isinstance: True is no count
        raise FileFormatError(
            f"the save's entry {name!r} is {shown(value)}; expected a {kind.__name__}, as relive writes it"
        )
    return value


def whole(content: Mapping[str, object], name: str) -> int:
    """One entry of a save's JSON, a count from 0 to ``MOST``.

    Raises:
        FileFormatError: the entry is missing, or not a count.
    """
    value: int = entry(content, name, int)
    if not 0 <= value <= MOST:
        raise FileFormatError(f"the save's entry {name!r} is {shown(value)}; expected a number from 0 to {MOST}")
    return value


def integers(content: Mapping[str, object], name: str, *shape: int) -> NDArray[np.int64]:
    """One entry of a save's JSON, a list (of lists) of counts, as an array of this shape.

    Raises:
        FileFormatError: the entry has another shape, or a member is not a count.
    """
    counts = np.array(entry(content, name, list))
    # a list of another shape, or with a text, a float or a larger number in it, gets another dtype
    if counts.shape != shape or counts.dtype != np.int64 or (counts < 0).any() or (counts > MOST).any():
        raise FileFormatError(
            f"the save's entry {name!r} is {shown(content[name])}; expected numbers from 0 to {MOST}, of shape {shape}"
        )
    return counts


def fitting(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """The tensor ``name`` of a save, of this shape and dtype. Without a dtype, ``shape`` is its first axes.

    Raises:
        FileFormatError: the tensor is missing, or has another shape or dtype.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise FileFormatError(f"the save has no tensor {shown(name)}")
    actual = tuple(tensor.shape if dtype is not None else tensor.shape[: len(shape)])
    if actual != shape or (dtype is not None and tensor.dtype is not dtype):
        expected = f"{dtype} {shape}" if dtype is not None else f"{shape} in front"
        raise FileFormatError(f"tensor {shown(name)}: expected {expected}, got {tensor.dtype} {tuple(tensor.shape)}")
    return tensor


_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
"""Numbers of errors of the machine, which no content of a save can cause."""


@contextmanager
def contradictions(path: str | os.PathLike[str], *innocent: type[ReliveError]) -> Generator[None]:
    """Turn any error while a save is loaded into an error of the save, except errors of the ``innocent`` kinds.

    Raises:
        FileFormatError: replaces any other error, and names the save.
        LifecycleError: the sampler or view given belongs to another buffer, which is not the save's fault.
        OSError: the disk is full or fails, or too many files are open.
    """
    try:
        yield
    except (LifecycleError, *innocent):
        raise
    except FileFormatError as error:
        if os.fspath(path) in str(error):
            raise
        raise FileFormatError(f"'{path}': {error}") from error
    except MemoryError as error:
        raise FileFormatError(f"the save in '{path}' needs more memory than there is") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _MACHINE:
            raise
        raise FileFormatError(f"the save in '{path}' contradicts itself: {error!s:.2000}") from error
