"""How the shards of a replay divide a batch, computed from the shards' totals alone. Nothing here communicates.

A batch of B rows is drawn from K shards as from one ring that has all of their rows, shard after shard. Row i of shard
k has the priority pᵢ, the shard has the mass Mₖ = Σ pᵢ over its rows, and M = Σ Mₖ. The one ring draws B masses from
[0, M), and each mass belongs to the row whose interval it lies in. Shard k's rows have the interval [M₁ + ... + Mₖ₋₁,
M₁ + ... + Mₖ). So the shard draws exactly the masses that lie there. Their number is multinomial in the Mₖ. Every
process that knows the masses and (seed, t) computes the same plan.

Where all rows have the same chance, a shard's mass is its number of rows. Equal numbers from each shard, with corrected
weights, would have the same expectation, but they are another batch, and have more variance.

With :class:`relive.Fresh`, new rows come first, and only what they leave of the batch is drawn so. Each shard serves
its own, all of them if the batch has room. Otherwise a shard serves B times its part of all that wait, rounded up or
down at random, so that rows of all shards wait equally long. The counts add up to B exactly.

The file reads from the whole to the part: the plan of a batch, the draws of one shard, and the division of envs and
indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import core
from ..batches import Batch, SequenceBatch
from ..errors import EmptyError, NotFiniteError, ParameterError, ShapeError
from ..parameters import COUNT_RULE, Rule, is_count, is_number, is_own, require
from ..samplers.fresh import Fresh
from ..samplers.prioritized import Prioritized
from ..samplers.uniform import Uniform
from ..samplers.uniform import masses as masses_of
from ..steps.arrays import Array, Doubles, Ints

if TYPE_CHECKING:
    from ..replay.buffer import ReplayBuffer


Floats = NDArray[np.float32]

Shardable = Uniform | Prioritized | Fresh
"""The samplers whose draws shards can divide; a Fresh with one of the others inside."""

ROUNDING = -1
"""The number of the stream that rounds counts of new rows. Those of shards count from 0."""


class BatchPlan(NamedTuple):
    """A batch, divided among shards. :func:`plan` makes one."""

    masses: Doubles
    """The mass of each shard, ``[K]``."""
    ends: Doubles
    """Where each shard's interval ends, ``[K]``: the running sum of ``masses``."""
    wanted: Doubles
    """The masses that one ring of all rows would draw: B of them, less the new rows."""
    new: Ints
    """How many new rows each shard serves, ``[K]``."""

    def counts(self) -> Ints:
        """How many rows each shard draws, int64 ``[K]``; new ones count."""
        # "right": a mass that lies on an end belongs to the shard after it, so a shard of mass 0 draws nothing
        return self.new + np.bincount(self.ends.searchsorted(self.wanted, "right"), minlength=len(self.ends))

    def of(self, shard: int) -> Doubles:
        """Where shard number ``shard`` draws its rows but new ones: ``[count]``, each from 0 to below the shard's mass,
        in the order of the batch.

        Raises:
            ParameterError: there is no such shard.
        """
        exists: Rule = lambda k: is_count(k) and k < len(self.ends), f"expected a number from 0 to {len(self.ends) - 1}"
        require("shard_masses", exists, shard=shard)
        begin = self.ends[shard - 1] if shard else 0.0
        masses = self.wanted[(self.wanted >= begin) & (self.wanted < self.ends[shard])] - begin
        return np.minimum(masses, math.nextafter(self.masses[shard], 0.0))  # a difference may round up to the mass


def plan(
    masses: ArrayLike,
    batch_size: int,
    seed: int,
    t: int,
    *,
    stratified: bool = False,
    waiting: ArrayLike | None = None,
) -> BatchPlan:
    """How shards divide batch number ``t``. Arguments and errors are those of :func:`shard_counts`.

    Args:
        masses: see there.
        batch_size: see there.
        seed: see there.
        t: see there.
        stratified: see there.
        waiting: ``[K]``, how many new rows wait in each shard; None is none.
    """
    require("shard_counts", COUNT_RULE, batch_size=batch_size)
    require("shard_counts", (is_count, "expected the number of the batch, a whole number of at least 0"), t=t)
    vector = np.asarray(masses, np.float64)
    if vector.ndim != 1 or not vector.size:
        raise ShapeError(f"masses: expected one number per shard, [K], got shape {vector.shape}")
    new = _new_counts(np.zeros(len(vector)) if waiting is None else waiting, batch_size, core.key(seed, t))
    wanted = np.empty(batch_size - int(new.sum()))
    if not len(wanted):  # then nothing is drawn by chance, whatever the masses are
        return BatchPlan(vector, vector.cumsum(), wanted, new)
    ends = _ends(vector)
    core.masses(core.key(seed, t), stratified, float(ends[-1]), wanted)
    return BatchPlan(vector, ends, wanted, new)


def shard_counts(masses: ArrayLike, batch_size: int, seed: int, t: int, *, stratified: bool = False) -> Ints:
    """How many rows of batch number ``t`` each shard draws, int64 ``[K]``; they add up to ``batch_size``.

    Args:
        masses: ``[K]``, the summed priorities of each shard, or its number of rows that can be drawn. A shard of mass 0
            draws nothing.
        batch_size: B, over all shards.
        seed: the seed of the batches, the same for all shards.
        t: the number of the batch, from 0.
        stratified: False gives a multinomial distribution. True gives that of one draw from each of B equal parts of
            the whole mass: a count is then less than 2 away from B Mₖ / M.

    Raises:
        EmptyError: all masses are 0.
        NotFiniteError: a mass, or their sum, is NaN, infinite or negative; names the shard.
        ShapeError: ``masses`` is no vector.
        ParameterError: ``batch_size`` is not positive, or ``t`` is negative.
    """
    return plan(masses, batch_size, seed, t, stratified=stratified).counts()


def shard_masses(
    masses: ArrayLike, shard: int, batch_size: int, seed: int, t: int, *, stratified: bool = False
) -> Doubles:
    """Where shard number ``shard`` draws its rows: float64 ``[count]``, in [0, its mass), in the order of the batch.

    For each number, draw the row whose interval holds the number, as :meth:`relive.samplers.sumtree.SumTree.find` does.
    Then all shards together draw the rows that one tree of all priorities would draw, except for roundings at the edges
    of intervals. ``count`` is the shard's entry of :func:`shard_counts`. Arguments and errors are those of that
    function.

    Raises:
        ParameterError: there is no such shard.
    """
    return plan(masses, batch_size, seed, t, stratified=stratified).of(shard)


def shard_key(seed: int, t: int, shard: int) -> int:
    """The stream of random numbers for a shard that draws its rows of batch ``t`` by itself.

    The draws of a shard are then independent of the counts and of the other shards.
    """
    return core.key(core.key(seed, t), shard)


def global_weights(priorities: ArrayLike, least: float, beta: float) -> Floats:
    """The importance weights, float32 ``[B]``, that one ring of all shards gives to rows of these ``priorities``.

    (N P)^-β, divided by the largest (Schaul et al. 2016, section 3.4): N and M cancel out, and (pᵢ / p_min)^-β is left.

    Args:
        priorities: ``[B]``, pᵢ = (|TD error| + eps)^α.
        least: p_min: the smallest priority among the rows that all shards drew for this batch, or among all rows of
            all shards, as :class:`relive.Prioritized` normalizes by "batch" or "buffer".
        beta: β.

    Raises:
        ParameterError: ``least`` is not above 0, or ``beta`` is negative.
    """
    positive: Rule = lambda p: is_number(p, 0) and p > 0, "expected the smallest priority of all shards, above 0"
    require("global_weights", positive, least=least)
    require("global_weights", (lambda beta: is_number(beta, 0), "expected a number of at least 0"), beta=beta)
    with np.errstate(all="ignore"):  # as Priorities::draw of compiled code
        return ((np.asarray(priorities, np.float64) / least) ** -beta).astype(np.float32)


def _new_counts(waiting: ArrayLike, batch_size: int, stream: int) -> Ints:
    """How many new rows each shard serves, int64 ``[K]``: all that wait, or ``batch_size`` of them."""
    counts = np.asarray(waiting, np.int64)
    total = int(counts.sum())
    if total <= batch_size:
        return counts
    # one shift for all shards: so each count is one of the two whole numbers beside its exact part, and that part on
    # average. Rounded down each time, a shard with few rows would never have its turn
    shift = np.empty(1)
    core.masses(core.key(stream, ROUNDING), False, float(total), shift)
    ends = [(end * batch_size + int(shift[0])) // total for end in (0, *counts.cumsum().tolist())]
    return np.diff(ends)


def _ends(masses: Doubles) -> Doubles:
    """The running sum of the shards' masses, ``[K]``, added from the first to the last."""
    with np.errstate(all="ignore"):  # what is wrong is named below
        ends = masses.cumsum()
    if not (masses.min() >= 0.0 and ends[-1] < math.inf):  # also False for a NaN, which reaches the last sum
        wrong = int(np.argmin(np.isfinite(ends) & (masses >= 0.0)))
        raise NotFiniteError(
            f"masses: shard {wrong} has {masses[wrong]}; expected finite numbers of at least 0 with a finite sum"
        )
    if not ends[-1] > 0.0:
        raise EmptyError("no shard has a row to draw; add steps until a next observation is known")
    return ends


# The draws of one shard


class Totals(NamedTuple):
    """The totals of a shard that the others need before a batch is drawn."""

    mass: float
    """The summed priorities; with :class:`relive.Uniform` the number of transitions that can be drawn."""
    least: float
    """The smallest priority if weights are normalized by the whole buffer; otherwise infinity."""
    largest: float
    """The largest TD error ever set, which new transitions get; 0 without priorities."""
    waiting: int = 0
    """With :class:`relive.Fresh`, how many rows were not served yet."""


class Share(NamedTuple):
    """The rows of a batch that one shard is to draw."""

    rows: int
    """How many rows, besides new ones."""
    stream: int
    """The stream of random numbers, for uniform draws and for views that draw goals."""
    mass: float
    """The mass of the shard when the batch was planned."""
    masses: Doubles
    """With priorities, where the rows lie in that mass: float64 ``[rows]``, from 0 to below ``mass``."""
    new: int = 0
    """How many new rows, which come first."""


class ShardDraw(NamedTuple):
    """The rows that a shard drew for one batch."""

    places: Ints
    """Where they lie, int64 ``[count]``."""
    priorities: Doubles | None
    """The priorities of all but the new ones, as parts of the mass that the batch was planned with. None where all rows
    have the same chance."""
    new: int = 0
    """So many of the rows, the first ones, are served as new."""


class ShardSampler:
    """Draws the rows of one shard for the batches that all shards draw together. The caller holds :attr:`lock`.

    Args:
        replay: the shard. Its sampler is a :class:`relive.Uniform`, a :class:`relive.Prioritized`, or a
            :class:`relive.Fresh` around one of them.

    Raises:
        ParameterError: the sampler is another one; its draws depend on the order in which all rows came.
    """

    replay: ReplayBuffer
    lock: RLock

    def __init__(self, replay: ReplayBuffer) -> None:
        inside: Any = replay
        self.replay, self.lock = replay, inside.lock
        self._ring, self._reader, self._writer = inside._ring, inside._reader, inside._writer
        self._progress, self._sampler = inside._progress, inside._sampler
        if not (is_own(self._sampler) and self._sampler.can_be_shared):
            raise ParameterError(
                f"sampler={self._sampler!r}: shards draw with Uniform() or Prioritized(...), or Fresh(...) around one "
                "of them; create the replay with one"
            )
        self._by_chance = self._sampler.by_chance
        self.prioritized: Prioritized | None = self._sampler.prioritized

    @property
    def t(self) -> int:
        """The number of the next batch."""
        return self._progress.draws - self._progress.first

    @property
    def beta(self) -> float:
        """The exponent of the weights of the next batch; 0 without priorities."""
        return 0.0 if self.prioritized is None else self.prioritized.current_beta

    @property
    def compares_in_batch(self) -> bool:
        """True if weights are divided by the largest of the batch, which is known once all shards have drawn."""
        return self.prioritized is not None and self.prioritized.normalize == "batch"

    @property
    def settings(self) -> dict[str, float]:
        """Parameters that are equal in all shards. Otherwise their priorities and weights would not fit together."""
        sampler = self.prioritized
        if sampler is None:
            return {"whether new rows come first": self._serves_new, "whether there are priorities": False}
        default = -1.0 if sampler.default_error is None else sampler.default_error
        compares = self.compares_in_batch
        flags = {"stratified": sampler.stratified, "whether weights compare with the batch": compares}
        numbers = {"alpha": sampler.alpha, "eps": sampler.eps, "beta": sampler.current_beta}
        kind = {"whether new rows come first": self._serves_new, "whether there are priorities": True}
        return {**kind, **numbers, "default_error (or -1)": default, **flags}

    @property
    def _serves_new(self) -> bool:
        return self._by_chance is not self._sampler

    def totals(self) -> Totals:
        """The totals of this shard now."""
        self._prepare()
        sampler, waiting = self.prioritized, self._sampler.waiting
        if sampler is None:
            return Totals(self._mass, math.inf, 0.0, waiting)
        least = sampler.smallest if sampler.normalize == "buffer" else math.inf
        return Totals(self._mass, least, sampler.largest_error, waiting)

    @property
    def _mass(self) -> float:
        return cast("Uniform | Prioritized", self._by_chance).mass

    def plan(self, masses: Doubles, batch_size: int, seed: int, t: int, waiting: ArrayLike | None = None) -> BatchPlan:
        """How shards with these ``masses``, ``[K]``, and ``waiting`` rows, ``[K]``, divide batch ``t``."""
        stratified = self.prioritized is not None and self.prioritized.stratified
        return plan(masses, batch_size, seed, t, stratified=stratified, waiting=waiting)

    def draw(self, planned: BatchPlan, shard: int, key: int) -> ShardDraw:
        """Draw the rows of this shard for a batch, as :meth:`draw_share`.

        Args:
            planned: the plan of the batch.
            shard: this shard's number.
            key: :func:`relive.cluster.plan.shard_key`, with which a uniform sampler draws its rows.
        """
        masses = planned.of(shard)
        return self.draw_share(Share(len(masses), key, planned.masses.item(shard), masses, planned.new.item(shard)))

    def draw_share(self, share: Share) -> ShardDraw:
        """Draw a share of a batch from the rows that are here now; none if there are no rows any more.

        New rows that were overwritten since the batch was planned are replaced by others, drawn by chance.

        Rows may have come, gone or got other priorities since the batch was planned. The masses that were planned are
        therefore stretched to the mass that is here now. The chance of a row is the product of two chances: that of the
        shard by the plan, and that of the row in the shard as it is now. So it is exact. If nothing has changed, the
        rows are those that one ring of all shards draws.
        """
        self._prepare()
        new = self._sampler.take_new(share.new) if share.new else np.empty(0, np.int64)
        now, sampler, rows = self._mass, self.prioritized, share.rows + share.new - len(new)
        places, priorities = np.empty(0, np.int64), None if sampler is None else np.empty(0)
        if rows and now > 0.0:
            with suppress(EmptyError, core.EmptyDraw):  # a signal handler may clear the replay between these lines
                if sampler is None:
                    places = self._by_chance.draw(rows, share.stream, 1, 1)[0]
                elif share.mass > 0.0:
                    masses = share.masses
                    if rows > share.rows:
                        masses = np.concatenate([masses, masses_of(rows - share.rows, share.stream, False, share.mass)])
                    # below the mass: a product that rounds up to it lies behind the last row
                    wanted = np.minimum(masses * (now / share.mass), math.nextafter(now, 0.0))
                    places, priorities = sampler.draw_at(wanted)
                    priorities = priorities * (share.mass / now)
        return ShardDraw(np.concatenate([new, places]) if len(new) else places, priorities, len(new))

    def count_batch(self, rows: int, by_chance: bool) -> None:
        """Count a batch of all shards, in which this shard drew ``rows`` rows, and go on to the next number.

        ``by_chance`` is False if the batch, over all shards, has new rows alone: beta does not move on then.
        """
        self._progress.draws += 1
        self._progress.sampled += rows
        if self.prioritized is not None and by_chance:
            self.prioritized.count_draw()

    def draw_state(self) -> Any:
        """The state that draws change, for :meth:`put_back`."""
        return self._sampler.draw_state()

    def put_back(self, draw_state: Any) -> None:
        """Serve again what was served since then: nobody got it."""
        with self.lock:
            self._prepare()
            self._sampler.set_draw_state(draw_state)

    def weights(self, drawn: ShardDraw, total: float, least: float, beta: float) -> dict[str, Array]:
        """``weight`` and, with priorities, ``probability``, as one ring of all shards gives them.

        Without priorities, and for new rows, each weight is 1.

        Args:
            drawn: the rows of this shard.
            total: the mass of all shards.
            least: the priority that gets the weight 1; see :func:`relive.cluster.plan.global_weights`.
            beta: :attr:`beta` when the batch was planned.
        """
        if drawn.priorities is None:
            return {"weight": np.ones(len(drawn.places), np.float32)}
        certain = np.ones(drawn.new)
        if not len(drawn.priorities):  # then there may be no least priority
            return {"weight": certain.astype(np.float32), "probability": certain}
        weight, probability = global_weights(drawn.priorities, least, beta), drawn.priorities / total
        if drawn.new:
            return {"weight": np.concatenate([certain.astype(np.float32), weight]),
                    "probability": np.concatenate([certain, probability])}  # fmt: skip
        return {"weight": weight, "probability": probability}

    def read(
        self, drawn: ShardDraw, key: int, rows: int | None = None, extras: Mapping[str, Array] | None = None
    ) -> Batch | SequenceBatch:
        """The rows drawn, as the replay's view reads them, filled up with others to ``rows`` rows.

        Rows that fill up have ``index`` -1, and 0 in the ``extras``. They repeat the rows drawn. If none was drawn,
        they are any rows that can be drawn, and if there are none, they are zeros.
        """
        places, count = drawn.places, len(drawn.places)
        rows = count if rows is None else rows
        if count < rows:
            others = places if count else self._ring.draw(rows, key)
            places = np.resize(others, rows) if others is not None else places
        full = {
            name: np.concatenate([values, np.zeros(len(places) - count, values.dtype)])
            for name, values in (extras or {}).items()
        }
        batch = self._reader.read(places, full, key)
        if len(places) < rows:
            batch = batch.blank(rows)
        if count < rows and "index" in batch:
            batch["index"][count:] = -1
        return batch

    def _prepare(self) -> None:
        """Mend what an interrupted call left half done, and apply the view's rule of what can be drawn."""
        if self._ring.pending is not None:
            self._writer.repair()
        self._reader.keep_rule()


# Envs and indices


BITS = 48
"""The lower bits of an index, which name a transition. The bits above, without the sign, name the life of the shard:
the row numbers of a shard that came back start again."""


LIVES = 2 ** (63 - BITS)
"""How many lives of a shard an index can name. One more would reach the sign, which marks an index of nothing."""


class ShardEntries(NamedTuple):
    """The entries of a batch, or of a vector step, that belong to one shard."""

    shard: int
    at: Ints
    """int64 ``[K]``: the places of these entries in the whole."""
    inside: Ints
    """int64 ``[K]``: the indices, or the envs, as the shard counts them."""


ENVS_RULE: Rule = (
    lambda envs: is_count(envs, 1) and envs <= 2**31 - 1,  # its products with numbers of shards fit into int64
    "expected a whole number from 1 to 2**31 - 1",
)


class Partition:
    """Shard k of K has the envs ``starts[k]`` up to ``starts[k + 1]``: as even a number as possible.

    Args:
        num_envs: N.
        shards: K, at most N, since an env has its steps in one place.
    """

    num_envs: int
    shards: int

    def __init__(self, num_envs: int, shards: int) -> None:
        require("Replay", ENVS_RULE, num_envs=num_envs)
        require("Replay", COUNT_RULE, shards=shards)
        if shards > num_envs:
            raise ParameterError(
                f"Replay(num_envs={num_envs}, shards={shards}): the steps of an env lie in one shard; use at most as "
                "many shards as there are envs"
            )
        self.num_envs, self.shards = num_envs, shards
        self.starts: Ints = np.arange(shards + 1, dtype=np.int64) * num_envs // shards

    def parts(self, capacity: int) -> list[tuple[int, int, int]]:
        """The first env of each shard, its number of envs, and its rows, if every env has equally many.

        Rows that this leaves over are not used.
        """
        rows = capacity // self.num_envs
        return [(first, end - first, (end - first) * rows) for first, end in pairwise(self.starts.tolist())]

    def by_shard(self, envs: Ints) -> list[ShardEntries]:
        """Envs, int64 ``[K]``, sorted into the entries of each shard that has some of them."""
        owner = self.starts.searchsorted(envs, "right") - 1  # "right": an env at a start belongs to that shard
        return [ShardEntries(*entries) for entries in _grouped(owner, envs - self.starts[owner])]

    def public(self, index: NDArray[np.int64], life: int) -> Ints:
        """Indices that a shard gave in one of its lives, as the learner sees them. -1, which names nothing, stays."""
        return np.where(index < 0, index, index | (life << BITS))

    def of_index(self, index: Ints) -> list[tuple[int, ShardEntries]]:
        """Public indices, int64 ``[B]``, by life and shard. ``inside`` has the indices that the shard gave.

        Raises:
            ParameterError: one is negative.
        """
        if index.size and index.min() < 0:
            bad = int(np.argmin(index))
            raise ParameterError(f"index: entry {bad}, {index[bad]}, was never issued; pass batch['index']")
        inside, life = index & ((1 << BITS) - 1), index >> BITS
        # a shard gives index * K + k, so the remainder names it
        whose = life * self.shards + inside % self.shards
        return [
            (which // self.shards, ShardEntries(which % self.shards, *entries))
            for which, *entries in _grouped(whose, inside)
        ]


def _grouped(owner: Ints, values: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """Each owner, where its entries are, and their values."""
    for one in np.unique(owner).tolist():
        at = np.flatnonzero(owner == one)
        yield one, at, values[at]
