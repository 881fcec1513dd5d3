"""Priorities that both twins of a kernel change, and tensors that they may be changed by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import inside
from relive import Prioritized
from relive.kernels import cpu, reference
from twins import Twin

PRIVATE: Any = torch


class Pair:
    """Priorities of a ring that was played at random, twice: for the plain twin, and bound for the fast one."""

    def __init__(self, seed: int, alpha: float = 0.6, minima: bool = False) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.num_envs = int(rng.integers(1, 4))
        sampler = Prioritized(alpha, stratified=bool(rng.integers(2)))
        self.twin = Twin(self.num_envs, int(rng.integers(2, 30)), sampler=sampler)
        for _ in range(int(rng.integers(1, 50))):
            self.twin.add("".join(rng.choice(list("...TUB"), self.num_envs)))
        self.ring: Any = inside.ring(self.twin.buffer)
        for place in self.ring.anchors().tolist():
            sampler.update(np.array([place]), rng.gamma(1.0, 3.0, 1).astype(np.float32))
        if minima and self.ring.drawable:
            inside.tree(sampler).minimum_positive()
        memory = inside.bound(sampler)().memory  # the kernels do not write to the ring
        room = int(rng.integers(0, 3))  # for no notes of what changes, for few, or for all
        undo = np.zeros((0, 2 + 2 * int(rng.integers(0, 9)), 200)[room])
        self.plain: Any = self._copied(memory, undo)
        self.memory: Any = self._copied(memory, undo)
        self.handle = cpu.handle_of(self.memory._replace(ring=self.ring.handle))

    @staticmethod
    def _copied(memory: Any, undo: Any) -> Any:
        arrays = {name: array.copy() for name, array in memory._asdict().items() if name not in ("ring", "undo")}
        return reference.Priorities(**arrays, ring=memory.ring, undo=undo.copy())

    def agree(self) -> None:
        """Both have the same bits, and nothing is left to be taken back."""
        for name, one in self.plain._asdict().items():
            if name != "ring":
                assert one.tobytes() == getattr(self.memory, name).tobytes(), name
        assert not self.plain.undo[:1].any()

    def index(self) -> Any:
        """Public indices of rows that can be drawn."""
        return self.ring.index_of(self.ring.anchors())

    def rate(self, index: Any, errors: Any) -> int:
        """Rate in both; strided tensors of either dtype for the fast one."""
        stride, wide = int(self.rng.integers(1, 4)), errors.dtype == np.float64
        spread = [torch.zeros(len(x) * stride, dtype=torch.from_numpy(x).dtype)[::stride] for x in (index, errors)]
        for target, source in zip(spread, (index, errors), strict=True):
            target[:] = torch.from_numpy(source)
        places = (number for x in spread for number in (x.data_ptr(), x.stride(0)))
        found = cpu.rate(self.handle, len(index), *places, wide)
        assert found == reference.rate(self.plain, index, errors)
        self.agree()
        return found


def lazily_negated(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, of which torch keeps the negatives."""
    return PRIVATE._neg_view(-x)
