"""Windows with other goals: core plans and rewrites them as the definition says; and where episodes end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import inside
from covering import covering
from definitions import goals as definition
from relabelling import HerTwin, view_of
from relive import core
from relive.core import windows as numbers
from relive.core.words import COMPLETED
from relive.views.hindsight import GoalBytes
from ring_plays import RingPlay

MEMBERS = ("which", "begin", "now", "after", "spans", "rewards", "flags", "used")


def planned(ring: Any, arrays: Any, layout: Any, places: Any, others: Any, n: int, key: int, width: int) -> None:
    """Core and the definition plan the same goals in the same memory, and make the same of their rewards."""
    count, results = len(places), list[list[Any]]()
    for plain in (False, True):
        out, last = np.full((count, width), 9, np.uint8), np.full(count, -9, np.int64)
        steps: Any = core.RelabelledSteps(count, n)
        for name in MEMBERS:
            getattr(steps, name)[...] = 0
        pairs = np.zeros(2 * count * n * layout.goal_bytes, np.uint8)
        given = layout, places, n, 0.7, key, 0.7, others, out, last
        if plain:
            steps = SimpleNamespace(**{name: getattr(steps, name) for name in MEMBERS})
            found = definition.plan_goals(arrays, *given, steps, pairs)
        else:
            found = core.plan_goals(ring, *given, steps, pairs)
        total = int(steps.begin[found])
        results.append([found, steps.which[:found].copy(), steps.begin[: found + 1].copy()])
        results[-1].append(steps.spans[:, :found].copy())
        results[-1] += [x[..., :total].copy() for x in (steps.now, steps.after, steps.rewards, steps.flags)]
        results[-1] += [pairs, out.copy(), last.copy()]
        judge = np.random.default_rng(key % 2**32)
        rewards, steps.flags[:] = judge.random(count * n, np.float32), judge.random((2, count * n)) < 0.2

        def relabel(judged: bool, given: Any = (found, out, last, steps, rewards), plain: bool = plain) -> int:
            found, *rest = given
            if plain:
                return definition.relabel_windows(arrays, layout, 0.7, found, judged, *rest)
            return core.relabel_windows(ring, layout, 0.7, judged, *rest)

        assert relabel(True) == -1
        results[-1] += [out.copy(), last.copy(), steps.used[:found].copy()]
        if total:
            rewards[total - 1] = [np.nan, np.inf, -np.inf][key % 3]
            assert relabel(True) == total - 1
            assert np.array_equal(out, results[-1][-3])
            assert relabel(False) == -1
    for fast, wanted in zip(*results, strict=True):
        assert np.asarray(fast).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize(("seed", "strategy"), covering(range(10), range(5)))
def test_goals_of_a_replay_are_as_defined(seed: int, strategy: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs, rows, n = int(rng.integers(1, 4)), int(rng.integers(3, 12)), int(rng.integers(1, 5))
    twin = HerTwin(num_envs, rows, dress="goals")
    for t in range(40):
        twin.add("".join(rng.choice(list("....TU"), num_envs)))
        if rng.random() < 0.05:
            twin.interrupt([int(rng.integers(num_envs))])
        if t % 4 or not len(twin.buffer):
            continue
        ring = inside.ring(twin.buffer)
        ring.ends()
        fit = GoalBytes(ring, ("obs", "achieved_goal"), ("obs", "desired_goal"), strategy, bool(seed % 2))
        places, others = ring.draw(16, t), ring.draw(16, t + 1)
        assert places is not None
        planned(ring.core, ring.arrays, fit.core, places, others, n, 77 + t, fit.batch.nbytes)


@given(st.integers(0, 2**32), st.integers(0, 4), st.booleans())
def test_goals_of_bare_rings_are_as_defined(seed: int, strategy: int, finished: bool) -> None:
    rng = np.random.default_rng(seed)
    play = RingPlay(rng)
    for _ in range(2):
        play.play(int(rng.integers(1, 60)))
        live, size = play.live(), int(rng.integers(0, 25))
        layout = core.GoalLayout(
            play.window_layout(), goal_at=int(rng.integers(0, play.width - 15 - size)), goal_bytes=size, into_obs=0,
            into_next=112, mark=110, strategy=strategy, finished=finished,
        )  # fmt: skip
        count = 2 * len(live)
        places = rng.choice(live, count) if count else live
        never = np.flatnonzero(play.arrays.stamp < 0)
        others, n = rng.permutation(places), int(rng.integers(1, 8))
        planned(play.core, play.arrays, layout, places, others, n, int(rng.integers(0, 2**63)) * 2 + 1, 192)
        if len(never):  # rows that no sampler of relive draws, but a user's may
            wild = np.full(3, never[0])
            out, last = np.zeros((3, 192), np.uint8), np.zeros(3, np.int64)
            steps, pairs = core.RelabelledSteps(3, n), np.zeros(6 * n * size, np.uint8)
            core.plan_goals(play.core, layout, wild, n, 0.9, 1, 1.0, wild, out, last, steps, pairs)


def test_the_numbers_of_strategies_are_the_same_everywhere() -> None:
    for name in ("FUTURE", "FINAL", "EPISODE", "PAST", "RANDOM"):
        assert getattr(numbers, name) == getattr(definition, name)
    assert numbers.OTHERS == definition.GOALS + 1


def small() -> tuple[Any, Any, Any, Any]:
    play = RingPlay(np.random.default_rng(1), num_envs=2, rows=9).play(40)
    layout = core.GoalLayout(
        play.window_layout(), goal_at=8, goal_bytes=8, into_obs=0, into_next=112, mark=110, strategy=numbers.FINAL,
        finished=False,
    )  # fmt: skip
    return play, layout, play.live(), np.full((len(play.live()), 192), 9, np.uint8)


def test_a_place_that_is_no_rows_is_answered_by_its_position() -> None:
    play, layout, places, out = small()
    count, last = len(places), np.zeros(len(places), np.int64)
    places[3] = 18
    steps, pairs = core.RelabelledSteps(count, 2), np.zeros(4 * count * 8, np.uint8)
    assert core.plan_goals(play.core, layout, places, 2, 0.9, 1, 0.5, places, out, last, steps, pairs) == -4
    assert core.relabel_windows(play.core, layout, 0.9, True, out, last, steps, np.zeros(0, np.float32)) == -1
    assert (out == 9).all()


def test_batches_without_rows_are_planned() -> None:
    play, layout, places, out = small()
    steps, none = core.RelabelledSteps(0, 3), places[:0]
    given = none, out[:0], np.zeros(0, np.int64)
    assert core.plan_goals(play.core, layout, none, 3, 0.9, 1, 0.5, *given, steps, np.zeros(0, np.uint8)) == 0
    assert core.relabel_windows(play.core, layout, 0.9, True, *given[1:], steps, np.zeros(0, np.float32)) == -1


def test_a_ring_that_notes_no_ends_has_no_other_goals() -> None:
    play, layout, places, out = small()
    ring = core.Ring(play.arrays._replace(ends=np.zeros(0, np.int32), seen=np.zeros(0, np.int64)))
    steps, pairs = core.RelabelledSteps(len(places), 1), np.zeros(2 * len(places) * 8, np.uint8)
    last = np.zeros(len(places), np.int64)
    assert core.plan_goals(ring, layout, places, 1, 0.9, 1, 1.0, places, out, last, steps, pairs) == 0
    assert not out[:, layout.mark].any()


def test_arrays_that_do_not_fit_each_other_are_refused() -> None:
    play, layout, places, out = small()
    count = len(places)
    last, pairs, steps = np.zeros(count, np.int64), np.zeros(4 * count * 8, np.uint8), core.RelabelledSteps(count, 2)
    good: dict[str, Any] = {
        "ring": play.core, "layout": layout, "places": places, "n": 2, "gamma": 0.9, "key": 1, "ratio": 1.0,
        "others": places, "out": out, "last": last, "steps": steps, "pairs": pairs,
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {"n": 3}, {"n": 0}, {"others": places[1:]}, {"out": out[1:]}, {"last": last[1:]}, {"pairs": pairs[1:]},
        {"steps": core.RelabelledSteps(count, 3)}, {"out": out[:, :120].copy()},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ValueError, match="plan_goals"):
            core.plan_goals(**(good | change))
    found = core.plan_goals(**good)
    assert found > 1
    rest = {"ring": play.core, "layout": layout, "gamma": 0.9, "judged": True, "out": out, "last": last}
    rewards = np.zeros(2 * count, np.float32)
    other = RingPlay(np.random.default_rng(2), num_envs=1, rows=5)
    wrong: list[dict[str, Any]] = [
        {"out": out[1:]}, {"last": last[1:]}, {"rewards": rewards[: found - 1]}, {"ring": other.core},
        {"steps": core.RelabelledSteps(count, 2)},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(ValueError, match="relabel_windows"):
            core.relabel_windows(**(rest | {"steps": steps, "rewards": rewards} | change))
    for member, value in ((steps.which, count), (steps.begin, 2 * count + 1), (steps.after, 18), (steps.after, -1)):
        kept, at = member.copy(), 1 if member is steps.begin else 0
        member[at] = value
        with pytest.raises(ValueError, match="relabel_windows"):
            core.relabel_windows(**rest, steps=steps, rewards=rewards)
        member[:] = kept
    assert core.relabel_windows(**rest, steps=steps, rewards=rewards) == -1
    with pytest.raises(ValueError, match="strategy"):
        core.GoalLayout(
            layout.window, goal_at=0, goal_bytes=0, into_obs=0, into_next=0, mark=0, strategy=5, finished=False
        )
    for rows, n in ((-1, 1), (1, 0), (2**40, 2**40)):
        with pytest.raises(ValueError, match="RelabelledSteps"):
            core.RelabelledSteps(rows, n)


# Where episodes end.


@pytest.mark.parametrize("seed", range(5))
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
    ends, _ = inside.ring(twin.buffer).ends()
    ends[1] += 1
    with pytest.raises(InvariantError, match=r"8: the episode of row \d+ of env 0 ends elsewhere"):
        twin.buffer.check()
    ends[1] -= 1
    inside.ring(twin.buffer).step[1] = 0
    with pytest.raises(InvariantError):
        twin.buffer.check()


def test_a_number_of_transitions_beyond_32_bits_does_no_harm() -> None:
    play, rows = "..T.....U..", 9
    plain, late = (HerTwin(1, rows, dress="goals", view=view_of("future", 2)) for _ in range(2))
    ring = inside.ring(late.buffer)
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
