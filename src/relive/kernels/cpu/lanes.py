"""Lanes: eight float32 numbers of neighbouring envs in one vector register, for loops that LLVM does not vectorize.

A recursion over time that reads seven arrays and writes two is too much for LLVM's alias checks. With vectors as
values of their own, the loop is written once, in plain numba, and no check is needed. Memory goes in by address.

All arithmetic is IEEE float32, lane by lane, without fused multiply-add: results equal torch's to the bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

from numba import extending, types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel

from .jit import intrinsic

__all__ = ["LANES", "choose", "is_nan", "load", "load_marks", "some", "splat", "store", "within"]

LANES = 8
"""How many envs a vector holds."""

_extending: Any = extending
_ir: Any = cast("Any", cgutils).ir
_FLOATS = _ir.VectorType(_ir.FloatType(), LANES)
_MARKS = _ir.VectorType(_ir.IntType(1), LANES)
_BYTES = _ir.VectorType(_ir.IntType(8), LANES)


class Lanes(types.Type):
    """Eight float32 numbers."""

    def __init__(self) -> None:
        super().__init__("Lanes")


class Marks(types.Type):
    """Eight truth values."""

    def __init__(self) -> None:
        super().__init__("Marks")


lanes_t, marks_t = Lanes(), Marks()


@_extending.register_model(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _FLOATS)


@_extending.register_model(Marks)
class _MarksModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _MARKS)


def _operation(python: Any, given: Any, result: Any, build: Callable[[Any, Any], Any]) -> None:
    """Teach numba what an operator does with vectors: one instruction of LLVM."""

    def typer(_context: Any) -> Any:
        def typed(*kinds: Any) -> Any:
            return result if kinds == given else None

        return typed

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return build(builder, args)

    _extending.type_callable(python)(typer)
    _extending.lower_builtin(python, *given)(lower)


_TWO, _BOTH = (lanes_t, lanes_t), (marks_t, marks_t)
_operation(operator.add, _TWO, lanes_t, lambda builder, x: builder.fadd(*x))
_operation(operator.sub, _TWO, lanes_t, lambda builder, x: builder.fsub(*x))
_operation(operator.mul, _TWO, lanes_t, lambda builder, x: builder.fmul(*x))
_operation(operator.gt, _TWO, marks_t, lambda builder, x: builder.fcmp_ordered(">", *x))
_operation(operator.eq, _TWO, marks_t, lambda builder, x: builder.fcmp_ordered("==", *x))
_operation(operator.or_, _BOTH, marks_t, lambda builder, x: builder.or_(*x))
_operation(operator.and_, _BOTH, marks_t, lambda builder, x: builder.and_(*x))
_operation(operator.invert, (marks_t,), marks_t, lambda builder, x: builder.not_(*x))


def _masked(builder: Any, action: str, args: Any, result: Any, suffix: str) -> Any:
    """Call llvm.masked.load or llvm.masked.store: lanes that are not marked touch no memory."""
    function: Any = _ir.FunctionType(result, [arg.type for arg in args])
    name = f"llvm.masked.{action}.v{LANES}{suffix}.p0v{LANES}{suffix}"
    declared: Any = cast("Any", cgutils).get_or_insert_function(builder.module, function, name)
    return builder.call(declared, args)


def _load(builder: Any, address: Any, marks: Any, kind: Any, suffix: str) -> Any:
    pointer, one = builder.inttoptr(address, kind.as_pointer()), _ir.Constant(_ir.IntType(32), 1)
    return _masked(builder, "load", [pointer, one, marks, _ir.Constant(kind, None)], kind, suffix)


@intrinsic
def load(_context: Any, address: Any, inside: Any) -> Any:
    """The float32 numbers at an address; 0 in lanes that are not ``inside``, where no memory is read."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _load(builder, args[0], args[1], _FLOATS, "f32")

    return lanes_t(types.intp, marks_t), codegen


@intrinsic
def load_marks(_context: Any, address: Any, inside: Any) -> Any:
    """The bools at an address, one byte each; False in lanes that are not ``inside``, where no memory is read."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.icmp_unsigned("!=", _load(builder, args[0], args[1], _BYTES, "i8"), _ir.Constant(_BYTES, None))

    return marks_t(types.intp, marks_t), codegen


@intrinsic
def store(_context: Any, address: Any, values: Any, inside: Any) -> Any:
    """Write float32 numbers to an address, in the lanes ``inside`` alone."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer, one = builder.inttoptr(args[0], _FLOATS.as_pointer()), _ir.Constant(_ir.IntType(32), 1)
        _masked(builder, "store", [args[1], pointer, one, args[2]], _ir.VoidType(), "f32")
        return context.get_dummy_value()

    return types.void(types.intp, lanes_t, marks_t), codegen


@intrinsic
def splat(_context: Any, number: Any) -> Any:
    """The same number in all lanes."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return _repeated(builder, args[0], _FLOATS)

    return lanes_t(types.float32), codegen


def _repeated(builder: Any, value: Any, kind: Any) -> Any:
    first = builder.insert_element(_ir.Constant(kind, _ir.Undefined), value, _ir.Constant(_ir.IntType(32), 0))
    zeros = _ir.Constant(_ir.VectorType(_ir.IntType(32), LANES), None)
    return builder.shuffle_vector(first, _ir.Constant(kind, _ir.Undefined), zeros)


@intrinsic
def within(_context: Any, count: Any) -> Any:
    """True in the first ``count`` lanes."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        numbers = _ir.VectorType(_ir.IntType(64), LANES)
        places = _ir.Constant(numbers, [_ir.Constant(_ir.IntType(64), i) for i in range(LANES)])
        return builder.icmp_signed("<", places, _repeated(builder, args[0], numbers))

    return marks_t(types.intp), codegen


@intrinsic
def choose(_context: Any, marks: Any, yes: Any, no: Any) -> Any:
    """``yes`` in lanes that are marked, ``no`` in the others."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(*args)

    return lanes_t(marks_t, lanes_t, lanes_t), codegen


@intrinsic
def some(_context: Any, marks: Any) -> Any:
    """Whether any lane is marked."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = _ir.IntType(LANES)
        return builder.icmp_unsigned("!=", builder.bitcast(args[0], bits), bits(0))

    return types.boolean(marks_t), codegen


@intrinsic
def is_nan(_context: Any, values: Any) -> Any:
    """Which numbers are NaN."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fcmp_unordered("uno", args[0], args[0])

    return marks_t(lanes_t), codegen
