"""Weights of windows: what does not fit is refused. What they are is in samplers/test_sequence_weights.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from definitions import draws, tree
from relive import core
from relive.core.words import HISTORY, LENGTH, STRIDE, TAILS, WEIGH
from support.ring_plays import RingPlay

WINDOWS, EPISODES = 0, 2
"""What COUNTERS say is drawn equally often."""


def play_of(seed: int, weigh: int) -> tuple[np.random.Generator, RingPlay, Any]:
    """A random ring whose rule weighs in this way, and the places that can be drawn; there may be none."""
    rng = np.random.default_rng(seed)
    play = RingPlay(rng)
    counters = play.arrays.counters
    counters[HISTORY] = counters[LENGTH] - 1 + rng.integers(0, 3)
    counters[TAILS], counters[WEIGH] = rng.integers(2), weigh
    play.play(int(rng.integers(5, 90)))
    return rng, play, np.array(draws.anchors(play.arrays), np.int64)


def weighed(play: RingPlay, places: Any, drawable: Any) -> tuple[core.Tree, Any]:
    """A tree of the ring's windows, and its nodes."""
    leaves = play.num_envs * play.rows
    nodes = np.zeros(tree.offsets_of(leaves)[-1] + 1)
    made = core.Tree(nodes, leaves, np.empty(0))
    assert core.weigh_windows(made, play.core, places, drawable) == -1
    return made, nodes


def test_a_wrong_place_weighs_nothing_and_neither_do_those_before_it() -> None:
    _, play, anchors = play_of(3, WINDOWS)
    leaves = play.num_envs * play.rows
    made, nodes = weighed(play, anchors[:0], np.ones(0, np.uint8))
    for bad in (-1, leaves, 2**62, -(2**62)):
        assert core.weigh_windows(made, play.core, np.array([0, bad, 1]), np.ones(3, np.uint8)) == 1
        assert not nodes.any()
    with pytest.raises(ValueError, match="a flag for each place"):
        core.weigh_windows(made, play.core, np.array([0, 1]), np.ones(3, np.uint8))
    other = core.Tree(np.zeros(tree.offsets_of(leaves + 1)[-1] + 1), leaves + 1, np.empty(0))
    with pytest.raises(ValueError, match="a leaf for each row"):
        core.weigh_windows(other, play.core, np.array([0]), np.ones(1, np.uint8))
    with pytest.raises(ValueError, match="a leaf for each row"):
        core.draw_by_weight(other, 1, 0, None, None, play.core)
    with pytest.raises(ValueError, match="one for each env"):
        core.draw_by_weight(made, 1, 0, None, None, play.core, np.zeros(play.num_envs + 1, np.int64))
    for wrong in (play.arrays, 7):
        with pytest.raises(TypeError, match="the compiled ring"):
            core.draw_by_weight(made, 1, 0, None, None, wrong)
    with pytest.raises(TypeError, match="oldest rows"):
        core.draw_by_weight(made, 1, 0, None, None, play.core, [0])


@pytest.mark.parametrize("stride", [0, -5, 2**62])
def test_whatever_a_ring_says_of_its_windows_what_is_drawn_is_a_row(stride: int) -> None:
    rng, play, anchors = next(found for seed in range(99) if len((found := play_of(seed, EPISODES))[2]))
    ring, leaves = play.arrays, play.num_envs * play.rows
    made, nodes = weighed(play, anchors, np.ones(len(anchors), np.uint8))
    ring.step[:] = rng.integers(0, 2**31 - 1, leaves)
    ring.counters[STRIDE] = stride
    nodes[:leaves] = 1.0
    made.build()
    places, _ = core.draw_by_weight(made, 200, 5, None, None, play.core)
    assert ((places >= 0) & (places < leaves)).all()
