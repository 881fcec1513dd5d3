"""What all numba kernels share: how they are compiled, memory by address, and the counter-based generator."""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core import caching, cgutils
from numba.extending import intrinsic as numba_intrinsic
from numpy.typing import NDArray

__all__ = [
    "Addresses",
    "Bytes",
    "Floats",
    "address_t",
    "addressed",
    "f32",
    "fetch",
    "flags",
    "floats",
    "inlined",
    "intrinsic",
    "jit",
    "memcpy",
    "mix",
    "prefetch",
    "remainder",
    "stream",
]

F = TypeVar("F", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Addresses = NDArray[np.uint64]

f32 = np.float32
address_t = np.uintp
_carray: Any = cast("Any", numba).carray
_ir: Any = cast("Any", cgutils).ir
_FunctionCache: Any = cast("Any", caching).FunctionCache
_CacheFiles: Any = cast("Any", caching).IndexDataCacheFile


def _sources() -> tuple[float, int]:
    """When a kernel was changed last, and how long all of them are."""
    files = [path.stat() for path in Path(__file__).parent.parent.rglob("*.py")]
    return max(file.st_mtime for file in files), sum(file.st_size for file in files)


SOURCES = _sources()


def jit(function: F, **options: Any) -> F:
    """Compile on first call, with a cache on disk."""
    compiled: Any = cast("Any", numba).njit(error_model="numpy", nogil=True, **options)(function)
    try:
        compiled._cache = KernelCache(function)
    except (RuntimeError, OSError):
        warn_once("numba finds no directory that it may write to and that is yours alone: kernels are compiled again "
                  "in every process")  # fmt: skip
    return cast("F", compiled)


def inlined(function: F) -> F:
    """As :func:`jit`, for a part of a hot loop: it becomes a piece of its caller, never a call."""
    return jit(function, forceinline=True)


class KernelCache(_FunctionCache):
    """numba's cache of a function, which takes no harm from files that are damaged and directories that are not there.

    Where neither the package's directory nor the user's own can be written, it is in one for temporary files. What is
    read from a cache is run, so that has to be the user's and closed to all others.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            super().__init__(function)
        except RuntimeError:
            with _numba_caches_in(private_directory()):
                super().__init__(function)
            warn_once(f"numba can write neither beside the package nor in your home, and caches kernels in "
                      f"'{private_directory()}'; NUMBA_CACHE_DIR names another place")  # fmt: skip
        # numba looks at the function's own file alone, and would go on with what it compiled of others before they
        # changed
        file: Any = _Files(self._cache_path, self._impl.filename_base, SOURCES)
        self._cache_file = file

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled, or None; files that cannot be read are thrown away."""
        numbas: Any = super()
        try:
            return numbas.load_overload(sig, target_context)
        except Exception:
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, where that can be done."""
        with suppress(OSError):
            super().save_overload(sig, data)


class _Files(_CacheFiles):
    """The files of a cache, with a checksum at the end of compiled code: a flipped bit of it could do anything."""

    def _save_data(self, name: str, data: Any) -> None:
        raw = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(raw + zlib.crc32(raw).to_bytes(4, "little"))

    def _load_data(self, name: str) -> Any:
        raw = Path(self._data_path(name)).read_bytes()
        if zlib.crc32(raw[:-4]).to_bytes(4, "little") != raw[-4:]:
            raise ValueError("damaged")
        numbas: Any = super()
        return numbas._load_data(name)


@contextmanager
def _numba_caches_in(folder: Path) -> Generator[None]:
    config: Any = cast("Any", numba).config
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


@cache
def private_directory() -> Path:
    """A directory for temporary files that nobody but this user can read or write.

    Raises:
        RuntimeError: there is none; somebody else has made what has its name, say.
    """
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = Path(tempfile.gettempdir(), "relive-kernels" if user is None else f"relive-kernels-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # a link would be followed to wherever its owner wants
    if not stat.S_ISDIR(found.st_mode) or (user is not None and (found.st_uid != user or found.st_mode & 0o077)):
        raise RuntimeError(f"'{folder}' is not a directory of yours alone")
    return folder


@cache
def warn_once(message: str) -> None:
    """Tell the user something that holds for all kernels."""
    warnings.warn(f"relive: {message}", RuntimeWarning, stacklevel=2)


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's intrinsic, which its stubs do not type."""
    return cast("Any", numba_intrinsic)(function)


@intrinsic
def pointer(_context: Any, address: Any, like: Any) -> Any:
    """An integer address as a pointer to elements of the dtype ``like``, for numba.carray."""
    pointer = types.CPointer(like.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return pointer(types.uintp, like), codegen


@jit
def addressed(address: int, shape: Any, like: Any) -> Any:
    """The memory at an address as a contiguous array of this shape and dtype."""
    return _carray(pointer(address_t(address), like), shape)


@jit
def floats(address: int, size: int) -> Floats:
    """The memory of a float32 tensor; address 0 is an empty array."""
    return addressed(address, size if address else 0, f32)


@jit
def flags(address: int, size: int) -> Bytes:
    """The memory of a bool tensor; address 0 is an empty array."""
    return addressed(address, size if address else 0, np.uint8)


@intrinsic
def memcpy(_context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes from one address to another."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointers = [builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2]]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), codegen


@intrinsic
def stream(_context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes past the caches: the target's are not loaded first. ``target`` and ``nbytes`` are multiples of 64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        line, number = _ir.VectorType(_ir.IntType(64), 8), _ir.IntType(64)
        past = builder.module.add_metadata([_ir.Constant(_ir.IntType(32), 1)])
        lines = cast("Any", cgutils).for_range_slice(builder, number(0), args[2], number(64), intp=number)
        with lines as (offset, _):
            here, there = (builder.inttoptr(builder.add(x, offset), line.as_pointer()) for x in (args[1], args[0]))
            stored = builder.store(builder.load(here, align=1), there, align=64)
            stored.set_metadata("nontemporal", past)
        builder.fence("seq_cst")  # what comes after may be read by another thread
        return _context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), codegen


@intrinsic
def prefetch(_context: Any, array: Any, place: Any) -> Any:
    """Start to load the cache line of an element, which need not exist."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        number = cgutils.int32_t
        kind = _ir.FunctionType(_ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        prefetch = cast("Any", cgutils).get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(prefetch, [address, number(0), number(3), number(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(array, place), codegen


@jit
def fetch(memory: Any, start: int, nbytes: int) -> None:
    """Ask for the cache lines of ``nbytes`` bytes of packed rows; past their end that does no harm."""
    for byte in range(start - start % 64, start + nbytes, 64):
        prefetch(memory, byte)


@jit
def mix(z: Any) -> Any:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def remainder(number: Any, size: int, inverse: float) -> Any:
    """number % size for 0 <= number < 2**52, given 1 / size: a division takes as long as several of these."""
    rest = number - np.int64(np.float64(number) * inverse) * size
    if rest < 0:  # the quotient is off by one at most
        return rest + size
    return rest - size if rest >= size else rest
