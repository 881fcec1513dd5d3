"""Counters that processes share, with the atomic instructions that keep their order on every processor.

``publish`` is a release: who sees the counter by ``published``, an acquire, sees all that was written before it. An
aligned int64 is written in one piece, so nobody sees half of it. A full fence lies between a change and the look at the
mark of a bell, and setting the mark is a full fence too. So of two processes, one that changes and looks for the mark,
and one that marks and looks for the change, at least one sees what the other did: no wake-up is lost.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from ..reference.counters import INSERTS, OTHERS, PENDING, SAMPLES
from ..tables import COMMITTED, CUT, DRAINED, FOLLOWED, LANE_ALONE, MASKED, WANTED
from .jit import address_t, intrinsic, jit, matrix_of, vector_of

__all__ = [
    "add_count",
    "admit",
    "admit_noted",
    "commit_step",
    "confirm",
    "mark_bell",
    "publish",
    "published",
    "ring_bell",
    "take_back",
]


Ints = NDArray[np.int64]
Bells = NDArray[np.int32]

_ir: Any = cast("Any", cgutils).ir
INT32, INT64 = _ir.IntType(32), _ir.IntType(64)


@intrinsic
def store_release(_context: Any, address: Any, value: Any) -> Any:
    """Write an int64 after all that was written before it."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        # 8 is the alignment: only an aligned int64 is written in one piece
        builder.store_atomic(args[1], builder.inttoptr(args[0], INT64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.uintp, types.int64), codegen


@intrinsic
def load_acquire(_context: Any, address: Any) -> Any:
    """Read an int64 after all that was read before it, and before all that is read after it."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.fence("acquire")
        return builder.load_atomic(builder.inttoptr(args[0], INT64.as_pointer()), "acquire", 8)

    return types.int64(types.uintp), codegen


@intrinsic
def set_bits(_context: Any, address: Any, bits: Any) -> Any:
    """Set bits of an int32, as a full fence; gives its value before."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("or", builder.inttoptr(args[0], INT32.as_pointer()), args[1], "seq_cst")

    return types.int32(types.uintp, types.int32), codegen


@intrinsic
def exchange(_context: Any, address: Any, before: Any, after: Any) -> Any:
    """Replace an int32 or an int64 if it has the value ``before``, as a full fence; gives the value that it had.

    ``before`` and ``after`` have the type of what is replaced.
    """

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], args[1].type.as_pointer())
        found = builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 0)

    return before(types.uintp, before, before), codegen


@intrinsic
def look_after_fence(_context: Any, address: Any) -> Any:
    """Read an int32 after everything before has reached all processors."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return builder.load_atomic(builder.inttoptr(args[0], INT32.as_pointer()), "seq_cst", 4)

    return types.int32(types.uintp), codegen


@jit
def publish(counters: Ints, place: int, value: int, bells: Bells, bell: int) -> bool:
    """See :func:`relive.kernels.reference.counters.publish`."""
    store_release(address_t(counters.ctypes.data + 8 * place), np.int64(value))
    return ring_bell(bells, bell)


@jit
def published(counters: Ints, place: int) -> int:
    """See :func:`relive.kernels.reference.counters.published`."""
    return load_acquire(address_t(counters.ctypes.data + 8 * place))


@jit
def mark_bell(bells: Bells, place: int) -> int:
    """See :func:`relive.kernels.reference.counters.mark_bell`."""
    return set_bits(address_t(bells.ctypes.data + 4 * place), np.int32(1)) | np.int32(1)


@jit
def ring_bell(bells: Bells, place: int) -> bool:
    """See :func:`relive.kernels.reference.counters.ring_bell`."""
    address = address_t(bells.ctypes.data + 4 * place)
    value = look_after_fence(address)
    while value & 1:
        # 2 for the ring, less 1 for the mark; only the largest odd value overflows, and wraps to the smallest
        found = exchange(address, np.int32(value), np.int32(value + 1))
        if found == value:
            return True
        value = found
    return False


@jit
def commit_step(handle: Ints, number: int, marks: int) -> int:
    """See :func:`relive.kernels.reference.counters.commit_step`. The handle's members are those of a LaneArrays.

    ``number`` counts steps from 0 on, and no lane comes to 2**63 of them.
    """
    counters, bell = vector_of(handle, 0, np.int64), vector_of(handle, 1, np.int32)
    noted, mask = vector_of(handle, 2, np.uint8), matrix_of(handle, 5, np.uint8)
    terminated, truncated = matrix_of(handle, 3, np.uint8), matrix_of(handle, 4, np.uint8)
    # step ``number`` lies in row number % S, and S of them never overlap: the writer is at most S ahead
    row, before = number % noted.size, (number + noted.size - 1) % noted.size  # no remainder of a negative number
    for n in range(mask.shape[1]):
        kept = marks & MASKED == 0 or mask[row, n] > 0
        if kept and marks & FOLLOWED == 0 and (terminated[row, n] | truncated[row, n]) > 0:
            return -1 - n
        if not kept and marks & CUT == 0:
            was_kept = noted[before] & MASKED == 0 or mask[before, n] > 0
            if was_kept and (terminated[before, n] | truncated[before, n]) == 0:
                marks |= LANE_ALONE
    noted[row] = marks
    # the marks and the fields come first: who sees this count reads them
    store_release(address_t(counters.ctypes.data + 8 * COMMITTED), np.int64(number + 1))
    # what the owner wants is read after the fence, since it sets that before it marks the bell
    wanted = look_after_fence(address_t(bell.ctypes.data + 4 * WANTED))
    if number + 1 - counters[DRAINED] < wanted:
        return 0
    return 1 if ring_bell(bell, 0) else 0


@intrinsic
def add_to(_context: Any, address: Any, amount: Any) -> Any:
    """Add to an int64; gives its value before."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], INT64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.uintp, types.int64), codegen


@jit
def add_count(counts: Ints, place: int, amount: int) -> None:
    """See :func:`relive.kernels.reference.counters.add_count`."""
    add_to(address_t(counts.ctypes.data + 8 * place), np.int64(amount))


@jit
def admit(counts: Ints, side: int, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
    """See :func:`relive.kernels.reference.counters.admit`."""
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
def admit_noted(counts: Ints, note: Ints, count: int, ratio: float, min_size: int, low: float, high: float) -> bool:
    """See :func:`relive.kernels.reference.counters.admit_noted`. A signal's handler runs before or after this call."""
    add_count(counts, PENDING, count)  # before the insert counts, so that no sample passes because of it
    if not admit(counts, INSERTS, count, ratio, min_size, low, high):
        # it was counted above, and nothing was admitted
        add_count(counts, PENDING, -count)
        return False
    note[0] += count
    return True


@jit
def confirm(counts: Ints, note: Ints) -> None:
    """See :func:`relive.kernels.reference.counters.confirm`."""
    add_count(counts, PENDING, -note[0])
    note[0] = 0


@jit
def take_back(counts: Ints, note: Ints) -> None:
    """See :func:`relive.kernels.reference.counters.take_back`."""
    add_count(counts, INSERTS, -note[0])  # first: in the other order, samples could pass in between
    confirm(counts, note)
