"""Rows of bytes and tensors over them, in the plainest way: what ``relive.core`` is held to."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["DLPACK", "can_be_read", "packed", "tensors", "view"]

Bytes = NDArray[np.uint8]

DLPACK = {
    torch.int8: 0, torch.int16: 0, torch.int32: 0, torch.int64: 0,
    torch.uint8: 1, torch.uint16: 1, torch.uint32: 1, torch.uint64: 1,
    torch.float16: 2, torch.float32: 2, torch.float64: 2, torch.bfloat16: 4,
    torch.complex64: 5, torch.complex128: 5, torch.bool: 6,
}  # fmt: skip
"""The codes of dtypes by DLPack's standard."""


def can_be_read(thing: Any) -> bool:
    """True if compiled code reads the numbers of an object where they lie."""
    if type(thing) is np.ndarray:
        known = thing.dtype.kind in "biufc" and thing.dtype not in (np.longdouble, np.clongdouble)
        return known and thing.dtype.isnative and thing.flags.aligned
    if type(thing) is not Tensor or not thing.is_cpu or thing.layout is not torch.strided:
        return False
    return not (thing.is_neg() or thing.is_conj()) and (thing.numel() == 0 or thing.data_ptr() != 0)


def packed(columns: list[Bytes], offsets: list[int], width: int, steps: int) -> Bytes:
    """Columns ``[T * N, bytes]`` side by side in rows ``[N * T, width]`` of 7s: step t of env n is row n * T + t."""
    rows = np.full((len(columns[0]), width), 7, np.uint8)
    envs = len(rows) // steps
    for column, offset in zip(columns, offsets, strict=True):
        for t in range(steps):
            for n in range(envs):
                rows[n * steps + t, offset : offset + column.shape[1]] = column[t * envs + n]
    return rows


def view(rows: Tensor, dtype: torch.dtype, shape: tuple[int, ...], at: int) -> Tensor:
    """One field of rows (uint8 ``[..., W]``) over the same memory."""
    if not rows.numel():
        return torch.empty((*rows.shape[:-1], *shape), dtype=dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    values: Any = cast("Any", rows[..., at : at + nbytes]).view(dtype)
    return values.unflatten(-1, shape) if shape else values.squeeze(-1)


def tensors(rows: Bytes, fields: list[tuple[Any, torch.dtype, tuple[int, ...], int]]) -> dict[Any, Tensor]:
    """The fields (name, dtype, shape, first byte) of rows."""
    whole = torch.from_numpy(rows)
    return {name: view(whole, dtype, shape, at) for name, dtype, shape, at in fields}
