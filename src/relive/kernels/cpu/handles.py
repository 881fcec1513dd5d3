"""Handles: many arrays handed to compiled code as one.

A numba call takes 0.1 us for its first array argument and about as much again for each further one. So the arrays of
a NamedTuple, which stay where they are, are written down once as one int64 array, its handle. Compiled code opens the
handle into the same NamedTuple, which costs next to nothing. The maker of a handle keeps the arrays alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ring_state import RingArrays, StagedRows
from .jit import addressed, inlined, strided

__all__ = ["ENTRIES", "Ints", "column_of", "handle_of", "matrix_of", "open_ring", "open_staged", "vector_of"]

Ints = NDArray[np.int64]

ENTRIES = 3
"""Numbers in a handle for each member: of an array its address, its length and the elements from one item to the next
(a matrix: in a row); of an int the int itself and two that mean nothing."""


def handle_of(members: Any) -> Ints:
    """The handle of a NamedTuple of ints and arrays, each a contiguous matrix or a vector of any stride."""
    entries = list[int]()
    for member in members:
        if isinstance(member, int):
            entries += member, 0, 0
        else:
            apart = member.shape[1] if member.ndim == 2 else member.strides[0] // member.itemsize
            entries += member.ctypes.data, len(member), apart
    return np.array(entries, np.int64)


@inlined
def vector_of(handle: Ints, member: int, like: Any) -> Any:
    """A contiguous vector of a handle, with elements of the dtype ``like``."""
    return addressed(handle[ENTRIES * member], handle[ENTRIES * member + 1], like)


@inlined
def matrix_of(handle: Ints, member: int, like: Any) -> Any:
    """A contiguous matrix of a handle."""
    shape = handle[ENTRIES * member + 1], handle[ENTRIES * member + 2]
    return addressed(handle[ENTRIES * member], shape, like)


@inlined
def column_of(handle: Ints, member: int, like: Any) -> Any:
    """A vector of a handle whose elements may lie apart."""
    address, count, stride = handle[ENTRIES * member], handle[ENTRIES * member + 1], handle[ENTRIES * member + 2]
    return strided(address, count, stride, like)


@inlined
def open_ring(handle: Ints) -> RingArrays:
    """The arrays of a ring; the numbers are the positions of :class:`RingArrays`'s members."""
    return RingArrays(
        handle[0],
        handle[ENTRIES],
        handle[2 * ENTRIES],
        matrix_of(handle, 3, np.int64),
        vector_of(handle, 4, np.int64),
        matrix_of(handle, 5, np.uint8),
        column_of(handle, 6, np.int32),
        column_of(handle, 7, np.int64),
        column_of(handle, 8, np.int32),
        column_of(handle, 9, np.float32),
        column_of(handle, 10, np.uint8),
        column_of(handle, 11, np.uint8),
        vector_of(handle, 12, np.int32),
        vector_of(handle, 13, np.int64),
        vector_of(handle, 14, np.int64),
        vector_of(handle, 15, np.int64),
    )


@inlined
def open_staged(handle: Ints) -> StagedRows:
    """The arrays of rows that are added; the numbers are the positions of :class:`StagedRows`'s members."""
    return StagedRows(
        vector_of(handle, 0, np.int64),
        matrix_of(handle, 1, np.uint8),
        matrix_of(handle, 2, np.uint8),
        column_of(handle, 3, np.float32),
        column_of(handle, 4, np.uint8),
        column_of(handle, 5, np.uint8),
        vector_of(handle, 6, np.int64),
        vector_of(handle, 7, np.int64),
        vector_of(handle, 8, np.int64),
        vector_of(handle, 9, np.int64),
        vector_of(handle, 10, np.uint8),
    )
