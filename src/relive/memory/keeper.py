"""Keeper: what gives a replay the memory of its arrays: private memory, or files that outlive the process."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ..steps.arrays import Array
from .blocks import zeroed

__all__ = ["RAM", "Keeper", "Ram"]


class Keeper(ABC):
    """Gives a replay the memory of its rows, of the state of its ring, and of its sampler's priorities."""

    durable = False
    """Whether what the arrays hold outlives the process, so that a kill must never leave a change half done."""

    died = False
    """Whether the process that kept the arrays before ended without closing them."""

    @abstractmethod
    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of this shape and dtype. It holds zeros, or what was kept under the name before."""

    def has(self, name: str) -> bool:
        """Whether something was kept under the name before this process."""
        return False

    def expect_scan(self) -> None:  # noqa: B027 - a default, not an omission
        """All rows are about to be read, one after another."""


class Ram(Keeper):
    """Private memory of this process."""

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Zeros."""
        # An array, not a tensor: moving a tensor to shared memory would move all tensors that share its storage.
        return zeroed(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


RAM = Ram()
"""The keeper of every replay that has no other."""
