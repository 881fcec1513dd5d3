"""The episodes among stored steps: where each begins, how long it is, what it returned, and how it ended."""

from __future__ import annotations

import numpy as np

from ..steps.arrays import Array, Bools, Ints
from .experience import Experience

__all__ = ["COLUMNS", "episodes_of"]


COLUMNS = ("env", "start", "length", "return", "terminated", "truncated", "complete")
"""The columns of a table of episodes."""


def episodes_of(steps: Experience) -> dict[str, Array]:
    """A table of episodes, env by env in the order of time: a column ``[E]`` for each of :data:`COLUMNS`.

    ``start`` is the position of an episode's first stored step, among the steps as they were read. ``length`` counts
    its stored steps, and ``return`` is the sum of their rewards, without a discount. ``terminated`` and ``truncated``
    are the flags of its last stored step. ``complete`` (bool) is True if its real first step is stored and the episode
    has ended. Transitions without an order have no episodes.
    """
    size = len(steps) if steps.ordered else 0
    last = (steps.ended | ~steps.follows)[:size]
    last[-1:] = True
    ends: Ints = np.flatnonzero(last)
    starts = np.append(0, ends[:-1] + 1)[: len(ends)]
    truncated = np.zeros(len(steps), np.bool_) if steps.truncated is None else steps.truncated
    sums = np.add.reduceat(steps.reward[:size].astype(np.float64), starts) if size else np.empty(0)
    return {
        "env": steps.env[starts],
        "start": starts,
        "length": ends - starts + 1,
        "return": sums,
        "terminated": steps.terminated[ends],
        "truncated": truncated[ends],
        "complete": _begun(steps, starts) & steps.ended[ends],
    }


def _begun(steps: Experience, starts: Ints) -> Bools:
    """Whether the rows ``starts`` are known to be the first steps of their episodes."""
    if steps.step is not None:
        return steps.step[starts] == 0
    first_of_env = np.append(True, steps.env[1:] != steps.env[:-1])[starts]
    return steps.starts[starts] | (first_of_env & steps.begins)
