"""Slots: batches in shared memory. One process fills a slot, and another one reads it in place."""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.process import BaseProcess
from typing import Any, Never, cast
from weakref import WeakSet, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import increment_version

from ..batches import SequenceBatch, as_tensordict, replace_parts
from ..errors import EmptyError, FieldError, LifecycleError, ParameterError, WaitTimeoutError
from ..parameters import TIMEOUT_RULE, Rule, an_instance, is_count, one_of, refuse_class, require
from ..replay.buffer import ReplayBuffer
from ..replay.checks import require_rows
from ..replay.durable import Drawn
from ..steps.arrays import as_host
from ..steps.schema import Path, map_leaves, not_named
from .lanes import Lanes
from .limits import LIMIT_RULE, RateLimit
from .shared import SharedBlock
from .wire import HELLO, Address, Failure, Line, Parcel, accept, listen

__all__ = [
    "BatchForm",
    "Learner",
    "Order",
    "Owner",
    "Packed",
    "ReplayServer",
    "Seat",
    "Slot",
    "Uploads",
    "form_of",
    "is_batch",
    "run_owner",
]


LINE = 64
"""Bytes of a cache line; every field begins on one."""


@dataclass(frozen=True)
class BatchForm:
    """Which tensors a batch consists of: all that a reader needs besides their bytes."""

    fields: tuple[tuple[Path, torch.dtype, tuple[int, ...]], ...]
    """Path, dtype and shape of each tensor, in the order of memory."""
    facts: int
    """How many of the last fields are facts about sequences."""
    states: int
    """How many fields, before the facts, are recurrent states."""
    hidden: Any
    """The nesting of the states, each as its number; None where there are none."""
    time_first: bool | None
    """Whether time is the first axis of a batch of sequences; None for a batch of transitions."""

    @cached_property
    def offsets(self) -> list[int]:
        """Where each field begins, in bytes, and where the last one ends."""
        found = [0]
        for _, dtype, shape in self.fields:
            found.append(found[-1] + -(-math.prod(shape) * dtype.itemsize // LINE) * LINE)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of such a batch."""
        return self.offsets[-1]


def form_of(batch: Any) -> tuple[BatchForm, list[Tensor]]:
    """The form of a batch of a replay, and its tensors in the form's order."""
    if not isinstance(batch, SequenceBatch):
        items: Any = batch.items(include_nested=True, leaves_only=True)
        named: dict[Path, Tensor] = {key if isinstance(key, tuple) else (key,): value for key, value in items}
        return BatchForm(_fields(named), 0, 0, None, None), list(named.values())
    leaves, facts, hidden = batch.parts
    states = list[Tensor]()

    def number(state: Tensor) -> int:
        states.append(state)
        return len(states) - 1

    numbers = map_leaves(number, hidden)
    numbered = {("hidden", str(i)): state for i, state in enumerate(states)}
    known = {(name,): fact for name, fact in facts.items()}
    fields = _fields(leaves) + _fields(numbered) + _fields(known)
    return BatchForm(fields, len(facts), len(states), numbers, batch.time_first), [
        *leaves.values(),
        *states,
        *known.values(),
    ]


def _fields(leaves: Mapping[Path, Tensor]) -> tuple[tuple[Path, torch.dtype, tuple[int, ...]], ...]:
    return tuple((path, leaf.dtype, tuple(leaf.shape)) for path, leaf in leaves.items())


class Slot:
    """Room for one batch, and the tensors over it.

    Args:
        memory: uint8, at least as large as the batch; a tensor may be on a device.
        form: the form of the batch that the slot holds now.
        block: the shared memory that ``memory`` belongs to, if it is shared.
    """

    def __init__(self, memory: NDArray[np.uint8] | Tensor, form: BatchForm, block: SharedBlock | None = None) -> None:
        self.form, self.block = form, block
        self.memory = memory if isinstance(memory, Tensor) else torch.from_numpy(memory)
        self._tensors = [
            self.memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (_, dtype, shape), start in zip(form.fields, form.offsets, strict=False)
        ]
        self._leaves = dict(zip([path for path, _, _ in form.fields], self._tensors, strict=True))
        self._handed: Any = None

    def write(self, tensors: list[Tensor]) -> None:
        """Copy the tensors of a batch of this form."""
        for target, tensor in zip(self._tensors, tensors, strict=True):
            target.copy_(tensor)

    def batch(self) -> Any:
        """The batch, without a copy. It is valid until :meth:`expire`."""
        form, tensors = self.form, self._tensors
        if form.time_first is None:
            self._handed = as_tensordict(self._leaves, tensors[0].shape[:1])
            return self._handed
        count = len(tensors) - form.facts
        paths = [path for path, _, _ in form.fields]
        middle = count - form.states
        facts = {path[0]: tensor for path, tensor in zip(paths[count:], tensors[count:], strict=True)}
        hidden = map_leaves(tensors[middle:count].__getitem__, form.hidden)
        leaves = dict(zip(paths[:middle], tensors, strict=False))
        self._handed = SequenceBatch(leaves, facts, hidden, time_first=form.time_first)
        return self._handed

    def expire(self) -> None:
        """Make the batch that was handed out refuse all use, and let autograd see that its tensors change.

        Tensors that were taken out of the batch can still be read, but what they show is undefined.
        """
        batch, self._handed = self._handed, None
        if isinstance(batch, SequenceBatch):
            replace_parts(batch, _EXPIRED)
        elif batch is not None:
            batch._tensordict = _EXPIRED
        increment_version(self.memory)


@dataclass(frozen=True)
class Packed:
    """A batch as bytes, to send to another process. Tensors would be sent as open files."""

    form: BatchForm
    memory: NDArray[np.uint8]

    @classmethod
    def of(cls, batch: Any) -> Packed:
        """The bytes of a batch."""
        form, tensors = form_of(batch)
        packed = cls(form, np.empty(form.nbytes, np.uint8))
        Slot(packed.memory, form).write(tensors)
        return packed

    def batch(self) -> Any:
        """The batch, over these bytes."""
        return Slot(self.memory, self.form).batch()


def is_batch(value: Any) -> bool:
    """Whether this is a batch of a replay, of transitions or of sequences."""
    return isinstance(value, SequenceBatch) or type(value).__name__ == "TensorDict"


class _Expired(dict[Any, Any]):
    """The fields of a batch that was given back: its slot may hold another batch by now."""

    def _refuse(self, *_: Any) -> Never:
        raise LifecycleError(
            "this batch was given back: a batch of a server is valid until its learner asks for the next one; keep "
            "batch.clone() to use it longer"
        )

    __getitem__ = __iter__ = __len__ = __contains__ = get = keys = values = items = cast("Any", _refuse)


_EXPIRED = _Expired()


class Uploads:
    """Copies batches of slots to a device. A slot may be given back once :meth:`wait` returns.

    For CUDA, the shared memory of each slot is page-locked in this process. So the GPU copies a batch while the learner
    goes on. If the system refuses to lock the memory, the learner waits for the copy.

    Args:
        device: where batches go.
        locks: whether to lock memory; by default for CUDA.
    """

    def __init__(self, device: torch.device, locks: bool | None = None) -> None:
        self.device = device
        self._locks = device.type == "cuda" if locks is None else locks
        self._locked: dict[int, finalize[Any, Any]] = {}
        """The call that unlocks the memory of each slot, by the address of the memory."""
        self._copied: Any = None
        """The event after the last copy."""

    @property
    def locked(self) -> int:
        """How many slots are locked."""
        return sum(unlock.alive for unlock in self._locked.values())

    def prepare(self, block: SharedBlock) -> None:
        """Lock the memory of a slot, until the block is dropped or :meth:`close` is called."""
        if not self._locks:
            return
        address, runtime = block.array.ctypes.data, _runtime()
        self._locked = {key: unlock for key, unlock in self._locked.items() if unlock.alive}
        if int(runtime.cudaHostRegister(address, block.nbytes, 0)) == 0:
            self._locked[address] = finalize(block, _unlock, runtime, address)

    def upload(self, slot: Slot) -> Any:
        """The batch of a slot on the device, in memory of its own."""
        locked = slot.memory.data_ptr() in self._locked
        moved = slot.memory[: slot.form.nbytes].to(self.device, non_blocking=locked, copy=True)
        if locked:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.device))
        return Slot(moved, slot.form).batch()

    def wait(self) -> None:
        """Wait until the device has copied the last batch."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()

    def close(self) -> None:
        """Unlock all memory."""
        self.wait()
        for unlock in self._locked.values():
            unlock()


def _runtime() -> Any:
    """CUDA's runtime."""
    cuda: Any = torch.cuda  # its stubs leave the type open
    return cuda.cudart()


def _unlock(runtime: Any, address: int) -> None:
    runtime.cudaHostUnregister(address)


LEARNER_GLANCE = 0.25
"""Seconds between two checks whether the owner is alive. Usually the end of the line shows its death at once."""


class Learner(Iterator[Any]):
    """The batches of a :class:`relive.ReplayServer`, in this process: ``for batch in server.learner(): ...``.

    Batches are views of slots in shared memory. Each is valid until the next one is asked for; keep ``batch.clone()``
    for longer. Calls reach the owner in the order in which they are made.

    With a ``device``, each batch is copied there, into memory of its own, and stays valid.

    Use it in the process that made it, from one thread at a time.

    Raises:
        LifecycleError: from any call, if the process that owns the replay has ended.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        timeout: float | None,
        is_alive: Callable[[], bool],
        device: torch.device | None = None,
    ) -> None:
        """Connect; :meth:`relive.ReplayServer.learner` does."""
        self._uploads = None if device is None else Uploads(device)
        self.rank, self._timeout, self._is_alive = rank, timeout, is_alive
        self._address, self._process = address, os.getpid()
        self._slots: dict[int, Slot] = {}
        self._batches = deque[Any]()
        """What came and was not taken yet: failures, or pairs of the slot's number and the transitions completed."""
        self._replies, self._late = deque[Any](), deque[Failure]()
        self._used: int | None = None
        self._calls = self._errors = 0
        self._asked = False
        self._is_whole = True
        """False while a message is sent or read. If it is still False when the next call begins, a call was broken off
        there. What the owner has received is then unknown, so the line is closed."""
        self._taken, self._at_once, self._waited, self._completed = 0, 0, 0.0, 0
        self._line = self._connected()
        _learners.add(self)

    def __iter__(self) -> Learner:
        return self

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
        self._begin()
        if self._uploads is not None:
            self._uploads.wait()
        if self._used is not None:
            self._slots[self._used].expire()
        if not self._asked:
            self._is_whole = False
            self._send(("next", self._used, self._errors))
            self._used, self._asked = None, True
            self._is_whole = True
        self._read_what_came()
        self._at_once += bool(self._batches)
        start = time.perf_counter()
        self._wait_for(self._batches, timeout, "no batch came")
        self._waited += time.perf_counter() - start
        self._raise_late()
        self._is_whole = False
        self._asked, found = False, self._batches.popleft()
        if isinstance(found, Failure):
            self._errors += 1
        else:
            self._used, self._completed = found
        self._is_whole = True
        if isinstance(found, Failure):
            raise found.raised("the draw failed")
        self._taken += 1
        slot = self._slots[found[0]]
        return slot.batch() if self._uploads is None else self._uploads.upload(slot)

    def update_priorities(self, index: Any, td_error: Any, mask: Any = None) -> None:
        """As :meth:`relive.ReplayBuffer.update_priorities`, but a later call raises the errors of this one."""
        errors = None if mask is None else as_host(mask)
        self._begin()
        given = np.array(as_host(index)), np.array(as_host(td_error)), errors
        self._send_on(("rate", Parcel("update_priorities: an argument", given)))

    def add(self, step: Mapping[str, Any] | None = None, /, *more: Never, envs: Any = None, **fields: Any) -> None:
        """As :meth:`relive.ReplayBuffer.add`, but a later call raises the errors of this one. Lanes are quicker."""
        if more or not (step is None or hasattr(step, "keys")):
            raise FieldError(not_named(step))
        self._begin()
        values = fields if step is None else {**step, **fields}
        plain = {name: _plain(value) for name, value in values.items()}
        self._send_on(("add", Parcel("add: a field", (plain, envs))))

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the replay in the owner's process, such as ``call("save", path)``, or read a property there.

        The owner makes this call after all earlier ones of this learner. Raises what the method raises.
        """
        self._begin()
        given = Parcel(f"call(name={name!r}): an argument", (name, args, kwargs))
        self._calls += 1
        self._send(("call", self._calls, given))
        self._wait_for(self._replies, None, "")
        kind, value = self._replies.popleft()
        if kind == "failed":
            raise value.raised(name)
        value = value.open()
        return value.batch() if isinstance(value, Packed) else value

    @property
    def completed(self) -> int:
        """How many transitions had been completed when the batch that came last was drawn."""
        return self._completed

    def stats(self) -> dict[str, float]:
        """Figures of this learner.

        ``batches``: how many it took; ``ready``: how many were there when it asked; ``waited``: seconds that it waited
        for the others; ``pinned``: slots in page-locked memory, from which a GPU copies by itself.
        """
        pinned = 0 if self._uploads is None else self._uploads.locked
        found = {"batches": self._taken, "ready": self._at_once, "waited": self._waited, "pinned": pinned}
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        """Give everything back, and leave the rank to another process."""
        if self._uploads is not None:
            self._uploads.close()
        if self._used is not None:
            self._slots[self._used].expire()
            self._used = None
        self._line.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Never:
        raise LifecycleError(
            "a learner cannot be sent to another process; send the server, and call learner(rank) there"
        )

    # -- inside -------------------------------------------------------------------------------------------------

    def _connected(self) -> Line:
        line = self._address.connect(str(self.rank))
        try:
            kind, *rest = line.receive()
        except (OSError, EOFError) as error:
            raise self._ended() from error
        if kind == "refused":
            raise LifecycleError(f"learner: {rest[0]}")
        self._owner = rest[0]
        return line

    def _send(self, message: Any) -> None:
        try:
            self._line.send(message)
        except (OSError, EOFError) as error:
            raise self._ended() from error

    def _send_on(self, message: Any) -> None:
        """Send a message that has no answer. What came is read first, so that a learner that only sends fills nothing
        up, and hears of errors.
        """
        self._read_what_came()
        self._send(message)

    def _wait_for(self, kept: deque[Any], timeout: float | None, what: str) -> None:
        """Read messages until ``kept`` has one."""
        end = None if timeout is None else time.monotonic() + timeout
        while not kept:
            left = LEARNER_GLANCE if end is None else min(LEARNER_GLANCE, end - time.monotonic())
            if left < 0:
                raise WaitTimeoutError(f"learner {self.rank}: {what} within {timeout} s; is anything added?")
            if self._line.waits(left):
                self._read()
            elif not self._is_alive():
                raise self._ended()

    def _read_what_came(self) -> None:
        while self._line.waits(0):
            self._read()

    def _read(self) -> None:
        self._is_whole = False
        try:
            kind, *rest = self._line.receive()
        except (OSError, EOFError) as error:
            raise self._ended() from error
        if kind == "batch":
            place, completed, changed = rest
            if changed is not None:
                name, form = changed
                self._slots[place] = slot = _attached(name, form)
                if self._uploads is not None and slot.block is not None:
                    self._uploads.prepare(slot.block)
            self._batches.append((place, completed))
        elif kind == "error":
            self._batches.append(rest[0])
        elif kind == "late":
            self._late.append(rest[0])
        elif rest[0] == self._calls:  # else the call was broken off
            self._replies.append((kind, rest[1]))
        self._is_whole = True

    def _begin(self) -> None:
        """What every call does first."""
        self._require_here()
        self._raise_late()

    def _raise_late(self) -> None:
        if self._late:
            raise self._late.popleft().raised("an earlier call failed")

    def _require_here(self) -> None:
        if os.getpid() != self._process:
            raise LifecycleError("this learner belongs to another process; call server.learner(rank) in each process")
        if not self._is_whole:
            self._line.close()
        if self._line.closed:
            raise LifecycleError(
                "this learner is closed, or a call was broken off while it sent or read; call server.learner(rank)"
            )

    def _ended(self) -> LifecycleError:
        self._line.close() if hasattr(self, "_line") else None
        return LifecycleError(
            "the process that owns the replay has ended; start a new ReplayServer, from a save if there is one"
        )

    def hang_up(self) -> None:
        """Close the line in a forked child. If the child kept it open, the owner could not see this process end."""
        self._line.close()


def _attached(name: str, form: BatchForm) -> Slot:
    block = SharedBlock.attach(name)
    return Slot(block.array, form, block)


def _plain(tree: Any) -> Any:
    """A field of a step, nested or not, with arrays in place of tensors, which would be sent as open files."""
    if hasattr(tree, "items"):
        return {name: _plain(member) for name, member in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_plain(member) for member in cast("tuple[Any, ...]", tree))
    return as_host(tree) if isinstance(tree, Tensor) and tree.dtype is not torch.bfloat16 else tree


_learners = WeakSet[Learner]()


def _hang_up_learners() -> None:
    for learner in list(_learners):
        learner.hang_up()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_hang_up_learners)


@dataclass
class Seat:
    """A learner, as the owner sees it."""

    line: Line | None = None
    gone: bool = False
    """Whether it was connected once and has left. Then its turns are passed over; one that never came is waited for."""
    wants: bool = False
    """Whether it has asked for a batch, and was sent no error since."""
    slots: list[Slot | None] = field(default_factory=list[Any])
    free: deque[int] = field(default_factory=deque[int])
    ready: deque[Drawn] = field(default_factory=deque[Drawn])
    """Batches that were drawn for it, and that it has not asked for yet."""
    errors: int = 0
    """How many errors it was sent."""
    asked: int = 0
    """How many batches it has asked for that are not drawn yet."""
    unread: int = 0
    """How many errors of calls it was sent since it was last known to read."""
    late: deque[Failure] = field(default_factory=deque[Failure])
    """Errors of calls that are still to be sent."""

    def slot_for(self, form: BatchForm) -> tuple[int, Any]:
        """Make the learner's next free slot ready for a batch.

        Returns:
            the slot's number; and the name of its memory with the form of the batch if they are new to the learner,
            otherwise None.

        Raises:
            OSError, ParameterError: there is no memory for it, or too many files are open. Nothing has changed.
        """
        place = self.free[0]
        slot = self.slots[place]
        if slot is not None and slot.form == form:
            return place, None
        block = None if slot is None else slot.block
        if block is None or block.nbytes < form.nbytes:
            block = SharedBlock.create(max(form.nbytes, 1))
        self.slots[place] = Slot(block.array, form, block)
        return place, (block.name, form)


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


SERVER_GLANCE = 0.5
"""Seconds between two checks whether the process is alive. Usually the end of the line shows its death at once."""

SLOTS_RULE: Rule = (lambda count: is_count(count, 1) and count <= 2**16, "expected a whole number from 1 to 65,536")

GRACE = 5.0
"""Seconds that the process has to end when it is asked to."""


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
        self._order = Order(int(batch_size), int(depth), int(learners))
        self._starter, self._calls = os.getpid(), 0
        start: Any = multiprocessing.get_context(context)
        listener, self._address = listen()
        control, inside = start.Pipe()
        self._control: Line | None = Line(control)
        _controls.add(self._control)
        arguments = (make, self._order, listener, self._address, inside, lanes, limit)
        self._process: Any = start.Process(target=run_owner, args=arguments, name="relive-replay", daemon=True)
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
        finally:
            listener.close()
            inside.close()
        self.close = finalize(self, _end, self._process, self._control, self._starter)
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
        if not (is_count(rank) and rank < self._order.learners):
            raise ParameterError(
                f"learner(rank={rank!r}): expected a whole number from 0 to {self._order.learners - 1}; give "
                "ReplayServer as many learners as you need"
            )
        require("learner", TIMEOUT_RULE, timeout=timeout)
        try:
            place = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ParameterError(f"learner(device={device!r:.80}): expected a device such as 'cuda'; {error}") from None
        return Learner(self._address, int(rank), timeout, self._is_alive, place)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the replay in its process, such as ``call("save", path)``, or read a property there.

        Only the process that started the server can use this. It may overtake calls of learners; :meth:`Learner.call`
        comes after the earlier calls of its learner. Raises what the method raises.
        """
        if self._control is None or self._control.closed:
            raise LifecycleError("call: the server has ended, or was started by another process; use a learner's call")
        given = Parcel(f"call(name={name!r}): an argument", (name, args, kwargs))
        try:
            self._calls += 1
            self._control.send(("call", self._calls, given))
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

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: a handle of the same server. To drop or close a handle does not end the server."""
        return _handle, ({"_order": self._order, "_address": self._address, "_pid": self._pid},)

    def __repr__(self) -> str:
        order = self._order
        return f"ReplayServer(batch_size={order.batch_size}, depth={order.depth}, learners={order.learners})"

    # -- inside -------------------------------------------------------------------------------------------------

    def _answer(self, what: str) -> Any:
        """The answer of the process to the last request."""
        kind, number, value, line = "", -1, cast("Any", None), self._control
        assert line is not None
        try:
            while number != self._calls:  # other numbers answer calls that were broken off
                while not line.waits(SERVER_GLANCE):
                    if not self._is_alive():
                        raise self._ended()
                kind, number, value = line.receive()
        except (OSError, EOFError) as error:
            raise self._ended() from error
        if kind == "failed":
            raise value.raised(what)
        value = value.open()
        return value.batch() if isinstance(value, Packed) else value

    def _is_alive(self) -> bool:
        if os.getpid() == self._starter:
            return self._process.is_alive()
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


def _handle(state: Mapping[str, Any]) -> ReplayServer:
    server = ReplayServer.__new__(ReplayServer)
    vars(server).update(state, _control=None, _starter=0, close=_nothing)
    return server


def _nothing() -> None:
    """Close a handle. That does nothing, because the server belongs to the process that started it."""


def _end(process: BaseProcess, control: Line, starter: int) -> None:
    """End a server's process: first ask, then terminate, then kill. Only the process that started it may do so."""
    control.close()
    if os.getpid() != starter:
        return
    process.join(GRACE)
    if process.is_alive():
        process.terminate()
        process.join(GRACE)
    if process.is_alive():
        process.kill()
        process.join(GRACE)


_controls = WeakSet[Line]()


def _close_controls() -> None:
    for line in list(_controls):
        line.close()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_close_controls)
