"""Rule: which rows of a ring can be drawn."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

from ..errors import ParameterError
from ..kernels.ring_state import NOT_FINITE, RULE, WEIGH
from ..parameters import is_count, is_flag
from ..steps.arrays import Ints

__all__ = ["WEIGHS", "Rule", "Weigh", "note_rule", "noted_rule", "require_rule"]


Weigh = Literal["windows", "steps", "episodes"]


WEIGHS: tuple[Weigh, ...] = get_args(Weigh)
"""Every way to weigh, in the order that files count them."""


class Rule(NamedTuple):
    """What can be drawn: the rows that end a window of their episode, with what is read before it still there.

    The windows of an episode start at its steps 0, ``stride``, 2 ``stride``, ... and have ``length`` steps each, but
    for the last of an episode that is over, which may be shorter. Transitions are windows of one step.
    """

    history: int = 0
    """How many rows before a window's last are read, as far as its episode has them."""
    length: int = 1
    stride: int = 1
    tails: bool = True
    """Whether a last window that is shorter counts."""
    weigh: Weigh = "windows"
    """What is drawn equally often by a sampler that draws uniformly."""

    @property
    def sparse(self) -> bool:
        """Whether it takes more to draw uniformly than to draw rows until one can be drawn."""
        return self.length > 1 or self.weigh == "episodes"


def require_rule(rule: Rule) -> None:
    """Refuse a rule that kernels cannot follow; the views of relive give none.

    Raises:
        ParameterError: it asks for rows that are not there, or for windows without steps.
    """
    history, length, stride, tails, weigh = rule
    counts = all(is_count(count) and count < 2**31 for count in (history, length, stride))
    if not (counts and 1 <= stride <= length <= history + 1 and is_flag(tails) and weigh in WEIGHS):
        raise ParameterError(
            f"a view's rule is {rule!r}: expected a history of at least length - 1 rows, a stride from 1 to length, "
            f"all below 2**31, tails True or False, and weigh one of {WEIGHS}"
        )


def note_rule(rule: Rule, counters: Ints) -> None:
    """Write a rule where kernels, and files, have it: into the counters of a ring."""
    counters[RULE:NOT_FINITE], counters[WEIGH] = rule[:4], WEIGHS.index(rule.weigh)


def noted_rule(counters: Ints) -> Rule:
    """The rule that :func:`note_rule` wrote.

    Raises:
        ParameterError: these counters hold none.
    """
    history, length, stride, tails, _, weigh = counters[RULE : WEIGH + 1].tolist()
    known = cast("Any", WEIGHS[weigh]) if 0 <= weigh < len(WEIGHS) else weigh
    rule = Rule(history, length, stride, bool(tails) if tails in (0, 1) else tails, known)
    require_rule(rule)
    return rule
