"""The table by which compiled code checks and copies the fields of a step, and how it finds NumPy's arrays.

A table is int64 ``[DIMS + D, F]``: one column for each of F fields, one line for each fact below, and at last the sizes
of up to D axes. A step is a tuple of F arrays and tensors. Its arrays are read as C code reads them: through the public
struct ``PyArrayObject_fields`` of NumPy's headers (numpy/ndarraytypes.h), which every extension is compiled against.
:mod:`relive.kernels.tensor_calls` says how its tensors are read.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ARRAY",
    "ASKED",
    "COUNT",
    "DATA",
    "DESCR",
    "DESCRIBE",
    "DIMS",
    "DTYPE",
    "FLAGS",
    "ITEM",
    "KIND",
    "LARGEST",
    "LENGTH",
    "NARROWED",
    "NDIM",
    "NEGATED",
    "PAST",
    "PITCH",
    "PLAIN",
    "POINTERS",
    "RANK",
    "SHAPE",
    "SIZE",
    "SOURCE",
    "STRIDE",
    "TARGET",
    "TENSOR",
    "TYPE",
    "TYPE_OF",
    "WORDS",
    "first_item",
    "words",
]

# The lines of a table

POINTERS = 0
"""The addresses of the ASKED tensors, in turn and without gaps; the caller puts them there."""
KIND = 1
"""How the field is given: one of the four kinds below."""
ITEM = 2
"""The byte of the tuple at which the field's item is."""
TYPE = 3
"""The address of the class that it must have, ``numpy.ndarray`` or ``torch.Tensor``."""
DTYPE = 4
"""The address of the dtype that an array must have; what DLPack calls the dtype that a tensor must have."""
NDIM = 5
"""How many axes it must have."""
SOURCE = 6
"""The address of the first byte of what was given; noted when it is accepted."""
TARGET = 7
"""The address of the field's first row."""
STRIDE = 8
"""Bytes from a row of the field to the next."""
COUNT = 9
"""Runs of bytes that a row consists of; 0 if the field is checked and not copied."""
PITCH = 10
"""Bytes from one run to the next, in the row."""
SIZE = 11
"""Bytes of a run, in the row; of a field that is not copied, all its bytes."""
PAST = 12
"""1 if a row is written past the caches."""
DESCRIBE = 13
"""The address of torch's function that describes a tensor."""
NEGATED = 14
"""The address of torch's function that says whether a tensor is negated lazily; 0 if this field's cannot be."""
DIMS = 15
"""The size of the first axis; further axes follow."""

# Kinds

ARRAY = 0
"""A NumPy array of the stored dtype."""
NARROWED = 1
"""A NumPy array of float64, stored as float32."""
TENSOR = 2
"""A tensor of the stored dtype."""
ASKED = 3
"""A tensor that the caller has checked and whose address is among POINTERS."""

LARGEST = float(np.finfo(np.float32).max)
"""The largest number of a float32."""

# The 8-byte words of an array object, as PyArrayObject_fields has them

TYPE_OF, DATA, RANK, SHAPE, DESCR, FLAGS, WORDS = 1, 2, 3, 4, 7, 8, 9
LENGTH = 2
"""The word of a tuple that has its length."""
PLAIN = 0x101
"""NPY_ARRAY_C_CONTIGUOUS and NPY_ARRAY_ALIGNED: the flags that an array must have."""


@cache
def first_item() -> int:
    """The byte of a tuple at which its first item is; 0 if this Python lays out its objects in another way.

    Free-threaded and debug builds of Python do. There NumPy checks and copies arrays.
    """
    # words are read as little-endian int64, so only a 64-bit CPython of that order has this layout
    if sys.implementation.name != "cpython" or np.dtype(np.intp).itemsize != 8 or sys.byteorder != "little":
        return 0
    # contiguous, a gap at the front, transposed, empty, and a view of fewer axes: each has other flags or sizes
    whole = np.zeros((3, 5, 2), np.float32)
    if not all(_is_laid_out_so(array) for array in (whole, whole[:, 1:], whole.T, np.zeros(0, np.int64), whole[0, 0])):
        return 0
    items = tuple(object() for _ in range(3))
    found = words(id(items) + 8 * LENGTH, 1) + words(id(items) + tuple.__basicsize__, len(items))
    return tuple.__basicsize__ if found == [len(items), *(id(item) for item in items)] else 0


def _is_laid_out_so(array: NDArray[Any]) -> bool:
    """True if the words of an array object agree with what NumPy says of the array."""
    # the object has to be as large as the words that are read, else the next line would read beyond it
    if sys.getsizeof(array) - (array.nbytes if array.base is None else 0) < 8 * WORDS:
        return False
    found = words(id(array), WORDS)
    if found[TYPE_OF] != id(np.ndarray):
        return False
    flags = array.flags.c_contiguous + 0x100 * array.flags.aligned
    facts = found[DATA], found[RANK] % 2**32, found[DESCR], found[FLAGS] & PLAIN
    if facts != (array.ctypes.data, array.ndim, id(array.dtype), flags):
        return False
    return tuple(words(found[SHAPE], array.ndim)) == array.shape


def words(address: int, count: int) -> list[int]:
    """The 8-byte words of memory from an address on."""
    return list((ctypes.c_int64 * count).from_address(address))
