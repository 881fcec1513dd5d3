"""Bounded: a dictionary of prepared objects that never grows large."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["LIMIT", "Bounded"]

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 64
"""The most values kept. A loop adds and draws in a handful of sizes; one that never repeats a size gains nothing."""


class Bounded(dict[K, V]):
    """Keeps what was made for a key, such as a number of rows, to use it again. When it is full, it is emptied.

    It does not make the values itself. So it refers to no function, and thus to no owner, and the memory of a buffer is
    free as soon as the buffer is dropped.
    """

    def keep(self, key: K, value: V) -> V:
        """Keep ``value`` under ``key``, in place of all others if there are :data:`LIMIT`; returns it."""
        if len(self) >= LIMIT:
            self.clear()
        self[key] = value
        return value
