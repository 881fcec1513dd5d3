"""Uniform and WithoutReplacement: every transition equally often."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from ..errors import InvariantError, ShapeError
from ..ring.ring import Ints, Ring
from .contract import Extras, only, refuse_weights
from .sequence_weights import WindowWeights, nothing_to_draw
from .sumtree import SumTree

__all__ = ["Uniform", "WithoutReplacement"]


class Uniform:
    """Every transition with the same probability, with replacement; of sequences each, or as their view weighs them."""

    per_row = ()
    extras = ()

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._windows: WindowWeights | None = None
        self.watches = False

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        self._ring = only(self._ring, ring, self)
        self._windows = WindowWeights(ring) if ring.rule.sparse else None
        self.watches = ring.rule.sparse

    def nbytes(self, rows: int) -> int:
        """Nothing, but of sequences a tree of their weights."""
        return SumTree.nbytes(rows) if self._windows is not None else 0

    def changed(self, places: Ints, opens: Any) -> None:
        """Of sequences, note which can be drawn."""
        if self._windows is not None:
            self._windows.changed(places, opens)

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]``."""
        return self.draw_recent(count, key, 0)

    def draw_recent(self, count: int, key: int, newest: int) -> tuple[Ints, Extras]:
        """The same from the ``newest`` completed transitions alone (0: from all)."""
        if self._windows is not None:
            return self._windows.draw(count, key, newest), {}
        places = self._ring.draw(count, key, newest) if self._ring is not None else None
        if places is None:
            raise nothing_to_draw(self._ring)
        return places, {}

    def check(self) -> None:
        """Test that of sequences just those are noted that can be drawn.

        Raises:
            InvariantError: naming the first place where that is not so.
        """
        if self._windows is not None:
            self._windows.check()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: draws are functions of their keys."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""

    def __repr__(self) -> str:
        return "Uniform()"


class WithoutReplacement:
    """Epochs: every transition once, in random order, before any comes again.

    An epoch serves what could be drawn when it began; what has left the buffer meanwhile is passed over, what has come
    waits for the next. A batch that an epoch cannot fill goes on with the next one.
    """

    watches = False
    per_row = ()
    extras = ()

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._rest: Ints = np.empty(0, np.int64)
        """The indices that the epoch has still to serve."""

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        refuse_weights(ring, self)
        self._ring = only(self._ring, ring, self)

    def nbytes(self, rows: int) -> int:
        """The order of an epoch, int64; where one begins it takes three times as much for a moment."""
        return 8 * rows

    def changed(self, places: Ints, opens: Any) -> None:
        """Nothing to keep: what is drawn is looked up."""

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]``, all different unless an epoch ends among them.

        Raises:
            EmptyError: there is nothing to draw.
            ShapeError: there are fewer than ``count`` transitions.
        """
        ring = self._ring
        if ring is None or not ring.drawable:
            raise nothing_to_draw(ring)
        if count > ring.drawable:
            items = "transitions" if ring.rule.length == 1 else "sequences"
            raise ShapeError(f"sample({count}): there are {ring.drawable} {items} to draw without replacement")
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
            span *= 2  # so that a long run of what has left the buffer is soon passed
        self._rest = rest  # at once: a draw that is broken off has served nothing
        return np.concatenate(found), {}

    def check(self) -> None:
        """Test that the epoch consists of transitions that there were.

        Raises:
            InvariantError: one was never added.
        """
        if self._ring is not None:
            _, unknown = self._ring.find(self._rest)
            if unknown >= 0:
                raise InvariantError(f"sampler: the epoch has index {self._rest[unknown]}, which was never issued")

    def state_dict(self) -> dict[str, Any]:
        """The rest of the epoch."""
        return {"order": self._rest.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that epoch."""
        self._rest = np.array(state["order"], np.int64)

    def __repr__(self) -> str:
        return "WithoutReplacement()"
