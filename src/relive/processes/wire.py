"""Wire: messages between the owner of a replay and its learners, over sockets of this machine.

Both ends belong to one user; the system makes sure that they do. The first message proves that its sender has the
server's token. Later messages are Python objects, pickled as :mod:`multiprocessing` pickles them.
"""

from __future__ import annotations

import builtins
import os
import secrets
import select
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from .. import errors
from ..errors import LifecycleError, ParameterError

R = TypeVar("R")

_unpickled: Callable[[bytes], Any] = cast("Any", ForkingPickler).loads
"""The function that ``Connection.recv`` calls. It only gets bytes from processes of this user with the token."""

HELLO = 200
"""The most bytes of the first message."""

MOST = 8_000
"""The most characters of an error's message, and of its traceback, that are sent."""

LENGTH = struct.Struct("!i")
"""How a message of :mod:`multiprocessing` begins: the number of its bytes, if it is a short one."""


class Address(NamedTuple):
    """Where a server listens, and the token that proves who may talk to it."""

    name: str
    token: str

    def connect(self, hello: str) -> Line:
        """A line to the server; ``hello`` is sent first, with the token.

        Raises:
            LifecycleError: nobody listens.
        """
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self.name)
            line = Line(Connection(end.detach()))
            line.send_bytes(f"{self.token} {hello}".encode())
        except OSError as error:
            end.close()
            raise LifecycleError(f"ReplayServer: it has ended ({error.strerror or error}); start a new one") from error
        return line

    def admits(self, hello: bytes) -> str | None:
        """The first message without the token; None if it has another token, or none."""
        token, _, rest = hello.decode("utf-8", "replace").partition(" ")
        return rest if secrets.compare_digest(token.encode(), self.token.encode()) else None


def listen() -> tuple[socket.socket, Address]:
    """A socket that listens. On Linux it has no file, so none is left behind; elsewhere it has a folder of its own.

    Raises:
        LifecycleError: the system lacks these sockets, or cannot pass them on, such as Windows.
    """
    if not (hasattr(socket, "AF_UNIX") and hasattr(socket, "SCM_RIGHTS")):
        raise LifecycleError(
            "ReplayServer: expected a system with Unix sockets that processes can pass on, as Linux and macOS have; on "
            "this one use replay.serve(batch_size), which draws in a thread"
        )
    token = secrets.token_hex(16)
    if sys.platform == "linux":
        name = f"\0relive-{os.getpid()}-{token[:8]}"
    else:
        name = str(Path(tempfile.mkdtemp(prefix="relive-")) / "server")
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.bind(name)
    end.listen(64)
    end.setblocking(False)  # who has connected may be gone again before accept()
    return end, Address(name, token)


def accept(listener: socket.socket) -> Line | None:
    """The next line that comes in; None if there is none, or if it comes from another user."""
    try:
        end, _ = listener.accept()
    except OSError:
        return None
    if hasattr(socket, "SO_PEERCRED"):
        # messages are pickles, which can run code: only this user's processes may send any
        _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            end.close()
            return None
    end.setblocking(True)
    return Line(Connection(end.detach()))


class Line:
    """One end of a connection.

    If a call is broken off within a message, the rest of that message is lost. So the next call closes the line.
    """

    descriptor: int

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection, self.descriptor = connection, connection.fileno()
        """The descriptor, also after the line was closed."""
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._hello = b""
        """The bytes of the first message that have come so far, for :meth:`receive_hello`."""
        self._within = False
        """True from the first byte of a message to its last. A call that finds it True follows one that broke off."""

    def fileno(self) -> int:
        """The descriptor, for ``select`` and ``poll``."""
        return self._connection.fileno()

    @property
    def closed(self) -> bool:
        """True if nothing can be sent any more."""
        return self._connection.closed

    def send(self, message: object) -> None:
        """Send an object. Raises OSError if the other end is gone."""
        self._whole(self._connection.send_bytes, ForkingPickler.dumps(message))

    def send_bytes(self, message: bytes) -> None:
        """Send bytes."""
        self._whole(self._connection.send_bytes, message)

    def set_patience(self, seconds: float) -> None:
        """Set how many seconds the other end may take to send, or to read, more of a message that has begun."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # a struct timeval
        with socket.socket(fileno=os.dup(self.fileno())) as end:  # a copy: the line keeps its own descriptor
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, limit)

    def waits(self, seconds: float | None) -> bool:
        """True if a message, or the end of the line, comes within so many seconds."""
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError if the other end is gone."""
        return _unpickled(self._whole(self._connection.recv_bytes))

    def receive_hello(self) -> bytes | None:
        """The first message as bytes, or None until all of it has come. It never waits: a stranger may stop anywhere.

        Raises EOFError or OSError if the other end is gone, or if the message is longer than ``HELLO``.
        """
        while (missing := self._hello_lacks()) and self.waits(0):
            piece = os.read(self.fileno(), missing)  # no more: later messages are read in another way
            if not piece:
                raise EOFError
            self._hello += piece
        return None if missing else self._hello[LENGTH.size :]

    def _hello_lacks(self) -> int:
        """How many bytes are still to come: of the first message's length, and then of the message."""
        if len(self._hello) < LENGTH.size:
            return LENGTH.size - len(self._hello)
        (size,) = LENGTH.unpack_from(self._hello)
        if not 0 <= size <= HELLO:
            raise EOFError
        return LENGTH.size + size - len(self._hello)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def _whole(self, call: Callable[..., R], *args: bytes | memoryview) -> R:
        """Make a call that sends or reads one message, unless an earlier one was broken off."""
        if self._within:
            self.close()
            raise EOFError
        self._within = True
        result = call(*args)  # if it raises, the ends no longer agree where a message begins, and the flag stays
        self._within = False
        return result


class Parcel:
    """The arguments or the result of a call, pickled before the message that carries them.

    So an object that cannot be pickled here, or unpickled at the other end, is an error of that call alone.

    Args:
        what: names the object in errors, such as ``"call(name='stats')"``.
        value: any object that can be pickled.

    Raises:
        ParameterError: the object cannot be pickled.
    """

    def __init__(self, what: str, value: object) -> None:
        self._what = what
        try:
            self._bytes = bytes(ForkingPickler.dumps(value))
        except Exception as error:  # __reduce__ may raise anything
            raise self._refused("pickled", error) from error

    def open(self) -> Any:
        """The object.

        Raises:
            ParameterError: the object cannot be unpickled here.
        """
        try:
            return _unpickled(self._bytes)
        except Exception as error:
            raise self._refused("unpickled", error) from error

    def _refused(self, how: str, error: Exception) -> ParameterError:
        return ParameterError(
            f"{self._what} cannot be {how}, so it cannot pass between processes ({type(error).__name__}: {error}); "
            "expected numbers, text, arrays, or objects of classes that both processes can import"
        )


@dataclass(frozen=True)
class Failure:
    """An error to send to another process: the name of its class, its message and its traceback."""

    kind: str
    message: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The parts of an error that can be sent."""
        return cls(type(error).__name__, str(error)[:MOST], "".join(traceback.format_exception(error))[-MOST:])

    def raised(self, what: str) -> Exception:
        """The error to raise here: of the same class, if that is relive's or Python's, else a LifecycleError."""
        kind = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        error: Exception = LifecycleError(f"{what}: {self.kind}: {self.message}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(TypeError):  # some of Python's take more than a message
                error = kind(self.message)
        error.__cause__ = ElsewhereError(self.text)
        return error


class ElsewhereError(Exception):
    """The traceback of another process, shown as the cause of an error."""

    def __str__(self) -> str:
        return f"\n\nin the process that owns the replay:\n{self.args[0]}"
