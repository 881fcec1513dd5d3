"""n-step sums that begin in the newest n - 1 rows of a full ring mix in rewards of a ring ago."""

import sys
from importlib import util
from pathlib import Path

import torch

COMMIT = "229ed59bbf"
folder = Path(__file__).resolve().parents[2] / "build" / "checkouts" / "FastTD3"
if not folder.exists():
    sys.exit(77)  # `make checkouts` fetches it
from tensordict import TensorDict

spec = util.spec_from_file_location("fast_td3_utils", folder / "fast_td3" / "fast_td3_utils.py")
module = util.module_from_spec(spec)
spec.loader.exec_module(module)

RING, N, STEPS = 64, 8, 150  # one episode without an end; step k has the observation and the reward k
buffer = module.SimpleReplayBuffer(1, RING, 1, 1, 1, n_steps=N, gamma=1.0, device="cpu")
for k in range(STEPS):
    here, ahead = torch.full((1, 1), float(k)), torch.full((1, 1), k + 1.0)
    zero = torch.zeros(1, dtype=torch.long)
    then = TensorDict({"observations": ahead, "rewards": here[0], "dones": zero, "truncations": zero}, [1])
    buffer.extend(TensorDict({"observations": here, "actions": here, "next": then}, [1]))

torch.manual_seed(0)
batch = buffer.sample(200_000)
start, last = batch["observations"][:, 0], batch["next", "observations"][:, 0] - 1
right = (start + last) * (last - start + 1) / 2  # the sum of start ... last
wrong = (batch["next", "rewards"] != right).float().mean().item()
print(f"FastTD3 {COMMIT}: {wrong:.1%} of sums hold rewards of a ring ago (ring {RING}, n = {N})")
sys.exit(0 if wrong else 1)
