"""Returns and advantages for contiguous float32 tensors: reference/returns.py's names and, to the bit, results.

All arrays are flat: row t + 1 lies n further on. A loop over flat, unsigned positions is one that LLVM vectorizes
for any T and N, which it does not for 2-D indices. Each estimator is passes that prepare ``term`` and ``trace``, a
sparse one over the few masked steps, and the one recursion of :func:`_scan`.

Arrays go in by address: wrapping seven tensors as NumPy arrays costs 4 us a call, as much as the work on 8 envs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..reference.returns import refuse_missing
from .jit import Bytes, Floats, address_t, f32, flags, floats, jit

__all__ = ["discounted_return", "gae", "vtrace"]

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
    """See :func:`relive.kernels.reference.returns.gae`."""
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
    """See :func:`relive.kernels.reference.returns.discounted_return`."""
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
    """See :func:`relive.kernels.reference.returns.vtrace`."""
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


@jit
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
    r, v, fv = floats(reward, size), floats(value, size + n), floats(final_value, size)
    te, tr, real = flags(terminated, size), flags(truncated, size), flags(mask, size)
    term, trace = floats(advantage, size), floats(ret, size)
    missing = _deltas(r, v, v[n:], te, tr, fv, f32(gamma), term)
    _traces(te, tr, f32(gamma * lam), trace)
    _masked(real, v[:0], term, trace)
    _scan(term, trace, v, n)
    return _first_missing(te, tr, fv, real) if missing else -1


@jit
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
    r, v, fv = floats(reward, size), floats(value, size + n), floats(final_value, size)
    te, tr, real = flags(terminated, size), flags(truncated, size), flags(mask, size)
    term, trace, nothing = floats(ret, size), np.empty(size, np.float32), np.zeros(size, np.float32)
    missing = _deltas(r, nothing, nothing, te, tr, fv, f32(gamma), term)
    _traces(te, tr, f32(gamma), trace)
    _masked(real, v, term, trace)
    if v.size:  # the last row goes on with the bootstrap, and then is a row like any other
        for i in range(size - n, size):
            if trace[i] != f32(0):
                term[i] += trace[i] * v[i + n]
    _scan(term, trace, v[:0], n)
    return _first_missing(te, tr, fv, real) if missing and v.size else -1


@jit
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
    r, v, fv = floats(reward, size), floats(value, size + n), floats(final_value, size)
    te, tr, real = flags(terminated, size), flags(truncated, size), flags(mask, size)
    rho, term, target = floats(ratio, size), floats(advantage, size), floats(ret, size)
    g, last = f32(gamma), size - n
    missing = _deltas(r, v, v[n:], te, tr, fv, g, term)
    _traces(te, tr, g, target)
    for i in range(size):
        c = f32(lam) * min(rho[i], f32(c_clip))
        rho[i] = min(rho[i], f32(rho_clip))
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


@jit
def _deltas(r: Floats, v: Floats, following: Floats, te: Bytes, tr: Bytes, fv: Floats, g: Any, term: Floats) -> bool:
    """term = r - v + g * the value after the step; whether some truncated step may lack its final value."""
    zero, missing = f32(0), np.uint8(0)
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


@jit
def _first_missing(te: Bytes, tr: Bytes, fv: Floats, real: Bytes) -> int:
    """The first real step that was truncated and lacks its final value, or -1."""
    for i in range(tr.size):
        if tr[i] and not te[i] and (not real.size or real[i]) and (not fv.size or np.isnan(fv[i])):
            return i
    return -1


@jit
def _traces(te: Bytes, tr: Bytes, decay: Any, trace: Floats) -> None:
    zero = f32(0)
    for i in range(trace.size):
        trace[i] = zero if te[i] | tr[i] else decay


@jit
def _masked(real: Bytes, fill: Floats, term: Floats, trace: Floats) -> None:
    """A step that is not real stands for its own value (or 0), and no trace passes through it."""
    words = real[: real.size // 8 * 8].view(np.uint64)
    for w in range(words.size + 1):
        if w == words.size or words[w] != _ALL_TRUE:
            for i in range(8 * w, min(8 * w + 8, real.size)):
                if not real[i]:
                    term[i] = fill[i] if fill.size else f32(0)
                    trace[i] = f32(0)


@jit
def _scan(term: Floats, trace: Floats, v: Floats, n: int) -> None:
    """From the last row upwards: term[i] += trace[i] * term[i + n]; with v, trace[i] = term[i] + v[i]."""
    zero, step, start = f32(0), address_t(n), address_t(term.size)
    if v.size:
        for k in range(step):
            i = start - step + address_t(k)
            trace[i] = term[i] + v[i]
    start -= step
    while start > address_t(0):
        start -= step
        for k in range(step):
            i = start + address_t(k)
            c = trace[i]
            x = term[i] + (zero if c == zero else c * term[i + step])
            term[i] = x
            if v.size:
                trace[i] = x + v[i]
