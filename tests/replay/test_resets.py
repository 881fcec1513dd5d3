"""The check of resets: an env that was reset in mid-episode is found where next_obs shows it; right loops are quiet."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, ReplayBuffer, Schema
from relive.errors import EpisodeEndWarning
from relive.replay import checks as resets
from support import internals

SCHEMA = Schema(
    {
        "obs": {"a": Field((2,)), "b": Field((), torch.int64)},
        "reward": (),
        "terminated": Field((), torch.bool),
        "truncated": Field((), torch.bool),
    }
)
N = 3
Given = Callable[[Any, Any, Any], Any]


def shown(numbers: Any) -> dict[str, Any]:
    """The observation of each env that a number stands for; some hold NaN."""
    first = np.where(numbers % 5 == 0, np.nan, numbers)
    return {"a": np.stack([first, -numbers], -1).astype(np.float32), "b": numbers}


def true(_obs: Any, after: Any, _ended: Any) -> Any:
    return after


def steps(count: int, cuts: tuple[int, ...] = (), given: Given = true, ends: float = 0.1) -> Iterator[dict[str, Any]]:
    """The steps of a loop that resets its envs after the steps ``cuts``, without a word.

    Args:
        count: how many steps.
        cuts: see above.
        given: obs, next_obs and ended -> what the loop passes as next_obs.
        ends: how often an episode ends.
    """
    rng = np.random.default_rng(0)
    obs = rng.integers(100, size=N)
    for t in range(count):
        after, ended = obs + rng.integers(1, 3, N), rng.random(N) < ends
        yield {
            "obs": shown(obs),
            "next_obs": shown(given(obs, after, ended)),
            "reward": np.ones(N, np.float32),
            "terminated": ended,
            "truncated": np.zeros(N, np.bool_),
        }
        obs = np.where(ended | (t in cuts), rng.integers(1000, 9999, N), after)


def add_each(replay: ReplayBuffer, played: list[dict[str, Any]]) -> None:
    for step in played:
        replay.add(step)


def add_by_env(replay: ReplayBuffer, played: list[dict[str, Any]]) -> None:
    for step in played:
        for env in (2, 0, 1):
            replay.add(taken(step, [env]), envs=[env])


def extend(replay: ReplayBuffer, played: list[dict[str, Any]]) -> None:
    for low in range(0, len(played), 15):
        replay.extend(stacked(played[low : low + 15]))


def add_tensors(replay: ReplayBuffer, played: list[dict[str, Any]]) -> None:
    for step in played:
        replay.add(mapped(torch.as_tensor, step))


def add_in_any_order_of_memory(replay: ReplayBuffer, played: list[dict[str, Any]]) -> None:
    for step in played:
        replay.add(mapped(np.asfortranarray, step))


def mapped(function: Any, tree: Any) -> Any:
    return {name: mapped(function, x) for name, x in tree.items()} if isinstance(tree, dict) else function(tree)


def taken(step: dict[str, Any], envs: list[int]) -> dict[str, Any]:
    return mapped(lambda x: x[envs], step)


def stacked(trees: list[Any]) -> Any:
    if isinstance(trees[0], dict):
        return {name: stacked([tree[name] for tree in trees]) for name in trees[0]}
    return np.stack(trees)


WAYS = add_each, add_by_env, extend, add_tensors, add_in_any_order_of_memory


def warned(play: Callable[[ReplayBuffer], object], **options: Any) -> list[str]:
    """The warnings of a play in a fresh replay."""
    replay = ReplayBuffer(SCHEMA, 600, N, seed=0, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play(replay)
    assert all(one.category is EpisodeEndWarning for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cuts", [(40,), (20, 40, 70)])
def test_an_env_that_was_reset_in_mid_episode_is_told_once(way: Any, cuts: tuple[int, ...]) -> None:
    (message,) = warned(lambda replay: way(replay, list(steps(100, cuts, ends=0.0))))
    assert "next_obs" in message
    assert "truncated=True" in message
    assert "interrupt()" in message


def test_the_warning_names_the_line_that_added_the_step() -> None:
    replay = ReplayBuffer(SCHEMA, 600, N, seed=0)
    with pytest.warns(EpisodeEndWarning) as caught:
        add_each(replay, list(steps(60, (40,), ends=0.0)))
    line = add_each.__code__.co_firstlineno + 2  # that calls add, not one that calls add_each
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


@pytest.mark.parametrize("way", WAYS)
def test_a_right_loop_says_nothing(way: Any) -> None:
    assert warned(lambda replay: way(replay, list(steps(100)))) == []


def test_a_loop_that_interrupts_before_it_goes_on_says_nothing() -> None:
    def play(replay: ReplayBuffer) -> None:
        for t, step in enumerate(steps(100, (20, 40))):
            replay.add(step)
            if t in (20, 40):
                replay.interrupt() if t == 20 else replay.clear()

    assert warned(play) == []


def test_a_loop_that_leaves_out_a_step_says_nothing() -> None:
    def play(replay: ReplayBuffer) -> None:
        for t, step in enumerate(steps(100, ends=0.0)):
            replay.add(step, mask=np.array([t % 9 != 5, True, True]))

    assert warned(play) == []


@pytest.mark.parametrize(
    "given",
    [
        lambda obs, after, ended: np.where(ended, after, 0),
        lambda obs, after, ended: np.where(ended, after, obs),
        lambda obs, after, ended: np.where(ended, after, after + 1),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_next_obs_that_are_not_read_may_hold_anything(way: Any, given: Given) -> None:
    assert warned(lambda replay: way(replay, list(steps(100, (40,), given)))) == []


def test_a_loop_that_passes_next_obs_only_at_ends_costs_nothing_after_its_first_step() -> None:
    replay = ReplayBuffer(SCHEMA, 600, N, seed=0)
    (step,) = steps(1, ends=0.0)
    replay.add({name: x for name, x in step.items() if name != "next_obs"})
    assert internals.first(internals.writer(replay), "resets") is None


def test_the_check_stops_after_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resets, "MOST_CALLS", 30)
    assert warned(lambda replay: add_each(replay, list(steps(60, (40,))))) == []


@pytest.mark.parametrize("options", [{"check_ends": False}, {"own_next_obs": True}, {"ordered": False}])
def test_replays_that_store_next_obs_or_were_told_not_to_check_say_nothing(options: dict[str, Any]) -> None:
    assert warned(lambda replay: add_each(replay, list(steps(60, (40,)))), **options) == []


def test_a_copy_goes_on_with_the_check() -> None:
    played = list(steps(60, (40,), ends=0.0))
    replay = ReplayBuffer(SCHEMA, 600, N, seed=0)
    add_each(replay, played[:30])
    again = pickle.loads(pickle.dumps(replay))
    with pytest.warns(EpisodeEndWarning, match="env 0 went on with another observation"):
        add_each(again, played[30:])


def test_observations_without_numbers_are_no_trouble() -> None:
    empty = Schema({"obs": (0,), "reward": (), **{name: SCHEMA[name] for name in ("terminated", "truncated")}})
    replay, flags = ReplayBuffer(empty, 60, N), np.zeros(N, np.bool_)
    for _ in range(12):
        obs = np.zeros((N, 0), np.float32)
        replay.add(obs=obs, next_obs=obs, reward=np.ones(N, np.float32), terminated=flags, truncated=flags)
    replay.check()
