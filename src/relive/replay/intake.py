"""Intake: adds steps from elsewhere in pieces, so that after an interruption it is known whether a piece is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..steps.arrays import Ints
from .buffer import ReplayBuffer
from .writer import PIECE

__all__ = ["Intake"]


class Intake:
    """Adds pieces of steps to some envs of a replay, each as a whole or not at all.

    The caller holds the replay's lock from :meth:`mark` on until it has looked whether the piece is in.

    Args:
        replay: gets the steps.
        envs: int64 ``[K]``: the envs that the steps are of.
    """

    def __init__(self, replay: ReplayBuffer, envs: Ints) -> None:
        self.replay, self.envs = replay, envs
        inside: Any = replay
        self._ring = inside._ring
        self.most = max(min(self._ring.rows // 2, PIECE) // len(envs), 1)
        """The most vector steps of a piece: as many as the replay stores in one call that nothing can break off."""

    def mark(self) -> int:
        """A number that changes as soon as a piece with steps is in, and not before."""
        return int(self._ring.heads[self.envs].sum())

    def add(self, steps: Mapping[str, Any]) -> None:
        """Add a piece: vector steps as :meth:`relive.ReplayBuffer.extend` takes them, no more than :attr:`most`.

        If there are several, none of them leaves out a row that interrupts an episode.
        """
        self.replay.extend(steps, envs=self.envs)

    def interrupt(self) -> None:
        """The next steps start new episodes."""
        self.replay.interrupt(self.envs)
