"""Tensors over packed rows, one for each field, in plain torch."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..tensor_calls import made_code

__all__ = ["CODE", "DIMS", "INTO", "ITEM", "NDIM", "OFFSET", "WIDTH", "field_of", "rows_at", "split_rows"]

OFFSET, WIDTH, ITEM, CODE, INTO, NDIM, DIMS = range(7)
"""The entries of a line of ``table``: the byte of a row at which the field begins; how many bytes a row has, and each
number of the field; what DLPack calls its dtype; which of the dicts gets it; how many axes it has, and from here on
their sizes."""


def split_rows(describe: int, lend: int, adopt: int, rows: int, names: int, table: NDArray[Any], found: int) -> bool:
    """Make a tensor for each field of packed rows, over the same memory.

    Args:
        describe: the address of torch's function of that name: :class:`relive.kernels.tensor_calls.TensorCalls`.
        lend: likewise.
        adopt: likewise. No tensor holds another one: the memory is given back after the last has gone.
        rows: the address (``id``) of a tensor, uint8 ``[..., W]``.
        names: that of a tuple with what each field is called.
        table: int64, a line for each field, of the entries above.
        found: that of a tuple of dicts, which get name -> tensor ``[..., *shape]``.

    Returns:
        whether the rows are in RAM and lie so that this can be done: W bytes without gaps, and rows that begin at
        multiples of each number's size. False, too, if there are none, or no numbers. Then the dicts are as they were.
    """
    packed, keys, dicts = (ctypes.cast(address, ctypes.py_object).value for address in (rows, names, found))
    if not packed.is_cpu or packed.dtype is not torch.uint8 or not packed.dim() or not packed.data_ptr():
        return False
    *lead, width = packed.shape
    *apart, gap = packed.stride()
    if gap != 1 or any(line[WIDTH] != width or any(step % line[ITEM] for step in apart) for line in table):
        return False
    for name, line in zip(keys, table.tolist(), strict=True):
        dicts[line[INTO]][name] = field_of(packed, 0, lead, apart, line)
    return True


def rows_at(rows: int) -> Any:
    """The tensor at an address as an array; None if it is not in RAM."""
    packed: Tensor = ctypes.cast(rows, ctypes.py_object).value
    return packed.numpy() if packed.is_cpu and packed.data_ptr() else None


def field_of(packed: Any, start: int, lead: list[int], apart: list[int], line: list[int]) -> Tensor:
    """A tensor for one field of rows ``lead``, which lie ``apart`` bytes from each other from byte ``start`` on."""
    dims = line[DIMS : DIMS + line[NDIM]]
    strides = [step // line[ITEM] for step in apart]
    strides += [prod(max(size, 1) for size in dims[axis + 1 :]) for axis in range(len(dims))]
    memory = torch.empty(0, dtype=_dtypes()[line[CODE]]).set_(packed.untyped_storage())
    begin = (packed.storage_offset() + start + line[OFFSET]) // line[ITEM]
    return memory.as_strided([*lead, *dims], strides, begin)


@cache
def _dtypes() -> dict[int, torch.dtype]:
    """The dtypes of tensors that can be made, by what DLPack calls them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are experimental
        return {made_code(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
