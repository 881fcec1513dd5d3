"""`optimize_memory_usage=True` returns the next episode's first observation at a time limit, masked as a terminal."""

import sys
from importlib import metadata

import numpy as np

try:
    version = metadata.version("stable-baselines3")
except metadata.PackageNotFoundError:
    sys.exit(77)
from gymnasium.spaces import Box
from stable_baselines3.common.buffers import ReplayBuffer

EPISODE, STEPS = 5, 40  # every episode is cut off; observations are (episode, step)
box = Box(-np.inf, np.inf, (2,))
found = {}
for saving in (False, True):
    buffer = ReplayBuffer(100, box, box, optimize_memory_usage=saving, handle_timeout_termination=not saving)
    for k in range(STEPS):
        end = k % EPISODE == EPISODE - 1
        obs, final = (np.array([[k // EPISODE, k % EPISODE + more]], np.float32) for more in (0, 1))
        buffer.add(obs, final, np.zeros((1, 2)), np.zeros(1), np.array([end]), [{"TimeLimit.truncated": end}])
    batch = buffer._get_samples(np.arange(STEPS - 1))
    cut = batch.observations[:, 1] == EPISODE - 1
    kept = (batch.next_observations[:, 1] == EPISODE) & (batch.dones[:, 0] == 0)
    found[saving] = f"{int((kept & cut).sum())} of {int(cut.sum())}"
    wrong = int((cut & ~kept).sum())
print(f"stable-baselines3 {version}: {found[True]} time limits keep their final observation and bootstrap;"
      f" {found[False]} without the option")  # fmt: skip
sys.exit(0 if wrong else 1)
