"""Fresh: draws that serve each new transition or window once, and fill the batch as another sampler draws."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from .. import core
from ..device.fresh import DeviceFresh
from ..device.ring import DeviceRing
from ..errors import LifecycleError, ParameterError
from ..ring.ring import EVERY_ROW, Ring, WindowRule
from ..steps.arrays import Ints
from .contract import Drawn, OwnSampler, State, bring_up_to_date, require_own_ring
from .prioritized import Prioritized, complete_places
from .recent import Recent, of_inner
from .uniform import Uniform, WithoutReplacement, emptied

INNER = Uniform, Prioritized, Recent, WithoutReplacement

DTYPES: dict[str, Any] = {"weight": np.float32, "probability": np.float64}
"""The further fields of a batch that inner samplers give."""


class ServedRows(NamedTuple):
    """The state that draws change. It is replaced as a whole, so an exception comes before a draw or after it."""

    next: Ints
    """For each env, the number of the row after the last one that was served, ``[N]``."""
    total: int
    """How many were served."""
    skips: int = 0
    """How often the user had skipped what was stored."""
    kinds: int = 0
    """How often the view had begun to read windows of another kind."""
    uncounted: int = 0
    """How many came besides those that were counted: draws were taken back that were made with another view."""


# Rows of an env become drawable in the order of their numbers, even the shorter window that an interruption ends. So a
# number for each env says what was served, and nothing has to be noted when steps are added but how many windows came.
class Fresh(OwnSampler):
    """Each new transition, or window, is in exactly one batch soon after it came. Others fill up the batch.

    A batch begins with those that were not served yet, the first completed first, over all envs. If there are more
    than B of them, the rest waits for the next batch. If there are fewer, ``inner`` draws the other rows, from all that
    is stored. So a transition may come again, as any other does.

    Rows that are overwritten before their turn are :attr:`lost`. What was stored before the sampler came counts as new,
    unless you call :meth:`skip`.

    In shards, every shard serves its own: the counts of a batch are exact, and the order is that of each shard. On a
    device, batches are those of a replay in RAM, if ``inner`` draws there.

    Args:
        inner: draws the other rows: :class:`Uniform` (default), :class:`Prioritized`, :class:`Recent` or
            :class:`WithoutReplacement`. Its ``weight`` and ``probability`` are 1 for those that are served as new.

    Raises:
        ParameterError: ``inner`` is another sampler.
    """

    draws_late = False

    # members of the inner sampler, without a call in between
    extras: Any = of_inner("extras")
    nbytes: Any = of_inner("nbytes")
    check: Any = of_inner("check")
    can_be_shared: Any = of_inner("can_be_shared")

    def __init__(self, inner: Uniform | Prioritized | Recent | WithoutReplacement | None = None) -> None:
        self._inner: Uniform | Prioritized | Recent | WithoutReplacement = Uniform() if inner is None else inner
        if not isinstance(cast("object", self._inner), INNER):
            raise ParameterError(
                f"Fresh: inner is Uniform(), Prioritized(), Recent() or WithoutReplacement(), got {inner!r:.200}"
            )
        self.per_row: tuple[str, ...] = tuple(f"inner.{name}" for name in self._inner.per_row)
        self._ring: Ring | None = None
        self._rule: WindowRule = EVERY_ROW
        self.noted: ServedRows = ServedRows(np.zeros(0, np.int64), 0)
        """The rows that were served, as far as RAM knows; a device may have served more."""
        self._skipped = self.noted
        """The state right after the last :meth:`skip`."""
        self._before = self.noted
        """The state before the last draw."""
        self._new_last = 0
        """How many of the last batch were new."""
        self._came = self._since = 0
        """So many became drawable; if all transitions do, so many until ``_since`` were completed, and all later ones.

        A ring notes what was completed. Of windows it does not, so they are counted as they come.
        """

    @property
    def inner(self) -> Uniform | Prioritized | Recent | WithoutReplacement:
        """The sampler for the rest of a batch; it cannot be replaced."""
        return self._inner

    @property
    def prioritized(self) -> Any:
        """The inner sampler, if it keeps TD errors."""
        return self._inner.prioritized

    @property
    def by_chance(self) -> OwnSampler:
        """The inner sampler."""
        return self._inner

    @property
    def served(self) -> int:
        """How many transitions, or windows, were served as new. Those of batches drawn ahead count."""
        bring_up_to_date(self._ring)
        return self.noted.total

    @property
    def waiting(self) -> int:
        """How many were not served yet."""
        bring_up_to_date(self._ring)
        return self._waiting()

    @property
    def lost(self) -> int:
        """How many were overwritten, or cleared, before they were served.

        If the view begins to read windows of another kind, the count begins anew.
        """
        bring_up_to_date(self._ring)
        return self._lost()

    def skip(self) -> None:
        """Count all that is stored as served. :attr:`served` and :attr:`lost` begin anew.

        For steps that are not new to the learner, as those of a file or from before training. Batches that are drawn
        ahead, by ``serve``, stay as they are; those that nobody takes count as skipped.

        Raises:
            LifecycleError: no replay has this sampler yet.
        """
        ring = self._ring
        if ring is None:
            raise LifecycleError("skip: this sampler has no replay yet; make one with it, then call skip")
        with ring.alone():
            behind, index = np.zeros(ring.num_envs, np.int64), ring.index_of(ring.anchors())
            np.maximum.at(behind, index % ring.num_envs, index // ring.num_envs + 1)
            self._came, self._since = 0, ring.completed
            self._skipped = self.noted = ServedRows(behind, 0, self.noted.skips + 1, self.noted.kinds)

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        first = self._ring is None
        self._ring = require_own_ring(self._ring, ring, self)
        self._inner.attach(ring)
        changed, self._rule = ring.rule != self._rule, ring.rule
        self.watches: bool = ring.rule.leaves_out or self._inner.watches
        if first:
            self._skipped = self.noted = ServedRows(np.zeros(ring.num_envs, np.int64), 0)
        # without a change under way, its rows are those of a file, if there are any
        if changed or ring.pending is None:
            self._came, self._since = 0, ring.completed
            self.noted = self.noted._replace(kinds=self.noted.kinds + changed, uncounted=0)
        self._count_at_least_those_that_wait()

    def changed(self, places: Ints, drawable: Any) -> None:
        """Count the windows that came."""
        if self._rule.leaves_out:
            self._came += int(np.count_nonzero(drawable))
        if self._inner.watches:
            self._inner.changed(places, drawable)

    def draw(self, count: int, key: int, update: int, of: int) -> Drawn:
        """Places of anchors ``[count]``: those that wait, then those of the inner sampler, with its fields."""
        places, taken = np.empty(count, np.int64), 0
        ring, served = self._ring, self.noted
        self._before = served
        if ring is not None:
            behind = served.next.copy()
            taken = core.take_fresh(ring.core, behind, places)
            served = served._replace(next=behind, total=served.total + taken)
        self._new_last = taken
        if not taken:
            return self._inner.draw(count, key, update, of)
        extras: Any = {name: np.empty(0, DTYPES[name]) for name in self.extras}
        if taken < count:
            try:
                places[taken:], extras = self._inner.draw(count - taken, key, update, of)
            except core.EmptyDraw as error:
                raise emptied() from error
        self.noted = served  # last: an interrupted draw must not count as one
        return places, {name: np.concatenate([np.ones(taken, x.dtype), x]) for name, x in extras.items()}

    def batch_failed(self) -> None:
        """New rows that nobody got are served again."""
        self.noted = self._before
        self._inner.batch_failed()

    def take_new(self, count: int) -> Ints:
        """See :class:`OwnSampler`."""
        places, served = np.empty(count, np.int64), self.noted
        behind = served.next.copy()
        taken = core.take_fresh(cast("Ring", self._ring).core, behind, places)
        self.noted = served._replace(next=behind, total=served.total + taken)
        return places[:taken]

    def likely(self, ring: Ring, count: int, key: int, update: int, of: int, newest: int = 0) -> Ints | None:
        """Those that wait, and those of the inner sampler, if as many new ones come as for the last batch."""
        waiting = np.empty(count, np.int64)
        waiting = waiting[: core.take_fresh(ring.core, self.noted.next.copy(), waiting)]
        rest = count - max(len(waiting), min(self._new_last, count))
        others = self._inner.likely(ring, rest, key, update, of) if rest else None
        return waiting if others is None else np.concatenate([waiting, others])

    # -- on a device ----------------------------------------------------------------------------------------------

    def bytes_on_device(self, rows: int, num_envs: int) -> int | None:
        """Bytes of the queue of new rows, and those of the inner sampler; None if that one draws in RAM alone."""
        inner = self._inner.bytes_on_device(rows, num_envs)
        return None if inner is None else inner + DeviceFresh.count_bytes(rows, num_envs)

    def on_device(self, rows: DeviceRing) -> DeviceFresh:
        """See :class:`OwnSampler`."""
        return DeviceFresh(rows, self, self._inner.on_device(rows))

    def places_waiting(self, ring: Ring) -> Ints:
        """The places of those that were not served yet, the first completed first."""
        places = np.empty(self._waiting(), np.int64)
        core.take_fresh(ring.core, self.noted.next.copy(), places)
        return places

    def note(self, behind: Ints, total: int, opened: int) -> None:
        """Note what a device has served, up to ``behind`` of each env, and how many windows have come to it."""
        self.noted = self.noted._replace(next=behind, total=total)
        if self._rule.leaves_out:
            self._came += opened

    # -- state ----------------------------------------------------------------------------------------------------

    def draw_state(self) -> tuple[ServedRows, Any]:
        """The rows that were served, and the inner sampler's state. No array is ever written to, so none is copied."""
        return self.noted, self._inner.draw_state()

    def set_draw_state(self, draw_state: tuple[ServedRows, Any]) -> None:
        """See :class:`Sampler`. What was skipped since then stays skipped."""
        served, inner = draw_state
        now = self.noted
        self._inner.set_draw_state(inner)
        if served.skips != now.skips:
            served = self._skipped
        if served.kinds != now.kinds:  # other windows wait for the same rows: none of them is lost by that
            lost = self._lost()
            self.noted = served
            came = served.total + self._waiting() + lost
            served = served._replace(kinds=now.kinds, uncounted=came - self._all_that_came())
        self.noted = served

    def take_over(self, other: OwnSampler, env: int, to: int) -> None:
        """Count as served what was served in env ``env`` of ``other``, if nothing waited in env ``to`` before."""
        super().take_over(other, env, to)
        if not isinstance(other, Fresh):
            return
        ring, source = cast("Ring", self._ring), cast("Ring", other._ring)
        here, there = complete_places(ring, to), complete_places(source, env)
        number = ring.index_of(here) // ring.num_envs
        before = number[: max(len(here) - len(there), 0)]
        if len(before) and before[-1] >= self.noted.next[to]:
            return
        wait_there = int(np.count_nonzero(source.index_of(there) // source.num_envs >= other.noted.next[env]))
        waiting, behind, count = self._waiting(), self.noted.next.copy(), min(wait_there, len(here))
        behind[to] = number[-count] if count else ring.heads[to]
        self.noted = self.noted._replace(next=behind)
        # those that were served there did not come as new
        self._came -= waiting - self._waiting() if self._rule.leaves_out else len(there) - wait_there

    def state_dict(self) -> State:
        """The rows that were served, how many came and how many wait, and the inner sampler's state."""
        inner = {f"inner.{name}": value for name, value in self._inner.state_dict().items()}
        mine = {"next": self.noted.next.copy(), "served": self.noted.total, "waiting": self._waiting()}
        completed = 0 if self._ring is None else self._ring.completed
        return {**mine, "came": self._all_that_came() + self.noted.uncounted, "completed": completed, **inner}

    def load_state_dict(self, state: State) -> None:
        """Continue with the state of another sampler."""
        ring = cast("Ring", self._ring)
        behind, served, completed = np.array(state["next"], np.int64), int(state["served"]), int(state["completed"])
        if len(behind) != ring.num_envs:  # the rows were dealt to other envs: the newest are those that wait
            behind, until = ring.heads.copy(), np.empty(ring.num_envs, np.int64)
            if state["waiting"]:
                core.window(ring.core, int(state["waiting"]), behind, until)
        # rows of files may be of before this state, and rows that come then must not count as served
        self.noted = self.noted._replace(next=np.minimum(behind, ring.heads), total=served, uncounted=0)
        self._came, self._since = int(state["came"]), min(completed, ring.completed)
        self._count_at_least_those_that_wait()
        inner = {name: value for name, value in state.items() if name.startswith("inner.")}
        if inner:  # else the inner sampler has its state in files
            self._inner.load_state_dict({name.removeprefix("inner."): value for name, value in inner.items()})

    def _waiting(self) -> int:
        return 0 if self._ring is None else core.count_fresh(self._ring.core, self.noted.next)

    def _lost(self) -> int:
        return max(self._all_that_came() + self.noted.uncounted - self.noted.total - self._waiting(), 0)

    def _all_that_came(self) -> int:
        later = 0 if self._ring is None or self._rule.leaves_out else self._ring.completed - self._since
        return self._came + later

    def _count_at_least_those_that_wait(self) -> None:
        """Count what came by calls that told nothing: they were broken off, or made a ring of rows at once."""
        missing = self.noted.total + self._waiting() - self._all_that_came() - self.noted.uncounted
        self._came += max(missing, 0)

    def __repr__(self) -> str:
        return f"Fresh({self._inner!r})"
