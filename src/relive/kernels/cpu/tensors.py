"""Calls from compiled code to the C functions of torch that :mod:`relive.kernels.tensor_calls` finds.

The caller holds the GIL: it is compiled with ``nogil=False``.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.core import cgutils

from ..tensor_calls import CPU, DESCRIBED
from .jit import addressed, inlined, intrinsic

__all__ = ["adopt", "describe", "is_true", "lend", "numbers_of", "release_gil", "take_gil"]

_cgutils: Any = cast("Any", cgutils)
_ir: Any = _cgutils.ir
_word, _pointer = _ir.IntType(64), _cgutils.voidptr_t


@intrinsic
def describe(_context: Any, function: Any, tensor: Any) -> Any:
    """Whether ``function`` failed (1) or not (0), and the words of the DLTensor that it wrote for a tensor."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out = _cgutils.alloca_once(builder, _ir.ArrayType(_word, DESCRIBED))
        answer = _call(builder, _ir.IntType(32), args, builder.bitcast(out, _pointer))
        failed = builder.icmp_signed("!=", answer, answer.type(0))
        with _cgutils.if_unlikely(builder, failed):
            context.get_python_api(builder).err_clear()
        described = builder.load(out)
        words = [builder.extract_value(described, k) for k in range(DESCRIBED)]
        return _cgutils.pack_array(builder, [builder.zext(failed, _word), *words])

    return types.UniTuple(types.int64, 1 + DESCRIBED)(types.int64, types.int64), codegen


@inlined
def numbers_of(describing: int, tensor: int) -> Any:
    """The address of a tensor's numbers, 0 if they are not in RAM; their dtype, and two arrays: sizes and strides."""
    failed, data, device, axes, sizes, strides, offset = describe(describing, tensor)
    known = not failed and data != 0 and device == CPU and offset == 0  # a FakeTensor says: in RAM, at the address 0
    count = axes & 0xFFFFFFFF if known else 0
    shape, apart = addressed(sizes, count, np.int64), addressed(strides, count, np.int64)
    return data if known else 0, axes >> 32, shape, apart


@intrinsic
def is_true(_context: Any, method: Any, thing: Any) -> Any:
    """Whether a C method without arguments answers True for an object; what it raises goes to the caller in Python."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        api = context.get_python_api(builder)
        answer = _call(builder, _pointer, args, _pointer(None))
        with _cgutils.if_unlikely(builder, _cgutils.is_null(builder, answer)):
            context.call_conv.return_exc(builder)
        truth = api.object_istrue(answer)
        api.decref(answer)
        with _cgutils.if_unlikely(builder, builder.icmp_signed("<", truth, truth.type(0))):
            context.call_conv.return_exc(builder)
        return builder.icmp_signed("!=", truth, truth.type(0))

    return types.boolean(types.int64, types.int64), codegen


@intrinsic
def lend(_context: Any, function: Any, tensor: Any) -> Any:
    """The address of the loan of a tensor; what torch raises goes to the caller in Python."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out = _cgutils.alloca_once(builder, _word)
        failed = _call(builder, _ir.IntType(32), args, builder.bitcast(out, _pointer))
        with _cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, failed.type(0))):
            context.call_conv.return_exc(builder)
        return builder.load(out)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def adopt(_context: Any, function: Any, loan: Any, found: Any, key: Any) -> Any:
    """Put the tensor that a loan describes into the dict at the address ``found``, under the object at ``key``."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        api, out = context.get_python_api(builder), _cgutils.alloca_once_value(builder, _pointer(None))
        failed = _call(builder, _ir.IntType(32), args, builder.bitcast(out, _pointer))
        with _cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, failed.type(0))):
            context.call_conv.return_exc(builder)
        tensor = builder.load(out)
        failed = api.dict_setitem(*(builder.inttoptr(arg, _pointer) for arg in args[2:]), tensor)
        api.decref(tensor)
        with _cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, failed.type(0))):
            context.call_conv.return_exc(builder)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def release_gil(_context: Any) -> Any:
    """Let other threads of Python run until :func:`take_gil`, which gets the answer. Nothing may raise in between."""

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        return builder.ptrtoint(context.get_python_api(builder).save_thread(), _word)

    return types.int64(), codegen


@intrinsic
def take_gil(_context: Any, thread: Any) -> Any:
    """Wait until no other thread of Python runs, and keep it so."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        context.get_python_api(builder).restore_thread(builder.inttoptr(args[0], _pointer))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _call(builder: Any, result: Any, args: Any, second: Any) -> Any:
    """Call the C function at the address ``args[0]`` with the object at ``args[1]`` and another pointer."""
    kind = _ir.FunctionType(result, [_pointer, _pointer])
    return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.inttoptr(args[1], _pointer), second])
