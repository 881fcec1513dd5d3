"""Lanes: bring the steps of many processes to the one that owns the replay."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from ..errors import LifecycleError, ParameterError, SchemaError
from ..kernels.lane_state import ALONE, CUT, WANTED
from ..memory.forks import shared_lock
from ..parameters import COUNT_RULE, FLAG_RULE, TIMEOUT_RULE, Rule, is_count, require
from ..replay.buffer import ReplayBuffer
from ..replay.intake import Intake
from ..steps.schema import Schema
from .lane import HEADER, LINE, Lane, LaneLayout
from .rate import LIMIT_RULE, RateLimit
from .shared import Claim, SharedBlock
from .waiting import Bell
from .writer import LaneWriter

__all__ = ["Lanes"]

OWNER = 0
"""The draining process claims this place of the block. The writer of lane k claims place k + 1."""

STEPS_RULE: Rule = (lambda steps: is_count(steps, 2), "expected a whole number of at least 2")


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
        self._share(schema, int(writers), layout, debug, SharedBlock.create(HEADER + int(writers) * layout.nbytes))

    def _share(self, schema: Schema, writers: int, layout: LaneLayout, debug: bool, block: SharedBlock) -> None:
        """Use the lanes that lie in a block."""
        self.schema, self.writers, self.debug = schema, writers, debug
        self.num_envs, self.steps, self.own_next_obs = layout.num_envs, layout.steps, layout.own_next_obs
        self._layout, self._block = layout, block
        self._token = int(block.token, 16) >> 1  # 63 bits, so that it is an int64
        filled, self._had_owner = (block.array[i : i + 8].view(np.int32) for i in (0, LINE))
        starts = (HEADER + k * layout.nbytes for k in range(writers))
        self._lanes = [Lane(layout, block.array[i : i + layout.nbytes], filled) for i in starts]
        self._filled, self._wanted = Bell(filled[:1]), filled[WANTED:]
        self._lock = shared_lock()
        self._claim: Claim | None = None
        self._note: tuple[Intake, Lane, int, int] | None = None
        """The piece that is being added: its intake, its lane, the number of the first step after it, and the mark that
        the intake had before. A call that was broken off leaves it; otherwise it is None between calls."""
        self._limit: RateLimit | None = None
        self._counted = np.zeros(1, np.int64)
        """How many steps the limit has counted that are not in the replay yet."""
        self._first = 0
        """The lane to begin with: the one after the last that gave steps. If each call began with lane 0, a limit could
        leave nothing for the other lanes."""
        self._blocked: float | None = None
        """When the limit began to hold back steps that are there, in seconds of ``time.monotonic``; None if it does not
        hold any back."""
        self._intakes: tuple[ReplayBuffer, list[Intake]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = self.num_envs, self.steps, self.own_next_obs
        return Lanes._attached, (self.schema, self.writers, sizes, self.debug, self._block)

    @classmethod
    def _attached(
        cls, schema: Schema, writers: int, sizes: tuple[int, int, bool], debug: bool, block: SharedBlock
    ) -> Lanes:
        lanes = cls.__new__(cls)
        lanes._share(schema, writers, LaneLayout(schema, *sizes), debug, block)
        return lanes

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
        return LaneWriter(self.schema, self._lanes[lane], int(lane), claim, self._owner_ended, timeout, self.debug)

    def recorded(self, env: Any, lane: int, *, timeout: float | None = None) -> Any:
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
        from .recorder import RecordedEnv  # gymnasium is imported where it is used

        if self.num_envs != 1:
            raise ParameterError(f"Lanes.recorded: a single env needs Lanes(num_envs=1), got {self.num_envs}")
        return RecordedEnv(env, partial(self.writer, lane, timeout=timeout))

    def _owner_ended(self) -> bool:
        """Whether some process has drained these lanes, and no process does so now."""
        return bool(self._had_owner[0]) and not self._block.is_claimed(OWNER)

    @property
    def alive(self) -> list[bool]:
        """Which lanes have a writer now, in the order of the lanes."""
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
        self._own()
        self._wanted[0] = steps
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
        moved = self._drained(replay, limit)
        if limit is None or timeout == 0 or self._blocked is None or moved:
            return moved
        return self._drained(replay, limit) if limit.wait_for_room(self.num_envs, timeout) else 0

    def _drained(self, replay: ReplayBuffer, limit: RateLimit | None) -> int:
        """Move what may be moved now."""
        with self._lock:
            self._own()
            with replay.lock:
                intakes = self._intakes_of(replay)
                self._settle()
                if limit is not self._limit:
                    self._limit, self._blocked = limit, None
                moved, first = 0, self._first
                for k in (*range(first, self.writers), *range(first)):
                    count = self._drain(self._lanes[k], intakes[k], self._source(k))
                    if count:
                        moved, self._first = moved + count, (k + 1) % self.writers
                return moved

    def _own(self) -> None:
        """Be the one process that drains."""
        with self._lock:  # two threads of the process may come at once
            if self._claim is not None and self._claim.holds:
                return
            self._claim = self._block.claim(OWNER)
            if self._claim is None:
                raise LifecycleError("another process drains these lanes and is alive; a lane has one reader")
            self._had_owner[0] = 1

    def _intakes_of(self, replay: ReplayBuffer) -> list[Intake]:
        """The intake of each lane into this replay, after a test that the replay fits the lanes."""
        if self._intakes is None or self._intakes[0] is not replay:
            self._require_fit(replay)
            envs = np.arange(self.writers * self.num_envs).reshape(self.writers, self.num_envs)
            intakes = [Intake(replay, mine) for mine in envs]
            for k, (lane, intake) in enumerate(zip(self._lanes, intakes, strict=True)):
                # a process that was killed may have stored these steps of a replay in files, and not given them back
                if (after := intake.drained(self._source(k))) > lane.drained:
                    _give_back(lane, after)
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

    def _settle(self) -> None:
        """After a call that was broken off, count its last piece if the replay has it."""
        if self._note is not None:
            intake, lane, after, mark = self._note
            with intake.replay.lock:
                if intake.mark() != mark:
                    self._confirm()
                    _give_back(lane, after)
                else:
                    intake.fail()
            self._note = None
        if self._limit is not None and self._counted[0]:
            self._limit.take_back(self._counted)

    def _source(self, lane: int) -> int:
        """The number by which a replay in files knows a lane. No lane of other lanes has it."""
        return self._token ^ lane

    def _drain(self, lane: Lane, intake: Intake, source: int) -> int:
        """Move the steps that a lane has now, piece by piece; returns how many, over its envs."""
        lane.require_sound()
        at, end, moved = lane.drained, lane.committed, 0
        while at < end:
            count, marks, rows = self._allowed(lane, at, end, intake.most)
            if not count:
                break
            steps = lane.read(at, count, marks)
            if marks & CUT:
                intake.interrupt()
            self._note = intake, lane, at + count, intake.begin(source, at + count)
            try:
                intake.add(steps)
            except BaseException:
                self._settle()
                raise
            self._confirm()  # before the note is cleared: without it, nobody could find out that the piece is in
            _give_back(lane, at + count)
            self._note = None
            moved += rows
            at += count
        return moved

    def _confirm(self) -> None:
        """Note in the limit that the steps which it has counted are in the replay."""
        if self._limit is not None:
            self._limit.confirm(self._counted)

    def _allowed(self, lane: Lane, at: int, end: int, most: int) -> tuple[int, int, int]:
        """The piece from step ``at`` on that may be added now: its vector steps, its marks, its steps over all envs.

        The limit has counted these steps. If the limit allows none, the number of vector steps is 0.
        """
        while True:
            count, marks = _piece(lane, at, end, most)
            rows = lane.rows(at, count, marks)
            if self._limit is None or not rows:
                return count, marks, rows
            if self._limit.admit_inserts(rows, self._counted):
                if self._blocked is not None:
                    self._limit.note_insert_wait(time.monotonic() - self._blocked)
                    self._blocked = None
                return count, marks, rows
            if count == 1:
                self._blocked = time.monotonic() if self._blocked is None else self._blocked
                return 0, marks, 0
            most = count // 2


def _piece(lane: Lane, at: int, end: int, most: int) -> tuple[int, int]:
    """How many steps from number ``at`` on a replay can take at once, and the marks that any of them has.

    The steps lie in one piece of memory, and no episode is interrupted between them. A replay keeps memory for each
    size that it gets. So the count is a power of two, which keeps the sizes few.
    """
    marks = lane.marks(at, min(end, at + most))
    if marks[0] & ALONE:
        return 1, int(marks[0])
    stops = np.flatnonzero(marks[1:] & (CUT | ALONE))
    count = int(stops[0]) + 1 if len(stops) else len(marks)
    count = 1 << (count.bit_length() - 1)
    return count, int(np.bitwise_or.reduce(marks[:count]))


def _give_back(lane: Lane, number: int) -> None:
    """Free the rows of all steps before ``number``, which are in the replay, and wake the writer if it waits."""
    if lane.give_back(number):
        Bell(lane.drained_bell).wake()
