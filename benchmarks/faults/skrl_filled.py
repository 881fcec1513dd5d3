"""An add of several rows that goes over the end of the memory does not mark it as filled."""

import sys
from importlib import metadata

import torch

try:
    version = metadata.version("skrl")
except metadata.PackageNotFoundError:
    sys.exit(77)
from skrl.memories.torch import RandomMemory

memory = RandomMemory(memory_size=8, num_envs=1, device="cpu")
memory.create_tensor("observations", size=1, dtype=torch.float32)  # one field, so that the rows are right
for block in torch.arange(12.0).split(6):
    memory.add_samples(observations=block[:, None])  # 6 rows, and 6 more of which the last 4 begin again at row 0

stored = memory.get_tensor_by_name("observations").flatten()
(drawn,) = memory.sample(["observations"], batch_size=8)[0]
print(f"skrl {version}: {int((~stored.isnan()).sum())} of 8 rows are stored, {len(drawn)} can be drawn")
sys.exit(0 if not memory.filled else 1)
