"""Ring: which steps there are, where they lie, and which of them can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import numpy as np
from torch import Tensor

from .. import kernels
from ..errors import InvariantError, LifecycleError, ParameterError, SchemaError
from ..kernels.ring_state import (
    ALONE,
    COMPLETED,
    COUNT,
    DRAWABLE,
    FINALS,
    HEAD,
    LINKED,
    NEXT,
    NO_FINALS,
    TAIL,
    USED_UP,
)
from ..memory.bounded import Bounded
from ..memory.store import Apart, Plan, Store, require_rows, vector
from ..steps.arrays import Ints
from ..steps.trees import Path
from . import invariants
from .adding import NOBODY, Adding, Change, Ended, refused
from .invariants import LARGEST
from .rule import Rule, note_rule, noted_rule, require_rule
from .state import RingState
from .undo import Undo

__all__ = ["Ring"]


Events = tuple[Ints, Any]
NOTHING: Apart = []


class Ring(RingState):
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
    6. A row can be drawn iff it is live, complete, the last of a window as :class:`Rule` says, and the ``history`` rows
       before it, or as many as its episode has, are live too.
    7. ``order`` is the number of the env's transitions that were complete before a row, modulo 2**32.
    8. Every episode has exactly one row that never becomes a transition, its last. So a row's number less its
       ``order`` is the number of its episode in its env, and :meth:`ends` gives the last row of each.

    Args:
        num_envs: N.
        rows: rows per env, at least 2.
        store: where the rows lie.
        ordered: whether rows with next observations of their own come in the order of time, too. They are complete at
            once, and there are no boundary rows; otherwise each is an episode of one step.
    """

    def __init__(self, num_envs: int, rows: int, store: Store, ordered: bool = True) -> None:
        super().__init__(num_envs, rows, store, ordered)
        self._rule = Rule()
        self.undo = Undo(self.arrays.undo) if store.keeper.durable else None
        """Notes how to take back what is being changed, where the memory outlives the process; else None."""
        self.doubtful: Ints | None = NOBODY
        """Where a kill may have left a sampler's numbers wrong, when this ring was resumed: places, or None for all."""
        self.fresh = NOBODY  # places that can be drawn only now, since the kill ended their episodes
        if store.keeper.has("counters"):
            self._resume(store.keeper.died)
        else:
            note_rule(self._rule, self.counters)
        self.pending: Change | Adding | Ended | None = None
        """What is being changed; set by the ring, and None again once the sampler knows of it, too. A call that finds
        it set was preceded by one that an exception broke off: :meth:`mend` comes first then."""
        self.before_overwriting: Callable[[Ints], object] | None = None
        """Called with the envs that are about to get rows, while a save reads the rows that these may overwrite."""
        self._none: Events = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        self._addings = Bounded[tuple[int, bool, bool], Adding]()

    @property
    def transitions(self) -> int:
        """How many transitions a window of the newest can have: those that can be drawn, or all complete ones."""
        if self._rule.length == 1:
            return self.drawable
        some = self.heads > self.oldest
        places = np.arange(self.num_envs) * self.rows + self.oldest % self.rows
        ahead = (self.state[:, COUNT] - self.order[places]) % 2**32
        return int(ahead[some].sum())

    def _resume(self, died: bool) -> None:
        """Go on with what is in memory. If the process before ``died``, take back the change that it was in.

        Raises:
            InvariantError, ParameterError: it makes no sense.
        """
        if died and self.undo is not None:
            self.doubtful = self.undo.restore(self)
            self.state[self.heads <= self.oldest, NEXT] = 0  # all rows of these envs were given up
        invariants.check_cursors(self, LARGEST // 2)  # what comes next has to fit as well
        self._rule = noted_rule(self.counters)
        if died and self.undo is not None:
            self.fresh = self.undo.end_episodes(self)
            if self.doubtful is None or self._rule.length > 1:  # an end may let a shorter window be drawn
                self.doubtful = None
                self.counters[DRAWABLE] = len(self.anchors())
        if not 0 <= self.drawable <= self.rows_live:
            raise InvariantError(f"invariant 6: {self.drawable} counted, of {self.rows_live} rows")

    def settle(self) -> None:
        """A change is done, and the sampler knows of it."""
        if self.undo is not None:
            self.undo.end()
        self.pending = None

    def _follow(self, rule: Rule) -> None:
        require_rule(rule)
        if self.alone and rule.length > 1:
            raise SchemaError("sequences need steps in order that share observations; here each has its own")
        if self.undo is not None:
            self.undo.begin_rebuild(self)
        self._rule = rule
        note_rule(rule, self.counters)
        self._addings.clear()  # there may be more events now
        self.counters[DRAWABLE] = len(self.anchors())

    rule: Rule = cast("Any", property(attrgetter("_rule"), _follow))  # every batch reads it, this way without a call
    """What can be drawn; set by the view that reads it.

    Raises:
        ParameterError: it makes no sense.
        SchemaError: it asks for windows of several steps where steps have no order.
    """

    def add(
        self, envs: Ints, steps: Sequence[Any], final: Sequence[Any] | None, events: bool, cut: Ints | None = None
    ) -> Events:
        """Store one more step of each of ``envs``, in turn.

        Rows and counters change in one compiled call, which no exception can break off; large fields are written
        before it. The change can be mended until the caller has told its sampler and sets :attr:`pending` to None.

        Args:
            envs: int64 ``[K]``; no env more often than it has room.
            steps: the checked leaves ``[K, ...]`` of the store, in its order.
            final: the leaves of the final observations ``[K, ...]``, read where an episode ended. ``steps`` may have
                them again at its end; then what checked all of these leaves at once copies them at once.
            events: whether to list the rows that can be drawn from now on, and those that no longer can.
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
        if undo is not None and undo.active:  # the piece before was the sampler's last
            undo.end()
        if final is None:
            (staged, apart), ends_apart = store.stage("step", count, steps), NOTHING
            ends = staged
        else:
            (staged, apart), (ends, ends_apart) = store.stage_both(count, steps, final)
        adding = self._addings.get((count, final is None, events))
        if adding is None or adding.staged is not staged or adding.final is not ends:
            adding = self.new_adding(envs, staged, ends, events)
            self._addings.keep((count, final is None, events), adding)
        if adding.envs is not envs:
            adding.take(envs)
        if events:
            adding.since = self.counters.item(COMPLETED)
        adding.cut = envs if cut is None else cut
        mode = LINKED if self.linked else ALONE if self.alone else NO_FINALS if final is None else FINALS
        before = self.pending
        if apart:  # written first: a step that is counted is all there, and what it overwrites can be given up
            adding.plan(mode, undo)
            self.pending = adding
            store.write(apart, adding.places)
            if ends_apart:
                store.write(ends_apart, adding.finals)
        self.pending = adding
        found = kernels.fast().add_rows(self.handle, adding.handle, mode)
        if found == USED_UP and undo is not None and undo.renew is not None:
            self.pending = before  # nothing was changed, and nothing is if the disk fails
            again = undo.renew(count)
            self.pending = adding
            found = kernels.fast().add_rows(self.handle, adding.handle, mode) if again else found
        if found < 0:
            self.pending = before  # nothing was changed
            raise refused(envs, found)
        return (adding.where[:found], adding.opens[:found]) if events else self._none

    def mend(self) -> None:
        """Make rows and counters agree after a call that was broken off; the sampler has to ``attach`` afterwards.

        The rows that such a call was to overwrite are given up, even if it had not come to them. The episodes that it
        was about do not go on, since its caller cannot know whether its steps are in. A second time changes nothing.
        """
        change = self.pending
        if change is None:
            return
        if isinstance(change, Ended):
            raise change.error()
        if change.clears:
            self._forget(change.rewinds)
        np.maximum.at(self.state[:, TAIL], change.envs, change.tails[: len(change.envs)])
        self.state[change.cut, NEXT] = 0
        self.rule = change.rule or self._rule

    @property
    def unseen(self) -> int:
        """Transitions with this stamp or a later one are new to a sampler that is asked to ``attach``."""
        return self.completed if self.pending is None else self.pending.since

    def new_adding(self, envs: Ints, staged: Any, final: Any, events: bool) -> Adding:
        """What :meth:`add` needs for that many envs, until the rule changes."""
        # every row that is written closes its own history at most, and all together no more than there is
        count, most = len(envs), self.num_envs * self.rows
        size = min(count * (2 * self._rule.history + 4), most + 4 * count) if events else 0
        return Adding(self, envs, staged, final, size)

    def draw(self, count: int, key: int, newest: int = 0) -> Ints | None:
        """Places ``[count]`` of anchors, each equally often and with replacement; None if there are none.

        Args:
            count: B.
            key: the key of the stream of random numbers.
            newest: draw from this many of the newest, in the order of completion; 0 means from all.
        """
        places = np.empty(count, np.int64)
        found = kernels.fast().draw(self.handle, np.uint64(key), newest, places)
        return places if found else None

    def window_places(self, newest: int) -> tuple[Ints, Ints]:
        """Where the ``newest`` of :attr:`transitions` lie: from the first up to the second, ``[2 N]`` each."""
        first, until = np.empty(self.num_envs, np.int64), np.empty(self.num_envs, np.int64)
        kernels.fast().window(self.handle, newest, first, until)
        base = np.arange(self.num_envs) * self.rows
        begin, length = first % self.rows, self.heads - first
        seam = np.maximum(begin + length - self.rows, 0)  # what lies before the first place of the ring
        begins, ends = np.empty((2, self.num_envs, 2), np.int64)
        begins[:, 0], begins[:, 1] = base + begin, base
        ends[:, 0], ends[:, 1] = base + begin + length - seam, base + seam
        return begins.reshape(-1), ends.reshape(-1)

    def index_of(self, places: Ints) -> Any:
        """The public index ``number * N + env`` of live places ``[B]``.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows.
        """
        places = vector(places)
        index = np.empty(len(places), np.int64)
        require_rows(places, kernels.fast().ids_of(self.handle, places, index), self.store.num_rows)
        return index

    def plan(self, places: Any, n: int = 1, gamma: float = 0.99) -> Plan:
        """The n-step transitions that start at ``places`` ``[B]``, for :meth:`read`; a view may change them first.

        Args:
            places: anchors.
            n: rewards per window.
            gamma: discount per step.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows.
        """
        plan = self.store.plan(vector(places))
        bad = kernels.fast().windows(self.handle, plan.batch.handle, plan.places, n, gamma, plan.rows, plan.last)
        if bad >= 0:
            require_rows(plan.places, bad, self.store.num_rows)
        return plan

    def read(self, plan: Plan) -> dict[Path, Tensor]:
        """The fields ``[B, ...]`` of planned transitions."""
        return self.store.fields(plan)

    def take(self, places: Ints, paths: Iterable[Path] | None = None) -> dict[Path, Tensor]:
        """Fields (default: all) of the rows ``places`` ``[...]`` as they are stored; negative places give zeros.

        Raises:
            ParameterError, DTypeError: a place is beyond the last row, or they are no integers.
        """
        return self.store.read(places, paths)

    def tensors(self, *arrays: Any) -> list[Tensor]:
        """Arrays as tensors on the device of batches."""
        return self.store.tensors(*arrays)

    def frames(self, places: Any, depth: int, repeat: bool) -> Ints:
        """The places ``[B, depth]`` of the frames that end at ``places``, oldest first, none of another episode.

        Before an episode's first frame that one is repeated, or the place is -1, which reads as zeros.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows.
        """
        places = vector(places)
        frames = np.empty((len(places), depth), np.int64)
        bad = kernels.fast().stack_places(self.handle, places, depth, repeat, frames)
        if bad >= 0:
            require_rows(places, bad, self.store.num_rows)
        return frames

    def require_anchors(self, places: Any) -> Ints:
        """Places ``[B]`` that a user's sampler chose, as kernels take them.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows that can be drawn; names the first.
        """
        chosen = vector(places)
        found, unknown = self.find(self.index_of(chosen))
        known = len(chosen) if unknown < 0 else unknown
        wrong = np.flatnonzero(found[:known] != chosen[:known])
        bad = int(wrong[0]) if len(wrong) else unknown
        if bad >= 0:
            raise ParameterError(
                f"places: entry {bad} is {chosen[bad]}, a row that cannot be drawn; choose among ring.anchors()"
            )
        return chosen

    def interrupt(self, envs: Ints) -> Events:
        """The episodes under way in ``envs`` will not go on: their newest rows never become transitions.

        Returns:
            events as :meth:`add`: the transitions before those, where they end a shorter window.
        """
        self.pending = Change(envs if self.pending is None else np.append(self.pending.cut, envs))
        if self._rule.length == 1:
            self.state[envs, NEXT] = 0
            return self._none
        cut = envs[self.state[envs, NEXT] > 1]
        last = (self.heads[cut] - 2) * self.num_envs + cut
        before, _ = self.find(last)
        self.state[envs, NEXT] = 0
        after, _ = self.find(last)
        opened = after[(before < 0) & (after >= 0)]
        self.counters[DRAWABLE] += len(opened)
        return opened, np.ones(len(opened), np.uint8)

    def clear(self, rewind: bool = False) -> None:
        """No row is live any more. Numbers go on, so that an old index is never mistaken for a new one.

        With ``rewind`` the next rows of each env go to its first place again, as in a new ring: the numbers between are
        passed over, which only rows with next observations of their own allow (invariant 8).

        Raises:
            LifecycleError: rewinding rows that share observations.
        """
        if rewind and not self.alone:
            raise LifecycleError("clear(rewind=True): rows that share observations go on where they are; leave it out")
        if self.undo is not None:
            self.undo.begin_rebuild(self)
        self.pending = Change(clears=True, rewinds=rewind)
        self._forget(rewind)

    def _forget(self, rewind: bool) -> None:
        if rewind:
            self.state[:, HEAD] += -self.state[:, HEAD] % self.rows
        self.state[:, TAIL], self.state[:, NEXT] = self.state[:, HEAD], 0
        self.counters[DRAWABLE] = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and deepcopy: None. A copy of a sampler or view, whatever it keeps, comes without the ring."""
        return type(None), ()

    def check(self) -> None:
        """Test the invariants, and all that compiled code relies on: no row is trusted before it is tested.

        Raises:
            InvariantError: naming the first that does not hold, and where.
        """
        invariants.check(self)
