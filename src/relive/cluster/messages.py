"""Messages of a cluster: the link by which they travel, and the queue of rollouts.

Nothing here knows of Ray. :mod:`relive.cluster.ray` has the link to its actors.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ..errors import LifecycleError
from ..processes.blocks import Block

PAUSE = 0.05
"""Seconds between two questions to shards that do not answer."""


class Link(Protocol):
    """The way of messages to shards. If other processes are to send steps, the link can be pickled.

    With these three methods every rule of failures is tested in one process. Ray is imported by one module alone.
    """

    def call(self, shard: int, method: str, *arguments: object) -> object:
        """Send a message to a shard, and return what :meth:`answers` takes."""
        ...

    def answers(self, calls: Mapping[int, object], timeout: float) -> tuple[dict[int, Any], set[int]]:
        """The answers that came within ``timeout`` seconds, by key, and the keys of the calls that failed.

        A call whose answer has not come is in neither of the two. An error that a shard raised is raised here.
        """
        ...

    def close(self) -> None:
        """End the shards."""
        ...


# The queue of rollouts


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

    A rollout stays until the learner settles it: the answer to :meth:`fetch` may be lost, and the learner may restart.
    The place in line is part of the learner's state, so each rollout is consumed once over restarts, too.

    Args:
        capacity: the most rollouts in the queue. Those that were fetched and not settled count, too.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._born = capacity, os.urandom(8).hex()
        self._line = deque[tuple[int, Label, Block]]()
        """The rollouts that are not settled, each with its place in line. Places grow and are never used again."""
        self._came = 0
        self._last: dict[str, tuple[str, int]] = {}
        """The life of each worker's sender, and the number of the last rollout that came from it."""
        self._repeated = 0

    def begin(self, worker: str, life: str) -> None:
        """Note that a sender begins. Earlier senders of the same worker are refused from now on."""
        self._last[worker] = life, 0

    def room(self) -> bool:
        """True if there is room for another rollout."""
        return len(self._line) < self._capacity

    def put(self, label: Label, block: Block) -> bool:
        """Keep a rollout; False if there is no room. A rollout that came before is not kept again.

        Raises:
            LifecycleError: the worker has a newer sender.
        """
        life, number = self._last.get(label.worker, (label.life, 0))
        if life != label.life:
            raise LifecycleError(f"worker {label.worker!r} has a newer sender; give each worker a name of its own")
        if label.number <= number:  # its confirmation was lost, so the sender sent it again
            self._repeated += 1
            return True
        if not self.room():
            return False
        self._came += 1
        self._line.append((self._came, label, block))
        self._last[label.worker] = label.life, label.number
        return True

    def fetch(self, born: str, place: int, oldest: int) -> Fetched:
        """The first rollout behind this place in line whose version is at least ``oldest``. Older ones are dropped.

        The place belongs to the life ``born`` of the queue. If the queue is in another life, the line begins anew.
        """
        place, dropped = place if born == self._born else 0, list[Label]()
        for entry in [waiting for waiting in self._line if waiting[0] > place]:
            place, label, block = entry
            if label.version >= oldest:
                return Fetched(self._born, place, label, block, dropped)
            dropped.append(label)
            self._line.remove(entry)
        return Fetched(self._born, place, None, None, dropped)

    def settle(self, born: str, place: int) -> None:
        """Remove the rollouts up to this place in line: the learner does not need them again."""
        # a place of an earlier life says nothing about this line
        while born == self._born and self._line and self._line[0][0] <= place:
            self._line.popleft()

    def stats(self) -> dict[str, float]:
        """``came``, ``kept``, ``repeated``: how many rollouts came, how many are in the queue, how many came again."""
        return {"came": float(self._came), "kept": float(len(self._line)), "repeated": float(self._repeated)}
