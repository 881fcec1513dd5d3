"""The arrays of a buffer under the host's names: what is written to them is stored, or is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from .common import Array

__all__ = ["Column", "Copied", "copied"]


class Column:
    """An array of a buffer, or a dictionary of those; assigning to it writes them.

    Args:
        name: what ``buffer.column`` knows it by.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, buffer: Any, owner: Any = None) -> Any:
        return self if buffer is None else buffer.column(self.name)

    def __set__(self, buffer: Any, values: Any) -> None:
        shown = buffer.column(self.name)
        if not isinstance(shown, Mapping):
            shown[...] = values
            return
        members = cast("Mapping[str, Array]", shown)
        for key, member in members.items():
            member[...] = values[key]


class Copied(np.ndarray[Any, Any]):
    """A copy of what is stored in another form, which cannot be written to.

    But for ``dones[i] = True`` of the newest step i, by which the host cuts episodes off before it resets the envs.
    """

    newest: int | None = None
    cut_off: Callable[[], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.flags.writeable:  # a copy of this copy, or what was computed from it
            super().__setitem__(key, value)
        elif self.cut_off is not None and isinstance(key, int | np.integer) and key == self.newest and np.all(value):
            self.cut_off()
        else:
            raise ValueError(
                "this array is a copy, since observations are stored once here, and nothing would come of writing to "
                "it; use ReplayBuffer without optimize_memory_usage, whose arrays are the storage"
            )


def copied(array: Array) -> Any:
    """An array that nobody else has, as one that cannot be written to."""
    shown = array.view(Copied)
    shown.flags.writeable = False
    return shown
