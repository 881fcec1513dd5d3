"""The sum over n whole steps that ends in a terminal has `done` 0; shorter sums have 1, which is right."""

import sys
from importlib import metadata

try:
    version = metadata.version("cpprb")
except metadata.PackageNotFoundError:
    sys.exit(77)
from cpprb import ReplayBuffer

N = 3
fields = {name: {} for name in ("obs", "act", "rew", "next_obs", "done")}
buffer = ReplayBuffer(32, fields, Nstep={"size": N, "gamma": 0.9, "rew": "rew", "next": "next_obs"})
for k in range(10):  # one episode, which ends in a terminal; observations count the steps
    buffer.add(obs=k, act=0, rew=1, next_obs=k + 1, done=k == 9)
buffer.on_episode_end()
rows = buffer.get_all_transitions()
done = rows["done"][rows["obs"] >= 10 - N].tolist()  # of the sums that reach the terminal
print(f"cpprb {version}: `done` of the {N} sums that reach a terminal (n = {N}): {done}")
sys.exit(0 if 0.0 in done else 1)
