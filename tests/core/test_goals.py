"""Windows with other goals: however they are drawn, and what is refused; and where episodes end."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from relive import core
from relive.core import words as numbers
from relive.core.words import COMPLETED
from relive.views.hindsight import GoalBytes
from support import internals
from support.effort import first_of
from support.goal_plays import HerTwin, view_of
from support.ring_plays import RingPlay

PROBABILITY, WEIGHT, WIDTH = 176, 184, 192


def windows_of(ring: Any, layout: Any, width: int = WIDTH, size: int = 0, **options: Any) -> core.GoalWindows:
    """What reads windows with other goals as bytes; the last 16 have room for weights."""
    at = {"probability_at": width - 16, "weight_at": width - 8}
    fields = core.Fields([("rows", torch.uint8, (width - 16,), 0)], width)
    known = [("rows", torch.uint8, (width - 16,), 0), ("probability", torch.float64, (), width - 16)]
    weighed = core.Fields([*known, ("weight", torch.float32, (), width - 8)], width)
    goals = {"dtype": np.dtype(np.uint8), "shape": (size or layout.goal_bytes,)}
    return core.GoalWindows(ring, layout, fields, weighed, **(at | goals | options))


def rows_of(batch: Any) -> Any:
    return batch.fields()["rows"].contiguous().numpy()


@pytest.mark.parametrize("by", ["chance", "priority"])
def test_a_batch_of_a_draw_is_that_of_its_places(by: str) -> None:
    for seed in range(10):
        twin = HerTwin(2, 11, dress="goals", view=view_of()).play(*[".."] * 9, "TU", "..", "..", "..")
        ring = internals.ring(twin.buffer)
        ring.ends()
        anchors, leaves, rng = ring.anchors(), len(ring.step), np.random.default_rng(seed)
        tree = core.Tree(np.zeros(core.tree_offsets(leaves)[-1] + 1), leaves, np.empty(0))
        tree.set(anchors, rng.gamma(1.0, 2.0, len(anchors)))
        terms = np.array([0.6, 1e-6, 1.0, 0.0])
        memory = core.Priorities(tree, np.zeros(leaves, np.float32), terms, ring.core, np.zeros(0))
        drawn: Any = core.draw_by_chance(ring.core, 9, seed)
        if by == "priority":
            drawn = core.draw_by_priority(memory, 9, seed, True, 0.4, 0.0)
        fit = GoalBytes(ring, ("obs", "achieved_goal"), ("obs", "desired_goal"), seed % 5, False)
        found, wanted = (fit.core.draw(what, 2, 0.9, seed, 0.8) for what in (drawn, drawn[0]))
        assert found.chosen == wanted.chosen
        assert np.array_equal(found.aim, wanted.aim)
        batch, plain = found.fields(), wanted.fields()
        for name, array in drawn[1].items():
            assert np.array_equal(batch.pop((name,)).numpy(), array)
        assert all(torch.equal(batch[path], plain[path]) for path in plain)
        assert batch.keys() == plain.keys()


def small() -> tuple[Any, Any, Any]:
    play = RingPlay(np.random.default_rng(1), num_envs=2, rows=9).play(40)
    known: dict[str, Any] = {"goal_at": 8, "goal_bytes": 8, "into_obs": 0, "into_next": 112, "mark": 110}
    layout = core.GoalLayout(play.window_layout(), **known, strategy=numbers.FINAL, finished=False)
    return play, layout, play.live()


def test_a_place_that_is_no_rows_is_answered_by_its_position() -> None:
    play, layout, places = small()
    for beyond in (18, -1, 2**62):
        places[3] = beyond
        assert windows_of(play.core, layout).draw(places, 2, 0.9, 1, 0.5) == 3


def test_batches_without_rows_are_planned() -> None:
    play, layout, places = small()
    batch = windows_of(play.core, layout).draw(places[:0], 3, 0.9, 1, 0.5)
    assert (batch.chosen, batch.total, batch.relabel()) == (0, 0, -1)
    assert [len(x) for x in (batch.which, batch.begin, batch.now, batch.after, batch.last, batch.rows)] == [0] * 6
    assert rows_of(batch).shape == (0, WIDTH - 16)


def test_a_ring_that_notes_no_ends_has_no_other_goals() -> None:
    play, layout, places = small()
    ring = core.Ring(play.arrays._replace(ends=np.zeros(0, np.int32), seen=np.zeros(0, np.int64)))
    for ring_, ratio in ((ring, 1.0), (play.core, 0.0)):
        batch = windows_of(ring_, layout).draw(places, 1, 0.9, 1, ratio)
        assert batch.chosen == 0
        assert not rows_of(batch)[:, layout.mark].any()


def test_what_does_not_fit_is_refused() -> None:
    play, layout, places = small()
    windows = windows_of(play.core, layout)
    with pytest.raises(ValueError, match="at least 1 step"):
        windows.draw(places, 0, 0.9, 1, 1.0)
    for wrong in (places.astype(np.int32), places[None], None):
        with pytest.raises(TypeError):
            windows.draw(wrong, 1, 0.9, 1, 1.0)
    for count in (2**62, 2**50):
        with pytest.raises(MemoryError):
            windows.draw(core.draw_by_chance(play.core, count, 1), 1, 0.9, 1, 1.0)
    wrong_parts: list[dict[str, Any]] = [
        {"width": 112}, {"probability_at": 180}, {"probability_at": 192}, {"weight_at": 190}, {"weight_at": -1},
        {"shape": (7,)}, {"shape": (2**62, 2**62)}, {"dtype": np.dtype(np.complex64), "shape": (1,)},
        {"dtype": np.dtype("O"), "shape": (1,)}, {"dtype": "f4"}, {"shape": (-1, -8)},
    ]  # fmt: skip
    for change in wrong_parts:
        with pytest.raises(ValueError, match=r"does not fit|goals are numbers|dtype of goals"):
            windows_of(play.core, layout, **change)
    with pytest.raises(TypeError):
        windows_of(None, layout)
    with pytest.raises(ValueError, match="strategy"):
        core.GoalLayout(
            layout.window, goal_at=0, goal_bytes=0, into_obs=0, into_next=0, mark=0, strategy=5, finished=False
        )


def test_results_that_do_not_fit_a_batch_are_refused_before_anything_is_written() -> None:
    play, layout, places = small()
    batch = windows_of(play.core, layout).draw(places, 2, 0.9, 1, 1.0)
    assert batch.total > 1
    good, before = np.zeros(batch.total, np.float32), rows_of(batch).copy()
    for at in range(3):
        for wrong in (good[1:], np.append(good, 0), good[None]):
            given: list[Any] = [None, None, None]
            given[at] = wrong
            with pytest.raises(ValueError, match=r"a step|too deep"):
                batch.relabel(*given)
    assert np.array_equal(rows_of(batch), before)
    assert batch.relabel(good[::-1], good == 0, np.zeros(2 * batch.total, bool)[::2]) == -1


def test_what_a_batch_knows_cannot_be_changed() -> None:
    play, layout, places = small()
    batch = windows_of(play.core, layout).draw(places, 2, 0.9, 1, 1.0)
    for name in ("which", "begin", "used", "first", "end", "aim", "now", "after", "last", "rows"):
        array = getattr(batch, name)
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
    kept, begin = batch.rows, batch.begin
    wanted = kept.copy(), begin.copy()
    del batch
    gc.collect()
    filler = [np.full(n, 255, np.uint8) for n in range(16, 9000, 8)]
    assert (kept.tobytes(), begin.tobytes()) == (wanted[0].tobytes(), wanted[1].tobytes())
    del filler


def test_a_ring_that_was_bound_to_other_rows_is_refused() -> None:
    play, layout, places = small()
    batch = windows_of(play.core, layout).draw(places, 2, 0.9, 1, 1.0)
    play.core.rebind(RingPlay(np.random.default_rng(2), num_envs=1, rows=5).arrays)
    with pytest.raises(ValueError, match="other rows"):
        batch.relabel()


def test_windows_are_not_copied_and_not_pickled() -> None:
    play, layout, _ = small()
    windows = windows_of(play.core, layout)
    for refused in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="pickle"):
            refused(windows)


# Where episodes end.


@pytest.mark.parametrize("seed", first_of(2, range(5)))
def test_ends_of_episodes_are_known_however_seldom_they_are_asked_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    twin = HerTwin(2, 11, dress="goals", view=view_of("final"))
    for _ in range(12):
        for _ in range(int(rng.integers(1, 60))):
            twin.add("".join(rng.choice(list("......TU"), 2)))
        if rng.random() < 0.3:
            twin.clear() if rng.random() < 0.5 else twin.interrupt()
            twin.add("..")
            twin.add("..")
        twin.check_drawn(twin.buffer.sample(16), twin.buffer.view)
        twin.buffer.check()


def test_check_finds_an_episode_that_ends_elsewhere() -> None:
    from relive.errors import InvariantError

    twin = HerTwin(1, 11, dress="goals", view=view_of()).play(*"..T.....")
    twin.buffer.sample(4)
    twin.buffer.check()
    ends, _ = internals.ring(twin.buffer).ends()
    ends[1] += 1
    with pytest.raises(InvariantError, match=r"8: the episode of row \d+ of env 0 ends elsewhere"):
        twin.buffer.check()
    ends[1] -= 1
    internals.ring(twin.buffer).step[1] = 0
    with pytest.raises(InvariantError):
        twin.buffer.check()


def test_a_number_of_transitions_beyond_32_bits_does_no_harm() -> None:
    play, rows = "..T.....U..", 9
    plain, late = (HerTwin(1, rows, dress="goals", view=view_of("future", 2)) for _ in range(2))
    ring = internals.ring(late.buffer)
    ring.state[:, :2] = rows * 2**30  # rows that were written, at the same places, and cleared
    ring.state[:, 3] = ring.counters[COMPLETED] = 2**32 - 3  # transitions completed: the play goes beyond
    for twin in (plain, late):
        twin.play(*play)
        twin.buffer.check()
    for _ in range(5):
        one, other = plain.buffer.sample(30), late.buffer.sample(30)
        assert torch.equal(other["index"], one["index"] + rows * 2**30)
        for name in ("obs", "next_obs"):
            assert torch.equal(one[name, "desired_goal"], other[name, "desired_goal"])
        late.buffer.check()
