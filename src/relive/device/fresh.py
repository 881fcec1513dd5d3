"""DeviceFresh: the new rows of a ring on a device, each served once, as :class:`relive.Fresh` serves them.

It does what ``take_fresh`` of ``draws.cpp`` does for a ring in RAM. Every function on the device is as those of
:class:`relive.device.ring.DeviceRing`: fixed shapes, and no wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..core.words import FINALS
from ..ring.ring import Ring
from ..steps.arrays import Array
from ..steps.schema import Path
from .contract import DeviceSampler, Kind, SamplerReport
from .ring import AddPlan, DeviceRing, Spots

INT64 = torch.int64


# On a device a row can be drawn when it is complete or never: only interruptions open windows later, and these are the
# host's. So new rows come in the order of their completion, and a queue of them is in the order in which they are
# served. RAM needs no queue: it looks through the rows, as many as there are.
class DeviceFresh(DeviceSampler):
    """A queue of the rows that were not served yet, before the draws of another sampler.

    Args:
        rows: the ring on the device.
        sampler: the sampler in RAM.
        inner: draws the other rows.
    """

    def __init__(self, rows: DeviceRing, sampler: Any, inner: DeviceSampler) -> None:
        super().__init__(rows, sampler)
        device = rows.envs.device
        self.size: int = self._count_entries(rows.num_envs * rows.rows, rows.num_envs)
        self.inner = inner
        self.queue: Tensor = torch.zeros(self.size + 1, dtype=INT64, device=device)
        """The public indices of new rows, in a ring; last, an entry that takes writes that are not wanted.

        No entry is overwritten before its row is. At first the queue has as many entries as there are rows, at most.
        A step on the device is one of all envs: each completes one row a step, and all steps together one more. So the
        rows of before are gone after as many entries again, and those of later steps, too.
        """
        self.came: Tensor = torch.zeros(1, dtype=INT64, device=device)
        """How many rows were ever put into the queue."""
        self.gone: Tensor = torch.zeros(rows.num_envs + 2, dtype=INT64, device=device)
        """For each env, the number of the row after the last that was served; how many rows have left the queue; how
        many were served. One operation changes them all, so that they always fit each other."""
        self._looks_at_all = False
        """True if rows of the queue may have been overwritten, so that those to serve may lie anywhere in it."""
        self._safe = self._steps = self._counted = 0
        """No row that waits is overwritten up to step ``_safe``; the step of the last batch; as many as the sampler in
        RAM has heard of."""
        self._most: float = 0
        """After the last batch, at most so many waited, or will be complete with the next step of their env."""
        self._kept: tuple[object, object] = None, None
        self._token = object()

    @staticmethod
    def count_bytes(num_rows: int, num_envs: int) -> int:
        """The bytes of all tensors, besides those of the inner sampler."""
        return 8 * (DeviceFresh._count_entries(num_rows, num_envs) + 1) + 8 * (num_envs + 3)

    @staticmethod
    def _count_entries(num_rows: int, num_envs: int) -> int:
        return 2 * num_rows + num_envs

    # -- on the device ------------------------------------------------------------------------------------------

    def added(self, added: AddPlan) -> None:
        """Put the rows that can be drawn from this step on into the queue."""
        self.inner.added(added)
        ring = self.rows
        # the number of the step's row: the newest, or the one before a boundary row
        written = ring.head - 1 - (added.finals != ring.dummy_row).to(INT64)
        # env by env, the row before the step's own: the order of their stamps
        pairs = (added.before, added.completed_now), (ring.envs, ring.envs), (written - 1, written)
        spots = Spots(*(torch.stack(pair, 1).view(-1) for pair in pairs))
        opens = (spots.places != ring.dummy_row) & ring.can_draw(spots)
        turn = self.came + torch.cumsum(opens.to(INT64), 0) - 1
        index = spots.numbers * ring.num_envs + spots.envs
        self.queue.index_put_((torch.where(opens, turn % self.size, self.size),), index)
        self.came.add_(opens.sum())

    def draw(self, count: int, stream: Tensor, wanted: Tensor | None = None) -> tuple[Spots, dict[Path, Tensor]]:
        """Rows ``[count]``: those that wait, then those of the inner sampler, whose fields are 1 for new rows."""
        ring, num_envs, item = self.rows, self.rows.num_envs, torch.arange(count, device=stream.device)
        looks = self.size if self._looks_at_all else count
        begin = torch.maximum(self.gone[num_envs : num_envs + 1], self.came - self.size)
        position = begin + torch.arange(looks, device=stream.device)
        index = self.queue[position % self.size]
        # rows that were overwritten, or whose history was, are passed over
        waits = (position < self.came) & self._lives(index)
        rank = torch.cumsum(waits.to(INT64), 0)
        served = waits & (rank <= count)
        taken = served.sum(0, keepdim=True)
        slot = torch.where(served, rank - 1, count)
        index = torch.zeros(count + 1, dtype=INT64, device=stream.device).index_put_((slot,), index)[:count]
        # all that was looked at has left the queue, unless more wait than there is room for
        behind = torch.where(served, position + 1, begin).max()
        left = torch.where(rank[-1:] > count, behind, torch.minimum(begin + looks, self.came))
        drawn, fields = self.inner.draw(count, stream, count - taken)
        numbers, envs, new = index // num_envs, index % num_envs, item < taken
        after = self.gone[:num_envs].scatter_reduce(0, envs, torch.where(new, numbers + 1, 0), "amax")
        self.gone.copy_(torch.cat([after, left, self.gone[-1:] + taken]))
        rest = torch.clamp(item - taken, min=0)
        mine = Spots(ring.base[envs] + numbers % ring.rows, envs, numbers)
        spots = Spots(*(torch.where(new, one, other[rest]) for one, other in zip(mine, drawn, strict=True)))
        return spots, {path: torch.where(new, 1.0, field[rest]) for path, field in fields.items()}

    def _lives(self, index: Tensor) -> Tensor:
        """True for rows of the queue that are still there, with what has to lie before them; bool ``[K]``."""
        ring, history = self.rows, self.rows.rule.history
        number, env = index // ring.num_envs, index % ring.num_envs
        if history:
            number = number - torch.clamp(ring.step[ring.base[env] + number % ring.rows], max=history)
        return number >= ring.oldest[env]

    @property
    def set_errors(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """See :class:`DeviceSampler`."""
        return self.inner.set_errors

    # -- on the host --------------------------------------------------------------------------------------------

    def draws_for(self, kind: Kind) -> bool:
        """See :class:`DeviceSampler`."""
        return self.inner.draws_for(kind)

    def relied_on(self) -> tuple[Hashable, ...]:
        """See :class:`DeviceSampler`."""
        return self._looks_at_all, *self.inner.relied_on()

    @property
    def kept(self) -> object:
        """See :class:`DeviceSampler`."""
        now = self.sampler.noted, self.inner.kept
        if now[0] is not self._kept[0] or now[1] is not self._kept[1]:
            self._kept, self._token = now, object()
        return self._token

    def arrays(self) -> list[tuple[Array, Tensor]]:
        """See :class:`DeviceSampler`."""
        return self.inner.arrays()

    def window_lifetime(self, ring: Ring) -> int | None:
        """See :class:`DeviceSampler`."""
        return self.inner.window_lifetime(ring)

    def send(self, ring: Ring) -> None:
        """See :class:`DeviceSampler`."""
        self.inner.send(ring)
        index = ring.index_of(self.sampler.places_waiting(ring))
        self.queue[: len(index)].copy_(torch.from_numpy(index))
        self.came.fill_(len(index))
        noted, num_envs = self.sampler.noted, ring.num_envs
        self.gone[:num_envs].copy_(torch.from_numpy(noted.next))
        self.gone[num_envs].fill_(0)
        self.gone[num_envs + 1].fill_(noted.total)
        self._counted, self._steps = len(index), 0
        self._most = len(index) + self._incomplete
        # a step of all envs overwrites so many rows of an env at most
        each = 2 if ring.mode == FINALS else 1
        self._lifetime: int = (ring.rows - ring.rule.history - 1) // each
        left = (index // num_envs - ring.rule.history + ring.rows - ring.heads[index % num_envs]) // each
        self._safe = int(left.min(initial=self._lifetime))

    @property
    def _incomplete(self) -> int:
        """The most rows that are there, and complete only with the next step."""
        return self.rows.num_envs if self.rows.mode == FINALS else 0

    def send_parameters(self) -> None:
        """See :class:`DeviceSampler`."""
        self.inner.send_parameters()

    # Rows that wait, and those that the next step completes, are at most `num_envs` more after a step. So the host
    # knows when a batch takes all that wait, and from then on for how long no row that waits is overwritten.
    def before_batch(self, count: int, steps: int, update: int, of: int, certain: bool = True) -> None:
        """See :class:`DeviceSampler`."""
        self.inner.before_batch(count, steps, update, of, certain=False)
        most = self._most + self.rows.num_envs * (steps - self._steps)
        self._looks_at_all = steps > self._safe
        if most <= count:
            self._safe = steps + self._lifetime
        self._most, self._steps = max(most - count, self._incomplete), steps

    def batch_failed(self) -> None:
        """See :class:`DeviceSampler`."""
        self.inner.batch_failed()
        self._most, self._safe = math.inf, -1  # until the ring is sent again

    def bring_back(self) -> SamplerReport:
        """See :class:`DeviceSampler`."""
        report = self.inner.bring_back()
        gone, came = self.gone.cpu().numpy(), int(self.came)
        self.sampler.note(gone[:-2].copy(), int(gone[-1]), came - self._counted)
        self._counted = came
        self._kept = self.sampler.noted, self._kept[1]  # the device knows it
        return report
