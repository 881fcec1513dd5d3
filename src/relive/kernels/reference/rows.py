"""Rows of bytes, in plain Python: checking and copying a step, packing rows, gathering them, making tensors of them."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
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
from ..tables import UNFIT
from ..tensor_calls import dtype_code, made_code

__all__ = [
    "FIELD_DICT",
    "FIELD_DIMS",
    "FIELD_DTYPE",
    "FIELD_ITEM_BYTES",
    "FIELD_NDIM",
    "FIELD_OFFSET",
    "FIELD_ROW_BYTES",
    "PackedFields",
    "accept_step",
    "copy_row",
    "copy_step",
    "field_of",
    "pack_rows",
    "rows_at",
    "split_rows",
    "take_batch",
    "take_rows",
    "take_step",
]


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
    """True if a tensor is in RAM and as its column of the table says."""
    if type(value) is not Tensor or not value.is_cpu or dtype_code(value.dtype) != column[DTYPE]:
        return False
    try:
        if list(value.shape) != column[DIMS : DIMS + column[NDIM]].tolist():
            return False
        return value.is_contiguous() and (not value.numel() or value.data_ptr() != 0)
    except RuntimeError:  # nested and sparse tensors have no shape, strides or address
        return False


def _array_fits(value: Any, column: Ints) -> bool:
    """True if an array is as its column of the table says."""
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


FIELD_OFFSET, FIELD_ROW_BYTES, FIELD_ITEM_BYTES, FIELD_DTYPE, FIELD_DICT, FIELD_NDIM, FIELD_DIMS = range(7)
"""The entries of a line of ``table``: the byte of a row at which the field begins; how many bytes a row has, and each
number of the field; what DLPack calls its dtype; which of the dicts gets it; how many axes it has, and from here on
their sizes."""


def split_rows(describe: int, lend: int, adopt: int, rows: int, names: int, table: NDArray[Any], found: int) -> bool:
    """Make a tensor for each field of packed rows, over the same memory.

    Args:
        describe: the address of torch's function of that name: :class:`relive.kernels.tensor_calls.TensorCalls`.
        lend: the address of the function that lends a tensor.
        adopt: the address of the function that makes a tensor of a loan. No tensor holds another one: the memory is
            given back after the last has gone.
        rows: the address (``id``) of a tensor, uint8 ``[..., W]``.
        names: that of a tuple with what each field is called.
        table: int64, a line for each field, of the entries above.
        found: that of a tuple of dicts, which get name -> tensor ``[..., *shape]``.

    Returns:
        True if the rows are in RAM and lie so that this can be done: W bytes without gaps, and rows that begin at
        multiples of each number's size. False, too, if there are none, or no numbers. Then the dicts are as they were.
    """
    packed, keys, dicts = (ctypes.cast(address, ctypes.py_object).value for address in (rows, names, found))
    if not packed.is_cpu or packed.dtype is not torch.uint8 or not packed.dim() or not packed.data_ptr():
        return False
    *lead, width = packed.shape
    *apart, gap = packed.stride()
    if gap != 1 or any(
        line[FIELD_ROW_BYTES] != width or any(step % line[FIELD_ITEM_BYTES] for step in apart) for line in table
    ):
        return False
    for name, line in zip(keys, table.tolist(), strict=True):
        dicts[line[FIELD_DICT]][name] = field_of(packed, 0, lead, apart, line)
    return True


def rows_at(rows: int) -> Any:
    """The tensor at an address as an array; None if it is not in RAM."""
    packed: Tensor = ctypes.cast(rows, ctypes.py_object).value
    return packed.numpy() if packed.is_cpu and packed.data_ptr() else None


def field_of(packed: Any, start: int, lead: list[int], apart: list[int], line: list[int]) -> Tensor:
    """A tensor for one field of rows ``lead``, which lie ``apart`` bytes from each other from byte ``start`` on."""
    dims = line[FIELD_DIMS : FIELD_DIMS + line[FIELD_NDIM]]
    strides = [step // line[FIELD_ITEM_BYTES] for step in apart]
    strides += [prod(max(size, 1) for size in dims[axis + 1 :]) for axis in range(len(dims))]
    memory = torch.empty(0, dtype=_dtypes()[line[FIELD_DTYPE]]).set_(packed.untyped_storage())
    begin = (packed.storage_offset() + start + line[FIELD_OFFSET]) // line[FIELD_ITEM_BYTES]
    return memory.as_strided([*lead, *dims], strides, begin)


@cache
def _dtypes() -> dict[int, torch.dtype]:
    """The dtypes of tensors that can be made, by what DLPack calls them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are experimental
        return {made_code(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


Bytes = NDArray[np.uint8]


class PackedFields(NamedTuple):
    """All that :func:`take_batch` needs to make tensors of packed rows."""

    describe: int
    """The address of torch's function of that name: :class:`relive.kernels.tensor_calls.TensorCalls`."""
    lend: int
    """The address of torch's function that lends a tensor."""
    adopt: int
    """The address of torch's function that makes a tensor of a loan."""
    table: Ints
    """int64, a line for each field, as :func:`split_rows` takes it."""
    names: int
    """The address of a tuple with the names of these fields."""


def pack_rows(columns: Ints, sizes: Ints, offsets: Ints, rows: Bytes, steps: int) -> None:
    """Copy columns side by side: bytes ``offset`` to ``offset + size`` of a packed row are a field of a step.

    Args:
        columns: the address of each column. Its row t * N + n is step t of env n.
        sizes: bytes of a row of each.
        offsets: the byte of a packed row at which each begins.
        rows: ``[N * T, W]``, written; row n * T + t becomes step t of env n.
        steps: T. With 1, packed rows come in the order of the columns' rows.
    """
    envs = len(rows) // steps
    for column, size, offset in zip(columns.tolist(), sizes.tolist(), offsets.tolist(), strict=True):
        for t in range(steps):
            for n in range(envs):
                target = rows.ctypes.data + (n * steps + t) * rows.shape[1] + offset
                ctypes.memmove(target, column + (t * envs + n) * size, size)


def take_rows(source: Bytes, index: Ints, out: Any) -> int:
    """Copy the rows ``index`` of ``source`` ``[R, W]`` to ``out`` ``[B, W]``, all contiguous.

    Returns:
        -1, or the first place in ``index`` whose number is no row; the rows before it are written.
    """
    for b, r in enumerate(index.tolist()):
        if not 0 <= r < len(source):
            return b
        out[b] = source[r]
    return -1


def take_batch(fields: PackedFields, source: Bytes, index: Ints, rows: int, found: int) -> int:
    """:func:`take_rows`, and a tensor for each field of the batch. The GIL is not held while rows are copied.

    Args:
        fields: the rest.
        source: ``[R, W]``, the packed rows.
        index: the rows of the batch, ``[B]``.
        rows: the address (``id``) of a tensor, uint8 ``[B, W]`` in one piece, which the batch will lie in.
        found: see :func:`relive.kernels.reference.rows.split_rows`.

    Returns:
        what :func:`take_rows` returns, or UNFIT if ``rows`` are another tensor. The dicts are as they were unless it is
        -1.
    """
    out = rows_at(rows)
    if out is None or out.shape != (len(index), source.shape[1]):
        return UNFIT
    bad = take_rows(source, index, out)
    if bad >= 0:
        return bad
    made = split_rows(fields.describe, fields.lend, fields.adopt, rows, fields.names, fields.table, found)
    return -1 if made else UNFIT
