"""Proximal policy optimisation (Schulman et al. 2017): clipped policy gradients on short rollouts of several envs.

    python examples/ppo.py                      CartPole-v1: two actions, until the mean return is well above 475
    python examples/ppo.py --env Pendulum-v1    continuous actions, and episodes that only ever end by truncation
    python examples/ppo.py --env masked         a pond where most jumps are illegal; which ones are changes each time
    python examples/ppo.py --env unmasked       the same without the mask: it cannot learn
    python examples/ppo.py --env dict           nested observations: a uint8 picture, and a goal

The same loop learns all of them. Only the distribution of actions and a few numbers differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import ClipAction, RescaleAction
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

import relive
from support.common import Courtyard, Goal, LilyPads, Run, command_line


@dataclass(frozen=True)
class Task:
    """An env and its hyperparameters; the defaults suit small envs with discrete actions."""

    make: Callable[[], gym.Env]
    goal: Goal
    num_envs: int = 8
    num_steps: int = 32  # of each env, per rollout
    batch_size: int = 256
    epochs: int = 20
    learning_rate: float = 1e-3
    gamma: float = 0.98
    lam: float = 0.8
    clip: float = 0.2
    entropy: float = 0.0
    extras: Mapping[str, relive.Field] = field(default_factory=dict)  # fields of a step beyond the usual ones


def cartpole() -> gym.Env:
    return gym.make("CartPole-v1")


def pendulum() -> gym.Env:
    env = RescaleAction(gym.make("Pendulum-v1"), np.float32(-1), np.float32(1))
    return ClipAction(env)  # a Gaussian policy has no bounds, but the motor has


# Naming the mask is enough: the collector finds it in info, passes it to the policy, and stores it.
MASK = {"action_mask": relive.Field((8,), torch.bool)}

TASKS = {
    # 25 such episodes are no luck: at seeds 0 to 4, the policies then reached 500 in each of 100 further ones
    "CartPole-v1": Task(cartpole, Goal(random=22, target=475, stop=490, steps=300_000, short=(60_000, 250), window=25)),
    "Pendulum-v1": Task(
        pendulum,
        Goal(random=-1200, target=-250, steps=250_000, short=(80_000, -600)),
        num_envs=4,
        num_steps=256,
        batch_size=64,
        epochs=10,
        gamma=0.9,
        lam=0.95,
    ),
    "masked": Task(
        LilyPads, Goal(random=-0.27, target=0.8, steps=20_000, short=(20_000, 0.7)), entropy=0.01, extras=MASK
    ),
    "unmasked": Task(LilyPads, Goal(random=-1.01, target=0.8, steps=20_000, short=(20_000, 0.7)), entropy=0.01),
    "dict": Task(Courtyard, Goal(random=-0.79, target=0.8, steps=50_000, short=(50_000, 0.7)), entropy=0.01),
}
IN_SHORT = ("CartPole-v1", "Pendulum-v1", "masked", "dict")


class Policy(nn.Module):
    """Actor and critic. Without ``action``, ``forward`` draws actions to play; with it, it evaluates them."""

    def __init__(self, schema: relive.Schema, action_space: gym.Space) -> None:
        super().__init__()
        inputs = sum(torch.Size(leaf.shape).numel() for path, leaf in schema.leaves.items() if path[0] == "obs")
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        self.actor, self.critic = network(inputs, outputs, gain=0.01), network(inputs, 1, gain=1.0)
        self.log_std = nn.Parameter(torch.zeros(outputs))  # of continuous actions

    def forward(self, obs: Any, action: Tensor | None = None, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        x = flatten(obs)
        actions = self.distribution(self.actor(x), action_mask)
        action = actions.sample() if action is None else action
        return {
            "action": action,
            "value": self.critic(x).squeeze(-1),
            "log_prob": actions.log_prob(action),
            "entropy": actions.entropy(),
        }

    def distribution(self, scores: Tensor, action_mask: Tensor | None) -> Distribution:
        if not self.discrete:
            return Independent(Normal(scores, self.log_std.exp(), validate_args=False), 1)
        if action_mask is not None:
            scores = scores.masked_fill(~action_mask, -1e9)  # illegal: probability 0, and no gradient
        return Categorical(logits=scores, validate_args=False)


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers = nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def flatten(obs: Any) -> Tensor:
    """Rows of floats ``[B, inputs]`` from a tensor or a batch of any depth; bytes are scaled to 0 to 1."""
    if isinstance(obs, Tensor):
        return (obs / 255 if obs.dtype is torch.uint8 else obs.float()).reshape(len(obs), -1)
    return torch.cat([flatten(obs[name]) for name in sorted(obs.keys())], dim=1)


def train(task: Task, args: argparse.Namespace, run: Run) -> Policy:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or task.num_envs
    envs = SyncVectorEnv([task.make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    schema = relive.Schema.from_env(envs, value=(), log_prob=(), **task.extras)
    rollout = relive.RolloutBuffer(schema, task.num_steps, num_envs, device=args.device, seed=args.seed)
    policy = Policy(schema, envs.single_action_space).to(args.device)
    collector = relive.Collector(envs, policy, rollout, seed=args.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=task.learning_rate, eps=1e-5)

    while not run.over:
        optimizer.param_groups[0]["lr"] = task.learning_rate * run.remaining
        clip = task.clip * run.remaining
        stats = collector.collect()  # fills the rollout, and values the final observations of truncated episodes
        rollout.finish(relive.GAE(gamma=task.gamma, lam=task.lam))
        if "action_mask" in schema:
            legal = rollout["action_mask"].gather(-1, rollout["action"].unsqueeze(-1))
            assert legal.all(), "the policy played an illegal action"

        losses: dict[str, Tensor] = {}
        minibatches = rollout.minibatches(task.batch_size, epochs=task.epochs, normalize_advantage=True, reuse=True)
        for batch in minibatches:
            now = policy(batch["obs"], action=batch["action"], action_mask=batch.get("action_mask", None))
            ratio = (now["log_prob"] - batch["log_prob"]).exp()
            clipped = ratio.clamp(1 - clip, 1 + clip)
            policy_loss = -torch.min(ratio * batch["advantage"], clipped * batch["advantage"]).mean()
            value_loss = 0.5 * (now["value"] - batch["return"]).square().mean()
            entropy = now["entropy"].mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - task.entropy * entropy).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        run.update(collector.total_steps, stats.episode_returns, **losses)
    envs.close()
    return policy


def main() -> None:
    args = command_line(__doc__, *TASKS).parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    for env in [args.env] if args.env else IN_SHORT if args.short else ["CartPole-v1"]:
        with Run("PPO", env, TASKS[env].goal, args) as run:
            train(TASKS[env], args, run)
    print("Next: examples/a2c.py and examples/grpo.py are simpler; docs/rollouts.md says what else a rollout can do.")


if __name__ == "__main__":
    main()
