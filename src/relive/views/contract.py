"""View: the interface of batch readers, one method; and the defaults of all else that a view may have."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from torch import Tensor

from ..ring.ring import Ring, WindowRule
from ..steps.arrays import Ints
from ..steps.schema import Path


class View(Protocol):
    """Turns the places of anchors into the fields of a batch. A view has :meth:`read`; the rest has defaults.

    ================== =========================================== ==================================================
    optional member    what it is                                  without it
    ================== =========================================== ==================================================
    ``history``        int: how many rows before an anchor the     0
                       view reads, if the episode has them
    ``rule``           :class:`relive.ring.Rule`: which rows are   every transition with its ``history``
                       anchors, for windows of several steps
    ``time_first``     bool: whether the batch is one of           None: transitions, a Batch
                       sequences ``[T, B]`` or ``[B, T]``
    ``require(ring)``  raises where the view cannot read a ring;   every ring can be read
                       called when the view is set
    ================== =========================================== ==================================================

    They may be attributes or properties, and may change at any time. Only the functions below look for them.
    """

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of a batch, read from ``ring``.

        ``places`` are those of anchors, int64 ``[B]``. ``key`` is the batch's stream of random numbers, for views that
        draw. It is None for reads without a draw, as by :meth:`relive.ReplayBuffer.data`. A view that reads through
        another one passes ``key`` on.
        """
        ...


class SequenceReader(View, Protocol):
    """A view of sequences, for type checkers."""

    @property
    def time_first(self) -> bool:
        """True if time is the first axis of a batch, not the second."""
        ...


@cache
def rule_of_transitions(history: int) -> WindowRule:
    """Every transition whose history is stored is an anchor; the same rule each time."""
    return WindowRule(int(history))


def rule_of(view: View) -> WindowRule:
    """The view's rule of what can be drawn."""
    rule: WindowRule | None = getattr(view, "rule", None)
    return rule_of_transitions(int(getattr(view, "history", 0))) if rule is None else rule


def time_first_of(view: View) -> bool | None:
    """True if time is the first axis of a batch of sequences; None for a view of transitions."""
    return getattr(view, "time_first", None)


def require_readable(view: View, ring: Ring) -> None:
    """Let the view refuse a ring that it cannot read.

    Raises:
        SchemaError: as the view says.
    """
    require = getattr(view, "require", None)
    if require is not None:
        require(ring)
