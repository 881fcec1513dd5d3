"""PPO's rollouts hold γV(final observation) in the rewards of time limits; the returns are right."""

import sys
from importlib import metadata
from typing import Any

try:
    version = metadata.version("stable-baselines3")
except metadata.PackageNotFoundError:
    sys.exit(77)
import gymnasium as gym
import numpy as np
from stable_baselines3 import PPO


class Count(gym.Env):
    """Observes how many steps its episode has had; each earns 1; the time limit of 3 is the only end."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, _: Any) -> Any:
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, False, self.count == 3, {}


model = PPO("MlpPolicy", Count(), n_steps=30, batch_size=30, seed=0, device="cpu")
_, callback = model._setup_learn(30)
model.collect_rollouts(model.env, callback, model.rollout_buffer, 30)
edited = model.rollout_buffer.rewards.flatten() != 1
print(f"stable-baselines3 {version}: {edited.sum()} of 30 stored rewards are not the environment's, at 10 time limits")
sys.exit(0 if edited.any() else 1)
