"""Finals: what truncated episodes ended on, until one call at the end of a collection values it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rollout.buffer import RolloutBuffer
from .inputs import Leaves

__all__ = ["Finals", "Given"]


class Given(NamedTuple):
    """What a policy is given: observations, hidden states and the fields that come as keywords, rows ``[B, ...]``."""

    obs: Leaves
    hidden: Leaves
    info: Leaves


class _Ended(NamedTuple):
    made: int
    """How many vector steps were made before the one that ended the episodes."""
    envs: Tensor
    """The envs of those episodes, ``[K]``."""
    given: Given
    """What a policy would be given at their ends, rows ``[K, ...]``."""


class Finals:
    """The ends of truncated episodes of a rollout that have no value yet."""

    def __init__(self) -> None:
        self._made = 0
        self._waiting: list[_Ended] = []

    def clear(self) -> None:
        """Forget them."""
        self._waiting = []

    def note(self, ended: tuple[Tensor, Given] | None) -> None:
        """One more vector step was added to the rollout; with the envs it truncated, and what they ended on."""
        if ended is not None:
            self._waiting.append(_Ended(self._made, *ended))
        self._made += 1

    def after(self, now: Given) -> Given:
        """The rows ``now``, and after them those of all ends."""
        ends = [ended.given for ended in self._waiting]
        return Given(*(_joined(leaves, [given[i] for given in ends]) for i, leaves in enumerate(now)))

    def set_values(self, buffer: RolloutBuffer, values: Tensor) -> None:
        """Hand the values of all ends to the rollout, in the order of :meth:`after`."""
        if self._waiting:
            # counted from the newest step, so that it does not matter what has left the buffer meanwhile
            steps = torch.cat([torch.full_like(e.envs, buffer.steps - (self._made - e.made)) for e in self._waiting])
            envs = torch.cat([ended.envs for ended in self._waiting])
            kept = steps >= 0
            buffer.set_final_value(steps[kept], envs[kept], values[kept])
        self.clear()


def _joined(first: Leaves, others: list[Leaves]) -> Leaves:
    return {path: torch.cat([x, *(leaves[path] for leaves in others)]) for path, x in first.items()}
