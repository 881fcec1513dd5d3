"""Intake: adds steps from elsewhere in pieces. After an interruption or a kill, it is known whether a piece is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ring.state import piece_of
from ..steps.arrays import Ints
from .buffer import ReplayBuffer
from .durable import AFTER, ENVS, MARK, SOURCE, VOID

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
        self._durable = inside._durable

    def mark(self) -> int:
        """A number that changes at the moment when a piece with steps is in."""
        return int(self._ring.heads[self.envs].sum())

    @property
    def _note(self) -> Any:
        """The note of these envs, in the row of the first; None if the replay is not in files.

        It is asked for when it is used: a source with a ledger of its own needs no notes.
        """
        return None if self._durable is None else self._durable.drained()[self.envs[0]]

    def begin(self, source: int, after: int) -> int:
        """Note that the next :meth:`add` has the steps of a source up to number ``after``; returns :meth:`mark`.

        The note of a replay in files outlives the process: see :meth:`drained`.

        Args:
            source: a number that no other source of steps has.
            after: the number of the first step after the piece.
        """
        mark, note = self.mark(), self._note
        if note is not None:
            note[MARK] = VOID  # until the other words are those of this piece; the piece before was given back
            note[SOURCE], note[AFTER], note[ENVS] = source, after, len(self.envs)
            note[MARK] = mark
        return mark

    def fail(self) -> None:
        """The piece that was begun is not in, and will not be."""
        if (note := self._note) is not None:
            note[MARK] = VOID

    def drained(self, source: int) -> int:
        """Up to which number a replay in files is known to have the steps of a source; 0 if it notes nothing of it.

        It counts a piece that was stored just before the process was killed.
        """
        note = self._note
        if note is None or note[MARK] == VOID or note[SOURCE] != source or note[MARK] == self.mark():
            return 0
        return int(note[AFTER])

    def add(self, steps: Mapping[str, Any]) -> None:
        """Add a piece: vector steps as :meth:`relive.ReplayBuffer.extend` takes them, no more than :attr:`most`.

        In a piece of several vector steps, no row may be left out if that would interrupt an episode.
        """
        self.replay.extend(steps, envs=self.envs)

    def interrupt(self) -> None:
        """Interrupt the running episodes: the next steps start new ones."""
        self.replay.interrupt(self.envs)
