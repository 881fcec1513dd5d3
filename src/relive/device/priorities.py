"""DevicePriorities: the TD errors of a ring's rows on a device, and the sum tree that draws by them.

They have the bits of :class:`relive.Prioritized`. Every function is as those of
:class:`relive.device.ring.DeviceRing`: fixed shapes, and no wait for the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.numbers import power
from ..core.words import LARGEST_ERROR
from .ring import Added, DeviceRing, Spots
from .tree import DeviceTree

__all__ = ["DevicePriorities"]


FLOAT64, INT64 = torch.float64, torch.int64


class Weighed(NamedTuple):
    """Rows that were drawn by priority, ``[B]`` each."""

    spots: Spots
    weight: Tensor
    """float32."""
    probability: Tensor
    """float64."""


class DevicePriorities:
    """The priorities of the rows of a ring.

    Args:
        ring: the rows.
        device: of all tensors.
    """

    def __init__(self, ring: DeviceRing, device: torch.device) -> None:
        self.ring = ring
        self.rows: int = ring.num_envs * ring.rows
        self.tree: DeviceTree = DeviceTree(self.rows, device)
        self.errors: Tensor = torch.zeros(self.rows + 2, dtype=torch.float32, device=device)
        self.newest: Tensor = torch.zeros(self.rows + 2, dtype=torch.int32, device=device)
        """Memory for :meth:`rate`: of each row, the last of its errors in one update."""
        self.alpha: Tensor = torch.zeros(1, dtype=FLOAT64, device=device)
        self.eps: Tensor = torch.zeros(1, dtype=FLOAT64, device=device)
        self.largest: Tensor = torch.zeros(1, dtype=FLOAT64, device=device)
        self.default: Tensor = torch.zeros(1, dtype=FLOAT64, device=device)
        """The error of new rows; NaN for the largest so far."""
        self.beta: Tensor = torch.zeros(3, dtype=FLOAT64, device=device)
        """The first and the last exponent of weights, and in how many draws it gets from one to the other."""
        self.draws: Tensor = torch.zeros(1, dtype=INT64, device=device)
        """Draws of this sampler."""
        self.counts: Tensor = torch.zeros(3, dtype=INT64, device=device)
        """Errors that came too late; errors that were no float32, or too large for a sum; draws while all priorities
        were 0. These count since the host read them last."""

    @staticmethod
    def count_bytes(num_rows: int) -> int:
        """The bytes of all tensors for so many rows."""
        return DeviceTree.count_bytes(num_rows) + 8 * (num_rows + 2) + 8 * 11

    @property
    def heaviest(self) -> float:
        """The largest weight that all leaves can have without an infinite sum anywhere."""
        return torch.finfo(FLOAT64).max / (2.0 * self.rows)

    # -- writing ------------------------------------------------------------------------------------------------

    def added(self, added: Added) -> None:
        """Give rows that are complete now the error of new rows, and those that were overwritten no weight."""
        # rounded to float32 before the power, as the error is stored: a save then gives the same leaf again
        error = torch.where(torch.isnan(self.default), self.largest, self.default).to(torch.float32)
        weight = power(error.to(FLOAT64) + self.eps, self.alpha)
        fresh = torch.cat([added.before, added.own])
        nowhere = self.ring.nowhere
        # a row of the step is complete at once, or waits; either way what lay there is gone
        gone = torch.cat([torch.where(added.own == nowhere, added.places, nowhere), added.finals])
        self.errors.index_put_((fresh,), error.expand(len(fresh)))
        # fresh and gone rows are never the same, so each leaf is written once
        places = torch.cat([fresh, gone])
        self.tree.put(places, torch.cat([weight.expand(len(fresh)), torch.zeros_like(gone, dtype=FLOAT64)]))

    def rate(self, index: Tensor, errors: Tensor) -> Tensor:
        """Set the errors, of either sign, of rows with these public indices; how many are gone, int64 without axes.

        Of several errors for one row the last counts. One that is no float32, or makes too large a priority, is passed
        over and counted, and so is an index that was never issued.
        """
        spots, able = self.ring.find(index)
        # a wrong error becomes NaN, and is counted instead of raised: to raise it would be to wait for the device
        sizes = errors.to(FLOAT64).abs()
        sizes = torch.where(sizes <= LARGEST_ERROR, sizes, math.nan).to(torch.float32)
        weights = power(sizes.to(FLOAT64) + self.eps, self.alpha)
        issued = (index >= 0) & (index // self.ring.num_envs < self.ring.head[index % self.ring.num_envs])
        right = issued & (weights <= self.heaviest)  # False for NaN
        late = (right & ~able).sum()  # rows that were there once, and are overwritten
        taken = right & able
        places = torch.where(taken, spots.places, self.ring.nowhere)
        # the last of several: each row notes the position of the last error that is for it
        order = torch.arange(len(index), dtype=torch.int32, device=index.device)
        self.newest.index_put_((places,), torch.full_like(order, -1))
        self.newest.scatter_reduce_(0, places, order, "amax")
        # all of them wrote -1 first, so what an earlier update left does not count
        last = taken & (self.newest[places] == order)
        places = torch.where(last, places, self.ring.nowhere)
        self.errors.index_put_((places,), sizes)
        self.tree.put(places, weights)
        self.largest.copy_(torch.maximum(self.largest, torch.where(taken, sizes, 0.0).max().to(FLOAT64)))
        self.counts[0].add_(late)
        self.counts[1].add_((~right).sum())
        return late

    # -- drawing ------------------------------------------------------------------------------------------------

    def draw(self, count: int, stream: Tensor, stratified: bool) -> Weighed:
        """Rows ``[count]`` by their priority; with ``stratified`` one from each of so many equal parts of the total."""
        places = self.tree.draw(count, stream, self.ring.golden, stratified)
        probability = self.tree.nodes[places] / self.tree.total
        first, last, until = self.beta
        # a constant beta has `until` 0, and the quotient by it is passed over
        beta = torch.where(until > 0, first + (last - first) * torch.clamp(self.draws / until, max=1.0), first)
        self.draws.add_(1)
        self.counts[2:].add_(self.tree.total <= 0.0)  # there was nothing to draw by
        # the rarest row of the batch has weight 1, and N cancels: (N P(i))^-beta / max = (P(i) / min P)^-beta
        weight = power(probability / probability.min(), -beta).to(torch.float32)
        return Weighed(self.ring.spots_of(places), weight, probability)
