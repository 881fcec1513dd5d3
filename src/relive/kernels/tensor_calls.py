"""The C functions of torch by which compiled code reads and makes tensors without a line of Python.

Newer versions of torch offer other libraries a table of C functions: the DLPack exchange API, struct DLPackExchangeAPI
of dlpack.h. One of them writes down where a tensor's numbers lie, and its device, dtype, sizes and strides. DLPack
knows nothing of numbers that are negated lazily. So ``Tensor.is_neg`` is asked as well, as Python itself asks: by the C
function in its PyMethodDef.

Two more make tensors. One lends a tensor: it allocates a DLManagedTensorVersioned, which keeps the tensor's memory. The
other makes a tensor of such a loan. In between, the loan can be changed so that it describes a part of the memory. Both
ends are torch, so torch itself gives the memory back, in whatever thread that happens. All are called with the GIL
held.
"""

from __future__ import annotations

import ctypes
import types
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .step_table import first_item, words

__all__ = ["CPU", "DESCRIBED", "LOAN", "TensorCalls", "dtype_code", "made_code", "tensor_calls"]

# The 8-byte words of a DLTensor: the address; the device's type and number; the axes and, in the upper half, the dtype;
# the addresses of the sizes and of the strides, in elements; and the bytes from the address to the first number

DESCRIBED = 6
"""How many words there are."""
CPU = 1
"""The second word of a tensor in RAM: device type kDLCPU, device 0."""

LOAN = 4
"""The words of a DLManagedTensorVersioned before its DLTensor: version, owner, what gives it back, and flags."""

MAJOR = 1
"""The version of these structs whose words are known; a change of their layout is another major version."""
LEND, ADOPT, DESCRIBE = 3, 4, 5
"""The words of DLPackExchangeAPI with the addresses of ``managed_tensor_from_py_object_no_sync``,
``managed_tensor_to_py_object_no_sync`` and ``dltensor_from_py_object_no_sync``."""
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
        lend: ``int lend(PyObject *tensor, DLManagedTensorVersioned **out)``, as ``describe``.
        adopt: ``int adopt(DLManagedTensorVersioned *loan, PyObject **out)``, as ``describe``; it takes the loan.
    """

    __slots__ = ("adopt", "describe", "is_negated", "lend")

    def __init__(self, describe: int, is_negated: int, lend: int, adopt: int) -> None:
        self.describe, self.is_negated, self.lend, self.adopt = describe, is_negated, lend, adopt

    def description(self, tensor: Tensor) -> list[int] | None:
        """The words of a tensor's DLTensor, which point into the tensor; None if torch cannot write them."""
        out = (ctypes.c_int64 * DESCRIBED)()
        function: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(self.describe)
        try:
            return None if function(tensor, ctypes.addressof(out)) else list(out)
        except (RuntimeError, BufferError):  # ctypes raises what torch has set
            return None

    def loan(self, tensor: Tensor) -> int:
        """The address of a loan of a tensor that can be described, which :meth:`adopted` has to take."""
        out = ctypes.c_int64()
        lend: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(self.lend)
        lend(tensor, ctypes.addressof(out))
        return out.value

    def adopted(self, loan: int) -> Tensor:
        """The tensor that a loan describes."""
        out = ctypes.py_object()
        adopt: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(self.adopt)
        adopt(loan, ctypes.addressof(out))
        tensor = out.value
        ctypes.pythonapi.Py_DecRef(out)  # the reference that torch gave away
        return tensor


@cache
def tensor_calls() -> TensorCalls | None:
    """torch's functions; None if this torch has no such table, or this Python lays out its objects in another way.

    There Python asks each tensor for class, dtype, shape and address.
    """
    if not first_item():
        return None
    lend, adopt, describe = _exchange()
    is_negated = _method(Tensor.is_neg)
    if not describe or not is_negated:
        return None
    calls = TensorCalls(describe, is_negated, lend, adopt)
    whole = torch.zeros(3, 5, 2, device="cpu")
    known = whole, whole[:, 1:], whole.mT, whole[0, 0, 0], whole[:0].long(), whole == 0
    return calls if all(_is_described(calls, tensor) and _is_lent(calls, tensor) for tensor in known) else None


def _exchange() -> tuple[int, int, int]:
    """The addresses of the functions that lend, adopt and describe a tensor; zeros if there are none."""
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer: Any = kind(("PyCapsule_GetPointer", ctypes.pythonapi))
    try:
        table = pointer(getattr(Tensor, "__dlpack_c_exchange_api__", None), b"dlpack_exchange_api")
    except ValueError:  # no capsule, or that of another protocol
        return 0, 0, 0
    (version,) = words(table, 1)
    found = words(table, DESCRIBE + 1) if version % 2**32 == MAJOR else [0] * (DESCRIBE + 1)
    return found[LEND], found[ADOPT], found[DESCRIBE]


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
    """True if the words of a DLTensor agree with what torch says of the tensor."""
    found = calls.description(tensor)
    return found is not None and _are_of(found, tensor)


def _are_of(found: list[int], tensor: Tensor) -> bool:
    """True if these words of a DLTensor agree with what torch says of the tensor."""
    data, device, axes, sizes, strides, offset = found
    # the lower half of the word counts the axes; the upper half is the dtype
    if (data, device, axes % 2**32, offset) != (tensor.data_ptr(), CPU, tensor.dim(), 0):
        return False  # nothing is read by way of words that mean something else
    shape, steps = (tuple(words(address, tensor.dim())) if tensor.dim() else () for address in (sizes, strides))
    return (shape, steps) == (tuple(tensor.shape), tensor.stride())


def _is_lent(calls: TensorCalls, tensor: Tensor) -> bool:
    """True if the words of a loan are as expected, and adopting it gives the tensor again."""
    loan = calls.loan(tensor)
    found = words(loan, LOAN + DESCRIBED)
    # the lower half of the first word is the major version
    if found[0] % 2**32 != MAJOR or not _are_of(found[LOAN:], tensor):
        return False
    again = calls.adopted(loan)
    same = again.dtype is tensor.dtype and again.shape == tensor.shape and again.stride() == tensor.stride()
    return same and again.data_ptr() == tensor.data_ptr()


@cache
def dtype_code(dtype: torch.dtype) -> int:
    """DLPack's name of a dtype: the upper half of a DLTensor's third word; 0 if it has no name for this one alone."""
    calls = None if dtype in SHARED else tensor_calls()
    found = None if calls is None else calls.description(torch.empty(0, dtype=dtype, device="cpu"))
    return 0 if found is None else found[2] >> 32


@cache
def made_code(dtype: torch.dtype) -> int:
    """DLPack's name of a dtype for tensors that are made; 0 if torch makes a tensor of another dtype of it."""
    calls, some = tensor_calls(), torch.empty(0, dtype=dtype, device="cpu")
    found = None if calls is None else calls.description(some)
    if calls is None or found is None or calls.adopted(calls.loan(some)).dtype is not dtype:
        return 0
    return found[2] >> 32
