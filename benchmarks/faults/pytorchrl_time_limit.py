"""One flag stands for terminals and time limits, and the next observation of both is the reset one."""

import sys
from importlib import metadata
from types import ModuleType

import numpy as np

try:
    package = metadata.distribution("pytorchrl")
except metadata.PackageNotFoundError:
    sys.exit(77)
from gymnasium import spaces

sys.modules["gym"] = ModuleType("gym")  # the vector environment asks it for spaces alone
sys.modules["gym"].spaces = spaces
for part in ("agent", "agent.env", "agent.env.vec_envs"):  # without their `__init__`, which import simulators
    sys.modules[f"pytorchrl.{part}"] = module = ModuleType(part)
    module.__path__ = [str(package.locate_file("pytorchrl/" + part.replace(".", "/")))]
from pytorchrl.agent.env.vec_envs.sequential_vec_env import SequentialVecEnv


class Count:
    """Observes how many steps its episode has had; cut off after 3, as the wrapper of old versions of gym did it."""

    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def reset(self):
        self.count = 0
        return np.zeros(1)

    def step(self, _):
        self.count += 1
        return np.full(1, self.count), 1.0, self.count == 3, {}


(envs := SequentialVecEnv([Count])).reset()
obs, _, done, _ = [envs.step([0]) for _ in range(3)][-1]
print(f"pytorchrl {package.version}: a time limit in state 3 leads to {obs[0, 0]:.0f}, and `done` is {done[0]}")
sys.exit(0 if done[0] and obs[0, 0] != 3 else 1)
