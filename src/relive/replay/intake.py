"""Intake: adds steps from elsewhere in pieces. After an interruption, it is known whether a piece is in the replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ring.state import piece_of
from ..steps.arrays import Ints
from .buffer import ReplayBuffer

__all__ = ["Intake"]


class Intake:
    """Adds pieces of steps to some envs of a replay, each as a whole or not at all.

    The caller takes the replay's lock before it calls :meth:`mark`, and holds it until it knows whether the piece is
    in.

    Args:
        replay: the replay that gets the steps.
        envs: int64 ``[K]``, the envs of the steps.
    """

    def __init__(self, replay: ReplayBuffer, envs: Ints) -> None:
        self.replay, self.envs = replay, envs
        inside: Any = replay
        self._ring = inside._ring
        self.most = max(piece_of(self._ring.rows) // len(envs), 1)
        """The most vector steps of a piece: the replay stores this many in one call that nothing can break off."""

    def mark(self) -> int:
        """A number that changes at the moment when a piece with steps is in."""
        return int(self._ring.heads[self.envs].sum())

    def add(self, steps: Mapping[str, Any]) -> None:
        """Add a piece: vector steps as :meth:`relive.ReplayBuffer.extend` takes them, no more than :attr:`most`.

        In a piece of several vector steps, no row may be left out if that would interrupt an episode.
        """
        self.replay.extend(steps, envs=self.envs)

    def interrupt(self) -> None:
        """Interrupt the running episodes: the next steps start new ones."""
        self.replay.interrupt(self.envs)
