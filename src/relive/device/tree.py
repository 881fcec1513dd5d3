"""DeviceTree: a sum tree on a device.

It has the bits of :class:`relive.samplers.sumtree.SumTree`: the same nodes, added up in the same order. Every function
is as those of :class:`relive.device.ring.DeviceRing`: fixed shapes, and no wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import core
from ..core.numbers import uniform
from ..core.words import FANOUT

FLOAT64, INT64 = torch.float64, torch.int64


class DeviceTree:
    """Weights (float64), all 0 at first, with sums over them.

    Args:
        leaves: how many weights.
        device: of all tensors.
    """

    def __init__(self, leaves: int, device: torch.device) -> None:
        self.offsets: list[int] = core.tree_offsets(leaves)
        """Where each level of the tree starts; last, its root."""
        self.leaves = leaves
        self.nodes: Tensor = torch.zeros(self.offsets[-1] + 2, dtype=FLOAT64, device=device)
        """The nodes of the tree, and at last one that takes writes that are not wanted."""

    @staticmethod
    def count_bytes(leaves: int) -> int:
        """The bytes of all tensors for so many leaves."""
        return 8 * (core.tree_offsets(leaves)[-1] + 2)

    @property
    def total(self) -> Tensor:
        """The sum of all weights, ``[1]``."""
        return self.nodes[self.offsets[-1] : self.offsets[-1] + 1]

    def put(self, places: Tensor, weights: Tensor) -> None:
        """Give leaves their weights, each at most once, and sum all nodes above them anew; others are passed over."""
        self.climb(places, self.note(places, weights))

    def note(self, places: Tensor, weights: Tensor) -> Tensor:
        """Give leaves their weights; the sums above them wait for :meth:`climb`. True for places that are leaves."""
        real = places < self.leaves
        self.nodes.index_put_((torch.where(real, places, len(self.nodes) - 1),), weights)
        return real

    def climb(self, places: Tensor, real: Tensor) -> None:
        """Sum all nodes above these places anew where they are ``real`` leaves."""
        node = torch.where(real, places, 0)  # a sum that is made again stays what it is
        # sums are made anew and not changed by differences, which drift: so a node is a function of the leaves alone.
        # Two places below one node write the same sum to it
        for below, above in zip(self.offsets, self.offsets[1:], strict=False):
            node = node // FANOUT
            children = self.nodes[below + (node * FANOUT)[:, None] + torch.arange(FANOUT, device=node.device)]
            self.nodes.index_put_((above + node,), _summed(children)[-1])

    def draw(
        self, count: int, stream: Tensor, golden: Tensor, stratified: bool, wanted: Tensor | None = None
    ) -> Tensor:
        """Leaves ``[count]`` by their weight; with ``stratified`` one from each of so many equal parts of the total.

        With ``wanted``, int64 ``[1]``, the first so many are those of a batch of that size.
        """
        total = self.total
        item = torch.arange(count, device=self.nodes.device)
        u = uniform(stream, 1 + item, golden)
        if stratified:
            # where none is wanted, a mass may be any, but has to be one: NaN is no place
            u = (item.to(FLOAT64) + u) / (float(count) if wanted is None else torch.clamp(wanted, min=1).to(FLOAT64))
        # rounding may reach the total, which lies beyond all leaves. One less in its bits is the largest number below
        below = (total.view(INT64) - 1).view(FLOAT64)
        return self._leaves_at(torch.minimum(below, u * total))

    def _leaves_at(self, masses: Tensor) -> Tensor:
        """The leaf whose interval holds each mass, int64 ``[B]``: down the tree, one level for all before the next."""
        # `start` is the mass before a node's first leaf: children are added to it one by one, from left to right, so
        # that the edges have the bits of the walk in RAM
        node, start = torch.zeros_like(masses, dtype=INT64), torch.zeros_like(masses)
        children_of = torch.arange(FANOUT, device=masses.device)
        for level in range(len(self.offsets) - 2, -1, -1):
            children = self.nodes[self.offsets[level] + (node * FANOUT)[:, None] + children_of]
            edges = _summed(children, start)
            child, positive = torch.zeros_like(node), torch.zeros_like(node)
            for k, edge in enumerate(edges):
                # as many children end at or below the mass as come before the one that holds it
                child = child + (edge <= masses)
                positive = torch.where(children[:, k] > 0.0, k, positive)
            # rounding may leave a mass beyond all children: it goes to the last that has weight
            child = torch.where(child == FANOUT, positive, child)
            # what lies before a child is the edge of the one before it; before child 0 that is `start` as it was
            for k, edge in enumerate(edges[:-1], 1):
                start = torch.where(child == k, edge, start)
            node = node * FANOUT + child
        return node


def _summed(children: Tensor, start: Tensor | None = None) -> list[Tensor]:
    """The running sums of ``[B, 8]`` from left to right, ``[B]`` each; from ``start``, or from 0."""
    sums: list[Tensor] = []
    total = torch.zeros_like(children[:, 0]) if start is None else start
    for k in range(FANOUT):
        total = total + children[:, k]
        sums.append(total)
    return sums
