"""Mistakes that only the whole of a log shows, and right logs that look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import relive
from support import logs
from support.logs import Arrays


def found(log: Arrays) -> set[tuple[str, str]]:
    return {(finding.rule, finding.sure) for finding in relive.audit(log).findings}


def stored_as_it_is(log: Arrays, keep_next: bool = True) -> Arrays:
    """The env's own array in every row: each holds what the env wrote last, before its reset made a new one."""
    obs, ended = log["obs"].copy(), logs.ended(log)
    for env in range(obs.shape[1]):
        ends = np.append(np.flatnonzero(ended[:, env]), len(obs) - 1)
        obs[:, env] = log["next_obs"][ends[np.searchsorted(ends, np.arange(len(obs)))], env]
    out = {**log, "obs": obs, "next_obs": obs}
    return out if keep_next else logs.without_next(out)


@pytest.mark.parametrize("keep_next", [True, False])
@pytest.mark.parametrize("env", ["CartPole", "Pendulum", "Arena"])
def test_an_array_that_all_rows_of_an_episode_hold_is_found(env: str, keep_next: bool) -> None:
    log = logs.played(env)
    assert ("constant-field", "likely") in found(stored_as_it_is(log, keep_next))
    assert "constant-field" not in {rule for rule, _ in found(log if keep_next else logs.without_next(log))}


def test_one_number_an_episode_may_be_a_context_and_a_goal_may_stay() -> None:
    rng, episodes = np.random.default_rng(0), np.repeat(np.arange(20), 30)
    arm = rng.normal(size=(20, 1))[episodes]
    log = {"obs": arm, "next_obs": arm, "action": rng.integers(0, 3, 600), "reward": rng.normal(size=600),
           "terminated": np.zeros(600, bool), "truncated": np.arange(600) % 30 == 29}  # fmt: skip
    assert found(log) == {("constant-field", "possible")}
    assert found(logs.goals("")) == set()


@pytest.mark.parametrize("env", ["Pendulum", "MountainCar", "Horizon"])
def test_terminals_of_one_length_that_nothing_foretells_may_be_a_time_limit(env: str) -> None:
    log = logs.limits_as_terminals(logs.played(env, steps=700))
    assert ("time-limit-as-terminal", "possible") in found(log)
    assert relive.audit(log).ok


def test_a_clock_and_a_state_that_ends_all_episodes_foretell_the_end() -> None:
    t = np.arange(900) % 30
    rng = np.random.default_rng(0)
    for obs, after in (
        (np.stack([t / 30, rng.normal(size=900)], 1), np.stack([(t + 1) / 30, rng.normal(size=900)], 1)),
        (np.stack([np.sin(t / 5), np.cos(t / 5)], 1), np.stack([np.sin((t + 1) / 5), np.cos((t + 1) / 5)], 1)),
    ):
        inner = t < 29
        after[inner] = np.roll(obs, -1, 0)[inner]
        log = {"obs": obs, "next_obs": after, "reward": rng.normal(size=900), "terminated": t == 29,
               "truncated": np.zeros(900, bool)}  # fmt: skip
        assert found(log) == set()


def chain(start: Callable[[Any], int], step: Callable[[int, Any], int], limit: int, seed: int,
          ends: Callable[[int], bool] = lambda s: False) -> Arrays:  # fmt: skip
    """A log of a chain of few states."""
    rng, rows, s, t = np.random.default_rng(seed), list[Any](), 0, 0
    for _ in range(2000):
        s = start(rng) if t == 0 else s
        after, t = step(s, rng), t + 1
        terminated = ends(after)
        truncated = not terminated and t == limit
        rows.append(([float(s)], [float(after)], rng.normal(), terminated, truncated))
        s, t = after, 0 if terminated or truncated else t
    names = "obs", "next_obs", "reward", "terminated", "truncated"
    return {name: np.array(x) for name, x in zip(names, zip(*rows, strict=True), strict=True)}


RIGHT: dict[str, Arrays] = {
    "a clock cut at midnight": chain(lambda _: 0, lambda s, _: (s + 1) % 24, 24, 0),
    "a clock cut every second midnight": chain(lambda _: 0, lambda s, _: (s + 1) % 24, 48, 0),
    "a slow ring": chain(lambda r: int(r.integers(4)), lambda s, r: (s + 1) % 4 if r.random() < 0.2 else s, 25, 0),
    "rare jumps": chain(
        lambda r: int(r.integers(4)), lambda s, r: int(r.integers(4)) if r.random() < 0.3 else s, 20, 1),
    "a light": chain(lambda r: int(r.integers(2)), lambda s, r: 1 - s if r.random() < 0.15 else s, 30, 3),
    "a slow walk to an end": chain(
        lambda r: int(r.integers(6)), lambda s, r: int(r.integers(6)) if r.random() < 0.2 else s, 10**9, 1,
        lambda s: s == 3),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_an_env_that_makes_the_same_move_inside_an_episode_has_stored_no_reset(name: str) -> None:
    report = relive.audit(RIGHT[name])
    assert report.ok, str(report)


@pytest.mark.parametrize("env", ["CliffWalking", "FrozenLake", "Grid"])
def test_a_reset_that_is_stored_is_found_among_few_states(env: str) -> None:
    log = logs.played(env, max_episode_steps=60) if env != "Grid" else logs.played(env)
    ended = logs.ended(log)[:-1]
    wrong = log["next_obs"].copy()
    wrong[:-1][ended] = log["obs"][1:][ended]
    rules = {rule for rule, _ in found({**log, "next_obs": wrong})}
    assert rules & {"reset-as-final-observation", "next-episode-begins-on-the-end"}
