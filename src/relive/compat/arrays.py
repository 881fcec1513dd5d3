"""Conversions that the drop-ins share: whatever a host passes as an array, and tensors to the host's device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..steps.arrays import NUMPY_DTYPES, Array, as_tensor

__all__ = ["array_of", "sent"]


PLAIN = (float, int, bool)


def array_of(name: str, value: Any, dtype: torch.dtype = torch.float32) -> Array:
    """A tensor on any device, an array, a list or a number as an array of ``dtype``.

    It is copied only if it has another dtype or is on another device.

    Args:
        name: the field, for the error.
        value: see above.
        dtype: one that NumPy has, too.

    Raises:
        ShapeError: it is none of these, or a list whose rows differ in length.
    """
    if type(value) is np.ndarray:  # the most frequent first: each question takes time
        return value if value.dtype == NUMPY_DTYPES[dtype] else value.astype(NUMPY_DTYPES[dtype])
    if isinstance(value, Tensor):
        if value.dtype is not dtype or not value.is_cpu or value.requires_grad:
            value = value.detach().to("cpu", dtype)
        return value.numpy()
    if type(value) in PLAIN:
        return np.array(value, NUMPY_DTYPES[dtype])
    return as_tensor(value, name).numpy().astype(NUMPY_DTYPES[dtype], copy=False)


def sent(value: Any, device: torch.device) -> Tensor:
    """A tensor or an array as a tensor on ``device``, copied only if it is elsewhere."""
    if type(value) is Tensor and value.device == device:
        return value
    return torch.as_tensor(value).to(device)
