"""An audit finds nothing in what collectors of relive store, however odd the environment is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import relive
from relive import GAE, Collector, Field, ReplayBuffer, RolloutBuffer, Schema
from support.effort import CI, in_ci, often


class Odd(gym.Env[Any, Any]):
    """Observations are drawn anew; an episode ends by itself with one step in ten, or is cut off after 15."""

    observation_space: Any = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def seen(self) -> Any:
        return self.np_random.normal(size=2).astype(np.float32)

    def reward(self, action: Any) -> float:
        return float(self.np_random.normal())

    def ends(self) -> tuple[bool, bool]:
        return bool(self.np_random.random() < 0.1), self.t == 15

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.seen(), self.reward(action), *self.ends(), {}


class Deterministic(Odd):
    """Each episode is the same; what comes next, and the reward, follows from the observation."""

    def seen(self) -> Any:
        return np.array([np.sin(self.t), np.cos(self.t)], np.float32)

    def reward(self, action: Any) -> float:
        return float(np.sin(self.t))

    def ends(self) -> tuple[bool, bool]:
        return self.t == 10, False


class Whole(Deterministic):
    """The same with whole numbers, a constant reward, and a time limit."""

    def seen(self) -> Any:
        return np.array([self.t, 1], np.float32)

    def reward(self, action: Any) -> float:
        return 1.0

    def ends(self) -> tuple[bool, bool]:
        return False, self.t == 10


class OneStep(Odd):
    """Episodes of one step."""

    def ends(self) -> tuple[bool, bool]:
        return True, False


class Bandit(OneStep):
    """The same without a state."""

    def seen(self) -> Any:
        return np.zeros(2, np.float32)

    def reward(self, action: Any) -> float:
        return float(action)


class Sparse(Odd):
    """A reward at the end alone."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 10.0 * terminated, terminated, truncated, info


class Horizon(Odd):
    """A true horizon: all episodes terminate after 12 steps."""

    def ends(self) -> tuple[bool, bool]:
        return self.t == 12, False


class Huge(Odd):
    """Numbers near the largest of float32."""

    def seen(self) -> Any:
        return super().seen() * np.float32(1e37)

    def reward(self, action: Any) -> float:
        return 1e37 * super().reward(action)


class Bytes(Odd):
    """Images of bytes."""

    observation_space = gym.spaces.Box(0, 255, (3, 4, 4), np.uint8)

    def seen(self) -> Any:
        return self.np_random.integers(0, 256, (3, 4, 4), np.uint8)


ENVS: list[Any] = [Odd, Deterministic, Whole, OneStep, Bandit, Sparse, Horizon, Huge, Bytes, "FrozenLake-v1",
                   "CliffWalking-v1", "Blackjack-v1", "MountainCar-v0"]  # fmt: skip


def first_leaf(tree: Any) -> torch.Tensor:
    while not isinstance(tree, torch.Tensor):
        tree = next(iter(tree.values())) if hasattr(tree, "values") else tree[0]
    return tree


def value(obs: Any) -> torch.Tensor:
    """A critic that saturates, as one may early on."""
    leaf = first_leaf(obs).float()
    return 3 + torch.tanh(leaf.reshape(len(leaf), -1).sum(1) / 3)


MODES = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
CASES = [
    pytest.param(env, mode, marks=pytest.mark.slow if (i + j) % 2 else CI if i % 4 else ())
    for i, env in enumerate(ENVS)
    for j, mode in enumerate(MODES)
]
"""Each environment in one of the modes, and every fourth one quickly."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("env", "mode"), CASES)
def test_what_collectors_store_is_clean(env: Any, mode: AutoresetMode) -> None:
    def make() -> SyncVectorEnv:
        envs = SyncVectorEnv([env if callable(env) else lambda: gym.make(env)] * 3, autoreset_mode=mode)
        envs.action_space.seed(0)
        return envs

    envs = make()
    spaces: Any = envs.single_observation_space, envs.single_action_space
    replay = ReplayBuffer(Schema.from_spaces(*spaces), 3000, 3, seed=0)
    Collector(envs, lambda obs: {"action": envs.action_space.sample()}, replay, seed=0).collect(often(100, 250))
    report = relive.audit(replay)
    assert report.ok, str(report)
    assert {finding.rule for finding in report.findings} <= {"constant-field"}
    rollout, played = RolloutBuffer(Schema.from_spaces(*spaces, value=()), 300, 3, seed=0), make()
    policy: Any = lambda obs: {"action": played.action_space.sample(), "value": value(obs)}  # noqa: E731
    Collector(played, policy, rollout, seed=0).collect()
    rollout.finish(GAE(gamma=0.99, lam=0.95))
    report = relive.audit(rollout)
    assert report.ok or env is Bandit, str(report)


def test_an_episode_that_ends_where_it_began_is_never_called_certain() -> None:
    rows = {"obs": np.arange(300) % 10, "reward": np.ones(300), "terminated": np.zeros(300, bool),
            "truncated": np.arange(300) % 10 == 9, "next_obs": (np.arange(300) + 1) % 10}  # fmt: skip
    assert {finding.sure for finding in relive.audit(rows).findings} <= {"likely", "possible"}


def test_a_save_loaded_twice_and_steps_added_twice_are_no_determinism() -> None:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(401, 2)).astype(np.float32)
    rows = {"obs": obs[:-1], "next_obs": obs[1:], "reward": rng.normal(size=400), "action": rng.normal(size=(400, 1)),
            "terminated": np.arange(400) % 20 == 19, "truncated": np.zeros(400, bool)}  # fmt: skip
    assert "duplicate-rows" not in {finding.rule for finding in relive.audit(rows).findings}
    for twice in ({name: np.concatenate([x, x]) for name, x in rows.items()},
                  {name: np.repeat(x, 2, 0) for name, x in rows.items()}):  # fmt: skip
        assert "duplicate-rows" in {finding.rule for finding in relive.audit(twice).findings}


@pytest.mark.filterwarnings("error")
def test_no_arrays_make_an_audit_fail_or_warn() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        size, width = int(rng.integers(1, 60)), int(rng.integers(0, 4))
        obs = rng.integers(0, 4, (size, width)) if seed % 2 else rng.normal(size=(size, width))
        rows: dict[str, Any] = {name: rng.normal(size=size).round(1) for name in ("reward", "value", "advantage")}
        rows |= {"obs": obs, "terminated": rng.random(size) < 0.2, "truncated": rng.random(size) < 0.1}
        index, batch = rng.integers(0, size, 10), None
        if seed % 3:
            rows["next_obs"] = np.roll(obs, -int(rng.integers(0, 4)), 0)
            names = ("obs", "reward", "next_obs", "terminated")
            batch = {"index": index} | {name: rows[name][index] for name in names}
        draws = rng.integers(-1, size, (20, 4) if seed % 4 else (20, 4, 3))
        report = relive.audit(rows, batch=batch, n=int(rng.integers(1, 5)), draws=draws)
        assert report.rows == size
        for finding in report.findings:
            known = max(size, len(index)) if finding.rule.startswith("n-step") else size  # some are about the batch
            assert all(0 <= row < known for row in finding.examples)


@pytest.mark.slow
def test_nothing_is_found_in_a_million_clean_rows() -> None:
    rng, envs, steps = np.random.default_rng(0), 250, 4000
    obs, age = rng.normal(0, 0.1, (envs, 17)), np.zeros(envs, int)
    rows: list[dict[str, Any]] = []
    for _ in range(steps):
        action = rng.uniform(-1, 1, (envs, 6))
        after = 0.98 * obs + 0.1 * action[:, :1] + rng.normal(0.05, 0.05, obs.shape)
        age += 1
        terminated = rng.random(envs) < 0.004
        truncated = ~terminated & (age >= 200)
        rows.append({"obs": obs, "action": action, "reward": 1 - np.abs(after[:, 0]), "terminated": terminated,
                     "truncated": truncated, "next_obs": after})  # fmt: skip
        done = terminated | truncated
        age[done] = 0
        obs = np.where(done[:, None], rng.normal(0, 0.1, obs.shape), after)
    columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    columns = {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in columns.items()}
    flag = Field((), torch.bool)
    schema = Schema({"obs": (17,), "action": (6,), "reward": (), "terminated": flag, "truncated": flag})
    replay = ReplayBuffer(schema, envs * (steps + 40), envs, seed=0)
    replay.extend(columns)
    for source in (columns, replay):
        began = time.process_time()
        report = relive.audit(source)
        print(f"{report.rows:,} rows: {time.process_time() - began:.2f} s of the processor")
        assert not report.findings, str(report)


def series() -> dict[str, Any]:
    """A price that no action moves, in windows that go on from each other, and a policy that follows its last move."""
    rng = np.random.default_rng(0)
    moves = rng.normal(size=3001)
    price, action = 100 + np.cumsum(moves), np.tanh(moves[:3000]) + 0.1 * rng.normal(size=3000)
    log = {"obs": price[:3000, None], "action": action[:, None], "reward": action * moves[1:]}
    return log | {"next_obs": price[1:, None], "terminated": np.zeros(3000, bool), "truncated": cuts(250)}


def cuts(length: int) -> Any:
    return np.arange(3000) % length == length - 1


def clock() -> dict[str, Any]:
    """An hour of the day as observation, without next observations."""
    hour = np.arange(3000) % 24 / 24
    log = {"obs": hour[:, None].astype(np.float32), "action": np.random.default_rng(0).normal(size=(3000, 1))}
    return log | {"reward": np.sin(6.28 * hour), "terminated": np.zeros(3000, bool), "truncated": cuts(3000)}


def bandit() -> dict[str, Any]:
    """A bandit without a state, in episodes of 100 pulls."""
    rng, blank = np.random.default_rng(0), np.zeros((3000, 1), np.float32)
    log = {"obs": blank, "next_obs": blank, "action": rng.integers(0, 3, 3000), "reward": rng.normal(size=3000)}
    return log | {"terminated": np.zeros(3000, bool), "truncated": cuts(100)}


def queues() -> dict[str, Any]:
    """Lengths of a few queues, which are whole numbers and no bytes."""
    waiting = np.random.default_rng(0).poisson(10, (3001, 4, 3)).astype(np.float32)
    log = {"obs": waiting[:-1], "next_obs": waiting[1:], "reward": -waiting[1:].mean((1, 2))}
    return log | {"terminated": np.zeros(3000, bool), "truncated": cuts(250)}


def contexts() -> dict[str, Any]:
    """Episodes of one step."""
    rng, ends = np.random.default_rng(0), np.ones(50, bool)
    log = {"obs": rng.normal(size=(50, 2)), "next_obs": rng.normal(size=(50, 2)), "reward": np.ones(50)}
    return log | {"terminated": ends, "truncated": ~ends}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [in_ci(series), in_ci(clock), bandit, queues, contexts])
def test_logs_that_look_odd_and_are_right_pass(make: Callable[[], dict[str, Any]]) -> None:
    report = relive.audit(make())
    assert report.ok, str(report)
