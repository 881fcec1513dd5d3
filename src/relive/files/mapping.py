"""Arrays in files that are mapped into memory. Each file is a safetensors file with one tensor and a fixed size.

The header is padded with spaces up to a page, as safetensors allows, so that the numbers begin at a page of memory. The
manifest determines every byte of the header, which also names the run of the file. So a file of another run or of
another array is refused without a parser.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FileFormatError
from . import disk
from .sealed import damaged

__all__ = ["CODES", "MappedArray", "MappedSpec", "create", "free_bytes", "map_file", "map_to_read"]


PAGE = 4096
"""Numbers begin at a multiple of this many bytes, the page of most machines."""


CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip
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
        """The bytes before its numbers, in a file of this run."""
        entry = {"dtype": CODES[self.dtype], "shape": self.shape, "data_offsets": [0, self.nbytes]}
        text = json.dumps({"__metadata__": {"run": run}, self.name: entry}, separators=(",", ":")).encode()
        size = -(-(8 + len(text)) // PAGE) * PAGE - 8
        return struct.pack("<Q", size) + text.ljust(size)


class MappedArray(NamedTuple):
    """An array over a file, with the mapping and the descriptor of the file."""

    array: NDArray[Any]
    memory: mmap.mmap
    descriptor: int

    def flush(self) -> None:
        """Write all changed pages through to the disk."""
        self.memory.flush()


def create(directory: Path, spec: MappedSpec, run: str) -> None:
    """Write a new file of zeros, with all of its space on the disk.

    Raises:
        OSError: the disk has no room for it, or fails.
    """
    header = spec.header(run)
    size = len(header) + spec.nbytes
    path = directory / spec.file
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        _allocate(descriptor, size, path)
        os.pwrite(descriptor, header, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def map_file(directory: Path, spec: MappedSpec, run: str) -> MappedArray:
    """The array in a file that :func:`create` wrote, to be read and written.

    Raises:
        FileFormatError: the file is missing, is not a regular file, or is not the one that the manifest describes.
        OSError: the file may not be written, or the disk is full.
    """
    descriptor = _opened(directory, spec, run, disk.open_to_write)
    try:
        size = os.fstat(descriptor).st_size
        _allocate(descriptor, size, directory / spec.file)  # a copied file may have holes; a write into one can fail
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return _over(spec, memory, descriptor)


def map_to_read(directory: Path, spec: MappedSpec, run: str, *, copy: bool) -> MappedArray:
    """The array in a file, to which another process may be writing. The file is never changed.

    Without ``copy``, the array shows what the other process writes. With it, the array may be written to. A page that
    was written to is this process's own from then on. The other pages may or may not show what the other one writes.

    Raises:
        FileFormatError: as :func:`map_file`.
    """
    descriptor = _opened(directory, spec, run, disk.open_to_read)
    try:
        access = mmap.ACCESS_COPY if copy else mmap.ACCESS_READ
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=access)
    except BaseException:
        os.close(descriptor)
        raise
    return _over(spec, memory, descriptor)


def _opened(directory: Path, spec: MappedSpec, run: str, opener: Callable[[Path], int]) -> int:
    """The descriptor of the file that the manifest describes.

    Raises:
        FileFormatError: the file is missing, is not a regular file, or is another one.
    """
    path, header = directory / spec.file, spec.header(run)
    try:
        descriptor = opener(path)
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
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _over(spec: MappedSpec, memory: mmap.mmap, descriptor: int) -> MappedArray:
    flat = np.frombuffer(memory, np.uint8, spec.nbytes, len(memory) - spec.nbytes)
    return MappedArray(flat.view(np.dtype(spec.dtype)).reshape(spec.shape), memory, descriptor)


def _allocate(descriptor: int, size: int, path: Path) -> None:
    """Reserve disk space. Otherwise a full disk would send a signal (SIGBUS) at some later write to memory.

    Raises:
        OSError: the disk has no room. The attempt does not fill it up.
    """
    missing, free = size - 512 * os.fstat(descriptor).st_blocks, free_bytes(path.parent)
    try:
        if missing > free:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            what = f"the file takes {size:,} bytes, and the disk has {free:,} free; lower the capacity"
            raise OSError(error.errno, what, str(path)) from error
        raise


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written to the disk of a directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
