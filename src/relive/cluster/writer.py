"""Writer: sends the steps of some envs to their shards, and each of them exactly once."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import LifecycleError, ParameterError, ReliveError, WaitTimeoutError
from ..steps.arrays import Ints, as_host
from ..steps.schema import Schema
from .division import Division, Parcel
from .group import PAUSE, Link
from .ledger import Origin, Rank
from .shard import Chunk
from .steps import Steps

__all__ = ["Writer", "chosen_envs"]


LONGEST_PAUSE = 1.0
"""Seconds between two attempts to reach a shard that does not answer, at most."""


class Writer:
    """Sends the steps of some envs of a replay to its shards; made by :meth:`relive.cluster.Replay.writer`.

    A writer can be passed to another process, and belongs to the process that uses it first. While a shard does not
    answer, its writers wait. Then they send again what was not confirmed. No step is stored twice. A new writer for the
    same envs replaces this one. From then on, the steps of this one are refused.

    Args:
        link: to the shards.
        schema: the fields of a step.
        own_next_obs: whether every row has a next observation of its own.
        division: of the envs among the shards.
        envs: int64 ``[N]``, its envs, as the whole replay counts them.
        in_flight: how many chunks a shard may still have to confirm before the next one is sent.
        timeout: seconds to wait for a shard, or for the limit.
        most: the most steps of a chunk, over its envs, under a limit of samples per insert; None without one.
    """

    def __init__(
        self,
        link: Link,
        schema: Schema,
        own_next_obs: bool,
        division: Division,
        envs: Ints,
        in_flight: int,
        timeout: float,
        most: int | None = None,
    ) -> None:
        self.schema, self.envs, self.num_envs = schema, envs, len(envs)
        self._steps = Steps(schema, len(envs), own_next_obs)
        self._lanes = [_Lane(link, parcel, in_flight, timeout) for parcel in division.by_shard(envs)]
        widest = max(len(lane.columns) for lane in self._lanes)
        if most is not None and widest > most:
            raise ParameterError(
                f"writer: one step of {widest} envs of a shard is more than the limit may ever allow at once, {most} "
                "steps a shard; make error_buffer larger"
            )
        self._most = None if most is None else most // widest

    def extend(self, steps: Mapping[str, Any]) -> None:
        """Send steps in the order of time, as :meth:`relive.ReplayBuffer.extend` takes them: ``[T, N, ...]``.

        Send many at once, such as ``collector.steps(32)``: a message costs about as much as a hundred small steps. When
        this returns, the steps may not have reached their shards yet. :meth:`flush` waits until they have.

        Raises:
            FieldError, ShapeError, DTypeError: the steps do not fit. Nothing is sent.
            WaitTimeoutError: the limit has not allowed earlier steps within the timeout. These steps wait in the
                writer, too. The next call sends them, so do not pass them again.
            LifecycleError: a shard has not answered within the timeout, and the steps wait in the writer; or a newer
                writer has the envs, and nothing is sent.
        """
        checked = self._steps.checked(steps)
        most, late = self._most or max(checked.steps, 1), None
        for lane in self._lanes if checked.steps else ():
            lane.require_envs()
        for begin in range(0, checked.steps, most):
            part = checked if checked.steps <= most else checked.part(begin, min(begin + most, checked.steps))
            for lane in self._lanes:
                late = lane.send(self._steps.packed(part, lane.columns), part.steps, late)
        if late is not None:
            raise late

    def flush(self) -> None:
        """Wait until the shards have confirmed all steps.

        Raises:
            LifecycleError: as :meth:`extend`.
        """
        for lane in self._lanes:
            lane.settle(0)

    def interrupt(self) -> None:
        """Interrupt the running episodes: the next steps do not follow the last ones.

        Raises:
            LifecycleError: as :meth:`extend`.
        """
        for lane in self._lanes:
            lane.claim()

    def __repr__(self) -> str:
        return f"Writer(envs={self.envs.tolist()})"


class _Lane:
    """Sends a writer's steps to one shard."""

    def __init__(self, link: Link, parcel: Parcel, in_flight: int, timeout: float) -> None:
        self.columns = parcel.at
        self._link, self._shard, self._envs = link, parcel.shard, tuple(parcel.inside.tolist())
        self._in_flight, self._timeout = in_flight, timeout
        self._claimed: tuple[Rank, int] | None = None
        """The rank, and how many steps the shard has confirmed. One assignment sets both, because Ctrl-C may come."""
        self._waiting = deque[tuple[Chunk, Any]]()
        """Chunks that are not confirmed, and the calls that sent them."""
        self._broken: ReliveError | None = None

    def claim(self) -> None:
        """Take the envs, as a new writer does."""
        self.settle(0)
        token, end, pause = os.urandom(8).hex(), time.monotonic() + self._timeout, PAUSE
        while True:
            call = self._link.call(self._shard, "claim", self._envs, token)
            found, _ = self._link.answers({0: call}, max(end - time.monotonic(), 0.0))
            if found:
                self._claimed = found[0], 0
                return
            pause = self._pause(end, pause)

    def require_envs(self) -> None:
        """Take the envs unless this writer has them.

        Raises:
            LifecycleError: the writer has failed before, or the shard does not answer.
        """
        if self._broken is not None:
            raise LifecycleError(f"this writer has failed: {self._broken}; make a new one") from self._broken
        if self._claimed is None:
            self.claim()

    def send(self, block: Any, count: int, late: ReliveError | None = None) -> ReliveError | None:
        """Send the next chunk once few enough are on their way. If that takes too long, the chunk waits here.

        Args:
            block: the steps.
            count: how many vector steps.
            late: the error for which earlier chunks wait here. Then this one waits, too.

        Returns:
            the error for which the chunk waits, or None if it was sent.
        """
        try:
            if late is None:
                self.settle(self._in_flight - 1)
        except (WaitTimeoutError, LifecycleError) as error:
            if self._broken is not None:
                raise
            late = error
        rank, sure = self._known()
        last = self._waiting[-1][0].origin if self._waiting else None
        chunk = Chunk(Origin(rank, self._envs, sure if last is None else last.start + last.steps, count, sure), block)
        self._waiting.append((chunk, None))  # before the call: if Ctrl-C comes between the two, it is sent again
        if late is None:
            self._waiting[-1] = (chunk, self._link.call(self._shard, "push", chunk))
        return late

    def settle(self, most: int) -> None:
        """Wait until at most ``most`` chunks are not confirmed. Chunks that failed are sent again, in order."""
        end, pause = time.monotonic() + self._timeout, PAUSE
        while len(self._waiting) > most:
            chunk, call = self._waiting[0]
            until = chunk.origin.start + chunk.origin.steps
            try:
                found, _ = ({}, ()) if call is None else self._link.answers({0: call}, max(end - time.monotonic(), 0.0))
            except ReliveError as error:
                self._broken = error
                self._waiting.clear()
                raise
            if found and found[0] >= until:
                self._claimed = self._known()[0], until
                self._waiting.popleft()
                end, pause = time.monotonic() + self._timeout, PAUSE
                continue
            if not (found and self._wait_for_room(chunk.origin, end)):
                pause = self._pause(end, pause)
            self._send_again()

    def _wait_for_room(self, origin: Origin, end: float) -> bool:
        """Wait until the limit allows a chunk that the shard has not stored; False if the limit was not the reason.

        Raises:
            WaitTimeoutError: the limit has not allowed the steps in time.
        """
        waited = False
        while True:
            call = self._link.call(self._shard, "has_room", origin)
            found, _ = self._link.answers({0: call}, max(end - time.monotonic(), 0.0))
            if not found or found[0]:
                return waited and bool(found)
            waited = True
            if time.monotonic() + PAUSE > end:
                raise WaitTimeoutError(
                    f"shard {self._shard}: the limit has not allowed {origin.steps} steps for {self._timeout:g} s; "
                    "does the learner sample? The steps wait here, and extend() or flush() sends them again"
                )
            time.sleep(PAUSE)

    def _known(self) -> tuple[Rank, int]:
        if self._claimed is None:
            raise LifecycleError("this writer has no envs yet; call claim() first")
        return self._claimed

    def _send_again(self) -> None:
        _, sure = self._known()
        for i, (chunk, _) in enumerate(self._waiting):
            again = Chunk(chunk.origin._replace(sure=sure), chunk.block)
            self._waiting[i] = (again, self._link.call(self._shard, "push", again))

    def _pause(self, end: float, pause: float) -> float:
        """Wait before another attempt. Returns the seconds to wait before the attempt after it.

        Raises:
            LifecycleError: there is no time for another attempt.
        """
        if time.monotonic() + pause > end:
            raise LifecycleError(
                f"shard {self._shard} has not answered for {self._timeout:g} s; its steps wait here, and extend() or "
                "flush() sends them again"
            )
        time.sleep(pause)
        return min(2 * pause, LONGEST_PAUSE)


def chosen_envs(envs: Any, num_envs: int) -> Ints:
    """The envs of a writer, int64 ``[N]``.

    Raises:
        ParameterError: an env comes twice or does not exist, or none is given.
        ShapeError, DTypeError: this is no array.
    """
    given = np.arange(num_envs) if envs is None else as_host(envs, "writer(envs=...)")
    fits = given.ndim == 1 and given.size > 0 and given.dtype.kind in "iu" and len(np.unique(given)) == len(given)
    if not fits or given.min() < 0 or given.max() >= num_envs:
        raise ParameterError(
            f"writer(envs={envs!r:.80}): expected different whole numbers from 0 to {num_envs - 1}, such as range(8)"
        )
    return given.astype(np.int64)
