"""Ring: which steps are stored, where they lie, and which of them can be drawn.

The ring comes first. After it come the words that it uses: spans of rows, the rule of what can be drawn, the changes
that it notes before it makes them, and the undo note of a ring in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import core
from ..core import Draw, Windows
from ..core.words import (
    ACROSS,
    ALONE,
    COLUMNS,
    COMPLETED,
    COUNT,
    COUNTERS,
    DRAWABLE,
    EPISODES,
    FINALS,
    HEAD,
    HISTORY,
    LINKED,
    NEXT,
    NO_FINALS,
    NOT_FINITE,
    RULE,
    TAIL,
    TAILS,
    UNDO_ADDING,
    UNDO_AFTER,
    UNDO_COUNTERS,
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    UNDO_REBUILD,
    UNDO_ROW,
    UNDO_ROWS,
    UNDO_START,
    USED_UP,
    WEIGH,
    RingArrays,
    StagedRows,
    env_entries,
    first_row,
    packed,
    row_entries,
    undo_size,
    unpacked,
)
from ..errors import FieldError, InvariantError, LifecycleError, ParameterError, ReliveError, SchemaError
from ..memory.allocator import zeroed
from ..memory.copier import BoundedCache
from ..memory.layout import WEIGHED, RowLayout
from ..memory.store import Plan, Remainder, Store, require_rows, vector
from ..parameters import is_count, is_flag
from ..steps.arrays import Array, Bools, Ints, Leaf
from ..steps.schema import Field, Path

PIECE = 4096
"""The most rows stored at once. The memory that they are packed in is kept."""


LARGEST_NUMBER = 2**52
"""The largest number of a row that the kernels can use. A million rows a second reach it after 142 years."""


UNLIMITED = 2**62
"""More than any number of a row."""


CHECKED_AT_ONCE = 2**18
"""Rows tested at once."""


NO_ENVS: Ints = np.zeros(0, np.int64)


NO_STAMP = 2**63 - 1
"""More than the stamp of any transition."""


Opens = NDArray[np.uint8]
"""1 for each row that can be drawn from now on, 0 for each that no longer can."""


Events = tuple[Ints, Opens]
"""Places of rows, and what becomes of each."""


NOTHING: Remainder = []


class Stacks(NamedTuple):
    """How fields of the observation are read as stacks of frames."""

    paths: tuple[Path, ...]
    """The fields."""
    depth: int
    """How many frames a stack has."""
    repeat: bool
    """True if frames from before the episode are its first one, else they are zeros."""


NO_STACKS = Stacks((), 0, False)


# `step` is one int32 a row and serves as the episode counter: rows i and i + k share an episode if and only if step[i +
# k] = step[i] + k. It also says how many frames of a stack there are. 64 bits would cost 16 bytes a row and a new
# format.
class Ring:
    """N rings of rows, one per env, in which an episode of k transitions takes k + 1 rows.

    The last row of an episode is a boundary row: it holds the observation that the episode ended on, so the next
    observation of a transition is always that of the next row. The invariants, which :meth:`check` tests:

    1. A row's id is (env, number in that env). Numbers only grow and are never reused; row ``number`` of env ``e`` lies
       at place ``e * rows + number % rows``.
    2. A row is live while its number is among the newest ``rows`` of its env and not cleared.
    3. The next step of the same env is number + 1.
    4. ``step`` is a row's index within its episode: rows i and i + k share an episode iff step[i + k] = step[i] + k.
       An episode of 2**31 - 1 steps is cut, as if it had been interrupted.
    5. A transition is complete once its next observation is known. ``stamp`` numbers complete transitions in the order
       of completion, starting at 0; it is negative in all other rows: the newest of an episode under way, boundary
       rows, and rows whose episode was interrupted.
    6. A row can be drawn iff it is live, complete, the last of a window as :class:`WindowRule` says, and the
       ``history`` rows before it, or as many as its episode has, are live too. With ``across`` they are those of any
       episode, and the earliest need not be live if the row after it begins an episode.
    7. ``order`` is the number of the env's transitions that were complete before a row, modulo 2**32.
    8. Every episode has exactly one row that never becomes a transition, its last. So a row's number less its
       ``order`` is the number of its episode in its env, and :meth:`ends` gives the last row of each.

    Args:
        num_envs: N.
        rows: rows per env, at least 2.
        store: where the rows lie.
        ordered: True if rows with next observations of their own come in the order of time, too. They are complete at
            once, and there are no boundary rows; otherwise each is an episode of one step.
    """

    def __init__(self, num_envs: int, rows: int, store: Store, ordered: bool = True) -> None:
        if num_envs < 1 or rows < 2:
            raise ParameterError(f"a ring needs at least 1 env and 2 rows per env, got {num_envs} and {rows}")
        self.num_envs = num_envs
        self.rows = rows
        self.store = store
        self.leaves: dict[Path, Field] = store.leaves
        """The fields of a step."""
        allocator = store.allocator
        self.state: Ints = allocator.take("state", (num_envs, COLUMNS), np.int64)
        """``[N, 4]``: HEAD, TAIL, NEXT and COUNT of each env, as :mod:`relive.core.words` says."""
        self.counters: Ints = allocator.take("counters", (COUNTERS,), np.int64)
        """``[9]``: the counts of the whole ring, and its rule."""
        self.step: Array = store.meta("_step")
        self.stamp: Array = store.meta("_stamp")
        self.order: Array = store.meta("_order")
        """Of each place ``[R]``, as the invariants say."""
        self.own_next: bool = any(path[0] == "next_obs" for path in store.leaves)
        """True if each row is complete with a next observation of its own."""
        self.ordered: bool = ordered or not self.own_next
        """True if the rows of an env come in the order of time."""
        self.mode: int = FINALS if not self.own_next else LINKED if ordered else ALONE
        """How kernels store a step; see :mod:`relive.core.words`."""
        self.undo: Undo | None = None
        """Notes how to take back what is being changed, where the memory outlives the process; else None."""
        self.arrays = self._ring_arrays()
        """All that kernels read and write; also by name, for Python."""
        self.core: core.Ring = core.Ring(self.arrays)
        """The arrays of the ring, as compiled code takes them."""
        self.notes_ends = False
        """True once :meth:`ends` was called."""
        self._rule = EVERY_ROW
        self.suspect: Ints | None = NO_ENVS
        """Places where a kill may have left a sampler's numbers wrong, when this ring was resumed; None for all."""
        self.newly_drawable = NO_ENVS
        """Places that can be drawn only since this ring was resumed, because the kill ended their episodes."""
        if allocator.has("counters"):
            self._resume(allocator.died)
        else:
            _note_rule(self._rule, self.counters)
        self.pending: Change | Adding | Ended | DeviceIsNewer | None = None
        """The change under way; set by the ring, and None again once the sampler knows of it, too. A call that finds
        it set was preceded by one that an exception broke off: :meth:`repair` comes first then."""
        self.before_overwriting: Callable[[Ints], object] | None = None
        """Called with the envs that are about to get rows, while a save reads the rows that these may overwrite."""
        self.alone: Callable[[], AbstractContextManager[object]] = nullcontext
        """A context for a change that the user makes of a sampler. No other call of the replay runs meanwhile, nothing
        is left half done, and all batches that are due are drawn before. The replay sets it."""
        self._no_events: Events = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        self._windows: list[Windows | None] = [None, None]
        """The readers of n-step windows: without and with weights."""
        self._stacks = BoundedCache[tuple[bool, Stacks], Windows]()
        """The readers of windows with stacks of frames."""
        self.sequences: BoundedCache[Any, Any] = BoundedCache()
        """The readers of sequences, each under its cut, which views put there."""
        self._addings = BoundedCache[tuple[int, bool, bool], Adding]()

    def _ring_arrays(self) -> RingArrays:
        """The arrays of kernels, over the memory of the store; in files, with the undo note."""
        store, allocator = self.store, self.store.allocator
        starts, none = store.layout.starts, np.empty(0, np.int64)
        reward, terminated, truncated = map(store.meta, ("reward", "terminated", "truncated"))
        # starts[3] is the byte after a step's three groups of fields, starts[1] the byte after its observation
        arrays = RingArrays(
            self.rows, starts[3], starts[1], self.state, self.counters, store.target, self.step, self.stamp, self.order,
            reward, terminated, truncated, none.astype(np.int32), none,
        )  # fmt: skip
        if not allocator.durable:
            return arrays
        words: Ints = allocator.take("undo", (undo_words(self.num_envs, self.rows),), np.int64)
        self.undo = Undo(words)
        # every row may be overwritten until Durable, which writes the journal, sets the reserve
        return arrays._replace(undo=words, reserve=np.full(self.num_envs, UNLIMITED, np.int64))

    # -- counts and cursors -------------------------------------------------------------------------------------

    @property
    def drawable(self) -> int:
        """How many anchors there are: rows that can be drawn."""
        return int(self.counters[DRAWABLE])

    @property
    def completed(self) -> int:
        """How many transitions were ever completed."""
        return int(self.counters[COMPLETED])

    @property
    def episodes(self) -> int:
        """How many episodes have ended."""
        return int(self.counters[EPISODES])

    @property
    def not_finite(self) -> int:
        """How many rewards were NaN or infinite, among all that were ever added."""
        return int(self.counters[NOT_FINITE])

    @not_finite.setter
    def not_finite(self, count: int) -> None:
        self.counters[NOT_FINITE] = count

    @property
    def oldest(self) -> Ints:
        """The number of the oldest live row of each env, ``[N]``."""
        return np.maximum(self.state[:, TAIL], self.state[:, HEAD] - self.rows)

    @property
    def heads(self) -> Ints:
        """The number that each env's next row will have, ``[N]``."""
        return self.state[:, HEAD]

    @property
    def under_way(self) -> Bools:
        """Bool ``[N]``: True if the newest row of an env is in an episode that goes on with the next."""
        return self.state[:, NEXT] > 0

    @property
    def rows_live(self) -> int:
        """How many rows are live, in all envs."""
        return int((self.heads - self.oldest).sum())

    @property
    def transitions(self) -> int:
        """How many transitions a window of the newest can have: those that can be drawn, or all complete ones."""
        return self.drawable if self._rule.length == 1 else core.count_complete(self.core)

    @property
    def unseen(self) -> int:
        """Transitions with this stamp or a later one are new to a sampler that is asked to ``attach``."""
        return self.completed if self.pending is None else self.pending.since

    # -- where rows lie -----------------------------------------------------------------------------------------

    @property
    def span(self) -> Span:
        """The live rows: for each env, a range of numbers."""
        return Span(self.oldest, self.heads.copy())  # a copy: `heads` changes with the next step

    def live_rows(self, low: int = 0, high: int | None = None) -> tuple[Ints, Ints]:
        """The envs and numbers of live rows, env by env in the order of time: all, or from ``low`` up to ``high``."""
        return self.span.rows(low, high)

    def places(self) -> Ints:
        """The places of all live rows, env by env in the order of time."""
        return self.span.places(self.rows)

    def live_places(self, env: int) -> Ints:
        """The places of an env's live rows, in the order of time."""
        numbers = np.arange(int(self.oldest[env]), int(self.heads[env]), dtype=np.int64)
        return env * self.rows + numbers % self.rows

    def anchors(self) -> Ints:
        """The places of all rows that can be drawn, env by env in the order of time."""
        self.store.allocator.expect_scan()
        places = np.empty(self.rows_live, np.int64)
        count = core.anchors(self.core, places)
        return places[:count]

    def ages(self) -> tuple[int, int]:
        """The sum of the ages of all rows that can be drawn, and the largest; 0 if there are none.

        A row's age is how many transitions were completed after it. All rows are read only the first time, and after
        changes other than added rows.
        """
        self.store.allocator.expect_scan()
        return core.ages(self.core)

    def find(self, index: Ints) -> tuple[Ints, int]:
        """Places of public indices, -1 for those that can no longer be drawn; and the first never issued, or -1."""
        index = vector(index)
        places = np.empty(len(index), np.int64)
        bad = core.live(self.core, index, places)
        return places, bad

    def index_of(self, places: Ints) -> Ints:
        """The public index ``number * N + env`` of live places ``[B]``.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows.
        """
        places = vector(places)
        index = np.empty(len(places), np.int64)
        require_rows(places, core.ids_of(self.core, places, index), self.store.num_rows)
        return index

    def require_anchors(self, places: object) -> Ints:
        """Places ``[B]`` that a user's sampler chose, as kernels take them.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows that can be drawn; names the first.
        """
        chosen = vector(places)
        # there and back: a place has the index of the row that lies there now, and `find` knows if that can be drawn
        found, unknown = self.find(self.index_of(chosen))
        known = len(chosen) if unknown < 0 else unknown  # `find` stops at an index that was never issued
        wrong = np.flatnonzero(found[:known] != chosen[:known])
        bad = int(wrong[0]) if len(wrong) else unknown
        if bad >= 0:
            raise ParameterError(
                f"places: entry {bad} is {chosen[bad]}, a row that cannot be drawn; choose among ring.anchors()"
            )
        return chosen

    def ends(self) -> tuple[NDArray[np.int32], Ints]:
        """The last row of each episode, as far as it is noted, for :class:`relive.core.GoalWindows`.

        The first array, int32 ``[N * rows]``, holds at ``e * rows + k % rows`` the number of the last row of episode k
        of env e, modulo 2**32. The second, ``[N]``, is the number up to which each env's rows were noted. The kernel
        notes what has come since. A ring that is never asked for its ends keeps neither.
        """
        if not self.notes_ends:
            ends = zeroed(4 * self.num_envs * self.rows).view(np.int32)
            noted = np.zeros(self.num_envs, np.int64)
            self.arrays: RingArrays = self.arrays._replace(ends=ends, seen=noted)
            self.core.rebind(self.arrays)
            self.notes_ends: bool = True  # last: an exception before this line has the next call begin again
        return self.arrays.ends, self.arrays.seen

    # -- drawing and reading ------------------------------------------------------------------------------------

    def draw(self, count: int, key: int) -> Ints | None:
        """Places ``[count]`` of anchors, each equally often and with replacement; None if there are none.

        Args:
            count: B.
            key: the key of the stream of random numbers.
        """
        places = np.empty(count, np.int64)
        some = core.draw(self.core, key, 0, places)
        return places if some else None

    def window_places(self, newest: int) -> tuple[Ints, Ints]:
        """The places of the ``newest`` of :attr:`transitions`: from the first up to the second, ``[2 N]`` each."""
        begins, ends = np.empty((2, 2 * self.num_envs), np.int64)
        core.window_runs(self.core, newest, begins, ends)
        return begins, ends

    def plan(self, places: Ints, n: int = 1, gamma: float = 0.99) -> Plan:
        """The n-step transitions that start at ``places`` ``[B]``, for :meth:`read`; a view may change them first.

        Args:
            places: anchors.
            n: rewards per window.
            gamma: discount per step.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows.
        """
        plan = self.store.plan(vector(places))
        bad = core.read_windows(self.core, plan.batch.core, plan.places, n, gamma, plan.rows, plan.last)
        if bad >= 0:
            require_rows(plan.places, bad, self.store.num_rows)
        return plan

    def windows(
        self,
        places: Any,
        n: int,
        gamma: float,
        kind: type[dict[str, Any]] | None = None,
        sums: Callable[[Ints, NDArray[np.int32]], NDArray[np.float32]] | None = None,
        stacks: Stacks | None = None,
    ) -> Any:
        """The fields ``[B, ...]`` of the n-step transitions that start at ``places``, or at the anchors of a draw.

        They come by path, or nested as this kind of dict. A draw by priority gives its ``weight`` and ``probability``
        as well. One compiled call draws, reads and makes the tensors, for which all fields must be in RAM.

        Args:
            places: anchors, or a draw.
            n: rewards per window.
            gamma: discount per step.
            kind: the kind of dict.
            sums: gives the rewards in place of the discounted sums, float32 ``[B]``: of the anchors' places, and how
                many steps each window has.
            stacks: the fields of the observation that are read as stacks.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows.
        """
        drawn = places.__class__ is Draw
        weighed = drawn and places.weighed
        windows = self._windows[weighed] if stacks is None else self._stacks.get((weighed, stacks))
        if windows is None:
            windows = self._new_windows(weighed, stacks)
        found = windows.sample(places if drawn else vector(places), n, gamma, kind, sums)
        if found.__class__ is int:
            require_rows(places, found, self.store.num_rows)
        return found

    def _new_windows(self, weighed: bool, given: Stacks | None) -> Windows:
        """A new reader of windows into the rows of a batch: with stacks behind all else, and then weights, if any.

        Large fields are apart, each in a column of its own.
        """
        store, weights, stacks = self.store, WEIGHED if weighed else {}, given or NO_STACKS
        batch, source = store.batch, store.layout
        pairs = {path: ("next_obs", *path[1:]) for path in stacks.paths if path not in store.large}
        frames: dict[Path, Field] = {}  # the rows have the newest frames as well, by the names that a batch has
        for name in (*pairs, *pairs.values()):
            frames[("_stack", *name)] = Field((stacks.depth, *batch.fields[name].shape), batch.fields[name].dtype)
        rows = RowLayout(*batch.groups, frames, weights) if frames or weights else batch
        place = {path: ("_stack", *path) if ("_stack", *path) in frames else path for path in (*batch.fields, *weights)}
        facts: list[Any] = [(x, rows.fields[y].dtype, rows.fields[y].shape, rows.offsets[y]) for x, y in place.items()]
        columns, large = self.large_fields(stacks) if store.large else ([], [])
        facts[len(batch.fields) : len(batch.fields)] = columns  # weights come last
        at = (rows.offsets["probability",], rows.offsets["weight",]) if weighed else (-1, -1)
        stacked = [
            (source.offsets[now], source.fields[now].nbytes, rows.offsets[place[now]], rows.offsets[place[then]])
            for now, then in pairs.items()
        ]
        windows = Windows(
            self.core, batch.core, core.Fields(facts, rows.nbytes), *at, in_files=self.undo is not None,
            stacked=stacked, depth=stacks.depth, repeat=stacks.repeat, large=large,
        )  # fmt: skip
        if given is None:
            self._windows[weighed] = windows
            return windows
        return self._stacks.keep((weighed, given), windows)

    def large_fields(self, stacks: Stacks = NO_STACKS) -> tuple[list[Any], list[Any]]:
        """The large fields of n-step transitions as compiled code takes them: the columns of a batch, and their rows.

        There are none unless all fields are in RAM.
        """
        columns, large = list[Any](), list[Any]()
        for path, block in (self.store.apart or {}).items():
            field, stacked = self.leaves[path], path in stacks.paths
            now, then = path[0] != "next_obs", path[0] == ("next_obs" if self.own_next else "obs")
            shape = (stacks.depth, *field.shape) if stacked else field.shape
            columns += [(x, field.dtype, shape, None) for x in [path] * now + [("next_obs", *path[1:])] * then]
            large.append((block, now, then, stacked))
        return columns, large

    def extras(self, extras: Mapping[str, Array]) -> dict[Path, Tensor]:
        """The further fields of a draw, arrays ``[B]`` by name, as fields of a batch."""
        if not extras:
            return {}
        return {(name,): x for name, x in zip(extras, self.tensors(*extras.values()), strict=True)}

    def read(self, plan: Plan) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of planned transitions."""
        return self.store.fields(plan)

    def take(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """Fields (default: all) of the rows ``places`` ``[...]`` as they are stored; negative places give zeros.

        Raises:
            ParameterError, DTypeError: a place is beyond the last row, or they are no integers.
        """
        return self.store.read(places, paths)

    def tensors(self, *arrays: Array) -> list[Tensor]:
        """Arrays as tensors on the device of batches, sent in one copy."""
        return self.store.tensors(*arrays)

    def frames(self, places: Ints, depth: int, repeat: bool) -> Ints:
        """The places ``[B, depth]`` of the frames that end at ``places``, oldest first, none of another episode.

        Before an episode's first frame that one is repeated, or the place is -1, which reads as zeros.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows.
        """
        places = vector(places)
        frames = np.empty((len(places), depth), np.int64)
        bad = core.stack_places(self.core, places, depth, repeat, frames)
        if bad >= 0:
            require_rows(places, bad, self.store.num_rows)
        return frames

    # -- changes ------------------------------------------------------------------------------------------------

    def add(
        self,
        envs: Ints,
        steps: Sequence[Leaf],
        final: Sequence[Leaf] | None,
        events: bool,
        cut: Ints | None = None,
    ) -> Events:
        """Store one more step of each of ``envs``, in turn.

        Rows and counters change in one compiled call, which no exception can break off; large fields are written
        before it. The change can be mended until the caller has told its sampler and sets :attr:`pending` to None.

        Args:
            envs: int64 ``[K]``; no env more often than it has room.
            steps: the checked leaves ``[K, ...]`` of the store, in its order.
            final: the leaves of the final observations ``[K, ...]``, read where an episode ended. ``steps`` may have
                them again at its end; then what checked all of these leaves at once copies them at once.
            events: True to list the rows that can be drawn from now on, and those that no longer can.
            cut: the envs whose episodes do not go on if this is broken off; default ``envs``.

        Returns:
            the places of the events, in order, with 1 where a row can be drawn now, 0 where it no longer can.

        Raises:
            FieldError: an episode ended and ``final`` is None. Nothing is stored.
            ParameterError: the rows are too many for one call of a ring in files. Nothing is stored.
        """
        if self.before_overwriting is not None:
            self.before_overwriting(envs)
        count, store, undo = len(envs), self.store, self.undo
        if undo is not None and undo.active:
            undo.end()  # the sampler knows of the piece before: only now may its note go
        if final is None:
            (staged, remainder), ends_remainder = store.stage("step", count, steps), NOTHING
            ends = staged
        else:
            (staged, remainder), (ends, ends_remainder) = store.stage_both(count, steps, final)
        adding = self._addings.get((count, final is None, events))
        # it has the addresses of the staged rows, so other memory needs another one
        if adding is None or adding.arrays.staged is not staged or adding.arrays.final is not ends:
            adding = self.new_adding(envs, staged, ends, events)
            self._addings.keep((count, final is None, events), adding)
        if adding.envs is not envs:
            adding.take(envs)
        if events:
            adding.since = self.counters.item(COMPLETED)
        adding.cut = envs if cut is None else cut
        mode = NO_FINALS if final is None and not self.own_next else self.mode
        before = self.pending
        # large fields go first: a step that is counted is all there, and what it overwrites can be given up
        if remainder:
            adding.plan(mode, undo)
            self.pending = adding
            store.write(remainder, adding.arrays.places)
            if ends_remainder:
                store.write(ends_remainder, adding.arrays.finals)
        self.pending = adding  # before the kernel: an exception right after it finds what has to be mended
        result = core.add_rows(self.core, adding.core, mode)
        if result == USED_UP and undo is not None and undo.renew is not None:
            self.pending = before  # nothing was changed, and nothing is if the disk fails
            renewed = undo.renew(count)
            self.pending = adding
            result = core.add_rows(self.core, adding.core, mode) if renewed else result
        if result < 0:
            self.pending = before  # nothing was changed
            raise _refused(envs, result)
        return (adding.arrays.where[:result], adding.arrays.opens[:result]) if events else self._no_events

    def new_adding(self, envs: Ints, staged: Array, final: Array, events: bool) -> Adding:
        """The arrays that :meth:`add` needs for that many envs, until the rule changes."""
        # every row that is written closes its own history at most, and all together no more than there is
        count, most = len(envs), self.num_envs * self.rows
        size = min(count * (2 * self._rule.history + 4), most + 4 * count) if events else 0
        return Adding(self, envs, staged, final, size)

    def interrupt(self, envs: Ints) -> Events:
        """The episodes under way in ``envs`` will not go on: their newest rows never become transitions.

        Returns:
            events as :meth:`add`: the transitions before those, where they end a shorter window.
        """
        self.pending = Change(envs if self.pending is None else np.append(self.pending.cut, envs))
        opened = self._end_episodes(envs)
        if not len(opened):
            return self._no_events
        self.counters[DRAWABLE] += len(opened)
        self.core.changed()
        return opened, np.ones(len(opened), np.uint8)

    def _end_episodes(self, envs: Ints) -> Ints:
        """End the episodes under way in ``envs``. Returns the places that can be drawn only now.

        The last complete step of an episode that has ended is the last of a window, although that may be shorter.
        """
        if self._rule.length == 1:
            self.state[envs, NEXT] = 0
            return NO_ENVS
        # the newest row of an episode under way waits for its next observation: the last complete one is before it
        last = self.heads[envs] - 2
        same = (self.state[envs, NEXT] > 1) & (last >= self.oldest[envs])  # it is live, and of the same episode
        index = last[same] * self.num_envs + envs[same]
        before, _ = self.find(index)
        self.state[envs, NEXT] = 0
        after, _ = self.find(index)
        return after[(before < 0) & (after >= 0)]

    def clear(self, rewind: bool = False) -> None:
        """No row is live any more. Numbers go on, so that an old index is never mistaken for a new one.

        With ``rewind`` the next rows of each env go to its first place again, as in a new ring: the numbers between are
        passed over, which only rows with next observations of their own allow (invariant 8).

        Raises:
            LifecycleError: rewinding rows that share observations.
        """
        if rewind and not self.own_next:
            raise LifecycleError("clear(rewind=True): rows that share observations go on where they are; leave it out")
        if self.undo is not None:
            self.undo.begin_rebuild(self)
        self.pending = Change(clears=True, rewinds=rewind)
        self._forget(rewind)

    def _forget(self, rewind: bool) -> None:
        if rewind:
            self.state[:, HEAD] += -self.state[:, HEAD] % self.rows  # a multiple of `rows` lies at the first place
        self.state[:, TAIL], self.state[:, NEXT] = self.state[:, HEAD], 0
        self.counters[DRAWABLE] = 0
        self.core.changed()

    def _follow(self, rule: WindowRule) -> None:
        _require_rule(rule)
        if self.own_next and rule.length > 1:
            raise SchemaError("sequences need steps in order that share observations; here each has its own")
        if self.undo is not None:
            self.undo.begin_rebuild(self)
        self._rule = EVERY_ROW if rule == EVERY_ROW else rule
        _note_rule(rule, self.counters)
        self.core.changed()
        self._addings.clear()  # there may be more events now
        self.counters[DRAWABLE] = len(self.anchors())

    # every batch reads it, this way without a call
    rule: WindowRule = cast("Any", property(attrgetter("_rule"), _follow))
    """The rule of what can be drawn; set by the view that reads it.

    Raises:
        ParameterError: it makes no sense.
        SchemaError: it asks for windows of several steps where steps have no order.
    """

    def order_as(self, other: Ring, since: int) -> None:
        """Give the transitions completed from number ``since`` on, copies of the newest of ``other``, its order."""
        places_of = [self.live_places(env) for env in range(self.num_envs)]
        copies, stamps = list[Ints](), list[Ints]()
        for env, places in enumerate(places_of):
            stamp, copied = other.stamp[other.live_places(env)], places[self.stamp[places] >= since]
            copies.append(copied)
            stamps.append(stamp[stamp >= 0][-len(copied) :] if len(copied) else stamp[:0])  # [-0:] would be all
        order, new = np.argsort(np.concatenate(stamps)), self.stamp.copy()
        new[np.concatenate(copies)[order]] = np.arange(self.completed - len(order), self.completed)
        for places in places_of:
            stamp = new[places]
            # a row that is no transition has -1 - the stamp of the next one, so that stamps stay in order (invariant 5)
            following = np.minimum.accumulate(np.where(stamp < 0, self.completed, stamp)[::-1])[::-1]
            new[places] = np.where(stamp < 0, -1 - following, stamp)
        self.stamp[...] = new  # at once: an exception comes before it or after it
        self.core.changed()

    # -- after an exception, and after a kill -------------------------------------------------------------------

    def commit(self) -> None:
        """A change is done, and the sampler knows of it."""
        if self.undo is not None:
            self.undo.end()  # first: a kill between the two lines finds a whole change
        self.pending = None

    def repair(self) -> None:
        """Make rows and counters agree after a call that was broken off; the sampler has to ``attach`` afterwards.

        The rows that such a call was to overwrite are given up, even if it had not come to them. The episodes that it
        was about do not go on, since its caller cannot know whether its steps are in. A second time changes nothing.
        """
        change = self.pending
        if change is None:
            return
        if isinstance(change, Ended):
            raise change.error()
        if isinstance(change, DeviceIsNewer):
            change.bring_back()
            return
        if change.clears:
            self._forget(change.rewinds)
        # maximum.at: an env may come several times, and a tail never goes back
        np.maximum.at(self.state[:, TAIL], change.envs, change.tails[: len(change.envs)])
        self.state[change.cut, NEXT] = 0
        self.rule = change.rule or self._rule  # counts what can be drawn, once all cursors are right

    # Episodes under way end where their process died, since their environments died with it. After `close()` they go
    # on.
    def _resume(self, died: bool) -> None:
        """Go on with what is in memory. If the process before ``died``, take back the change that it was in.

        Raises:
            InvariantError, ParameterError: it makes no sense.
        """
        killed = died and self.undo is not None
        if killed:
            self.suspect = self._take_back()
            self.state[self.heads <= self.oldest, NEXT] = 0  # all rows of these envs were given up
        self.check_cursors(LARGEST_NUMBER // 2)  # what comes next has to fit as well
        self._rule = _noted_rule(self.counters)
        if killed:
            self.newly_drawable: Ints = self._end_all_episodes()
            if self.suspect is None or self._rule.length > 1:  # an end may let a shorter window be drawn
                self.suspect = None
                self.counters[DRAWABLE] = len(self.anchors())
        if not 0 <= self.drawable <= self.rows_live:
            raise InvariantError(f"invariant 6: {self.drawable} counted, of {self.rows_live} rows")

    def _take_back(self) -> Ints | None:
        """Put back what the change that a kill broke off found, and give up the rows that it was to overwrite.

        It may be called again after a kill on its way. The change stays noted until :meth:`commit`.

        Returns:
            the places whose drawability may have changed, or None if that may be any.

        Raises:
            InvariantError: the note makes no sense.
        """
        assert self.undo is not None
        words = self.undo.words
        kind, count, rows = (int(words[at]) for at in (UNDO_KIND, UNDO_ENVS, UNDO_ROWS))
        if kind == UNDO_NONE:
            return NO_ENVS
        # every number of the note is tested before it is used as an index: the file may hold anything
        _require_note(kind in (UNDO_ADDING, UNDO_REBUILD) and 0 <= count <= self.num_envs)
        _require_note(0 <= rows <= (len(words) - first_row(self.num_envs)) // UNDO_ROW)
        entries, noted = env_entries(words, count), row_entries(words, self.num_envs, rows)
        envs, places = entries[:, 0], noted[:, 0]
        _require_note(((envs >= 0) & (envs < self.num_envs)).all() and len(np.unique(envs)) == count)
        _require_note(((places >= 0) & (places < self.store.num_rows)).all())
        self.stamp[places], (self.step[places], self.order[places]) = noted[:, 1], unpacked(noted[:, 2])
        self.state[envs] = entries[:, 1:UNDO_AFTER]
        self.counters[:COUNTERS] = words[UNDO_COUNTERS : UNDO_COUNTERS + COUNTERS]
        self.check_cursors(LARGEST_NUMBER)
        after = entries[:, UNDO_AFTER]
        added = after - self.state[envs, HEAD]
        # a step takes two rows at most, and a note has no room for more steps than words
        _require_note(((added >= 0) & (added <= 2 * (len(words) - UNDO_START + self.rows))).all())
        given_up = self._give_up(envs, after - self.rows)
        return None if kind == UNDO_REBUILD else np.concatenate([places, given_up])

    def _give_up(self, envs: Ints, until: Ints) -> Ints:
        """Rows of envs below these numbers are gone. Returns the places of all rows that this may concern."""
        history = int(self.counters[HISTORY])
        concerned = [NO_ENVS]
        for env, tail in zip(envs.tolist(), until.tolist(), strict=True):
            oldest, head = int(self.oldest[env]), int(self.state[env, HEAD])
            if tail <= oldest:
                continue
            # a row at `tail` or later may need up to `history` rows before it, so it may stop being drawable, too
            numbers = np.arange(oldest, min(tail + history + 1, head), dtype=np.int64)
            index = numbers * self.num_envs + env
            before, _ = self.find(index)
            self.state[env, TAIL] = min(tail, head)  # a tail beyond the head would make rows live that do not exist
            after, _ = self.find(index)
            self.counters[DRAWABLE] -= np.count_nonzero(before >= 0) - np.count_nonzero(after >= 0)
            concerned.append(env * self.rows + numbers % self.rows)
        return np.concatenate(concerned)

    def _end_all_episodes(self) -> Ints:
        """End the episodes under way, whose process died: the envs are gone, so no step that comes goes on with one.

        Call it after :meth:`_take_back`. If a kill interrupts what follows, both are called again, up to
        :meth:`commit`. Returns the places that can be drawn only now.
        """
        assert self.undo is not None
        if self._rule.length > 1:
            self.undo.end()  # nothing is half done any more, and after a kill all windows are found again
            self.undo.begin_rebuild(self)  # of all envs, so that a kill leads back to where their episodes go on
        return self._end_episodes(np.arange(self.num_envs))

    # -- invariants ---------------------------------------------------------------------------------------------

    def check(self, *, recount: bool = True) -> None:
        """Test the invariants, and all that compiled code relies on: no row is trusted before it is tested.

        Args:
            recount: False if what can be drawn has just been counted.

        Raises:
            InvariantError: naming the first that does not hold, and where.
        """
        self.check_cursors(LARGEST_NUMBER)
        self.store.allocator.expect_scan()
        stamps = [NO_ENVS]
        for low in range(0, self.rows_live, CHECKED_AT_ONCE):
            # each piece begins with the last row of the one before, so that all neighbours are compared
            stamp = self._check_rows(*self.live_rows(max(low - 1, 0), low + CHECKED_AT_ONCE))
            stamps.append(stamp[low > 0 :])
        known = np.sort(np.concatenate(stamps))
        _require((known[1:] != known[:-1]) | (known[1:] < 0), "5: two transitions have one stamp")
        count = len(self.anchors()) if recount else self.drawable
        _require(self.drawable == count, f"6: {self.drawable} counted, {count} found")

    def check_cursors(self, most: int) -> None:
        """Test the cursors and counters, as far as they show it alone, before they are used to find rows.

        Args:
            most: the largest number that a row may have.

        Raises:
            InvariantError: names the first that does not hold.
        """
        head, tail, following, count = self.state.T
        # an index is number * N + env: below 2**62 it cannot overflow an int64
        _require(
            (tail >= 0) & (tail <= head) & (head <= min(most, 2**62 // self.num_envs)),
            "1: the cursors are not numbers of rows",
        )
        live = head > self.oldest
        _require((following >= 0) & (live | (following == 0)), "4: the next row is in no episode")
        _require((count >= 0) & (count <= head), "7: more transitions than rows")
        _require(self.completed == int(count.sum()), f"7: {self.completed} completed, {int(count.sum())} in the envs")
        _require(0 <= self.episodes <= self.completed, f"8: {self.episodes} episodes have ended")

    def _check_rows(self, env: Ints, number: Ints) -> Ints:
        """Test the invariants of some successive live rows. Returns their stamps."""
        place = env * self.rows + number % self.rows
        step, stamp, order = (x[place].astype(np.int64) for x in (self.step, self.stamp, self.order))
        complete, newest = stamp >= 0, number == self.heads[env] - 1
        passed, same_env = np.where(complete, stamp, -1 - stamp), env[1:] == env[:-1]
        begins, goes_on = step[1:] == 0, step[1:] == step[:-1] + 1
        # `order` is a count modulo 2**32: the count itself follows from that of the env, which is less than 2**32 ahead
        ahead = (self.state[env, COUNT] - order) % 2**32
        before = self.state[env, COUNT] - ahead

        def require(holds: Bools, what: str) -> None:
            # flags of pairs have an entry less, and mean nothing where the two rows are of different envs
            rows = holds if len(holds) == len(env) else np.append(holds | ~same_env, True)
            if not rows.all():
                at = int(rows.argmin())
                raise InvariantError(f"invariant {what.format(f'row {number[at]} of env {env[at]}')}")

        require(step >= 0, "4: step of {} is not one")
        require(begins | goes_on, "4: step after {} neither starts nor goes on")
        following = self.state[env, NEXT]
        require(~newest | (following == 0) | (following == step + 1), "4: what comes after {} is not its next step")
        require((passed >= 0) & (passed < self.completed + ~complete), "5: the stamp of {} was never issued")
        require(passed[1:] >= passed[:-1], "5: the stamps after {} are not in order")
        if self.own_next:
            require(complete, "5: {} has its own next_obs and is not complete")
            require(self.ordered | (step == 0), "4: {} stands alone and is in an episode")
        else:
            require(~complete[:-1] | goes_on, "5: {} is complete and has no successor")
            require(~newest | ~complete, "5: {} is the newest and complete")
            require(complete[:-1] | begins, "8: {} ends an episode that goes on")
        require((before >= 0) & (before <= number), "7: {} miscounts the transitions before it")
        require(ahead[1:] == ahead[:-1] - complete[:-1], "7: the row after {} miscounts the transitions of its env")
        require(~newest | (ahead == complete), "7: {} miscounts the transitions of its env")
        if self.notes_ends:
            self._check_ends(env, number, number - before, require)
        return stamp

    def _check_ends(self, env: Ints, number: Ints, episode: Ints, require: Callable[[Bools, str], None]) -> None:
        """Test invariant 8: what is noted as the last rows of episodes."""
        ends, noted_until = self.ends()
        last = np.append((episode[1:] != episode[:-1]) | (env[1:] != env[:-1]), False)
        last |= number == np.minimum(noted_until, self.heads)[env] - 1
        noted = ends[env * self.rows + episode % self.rows]
        right = (noted - number) % 2**32 == 0  # int32 entries hold numbers modulo 2**32
        require(~last | (number >= noted_until[env]) | right, "8: the episode of {} ends elsewhere")

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """For pickle and deepcopy: None. A copy of a sampler or view, whatever it keeps, comes without the ring."""
        return type(None), ()


def _require(holds: Bools | np.bool_ | bool, what: str) -> None:
    if not np.all(holds):
        raise InvariantError(f"invariant {what}")


def drawn_or_given(places: Ints | Draw) -> tuple[Ints, dict[str, Array]]:
    """Places, and the further fields of a batch: those of a draw, which is made now, or none."""
    if isinstance(places, Draw):
        chosen, extras = places
        return chosen, extras
    return places, {}


class Span(NamedTuple):
    """For each env e, the rows with numbers from ``first[e]`` up to, not including, ``until[e]``.

    Its rows are counted env by env in the order of time; "row k" below is the k-th in that order.
    """

    first: Ints
    """int64 ``[N]``."""
    until: Ints
    """int64 ``[N]``, at least ``first``."""

    @property
    def size(self) -> int:
        """How many rows there are, over all envs."""
        return int((self.until - self.first).sum())

    def rows(self, low: int = 0, high: int | None = None) -> tuple[Ints, Ints]:
        """The envs and numbers of all rows, or of the rows from ``low`` up to ``high``."""
        ends = np.cumsum(self.until - self.first)
        row = np.arange(low, int(ends[-1]) if high is None else min(high, int(ends[-1])))
        env = np.searchsorted(ends, row, side="right")  # "right" passes over envs without rows
        return env, row + (self.until - ends)[env]  # row ends[e] - 1 is the last of env e, with number until[e] - 1

    def places(self, per_env: int, low: int = 0, high: int | None = None) -> Ints:
        """The places of the rows that :meth:`rows` gives, in a ring of ``per_env`` rows per env."""
        ends = np.cumsum(self.until - self.first)
        high = int(ends[-1]) if high is None else min(high, int(ends[-1]))
        env = int(np.searchsorted(ends, low, side="right"))
        if low < high <= ends[env]:  # all in one env, as most often: one run of places, or two
            begin = int(low + (self.until - ends)[env]) % per_env  # as `rows` finds the number
            run = np.arange(begin, begin + high - low)
            return env * per_env + (run if run[-1] < per_env else run % per_env)
        envs, numbers = self.rows(low, high)
        return envs * per_env + numbers % per_env

    def meet(self, other: Span) -> Span:
        """The rows that both have."""
        first = np.maximum(self.first, other.first)
        return Span(first, np.maximum(np.minimum(self.until, other.until), first))  # never ends before it begins

    def where(self, part: Span) -> slice | Ints:
        """The positions of the rows of ``part`` among these rows, which have all of them: a slice, or an array."""
        if part.size == self.size:
            return slice(None)
        # the rows of env e begin after those of the envs before it
        begin = np.cumsum(self.until - self.first) - (self.until - self.first) + (part.first - self.first)
        runs: list[Ints] = [np.arange(a, a + n) for a, n in zip(begin, part.until - part.first, strict=True)]
        return np.concatenate(runs)


Weigh = Literal["windows", "steps", "episodes"]


WEIGHS: tuple[Weigh, ...] = get_args(Weigh)
"""Every way to weigh, in the order that files count them."""


class WindowRule(NamedTuple):
    """The rows that can be drawn: those that end a window of their episode, with what is read before it still there.

    The windows of an episode start at its steps 0, ``stride``, 2 ``stride``, ... and have ``length`` steps each, but
    for the last of an episode that is over, which may be shorter. Transitions are windows of one step.
    """

    history: int = 0
    """How many rows before a window's last are read, as far as its episode has them."""
    length: int = 1
    stride: int = 1
    tails: bool = True
    """True if a last window that is shorter counts."""
    weigh: Weigh = "windows"
    """The unit that a sampler draws equally often if it draws uniformly."""
    across: bool = False
    """True if the rows before are read whatever episode they are of. Only windows of one step have this rule."""

    @property
    def sparse(self) -> bool:
        """True if drawing rows until one can be drawn is not enough to draw uniformly."""
        return self.length > 1 or self.weigh == "episodes"

    @property
    def leaves_out(self) -> bool:
        """True if a complete step need not end a window: those that came cannot be told from the steps alone."""
        return self.sparse or self.across


EVERY_ROW = WindowRule()
"""The rule of single transitions. It is one object, so that readers see by identity that a ring follows it."""


def _require_rule(rule: WindowRule) -> None:
    """Refuse a rule that kernels cannot follow; the views of relive give none.

    Raises:
        ParameterError: it asks for rows that are not there, or for windows without steps.
    """
    history, length, stride, tails, weigh, across = rule
    # kernels add these to numbers of rows in int64, and files hold them as int32
    counts = all(is_count(count) and count < 2**31 for count in (history, length, stride))
    alike = is_flag(tails) and weigh in WEIGHS and is_flag(across)
    whole = not across or (history > 0 and length == 1 and weigh == "windows")
    if not (counts and 1 <= stride <= length <= history + 1 and alike and whole):
        raise ParameterError(
            f"a view's rule is {rule!r}: expected a history of at least length - 1 rows, a stride from 1 to length, "
            f"all below 2**31, tails and across True or False, and weigh one of {WEIGHS}; with across=True a history "
            "of at least 1 row, length 1 and weigh 'windows'"
        )


def _note_rule(rule: WindowRule, counters: Ints) -> None:
    """Write a rule where kernels, and files, have it: into the counters of a ring."""
    # history, length, stride and tails lie before NOT_FINITE, and `weigh` after it
    counters[RULE:NOT_FINITE], counters[WEIGH] = rule[:4], WEIGHS.index(rule.weigh)
    counters[TAILS] += ACROSS * rule.across


def _noted_rule(counters: Ints) -> WindowRule:
    """The rule that :func:`_note_rule` wrote.

    Raises:
        ParameterError: these counters hold none.
    """
    history, length, stride, word, _, weigh = counters[RULE : WEIGH + 1].tolist()
    known = cast("Any", WEIGHS[weigh]) if 0 <= weigh < len(WEIGHS) else weigh
    tails = bool(word % ACROSS) if 0 <= word < 2 * ACROSS else word
    rule = WindowRule(history, length, stride, tails, known, 0 <= word - ACROSS < ACROSS)
    _require_rule(rule)
    return EVERY_ROW if rule == EVERY_ROW else rule


# Ctrl-C comes between two lines of Python, so a compiled call is whole or never was. The note is written before
# anything changes, and repairing twice is the same as once. To undo would need the rows that were overwritten, to redo
# a copy of the images.
class Change(NamedTuple):
    """The change that a call is about to make, noted first, so that the next call can repair it after an exception."""

    cut: Ints = NO_ENVS
    """The envs whose episodes under way do not go on."""
    envs: Ints = NO_ENVS
    """The envs that get a row."""
    tails: Ints = NO_ENVS
    """The number up to which, for each of ``envs``, rows make way for it."""
    since: int = NO_STAMP
    """Transitions stamped from here on are new."""
    rule: WindowRule | None = None
    """The rule before, where that changes."""
    clears: bool = False
    rewinds: bool = False


class Ended(NamedTuple):
    """Takes the place of a change in a ring that can no longer be used: every call on a replay looks for one first."""

    reason: str
    """Who or what ended it, and what to do."""
    cut: Ints = NO_ENVS
    since: int = NO_STAMP

    def error(self) -> LifecycleError:
        """The error for every further call."""
        return LifecycleError(self.reason)


class DeviceIsNewer(NamedTuple):
    """Takes the place of a change in a ring that is out of date, since a device knows of steps that it does not."""

    bring_back: Callable[[], None]
    """Brings the ring up to date, and the sampler, and takes this away again."""
    cut: Ints = NO_ENVS
    since: int = NO_STAMP


class Adding:
    """The arrays that compiled code reads and notes when rows are added; ``core`` has them all.

    With ``cut``, ``envs``, ``tails``, ``since`` and the three that are fixed it also serves as a :class:`Change`, which
    so costs nothing to make.

    Args:
        ring: the ring that gets the rows.
        envs: int64 ``[K]``; later calls may put another array of the same length in its place.
        staged: the rows, uint8 ``[K, W]``.
        final: those of the final observations.
        size: how many events there may be.
    """

    clears = rewinds = False
    rule: WindowRule | None = None

    def __init__(self, ring: Ring, envs: Ints, staged: Array, final: Array, size: int) -> None:
        self.envs: Ints = envs
        self.cut: Ints = envs
        self.since = 0
        self._ring, fields = ring.core, ring.store.layout.arrays(staged)
        terminated, truncated = (fields[name,].view(np.uint8) for name in ("terminated", "truncated"))
        places, finals, tails, where = (np.zeros(n, np.int64) for n in (len(envs), len(envs), len(envs), size))
        self.arrays: StagedRows = StagedRows(
            envs, staged, final, fields["reward",], terminated, truncated,
            places, finals, tails, where, np.zeros(size, np.uint8),
        )  # fmt: skip
        self.tails: Ints = tails
        self.core: core.StagedRows = core.StagedRows(self.arrays)

    def take(self, envs: Ints) -> None:
        """Add to these envs from now on, as many as before."""
        self.tails.fill(0)  # they belong to other envs, and `repair` would give up rows of these
        self.envs = NO_ENVS  # while the two disagree, `repair` finds no envs
        self.core.take_envs(envs)
        self.envs = envs

    def plan(self, mode: int, undo: Undo | None = None) -> None:
        """Note where the rows will go, and up to which numbers other rows make way for them.

        Raises:
            FieldError, ParameterError: the rows are refused.
        """
        result = core.plan_rows(self._ring, self.core, mode)
        if result == USED_UP and undo is not None and undo.renew is not None and undo.renew(len(self.envs)):
            result = core.plan_rows(self._ring, self.core, mode)
        if result < 0:
            raise _refused(self.envs, result)


def _refused(envs: Ints, result: int) -> ReliveError:
    """The error for rows of ``envs`` that a kernel refused with the number ``result``."""
    if result == USED_UP:
        return ParameterError(
            f"add: {len(envs)} rows are too many for one call of a replay in files; add fewer steps at once"
        )
    # a kernel returns -1 - k for the k-th row
    return missing_final(int(envs[-1 - result]))


def missing_final(env: int) -> FieldError:
    """The error for an episode that ended without a final observation."""
    return FieldError(
        f"field 'next_obs': the episode of env {env} ended and its final observation is missing; pass next_obs "
        "(Gymnasium's final_obs where there is one), [N, ...]; it is read only where an episode ended"
    )


def piece_of(rows: int) -> int:
    """How many successive steps are stored at once in a ring of ``rows`` rows an env.

    Each takes up to two rows, and together they must not fill the ring of an env.
    """
    return max(min(rows // 2, PIECE), 1)


def undo_words(num_envs: int, rows: int) -> int:
    """How many words a ring in files has to note how to take back any of its changes."""
    return undo_size(num_envs, max(num_envs, piece_of(rows)))


class Undo:
    """The note of a change (:mod:`relive.core.words`): begun, ended, and after a kill taken back by the ring.

    The kind is written last and cleared first, so a note with a kind is whole.

    Args:
        words: the memory of the note, of a ring whose memory outlives the process.
    """

    def __init__(self, words: Ints) -> None:
        self.words = words
        self.renew: Callable[[int], bool] | None = None
        """Puts more rows in reserve before so many are added. True if it did."""
        # NumPy takes three times as long for one number
        self._first = self.words.data.cast("B").cast("q")

    @property
    def active(self) -> bool:
        """True if a change is under way."""
        return self._first[UNDO_KIND] != UNDO_NONE

    def end(self) -> None:
        """The change is done."""
        self._first[UNDO_KIND] = UNDO_NONE

    def begin_rebuild(self, ring: Ring) -> None:
        """Note that all that can be drawn is about to change. A kill on the way leads back to before this call."""
        if self.active:  # that note leads back further; besides, what can be drawn has to be found again
            self._first[UNDO_KIND] = UNDO_REBUILD
            return
        self.note_mark(ring.state, ring.counters, ring.heads, NO_ENVS, NO_ENVS.reshape(0, 3))

    def note_mark(self, state: Ints, counters: Ints, after: Ints, places: Ints, newest: Ints) -> None:
        """Note a state to go back to, as if a change had been broken off that began there.

        Args:
            state: ``[N, 4]``.
            counters: as the ring has them.
            after: ``[N]``: the number that each env's next row may have had meanwhile.
            places: ``[R]``: the places of rows to put back.
            newest: ``[R, 3]``: stamp, step and order of these rows.
        """
        words = self.words
        words[:] = 0  # first, the kind with it: a half-written note counts as none
        words[UNDO_COUNTERS:UNDO_START] = counters
        words[UNDO_ENVS], words[UNDO_ROWS] = len(state), len(places)
        entries = env_entries(words, len(state))
        entries[:, 0], entries[:, 1:UNDO_AFTER] = range(len(state)), state
        entries[:, UNDO_AFTER] = np.maximum(after, state[:, HEAD])
        rows = row_entries(words, len(state), len(places))
        rows[:, 0], rows[:, 1], rows[:, 2] = places, newest[:, 0], packed(newest[:, 1], newest[:, 2])
        words[UNDO_KIND] = UNDO_REBUILD  # last: only now is the note whole


def _require_note(holds: np.bool_ | bool) -> None:
    if not holds:
        raise InvariantError("undo: the note of what was being changed makes no sense")
