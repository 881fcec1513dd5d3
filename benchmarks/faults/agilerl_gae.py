"""Advantages read the flag of the following row, so each end is cut one step late."""

import sys
from importlib import metadata

import numpy as np

try:
    version = metadata.version("agilerl")
except metadata.PackageNotFoundError:
    sys.exit(77)
from agilerl.components.rollout_buffer import RolloutBuffer
from gymnasium.spaces import Box

box = Box(-1, 1, (1,), np.float32)
reward, done, value = [0.0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0.0, 0, 0, 5, 0]  # step 2 ends an episode, and earns 1
buffer = RolloutBuffer(5, box, box, 1, gamma=0.99, gae_lambda=0.95)
for r, d, v in zip(reward, done, value, strict=True):
    obs = np.zeros((1, 1), np.float32)
    buffer.add(obs, obs, np.array([r]), np.array([d], bool), np.array([v]), np.zeros(1), next_obs=obs)
buffer.compute_returns_and_advantages(np.zeros(1), np.zeros(1, bool))
found = buffer.buffer["advantages"].numpy().reshape(-1)

right, after = np.zeros(5), 0.0
for t in reversed(range(5)):
    more = (1 - done[t]) * (value[t + 1] if t < 4 else 0)
    right[t] = after = reward[t] + 0.99 * more - value[t] + 0.99 * 0.95 * (1 - done[t]) * after
ours, theirs = (x[:3].round(2).tolist() for x in (right, found + 0))
print(f"agilerl {version}: advantages of an episode of three steps: {theirs}, {ours} are right")
sys.exit(0 if not np.allclose(found, right, atol=1e-4) else 1)
