"""The recurrent states of a rollout, of every step or of every k-th: how they are kept, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..batches.states import swap_layers
from ..errors import ParameterError
from ..files.entries import fitting
from ..parameters import is_count
from ..steps.arrays import Ints
from ..steps.schema import Schema
from ..steps.trees import Path, descend, dotted
from .columns import Columns
from .episodes import ORIGIN, START
from .fields import Fields

__all__ = ["Empty", "KeptStates", "States", "kept_every"]


Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a shape and dtype, with arbitrary contents."""


class States:
    """The recurrent states of a rollout: columns ``[T, N, ...]``, or every k-th row of them.

    Args:
        columns: path -> ``[ceil(T / every), N, ...]``.
        every: k.
        initial: the state that episodes start in, path -> ``[...]``; used where an episode's first state is not kept.
    """

    def __init__(self, columns: Mapping[Path, Tensor], every: int, initial: Mapping[Path, Tensor]) -> None:
        self._columns = {path: column.flatten(0, 1) for path, column in columns.items()}
        self._bits = {path: x.reshape(len(x), -1).view(torch.uint8) for path, x in self._columns.items()}
        self.every, self._initial = every, initial

    def first_rows(self, windows: Ints) -> Ints:
        """Where to start to unroll: at the window, at the last state kept before it, or at the episode's start."""
        start = windows[:, START]
        return start if self.every == 1 else np.maximum(start // self.every * self.every, windows[:, ORIGIN])

    def at(self, index: Any, kept: Any, empty: Empty) -> dict[Path, Tensor]:
        """The states before rows that :meth:`first_rows` gave, ``[layers, B, size]`` or ``[B, size]``.

        Args:
            index: ``[B]``, the flat place of each state: number k * N + n is that of env n at step k * every.
            kept: ``[B]``, 0 where that step is not the row itself, which then begins an episode.
            empty: makes the results.

        ``index`` and ``kept`` are arrays if the states are in RAM, and tensors if they are on a device.
        """
        found: dict[Path, Tensor] = {}
        for path, column in self._columns.items():
            state = empty((len(index), *column.shape[1:]), column.dtype)
            if column.is_cpu:
                bits = state.view(len(index), -1).view(torch.uint8).numpy()
                bad = kernels.fast().take_rows(self._bits[path].numpy(), index, bits)
                assert bad < 0, "a window begins outside the rollout"
            else:
                torch.index_select(column, 0, index, out=state)
            if self.every > 1:
                state[torch.as_tensor(kept == 0)] = self._initial[path]
            swapped = swap_layers(state)
            if not swapped.is_contiguous():
                swapped = empty(tuple(swapped.shape), column.dtype).copy_(swapped)
            found[path] = swapped
        return found


def kept_every(every: int, schema: Schema, wrap: bool) -> int:
    """How many steps lie between two recurrent states that are kept.

    Raises:
        ParameterError: not a positive number, or above 1 where there are no states, or where the rollout wraps.
    """
    if not is_count(every, 1) or (every > 1 and (wrap or "hidden" not in schema)):
        raise ParameterError(
            f"hidden_every={every!r}: expected at least 1; more than that needs a field 'hidden', and no wrap"
        )
    return int(every)


class KeptStates:
    """Where the recurrent states of a rollout are kept: in columns like all others, or in ``rows`` of their own.

    Args:
        fields: of the rollout; where ``fields.every`` is k > 1, only the states of steps 0, k, 2k, ... are kept.
        columns: of the rollout.
    """

    def __init__(self, fields: Fields, columns: Columns) -> None:
        self._fields, self._columns = fields, columns
        self.initial: Any = None
        """The state that episodes start in, nested as ``hidden`` without the env axis; None is zeros."""
        self.rows: Columns | None = None
        """One row for every k steps, if k is above 1."""
        if fields.every > 1:
            hidden = {path: field for path, field in fields.schema.leaves.items() if path[0] == "hidden"}
            self.rows = Columns(hidden, -(-fields.num_steps // fields.every), fields.num_envs, fields.device, False)

    def write(self, rows: Columns, row: int, checked: Sequence[Any]) -> list[Any]:
        """Keep the states of a step if it is a k-th one; returns the other values of the step."""
        sparse = [path[0] == "hidden" for path in self._fields.schema.leaves]
        if row % self._fields.every == 0:
            states = [value for value, apart in zip(checked, sparse, strict=True) if apart]
            rows.write(row // self._fields.every, states)
        return [value for value, apart in zip(checked, sparse, strict=True) if not apart]

    def reader(self) -> States | None:
        """What reads the states; None if the schema has no ``hidden``."""
        hidden = [path for path in self._fields.schema.leaves if path[0] == "hidden"]
        if not hidden:
            return None
        if self.rows is None:
            return States({path: self._columns.ordered(path) for path in hidden}, 1, {})
        initial = {path: self._initial_of(path) for path in hidden}
        return States({path: self.rows.view(path) for path in hidden}, self._fields.every, initial)

    def _initial_of(self, path: Path) -> Tensor:
        leaf, device = self._fields.schema.leaves[path], self._fields.device
        if self.initial is None:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        return torch.as_tensor(descend(self.initial, path[1:])).detach().to(device, leaf.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What a save holds of them besides the columns, by name."""
        if self.rows is None:
            return {}
        states = {f".states.{dotted(path)}": self.rows.view(path) for path in self.rows.own}
        return states | {f".initial.{dotted(path)}": self._initial_of(path) for path in self.rows.own}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put what :meth:`tensors` gave back.

        Raises:
            FileFormatError, ValueError, KeyError, RuntimeError: it does not fit.
        """
        if self.rows is None:
            return
        initial: dict[Path, Tensor] = {}
        for path in self.rows.own:
            state, leaf = self.rows.view(path), self._fields.schema.leaves[path]
            state.copy_(fitting(tensors, f".states.{dotted(path)}", tuple(state.shape), state.dtype))
            initial[path] = fitting(tensors, f".initial.{dotted(path)}", leaf.shape, leaf.dtype)
        self.initial = self._fields.schema.rebuild("hidden", initial.__getitem__)
