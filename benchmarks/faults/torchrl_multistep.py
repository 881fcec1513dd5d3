"""`MultiStep` moves the next observation n steps ahead and keeps the flags of the first step."""

import sys
from importlib import metadata

import torch

try:
    version = metadata.version("torchrl")
except metadata.PackageNotFoundError:
    sys.exit(77)
from tensordict import TensorDict
from torchrl.data import MultiStep

T, N = 10, 3  # one episode, which ends in a terminal; observations count the steps
number, end = torch.arange(float(T)).reshape(1, T, 1), torch.zeros(1, T, 1, dtype=torch.bool)
end[:, -1] = True
then = {"observation": number + 1, "reward": torch.ones(1, T, 1), "done": end, "terminated": end.clone()}
steps = MultiStep(gamma=0.99, n_steps=N)(TensorDict({"observation": number, "next": then}, [1, T]))

terminal = steps["next", "observation"] == T
flagged = int((terminal & steps["next", "terminated"]).sum())
print(f"torchrl {version}: {int(terminal.sum())} rows lead to the terminal (n = {N}); `terminated` is set in {flagged}")
sys.exit(0 if flagged < int(terminal.sum()) else 1)
