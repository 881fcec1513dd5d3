"""Stable-Baselines3's buffers and the drop-ins for them: each method of the one against that of the other."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from harness import Contender, Effort, Workload, measure, write

CAPACITY, BATCH, ENVS, STEPS, FILLED = 1_000_000, 256, 4, 512, 20_000
OBS, ACTION = gym.spaces.Box(-9, 9, (17,), np.float32), gym.spaces.Box(-1, 1, (6,), np.float32)
PIXELS = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
GOALS = gym.spaces.Dict({
    name: gym.spaces.Box(-9, 9, (size,), np.float32)
    for name, size in (("observation", 10), ("achieved_goal", 3), ("desired_goal", 3))
})  # fmt: skip
DISCRETE = gym.spaces.Discrete(6)
HOST = "stable_baselines3"
WORKLOADS = {
    "ReplayBuffer.add, 4 envs": ("ReplayBuffer", OBS, "add"),
    "ReplayBuffer.sample(256)": ("ReplayBuffer", OBS, "sample"),
    "add and sample(256)": ("ReplayBuffer", OBS, "both"),
    "sample(256) of pixels": ("ReplayBuffer", PIXELS, "sample"),
    "DictReplayBuffer.add": ("DictReplayBuffer", GOALS, "add"),
    "DictReplayBuffer.sample(256)": ("DictReplayBuffer", GOALS, "sample"),
    "NStepReplayBuffer.add": ("NStepReplayBuffer", OBS, "add"),
    "NStepReplayBuffer.sample(256), n = 3": ("NStepReplayBuffer", OBS, "sample"),
    "NStepReplayBuffer.add and sample(256)": ("NStepReplayBuffer", OBS, "both"),
    "HerReplayBuffer.add": ("HerReplayBuffer", GOALS, "add"),
    "HerReplayBuffer.sample(256)": ("HerReplayBuffer", GOALS, "sample"),
    "HerReplayBuffer.add and sample(256)": ("HerReplayBuffer", GOALS, "both"),
    "RolloutBuffer.add, 512 times": ("RolloutBuffer", OBS, "fill"),
    "compute_returns_and_advantage": ("RolloutBuffer", OBS, "compute"),
    "RolloutBuffer.get(256)": ("RolloutBuffer", OBS, "get"),
    "DictRolloutBuffer.get(256)": ("DictRolloutBuffer", GOALS, "get"),
    "all of a PPO update, 10 x get(64)": ("RolloutBuffer", OBS, "update"),
}


class Goals(gym.Env[Any, Any]):
    """What HER asks an env for."""

    observation_space, action_space = GOALS, ACTION

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        """0 where the goal is near, else -1."""
        return -(np.abs(achieved - desired).max(-1) > 0.5).astype(np.float32)


class Buffer:
    """One of two classes of one name."""

    def __init__(self, label: str, package: str, role: str) -> None:
        self.label, self.package, self.role, self.note = label, package, role, ""

    def kind(self, name: str) -> Any:
        if self.role == "ours":
            return getattr(importlib.import_module("relive.compat.stable_baselines3"), name)
        return getattr(importlib.import_module(HOST if name[:3] == "Her" else f"{HOST}.common.buffers"), name)

    def setup(self, data: tuple[str, Any, str]) -> None:
        name, space, method = data
        action = DISCRETE if space is PIXELS else ACTION
        rng = np.random.default_rng(0)
        self.rollout = "Rollout" in name
        capacity = STEPS if self.rollout else 40_000 if space is PIXELS else CAPACITY
        options: dict[str, Any] = {"device": "cpu", "n_envs": ENVS}
        if name == "HerReplayBuffer":
            vec_env = importlib.import_module(f"{HOST}.common.vec_env")
            options["env"] = vec_env.DummyVecEnv([Goals] * ENVS)
        self.buffer = self.kind(name)(capacity, space, action, **options)
        self.steps = [self.step(space, action, rng, t) for t in range(STEPS)]
        if self.rollout:
            self.fill()
            self.last = torch.zeros(ENVS), np.zeros(ENVS, bool)
            self.buffer.compute_returns_and_advantage(*self.last)
        else:
            for t in range(2 * STEPS if space is PIXELS else FILLED):
                self.buffer.add(*self.steps[t % STEPS])
        self.count = 0
        self.run: Callable[[], Any] = {
            "add": self.add,
            "sample": lambda: self.buffer.sample(BATCH),
            "both": self.add_and_sample,
            "fill": self.fill,
            "compute": lambda: self.buffer.compute_returns_and_advantage(*self.last),
            "get": lambda: list(self.buffer.get(BATCH)),
            "update": self.update,
        }[method]

    def step(self, space: Any, action: Any, rng: Any, t: int) -> tuple[Any, ...]:
        obs, following = (self.drawn(space, rng, t + k) for k in range(2))
        done = np.full(ENVS, t % 128 == 127)
        actions = np.stack([action.sample() for _ in range(ENVS)])
        reward = rng.standard_normal(ENVS).astype(np.float32)
        if self.rollout:
            return obs, actions, reward, done, torch.zeros(ENVS, 1), torch.zeros(ENVS)
        return obs, following, actions, reward, done, [{} for _ in range(ENVS)]

    def drawn(self, space: Any, rng: Any, t: int) -> Any:
        """Observation number t, so that steps follow one another."""
        if isinstance(space, gym.spaces.Dict):
            return {key: self.drawn(member, rng, t) for key, member in space.spaces.items()}
        return np.full((ENVS, *space.shape), t % 251 if space.dtype == np.uint8 else t / 100, space.dtype)

    def add(self) -> None:
        self.buffer.add(*self.steps[self.count % STEPS])
        self.count += 1

    def add_and_sample(self) -> None:
        """One training step of an off-policy algorithm."""
        self.add()
        self.buffer.sample(BATCH)

    def fill(self) -> None:
        self.buffer.reset()
        for step in self.steps:
            self.buffer.add(*step)

    def update(self) -> None:
        """A rollout from the first step to the last batch, with the host's own numbers for PPO."""
        self.fill()
        self.buffer.compute_returns_and_advantage(*self.last)
        for _ in range(10):
            for _ in self.buffer.get(64):
                pass

    def check(self) -> str:
        self.run()
        rewards = self.buffer.rewards if self.rollout else self.buffer.sample(BATCH).rewards
        return "" if np.isfinite(np.asarray(rewards)).all() else "rewards that are not finite"


def run(effort: Effort, folder: Path) -> None:
    """Measures the methods and writes `compat_sb3.json`."""
    workloads = []
    for label, work in WORKLOADS.items():
        contenders: list[Contender] = [
            Buffer("relive.compat.stable_baselines3", "relive", "ours"),
            Buffer("stable-baselines3", "stable-baselines3", "peer"),
        ]
        workloads.append(measure(Workload(label, work), contenders, effort))
    write("compat_sb3", "Stable-Baselines3's buffers", workloads, folder)
