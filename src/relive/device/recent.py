"""DeviceRecent: the rows of the newest transitions of a ring on a device, as :class:`relive.Recent` draws from them.

It does what ``draw_ranges.cpp`` does for a ring in RAM. Every function is as those of
:class:`relive.device.ring.DeviceRing`: fixed shapes, and no wait for the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ring.ring import Ring
from ..steps.schema import Path
from .contract import DeviceSampler, Kind
from .ring import DeviceRing, Spots

FLOAT64, INT64 = torch.float64, torch.int64

AT_ONCE = 2**17
"""Searches, over all envs, that are made at once; each halves the rows of its env until one is left."""

FEWEST = 3
"""At least 2**3 stamps are tried at once, however many envs there are."""


FEWEST_NEWEST = 2
"""Newest transitions for each env, so that a third of the rows among them or more can be drawn: an env's newest row is
not complete, and neither is the final observation that may follow each of the others."""

MOST = 2**62
"""More transitions than any ring has; a larger ``c_min`` may be no int64."""


class DeviceRecent(DeviceSampler):
    """Finds where the newest transitions begin in each env, and draws among them."""

    def __init__(self, rows: DeviceRing, sampler: Any) -> None:
        super().__init__(rows, sampler)
        device = rows.envs.device
        self.share: Tensor = torch.zeros(1, dtype=FLOAT64, device=device)
        self.least: Tensor = torch.zeros(1, dtype=INT64, device=device)
        """The newest are this share of the transitions that can be drawn, and at least so many."""
        self._sent: tuple[float, int] | None = None
        """Both, as the device has them."""
        self.rounds = self.bits = 0
        self.expect(0)

    @staticmethod
    def count_bytes(num_rows: int) -> int:
        """The bytes of all tensors, for any number of rows."""
        return 16

    def draw(self, count: int, stream: Tensor, wanted: Tensor | None = None) -> tuple[Spots, dict[Path, Tensor]]:
        """See :class:`DeviceSampler`."""
        return self.rows.draw(count, stream, self.first(), wanted), {}

    def draws_for(self, kind: Kind) -> bool:
        """See :class:`DeviceSampler`."""
        return kind != "sequences" and self.sampler.c_min >= FEWEST_NEWEST * self.rows.num_envs

    def relied_on(self) -> tuple[Hashable, ...]:
        """See :class:`DeviceSampler`."""
        return self.rounds, self.bits

    def send(self, ring: Ring) -> None:
        """See :class:`DeviceSampler`."""
        self._sent = None
        if ring.rows_live:
            # the oldest stamp of all live rows; a row that is not complete has -1 - the number completed before it
            some = np.flatnonzero(ring.heads > ring.oldest)
            stamps = ring.stamp[some * ring.rows + ring.oldest[some] % ring.rows]
            self.expect(ring.completed - int(np.where(stamps < 0, -1 - stamps, stamps).min()))

    def before_batch(self, count: int, steps: int, update: int, of: int, certain: bool = True) -> None:
        """See :class:`DeviceSampler`."""
        now = self.sampler.share(update, of), min(self.sampler.c_min, MOST)
        if now != self._sent:
            self.share.fill_(now[0])
            self.least.fill_(now[1])
        self._sent = now

    def expect(self, oldest: int) -> None:
        """Be ready for live rows that were completed so many transitions ago, and for all that are added from now on.

        A row that is added here makes way within ``rows`` steps of all envs, and each completes one transition an env
        and, over all of its steps, one more.
        """
        added = self.rows.num_envs * (self.rows.rows + 2)
        bits = (max(oldest, added) + added).bit_length()
        # a round tries 2**bits stamps in each of N envs, so more envs leave fewer bits for a round
        most = max(AT_ONCE // self.rows.num_envs, 1).bit_length() - 1
        self.rounds: int = -(-bits // max(most, FEWEST))  # rounded up
        self.bits: int = -(-bits // self.rounds)
        """Each round tries 2**bits stamps, in as many parts of what is left."""

    def first(self) -> Tensor:
        """The first row of each env that belongs to the newest transitions, ``[N]``; the oldest if all do."""
        ring = self.rows
        whole = ring.first_with_history()
        stored = ring.transitions_since(whole[:, None]).sum(0)
        newest = torch.maximum((stored.to(FLOAT64) * self.share).to(INT64), self.least)
        # the stamp since which there are so many: the largest of which that is true. Fewer transitions are newer than a
        # larger stamp, so a search by its digits finds it, in base 2**bits and the highest digit first. No stamp that
        # counts is older than 2**(bits * rounds) transitions: `expect` has seen to that
        stamp = torch.clamp(ring.counters[:1] - 2 ** (self.bits * self.rounds), min=0)
        parts = torch.arange(2**self.bits, device=whole.device)
        first = whole[:, None]
        for turn in range(self.rounds - 1, -1, -1):
            tried = stamp + parts * 2 ** (self.bits * turn)
            firsts = torch.maximum(self._stamped_since(tried), whole[:, None])
            # true for the first of `tried` and false from some one on, as there are fewer and fewer
            enough = ring.transitions_since(firsts).sum(0) >= newest
            # the last of which it is true: this digit is found
            last = torch.clamp(enough.sum(0, keepdim=True) - 1, min=0)
            stamp, first = tried[last], firsts.index_select(1, last)
        return torch.where(newest >= stored, whole, first[:, 0])

    def _stamped_since(self, stamps: Tensor) -> Tensor:
        """The first row of each env that was stamped since each of ``[K]`` stamps, or the env's next: ``[N, K]``."""
        ring = self.rows
        oldest, base = ring.oldest[:, None], ring.base[:, None]
        live, start = ring.head[:, None] - oldest, oldest % ring.rows
        older = torch.zeros_like(oldest * stamps)  # so many live rows have older stamps
        # the stamps of an env grow from row to row, so it is a binary search: bit by bit, the highest first
        for bit in range(ring.rows.bit_length() - 1, -1, -1):
            upto = older + 2**bit
            stamp = ring.stamp[base + (start + upto - 1) % ring.rows]
            # a row that is not complete has the number of those completed before it, as -1 - stamp
            stamp = stamp ^ (stamp >> 63)
            older = torch.where((upto <= live) & (stamp < stamps), upto, older)
        return oldest + older
