"""Copying rows of bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..step_table import (
    ASKED,
    COUNT,
    DATA,
    DESCR,
    DESCRIBE,
    DIMS,
    DTYPE,
    FLAGS,
    ITEM,
    KIND,
    LARGEST,
    LENGTH,
    NARROWED,
    NDIM,
    NEGATED,
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
from ..tensor_calls import CPU
from .jit import Addresses, address_t, addressed, inlined, jit, memcpy, stream
from .tensors import describe, is_true, release_gil, take_gil

__all__ = ["accept_step", "copy_row", "copy_step", "take_step"]

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

    Everything that is read here exists: the caller holds the tuple, which holds its items. An item's second word is its
    class, whatever the object is. The further words are read of arrays alone, and torch's functions are called with
    tensors alone. No other thread of Python runs meanwhile, except inside ``is_neg``, which therefore comes first.
    """
    if addressed(step, LENGTH + 1, np.int64)[LENGTH] != table.shape[1]:
        return 0
    for i in range(table.shape[1]):
        if table[NEGATED, i]:
            item = _item(step, table, i)
            if addressed(item, WORDS, np.int64)[TYPE_OF] != table[TYPE, i] or is_true(table[NEGATED, i], item):
                return i
    asked = 0  # how many tensors that the caller has checked came before field i
    for i in range(table.shape[1]):
        if table[KIND, i] == ASKED:
            table[SOURCE, i] = table[POINTERS, asked]
            asked += 1
            if table[SOURCE, i] == 0 and table[SIZE, i] > 0:
                return i
        elif table[KIND, i] == TENSOR:
            if not _take_tensor(_item(step, table, i), table, i):
                return i
        else:
            array = addressed(_item(step, table, i), WORDS, np.int64)
            if not _is_plain(array, table, i):
                return i
            table[SOURCE, i] = array[DATA]
            if table[KIND, i] == NARROWED and not _can_be_narrowed(table[SOURCE, i], table[COUNT, i] * table[SIZE, i]):
                return i
    return -1


@inlined
def _item(step: int, table: Ints, i: int) -> int:
    """The address of the object that is field i of a step."""
    return addressed(step + table[ITEM, i], 1, np.int64)[0]


@jit
def _take_tensor(item: int, table: Ints, i: int) -> bool:
    """Note where the numbers of a tensor in RAM lie, if it has field i's dtype and shape and no gaps."""
    if addressed(item, WORDS, np.int64)[TYPE_OF] != table[TYPE, i]:
        return False
    failed, data, device, axes, sizes, strides, offset = describe(table[DESCRIBE, i], item)
    # the lower half of ``axes`` counts the axes, the upper half is the dtype
    if failed or device != CPU or axes != (table[DTYPE, i] << 32) + table[NDIM, i] or offset != 0:
        return False
    rank = table[NDIM, i]
    shape, apart = addressed(sizes, rank, np.int64), addressed(strides, rank, np.int64)
    count, gaps = 1, 0  # numbers in the axes after this one, which fit in memory
    for axis in range(rank - 1, -1, -1):
        if shape[axis] != table[DIMS + axis, i]:
            return False
        gaps += int(shape[axis] != 1 and apart[axis] != count)
        count *= shape[axis]
    table[SOURCE, i] = data
    return count == 0 or (gaps == 0 and data != 0)


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


def _take_step(step: int, table: Ints, row: int, hold: bool) -> int:
    """See :func:`relive.kernels.reference.rows.take_step`. The caller holds the tuple, and so what is copied."""
    bad = accept_step(step, table)
    if bad >= 0:
        return bad
    if hold:
        copy_step(table, row)
        return bad
    noted = table.copy()  # another thread may have a step accepted meanwhile
    thread = release_gil()
    copy_step(noted, row)
    take_gil(thread)
    return bad


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


take_step = jit(_take_step, nogil=False)
