"""Jumps inside an episode are found where two episodes were joined, and nothing is said of envs that jump by nature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import relive
from relive import ReplayBuffer
from support.effort import often

RULE = "jump-inside-an-episode"


def drift(rng: Any, length: int, dims: int = 4) -> Any:
    """Observations that wander off from near 0."""
    return rng.normal(size=dims) * 0.01 + np.cumsum(0.05 + rng.normal(size=(length + 1, dims)) * 0.02, 0)


def played(one: Callable[[Any, int], Any], seed: int = 0, episodes: int = 40, lengths: tuple[int, int] = (45, 55),
           stop: float = 0.0) -> dict[str, Any]:  # fmt: skip
    """Steps of episodes, without next observations. ``stop`` is the share that terminates; the others are cut off."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(*lengths, episodes)
    parts = [np.asarray(one(rng, int(size)), np.float32) for size in sizes]
    ends, total = np.cumsum(sizes) - 1, int(sizes.sum())
    terminated, truncated = np.zeros(total, bool), np.zeros(total, bool)
    terminal = rng.random(episodes) < stop
    terminated[ends[terminal]], truncated[ends[~terminal]] = True, True
    return {"obs": np.concatenate([part[:-1] for part in parts]), "action": np.zeros((total, 1), np.float32),
            "reward": np.zeros(total, np.float32),  # of which no rule has anything to learn
            "terminated": terminated, "truncated": truncated}  # fmt: skip


def late(arrays: dict[str, Any], name: str = "truncated", by: int = 1) -> dict[str, Any]:
    flags = np.roll(arrays[name], by)
    flags[:by] = False
    return arrays | {name: flags}


def found(source: Any) -> list[str]:
    return [f"{x.rule} {x.sure}" for x in relive.audit(source).findings if x.rule in (RULE, "ends-one-row-off")]


@pytest.mark.parametrize("stop", [0.0, 0.3])
@pytest.mark.parametrize("dims", [1, 4, 17])
def test_time_outs_a_row_late_are_found_in_arrays_and_in_the_replay_of_them(dims: int, stop: float) -> None:
    right = played(lambda rng, length: drift(rng, length, dims), stop=stop)
    wrong = late(right)
    for source in (wrong, ReplayBuffer.from_arrays(wrong)):
        assert found(source) in ([f"{RULE} likely"], ["ends-one-row-off likely"]), found(source)
    for source in (right, ReplayBuffer.from_arrays(right)):
        assert found(source) == []


def test_ends_that_are_lost_are_found_where_others_are_flagged() -> None:
    right = played(drift, stop=0.5)
    lost = right | {"truncated": np.zeros_like(right["truncated"])}
    for source in (lost, ReplayBuffer.from_arrays(lost)):
        assert found(source) == [f"{RULE} possible"]


def wrapped(rng: Any, length: int) -> Any:
    """An angle that comes round, beside its speed."""
    angle = rng.uniform(-np.pi, np.pi) + np.cumsum(rng.normal(size=length + 1) * 0.02 + 0.1)
    return np.stack([(angle + np.pi) % (2 * np.pi) - np.pi, np.gradient(angle)], 1)


def portal(rng: Any, length: int) -> Any:
    """A place from which one comes to another place, far away and not where episodes begin."""
    path = drift(rng, length, 2)
    path[int(length * 0.6) :] += 40.0
    return path


def one_hot(rng: Any, length: int) -> Any:
    return np.eye(12)[rng.integers(0, 12, length + 1)]


def grid(rng: Any, length: int) -> Any:
    """A grid in which one falls back to the start, in whole numbers."""
    place = np.cumsum(rng.integers(0, 2, (length + 1, 2)), 0)
    return place % 25


def anew(rng: Any, length: int) -> Any:
    return rng.normal(size=(length + 1, 3))


def heavy(rng: Any, length: int) -> Any:
    """A walk whose steps have no mean."""
    return np.cumsum(rng.standard_cauchy(size=(length + 1, 3)), 0)


def pictures(rng: Any, length: int) -> Any:
    return rng.random((length + 1, 24, 24))


def bouncing(rng: Any, length: int) -> Any:
    """A speed that turns round at a wall."""
    place = np.abs((rng.random() + np.arange(length + 1) * 0.037) % 2 - 1)
    return np.stack([place, np.gradient(place) * 27], 1)


def resampled_goal(rng: Any, length: int) -> Any:
    """A goal beside the state that changes now and then."""
    goal = np.repeat(rng.normal(size=(length // 20 + 2, 2)) * 5, 20, 0)[: length + 1]
    return np.concatenate([drift(rng, length, 2), goal], 1)


CLEAN = [drift, wrapped, portal, one_hot, grid, anew, heavy, pictures, bouncing, resampled_goal]


@pytest.mark.parametrize("one", CLEAN)
def test_right_logs_of_envs_that_jump_have_no_finding(one: Any) -> None:
    for seed in range(often(1, ci=20)):
        for lengths, stop in (((45, 55), 0.0), ((5, 80), 0.5), ((2, 30), 1.0), ((300, 301), 0.0)):
            right = played(one, seed, 12, lengths, stop)
            for source in (right, ReplayBuffer.from_arrays(right)):
                assert RULE not in " ".join(found(source)), (seed, lengths)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1"])
def test_right_logs_of_gymnasiums_envs_have_no_finding(name: str) -> None:
    env = gym.make(name, max_episode_steps=60)
    rows: dict[str, list[Any]] = {key: [] for key in ("obs", "action", "reward", "terminated", "truncated")}
    env.action_space.seed(0)
    obs, _ = env.reset(seed=0)
    for _ in range(1500):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        for key, value in zip(rows, (obs, action, reward, terminated, truncated), strict=True):
            rows[key].append(value)
        obs = env.reset()[0] if terminated or truncated else after
    arrays = {key: np.array(values) for key, values in rows.items()}
    for source in (arrays, ReplayBuffer.from_arrays(arrays)):
        assert found(source) == []
