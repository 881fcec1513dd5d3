"""`warm` stores the steps that `NEXT_STEP` autoreset ignores, and marks time limits as terminals."""

import sys
from importlib import metadata
from unittest.mock import MagicMock

import torch

try:
    version = metadata.version("velora")
except metadata.PackageNotFoundError:
    sys.exit(77)
import gymnasium as gym

for name in ("velora.models", "velora.models.config"):
    sys.modules[name] = MagicMock()  # agents, of which the buffer needs nothing
from velora.buffer import ReplayBuffer


class Count(gym.Env):
    """Observes how many steps its episode has had; each earns 1; the limit of 4 is the only end."""

    observation_space = action_space = gym.spaces.Box(0, 9)

    def reset(self, seed=None, options=None):
        self.count = 0
        return self.observation_space.low, {}

    def step(self, _):
        self.count += 1
        return self.observation_space.low + self.count, 1.0, False, self.count == 4, {}


gym.register("Count-v0", Count)
agent = MagicMock(device=torch.device("cpu"), predict=lambda *_, **__: (torch.zeros(2, 1),) * 2)
agent.env.spec.id = "Count-v0"
(buffer := ReplayBuffer(100, 1, 1, 1)).warm(agent, 100, 2)
none, done = int((buffer.rewards == 0).sum()), int(buffer.dones.sum())
print(f"velora {version}: {none} of {len(buffer)} rows are no steps; {done} time limits have the flag of terminals")
sys.exit(0 if none or done else 1)
