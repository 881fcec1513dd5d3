"""DrawCounts: how often each stored transition was drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError
from ..ring.ring import Ring
from ..ring.span import Span
from ..steps.arrays import Array, Ints

__all__ = ["DrawCounts"]


MOST_WAITING = 2**15
"""How many rows wait to be counted together: one pass over many rows costs far less than one pass per batch."""


ONE = np.uint32(1)
"""A one of the counts' dtype. NumPy adds a one of another dtype a hundred times more slowly."""


class DrawCounts:
    """Counts the draws of each stored transition. When a row is overwritten, its count starts at 0 again.

    Args:
        ring: the rows. The counts take 4 bytes for each row of its capacity.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.by_place = np.zeros(ring.num_envs * ring.rows, np.uint32)
        """The draws of the row at each place of the ring, as far as they were counted. To overflow, one row would have
        to be drawn 2**32 times, which does not happen in practice."""
        self._heads: Ints = ring.heads.copy()
        """The number of each env's next row when rows were last counted: later rows start at 0."""
        self._waiting: list[Ints] = []
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the counts."""
        return self.by_place.nbytes

    def note(self, index: Ints) -> bool:
        """Remember the rows ``[B]`` of a batch, by their public index. Returns whether it is time to ``settle``."""
        self._waiting.append(index.copy())  # a batch's memory may be handed out again
        self._rows += len(index)
        return self._rows >= MOST_WAITING

    def settle(self) -> None:
        """Count the rows that wait. Rows that were overwritten meanwhile are left out.

        Raises:
            ParameterError: an index was never issued. All other rows are counted.
        """
        ring, heads = self.ring, self.ring.heads.copy()
        taken = len(self._waiting)  # the training thread may add batches meanwhile; these go on waiting
        index = np.concatenate([*self._waiting[:taken], np.empty(0, np.int64)])
        del self._waiting[:taken]
        self._rows = 0
        self.by_place[Span(np.maximum(self._heads, ring.oldest), heads).places(ring.rows)] = 0
        self._heads = heads
        unknown = first_unknown(ring, index)
        known = index if unknown < 0 else index[issued(ring, index)]
        np.add.at(self.by_place, places_of(ring, known), ONE)
        if unknown >= 0:
            raise never_issued(index, unknown)

    def of_index(self, index: Ints) -> Any:
        """The draws of transitions by public index, int64 ``[B]``; -1 where one can no longer be drawn.

        Raises:
            ParameterError: an index was never issued.
        """
        self.settle()
        places, unknown = self.ring.find(index)
        if unknown >= 0:
            raise never_issued(index, unknown)
        return np.where(places >= 0, self.by_place[places].astype(np.int64), -1)

    def of_stored(self) -> Any:
        """The draws of all transitions that can be drawn, uint32 ``[len(replay)]``."""
        self.settle()
        return self.by_place[self.ring.anchors()]

    def drawn(self) -> tuple[Ints, Ints]:
        """The stored rows that were drawn: their public index, int64 ``[K]``, and how often, int64 ``[K]``."""
        self.settle()
        envs, numbers = self.ring.live()
        draws = self.by_place[self.ring.places()]
        rows = np.flatnonzero(draws)
        return (numbers * self.ring.num_envs + envs)[rows], draws[rows].astype(np.int64)

    def restore(self, index: Array, draws: Array) -> None:
        """Continue the counts that :meth:`drawn` gave. Rows that were overwritten meanwhile are left out.

        Raises:
            ParameterError: these are not whole numbers ``[K]``, a count is out of range, or an index was never issued.
                Nothing is changed.
        """
        if index.shape != draws.shape or index.ndim != 1 or index.dtype.kind != "i" or draws.dtype.kind != "i":
            raise ParameterError(
                "Monitor: expected an index and draws, whole numbers [K], as state_dict() gave them, got "
                f"{index.dtype}{list(index.shape)} and {draws.dtype}{list(draws.shape)}"
            )
        if len(draws) and not (draws.min() >= 0 and draws.max() < 2**32):
            raise ParameterError(f"Monitor: expected draws from 0 to 2**32 - 1, got {draws.min()} to {draws.max()}")
        places, stored = located(self.ring, index)
        self.settle()
        self.by_place[:] = 0
        self.by_place[places[stored]] = draws[stored]


def issued(ring: Ring, index: Ints) -> NDArray[np.bool_]:
    """Which of these ``[B]`` are the index of a row that this ring has, or had, bool ``[B]``."""
    return (index >= 0) & (index // ring.num_envs < ring.heads[index % ring.num_envs])


def first_unknown(ring: Ring, index: Ints) -> int:
    """The first entry of ``[B]`` that was never issued, or -1."""
    known = issued(ring, index)
    return -1 if known.all() else int(np.argmin(known))


def located(ring: Ring, index: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Where the rows of a batch ``[B]`` lie or lay, and which are still stored. Only numbers are compared.

    Raises:
        ParameterError: an index was never issued.
    """
    unknown = first_unknown(ring, index)
    if unknown >= 0:
        raise never_issued(index, unknown)
    numbers, envs = index // ring.num_envs, index % ring.num_envs
    return envs * ring.rows + numbers % ring.rows, numbers >= ring.oldest[envs]


def places_of(ring: Ring, index: Ints) -> Ints:
    """The places of the rows of a batch ``[B]`` that are still stored.

    Raises:
        ParameterError: an index was never issued.
    """
    places, stored = located(ring, index)
    return places[stored]


def never_issued(index: Ints, entry: int) -> ParameterError:
    """The error for an index that is not this replay's."""
    return ParameterError(
        f"index: entry {entry}, {index[entry]}, was never issued by this replay; pass a batch that it drew"
    )
