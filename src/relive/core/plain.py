"""Arrays of tensors and tensors over arrays, by plain torch: for a torch without DLPack exchange, or as it traces."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import numpy as np
import torch
from torch import Tensor

_NUMPY = {
    getattr(torch, name): np.dtype(name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
        "float64", "complex64", "complex128",
    )
}  # fmt: skip

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes -> the integers that hold a number of a dtype that NumPy lacks."""


def array_of(tensor: Tensor) -> np.ndarray | None:
    """The memory of a tensor in RAM as an array, of integers where NumPy lacks the dtype; None if there is none."""
    if not tensor.is_cpu or (tensor.numel() and not tensor.data_ptr()):
        return None
    dtype, tensor = tensor.dtype, tensor.detach()
    return (tensor if dtype in _NUMPY else tensor.view(_BITS[dtype.itemsize])).numpy()


def put_fields(
    rows: np.ndarray,
    fields: Iterable[tuple[Hashable, torch.dtype, tuple[int, ...], int | None]],
    into: dict[Hashable, Tensor],
    columns: Iterable[np.ndarray] = (),
) -> None:
    """Put a tensor over each field (name, dtype, shape, first byte) of rows, uint8 ``[..., W]``, into a dict.

    Fields without a first byte are the ``columns``, uint8 ``[R, bytes]`` for R rows in all, in their order.
    """
    lead, apart = rows.shape[:-1], iter(columns)
    for name, dtype, shape, at in fields:
        part = next(apart) if at is None else rows[..., at : at + math.prod(shape) * dtype.itemsize]
        held = _NUMPY.get(dtype) or _NUMPY[_BITS[dtype.itemsize]]
        tensor = torch.from_numpy(part.view(held).reshape((*lead, *shape)))
        into[name] = tensor if tensor.dtype is dtype else tensor.view(dtype)
