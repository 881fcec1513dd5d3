"""Episodes: where the episodes of a rollout start and end, and the windows that they are cut into."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..batches.sequences import WHOLE
from ..steps.arrays import Ints, as_host
from .columns import Columns
from .named import NamedColumns

__all__ = ["BEGINS", "ENV", "LENGTH", "ORIGIN", "START", "Episodes", "Flags", "cut"]

ENV, START, LENGTH, ORIGIN, BEGINS = range(5)
"""The columns of a table of windows: the env, the first step, how many steps, the episode's first step in this rollout
or 0, and 1 if the episode begins there."""

_CUTS = ("terminated", "truncated", "mask")
"""The columns that say where episodes end, and which steps are real."""


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
        """Whether the episodes of the newest row were broken off, although its flags do not say so."""

    def flags(self) -> Flags:
        """Where the episodes of the present steps start and end."""
        leaves = [leaf for name in _CUTS for leaf in self._named.leaves((name,))]
        return self._flags([self._columns.ordered(leaf) for leaf in leaves])

    def _flags(self, columns: list[Tensor]) -> Flags:
        if columns[0].is_cpu:
            terminated, truncated, real = (as_host(column) for column in columns)
        else:  # in one copy: each one waits for the device
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
        """Whether the episodes have ended after the oldest rows, which lie at these places, bool ``[N]``."""
        if not self.are_known:
            return self.ended
        return self._flags([self._columns.view((name,), rows) for name in _CUTS]).ended.view(np.bool_)


class Flags:
    """Where the episodes of a rollout start and end: ``done``, ``real`` and ``starts``, uint8 ``[T, N]``.

    Args:
        done: bool ``[T, N]``, ``terminated | truncated``.
        real: bool ``[T, N]``, the rollout's mask.
        ended: bool ``[N]``, whether the episode before the first row had ended.
    """

    def __init__(self, done: NDArray[Any], real: NDArray[Any], ended: NDArray[Any]) -> None:
        self.done, self.real = (np.ascontiguousarray(x).view(np.uint8) for x in (done, real))
        self.starts, self.ended = np.empty_like(self.done), ended.astype(np.uint8)
        """1 at the first step of an episode, ``[T, N]``; and 1 where the newest episode has ended, ``[N]``."""
        kernels.fast().episode_starts(self.done, self.real, self.ended, self.starts)


def cut(flags: Flags, length: int | None, stride: int, drop_tail: bool, complete: bool) -> Ints:
    """The windows of ``length`` steps, or of whole episodes if it is None, as a table ``[K, 5]``."""
    size, stride = WHOLE if length is None else min(length, WHOLE), min(stride, WHOLE)
    arguments = flags.done, flags.real, flags.starts, size, stride, not drop_tail or length is None, complete
    room = np.empty((flags.done.size // min(stride, size) + flags.done.size // 8 + 8, 5), np.int64)
    found = kernels.fast().plan_windows(*arguments, room)
    if found > len(room):
        room = np.empty((found, 5), np.int64)
        kernels.fast().plan_windows(*arguments, room)
    return room[:found]
