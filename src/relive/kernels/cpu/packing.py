"""Rows of several fields side by side: how they are packed, and how they are picked in any order.

Addresses and bytes are int64, and ``n * steps + t`` numbers a packed row. An address plus the bytes of an array in
memory fits, since a process has fewer than 2 ** 63 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.packing import PackedFields
from ..ring_state import UNFIT
from .fields import rows_at, split_rows
from .handles import ENTRIES, matrix_of
from .jit import LINE, Bytes, address_t, copy_short, inlined, jit, memcpy, prefetch
from .tensors import release_gil, take_gil

__all__ = ["pack_rows", "take_batch", "take_rows"]

Ints = NDArray[np.int64]
AHEAD = 16
"""A row is loaded this many rows before its turn: enough for memory to answer, and few enough for the nearest cache."""
FORESEEN = 1024
"""Bytes of a row that are loaded ahead; the processor itself loads the rest of a longer one."""
SHORT = 512
"""Rows and fields of at most this many bytes are copied without a call."""
FEW = 47
"""Fields of at most this many bytes are packed by a call each, which is then as quick."""
DESCRIBE, LEND, ADOPT, TABLE, NAMES = range(len(PackedFields._fields))
"""The positions of :class:`relive.kernels.reference.packing.PackedFields`'s members."""
BLOCK = 64
"""Envs, or steps, that are packed together: field after field, while they stay in a near cache."""
NARROW_BLOCK = 8
"""Envs that are packed together with several steps of each."""


@jit
def pack_rows(columns: Ints, sizes: Ints, offsets: Ints, rows: Bytes, steps: int) -> None:
    """See :func:`relive.kernels.reference.packing.pack_rows`."""
    envs, wide = rows.shape[0] // steps, BLOCK if steps == 1 else NARROW_BLOCK
    for first in range(0, steps, BLOCK):
        for low in range(0, envs, wide):
            for f in range(columns.size):
                for t in range(first, min(first + BLOCK, steps)):
                    _pack_step(columns[f], sizes[f], offsets[f], rows, steps, t, low, min(low + wide, envs))


@inlined
def _pack_step(column: int, size: int, offset: int, rows: Bytes, steps: int, t: int, low: int, high: int) -> None:
    """One field of step t of some envs; ``source`` and ``target`` are addresses, the latter that of env 0."""
    envs, width = rows.shape[0] // steps, rows.shape[1]
    source, target = column + t * envs * size, rows.ctypes.data + t * width + offset
    if size == 4:  # a constant size is one move, not a call
        for n in range(low, high):
            memcpy(address_t(target + n * steps * width), address_t(source + n * 4), np.intp(4))
    elif FEW < size <= SHORT:
        _copy_items(source + low * size, target + low * steps * width, size, steps * width, high - low)
    else:
        for n in range(low, high):
            memcpy(address_t(target + n * steps * width), address_t(source + n * size), np.intp(size))


@jit
def _copy_items(source: int, target: int, size: int, apart: int, count: int) -> None:
    """Copy items of at least 16 bytes, 16 at a time, to places that lie ``apart`` bytes from each other."""
    whole, last = size // 16 * 16, size - 16
    for k in range(count):
        from_, to = source + k * size, target + k * apart
        copy_short(address_t(to), address_t(from_), np.intp(whole))
        copy_short(address_t(to + last), address_t(from_ + last), np.intp(16))  # most often, some of them again


@jit
def take_rows(source: Bytes, index: Ints, out: Any) -> int:
    """See :func:`relive.kernels.reference.packing.take_rows`."""
    count, width = source.shape
    flat, here, there = source.reshape(-1), source.ctypes.data, out.ctypes.data
    short, loaded = width % 16 == 0 and width <= SHORT, min(width, FORESEEN)
    for b in range(min(AHEAD, index.size)):
        _load_ahead(flat, index[b] * width, loaded)
    for b in range(index.size):
        if b + AHEAD < index.size:
            _load_ahead(flat, index[b + AHEAD] * width, loaded)
        if not 0 <= index[b] < count:
            return b
        target, row = address_t(there + b * width), address_t(here + index[b] * width)
        if short:
            copy_short(target, row, np.intp(width))
        else:
            memcpy(target, row, np.intp(width))
    return -1


@inlined
def _load_ahead(flat: Bytes, start: int, nbytes: int) -> None:
    """Begin to load these bytes, which need not exist."""
    for byte in range(start, start + nbytes, LINE):
        prefetch(flat, byte)


def _take_batch(fields: Ints, source: Bytes, index: Ints, rows: int, found: int) -> int:
    """See :func:`relive.kernels.reference.packing.take_batch`; ``fields`` is a handle. The caller holds ``rows``."""
    out = rows_at(fields[ENTRIES * DESCRIBE], rows)
    if out.shape[0] != index.size or out.shape[1] != source.shape[1]:
        return UNFIT
    thread = release_gil()
    bad = take_rows(source, index, out)
    take_gil(thread)
    if bad >= 0:
        return bad
    describe, lend, adopt = fields[ENTRIES * DESCRIBE], fields[ENTRIES * LEND], fields[ENTRIES * ADOPT]
    table, names = matrix_of(fields, TABLE, np.int64), fields[ENTRIES * NAMES]
    return -1 if split_rows(describe, lend, adopt, rows, names, table, found) else UNFIT


take_batch = jit(_take_batch, nogil=False)
