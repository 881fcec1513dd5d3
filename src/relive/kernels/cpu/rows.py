"""Copying rows of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import Addresses, address_t, jit, memcpy, stream

__all__ = ["copy_row"]

LONG = 2**17
"""Bytes of a row from which it is written past the caches: it would drive out all else, and is not read soon."""


def copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    """See :func:`relive.kernels.reference.rows.copy_row`."""
    _copy_row(sources, targets, nbytes, row)


@jit
def _copy_row(sources: Addresses, targets: Addresses, nbytes: NDArray[np.int64], row: int) -> None:
    for i in range(sources.size):
        if sources[i]:
            _copy(np.int64(targets[i]) + row * nbytes[i], np.int64(sources[i]), nbytes[i])


@jit
def _copy(target: Any, source: Any, nbytes: int) -> None:
    head = -target % 64 if nbytes >= LONG else nbytes  # up to the next cache line
    memcpy(address_t(target), address_t(source), np.intp(head))
    lines = (nbytes - head) // 64 * 64
    if lines:
        stream(address_t(target + head), address_t(source + head), np.intp(lines))
        done = head + lines
        memcpy(address_t(target + done), address_t(source + done), np.intp(nbytes - done))
