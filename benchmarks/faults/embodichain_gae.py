"""At a time limit, `compute_gae` bootstraps from the value of the observation before the step."""

import sys
from importlib import metadata, util

import torch

try:
    package = metadata.distribution("embodichain")
except metadata.PackageNotFoundError:
    sys.exit(77)
from tensordict import TensorDict

# this file alone, because the package's learning module imports its simulator
spec = util.spec_from_file_location("common", package.locate_file("embodichain/learning/rl/algo/common.py"))
module = util.module_from_spec(spec)
spec.loader.exec_module(module)

# the second of three steps meets a time limit; the last value is that of the observation after the rollout
value = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
cut = torch.tensor([[False, True, False, False]])
rollout = TensorDict({"value": value, "reward": torch.zeros(1, 4), "done": cut, "truncated": cut,
                      "terminated": torch.zeros_like(cut)}, [1, 4])  # fmt: skip
advantages, _ = module.compute_gae(rollout, 1.0, 0.0)
target = advantages[0, 1].item() + 2.0
means = {0.0: "nothing: the limit is a terminal", 2.0: "the value before the step"}.get(target, "something else")
print(f"embodichain {package.version}: a time limit after the state of value 2 bootstraps from {target}, {means}")
sys.exit(0 if target in (0.0, 2.0) else 1)
