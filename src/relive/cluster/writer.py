"""ClusterWriter: sends the steps of some envs to their shards, and each of them exactly once.

A shard confirms each chunk. A chunk that is not confirmed is sent again, in order, and the ledger of the shard leaves
out what it has. The file reads from the outside in: the writer, the sender to one shard, and the packing of steps.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import LifecycleError, ParameterError, ReliveError, WaitTimeoutError
from ..processes.blocks import Block, packed
from ..replay.checks import flattened, row_mask, stored_fields
from ..ring.ring import missing_final
from ..steps.arrays import Array, Bools, Ints, as_host
from ..steps.checker import StepChecker
from ..steps.schema import Path, Schema, map_leaves
from .messages import PAUSE, Link
from .plan import ShardEntries
from .shard import Chunk, ChunkOrigin, Rank

LONGEST_PAUSE = 1.0
"""Seconds between two attempts to reach a shard that does not answer, at most."""


class ClusterWriter:
    """Sends the steps of some envs of a replay to its shards; made by :meth:`relive.cluster.Replay.writer`.

    A writer can be passed to another process, and belongs to the process that uses it first. While a shard does not
    answer, its writers wait. Then they send again what was not confirmed. No step is stored twice. A new writer for the
    same envs replaces this one. From then on, the steps of this one are refused.

    Args:
        packer: checks and packs steps of these envs.
        envs: int64 ``[N]``, its envs, as the whole replay counts them.
        senders: one for each shard that has some of the envs.
        most: the most steps of a chunk, over its envs, under a limit of samples per insert; None without one.
    """

    schema: Schema
    envs: Ints
    num_envs: int

    def __init__(self, packer: StepPacker, envs: Ints, senders: list[ShardSender], most: int | None) -> None:
        self.schema, self.envs, self.num_envs = packer.schema, envs, len(envs)
        self._packer, self._senders = packer, senders
        widest = max(len(sender.columns) for sender in senders)
        if most is not None and widest > most:
            raise ParameterError(
                f"writer: one step of {widest} envs of a shard is more than the limit may ever allow at once, {most} "
                "steps a shard; make error_buffer larger"
            )
        self._most = None if most is None else most // widest  # vector steps, so that no shard gets more than ``most``

    def extend(self, steps: Mapping[str, object]) -> None:
        """Send steps in the order of time, as :meth:`relive.ReplayBuffer.extend` takes them: ``[T, N, ...]``.

        Send many at once, such as ``collector.steps(32)``: a message costs about as much as a hundred small steps. When
        this returns, the steps may not have reached their shards yet. :meth:`flush` waits until they have.

        Raises:
            FieldError, ShapeError, DTypeError: the steps do not fit. Nothing is sent.
            WaitTimeoutError: the limit has not allowed earlier steps within the timeout. These steps wait in the
                writer, too. The next call sends them, so do not pass them again.
            LifecycleError: a shard has not answered within the timeout, and the steps wait in the writer; or a newer
                writer has the envs, and nothing is sent.
            OSError: the disk of a shard is full, or fails. The steps wait in the writer.
        """
        checked = self._packer.checked(steps)
        most, late = self._most or max(checked.steps, 1), None
        for sender in self._senders if checked.steps else ():
            sender.require_envs()  # of all shards, before the first chunk is sent to one
        for begin in range(0, checked.steps, most):
            part = checked if checked.steps <= most else checked.part(begin, min(begin + most, checked.steps))
            for sender in self._senders:
                late = sender.send(self._packer.packed(part, sender.columns), part.steps, late)
        if late is not None:
            raise late

    def flush(self) -> None:
        """Wait until the shards have confirmed all steps.

        Raises:
            LifecycleError: as :meth:`extend`.
        """
        for sender in self._senders:
            sender.confirm(0)

    def interrupt(self, *, next_obs: object = None) -> None:
        """Interrupt the running episodes: the next steps do not follow the last ones.

        Args:
            next_obs: what the newest steps led to, ``[N, ...]``, if it is known: they are then stored as truncated, as
                by :meth:`relive.ReplayBuffer.interrupt`.

        Raises:
            FieldError, ShapeError, DTypeError: ``next_obs`` does not fit. Nothing is sent.
            LifecycleError: as :meth:`extend`.
        """
        last = None if next_obs is None else self._packer.observations(next_obs)
        for sender in self._senders:
            sender.claim(None if last is None else map_leaves(itemgetter(sender.columns), last))

    def __repr__(self) -> str:
        return f"ClusterWriter(envs={self.envs.tolist()})"


class ShardSender:
    """Sends a writer's steps to one shard.

    Args:
        link: to the shards.
        entries: the envs of the writer that this shard has.
        in_flight: how many chunks the shard may still have to confirm before the next one is sent.
        timeout: seconds to wait for the shard, or for the limit.
    """

    def __init__(self, link: Link, entries: ShardEntries, in_flight: int, timeout: float) -> None:
        self.columns: Ints = entries.at
        """int64 ``[K]``: the envs of the shard, as the writer counts them."""
        self._link, self._shard, self._envs = link, entries.shard, tuple(entries.inside.tolist())
        self._in_flight, self._timeout = in_flight, timeout
        self._claimed: tuple[Rank, int] | None = None
        """The rank, and how many steps the shard has confirmed. One assignment sets both, because Ctrl-C may come."""
        self._waiting: deque[tuple[Chunk, object]] = deque()
        """Chunks that are not confirmed, and the calls that sent them, in the order of their steps."""
        self._broken: ReliveError | None = None
        """The error with which the shard refused a chunk. Later chunks would leave a gap, so there are none."""

    def claim(self, next_obs: object = None) -> tuple[Rank, int]:
        """Take the envs, as a new writer does. Returns the rank, and how many steps the shard has confirmed: none.

        Args:
            next_obs: what the newest steps of this writer led to, ``[K, ...]``; None if that is not known.
        """
        self.confirm(0)  # the shard refuses chunks of the rank before
        before = None if self._claimed is None else self._claimed[0].token
        token, end, pause = os.urandom(8).hex(), time.monotonic() + self._timeout, PAUSE
        while True:
            call = self._link.call(self._shard, "claim", self._envs, token, before, next_obs)
            answers, _ = self._link.answers({0: call}, max(end - time.monotonic(), 0.0))
            if answers:
                self._claimed = claimed = answers[0], 0
                return claimed
            pause = self._pause(end, pause)

    def require_envs(self) -> tuple[Rank, int]:
        """Take the envs unless this writer has them. Returns the rank, and how many steps the shard has confirmed.

        Raises:
            LifecycleError: the writer has failed before, or the shard does not answer.
        """
        if self._broken is not None:
            raise LifecycleError(f"this writer has failed: {self._broken}; make a new one") from self._broken
        return self._claimed or self.claim()

    def send(self, block: Block, count: int, late: Exception | None = None) -> Exception | None:
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
                self.confirm(self._in_flight - 1)
        except (WaitTimeoutError, LifecycleError, OSError) as error:
            if self._broken is not None:
                raise
            late = error
        rank, sure = self.require_envs()
        # a chunk starts where the one before it ends, or, if all are confirmed, where the shard is
        last = self._waiting[-1][0].origin if self._waiting else None
        start = sure if last is None else last.start + last.steps
        chunk = Chunk(ChunkOrigin(rank, self._envs, start, count, sure), block)
        self._waiting.append((chunk, None))  # before the call: if Ctrl-C comes between the two, it is sent again
        if late is None:
            self._waiting[-1] = (chunk, self._link.call(self._shard, "push", chunk))
        return late

    def confirm(self, most: int) -> None:
        """Wait until at most ``most`` chunks are not confirmed. Chunks that failed are sent again, in order."""
        end, pause = time.monotonic() + self._timeout, PAUSE
        while len(self._waiting) > most:
            chunk, call = self._waiting[0]
            until = chunk.origin.start + chunk.origin.steps
            received = None if call is None else self._answer(call, end)
            if received is not None and received >= until:
                # before the pop: if Ctrl-C comes between the two, the chunk is sent once more and left out
                self._claimed = chunk.origin.rank, until
                self._waiting.popleft()
                end, pause = time.monotonic() + self._timeout, PAUSE
                continue
            # not stored: for lack of room, or because this chunk or one before it was lost
            if received is None or not self._wait_for_room(chunk.origin, end):
                pause = self._pause(end, pause)
            self._send_again()

    def _wait_for_room(self, origin: ChunkOrigin, end: float) -> bool:
        """Wait until the limit allows a chunk that the shard has not stored; False if the limit was not the reason.

        Raises:
            WaitTimeoutError: the limit has not allowed the steps in time.
        """
        waited = False
        while True:
            has_room = self._answer(self._link.call(self._shard, "has_room", origin), end)
            if has_room is None or has_room:
                return waited and bool(has_room)
            waited = True
            if time.monotonic() + PAUSE > end:
                raise WaitTimeoutError(
                    f"shard {self._shard}: the limit has not allowed {origin.steps} steps for {self._timeout:g} s; "
                    "does the learner sample? The steps wait here, and extend() or flush() sends them again"
                )
            time.sleep(PAUSE)

    def _answer(self, call: object, end: float) -> Any:
        """The shard's answer to a call; None if there is none in time.

        Raises:
            ReliveError: the shard refused it, so this writer has failed.
            OSError: the disk of the shard is full, or fails. The chunks wait here, to be sent again.
        """
        try:
            return self._link.answers({0: call}, max(end - time.monotonic(), 0.0))[0].get(0)
        except ReliveError as error:
            self._broken = error
            self._waiting.clear()
            raise
        except OSError:  # a later attempt makes new calls: these would raise the same error for ever
            self._waiting = deque((chunk, None) for chunk, _ in self._waiting)
            raise

    def _send_again(self) -> None:
        """Send all chunks that are not confirmed: the shard refuses a later one if an earlier one is missing."""
        _, sure = self.require_envs()
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


# Packing


class StepPacker:
    """Checks steps ``[T, N, ...]`` as :meth:`relive.ReplayBuffer.extend` does, and packs those of some envs.

    Args:
        schema: the fields of a step.
        num_envs: N.
        own_next_obs: True if every row has a ``next_obs`` of its own.
    """

    def __init__(self, schema: Schema, num_envs: int, own_next_obs: bool) -> None:
        self.schema = schema
        self._stored = stored_fields(schema, own_next_obs)
        self._with_next = stored_fields(schema, True)
        self._num_envs, self._own_next_obs = num_envs, own_next_obs

    def checked(self, steps: Mapping[str, object]) -> CheckedSteps:
        """The steps, once all of them fit.

        Raises:
            FieldError, ShapeError, DTypeError: they do not fit, or a final observation is missing.
        """
        values, count = flattened(steps, (self._num_envs,))
        rows = count * self._num_envs
        mask = row_mask(values.pop("mask"), rows) if "mask" in values else None
        schema = self._with_next if "next_obs" in values else self._stored
        checker = StepChecker(schema, rows, torch.device("cpu"), upload=False)
        leaves = dict(zip(schema.leaves, map(_on_host, checker(values)), strict=True))
        finals = {}
        if not self._own_next_obs:
            finals = {path: leaves.pop(path) for path in list(leaves) if path[0] == "next_obs"}
            ended = _ended(leaves, mask)
            if ended.any() and not finals:
                raise missing_final(int(np.argmax(ended)) % self._num_envs)
        return CheckedSteps(count, leaves, finals, mask)

    def observations(self, next_obs: object) -> object:
        """Observations ``[N, ...]`` in RAM, nested as the schema is, once they fit."""
        obs = Schema({"next_obs": self.schema["obs"]})
        leaves = StepChecker(obs, self._num_envs, torch.device("cpu"), upload=False)({"next_obs": next_obs})
        on_host = dict(zip(obs.leaves, map(_on_host, leaves), strict=True))
        return obs.rebuild("next_obs", on_host.__getitem__)

    def packed(self, checked: CheckedSteps, columns: Ints) -> Block:
        """The steps of the envs in ``columns``, int64 ``[K]``, as :class:`relive.cluster.shard.Chunk` describes."""
        count, width = checked.steps, len(columns)
        whole = width == self._num_envs

        def of_columns(rows: Any) -> Any:
            by_env = rows.reshape(count, self._num_envs, *rows.shape[1:])
            return by_env if whole else by_env[:, columns]

        leaves = {path: of_columns(leaf) for path, leaf in checked.leaves.items()}
        mask = None if checked.mask is None else of_columns(checked.mask)
        if mask is not None:
            leaves["mask",] = mask
        if checked.finals:
            # rows t * K + k of the chunk; the finals lie in rows t * N + n of all envs of the writer
            ended = np.flatnonzero(_ended(leaves, mask).reshape(-1))
            at = ended // width * self._num_envs + columns[ended % width]
            leaves["ended",] = ended
            leaves |= {path: final[at] for path, final in checked.finals.items()}
        return packed(leaves)


class CheckedSteps(NamedTuple):
    """T steps of N envs that fit the schema."""

    steps: int
    """T."""
    leaves: dict[Path, Array | Tensor]
    """The fields of the schema, ``[T * N, ...]``; with ``next_obs`` if every row has one."""
    finals: dict[Path, Array | Tensor]
    """``next_obs`` ``[T * N, ...]`` if only the ends of episodes have one; empty if there was none."""
    mask: Bools | None
    """bool ``[T * N]``, or None for all True."""

    def part(self, begin: int, end: int) -> CheckedSteps:
        """The steps from ``begin`` up to ``end``."""
        width = next(iter(self.leaves.values())).shape[0] // self.steps
        rows = slice(begin * width, end * width)
        leaves, finals = ({path: leaf[rows] for path, leaf in group.items()} for group in (self.leaves, self.finals))
        return CheckedSteps(end - begin, leaves, finals, None if self.mask is None else self.mask[rows])


def _on_host(leaf: Array | Tensor) -> Array | Tensor:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _ended(leaves: Mapping[Path, Array | Tensor], mask: Bools | None) -> Bools:
    """True for rows that end an episode and are stored, bool. Each of them needs a final observation."""
    done = as_host(leaves["terminated",]) | as_host(leaves["truncated",])
    return done if mask is None else done & mask
