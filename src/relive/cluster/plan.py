"""How the shards of a replay divide a batch, computed from the shards' totals alone. Nothing here communicates.

A batch of B rows is drawn from K shards as from one ring that has all of their rows, shard after shard. Row i of shard
k has the priority pᵢ, the shard has the mass Mₖ = Σ pᵢ over its rows, and M = Σ Mₖ. The one ring draws B masses from
[0, M), and each mass belongs to the row whose interval it lies in. Shard k's rows have the interval [M₁ + ... + Mₖ₋₁,
M₁ + ... + Mₖ). So the shard draws exactly the masses that lie there. Their number is multinomial in the Mₖ. Every
process that knows the masses and (seed, t) computes the same plan.

Where all rows have the same chance, a shard's mass is its number of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import kernels
from ..errors import EmptyError, NotFiniteError, ParameterError, ShapeError
from ..kernels.reference.random import key
from ..parameters import COUNT_RULE, is_count, is_number, require
from ..steps.arrays import Doubles, Ints

__all__ = ["Plan", "global_weights", "plan", "shard_counts", "shard_key", "shard_masses"]

Floats = NDArray[np.float32]


class Plan(NamedTuple):
    """A batch, divided among shards. :func:`plan` makes one."""

    masses: Doubles
    """The mass of each shard, ``[K]``."""
    ends: Doubles
    """Where each shard's interval ends, ``[K]``: the running sum of ``masses``."""
    wanted: Doubles
    """The masses that one ring of all rows would draw, ``[B]``."""

    def counts(self) -> Ints:
        """How many rows each shard draws, int64 ``[K]``."""
        return np.bincount(self.ends.searchsorted(self.wanted, "right"), minlength=len(self.ends))

    def of(self, shard: int) -> Doubles:
        """Where shard number ``shard`` draws its rows: ``[count]``, each from 0 to below the shard's mass, in the order
        of the batch.

        Raises:
            ParameterError: there is no such shard.
        """
        if not (is_count(shard) and shard < len(self.ends)):
            raise ParameterError(f"shard={shard!r}: expected a whole number from 0 to {len(self.ends) - 1}")
        begin = self.ends[shard - 1] if shard else 0.0
        mine = self.wanted[(self.wanted >= begin) & (self.wanted < self.ends[shard])] - begin
        return np.minimum(mine, math.nextafter(self.masses[shard], 0.0))  # a difference may round up to the mass


def plan(masses: ArrayLike, batch_size: int, seed: int, t: int, *, stratified: bool = False) -> Plan:
    """How shards divide batch number ``t``. Arguments and errors are those of :func:`shard_counts`."""
    require("shard_counts", COUNT_RULE, batch_size=batch_size)
    if not is_count(t):
        raise ParameterError(f"t={t!r}: expected the number of the batch, a whole number of at least 0")
    given = _vector(masses)
    ends, wanted = _ends(given), np.empty(batch_size)
    total = float(ends[-1])
    kernels.fast().masses(np.uint64(key(seed, t)), stratified, total, math.nextafter(total, 0.0), wanted)
    return Plan(given, ends, wanted)


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
    return key(key(seed, t), shard)


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
    if not (is_number(least, 0) and least > 0):
        raise ParameterError(f"least={least!r}: expected a number above 0, the smallest priority of all shards")
    if not is_number(beta, 0):
        raise ParameterError(f"beta={beta!r}: expected a number of at least 0")
    with np.errstate(all="ignore"):  # as relive.kernels.reference.priorities.draw_weighted
        return ((np.asarray(priorities, np.float64) / least) ** -beta).astype(np.float32)


def _ends(given: Doubles) -> Doubles:
    """The running sum of the shards' masses, ``[K]``, added from the first to the last."""
    with np.errstate(all="ignore"):  # what is wrong is named below
        ends = given.cumsum()
    if not (given.min() >= 0.0 and ends[-1] < math.inf):  # so does a NaN, as it reaches the last sum
        wrong = int(np.argmin(np.isfinite(ends) & (given >= 0.0)))
        raise NotFiniteError(
            f"masses: shard {wrong} has {given[wrong]}; expected finite numbers of at least 0 with a finite sum"
        )
    if not ends[-1] > 0.0:
        raise EmptyError("no shard has a row to draw; add steps until a next observation is known")
    return ends


def _vector(masses: ArrayLike) -> Doubles:
    given = np.asarray(masses, np.float64)
    if given.ndim != 1 or not given.size:
        raise ShapeError(f"masses: expected one number per shard, [K], got shape {given.shape}")
    return given
