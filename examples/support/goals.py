"""Envs with goals: one whose episodes end at the goal, and a wrapper that records whether they reached it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv


class BitFlip(gym.Env[dict[str, Any], np.int64]):
    """Make a row of bits equal another: each action flips one (Andrychowicz et al. 2017, section 3.1).

    Each step costs 1, except the one that reaches the goal. The goal ends the episode, and so do as many flips as there
    are bits. So episodes differ in length. Random play hardly ever arrives, so all its rewards are -1.
    """

    def __init__(self, size: int = 15) -> None:
        bits = gym.spaces.MultiBinary(size)
        self.size = size
        self.observation_space = gym.spaces.Dict(observation=bits, achieved_goal=bits, desired_goal=bits)
        self.action_space = gym.spaces.Discrete(size)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(2, size=(2, self.size), dtype=np.int8)
        self.flips = 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[dict, float, bool, bool, dict]:
        self.bits[action] ^= 1
        self.flips += 1
        arrived = bool(self.compute_terminated(self.bits, self.goal))
        reward = float(self.compute_reward(self.bits, self.goal))
        return self._look(), reward, arrived, self.flips == self.size, {"is_success": arrived}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """The reward of one step, or of many at once: ``[M, size] -> [M]``."""
        return self.compute_terminated(achieved, desired) - np.float32(1)

    def compute_terminated(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """Whether the goal is reached, for one step or for many at once."""
        return (achieved == desired).all(axis=-1)

    def _look(self) -> dict[str, np.ndarray]:
        return {"observation": self.bits.copy(), "achieved_goal": self.bits.copy(), "desired_goal": self.goal.copy()}


class Judged(gym.Wrapper):
    """Keeps the last ``is_success`` of each episode until ``successes`` reads it."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.results: list[float] = []

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            self.results.append(float(info["is_success"]))
        return obs, reward, terminated, truncated, info


def successes(envs: SyncVectorEnv) -> list[float]:
    """1 or 0 for each episode that ended since the last call; the envs are ``Judged``."""
    found: list[float] = []
    for env in envs.envs:
        found += env.results
        env.results.clear()
    return found
