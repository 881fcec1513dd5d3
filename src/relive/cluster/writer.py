"""Writer: sends the steps of some envs to their shards, and each of them exactly once."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import LifecycleError, ParameterError, ReliveError, WaitTimeoutError
from ..replay.checks import flattened, row_mask, stored_fields
from ..ring.ring import missing_final
from ..steps.arrays import Ints, as_host
from ..steps.checker import StepChecker
from ..steps.schema import Path, Schema
from .group import PAUSE, Group, Link
from .plan import Division, Parcel
from .shard import Block, Chunk, Origin, Rank, packed

__all__ = ["Checked", "Outbox", "Steps", "Writer", "chosen_envs"]


class Checked(NamedTuple):
    """T steps of N envs that fit the schema."""

    steps: int
    """T."""
    leaves: dict[Path, Any]
    """The fields of the schema, ``[T * N, ...]``; with ``next_obs`` if every row has one."""
    finals: dict[Path, Any]
    """``next_obs`` ``[T * N, ...]`` if only the ends of episodes have one; empty if none was given."""
    mask: NDArray[np.bool_] | None
    """bool ``[T * N]``, or None for all True."""

    def part(self, begin: int, end: int) -> Checked:
        """The steps from ``begin`` up to ``end``."""
        width = next(iter(self.leaves.values())).shape[0] // self.steps
        rows = slice(begin * width, end * width)
        leaves, finals = ({path: leaf[rows] for path, leaf in group.items()} for group in (self.leaves, self.finals))
        return Checked(end - begin, leaves, finals, None if self.mask is None else self.mask[rows])


class Steps:
    """Checks steps ``[T, N, ...]`` as :meth:`relive.ReplayBuffer.extend` does, and packs those of some envs.

    Args:
        schema: the fields of a step.
        num_envs: N.
        own_next_obs: whether every row has a ``next_obs`` of its own.
    """

    def __init__(self, schema: Schema, num_envs: int, own_next_obs: bool) -> None:
        self._stored = stored_fields(schema, own_next_obs)
        self._both = stored_fields(schema, True)
        self._num_envs, self._own = num_envs, own_next_obs

    def checked(self, steps: Mapping[str, Any]) -> Checked:
        """The steps, once all of them fit.

        Raises:
            FieldError, ShapeError, DTypeError: they do not fit, or a final observation is missing.
        """
        values, count = flattened(steps, (self._num_envs,))
        rows = count * self._num_envs
        mask = row_mask(values.pop("mask"), rows) if "mask" in values else None
        schema = self._both if "next_obs" in values else self._stored
        checker = StepChecker(schema, rows, torch.device("cpu"), upload=False)
        leaves = dict(zip(schema.leaves, map(_on_host, checker(values)), strict=True))
        finals = {}
        if not self._own:
            finals = {path: leaves.pop(path) for path in list(leaves) if path[0] == "next_obs"}
            ended = _ended(leaves, mask)
            if ended.any() and not finals:
                raise missing_final(int(np.argmax(ended)) % self._num_envs)
        return Checked(count, leaves, finals, mask)

    def packed(self, checked: Checked, columns: Ints) -> Block:
        """The steps of the envs in ``columns``, int64 ``[K]``, as :class:`relive.cluster.shard.Chunk` describes."""
        count, width = checked.steps, len(columns)
        whole = width == self._num_envs

        def of_these(rows: Any) -> Any:
            by_env = rows.reshape(count, self._num_envs, *rows.shape[1:])
            return by_env if whole else by_env[:, columns]

        leaves = {path: of_these(leaf) for path, leaf in checked.leaves.items()}
        if checked.mask is not None:
            leaves["mask",] = of_these(checked.mask)
        if checked.finals:
            ended = np.flatnonzero(_ended(leaves, leaves.get(("mask",))).reshape(-1))
            at = ended // width * self._num_envs + columns[ended % width]
            leaves["ended",] = ended
            leaves |= {path: final[at] for path, final in checked.finals.items()}
        return packed(leaves)


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _ended(leaves: Mapping[Path, Any], mask: Any) -> NDArray[np.bool_]:
    """Which rows end an episode and are stored, bool. Each of them needs a final observation."""
    done = as_host(leaves["terminated",]) | as_host(leaves["truncated",])
    return done if mask is None else done & mask


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


MOST_SENT = 64
"""The most calls that may be on their way."""


class _Sent(NamedTuple):
    """A call whose answer nobody waits for."""

    shard: int
    call: Any
    rows: int
    """How many TD errors the call carries; 0 if it is another call."""


class Outbox:
    """Sends messages to the shards of a group, and reads their answers later.

    Args:
        group: the shards.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._sent = group, list[_Sent]()
        self.dropped = 0
        """How many TD errors were lost, because the shard of the rows was restarted or did not answer."""

    def send(self, shard: int, rows: int, method: str, *arguments: Any) -> None:
        """Send a message that carries TD errors for ``rows`` rows."""
        self._sent.append(_Sent(shard, self._group.link.call(shard, method, *arguments), rows))

    def settle(self, most: int = MOST_SENT) -> None:
        """Read the answers that have come. While more than ``most`` calls have none, wait for the oldest.

        Raises:
            ReliveError: what a shard raised. It is raised once.
        """
        group, surplus, waiting = self._group, len(self._sent) - most, list[_Sent]()
        try:
            while self._sent:
                note = self._sent.pop(0)  # first, so that an error that it brings is raised once
                wait = group.timeout if surplus > 0 else 0.0
                found, failed = group.link.answers({note.shard: note.call}, wait)
                if note.shard in failed or (wait and not found):
                    self.dropped += note.rows
                elif not found:
                    waiting.append(note)
                surplus -= 1
        finally:
            self._sent = waiting + self._sent
