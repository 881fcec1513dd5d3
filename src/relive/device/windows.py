"""DeviceWindows: the weights of the windows of a ring on a device, and draws by them.

They have the bits of the tree that :class:`relive.Uniform` keeps for windows of several steps in RAM, and its draws are
those of ``weights.cpp``. Every function is as those of :class:`relive.device.ring.DeviceRing`: fixed shapes, and no
wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.numbers import mix, uniform
from ..core.words import FANOUT
from .ring import AddPlan, DeviceRing, Spots
from .tree import DeviceTree

FLOAT64, INT64 = torch.float64, torch.int64

MOST_ADDED = 2
"""Rows that a step adds to an env: its own, and one for a final observation."""


class DeviceWindows:
    """A weight for every window of a ring that can be drawn, kept at its last row, as the ring's rule says.

    Args:
        ring: the rows.
        device: of all tensors.
    """

    def __init__(self, ring: DeviceRing, device: torch.device) -> None:
        self.ring = ring
        self.tree: DeviceTree = DeviceTree(ring.num_envs * ring.rows, device)

    # -- writing ------------------------------------------------------------------------------------------------

    def added(self, added: AddPlan) -> None:
        """Take the weights of windows that lost rows of their history, and give those that the step ended theirs."""
        ring, tree, rule = self.ring, self.tree, self.ring.rule
        # a window that has lost rows ends at the oldest row, or up to `history` rows after it. The windows that were
        # overwritten ended at the MOST_ADDED rows before the oldest, where the step's own rows lie now
        span = min(rule.history + MOST_ADDED, ring.rows)
        oldest = ring.oldest[:, None]
        numbers = oldest - MOST_ADDED + torch.arange(span, device=oldest.device)
        places = ring.base[:, None] + numbers % ring.rows
        # a window needs its history: as many rows of its episode as there are, up to `history`
        gone = numbers - torch.clamp(ring.step[places], max=rule.history) < oldest
        tree.note(
            torch.where(gone, places, ring.dummy_row).reshape(-1), torch.zeros_like(numbers, dtype=FLOAT64).view(-1)
        )
        # one in each group of leaves with a sum of its own, also where the ring of an env begins and ends: `climb` sums
        # the node above a place anew, so every FANOUT-th place of a run is enough
        groups = [places[:, ::FANOUT].reshape(-1), places[:, -1], ring.base, ring.base + ring.rows - 1]
        # the number of the step's row: the newest, or the one before a boundary row
        written = ring.head - 1 - (added.finals != ring.dummy_row).to(INT64)
        complete = torch.cat([added.before, added.completed_now])
        spots = Spots(complete, torch.cat([ring.envs, ring.envs]), torch.cat([written - 1, written]))
        opens = (spots.places != ring.dummy_row) & ring.can_draw(spots)
        tree.note(spots.places, torch.where(opens, self._weights(spots), 0.0))
        if rule.weigh == "episodes":
            # an episode's newest window has the weight of the whole episode, so the one before gives it up
            before = torch.where(opens, self._window_before(spots), ring.dummy_row)
            tree.note(before, torch.zeros_like(before, dtype=FLOAT64))
            groups.append(before)
        changed = torch.cat([*groups, spots.places])
        tree.climb(changed, changed < tree.leaves)

    def _weights(self, spots: Spots) -> Tensor:
        """The weights of windows that can be drawn."""
        at = self.ring.step[spots.places].to(INT64)
        if self.ring.rule.weigh == "steps":
            return (at + 1 - self.ring.window_start(at)).to(FLOAT64)  # a tail has fewer steps
        return torch.ones_like(at, dtype=FLOAT64)

    def _whole_before(self, at: Tensor) -> Tensor:
        """The first step of the last whole window before the one that ends at step ``at`` >= length of an episode."""
        return self.ring.window_start(at - self.ring.rule.stride)

    def _window_before(self, spots: Spots) -> Tensor:
        """Where the windows before these end, in the same episode; ``dummy_row`` if there is none, or no more."""
        ring, rule = self.ring, self.ring.rule
        at = ring.step[spots.places].to(INT64)
        # so many steps lie between the ends of the two windows, and as many rows
        number = spots.numbers - (at - (self._whole_before(at) + rule.length - 1))
        there = (at >= rule.length) & (number >= ring.oldest[spots.envs])
        return torch.where(there, ring.base[spots.envs] + number % ring.rows, ring.dummy_row)

    # -- drawing ------------------------------------------------------------------------------------------------

    def draw(self, count: int, stream: Tensor) -> Spots:
        """The last rows ``[count]`` of windows."""
        ring = self.ring
        spots = ring.spots_of(self.tree.draw(count, stream, ring.golden, stratified=False))
        if ring.rule.weigh != "episodes":
            return spots
        return self._of_episodes(
            spots, uniform(mix(stream), 1 + torch.arange(count, device=stream.device), ring.golden)
        )

    def _of_episodes(self, newest: Spots, random: Tensor) -> Spots:
        """For the newest window of an episode, one of all of its windows, as the numbers in [0, 1) say."""
        ring, rule = self.ring, self.ring.rule
        at, oldest = ring.step[newest.places].to(INT64), ring.oldest[newest.envs]
        begins = newest.numbers - at
        # the first row that can end a window: the episode's first, or the first whose history is still stored
        low = torch.where(begins >= oldest, begins, oldest + rule.history)
        first, last = ring.window_start(low - begins), self._whole_before(at)
        # the windows beside the newest: `stride` apart from `first` to `last`. An episode of one window has none
        others = torch.where((at >= rule.length) & (last >= first), (last - first) // rule.stride + 1, 0)
        chosen = (random * (1 + others).to(FLOAT64)).to(INT64)
        # 1 is the window before the newest, and so on
        number = begins + last - (chosen - 1) * rule.stride + rule.length - 1
        number = torch.where(chosen == 0, newest.numbers, number)
        return Spots(ring.base[newest.envs] + number % ring.rows, newest.envs, number)
