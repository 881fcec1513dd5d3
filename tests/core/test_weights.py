"""Weights of windows, and draws of episodes: compiled code beside the lists of the definition, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from definitions import draws, tree
from definitions import weights as definition
from definitions.places import oldest, row_at
from relive import core
from relive.core.words import ALONE, HEAD, HISTORY, LENGTH, LINKED, STRIDE, TAILS, WEIGH
from support.ring_plays import RingPlay

WEIGHS = [definition.WINDOWS, definition.STEPS, definition.EPISODES]


def play_of(seed: int, kind: int, weigh: int) -> tuple[np.random.Generator, RingPlay, Any]:
    """A random ring whose rule weighs in this way, and the places that can be drawn; there may be none."""
    rng = np.random.default_rng(seed)
    play = RingPlay(rng, kind)
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


@given(st.integers(0, 2**32), st.sampled_from([0, ALONE, LINKED]), st.sampled_from(WEIGHS))
def test_windows_weigh_what_the_definition_says(seed: int, kind: int, weigh: int) -> None:
    rng, play, anchors = play_of(seed, kind, weigh)
    made, nodes = weighed(play, anchors, np.ones(len(anchors), np.uint8))
    wanted = np.zeros(play.num_envs * play.rows)
    for place, weight in definition.weights(play.arrays).items():
        wanted[place] = weight
    assert nodes[: len(wanted)].tobytes() == wanted.tobytes()
    summed = nodes.copy()
    made.build()
    assert nodes.tobytes() == summed.tobytes()
    # what can be drawn no more weighs nothing, and only the last word on a place counts
    gone = rng.random(len(anchors)) < 0.5
    again = np.concatenate([anchors, anchors[gone]])
    flags = np.concatenate([np.ones(len(anchors)), np.zeros(gone.sum())]).astype(np.uint8)
    _, nodes = weighed(play, again, flags)
    assert not nodes[anchors[gone]].any()
    if weigh != definition.EPISODES:
        assert np.array_equal(nodes[anchors[~gone]], wanted[anchors[~gone]])


@given(st.integers(0, 2**32), st.sampled_from([0, ALONE, LINKED]), st.integers(0, 40), st.booleans())
def test_draws_of_episodes_choose_among_the_windows_of_the_definition(
    seed: int, kind: int, count: int, recent: bool
) -> None:
    rng, play, anchors = play_of(seed, kind, definition.EPISODES)
    if not len(anchors):
        return
    ring, leaves = play.arrays, play.num_envs * play.rows
    made, nodes = weighed(play, anchors, np.ones(len(anchors), np.uint8))
    low = np.array([oldest(e, ring) for e in range(play.num_envs)], np.int64)
    offsets, cover = tree.offsets_of(leaves), (None, None)
    if recent:  # no newest window ends before the oldest row that counts
        for e in range(play.num_envs):
            newest = [row_at(int(p), ring)[1] for p in np.flatnonzero(nodes[:leaves]) if p // play.rows == e]
            low[e] = rng.integers(low[e], min(newest, default=int(ring.state[e, HEAD])) + 1)
    whole = np.array(offsets[-1:]), nodes[-1:].copy()
    drawn = core.draw_by_weight(made, count, seed, *cover, play.core, low if recent else None)
    places, extras = drawn
    masses = np.array(draws.masses(seed, False, float(nodes[-1]), count), np.float64)
    newest = tree.find(nodes, offsets, whole[0], whole[1].tolist(), masses)[0]
    random = draws.masses(core.mix(seed), False, 1.0, count)
    wanted = [
        definition.window_of_episode(place, int(low[place // play.rows]), u, ring)
        for place, u in zip(newest, random, strict=True)
    ]
    assert places.tolist() == wanted
    assert extras == {}


def test_a_wrong_place_weighs_nothing_and_neither_do_those_before_it() -> None:
    _, play, anchors = play_of(3, 0, definition.WINDOWS)
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
    rng, play, anchors = next(found for seed in range(99) if len((found := play_of(seed, 0, definition.EPISODES))[2]))
    ring, leaves = play.arrays, play.num_envs * play.rows
    made, nodes = weighed(play, anchors, np.ones(len(anchors), np.uint8))
    ring.step[:] = rng.integers(0, 2**31 - 1, leaves)
    ring.counters[STRIDE] = stride
    nodes[:leaves] = 1.0
    made.build()
    places, _ = core.draw_by_weight(made, 200, 5, None, None, play.core)
    assert ((places >= 0) & (places < leaves)).all()
