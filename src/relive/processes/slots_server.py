"""ReplayServer: a process of its own that owns a replay and serves its batches to learners through slots."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from typing import Any, cast
from weakref import WeakSet, finalize

import torch

from ..errors import LifecycleError, ParameterError
from ..parameters import TIMEOUT_RULE, Rule, an_instance, is_count, one_of, require
from ..replay.arguments import require_rows
from ..replay.buffer import ReplayBuffer
from .lanes import Lanes
from .rate import LIMIT_RULE, RateLimit
from .slots import Packed
from .slots_learner import Learner
from .slots_owner import Order, run_owner
from .wire import Line, Parcel, listen

__all__ = ["ReplayServer"]

GLANCE = 0.5
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
                while not line.waits(GLANCE):
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


def _hang_up() -> None:
    for line in list(_controls):
        line.close()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_hang_up)
