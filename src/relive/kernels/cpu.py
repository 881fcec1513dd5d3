"""The hot loops in numba, for contiguous float32 tensors on the CPU: reference.py's names and, to the bit, results.

All arrays are flat: row t + 1 lies n further on. A loop over flat, unsigned positions is one that LLVM vectorizes
for any T and N, which it does not for 2-D indices. Each estimator is passes that prepare ``term`` and ``trace``, a
sparse one over the few masked steps, and the one recursion of :func:`_scan`.

Arrays go in by address: wrapping seven tensors as NumPy arrays costs 4 us a call, as much as the work on 8 envs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from .reference import refuse_missing

__all__ = ["copy_row", "discounted_return", "gae", "permutation", "vtrace"]

F = TypeVar("F", bound=Callable[..., Any])
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Addresses = NDArray[np.uint64]


def _jit(function: F) -> F:
    return cast("Any", numba).njit(cache=True, error_model="numpy", nogil=True)(function)


def _intrinsic(function: Callable[..., Any]) -> Any:
    return cast("Any", intrinsic)(function)


_f = np.float32
_u = np.uintp
_ALL_TRUE = np.uint64(0x0101010101010101)


def gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    mask: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.gae`."""
    advantage, ret = torch.empty_like(reward), torch.empty_like(reward)
    missing = _gae(
        reward.shape[1],
        reward.numel(),
        reward.data_ptr(),
        value.data_ptr(),
        terminated.data_ptr(),
        truncated.data_ptr(),
        0 if final_value is None else final_value.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        gamma,
        lam,
        advantage.data_ptr(),
        ret.data_ptr(),
    )
    refuse_missing(missing, reward)
    return advantage, ret


def discounted_return(
    reward: Tensor,
    value: Tensor | None,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    mask: Tensor | None,
    gamma: float,
) -> Tensor:
    """See :func:`relive.kernels.reference.discounted_return`."""
    ret = torch.empty_like(reward)
    missing = _discounted_return(
        reward.shape[1],
        reward.numel(),
        reward.data_ptr(),
        0 if value is None else value.data_ptr(),
        terminated.data_ptr(),
        truncated.data_ptr(),
        0 if final_value is None or value is None else final_value.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        gamma,
        ret.data_ptr(),
    )
    refuse_missing(missing, reward)
    return ret


def vtrace(
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor | None,
    mask: Tensor | None,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.vtrace`."""
    advantage, ret = torch.empty_like(reward), torch.empty_like(reward)
    ratio = log_rho.exp()  # torch's exp is vectorized, and so both twins share it to the bit
    missing = _vtrace(
        reward.shape[1],
        reward.numel(),
        ratio.data_ptr(),
        reward.data_ptr(),
        value.data_ptr(),
        terminated.data_ptr(),
        truncated.data_ptr(),
        0 if final_value is None else final_value.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        gamma,
        lam,
        rho_clip,
        c_clip,
        advantage.data_ptr(),
        ret.data_ptr(),
    )
    refuse_missing(missing, reward)
    return advantage, ret


def permutation(n: int, seed: int, counter: int) -> Tensor:
    """See :func:`relive.kernels.reference.permutation`."""
    order = torch.empty(n, dtype=torch.int64)
    _permutation(np.uint64(seed), np.uint64(counter), order.numpy())
    return order


def copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    """See :func:`relive.kernels.reference.copy_row`."""
    _copy_row(sources, targets, nbytes, row)


@_intrinsic
def _pointer(_context: Any, address: Any, like: Any) -> Any:
    """An integer address as a pointer to elements of the dtype ``like``, for numba.carray."""
    pointer = types.CPointer(like.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return pointer(types.uintp, like), codegen


@_jit
def _floats(address: int, size: int) -> Floats:
    """The memory of a float32 tensor; address 0 is an empty array."""
    return _carray(_pointer(_u(address), _f), size if address else 0)


@_jit
def _bytes(address: int, size: int) -> Bytes:
    """The memory of a bool tensor; address 0 is an empty array."""
    return _carray(_pointer(_u(address), np.uint8), size if address else 0)


_carray: Any = cast("Any", numba).carray


@_intrinsic
def _memcpy(_context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointers = [builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2]]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], args[2], 1)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp), codegen


@_jit
def _copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    for i in range(sources.size):
        if sources[i]:
            _memcpy(_u(targets[i] + np.uint64(row * nbytes[i])), _u(sources[i]), nbytes[i])


@_jit
def _gae(
    n: int,
    size: int,
    reward: int,
    value: int,
    terminated: int,
    truncated: int,
    final_value: int,
    mask: int,
    gamma: float,
    lam: float,
    advantage: int,
    ret: int,
) -> int:
    r, v, fv = _floats(reward, size), _floats(value, size + n), _floats(final_value, size)
    te, tr, real = _bytes(terminated, size), _bytes(truncated, size), _bytes(mask, size)
    term, trace = _floats(advantage, size), _floats(ret, size)
    missing = _deltas(r, v, v[n:], te, tr, fv, _f(gamma), term)
    _traces(te, tr, _f(gamma * lam), trace)
    _masked(real, v[:0], term, trace)
    _scan(term, trace, v, n)
    return _first_missing(te, tr, fv, real) if missing else -1


@_jit
def _discounted_return(
    n: int,
    size: int,
    reward: int,
    value: int,
    terminated: int,
    truncated: int,
    final_value: int,
    mask: int,
    gamma: float,
    ret: int,
) -> int:
    r, v, fv = _floats(reward, size), _floats(value, size + n), _floats(final_value, size)
    te, tr, real = _bytes(terminated, size), _bytes(truncated, size), _bytes(mask, size)
    term, trace, nothing = _floats(ret, size), np.empty(size, np.float32), np.zeros(size, np.float32)
    missing = _deltas(r, nothing, nothing, te, tr, fv, _f(gamma), term)
    _traces(te, tr, _f(gamma), trace)
    _masked(real, v, term, trace)
    if v.size:  # the last row goes on with the bootstrap, and then is a row like any other
        for i in range(size - n, size):
            if trace[i] != _f(0):
                term[i] += trace[i] * v[i + n]
    _scan(term, trace, v[:0], n)
    return _first_missing(te, tr, fv, real) if missing and v.size else -1


@_jit
def _vtrace(
    n: int,
    size: int,
    ratio: int,
    reward: int,
    value: int,
    terminated: int,
    truncated: int,
    final_value: int,
    mask: int,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
    advantage: int,
    ret: int,
) -> int:
    r, v, fv = _floats(reward, size), _floats(value, size + n), _floats(final_value, size)
    te, tr, real = _bytes(terminated, size), _bytes(truncated, size), _bytes(mask, size)
    rho, term, target = _floats(ratio, size), _floats(advantage, size), _floats(ret, size)
    g, last = _f(gamma), size - n
    missing = _deltas(r, v, v[n:], te, tr, fv, g, term)
    _traces(te, tr, g, target)
    for i in range(size):
        c = _f(lam) * min(rho[i], _f(c_clip))
        rho[i] = min(rho[i], _f(rho_clip))
        term[i] *= rho[i]
        target[i] *= c
    _masked(real, v[:0], term, target)
    _scan(term, target, v, n)
    _deltas(r[:last], v, target[n:], te, tr, fv, g, term)
    _deltas(r[last:], v[last:], v[size:], te[last:], tr[last:], fv[last:], g, term[last:])
    for i in range(size):
        term[i] *= rho[i]
    _masked(real, v[:0], term, rho)
    return _first_missing(te, tr, fv, real) if missing else -1


@_jit
def _deltas(
    r: Floats, v: Floats, following: Floats, te: Bytes, tr: Bytes, fv: Floats, g: Any, term: Floats
) -> bool:
    """term = r - v + g * the value after the step; whether some truncated step may lack its final value."""
    zero, missing = _f(0), np.uint8(0)
    if fv.size:
        for i in range(r.size):
            final, going_on = fv[i], following[i]  # both are read, so that the choice needs no branch
            term[i] = (r[i] - v[i]) + (zero if te[i] else g * (final if tr[i] else going_on))
            missing |= tr[i] & (te[i] ^ np.uint8(1)) & np.uint8(final != final)
    else:
        for i in range(r.size):
            term[i] = (r[i] - v[i]) + (zero if te[i] | tr[i] else g * following[i])
            missing |= tr[i] & (te[i] ^ np.uint8(1))
    return missing != 0


@_jit
def _first_missing(te: Bytes, tr: Bytes, fv: Floats, real: Bytes) -> int:
    """The first real step that was truncated and lacks its final value, or -1."""
    for i in range(tr.size):
        if tr[i] and not te[i] and (not real.size or real[i]) and (not fv.size or np.isnan(fv[i])):
            return i
    return -1


@_jit
def _traces(te: Bytes, tr: Bytes, decay: Any, trace: Floats) -> None:
    zero = _f(0)
    for i in range(trace.size):
        trace[i] = zero if te[i] | tr[i] else decay


@_jit
def _masked(real: Bytes, fill: Floats, term: Floats, trace: Floats) -> None:
    """A step that is not real stands for its own value (or 0), and no trace passes through it."""
    words = real[: real.size // 8 * 8].view(np.uint64)
    for w in range(words.size + 1):
        if w == words.size or words[w] != _ALL_TRUE:
            for i in range(8 * w, min(8 * w + 8, real.size)):
                if not real[i]:
                    term[i] = fill[i] if fill.size else _f(0)
                    trace[i] = _f(0)


@_jit
def _scan(term: Floats, trace: Floats, v: Floats, n: int) -> None:
    """From the last row upwards: term[i] += trace[i] * term[i + n]; with v, trace[i] = term[i] + v[i]."""
    zero, step, start = _f(0), _u(n), _u(term.size)
    if v.size:
        for k in range(step):
            i = start - step + _u(k)
            trace[i] = term[i] + v[i]
    start -= step
    while start > _u(0):
        start -= step
        for k in range(step):
            i = start + _u(k)
            c = trace[i]
            x = term[i] + (zero if c == zero else c * term[i + step])
            term[i] = x
            if v.size:
                trace[i] = x + v[i]


@_jit
def _mix(z: Any) -> Any:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_jit
def _permutation(seed: Any, counter: Any, order: NDArray[np.int64]) -> None:
    golden = np.uint64(0x9E3779B97F4A7C15)
    for i in range(order.size):
        order[i] = i
    state = _mix(_mix(seed) + counter * golden)
    for i in range(order.size - 1, 0, -1):
        state += golden
        j = np.int64(np.float64(_mix(state) >> np.uint64(11)) * 2.0**-53 * np.float64(i + 1))
        order[i], order[j] = order[j], order[i]
