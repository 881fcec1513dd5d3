"""Prioritized: transitions drawn in proportion to a power of their TD errors; and the TD errors that come back."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import core
from ..core.words import (
    ALL_RATED,
    ALPHA,
    DRAWABLE,
    DRAWS,
    EPS,
    FACTS,
    LARGEST,
    LARGEST_ERROR,
    RATED,
    RATED_LARGEST,
    RATED_START,
    UNUSUAL,
)
from ..device.priorities import DevicePriorities
from ..device.ring import DeviceRing
from ..errors import DTypeError, EmptyError, InvariantError, NotFiniteError, ParameterError, ShapeError
from ..memory.allocator import zeroed
from ..parameters import checked, is_count, is_flag, is_number
from ..ring.ring import Change, Ended, Opens, Ring
from ..steps.arrays import Array, Doubles, Ints, as_host, whole_numbers
from .contract import Drawn, OwnSampler, State, bring_up_to_date, refuse_weights, require_own_ring
from .sumtree import SumTree
from .uniform import emptied, masses, nothing_to_draw, recent_leaves, require_weights


def _is_beta(beta: float | tuple[float, ...]) -> bool:
    """True for an exponent, or a schedule (first, last, draws) for it that does not fall.

    The weights have to correct most where learning ends (Schaul et al. 2015), so beta only grows.
    """
    if not isinstance(beta, tuple):
        return is_number(beta, 0)
    if len(beta) != 3:
        return False
    first, last, draws = beta
    return is_number(first, 0) and is_number(last, 0) and first <= last and is_count(draws, 1)


@checked(
    alpha=(lambda alpha: is_number(alpha, 0), "alpha is a number of at least 0"),
    beta=(
        _is_beta,
        "beta is a number of at least 0, or a triple (first, last, draws) with first <= last and draws of at least 1, "
        "such as (0.4, 1.0, 100_000)",
    ),
    eps=(lambda eps: is_number(eps) and eps > 0, "eps is a number above 0"),
    largest_error=(lambda error: is_number(error, 0), "largest_error is a number of at least 0"),
    stratified=(is_flag, "stratified is True or False"),
    normalize=(lambda normalize: normalize in ("batch", "buffer"), "normalize is 'batch' or 'buffer'"),
    default_error=(
        lambda error: error is None or is_number(error, 0, LARGEST_ERROR),
        "default_error is a number of at least 0 that float32 can hold, or None",
    ),
    eta=(lambda eta: is_number(eta, 0, 1), "eta is a number from 0 to 1"),
)
class Prioritized(OwnSampler):
    """Prioritized experience replay (Schaul et al. 2015): P(i) = pᵢ / Σp with p = (abs(TD error) + eps)^alpha.

    A batch gets ``probability`` (float64, exact) and ``weight`` (float32) = (N · P)^-beta, divided by the largest
    weight in the batch or in the buffer. Pass the TD errors of its ``index`` to ``update_priorities``.

    Args:
        alpha: how much priorities matter; 0 is uniform.
        beta: how much the weights correct for the priorities; 1 is fully. A triple (first, last, draws) changes it
            linearly from ``first`` up to ``last`` over that many draws.
        eps: added to every TD error, so that transitions without error are drawn, too.
        stratified: draw once from each of B equal parts of the total, instead of B independent draws.
        normalize: "batch" divides weights by the largest in the batch, "buffer" by the largest of any transition.
            Inside :class:`Recent`, only transitions that it may draw count.
        default_error: the TD error of new transitions; None is the largest seen so far, 1 at first.
        eta: the error of a sequence of TD errors is eta · max + (1 - eta) · mean (Kapturowski et al. 2019).

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later.
    """

    watches = True
    state_in_files = can_be_shared = True
    per_row: tuple[str, ...] = ("errors",)
    extras: tuple[str, ...] = "weight", "probability"
    stored: StoredPriorities = cast("StoredPriorities", None)
    """The errors of all rows and the tree, as far as RAM knows; another object when they were made anew."""
    noted_largest: float = 1.0
    """The largest error as far as RAM knows, while a device may know of a larger one."""
    _binding: Binding | None = None
    _durable: DurablePriorities | None = None
    """The priorities of a replay in files; None elsewhere."""

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float | tuple[float, float, int] = 0.4,
        *,
        eps: float = 1e-6,
        stratified: bool = True,
        normalize: Literal["batch", "buffer"] = "batch",
        default_error: float | None = None,
        eta: float = 0.9,
    ) -> None:
        self._ring: Ring | None = None
        self.stored = StoredPriorities(0.0, 0.0, np.empty(0, np.float32), cast("SumTree", None))  # until attach
        self._fresh: tuple[float, float, StoredPriorities] | None = None
        """The error of new transitions, its weight, and the priorities it fits; kept, as they rarely change."""
        self.alpha = alpha
        self.eps = eps
        self.beta = beta
        self.eta = eta
        self.stratified = stratified
        self.normalize = normalize
        self.default_error = default_error
        self._draws = 0

    @property
    def alpha(self) -> float:
        """The exponent of the priorities. A change takes effect at once on all stored transitions."""
        return self.stored.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._reweigh(alpha, self.stored.eps)

    @property
    def eps(self) -> float:
        """Added to every TD error. A change takes effect at once on all stored transitions."""
        return self.stored.eps

    @eps.setter
    def eps(self, eps: float) -> None:
        self._reweigh(self.stored.alpha, eps)

    @property
    def _tree(self) -> SumTree:
        bring_up_to_date(self._ring)
        return self.stored.tree

    @property
    def _errors(self) -> NDArray[np.float32]:
        bring_up_to_date(self._ring)
        return self.stored.errors

    def _new_error(self) -> np.float32:
        return np.float32(self.noted_largest if self.default_error is None else self.default_error)

    def nbytes(self, rows: int) -> int:
        """Bytes of the errors, float32, and of the tree of priorities."""
        return 4 * rows + SumTree.nbytes(rows, self.normalize == "buffer")

    @property
    def prioritized(self) -> Prioritized:
        """This sampler: it keeps TD errors."""
        return self

    def likely(self, ring: Ring, count: int, key: int, update: int, of: int, newest: int = 0) -> Ints | None:
        """See :class:`OwnSampler`."""
        total = self.mass
        if newest or not 0 < total < math.inf:
            return None
        return self.draw_at(masses(count, key, self.stratified, total))[0]

    def bytes_on_device(self, rows: int, num_envs: int) -> int:
        """Bytes of the errors, the tree and the parameters on a device."""
        return DevicePriorities.count_bytes(rows)

    def on_device(self, rows: DeviceRing) -> DevicePriorities:
        """See :class:`OwnSampler`."""
        return DevicePriorities(rows, self)

    def attach(self, ring: Ring) -> None:
        """Give a priority to every transition that can be drawn, and to no other row."""
        refuse_weights(ring, self)
        if self._ring is None and ring.store.allocator.durable:
            durable = self._durable = DurablePriorities(ring)
            if durable.resumed:
                self._resume(ring, durable)
                return
        places, errors, durable = ring.anchors(), self._errors, self._durable
        if self._ring is None:  # new memory takes room only where it is written
            errors = zeroed(4 * ring.num_envs * ring.rows).view(np.float32) if durable is None else durable.errors
            errors[places] = self._new_error()
        elif require_own_ring(self._ring, ring, self):  # anchors that the last view could not draw are new
            new = (self._tree.get(places) == 0) | (ring.stamp[places] >= ring.unseen)
            errors[places[new]] = self._new_error()
        self._adopt(self._computed(places, errors, self.alpha, self.eps))
        self._ring = ring

    def _resume(self, ring: Ring, durable: DurablePriorities) -> None:
        """Go on with the priorities in files. Those that a kill left in doubt are computed again.

        Raises:
            NotFiniteError: an error is negative or not finite.
        """
        suspect = durable.restore(ring, self.default_error)
        self.noted_largest, self._draws = float(durable.facts[LARGEST]), int(durable.facts[DRAWS])
        alpha, eps = durable.facts[[ALPHA, EPS]].tolist()
        if suspect is not None and (alpha, eps) == (float(self.alpha), float(self.eps)):
            durable.repair(ring, suspect)
            self.stored = StoredPriorities(alpha, eps, durable.errors, durable.tree)
        else:
            places = ring.anchors()
            _require_errors(durable.errors[places])
            self._adopt(self._computed(places, durable.errors, self.alpha, self.eps))
        durable.end()  # last: after a kill before it, the next process finds the same notes and starts here again
        self._ring = ring

    def _computed(self, places: Ints, errors: NDArray[np.float32], alpha: float, eps: float) -> StoredPriorities:
        """Priorities of the rows at ``places`` from their errors, and of no others."""
        tree = SumTree(len(errors))
        tree.set([0], _powers_of(self._new_error(), alpha, eps))  # the weight of the next new transition must fit, too
        tree.set([0], 0.0)  # it was only tried: row 0 has a weight only if it is among the places
        tree.set(places, _powers_of(errors[places], alpha, eps))
        return StoredPriorities(alpha, eps, errors, tree)

    def _adopt(self, stored: StoredPriorities) -> None:
        """Use these priorities; of a replay in files, copy them there. The caller sees to it that a kill is mended."""
        durable = self._durable
        if durable is not None:
            if stored.errors is not durable.errors:
                durable.errors[:] = stored.errors
            durable.tree.become(stored.tree)
            durable.facts[[ALPHA, EPS, LARGEST, DRAWS]] = stored.alpha, stored.eps, self.noted_largest, self._draws
            stored = stored._replace(errors=durable.errors, tree=durable.tree)
        self.stored = stored

    def _reweigh(self, alpha: float, eps: float) -> None:
        """Recompute all weights, or change nothing if one would be too large."""
        if self._ring is None:
            self.stored = self.stored._replace(alpha=alpha, eps=eps)
            return
        bring_up_to_date(self._ring)
        try:
            stored = self._computed(self._ring.anchors(), self._errors, alpha, eps)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"Prioritized(alpha={alpha!r}, eps={eps!r}): (|TD error| + eps)^alpha of a stored error would be "
                "too large for a sum; choose a smaller alpha or eps"
            ) from error
        with _rebuilding(self._ring):
            self._adopt(stored)

    def changed(self, places: Ints, drawable: Opens) -> None:
        """Give new transitions the default error, and rows that can no longer be drawn no weight."""
        error = self.noted_largest if self.default_error is None else self.default_error
        bound, fresh = self._bound(), self._fresh
        if fresh is None or fresh[0] != error or fresh[2] is not bound.stored:
            weight = float(self._weights(self._new_error())[0])
            fresh = self._fresh = float(error), weight, bound.stored
        bound.core.note_drawable(places, drawable, fresh[0], fresh[1])

    def draw(self, count: int, key: int, update: int, of: int, newest: int = 0) -> Drawn:
        """Places of anchors ``[count]`` among the ``newest`` completed transitions (0: among all).

        They come with ``probability`` and ``weight``.
        """
        ring, bound = self._ring, self._binding
        if ring is None or not ring.counters.item(DRAWABLE):
            raise nothing_to_draw(ring)
        if bound is None or bound.stored is not self.stored:
            bound = self._bound()
        if newest:
            tree = self._tree
            recent = recent_leaves(tree, ring, newest)
            total, cover, runs = recent.cover.total, recent.cover, (recent.begins, recent.ends)
        else:
            tree, total, cover, runs = bound.stored.tree, bound.total.item(), (None, None), ()
        lowest = 0.0 if self.normalize == "batch" else self._lowest(tree, *runs)  # 0: that of the batch
        if not total > 0:
            raise self._without_mass()
        beta, draws = self.beta, self._draws
        if type(beta) is not float:
            beta = self.beta_at(draws)
        drawn = core.draw_by_priority(bound.core, count, key, self.stratified, beta, lowest, *cover)
        if self._durable is None:
            object.__setattr__(self, "_draws", draws + 1)  # other assignments are checked, which takes longer
        else:
            self.set_draw_state(draws + 1)
        return drawn

    def draw_recent(self, count: int, key: int, newest: int) -> Drawn:
        """As :meth:`draw`, whatever a class that inherits from this one draws."""
        return Prioritized.draw(self, count, key, 1, 1, newest)

    def _lowest(self, tree: SumTree, *runs: Ints) -> float:
        try:
            return tree.minimum_positive(*runs)
        except EmptyError:
            raise self._without_mass() from None

    def _without_mass(self) -> EmptyError:
        if self._ring is None or not self._ring.drawable:  # there was something when the draw began
            return emptied()
        return EmptyError("the priorities of all transitions are 0; choose a larger eps, or a smaller alpha")

    def count_draw(self) -> None:
        """Count a draw, which moves a scheduled beta on."""
        self.set_draw_state(self._draws + 1)

    def draw_state(self) -> int:
        """The number of draws, for a schedule of beta."""
        return self._draws

    def set_draw_state(self, draw_state: int) -> None:
        """See :class:`Sampler`."""
        object.__setattr__(self, "_draws", draw_state)
        if self._durable is not None:
            self._durable.facts[DRAWS] = draw_state

    def beta_at(self, draws: int) -> float:
        """The exponent of the weights after so many draws."""
        if not isinstance(self.beta, tuple):
            return float(self.beta)
        first, last, until = self.beta
        return float(first + (last - first) * min(draws / until, 1.0))

    @property
    def current_beta(self) -> float:
        """The exponent of the next draw's weights.

        Inside :class:`Fresh` on a device, it is that of the last call that waited for the device.
        """
        return self.beta_at(self._draws)

    def rate(self, index: object, td_error: object, mask: object, time_first: bool | None) -> int:
        """Set the TD errors of the transitions ``index``; returns how many of them were overwritten meanwhile.

        Plain tensors and arrays in RAM are checked and read by one compiled call, which gives up where anything is
        wrong. Then, and for all else, :meth:`_rate_checked` takes longer, and says what is wrong.

        Args:
            index: int64 ``[B]``.
            td_error: ``[B]``, or the errors of sequences.
            mask: True for the errors of sequences that count; None for errors ``[B]``.
            time_first: True if time is the first axis of errors of sequences; None if batches are of transitions.
        """
        late, bound = UNUSUAL, self._binding
        if bound is None or bound.stored is not self.stored:
            bound = self._bound()
        if mask is None or time_first is not None:
            late = bound.core.rate(index, td_error, mask, bool(time_first), self.eta)
        if late == UNUSUAL:
            late = self._rate_checked(index, td_error, mask, time_first)
            bound = self._bound()
        largest = bound.facts.item(LARGEST)
        if largest != self.noted_largest:  # every assignment is checked, which takes longer than this
            self.noted_largest = largest
        return late

    def _rate_checked(self, index: object, td_error: object, mask: object, time_first: bool | None) -> int:
        """Set the errors after checks that raise an error for what is wrong."""
        if hasattr(index, "keys"):
            raise ParameterError(f"index: expected integers [B], got a {type(index).__name__}; pass batch['index']")
        where = whole_numbers(index, "index")
        real = None if mask is None else as_host(mask, "mask")
        errors, real = errors_by_item(time_first, where, doubles(td_error), real)
        require_float32(errors)
        # the tree of now: while arguments were converted, another thread may have set alpha, which makes a new tree
        late = self._bound().core.rate(where, errors, real, False, self.eta)
        if late == UNUSUAL:
            self._places_of(where)  # raises an error for an index that was never issued
            raise NotFiniteError(
                f"td_error: (|TD error| + eps)^alpha of the error {np.abs(errors).max():.3g} would be too large for a "
                f"sum with alpha={self.alpha!r}; check the loss, or choose a smaller alpha"
            )
        return late

    def _places_of(self, index: Ints) -> Ints:
        """The places of these indices, -1 for those that can no longer be drawn.

        Raises:
            ParameterError: one was never issued.
        """
        places, unknown = self._own_ring().find(index)
        if unknown >= 0:
            raise ParameterError(f"index: entry {unknown}, {index[unknown]}, was never issued; pass batch['index']")
        return places

    def priorities_of(self, index: Ints) -> Doubles:
        """The priority p of the transitions ``index`` ``[B]``; 0 for those that can no longer be drawn.

        Raises:
            ParameterError: an index was never issued.
        """
        places = self._places_of(index)
        p = self._tree.get(np.maximum(places, 0))  # place 0 stands in for those that are gone
        p[places < 0] = 0.0
        return p

    def priorities(self) -> Doubles:
        """The weight p of every transition that can be drawn."""
        return self._tree.get(self._ring.anchors()) if self._ring is not None else np.empty(0)

    def positive(self) -> Doubles:
        """The weights p above 0, in the order of memory; all others are 0, those of rows that cannot be drawn too."""
        weights = self._tree.weights
        return weights[weights > 0]

    def take_over_errors(self, other: Prioritized, env: int, to: int) -> None:
        """Give the newest transitions of env ``to`` the TD errors of their originals, in env ``env`` of ``other``."""
        here, there = complete_places(self._ring, to), complete_places(other._ring, env)
        count = min(len(here), len(there))
        here, there = here[len(here) - count :], there[len(there) - count :]
        both = (self._tree.get(here) > 0) & (other._tree.get(there) > 0)
        index = self._own_ring().index_of(here[both])
        self.rate(index, other._errors[there[both]], None, None)
        self.largest_error = other.largest_error

    def _own_ring(self) -> Ring:
        assert self._ring is not None  # a replay attaches its sampler before all else
        return self._ring

    def _bound(self) -> Binding:
        """The memory of the priorities; bound again if an array was replaced."""
        bound, stored = self._binding, self.stored
        if bound is None or bound.stored is not stored:
            bound = self._binding = Binding(stored, self._own_ring(), self.noted_largest, self._durable)
        return bound

    @property
    def mass(self) -> float:
        """The sum of all priorities: a shard's share of the draws of all shards."""
        return self._tree.total

    @property
    def smallest(self) -> float:
        """The smallest priority of a transition that can be drawn; infinity if there is none."""
        return self._tree.minimum_positive() if self._tree.total > 0 else math.inf

    @property
    def largest_error(self) -> float:
        """The largest TD error known, which new transitions get unless ``default_error`` is given. It only grows."""
        bring_up_to_date(self._ring)
        return self.noted_largest

    @largest_error.setter
    def largest_error(self, error: float) -> None:
        if error > self.noted_largest:
            _require_usable(self._own_ring())
            self.noted_largest = self._bound().facts[LARGEST] = float(error)

    def draw_at(self, masses: Doubles) -> tuple[Ints, Doubles]:
        """The transitions that own ``masses`` (float64 ``[B]``, in [0, :attr:`mass`)): their places and priorities.

        It is no draw of the schedule of beta; :meth:`count_draw` counts one.
        """
        places = self._tree.find(masses)
        return places, self._tree.get(places)

    def check(self) -> None:
        """Check that each transition that can be drawn has the priority of its error, and no other row has one.

        Raises:
            InvariantError: names the first place with a wrong priority.
        """
        if self._ring is not None:
            places = self._ring.anchors()
            require_weights(self._tree, places, self._weights(self._errors[places]))

    def state_dict(self) -> State:
        """The errors of all rows, the largest error seen, and the number of draws for a schedule of beta."""
        return {"errors": self._errors.copy(), "largest": self.noted_largest, "draws": self._draws}

    def load_state_dict(self, state: State) -> None:
        """Continue with the state of another sampler.

        Raises:
            ShapeError: the number of errors is not the number of rows.
            NotFiniteError: an error is NaN, infinite or negative.
        """
        saved = np.asarray(state["errors"], np.float32)
        if saved.shape != self._errors.shape:
            raise ShapeError(f"errors: expected {self._errors.shape}, one per row, got {saved.shape}")
        ring = self._own_ring()
        places, errors = ring.places(), zeroed(saved.nbytes).view(np.float32)
        errors[places] = live = saved[places]  # only live rows: a full copy would take memory for all rows
        _require_errors(live)
        stored = self._computed(ring.anchors(), errors, self.alpha, self.eps)
        with _rebuilding(ring):
            self.noted_largest, self._draws = float(state["largest"]), int(state["draws"])
            self._adopt(stored)

    def _weights(self, errors: ArrayLike) -> Doubles:
        return _powers_of(errors, self.alpha, self.eps)

    def __repr__(self) -> str:
        return (
            f"Prioritized({self.alpha}, {self.beta}, eps={self.eps}, stratified={self.stratified}, "
            f"normalize={self.normalize!r}, default_error={self.default_error}, eta={self.eta})"
        )


def _powers_of(errors: ArrayLike, alpha: float, eps: float) -> Doubles:
    """(error + eps)^alpha ``[B]`` of float32 errors ``[B]``, or of one; the tree refuses infinite ones."""
    sizes = np.atleast_1d(np.asarray(errors, np.float32))
    out = np.empty(len(sizes))
    core.powers(sizes, alpha, eps, out)
    return out


def complete_places(ring: Ring | None, env: int) -> Ints:
    """The places of an env's complete transitions, in the order of time."""
    assert ring is not None
    places = ring.live_places(env)
    return places[ring.stamp[places] >= 0]


class StoredPriorities(NamedTuple):
    """The parts of the priorities that must agree, so that one assignment changes them all."""

    alpha: float
    eps: float
    errors: NDArray[np.float32]
    """The TD error of each row; meaningless for rows that cannot be drawn."""
    tree: SumTree
    """(error + eps)^alpha of each row that can be drawn, 0 for the others."""


class Binding:
    """The memory of the priorities, as compiled code takes it; for as long as it consists of the same arrays."""

    def __init__(self, stored: StoredPriorities, ring: Ring, largest: float, durable: DurablePriorities | None) -> None:
        self.stored = stored
        self.total: Doubles = stored.tree.whole.until
        self.facts: Doubles = np.empty(FACTS) if durable is None else durable.facts
        undo = np.empty(0) if durable is None else durable.undo
        self.facts[[ALPHA, EPS, LARGEST]] = stored.alpha, stored.eps, largest
        self.core: core.Priorities = core.Priorities(stored.tree.core, stored.errors, self.facts, ring.core, undo)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """For pickle and deepcopy: None. A copy of a sampler has arrays at other addresses."""
        return type(None), ()


MOST = 2**16
"""The most errors of one update whose old values are noted before they change."""


class DurablePriorities:
    """The errors, the tree and the facts of a ring whose memory outlives the process.

    Args:
        ring: the ring.
    """

    def __init__(self, ring: Ring) -> None:
        allocator, rows = ring.store.allocator, ring.store.num_rows
        self.resumed: bool = allocator.has("nodes")
        """True if an earlier process left them."""
        self.errors: NDArray[np.float32] = allocator.take("errors", (rows,), np.float32)
        self.tree: SumTree = SumTree(rows, allocator.take("nodes", (SumTree.count_nodes(rows),), np.float64))
        self.facts: Doubles = allocator.take("facts", (FACTS,), np.float64)
        self.undo: Doubles = allocator.take("errors.undo", (RATED_START + 2 * min(rows, MOST),), np.float64)

    def restore(self, ring: Ring, default_error: float | None) -> Ints | None:
        """Put back the errors of an update that a kill broke off. If a kill interrupts this call, call it again.

        Transitions that can be drawn for the first time get the error of new ones: ``default_error``, or if it is None
        the largest so far.

        Returns:
            the places whose weights are in doubt, those that the ring doubts included; None if any weight may be wrong.

        Raises:
            InvariantError: the facts or the notes make no sense.
        """
        facts, undo, count = self.facts, self.undo, float(self.undo[RATED])
        most = (len(undo) - RATED_START) // 2
        if count != ALL_RATED and not (0 <= count <= most and count == int(count)):
            raise InvariantError(f"sampler: {count} errors to put back; expected 0 to {most}")
        places = np.zeros(0, np.int64)
        if count > 0:
            pairs = undo[RATED_START : RATED_START + 2 * int(count)].reshape(-1, 2)
            if not ((pairs[:, 0] >= 0) & (pairs[:, 0] < ring.store.num_rows) & (pairs[:, 1] <= LARGEST_ERROR)).all():
                raise InvariantError("sampler: an error to put back is that of no row")
            places = pairs[:, 0].astype(np.int64)
            self.errors[places], facts[LARGEST] = pairs[:, 1], undo[RATED_LARGEST]
        counts = 0 <= facts[DRAWS] < 2**53 and facts[DRAWS] == int(facts[DRAWS])
        if not (counts and 0 <= facts[LARGEST] <= LARGEST_ERROR and facts[ALPHA] >= 0 and facts[EPS] > 0):
            raise InvariantError(f"sampler: {facts.tolist()} are not an exponent, an eps, an error and a count")
        self.errors[ring.newly_drawable] = facts[LARGEST] if default_error is None else default_error
        if count == ALL_RATED or ring.suspect is None:
            return None
        return np.unique(np.concatenate([places, ring.suspect]))

    def repair(self, ring: Ring, suspect: Ints) -> None:
        """Compute the weights at ``suspect`` places, and all sums above them, again from the errors.

        Raises:
            NotFiniteError: an error is negative or not finite.
        """
        index, weights = ring.index_of(suspect), np.zeros(len(suspect))
        written = np.flatnonzero(index >= 0)
        drawable = written[ring.find(index[written])[0] >= 0]
        errors = self.errors[suspect[drawable]]
        _require_errors(errors)
        weights[drawable] = _powers_of(errors, *self.facts[[ALPHA, EPS]].tolist())
        self.tree.put(suspect, weights)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """For pickle and deepcopy: None. A copy of a sampler starts in memory of its own."""
        return type(None), ()

    def end(self) -> None:
        """Forget the notes, once the weights that :meth:`restore` doubted are right again."""
        self.undo[RATED] = 0.0


def _require_errors(errors: NDArray[np.float32]) -> None:
    """Require errors as priorities are made of.

    Raises:
        NotFiniteError: one is NaN, infinite or negative.
    """
    if not (np.isfinite(errors).all() and (errors >= 0).all()):
        raise NotFiniteError("errors: a TD error in the saved state is negative or not finite")


def _require_usable(ring: Ring) -> None:
    """Refuse to change priorities in files that this process does not hold. Calls of the replay check this themselves.

    Raises:
        LifecycleError: the ring was closed, or belongs to the parent of this process.
    """
    if isinstance(ring.pending, Ended):
        raise ring.pending.error()


@contextmanager
def _rebuilding(ring: Ring) -> Generator[None]:
    """In this context all priorities of a ring are replaced. After a kill or an exception they are computed again.

    Raises:
        LifecycleError: the ring was closed, or belongs to the parent of this process.
    """
    if ring.undo is None:
        yield
        return
    _require_usable(ring)
    ring.undo.begin_rebuild(ring)
    ring.pending = Change()
    yield
    ring.commit()


# The mean is summed from left to right, since NumPy's order depends on the layout in memory.
def errors_by_item(
    time_first: bool | None, index: Ints, errors: Doubles, mask: Array | None
) -> tuple[Doubles, Array | None]:
    """TD errors and their mask, item by item. Errors of transitions are ``[B]`` and have no mask. Errors of sequences
    and their mask become ``[B, T]``, with 0 for errors that do not count.

    Raises:
        ShapeError: the errors do not fit the items ``index`` as the view reads them.
        ParameterError: errors of sequences come without their mask.
    """
    count = index.size
    if errors.ndim != 2 or time_first is None:
        if index.ndim != 1 or errors.shape != index.shape:
            message = f"update_priorities: expected an index [B] and errors [B], got {index.shape}, {errors.shape}"
            if index.ndim == 1 and errors.ndim == 2:
                message += (
                    "; a target [B] minus a value [B, 1] is [B, B]: take value.squeeze(-1). "
                    "Errors of two axes belong to a view that reads sequences, such as Sequence"
                )
            raise ShapeError(message)
        if mask is not None:
            raise ShapeError(
                f"mask: errors [B] have none, got {mask.dtype} {mask.shape}; leave out the errors that do not count"
            )
        return errors, None
    axes = "[T, B]" if time_first else "[B, T]"
    if index.ndim != 1 or errors.shape[1 if time_first else 0] != count:
        raise ShapeError(
            f"td_error: expected {axes} of {count} sequences, as the view has time "
            f"{'first' if time_first else 'second'}, got {errors.shape}"
        )
    if mask is None:
        raise ParameterError("mask: errors of sequences need one, for the steps that count; pass mask=seq['mask']")
    if mask.shape != errors.shape or mask.dtype != np.bool_:
        raise ShapeError(f"mask: expected bool {errors.shape} for errors {axes}, got {mask.dtype} {mask.shape}")
    errors = np.where(mask, errors, 0.0)  # a network's output for padding may be NaN
    return (errors.T, mask.T) if time_first else (errors, mask)


def doubles(numbers: object, name: str = "td_error") -> Doubles:
    """Numbers, one for each row of a batch, of any real dtype and on any device, as float64.

    Raises:
        DTypeError: they are not real numbers.
        ShapeError: a list with rows of different lengths.
    """
    array = as_host(numbers, name)
    if array.size and array.dtype.kind not in "fiub":
        raise DTypeError(f"{name}: expected real numbers, got {array.dtype}; pass one float for each row of the batch")
    return np.asarray(array if array.size else np.zeros(array.shape), np.float64)


def require_float32(errors: Doubles) -> None:
    """Require TD errors that float32 can hold, item by item: float64 ``[B]`` or ``[B, L]``.

    Raises:
        NotFiniteError: one is NaN, infinite, or too large. Names the first item with such an error.
    """
    bad = np.flatnonzero(~(np.abs(errors) <= LARGEST_ERROR))
    if len(bad):
        entry = int(bad[0]) // errors[0].size
        raise NotFiniteError(f"td_error: entry {entry} is {errors[entry]}, not a finite float32; fix the loss")
