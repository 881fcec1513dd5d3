"""Numbers that compiled code and its callers share where windows are read."""

from __future__ import annotations

__all__ = ["EPISODE", "FINAL", "FUTURE", "PAST", "RANDOM"]


FUTURE, FINAL, EPISODE, PAST, RANDOM = range(5)
"""The strategies, which say where a goal may come from: the steps from the anchor on, the last, all of the episode,
those before the anchor; or any step of the whole replay."""
