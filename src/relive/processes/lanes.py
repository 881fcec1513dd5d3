"""Lanes: bring the steps of many processes to the one that owns the replay.

A lane is a ring of whole steps in shared memory. Each process that plays has one, and one owner drains them all. So no
rule of the replay is written twice. The number of committed steps is stored last, in one word that a kill cannot leave
half written.

The file reads from the outside in: the lanes as a user has them, the writer of one lane, the pieces in which steps get
into a replay, and the memory of a lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import core
from ..core.words import (
    COMMITTED,
    CUT,
    DRAINED,
    FINISHED,
    FOLLOWED,
    LANE_ALONE,
    LANE_COUNTERS,
    MASKED,
    WANTED,
    LaneArrays,
)
from ..errors import (
    FieldError,
    InvariantError,
    LifecycleError,
    ParameterError,
    ReliveError,
    SchemaError,
    WaitTimeoutError,
)
from ..memory.allocator import shared_lock
from ..memory.copier import StepCopier
from ..memory.layout import typed
from ..parameters import COUNT_RULE, FLAG_RULE, TIMEOUT_RULE, Rule, is_count, require
from ..replay.buffer import ReplayBuffer
from ..replay.checks import flattened, refuse_not_finite, row_mask, stored_fields
from ..replay.durable import AFTER, ENVS, MARK, SOURCE, VOID
from ..ring.ring import missing_final, piece_of
from ..steps.arrays import NUMPY_DTYPES, Array, Ints, Leaf, as_host
from ..steps.checker import StepChecker, refuse_unreadable
from ..steps.schema import Path, Schema, map_leaves, not_named
from .blocks import ArraySpec, BlockSpec
from .limits import LIMIT_RULE, RateLimit
from .shared import CACHE_LINE, Bell, Claim, SharedBlock

if TYPE_CHECKING:
    from gymnasium import Env

Obs = TypeVar("Obs")
Act = TypeVar("Act")

HEADER = 2 * CACHE_LINE
"""Bytes before the first lane: a cache line for the owner's bell, and one that notes whether an owner ever came."""

OWNER = 0
"""The draining process claims this place of the block. The writer of lane k claims place k + 1."""

STEPS_RULE: Rule = (lambda steps: is_count(steps, 2), "expected a whole number of at least 2")

Bytes = NDArray[np.uint8]


class Lanes:
    """Bring steps from many processes to one replay: each writer has a lane of its own, in shared memory.

    Give the lanes to the writers' processes, as an argument or by a fork. There, :meth:`writer` returns the object that
    adds steps. The process that owns the replay calls :meth:`drain`, which moves the steps into the replay. Each step
    gets there once and whole. Only a step whose writer is killed before ``add`` returns may be missing.

    The envs of writer k are the replay's envs from ``k * num_envs`` on.

    Args:
        schema: the fields of a step, those of the replay.
        writers: how many lanes there are.
        num_envs: N, the envs of each writer.
        steps: how many vector steps a lane holds; a writer waits while its lane is full.
        own_next_obs: every step comes with its next observations. Required if the replay has ``own_next_obs=True`` or
            ``ordered=False``.
        debug: refuse steps in which a reward, an action or an observation is NaN or infinite, in the writer. Required
            if the replay has ``debug=True``.

    Raises:
        SchemaError: a replay cannot have the schema.
        ParameterError: an argument is out of range, or the lanes take more memory than is free.
        OSError: the system has no memory that processes share, such as Windows.
    """

    schema: Schema
    writers: int
    debug: bool
    num_envs: int
    steps: int
    own_next_obs: bool

    def __init__(
        self,
        schema: Schema,
        writers: int,
        num_envs: int = 1,
        *,
        steps: int = 1024,
        own_next_obs: bool = False,
        debug: bool = False,
    ) -> None:
        require("Lanes", COUNT_RULE, writers=writers, num_envs=num_envs)
        require("Lanes", STEPS_RULE, steps=steps)
        require("Lanes", FLAG_RULE, own_next_obs=own_next_obs, debug=debug)
        layout = LaneLayout(schema, int(num_envs), int(steps), own_next_obs)
        self._share(layout, int(writers), debug, SharedBlock.create(HEADER + int(writers) * layout.nbytes))

    def _share(self, layout: LaneLayout, writers: int, debug: bool, block: SharedBlock) -> None:
        """Use the lanes that lie in a block."""
        self.schema, self.writers, self.debug = layout.schema, writers, debug
        self.num_envs, self.steps, self.own_next_obs = layout.num_envs, layout.steps, layout.own_next_obs
        self._layout, self._block = layout, block
        self._token = int(block.token, 16) >> 1  # 63 bits, so that it is an int64
        filled, self._had_owner = (block.array[i : i + 8].view(np.int32) for i in (0, CACHE_LINE))
        starts = (HEADER + k * layout.nbytes for k in range(writers))
        self._lanes = [Lane(layout, block.array[i : i + layout.nbytes], filled) for i in starts]
        self._filled, self._wanted = Bell(filled[:1]), filled[WANTED:]
        self._lock = shared_lock()
        self._claim: Claim | None = None
        self._piece: _Piece | None = None
        """The piece that is being added. A call that was broken off leaves it; otherwise it is None between calls."""
        self._limit: RateLimit | None = None
        self._admitted = np.zeros(1, np.int64)
        """How many steps the limit has counted that are not in the replay yet."""
        self._first = 0
        """The lane to begin with: the one after the last that gave steps. If each call began with lane 0, a limit could
        leave nothing for the other lanes."""
        self._limited_since: float | None = None
        """When the limit began to hold back steps that are there, in seconds of ``time.monotonic``; None if it does not
        hold any back."""
        self._intakes: tuple[ReplayBuffer, list[Intake]] | None = None

    def __getstate__(self) -> tuple[LaneLayout, int, bool, SharedBlock]:
        return self._layout, self.writers, self.debug, self._block

    def __setstate__(self, state: tuple[LaneLayout, int, bool, SharedBlock]) -> None:
        self._share(*state)

    def __repr__(self) -> str:
        return (
            f"Lanes({self.schema!r}, writers={self.writers}, num_envs={self.num_envs}, steps={self.steps}, "
            f"own_next_obs={self.own_next_obs}, debug={self.debug})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self._block.nbytes

    # -- writers ------------------------------------------------------------------------------------------------

    def writer(self, lane: int, *, timeout: float | None = None) -> LaneWriter:
        """Take a lane for this process alone, until the writer is closed or the process ends.

        After that, however the process ended, another process can take the lane. The running episodes are then
        interrupted: no step of the new writer follows a step of the old one.

        Args:
            lane: its number, from 0 on.
            timeout: seconds that ``add`` waits at most while the lane is full; None waits for ever.

        Raises:
            ParameterError: there is no such lane, or the timeout is out of range.
            LifecycleError: another writer of this lane is alive.
        """
        require("Lanes.writer", TIMEOUT_RULE, timeout=timeout)
        exists: Rule = lambda k: is_count(k) and k < self.writers, f"expected a lane from 0 to {self.writers - 1}"
        require("Lanes.writer", exists, lane=lane)
        claim = self._block.claim(OWNER + 1 + int(lane))
        if claim is None:
            raise LifecycleError(f"lane {lane} has a writer that is alive; close() it first, or take another lane")
        return LaneWriter(self, int(lane), claim, timeout)

    def recorded(self, env: Env[Obs, Act], lane: int, *, timeout: float | None = None) -> Env[Obs, Act]:
        """A single ``gymnasium.Env`` that writes each of its steps into a lane, in whichever process it is stepped.

        With it, the workers of an ``AsyncVectorEnv`` write the steps that they play. The env takes the lane at its
        first reset, and keeps it until the env is closed. A step has the fields ``obs``, ``action``, ``reward``,
        ``terminated`` and ``truncated``, and no others.

        Args:
            env: the env. These lanes must have ``num_envs=1``.
            lane: its number, from 0 on.
            timeout: as for :meth:`writer`.

        Raises:
            ParameterError: these lanes are for several envs each.
        """
        if self.num_envs != 1:
            raise ParameterError(f"Lanes.recorded: a single env needs Lanes(num_envs=1), got {self.num_envs}")
        from .recorder import RecordedEnv  # gymnasium is imported where it is used

        return RecordedEnv(env, partial(self.writer, lane, timeout=timeout))

    def _owner_ended(self) -> bool:
        """True if some process has drained these lanes, and no process does so now."""
        return bool(self._had_owner[0]) and not self._block.is_claimed(OWNER)

    @property
    def alive(self) -> list[bool]:
        """True for each lane that has a writer now, in the order of the lanes."""
        return [self._block.is_claimed(OWNER + 1 + k) for k in range(self.writers)]

    # -- the owner ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[int]:
        """How many vector steps wait in each lane."""
        return [lane.committed - lane.drained for lane in self._lanes]

    def wait(self, timeout: float | None = None, *, steps: int = 1) -> bool:
        """Sleep until a lane has steps. Returns False if no lane has them within ``timeout`` seconds.

        Args:
            timeout: seconds. None waits for ever, and 0 looks once.
            steps: how many vector steps must wait in one lane. To wake for each single step costs far more than to take
                many at once. So an owner that has nothing else to do should ask for some dozens, and give a timeout.

        Raises:
            ParameterError: an argument is out of range.
            LifecycleError: another process drains these lanes.
        """
        require("Lanes.wait", TIMEOUT_RULE, timeout=timeout)
        possible: Rule = lambda k: is_count(k, 1) and k <= self.steps, f"a lane holds from 1 to {self.steps} steps"
        require("Lanes.wait", possible, steps=steps)
        self._become_owner()
        self._wanted[0] = steps  # before wait() marks the bell: a writer that sees the mark sees this number
        return self._filled.wait(lambda: any(lane.committed - lane.drained >= steps for lane in self._lanes), timeout)

    def drain(self, replay: ReplayBuffer, *, limit: RateLimit | None = None, timeout: float | None = 0.0) -> int:
        """Move the steps that are in the lanes into a replay; returns how many, over all envs.

        With a limit, this call moves as many steps as the limit allows, and counts them in it. The other steps stay in
        their lanes. When a lane is full, its writer waits.

        An exception during the call, such as Ctrl-C, loses no step and stores none twice: the next call continues. The
        running episodes of the lane that was being drained may be interrupted.

        Args:
            replay: gets the steps.
            limit: says how many steps may be added, such as :class:`relive.SamplesPerInsert`. This call counts the
                steps in the limit, so do not count them again.
            timeout: seconds to sleep at most if steps are there and the limit allows none. None is for ever; the
                default does not wait.

        Raises:
            SchemaError: the replay has other fields, another number of envs, or needs next observations that these
                steps do not have.
            ParameterError: the replay refuses NaN, but the writers do not; or one vector step of a writer is so many
                inserts that the limit could hold both sides back for ever.
            LifecycleError: another process drains these lanes.
        """
        require("Lanes.drain", TIMEOUT_RULE, timeout=timeout)
        require("Lanes.drain", LIMIT_RULE, limit=limit)
        require("Lanes.drain", (lambda replay: isinstance(replay, ReplayBuffer), "expected a replay"), replay=replay)
        if limit is not None:
            limit.require_inserts(self.num_envs)
        moved = self._move(replay, limit)
        if limit is None or timeout == 0 or self._limited_since is None or moved:
            return moved
        # outside of the locks: the limit gives room once another thread draws from the replay
        return self._move(replay, limit) if limit.wait_for_room(self.num_envs, timeout) else 0

    def _move(self, replay: ReplayBuffer, limit: RateLimit | None) -> int:
        """Move all steps that may be moved now."""
        with self._lock:  # before the replay's lock, in every call: otherwise two threads could wait for each other
            self._become_owner()
            with replay.lock:
                intakes = self._intakes_of(replay)
                self._finish_broken_off()
                if limit is not self._limit:
                    self._limit, self._limited_since = limit, None
                moved, first = 0, self._first
                for k in (*range(first, self.writers), *range(first)):
                    count = self._drain(self._lanes[k], intakes[k])
                    if count:
                        moved, self._first = moved + count, (k + 1) % self.writers
                return moved

    def _become_owner(self) -> None:
        """Be the one process that drains."""
        with self._lock:  # two threads of the process may come at once
            if self._claim is not None and self._claim.holds:
                return
            self._claim = self._block.claim(OWNER)
            if self._claim is None:
                raise LifecycleError("another process drains these lanes and is alive; a lane has one reader")
            self._had_owner[0] = 1  # after the claim: without one, it tells writers that the owner has ended

    def _intakes_of(self, replay: ReplayBuffer) -> list[Intake]:
        """The intake of each lane into this replay, after a test that the replay fits the lanes."""
        if self._intakes is None or self._intakes[0] is not replay:
            self._require_fit(replay)
            envs = np.arange(self.writers * self.num_envs).reshape(self.writers, self.num_envs)
            # no lane of other lanes has this number, by which a replay in files knows the lane
            intakes = [Intake(replay, envs_of_lane, self._token ^ k) for k, envs_of_lane in enumerate(envs)]
            for lane, intake in zip(self._lanes, intakes, strict=True):
                # a process that was killed may have stored these steps of a replay in files, and not given them back
                if (after := intake.drained()) > lane.drained:
                    lane.give_back(after)
            self._intakes = replay, intakes
        if replay.debug and not self.debug:
            raise ParameterError("drain: the replay has debug=True; make Lanes(debug=True), so that the writer raises")
        return self._intakes[1]

    def _require_fit(self, replay: ReplayBuffer) -> None:
        if replay.schema != self.schema:
            raise SchemaError(f"drain: expected a replay of {self.schema!r}, got one of {replay.schema!r}")
        if replay.num_envs != self.writers * self.num_envs:
            raise SchemaError(
                f"drain: {self.writers} writers of {self.num_envs} envs need a replay of num_envs="
                f"{self.writers * self.num_envs}, got {replay.num_envs}"
            )
        if replay.own_next_obs and not self.own_next_obs:
            raise SchemaError("drain: this replay needs next_obs with every step; make Lanes(own_next_obs=True)")

    def _drain(self, lane: Lane, intake: Intake) -> int:
        """Move the steps that a lane has now, piece by piece; returns how many, over its envs."""
        lane.require_sound()
        start, end, moved = lane.drained, lane.committed, 0
        while start < end:
            count, flags, rows = self._next_piece(lane, start, end, intake.most)
            if not count:
                break
            steps = lane.read(start, count, flags)
            if flags & CUT:
                intake.replay.interrupt(intake.envs)
            after = start + count
            # before the add: a call that is broken off from here on finds out by the heads whether the piece is in
            self._piece = _Piece(intake, lane, after, intake.begin(after))
            try:
                if flags & FINISHED:
                    last = map_leaves(itemgetter(0), steps["obs"])
                    intake.replay.interrupt(intake.envs, next_obs=last)
                else:
                    intake.replay.extend(steps, envs=intake.envs)
            except BaseException:
                self._finish_broken_off()
                raise
            self._confirm()  # before the piece is cleared: without it, nobody could find out that the piece is in
            lane.give_back(after)  # after the add: from here on the writer overwrites these rows
            self._piece = None
            moved += rows
            start = after
        return moved

    def _next_piece(self, lane: Lane, start: int, end: int, most: int) -> tuple[int, int, int]:
        """The piece from step ``start`` on that may be added now: vector steps, flags, and steps over all envs.

        The limit has counted these steps. If the limit allows none, the number of vector steps is 0.
        """
        while True:
            count, flags = lane.piece(start, min(end, start + most))
            rows = lane.rows(start, count, flags)
            if self._limit is None or not rows:
                return count, flags, rows
            if self._limit.admit_inserts(rows, self._admitted):
                if self._limited_since is not None:
                    self._limit.note_insert_wait(time.monotonic() - self._limited_since)
                    self._limited_since = None
                return count, flags, rows
            if count == 1:
                self._limited_since = time.monotonic() if self._limited_since is None else self._limited_since
                return 0, flags, 0
            most = count // 2

    def _confirm(self) -> None:
        """Note in the limit that the steps which it has counted are in the replay."""
        if self._limit is not None:
            self._limit.confirm(self._admitted)

    def _finish_broken_off(self) -> None:
        """After a call that was broken off, count its last piece if the replay has it."""
        piece = self._piece
        if piece is not None:
            with piece.intake.replay.lock:
                if piece.intake.head_sum() != piece.head_sum:
                    self._confirm()
                    piece.lane.give_back(piece.after)
                else:
                    piece.intake.fail()
            self._piece = None
        if self._limit is not None and self._admitted[0]:  # counted, and not in: confirm() has set it to 0 otherwise
            self._limit.take_back(self._admitted)


class _Piece(NamedTuple):
    """A piece of steps that is being added to a replay."""

    intake: Intake
    lane: Lane
    after: int
    """The number of the first step after the piece."""
    head_sum: int
    """The value of :meth:`Intake.head_sum` before. As soon as it is another number, the piece is in."""


class LaneWriter:
    """Writes the steps of one process into its lane; made by :meth:`relive.Lanes.writer`.

    :meth:`add` takes what :meth:`relive.ReplayBuffer.add` takes, and makes the same checks. When it returns, the step
    is acknowledged: the owner of the replay gets the step, even if this process is killed at once. The first step
    starts new episodes. A :class:`relive.Collector` takes a writer as its buffer.

    One thread at a time may use it, in the process that made it.

    Args:
        lanes: the lanes.
        number: the number of the lane where steps go.
        claim: keeps other writers out.
        timeout: seconds that :meth:`add` waits while the lane is full.
    """

    schema: Schema
    num_envs: int
    device: torch.device
    own_next_obs: bool
    timeout: float | None
    debug: bool

    def __init__(self, lanes: Lanes, number: int, claim: Claim, timeout: float | None) -> None:
        self.schema, self.num_envs, self.device = lanes.schema, lanes.num_envs, torch.device("cpu")
        self.own_next_obs, self.timeout, self.debug = lanes.own_next_obs, timeout, lanes.debug
        inside: Any = lanes
        lane: Lane = inside._lanes[number]
        self._lane, self._number, self._claim, self._owner_ended = lane, number, claim, inside._owner_ended
        layout = lane.layout
        self._filled, self._leaves, self._steps = inside._filled, len(layout.stored.leaves), layout.steps
        self._without_next, self._with_next = self._pair(layout.stored), self._pair(layout.fields)
        self._limit = 0
        """The number of the first step that has no room, as far as this end knows. The owner only ever makes it larger,
        so an old value is safe."""
        self._cut = True
        """True if the next step starts new episodes."""

    def _pair(self, fields: Schema) -> tuple[StepChecker, StepCopier]:
        """The checker of steps with these fields, and the copier of their leaves into a row of the lane."""
        targets = list(self._lane.columns.values())[: len(fields.leaves)]  # those of next_obs come last
        copier = StepCopier(fields.leaves, targets, self.num_envs)
        return StepChecker(fields, self.num_envs, self.device, upload=False), copier

    def add(self, step: Mapping[str, object] | None = None, /, *more: NoReturn, **fields: object) -> None:
        """Append one step of every env. The call waits while the lane is full.

        Args:
            step: field -> ``[N, ...]``, with ``next_obs`` and ``mask`` as :meth:`relive.ReplayBuffer.add` takes them.
            fields: like ``step``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema, or the final observation
                of an episode that ended is missing. Nothing is written.
            NotFiniteError: in debug mode, a number is NaN or infinite. Nothing is written.
            WaitTimeoutError: the lane was full for ``timeout`` seconds. Nothing is written, and the same step can be
                added again.
            LifecycleError: the writer is closed, or belongs to another process; or the lane is full, and the process
                that drained it has ended.
        """
        cut, self._cut = self._cut, True  # if anything breaks this off, the next step does not follow the last one
        try:
            if more or not (step is None or hasattr(step, "keys")):
                raise FieldError(not_named(step))
            if not self._claim.holds:
                raise self._closed()
            self._write(fields if step is None else {**step, **fields}, cut)
        except ReliveError:  # nothing was written, and the caller knows
            self._cut = cut
            raise
        self._cut = False

    def extend(self, steps: Mapping[str, object]) -> None:
        """Append many steps ``[T, N, ...]`` in the order of time, such as those of :meth:`relive.Collector.steps`.

        Each step is committed by itself. After an error, the steps before the one that failed are in the lane.

        Raises:
            ShapeError: the fields differ in their number of steps. Nothing is written.
            FieldError, DTypeError, DeviceError, NotFiniteError, WaitTimeoutError, LifecycleError: as :meth:`add`.
        """
        n = self.num_envs
        rows, count = flattened(steps, (n,))
        for t in range(count):
            self.add(map_leaves(itemgetter(slice(t * n, t * n + n)), rows))

    def interrupt(self, *, next_obs: object = None) -> None:
        """Let the next step start new episodes: the running ones do not go on. Call it after a reset in mid-episode.

        Args:
            next_obs: what the newest steps led to, ``[N, ...]``, if it is known: they are then stored as truncated, as
                by :meth:`relive.ReplayBuffer.interrupt`. It takes the place of a step in the lane.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError, NotFiniteError: ``next_obs`` does not fit.
            WaitTimeoutError, LifecycleError: as :meth:`add`.
        """
        if next_obs is not None and not self._cut:
            leaves, n = self.schema.leaves, self.num_envs

            def zeros(path: Path) -> Tensor:
                return torch.zeros((n, *leaves[path].shape), dtype=leaves[path].dtype, device="cpu")

            step = {name: self.schema.rebuild(name, zeros) for name in self.schema.names}
            step |= {"obs": next_obs, "mask": np.zeros(n, np.bool_)}
            if self.own_next_obs:
                step["next_obs"] = next_obs
            if not self._claim.holds:
                raise self._closed()
            self._write(step, cut=False, finished=True)
        self._cut = True

    def close(self) -> None:
        """Let another process write to the lane. The steps in it stay."""
        self._claim.drop()

    def __enter__(self) -> LaneWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise LifecycleError("a writer belongs to its process: send the Lanes, and call lanes.writer(k) over there")

    # -- inside -------------------------------------------------------------------------------------------------

    def _closed(self) -> LifecycleError:
        return LifecycleError(
            f"this writer of lane {self._number} is closed, or was made before a fork; call lanes.writer("
            f"{self._number}) in the process that plays"
        )

    def _write(self, values: dict[str, object], cut: bool, finished: bool = False) -> None:
        """Check a step, wait for room, copy it, and commit it last.

        Args:
            values: the step.
            cut: True if it starts new episodes.
            finished: True if it is no step, but says what the newest steps led to.
        """
        mask = values.pop("mask") if "mask" in values else None
        follows = self.own_next_obs or "next_obs" in values
        checker, copier = self._with_next if follows else self._without_next
        stored = None if mask is None else row_mask(mask, self.num_envs)
        number = self._lane.committed
        row = number % self._steps  # free once the owner has drained step number - steps, which had this row
        if number >= self._limit:
            self._limit = self._lane.drained + self._steps
        if number >= self._limit or self.debug or not copier.take(row, values, False):
            try:
                leaves = checker(values, copier)
            except (RuntimeError, TypeError):
                refuse_unreadable(values)
                raise
            if self.debug:
                self._refuse_not_finite(leaves, None if finished else stored)
            if number >= self._limit:
                self._wait_for_room(number)
            copier.write(row, leaves)
        if stored is not None:
            self._lane.mask[row] = stored
        # last: the kernel raises the counter after all writes above, and the owner reads only rows below the counter
        marks = CUT * cut + FOLLOWED * follows + MASKED * (stored is not None) + FINISHED * finished
        result = self._lane.commit(number, marks)
        if result > 0:
            self._filled.wake()
        if result < 0:  # -1 - n: nothing was committed, and the next step writes this row again
            raise missing_final(-1 - result)

    def _refuse_not_finite(self, leaves: Sequence[Leaf], stored: Leaf | None) -> None:
        """Raise NotFiniteError if a number that is learned from is NaN or infinite."""
        fields, final = self._lane.layout.stored.leaves, leaves[self._leaves :]
        envs = np.arange(self.num_envs)
        rows = np.ones(self.num_envs, np.bool_) if stored is None else as_host(stored)
        refuse_not_finite(fields, leaves[: self._leaves], final or None, envs, rows)

    def _wait_for_room(self, number: int) -> None:
        """Sleep until the owner has taken a step.

        Raises:
            WaitTimeoutError: it takes longer than the timeout.
            LifecycleError: the owner has ended.
        """
        require("add", TIMEOUT_RULE, timeout=self.timeout)

        def ready() -> bool:
            self._limit = self._lane.drained + self._steps
            if number < self._limit:
                return True
            if self._owner_ended():
                raise LifecycleError(
                    f"lane {self._number} is full, and the process that drained it has ended: drain it in another one, "
                    "or end this one"
                )
            return False

        if not self._lane.drained_bell.wait(ready, self.timeout):
            raise WaitTimeoutError(
                f"lane {self._number} is full: {self._steps} steps wait for the owner to call drain(), for more than "
                f"{self.timeout} s; call it more often, or make the lanes longer"
            )


class Intake:
    """How pieces of steps get into some envs of a replay, each as a whole or not at all.

    A piece is vector steps as :meth:`relive.ReplayBuffer.extend` takes them, no more than :attr:`most`. In a piece of
    several vector steps, no row may be left out if that would interrupt an episode. The caller takes the replay's lock
    before it calls :meth:`head_sum`, and holds it until it knows whether the piece is in.

    Args:
        replay: the replay that gets the steps.
        envs: int64 ``[K]``, the envs of the steps.
        source: a number that no other source of steps has, for :meth:`begin`.
    """

    replay: ReplayBuffer[Any, Any]
    envs: Ints

    def __init__(self, replay: ReplayBuffer, envs: Ints, source: int = 0) -> None:
        self.replay, self.envs, self._source = replay, envs, source
        inside: Any = replay
        self._ring = inside._ring
        self.most: int = max(piece_of(self._ring.rows) // len(envs), 1)
        """The most vector steps of a piece: the replay stores this many in one call that nothing can break off.

        So Ctrl-C finds a piece in or not in, and the ring's heads say which; nothing has to be logged.
        """
        self._durable = inside._durable

    def head_sum(self) -> int:
        """The sum of the envs' heads. Heads only grow, all at once and last: a change means that the piece is in."""
        return int(self._ring.heads[self.envs].sum())

    @property
    def _note(self) -> Ints | None:
        """The note of these envs, in the row of the first; None if the replay is not in files.

        It is looked up when it is used: a source with a ledger of its own needs no notes.
        """
        return None if self._durable is None else self._durable.drained()[self.envs[0]]

    def begin(self, after: int) -> int:
        """Note that the next piece has the steps of the source before number ``after``; returns :meth:`head_sum`.

        The note of a replay in files outlives the process: see :meth:`drained`.
        """
        head_sum, note = self.head_sum(), self._note
        if note is not None:
            note[MARK] = VOID  # until the other words are those of this piece; the piece before was given back
            note[SOURCE], note[AFTER], note[ENVS] = self._source, after, len(self.envs)
            note[MARK] = head_sum
        return head_sum

    def fail(self) -> None:
        """Note that the piece that was begun is not in, and will not be."""
        if (note := self._note) is not None:
            note[MARK] = VOID

    def drained(self) -> int:
        """The number before which a replay in files has all steps of the source; 0 if it notes nothing of the source.

        It counts a piece that was stored just before the process was killed.
        """
        note = self._note
        # heads that are still those of the note: the kill came before the piece was in
        if note is None or note[MARK] == VOID or note[SOURCE] != self._source or note[MARK] == self.head_sum():
            return 0
        return int(note[AFTER])


class Lane:
    """One lane: what its writer writes and its owner reads.

    The writer first copies a step, and then raises the counter of committed steps. The owner reads only committed
    steps. So it never reads half a step, and a killed writer leaves at most one unfinished step, which is never read.
    Each counter has one process that writes it: the writer COMMITTED, the owner DRAINED.

    Args:
        layout: where the parts lie.
        memory: uint8 ``[layout.nbytes]``.
        filled: int32 ``[2]``: the owner's bell, and the number of steps that must wait in a lane before it rings.
    """

    layout: LaneLayout
    mask: Bytes

    def __init__(self, layout: LaneLayout, memory: Bytes, filled: NDArray[np.int32]) -> None:
        self.layout = layout
        arrays = layout.spec.arrays(memory)
        own = (arrays["lane", part] for part in ("counters", "bell", "flags", "mask"))
        self._counters, bell, self._flags, self.mask = own
        self.columns: dict[Path, Array] = {path: arrays[("field", *path)] for path in layout.fields.leaves}
        self.drained_bell: Bell = Bell(bell)
        terminated, truncated = (self.columns[name,].view(np.uint8) for name in ("terminated", "truncated"))
        parts = LaneArrays(self._counters, filled, self._flags, terminated, truncated, self.mask)
        self.commit: Callable[[int, int], int] = core.Lane(parts).commit
        """``commit`` of :class:`relive.core.Lane`: takes the number of a step and its flags."""

    def require_sound(self) -> None:
        """Test the counters before rows are looked up with them.

        Raises:
            InvariantError: a process has overwritten them.
        """
        committed, drained = self.committed, self.drained
        if not 0 <= drained <= committed <= drained + self.layout.steps:
            raise InvariantError(
                f"a lane of {self.layout.steps} steps: {committed} committed and {drained} drained; another process "
                "wrote to its memory"
            )

    @property
    def committed(self) -> int:
        """How many steps were ever committed."""
        return core.published(self._counters, COMMITTED)

    @property
    def drained(self) -> int:
        """How many steps the owner has taken."""
        return core.published(self._counters, DRAINED)

    def give_back(self, number: int) -> None:
        """Free the rows of all steps before ``number``, which are in the replay, and wake the writer if it waits."""
        if core.publish(self._counters, DRAINED, number, self.drained_bell.word, 0):
            self.drained_bell.wake()

    def piece(self, start: int, end: int) -> tuple[int, int]:
        """How many steps from ``start`` on a replay can take at once, before ``end``, and the flags of any of them.

        The steps lie in one piece of memory, and no episode is interrupted between them. A replay keeps memory for each
        size that it gets. So the count is a power of two, which keeps the sizes few.
        """
        row = start % self.layout.steps
        flags = self._flags[row : row + end - start]  # up to the lane's last row: the slice ends there
        if flags[0] & LANE_ALONE:
            return 1, int(flags[0])
        if flags[0] & FINISHED:
            return 1, int(flags[0])
        # a cut may come first in a piece, not within it
        stops = np.flatnonzero(flags[1:] & (CUT | FINISHED | LANE_ALONE))
        count = int(stops[0]) + 1 if len(stops) else len(flags)
        count = 1 << (count.bit_length() - 1)
        return count, int(np.bitwise_or.reduce(flags[:count]))

    def read(self, number: int, count: int, flags: int) -> dict[str, object]:
        """Steps as :meth:`relive.ReplayBuffer.extend` takes them, ``[T, N, ...]``, over the lane's own memory.

        Args:
            number: the number of the first step.
            count: T, the number of steps. Their rows lie in one piece of memory.
            flags: the flags that any of the steps has.
        """
        row, layout = number % self.layout.steps, self.layout
        rows = slice(row, row + count)

        def leaf(path: Path) -> Leaf:
            part, dtype = self.columns[path][rows], layout.fields.leaves[path].dtype
            return part if dtype in NUMPY_DTYPES else typed(part, dtype)

        schema = layout.fields if flags & FOLLOWED else layout.stored
        steps = {name: schema.rebuild(name, leaf) for name in schema.names}
        if flags & MASKED:
            steps["mask"] = self._stored(rows)
        return steps

    def rows(self, number: int, count: int, flags: int) -> int:
        """How many steps :meth:`read` gives, counted over all envs, without those that are masked out."""
        if not flags & MASKED:
            return count * self.layout.num_envs
        row = number % self.layout.steps
        return int(np.count_nonzero(self._stored(slice(row, row + count))))

    def _stored(self, rows: slice) -> NDArray[np.bool_]:
        """True for steps that are stored, bool ``[T, N]``. A vector step without a mask has those of all envs."""
        unmasked = self._flags[rows] & MASKED == 0
        return (self.mask[rows] | unmasked[:, None]).view(np.bool_)


class LaneLayout:
    """Where the parts of a lane lie in its memory: its counters, the flags of its steps, and a column for each field.

    Parts begin at cache lines, so that two processes never write to the same line.

    Args:
        schema: the fields of a step, as a replay has them.
        num_envs: N, the envs of a writer.
        steps: S, how many vector steps a lane holds.
        own_next_obs: True if every step comes with its next observations.

    Raises:
        SchemaError: a replay cannot have this schema.
    """

    schema: Schema
    num_envs: int
    steps: int
    own_next_obs: bool

    def __init__(self, schema: Schema, num_envs: int, steps: int, own_next_obs: bool) -> None:
        self.schema, self.num_envs, self.steps, self.own_next_obs = schema, num_envs, steps, own_next_obs
        self.stored: Schema = stored_fields(schema, own_next_obs)
        self.fields: Schema = self.stored if own_next_obs else self.stored.extend(next_obs=self.stored["obs"])
        """All fields that a step may have. The leaves of the stored fields come first."""
        columns = self.fields.leaves.items()
        self.spec: BlockSpec = BlockSpec(
            (
                # the counters and the writer's bell: a line each, because the two processes write to one each
                ArraySpec(("lane", "counters"), torch.int64, (LANE_COUNTERS,)),
                ArraySpec(("lane", "bell"), torch.int32, (1,)),
                ArraySpec(("lane", "flags"), torch.uint8, (steps,)),
                ArraySpec(("lane", "mask"), torch.uint8, (steps, num_envs)),
                *(ArraySpec(("field", *k), x.dtype, (steps, num_envs, *x.shape)) for k, x in columns),
            )
        )
        self.nbytes: int = self.spec.nbytes
