"""The base of all numba kernels.

In order: compiling, with one line of log when it takes long; the cache on disk; memory by address, as arrays; copies,
fences and prefetches; splitmix64; handles, by which NamedTuples of arrays go into a kernel.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
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
from numba.core import caching, cgutils, compiler_lock, event, registry
from numba.extending import intrinsic as numba_intrinsic
from numba.np import arrayobj
from numpy.typing import NDArray

from ..tables import RingArrays, StagedRows

__all__ = [
    "ENTRIES",
    "LINE",
    "PROGRESS",
    "Addresses",
    "Bytes",
    "Floats",
    "Ints",
    "KernelCache",
    "address_t",
    "addressed",
    "cache_folder",
    "column_of",
    "copy_ahead",
    "copy_short",
    "f32",
    "fence",
    "fetch",
    "fill",
    "flags",
    "floats",
    "handle_of",
    "inlined",
    "intrinsic",
    "jit",
    "load_target",
    "matrix_of",
    "memcpy",
    "mix",
    "open_ring",
    "open_staged",
    "prefetch",
    "private_directory",
    "remainder",
    "stream",
    "strided",
    "vector_of",
    "warn_once",
]


_FunctionCache: Any = cast("Any", caching).FunctionCache
_CacheFiles: Any = cast("Any", caching).IndexDataCacheFile
_Listener: Any = cast("Any", event).Listener

LONG = 1.0
"""Seconds of compiling after which the line is written."""

COMPILING = (
    "relive compiles its kernels for the first use on this machine, which can take half a minute; they are kept on "
    "disk. `python -m relive.compile` does all of it ahead of time."
)


def _sources() -> tuple[float, int]:
    """When a kernel was changed last, and how long all of them are."""
    # all kernels, not this file alone: a kernel inlines what other modules define
    files = [path.stat() for path in Path(__file__).parent.parent.rglob("*.py")]
    return max(file.st_mtime for file in files), sum(file.st_size for file in files)


SOURCES = _sources()


class Progress(_Listener):
    """Counts the kernels that this process compiled, and logs one line when that begins to take long.

    The line is a warning of the logger ``relive.compile``, so Python writes it to stderr unless logging is set up
    otherwise.
    """

    def __init__(self) -> None:
        self.compiled = 0
        """How many functions were compiled rather than loaded."""
        self._seconds = 0.0  # of the compilations that ended
        self._depth = 0  # compiling a kernel compiles the functions that it calls
        self._began = 0.0  # when the outermost compilation began
        self._said = False

    def on_start(self, event: Any) -> None:
        """A compilation begins; numba holds its lock until the end, so there is one thread."""
        if _is_kernel(event):
            self._depth += 1
            if self._depth == 1:
                self._began = time.perf_counter()
            self._say_if_long()

    def on_end(self, event: Any) -> None:
        """It ended, well or not."""
        if _is_kernel(event):
            self._say_if_long()
            self._depth, self.compiled = self._depth - 1, self.compiled + 1
            if self._depth == 0:
                self._seconds += time.perf_counter() - self._began

    def _say_if_long(self) -> None:
        if not self._said and self._seconds + time.perf_counter() - self._began > LONG:
            self._said = True
            logging.getLogger("relive.compile").warning(COMPILING)


def _is_kernel(event: Any) -> bool:
    """True if an event is about a function of ours, and not one that the user compiles with numba."""
    return event.data["dispatcher"].py_func.__module__.startswith("relive.")


PROGRESS = Progress()
cast("Any", event).register("numba:compile", PROGRESS)


def load_target() -> None:
    """Let numba load the types and functions that it knows, which the first kernel would do otherwise.

    As numba does, this takes its lock: two threads that load at once would fail, or compile with half of the types.
    """
    with cast("Any", compiler_lock).global_compiler_lock:
        cast("Any", registry).cpu_target.target_context.refresh()


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
        """The compiled function, or None; files that cannot be read are thrown away."""
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
    # made first and checked after: a check before would leave time for somebody else to make it
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # a link would be followed to wherever its owner wants
    if not stat.S_ISDIR(found.st_mode) or (user is not None and (found.st_uid != user or found.st_mode & 0o077)):
        raise RuntimeError(f"'{folder}' is not a directory of yours alone")
    return folder


@cache
def warn_once(message: str) -> None:
    """Tell the user something that holds for all kernels."""
    warnings.warn(f"relive: {message}", RuntimeWarning, stacklevel=2)


F = TypeVar("F", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Addresses = NDArray[np.uint64]

f32 = np.float32
address_t = np.uintp
LINE, LINES = 64, 4
"""Bytes of a cache line, and how many are copied in one turn of a loop."""

_carray: Any = cast("Any", numba).carray
_arrays: Any = arrayobj
_ir: Any = cast("Any", cgutils).ir


def jit(function: F, **options: Any) -> F:
    """Compile on first call, with a cache on disk."""
    compiled: Any = cast("Any", numba).njit(**{"error_model": "numpy", "nogil": True} | options)(function)
    try:
        compiled._cache = KernelCache(function)
    except (RuntimeError, OSError):
        warn_once("numba finds no directory that it may write to and that is yours alone: kernels are compiled again "
                  "in every process")  # fmt: skip
    return cast("F", compiled)


def inlined(function: F) -> F:
    """Compile a part of a hot loop: it becomes a piece of its caller, never a call."""
    return jit(function, forceinline=True)


def cache_folder() -> str | None:
    """The folder of compiled kernels, or None if they are not kept."""
    return cast("Any", mix)._cache.cache_path


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


@intrinsic
def strided(_context: Any, address: Any, count: Any, stride: Any, like: Any) -> Any:
    """``count`` elements of the dtype ``like``, the first at an address, each ``stride`` elements after the last.

    A slice of contiguous memory would be the same, but takes sixty instructions, and code that is not in the caches
    costs more than what it does.
    """
    array = types.Array(like.dtype, 1, "A")

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        made, element = _arrays.make_array(array)(context, builder), context.get_data_type(like.dtype)
        size = context.get_constant(types.intp, context.get_abi_sizeof(element))
        _arrays.populate_array(
            made, builder.inttoptr(args[0], element.as_pointer()), [args[1]], [builder.mul(args[2], size)], size, None
        )
        return made._getvalue()

    return array(types.intp, types.intp, types.intp, like), codegen


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
def fill(_context: Any, target: Any, value: Any, nbytes: Any) -> Any:
    """Set bytes at an address to one value."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, value, nbytes = args
        cgutils.memset(builder, builder.inttoptr(target, cgutils.voidptr_t), nbytes, value)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uint8, types.intp), codegen


@intrinsic
def copy_short(_context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy a multiple of 16 bytes, 16 at a time: for some hundred bytes, quicker than the call of :func:`memcpy`."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        piece, number = _ir.VectorType(_ir.IntType(64), 2), _ir.IntType(64)
        pieces = cast("Any", cgutils).for_range_slice(builder, number(0), args[2], number(16), intp=number)
        with pieces as (offset, _):
            here, there = (builder.inttoptr(builder.add(x, offset), piece.as_pointer()) for x in (args[1], args[0]))
            # align=1: rows begin at any byte of memory that is not ours
            builder.store(builder.load(here, align=1), there, align=1)
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
            # align=64: a nontemporal store of another alignment is split, or faults
            stored = builder.store(builder.load(here, align=1), there, align=64)
            stored.set_metadata("nontemporal", past)
        builder.fence("seq_cst")  # what comes after may be read by another thread
        return _context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), codegen


@intrinsic
def copy_ahead(_context: Any, target: Any, source: Any, nbytes: Any, ahead: Any) -> Any:
    """Copy bytes, and meanwhile start to load as many at the address ``ahead``, which need not exist."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number, size, (target, source, nbytes, ahead) = _ir.IntType(64), LINES * LINE, args
        line = _ir.VectorType(number, LINE // 8).as_pointer()
        # -size has all bits set above those of the remainder, as size is a power of two
        whole = builder.and_(nbytes, number(-size))
        with cast("Any", cgutils).for_range_slice(builder, number(0), whole, number(size), intp=number) as (k, _):
            places = [builder.add(k, number(LINE * i)) for i in range(LINES)]
            coming, here, there = ([builder.add(x, place) for place in places] for x in (ahead, source, target))
            for address in coming:
                _prefetch(builder, builder.inttoptr(address, cgutils.voidptr_t), NEAR)
            loaded = [builder.load(builder.inttoptr(address, line), align=1) for address in here]
            for value, address in zip(loaded, there, strict=True):
                builder.store(value, builder.inttoptr(address, line), align=1)
        # the rest, fewer than ``size`` bytes
        to, from_ = (builder.inttoptr(builder.add(address, whole), cgutils.voidptr_t) for address in (target, source))
        cgutils.raw_memcpy(builder, to, from_, builder.sub(nbytes, whole), 1)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp, types.uintp), codegen


@intrinsic
def fence(_context: Any) -> Any:
    """Order stores: the compiler moves none across this, in either direction.

    The processor needs no order here. A thread's stores reach memory as if in the order of its program, and after a
    kill nobody looks before all of them are there.
    """

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst", "singlethread")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def prefetch(_context: Any, array: Any, place: Any) -> Any:
    """Start to load the cache line of an element, which need not exist."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        _prefetch(builder, builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t), ALL)
        return context.get_dummy_value()

    return types.void(array, place), codegen


ALL, NEAR = 3, 2
"""Into which caches something is loaded: all of them, or all but the first."""


def _prefetch(builder: Any, address: Any, caches: int) -> None:
    number = cgutils.int32_t
    kind = _ir.FunctionType(_ir.VoidType(), [cgutils.voidptr_t, number, number, number])
    prefetch = cast("Any", cgutils).get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(prefetch, [address, number(0), number(caches), number(1)])  # to read, data


@jit
def fetch(memory: Any, start: int, nbytes: int) -> None:
    """Ask for the cache lines of ``nbytes`` bytes of packed rows; past their end that does no harm."""
    # from the start of the first line, so that the last one is not left out
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
    # below 2**52 a float64 holds number exactly, and the product is off by less than one
    rest = number - np.int64(np.float64(number) * inverse) * size
    if rest < 0:  # the quotient is off by one at most
        return rest + size
    return rest - size if rest >= size else rest


Ints = NDArray[np.int64]

ENTRIES = 3
"""Numbers in a handle for each member: of an array its address, its length and the elements from one item to the next
(a matrix: in a row); of an int the int itself and two that mean nothing."""


def handle_of(members: Any) -> Ints:
    """The handle of a NamedTuple of ints and arrays, each a contiguous matrix or a vector of any stride."""
    entries = list[int]()
    for member in members:
        if isinstance(member, int):
            entries += member, 0, 0
        else:
            # elements, not bytes: a stride that is no multiple of the itemsize would be cut, and no ring has one
            apart = member.shape[1] if member.ndim == 2 else member.strides[0] // member.itemsize
            entries += member.ctypes.data, len(member), apart
    return np.array(entries, np.int64)


@inlined
def vector_of(handle: Ints, member: int, like: Any) -> Any:
    """A contiguous vector of a handle, with elements of the dtype ``like``."""
    return addressed(handle[ENTRIES * member], handle[ENTRIES * member + 1], like)


@inlined
def matrix_of(handle: Ints, member: int, like: Any) -> Any:
    """A contiguous matrix of a handle."""
    shape = handle[ENTRIES * member + 1], handle[ENTRIES * member + 2]
    return addressed(handle[ENTRIES * member], shape, like)


@inlined
def column_of(handle: Ints, member: int, like: Any) -> Any:
    """A vector of a handle whose elements may lie apart."""
    address, count, stride = handle[ENTRIES * member], handle[ENTRIES * member + 1], handle[ENTRIES * member + 2]
    return strided(address, count, stride, like)


@inlined
def open_ring(handle: Ints) -> RingArrays:
    """The arrays of a ring; the numbers are the positions of :class:`RingArrays`'s members."""
    return RingArrays(
        handle[0],
        handle[ENTRIES],
        handle[2 * ENTRIES],
        matrix_of(handle, 3, np.int64),
        vector_of(handle, 4, np.int64),
        matrix_of(handle, 5, np.uint8),
        column_of(handle, 6, np.int32),
        column_of(handle, 7, np.int64),
        column_of(handle, 8, np.int32),
        column_of(handle, 9, np.float32),
        column_of(handle, 10, np.uint8),
        column_of(handle, 11, np.uint8),
        vector_of(handle, 12, np.int32),
        vector_of(handle, 13, np.int64),
        vector_of(handle, 14, np.int64),
        vector_of(handle, 15, np.int64),
    )


@inlined
def open_staged(handle: Ints) -> StagedRows:
    """The arrays of rows that are added; the numbers are the positions of :class:`StagedRows`'s members."""
    return StagedRows(
        vector_of(handle, 0, np.int64),
        matrix_of(handle, 1, np.uint8),
        matrix_of(handle, 2, np.uint8),
        column_of(handle, 3, np.float32),
        column_of(handle, 4, np.uint8),
        column_of(handle, 5, np.uint8),
        vector_of(handle, 6, np.int64),
        vector_of(handle, 7, np.int64),
        vector_of(handle, 8, np.int64),
        vector_of(handle, 9, np.int64),
        vector_of(handle, 10, np.uint8),
    )
