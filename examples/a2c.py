"""Advantage actor-critic (Mnih et al. 2016), synchronous: one gradient step on each short rollout of several envs.

    python examples/a2c.py              CartPole-v1, until the mean return is well above 475
    python examples/a2c.py --seed 3     the same with another seed

It differs from examples/ppo.py as the algorithms do. It uses n-step returns instead of GAE, the whole rollout as one
batch instead of minibatches, and no ratio or clipping. It plays Gymnasium's own vectorized CartPole, which resets an
env one step after its episode ended. No action is taken in those steps, so the batch leaves them out.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import relive
from support.common import Goal, Run, command_line

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=475, stop=490, steps=500_000, short=(150_000, 200))
NUM_ENVS = 8
NUM_STEPS = 8  # of each env, between two gradient steps
GAMMA = 0.99
LEARNING_RATE = 2e-3


class Policy(nn.Module):
    """Actor and critic. Without ``action``, ``forward`` draws actions to play; with it, it evaluates them."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = network(inputs, actions), network(inputs, 1)

    def forward(self, obs: Tensor, action: Tensor | None = None) -> dict[str, Tensor]:
        actions = Categorical(logits=self.actor(obs), validate_args=False)
        action = actions.sample() if action is None else action
        return {
            "action": action,
            "value": self.critic(obs).squeeze(-1),
            "log_prob": actions.log_prob(action),
            "entropy": actions.entropy(),
        }


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def train(args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    envs = gym.make_vec(ENV, args.num_envs or NUM_ENVS)
    schema = relive.Schema.from_env(envs, value=())  # obs, action, reward, terminated, truncated, and value
    rollout = relive.RolloutBuffer(schema, NUM_STEPS, envs.num_envs, device=args.device, seed=args.seed)
    policy = Policy(envs.single_observation_space.shape[0], envs.single_action_space.n).to(args.device)
    collector = relive.Collector(envs, policy, rollout, seed=args.seed)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=LEARNING_RATE, alpha=0.99, eps=1e-5)

    while not run.over:
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        stats = collector.collect()
        rollout.finish(relive.MonteCarlo(gamma=GAMMA))  # rewards to the end of the rollout, then the critic's value
        batch = rollout.flat()
        now = policy(batch["obs"], action=batch["action"])

        policy_loss = -(now["log_prob"] * batch["advantage"]).mean()
        value_loss = 0.5 * (now["value"] - batch["return"]).square().mean()
        optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()

        losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": now["entropy"].mean()}
        run.update(collector.total_steps, stats.episode_returns, **losses)
    envs.close()


def main() -> None:
    args = command_line(__doc__, ENV).parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    with Run("A2C", ENV, GOAL, args) as run:
        train(args, run)
    print("Next: examples/ppo.py learns from each rollout many times over; examples/grpo.py needs no critic.")


if __name__ == "__main__":
    main()
