"""Draws that are made when they are read, and windows as batches: core does what the definitions say, to the bit."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from definitions import draws, priorities, tree
from relive import core
from relive.core.words import ALONE, DRAWABLE, LINKED
from support.random_draws import others_run_during
from support.ratings import Pair
from support.ring_plays import RingPlay

KINDS = [0, ALONE, LINKED]
WIDTH = 192
"""Bytes of a row of a batch. Those from 128 on are free of what windows have if nothing is copied there."""
PROBABILITY, WEIGHT = 176, 184


def equal(found: Any, wanted: list[Any], dtype: Any) -> None:
    assert found.dtype == dtype
    assert found.tobytes() == np.array(wanted, dtype).tobytes()


def drawable(rng: np.random.Generator, kind: int = 0, **sizes: int) -> tuple[RingPlay, Any]:
    """A ring with rows that can be drawn, counted as a ring counts them, and their places."""
    while True:
        play = RingPlay(rng, kind, **sizes).play(int(rng.integers(5, 60)))
        anchors = np.array(draws.anchors(play.arrays), np.int64)
        if len(anchors):
            play.arrays.counters[DRAWABLE] = len(anchors)
            return play, anchors


def tree_of(rng: np.random.Generator, leaves: int, some: float = 0.7) -> tuple[core.Tree, Any]:
    """A tree of random weights, some of them 0, and its nodes."""
    nodes = np.zeros(tree.offsets_of(leaves)[-1] + 1)
    nodes[:leaves] = rng.gamma(1.0, 2.0, leaves) * (rng.random(leaves) < some)
    made = core.Tree(nodes, leaves, np.empty(0))
    made.build()
    return made, nodes


def cover_of(rng: np.random.Generator, nodes: Any, leaves: int) -> tuple[Any, Any]:
    """The cover of two random ranges, and its sums."""
    ends = np.sort(rng.integers(0, leaves + 1, 4))
    places, until = tree.cover(nodes, tree.offsets_of(leaves), ends[::2], ends[1::2])
    return np.array(places, np.int64), np.array(until, np.float64)


# draws


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.integers(1, 30))
@settings(max_examples=settings.default.max_examples // 2)
def test_draws_by_chance_are_those_of_the_definition(seed: int, kind: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    play, _ = drawable(rng, kind)
    for newest in (0, int(rng.integers(1, 20)), 2**62, -3):
        key = int(rng.integers(0, 2**63)) * int(rng.choice([1, -1, 2]))
        drawn = core.draw_by_chance(play.core, count, key, newest)
        assert (drawn.count, drawn.weighed, len(drawn)) == (count, False, 2)
        wanted = draws.draw(play.arrays, key, newest, count)
        if wanted is None:  # none of the newest ends a window
            with pytest.raises(ValueError, match="nothing to draw"):
                tuple(drawn)
            continue
        places, extras = drawn
        equal(places, wanted, np.int64)
        assert extras == {}
        again, _ = drawn
        assert again is not places
        assert again.tobytes() == places.tobytes()


@given(st.integers(0, 2**32), st.booleans(), st.integers(0, 30))
@settings(max_examples=settings.default.max_examples // 2)
def test_draws_by_weight_are_those_of_the_definition(seed: int, some: bool, count: int) -> None:
    rng = np.random.default_rng(seed)
    leaves = int(rng.integers(1, 200))
    made, nodes = tree_of(rng, leaves)
    offsets = tree.offsets_of(leaves)
    cover = cover_of(rng, nodes, leaves) if some else (np.array(offsets[-1:]), nodes[-1:].copy())
    drawn = core.draw_by_weight(made, count, seed, *(cover if some else ()))
    assert (drawn.count, drawn.weighed) == (count, False)
    total = float(cover[1][-1]) if len(cover[1]) else 0.0
    if not total > 0:
        with pytest.raises(ValueError, match="nothing to draw"):
            tuple(drawn)
        return
    places, extras = drawn
    masses = np.array(draws.masses(seed, False, total, count), np.float64)
    equal(places, tree.find(nodes, offsets, cover[0], cover[1].tolist(), masses)[0], np.int64)
    assert extras == {}


@given(
    st.integers(0, 2**32), st.booleans(), st.sampled_from([0.0, 0.4, 1.0]), st.booleans(), st.booleans(),
    st.integers(0, 30),
)  # fmt: skip
@settings(max_examples=settings.default.max_examples // 2)
def test_draws_by_priority_are_those_of_the_definition(
    seed: int, stratified: bool, beta: float, some: bool, lowest: bool, count: int
) -> None:
    pair = Pair(seed)
    leaves = len(pair.plain.errors)
    whole = np.array(pair.plain.offsets[-1:]), pair.plain.nodes[-1:].copy()
    cover = cover_of(pair.rng, pair.plain.nodes, leaves) if some else whole
    weights = pair.plain.nodes[:leaves]
    low = float(weights[weights > 0].min()) if lowest and weights.any() else 0.0
    terms = seed, stratified, beta, low
    drawn = core.draw_by_priority(pair.core, count, *terms, *(cover if some else ()))
    assert (drawn.count, drawn.weighed) == (count, True)
    wanted = priorities.draw_weighted(pair.plain, *terms, *cover, count)
    if wanted is None:
        with pytest.raises(ValueError, match="nothing to draw"):
            tuple(drawn)
        return
    places, extras = drawn
    assert list(extras) == ["weight", "probability"]
    equal(places, wanted[0], np.int64)
    equal(extras["probability"], wanted[1], np.float64)
    equal(extras["weight"], wanted[2], np.float32)


def test_a_draw_is_made_of_what_there_is_when_it_is_read() -> None:
    rng = np.random.default_rng(5)
    made, _ = tree_of(rng, 40, 1.0)
    drawn = core.draw_by_weight(made, 9, 3)
    before = drawn[0].tolist()
    made.set(np.arange(40), np.zeros(1))
    made.set(np.array([7]), np.ones(1))
    assert before != drawn[0].tolist() == [7] * 9


def test_a_cover_is_that_of_the_moment_of_the_draw() -> None:
    rng = np.random.default_rng(5)
    made, nodes = tree_of(rng, 40, 1.0)
    places, until = cover_of(rng, nodes, 40)
    drawn = core.draw_by_weight(made, 9, 3, places, until)
    before = drawn[0].tolist()
    places[:], until[:] = -1, 1e300
    assert drawn[0].tolist() == before


def test_a_draw_is_a_pair() -> None:
    play, _ = drawable(np.random.default_rng(0))
    drawn = core.draw_by_chance(play.core, 4, 1)
    places, extras = drawn
    assert drawn[0].tolist() == drawn[-2].tolist() == places.tolist()
    assert drawn[1] == drawn[-1] == extras
    assert [len(part) for part in tuple(drawn)] == [4, 0]
    for at in (2, -3, 2**62):
        with pytest.raises(IndexError):
            drawn[at]
    with pytest.raises(TypeError):
        drawn["places"]


def ring_draw(count: Any, key: Any = 1) -> Any:
    return core.draw_by_chance(drawable(np.random.default_rng(0))[0].core, count, key)


def tree_draw(count: Any, key: Any = 1) -> Any:
    return core.draw_by_weight(tree_of(np.random.default_rng(0), 20)[0], count, key)


def priority_draw(count: Any, key: Any = 1) -> Any:
    seed = next(seed for seed in range(99) if Pair(seed).plain.nodes[-1] > 0)
    return core.draw_by_priority(Pair(seed).core, count, key, True, 0.4, 0.0)


MAKE: dict[str, Callable[..., Any]] = {"chance": ring_draw, "weight": tree_draw, "priority": priority_draw}


@pytest.mark.parametrize("by", MAKE)
def test_sizes_and_keys_of_a_draw_are_checked(by: str) -> None:
    make = MAKE[by]
    for count in (-1, -(2**62)):
        with pytest.raises(ValueError, match="negative"):
            make(count)
    for count in (1.0, "1", None, 2**63):
        with pytest.raises(TypeError):
            make(count)
    for key in (1.0, "1", None):
        with pytest.raises(TypeError):
            make(3, key)
    assert make(np.uint8(3)).count == 3
    assert make(3, -1)[0].tolist() == make(3, 2**64 - 1)[0].tolist() == make(3, np.uint64(2**64 - 1))[0].tolist()
    assert make(0)[0].shape == (0,)
    for count in (2**62, 2**60 + 1):
        with pytest.raises((MemoryError, ValueError)):
            tuple(make(count))


@pytest.mark.parametrize("by", MAKE)
def test_a_draw_keeps_what_it_is_made_of(by: str) -> None:
    drawn, other = MAKE[by](30), MAKE[by](30)
    before = other[0].tolist()
    gc.collect()
    filler = [np.full(n, 255, np.uint8) for n in range(16, 9000, 8)]
    assert drawn[0].tolist() == before
    del filler


@pytest.mark.parametrize("by", MAKE)
def test_a_draw_is_not_copied_and_not_pickled(by: str) -> None:
    drawn = MAKE[by](3)
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pickle"):
            refused(drawn)


def test_draws_are_made_by_functions_of_compiled_parts_alone() -> None:
    for wrong in (None, 3, np.zeros(3), object()):
        with pytest.raises(TypeError):
            core.draw_by_chance(wrong, 3, 1)
        with pytest.raises(TypeError):
            core.draw_by_weight(wrong, 3, 1)
        with pytest.raises(TypeError):
            core.draw_by_priority(wrong, 3, 1, True, 0.4, 0.0)
    with pytest.raises(TypeError):
        core.Draw()
    empty: Any = core.Draw.__new__(core.Draw)
    with pytest.warns(RuntimeWarning, match="uninitialized"), pytest.raises(TypeError):
        tuple(empty)


@pytest.mark.parametrize("by", ["weight", "priority"])
def test_covers_are_checked(by: str) -> None:
    pair = Pair(next(seed for seed in range(99) if Pair(seed).plain.nodes[-1] > 0))
    offsets = pair.plain.offsets
    made = core.Tree(pair.memory.nodes, len(pair.memory.errors), np.empty(0))
    root, total = np.array(offsets[-1:]), pair.memory.nodes[-1:].copy()

    def draw(places: Any, until: Any) -> Any:
        if by == "weight":
            return tuple(core.draw_by_weight(made, 5, 1, places, until))
        return tuple(core.draw_by_priority(pair.core, 5, 1, True, 0.4, 0.0, places, until))

    assert draw(root, total)[0].tolist() == draw(None, None)[0].tolist()
    wrong: list[Any] = [
        (root.astype(np.int32), total), (root, total.astype(np.float32)), (root, None), (None, total),
        (root[None], total), (root.tolist(), total.tolist()),
    ]  # fmt: skip
    for cover in wrong:
        with pytest.raises(TypeError, match="cover"):
            draw(*cover)
    leaves = len(pair.plain.errors)
    for places in (root + 1, root * 0 - 1, root * 0 + 2**62, root * 0 + leaves):  # no nodes: some leaves are drawn
        found = draw(places, total)[0]
        assert found.min() >= 0
        assert found.max() < leaves
    for places, until in ((root, np.ones(2)), (np.repeat(root, 2), total)):
        with pytest.raises(ValueError, match="a sum for each node"):
            draw(places, until)
    for sums in ([np.nan], [0.0], [-1.0], []):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw(root[: len(sums)], np.array(sums))
    for sums in (np.inf, 1e300):  # too large for the tree: still leaves of it
        places, _ = draw(root, np.array([sums]))
        assert ((places >= 0) & (places < len(pair.plain.errors))).all()


@pytest.mark.parametrize("why", ["no rows", "cleared", "counted wrongly"])
def test_there_is_nothing_to_draw_from_a_ring_without_anchors(why: str) -> None:
    rng = np.random.default_rng(3)
    play = RingPlay(rng, num_envs=2, rows=9)
    if why == "cleared":
        play.play(20).arrays.state[:, 1] = play.arrays.state[:, 0]
    elif why == "counted wrongly":
        play.add(0)  # one row that waits for its next observation
        play.arrays.counters[DRAWABLE] = 1
    drawn = core.draw_by_chance(play.core, 4, 1)
    with pytest.raises(ValueError, match="nothing to draw"):
        tuple(drawn)
    with pytest.raises(ValueError, match="nothing to draw"):
        windows_of(play).sample(drawn, 1, 0.9)


# windows


def known_fields(play: RingPlay, layout: Any, weighed: bool) -> dict[str, tuple[Any, tuple[int, ...], int]]:
    """All parts of a row that a window writes: dtype, shape and first byte."""
    own = layout.next_bytes < 0
    found: dict[str, tuple[Any, tuple[int, ...], int]] = {
        "index": (torch.int64, (), layout.index),
        "next_index": (torch.int64, (), layout.next_index),
        "discount": (torch.float32, (), layout.discount),
        "steps": (torch.int32, (), layout.steps),
        "reward": (torch.float32, (), layout.reward),
        "terminated": (torch.bool, (), layout.terminated),
        "truncated": (torch.uint8, (), layout.truncated),
        "step": (torch.uint8, (min(layout.step_bytes, 80),), 0),
    }
    if not own:
        found["next"] = torch.uint8, (layout.next_bytes,), layout.next_at
    if weighed:
        found["weight"] = torch.float32, (), WEIGHT
        found["probability"] = torch.float64, (), PROBABILITY
    return found


def layout_of(play: RingPlay) -> Any:
    """A layout of rows that leaves the bytes for weights alone."""
    while True:
        layout = play.window_layout()
        if 112 + max(layout.next_bytes, layout.own_bytes) <= PROBABILITY:
            return layout


def fields_of(known: dict[str, tuple[Any, tuple[int, ...], int]]) -> Any:
    return core.Fields([(name, *facts) for name, facts in known.items()], WIDTH)


def windows_of(play: RingPlay, layout: Any = None, weighed: bool = False, in_files: bool = False) -> Any:
    layout = layout or layout_of(play)
    at = {"probability_at": PROBABILITY, "weight_at": WEIGHT} if weighed else {}
    return core.Windows(play.core, layout, fields_of(known_fields(play, layout, weighed)), **at, in_files=in_files)


def wanted_of(play: RingPlay, layout: Any, places: Any, n: int, gamma: float, extras: dict[str, Any]) -> Any:
    """The bytes of all parts of a batch of the windows at these places."""
    rows = np.full((len(places), WIDTH), 9, np.uint8)
    assert core.read_windows(play.core, layout, places, n, gamma, rows, np.zeros(len(places), np.int64)) == -1
    found: dict[str, bytes] = {}
    for name, (dtype, shape, at) in known_fields(play, layout, False).items():
        size = dtype.itemsize * int(np.prod(shape, dtype=int))
        found[name] = rows[:, at : at + size].tobytes()
    return found | {name: array.tobytes() for name, array in extras.items()}


def bytes_of(batch: dict[str, Any]) -> dict[str, bytes]:
    return {name: x.contiguous().numpy().tobytes() for name, x in batch.items()}


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_windows_that_are_drawn_and_read_at_once_are_those_of_the_places(seed: int, kind: int, in_files: bool) -> None:
    rng = np.random.default_rng(seed)
    play, anchors = drawable(rng, kind)
    layout = layout_of(play)
    windows = windows_of(play, layout, in_files=in_files)
    for count in (0, 1, int(rng.integers(2, 50))):
        n, gamma = int(rng.integers(1, 8)), float(rng.random())
        drawn = core.draw_by_chance(play.core, count, seed)
        for given_, places in ((drawn, drawn[0]), (rng.choice(anchors, count), None)):
            batch = windows.sample(given_, n, gamma)
            assert all(x.shape[0] == count for x in batch.values())
            wanted = wanted_of(play, layout, given_ if places is None else places, n, gamma, {})
            assert bytes_of(batch) == wanted


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_weights_are_those_of_the_draw(seed: int, kind: int, some: bool) -> None:
    rng = np.random.default_rng(seed)
    play, anchors = drawable(rng, kind)
    leaves = len(play.arrays.step)
    made, nodes = tree_of(rng, leaves, 0.0)
    made.set(anchors, rng.gamma(1.0, 2.0, len(anchors)))
    facts = np.array([0.6, 1e-6, 1.0, 0.0])
    memory = core.Priorities(made, np.zeros(leaves, np.float32), facts, play.core, np.zeros(0))
    cover: Any = cover_of(rng, nodes, leaves) if some else ()
    drawn = core.draw_by_priority(memory, int(rng.integers(0, 40)), seed, True, 0.4, 0.0, *cover)
    layout, n, gamma = layout_of(play), int(rng.integers(1, 5)), 0.9
    windows = windows_of(play, layout, weighed=True)
    if some and not (len(cover[1]) and cover[1][-1] > 0):
        with pytest.raises(ValueError, match="nothing to draw"):
            windows.sample(drawn, n, gamma)
        return
    chosen, extras = drawn
    batch = windows.sample(drawn, n, gamma)
    assert bytes_of(batch) == wanted_of(play, layout, chosen, n, gamma, extras)
    by_weight = core.draw_by_weight(made, 7, seed)
    plain = windows_of(play, layout)
    assert bytes_of(plain.sample(by_weight, n, gamma)) == wanted_of(play, layout, by_weight[0], n, gamma, {})
    with pytest.raises(ValueError, match="no room for the weights"):
        plain.sample(drawn, n, gamma)


def test_a_place_that_is_no_rows_is_answered_by_its_position() -> None:
    play, anchors = drawable(np.random.default_rng(3), num_envs=2, rows=7)
    windows = windows_of(play)
    for beyond in (-1, -(2**62), 14, 2**62):
        places = np.append(anchors, [beyond, beyond])
        assert windows.sample(places, 2, 0.9) == len(anchors)
        assert windows.sample(places[::-1].copy(), 2, 0.9) == 0


def test_a_draw_of_a_ring_with_more_rows_is_refused() -> None:
    rng = np.random.default_rng(3)
    small, _ = drawable(rng, num_envs=1, rows=5)
    nodes = np.zeros(tree.offsets_of(99)[-1] + 1)
    nodes[98] = 1.0
    made = core.Tree(nodes, 99, np.empty(0))
    made.build()
    with pytest.raises(ValueError, match="of another ring"):
        windows_of(small).sample(core.draw_by_weight(made, 3, 1), 1, 0.9)


def test_what_windows_are_read_of_is_checked() -> None:
    play, anchors = drawable(np.random.default_rng(1))
    windows = windows_of(play)
    wrong: list[Any] = [
        None, 3, anchors.tolist(), anchors.astype(np.int32), anchors.astype(np.float64), anchors[None],
        np.repeat(anchors, 2)[::2], torch.from_numpy(anchors), (anchors, {}),
    ]  # fmt: skip
    for places in wrong:
        if places is not None and getattr(places, "shape", ()) == (1,) and places.dtype == np.int64:
            continue  # a single place has no gaps
        with pytest.raises(TypeError):
            windows.sample(places, 1, 0.9)
    for steps in (0, -1, -(2**62)):
        with pytest.raises(ValueError, match="at least 1 step"):
            windows.sample(anchors, steps, 0.9)
    assert windows.sample(anchors, 2**62, 0.9).keys() == windows.sample(anchors, 1, 0.9).keys()
    with pytest.raises(TypeError):
        windows.sample(anchors, 1.5, 0.9)
    empty: Any = core.Draw.__new__(core.Draw)
    with pytest.warns(RuntimeWarning, match="uninitialized"), pytest.raises(TypeError):
        windows.sample(empty, 1, 0.9)


def test_batches_of_more_memory_than_there_is_are_refused() -> None:
    play, _ = drawable(np.random.default_rng(1))
    windows = windows_of(play)
    for count in (2**62, 2**56, 2**50):
        with pytest.raises(MemoryError):
            windows.sample(core.draw_by_chance(play.core, count, 1), 1, 0.9)


def test_layouts_are_checked() -> None:
    play = RingPlay(np.random.default_rng(2), 0).play(20)
    layout = layout_of(play)
    known = known_fields(play, layout, True)
    fields = fields_of(known)
    core.Windows(play.core, layout, fields)
    core.Windows(play.core, layout, fields, PROBABILITY, WEIGHT)
    two: list[tuple[int, int]] = [
        (PROBABILITY, -1), (-1, WEIGHT), (PROBABILITY + 4, WEIGHT), (PROBABILITY, WEIGHT + 2), (WIDTH, WEIGHT),
        (PROBABILITY, WIDTH), (2**63 - 8, WEIGHT), (PROBABILITY, 2**63 - 4),
    ]  # fmt: skip
    for at in two:
        with pytest.raises(ValueError, match="does not fit"):
            core.Windows(play.core, layout, fields, *at)
    for width in (96, 184, 16):
        narrow = core.Fields([("reward", torch.float32, (), 0)], width)
        with pytest.raises(ValueError, match="does not fit"):
            core.Windows(play.core, layout, narrow)
    names = [name for name in dir(layout) if not name.startswith("_") and name != "fits"]
    own = {name: getattr(layout, name) for name in names}
    for change in (
        {"index": 185},
        {"truncated": -1},
        {"step_bytes": play.width + 1},
        {"next_at": 192, "next_bytes": 1},
    ):
        with pytest.raises(ValueError, match="does not fit"):
            core.Windows(play.core, core.WindowLayout(**(own | change)), fields)
    for parts in ((None, layout, fields), (play.core, None, fields), (play.core, layout, None), (1, layout, fields)):
        with pytest.raises(TypeError):
            core.Windows(*parts)


def test_a_ring_that_is_bound_to_other_rows_is_followed_if_they_fit() -> None:
    rng = np.random.default_rng(4)
    play, anchors = drawable(rng, num_envs=1, rows=20)
    windows = windows_of(play)
    before = bytes_of(windows.sample(anchors, 1, 0.9))
    copied = play.arrays.memory.copy()
    play.core.rebind(play.arrays._replace(memory=copied))
    play.arrays.memory[...] = 0
    assert bytes_of(windows.sample(anchors, 1, 0.9))["step"] == before["step"]
    wide = np.concatenate([copied, copied], axis=1)
    play.core.rebind(play.arrays._replace(memory=wide))
    windows.sample(anchors, 1, 0.9)
    layout = layout_of(play)
    while layout.step_bytes <= 16:
        layout = layout_of(play)
    windows = windows_of(play, layout)
    narrow = np.zeros((len(wide), 16), np.uint8)
    play.core.rebind(play.arrays._replace(memory=narrow, step_bytes=0, obs_bytes=0))
    with pytest.raises(ValueError, match="another width"):
        windows.sample(anchors, 1, 0.9)


# memory and threads


def test_tensors_and_windows_outlive_what_they_were_made_of() -> None:
    rng = np.random.default_rng(6)
    play, anchors = drawable(rng)
    layout = layout_of(play)
    windows, wanted = windows_of(play, layout), wanted_of(play, layout, anchors, 3, 0.9, {})
    del play, layout
    gc.collect()
    filler = [np.full(n, 255, np.uint8) for n in range(16, 9000, 8)]
    batch = windows.sample(anchors, 3, 0.9)
    del windows
    gc.collect()
    filler += [np.full(n, 255, np.uint8) for n in range(16, 9000, 8)]
    assert bytes_of(batch) == wanted
    one = batch["step"]
    del batch
    gc.collect()
    filler += [np.full(n, 255, np.uint8) for n in range(16, 9000, 8)]
    assert one.numpy().tobytes() == wanted["step"]


def test_memory_of_a_large_batch_is_used_again_once_it_is_dropped_and_not_before() -> None:
    play, anchors = drawable(np.random.default_rng(7))
    windows, many = windows_of(play), np.repeat(anchors, 2**19 // len(anchors))

    def address(batch: Any) -> int:
        return batch["index"].data_ptr()

    kept = windows.sample(many, 1, 0.9)
    index = kept["index"]
    wanted = index.clone()
    del kept
    seen = {address(windows.sample(many, 1, 0.9)) for _ in range(5)}
    assert len(seen) == 1
    assert index.data_ptr() not in seen
    assert torch.equal(index, wanted)


def test_windows_are_not_copied_and_not_pickled() -> None:
    windows = windows_of(RingPlay(np.random.default_rng(0)).play(9))
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pickle"):
            refused(windows)


@pytest.mark.parametrize("kind", ["draw", "places", "fewer in files"])
def test_other_threads_run_while_a_long_batch_is_read_and_only_then(kind: str) -> None:
    play, anchors = drawable(np.random.default_rng(8))
    windows = windows_of(play, in_files=kind == "fewer in files")
    many: Any = core.draw_by_chance(play.core, 20_000, 1) if kind == "draw" else np.resize(anchors, 20_000)
    if kind == "fewer in files":
        many = many[:1300]  # too few bytes to let others run in RAM
        assert many.size * WIDTH < 2**18
    assert others_run_during(lambda _: windows.sample(many, 1, 0.9))
    if kind != "fewer in files":
        assert not others_run_during(lambda _: windows.sample(anchors[:1], 1, 0.9))


def test_places_that_another_thread_changes_meanwhile_are_those_of_the_call() -> None:
    play, anchors = drawable(np.random.default_rng(9))
    windows, places = windows_of(play), np.resize(anchors, 60_000)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            places[-1000:] = 2**60
            places[-1000:] = anchors[0]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(30):
            found = windows.sample(places, 1, 0.9)  # a batch, or the position of the first place that is no row's
            assert isinstance(found, dict) or 59_000 <= found < 60_000
    finally:
        stop.set()
        thread.join()


def test_threads_share_windows() -> None:
    play, anchors = drawable(np.random.default_rng(10))
    layout = layout_of(play)
    windows, many = windows_of(play, layout), np.resize(anchors, 8000)
    wanted, wrong = wanted_of(play, layout, anchors, 2, 0.9, {}), list[int]()

    def work(number: int) -> None:
        for _ in range(20):
            batch = windows.sample(many, 2, 0.9)
            if bytes_of({name: x[: len(anchors)] for name, x in batch.items()}) != wanted:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
