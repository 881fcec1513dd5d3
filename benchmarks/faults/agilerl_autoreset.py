"""`collect_rollouts` stores the steps that `NEXT_STEP` autoreset ignores, the mode of its vector environments."""

import sys
from importlib import metadata, util
from unittest.mock import MagicMock

import numpy as np
import torch

try:
    package = metadata.distribution("agilerl")
except metadata.PackageNotFoundError:
    sys.exit(77)
import gymnasium as gym

sys.modules["agilerl.networks"] = MagicMock(StochasticActor=int)  # agents, of which the loop needs little
sys.modules["agilerl.algorithms"] = sys.modules["agilerl.components.llm_rollout_data"] = MagicMock()
spec = util.spec_from_file_location("on_policy", package.locate_file("agilerl/rollouts/on_policy.py"))
module = util.module_from_spec(spec)
spec.loader.exec_module(module)

rows, value = [], torch.zeros(2)
agent = MagicMock(num_envs=2, learn_step=400, scores=[])
agent.registry.policy.return_value = "policy"
agent.get_action = lambda *_, **__: (envs.action_space.sample(), np.zeros(2), 0, np.zeros(2))
agent._get_action_and_values = lambda *_, **__: (0, 0, 0, value, 0)
agent.rollout_buffer.add = lambda **row: rows.append(row)
envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)  # as `make_vect_envs` makes them
envs.action_space.seed(0)
envs.reset(seed=0)
module.collect_rollouts(agent, envs)
ignored = sum(int((row["reward"] == 0).sum()) for row in rows)  # every true step of CartPole earns 1
print(f"agilerl {package.version}: {ignored} of {2 * len(rows)} stored rows are steps that the environments ignored")
sys.exit(0 if ignored else 1)
