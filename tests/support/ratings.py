"""Priorities that the compiled core and their definition change alike, and tensors that they may be changed by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from definitions import priorities as plain
from relive import Prioritized, core
from relive.core.words import LARGEST
from support import internals
from support.twins import Twin

PRIVATE: Any = torch


class Pair:
    """Priorities of a ring that was played at random, twice: for the definition, and for compiled code."""

    def __init__(self, seed: int, alpha: float = 0.6, minima: bool = False) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.num_envs = int(rng.integers(1, 4))
        sampler = Prioritized(alpha, stratified=bool(rng.integers(2)))
        self.twin = Twin(self.num_envs, int(rng.integers(2, 30)), sampler=sampler)
        for _ in range(int(rng.integers(1, 50))):
            self.twin.add("".join(rng.choice(list("...TUB"), self.num_envs)))
        self.ring: Any = internals.ring(self.twin.buffer)
        for place in self.ring.anchors().tolist():
            sampler.rate(self.ring.index_of(np.array([place])), rng.gamma(1.0, 3.0, 1).astype(np.float32), None, None)
        if minima and self.ring.drawable:
            internals.tree(sampler).minimum_positive()
        room = int(rng.integers(0, 3))  # for no notes of what changes, for few, or for all
        undo = np.zeros((0, 2 + 2 * int(rng.integers(0, 9)), 200)[room])
        self.plain, self.memory = (self._copied(sampler, undo) for _ in range(2))
        tree = core.Tree(self.memory.nodes, len(self.memory.errors), self.memory.minima)
        self.core = core.Priorities(tree, self.memory.errors, self.memory.facts, self.ring.core, self.memory.undo)

    def _copied(self, sampler: Any, undo: Any) -> plain.Memory:
        tree, facts = internals.tree(sampler), internals.bound(sampler)().facts
        arrays = [
            tree.nodes.copy(),
            internals.offsets(tree).tolist(),
            tree.minima.copy(),
            internals.errors(sampler).copy(),
        ]
        return plain.Memory(*arrays, facts.copy(), self.ring.arrays, undo.copy())

    def agree(self) -> None:
        """Both have the same bits, and nothing is left to be taken back."""
        for name in ("nodes", "minima", "errors", "facts", "undo"):
            assert getattr(self.plain, name).tobytes() == getattr(self.memory, name).tobytes(), name
        assert not self.plain.undo[:1].any()

    def state(self) -> list[bytes]:
        """All that the definition keeps."""
        return [getattr(self.plain, name).tobytes() for name in ("nodes", "minima", "errors", "facts")]

    def index(self) -> Any:
        """Public indices of rows that can be drawn."""
        return self.ring.index_of(self.ring.anchors())

    def rate(self, index: Any, errors: Any) -> int:
        """Rate in both; compiled code gets strided arrays or tensors."""
        steps = self.rng.integers(1, 4, 2).tolist()
        spread = [np.zeros(len(x) * k, x.dtype)[::k] for x, k in zip((index, errors), steps, strict=True)]
        for target, source in zip(spread, (index, errors), strict=True):
            target[:] = source
        read = [torch.from_numpy(x) if self.rng.integers(2) else x for x in spread]
        found = self.core.rate(*read)
        assert found == plain.rate(self.plain, index.tolist(), list(errors))
        self.agree()
        return found


def long_way(self: Any, *given: Any) -> int:
    """``Prioritized.rate`` that has nothing read by compiled code before it was checked."""
    late = self._rate_checked(*given)
    self.noted_largest = self._bound().facts.item(LARGEST)
    return late


def lazily_negated(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, of which torch keeps the negatives."""
    return PRIVATE._neg_view(-x)
