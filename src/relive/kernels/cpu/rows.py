"""Copying rows of bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..step_table import (
    COUNT,
    DATA,
    DESCR,
    DIMS,
    DTYPE,
    FLAGS,
    ITEM,
    KIND,
    LARGEST,
    LENGTH,
    NARROWED,
    NDIM,
    PAST,
    PITCH,
    PLAIN,
    POINTERS,
    RANK,
    SHAPE,
    SIZE,
    SOURCE,
    STRIDE,
    TARGET,
    TENSOR,
    TYPE,
    TYPE_OF,
    WORDS,
)
from .jit import Addresses, address_t, addressed, jit, memcpy, stream

__all__ = ["accept_step", "copy_row", "copy_step"]

Ints = NDArray[np.int64]


def copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    """See :func:`relive.kernels.reference.rows.copy_row`."""
    _copy_row(sources, targets, nbytes, row)


@jit
def _copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    for i in range(sources.size):
        if sources[i]:
            target = np.int64(targets[i]) + row * nbytes[i]
            memcpy(address_t(target), address_t(sources[i]), np.intp(nbytes[i]))


def _accept_step(step: int, table: Ints) -> int:
    """See :func:`relive.kernels.reference.rows.accept_step`.

    Everything that is read here exists: the caller holds the tuple, which holds its items, and no other thread of
    Python runs meanwhile. An item's second word is its class, whatever the object is. The further words are read of
    arrays alone.
    """
    if addressed(step, LENGTH + 1, np.int64)[LENGTH] != table.shape[1]:
        return 0
    tensors = 0  # how many came before field i
    for i in range(table.shape[1]):
        if table[KIND, i] == TENSOR:
            table[SOURCE, i] = table[POINTERS, tensors]
            tensors += 1
            if table[SOURCE, i] == 0 and table[COUNT, i] * table[SIZE, i] > 0:
                return i
        else:
            item = addressed(step + table[ITEM, i], 1, np.int64)[0]
            if not _is_plain(addressed(item, WORDS, np.int64), table, i):
                return i
            table[SOURCE, i] = addressed(item, WORDS, np.int64)[DATA]
            if table[KIND, i] == NARROWED and not _can_be_narrowed(table[SOURCE, i], table[COUNT, i] * table[SIZE, i]):
                return i
    return -1


@jit
def _is_plain(array: Ints, table: Ints, i: int) -> bool:
    """Whether the object of these words is an array of field i's dtype and shape, contiguous and aligned."""
    if array[TYPE_OF] != table[TYPE, i] or array[DESCR] != table[DTYPE, i] or array[FLAGS] & PLAIN != PLAIN:
        return False
    axes = array[RANK] & 0xFFFFFFFF  # a C int; what is in the word's upper half means nothing
    if axes != table[NDIM, i]:
        return False
    shape = addressed(array[SHAPE], axes, np.int64)
    for axis in range(axes):  # noqa: SIM110 - numba compiles no generator
        if shape[axis] != table[DIMS + axis, i]:
            return False
    return True


@jit
def _can_be_narrowed(address: int, nbytes: int) -> bool:
    """Whether each float64 from an address on, stored in ``nbytes`` bytes of float32, is infinite only if it was."""
    numbers, lost = addressed(address, nbytes // 4, np.float64), 0
    for k in range(numbers.size):  # to the end, since a loop without a way out is compiled to vector code
        lost += int(abs(numbers[k]) > LARGEST and abs(numbers[k]) != np.inf)
    return lost == 0


accept_step = jit(_accept_step, nogil=False)


@jit
def copy_step(table: Ints, row: int) -> None:
    """See :func:`relive.kernels.reference.rows.copy_step`."""
    for i in range(table.shape[1]):
        source, target = table[SOURCE, i], table[TARGET, i] + row * table[STRIDE, i]
        count, pitch, size = table[COUNT, i], table[PITCH, i], table[SIZE, i]
        if table[KIND, i] == NARROWED:
            _narrow(target, source, count, pitch, size)
        elif count != 1:
            _spread(target, source, count, pitch, size)
        elif table[PAST, i]:
            _copy_past(target, source, size)
        else:
            memcpy(address_t(target), address_t(source), np.intp(size))


@jit
def _copy_past(target: int, source: int, nbytes: int) -> None:
    """Copy bytes past the caches; the pieces of a cache line at both ends go through them."""
    head = min(-target % 64, nbytes)
    lines = (nbytes - head) // 64 * 64
    done = head + lines
    memcpy(address_t(target), address_t(source), np.intp(head))
    if lines:
        stream(address_t(target + head), address_t(source + head), np.intp(lines))
    memcpy(address_t(target + done), address_t(source + done), np.intp(nbytes - done))


@jit
def _spread(target: int, source: int, count: int, pitch: int, size: int) -> None:
    """Copy ``count`` runs of ``size`` bytes to places ``pitch`` bytes apart; bytes and words need no call for each."""
    if size == 1:
        from_, to = addressed(source, count, np.uint8), addressed(target, (count - 1) * pitch + 1, np.uint8)
        for run in range(count):
            to[run * pitch] = from_[run]
    elif size == 4 and pitch % 4 == 0 and target % 4 == 0:
        words, places = addressed(source, count, np.int32), addressed(target, (count - 1) * pitch // 4 + 1, np.int32)
        for run in range(count):
            places[run * pitch // 4] = words[run]
    else:
        for run in range(count):
            memcpy(address_t(target + run * pitch), address_t(source + run * size), np.intp(size))


@jit
def _narrow(target: int, source: int, count: int, pitch: int, size: int) -> None:
    """Store float64 numbers as float32, ``count`` runs of ``size`` bytes that begin every ``pitch`` bytes."""
    width = size // 4
    for run in range(count):
        numbers = addressed(source + 8 * run * width, width, np.float64)
        stored = addressed(target + run * pitch, width, np.float32)
        for k in range(width):
            stored[k] = np.float32(numbers[k])
