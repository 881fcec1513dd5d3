"""What rsl_rl's storage shows of its rollout: columns as its attributes, and GAE over its one kind of done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError
from ...returns.estimators import GAE

__all__ = ["Column", "Returns", "assign"]


@dataclass(frozen=True, slots=True)
class Returns:
    """GAE where ``terminated`` holds every done, time-outs too, as rsl_rl stores it."""

    gamma: float
    lam: float
    normalize: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return GAE().reads

    def __call__(self, *, terminated: Tensor, truncated: Tensor, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        ends = {"terminated": terminated & ~truncated, "truncated": truncated}
        return GAE(self.gamma, self.lam, self.normalize)(**ends, **columns)


class Column:
    """An attribute that shows one column of the rollout as rsl_rl shapes it; assigning to it writes into the column.

    Args:
        name: the column's name in the rollout.
        scalar: whether rsl_rl has a last axis of 1 that the column has not.
        kinds: the training types that have it.
    """

    def __init__(self, name: str, *, scalar: bool = True, kinds: tuple[str, ...] = ("rl", "distillation")) -> None:
        self._name, self._scalar, self._kinds = name, scalar, kinds

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, storage: Any, owner: type | None = None) -> Any:
        if storage is None:
            return self
        if storage.training_type not in self._kinds:
            raise AttributeError(f"a storage for {storage.training_type!r} has no {self._attribute!r}")
        return storage.column(self._name, self._scalar)

    def __set__(self, storage: Any, value: Any) -> None:
        assign(self._attribute, self.__get__(storage), torch.as_tensor(value))


def assign(name: str, target: Tensor, value: Tensor) -> None:
    """Write a whole column, which must be of its shape."""
    if value.shape != target.shape:
        raise ShapeError(f"{name}: expected {tuple(target.shape)}, got {tuple(value.shape)}; write to it in place")
    target.copy_(value.detach())
