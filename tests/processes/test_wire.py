"""Lines between processes: a message that was broken off ends the line."""

from __future__ import annotations

import socket
import struct
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from relive.processes.wire import HELLO, Line

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


def test_a_first_message_is_read_as_its_bytes_come_and_what_follows_it_is_left_to_the_next_call() -> None:
    here, there = socket.socketpair()
    with there:
        line = Line(Connection(here.detach()))
        assert line.receive_hello() is None
        for byte in struct.pack("!i", 5) + b"hell":
            there.sendall(bytes([byte]))
            assert line.receive_hello() is None
        there.sendall(b"o" + struct.pack("!i", 4) + b"more")
        assert line.receive_hello() == b"hello"
        assert line._connection.recv_bytes() == b"more"
        line.close()


@pytest.mark.parametrize("size", [-1, HELLO + 1, 2**31 - 1])
def test_a_first_message_that_is_too_long_ends_the_line_before_it_is_read(size: int) -> None:
    here, there = socket.socketpair()
    with there:
        line = Line(Connection(here.detach()))
        there.sendall(struct.pack("!i", size))
        with pytest.raises(EOFError):
            line.receive_hello()
        line.close()
