"""Limits of samples per insert, counted with atomic instructions. See :mod:`relive.kernels.reference.limits`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from ..reference.limits import INSERTS, SAMPLES
from .counters import exchange, load_acquire
from .jit import address_t, intrinsic, jit

__all__ = ["add_count", "admit"]

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
            allowed = across >= min_size and across * ratio - after >= low
        else:
            allowed = after <= min_size or after * ratio - across <= high
        if not allowed:
            return False
        found = exchange(mine, np.int64(seen), np.int64(after))
        if found == seen:
            return True
        seen = found


@jit
def add_count(counts: Counts, place: int, amount: int) -> None:
    """See :func:`relive.kernels.reference.limits.add_count`."""
    add_to(address_t(counts.ctypes.data + 8 * place), np.int64(amount))
