"""`ignore_obs_next=True` returns `obs` itself as `obs_next` at the end of an episode."""

import sys
from importlib import metadata

import numpy as np

try:
    version = metadata.version("tianshou")
except metadata.PackageNotFoundError:
    sys.exit(77)
from tianshou.data import Batch, ReplayBuffer

EPISODE, STEPS = 5, 40  # every episode is cut off; observations are (episode, step)
found = {}
for saving in (False, True):
    buffer = ReplayBuffer(100, ignore_obs_next=saving)
    for k in range(STEPS):
        obs, after = (np.array([k // EPISODE, k % EPISODE + more]) for more in (0, 1))
        cut = k % EPISODE == EPISODE - 1
        buffer.add(Batch(obs=obs, act=0, rew=0.0, terminated=False, truncated=cut, info={}, obs_next=after))
    batch = buffer[np.arange(STEPS)]
    found[saving] = int((batch.obs_next == batch.obs)[batch.truncated].all(1).sum())
print(f"tianshou {version}: at {found[True]} of {STEPS // EPISODE} time limits `obs_next` is `obs`;"
      f" at {found[False]} without the option")  # fmt: skip
sys.exit(0 if found[True] else 1)
