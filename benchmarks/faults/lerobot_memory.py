"""`optimize_memory` returns the next episode's first state, or one of a ring ago, as the next state of an end."""

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

RING, EPISODE = 100, 8  # all episodes end by their time limit
shares = {}
for saving in (False, True):
    buffer = module.ReplayBuffer(RING, "cpu", ["x"], lambda x: x, use_drq=False, optimize_memory=saving)
    for k in range(250):  # states are (episode, step), so the next state of (e, s) is (e, s + 1)
        state, after = ({"x": torch.tensor([[k // EPISODE, k % EPISODE + more]]).float()} for more in (0, 1))
        buffer.add(state, torch.zeros(1, 1), 0.0, after, done=False, truncated=k % EPISODE == EPISODE - 1)
    torch.manual_seed(0)
    batches = [buffer.sample(RING) for _ in range(1000)]
    wrong = torch.cat([(b["next_state"]["x"] != b["state"]["x"] + torch.tensor([0, 1])).any(1) for b in batches])
    masked = torch.cat([b["done"].bool() for b in batches])
    shares[saving] = (wrong & ~masked).float().mean().item()
print(f"lerobot {package.version}: {shares[True]:.1%} of next states are wrong (ring {RING}, episodes of {EPISODE});"
      f" {shares[False]:.1%} without the option")  # fmt: skip
sys.exit(0 if shares[True] else 1)
