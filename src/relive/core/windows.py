"""Numbers that compiled code and its callers share where windows are read."""

from __future__ import annotations

__all__ = ["EPISODE", "FINAL", "FIRST", "FUTURE", "OTHERS", "PAST", "RANDOM"]


FIRST = 5
"""The row of the facts about sequences with the place of each one's row 0. Those before it are fields of a batch: the
public index of the window's anchor, its number of rows, how many of them are burn-in, its env, and the number of its
first step within the env."""

FUTURE, FINAL, EPISODE, PAST, RANDOM = range(5)
"""The strategies, which say where a goal may come from: the steps from the anchor on, the last, all of the episode,
those before the anchor; or any step of the whole replay."""

OTHERS = 2**32 + 1
"""The number of a batch's further stream, by which the goals of RANDOM are drawn."""
