"""Which fields of a step compiled code reads, and what it makes of them, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from relive import Field
from relive.steps.arrays import NUMPY_DTYPES

WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def leaf(value: Any, field: Field, count: int) -> torch.Tensor | None:
    """A field ``[count, *shape]`` as it is stored; None if compiled code does not read it.

    A tensor is of no subclass, dense, in RAM, and neither negated nor conjugated lazily; its numbers are in memory. An
    array is of no subclass. Lists, tuples and numbers are what NumPy makes of them. Any of them may have gaps and, if
    ``count`` is 1, lack the first axis.
    """
    if type(value) in (list, tuple, bool, int, float, complex, str, bytes) or isinstance(value, np.generic):
        try:
            value = np.asarray(value)
        except Exception:
            return None
    if type(value) is np.ndarray:
        dtype = value.dtype.newbyteorder("=")
        if dtype not in NUMPY_DTYPES.values():
            return None
        value = torch.from_numpy(value.astype(dtype))
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_nested or not value.is_cpu:
        return None
    if value.is_neg() or value.is_conj() or (value.numel() and not value.data_ptr()):
        return None
    given = value.detach()
    if count == 1 and given.shape == field.shape:
        given = given[None]
    return converted(given, field.dtype) if given.shape == (count, *field.shape) else None


def converted(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor in another dtype; None if compiled code does not know that each number keeps its meaning.

    Whole numbers stay whole in range, and floats hold them exactly. No finite number becomes infinite.
    """
    if given.dtype is dtype:
        return given
    numbers = given.reshape(-1).tolist()
    if given.dtype in WHOLE and dtype in (*WHOLE[1:], torch.uint64):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        kept = all(low <= x <= high for x in numbers)
    elif given.dtype in WHOLE and dtype in REAL[2:]:
        kept = all(abs(x) <= 2 / torch.finfo(dtype).eps for x in numbers)
    elif given.dtype in REAL and dtype in REAL[2:]:
        kept = all(not torch.finfo(dtype).max < abs(x) < float("inf") for x in numbers)
    else:
        return None
    return given.to(dtype) if kept else None


def leaves(values: tuple[Any, ...], fields: dict[Any, Field], count: int) -> list[torch.Tensor] | None:
    """All leaves of a step; None if one is not read, or there are fewer values, or more."""
    if len(values) != len(fields):
        return None
    read = [leaf(value, field, count) for value, field in zip(values, fields.values(), strict=True)]
    return None if any(x is None for x in read) else [x for x in read if x is not None]


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
