"""Finals: the final observations of truncated episodes, kept until one call at a collection's end values them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import FullError
from ..rollout.buffer import RolloutBuffer
from .inputs import Leaves

__all__ = ["Finals", "Given", "room"]


class Given(NamedTuple):
    """The inputs of a policy: observations, hidden states and the fields passed as keywords, rows ``[B, ...]``."""

    obs: Leaves
    hidden: Leaves
    info: Leaves


class _Ended(NamedTuple):
    made: int
    """How many vector steps were played before the one that ended the episodes."""
    envs: Tensor
    """The envs of those episodes, ``[K]``."""
    given: Given
    """The inputs of a policy at their final observations, rows ``[K, ...]``."""


class Finals:
    """The ends of truncated episodes of a rollout that have no value yet."""

    def __init__(self) -> None:
        self._made = 0
        self._waiting: list[_Ended] = []

    def clear(self) -> None:
        """Forget them."""
        self._waiting = []

    def note(self, ended: tuple[Tensor, Given] | None) -> None:
        """Note a vector step that was added to the rollout, with the envs that it truncated and their final inputs."""
        if ended is not None:
            self._waiting.append(_Ended(self._made, *ended))
        self._made += 1

    def after(self, now: Given) -> Given:
        """The rows ``now``, followed by those of all ends."""
        ends = [ended.given for ended in self._waiting]
        return Given(*(_joined(leaves, [given[i] for given in ends]) for i, leaves in enumerate(now)))

    def set_values(self, buffer: RolloutBuffer, values: Tensor) -> None:
        """Pass the values of all ends, in the order of :meth:`after`, to the rollout."""
        if self._waiting:
            # counted from the newest step, since a rollout that wraps may have dropped old steps
            steps = torch.cat([torch.full_like(e.envs, buffer.steps - (self._made - e.made)) for e in self._waiting])
            envs = torch.cat([ended.envs for ended in self._waiting])
            kept = steps >= 0
            buffer.set_final_value(steps[kept], envs[kept], values[kept])
        self.clear()


def _joined(first: Leaves, others: list[Leaves]) -> Leaves:
    return {path: torch.cat([x, *(leaves[path] for leaves in others)]) for path, x in first.items()}


def room(buffer: RolloutBuffer, wanted: int | None) -> int:
    """How many vector steps to play; clears a full rollout.

    Raises:
        FullError: more are wanted than the buffer can take.
    """
    left = buffer.num_steps if buffer.is_full else buffer.num_steps - buffer.steps
    count = left if wanted is None else wanted
    if count > left and not buffer.wrap:
        raise FullError(f"collect({count!r}): the buffer has room for {left} more steps; collect 1 to {left}")
    if buffer.is_full and not buffer.wrap:
        buffer.clear()
    return count
