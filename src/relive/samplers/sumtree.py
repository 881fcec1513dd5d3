"""SumTree: weights to change one by one and to draw in proportion, in O(log n). Nothing here is about RL."""

from __future__ import annotations

from sys import float_info
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import core
from ..core.words import FANOUT
from ..errors import DTypeError, EmptyError, InvariantError, NotFiniteError, ParameterError, ShapeError
from ..memory.allocator import zeroed
from ..steps.arrays import Array, Doubles, Ints

ALIGNMENT = 8
"""Doubles in a cache line."""


_INT64 = np.dtype(np.int64)


class Cover(NamedTuple):
    """Some leaves of a tree, as the fewest nodes that cover them from left to right. Valid until the next write."""

    places: Ints
    """The positions of these nodes."""
    until: Doubles
    """The running sum of weights up to and including each node."""

    @property
    def total(self) -> float:
        """The summed weight of the covered leaves."""
        return self.until.item(-1) if self.until.size else 0.0


class SumTree:
    """``size`` weights (float64), all 0 at first, with sums over them for quick draws.

    Leaf i owns the masses from the sum of the weights before it up to that sum plus its own, to within rounding. The
    sums depend only on the weights, not on the order of writes, so nothing drifts. Only one thread may write.
    ``src/core/tree.hpp`` describes the layout and the order of summation.

    Args:
        size: number of leaves, at least 1.
        nodes: float64 ``[count_nodes(size)]``, which starts on a cache line: the memory of a tree of that size, or
            zeros. None takes new memory.
    """

    def __init__(self, size: int, nodes: Doubles | None = None) -> None:
        if size < 1:
            raise ParameterError(f"a sum tree needs at least 1 leaf, got size {size}")
        self._size = int(size)
        self._offsets: NDArray[np.uint64] = np.array(core.tree_offsets(self._size), np.uint64)
        self._root = self._offsets[-1:].astype(np.int64)
        self.nodes: Doubles = _aligned(int(self._offsets[-1]) + 1) if nodes is None else nodes
        """The leaves, and the sums over them level by level; the same array for life."""
        self.minima: Doubles = np.empty(0)
        """The minima of the nodes, for compiled code; empty until the first call of :meth:`minimum_positive`."""
        self.core: core.Tree = core.Tree(self.nodes, self._size, self.minima)
        """The tree, as compiled code takes it."""

    @staticmethod
    def count_nodes(size: int) -> int:
        """The number of nodes of a tree of ``size`` leaves."""
        return core.tree_offsets(size)[-1] + 1

    @staticmethod
    def nbytes(size: int, minima: bool = False) -> int:
        """Bytes of a tree of ``size`` leaves, with or without minima."""
        offsets = core.tree_offsets(size)
        nodes, leaves = offsets[-1] + 1, offsets[1]
        return (nodes + ALIGNMENT + (nodes - leaves if minima else 0)) * 8

    def __repr__(self) -> str:
        return f"SumTree({self._size})"

    def __len__(self) -> int:
        return self._size

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return self.nodes.item(-1)

    @property
    def weights(self) -> Doubles:
        """The weights of all leaves, over the tree's memory."""
        return self.nodes[: self._size]

    @property
    def whole(self) -> Cover:
        """All leaves. What it holds changes with every write."""
        return Cover(self._root, self.nodes[-1:])

    def get(self, positions: ArrayLike) -> Doubles:
        """The weights ``[B]`` (float64) of the leaves at ``positions`` (integers, ``[B]``).

        Raises:
            ParameterError: a position is not in 0..size - 1; names the first one.
        """
        index = _integers(positions)
        out = np.empty(index.size)
        bad = self.core.get(index, out)
        if bad >= 0:
            raise self._no_position(index, bad)
        return out

    def set(self, positions: ArrayLike, values: ArrayLike) -> None:
        """Give the leaves at ``positions`` (integers, ``[B]``) the weights ``values`` (``[B]``, or one number for all).

        If a leaf occurs several times, its last weight counts. An error names the first bad entry and writes nothing.

        Raises:
            ParameterError: a position is not in 0..size - 1.
            ShapeError: the number of values differs from the number of positions.
            NotFiniteError: a value is NaN, infinite, negative, or so large that a sum could become infinite.
        """
        index = _integers(positions)
        weights = np.ascontiguousarray(values, np.float64)  # one entry if values is a number
        if weights.shape != index.shape and not isinstance(values, float) and np.ndim(values):
            raise ShapeError(f"values: expected shape {index.shape}, one per position, got {weights.shape}")
        bad = self.core.set(index, weights)
        if bad >= 0:
            if not 0 <= index[bad] < self._size:
                raise self._no_position(index, bad)
            given, most = weights[bad % weights.size], float_info.max / (2.0 * self._size)
            raise NotFiniteError(f"values: entry {bad}, for position {index[bad]}, is {given}; pass 0 to {most:.1e}")

    def cover(self, begins: Ints, ends: Ints) -> Cover:
        """The leaves from each of ``begins`` up to its entry in ``ends`` (int64, in 0..size, begin <= end), for draws.

        Heavy leaves elsewhere cost no precision, as no two sums are subtracted.
        """
        most = 2 * (FANOUT - 1) * len(self._offsets) * len(begins)
        places, until = np.empty(most, np.int64), np.empty(most)
        count = self.core.cover(begins, ends, places, until)
        return Cover(places[:count], until[:count])

    def find(self, masses: ArrayLike, among: Cover | None = None) -> Ints:
        """The leaves ``[B]`` (int64) that own ``masses`` (``[B]``, in [0, total)), of all or ``among`` some.

        A leaf of weight 0 is never found. With ``among``, only its leaves own masses, and ``total`` is the cover's.

        Raises:
            EmptyError: all weights are 0.
            NotFiniteError: a mass is not in [0, total); names the first one.
        """
        wanted = _flat(np.ascontiguousarray(masses, np.float64), "masses")
        out = np.empty(wanted.size, np.int64)
        places, until = (self._root, self.nodes[-1:]) if among is None else among
        bad = self.core.find(places, until, wanted, out)
        if bad >= 0:
            self._refuse_empty()
            given, total = wanted[bad], Cover(places, until).total
            raise NotFiniteError(f"masses: entry {bad} is {given}, not in [0, {total}); pass u * total with u < 1")
        return out

    def minimum_positive(self, begins: Ints | None = None, ends: Ints | None = None) -> float:
        """The smallest weight above 0, of all leaves or of those from each of ``begins`` up to its entry in ``ends``.

        The first call takes O(size). From then on minima are kept, and a range takes O(log n).

        Raises:
            EmptyError: all weights asked for are 0.
        """
        self._refuse_empty()
        if not self.minima.size:
            self._keep_minima(np.full(self.nodes.size - int(self._offsets[1]), np.inf))
            self.core.build()
        if begins is None or ends is None:
            return self.minima.item(-1)
        lowest = self.core.lowest(begins, ends)
        if lowest == np.inf:
            raise EmptyError("all weights of these leaves are 0; ask for leaves that have a weight")
        return lowest

    def become(self, other: SumTree) -> None:
        """Have the weights of another tree of the same size."""
        self.nodes[:] = other.nodes
        self._keep_minima(np.empty(0))

    def put(self, positions: Ints, weights: Doubles) -> None:
        """Give leaves ``[B]`` their weights, and compute all sums above them again.

        :meth:`set` climbs no further than sums change, and so it trusts all sums. After a kill they may be wrong.
        """
        self.nodes[positions] = weights
        places = positions
        for below, above in zip(self._offsets[:-1].tolist(), self._offsets[1:].tolist(), strict=True):
            places = np.unique(places // FANOUT)
            children = self.nodes[below + FANOUT * places[:, None] + np.arange(FANOUT)]
            total = np.zeros(len(places))
            for k in range(FANOUT):  # from left to right, as everywhere
                total += children[:, k]
            self.nodes[above + places] = total
        self._keep_minima(np.empty(0))

    def check(self) -> None:
        """Check the invariants.

        Raises:
            InvariantError: a leaf is not a valid weight, or a node does not follow from its children; names the first.
        """
        leaves, nodes, minima = self.nodes[: self._size], self.nodes.copy(), np.full_like(self.minima, np.inf)
        _require("a weight is finite and not negative", np.isfinite(leaves) & (leaves >= 0), leaves)
        nodes[self._size : int(self._offsets[1])] = 0.0
        core.Tree(nodes, self._size, minima).build()
        _require("a node is the sum of its children, from left to right", nodes == self.nodes, self.nodes)
        _require("a minimum is the smallest positive one below it", minima == self.minima, self.minima)

    def _keep_minima(self, minima: Doubles) -> None:
        self.minima = self.core.minima = minima

    def _no_position(self, index: Ints, bad: int) -> ParameterError:
        last = self._size - 1
        return ParameterError(
            f"positions: entry {bad} is {index[bad]}, not in 0..{last}; pass places of this tree's leaves"
        )

    def _refuse_empty(self) -> None:
        if not self.total > 0:
            raise EmptyError("all weights of the sum tree are 0; set some before you draw")


def _require(rule: str, holds: NDArray[np.bool_], values: Doubles) -> None:
    if not holds.all():
        place = int(holds.argmin())
        raise InvariantError(f"{rule}: place {place} holds {values[place]}")


def _integers(positions: ArrayLike) -> Ints:
    index = np.ascontiguousarray(positions)
    if index.dtype is not _INT64:
        if index.dtype.kind not in "iu" and index.size:
            raise DTypeError(f"positions: expected integers, got {index.dtype}; pass int64")
        index = index.astype(np.int64)
    return _flat(index, "positions")


def _flat(array: Array, name: str) -> Array:
    if array.ndim != 1:
        raise ShapeError(f"{name}: expected one axis, got shape {array.shape}; flatten them")
    return array


def _aligned(count: int) -> Doubles:
    """Zeros that start on a cache line of 64 bytes, so that all blocks of 8 do."""
    memory = zeroed((count + ALIGNMENT) * 8).view(np.float64)
    start = -memory.ctypes.data % 64 // 8
    return memory[start : start + count]
