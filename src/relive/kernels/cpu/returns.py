"""Returns and advantages for contiguous float32 tensors: the names of ``reference/returns.py`` and, to the bit, its
results.

First vectors of eight numbers for numba, then the estimators. Each estimator is one pass from the last step to the
first, eight envs at a time. Arrays go in by
address, in one array of integers: wrapping eight tensors would cost more than the work on a small rollout.

``i`` is a flat place: step t of env n is i = t * envs + n, and i + envs is the step after it. Addresses are bytes:
a float32 lies at 4 * i, a flag at i. All fit in int64, since a process has fewer than 2 ** 63 bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numba import extending, types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numpy.typing import NDArray
from torch import Tensor

from ..reference.returns import Grid, refuse_missing
from .jit import f32, inlined, intrinsic, jit

__all__ = [
    "LANES",
    "PLACES",
    "SPOILT",
    "choose",
    "discounted_return",
    "fill_gae",
    "gae",
    "is_nan",
    "load",
    "load_marks",
    "some",
    "splat",
    "store",
    "vtrace",
    "within",
]


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
    """One number in all lanes."""

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
    """True if any lane is marked."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = _ir.IntType(LANES)
        return builder.icmp_unsigned("!=", builder.bitcast(args[0], bits), bits(0))

    return types.boolean(marks_t), codegen


@intrinsic
def is_nan(_context: Any, values: Any) -> Any:
    """True in the lanes whose number is NaN."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fcmp_unordered("uno", args[0], args[0])

    return marks_t(lanes_t), codegen


Ints = NDArray[np.int64]
Floats8 = Any
Flags8 = Any

NARROW = 2 * LANES
"""With at most this many envs, a pass follows eight envs through all of time: what one step passes to the next stays in
a register. With more, it takes row after row, as the processor loads ahead best what follows in memory."""


SPOILT = -2
"""Returned by :func:`fill_gae` if it has written an advantage that is not finite."""


class Places(NamedTuple):
    """Where the numbers of a rollout lie: addresses of contiguous arrays, 0 for one that is not there."""

    envs: int
    """N."""
    size: int
    """T * N."""
    reward: int
    value: int
    """``[T + 1, N]``; all others are ``[T, N]``."""
    terminated: int
    truncated: int
    final_value: int
    mask: int
    ratio: int
    """Of V-trace: π/μ, the ratio of the two policies' probabilities; overwritten by vs - v."""
    advantage: int
    ret: int


PLACES = Places._fields
"""The names of the numbers in the array that :func:`fill_gae` takes."""


def gae(grid: Grid, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.returns.gae`."""
    advantage, ret = torch.empty_like(grid.reward), torch.empty_like(grid.reward)
    refuse_missing(
        fill_gae(_places(grid, advantage=advantage, ret=ret), float(gamma), float(lam)), grid.reward.shape[1]
    )
    return advantage, ret


def discounted_return(grid: Grid, gamma: float) -> Tensor:
    """See :func:`relive.kernels.reference.returns.discounted_return`."""
    ret = torch.empty_like(grid.reward)
    if grid.value is None:
        grid = grid._replace(final_value=None)
    refuse_missing(_fill_returns(_places(grid, ret=ret), float(gamma)), grid.reward.shape[1])
    return ret


def vtrace(
    log_rho: Tensor, grid: Grid, gamma: float, lam: float, rho_clip: float, c_clip: float
) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.returns.vtrace`."""
    advantage, ret = torch.empty_like(grid.reward), torch.empty_like(grid.reward)
    ratio = log_rho.exp()  # both twins call torch's exp, so they agree to the bit
    places = _places(grid, ratio=ratio, advantage=advantage, ret=ret)
    refuse_missing(_fill_vtrace(places, *map(float, (gamma, lam, rho_clip, c_clip))), grid.reward.shape[1])
    return advantage, ret


def _places(grid: Grid, **more: Tensor) -> Ints:
    """The tensors of a grid, and those to write, as :class:`Places` has them."""
    tensors: dict[str, Any] = grid._asdict() | more
    # the grid holds its tensors while the kernel runs
    addresses = [0 if x is None else x.data_ptr() for x in map(tensors.get, PLACES[2:])]
    return np.array([grid.reward.shape[1], grid.reward.numel(), *addresses], np.int64)


@inlined
def _read(places: Ints) -> Places:
    return Places(
        places[0], places[1], places[2], places[3], places[4], places[5], places[6], places[7], places[8], places[9],
        places[10],
    )  # fmt: skip


@jit
def fill_gae(places: Ints, gamma: float, lam: float) -> int:
    """Write ``advantage`` and ``ret`` of :func:`gae` in place.

    Args:
        places: the numbers of :class:`Places`, in their order.
        gamma: discount per step.
        lam: λ.

    Returns:
        -1; or SPOILT; or the first flat place that was truncated and lacks its final value: then nothing is written.
    """
    p = _read(places)
    missing = _first_missing(p)
    if missing >= 0:
        return missing
    g, decay = splat(f32(gamma)), splat(f32(gamma * lam))
    zeros = splat(f32(0))  # NaN from the first advantage on that is not finite, as 0 times it is NaN
    if p.envs <= NARROW:
        for env in range(0, p.envs, LANES):
            zeros = zeros + _gae_through_time(p, env, g, decay, within(p.envs - env))
        return SPOILT if some(is_nan(zeros)) else -1
    # the others go in one vector with some lanes masked off
    whole = p.envs // LANES * LANES  # the envs that fill vectors
    # row t needs the advantages of row t + 1, so time runs backwards
    for start in range(p.size - p.envs, -1, -p.envs):  # where each row begins, the last one first
        for i in range(start, start + whole, LANES):
            zeros = zeros + _gae_at(p, i, g, decay, within(LANES))
        if whole < p.envs:
            zeros = zeros + _gae_at(p, start + whole, g, decay, within(p.envs - whole))
    return SPOILT if some(is_nan(zeros)) else -1


@inlined
def _gae_through_time(p: Places, env: int, g: Floats8, decay: Floats8, inside: Flags8) -> Floats8:
    """All steps of up to eight envs; the advantage and the value of the step after stay in registers.

    Returns the sum of 0 times each advantage.
    """
    # the bootstrap row: row T of ``value``, which no other column has
    i, zero = p.size + env, splat(f32(0))
    advantage, zeros, following = zero, zero, load(p.value + 4 * i, inside)
    while i >= p.envs:
        i -= p.envs
        v = load(p.value + 4 * i, inside)
        advantage = _gae_step(p, i, v, g, decay, advantage, following, inside)
        following = v
        zeros = zeros + zero * advantage
        store(p.advantage + 4 * i, advantage, inside)
        store(p.ret + 4 * i, advantage + v, inside)
    return zeros


@inlined
def _gae_at(p: Places, i: int, g: Floats8, decay: Floats8, inside: Flags8) -> Floats8:
    """One step of up to eight envs; the advantage of the step after is read from memory. Returns 0 times its own."""
    after, v = i + p.envs, load(p.value + 4 * i, inside)
    # the last row has no step after it, only a value
    carry = load(p.advantage + 4 * after, inside) if after < p.size else splat(f32(0))
    advantage = _gae_step(p, i, v, g, decay, carry, load(p.value + 4 * after, inside), inside)
    store(p.advantage + 4 * i, advantage, inside)
    store(p.ret + 4 * i, advantage + v, inside)
    return splat(f32(0)) * advantage


@inlined
def _gae_step(
    p: Places, i: int, v: Floats8, g: Floats8, decay: Floats8, carry: Floats8, following: Floats8, inside: Flags8
) -> Floats8:
    """δₜ + γλ(1 - doneₜ)Âₜ₊₁; ``carry`` is Âₜ₊₁, ``v`` and ``following`` the values before and after the step."""
    terminated, truncated = load_marks(p.terminated + i, inside), load_marks(p.truncated + i, inside)
    gain = load(p.reward + 4 * i, inside) - v
    delta = gain + _valued(p, i, g, following, terminated, truncated, inside)
    advantage = delta + _passed_on(terminated | truncated, decay, carry)
    return choose(_is_real(p, i, inside), advantage, splat(f32(0)))


@jit
def _fill_returns(places: Ints, gamma: float) -> int:
    """Write ``ret`` of :func:`discounted_return`; returns what :func:`fill_gae` does."""
    p = _read(places)
    missing = _first_missing(p) if p.value else -1
    if missing >= 0:
        return missing
    g = splat(f32(gamma))
    for start in range(p.size - p.envs, -1, -p.envs):
        for i in range(start, start + p.envs, LANES):
            _return_at(p, i, g, within(start + p.envs - i))
    return -1


@inlined
def _return_at(p: Places, i: int, g: Floats8, inside: Flags8) -> None:
    """rₜ + γGₜ₊₁, where an end that was cut goes on with its final value, and the last row with the bootstrap."""
    after = i + p.envs
    following, v = splat(f32(0)), splat(f32(0))
    if after < p.size:
        following = load(p.ret + 4 * after, inside)
    elif p.value:
        following = load(p.value + 4 * after, inside)
    if p.value:
        v = load(p.value + 4 * i, inside)
    terminated, truncated = load_marks(p.terminated + i, inside), load_marks(p.truncated + i, inside)
    term = load(p.reward + 4 * i, inside)
    # a step that terminated and was truncated counts as terminated
    if p.final_value and some(truncated):
        term = choose(truncated & ~terminated, term + g * load(p.final_value + 4 * i, inside), term)
    ret = term + _passed_on(terminated | truncated, g, following)
    store(p.ret + 4 * i, choose(_is_real(p, i, inside), ret, v), inside)


@jit
def _fill_vtrace(places: Ints, gamma: float, lam: float, rho_clip: float, c_clip: float) -> int:
    """Write ``advantage`` and ``ret`` of :func:`vtrace`; returns what :func:`fill_gae` does."""
    p = _read(places)
    missing = _first_missing(p)
    if missing >= 0:
        return missing
    g, factor, most_rho, most_c = splat(f32(gamma)), splat(f32(lam)), splat(f32(rho_clip)), splat(f32(c_clip))
    for start in range(p.size - p.envs, -1, -p.envs):
        for i in range(start, start + p.envs, LANES):
            _vtrace_at(p, i, g, factor, most_rho, most_c, within(start + p.envs - i))
    return -1


@inlined
def _vtrace_at(p: Places, i: int, g: Floats8, lam: Floats8, most_rho: Floats8, most_c: Floats8, inside: Flags8) -> None:
    """One step of up to eight envs; its ratio makes room for vs - v, which the step before needs."""
    after, zero = i + p.envs, splat(f32(0))
    ratio, v, following = (
        load(p.ratio + 4 * i, inside),
        load(p.value + 4 * i, inside),
        load(p.value + 4 * after, inside),
    )
    rho = choose(ratio > most_rho, most_rho, ratio)  # NaN stays NaN, as torch's clamp has it
    c = lam * choose(ratio > most_c, most_c, ratio)
    carry, target = zero, following
    if after < p.size:
        carry, target = load(p.ratio + 4 * after, inside), load(p.ret + 4 * after, inside)
    terminated, truncated = load_marks(p.terminated + i, inside), load_marks(p.truncated + i, inside)
    real, gain = _is_real(p, i, inside), load(p.reward + 4 * i, inside) - v
    delta = gain + _valued(p, i, g, following, terminated, truncated, inside)
    correction = rho * delta + _passed_on(terminated | truncated, g * c, carry)
    # a masked row is worth its own value: vs - v is 0
    correction = choose(real, correction, zero)
    advantage = rho * (gain + _valued(p, i, g, target, terminated, truncated, inside))
    store(p.ratio + 4 * i, correction, inside)
    store(p.ret + 4 * i, correction + v, inside)
    store(p.advantage + 4 * i, choose(real, advantage, zero), inside)


@inlined
def _valued(
    p: Places, i: int, g: Floats8, following: Floats8, terminated: Flags8, truncated: Flags8, inside: Flags8
) -> Floats8:
    """γ times the value after the step: 0 after a terminal, the final value after a truncation."""
    if some(truncated):  # rare: final values are read nowhere else
        if p.final_value:
            following = choose(truncated, load(p.final_value + 4 * i, inside), following)
        else:
            terminated = terminated | truncated
    return choose(terminated, splat(f32(0)), g * following)


@inlined
def _passed_on(done: Flags8, trace: Floats8, carry: Floats8) -> Floats8:
    """trace * carry; 0 where the episode is done or the trace is 0, even if ``carry`` is not finite."""
    zero = splat(f32(0))
    return choose(done | (trace == zero), zero, trace * carry)


@inlined
def _is_real(p: Places, i: int, inside: Flags8) -> Flags8:
    return load_marks(p.mask + i, inside) if p.mask else inside


@inlined
def _first_missing(p: Places) -> int:
    """The first real step that was truncated, not terminated, and lacks its final value; or -1."""
    # places, not envs: rows are contiguous, so vectors may run across them
    whole = p.size // LANES * LANES
    for i in range(0, whole, LANES):
        if _some_missing(p, i, within(LANES)):
            return _missing_from(p, i)
    return _missing_from(p, whole) if _some_missing(p, whole, within(p.size - whole)) else -1


@inlined
def _some_missing(p: Places, i: int, inside: Flags8) -> bool:
    missing = load_marks(p.truncated + i, inside)
    if not some(missing):
        return False
    missing = missing & ~load_marks(p.terminated + i, inside)
    missing = missing & _is_real(p, i, inside)
    if p.final_value:
        missing = missing & is_nan(load(p.final_value + 4 * i, missing))
    return some(missing)


@jit
def _missing_from(p: Places, i: int) -> int:
    """The first place from ``i`` on that lacks its final value; there is one."""
    while not _some_missing(p, i, within(1)):
        i += 1
    return i
