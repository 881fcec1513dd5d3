"""Bounded: a dictionary of things made ready, that never grows large."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["LIMIT", "Bounded"]

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 64
"""The most values kept. A loop adds and draws in a handful of sizes; one that never repeats a size gains nothing."""


class Bounded(dict[K, V]):
    """What was made for a number of rows, or another key, to be used again. When it is full, it starts anew.

    The one who makes a value puts it there, so that the dictionary refers to no function, and thus to no owner: the
    memory of a buffer that is dropped is free at once.
    """

    def keep(self, key: K, value: V) -> V:
        """Keep ``value`` under ``key``, in place of all others if there are :data:`LIMIT`; returns it."""
        if len(self) >= LIMIT:
            self.clear()
        self[key] = value
        return value
