"""Which fields of a step can be copied as they are, and what is stored of them, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from relive import Field
from relive.steps.arrays import NO_DTYPE, NUMPY_DTYPES

LARGEST = float(np.finfo(np.float32).max)


def fits(value: Any, field: Field, count: int, stored: bool = True) -> bool:
    """True if a field ``[count, *shape]`` can be copied as it is.

    A tensor is of no subclass, dense, in RAM and of the field's dtype; real, and not negated lazily; its numbers lie
    one after another, in memory. An array is of no subclass, and contiguous, aligned and in the machine's byte order.
    It has the field's dtype, or is float64 to be stored as float32, and then no number of it is beyond the largest
    float32 and not infinite.
    """
    shape = (count, *field.shape)
    if type(value) is torch.Tensor:
        if value.layout is not torch.strided or value.is_nested or not value.is_cpu or field.dtype.is_complex:
            return False
        if value.dtype is not field.dtype or tuple(value.shape) != shape or not value.is_contiguous() or value.is_neg():
            return False
        return not value.numel() or value.data_ptr() != 0
    if type(value) is not np.ndarray or value.shape != shape or not (value.flags.c_contiguous and value.flags.aligned):
        return False
    dtype = NUMPY_DTYPES.get(field.dtype, NO_DTYPE)
    if value.dtype == dtype and dtype is not NO_DTYPE:
        return True
    sizes = (
        np.abs(value) if value.dtype == np.float64 and field.dtype is torch.float32 and stored else np.full(1, 1e300)
    )
    return not ((sizes > LARGEST) & ~np.isinf(sizes)).any()


def refused(values: tuple[Any, ...], fields: dict[Any, Field], count: int) -> int:
    """The first field that cannot be copied as it is, or -1; 0 if there are fewer values, or more."""
    if len(values) != len(fields):
        return 0
    found = [fits(value, field, count) for value, field in zip(values, fields.values(), strict=True)]
    return -1 if all(found) else found.index(False)


def bits(value: Any, field: Field) -> bytes:
    """What is stored of a field that fits."""
    if isinstance(value, np.ndarray):
        return value.astype(NUMPY_DTYPES[field.dtype]).tobytes()
    return value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
