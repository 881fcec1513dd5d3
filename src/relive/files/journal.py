"""Journal: records appended to a file one after another. Each is on the disk before the next, and has a checksum.

A record is ``relive/j``, the run (16 characters), its number and the length of its payload (64 bits each, little
endian), the payload, and the CRC-32 of all that. Numbers rise by one. If the power goes while a record is written, the
record is not whole, and no whole record comes after it. So it is dropped. When a journal has grown long, a new one
takes its place by a rename. The new one begins with the last record of the old one.

After the last record there may be zeros. They are room for the next ones: to write over bytes that the disk has already
takes a third of the time in which a file grows, as the system then has nothing to note about the file.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import FileFormatError
from . import disk
from .sealed import damaged

__all__ = ["Journal", "Record", "last_record"]


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


_sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
"""Write the bytes of a file through, which has them in the same places already. Linux has a call of its own for it."""


class Record(NamedTuple):
    """A record as it was read."""

    number: int
    payload: bytes


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
        if raw.count(0, at) < len(raw) - at:  # not only room for more records
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
        end, grows = self._end + len(whole), self._end + len(whole) > self._size
        if grows:
            whole = _with_room(whole)
        try:
            _write_all(self._descriptor, whole, self._end)
            (os.fsync if grows else _sync_data)(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
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
        if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
            temporary = self._path.with_name(f"{self._path.name}.tmp")
            descriptor = disk.open_to_write(temporary, create=True)
            try:
                os.ftruncate(descriptor, 0)
                _write_all(descriptor, padded, 0)
                os.fsync(descriptor)
                os.replace(temporary, self._path)
            finally:
                os.close(descriptor)
        # The old file is used until the new one is open, so an exception in between has the next call come here again.
        descriptor = disk.open_to_write(self._path)
        try:
            if os.pread(descriptor, len(padded) + 1, 0) != padded:
                raise FileFormatError(
                    f"'{self._path}': expected the journal that was opened, got another file in its place; move the "
                    "directory back, or save to another path"
                )
            disk.sync_path(self._path.parent)
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
    at, last, found = 0, None, _record(raw, 0, path, run)
    while found is not None:
        if last is not None and found.number != last.number + 1:
            raise damaged(path, f"record {last.number + 1}", f"record {found.number}")
        last = found
        at += HEAD.size + len(found.payload) + TAIL.size
        found = _record(raw, at, path, run)
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
    """A record with zeros after it."""
    return whole.ljust(min(max(ROOM, 8 * len(whole)), ROTATED), b"\0")


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)
