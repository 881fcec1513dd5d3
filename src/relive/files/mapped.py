"""MappedDirectory: named arrays in files of one directory, mapped into memory, and a manifest that lists them.

The manifest is replaced by a rename, so a process that dies leaves the old manifest or the new one. Files that the
manifest does not name were left by a process that died. They are never read. A journal beside the arrays says what was
flushed, and when. ``docs/durable.md`` has the format.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ..errors import FileFormatError, NoSaveError
from ..printable import shown
from . import disk, format
from .disk import LOCK, Holder
from .format import AXES, MANIFEST, Spec, damaged, encode, is_list, is_object

FORMAT, VERSION = "relive mapped arrays", 1


JOURNAL = "journal"
"""The file that says what was flushed, and when."""


FILE = re.compile(r"[0-9]{3}-[a-z0-9-]{1,40}\.safetensors")
"""The name of an array's file."""


_OWN = re.compile(rf"{FILE.pattern}|{LOCK}|{JOURNAL}|{JOURNAL}\.tmp|{re.escape(MANIFEST)}\.tmp")


class MappedFiles(ABC):
    """The arrays that the manifest of a directory names, and those of them that were mapped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = disk.target(path).absolute()  # the process may change its directory while this is open
        self.run: str = ""
        self.content: dict[str, Any] | None = None
        """The JSON that was committed with the arrays; None if nothing ever was."""
        self.known: dict[str, MappedSpec] = {}
        """The arrays that the manifest names."""
        self._arrays: dict[str, tuple[MappedSpec, MappedArray]] = {}
        """The arrays that were taken."""
        self._besides: dict[str, MappedArray] = {}
        """Other mappings of arrays."""

    def _read(self, raw: bytes) -> None:
        """Take over what a manifest says."""
        self.run, self.content, self.known = _parse(self.path / MANIFEST, raw)

    @property
    @abstractmethod
    def last(self) -> Record | None:
        """The last record of the journal when this was opened, or that was written since; None in a new one."""

    def spec(self, name: str) -> MappedSpec | None:
        """The description of an array that was taken or that the manifest names; None if there is none."""
        return self._arrays[name][0] if name in self._arrays else self.known.get(name)

    @abstractmethod
    def check(self) -> None:
        """Map every array that the manifest names.

        Raises:
            FileFormatError: a file is missing, or is not as the manifest says.
            OSError: a file may not be opened, or the disk is full.
        """

    @abstractmethod
    def take(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """The array of this name; zeros if the manifest names none.

        Raises:
            FileFormatError: the array has another shape or dtype, or its file is not as the manifest says.
            OSError: the disk is full, or fails.
        """

    def memory(self, name: str) -> MappedArray:
        """The mapping of an array that was taken."""
        return self._arrays[name][1]

    def release(self) -> None:
        """Close the files. The arrays stay mapped for as long as something refers to them."""
        for mapped in (*(mapped for _, mapped in self._arrays.values()), *self._besides.values()):
            with suppress(OSError):
                os.close(mapped.descriptor)
        self._arrays, self._besides = {}, {}

    def _require_kind(self, spec: MappedSpec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Require an array of this shape and dtype.

        Raises:
            FileFormatError: the manifest says otherwise.
        """
        if (spec.dtype, spec.shape) != (str(np.dtype(dtype)), tuple(shape)):
            wanted = f"the array {spec.name!r} as {np.dtype(dtype)} {tuple(shape)}"
            raise damaged(self.path / MANIFEST, wanted, f"{spec.dtype} {spec.shape}")


class MappedDirectory(MappedFiles):
    """The arrays of a directory, held by this process alone.

    :meth:`take` gives an array as it is in its file. If there is no such array, it makes a new one, with all of its
    space on the disk. :meth:`commit` then makes the manifest name the arrays that were taken. Until then the directory
    counts as unchanged.

    Args:
        path: the directory, which is made if missing.

    Raises:
        LifecycleError: another process holds the directory.
        FileFormatError: the directory holds something else, or is damaged or of another version.
        OSError: the directory may not be written to.
    """

    run: str
    content: dict[str, Any] | None
    known: dict[str, MappedSpec]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._created = disk.make_directory(self.path)
        self._made: list[str] = []
        with ExitStack() as undo:
            undo.callback(self._remove_if_new)
            self._holder = Holder(self.path)
            undo.callback(self._holder.release)
            self._find()
            undo.pop_all()  # all is well: nothing is taken back

    def _find(self) -> None:
        """Read the manifest, if there is one, and open the journal."""
        try:
            raw = disk.read_manifest(self.path)
        except NoSaveError:
            names = os.listdir(self.path)
            if foreign := sorted(name for name in names if not _OWN.fullmatch(name)):
                raise FileFormatError(
                    f"'{self.path}': expected an empty directory or a replay in files, got one with {foreign[0]!r} in "
                    "it; give another path"
                ) from None
            self._remove([name for name in names if name != LOCK])  # left by a process that died before it was done
            self.run = os.urandom(8).hex()
            self.journal = Journal(self.path / JOURNAL, self.run, create=True)
            return
        self._read(raw)
        self.journal: Journal = Journal(self.path / JOURNAL, self.run)

    def check(self) -> None:
        """Map every array that the manifest names, as :meth:`MappedFiles.check`. :meth:`take` uses these mappings."""
        for name, spec in self.known.items():
            if name not in self._arrays and name not in self._besides:
                self._besides[name] = _mapped(self.path, spec, self.run, mmap.ACCESS_WRITE)

    @property
    def last(self) -> Record | None:
        """The last record of the journal; None in a new one."""
        return self.journal.last

    @property
    def mapped(self) -> list[str]:
        """The arrays that were taken."""
        return list(self._arrays)

    def take(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """The array of this name, as it is in its file. If the manifest does not name it, zeros in a new file.

        Its errors are those of :meth:`MappedFiles.take`.
        """
        if name not in self._arrays:
            spec = self.known.get(name)
            if spec is None:
                spec = MappedSpec(name, self._new_name(name), str(np.dtype(dtype)), tuple(shape))
                self._made.append(spec.file)  # first: `discard` removes a file that is half made, too
                _create(self.path, spec, self.run)
            self._require_kind(spec, shape, dtype)
            mapped = self._besides.pop(name, None) or _mapped(self.path, spec, self.run, mmap.ACCESS_WRITE)
            self._arrays[name] = spec, mapped
        return self._arrays[name][1].array

    def _new_name(self, name: str) -> str:
        # larger than any number there: files that no manifest names may be left
        numbers = [int(file[:3]) for file in os.listdir(self.path) if FILE.fullmatch(file)]
        text = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "array"
        return f"{max(numbers, default=-1) + 1:03d}-{text}.safetensors"

    def commit(self, content: Mapping[str, object]) -> None:
        """Write a manifest that names the arrays that were taken and has ``content``. Remove all other arrays' files.

        Raises:
            FileFormatError: the content is not JSON.
            LifecycleError: this process does not hold the directory any more.
            OSError: the disk is full, or fails. Then the old manifest stays in place.
        """
        self.require_held()
        arrays = [
            {"name": s.name, "file": s.file, "dtype": s.dtype, "shape": s.shape} for s, _ in self._arrays.values()
        ]
        parts = {"format": FORMAT, "version": VERSION, "run": self.run, "arrays": arrays}
        text = format.seal({**{key: json.dumps(value) for key, value in parts.items()}, "content": encode(content)})
        try:
            disk.replace_file(self.path / MANIFEST, self.path / f"{MANIFEST}.tmp", text)
        except BaseException:
            self._after_failed_commit(text)
            raise
        self.content, self.known, self._made = dict(content), {n: s for n, (s, _) in self._arrays.items()}, []
        # last: the old manifest may name these files, and a power cut may bring it back until the rename is synced
        kept = {spec.file for spec in self.known.values()}
        self._remove([name for name in os.listdir(self.path) if FILE.fullmatch(name) and name not in kept])

    def _after_failed_commit(self, text: bytes) -> None:
        """After a commit has failed: the manifest that is in place names no file that :meth:`discard` removes."""
        with suppress(OSError):
            if (self.path / MANIFEST).read_bytes() == text:  # the disk failed after the rename
                if self.content is None:
                    os.unlink(self.path / MANIFEST)
                else:
                    self._made = []

    def require_held(self) -> None:
        """Refuse to write into a directory that was released, or into another one that has taken its place.

        Raises:
            LifecycleError: the directory was released.
            FileFormatError: another directory is at the path.
            NoSaveError: nothing is at the path.
        """
        self._holder.require()

    def flush(self) -> None:
        """Write all changed pages of all arrays through to the disk.

        Raises:
            FileFormatError: another file is at the path of one of them, or none (NoSaveError).
            OSError: the disk fails.
        """
        for spec, mapped in self._arrays.values():
            path = self.path / spec.file
            disk.require_at(
                path,
                mapped.descriptor,
                f"'{path}': another file has taken the place of the one that is mapped; nothing that is written now "
                "would be found again",
            )
            mapped.memory.flush()

    def discard(self) -> None:
        """Take back what was made since the last commit, and release the directory."""
        self._remove(self._made)
        self.release()
        self._remove_if_new()

    def release(self) -> None:
        """Release the directory. The arrays stay mapped for as long as something refers to them."""
        super().release()
        self.journal.close()
        self._holder.release()  # last: nothing of this process may write once another one may

    def _remove_if_new(self) -> None:
        """Remove the directory if it was made here and nothing was committed."""
        if self._created and self.content is None:
            self._remove([LOCK, JOURNAL])
            with suppress(OSError):
                self.path.rmdir()

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(OSError):
                os.unlink(self.path / name)


class MappedCopy(MappedFiles):
    """The arrays of a directory that :class:`relive.files.mapped.MappedDirectory` wrote. Nothing there is changed.

    :meth:`take` gives memory that this process may change for itself. :meth:`live` gives the files as they are now.
    No lock is taken, which could make the ``open`` of a trainer fail. Of 2,700 copies beside a writer none had a wrong
    row: the writer notes every change before it makes it, and the copy leaves those rows out.

    Args:
        path: the directory.

    Raises:
        NoSaveError: the directory has no manifest.
        FileFormatError: the directory holds something else, or is damaged or of another version.
        OSError: a file may not be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._read(disk.read_manifest(self.path))
        self._last = self.record()

    @property
    def last(self) -> Record:
        """The last record of the journal when the manifest was read."""
        return self._last

    def record(self) -> Record:
        """The last record of the journal, now.

        Raises:
            FileFormatError: the journal is missing, altered or damaged.
        """
        return last_record(self.path / JOURNAL, self.run)

    def check(self) -> None:
        """Take every array that the manifest names, as :meth:`MappedFiles.check`."""
        for name, spec in self.known.items():
            self.take(name, spec.shape, spec.dtype)

    def take(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """The array of this name in private memory, as :meth:`MappedFiles.take`."""
        spec = self.known.get(name)
        if spec is None:
            return np.zeros(math.prod(shape), dtype).reshape(shape)
        self._require_kind(spec, shape, dtype)
        if name not in self._arrays:
            self._arrays[name] = spec, _mapped(self.path, spec, self.run, mmap.ACCESS_COPY)
        return self._arrays[name][1].array

    def live(self, name: str) -> np.ndarray:
        """The array of this name in its file, which another process may be changing. It cannot be written to."""
        if name not in self._besides:
            self._besides[name] = _mapped(self.path, self.known[name], self.run, mmap.ACCESS_READ)
        return self._besides[name].array


# -- the manifest ---------------------------------------------------------------------------------------------

ARRAYS = 512
"""The most arrays of a directory."""


def is_of_mapped(raw: bytes) -> bool:
    """True if a manifest says that it is one of mapped arrays. Nothing else in it is looked at."""
    return re.match(rb'\s*{\s*"format":\s*"%s"' % FORMAT.encode(), raw) is not None


def _parse(path: Path, raw: bytes) -> tuple[str, dict[str, Any], dict[str, MappedSpec]]:
    """The run, the content and the arrays, by name, of a manifest.

    Raises:
        FileFormatError: it is of another format or version, or damaged.
    """
    advice = "give the directory of a replay in files; a save is opened by load"
    manifest = format.parse_sealed(path, raw, FORMAT, (VERSION,), advice)
    try:
        if set(manifest) != {"format", "version", "run", "arrays", "content", "checksum"}:
            raise ValueError(f"the keys {shown(list(manifest))}")
        run, arrays, content = manifest["run"], manifest["arrays"], manifest["content"]
        if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{16}", run):
            raise ValueError(f"the run {shown(run)}")
        if not is_list(arrays) or not is_object(content) or len(arrays) > ARRAYS:
            raise ValueError("arrays or content of another kind")
        format.require_shallow(content)
        specs = [_spec(note) for note in arrays]
        if len({spec.name for spec in specs}) != len(specs) or len({spec.file for spec in specs}) != len(specs):
            raise ValueError("two arrays of one name or in one file")
    except ValueError as error:
        raise damaged(path, "a consistent manifest", error) from error
    return run, content, {spec.name: spec for spec in specs}


def _spec(note: object) -> MappedSpec:
    if is_object(note) and set(note) == {"name", "file", "dtype", "shape"}:
        name, file, dtype, shape = (note[key] for key in ("name", "file", "dtype", "shape"))
        texts = all(isinstance(text, str) for text in (name, file, dtype))
        known = texts and FILE.fullmatch(file) and dtype in CODES and is_list(shape) and len(shape) <= AXES
        # bounds far above any memory, so that no product of them overflows what NumPy and mmap take
        if known and all(type(size) is int and 0 < size < 2**48 for size in shape):
            spec = MappedSpec(name, file, dtype, tuple(shape))
            if spec.nbytes < 2**60:
                return spec
    raise ValueError(f"{shown(note)} for an array")


# -- an array in a file ---------------------------------------------------------------------------------------

PAGE = 4096
"""Numbers begin at a multiple of this many bytes, the page of most machines."""


CODES = {name: code for code, name in format.NAMES.items() if not name.startswith(("bfloat", "float8"))}
"""NumPy dtype -> its name in safetensors."""


class MappedSpec(NamedTuple):
    """An array in a file of its own."""

    name: str
    file: str
    dtype: str
    """The name of its NumPy dtype."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def header(self, run: str) -> bytes:
        """The bytes before its numbers, in a file of this run.

        They follow from the manifest, so a file of another run is told by its bytes alone. They fill whole pages, so
        the numbers begin at one.
        """
        return format.header({self.name: Spec(CODES[self.dtype], self.shape, self.file)}, {"run": run}, PAGE)


class MappedArray(NamedTuple):
    """An array over a file, with the mapping and the descriptor of the file."""

    array: np.ndarray
    memory: mmap.mmap
    descriptor: int


def _create(directory: Path, spec: MappedSpec, run: str) -> None:
    """Write a new file of zeros, with all of its space on the disk.

    Raises:
        OSError: the disk has no room for it, or fails.
    """
    header = spec.header(run)
    size = len(header) + spec.nbytes
    path = directory / spec.file
    descriptor = disk.create_file(path)
    try:
        _reserve_space(descriptor, size, path)
        os.pwrite(descriptor, header, 0)
        os.fsync(descriptor)  # before any manifest names the file
    finally:
        os.close(descriptor)


def _mapped(directory: Path, spec: MappedSpec, run: str, access: int) -> MappedArray:
    """The array in a file that :func:`_create` wrote, which another process may be writing to unless this one holds it.

    Args:
        directory: the directory of the file.
        spec: the array, as the manifest describes it.
        run: the run in the manifest.
        access: ACCESS_WRITE of mmap changes the file. ACCESS_READ shows what another process writes. ACCESS_COPY may be
            written to: a page that was written to is this process's own from then on, and the other pages may or may
            not show what another process writes.

    Raises:
        FileFormatError: the file is missing, is not a regular file, or is not the one that the manifest describes.
        OSError: the file may not be opened, or the disk is full.
    """
    path, header = directory / spec.file, spec.header(run)
    try:
        descriptor = (disk.open_to_write if access == mmap.ACCESS_WRITE else disk.open_to_read)(path)
    except FileNotFoundError as error:
        raise damaged(path, f"the file of the array {spec.name!r}", "nothing") from error
    try:
        if (size := os.fstat(descriptor).st_size) != len(header) + spec.nbytes:
            raise damaged(path, f"{len(header) + spec.nbytes} bytes", size)
        if os.pread(descriptor, len(header), 0) != header:
            raise FileFormatError(
                f"'{path}': expected the array {spec.name!r} of the run {run}, got another header; the file belongs to "
                "another replay or was altered: restore the whole directory from a copy"
            )
        if access == mmap.ACCESS_WRITE:
            _reserve_space(descriptor, size, path)  # a copied file may have holes; a write into one can fail
        memory = mmap.mmap(descriptor, size, access=access)
    except BaseException:
        os.close(descriptor)
        raise
    # the numbers are the last bytes of the file: its size was tested
    flat = np.frombuffer(memory, np.uint8, spec.nbytes, size - spec.nbytes)
    return MappedArray(flat.view(np.dtype(spec.dtype)).reshape(spec.shape), memory, descriptor)


def _reserve_space(descriptor: int, size: int, path: Path) -> None:
    """Reserve disk space. Otherwise a full disk would send a signal (SIGBUS) at some later write to memory.

    Raises:
        OSError: the disk has no room. The attempt does not fill it up.
    """
    # a block of st_blocks has 512 bytes on every system
    missing, disk_status = size - 512 * os.fstat(descriptor).st_blocks, os.statvfs(path.parent)
    free = disk_status.f_bavail * disk_status.f_frsize  # f_bavail: what is left to users other than root
    try:
        if missing > free:
            raise OSError(errno.ENOSPC, "No space left on device")
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        elif missing > 0:
            _rewrite(descriptor, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            what = f"the file takes {size:,} bytes, and the disk has {free:,} free; lower the capacity"
            raise OSError(error.errno, what, str(path)) from error
        raise


def _rewrite(descriptor: int, size: int) -> None:
    """Write the bytes of a file anew, with zeros after its end: macOS has no other call that gives each its space."""
    end = os.fstat(descriptor).st_size  # a new file may not be open to read
    for start in range(0, size, PIECE):
        length = min(PIECE, size - start)
        kept = os.pread(descriptor, length, start) if start < end else b""
        os.pwrite(descriptor, kept.ljust(length, b"\0"), start)


PIECE = 1 << 20
"""Bytes that are written at once."""


# -- the journal ----------------------------------------------------------------------------------------------

MARK = b"relive/j"
HEAD = struct.Struct("<8s16sQQ")
TAIL = struct.Struct("<I")


LONGEST = 1 << 26
"""The most bytes of a payload."""


ROOM = 1 << 18
"""A file that has to grow grows by at least so many bytes, and by eight records, but by no more than :data:`ROTATED`
unless a single record is longer."""


ROTATED = 1 << 24
"""A journal of this many bytes or more is replaced by a new one. A reader takes a journal that is a record longer."""


class Record(NamedTuple):
    """A record as it was read."""

    number: int
    payload: bytes


_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
"""Write the bytes of a file through, which has them in the same places already. Linux has a call of its own for it."""


class Journal:
    """The journal of a run, opened to append to it. Its last record is ``last``, or None in a new journal.

    The caller holds a lock on the directory.

    Args:
        path: the file, which is made if ``create``.
        run: 16 hexadecimal digits.
        create: begin a new journal in place of any file that is there.

    Raises:
        FileFormatError: the file is missing, of another run, altered or damaged.
    """

    def __init__(self, path: Path, run: str, *, create: bool = False) -> None:
        self._path, self._run = path, run.encode()
        self.last: Record | None = None
        if create:
            self._descriptor = disk.open_to_write(path, create=True)
            os.ftruncate(self._descriptor, 0)
            self._end = self._size = 0
            return
        try:
            self._descriptor = disk.open_to_write(path)
        except FileNotFoundError as error:
            raise damaged(path, "a journal", "nothing") from error
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        """Find the last whole record, and cut off the bytes after it."""
        raw = _bytes_of(self._descriptor, self._path)
        self.last, at = _last_in(raw, self._path, self._run)
        self._end, self._size = at, len(raw)
        if raw.count(0, at) < len(raw) - at:  # not only room for more records, but a record that a kill cut short
            os.ftruncate(self._descriptor, at)
            self._size = at

    def append(self, payload: bytes) -> int:
        """Add a record; it is on the disk when this returns. Returns its number.

        Raises:
            FileFormatError: the payload is too long.
            OSError: the disk is full, or fails. The record then counts as not written.
        """
        if len(payload) > LONGEST:
            raise FileFormatError(f"'{self._path}': a record of {len(payload)} bytes; at most {LONGEST} fit")
        number = 0 if self.last is None else self.last.number + 1
        if self._end >= ROTATED and self.last is not None:
            self._rotate(self.last)
        self._write(Record(number, payload))
        return number

    def _write(self, record: Record) -> None:
        """Write a record through to the disk at the end, or leave the journal as it was."""
        whole = _packed(self._run, record)
        # into room that was written before, so that only the bytes have to reach the disk, not the file's length
        end, grows = self._end + len(whole), self._end + len(whole) > self._size
        if grows:
            whole = _with_room(whole)
        try:
            _write_all(self._descriptor, whole, self._end)
            (os.fsync if grows else _sync_data)(self._descriptor)  # without growth, only bytes have changed
        except OSError:
            os.ftruncate(self._descriptor, self._end)  # half a record must not stand before the next one
            self._size = self._end
            raise
        size = max(self._size, self._end + len(whole))
        # in one line: an exception such as Ctrl-C finds the record counted or not, and its number is never given twice
        self._size, self._end, self.last = size, end, record

    def _rotate(self, last: Record) -> None:
        """Begin a new journal with the last record, in place of this one.

        Raises:
            FileFormatError: another file is there now, as after the directory was replaced.
        """
        whole = _packed(self._run, last)
        padded = _with_room(whole)
        if disk.is_at(self._path, self._descriptor):
            disk.replace_file(self._path, self._path.with_name(f"{self._path.name}.tmp"), padded)
        # The old file is used until the new one is open, so an exception in between has the next call come here again.
        descriptor = disk.open_to_write(self._path)
        try:
            if os.pread(descriptor, len(padded) + 1, 0) != padded:
                raise FileFormatError(
                    f"'{self._path}': expected the journal that was opened, got another file in its place; move the "
                    "directory back, or save to another path"
                )
            disk.sync_path(self._path.parent)  # or a power cut brings back the old file, which gets no more records
        except BaseException:
            os.close(descriptor)
            raise
        before = self._descriptor
        self._descriptor, self._end, self._size = descriptor, len(whole), len(padded)
        os.close(before)

    def close(self) -> None:
        """Close the file. A second time does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def last_record(path: Path, run: str) -> Record:
    """The last whole record of the journal of a run, to which another process may append meanwhile.

    Raises:
        FileFormatError: the file is missing, of another run, altered or damaged.
    """
    try:
        with disk.open_file(path) as stream:
            return _last_in(_bytes_of(stream.fileno(), path), path, run.encode())[0]
    except FileNotFoundError as error:
        raise damaged(path, "a journal", "nothing") from error


def _bytes_of(descriptor: int, path: Path) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > ROTATED + LONGEST + HEAD.size + TAIL.size:
        raise damaged(path, f"at most {ROTATED + LONGEST} bytes", size)
    return os.pread(descriptor, size, 0) if size else b""


def _last_in(raw: bytes, path: Path, run: bytes) -> tuple[Record, int]:
    """The last whole record, and the byte after it.

    Raises:
        FileFormatError: there is none; or a record is of another run, is missing, or is damaged.
    """
    at, last, following = 0, None, _record(raw, 0, path, run)
    while following is not None:
        if last is not None and following.number != last.number + 1:
            raise damaged(path, f"record {last.number + 1}", f"record {following.number}")
        last = following
        at += HEAD.size + len(last.payload) + TAIL.size
        following = _record(raw, at, path, run)
    if last is None:
        raise damaged(path, f"a journal of the run {run.decode()}", "something else")
    rest = raw.find(MARK, at + 1)
    while rest >= 0:  # a whole record after a damaged one: the file was damaged, and not cut short
        if _record(raw, rest, path, run) is not None:
            raise damaged(path, f"a whole record at byte {at}", f"a damaged one, and a whole one at {rest}")
        rest = raw.find(MARK, rest + 1)
    return last, at


def _record(raw: bytes, at: int, path: Path, run: bytes) -> Record | None:
    """The whole record of this run at a byte; None if there is none.

    Raises:
        FileFormatError: a whole record of another run is there.
    """
    if len(raw) - at < HEAD.size + TAIL.size:
        return None
    mark, its_run, number, length = HEAD.unpack_from(raw, at)
    end = at + HEAD.size + length
    # the length is tested before it is used: these bytes may be anything
    if mark != MARK or length > LONGEST or end + TAIL.size > len(raw):
        return None
    if TAIL.unpack_from(raw, end)[0] != zlib.crc32(memoryview(raw)[at:end]):
        return None
    if its_run != run:
        raise FileFormatError(
            f"'{path}': expected a journal of the run {run.decode()}, got one of {its_run!r}; it belongs "
            "to another replay: restore the whole directory from a copy"
        )
    return Record(number, raw[at + HEAD.size : end])


def _packed(run: bytes, record: Record) -> bytes:
    """A record as it lies in the file."""
    body = HEAD.pack(MARK, run, record.number, len(record.payload)) + record.payload
    return body + TAIL.pack(zlib.crc32(body))


def _with_room(whole: bytes) -> bytes:
    """A record with zeros after it: the next one is written over them in 90 to 130 µs, instead of 190 to 210."""
    return whole.ljust(min(max(ROOM, 8 * len(whole)), ROTATED), b"\0")


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)
