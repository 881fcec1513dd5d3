"""Uniform and WithoutReplacement: draws that treat all transitions equally."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import core
from ..core.words import DRAWABLE
from ..device.ring import DeviceRing
from ..device.uniform import DeviceUniform
from ..errors import EmptyError, InvariantError, ParameterError
from ..memory.store import require_rows
from ..ring.ring import Opens, Ring
from ..steps.arrays import Doubles, Ints
from .contract import Drawn, Extras, OwnSampler, State, refuse_weights, require_own_ring
from .sumtree import Cover, SumTree


class Uniform(OwnSampler):
    """Draws every transition with the same probability, with replacement.

    Windows of :class:`relive.Sequence` are drawn as its ``weigh`` says.
    """

    state_in_files = can_be_shared = True

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self.windows: WindowWeights | None = None
        """The weights of sequences; None without them."""

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        self._ring = require_own_ring(self._ring, ring, self)
        self.windows = WindowWeights(ring) if ring.rule.sparse else None
        self.watches: bool = ring.rule.sparse

    def nbytes(self, rows: int) -> int:
        """Bytes of the tree of window weights; 0 without sequences."""
        return SumTree.nbytes(rows) if self.windows is not None else 0

    def bytes_on_device(self, rows: int, num_envs: int) -> int:
        """None are needed before there are sequences."""
        return 0

    def on_device(self, rows: DeviceRing) -> DeviceUniform:
        """See :class:`OwnSampler`."""
        return DeviceUniform(rows, self)

    def changed(self, places: Ints, drawable: Opens) -> None:
        """Note which sequences can be drawn."""
        if self.windows is not None:
            self.windows.changed(places, drawable)

    def draw(self, count: int, key: int, update: int, of: int, newest: int = 0) -> Drawn:
        """Places of anchors ``[count]`` among the ``newest`` completed transitions (0: among all)."""
        if self.windows is not None:
            return self.windows.draw(count, key, newest)
        if self._ring is None or not self._ring.counters.item(DRAWABLE):
            raise nothing_to_draw(self._ring)
        return core.draw_by_chance(self._ring.core, count, key, newest)

    def draw_recent(self, count: int, key: int, newest: int) -> Drawn:
        """Places of anchors ``[count]`` among the ``newest`` completed transitions (0: among all).

        A class that inherits from this one and writes this method alone draws by it always.
        """
        return Uniform.draw(self, count, key, 1, 1, newest)

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "draw_recent" in vars(cls) and "draw" not in vars(cls):
            cls.draw = _draw_by_recent

    def likely(self, ring: Ring, count: int, key: int, update: int, of: int, newest: int = 0) -> Ints | None:
        """See :class:`OwnSampler`."""
        if not ring.rule.sparse:
            return _first_tries(ring, count, key, newest)
        if newest or ring.rule.weigh == "episodes":
            return None
        return self.draw(count, key, update, of)[0]  # reads the tree of weights alone

    @property
    def mass(self) -> float:
        """The number of transitions that can be drawn, or the summed weights of sequences: a shard's share of draws."""
        if self.windows is not None:
            return self.windows.tree.total
        return float(self._ring.drawable) if self._ring is not None else 0.0

    def check(self) -> None:
        """Check the weights of sequences.

        Raises:
            InvariantError: names the first place with a wrong weight.
        """
        if self.windows is not None:
            self.windows.check()

    def __repr__(self) -> str:
        return "Uniform()"


def _draw_by_recent(self: Uniform, count: int, key: int, update: int, of: int, newest: int = 0) -> Drawn:
    return self.draw_recent(count, key, newest)


class WithoutReplacement(OwnSampler):
    """Epochs: every transition is drawn once, in random order, before any comes again.

    An epoch consists of the transitions that could be drawn when it began. Those that have left the buffer since are
    skipped, and new ones wait for the next epoch. A batch may take its rest from the next epoch.
    """

    draws_late = False

    def __init__(self) -> None:
        self._ring: Ring | None = None
        self._rest: Ints = np.empty(0, np.int64)
        """The indices still to come in this epoch."""

    def attach(self, ring: Ring) -> None:
        """See :class:`Sampler`."""
        refuse_weights(ring, self)
        self._ring = require_own_ring(self._ring, ring, self)

    def nbytes(self, rows: int) -> int:
        """Bytes of the order of an epoch, int64. A new epoch takes three times as much for a moment."""
        return 8 * rows

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Ints, Extras]:
        """Places of anchors ``[count]``, all different unless a new epoch begins among them.

        Raises:
            EmptyError: there is nothing to draw.
            ParameterError: there are fewer than ``count`` transitions.
        """
        # A signal handler may call clear() at any line, so each round of the loop looks again.
        ring = self._ring
        if ring is None or not (there := ring.drawable):
            raise nothing_to_draw(ring)
        if count > there:
            items = "transitions" if ring.rule.length == 1 else "sequences"
            raise ParameterError(f"sample({count}): there are {there} {items} to draw without replacement")
        drawn: list[Ints] = []
        missing = span = count
        rest, epoch = self._rest, 0
        while missing:
            if not len(rest):
                index = ring.index_of(ring.anchors())
                if not len(index):
                    raise emptied()
                rest, epoch = index[core.permutation(len(index), key, epoch).numpy()], epoch + 1
            places, _ = ring.find(rest[:span])
            alive = np.flatnonzero(places >= 0)[:missing]
            drawn.append(places[alive])
            missing -= len(alive)
            rest = rest[len(places) if missing else int(alive[-1]) + 1 :]
            span *= 2  # long runs of indices that left the buffer are passed quickly
        self._rest = rest  # set last: an interrupted draw must not consume indices
        return np.concatenate(drawn), {}

    def likely(self, ring: Ring, count: int, key: int, update: int, of: int, newest: int = 0) -> Ints | None:
        """See :class:`OwnSampler`."""
        number, env = np.divmod(self._rest[:count], ring.num_envs)
        return env * ring.rows + number % ring.rows

    def draw_state(self) -> Ints:
        """The indices still to come in this epoch, int64. They are never written to, so this copies nothing."""
        return self._rest

    def set_draw_state(self, draw_state: Ints) -> None:
        """See :class:`Sampler`."""
        self._rest = draw_state

    def check(self) -> None:
        """Check that the epoch consists of transitions that were stored.

        Raises:
            InvariantError: an index was never issued.
        """
        if self._ring is not None:
            _, unknown = self._ring.find(self._rest)
            if unknown >= 0:
                raise InvariantError(f"sampler: the epoch has index {self._rest[unknown]}, which was never issued")

    def state_dict(self) -> State:
        """The indices still to come in this epoch."""
        return {"order": self._rest.copy()}

    def load_state_dict(self, state: State) -> None:
        """Continue the epoch of another sampler."""
        self._rest = np.array(state["order"], np.int64)

    def __repr__(self) -> str:
        return "WithoutReplacement()"


def _first_tries(ring: Ring, count: int, key: int, newest: int) -> Ints | None:
    """The first attempt of each draw of :func:`relive.core.draw`."""
    first, until = np.empty(ring.num_envs, np.int64), np.empty(ring.num_envs, np.int64)
    total = core.window(ring.core, newest, first, until)
    if total <= 0:
        return None
    # positions among the rows of all envs, one env after another; until[e] is where the rows of env e end
    at = masses(count, key, False, float(total)).astype(np.int64)
    env: Ints = np.asarray(np.searchsorted(until, at, side="right"), np.int64)
    number = first[env] + at - np.where(env > 0, until[env - 1], 0)
    return env * ring.rows + number % ring.rows


def masses(count: int, key: int, stratified: bool, total: float) -> Doubles:
    """The numbers of a draw in [0, total), float64 ``[count]``."""
    out = np.empty(count)
    core.masses(key, stratified, total, out)
    return out


class WindowWeights:
    """A weight for every window of a ring that can be drawn, kept at its last row.

    The weight is 1, or the window's number of steps if the ring's rule weighs by steps. To weigh by episodes, only the
    newest window of an episode has weight 1, and a second draw chooses among the episode's windows.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.tree: SumTree = SumTree(ring.num_envs * ring.rows)
        anchors = ring.anchors()
        self.changed(anchors, np.ones(len(anchors), np.uint8))

    def changed(self, places: Ints, drawable: Opens) -> None:
        """Note that the windows that end at ``places`` can be drawn from now on (1) or no more (0), in order."""
        require_rows(places, core.weigh_windows(self.tree.core, self._ring.core, places, drawable), len(self.tree))

    def draw(self, count: int, key: int, newest: int = 0) -> Drawn:
        """The last rows ``[count]`` of windows drawn with replacement; with ``newest``, they end among so many.

        Raises:
            EmptyError: there is no window to draw.
        """
        ring, recent = self._ring, None
        if not ring.counters.item(DRAWABLE):
            raise nothing_to_draw(ring)
        if newest:
            recent = recent_leaves(self.tree, ring, newest)
        episodes = oldest = None
        if ring.rule.weigh == "episodes":
            episodes, oldest = ring.core, None if recent is None else ring.heads - recent.rows
        cover = (None, None) if recent is None else recent.cover
        return core.draw_by_weight(self.tree.core, count, key, *cover, episodes, oldest)

    def check(self) -> None:
        """Check that every window that can be drawn has the right weight, and no other has one.

        Raises:
            InvariantError: names the first place with a wrong weight.
        """
        every = np.arange(len(self.tree))
        require_weights(self.tree, every, WindowWeights(self._ring).tree.get(every))


# A window is cut into its largest nodes of the tree, at most 14 a level, and nothing outside is read. With 1,024 envs
# it takes 242 µs instead of 780.
def recent_leaves(tree: SumTree, ring: Ring, newest: int) -> RecentLeaves:
    """The leaves of the ``newest`` transitions; if none of them has weight, of twice as many, and so on.

    Raises:
        EmptyError: no transition has weight.
    """
    while True:
        begins, ends = ring.window_places(newest)
        cover = tree.cover(begins, ends)
        if cover.total > 0:
            return RecentLeaves(cover, begins, ends)
        if newest >= ring.transitions:
            raise nothing_to_draw(ring)
        newest *= 2


class RecentLeaves(NamedTuple):
    """The leaves of a sum tree that belong to the newest transitions."""

    cover: Cover
    begins: Ints
    ends: Ints
    """Their runs of places, two of each env, each from a begin up to, not including, its end: ``[2 N]``."""

    @property
    def rows(self) -> Ints:
        """The number of places of each env among them, ``[N]``."""
        return (self.ends - self.begins).reshape(-1, 2).sum(1)


def nothing_to_draw(ring: Ring | None) -> EmptyError:
    """The error for a draw from a ring without anchors."""
    nothing = "there is no complete transition to draw; add steps until a next observation is known"
    if ring is None:
        return EmptyError(nothing)
    rule = ring.rule
    if rule.length == 1:
        complete = sum(int((ring.stamp[ring.live_places(env)] >= 0).sum()) for env in range(ring.num_envs))
        if not complete:
            return EmptyError(nothing)
        if rule.across:
            return EmptyError(
                f"there is no chunk to draw: one has {rule.history + 1} successive rows of an env and may need the row "
                f"before them, and an env keeps its newest {ring.rows} rows; add steps, or create the buffer with more "
                "rows"
            )
        return EmptyError(
            f"none of the {complete} complete transitions here can be drawn: the view reads the {rule.history} rows "
            f"before a step, as far as its episode has them, and an env keeps its newest {ring.rows} rows; create the "
            "buffer with more rows"
        )
    shorter = " (or the shorter end of an episode)" if rule.tails else ""
    return EmptyError(
        f"there is no complete sequence of {rule.length} steps{shorter} among the {ring.transitions} transitions here; "
        f"add steps. A sequence needs the {rule.history + 1} rows up to its end, or its whole episode, among the "
        f"newest {ring.rows} rows of its env; a buffer of more rows holds more sequences"
    )


def emptied() -> EmptyError:
    """The error for a draw whose steps were there when it began."""
    return EmptyError(
        "the steps that this batch was to be drawn from were taken away while it was drawn, as by a signal handler "
        "that calls clear(); add steps, and sample again"
    )


def require_weights(tree: SumTree, places: Ints, wanted: Doubles) -> None:
    """Check that a tree is sound, that ``places`` have these weights, and that all others have none.

    Raises:
        InvariantError: names the first place with a wrong weight.
    """
    tree.check()
    expected = np.zeros(len(tree))
    expected[places] = wanted
    weights = tree.get(np.arange(len(tree)))
    wrong = ~np.isclose(weights, expected, rtol=1e-9, atol=0.0)  # powers of arrays and of numbers may round differently
    if wrong.any():
        at = int(wrong.argmax())
        raise InvariantError(f"sampler: place {at} has the weight {weights[at]}; expected {expected[at]}")
