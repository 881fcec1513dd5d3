"""Lanes: bring the steps of many processes to the one that owns the replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Never

import numpy as np
import torch
from numpy.typing import NDArray

from .. import kernels
from ..errors import (
    FieldError,
    InvariantError,
    LifecycleError,
    ParameterError,
    ReliveError,
    SchemaError,
    WaitTimeoutError,
)
from ..kernels.tables import COMMITTED, CUT, DRAINED, FOLLOWED, LANE_ALONE, LANE_COUNTERS, MASKED, WANTED, LaneArrays
from ..memory.copier import StepCopier
from ..memory.keeper import shared_lock
from ..memory.layout import typed
from ..parameters import COUNT_RULE, FLAG_RULE, TIMEOUT_RULE, Rule, is_count, require
from ..replay.buffer import ReplayBuffer
from ..replay.checks import flattened, refuse_not_finite, row_mask, stored_fields
from ..replay.durable import AFTER, ENVS, MARK, SOURCE, VOID
from ..ring.ring import missing_final, piece_of
from ..steps.arrays import NUMPY_DTYPES, Array, Ints, as_host, numpy_dtype
from ..steps.checker import StepChecker, refuse_unreadable
from ..steps.schema import Path, Schema, map_leaves, not_named
from .limits import LIMIT_RULE, RateLimit
from .shared import Bell, Claim, SharedBlock

__all__ = ["HEADER", "LINE", "Intake", "Lane", "LaneLayout", "LaneWriter", "Lanes"]


LINE = 64
"""Bytes of a cache line. Parts begin at multiples of it, so that two processes never write to the same line."""

HEADER = 2 * LINE
"""Bytes before the first lane: a cache line for the owner's bell, and one that notes whether an owner ever came."""

Bytes = NDArray[np.uint8]


class LaneLayout:
    """Where the parts of a lane lie in its memory: its counters, the marks of its steps, and a column for each field.

    Args:
        schema: the fields of a step, as a replay has them.
        num_envs: N, the envs of a writer.
        steps: S, how many vector steps a lane holds.
        own_next_obs: whether every step comes with its next observations.

    Raises:
        SchemaError: a replay cannot have this schema.
    """

    def __init__(self, schema: Schema, num_envs: int, steps: int, own_next_obs: bool) -> None:
        self.num_envs, self.steps, self.own_next_obs = num_envs, steps, own_next_obs
        self.stored = stored_fields(schema, own_next_obs)
        self.fields = self.stored if own_next_obs else self.stored.extend(next_obs=self.stored["obs"])
        """All fields that a step may have. The leaves of the stored fields come first."""
        self.shapes: dict[Path, tuple[int, ...]] = {
            path: (steps, num_envs, *field.shape) for path, field in self.fields.leaves.items()
        }
        self._offsets: dict[Path, int] = {}
        self._bell, self._marks = _up(8 * LANE_COUNTERS), _up(8 * LANE_COUNTERS) + LINE
        self._mask = end = self._marks + _up(steps)
        end += _up(steps * num_envs)
        for path, field in self.fields.leaves.items():
            self._offsets[path] = end
            end += _up(math.prod(self.shapes[path]) * field.dtype.itemsize)
        self.nbytes = end

    def part(self, memory: Bytes, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array over the memory of a lane, from byte ``offset`` on."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return memory[offset : offset + size].view(dtype).reshape(shape)

    def columns(self, memory: Bytes) -> dict[Path, Array]:
        """The fields ``[S, N, ...]`` of a lane, of the dtypes that NumPy has for them."""
        return {
            path: self.part(memory, self._offsets[path], self.shapes[path], numpy_dtype(field.dtype))
            for path, field in self.fields.leaves.items()
        }

    def counters(self, memory: Bytes) -> tuple[Any, Any, Any, Any]:
        """The counters, the bell that rings when there is room, the marks ``[S]`` and the mask ``[S, N]``."""
        rows = self.steps, self.num_envs
        return (
            self.part(memory, 0, (LANE_COUNTERS,), np.int64),
            self.part(memory, self._bell, (1,), np.int32),
            self.part(memory, self._marks, rows[:1], np.uint8),
            self.part(memory, self._mask, rows, np.uint8),
        )


class Lane:
    """One lane: what its writer writes and its owner reads.

    The writer first copies a step, and then raises the counter of committed steps. The owner reads only committed
    steps. So it never reads half a step, and a killed writer leaves at most one unfinished step, which is never read.

    Args:
        layout: where the parts lie.
        memory: uint8 ``[layout.nbytes]``.
        filled: int32 ``[2]``: the owner's bell, and the number of steps that must wait in a lane before it rings.
    """

    def __init__(self, layout: LaneLayout, memory: Bytes, filled: NDArray[np.int32]) -> None:
        self.layout, self.filled = layout, filled
        self.columns = layout.columns(memory)
        self._counters, self.drained_bell, self._marks, self.mask = layout.counters(memory)
        terminated, truncated = (self.columns[name,].view(np.uint8) for name in ("terminated", "truncated"))
        arrays = LaneArrays(self._counters, filled, self._marks, terminated, truncated, self.mask)
        fast = kernels.fast()
        self._handle, self._commit = fast.handle_of(arrays), fast.commit_step
        self._published, self._publish = fast.published, fast.publish

    # -- the writer's side --------------------------------------------------------------------------------------

    def check(self) -> tuple[StepChecker, StepChecker, StepCopier, StepCopier]:
        """Two checkers and two copiers: for a step without next observations, and for a step with them."""
        cpu, layout = torch.device("cpu"), self.layout
        checkers = [StepChecker(s, layout.num_envs, cpu, upload=False) for s in (layout.stored, layout.fields)]
        copiers = [self._copier(len(s.leaves)) for s in (layout.stored, layout.fields)]
        return checkers[0], checkers[1], copiers[0], copiers[1]

    def _copier(self, count: int) -> StepCopier:
        """The copier of the first ``count`` leaves into a row of the lane."""
        fields = list(self.layout.fields.leaves.values())[:count]
        targets = list(self.columns.values())[:count]
        return StepCopier(
            [field.dtype for field in fields], targets, self.layout.num_envs, [field.shape for field in fields]
        )

    def commit(self, number: int, marks: int) -> int:
        """See :func:`relive.kernels.reference.counters.commit_step`."""
        return self._commit(self._handle, number, marks)

    # -- the owner's side ---------------------------------------------------------------------------------------

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
        return self._published(self._counters, COMMITTED)

    @property
    def drained(self) -> int:
        """How many steps the owner has taken."""
        return self._published(self._counters, DRAINED)

    def give_back(self, number: int) -> bool:
        """Free the rows of all steps before ``number``; returns whether the writer sleeps and must be woken."""
        return bool(self._publish(self._counters, DRAINED, number, self.drained_bell, 0))

    def marks(self, low: int, high: int) -> Bytes:
        """The marks of the steps from number ``low`` up to ``high``, or up to the lane's last row."""
        row = low % self.layout.steps
        return self._marks[row : row + high - low]

    def read(self, number: int, count: int, marks: int) -> dict[str, Any]:
        """Steps as :meth:`relive.ReplayBuffer.extend` takes them, ``[T, N, ...]``, over the lane's own memory.

        Args:
            number: the number of the first step.
            count: T, the number of steps. Their rows lie in one piece of memory.
            marks: the marks that any of the steps has.
        """
        row, layout = number % self.layout.steps, self.layout
        rows = slice(row, row + count)

        def leaf(path: Path) -> Any:
            part, dtype = self.columns[path][rows], layout.fields.leaves[path].dtype
            return part if dtype in NUMPY_DTYPES else typed(part, dtype)

        known = layout.fields if marks & FOLLOWED else layout.stored
        steps = {name: known.rebuild(name, leaf) for name in known.names}
        if marks & MASKED:
            steps["mask"] = self._mask(rows)
        return steps

    def rows(self, number: int, count: int, marks: int) -> int:
        """How many steps :meth:`read` gives, counted over all envs, without those that are masked out."""
        if not marks & MASKED:
            return count * self.layout.num_envs
        row = number % self.layout.steps
        return int(np.count_nonzero(self._mask(slice(row, row + count))))

    def _mask(self, rows: slice) -> NDArray[np.bool_]:
        """Which steps are kept, bool ``[T, N]``. A vector step without a mask keeps those of all envs."""
        unmasked = self._marks[rows] & MASKED == 0
        return (self.mask[rows] | unmasked[:, None]).view(np.bool_)


def _up(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


class LaneWriter:
    """Writes the steps of one process into its lane; made by :meth:`relive.Lanes.writer`.

    :meth:`add` takes what :meth:`relive.ReplayBuffer.add` takes, and makes the same checks. When it returns, the step
    is acknowledged: the owner of the replay gets the step, even if this process is killed at once. The first step
    starts new episodes. A :class:`relive.Collector` takes a writer as its buffer.

    One thread at a time may use it, in the process that made it.

    Args:
        schema: the fields of a step.
        lane: where steps go.
        place: the number of the lane.
        claim: keeps other writers out.
        owner_ended: returns whether there was an owner and is none any more.
        timeout: seconds that :meth:`add` waits while the lane is full.
        debug: whether to refuse NaN and infinity.
    """

    def __init__(
        self,
        schema: Schema,
        lane: Lane,
        place: int,
        claim: Claim,
        owner_ended: Callable[[], bool],
        timeout: float | None,
        debug: bool,
    ) -> None:
        self.schema, self.num_envs, self.device = schema, lane.layout.num_envs, torch.device("cpu")
        self.own_next_obs = lane.layout.own_next_obs
        self.timeout, self.debug = timeout, debug
        self._lane, self._place, self._claim, self._owner_ended = lane, place, claim, owner_ended
        self._filled, self._drained = Bell(lane.filled[:1]), Bell(lane.drained_bell)
        self._checks = lane.check()
        self._leaves, self._steps = len(lane.layout.stored.leaves), lane.layout.steps
        self._limit = 0
        """The number of the first step that has no room, as far as this end knows."""
        self._cut = True
        """Whether the next step starts new episodes."""

    def add(self, step: Mapping[str, Any] | None = None, /, *more: Never, **fields: Any) -> None:
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
                raise LifecycleError(
                    f"this writer of lane {self._place} is closed, or was made before a fork; call lanes.writer("
                    f"{self._place}) in the process that plays"
                )
            self._write(fields if step is None else {**step, **fields}, cut)
        except ReliveError:  # nothing was written, and the caller knows
            self._cut = cut
            raise
        self._cut = False

    def extend(self, steps: Mapping[str, Any]) -> None:
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

    def interrupt(self) -> None:
        """Let the next step start new episodes: the running ones do not go on. Call it after a reset in mid-episode."""
        self._cut = True

    def close(self) -> None:
        """Let another process write to the lane. The steps in it stay."""
        self._claim.drop()

    def __enter__(self) -> LaneWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise LifecycleError("a writer belongs to its process: send the Lanes, and call lanes.writer(k) over there")

    # -- inside -------------------------------------------------------------------------------------------------

    def _write(self, values: dict[str, Any], cut: bool) -> None:
        """Check a step, wait for room, copy it, and commit it last.

        Args:
            values: the step.
            cut: whether it starts new episodes.
        """
        step, both, copy_step, copy_both = self._checks
        mask = values.pop("mask") if "mask" in values else None
        follows = self.own_next_obs or "next_obs" in values
        check, copier = (both, copy_both) if follows else (step, copy_step)
        try:
            leaves = check(values, copier)
        except (RuntimeError, TypeError):
            refuse_unreadable(values)
            raise
        kept = None if mask is None else row_mask(mask, self.num_envs)
        if self.debug:
            self._refuse_not_finite(leaves, kept)
        number = self._lane.committed
        if number >= self._limit:
            self._wait_for_room(number)
        row = number % self._steps
        copier.write(row, leaves)
        if kept is not None:
            self._lane.mask[row] = kept
        found = self._lane.commit(number, CUT * cut + FOLLOWED * follows + MASKED * (kept is not None))
        if found > 0:
            self._filled.wake()
        if found < 0:
            raise missing_final(-1 - found)

    def _refuse_not_finite(self, leaves: Sequence[Any], kept: Any) -> None:
        """Raise NotFiniteError if a number that is learned from is NaN or infinite."""
        fields, final = self._lane.layout.stored.leaves, leaves[self._leaves :]
        envs = np.arange(self.num_envs)
        rows = np.ones(self.num_envs, np.bool_) if kept is None else as_host(kept)
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
                    f"lane {self._place} is full, and the process that drained it has ended: drain it in another one, "
                    "or end this one"
                )
            return False

        if not self._drained.wait(ready, self.timeout):
            raise WaitTimeoutError(
                f"lane {self._place} is full: {self._steps} steps wait for the owner to call drain(), for more than "
                f"{self.timeout} s; call it more often, or make the lanes longer"
            )


class Intake:
    """Adds pieces of steps to some envs of a replay, each as a whole or not at all.

    The caller takes the replay's lock before it calls :meth:`mark`, and holds it until it knows whether the piece is
    in.

    Args:
        replay: the replay that gets the steps.
        envs: int64 ``[K]``, the envs of the steps.
    """

    def __init__(self, replay: ReplayBuffer, envs: Ints) -> None:
        self.replay, self.envs = replay, envs
        inside: Any = replay
        self._ring = inside._ring
        self.most = max(piece_of(self._ring.rows) // len(envs), 1)
        """The most vector steps of a piece: the replay stores this many in one call that nothing can break off."""
        self._durable = inside._durable

    def mark(self) -> int:
        """A number that changes at the moment when a piece with steps is in."""
        return int(self._ring.heads[self.envs].sum())

    @property
    def _note(self) -> Any:
        """The note of these envs, in the row of the first; None if the replay is not in files.

        It is asked for when it is used: a source with a ledger of its own needs no notes.
        """
        return None if self._durable is None else self._durable.drained()[self.envs[0]]

    def begin(self, source: int, after: int) -> int:
        """Note that the next :meth:`add` has the steps of a source up to number ``after``; returns :meth:`mark`.

        The note of a replay in files outlives the process: see :meth:`drained`.

        Args:
            source: a number that no other source of steps has.
            after: the number of the first step after the piece.
        """
        mark, note = self.mark(), self._note
        if note is not None:
            note[MARK] = VOID  # until the other words are those of this piece; the piece before was given back
            note[SOURCE], note[AFTER], note[ENVS] = source, after, len(self.envs)
            note[MARK] = mark
        return mark

    def fail(self) -> None:
        """The piece that was begun is not in, and will not be."""
        if (note := self._note) is not None:
            note[MARK] = VOID

    def drained(self, source: int) -> int:
        """Up to which number a replay in files is known to have the steps of a source; 0 if it notes nothing of it.

        It counts a piece that was stored just before the process was killed.
        """
        note = self._note
        if note is None or note[MARK] == VOID or note[SOURCE] != source or note[MARK] == self.mark():
            return 0
        return int(note[AFTER])

    def add(self, steps: Mapping[str, Any]) -> None:
        """Add a piece: vector steps as :meth:`relive.ReplayBuffer.extend` takes them, no more than :attr:`most`.

        In a piece of several vector steps, no row may be left out if that would interrupt an episode.
        """
        self.replay.extend(steps, envs=self.envs)

    def interrupt(self) -> None:
        """Interrupt the running episodes: the next steps start new ones."""
        self.replay.interrupt(self.envs)


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
        if self.num_envs != 1:
            raise ParameterError(f"Lanes.recorded: a single env needs Lanes(num_envs=1), got {self.num_envs}")
        from .recorder import RecordedEnv  # gymnasium is imported where it is used

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
    if marks[0] & LANE_ALONE:
        return 1, int(marks[0])
    stops = np.flatnonzero(marks[1:] & (CUT | LANE_ALONE))
    count = int(stops[0]) + 1 if len(stops) else len(marks)
    count = 1 << (count.bit_length() - 1)
    return count, int(np.bitwise_or.reduce(marks[:count]))


def _give_back(lane: Lane, number: int) -> None:
    """Free the rows of all steps before ``number``, which are in the replay, and wake the writer if it waits."""
    if lane.give_back(number):
        Bell(lane.drained_bell).wake()
