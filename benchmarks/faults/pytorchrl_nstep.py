"""Sums over n steps stop at an end, but take the next observation and the flag of the newest step."""

import sys
from importlib import metadata
from types import ModuleType

import torch

try:
    package = metadata.distribution("pytorchrl")
except metadata.PackageNotFoundError:
    sys.exit(77)
for part in ("agent", "agent.storages", "agent.storages.off_policy"):  # without their `__init__`, which import gym
    sys.modules[f"pytorchrl.{part}"] = module = ModuleType(part)
    module.__path__ = [str(package.locate_file("pytorchrl/" + part.replace(".", "/")))]
from pytorchrl.agent.storages.off_policy.nstep_buffer import NStepReplayBuffer


class Parts:
    is_recurrent, gamma, _update_every, num_envs = False, 1.0, 50, 1


N, END = 3, 5  # step 5 ends an episode; observations count the steps, and each step earns 1
buffer = NStepReplayBuffer(40, "cpu", Parts(), Parts(), Parts(), n_step=N)
for k in range(20):
    number = {"Observation": k, "NextObservation": k + 1, "Done": k == END + 1, "NextDone": k == END, "Reward": 1}
    number |= dict.fromkeys(("Action", "RecurrentHiddenStates", "NextRecurrentHiddenStates"), 0)
    buffer.insert_transition({name: torch.tensor([[float(x)]]) for name, x in number.items()})

data = {name: torch.as_tensor(buffer.data[name])[: buffer.size].flatten() for name in buffer.data}
first = data["Observation"]
inside = (first <= END) & (first + N > END)  # windows with the end inside
wrong = inside & (data["NextDone"] == 0) & (data["NextObservation"] > END + 1)
found = f"{int(wrong.sum())} of {int(inside.sum())} windows with an end inside (n = {N})"
print(f"pytorchrl {package.version}: {found} bootstrap from the next episode")
sys.exit(0 if wrong.any() else 1)
