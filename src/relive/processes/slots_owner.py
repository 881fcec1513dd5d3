"""The owner of a replay that is served to other processes: it draws into slots, and answers the learners' calls."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..errors import EmptyError, LifecycleError
from ..parameters import Rule, refuse_class, require
from ..replay.buffer import ReplayBuffer
from ..replay.progress import Drawn
from .lanes import Lanes
from .rate import RateLimit
from .slots import Packed, form_of, is_batch
from .slots_seat import Seat
from .wire import HELLO, Address, Failure, Line, Parcel, accept

__all__ = ["Order", "Owner", "run_owner"]

TICK = 0.5
"""Seconds between two checks whether the process that started the owner is still there."""

NAME_RULE: Rule = (
    lambda name: isinstance(name, str) and not name.startswith("_") and hasattr(ReplayBuffer, name),
    "expected the name of a method or property of ReplayBuffer",
)

STALLED = 30
"""Seconds after which a learner that stands still within a message counts as gone, so that the others go on."""

UNREAD = 4
"""Errors of calls that are sent to a learner before it is known to read. They must fit in the socket."""

KEPT = 1000
"""Errors of calls that wait until the learner reads. Those after them are left out."""

PARTS = {"next": 3, "call": 3, "rate": 2, "add": 2}
"""What learners send, and how many parts it has."""

REFUSED = 10.0
"""Seconds within which a process must say who it is after it has connected."""


@dataclass(frozen=True)
class Order:
    """What is served, and to how many."""

    batch_size: int
    depth: int
    learners: int


class Owner:
    """Serves a replay to learners in other processes, over a socket and slots.

    All draws are made by the thread that calls :meth:`run`, and so are the calls of learners. Lanes are drained by a
    thread of its own.

    Args:
        replay: what is served.
        order: batch size, depth and learners.
        listener: where learners come in, at ``address``.
        control: the line to the process that started the server. When the line ends, the server ends.
        lanes: where steps come from, besides learners.
        limit: each batch, and each step of the lanes, waits until the limit allows it.
    """

    def __init__(
        self,
        replay: ReplayBuffer,
        order: Order,
        listener: socket.socket,
        address: Address,
        control: Line,
        lanes: Lanes | None,
        limit: RateLimit | None,
    ) -> None:
        self._replay, self._order, self._listener, self._address = replay, order, listener, address
        self._control, self._lanes, self._limit = control, lanes, limit
        self._served = replay.serve(order.batch_size, order.depth * order.learners)
        self._seats, self._turn = [Seat() for _ in range(order.learners)], 0
        self._strangers: dict[int, tuple[Line, float]] = {}
        self._open = set[Line]()
        """The lines of learners and of those who have not said yet who they are."""
        self._poll = select.poll()
        self._lines: dict[int, Callable[[], None]] = {}
        self._poke, self._poked = socket.socketpair()
        self._blocked: float | None = None
        self._held: Drawn | None = None
        """The newest batch, if it was drawn and has no slot yet."""
        self._failure: Failure | None = None
        self._ended = False

    def run(self) -> None:
        """Serve until the process that started the server ends the line."""
        self._listen_to(self._control.fileno(), self._obey)
        self._listen_to(self._listener.fileno(), self._let_in)
        self._listen_to(self._poked.fileno(), self._wake_up)
        if self._lanes is not None:
            threading.Thread(target=self._drain, args=(self._lanes,), name="relive-drain", daemon=True).start()
        parent = os.getppid()
        while not self._ended and os.getppid() == parent:
            for descriptor, _ in self._poll.poll(TICK * 1000):
                answer = self._lines.get(descriptor)
                if answer is not None:
                    answer()
            self._drop_strangers()
            self._draw()
        self._ended = True
        for end in (self._poke, self._poked, self._listener):
            end.close()

    def _wake_up(self) -> None:
        self._poked.recv(4096)

    # -- who comes and goes -------------------------------------------------------------------------------------

    def _listen_to(self, descriptor: int, answer: Callable[[], None]) -> None:
        self._lines[descriptor] = answer
        self._poll.register(descriptor, select.POLLIN)

    def _hang_up(self, line: Line) -> None:
        """Close a line, unless that was done before. The seat of its learner, if it has one, is free then."""
        if line in self._open:
            self._open.discard(line)
            self._lines.pop(line.descriptor, None)
            self._poll.unregister(line.descriptor)
            line.close()
            for seat in self._seats:
                if seat.line is line:
                    self._forget(seat)

    def _let_in(self) -> None:
        line = accept(self._listener)
        if line is not None:
            self._open.add(line)
            self._strangers[line.fileno()] = line, time.monotonic() + REFUSED
            self._listen_to(line.fileno(), lambda: self._greet(line))

    def _drop_strangers(self) -> None:
        for descriptor, (line, until) in list(self._strangers.items()):
            if time.monotonic() > until:
                del self._strangers[descriptor]
                self._hang_up(line)

    def _greet(self, line: Line) -> None:
        """Give the seat of the rank that it asks for to a process that has connected."""
        if not line.waits(0):
            return  # what the system reported was of an older line, whose descriptor had the same number
        self._strangers.pop(line.fileno(), None)
        try:
            rank = self._address.admits(line.receive_bytes(HELLO))
        except (OSError, EOFError):
            rank = None
        if rank is None or not rank.isdecimal() or int(rank) >= len(self._seats):
            self._hang_up(line)
            return
        seat = self._seats[int(rank)]
        while seat.line is not None and seat.line.waits(0):
            self._hear(seat)  # perhaps it has just hung up
        if seat.line is not None:
            self._tell(line, ("refused", f"learner {rank} is taken by a process that is alive"))
            self._hang_up(line)
            return
        line.set_patience(STALLED)
        depth = self._order.depth
        self._seats[int(rank)] = seat = Seat(line, slots=[None] * depth, free=deque(range(depth)))
        self._lines[line.fileno()] = lambda: self._hear(seat)
        self._tell(line, ("welcome", os.getpid()))

    def _obey(self) -> None:
        """Do what the process that started the server asks for."""
        try:
            message = self._control.receive()
        except (OSError, EOFError):
            self._ended = True
            return
        self._answer(self._control, message)

    def _hear(self, seat: Seat) -> None:
        """Do what a learner asks for."""
        line = seat.line
        if line is None or not line.waits(0):
            return  # as in _greet
        try:
            message = line.receive()
            known = PARTS[message[0]] == len(message)
        except Exception:  # it is gone, stands still within a message, or sends something else
            known, message = False, cast("Any", None)
        if not known:
            self._hang_up(line)
            return
        if message[0] in ("next", "call"):  # from here on it reads until it has the answer
            seat.unread = 0
            while seat.late:
                self._tell(line, ("late", seat.late.popleft()))
        if message[0] == "next":
            if message[1] is not None:
                seat.free.append(message[1])
            if message[2] == seat.errors:  # otherwise an error that is on its way is the answer
                seat.wants = True
                self._take(seat)
        else:
            self._answer(line, message)

    def _forget(self, seat: Seat) -> None:
        """A learner is gone: its slots are free, and its turns are passed over until it comes back."""
        seat.line, seat.gone, seat.wants = None, True, False
        for drawn in seat.ready:
            self._note_taken(drawn)
        seat.ready.clear()
        seat.late.clear()
        seat.slots[:] = [None] * len(seat.slots)

    # -- calls --------------------------------------------------------------------------------------------------

    def _answer(self, line: Line, message: Any) -> None:
        kind, *rest = message
        try:
            given = rest[-1].open()
            if kind == "rate":
                self._replay.update_priorities(*given)
            elif kind == "add":
                values, envs = given
                self._replay.add(values, envs=envs)
            else:
                self._tell(line, ("reply", rest[0], self._called(*given)))
        except Exception as error:
            failure = Failure.of(error)
            if kind == "call":
                self._tell(line, ("failed", rest[0], failure))
            else:
                self._tell_late(line, failure)

    def _called(self, name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parcel:
        """What a method or property of the replay gives."""
        require("call", NAME_RULE, name=name)
        value: Any = getattr(self._replay, name)
        value = value(*args, **kwargs) if callable(value) else value
        return Parcel(f"call(name={name!r}): its result", Packed.of(value) if is_batch(value) else value)

    def _tell_late(self, line: Line, failure: Failure) -> None:
        """Send a learner the error of a call that it does not wait for, now or once it reads."""
        seat = next(seat for seat in self._seats if seat.line is line)
        if seat.unread < UNREAD:
            seat.unread += 1
            self._tell(line, ("late", failure))
        elif len(seat.late) < KEPT:
            seat.late.append(failure)

    def _tell(self, line: Line, message: Any) -> None:
        try:
            line.send(message)
        except (OSError, EOFError):  # it is gone, or does not read; the starter's line is noticed when it is read
            self._hang_up(line)

    # -- draws --------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw all batches that are due: batch t for learner t mod learners, in the order of t."""
        if self._failure is not None:
            for seat in self._seats:
                if seat.wants:
                    self._fail(seat, self._failure)
        while not all(seat.gone for seat in self._seats):
            seat = self._seats[self._turn]
            if not seat.gone and not self._serve(seat):
                return
            self._turn = (self._turn + 1) % len(self._seats)

    def _serve(self, seat: Seat) -> bool:
        """Draw the next batch for a learner; False if it cannot be drawn yet, or not at all."""
        if not (seat.wants and seat.free):
            return False
        if self._held is None and not self._drawn(seat):
            return False
        assert self._held is not None
        form, tensors = form_of(self._held.batch)
        try:
            place, changed = seat.slot_for(form)
        except Exception as error:  # no memory, or too many open files: the learner may ask again
            self._fail(seat, Failure.of(error))
            return False
        drawn, self._held = self._held, None
        ahead = self._served.ahead
        ahead.ready[-1] = drawn = drawn._replace(batch=None)  # the slot has it from here on
        self._hand_over(seat, drawn, place, changed, tensors)
        return True

    def _drawn(self, seat: Seat) -> bool:
        """Draw the next batch; False if it may not be drawn yet, or if the draw failed. The learner gets the error."""
        if not self._is_allowed():
            return False
        ahead = self._served.ahead
        with self._replay.lock:
            ahead.draw()
        if ahead.error is not None:
            error, ahead.error = ahead.error, None
            if self._limit is not None:
                self._limit.uncount(samples=self._order.batch_size)
            if isinstance(error, EmptyError) and self._lanes is not None:
                return False  # the first steps have yet to come through the lanes
            self._fail(seat, Failure.of(error))
            return False
        self._held = ahead.ready[-1]
        return True

    def _is_allowed(self) -> bool:
        """Whether the limit allows a batch. The time until it does counts as waited."""
        if self._limit is None:
            return True
        if self._limit.try_to_sample(self._order.batch_size):
            if self._blocked is not None:
                self._limit.note_sample_wait(time.monotonic() - self._blocked)
                self._blocked = None
            return True
        self._blocked = time.monotonic() if self._blocked is None else self._blocked
        return False

    def _hand_over(self, seat: Seat, drawn: Drawn, place: int, changed: Any, tensors: list[torch.Tensor]) -> None:
        """Copy a batch into a slot of a learner, and send the learner the slot's number."""
        slot = seat.slots[seat.free.popleft()]
        assert slot is not None
        slot.write(tensors)
        seat.ready.append(drawn)
        if seat.asked:
            seat.asked -= 1
            self._note_taken(seat.ready.popleft())
        assert seat.line is not None
        self._tell(seat.line, ("batch", place, drawn.completed, changed))

    def _take(self, seat: Seat) -> None:
        """A learner takes its next batch, which counts as drawn from then on."""
        if seat.ready:
            self._note_taken(seat.ready.popleft())
        else:
            seat.asked += 1

    def _note_taken(self, drawn: Drawn) -> None:
        with self._replay.lock:
            self._served.ahead.note_taken(drawn)

    def _fail(self, seat: Seat, failure: Failure) -> None:
        """Answer a learner with an error. Nothing more is drawn for this learner until it asks again."""
        seat.wants, seat.asked = False, 0
        seat.errors += 1
        if seat.line is not None:
            self._tell(seat.line, ("error", failure))

    # -- lanes --------------------------------------------------------------------------------------------------

    def _drain(self, lanes: Lanes) -> None:
        """Move steps from the lanes into the replay, and let the other thread look whether it can draw now."""
        try:
            while not self._ended:
                if lanes.wait(TICK) and lanes.drain(self._replay, limit=self._limit, timeout=TICK):
                    self._poke.send(b"!")
        except Exception as error:  # the learners get the error
            self._failure = Failure.of(error)
            self._poke.send(b"!")


def run_owner(
    make: Callable[[], ReplayBuffer],
    order: Order,
    listener: socket.socket,
    address: Address,
    control: Any,
    lanes: Lanes | None,
    limit: RateLimit | None,
) -> None:
    """Run in the process of a server: make the replay, report whether that went well, and serve the replay."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the starter ends this one if it ends
    torch.set_num_threads(1)
    line = Line(control)
    try:
        refuse_class("make", make)
        replay: Any = make()
        if not isinstance(replay, ReplayBuffer):
            raise LifecycleError(
                f"ReplayServer(make): expected a function that makes a ReplayBuffer, got {replay!r:.80}"
            )
        owner = Owner(cast("ReplayBuffer", replay), order, listener, address, line, lanes, limit)
    except Exception as error:
        line.send(("failed", 0, Failure.of(error)))
        return
    line.send(("reply", 0, Parcel("a process number", os.getpid())))
    owner.run()
