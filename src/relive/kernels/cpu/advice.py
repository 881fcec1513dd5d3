"""Asking the system for pages of mapped files: reference/advice.py's name and result.

Addresses of a process are below 2**47, or 2**56 with the largest page tables, and rows lie within its arrays. So no
product or sum here overflows int64.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.core import cgutils

from ..reference.advice import MINCORE, PAGES, WILLNEED
from .handles import Ints
from .jit import intrinsic, jit

__all__ = ["ask_for"]

_ir: Any = cast("Any", cgutils).ir


@intrinsic
def call(_context: Any, function: Any, start: Any, nbytes: Any, last: Any) -> Any:
    """Call a C function of an address, a size and an int or an address; gives its int."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word, number = _ir.IntType(64), _ir.IntType(32)
        kind = _ir.FunctionType(number, [word, word, word])  # an int is the lower half of its register
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), list(args[1:]))

    return types.int32(types.int64, types.int64, types.int64, types.int64), codegen


@jit
def ask_for(calls: Ints, parts: Ints, page: int, begins: Ints, ends: Ints) -> int:
    """See :func:`relive.kernels.reference.advice.ask_for`."""
    there, missing = np.zeros(PAGES, np.uint8), 0
    for part in range(parts.shape[0]):
        for k in range(begins.size):
            low, last = _span(parts, part, page, begins[k], ends[k])
            while low < last:
                nbytes = min(last - low, PAGES * page)
                missing += _ask(calls, low, nbytes, -(-nbytes // page), there)
                low += PAGES * page
    return missing


@jit
def _span(parts: Ints, part: int, page: int, begin: int, end: int) -> tuple[int, int]:
    """The address of a run's first page, and that after its last byte."""
    first = parts[part, 0] + begin * parts[part, 1]
    return first - first % page, parts[part, 0] + end * parts[part, 1] if end > begin else 0


@jit
def _ask(calls: Ints, low: int, nbytes: int, count: int, there: Any) -> int:
    """Ask for ``count`` successive pages, at most :data:`PAGES`, if one is missing; gives how many are."""
    there[:count] = 0
    call(calls[MINCORE], low, nbytes, there.ctypes.data)
    absent = count
    for k in range(count):
        absent -= there[k] & 1
    if absent:
        call(calls[MINCORE + 1], low, nbytes, WILLNEED)
    return absent
