"""PPO adds γV of the observation before the step to the stored reward of a time limit, in place of the final one's."""

import sys
from importlib import metadata

import torch

try:
    version = metadata.version("rsl-rl-lib")
except metadata.PackageNotFoundError:
    sys.exit(77)
from rsl_rl.algorithms import PPO
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict


class Model(torch.nn.Linear):
    """The value of an observation is ten times itself."""

    is_recurrent, output_distribution_params = False, (torch.zeros(1, 1),)

    def forward(self, obs: TensorDict, stochastic_output: bool = False) -> torch.Tensor:
        return 10 * obs["policy"]

    def get_output_log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        return actions[:, 0]

    get_hidden_state = reset = lambda self, *_, **__: None


before, after = (TensorDict({"policy": torch.full((1, 1), x)}, [1]) for x in (2.0, 0.0))
storage = RolloutStorage("rl", 1, 1, before, (1,))
ppo = PPO(Model(1, 1), Model(1, 1), storage, gamma=0.9)
ppo.act(before)  # the step from 2 earns 1 and is cut off in 3; the environment resets and returns 0
ppo.process_env_step(after, torch.ones(1), torch.ones(1, dtype=torch.bool), {"time_outs": torch.ones(1)})
added = storage.rewards.item() - 1
print(f"rsl-rl-lib {version}: {added:.0f} is added to the reward, γV(2); γV of the final observation 3 is 27")
sys.exit(0 if abs(added - 27) > 1e-3 else 1)
