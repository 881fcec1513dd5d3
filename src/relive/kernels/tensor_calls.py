"""The C functions of torch by which compiled code reads tensors without a line of Python.

Newer versions of torch offer other libraries a table of C functions: the DLPack exchange API, struct DLPackExchangeAPI
of dlpack.h. One of them writes down where a tensor's numbers lie, and its device, dtype, sizes and strides. DLPack
knows nothing of numbers that are negated lazily. So ``Tensor.is_neg`` is asked as well, as Python itself asks: by the C
function in its PyMethodDef. Both are called with the GIL held.
"""

from __future__ import annotations

import ctypes
import types
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .step_table import first_item, words

__all__ = ["CPU", "DESCRIBED", "TensorCalls", "dtype_code", "tensor_calls"]

# The 8-byte words of a DLTensor: the address; the device's type and number; the axes and, in the upper half, the dtype;
# the addresses of the sizes and of the strides, in elements; and the bytes from the address to the first number

DESCRIBED = 6
"""How many words there are."""
CPU = 1
"""The second word of a tensor in RAM: device type kDLCPU, device 0."""

MAJOR = 1
"""The version of DLPackExchangeAPI whose words are known; a change of its layout is another major version."""
DESCRIBE = 5
"""The word of DLPackExchangeAPI with the address of ``dltensor_from_py_object_no_sync``."""
METHOD = 5
"""The word of a method of a C class, PyMethodDescrObject, that has the address of its PyMethodDef."""
NO_ARGUMENTS = 4
"""METH_NOARGS: the flag of a C function that takes an object and nothing else."""

SHARED = torch.uint8, torch.int8
"""DLPack calls integers of 1 to 7 bits by the same name: torch gives each a byte."""


class TensorCalls:
    """The addresses of torch's functions.

    Args:
        describe: ``int describe(PyObject *tensor, DLTensor *out)``: 0, or not 0 after an exception.
        is_negated: ``PyObject *is_negated(PyObject *tensor, NULL)``: a bool, or NULL after an exception.
    """

    __slots__ = ("describe", "is_negated")

    def __init__(self, describe: int, is_negated: int) -> None:
        self.describe, self.is_negated = describe, is_negated

    def description(self, tensor: Tensor) -> list[int] | None:
        """The words of a tensor's DLTensor, which point into the tensor; None if torch cannot write them."""
        out = (ctypes.c_int64 * DESCRIBED)()
        function: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(self.describe)
        try:
            return None if function(tensor, ctypes.addressof(out)) else list(out)
        except (RuntimeError, BufferError):  # ctypes raises what torch has set
            return None


@cache
def tensor_calls() -> TensorCalls | None:
    """torch's functions; None if this torch has no such table, or this Python lays out its objects in another way.

    There Python asks each tensor for class, dtype, shape and address.
    """
    if not first_item():
        return None
    describe, is_negated = _describing(), _method(Tensor.is_neg)
    if not describe or not is_negated:
        return None
    calls = TensorCalls(describe, is_negated)
    whole = torch.zeros(3, 5, 2, device="cpu")
    known = whole, whole[:, 1:], whole.mT, whole[0, 0, 0], whole[:0].long(), whole == 0
    return calls if all(_is_described(calls, tensor) for tensor in known) else None


def _describing() -> int:
    """The address of the function that describes a tensor; 0 if there is none."""
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer: Any = kind(("PyCapsule_GetPointer", ctypes.pythonapi))
    try:
        table = pointer(getattr(Tensor, "__dlpack_c_exchange_api__", None), b"dlpack_exchange_api")
    except ValueError:  # no capsule, or that of another protocol
        return 0
    (version,) = words(table, 1)
    return words(table, DESCRIBE + 1)[DESCRIBE] if version % 2**32 == MAJOR else 0


def _method(method: Any) -> int:
    """The address of the C function behind a method without arguments of a C class; 0 if it cannot be found."""
    if type(method) is not types.MethodDescriptorType or types.MethodDescriptorType.__basicsize__ < 8 * (METHOD + 1):
        return 0
    described = words(id(method), METHOD + 1)
    if described[1:3] != [id(type(method)), id(method.__objclass__)]:
        return 0
    name, function, flags = words(described[METHOD], 3)
    plain = ctypes.string_at(name) == method.__name__.encode() and flags % 2**32 == NO_ARGUMENTS
    return function if plain else 0


def _is_described(calls: TensorCalls, tensor: Tensor) -> bool:
    """Whether the words of a DLTensor are what torch says of the tensor."""
    found = calls.description(tensor)
    if found is None:
        return False
    data, device, axes, sizes, strides, offset = found
    shape, steps = (tuple(words(address, tensor.dim())) if tensor.dim() else () for address in (sizes, strides))
    known = (tensor.data_ptr(), CPU, tensor.dim(), tuple(tensor.shape), tensor.stride(), 0)
    return known == (data, device, axes % 2**32, shape, steps, offset)


@cache
def dtype_code(dtype: torch.dtype) -> int:
    """What DLPack calls a dtype: the upper half of a DLTensor's third word; 0 if it has no name for this one alone."""
    calls = None if dtype in SHARED else tensor_calls()
    found = None if calls is None else calls.description(torch.empty(0, dtype=dtype, device="cpu"))
    return 0 if found is None else found[2] >> 32
