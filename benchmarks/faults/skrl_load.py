"""`load` leaves what `sample` reads as it was."""

import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch

try:
    version = metadata.version("skrl")
except metadata.PackageNotFoundError:
    sys.exit(77)
from skrl.memories.torch import RandomMemory


def empty() -> RandomMemory:
    memory = RandomMemory(memory_size=4, num_envs=2, device="cpu")
    memory.create_tensor("rewards", size=1, dtype=torch.float32)
    return memory


saved, loaded = empty(), empty()
for _ in range(4):
    saved.add_samples(rewards=torch.full((2, 1), 7.0))
with tempfile.TemporaryDirectory() as folder:
    saved.save(folder)
    loaded.load(str(next(Path(folder, "memories").iterdir())))

(before,), (after,) = (memory.sample_all(["rewards"])[0] for memory in (saved, loaded))
same = int((after == before).sum())
print(f"skrl {version}: {same} of 8 saved rows can be read after `load`; len() is {len(loaded)}")
sys.exit(0 if not torch.equal(before, after) else 1)
