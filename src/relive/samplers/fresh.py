"""Fresh: draws that serve each new transition or window once, and fill the batch as another sampler draws."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from .. import core
from ..errors import LifecycleError, ParameterError
from ..ring.ring import EVERY_ROW, Ring, WindowRule
from ..steps.arrays import Ints
from .contract import Drawn, OwnSampler, State, require_own_ring
from .prioritized import Prioritized
from .recent import Recent, of_inner
from .uniform import Uniform, WithoutReplacement, emptied

INNER = Uniform, Prioritized, Recent, WithoutReplacement

DTYPES: dict[str, Any] = {"weight": np.float32, "probability": np.float64}
"""The further fields of a batch that inner samplers give."""


class Served(NamedTuple):
    """The state that draws change. It is replaced as a whole, so an exception comes before a draw or after it."""

    next: Ints
    """For each env, the number of the row after the last one that was served, ``[N]``."""
    total: int
    """How many were served."""


# Rows of an env become drawable in the order of their numbers, even the shorter window that an interruption ends. So a
# number for each env says what was served, and nothing has to be noted when steps are added but how many windows came.
class Fresh(OwnSampler):
    """Each new transition, or window, is in exactly one batch soon after it came. Others fill up the batch.

    A batch begins with those that were not served yet, the first completed first, over all envs. If there are more
    than B of them, the rest waits for the next batch. If there are fewer, ``inner`` draws the other rows, from all that
    is stored. So a transition may come again, as any other does.

    Rows that are overwritten before their turn are :attr:`lost`. What was stored before the sampler came counts as new,
    unless you call :meth:`skip`.

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
    likely: Any = of_inner("likely")
    check: Any = of_inner("check")

    def __init__(self, inner: Uniform | Prioritized | Recent | WithoutReplacement | None = None) -> None:
        self._inner: Uniform | Prioritized | Recent | WithoutReplacement = Uniform() if inner is None else inner
        if not isinstance(cast("object", self._inner), INNER):
            raise ParameterError(
                f"Fresh: inner is Uniform(), Prioritized(), Recent() or WithoutReplacement(), got {inner!r:.200}"
            )
        self.per_row: tuple[str, ...] = tuple(f"inner.{name}" for name in self._inner.per_row)
        self._ring: Ring | None = None
        self._rule: WindowRule = EVERY_ROW
        self._served = Served(np.zeros(0, np.int64), 0)
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
    def served(self) -> int:
        """How many transitions, or windows, were served as new."""
        return self._served.total

    @property
    def waiting(self) -> int:
        """How many were not served yet."""
        return 0 if self._ring is None else core.count_fresh(self._ring.core, self._served.next)

    @property
    def lost(self) -> int:
        """How many were overwritten, or cleared, before they were served.

        If the view begins to read windows of another kind, the count begins anew.
        """
        return max(self._all_that_came() - self._served.total - self.waiting, 0)

    def skip(self) -> None:
        """Count all that is stored as served. :attr:`served` and :attr:`lost` begin anew.

        For steps that are not new to the learner, as those of a file or from before training.

        Raises:
            LifecycleError: no replay has this sampler yet.
        """
        ring = self._ring
        if ring is None:
            raise LifecycleError("skip: this sampler has no replay yet; make one with it, then call skip")
        behind, index = np.zeros(ring.num_envs, np.int64), ring.index_of(ring.anchors())
        np.maximum.at(behind, index % ring.num_envs, index // ring.num_envs + 1)
        self._came, self._since, self._served = 0, ring.completed, Served(behind, 0)

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        first = self._ring is None
        self._ring = require_own_ring(self._ring, ring, self)
        self._inner.attach(ring)
        changed, self._rule = ring.rule != self._rule, ring.rule
        self.watches: bool = ring.rule.leaves_out or self._inner.watches
        if first:
            self._served = Served(np.zeros(ring.num_envs, np.int64), 0)
        # without a change under way, its rows are those of a file, if there are any
        if changed or ring.pending is None:
            self._came, self._since = 0, ring.completed
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
        ring, served = self._ring, self._served
        if ring is not None:
            behind = served.next.copy()
            taken = core.take_fresh(ring.core, behind, places)
            served = Served(behind, served.total + taken)
        if not taken:
            return self._inner.draw(count, key, update, of)
        extras: Any = {name: np.empty(0, DTYPES[name]) for name in self.extras}
        if taken < count:
            try:
                places[taken:], extras = self._inner.draw(count - taken, key, update, of)
            except core.EmptyDraw as error:
                raise emptied() from error
        self._served = served  # last: an interrupted draw must not count as one
        return places, {name: np.concatenate([np.ones(taken, x.dtype), x]) for name, x in extras.items()}

    def draw_state(self) -> tuple[Served, Any]:
        """The rows that were served, and the inner sampler's state. No array is ever written to, so none is copied."""
        return self._served, self._inner.draw_state()

    def set_draw_state(self, draw_state: tuple[Served, Any]) -> None:
        """See :class:`Sampler`."""
        self._inner.set_draw_state(draw_state[1])
        self._served = draw_state[0]

    def state_dict(self) -> State:
        """The rows that were served, how many came and how many wait, and the inner sampler's state."""
        inner = {f"inner.{name}": value for name, value in self._inner.state_dict().items()}
        mine = {"next": self._served.next.copy(), "served": self._served.total, "waiting": self.waiting}
        completed = 0 if self._ring is None else self._ring.completed
        return {**mine, "came": self._all_that_came(), "completed": completed, **inner}

    def load_state_dict(self, state: State) -> None:
        """Continue with the state of another sampler."""
        ring = cast("Ring", self._ring)
        behind, served, completed = np.array(state["next"], np.int64), int(state["served"]), int(state["completed"])
        if len(behind) != ring.num_envs:  # the rows were dealt to other envs: the newest are those that wait
            behind, until = ring.heads.copy(), np.empty(ring.num_envs, np.int64)
            if state["waiting"]:
                core.window(ring.core, int(state["waiting"]), behind, until)
        # rows of files may be of before this state, and rows that come then must not count as served
        self._served = Served(np.minimum(behind, ring.heads), served)
        self._came, self._since = int(state["came"]), min(completed, ring.completed)
        self._count_at_least_those_that_wait()
        inner = {name: value for name, value in state.items() if name.startswith("inner.")}
        if inner:  # else the inner sampler has its state in files
            self._inner.load_state_dict({name.removeprefix("inner."): value for name, value in inner.items()})

    def _all_that_came(self) -> int:
        later = 0 if self._ring is None or self._rule.leaves_out else self._ring.completed - self._since
        return self._came + later

    def _count_at_least_those_that_wait(self) -> None:
        """Count what came by calls that told nothing: they were broken off, or made a ring of rows at once."""
        missing = self._served.total + self.waiting - self._all_that_came()
        self._came += max(missing, 0)

    def __repr__(self) -> str:
        return f"Fresh({self._inner!r})"
