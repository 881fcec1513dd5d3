"""Copying the tensors of a step into arrays, all in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels

__all__ = ["Inbox"]

Array = NDArray[Any]


class Inbox:
    """Arrays that the tensors of each step are copied into, by their addresses.

    One call copies all tensors. Through ``Tensor.numpy()`` and an assignment, a single tensor takes longer than that.

    Args:
        arrays: contiguous, one for each tensor of a step. They are overwritten.
        shapes: for each array, the shapes that its tensor may have, with as many elements. By default, the array's.
    """

    def __init__(self, arrays: Sequence[Array], shapes: Sequence[tuple[tuple[int, ...], ...]] | None = None) -> None:
        self._arrays = tuple(arrays)
        self._shapes = shapes or [(array.shape,) for array in arrays]
        dtypes = [torch.from_numpy(array).dtype for array in arrays]
        self._plan = list(zip(range(len(arrays)), self._shapes, dtypes, strict=True))
        self._sources = np.zeros(len(arrays), np.uint64)
        self._addresses = memoryview(cast("Any", self._sources))  # faster than the array for single entries
        self._targets = np.array([array.ctypes.data for array in arrays], np.uint64)
        self._nbytes = np.array([array.nbytes for array in arrays], np.int64)

    def take(self, values: Sequence[Any]) -> bool:
        """Copy ``values`` and return True; False if one is no contiguous CPU tensor of the right shape and dtype.

        Then nothing was copied.
        """
        addresses = self._addresses
        if len(values) != len(self._plan):
            return False
        for value, (i, shapes, dtype) in zip(values, self._plan, strict=True):
            if not (
                value.__class__ is Tensor
                and value.dtype is dtype
                and value.shape in shapes
                and value.is_cpu
                and value.is_contiguous()
                and not value.is_neg()
            ):
                return False
            address = addresses[i] = value.data_ptr()
            if not address and value.numel():  # zeros that differentiation makes lie nowhere
                return False
        kernels.copy_row(self._sources, self._targets, self._nbytes, 0)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return Inbox, (self._arrays, self._shapes)
