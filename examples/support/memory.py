"""Envs that cannot be solved without memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class HiddenVelocities(gym.ObservationWrapper[np.ndarray, np.int64, np.ndarray]):
    """CartPole-v1 that shows the positions of cart and pole, but not their velocities: ``[2]`` instead of ``[4]``.

    Both are fractions of the limits at which an episode ends, so they have the same scale. One observation allows
    returns of about 50 at best; two in a row reveal the velocities.
    """

    LIMITS = np.array([2.4, 0.2095], np.float32)

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]] / self.LIMITS


class Privileged(gym.ObservationWrapper[dict[str, Any], np.int64, np.ndarray]):
    """CartPole-v1 that shows everything under ``"teacher"``, ``[4]``, and the two positions under ``"student"``."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Dict(
            student=gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            teacher=gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
        )

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {"student": observation[[0, 2]] / HiddenVelocities.LIMITS, "teacher": observation}


class TMaze(gym.Env[np.ndarray, np.int64]):
    """A corridor of 5 to 10 steps to a fork. A sign at the start, and only there, shows which arm has the reward.

    Observations are ``[2]``: the sign (-1 left, 1 right, 0 everywhere but at the start), and whether this is the fork.
    Actions: forward, left, right. An action into a wall does nothing. The correct arm gives 1, the wrong one 0, and
    either ends the episode. So the mean return is the rate of success. An agent that reaches the fork and forgot the
    sign gets 0.5. After 40 steps the episode is truncated. (After Bakker 2002.)
    """

    LIMIT = 40

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.length, self.arm = int(self.np_random.integers(5, 11)), int(self.np_random.integers(1, 3))
        self.place = self.walked = 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        at_fork = self.place == self.length
        self.place, self.walked = self.place + (action == 0 and not at_fork), self.walked + 1
        chosen = at_fork and action != 0
        return self._look(), float(chosen and action == self.arm), chosen, self.walked >= self.LIMIT, {}

    def _look(self) -> np.ndarray:
        sign = 2 * self.arm - 3 if self.place == 0 else 0
        return np.array([sign, self.place == self.length], np.float32)
