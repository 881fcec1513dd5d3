"""View: the interface of batch readers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..ring.ring import Ints, Ring
from ..ring.rule import Rule
from ..steps.trees import Path

__all__ = ["SequenceReader", "View", "rule_of", "time_first_of"]


class View(Protocol):
    """Turns the places of anchors into the fields of a batch.

    A view of sequences has two more members. ``rule`` (:class:`relive.ring.Rule`) says what can be drawn, and
    ``time_first`` (bool) whether time is the first axis of a batch or the second. A view that cannot read every ring
    may have ``require(ring)``, which is called when the view is set, and raises.
    """

    @property
    def history(self) -> int:
        """The number of rows before an anchor that the view reads, if the episode has them."""
        ...

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of a batch.

        ``key`` is the batch's stream of random numbers, for views that draw. It is None for reads without a draw, as by
        :meth:`relive.ReplayBuffer.data`. A view that reads through another one passes ``key`` on.
        """
        ...


class SequenceReader(View, Protocol):
    """A view of sequences, for type checkers."""

    @property
    def time_first(self) -> bool:
        """Whether time is the first axis of a batch or the second."""
        ...


def rule_of(view: View) -> Rule:
    """The view's rule of what can be drawn; single transitions if it has none."""
    rule: Rule | None = getattr(view, "rule", None)
    return Rule(int(view.history)) if rule is None else rule


def time_first_of(view: View) -> bool | None:
    """Whether time is the first axis of a batch of sequences; None for a view of transitions."""
    return getattr(view, "time_first", None)
