"""Copying rows of bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import Addresses, address_t, jit, memcpy

__all__ = ["copy_row"]


def copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    """See :func:`relive.kernels.reference.rows.copy_row`."""
    _copy_row(sources, targets, nbytes, row)


@jit
def _copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    for i in range(sources.size):
        if sources[i]:
            memcpy(address_t(targets[i] + np.uint64(row * nbytes[i])), address_t(sources[i]), nbytes[i])
