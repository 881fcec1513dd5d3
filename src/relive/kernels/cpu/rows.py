"""Rows of bytes: the names of ``reference/rows.py`` and, to the bit, its results.

In order: calls of torch's C functions and of the GIL; checking and copying a step; making tensors of packed rows;
packing and gathering rows.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from ..reference.rows import (
    FIELD_DICT,
    FIELD_DIMS,
    FIELD_DTYPE,
    FIELD_ITEM_BYTES,
    FIELD_NDIM,
    FIELD_OFFSET,
    FIELD_ROW_BYTES,
    PackedFields,
)
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
from ..tables import UNFIT
from ..tensor_calls import CPU, DESCRIBED, LOAN
from .jit import (
    ENTRIES,
    LINE,
    Addresses,
    Bytes,
    address_t,
    addressed,
    copy_short,
    inlined,
    intrinsic,
    jit,
    matrix_of,
    memcpy,
    prefetch,
    stream,
)

__all__ = [
    "BYTES",
    "accept_step",
    "adopt",
    "adopt_field",
    "copy_row",
    "copy_step",
    "describe",
    "is_true",
    "lend",
    "numbers_of",
    "pack_rows",
    "release_gil",
    "rows_at",
    "split_rows",
    "take_batch",
    "take_gil",
    "take_rows",
    "take_step",
]


_cgutils: Any = cast("Any", cgutils)
_ir: Any = _cgutils.ir
_word, _pointer = _ir.IntType(64), _cgutils.voidptr_t


@intrinsic
def describe(_context: Any, function: Any, tensor: Any) -> Any:
    """1 if ``function`` failed, else 0; then the words of the DLTensor that it wrote for a tensor."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out = _cgutils.alloca_once(builder, _ir.ArrayType(_word, DESCRIBED))
        answer = _call(builder, _ir.IntType(32), args, builder.bitcast(out, _pointer))
        failed = builder.icmp_signed("!=", answer, answer.type(0))
        with _cgutils.if_unlikely(builder, failed):
            context.get_python_api(builder).err_clear()
        described = builder.load(out)
        words = [builder.extract_value(described, k) for k in range(DESCRIBED)]
        return _cgutils.pack_array(builder, [builder.zext(failed, _word), *words])

    return types.UniTuple(types.int64, 1 + DESCRIBED)(types.int64, types.int64), codegen


@inlined
def numbers_of(describing: int, tensor: int) -> Any:
    """The address of a tensor's numbers, 0 if they are not in RAM; their dtype, and two arrays: sizes and strides."""
    failed, data, device, axes, sizes, strides, offset = describe(describing, tensor)
    # an offset would have to be added to ``data``; torch always gives 0
    known = not failed and data != 0 and device == CPU and offset == 0  # a FakeTensor says: in RAM, at the address 0
    # the lower half of the word counts the axes, the upper half is the dtype
    count = axes & 0xFFFFFFFF if known else 0
    shape, apart = addressed(sizes, count, np.int64), addressed(strides, count, np.int64)
    return data if known else 0, axes >> 32, shape, apart


@intrinsic
def is_true(_context: Any, method: Any, thing: Any) -> Any:
    """True if a C method without arguments answers True; what it raises goes to the caller in Python."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        api = context.get_python_api(builder)
        answer = _call(builder, _pointer, args, _pointer(None))
        with _cgutils.if_unlikely(builder, _cgutils.is_null(builder, answer)):
            context.call_conv.return_exc(builder)
        truth = api.object_istrue(answer)
        api.decref(answer)
        with _cgutils.if_unlikely(builder, builder.icmp_signed("<", truth, truth.type(0))):
            context.call_conv.return_exc(builder)
        return builder.icmp_signed("!=", truth, truth.type(0))

    return types.boolean(types.int64, types.int64), codegen


@intrinsic
def lend(_context: Any, function: Any, tensor: Any) -> Any:
    """The address of the loan of a tensor; what torch raises goes to the caller in Python."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out = _cgutils.alloca_once(builder, _word)
        failed = _call(builder, _ir.IntType(32), args, builder.bitcast(out, _pointer))
        with _cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, failed.type(0))):
            context.call_conv.return_exc(builder)
        return builder.load(out)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def adopt(_context: Any, function: Any, loan: Any, found: Any, key: Any) -> Any:
    """Put the tensor that a loan describes into the dict at the address ``found``, under the object at ``key``."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        api, out = context.get_python_api(builder), _cgutils.alloca_once_value(builder, _pointer(None))
        failed = _call(builder, _ir.IntType(32), args, builder.bitcast(out, _pointer))
        with _cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, failed.type(0))):
            context.call_conv.return_exc(builder)
        tensor = builder.load(out)
        failed = api.dict_setitem(*(builder.inttoptr(arg, _pointer) for arg in args[2:]), tensor)
        # the dict holds a reference of its own, so the one that torch gave goes
        api.decref(tensor)
        with _cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, failed.type(0))):
            context.call_conv.return_exc(builder)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def release_gil(_context: Any) -> Any:
    """Let other threads of Python run until :func:`take_gil`, which gets the answer. Nothing may raise in between."""

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        return builder.ptrtoint(context.get_python_api(builder).save_thread(), _word)

    return types.int64(), codegen


@intrinsic
def take_gil(_context: Any, thread: Any) -> Any:
    """Wait until no other thread of Python runs, and keep it so."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        context.get_python_api(builder).restore_thread(builder.inttoptr(args[0], _pointer))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _call(builder: Any, result: Any, args: Any, second: Any) -> Any:
    """Call the C function at the address ``args[0]`` with the object at ``args[1]`` and another pointer."""
    kind = _ir.FunctionType(result, [_pointer, _pointer])
    return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.inttoptr(args[1], _pointer), second])


Ints = NDArray[np.int64]


def copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    """See :func:`relive.kernels.reference.rows.copy_row`."""
    _copy_row(sources, targets, nbytes, row)


@jit
def _copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    for i in range(sources.size):
        if sources[i]:
            # int64 on both sides: numba makes a float64 of uint64 + int64, which has 53 bits
            target = np.int64(targets[i]) + row * nbytes[i]
            memcpy(address_t(target), address_t(sources[i]), np.intp(nbytes[i]))


def _accept_step(step: int, table: Ints) -> int:
    """See :func:`relive.kernels.reference.rows.accept_step`.

    Everything that is read here exists: the caller holds the tuple, which holds its items. An item's second word is its
    class, whatever the object is. The further words are read of arrays alone, and torch's functions are called with
    tensors alone. No other thread of Python runs meanwhile, except inside ``is_neg``, which therefore comes first.
    """
    # checked before any item is read: a shorter tuple ends before the items of the table
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
    # the stride of an axis of size 1 may be anything, so only the others count as gaps
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
    """True if the object of these words is an array of field i's dtype and shape, contiguous and aligned."""
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
    """True if each float64 from an address on, stored in ``nbytes`` bytes of float32, is infinite only if it was."""
    # 4 bytes of float32 are stored for each float64
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
    # ``stream`` needs a target at a multiple of 64, so the bytes before the first one go apart
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
        # runs of one byte, such as flags
        from_, to = addressed(source, count, np.uint8), addressed(target, (count - 1) * pitch + 1, np.uint8)
        for run in range(count):
            to[run * pitch] = from_[run]
    elif size == 4 and pitch % 4 == 0 and target % 4 == 0:
        # an int32 view of the target has to begin at a multiple of 4
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
        # the source has no gaps: run r begins after r * width numbers of 8 bytes
        numbers = addressed(source + 8 * run * width, width, np.float64)
        stored = addressed(target + run * pitch, width, np.float32)
        for k in range(width):
            stored[k] = np.float32(numbers[k])


take_step = jit(_take_step, nogil=False)


BYTES = 1 << 16 | 8 << 8 | 1
"""DLPack's name of uint8: one number, of 8 bits, kDLUInt."""
FIRST_ITEM = tuple.__basicsize__
"""The byte of a tuple at which its first item is, where torch's functions are known: ``step_table.first_item``."""


def _split_rows(describing: int, lending: int, adopting: int, rows: int, names: int, table: Ints, found: int) -> bool:
    """See :func:`relive.kernels.reference.rows.split_rows`.

    The caller holds ``rows``, ``names`` and ``found``.
    """
    data, dtype, shape, apart = numbers_of(describing, rows)
    lead = shape.size - 1
    if data == 0 or dtype != BYTES or lead < 0 or not _can_be_split(shape, apart, table):
        return False
    both = np.empty((2, lead + table.shape[1]), np.int64)
    for i in range(table.shape[0]):
        adopt_field(lending, adopting, rows, 0, shape[:lead], apart[:lead], names, i, table[i], both, found)
    return True


@inlined
def rows_at(describing: int, rows: int) -> Any:
    """The memory of the tensor of bytes at an address, with two axes; no rows if it is not in RAM."""
    data, dtype, shape, _ = numbers_of(describing, rows)
    known = data != 0 and dtype == BYTES and shape.size == 2
    return addressed(data, (shape[0], shape[1]) if known else (0, 1), np.uint8)


@inlined
def adopt_field(
    lending: int, adopting: int, rows: int, start: int, lead: Ints, apart: Ints, names: int, i: int, line: Ints,
    both: Ints, found: int,
) -> None:  # fmt: skip
    """Make a tensor for one field, called as item ``i`` of ``names``: :func:`relive.kernels.reference.rows.field_of`.

    From ``lend`` to ``adopt``, nothing else of Python runs. The loan points to ``both``, where sizes and strides are
    written. It may be gone after ``adopt``, as torch copies them, but not before: so the caller holds it.
    """
    axes, rank, item = lead.size, line[FIELD_NDIM], line[FIELD_ITEM_BYTES]
    dims, steps = both[0], both[1]
    for axis in range(axes):
        # DLPack counts strides in numbers; ``_can_be_split`` made sure that nothing is lost here
        dims[axis], steps[axis] = lead[axis], apart[axis] // item
    count = 1  # numbers from one item of this axis to the next
    for axis in range(rank - 1, -1, -1):
        dims[axes + axis], steps[axes + axis] = line[FIELD_DIMS + axis], count
        # an axis of size 0 counts as 1, as torch has it
        count *= max(line[FIELD_DIMS + axis], 1)
    loan = lend(lending, rows)
    words = addressed(loan, LOAN + DESCRIBED, np.int64)[LOAN:]
    # word 0 is the address, 2 has the axes and the dtype, 3 and 4 point to sizes and strides
    words[0] += start + line[FIELD_OFFSET]
    words[2] = (line[FIELD_DTYPE] << 32) + axes + rank
    words[3], words[4] = dims.ctypes.data, steps.ctypes.data
    adopt(adopting, loan, _tuple_item(found, line[FIELD_DICT]), _tuple_item(names, i))


@inlined
def _tuple_item(items: int, k: int) -> Any:
    """The address of item ``k`` of the tuple at an address."""
    # an item of a tuple is a pointer of 8 bytes
    return addressed(items + FIRST_ITEM + 8 * k, 1, np.int64)[0]


@inlined
def _can_be_split(shape: Ints, apart: Ints, table: Ints) -> bool:
    """True if rows of these sizes and strides are as the fields of ``table`` need them, and there are any."""
    last, there = shape.size - 1, 1
    for axis in range(shape.size):
        there *= shape[axis]
    if there == 0 or apart[last] != 1:
        return False
    for i in range(table.shape[0]):
        if table[i, FIELD_ROW_BYTES] != shape[last]:
            return False
        for axis in range(last):
            if apart[axis] % table[i, FIELD_ITEM_BYTES]:
                return False
    return True


split_rows = jit(_split_rows, nogil=False)


AHEAD = 16
"""A row is loaded this many rows before its turn: enough for memory to answer, and few enough for the nearest cache."""
FORESEEN = 1024
"""Bytes of a row that are loaded ahead; the processor itself loads the rest of a longer one."""
SHORT = 512
"""Rows and fields of at most this many bytes are copied without a call."""
FEW = 47
"""Fields of at most this many bytes are packed by a call each, which is then as quick."""
PACKED_DESCRIBE, PACKED_LEND, PACKED_ADOPT, PACKED_TABLE, PACKED_NAMES = range(len(PackedFields._fields))
"""The positions of :class:`relive.kernels.reference.rows.PackedFields`'s members."""
BLOCK = 64
"""Envs, or steps, that are packed together: field after field, while they stay in a near cache."""
NARROW_BLOCK = 8
"""Envs that are packed together with several steps of each."""


@jit
def pack_rows(columns: Ints, sizes: Ints, offsets: Ints, rows: Bytes, steps: int) -> None:
    """See :func:`relive.kernels.reference.rows.pack_rows`."""
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
    # column: row t * N + n is step t of env n; packed: row n * T + t. So an env is ``steps`` rows further
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
    # the last 16 bytes are copied apart, so that nothing is written beyond the item
    whole, last = size // 16 * 16, size - 16
    for k in range(count):
        from_, to = source + k * size, target + k * apart
        copy_short(address_t(to), address_t(from_), np.intp(whole))
        copy_short(address_t(to + last), address_t(from_ + last), np.intp(16))  # most often, some of them again


@jit
def take_rows(source: Bytes, index: Ints, out: Any) -> int:
    """See :func:`relive.kernels.reference.rows.take_rows`."""
    count, width = source.shape
    flat, here, there = source.reshape(-1), source.ctypes.data, out.ctypes.data
    # ``copy_short`` copies multiples of 16 bytes only
    short, loaded = width % 16 == 0 and width <= SHORT, min(width, FORESEEN)
    for b in range(min(AHEAD, index.size)):
        _load_ahead(flat, index[b] * width, loaded)
    for b in range(index.size):
        if b + AHEAD < index.size:
            _load_ahead(flat, index[b + AHEAD] * width, loaded)
        # checked before the copy: the index may be a user's, and memory is read by address
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
    """See :func:`relive.kernels.reference.rows.take_batch`; ``fields`` is a handle. The caller holds ``rows``."""
    out = rows_at(fields[ENTRIES * PACKED_DESCRIBE], rows)
    if out.shape[0] != index.size or out.shape[1] != source.shape[1]:
        return UNFIT
    thread = release_gil()
    bad = take_rows(source, index, out)
    take_gil(thread)
    if bad >= 0:
        return bad
    describe, lend, adopt = (
        fields[ENTRIES * PACKED_DESCRIBE],
        fields[ENTRIES * PACKED_LEND],
        fields[ENTRIES * PACKED_ADOPT],
    )
    table, names = matrix_of(fields, PACKED_TABLE, np.int64), fields[ENTRIES * PACKED_NAMES]
    return -1 if split_rows(describe, lend, adopt, rows, names, table, found) else UNFIT


take_batch = jit(_take_batch, nogil=False)
