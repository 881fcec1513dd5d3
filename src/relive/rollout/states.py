"""States: the recurrent states of a rollout, of every step or of every k-th."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..batches.states import swap_layers
from ..steps.trees import Path

__all__ = ["BEGINS", "ENV", "LENGTH", "ORIGIN", "START", "Empty", "Ints", "States"]

Ints = NDArray[np.int64]
ENV, START, LENGTH, ORIGIN, BEGINS = range(5)
"""The columns of a table of windows: the env, the first step, how many, where the episode starts, whether it does."""


Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a shape and dtype, of whatever content."""


class States:
    """The recurrent states of a rollout: columns ``[T, N, ...]``, or every k-th row of them.

    Args:
        columns: path -> ``[ceil(T / every), N, ...]``.
        every: k.
        initial: the state that episodes start in, path -> ``[...]``; used where that of an episode's start is not kept.
    """

    def __init__(self, columns: Mapping[Path, Tensor], every: int, initial: Mapping[Path, Tensor]) -> None:
        self._columns = {path: column.flatten(0, 1) for path, column in columns.items()}
        self._bits = {path: x.reshape(len(x), -1).view(torch.uint8) for path, x in self._columns.items()}
        self.every, self._initial = every, initial

    def first_rows(self, windows: Ints) -> Ints:
        """Where to start to unroll: at the window, at the last state kept before it, or at the episode's start."""
        start = windows[:, START]
        return start if self.every == 1 else np.maximum(start // self.every * self.every, windows[:, ORIGIN])

    def at(self, index: Tensor, kept: Tensor, empty: Empty) -> dict[Path, Tensor]:
        """The states before rows that :meth:`first_rows` gave, ``[layers, B, size]`` or ``[B, size]``.

        ``index`` is the row's place among those that are kept, of all envs; ``kept`` is 0 where it is not one of them.
        """
        found: dict[Path, Tensor] = {}
        count, one = len(index), torch.ones_like(index)
        for path, column in self._columns.items():
            state, bits = empty((count, *column.shape[1:]), column.dtype), self._bits[path]
            kernels.gather_windows(bits, index, 1, one, bits[0], 1, state.view(count, 1, -1).view(torch.uint8))
            if self.every > 1:
                state[kept == 0] = self._initial[path]
            swapped = swap_layers(state)
            if not swapped.is_contiguous():
                swapped = empty(tuple(swapped.shape), column.dtype).copy_(swapped)
            found[path] = swapped
        return found
