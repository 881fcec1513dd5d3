"""Limits of samples per insert, counted with atomic instructions. See :mod:`relive.kernels.reference.limits`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from ..reference.limits import INSERTS, OTHERS, PENDING, SAMPLES
from .counters import exchange, load_acquire
from .jit import address_t, intrinsic, jit

__all__ = ["add_count", "admit", "admit_noted", "confirm", "take_back"]

Counts = NDArray[np.int64]

_ir: Any = cast("Any", cgutils).ir
INT64 = _ir.IntType(64)


@intrinsic
def add_to(_context: Any, address: Any, amount: Any) -> Any:
    """Add to an int64; gives its value before."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], INT64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.uintp, types.int64), codegen


@jit
def add_count(counts: Counts, place: int, amount: int) -> None:
    """See :func:`relive.kernels.reference.limits.add_count`."""
    add_to(address_t(counts.ctypes.data + 8 * place), np.int64(amount))


@jit
def admit(counts: Counts, side: int, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
    """See :func:`relive.kernels.reference.limits.admit`."""
    # bytes from the start: each count takes 8
    base = address_t(counts.ctypes.data)
    mine, other = base + address_t(8 * side), base + address_t(8 * (INSERTS + SAMPLES - side))
    seen = load_acquire(mine)
    while True:
        across = load_acquire(other)
        after = seen + count  # counts stay below 2**53, so neither this nor its double loses anything
        if side == SAMPLES:
            # inserts were read first: one that is counted by then is pending until it is in
            ready = across - load_acquire(base + address_t(8 * PENDING))
            allowed = ready >= min_size and ready * ratio - after >= low
        else:
            total = after + load_acquire(base + address_t(8 * OTHERS))  # all together stay below 2**53, too
            allowed = total <= min_size or total * ratio - across <= high
        if not allowed:
            return False
        found = exchange(mine, np.int64(seen), np.int64(after))
        if found == seen:
            return True
        seen = found


@jit
def admit_noted(counts: Counts, note: Counts, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
    """See :func:`relive.kernels.reference.limits.admit_noted`. A signal's handler runs before this call or after it."""
    add_count(counts, PENDING, count)  # before the insert counts, so that no sample passes because of it
    if not admit(counts, INSERTS, count, ratio, min_size, low, high):
        add_count(counts, PENDING, -count)
        return False
    note[0] += count
    return True


@jit
def confirm(counts: Counts, note: Counts) -> None:
    """See :func:`relive.kernels.reference.limits.confirm`."""
    add_count(counts, PENDING, -note[0])
    note[0] = 0


@jit
def take_back(counts: Counts, note: Counts) -> None:
    """See :func:`relive.kernels.reference.limits.take_back`."""
    add_count(counts, INSERTS, -note[0])  # first: in the other order, samples could pass in between
    confirm(counts, note)
