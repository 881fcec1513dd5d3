"""View: what turns the places of drawn transitions into a batch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..ring.ring import Ints, Ring
from ..ring.rule import Rule
from ..steps.trees import Path

__all__ = ["SequenceReader", "View", "rule_of", "time_first_of"]


class View(Protocol):
    """Turns the places of anchors into the fields of a batch.

    One that reads sequences has two more members: ``rule`` (:class:`relive.ring.Rule`), what can be drawn, and
    ``time_first`` (bool), whether time is the first axis of what it reads or the second. One that cannot read every
    ring may have ``require(ring)``, which is called when it is set, and raises.
    """

    @property
    def history(self) -> int:
        """How many rows before an anchor it reads, as far as the episode has them."""
        ...

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of a batch.

        ``key`` is the stream of random numbers of the batch, for views that draw; None where nothing is drawn, as by
        :meth:`relive.ReplayBuffer.data`. One that reads through another hands it on.
        """
        ...


class SequenceReader(View, Protocol):
    """A view that reads sequences, as far as type checkers have to know it."""

    @property
    def time_first(self) -> bool:
        """Whether time is the first axis of a batch, or the second."""
        ...


def rule_of(view: View) -> Rule:
    """What can be drawn through a view: single transitions, unless it says more."""
    rule: Rule | None = getattr(view, "rule", None)
    return Rule(int(view.history)) if rule is None else rule


def time_first_of(view: View) -> bool | None:
    """Whether time is the first axis of a batch of sequences; None for a view of transitions."""
    return getattr(view, "time_first", None)
