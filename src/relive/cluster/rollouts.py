"""Rollouts: whole rollouts from many workers to one learner, each consumed exactly once, and none too old."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import FieldError, LifecycleError, ParameterError
from ..parameters import COUNT_RULE, FLAG_RULE, SECONDS_RULE, TIMEOUT_RULE, Rule, is_count, is_whole, require
from ..printable import shown
from ..processes.blocks import Block, packed
from ..steps.arrays import Array
from ..steps.schema import Path, nest
from .messages import PAUSE, Fetched, Label, Link

SHORTEST_PAUSE = 0.001
"""Seconds between two questions to the queue, at first; up to :data:`PAUSE`."""


VERSION_RULE: Rule = is_whole, "expected the version of a policy, a whole number"


class Rollout(NamedTuple):
    """A rollout as the learner gets it."""

    data: dict[str, Any]
    """The tensors that the worker sent, nested as they were, in memory of their own."""
    version: int
    """The version of the policy that played it."""
    worker: str


class Rollouts:
    """Whole rollouts from workers to a learner, in the order in which they come.

    A rollout stays in the queue until the learner settles it. So a learner that dies and comes back gets exactly the
    rollouts that are not in its saved state: save :meth:`position` with the state, and :meth:`resume` from it. If the
    learner never restarts, :meth:`get` is enough: each call settles the rollout before.

    Args:
        max_staleness: how many versions older than the learner's policy a rollout may be. Older ones are dropped.
        capacity: the most rollouts in the queue. Workers wait while it is full.
        settle_each: whether each :meth:`get` settles the rollouts before. Pass False to call :meth:`settle` yourself,
            after a save; the capacity then limits how many rollouts may lie between two saves.
        timeout: seconds to wait for the queue itself.
        connect: makes the queue and the link to it; default: a Ray actor, :func:`relive.cluster.ray.queue_actor`.

    Raises:
        ParameterError: an argument is out of range.
    """

    def __init__(
        self,
        max_staleness: int = 4,
        capacity: int = 16,
        *,
        settle_each: bool = True,
        timeout: float = 60.0,
        connect: Callable[[int], Link] | None = None,
    ) -> None:
        require("Rollouts", (is_count, "expected a number of versions, at least 0"), max_staleness=max_staleness)
        require("Rollouts", COUNT_RULE, capacity=capacity)
        require("Rollouts", FLAG_RULE, settle_each=settle_each)
        require("Rollouts", SECONDS_RULE, timeout=timeout)
        self._link = (connect or _actor)(capacity)
        self._max_staleness, self._settle_each, self._timeout = max_staleness, settle_each, timeout
        self._born: str = ""
        """The life of the queue."""
        self._place: int = 0
        """The place in its line of the last rollout that :meth:`get` returned or dropped."""
        self._last: dict[str, tuple[str, int]] = {}
        """The life of each worker's sender, and the number of the last rollout that was consumed from it."""
        self._counts = dict.fromkeys(("received", "stale", "lost", "repeated"), 0)

    def sender(self, worker: str) -> Sender:
        """The object with which a worker sends its rollouts. ``worker`` is the worker's name; no other may have it.

        Raises:
            ParameterError: the name is not text.
        """
        require("sender", (lambda name: isinstance(name, str), "expected the worker's name, a text"), worker=worker)
        return Sender(self._link, worker, self._timeout)

    def get(self, version: int, timeout: float | None = None) -> Rollout:
        """The next rollout that is not too old for a learner of this version.

        Args:
            version: the version of the learner's policy.
            timeout: seconds to wait for a rollout; None is for ever.

        Raises:
            LifecycleError: none has come within the timeout; or the queue does not answer.
            ParameterError: ``version`` or ``timeout`` is out of range.
        """
        require("get", VERSION_RULE, version=version)
        require("get", TIMEOUT_RULE, timeout=timeout)
        if self._settle_each:
            self.settle()  # before the fetch: the caller is done with the rollouts before this one
        attempts = _attempts(timeout, "no rollout has come", "look into the logs of the workers")
        while True:
            oldest = version - self._max_staleness
            # with the place, so that an answer that was lost is given again
            fetched: Fetched = _answer(self._link, self._timeout, "fetch", self._born, self._place, oldest)
            self._born, self._place, label, block, dropped = fetched
            self._counts["stale"] += sum(self._is_new(old) for old in dropped)
            if label is not None and block is not None:
                if self._is_new(label):
                    self._counts["received"] += 1
                    return Rollout(nest(block.tensors()), label.version, label.worker)
                continue
            next(attempts)

    def settle(self) -> None:
        """Settle all rollouts that :meth:`get` has returned, so that they do not come again.

        Call it once they are in the learner's saved state, or need not be.
        """
        if self._born:
            _answer(self._link, self._timeout, "settle", self._born, self._place)

    def position(self) -> dict[str, object]:
        """The place up to which rollouts were consumed, for the learner's saved state: lists, text and numbers."""
        return {"place": [self._born, self._place], "seen": {name: [*last] for name, last in self._last.items()}}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from :meth:`position`. Rollouts that were consumed after it come again; those before it do not.

        Raises:
            ParameterError: this is not what :meth:`position` gave. Nothing is changed.
        """
        try:
            born, place = position["place"]
            last = {name: (life, number) for name, (life, number) in position["seen"].items()}
            texts = [born, *last, *(life for life, _ in last.values())]
            numbers = [place, *(number for _, number in last.values())]
            if not (all(isinstance(text, str) for text in texts) and all(map(is_count, numbers))):
                raise ValueError
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ParameterError(f"resume: expected what position() gave, got {shown(position, 200)}") from error
        self._born, self._place, self._last = born, place, last
        self.settle()  # they are in the saved state, so the queue may forget them

    def stats(self) -> dict[str, float]:
        """Figures of the learner and of the queue.

        - ``received``: rollouts that :meth:`get` returned;
        - ``stale``: rollouts dropped as too old;
        - ``lost``: rollouts that a worker sent and that never came, because a queue died with them;
        - ``repeated``: rollouts that came twice and were given once;
        - ``came``, ``kept``: how many came to the queue, and how many it keeps.
        """
        queue = _answer(self._link, self._timeout, "stats")
        figures = {name: float(count) for name, count in self._counts.items()}
        return queue | figures | {"repeated": figures["repeated"] + queue["repeated"]}

    def close(self) -> None:
        """End the queue, with what is in it."""
        self._link.close()

    def _is_new(self, label: Label) -> bool:
        """True if this rollout was not consumed before. Counts rollouts that are missing before it as lost."""
        life, number = self._last.get(label.worker, (label.life, 0))
        if life == label.life:  # numbers of another life of the worker say nothing about this one
            if label.number <= number:  # the queue was restarted, and the worker sent it again
                self._counts["repeated"] += 1
                return False
            self._counts["lost"] += label.number - number - 1
        self._last[label.worker] = label.life, label.number
        return True


class Sender:
    """Sends the rollouts of one worker; made by :meth:`Rollouts.sender` and passed to the worker."""

    def __init__(self, link: Link, worker: str, timeout: float) -> None:
        self._link, self._worker, self._timeout = link, worker, timeout
        self._life, self._number = "", 0
        self._unconfirmed: tuple[Label, Block] | None = None
        """A rollout that was sent and not answered for: the queue may have it."""

    def put(self, data: Mapping[str, object], version: int, timeout: float | None = None) -> None:
        """Send a rollout once there is room for it. Returns when the queue has the rollout.

        If the queue does not answer, it may have the rollout all the same. The next call sends that one again before
        its own, so that it comes once; with the same data and version, it is that one.

        Args:
            data: arrays and CPU tensors by name, nested or not, such as ``collector.steps(32)``.
            version: the version of the policy that played it.
            timeout: seconds to wait for room; None is for ever.

        Raises:
            FieldError: ``data`` is empty, or holds something else.
            ParameterError: ``version`` or ``timeout`` is out of range.
            LifecycleError: there was no room in time, the queue does not answer, or the worker has a newer sender.
        """
        require("put", VERSION_RULE, version=version)
        require("put", TIMEOUT_RULE, timeout=timeout)
        block = packed(_leaves(data))
        if not self._life:
            life = os.urandom(8).hex()
            self._ask("begin", self._worker, life)  # if this fails, the next call begins with another life
            self._life = life
        attempts = _attempts(timeout, "put(): the queue was full", "the learner may have stopped")
        before = self._unconfirmed
        if before is not None:
            self._deliver(*before, attempts)
            if before[0].version == version and _same(before[1], block):
                return
        self._deliver(Label(self._worker, self._life, self._number + 1, int(version)), block, attempts)

    def _deliver(self, label: Label, block: Block, attempts: Iterator[None]) -> None:
        while True:
            if self._ask("room"):
                self._unconfirmed = label, block  # until the queue says whether it has it
                taken = self._ask("put", label, block)
                self._unconfirmed = None
                if taken:
                    break
            next(attempts)
        self._number = label.number

    def _ask(self, method: str, *arguments: object) -> Any:
        return _answer(self._link, self._timeout, method, *arguments)


def _attempts(timeout: float | None, problem: str, advice: str) -> Iterator[None]:
    """Each step waits longer than the one before, up to :data:`PAUSE`.

    Raises:
        LifecycleError: the time is over; says the ``problem`` and the ``advice``.
    """
    end, pause = math.inf if timeout is None else time.monotonic() + timeout, SHORTEST_PAUSE
    while time.monotonic() <= end:
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)
        yield
    raise LifecycleError(f"{problem} for {timeout:g} s; {advice}")


def _same(one: Block, other: Block) -> bool:
    """True if two rollouts have the same arrays, bit for bit."""
    arrays = zip(one.arrays().values(), other.arrays().values(), strict=False)  # the bytes between them say nothing
    return one.spec == other.spec and all(a.tobytes() == b.tobytes() for a, b in arrays)


def _answer(link: Link, timeout: float, method: str, *arguments: object) -> Any:
    """The queue's answer. A call that fails is made again until the timeout; the queue notices repeated calls.

    Raises:
        LifecycleError: there was no answer in time.
    """
    end = time.monotonic() + timeout
    while True:
        answers, _ = link.answers({0: link.call(0, method, *arguments)}, max(end - time.monotonic(), 0.0))
        if answers:
            return answers[0]
        if time.monotonic() + PAUSE > end:
            raise LifecycleError(f"the queue of rollouts has not answered {method}() for {timeout:g} s")
        time.sleep(PAUSE)


def _leaves(data: Any, above: Path = ()) -> dict[Path, Array | Tensor]:
    """The arrays of nested mappings by path.

    Raises:
        FieldError: there are none, or a leaf is something else.
    """
    leaves: dict[Path, Array | Tensor] = {}
    for name, value in data.items() if hasattr(data, "items") else ():
        if hasattr(value, "items"):
            leaves |= _leaves(value, (*above, name))
        elif isinstance(value, Tensor) or hasattr(value, "__array__"):
            leaves[(*above, name)] = value.cpu() if isinstance(value, Tensor) else value
        else:
            where = ".".join((*above, name))
            raise FieldError(f"put(): expected arrays and tensors, got {type(value).__name__} as {where!r}; convert it")
    if not leaves:
        raise FieldError("put(): expected arrays by name, such as collector.steps(32), got none")
    return leaves


def _actor(capacity: int) -> Link:
    from .ray import queue_actor

    return queue_actor()(capacity)
