"""The sum over n steps does not look at the end of its first step, and stops at the end of any environment."""

import sys
from importlib import metadata

import torch

try:
    version = metadata.version("agilerl")
except metadata.PackageNotFoundError:
    sys.exit(77)
from agilerl.components.replay_buffer import MultiStepReplayBuffer
from tensordict import TensorDict

T, N = 20, 3  # each step earns 1, and nothing is discounted; environment 0 ends at step 5, and 1 at step 9
buffer = MultiStepReplayBuffer(100, n_step=N, gamma=1.0)
for t in range(T):
    done = torch.tensor([[t == 5], [t == 9]]).float()
    obs = torch.tensor([[0.0, t], [1.0, t]])
    buffer.add(TensorDict({"obs": obs, "action": obs, "reward": torch.ones(2, 1), "next_obs": obs, "done": done}, [2]))

rows = buffer.storage[: len(buffer)]
over = cut = 0
for (env, t), (reward,) in zip(rows["obs"].tolist(), rows["reward"].tolist(), strict=True):
    left = (5 if env == 0 else 9) - t + 1  # steps to the end, if it is still ahead
    right = min(left, N) if left > 0 else N
    over, cut = over + (reward > right), cut + (reward < right)
print(f"agilerl {version}: of {len(rows)} sums (n = {N}) {over} run over an end, {cut} stop at the other environment's")
sys.exit(0 if over or cut else 1)
