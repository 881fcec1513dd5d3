"""Envs that nobody masters without a memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class HiddenVelocities(gym.ObservationWrapper[np.ndarray, np.int64, np.ndarray]):
    """CartPole-v1 that shows where the cart and the pole are, and not how fast they move: ``[2]`` instead of ``[4]``.

    Both are told as fractions of where the episode ends, so that they are of the same size. With one look the best
    there is are returns of about 50; with two in a row, the velocities are known again.
    """

    LIMITS = np.array([2.4, 0.2095], np.float32)

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]] / self.LIMITS


class Privileged(gym.ObservationWrapper[dict[str, Any], np.int64, np.ndarray]):
    """CartPole-v1 that tells a student the two positions and a teacher everything: ``{"student": ..., "teacher": ...}``."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Dict(
            student=gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            teacher=gym.spaces.Box(-np.inf, np.inf, (4,), np.float32),
        )

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {"student": observation[[0, 2]] / HiddenVelocities.LIMITS, "teacher": observation}
