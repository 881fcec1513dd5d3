"""The memory of a ring, and where its rows lie. All other kernels of rings build on this page.

Three numbers name a row, all int64, so none of them overflows:

- its env e, below N, and its number, which counts the env's rows from 0 and never repeats. A number stays below 2**52
  (:data:`relive.ring.invariants.LARGEST`), so that a float64 holds it exactly;
- its place, in rows of memory. Env e owns the ``rows`` places from e * rows on, and row ``number`` lies at place
  e * rows + number % rows. A place is below N * rows, the number of rows in memory;
- its public index, number * N + e, below 2**62, which users see and which is never reused.

A row is live while it is among the newest ``rows`` of its env and was not cleared: its number is at least
:func:`oldest` and below the env's HEAD. At each place at most one row is live.

Kernels take the arrays of a ring as one argument ``ring``, :class:`relive.kernels.ring_state.RingArrays`; the fast
twins take its handle. Three of the arrays have an entry a place for what is noted of the row:

- ``step`` (int32): the row's index within its episode, 0 for the first;
- ``stamp`` (int64): if the row is a complete transition, its number in the order of completion, over all envs;
  otherwise -1 - (transitions completed when the row was written). So stamps order all rows of an env;
- ``order`` (int32, modulo 2**32): how many transitions of the env are older than the row.

An anchor is a row that can be drawn; :mod:`relive.kernels.reference.rule` says which rows those are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ring_state import HEAD, TAIL, RingArrays

__all__ = ["Ints", "oldest", "place_after", "place_of", "row_at"]

Ints = NDArray[np.int64]


def oldest(e: int, ring: RingArrays) -> int:
    """The number of the oldest live row of an env; its HEAD, if no row is live."""
    return max(int(ring.state[e, TAIL]), int(ring.state[e, HEAD]) - ring.rows)


def place_of(number: Any, e: Any, rows: int) -> Any:
    """The place of row ``number`` of env e."""
    return e * rows + number % rows


def place_after(place: Any, begin: Any, rows: int) -> Any:
    """The place of the next row of an env whose first place is ``begin``."""
    return begin + (place - begin + 1) % rows


def row_at(place: int, ring: RingArrays) -> tuple[int, int, int]:
    """The env that owns a place, the env's first place, and the number of the newest row that was written there.

    Before the env's first round through its places, the number is negative where nothing was written.
    """
    rows = ring.rows
    e = place // rows
    head = int(ring.state[e, HEAD])
    return e, e * rows, next(number for number in range(head - rows, head) if place_of(number, e, rows) == place)
