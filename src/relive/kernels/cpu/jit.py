"""What all numba kernels share: how they are compiled, memory by address, and the counter-based generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.np import arrayobj
from numpy.typing import NDArray

from .cache import KernelCache, warn_once

__all__ = [
    "LINE",
    "Addresses",
    "Bytes",
    "Floats",
    "address_t",
    "addressed",
    "cache_folder",
    "copy_ahead",
    "copy_short",
    "f32",
    "fence",
    "fetch",
    "fill",
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
    "strided",
]

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
    """As :func:`jit`, for a part of a hot loop: it becomes a piece of its caller, never a call."""
    return jit(function, forceinline=True)


def cache_folder() -> str | None:
    """Where compiled kernels are kept, or None if they are not."""
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
        whole = builder.and_(nbytes, number(-size))
        with cast("Any", cgutils).for_range_slice(builder, number(0), whole, number(size), intp=number) as (k, _):
            places = [builder.add(k, number(LINE * i)) for i in range(LINES)]
            coming, here, there = ([builder.add(x, place) for place in places] for x in (ahead, source, target))
            for address in coming:
                _prefetch(builder, builder.inttoptr(address, cgutils.voidptr_t), NEAR)
            loaded = [builder.load(builder.inttoptr(address, line), align=1) for address in here]
            for value, address in zip(loaded, there, strict=True):
                builder.store(value, builder.inttoptr(address, line), align=1)
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
