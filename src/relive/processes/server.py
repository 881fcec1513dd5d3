"""ReplayServer: one process owns a replay, and serves its batches to learners in other processes.

The file reads from the outside in: the server, the owner's process, the learner's side, and the slots. A slot is shared
memory for one batch. The owner fills it, the learner reads it in place and gives it back. Sockets carry the rest:
requests, errors, steps and TD errors. Over a socket the system says at once that the other side has died, keeps the
order of a learner's calls, and blocks a sender whose receiver is behind; messages in shared memory would need flow
control of their own, and a ``multiprocessing.Queue`` copies each batch twice.

A shard of :mod:`relive.cluster` also gives batches to other processes, in another way, for another promise. A server
has one ring on one machine: a batch is the one that ``sample`` would give, bit for bit, and is never copied between
processes. Shards are several rings, perhaps on several machines: a batch is divided among them, its parts are copied,
and a shard may die and come back.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, NoReturn, cast
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from ..batches import Batch, take_back
from ..errors import EmptyError, FieldError, LifecycleError, ParameterError, WaitTimeoutError
from ..files.disk import start_thread
from ..memory.allocator import ONLY_HERE
from ..parameters import TIMEOUT_RULE, Rule, an_instance, is_count, one_of, refuse_class, require, torch_device
from ..replay.buffer import ReplayBuffer
from ..replay.checks import require_rows
from ..replay.serving import Batches, Drawn
from ..steps.arrays import ArrayLike, as_host
from ..steps.schema import not_named
from .blocks import Block, BlockSpec, is_batch, packed_batch, spec_of
from .lanes import Lanes
from .limits import LIMIT_RULE, RateLimit
from .shared import SharedBlock
from .wire import Address, Failure, Line, Parcel, accept, listen

SLOTS_RULE: Rule = (lambda count: is_count(count, 1) and count <= 2**16, "expected a whole number from 1 to 65,536")

GRACE = 5.0
"""Seconds that the process has to end when it is asked to."""

GLANCE = 0.25
"""Seconds between two checks whether the owner is alive. Usually the end of the line shows its death at once."""


class ServerOptions(NamedTuple):
    """Options of a server, for the process that owns the replay."""

    batch_size: int
    depth: int
    learners: int
    lanes: Lanes | None = None
    limit: RateLimit | None = None


class ReplayServer:
    """A process that owns a replay, and serves its batches to learners in other processes.

    The batches are those that ``sample`` gives, in the same order. Batch t goes to learner t mod ``learners``. It is
    drawn when that learner is done with the batch that came ``depth`` batches before it. At that moment, the replay has
    all steps and priorities that the learner sent before, and none that it sends later.

    Give the server to the learners' processes as an argument or by a fork. There, :meth:`learner` returns the iterator
    over the batches. The process ends with :meth:`close`, at the end of a ``with`` block, or when the process that
    started it ends, however that ends.

    Args:
        make: makes the replay, in the new process. It is pickled, so it is a function of a module.
        batch_size: B.
        depth: how many batches each learner has at most, the one in use included.
        learners: how many learners there are.
        lanes: lanes from which the process takes steps, if there are any.
        limit: batches are drawn, and lanes drained, as far as the limit allows.
        context: "spawn" or "fork": how the process starts.

    Raises:
        ParameterError: an argument is out of range, or the limit would never allow a batch, or a step of the lanes.
        LifecycleError: the system lacks the sockets that this needs, such as Windows; use
            :meth:`relive.ReplayBuffer.serve` there.
        Exception: what ``make`` raised.
    """

    def __init__(
        self,
        make: Callable[[], ReplayBuffer],
        batch_size: int,
        depth: int = 2,
        *,
        learners: int = 1,
        lanes: Lanes | None = None,
        limit: RateLimit | None = None,
        context: str = "spawn",
    ) -> None:
        require_rows(batch_size)
        require("ReplayServer", SLOTS_RULE, depth=depth, learners=learners)
        require("ReplayServer", one_of("spawn", "fork"), context=context)
        require("ReplayServer", (callable, "expected a function that makes a ReplayBuffer"), make=make)
        require("ReplayServer", an_instance(Lanes, "relive.Lanes(...)"), lanes=lanes)
        require("ReplayServer", LIMIT_RULE, limit=limit)
        if limit is not None:
            limit.require_samples(int(batch_size))
            limit.require_inserts(1 if lanes is None else lanes.num_envs)
        self._options = ServerOptions(int(batch_size), int(depth), int(learners))
        self._starter, self._calls = os.getpid(), 0
        listener, self._address = listen()
        start: Any = multiprocessing.get_context(context)
        control, owner_end = start.Pipe()
        self._control: Line | None = Line(control)
        ONLY_HERE[self._control] = Line.close  # a child's copy would hide from the owner that this process has ended
        # the lanes and the limit go to the owner alone: pickles of this server, for learners, are without them
        arguments = (make, self._options._replace(lanes=lanes, limit=limit), listener, self._address, owner_end)
        self._process: BaseProcess = start.Process(target=_run_owner, args=arguments, name="relive-replay", daemon=True)
        try:
            self._process.start()
        except Exception as error:
            self._control.close()
            if isinstance(error, OSError):  # no memory, or too many processes
                raise
            raise ParameterError(
                f"ReplayServer(make={make!r:.200}): 'spawn' sends all arguments by pickle, which fails: {error}; "
                "define make in a module, outside of other functions, or pass context='fork'"
            ) from error
        finally:  # the owner has both: if they stayed open here, nobody would see that it has ended
            listener.close()
            owner_end.close()
        self.close: Callable[[], object] = finalize(self, _end, self._process, self._control, self._starter)
        """End the process. The replay is lost: save it first, with ``call("save", path)``."""
        self._pid: int = self._answer("ReplayServer(make)")

    def learner(
        self, rank: int = 0, *, timeout: float | None = None, device: str | torch.device | None = None
    ) -> Learner:
        """Connect this process as learner ``rank``; returns the iterator over its batches.

        Args:
            rank: 0 up to, not including, ``learners``.
            timeout: seconds that ``next`` waits for a batch; None is for ever.
            device: where each batch is copied, in one piece. For CUDA, the slots are page-locked, and the GPU copies
                from them by itself. By default, batches are views of the slots.

        Raises:
            ParameterError: an argument is out of range.
            LifecycleError: a process that is alive has this rank, or the server has ended.
        """
        last = self._options.learners - 1
        words = f"expected a whole number from 0 to {last}; give ReplayServer as many learners as you need"
        require("learner", (lambda rank: is_count(rank) and rank <= last, words), rank=rank)
        require("learner", TIMEOUT_RULE, timeout=timeout)
        target = None if device is None else torch_device("learner", device)
        return Learner(self._address, int(rank), timeout, self._is_alive, target)

    def call(self, name: str, /, *args: object, **kwargs: object) -> Any:
        """Call a method of the replay in its process, such as ``call("save", path)``, or read a property there.

        ``name`` is that of the method or the property; ``args`` and ``kwargs`` are pickled and passed to the method.
        Only the process that started the server can use this. It may overtake calls of learners; :meth:`Learner.call`
        comes after the earlier calls of its learner. Raises what the method raises.
        """
        if self._control is None or self._control.closed:
            raise LifecycleError("call: the server has ended, or was started by another process; use a learner's call")
        arguments = Parcel(f"call(name={name!r}): an argument", (name, args, kwargs))
        try:
            self._calls += 1
            self._control.send(("call", self._calls, arguments))
        except (OSError, EOFError) as error:
            raise self._ended() from error
        return self._answer(name)

    @property
    def pid(self) -> int:
        """The number of the process that owns the replay."""
        return self._pid

    def __enter__(self) -> ReplayServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> tuple[ServerOptions, Address, int]:
        """For pickle: a handle of this server. To drop or close a handle does not end the server."""
        return self._options, self._address, self._pid

    def __setstate__(self, state: tuple[ServerOptions, Address, int]) -> None:
        self._options, self._address, self._pid = state
        self._control, self._starter, self.close = None, 0, lambda: None  # no process has the number 0

    def __repr__(self) -> str:
        options = self._options
        return f"ReplayServer(batch_size={options.batch_size}, depth={options.depth}, learners={options.learners})"

    # -- inside -------------------------------------------------------------------------------------------------

    def _answer(self, call: str) -> Any:
        """The process's answer to the last request."""
        line = self._control
        assert line is not None
        try:
            while True:
                while not line.waits(GLANCE):
                    if not self._is_alive():
                        raise self._ended()
                _, number, value = line.receive()
                if number == self._calls:  # other numbers answer calls that were broken off
                    break
        except (OSError, EOFError) as error:
            raise self._ended() from error
        return _outcome(value, call)

    def _is_alive(self) -> bool:
        if os.getpid() == self._starter:
            return self._process.is_alive()  # also reaps it: a dead child would still answer signal 0
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _ended(self) -> LifecycleError:
        self._process.join(1.0)
        return LifecycleError(
            f"the process that owns the replay has ended, with exit code {self._process.exitcode}; look at what it "
            "printed, and start a new ReplayServer, from a save if there is one"
        )


def _end(process: BaseProcess, control: Line, starter: int) -> None:
    """End a server's process: first ask, then terminate, then kill. Only the process that started it may do so."""
    control.close()  # this is how it is asked: the owner serves until its end of the line reads the end
    if os.getpid() != starter:
        return
    process.join(GRACE)
    for end in (process.terminate, process.kill):
        if process.is_alive():
            end()
            process.join(GRACE)


# The process that owns the replay


TICK = 0.5
"""Seconds between two checks whether the process that started the owner is still there."""

HELLO_TIMEOUT = 10.0
"""Seconds within which a process must have said who it is after it has connected, however many pieces that takes."""

STALLED = 30
"""Seconds after which a learner that stands still within a message counts as gone, so that the others go on."""

MESSAGE_SIZES = {"next": 3, "call": 3, "rate": 2, "add": 2}
"""How many parts each message of a learner has."""

MOST_UNREAD = 4
"""The most errors of calls that a learner is sent before it is known to read. They must fit in the socket, because the
owner would block in a full one."""

MOST_LATE = 1000
"""The most errors of calls that wait until the learner reads. Those after them are left out."""

METHOD_RULE: Rule = (
    lambda name: isinstance(name, str) and not name.startswith("_") and hasattr(ReplayBuffer, name),
    "expected the name of a method or property of ReplayBuffer",
)


def _run_owner(
    make: Callable[[], ReplayBuffer],
    options: ServerOptions,
    listener: socket.socket,
    address: Address,
    control: Connection[Any, Any],
) -> None:
    """Run in the process of a server: make the replay, report whether that went well, and serve the replay."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the starter ends this one if it ends
    torch.set_num_threads(1)  # the learners need the other cores
    line = Line(control)
    try:
        refuse_class("make", make)
        replay = make()
        if not isinstance(cast("object", replay), ReplayBuffer):
            raise LifecycleError(
                f"ReplayServer(make): expected a function that makes a ReplayBuffer, got {replay!r:.80}"
            )
        owner = Owner(replay, options, listener, address, line)
    except Exception as error:
        line.send(("failed", 0, Failure.of(error)))
        return
    line.send(("reply", 0, Parcel("a process number", os.getpid())))  # call number 0: the starter has made no other
    owner.run()


class Owner:
    """Serves a replay to learners in other processes, over a socket and slots.

    The thread that calls :meth:`run` makes all draws, and runs the calls of learners. A second thread drains the lanes.

    Args:
        replay: the replay to serve.
        options: the options of the server.
        listener: where learners connect, at ``address``.
        address: has the token that learners show.
        control: the line to the process that started the server. When the line ends, the server ends.
    """

    def __init__(
        self, replay: ReplayBuffer, options: ServerOptions, listener: socket.socket, address: Address, control: Line
    ) -> None:
        self._replay, self._options, self._listener, self._address = replay, options, listener, address
        self._control, self._limit = control, options.limit
        self._served = replay.serve(options.batch_size, options.depth * options.learners)
        self._clients, self._next_rank = [Client() for _ in range(options.learners)], 0
        self._open: dict[Line, float] = {}
        """The lines of learners, and until when their other end may still say who it is; infinity once it has."""
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        """The function that reads from each open descriptor."""
        self._waker, self._woken = socket.socketpair()
        """With one end, the draining thread wakes the other thread, which polls the other end."""
        self._limited_since: float | None = None
        """When the limit began to hold back the next batch; None while it does not."""
        self._undelivered: Drawn | None = None
        """The newest batch, if it was drawn and has no slot yet."""
        self._failure: Failure | None = None
        """The error that ended the draining of the lanes."""
        self._ended = False

    def run(self) -> None:
        """Serve until the process that started the server ends the line."""
        self._listen_to(self._control.fileno(), self._hear_starter)
        self._listen_to(self._listener.fileno(), self._accept)
        self._listen_to(self._woken.fileno(), lambda: self._woken.recv(4096))
        lanes = self._options.lanes
        if lanes is not None:
            drain = threading.Thread(target=self._drain, args=(lanes,), name="relive-drain", daemon=True)
            start_thread(drain, "serve without lanes")
        parent = os.getppid()  # changes when the starter dies, even if another process keeps its end of the line open
        while not self._ended and os.getppid() == parent:
            for descriptor, _ in self._poll.poll(TICK * 1000):
                handler = self._handlers.get(descriptor)  # none if an earlier handler of this round closed it
                if handler is not None:
                    handler()
            for line in [line for line, until in self._open.items() if time.monotonic() > until]:
                self._hang_up(line)
            self._draw()
        self._ended = True
        for end in (self._waker, self._woken, self._listener):
            end.close()

    # -- who comes and goes -------------------------------------------------------------------------------------

    def _listen_to(self, descriptor: int, handler: Callable[[], object]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def _hang_up(self, line: Line) -> None:
        """Close a line, unless it was closed before. If a learner had it, its rank is free then."""
        if self._open.pop(line, None) is not None:
            # before the close: the next file that is opened may get this number
            self._handlers.pop(line.descriptor, None)
            self._poll.unregister(line.descriptor)
            line.close()
            for client in self._clients:
                if client.line is line:
                    self._release(client)

    def _accept(self) -> None:
        line = accept(self._listener)
        if line is not None:
            self._open[line] = time.monotonic() + HELLO_TIMEOUT
            self._listen_to(line.fileno(), lambda: self._identify(line))

    def _identify(self, line: Line) -> None:
        """Read which rank a process asks for that has connected, and make it the learner of this rank."""
        try:
            hello = line.receive_hello()
            if hello is None:
                return  # the rest is not waited for; it has until the line's deadline
            rank = self._address.admits(hello)
        except (OSError, EOFError):
            rank = None
        self._open[line] = math.inf
        if rank is None or not rank.isdecimal() or int(rank) >= len(self._clients):
            self._hang_up(line)
            return
        client = self._clients[int(rank)]
        while client.line is not None and client.line.waits(0):
            self._hear_learner(client)  # perhaps it has just hung up
        if client.line is not None:
            self._send(line, ("refused", f"learner {rank} is taken by a process that is alive"))
            self._hang_up(line)
            return
        line.set_patience(STALLED)
        depth = self._options.depth
        self._clients[int(rank)] = client = Client(line, slots=[None] * depth, free=deque(range(depth)))
        self._handlers[line.fileno()] = lambda: self._hear_learner(client)
        self._send(line, ("welcome", os.getpid()))

    def _hear_starter(self) -> None:
        """Do what the process that started the server asks for."""
        try:
            message = self._control.receive()
        except (OSError, EOFError):
            self._ended = True
            return
        self._run_call(self._control, message)

    def _hear_learner(self, client: Client) -> None:
        """Do what a learner asks for."""
        line = client.line
        if line is None or not line.waits(0):
            return  # the poll reported an older line, whose descriptor had the same number
        try:
            message = line.receive()
            if len(message) != MESSAGE_SIZES[message[0]]:
                raise EOFError
        except Exception:  # it is gone, stands still within a message, or sends something else
            self._hang_up(line)
            return
        if message[0] in ("next", "call"):  # from here on it reads until it has the answer
            client.unread = 0
            while client.late:
                self._send(line, ("late", client.late.popleft()))
        if message[0] == "next":
            if message[1] is not None:
                client.free.append(message[1])  # the learner has expired this batch before it sent the message
            if message[2] == client.errors:  # otherwise an error that is on its way is the answer
                client.wants = True
                if client.ready:  # it takes its next batch, which counts as drawn from now on
                    self._note_taken(client.ready.popleft())
                else:
                    client.requested += 1
        else:
            self._run_call(line, message)

    def _release(self, client: Client) -> None:
        """Free the slots of a learner that is gone. Its turns are passed over until it comes back."""
        client.line, client.left, client.wants = None, True, False
        for drawn in client.ready:  # they were sent, so they count as taken: their numbers are not drawn again
            self._note_taken(drawn)
        client.ready.clear()
        client.late.clear()
        client.slots[:] = [None] * len(client.slots)

    # -- calls --------------------------------------------------------------------------------------------------

    def _run_call(self, line: Line, message: Any) -> None:
        kind, *rest = message
        try:
            arguments = rest[-1].open()
            if kind == "rate":
                self._replay.update_priorities(*arguments)
            elif kind == "add":
                values, envs = arguments
                self._replay.add(values, envs=envs)
            else:
                self._send(line, ("reply", rest[0], self._result(*arguments)))
        except Exception as error:
            failure = Failure.of(error)
            if kind == "call":
                self._send(line, ("failed", rest[0], failure))
            else:
                self._send_late(line, failure)

    def _result(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Parcel:
        """The result of a method of the replay, or the value of a property."""
        require("call", METHOD_RULE, name=name)
        value: Any = getattr(self._replay, name)
        value = value(*args, **kwargs) if callable(value) else value
        return Parcel(f"call(name={name!r}): its result", packed_batch(value) if is_batch(value) else value)

    def _send_late(self, line: Line, failure: Failure) -> None:
        """Send a learner the error of a call that it does not wait for, now or once it reads."""
        client = next(client for client in self._clients if client.line is line)
        if client.unread < MOST_UNREAD:
            client.unread += 1
            self._send(line, ("late", failure))
        elif len(client.late) < MOST_LATE:
            client.late.append(failure)

    def _send(self, line: Line, message: object) -> None:
        try:
            line.send(message)
        except (OSError, EOFError):  # it is gone, or does not read; the starter's line is noticed when it is read
            self._hang_up(line)

    # -- draws --------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw all batches that are due: batch t for learner t mod learners, in the order of t."""
        if self._failure is not None:
            for client in self._clients:
                if client.wants:
                    self._send_error(client, self._failure)
        while not all(client.left for client in self._clients):
            client = self._clients[self._next_rank]
            if not client.left and not self._serve(client):
                # batch t is for learner t mod learners: first come, first served would make every run different
                return
            self._next_rank = (self._next_rank + 1) % len(self._clients)

    def _serve(self, client: Client) -> bool:
        """Draw the next batch for a learner; False if it cannot be drawn yet, or not at all."""
        if not (client.wants and client.free):
            return False
        drawn = self._undelivered or self._draw_next(client)
        if drawn is None:
            return False
        spec, tensors = spec_of(drawn.batch)
        try:
            number, slot, new_memory = client.prepare_slot(spec)
        except Exception as error:  # no memory, or too many open files: the learner may ask again
            self._send_error(client, Failure.of(error))  # the batch stays in _undelivered: it is not drawn twice
            return False
        self._undelivered = None
        self._served.ahead.ready[-1] = drawn = drawn._replace(batch=None)  # the slot has it from here on
        client.free.popleft()
        slot.write(tensors)
        client.ready.append(drawn)
        if client.requested:
            client.requested -= 1
            self._note_taken(client.ready.popleft())
        assert client.line is not None
        self._send(client.line, ("batch", number, drawn.completed, new_memory))  # after the write: it reads at once
        return True

    def _draw_next(self, client: Client) -> Drawn | None:
        """Draw the next batch; None if it may not be drawn yet, or if the draw failed. The learner gets the error."""
        if not self._is_allowed():
            return None
        ahead = self._served.ahead
        with self._replay.lock:
            ahead.draw()
        if ahead.error is not None:
            error, ahead.error = ahead.error, None
            if self._limit is not None:
                self._limit.uncount(samples=self._options.batch_size)
            if isinstance(error, EmptyError) and self._options.lanes is not None:
                return None  # the first steps have yet to come through the lanes
            self._send_error(client, Failure.of(error))
            return None
        self._undelivered = ahead.ready[-1]
        return self._undelivered

    def _is_allowed(self) -> bool:
        """True if the limit allows a batch, which it counts. The time until it does counts as waited."""
        if self._limit is None:
            return True
        if self._limit.try_to_sample(self._options.batch_size):
            if self._limited_since is not None:
                self._limit.note_sample_wait(time.monotonic() - self._limited_since)
                self._limited_since = None
            return True
        self._limited_since = time.monotonic() if self._limited_since is None else self._limited_since
        return False

    def _note_taken(self, drawn: Drawn) -> None:
        with self._replay.lock:
            self._served.ahead.note_taken(drawn)

    def _send_error(self, client: Client, failure: Failure) -> None:
        """Answer a learner with an error. Nothing more is drawn for this learner until it asks again."""
        client.wants, client.requested = False, 0
        client.errors += 1
        if client.line is not None:
            self._send(client.line, ("error", failure))

    # -- lanes --------------------------------------------------------------------------------------------------

    def _drain(self, lanes: Lanes) -> None:
        """Move steps from the lanes into the replay, and let the other thread look whether it can draw now."""
        try:
            while not self._ended:
                if lanes.wait(TICK) and lanes.drain(self._replay, limit=self._limit, timeout=TICK):
                    self._waker.send(b"!")  # after the drain, so that the draw finds the steps
        except Exception as error:  # the learners get the error
            self._failure = Failure.of(error)
            self._waker.send(b"!")


@dataclass
class Client:
    """A learner, as the owner knows it."""

    line: Line | None = None
    left: bool = False
    """True if it was connected once and has left. Then its turns are passed over; one that never came is waited for."""
    wants: bool = False
    """True if it has asked for a batch, and was sent no error since."""
    slots: list[Slot | None] = field(default_factory=list["Slot | None"])
    free: deque[int] = field(default_factory=deque[int])
    """The numbers of the slots that it has given back."""
    ready: deque[Drawn] = field(default_factory=deque[Drawn])
    """Batches that were drawn for it, and that it has not asked for yet."""
    errors: int = 0
    """How many errors it was sent. It counts those that it has read: while the two differ, its requests are old."""
    requested: int = 0
    """How many batches it has asked for that are not drawn yet."""
    unread: int = 0
    """How many errors of calls it was sent since it was last known to read."""
    late: deque[Failure] = field(default_factory=deque[Failure])
    """Errors of calls that are still to be sent."""

    def prepare_slot(self, spec: BlockSpec) -> tuple[int, Slot, tuple[str, BlockSpec] | None]:
        """Make the learner's next free slot ready for a batch.

        Returns:
            the slot's number; the slot; and the name of its memory with the spec of the batch if they are new to the
            learner, otherwise None.

        Raises:
            OSError, ParameterError: there is no memory for it, or too many files are open. Nothing has changed.
        """
        number = self.free[0]
        slot = self.slots[number]
        if slot is not None and slot.spec == spec:
            return number, slot, None
        block = None if slot is None else slot.block
        if block is None or block.nbytes < spec.nbytes:
            block = SharedBlock.create(max(spec.nbytes, 1))
        self.slots[number] = slot = Slot(block.array, spec, block)  # keeps the block until the learner has attached it
        return number, slot, (block.name, spec)


# The learner's side


class Learner(Batches[Any]):
    """The batches of a :class:`relive.ReplayServer`, in this process: ``for batch in server.learner(): ...``.

    Batches are views of slots in shared memory. Each is valid until the next one is asked for; keep ``batch.clone()``
    for longer. Calls reach the owner in the order in which they are made.

    With a ``device``, each batch is copied there, into memory of its own, and stays valid.

    Use it in the process that made it, from one thread at a time.

    Raises:
        LifecycleError: from any call, if the process that owns the replay has ended.
    """

    rank: int

    def __init__(
        self,
        address: Address,
        rank: int,
        timeout: float | None,
        is_alive: Callable[[], bool],
        device: torch.device | None = None,
    ) -> None:
        """Connect; :meth:`relive.ReplayServer.learner` does."""
        super().__init__()
        self._uploads = None if device is None else Uploads(device)
        self.rank, self._timeout, self._is_alive = rank, timeout, is_alive
        self._process = os.getpid()
        self._slots: dict[int, Slot] = {}
        self._batches = deque[Failure | tuple[int, int]]()
        """Batches that have come: failures, or pairs of the slot's number and the transitions completed."""
        self._replies, self._late = deque[Failure | Parcel](), deque[Failure]()
        self._slot_in_use: int | None = None
        self._calls = self._errors = 0
        self._has_requested = False
        """True while a request for a batch is on its way or unanswered. After a timeout, it is not sent again."""
        self._is_intact = True
        """False while a message is sent or read. If it is still False when the next call begins, a call was broken off
        there. What the owner has received is then unknown, so the line is closed."""
        self._line = address.connect(str(rank))
        ONLY_HERE[self._line] = Line.close
        kind, *rest = self._receive()
        if kind == "refused":
            raise LifecycleError(f"learner: {rest[0]}")

    def __next__(self) -> Any:
        return self.take(self._timeout)

    def take(self, timeout: float | None = None) -> Any:
        """The next batch, or the error of its draw. The batch before is given back.

        Args:
            timeout: seconds; None is for ever.

        Raises:
            WaitTimeoutError: the batch did not come in time. The next call waits for the same batch.
            LifecycleError: the owner has ended, or this learner is closed or belongs to another process.
            Exception: what the draw raised, such as EmptyError, or what an earlier call raised in the owner's process.
        """
        require("take", TIMEOUT_RULE, timeout=timeout)
        self._start_call()
        # before the request, which gives the slot back: the owner may overwrite it as soon as it reads the message
        if self._uploads is not None:
            self._uploads.wait()
        if self._slot_in_use is not None:
            self._slots[self._slot_in_use].expire()
        if not self._has_requested:
            self._is_intact = False
            self._send(("next", self._slot_in_use, self._errors))
            self._slot_in_use, self._has_requested = None, True
            self._is_intact = True
        self._read_arrived()
        self._ready_at_once += bool(self._batches)
        start = time.perf_counter()
        self._wait_for(self._batches, timeout, "no batch came")
        self._waited += time.perf_counter() - start
        self._raise_late()
        self._is_intact = False  # an exception between these lines would lose the slot that was popped
        self._has_requested, answer = False, self._batches.popleft()
        if isinstance(answer, Failure):
            self._errors += 1
        else:
            self._slot_in_use, self._completed = answer
        self._is_intact = True
        if isinstance(answer, Failure):
            raise answer.raised("the draw failed")
        self._taken += 1
        slot = self._slots[answer[0]]
        return slot.batch() if self._uploads is None else self._uploads.upload(slot)

    def update_priorities(self, index: ArrayLike, td_error: ArrayLike, mask: ArrayLike | None = None) -> None:
        """As :meth:`relive.ReplayBuffer.update_priorities`, but a later call raises the errors of this one."""
        real = None if mask is None else as_host(mask)
        self._start_call()
        arguments = np.array(as_host(index)), np.array(as_host(td_error)), real
        self._send_unanswered(("rate", Parcel("update_priorities: an argument", arguments)))

    def add(
        self,
        step: Mapping[str, object] | None = None,
        /,
        *more: NoReturn,
        envs: ArrayLike | None = None,
        **fields: object,
    ) -> None:
        """As :meth:`relive.ReplayBuffer.add`, but a later call raises the errors of this one. Lanes are quicker."""
        if more or not (step is None or hasattr(step, "keys")):
            raise FieldError(not_named(step))
        self._start_call()
        values = fields if step is None else {**step, **fields}
        arrays = {name: _as_arrays(value) for name, value in values.items()}
        self._send_unanswered(("add", Parcel("add: a field", (arrays, envs))))

    def call(self, name: str, /, *args: object, **kwargs: object) -> Any:
        """Call a method of the replay in the owner's process, such as ``call("save", path)``, or read a property there.

        The owner makes this call after all earlier ones of this learner. Raises what the method raises.
        """
        self._start_call()
        arguments = Parcel(f"call(name={name!r}): an argument", (name, args, kwargs))
        self._calls += 1
        self._send(("call", self._calls, arguments))
        self._wait_for(self._replies, None, "")
        return _outcome(self._replies.popleft(), name)

    def stats(self) -> dict[str, float]:
        """Figures of this learner.

        ``batches``: how many it took; ``ready``: how many were there when it asked; ``waited``: seconds that it waited
        for the others; ``pinned``: slots in page-locked memory, from which a GPU copies by itself.
        """
        return super().stats() | {"pinned": 0.0 if self._uploads is None else float(self._uploads.pinned)}

    def close(self) -> None:
        """Give everything back, and leave the rank to another process."""
        if self._uploads is not None:
            self._uploads.close()
        if self._slot_in_use is not None:
            self._slots[self._slot_in_use].expire()
            self._slot_in_use = None
        self._line.close()

    def __reduce__(self) -> NoReturn:
        raise LifecycleError(
            "a learner cannot be sent to another process; send the server, and call learner(rank) there"
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _start_call(self) -> None:
        """Refuse a call that cannot be made here, and raise the error of an earlier one."""
        if os.getpid() != self._process:
            raise LifecycleError("this learner belongs to another process; call server.learner(rank) in each process")
        if not self._is_intact:
            self._line.close()
        if self._line.closed:
            raise LifecycleError(
                "this learner is closed, or a call was broken off while it sent or read; call server.learner(rank)"
            )
        self._raise_late()

    def _raise_late(self) -> None:
        if self._late:
            raise self._late.popleft().raised("an earlier call failed")

    def _send(self, message: object) -> None:
        try:
            self._line.send(message)
        except (OSError, EOFError) as error:
            raise self._ended() from error

    def _send_unanswered(self, message: object) -> None:
        """Send a message that has no answer.

        Messages that have arrived are read first. So a learner that only sends does not fill the socket up, and learns
        of errors.
        """
        self._read_arrived()
        self._send(message)

    def _wait_for(self, queue: Sized, timeout: float | None, problem: str) -> None:
        """Read messages until ``queue`` has one."""
        end = None if timeout is None else time.monotonic() + timeout
        while not queue:
            left = GLANCE if end is None else min(GLANCE, end - time.monotonic())
            if left < 0:
                raise WaitTimeoutError(f"learner {self.rank}: {problem} within {timeout} s; is anything added?")
            if self._line.waits(left):
                self._read()
            elif not self._is_alive():
                raise self._ended()

    def _read_arrived(self) -> None:
        while self._line.waits(0):
            self._read()

    def _read(self) -> None:
        self._is_intact = False
        kind, *rest = self._receive()
        if kind == "batch":
            number, completed, new_memory = rest
            if new_memory is not None:
                name, spec = new_memory
                block = SharedBlock.attach(name)
                self._slots[number] = Slot(block.array, spec, block)
                if self._uploads is not None:
                    self._uploads.pin(block)
            self._batches.append((number, completed))
        elif kind == "error":
            self._batches.append(rest[0])
        elif kind == "late":
            self._late.append(rest[0])
        elif rest[0] == self._calls:  # else the call was broken off
            self._replies.append(rest[1])
        self._is_intact = True

    def _receive(self) -> Any:
        try:
            return self._line.receive()
        except (OSError, EOFError) as error:
            raise self._ended() from error

    def _ended(self) -> LifecycleError:
        self._line.close()
        return LifecycleError(
            "the process that owns the replay has ended; start a new ReplayServer, from a save if there is one"
        )


def _outcome(answer: Failure | Parcel, call: str) -> Any:
    """The result of a call in the owner's process. Raises the error that it raised there."""
    if isinstance(answer, Failure):
        raise answer.raised(call)
    value = answer.open()
    return value.batch() if isinstance(value, Block) else value


def _as_arrays(tree: Any) -> object:
    """A field of a step, nested or not, with arrays in place of tensors, which would be sent as open files."""
    if hasattr(tree, "items"):
        return {name: _as_arrays(member) for name, member in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_as_arrays(member) for member in cast("tuple[object, ...]", tree))
    return as_host(tree) if isinstance(tree, Tensor) and tree.dtype is not torch.bfloat16 else tree  # NumPy lacks it


# Slots


class Slot:
    """Memory for one batch, and the tensors over it.

    Args:
        memory: uint8, at least as large as the batch; a tensor may be on a device.
        spec: the spec of the batch that the slot holds now.
        block: the shared memory that ``memory`` belongs to, if it is shared.
    """

    spec: BlockSpec
    block: SharedBlock | None

    def __init__(self, memory: NDArray[np.uint8] | Tensor, spec: BlockSpec, block: SharedBlock | None = None) -> None:
        self.spec, self.block = spec, block
        self.memory: Tensor = memory if isinstance(memory, Tensor) else torch.from_numpy(memory)
        self._leaves = spec.tensors(self.memory)
        self._batch: Batch | None = None

    def write(self, tensors: list[Tensor]) -> None:
        """Copy the tensors of a batch of this spec."""
        for target, tensor in zip(self._leaves.values(), tensors, strict=True):
            target.copy_(tensor)

    def batch(self) -> Batch:
        """The batch, without a copy. It is valid until :meth:`expire`."""
        self._batch = self.spec.batch(self._leaves)
        return self._batch

    def expire(self) -> None:
        """Make the last batch refuse all use, and let autograd see that its tensors change.

        Tensors that were taken out of the batch can still be read, but what they show is undefined.
        """
        # the fields are not filled with NaN, which takes 2 ms for images
        batch, self._batch = self._batch, None
        if batch is not None:
            take_back(batch)
        # a backward pass that saved one of the tensors now raises an error, where it would read another batch
        increment_version(self.memory)


class Uploads:
    """Copies batches of slots to a device. A slot may be given back once :meth:`wait` returns.

    For CUDA, the shared memory of each slot is page-locked in this process. So the GPU copies a batch while the learner
    goes on. If the system refuses to lock the memory, the learner waits for the copy. The copy is made here, since the
    owner would write over a slot that the user's own copy still reads.

    Args:
        device: where batches go.
        pins: True to page-lock memory; by default for CUDA.
    """

    def __init__(self, device: torch.device, pins: bool | None = None) -> None:
        self.device = device
        self._pins = device.type == "cuda" if pins is None else pins
        self._unpin: dict[int, finalize[[int], SharedBlock]] = {}
        """The call that unlocks the memory of each slot, by the address of the memory."""
        self._copied: torch.cuda.Event | None = None
        """The event after the last copy."""

    @property
    def pinned(self) -> int:
        """How many slots are page-locked."""
        return sum(unpin.alive for unpin in self._unpin.values())

    def pin(self, block: SharedBlock) -> None:
        """Page-lock the memory of a slot, until the block is dropped or :meth:`close` is called."""
        if not self._pins:
            return
        address, runtime = block.array.ctypes.data, _runtime()
        # without those that are gone: memory that could not be locked may lie at such an address now
        self._unpin = {key: unpin for key, unpin in self._unpin.items() if unpin.alive}
        if int(runtime.cudaHostRegister(address, block.nbytes, 0)) == 0:
            self._unpin[address] = finalize(block, runtime.cudaHostUnregister, address)

    def upload(self, slot: Slot) -> Batch:
        """The batch of a slot on the device, in memory of its own."""
        pinned = slot.memory.data_ptr() in self._unpin
        # a copy that does not block reads the slot until its event, so wait() comes before the slot is given back
        moved = slot.memory[: slot.spec.nbytes].to(self.device, non_blocking=pinned, copy=True)
        if pinned:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.device))
        return Slot(moved, slot.spec).batch()

    def wait(self) -> None:
        """Wait until the device has copied the last batch."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()

    def close(self) -> None:
        """Unlock all memory."""
        self.wait()  # memory that is unlocked while it is copied would break the copy
        for unpin in self._unpin.values():
            unpin()


def _runtime() -> Any:
    """CUDA's runtime."""
    cuda: Any = torch.cuda  # its stubs leave the type open
    return cuda.cudart()
