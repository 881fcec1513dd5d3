"""Uniform and WithoutReplacement: draws that treat all transitions equally."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from ..errors import InvariantError, ParameterError
from ..ring.ring import Ring
from ..steps.arrays import Ints
from .contract import Extras, Sampler, Terms, refuse_weights, require_own_ring
from .sequence_weights import WindowWeights, nothing_to_draw
from .sumtree import SumTree

__all__ = ["Uniform", "WithoutReplacement"]


PLAIN = 0, False, 0.0, 0.0
"""No priorities, and all that is there."""
ALIKE: Terms = None, PLAIN
"""All transitions alike."""


class Uniform(Sampler):
    """Draws every transition with the same probability, with replacement.

    Windows of :class:`relive.Sequence` are drawn as its ``weigh`` says.
    """

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._windows: WindowWeights | None = None

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        self._ring = require_own_ring(self._ring, ring, self)
        self._windows = WindowWeights(ring) if ring.rule.sparse else None
        self.watches = ring.rule.sparse

    def nbytes(self, rows: int) -> int:
        """Bytes of the tree of window weights; 0 without sequences."""
        return SumTree.nbytes(rows) if self._windows is not None else 0

    def changed(self, places: Ints, drawable: Any) -> None:
        """Note which sequences can be drawn."""
        if self._windows is not None:
            self._windows.changed(places, drawable)

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]``."""
        return self.draw_recent(count, key, 0)

    def terms(self, update: int, of: int) -> Terms | None:
        """See :class:`Sampler`."""
        if self._windows is None:
            return ALIKE
        tree = self._windows.tree
        return None if tree is None else (tree, PLAIN)

    def draw_recent(self, count: int, key: int, newest: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]`` among the ``newest`` completed transitions (0: among all)."""
        if self._windows is not None:
            return self._windows.draw(count, key, newest), {}
        places = self._ring.draw(count, key, newest) if self._ring is not None else None
        if places is None:
            raise nothing_to_draw(self._ring)
        return places, {}

    @property
    def mass(self) -> float:
        """The number of transitions that can be drawn, or the summed weights of sequences: a shard's share of draws."""
        if self._windows is not None:
            return self._windows.total
        return float(self._ring.drawable) if self._ring is not None else 0.0

    def check(self) -> None:
        """Check the weights of sequences.

        Raises:
            InvariantError: names the first place with a wrong weight.
        """
        if self._windows is not None:
            self._windows.check()

    def __repr__(self) -> str:
        return "Uniform()"


class WithoutReplacement(Sampler):
    """Epochs: every transition is drawn once, in random order, before any comes again.

    An epoch consists of the transitions that could be drawn when it began. Those that have left the buffer since are
    skipped, and new ones wait for the next epoch. A batch may take its rest from the next epoch.
    """

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._rest: Ints = np.empty(0, np.int64)
        """The indices still to come in this epoch."""

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        refuse_weights(ring, self)
        self._ring = require_own_ring(self._ring, ring, self)

    def nbytes(self, rows: int) -> int:
        """Bytes of the order of an epoch, int64. A new epoch takes three times as much for a moment."""
        return 8 * rows

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]``, all different unless a new epoch begins among them.

        Raises:
            EmptyError: there is nothing to draw.
            ParameterError: there are fewer than ``count`` transitions.
        """
        ring = self._ring
        if ring is None or not ring.drawable:
            raise nothing_to_draw(ring)
        if count > ring.drawable:
            items = "transitions" if ring.rule.length == 1 else "sequences"
            raise ParameterError(f"sample({count}): there are {ring.drawable} {items} to draw without replacement")
        found: list[Ints] = []
        missing = span = count
        rest, epoch = self._rest, 0
        while missing:
            if not len(rest):
                index = ring.index_of(ring.anchors())
                rest, epoch = index[kernels.permutation(len(index), key, epoch).numpy()], epoch + 1
            places, _ = ring.find(rest[:span])
            alive = np.flatnonzero(places >= 0)[:missing]
            found.append(places[alive])
            missing -= len(alive)
            rest = rest[len(places) if missing else int(alive[-1]) + 1 :]
            span *= 2  # long runs of indices that left the buffer are passed quickly
        self._rest = rest  # set last: an interrupted draw must not consume indices
        return np.concatenate(found), {}

    def draw_state(self) -> Ints:
        """The indices still to come in this epoch, int64. They are never written to, so this copies nothing."""
        return self._rest

    def undo_draws(self, draw_state: Ints) -> None:
        """See :class:`Sampler`."""
        self._rest = draw_state

    def check(self) -> None:
        """Check that the epoch consists of transitions that were stored.

        Raises:
            InvariantError: an index was never issued.
        """
        if self._ring is not None:
            _, unknown = self._ring.find(self._rest)
            if unknown >= 0:
                raise InvariantError(f"sampler: the epoch has index {self._rest[unknown]}, which was never issued")

    def state_dict(self) -> dict[str, Any]:
        """The indices still to come in this epoch."""
        return {"order": self._rest.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the epoch of another sampler."""
        self._rest = np.array(state["order"], np.int64)

    def __repr__(self) -> str:
        return "WithoutReplacement()"
