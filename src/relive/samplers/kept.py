"""KeptPriorities: the memory of the priorities of a replay in files, and how it is repaired after a kill."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvariantError
from ..kernels.reference.priorities import (
    ALL_RATED,
    ALPHA,
    DRAWS,
    EPS,
    FACTS,
    LARGEST,
    LARGEST_ERROR,
    RATED,
    RATED_LARGEST,
    RATED_START,
)
from ..ring.adding import Change, Ended
from ..ring.ring import Ring
from ..steps.arrays import Doubles, Ints
from .sumtree import SumTree
from .weighing import powers_of, require_errors

__all__ = ["KeptPriorities", "rebuilding", "require_usable"]


MOST = 2**16
"""The most errors of one update whose old values are noted before they change."""


class KeptPriorities:
    """The errors, the tree and the facts of a ring whose memory outlives the process.

    Args:
        ring: the ring.
    """

    def __init__(self, ring: Ring) -> None:
        keeper, rows = ring.store.keeper, ring.store.num_rows
        self.resumed = keeper.has("nodes")
        """Whether an earlier process kept them."""
        self.errors: NDArray[np.float32] = keeper.take("errors", (rows,), np.float32)
        self.tree = SumTree(rows, keeper.take("nodes", (SumTree.count_nodes(rows),), np.float64))
        self.facts: Doubles = keeper.take("facts", (FACTS,), np.float64)
        self.undo: Doubles = keeper.take("errors.undo", (RATED_START + 2 * min(rows, MOST),), np.float64)

    def restore(self, ring: Ring, default_error: float | None) -> Ints | None:
        """Put back the errors of an update that a kill broke off. If a kill interrupts this call, call it again.

        Transitions that can be drawn for the first time get the error of new ones: ``default_error``, or if it is None
        the largest so far.

        Returns:
            the places whose weights are in doubt, those that the ring doubts included; None if any weight may be wrong.

        Raises:
            InvariantError: the facts or the notes make no sense.
        """
        facts, undo, count = self.facts, self.undo, float(self.undo[RATED])
        most = (len(undo) - RATED_START) // 2
        if count != ALL_RATED and not (0 <= count <= most and count == int(count)):
            raise InvariantError(f"sampler: {count} errors to put back; expected 0 to {most}")
        places = np.zeros(0, np.int64)
        if count > 0:
            pairs = undo[RATED_START : RATED_START + 2 * int(count)].reshape(-1, 2)
            if not ((pairs[:, 0] >= 0) & (pairs[:, 0] < ring.store.num_rows) & (pairs[:, 1] <= LARGEST_ERROR)).all():
                raise InvariantError("sampler: an error to put back is that of no row")
            places = pairs[:, 0].astype(np.int64)
            self.errors[places], facts[LARGEST] = pairs[:, 1], undo[RATED_LARGEST]
        counts = 0 <= facts[DRAWS] < 2**53 and facts[DRAWS] == int(facts[DRAWS])
        if not (counts and 0 <= facts[LARGEST] <= LARGEST_ERROR and facts[ALPHA] >= 0 and facts[EPS] > 0):
            raise InvariantError(f"sampler: {facts.tolist()} are not an exponent, an eps, an error and a count")
        self.errors[ring.fresh] = facts[LARGEST] if default_error is None else default_error
        if count == ALL_RATED or ring.doubtful is None:
            return None
        return np.unique(np.concatenate([places, ring.doubtful]))

    def mend(self, ring: Ring, doubtful: Ints) -> None:
        """Compute the weights at ``doubtful`` places, and all sums above them, again from the errors.

        Raises:
            NotFiniteError: an error is negative or not finite.
        """
        index, weights = ring.index_of(doubtful), np.zeros(len(doubtful))
        written = np.flatnonzero(index >= 0)
        drawable = written[ring.find(index[written])[0] >= 0]
        errors = self.errors[doubtful[drawable]]
        require_errors(errors)
        weights[drawable] = powers_of(errors, *self.facts[[ALPHA, EPS]].tolist())
        self.tree.put(doubtful, weights)

    def __reduce__(self) -> Any:
        """For pickle and deepcopy: None. A copy of a sampler starts in memory of its own."""
        return type(None), ()

    def end(self) -> None:
        """Forget the notes, once the weights that :meth:`restore` doubted are right again."""
        self.undo[RATED] = 0.0


def require_usable(ring: Ring) -> None:
    """Refuse to change priorities in files that this process does not hold. Calls of the replay check this themselves.

    Raises:
        LifecycleError: the ring was closed, or belongs to the parent of this process.
    """
    if isinstance(ring.pending, Ended):
        raise ring.pending.error()


@contextmanager
def rebuilding(ring: Ring) -> Generator[None]:
    """In this context all priorities of a ring are replaced. After a kill or an exception they are computed again.

    Raises:
        LifecycleError: the ring was closed, or belongs to the parent of this process.
    """
    if ring.undo is None:
        yield
        return
    require_usable(ring)
    ring.undo.begin_rebuild(ring)
    ring.pending = Change()
    yield
    ring.settle()
