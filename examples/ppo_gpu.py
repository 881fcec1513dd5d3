"""PPO on a simulator that lives on the device: thousands of environments, short rollouts, large minibatches.

    python examples/ppo_gpu.py                      1024 point masses, on the CPU
    python examples/ppo_gpu.py --device cuda --num-envs 4096

Simulator, rollout and networks are on one device, as in rsl_rl (Rudin et al. 2022), and no part of an iteration waits
for it: the collector hands over tensors, ``finish`` computes all advantages in a few operations, and each epoch's
permutation is made there. The minibatches are those of a rollout in RAM. The returns of episodes are read once a round.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import relive
from support.common import Goal, Run, command_line
from support.point_masses import PointMasses

ENV = "PointMasses"
GOAL = Goal(random=10, target=90, steps=1_500_000, short=(1_000_000, 70), stop=94)
NUM_ENVS = 1_024
NUM_STEPS = 24  # of each env, per rollout
MINIBATCHES, EPOCHS = 4, 5
GAMMA, LAM = 0.97, 0.95
LEARNING_RATE = 1e-3
CLIP = 0.2
ROUND = 4  # rollouts between two looks at the returns


class Policy(nn.Module):
    """A Gaussian actor and a critic. Without ``action``, ``forward`` draws actions; with it, it evaluates them."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = network(inputs, actions), network(inputs, 1)
        self.log_std = nn.Parameter(torch.full((actions,), -0.5))

    def forward(self, obs: Tensor, action: Tensor | None = None) -> dict[str, Tensor]:
        actions = Independent(Normal(self.actor(obs), self.log_std.exp(), validate_args=False), 1, validate_args=False)
        action = actions.sample() if action is None else action
        return {"action": action, "value": self.value(obs), "log_prob": actions.log_prob(action)}

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ELU(), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, outputs))


def train(args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    simulator = PointMasses(args.num_envs or NUM_ENVS, args.device, seed=args.seed)
    schema = relive.Schema.from_env(simulator, value=(), log_prob=())
    rollout = relive.RolloutBuffer(schema, NUM_STEPS, simulator.num_envs, device=args.device, seed=args.seed)
    policy = Policy(schema["obs"].shape[0], schema["action"].shape[0]).to(args.device)
    collector = relive.Collector(simulator, policy, rollout, value_fn=policy.value)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    batch_size = NUM_STEPS * simulator.num_envs // MINIBATCHES

    while not run.over:
        rounds = []
        for _ in range(ROUND):
            rounds.append(collector.collect())  # and values the final observations of truncated episodes
            rollout.finish(relive.GAE(gamma=GAMMA, lam=LAM))
            losses: dict[str, Tensor] = {}
            for batch in rollout.minibatches(batch_size, epochs=EPOCHS, normalize_advantage=True):
                now = policy(batch["obs"], action=batch["action"])
                ratio = (now["log_prob"] - batch["log_prob"]).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                policy_loss = -torch.min(ratio * batch["advantage"], clipped * batch["advantage"]).mean()
                value_loss = 0.5 * (now["value"] - batch["return"]).square().mean()
                optimizer.zero_grad()
                (policy_loss + 0.5 * value_loss).backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                optimizer.step()
                losses = {"policy_loss": policy_loss, "value_loss": value_loss}
        returns = [value for stats in rounds for value in stats.episode_returns]  # waits for the device
        run.update(collector.total_steps, returns, **losses)


def main() -> None:
    args = command_line(__doc__, ENV).parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    with Run("PPO-GPU", ENV, GOAL, args) as run:
        train(args, run)
    print("Next: examples/fast_td3.py plays the same simulator off-policy; docs/device.md says what stays there.")


if __name__ == "__main__":
    main()
