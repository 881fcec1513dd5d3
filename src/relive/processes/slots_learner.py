"""Learner: takes the batches of a server, in the process that learns from them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Never, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ..errors import FieldError, LifecycleError, WaitTimeoutError
from ..parameters import TIMEOUT_RULE, require
from ..steps.arrays import as_host
from ..steps.schema import not_named
from .shared import SharedBlock
from .slots import BatchForm, Packed, Slot
from .uploads import Uploads
from .wire import Address, Failure, Line, Parcel

__all__ = ["Learner"]

GLANCE = 0.25
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
            left = GLANCE if end is None else min(GLANCE, end - time.monotonic())
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


def _hang_up() -> None:
    for learner in list(_learners):
        learner.hang_up()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_hang_up)
