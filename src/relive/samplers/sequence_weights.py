"""Uniform draws of windows: by the windows, by their steps, or by the episodes that they are of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import kernels
from ..errors import EmptyError, InvariantError
from ..kernels.reference.random import mix
from ..ring.ring import Ints, Ring
from .sumtree import SumTree

__all__ = ["WindowWeights", "draw_recent", "nothing_to_draw", "require_weights"]


Doubles = NDArray[np.float64]


class WindowWeights:
    """A weight for every window of a ring that can be drawn, kept at its last row.

    It is 1, or the window's number of steps if the ring's rule says to weigh by steps. To weigh by episodes each has
    one leaf, 1 at the newest of its windows, and which of them it is to be is drawn afterwards.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring, self._tree = ring, SumTree(ring.num_envs * ring.rows)
        anchors = ring.anchors()
        if ring.rule.weigh == "episodes" and len(anchors):
            index, step = ring.index_of(anchors), ring.step[anchors]
            number, env = index // ring.num_envs, index % ring.num_envs
            begins = number - step
            goes_on = (begins[1:] == begins[:-1]) & (env[1:] == env[:-1])
            anchors = anchors[~np.append(goes_on, False)]
        self._tree.set(anchors, self._weights(anchors))

    def changed(self, places: Ints, opens: Any) -> None:
        """Windows that can be drawn from now on (1) or no more (0), in order, by their last rows."""
        self._tree.set(places, opens * self._weights(places))
        if self._ring.rule.weigh == "episodes":
            drawable = places[self._tree.get(places) > 0]  # of several changes of a place the last is what counts
            earlier = self._earlier(drawable)
            self._tree.set(earlier, 0.0)

    def draw(self, count: int, key: int, newest: int = 0) -> Ints:
        """The last rows of windows ``[count]``, with replacement, of those that end among the ``newest`` transitions.

        Raises:
            EmptyError: there is none.
        """
        ring = self._ring
        if not ring.drawable:
            raise nothing_to_draw(ring)
        if newest:
            recent = draw_recent(self._tree, ring, newest, lambda total: _uniform(count, key, total))
            places, oldest = recent.places, recent.first
        else:
            places, oldest = self._tree.find(_uniform(count, key, self._tree.total)), ring.oldest
        if ring.rule.weigh == "episodes":
            return self._of_episodes(places, oldest, _uniform(count, mix(key), 1.0))
        return places

    def check(self) -> None:
        """Test that just the windows that can be drawn have a weight, and the right one.

        Raises:
            InvariantError: naming the first place that does not.
        """
        every = np.arange(len(self._tree))
        require_weights(self._tree, every, WindowWeights(self._ring)._tree.get(every))

    def _weights(self, places: Ints) -> Any:
        if self._ring.rule.weigh != "steps":
            return np.ones(len(places))
        rule, at = self._ring.rule, self._ring.step[places].astype(np.int64)
        return at + 1.0 - kernels.reference.window_start(at, rule.length, rule.stride)

    def _earlier(self, places: Ints) -> Ints:
        """The last rows of the windows before these, of the same episodes, as far as they are still there."""
        ring, rule = self._ring, self._ring.rule
        number, env = np.divmod(ring.index_of(places), ring.num_envs)
        at = ring.step[places].astype(np.int64)
        back = at - (rule.length - 1 + (at - rule.length) // rule.stride * rule.stride)
        there = (at >= rule.length) & (number - back >= ring.oldest[env])
        return (env * ring.rows + (number - back) % ring.rows)[there]

    def _of_episodes(self, places: Ints, oldest: Ints, random: Doubles) -> Ints:
        """One window of each episode that has its last at ``places``, of those that end at ``oldest`` [N] or later."""
        ring, (history, length, stride, _, _) = self._ring, self._ring.rule
        number, env = np.divmod(ring.index_of(places), ring.num_envs)
        at = ring.step[places].astype(np.int64)
        begins = number - at
        low = np.where(begins >= ring.oldest[env], begins, ring.oldest[env] + history)
        low = np.maximum(low, oldest[env]) - begins
        first = np.maximum(low - length + stride, 0) // stride  # whole windows are 0, 1, ..., and end so much later
        last = (at - length) // stride
        chosen = (random * (1 + np.maximum(last - first + 1, 0))).astype(np.int64)
        back = np.where(chosen > 0, at - (length - 1 + (last - chosen + 1) * stride), 0)
        return env * ring.rows + (number - back) % ring.rows


class RecentDraw(NamedTuple):
    """Leaves of a sum tree drawn from the newest transitions."""

    places: Ints
    total: float
    """The weight of all those transitions."""
    first: Ints
    """The number of the first of them per env, ``[N]``."""
    begins: Ints
    ends: Ints
    """The runs of places that they take."""


def draw_recent(tree: SumTree, ring: Ring, newest: int, masses: Callable[[float], Doubles]) -> RecentDraw:
    """Leaves drawn by their weights among the ``newest`` transitions.

    Where none of those has any weight, twice as many are looked at, and so on. ``masses`` draws numbers in [0, total).

    Raises:
        EmptyError: no transition has any weight.
    """
    while True:
        begins, ends = ring.window_places(newest)
        cover = tree.cover(begins, ends)
        total = cover.total
        if total > 0:
            break
        if newest >= ring.transitions:
            raise nothing_to_draw(ring)
        newest *= 2
    first = ring.heads - (ends - begins).reshape(-1, 2).sum(1)
    return RecentDraw(tree.find(masses(total), cover), total, first, begins, ends)


def nothing_to_draw(ring: Ring | None) -> EmptyError:
    """The error for a draw from a ring without anchors."""
    if ring is None or ring.rule.length == 1:
        return EmptyError("there is no complete transition to draw; add steps until a next observation is known")
    rule = ring.rule
    shorter = " (or what is left of an episode that is over)" if rule.tails else ""
    return EmptyError(
        f"there is no complete sequence of {rule.length} steps{shorter} among the {ring.transitions} transitions here; "
        f"add steps. It takes the {rule.history + 1} rows up to its end, or its whole episode, among the newest "
        f"{ring.rows} of its env: a buffer of more rows holds more of them"
    )


def require_weights(tree: SumTree, places: Ints, weights: Doubles) -> None:
    """Test that a tree is sound, and that these places and no others have a weight: these.

    Raises:
        InvariantError: naming the first place that has another one.
    """
    tree.check()
    expected = np.zeros(len(tree))
    expected[places] = weights
    found = tree.get(np.arange(len(tree)))
    wrong = ~np.isclose(found, expected, rtol=1e-9, atol=0.0)  # powers of arrays and of numbers may round differently
    if wrong.any():
        at = int(wrong.argmax())
        raise InvariantError(f"sampler: place {at} has the weight {found[at]}; what is stored there has {expected[at]}")


def _uniform(count: int, key: int, total: float) -> Doubles:
    out = np.empty(count, np.float64)
    kernels.fast().masses(np.uint64(key), False, total, math.nextafter(total, 0.0), out)
    return out
