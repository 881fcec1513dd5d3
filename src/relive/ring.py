"""Ring: which steps there are, where they lie, and which of them can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .errors import FieldError, InvariantError, SchemaError, ShapeError
from .parameters import is_count, is_flag
from .store import Apart, Store, require_rows, vector

__all__ = ["RULE", "Change", "Ring", "Rule", "Weigh", "missing_final"]

Ints = NDArray[np.int64]
Events = tuple[Ints, Any]
Weigh = Literal["windows", "steps", "episodes"]
HEAD, TAIL, NEXT, COUNT = 0, 1, 2, 3
COMPLETED, DRAWABLE, EPISODES, RULE, NOT_FINITE = 0, 1, 2, 3, 7
ALONE, LINKED = 2, 3
NOTHING: Apart = []
NOBODY: Ints = np.zeros(0, np.int64)
ADDINGS = 64
"""Numbers of envs for which arrays are kept ready."""


class Rule(NamedTuple):
    """What can be drawn: the rows that end a window of their episode, with what is read before it still there.

    The windows of an episode start at its steps 0, ``stride``, 2 ``stride``, ... and have ``length`` steps each, but
    for the last of an episode that is over, which may be shorter. Transitions are windows of one step.
    """

    history: int = 0
    """How many rows before a window's last are read, as far as its episode has them."""
    length: int = 1
    stride: int = 1
    tails: bool = True
    """Whether a last window that is shorter counts."""
    weigh: Weigh = "windows"
    """What is drawn equally often by a sampler that draws uniformly."""

    @property
    def sparse(self) -> bool:
        """Whether it takes more to draw uniformly than to draw rows until one can be drawn."""
        return self.length > 1 or self.weigh == "episodes"


class Change(NamedTuple):
    """What a call is about to change, noted before it does, so that the next call can mend what was broken off."""

    cut: Ints = NOBODY
    """The envs whose episodes under way do not go on."""
    envs: Ints = NOBODY
    """The envs that get a row."""
    tails: Ints = NOBODY
    """The number up to which, for each of ``envs``, rows make way for it."""
    since: int = 2**63 - 1
    """Transitions stamped from here on are new."""
    rule: Rule | None = None
    """What could be drawn before, where that changes."""
    clears: bool = False


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
    6. A row can be drawn iff it is live, complete, the last of a window as :class:`Rule` says, and the ``history`` rows
       before it, or as many as its episode has, are live too.
    7. ``order`` is the number of the env's transitions that were complete before a row, modulo 2**32.
    8. Every episode has exactly one row that never becomes a transition, its last. So a row's number less its
       ``order`` is the number of its episode in its env, and :meth:`ends` tells the last row of each.

    Args:
        num_envs: N.
        rows: rows per env, at least 2.
        store: where the rows lie.
        ordered: whether rows with next observations of their own come in the order of time, too. They are complete at
            once, and there are no boundary rows; otherwise each is an episode of one step.
    """

    def __init__(self, num_envs: int, rows: int, store: Store, ordered: bool = True) -> None:
        if num_envs < 1 or rows < 2:
            raise SchemaError(f"a ring needs at least 1 env and 2 rows per env, got {num_envs} and {rows}")
        self.num_envs, self.rows, self.store = num_envs, rows, store
        self.state: Ints = np.zeros((num_envs, 4), np.int64)
        self.counters: Ints = np.zeros(8, np.int64)
        self.step, self.stamp, self.order = store.meta("_step"), store.meta("_stamp"), store.meta("_order")
        self.alone = any(path[0] == "next_obs" for path in store.leaves)
        """Whether each row is complete with a next observation of its own."""
        self.linked = self.alone and ordered
        """Whether such rows go on from one another."""
        self._rule = Rule()
        self.counters[RULE:NOT_FINITE] = self._rule[:4]
        self.pending: Change | _Adding | None = None
        """What is being changed; set by the ring, and None again once the sampler knows of it, too. A call that finds
        it set was preceded by one that an exception broke off: :meth:`mend` comes first then."""
        self._ends: tuple[Any, Ints] | None = None
        self._none: Events = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        self._addings: dict[tuple[int, bool, bool], _Adding] = {}

    @property
    def drawable(self) -> int:
        """How many anchors there are: rows that can be drawn."""
        return int(self.counters[DRAWABLE])

    @property
    def transitions(self) -> int:
        """How many transitions a window of the newest can have: those that can be drawn, or all complete ones."""
        if self._rule.length == 1:
            return self.drawable
        some = self.heads > self.oldest
        places = np.arange(self.num_envs) * self.rows + self.oldest % self.rows
        ahead = (self.state[:, COUNT] - self.order[places]) % 2**32
        return int(ahead[some].sum())

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
        """How many rewards were NaN or infinite, of all that were ever added."""
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
    def rule(self) -> Rule:
        """What can be drawn; set by the view that reads it.

        Raises:
            SchemaError: it makes no sense, or windows of more than one step, where steps have no order.
        """
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        _require_rule(rule)
        if self.alone and rule.length > 1:
            raise SchemaError("sequences need steps in order that share observations; here each has its own")
        self._rule = rule
        self.counters[RULE:NOT_FINITE] = rule[:4]
        self._addings.clear()  # there may be more events now
        self.counters[DRAWABLE] = len(self.anchors())

    def add(
        self, envs: Ints, steps: Sequence[Any], final: Sequence[Any] | None, events: bool, cut: Ints | None = None
    ) -> Events:
        """Store one more step of each of ``envs``, in turn.

        Rows and counters change in one compiled call, which no exception comes between; large fields are written
        before. From then on until the caller, who has a sampler to tell, sets :attr:`pending` to None, this can be
        mended.

        Args:
            envs: int64 ``[K]``; no env more often than it has room.
            steps: the checked leaves ``[K, ...]`` of the store, in its order.
            final: the leaves of the final observations ``[K, ...]``, read where an episode ended.
            events: whether to tell which rows can be drawn from now on or no more.
            cut: the envs whose episodes do not go on if this is broken off; default ``envs``.

        Returns:
            the places of the events, in order, with 1 where a row can be drawn now, 0 where it no longer can.

        Raises:
            FieldError: an episode ended and ``final`` is None. Nothing is stored.
        """
        count, store = len(envs), self.store
        staged, apart = store.stage("step", count, steps)
        ends, ends_apart = (staged, NOTHING) if final is None else store.stage("final", count, final)
        adding = self._addings.get((count, final is None, events))
        if adding is None or adding.staged is not staged or adding.final is not ends:
            adding = self._adding(envs, staged, ends, events)
        if adding.envs is not envs:
            adding.tails.fill(0)  # which were of others
            adding.envs = NOBODY  # until the address is of the same
            adding.bound[0] = envs.__array_interface__["data"][0]
            adding.envs = envs
        if events:
            adding.since = self.counters.item(COMPLETED)
        adding.cut = envs if cut is None else cut
        mode = LINKED if self.linked else ALONE if self.alone else int(final is not None)
        before = self.pending
        if apart:  # written first: a step that is counted is all there, and what it overwrites can be given up
            self._plan(adding, mode)
            self.pending = adding
            store.write(apart, adding.places)
            if ends_apart:
                store.write(ends_apart, adding.finals)
        self.pending = adding
        found = kernels.fast().add_bound(adding.bound, mode)
        if found < 0:
            self.pending = before  # nothing was changed
            raise missing_final(int(envs[-1 - found]))
        return (adding.where[:found], adding.opens[:found]) if events else self._none

    def _plan(self, adding: _Adding, mode: int) -> None:
        """Note where the rows will go, and up to which numbers others make way for them.

        Raises:
            FieldError: a final observation is missing.
        """
        found = kernels.fast().plan_bound(adding.bound, mode)
        if found < 0:
            raise missing_final(int(adding.envs[-1 - found]))

    def mend(self) -> None:
        """Make rows and counters agree after a call that was broken off; the sampler has to ``attach`` afterwards.

        What such a call was to overwrite is given up, whether it was or not, and the episodes it was about do not go
        on: whoever made it cannot know whether its steps are in. Doing so twice is doing it once.
        """
        change = self.pending
        if change is None:
            return
        if change.clears:
            self._forget()
        np.maximum.at(self.state[:, TAIL], change.envs, change.tails[: len(change.envs)])
        self.state[change.cut, NEXT] = 0
        self.rule = change.rule or self._rule

    @property
    def unseen(self) -> int:
        """Transitions with this stamp or a later one are new to a sampler that is asked to ``attach``."""
        return self.completed if self.pending is None else self.pending.since

    def _adding(self, envs: Ints, staged: Any, final: Any, events: bool) -> _Adding:
        """What :meth:`add` needs for as many envs; used again by the next such add."""
        # every row that is written closes its own history at most, and all together no more than there is
        count, most = len(envs), self.num_envs * self.rows
        size = min(count * (2 * self._rule.history + 4), most + 4 * count) if events else 0
        if len(self._addings) >= ADDINGS:
            self._addings.clear()
        adding = self._addings[count, final is staged, events] = _Adding(self, envs, staged, final, size)
        return adding

    def draw(self, count: int, key: int, newest: int = 0) -> Ints | None:
        """Places ``[count]`` of anchors, each equally often and with replacement; None if there are none.

        Args:
            count: B.
            key: of the stream of random numbers.
            newest: draw from this many of the newest, in the order of completion; 0 means from all.
        """
        places = np.empty(count, np.int64)
        found = kernels.fast().draw(
            np.uint64(key), self.rows, newest, self.state, self.counters, self.step, self.stamp,
            self.order, self.store.target, places,
        )  # fmt: skip
        return places if found else None

    def window_places(self, newest: int) -> tuple[Ints, Ints]:
        """Where the ``newest`` of :attr:`transitions` lie: from the one up to the other, ``[2 N]`` each."""
        first, until = np.empty(self.num_envs, np.int64), np.empty(self.num_envs, np.int64)
        kernels.fast().window(
            self.rows, newest, self.state, self.counters, self.step, self.stamp, self.order, first, until
        )
        base = np.arange(self.num_envs) * self.rows
        begin, length = first % self.rows, self.heads - first
        seam = np.maximum(begin + length - self.rows, 0)  # what lies before the first place of the ring
        begins, ends = np.stack([base + begin, base], 1), np.stack([base + begin + length - seam, base + seam], 1)
        return begins.reshape(-1), ends.reshape(-1)

    def anchors(self) -> Ints:
        """The places of all rows that can be drawn, env by env in the order of time."""
        out = np.empty(int((self.heads - self.oldest).sum()), np.int64)
        found = kernels.fast().anchors(self.rows, self.state, self.counters, self.step, self.stamp, out)
        return out[:found]

    def ends(self) -> tuple[Any, Ints]:
        """The last row of each episode, and what is noted so far, for :func:`relive.kernels.reference.choose_goals`.

        The number of the last row of episode k of env e, modulo 2**32, is entry ``e * rows + k % rows`` of the first,
        int32 ``[N * rows]``, if that row was in the env up to the number that the second, ``[N]``, tells. The kernel
        notes what has come since: a ring that nobody asks for ends has none of this.
        """
        if self._ends is None:
            self._ends = np.zeros(self.num_envs * self.rows, np.int32), np.zeros(self.num_envs, np.int64)
        return self._ends

    def live_places(self, env: int) -> Ints:
        """The places of an env's live rows, in the order of time."""
        numbers = np.arange(int(self.oldest[env]), int(self.heads[env]), dtype=np.int64)
        return env * self.rows + numbers % self.rows

    def index_of(self, places: Ints, out: Any = None) -> Any:
        """The public index ``number * N + env`` of live places ``[B]``.

        Raises:
            ShapeError, DTypeError: they are no places of rows.
        """
        places = vector(places)
        index = np.empty(len(places), np.int64) if out is None else out
        require_rows(places, kernels.fast().ids_of(places, self.rows, self.state, index), self.store.num_rows)
        return index

    def find(self, index: Ints) -> tuple[Ints, int]:
        """Places of public indices, -1 for those that can no longer be drawn; and the first never issued, or -1."""
        index = vector(index)
        places = np.empty(len(index), np.int64)
        bad = kernels.fast().live(index, self.rows, self.state, self.counters, self.step, self.stamp, places)
        return places, int(bad)

    def require_anchors(self, places: Any) -> Ints:
        """Places ``[B]`` that somebody else chose, as kernels take them.

        Raises:
            ShapeError, DTypeError: they are not places of rows that can be drawn; names the first.
        """
        chosen = vector(places)
        found, unknown = self.find(self.index_of(chosen))
        known = len(chosen) if unknown < 0 else unknown
        wrong = np.flatnonzero(found[:known] != chosen[:known])
        bad = int(wrong[0]) if len(wrong) else unknown
        if bad >= 0:
            raise ShapeError(
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

    def clear(self) -> None:
        """No row is live any more. Numbers go on, so that an old index is never mistaken for a new one."""
        self.pending = Change(clears=True)
        self._forget()

    def _forget(self) -> None:
        self.state[:, TAIL], self.state[:, NEXT] = self.state[:, HEAD], 0
        self.counters[DRAWABLE] = 0

    def check(self) -> None:
        """Test the invariants.

        Raises:
            InvariantError: naming the first that does not hold, and where.
        """
        stamps: list[int] = []
        for env in range(self.num_envs):
            numbers: Ints = np.arange(int(self.oldest[env]), int(self.heads[env]))
            places: Ints = env * self.rows + numbers % self.rows
            step, stamp = self.step[places], self.stamp[places]
            if self.alone:
                _require(self.linked or not step.any(), f"4: a row of env {env} that stands alone is in an episode")
                _require(bool((stamp >= 0).all()), f"5: a row of env {env} with its own next_obs is not complete")
            goes_on = step[1:] == step[:-1] + 1
            _require(bool(((step[1:] == 0) | goes_on).all()), f"4: step of env {env} neither starts nor goes on")
            complete = stamp[:-1] >= 0
            if not self.alone:
                _require(bool((goes_on | ~complete).all()), f"5: a complete row of env {env} has no successor")
                _require(not len(stamp) or stamp[-1] < 0, f"5: the newest row of env {env} is complete")
            order = np.where(stamp >= 0, stamp, -1 - stamp)
            _require(bool((np.diff(order) >= 0).all()), f"5: the stamps of env {env} are not in order")
            stamps += stamp[stamp >= 0].tolist()
            if len(stamp):
                passed = np.concatenate([[0], np.cumsum(stamp >= 0)])
                ahead = self.state[env, COUNT] - (passed[-1] - passed[:-1]) - self.order[places]
                _require(bool((ahead % 2**32 == 0).all()), f"7: the rows of env {env} miscount its transitions")
            if not self.alone:
                self._check_ends(env, numbers, places)
        _require(len(set(stamps)) == len(stamps), "5: two transitions have one stamp")
        _require(not stamps or max(stamps) < self.completed, "5: a stamp was never issued")
        _require(self.drawable == len(self.anchors()), f"6: {self.drawable} counted, {len(self.anchors())} found")

    def _check_ends(self, env: int, numbers: Ints, places: Ints) -> None:
        """Invariant 8, of the rows of one env."""
        complete = self.state[env, COUNT] - (self.state[env, COUNT] - self.order[places]) % 2**32
        episode = numbers - complete
        begins = self.step[places[1:]] == 0
        _require(bool((np.diff(episode) == begins).all()), f"8: the rows of env {env} miscount its episodes")
        if self._ends is None:
            return
        ends, seen = self._ends
        known = numbers < seen[env]
        numbers, episode = numbers[known], episode[known]
        told = ends[env * self.rows + episode % self.rows]
        last = np.append(episode[1:] != episode[:-1], True)[: len(numbers)]
        right = (told[last] - numbers[last]) % 2**32 == 0
        _require(bool(right.all()), f"8: an episode of env {env} ends elsewhere")


class _Adding:
    """What a kernel reads and notes when rows are added, and ``bound``, all of that by its addresses.

    Args:
        ring: in which they go.
        envs: int64 ``[K]``; others later, as many.
        staged: the rows, uint8 ``[K, W]``.
        final: those of the final observations.
        size: how many events there may be.
    """

    __slots__ = ("bound", "cut", "envs", "final", "finals", "opens", "places", "since", "staged", "tails", "where")
    rule, clears = None, False
    """With ``cut``, ``envs``, ``tails`` and ``since`` it is a :class:`Change`, too, which so costs nothing to make."""

    def __init__(self, ring: Ring, envs: Ints, staged: Any, final: Any, size: int) -> None:
        self.envs, self.staged, self.final = envs, staged, final
        count, self.cut, self.since = len(envs), envs, 0
        self.places, self.finals, self.tails, self.where = (np.zeros(n, np.int64) for n in (count, count, count, size))
        self.opens, store = np.zeros(size, np.uint8), ring.store
        self.bound: Ints = kernels.fast().bind_add(
            envs, staged, final, store.flags, store.sizes, store.target, ring.rows, ring.state, ring.counters,
            ring.step, ring.stamp, ring.order, self.places, self.finals, self.where, self.opens, self.tails,
        )  # fmt: skip


def _require_rule(rule: Rule) -> None:
    """Refuse what no view of relive's own asks for, and kernels cannot do.

    Raises:
        SchemaError: rows that are not there, or windows that have no steps.
    """
    history, length, stride, tails, weigh = rule
    counts = all(is_count(count) and count < 2**31 for count in (history, length, stride))
    if not (counts and 1 <= stride <= length <= history + 1 and is_flag(tails) and weigh in get_args(Weigh)):
        raise SchemaError(
            f"a view's rule is {rule!r}: expected a history of at least length - 1 rows, a stride from 1 to length, "
            f"all below 2**31, tails True or False, and weigh one of {get_args(Weigh)}"
        )


def missing_final(env: int) -> FieldError:
    """The error for an episode that ended nobody knows where."""
    return FieldError(
        f"field 'next_obs': the episode of env {env} ended and its final observation is missing; pass next_obs "
        "(Gymnasium's final_obs where there is one), [N, ...]; it is read only where an episode ended"
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(f"invariant {what}")
