"""DrawCounts: how often each stored transition was drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ParameterError
from ..ring.ring import Ints, Ring
from ..ring.span import Span

__all__ = ["DrawCounts"]


MOST_WAITING = 2**15
"""Rows that wait to be counted together: one pass over many costs far less than one per batch."""


ONE = np.uint32(1)
"""Of the dtype of the counts: NumPy adds another dtype a hundred times more slowly."""


class DrawCounts:
    """Counts the draws of each transition that is stored; the count of an overwritten row starts at 0 again.

    Args:
        ring: the rows. It takes 4 bytes for each row of its capacity.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.by_place = np.zeros(ring.num_envs * ring.rows, np.uint32)
        """The draws of the row at each place of the ring, as far as they were counted; cannot overflow in practice:
        one row would have to be drawn 2**32 times."""
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
        """Count what waits. Rows that were overwritten meanwhile are left out.

        Raises:
            ParameterError: an index was never issued.
        """
        ring, heads = self.ring, self.ring.heads.copy()
        index = np.concatenate([*self._waiting, np.empty(0, np.int64)])
        self._waiting, self._rows = [], 0
        self.by_place[Span(np.maximum(self._heads, ring.oldest), heads).places(ring.rows)] = 0
        self._heads = heads
        np.add.at(self.by_place, places_of(ring, index), ONE)

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


def places_of(ring: Ring, index: Ints) -> Ints:
    """Where those rows of a batch ``[B]`` lie that are still stored. Only numbers are compared; no row is read.

    Raises:
        ParameterError: an index was never issued.
    """
    numbers, envs = index // ring.num_envs, index % ring.num_envs
    issued = (index >= 0) & (numbers < ring.heads[envs])
    if not issued.all():
        raise never_issued(index, int(np.argmin(issued)))
    return (envs * ring.rows + numbers % ring.rows)[numbers >= ring.oldest[envs]]


def never_issued(index: Ints, entry: int) -> ParameterError:
    """The error for an index that is not this replay's."""
    return ParameterError(
        f"index: entry {entry}, {index[entry]}, was never issued by this replay; pass a batch that it drew"
    )
