"""Served: batches that a thread draws while the learner computes; and Progress, the counts of what was drawn."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import parent_process
from queue import SimpleQueue
from struct import Struct
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from weakref import finalize

from torch.utils.data import get_worker_info

from ..core import key as stream
from ..errors import InvariantError, LifecycleError, WaitTimeoutError
from ..files.disk import start_thread
from ..samplers.contract import OwnSampler
from ..steps.arrays import Array

if TYPE_CHECKING:
    from typing import Self


B_co = TypeVar("B_co", covariant=True)

SLICE = 0.2
"""Seconds between two checks whether there is still a reason to wait."""


@runtime_checkable
class Limit(Protocol):
    """A limit for a server, such as :class:`relive.SamplesPerInsert`."""

    def try_to_sample(self, count: int, timeout: float | None = 0.0) -> bool:
        """Wait until ``count`` rows may be drawn, and count them; False if the time is over before."""
        ...

    def uncount(self, *, inserts: int = 0, samples: int = 0) -> None:
        """Take back what was counted and did not happen."""
        ...


class Repairs(Protocol):
    """An object that repairs a ring."""

    def repair(self) -> None:
        """Repair what a call left half done that an exception interrupted."""
        ...


class Batches(Iterator[B_co], ABC):
    """Batches that come to a learner one after another, and figures of how they came."""

    def __init__(self) -> None:
        self._taken, self._ready_at_once, self._waited, self._completed = 0, 0, 0.0, 0

    def __iter__(self) -> Self:
        return self

    @property
    def completed(self) -> int:
        """How many transitions had been completed when the batch that came last was drawn, as in ``stats()``."""
        return self._completed

    def stats(self) -> dict[str, float]:
        """``batches``: how many were taken; ``ready``: how many of them were there when the learner asked; ``waited``:
        seconds in all that the learner waited for the others.
        """
        return {"batches": float(self._taken), "ready": float(self._ready_at_once), "waited": self._waited}

    @abstractmethod
    def close(self) -> None:
        """End this."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# An iterator is not ended through its finalizer: `weakref.finalize` forgets its function before it calls it, so an
# exception between the two would leave the serving on.
class Served(Batches[B_co]):
    """The batches of :meth:`relive.ReplayBuffer.serve`, in order. Each stays valid, as those of ``sample`` do.

    The serving ends with :meth:`close`, at the end of a ``with`` block, or when this iterator is dropped. Batches that
    were drawn and not taken then count as not drawn: the replay draws them next.
    """

    def __init__(self, ahead: DrawAhead, timeout: float | None) -> None:
        super().__init__()
        self.ahead = ahead
        self._timeout = timeout
        self._end = finalize(self, ahead.close)

    def __next__(self) -> B_co:
        ahead = self.ahead
        if ahead.closed or (ahead.batches is not None and ahead.taken >= ahead.batches):
            self.close()
            raise StopIteration
        if ahead.ready:
            self._ready_at_once += 1
            drawn = ahead.take(0.0)
        else:
            start = time.perf_counter()
            drawn = ahead.take(self._timeout)
            self._waited += time.perf_counter() - start
        self._taken += 1
        self._completed = drawn.completed
        return drawn.batch

    def close(self) -> None:
        """End the serving. The replay can then be served again."""
        ahead = self.ahead
        if self._end.alive:
            ahead.close()  # not by calling `_end`: broken off, it would do nothing the next time
            self._end.detach()
        with ahead.lock:
            ahead.draw_due()


class Request(NamedTuple):
    """The batches that ``serve`` was asked for."""

    batch_size: int
    """B."""
    depth: int
    """The most batches at a time, the one in use included."""
    batches: int | None
    """How many in all; None is without end."""
    limit: Limit | None
    """Each batch waits until the limit allows it."""


class DrawAhead:
    """The batches drawn ahead of a learner, and the thread that draws them.

    A batch is due while fewer batches wait than :attr:`goal`. Due batches are drawn under the replay's lock, by the
    first thread that takes the lock: the thread that serves, or another one whose call must come after them. So the
    moment of a draw depends on the calls of the learner alone, never on when a thread happens to run.

    While a replay is served, its device does nothing by itself: every call draws the due batches first, in RAM.

    Args:
        writer: repairs what an earlier call left half done.
        progress: counts of what was drawn, and the batches that wait.
        draw: draws the batch of this number in its round, and adds it to ``progress.ahead``.
        undo: puts back batches that were drawn and not taken, and ends the serving.
        lock: the lock of the replay.
        request: the batches that are wanted.
    """

    ready: deque[Drawn]
    lock: AbstractContextManager[object]
    batch_size: int
    depth: int
    batches: int | None

    maybe_drawable = False
    """Whether there is something to draw is the ring's to say."""

    def __init__(
        self,
        writer: Repairs,
        progress: Progress,
        draw: Callable[[int], None],
        undo: Callable[[DrawAhead], None],
        lock: AbstractContextManager[object],
        request: Request,
    ) -> None:
        self.ready, self._draw, self._undo, self.lock = progress.ahead, draw, undo, lock
        self._writer = writer
        self._keep = progress.keep
        self.batch_size, self.depth, self.batches, self._limit = request
        self.goal, self.taken = 0, 0
        self.error: BaseException | None = None
        """The error for which the next batch could not be drawn. The learner gets it after the batches before it."""
        self.closed = False
        self.arrived: Event = Event()
        self._wake, self._allowed = SimpleQueue[bool](), SimpleQueue[bool]()
        self._thread: Thread | None = None
        self.is_drawing = False
        """True while a draw is under way. Then calls of the replay come from the draw, as from a reward function."""

    @property
    def due(self) -> bool:
        """True if a batch must be drawn before anything else happens to the replay."""
        return len(self.ready) < self.goal and self.error is None and not self.closed

    def prepare(self) -> None:
        """Draw the due batches before any other call, unless a draw makes it, as by a reward function."""
        if not self.is_drawing:
            self.draw_due()

    def _leave(self) -> None:
        """Leave a call to the ring in RAM, once the due batches are drawn."""
        self._writer.repair()
        self.prepare()

    def add(self, values: object, envs: object, view: object) -> bool:
        """See :class:`relive.replay.mirror.DeviceMirror`."""
        return bool(self._leave())

    def sample(self, count: object, view: object, update: object, of: object) -> None:
        """See :class:`relive.replay.mirror.DeviceMirror`."""
        self._leave()

    def set_errors(self, index: object, errors: object, mask: object) -> None:
        """See :class:`relive.replay.mirror.DeviceMirror`."""
        self._leave()

    def drawable(self, view: object) -> None:
        """See :class:`relive.replay.mirror.DeviceMirror`."""
        self._leave()

    def draw_due(self) -> None:
        """Draw the due batches that the limit allows. The caller holds the replay's lock."""
        try:
            self.is_drawing = True
            if self.closed:
                self._undo(self)
            while self.due and self._is_allowed():
                self.draw()
        finally:
            self.is_drawing: bool = False

    def draw(self) -> None:
        """Draw one batch, or note the error of the draw. The caller holds the replay's lock."""
        try:
            self._draw(self.ready[-1].update + 1 if self.ready else self.taken + 1)
        except Exception as error:
            self.error = error
            self._give_back(1)
        self.arrived.set()

    def take(self, timeout: float | None) -> Drawn:
        """The next batch. The thread draws the batches that are due from now on.

        Raises:
            WaitTimeoutError: the limit did not allow the batch in time.
            Exception: what the draw raised.
        """
        drawn = None
        while drawn is None:
            if not self.ready:
                self._await(timeout)
            if not self.ready and (self.error is not None or self.closed):
                error, self.error, self.goal = self.error, None, 0  # the learner's next call tries again
                raise error or LifecycleError("serve: it was closed while a batch was awaited; call serve again")
            # the learner is done with the batch before, so one more may be drawn: the batch in use counts as one
            self.goal = self.depth - 1 if self.batches is None else min(self.depth, self.batches - self.taken) - 1
            with suppress(IndexError):  # without the lock: another thread may have been quicker
                drawn = self.ready.popleft()
        self._keep()
        self.taken: int = drawn.update if self.batches is not None else self.taken + 1
        if self.goal > 0:
            self._start()
            self._wake.put(True)
        return drawn

    def note_taken(self, drawn: Drawn) -> None:
        """Count a batch as taken, by a learner that has it from elsewhere. The caller holds the replay's lock."""
        with suppress(ValueError):  # it was put back
            self.ready.remove(drawn)
        self._keep()

    def close(self) -> None:
        """Let the thread end. The next call that takes the replay's lock puts back the batches that were not taken."""
        self.closed: bool = True
        self._wake.put(False)
        self.arrived.set()

    def give_back(self) -> None:
        """Take back from the limit the batches that it has counted and that were not taken."""
        self._give_back(len(self.ready) + self._allowed.qsize())

    def _await(self, timeout: float | None) -> None:
        """Draw the next batch here, or wait until the thread has drawn it. With a limit, also wait for the limit."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.ready and self.error is None and not self.closed:
            self.arrived.clear()
            with self.lock:
                self.draw_due()
                if not self.ready and self.error is None and self._is_allowed():
                    self.draw()
            if self.ready or self.error is not None:
                return
            left = SLICE if end is None else min(SLICE, end - time.monotonic())
            if left <= 0:
                raise WaitTimeoutError(
                    f"serve: the limit allowed no batch of {self.batch_size} within {timeout} s; is anything added? "
                    "See limit.stats()"
                )
            self.goal: int = max(self.goal, 1)
            self._start()
            self._wake.put(True)
            self.arrived.wait(left)

    def _is_allowed(self) -> bool:
        """True if the limit allows the next batch now; the limit has then counted it."""
        if self._limit is None:
            return True
        if not self._allowed.empty():
            self._allowed.get()
            return True
        return self._limit.try_to_sample(self.batch_size)

    def _give_back(self, batches: int) -> None:
        if self._limit is not None and batches:
            self._limit.uncount(samples=batches * self.batch_size)

    def _start(self) -> None:
        """Start the thread, once, and again in a child of a fork, which has none."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._work, name="relive-serve", daemon=True)
            with suppress(MemoryError, RuntimeError):  # without it, each batch is drawn when it is asked for
                start_thread(self._thread, "draw in this one")

    def _work(self) -> None:
        """Draw the batches that are due, each time that the learner has taken one."""
        while self._wake.get() and not self.closed:
            while self.due and self._wait_for_limit():
                with self.lock:
                    self.draw_due()

    def _wait_for_limit(self) -> bool:
        """Wait until the limit allows a batch, without the replay's lock, so that others can add meanwhile."""
        if self._limit is not None and self._allowed.empty():
            while not self._limit.try_to_sample(self.batch_size, SLICE):
                if not self.due:
                    return False
            self._allowed.put(True)
        return True


# -- counts of what was drawn ----------------------------------------------------------------------------------

_SLOT = Struct("5q")


# Batches that were drawn and not taken count as not drawn.
class ProgressSlots:
    """The counts of a replay in files: two slots, written in turn, so that a kill leaves one of them whole.

    A slot is its number, the three counts, and its number again. A slot whose two numbers differ is not whole. The
    whole slot with the larger number counts.

    Args:
        words: int64 ``[10]``, in a file.
    """

    WORDS = 10

    def __init__(self, words: Array) -> None:
        self._bytes, self._slots = words.data.cast("B"), (0, _SLOT.size)
        whole = [slot for slot in map(self._read, self._slots) if slot[0] == slot[-1]]
        self._number, *counts, _ = max(whole, default=(-1, 0, 0, 0, -1))
        if not whole or min(self._number, *counts) < 0:
            raise InvariantError(f"progress: {[*map(self._read, self._slots)]} are not two slots of counts")
        self.counts: list[int] = counts
        """Batches drawn, rows drawn and late priorities, as they were when this was made."""

    def _read(self, at: int) -> tuple[int, ...]:
        return _SLOT.unpack_from(self._bytes, at)

    def write(self, draws: int, sampled: int, late: int) -> None:
        """Keep these counts."""
        number = self._number = self._number + 1
        # the other slot than the last: a kill in between leaves that one whole, and this one with unequal numbers
        _SLOT.pack_into(self._bytes, self._slots[number & 1], number, draws, sampled, late, number)


class Drawn(NamedTuple):
    """A batch that was drawn ahead of its learner."""

    number: int
    """Batch number t of its replay."""
    update: int
    """Its number in its round of updates, from 1."""
    rows: int
    """B."""
    draw_state: Any
    """The sampler's :meth:`~relive.samplers.contract.Sampler.draw_state` before the draw."""
    completed: int
    """How many transitions had been completed when it was drawn."""
    batch: Any
    """The batch as the view read it."""


@dataclass(slots=True)
class Progress:
    """Counts of what a replay has drawn, and its seed. Saves contain all of it."""

    seed: int
    """The seed of the batches."""
    first: int = 0
    """How many batches were drawn before this seed was set."""
    draws: int = 0
    """Batches drawn."""
    sampled: int = 0
    """Rows drawn."""
    late: int = 0
    """Priorities that came after their transition was overwritten."""
    slots: ProgressSlots | None = None
    """Where a replay in files keeps the counts for the next process; None for any other replay."""
    ahead: deque[Drawn] = field(default_factory=deque[Drawn])
    """Batches that wait for their learner, in order. They are in ``draws`` and ``sampled`` already."""

    @property
    def draws_taken(self) -> int:
        """Batches drawn, without those that wait for their learner."""
        return self.draws - len(self.ahead)

    @property
    def rows_taken(self) -> int:
        """Rows drawn, without those of batches that wait for their learner."""
        return self.sampled - sum(drawn.rows for drawn in self.ahead)

    @property
    def first_taken(self) -> int:
        """As ``first``, for a replay that draws the waiting batches again.

        If a seed was set while they waited, they are drawn from that seed, from number 0 on.
        """
        return min(self.first, self.draws_taken) if self._is_undoable else self.first

    @property
    def counts(self) -> list[int]:
        """The counts for a save: ``draws``, ``sampled`` and ``late``, without batches that can be drawn again."""
        undone = (self.draws_taken, self.rows_taken) if self._is_undoable else (self.draws, self.sampled)
        return [int(count) for count in (*undone, self.late)]  # batch sizes may have been NumPy's

    def keep(self) -> None:
        """Keep the counts of a replay in files, so that its next process goes on with the batches that nobody took."""
        if self.slots is not None:
            self.slots.write(self.draws_taken, self.rows_taken, self.late)

    @contextmanager
    def undone(self, sampler: OwnSampler) -> Generator[None]:
        """Within this context, the sampler is as if it had drawn nothing ahead."""
        if not self._is_undoable:
            yield
            return
        now = sampler.draw_state()
        try:
            sampler.set_draw_state(self.ahead[0].draw_state)
            yield
        finally:
            sampler.set_draw_state(now)

    def undo(self, sampler: OwnSampler) -> None:
        """Undo the draws ahead, so that the next batches are those that nobody took.

        If other batches were drawn in between, this is not possible, and the numbers of all of them are used up.
        """
        if self._is_undoable:
            sampler.set_draw_state(self.ahead[0].draw_state)
            self.first = self.first_taken
            self.draws, self.sampled = self.draws_taken, self.rows_taken
        self.ahead.clear()

    @property
    def _is_undoable(self) -> bool:
        """True if nothing else was drawn since the first batch that waits."""
        return len(self.ahead) > 0 and self.ahead[0].number == self.draws_taken


class Process:
    """Facts about this process."""

    is_first = False
    """True once it is known that no process of Python started this one, so that it is no worker of a ``DataLoader``."""


def stream_of(seed: int) -> int:
    """The seed of the batches. Each worker of a ``DataLoader`` has a copy of the buffer, and a seed of its own."""
    worker = get_worker_info()
    if worker is not None:
        return stream(seed, worker.seed)
    Process.is_first = parent_process() is None
    return seed


def _ask_again() -> None:
    Process.is_first = False


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_ask_again)
