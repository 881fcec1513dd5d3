"""Portion: the part of one shard in the draws of all shards, however the shards communicate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..batches.sequences import SequenceBatch, padding
from ..errors import ParameterError
from ..samplers.prioritized import Prioritized
from ..samplers.uniform import Uniform
from ..steps.arrays import Doubles, Ints
from .plan import Plan, global_weights, plan

if TYPE_CHECKING:
    from ..replay.buffer import ReplayBuffer

__all__ = ["Drawn", "Portion", "Share", "Totals"]


class Totals(NamedTuple):
    """What the other shards need to know of a shard before a batch is drawn."""

    mass: float
    """The summed priorities; with :class:`relive.Uniform` the number of transitions that can be drawn."""
    least: float
    """The smallest priority if weights are normalized by the whole buffer; otherwise infinity."""
    largest: float
    """The largest TD error ever set, which new transitions get; 0 without priorities."""


class Share(NamedTuple):
    """What a shard is asked to draw of a batch."""

    rows: int
    """How many rows."""
    stream: int
    """The stream of random numbers, for uniform draws and for views that draw goals."""
    mass: float
    """The mass of the shard when the batch was planned."""
    masses: Doubles
    """With priorities, where the rows lie in that mass: float64 ``[rows]``, from 0 to below ``mass``."""


class Drawn(NamedTuple):
    """The rows that a shard drew for one batch."""

    places: Ints
    """Where they lie, int64 ``[count]``."""
    priorities: Doubles | None
    """Their priorities, ``[count]``, as parts of the mass that the batch was planned with. None where all rows have the
    same chance."""


class Portion:
    """One shard: draws its rows of the batches that all shards draw together. The caller holds :attr:`lock`.

    Args:
        replay: the shard. Its sampler is a :class:`relive.Uniform` or a :class:`relive.Prioritized`.

    Raises:
        ParameterError: the sampler is another one; its draws depend on the order in which all rows came.
    """

    def __init__(self, replay: ReplayBuffer) -> None:
        inside: Any = replay
        self.replay, self.lock = replay, inside.lock
        self._ring, self._reader, self._writer = inside._ring, inside._reader, inside._writer
        self._progress, self._sampler = inside._progress, inside._sampler
        if type(self._sampler) not in (Uniform, Prioritized):
            raise ParameterError(
                f"sampler={self._sampler!r}: shards draw with Uniform() or Prioritized(...); create the replay with one"
            )
        self.prioritized: Prioritized | None = self._sampler if isinstance(self._sampler, Prioritized) else None

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
        """Whether weights are divided by the largest of the batch, which is known once all shards have drawn."""
        return self.prioritized is not None and self.prioritized.normalize == "batch"

    @property
    def settings(self) -> dict[str, float]:
        """What must be equal in all shards. Otherwise their priorities and weights would not fit together."""
        by = self.prioritized
        if by is None:
            return {"whether there are priorities": False}
        default = -1.0 if by.default_error is None else by.default_error
        flags = {"stratified": by.stratified, "whether weights compare with the batch": by.normalize == "batch"}
        numbers = {"alpha": by.alpha, "eps": by.eps, "beta": by.current_beta, "default_error (or -1)": default}
        return {"whether there are priorities": True, **numbers, **flags}

    def totals(self) -> Totals:
        """The totals of this shard now."""
        self._prepare()
        by = self.prioritized
        if by is None:
            return Totals(self._sampler.mass, math.inf, 0.0)
        return Totals(by.mass, by.smallest if by.normalize == "buffer" else math.inf, by.largest_error)

    def plan(self, masses: Doubles, batch_size: int, seed: int, t: int) -> Plan:
        """How shards with these ``masses``, ``[K]``, divide batch ``t``."""
        stratified = self.prioritized is not None and self.prioritized.stratified
        return plan(masses, batch_size, seed, t, stratified=stratified)

    def draw(self, planned: Plan, shard: int, key: int) -> Drawn:
        """Draw the rows of this shard for a batch, as :meth:`draw_share`.

        Args:
            planned: the plan of the batch.
            shard: this shard's number.
            key: :func:`relive.cluster.plan.shard_key`, with which a uniform sampler draws its rows.
        """
        masses = planned.of(shard)
        return self.draw_share(Share(len(masses), key, planned.masses.item(shard), masses))

    def draw_share(self, share: Share) -> Drawn:
        """Draw a share of a batch from the rows that are here now; none if there are no rows any more.

        Rows may have come, gone or got other priorities since the batch was planned. The masses that were planned are
        therefore stretched to the mass that is here now. The chance of a row is the product of two chances: that of the
        shard by the plan, and that of the row in the shard as it is now. So it is exact. If nothing has changed, the
        rows are those that one ring of all shards draws.
        """
        self._prepare()
        now, by = self._sampler.mass, self.prioritized
        if not (share.rows and now > 0.0):
            return Drawn(np.empty(0, np.int64), None if by is None else np.empty(0))
        if by is None:
            return Drawn(self._sampler.draw(share.rows, share.stream, 1, 1)[0], None)
        wanted = np.minimum(share.masses * (now / share.mass), math.nextafter(now, 0.0))
        places, priorities = by.draw_at(wanted)
        return Drawn(places, priorities * (share.mass / now))

    def count_batch(self, rows: int) -> None:
        """Count a batch of all shards, in which this shard drew ``rows`` rows, and go on to the next number."""
        self._progress.draws += 1
        self._progress.sampled += rows
        if self.prioritized is not None:
            self.prioritized.count_draw()

    def weights(self, drawn: Drawn, total: float, least: float, beta: float) -> dict[str, Any]:
        """``weight`` and, with priorities, ``probability``, as one ring of all shards gives them.

        Without priorities, each weight is 1.

        Args:
            drawn: the rows of this shard.
            total: the mass of all shards.
            least: the priority that gets the weight 1; see :func:`relive.cluster.plan.global_weights`.
            beta: :attr:`beta` when the batch was planned.
        """
        if drawn.priorities is None:
            return {"weight": np.ones(len(drawn.places), np.float32)}
        if not len(drawn.places):  # then there may be no least priority
            return {"weight": np.empty(0, np.float32), "probability": np.empty(0)}
        weight = global_weights(drawn.priorities, least, beta)
        return {"weight": weight, "probability": drawn.priorities / total}

    def read(self, drawn: Drawn, key: int, rows: int | None = None, extras: dict[str, Any] | None = None) -> Any:
        """The rows drawn, as the replay's view reads them, filled up with others to ``rows`` rows.

        Rows that fill up have ``index`` -1, and 0 in the ``extras``. They repeat the rows drawn. If none was drawn,
        they are any rows that can be drawn, and if there are none, they are zeros.
        """
        count = len(drawn.places)
        rows = count if rows is None else rows
        places = drawn.places
        if count < rows:
            others = places if count else self._ring.draw(rows, key)
            places = np.resize(others, rows) if others is not None else places
        full = {name: _filled(values, len(places)) for name, values in (extras or {}).items()}
        batch = self._reader.read(places, full, key)
        if len(places) < rows:
            batch = _blank(batch, rows)
        if count < rows and "index" in batch.keys():
            batch["index"][count:] = -1
        return batch

    def _prepare(self) -> None:
        """Mend what an interrupted call left half done, and apply the view's rule of what can be drawn."""
        if self._ring.pending is not None:
            self._writer.mend()
        self._reader.keep_rule()


def _filled(values: Any, rows: int) -> Any:
    """The values ``[count]``, followed by zeros up to ``rows``."""
    return np.concatenate([values, np.zeros(rows - len(values), values.dtype)])


def _blank(batch: Any, rows: int) -> Any:
    """``rows`` rows of zeros with the fields of a batch without rows; action masks allow every action."""
    if isinstance(batch, SequenceBatch):
        return batch.blank(rows)
    blank = batch.new_zeros(rows)
    for name in blank.keys():
        if padding((name,)):
            blank[name].fill_(True)
    return blank
