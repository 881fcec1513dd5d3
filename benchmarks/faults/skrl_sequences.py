"""Sequences cross the seam of a full memory, from the newest step to the oldest."""

import sys
from importlib import metadata

import torch

try:
    version = metadata.version("skrl")
except metadata.PackageNotFoundError:
    sys.exit(77)
from skrl.memories.torch import RandomMemory

SIZE, LENGTH = 8, 4
STARTS = SIZE - LENGTH + 1
memory = RandomMemory(memory_size=SIZE, num_envs=1, device="cpu")  # draws without replacement
memory.create_tensor("observations", size=1, dtype=torch.float32)
shares = []
for step in range(3 * SIZE):  # observations count the steps; all are of one episode
    memory.add_samples(observations=torch.tensor([[float(step)]]))
    if step >= 2 * SIZE:  # full, with the seam at each row in turn; all sequences are drawn
        (drawn,) = memory.sample(["observations"], batch_size=STARTS, sequence_length=LENGTH)[0]
        crossing = (drawn.reshape(STARTS, LENGTH).diff(dim=1) != 1).any(dim=1)
        shares.append(crossing.float().mean().item())

most, mean = max(shares), sum(shares) / len(shares)
found = f"{mean:.1%} of sequences cross the seam, {most:.0%} while it is in the middle"
print(f"skrl {version}: {found} (ring {SIZE}, length {LENGTH})")
sys.exit(0 if most else 1)
