"""Episodes: where the episodes of a rollout start and end, and whether the last ones go on."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..steps.arrays import as_host
from .columns import Columns
from .named import NamedColumns
from .windows import Flags

__all__ = ["Episodes"]

_CUTS = ("terminated", "truncated", "mask")
"""The columns that show where episodes end, and which steps are real."""


class Episodes:
    """The episodes of a rollout.

    Args:
        columns: of the rollout.
        named: the same by name.
    """

    def __init__(self, columns: Columns, named: NamedColumns) -> None:
        self._columns, self._named = columns, named
        self.ended: NDArray[np.bool_] = np.ones(columns.num_envs, np.bool_)
        """Whether the episode before the first row had ended, bool ``[N]``."""
        self.interrupted = False
        """Whether the episodes of the newest row will not go on, though its flags do not show it."""

    def flags(self) -> Flags:
        """What cuts the rollout into episodes."""
        leaves = [leaf for name in _CUTS for leaf in self._named.leaves((name,))]
        return self._flags([self._columns.ordered(leaf) for leaf in leaves])

    def _flags(self, columns: list[Tensor]) -> Flags:
        if columns[0].is_cpu:
            terminated, truncated, real = (as_host(column) for column in columns)
        else:  # together: each copy from a device waits for it
            terminated, truncated, real = as_host(torch.stack(columns))
        return Flags(terminated | truncated, real, self.ended)

    @property
    def are_known(self) -> bool:
        """Whether the steps say where episodes end."""
        return {("terminated",), ("truncated",)} <= self._columns.own

    def ended_by_now(self) -> NDArray[np.bool_]:
        """Whether the next step of each env starts an episode, bool ``[N]``."""
        if self.interrupted:
            return np.ones(self._columns.num_envs, np.bool_)
        return self.flags().ended.view(np.bool_) if self._columns.count and self.are_known else self.ended

    def ended_after(self, rows: slice) -> NDArray[np.bool_]:
        """The same after the oldest rows, which lie at these places."""
        if not self.are_known:
            return self.ended
        return self._flags([self._columns.view((name,), rows) for name in _CUTS]).ended.view(np.bool_)
