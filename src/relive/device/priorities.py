"""DevicePriorities: the TD errors of a ring's rows on a device, and the sum tree that draws by them.

They have the bits of :class:`relive.Prioritized`. Every function is as those of
:class:`relive.device.ring.DeviceRing`: fixed shapes, and no wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..core.numbers import power
from ..core.words import LARGEST_ERROR
from ..ring.ring import Ring
from ..steps.arrays import Array
from ..steps.schema import Path
from .contract import DeviceSampler, Kind, SamplerReport
from .ring import AddPlan, DeviceRing, Spots
from .tree import DeviceTree

FLOAT64, INT64 = torch.float64, torch.int64


class DevicePriorities(DeviceSampler):
    """The priorities of the rows of a ring, and draws by them."""

    def __init__(self, rows: DeviceRing, sampler: Any) -> None:
        super().__init__(rows, sampler)
        device = rows.envs.device
        self.num_rows: int = rows.num_envs * rows.rows
        self.tree: DeviceTree = DeviceTree(self.num_rows, device)
        self.errors: Tensor = torch.zeros(self.num_rows + 2, dtype=torch.float32, device=device)
        self.newest: Tensor = torch.zeros(self.num_rows + 2, dtype=torch.int32, device=device)
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
        self._sent: tuple[object, object, float, int] | None = None
        """The sampler's parameters that the device has."""
        self._counts_here = True
        """True if the host counts the draws, as the device does."""

    @staticmethod
    def count_bytes(num_rows: int) -> int:
        """The bytes of all tensors for so many rows."""
        return DeviceTree.count_bytes(num_rows) + 8 * (num_rows + 2) + 8 * 11

    @property
    def heaviest(self) -> float:
        """The largest weight that all leaves can have without an infinite sum anywhere."""
        return torch.finfo(FLOAT64).max / (2.0 * self.num_rows)

    # -- writing ------------------------------------------------------------------------------------------------

    def added(self, added: AddPlan) -> None:
        """Give rows that are complete now the error of new rows, and those that were overwritten no weight."""
        # rounded to float32 before the power, as the error is stored: a save then gives the same leaf again
        error = torch.where(torch.isnan(self.default), self.largest, self.default).to(torch.float32)
        weight = power(error.to(FLOAT64) + self.eps, self.alpha)
        fresh = torch.cat([added.before, added.completed_now])
        dummy_row = self.rows.dummy_row
        # a row of the step is complete at once, or waits; either way what lay there is gone
        gone = torch.cat([torch.where(added.completed_now == dummy_row, added.places, dummy_row), added.finals])
        self.errors.index_put_((fresh,), error.expand(len(fresh)))
        # fresh and gone rows are never the same, so each leaf is written once
        places = torch.cat([fresh, gone])
        self.tree.put(places, torch.cat([weight.expand(len(fresh)), torch.zeros_like(gone, dtype=FLOAT64)]))

    @property
    def set_errors(self) -> Callable[[Tensor, Tensor], Tensor]:
        """:meth:`rate`."""
        return self.rate

    def rate(self, index: Tensor, errors: Tensor) -> Tensor:
        """Set the errors, of either sign, of rows with these public indices; how many are gone, int64 without axes.

        Of several errors for one row the last counts. One that is no float32, or makes too large a priority, is passed
        over and counted, and so is an index that was never issued.
        """
        spots, able = self.rows.find(index)
        # a wrong error becomes NaN, and is counted instead of raised: to raise it would be to wait for the device
        sizes = errors.to(FLOAT64).abs()
        sizes = torch.where(sizes <= LARGEST_ERROR, sizes, math.nan).to(torch.float32)
        weights = power(sizes.to(FLOAT64) + self.eps, self.alpha)
        issued = (index >= 0) & (index // self.rows.num_envs < self.rows.head[index % self.rows.num_envs])
        right = issued & (weights <= self.heaviest)  # False for NaN
        late = (right & ~able).sum()  # rows that were there once, and are overwritten
        accepted = right & able
        places = torch.where(accepted, spots.places, self.rows.dummy_row)
        # the last of several: each row notes the position of the last error that is for it
        order = torch.arange(len(index), dtype=torch.int32, device=index.device)
        self.newest.index_put_((places,), torch.full_like(order, -1))
        self.newest.scatter_reduce_(0, places, order, "amax")
        # all of them wrote -1 first, so what an earlier update left does not count
        last = accepted & (self.newest[places] == order)
        places = torch.where(last, places, self.rows.dummy_row)
        self.errors.index_put_((places,), sizes)
        self.tree.put(places, weights)
        self.largest.copy_(torch.maximum(self.largest, torch.where(accepted, sizes, 0.0).max().to(FLOAT64)))
        self.counts[0].add_(late)
        self.counts[1].add_((~right).sum())
        return late

    # -- drawing ------------------------------------------------------------------------------------------------

    def draw(self, count: int, stream: Tensor, wanted: Tensor | None = None) -> tuple[Spots, dict[Path, Tensor]]:
        """Rows ``[count]`` by their priority, with their ``weight`` (float32) and ``probability`` (float64).

        Stratified, one comes from each of so many equal parts of the total.
        """
        places = self.tree.draw(count, stream, self.rows.golden, self.sampler.stratified, wanted)
        compared = probability = self.tree.nodes[places] / self.tree.total
        draws, empty = 1, self.tree.total <= 0.0  # there was nothing to draw by
        if wanted is not None:
            compared = torch.where(torch.arange(count, device=places.device) < wanted, probability, math.inf)
            draws = (wanted > 0).to(INT64)
            empty = empty & (wanted > 0)
        first, last, until = self.beta
        # a constant beta has `until` 0, and the quotient by it is passed over
        beta = torch.where(until > 0, first + (last - first) * torch.clamp(self.draws / until, max=1.0), first)
        self.draws.add_(draws)
        self.counts[2:].add_(empty)
        # the rarest row of the batch has weight 1, and N cancels: (N P(i))^-beta / max = (P(i) / min P)^-beta
        weight = power(probability / compared.min(), -beta).to(torch.float32)
        return self.rows.spots_of(places), {("weight",): weight, ("probability",): probability}

    # -- between the sampler in RAM and the device ----------------------------------------------------------------

    def draws_for(self, kind: Kind) -> bool:
        """See :class:`DeviceSampler`."""
        return kind in ("windows", "goals") and self.sampler.normalize == "batch"

    def relied_on(self) -> tuple[Hashable, ...]:
        """See :class:`DeviceSampler`."""
        return (self.sampler.stratified,)

    @property
    def kept(self) -> object:
        """See :class:`DeviceSampler`."""
        return self.sampler.stored

    def arrays(self) -> list[tuple[Array, Tensor]]:
        """See :class:`DeviceSampler`."""
        stored = self.sampler.stored
        return [(stored.errors, self.errors), (stored.tree.nodes, self.tree.nodes)]

    def send(self, ring: Ring) -> None:
        """See :class:`DeviceSampler`."""
        self._sent = None
        self.largest.fill_(self.sampler.noted_largest)
        self.counts.zero_()

    def send_parameters(self) -> None:
        """See :class:`DeviceSampler`."""
        sampler = self.sampler
        now = sampler.beta, sampler.default_error, sampler.noted_largest, sampler.draw_state()
        if now != self._sent:
            beta: float | tuple[float, ...] = sampler.beta
            schedule = beta if isinstance(beta, tuple) else (beta, 0, 0)
            default = torch.nan if sampler.default_error is None else float(np.float32(sampler.default_error))
            for k, value in enumerate(schedule):
                self.beta[k].fill_(float(value))
            self.default.fill_(default)
            self.alpha.fill_(float(sampler.alpha))
            self.eps.fill_(float(sampler.eps))
            if self._sent is None or now[3] != self._sent[3]:
                self.draws.fill_(sampler.draw_state())
            # one that was set meanwhile is larger than all that there were
            self.largest.copy_(torch.clamp(self.largest, min=sampler.noted_largest))
        self._sent = now

    def before_batch(self, count: int, steps: int, update: int, of: int, certain: bool = True) -> None:
        """See :class:`DeviceSampler`."""
        self._counts_here = certain
        if certain:
            self.sampler.count_draw()
            if self._sent is not None:
                self._sent = (*self._sent[:3], self.sampler.draw_state())

    def batch_failed(self) -> None:
        """See :class:`DeviceSampler`."""
        if self._counts_here:
            self._sent = None

    def bring_back(self) -> SamplerReport:
        """See :class:`DeviceSampler`."""
        sampler = self.sampler
        if len(sampler.stored.tree.minima):  # the device has no tree of minima
            sampler.stored.tree.core.build()
        largest, draws = float(self.largest), int(self.draws)
        sampler.largest_error = largest
        sampler.set_draw_state(draws)
        late, refused, empty = cast("list[int]", self.counts.cpu().tolist())
        self.counts.zero_()
        if self._sent is not None:  # those that were set meanwhile have still to be sent
            self._sent = (*self._sent[:2], largest, draws)
        warnings = list[str]()
        if empty:
            warnings.append(
                f"sample: {empty} batches were drawn while all priorities were 0, and mean nothing; choose a larger "
                "eps, or a smaller alpha"
            )
        if refused:
            warnings.append(
                f"update_priorities: {refused} TD errors were NaN, infinite or too large for a sum, or had an index "
                "that was never issued. They were passed over; check the loss, and pass batch['index']"
            )
        return SamplerReport(late, tuple(warnings))
