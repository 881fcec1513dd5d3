"""Lines between processes: a message that was broken off ends the line."""

from __future__ import annotations

import sys
from multiprocessing import Pipe
from typing import Any

import pytest

from relive.processes.wire import Line

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs Unix sockets")


class BrokenOff:
    """A connection of which one call is broken off within a message, as by Ctrl-C."""

    def __init__(self, connection: Any) -> None:
        self._connection, self.breaks = connection, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send_bytes(self, message: bytes) -> None:
        self._connection.send_bytes(message)
        if self.breaks:
            raise KeyboardInterrupt


def test_after_a_message_that_was_broken_off_the_next_call_closes_the_line() -> None:
    here, there = Pipe()
    connection = BrokenOff(here)
    line, other = Line(connection), Line(there)
    line.send("whole")
    assert other.receive() == "whole"
    connection.breaks = True
    with pytest.raises(KeyboardInterrupt):
        line.send("half")
    connection.breaks = False
    assert not line.closed
    with pytest.raises(EOFError):
        line.send("never")
    assert line.closed
    assert other.receive() == "half"
    with pytest.raises(EOFError):
        other.receive()
    other.close()
