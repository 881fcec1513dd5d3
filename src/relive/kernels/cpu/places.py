"""Where the rows of a ring lie: reference/places.py's names and results, which describes the memory of a ring.

``inverse`` is 1 / rows. Row numbers and places are below 2**52, as :func:`relive.kernels.cpu.jit.remainder` needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ring_state import HEAD, TAIL, RingArrays
from .jit import jit, remainder

__all__ = ["Ints", "oldest", "place_after", "place_of", "row_at"]

Ints = NDArray[np.int64]


@jit
def oldest(e: Any, ring: RingArrays) -> Any:
    """See :func:`relive.kernels.reference.places.oldest`."""
    return max(ring.state[e, TAIL], ring.state[e, HEAD] - ring.rows)


@jit
def place_of(number: Any, e: Any, rows: int, inverse: float) -> Any:
    """See :func:`relive.kernels.reference.places.place_of`."""
    return e * rows + remainder(number, rows, inverse)


@jit
def place_after(place: Any, begin: Any, rows: int) -> Any:
    """See :func:`relive.kernels.reference.places.place_after`."""
    return place + 1 if place + 1 < begin + rows else begin


@jit
def row_at(place: Any, inverse: float, ring: RingArrays) -> tuple[Any, Any, Any]:
    """See :func:`relive.kernels.reference.places.row_at`."""
    rows = ring.rows
    offset = remainder(place, rows, inverse)  # in [0, rows)
    begin = place - offset
    e = np.int64(np.float64(begin) * inverse + 0.5)  # e * rows / rows: rounding cannot be off by half
    newest = ring.state[e, HEAD] - 1  # -1 in an empty env; the remainder is rows - 1 then
    back = remainder(newest, rows, inverse) - offset  # how many rows ago the row was written, in (-rows, rows)
    return e, begin, newest - (back if back >= 0 else back + rows)
