"""The queue of whole rollouts on their way to a learner. Nothing here knows how its messages travel."""

from __future__ import annotations

import os
from collections import deque
from typing import NamedTuple

from ..errors import LifecycleError
from .blocks import Block

__all__ = ["Fetched", "Label", "RolloutQueue"]


class Label(NamedTuple):
    """The label that identifies a rollout."""

    worker: str
    life: str
    """The life of the sender: another one after every restart of the worker."""
    number: int
    """The number of the rollout in this life, from 1."""
    version: int
    """The version of the policy that played it."""


class Fetched(NamedTuple):
    """The queue's answer to the learner."""

    born: str
    """The life of the queue."""
    place: int
    """The place in line of the last rollout that was given or dropped."""
    label: Label | None
    block: Block | None
    """The rollout, or None if there is none yet."""
    dropped: list[Label]
    """Rollouts before this one that were too old."""


class RolloutQueue:
    """The rollouts on their way, in the order in which they came. The queue runs in a process of its own.

    Args:
        capacity: the most rollouts kept. Those that were fetched and not settled count, too.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._born = capacity, os.urandom(8).hex()
        self._kept = deque[tuple[int, Label, Block]]()
        self._came = 0
        self._last: dict[str, tuple[str, int]] = {}
        self._repeated = 0

    def begin(self, worker: str, life: str) -> None:
        """Note that a sender begins. Earlier senders of the same worker are refused from now on."""
        self._last[worker] = life, 0

    def room(self) -> bool:
        """Whether there is room for another rollout."""
        return len(self._kept) < self._capacity

    def put(self, label: Label, block: Block) -> bool:
        """Keep a rollout; False if there is no room. A rollout that came before is not kept again.

        Raises:
            LifecycleError: the worker has a newer sender.
        """
        life, number = self._last.get(label.worker, (label.life, 0))
        if life != label.life:
            raise LifecycleError(f"worker {label.worker!r} has a newer sender; give each worker a name of its own")
        if label.number <= number:
            self._repeated += 1
            return True
        if not self.room():
            return False
        self._came += 1
        self._kept.append((self._came, label, block))
        self._last[label.worker] = label.life, label.number
        return True

    def fetch(self, born: str, place: int, oldest: int) -> Fetched:
        """The first rollout behind this place in line whose version is at least ``oldest``. Older ones are dropped.

        The place belongs to the life ``born`` of the queue. If the queue is in another life, the line begins anew.
        """
        place, dropped = place if born == self._born else 0, list[Label]()
        for entry in [kept for kept in self._kept if kept[0] > place]:
            place, label, block = entry
            if label.version >= oldest:
                return Fetched(self._born, place, label, block, dropped)
            dropped.append(label)
            self._kept.remove(entry)
        return Fetched(self._born, place, None, None, dropped)

    def settle(self, born: str, place: int) -> None:
        """Remove the rollouts up to this place in line: the learner does not need them again."""
        while born == self._born and self._kept and self._kept[0][0] <= place:
            self._kept.popleft()

    def stats(self) -> dict[str, float]:
        """``came``, ``kept``, ``repeated``: how many rollouts came, how many are kept, and how many came again."""
        return {"came": float(self._came), "kept": float(len(self._kept)), "repeated": float(self._repeated)}
