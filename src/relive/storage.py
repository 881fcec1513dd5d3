"""Where the steps of a rollout lie: columns ``[T + 1, N, ...]``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .checks import numpy_view
from .errors import FullError
from .memory import zeroed
from .schema import Field, Path, nest

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Columns", "as_host", "as_tensordict"]


@cache
def _tensordict() -> Any:
    # importing tensordict takes as long as importing torch, so it waits for the first batch
    from tensordict import TensorDict

    # What is made here fits together. To check that again takes eight times as long as all the rest, a fifth of what
    # a small batch costs; the way around it has no public name.
    return getattr(TensorDict, "_new_unsafe", TensorDict)


def as_tensordict(
    leaves: Mapping[Path, Tensor], batch_size: Sequence[int], device: torch.device | None = None
) -> TensorDict:
    """The tensors, each of which begins with ``batch_size``, as a nested TensorDict.

    Nothing is copied but what is not on ``device``, if one is given.
    """
    if device is not None:
        leaves = {path: leaf.to(device) for path, leaf in leaves.items()}
    return _tensordict()(nest(leaves), batch_size=torch.Size(batch_size), device=device)


class Columns:
    """The columns ``[T + 1, N, ...]`` of a rollout: a ring of T rows, and after the newest the bootstrap row.

    ``own`` columns are there from the start; others are attached to the steps of the moment and go with them.
    Everything but :meth:`put` and the tensors themselves counts rows in the order of time, oldest first.
    """

    def __init__(
        self, leaves: Mapping[Path, Field], num_steps: int, num_envs: int, device: torch.device, wrap: bool
    ) -> None:
        self.num_steps, self.num_envs, self.device, self.wrap = num_steps, num_envs, device, wrap
        self.tensors: dict[Path, Tensor] = {}
        self._attached: set[Path] = set()
        self.start = self.count = 0
        """The place of the oldest row, and how many there are."""
        self.own = frozenset[Path]()
        self.include(leaves)

    def include(self, leaves: Mapping[Path, Field]) -> None:
        """``leaves``, in their order, are the own columns from now on: those there are stay, others begin as zeros."""
        attached = {path: self.tensors[path] for path in self._attached}
        self.tensors = {
            path: self.tensors[path] if path in self.own else self._zeros(field.shape, field.dtype)
            for path, field in leaves.items()
        }
        self.own = frozenset(self.tensors)
        self._find()
        self.tensors |= attached

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # a tensor made there could never be written to outside of it
            full = self.num_steps + 1, self.num_envs, *shape
            nbytes = math.prod(full) * dtype.itemsize
            if self.device.type != "cpu" or not nbytes:
                return torch.zeros(full, dtype=dtype, device=self.device)
            return torch.from_numpy(zeroed(nbytes)).view(dtype).view(full)

    def _find(self) -> None:
        """Note where the own columns lie."""
        own = {path: tensor for path, tensor in self.tensors.items() if path in self.own}
        # Assigning through NumPy costs a tenth of what torch does, and copying tensors by address less than that.
        self._hosts = {p: numpy_view(t) for p, t in own.items()} if self.device.type == "cpu" else None
        self._host_list = list((self._hosts or {}).values())
        self._sources = np.zeros(len(own), np.uint64)
        self._targets = np.array([t.data_ptr() for t in own.values()], np.uint64)
        self._row_bytes = np.array([t[0].nbytes for t in own.values()], np.int64)

    def __getstate__(self) -> dict[str, Any]:
        places = {"_hosts", "_host_list", "_sources", "_targets", "_row_bytes"}
        return {name: value for name, value in self.__dict__.items() if name not in places}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._find()

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
        if self.is_full and not self.wrap:
            raise FullError(
                f"the rollout already has its {self.num_steps} steps; call finish() and clear(), or create the "
                "buffer with wrap=True to keep the newest"
            )
        return (self.start + self.count) % self.num_steps

    def advance(self, rows: int) -> None:
        """The next ``rows`` are written; what was attached to the steps before them no longer fits."""
        self.release(self.count + rows - self.num_steps)
        self.detach()
        self.count += rows

    def detach(self) -> None:
        """What was attached is there no more."""
        self._attached.clear()

    def release(self, rows: int) -> None:
        """Give up the oldest rows, if ``rows`` is positive."""
        if rows > 0:
            self.detach()
            self.start, self.count = (self.start + rows) % self.num_steps, self.count - rows

    def write(self, row: int, values: Sequence[Any]) -> None:
        """Assign a checked step to a row, by its place in storage: the first leaves in order, as StepChecker does."""
        if self._hosts is None:
            for tensor, value in zip(self.tensors.values(), values, strict=False):
                tensor[row].copy_(value, non_blocking=True)
            return
        sources, hosts, tensors = self._sources, self._host_list, False
        for i, value in enumerate(values):
            if type(value) is not Tensor:
                hosts[i][row] = value
                continue
            if not tensors:
                sources.fill(0)
                tensors = True
            sources[i] = value.data_ptr()
        if tensors:
            kernels.copy_row(sources[: len(values)], self._targets, self._row_bytes, row)

    def put(self, path: Path, rows: int | slice, value: Any) -> None:
        """Assign to rows of one column, by their place in storage."""
        if self._hosts is not None:
            self._hosts[path][rows] = numpy_view(value.detach()) if isinstance(value, Tensor) else value
        else:
            self.tensors[path][rows] = value

    def place(self, rows: Tensor) -> Tensor:
        """Where rows, counted from the oldest, lie in storage."""
        return (rows + self.start) % self.num_steps

    @property
    def live(self) -> list[Path]:
        """The columns that belong to the steps of the moment."""
        return [path for path in self.tensors if path in self.own or path in self._attached]

    def below(self, path: Path) -> list[Path]:
        """The live leaves at or below a path."""
        if path in self.own or path in self._attached:
            return [path]
        return [leaf for leaf in self.live if leaf[: len(path)] == path]

    def ordered(self, path: Path) -> Tensor:
        """The written rows ``[T, N, ...]``: a view, or a copy where the ring has come round."""
        tensor, end = self.tensors[path], self.start + self.count
        if end <= self.num_steps:
            return tensor[self.start : end]
        return torch.cat([tensor[self.start : self.num_steps], tensor[: end - self.num_steps]])

    def with_last(self, path: Path) -> Tensor:
        """The written rows and the bootstrap row, ``[T + 1, N, ...]``."""
        tensor = self.tensors[path]
        if not self.start:
            return tensor[: self.count + 1]
        return torch.cat([self.ordered(path), tensor[self.num_steps :]])

    def attach(self, columns: Mapping[Path, Tensor]) -> None:
        """Write whole columns ``[T, N, ...]``, new ones where there is none of that shape and dtype.

        What is attached is so once all are written: a call that is broken off leaves none of them half new.
        """
        self._attached -= columns.keys()
        for path, column in columns.items():
            self._fill(path, column)
        self._attached |= columns.keys() - self.own

    def _fill(self, path: Path, column: Tensor) -> None:
        target = self.tensors.get(path)
        if target is None or target.shape[2:] != column.shape[2:] or target.dtype is not column.dtype:
            target = self.tensors[path] = self._zeros(tuple(column.shape[2:]), column.dtype)
        split = min(self.num_steps - self.start, self.count)
        target[self.start : self.start + split].copy_(column[:split])
        if split < self.count:
            target[: self.count - split].copy_(column[split:])


def as_host(value: Any) -> np.ndarray[Any, Any]:
    """Anything array-like, on whatever device, as a NumPy array."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
