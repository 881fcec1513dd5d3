"""Sums that a time limit cuts short lead to the observation of another step, and no flag masks it."""

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
for episode in range(2):  # each is cut off by a limit of 10 steps; observations count the steps of both
    for k in range(10 * episode, 10 * episode + 10):
        buffer.add(obs=k, act=0, rew=1, next_obs=k + 1, done=False)
    buffer.on_episode_end()
rows = {name: values.ravel() for name, values in buffer.get_all_transitions().items()}
last = (rows["obs"] >= 10 + 10 - N + 1) & (rows["done"] == 0)  # the sums of fewer than n steps of the second one
found = rows["next_obs"][last].tolist()
print(f"cpprb {version}: the {N - 1} last sums (n = {N}) lead to {found}, and the episode ended on 20.0")
sys.exit(0 if any(obs != 20 for obs in found) else 1)
