"""Rule: which rows of a ring can be drawn."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Rule", "Weigh"]


Weigh = Literal["windows", "steps", "episodes"]


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
