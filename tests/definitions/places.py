"""Where the rows of a ring lie: places, and the numbers of the rows that lie there.

Row ``number`` of env e lies at place ``e * rows + number % rows``. A ring is a :class:`relive.core.words.RingArrays`.
"""

from __future__ import annotations

from typing import Any

from relive.core.words import HEAD, TAIL


def oldest(e: int, ring: Any) -> int:
    """The number of the oldest live row of an env; its HEAD, if no row is live."""
    return max(int(ring.state[e, TAIL]), int(ring.state[e, HEAD]) - ring.rows)


def place_of(number: int, e: int, rows: int) -> int:
    """The place of row ``number`` of env e."""
    return e * rows + number % rows


def place_after(place: int, rows: int) -> int:
    """The place of the next row of the env that owns a place."""
    begin = place // rows * rows
    return begin + (place - begin + 1) % rows


def row_at(place: int, ring: Any) -> tuple[int, int]:
    """The env that owns a place, and the number of the newest row that was written there.

    Before the env's first round through its places, the number is negative where nothing was written.
    """
    e = place // ring.rows
    head = int(ring.state[e, HEAD])
    return e, next(number for number in range(head - ring.rows, head) if place_of(number, e, ring.rows) == place)
