"""Tensors over packed rows: reference/fields.py's names and results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.fields import CODE, DIMS, INTO, ITEM, NDIM, OFFSET, WIDTH
from ..tensor_calls import DESCRIBED, LOAN
from .jit import addressed, inlined, jit
from .tensors import adopt, lend, numbers_of

__all__ = ["BYTES", "adopt_field", "rows_at", "split_rows"]

Ints = NDArray[np.int64]

BYTES = 1 << 16 | 8 << 8 | 1
"""What DLPack calls uint8: one number, of 8 bits, kDLUInt."""
FIRST_ITEM = tuple.__basicsize__
"""The byte of a tuple at which its first item is, where torch's functions are known: ``step_table.first_item``."""


def _split_rows(describing: int, lending: int, adopting: int, rows: int, names: int, table: Ints, found: int) -> bool:
    """See :func:`relive.kernels.reference.fields.split_rows`.

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
    """Make a tensor for one field, called as item ``i`` of ``names``: :func:`relive.kernels.reference.fields.field_of`.

    From ``lend`` to ``adopt``, nothing else of Python runs. The loan points to ``both``, where sizes and strides are
    written. It may be gone after ``adopt``, as torch copies them, but not before: so the caller holds it.
    """
    axes, rank, item = lead.size, line[NDIM], line[ITEM]
    dims, steps = both[0], both[1]
    for axis in range(axes):
        dims[axis], steps[axis] = lead[axis], apart[axis] // item
    count = 1  # numbers from one item of this axis to the next
    for axis in range(rank - 1, -1, -1):
        dims[axes + axis], steps[axes + axis] = line[DIMS + axis], count
        count *= max(line[DIMS + axis], 1)
    loan = lend(lending, rows)
    words = addressed(loan, LOAN + DESCRIBED, np.int64)[LOAN:]
    words[0] += start + line[OFFSET]
    words[2] = (line[CODE] << 32) + axes + rank
    words[3], words[4] = dims.ctypes.data, steps.ctypes.data
    adopt(adopting, loan, _item(found, line[INTO]), _item(names, i))


@inlined
def _item(items: int, k: int) -> Any:
    """The address of item ``k`` of the tuple at an address."""
    return addressed(items + FIRST_ITEM + 8 * k, 1, np.int64)[0]


@inlined
def _can_be_split(shape: Ints, apart: Ints, table: Ints) -> bool:
    """Whether rows of these sizes and strides are as the fields of ``table`` need them, and there are any."""
    last, there = shape.size - 1, 1
    for axis in range(shape.size):
        there *= shape[axis]
    if there == 0 or apart[last] != 1:
        return False
    for i in range(table.shape[0]):
        if table[i, WIDTH] != shape[last]:
            return False
        for axis in range(last):
            if apart[axis] % table[i, ITEM]:
                return False
    return True


split_rows = jit(_split_rows, nogil=False)
