"""Images of bytes are stored as float32, in four times the memory."""

import sys
from importlib import metadata, util
from unittest.mock import MagicMock

import torch

try:
    package = metadata.distribution("lerobot")
except metadata.PackageNotFoundError:
    sys.exit(77)
for name in ("", ".datasets", ".datasets.lerobot_dataset", ".utils", ".utils.constants", ".utils.transition"):
    sys.modules[f"lerobot{name}"] = MagicMock()  # data sets, of which the buffer needs nothing here
spec = util.spec_from_file_location("buffer", package.locate_file("lerobot/rl/buffer.py"))
module = util.module_from_spec(spec)
spec.loader.exec_module(module)

image = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
buffer = module.ReplayBuffer(10, "cpu", ["image"], lambda x: x)
buffer.add({"image": image}, torch.zeros(1, 1), 0.0, {"image": image}, done=False, truncated=False)
stored = buffer.states["image"][0]
times = stored.nbytes // image.nbytes
print(f"lerobot {package.version}: an image of uint8 is stored as {stored.dtype}, in {times} times the memory")
sys.exit(0 if stored.dtype != torch.uint8 else 1)
