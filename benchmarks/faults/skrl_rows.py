"""Several rows added at once, with one environment: the fields of a step are stored at different rows."""

import sys
from importlib import metadata

import torch

try:
    version = metadata.version("skrl")
except metadata.PackageNotFoundError:
    sys.exit(77)
from skrl.memories.torch import RandomMemory

memory = RandomMemory(memory_size=8, num_envs=1, device="cpu")
for name in ("observations", "rewards"):
    memory.create_tensor(name, size=1, dtype=torch.float32)
number = torch.arange(2.0)[:, None]  # two steps, each of which has its number in all fields
memory.add_samples(observations=number, rewards=number)

observations, rewards = (memory.get_tensor_by_name(name)[:, 0, 0] for name in ("observations", "rewards"))
apart = sorted({int((rewards == k).nonzero()[0] - (observations == k).nonzero()[0]) for k in (0, 1)})
print(f"skrl {version}: rewards are stored {apart} rows after their observations; {len(memory)} of 2 steps are counted")
sys.exit(0 if apart != [0] else 1)
