"""Columns: the memory of a rollout, a column ``[T + 1, N, ...]`` for each field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import FullError
from ..memory.blocks import zeroed
from ..memory.copier import StepCopier
from ..memory.layout import typed
from ..steps.arrays import numpy_dtype, numpy_view
from ..steps.schema import Field
from ..steps.trees import Path

__all__ = ["Columns"]


class Columns:
    """The columns ``[T + 1, N, ...]`` of a rollout: a ring of T rows, and after the newest the bootstrap row.

    ``own`` columns exist from the start. The others are attached to the present steps and leave with them.
    :meth:`view`, :meth:`write` and :meth:`put` take the place of a row in storage. All other methods count rows from
    the oldest.

    On the CPU the memory is NumPy's, and every tensor that is handed out is a new one over it. ``share_memory_()`` and
    ``torch.multiprocessing`` move the memory of a tensor: they move that tensor alone, never the columns.
    """

    def __init__(
        self, leaves: Mapping[Path, Field], num_steps: int, num_envs: int, device: torch.device, wrap: bool
    ) -> None:
        self.num_steps, self.num_envs, self.device, self.wrap = num_steps, num_envs, device, wrap
        self._on_host = device.type == "cpu"
        self._memory: dict[Path, Any] = {}
        self._dtypes: dict[Path, torch.dtype] = {}
        self._attached: set[Path] = set()
        self.layout = object()
        """A new object whenever a column gets new memory: addresses are valid while it is the same object."""
        self._own: list[Any] = []
        """The memory of the own columns, in their order."""
        self.copier: StepCopier | None = None
        """Writes steps on the CPU; None on a device."""
        self.start = self.count = 0
        """The place of the oldest row, and the number of rows."""
        self.own = frozenset[Path]()
        for name, value in self._with(leaves).items():
            setattr(self, name, value)  # once ``__dict__`` was asked for, Python looks every attribute up more slowly

    def including(self, leaves: Mapping[Path, Field]) -> dict[str, Any]:
        """The attributes of these columns once ``leaves``, in their order, are the own ones: those that exist stay, the
        others begin as zeros.
        """
        return self.__dict__ | self._with(leaves)

    def _with(self, leaves: Mapping[Path, Field]) -> dict[str, Any]:
        """Those attributes that are others then."""
        made = {
            path: self._memory[path] if path in self.own else self._zeros(field.shape, field.dtype)
            for path, field in leaves.items()
        }
        made |= {path: self._memory[path] for path in self._attached}
        dtypes = self._dtypes | {path: field.dtype for path, field in leaves.items()}
        found = {"_memory": made, "_dtypes": dtypes, "own": frozenset(leaves)}
        return found | self._found(made, dtypes, frozenset(leaves))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Memory for one column."""
        full = self.num_steps + 1, self.num_envs, *shape
        if self._on_host:
            return zeroed(math.prod(full) * dtype.itemsize).view(numpy_dtype(dtype)).reshape(full)
        with torch.inference_mode(False):  # a tensor made there could never be written to outside of it
            return torch.zeros(full, dtype=dtype, device=self.device)

    def _found(self, memory: dict[Path, Any], dtypes: dict[Path, torch.dtype], own: frozenset[Path]) -> dict[str, Any]:
        """What is noted of the memory of own columns: on the CPU nobody else can move it."""
        paths = [path for path in memory if path in own]
        arrays = [memory[path] for path in paths]
        copier = None
        if self._on_host:
            kinds, shapes = [dtypes[path] for path in paths], [array.shape[2:] for array in arrays]
            copier = StepCopier(kinds, arrays, self.num_envs, shapes)
        return {"layout": object(), "_own": arrays, "copier": copier}

    def __getstate__(self) -> dict[str, Any]:
        """Arrays, which pickle copies; tensors would be moved, or on a device handed over, by multiprocessing."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("_own", "copier")}
        if not self._on_host:
            state["_memory"] = {path: numpy_view(column.cpu()) for path, column in self._memory.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._on_host:
            columns = {path: typed(array, self._dtypes[path]) for path, array in self._memory.items()}
            self._memory = {path: column.to(self.device) for path, column in columns.items()}
        self.__dict__ |= self._found(self._memory, self._dtypes, self.own)

    def view(self, path: Path, rows: int | slice = slice(None)) -> Tensor:
        """Rows of a column ``[T + 1, N, ...]``, by their place in storage: a new tensor over its memory."""
        memory = self._memory[path][rows]
        if not self._on_host:
            return memory
        if not torch.is_inference_mode_enabled():
            return typed(memory, self._dtypes[path])
        with torch.inference_mode(False):  # as in _zeros
            return typed(memory, self._dtypes[path])

    @property
    def is_full(self) -> bool:
        """Whether all T rows are written."""
        return self.count == self.num_steps

    @property
    def last_row(self) -> int:
        """Where the bootstrap row is."""
        return self.num_steps if self.start or self.is_full else self.count

    @property
    def next_row(self) -> int:
        """Where the next step goes.

        Raises:
            FullError: there is no room and the columns do not wrap.
        """
        if self.count == self.num_steps and not self.wrap:
            raise FullError(
                f"the rollout already has its {self.num_steps} steps; call finish() and clear(), or create the "
                "buffer with wrap=True to keep the newest"
            )
        return (self.start + self.count) % self.num_steps

    def detach(self) -> None:
        """Forget what was attached."""
        if self._attached:
            self._attached.clear()

    def write(self, row: int, values: Sequence[Any]) -> None:
        """Assign a checked step to a row by its place in storage: values of the first own columns, in their order."""
        if self.copier is not None:
            self.copier.write(row, values)
            return
        for tensor, value in zip(self._own, values, strict=False):
            tensor[row].copy_(value, non_blocking=True)

    def put(self, path: Path, rows: int | slice, value: Any) -> None:
        """Assign to rows of one column, by their place in storage."""
        if self._on_host and isinstance(value, Tensor):
            value = numpy_view(value.detach())
        self._memory[path][rows] = value

    def place(self, rows: Tensor) -> Tensor:
        """Where rows, counted from the oldest, lie in storage."""
        return (rows + self.start) % self.num_steps

    @property
    def live(self) -> list[Path]:
        """The columns of the present steps: own and attached ones."""
        return [path for path in self._memory if path in self.own or path in self._attached]

    def __contains__(self, path: Path) -> bool:
        """Whether the present steps have a leaf of this path."""
        return path in self.own or path in self._attached

    def below(self, path: Path) -> list[Path]:
        """The live leaves at or below a path."""
        if path in self.own or path in self._attached:
            return [path]
        return [leaf for leaf in self.live if leaf[: len(path)] == path]

    def ordered(self, path: Path) -> Tensor:
        """The written rows ``[T, N, ...]``: a view, or a copy once the ring has wrapped."""
        end = self.start + self.count
        if end <= self.num_steps:
            return self.view(path, slice(self.start, end))
        parts = slice(self.start, self.num_steps), slice(end - self.num_steps)
        return torch.cat([self.view(path, rows) for rows in parts])

    def with_last(self, path: Path) -> Tensor:
        """The written rows and the bootstrap row, ``[T + 1, N, ...]``."""
        if not self.start:
            return self.view(path, slice(self.count + 1))
        return torch.cat([self.ordered(path), self.view(path, slice(self.num_steps, None))])

    def attach(self, columns: Mapping[Path, Tensor]) -> None:
        """Write whole columns ``[T, N, ...]``, new ones where there is none of that shape and dtype.

        They count as attached once all are written: an interrupted call leaves no column half new.
        """
        self._attached -= columns.keys()
        for path, column in columns.items():
            self._fill(path, column)
        self.keep(columns)

    def keep(self, paths: Iterable[Path]) -> None:
        """Count columns, all of whose rows are written, as attached to the present steps."""
        self._attached |= {*paths} - self.own

    def drop(self, paths: Iterable[Path]) -> None:
        """Forget columns that were attached."""
        self._attached -= {*paths}

    def is_plain(self, path: Path, dtype: torch.dtype) -> bool:
        """Whether a column ``[T + 1, N]`` of this dtype has memory in RAM, and no column is nested under its name."""
        memory = self._memory.get(path)
        plain = self._on_host and memory is not None and memory.ndim == 2 and self._dtypes[path] is dtype
        return plain and sum(known[0] == path[0] for known in self._memory) == 1

    @property
    def in_one_piece(self) -> bool:
        """Whether the columns are in RAM, and the written rows lie one after another."""
        return self._on_host and self.start + self.count <= self.num_steps

    def described(self, path: Path) -> tuple[Path, tuple[int, ...], torch.dtype]:
        """The path of a column, the shape of one env's step in it, and its dtype."""
        return path, tuple(self._memory[path].shape[2:]), self._dtypes[path]

    def address(self, path: Path) -> int:
        """The address of a column in RAM; it is valid while ``layout`` is the same object."""
        return self._memory[path].ctypes.data

    def _fill(self, path: Path, column: Tensor) -> None:
        known = self._memory.get(path)
        if known is None or known.shape[2:] != column.shape[2:] or self._dtypes[path] is not column.dtype:
            made = self._zeros(tuple(column.shape[2:]), column.dtype)
            self.layout, self._dtypes[path], self._memory[path] = object(), column.dtype, made  # at once
        target = self.view(path)
        split = min(self.num_steps - self.start, self.count)
        target[self.start : self.start + split].copy_(column[:split])
        if split < self.count:
            target[: self.count - split].copy_(column[split:])
