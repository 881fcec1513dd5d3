"""Copying rows of bytes, in plain Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..step_table import (
    ASKED,
    COUNT,
    DIMS,
    DTYPE,
    KIND,
    LARGEST,
    NARROWED,
    NDIM,
    NEGATED,
    PITCH,
    POINTERS,
    SIZE,
    SOURCE,
    STRIDE,
    TARGET,
    TENSOR,
)
from ..tensor_calls import dtype_code

__all__ = ["accept_step", "copy_row", "copy_step", "take_step"]

Ints = NDArray[np.int64]


def copy_row(sources: NDArray[np.uint64], targets: NDArray[np.uint64], nbytes: NDArray[np.int64], row: int) -> None:
    """Copy ``nbytes[i]`` bytes from address ``sources[i]`` to row ``row`` of the column at ``targets[i]``; 0: skip."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), nbytes.tolist(), strict=False):
        if source:
            ctypes.memmove(target + row * size, source, size)


def accept_step(step: int, table: Ints) -> int:
    """Note in ``table`` where the fields of a step lie, if each may be copied as it is.

    Args:
        step: the address (``id``) of a tuple with an item for each column of ``table``, in order.
        table: int64, as :mod:`relive.kernels.step_table` says. Its ASKED tensors are checked already, and
            ``POINTERS`` has their addresses.

    Returns:
        -1, or a field that does not fit, 0 if the tuple has another length: the first tensor that is negated lazily,
        else the first of these. An array of another class, dtype or shape, one that is not contiguous and aligned, a
        float64 beyond the largest float32 and not infinite; a tensor of another class, dtype, shape or device, with
        gaps, or without memory.
    """
    values: tuple[Any, ...] = ctypes.cast(step, ctypes.py_object).value
    if len(values) != table.shape[1]:
        return 0
    for i in np.flatnonzero(table[NEGATED]).tolist():
        if type(values[i]) is not Tensor or values[i].is_neg():
            return i
    pointers = iter(table[POINTERS].tolist())
    for i in range(table.shape[1]):
        if table[KIND, i] == ASKED:
            table[SOURCE, i] = next(pointers)
            if not table[SOURCE, i] and table[SIZE, i]:
                return i
        elif not (_tensor_fits if table[KIND, i] == TENSOR else _array_fits)(values[i], table[:, i]):
            return i
        else:
            table[SOURCE, i] = values[i].data_ptr() if table[KIND, i] == TENSOR else values[i].ctypes.data
    return -1


def _tensor_fits(value: Any, column: Ints) -> bool:
    """Whether a tensor is in RAM and as its column of the table says."""
    if type(value) is not Tensor or not value.is_cpu or dtype_code(value.dtype) != column[DTYPE]:
        return False
    try:
        if list(value.shape) != column[DIMS : DIMS + column[NDIM]].tolist():
            return False
        return value.is_contiguous() and (not value.numel() or value.data_ptr() != 0)
    except RuntimeError:  # nested and sparse tensors have no shape, strides or address
        return False


def _array_fits(value: Any, column: Ints) -> bool:
    """Whether an array is as its column of the table says."""
    if type(value) is not np.ndarray or id(value.dtype) != column[DTYPE]:
        return False
    if list(value.shape) != column[DIMS : DIMS + column[NDIM]].tolist():
        return False
    if not (value.flags.c_contiguous and value.flags.aligned):
        return False
    sizes = np.abs(value) if column[KIND] == NARROWED else np.zeros(0)
    return not ((sizes > LARGEST) & ~np.isinf(sizes)).any()


def copy_step(table: Ints, row: int) -> None:
    """Copy the fields of the step that :func:`accept_step` noted last to row ``row`` of each."""
    for column in table.T.tolist():
        for run in range(column[COUNT]):
            size = column[SIZE]
            target = column[TARGET] + row * column[STRIDE] + run * column[PITCH]
            if column[KIND] == NARROWED:
                numbers = (ctypes.c_double * (size // 4)).from_address(column[SOURCE] + 2 * run * size)
                ctypes.memmove(target, np.array(numbers).astype(np.float32).ctypes.data, size)
            else:
                ctypes.memmove(target, column[SOURCE] + run * size, size)


def take_step(step: int, table: Ints, row: int, hold: bool) -> int:
    """:func:`accept_step`, and :func:`copy_step` if all fields fit. ``hold``: the GIL, while they are copied."""
    bad = accept_step(step, table)
    if bad < 0:
        copy_step(table, row)
    return bad
