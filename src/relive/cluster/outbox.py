"""Outbox: messages to shards whose answers nobody waits for, such as TD errors."""

from __future__ import annotations

from typing import Any, NamedTuple

from .group import Group

__all__ = ["Outbox"]


MOST_SENT = 64
"""The most calls that may be on their way."""


class _Sent(NamedTuple):
    """A call whose answer nobody waits for."""

    shard: int
    call: Any
    rows: int
    """How many TD errors the call carries; 0 if it is another call."""


class Outbox:
    """Sends messages to the shards of a group, and reads their answers later.

    Args:
        group: the shards.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._sent = group, list[_Sent]()
        self.dropped = 0
        """How many TD errors were lost, because the shard of the rows was restarted or did not answer."""

    def send(self, shard: int, rows: int, method: str, *arguments: Any) -> None:
        """Send a message that carries TD errors for ``rows`` rows."""
        self._sent.append(_Sent(shard, self._group.link.call(shard, method, *arguments), rows))

    def settle(self, most: int = MOST_SENT) -> None:
        """Read the answers that have come. While more than ``most`` calls have none, wait for the oldest.

        Raises:
            ReliveError: what a shard raised. It is raised once.
        """
        group, surplus, waiting = self._group, len(self._sent) - most, list[_Sent]()
        try:
            while self._sent:
                note = self._sent.pop(0)  # first, so that an error that it brings is raised once
                wait = group.timeout if surplus > 0 else 0.0
                found, failed = group.link.answers({note.shard: note.call}, wait)
                if note.shard in failed or (wait and not found):
                    self.dropped += note.rows
                elif not found:
                    waiting.append(note)
                surplus -= 1
        finally:
            self._sent = waiting + self._sent
