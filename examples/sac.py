"""Soft actor-critic (Haarnoja et al. 2018), with and without emphasis on recent experience (Wang and Ross 2019).

    python examples/sac.py              Pendulum-v1: swing it up and hold it there; about -150 is as good as it gets
    python examples/sac.py --ere        the same, with batches mostly from recent experience

The two differ in one line, the replay's sampler. Each round plays for a while and then makes one gradient step per
transition. With ERE, update k of the K in a round draws only from the newest N·η^(1000k/K) transitions. Episodes of
Pendulum-v1 only ever end by truncation, so ``discount`` is never 0 here. A learner that took a time limit for a failure
would expect no reward after it.

Two critics reduce overestimation, tanh squashes actions, and a learned temperature keeps the entropy of the policy near
minus the number of action dimensions.
"""

from __future__ import annotations

import argparse
import copy
import math

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RescaleAction
from torch import Tensor, nn
from torch.distributions import Normal

import relive
from support.common import Goal, Run, command_line

ENV = "Pendulum-v1"
GOAL = Goal(random=-1200, target=-200, steps=15_000, short=(8_000, -800), window=20)
NUM_ENVS = 4
ROUND = 50  # vector steps between updates
CAPACITY = 100_000
WARM_UP = 1_000  # random transitions before the first update
BATCH_SIZE = 128
GAMMA = 0.99
LEARNING_RATE = 1e-3
TAU = 0.005  # how far the target critics follow at each update
ETA, C_MIN = 0.996, 1_000  # of ERE


def pendulum() -> gym.Env:
    return RescaleAction(gym.make(ENV), np.float32(-1), np.float32(1))


class Actor(nn.Module):
    """A Gaussian, squashed by tanh: actions in (-1, 1), with their log probabilities."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.body = network(inputs, 2 * actions)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.body(obs).chunk(2, dim=-1)
        normal = Normal(mean, log_std.clamp(-20, 2).exp(), validate_args=False)
        x = normal.rsample()
        squashed = 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))  # log(1 - tanh²x) without cancellation
        return torch.tanh(x), (normal.log_prob(x) - squashed).sum(dim=-1)


class Critic(nn.Module):
    """Two Q-functions; the smaller of their answers overestimates less."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.one, self.two = network(inputs + actions, 1), network(inputs + actions, 1)

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([obs, action], dim=-1)
        return self.one(x).squeeze(-1), self.two(x).squeeze(-1)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


def train(ere: bool, args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or NUM_ENVS
    envs = SyncVectorEnv([pendulum] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    inputs, actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    actor, critic = Actor(inputs, actions).to(args.device), Critic(inputs, actions).to(args.device)
    slow_critic = copy.deepcopy(critic)
    log_alpha = torch.zeros((), device=args.device, requires_grad=True)  # of the temperature
    learned = actor.parameters(), critic.parameters(), [log_alpha]
    actor_optimizer, critic_optimizer, alpha_optimizer = (torch.optim.Adam(x, lr=LEARNING_RATE) for x in learned)

    sampler = relive.Recent(ETA, C_MIN) if ere else relive.Uniform()
    schema = relive.Schema.from_env(envs)  # obs, action, reward, terminated, truncated
    view = relive.Transition(gamma=GAMMA)
    replay = relive.ReplayBuffer(schema, CAPACITY, num_envs, sampler=sampler, view=view, seed=args.seed)
    collector = relive.Collector(envs, lambda obs: actor(obs.to(args.device))[0], replay, seed=args.seed)
    warm = collector.warm(replay, WARM_UP // num_envs, seed=args.seed)  # random actions, in separate envs
    run.update(warm.num_steps, warm.episode_returns)

    while not run.over:
        stats = collector.collect(ROUND)
        losses: dict[str, Tensor] = {}
        for batch in (drawn.to(args.device) for drawn in replay.batches(stats.num_steps, BATCH_SIZE, reuse=True)):
            alpha = log_alpha.exp().detach()
            with torch.no_grad():
                action, log_prob = actor(batch["next_obs"])
                soft_value = torch.min(*slow_critic(batch["next_obs"], action)) - alpha * log_prob
                target = batch["reward"] + batch["discount"] * soft_value
            one, two = critic(batch["obs"], batch["action"])
            critic_loss = (one - target).square().mean() + (two - target).square().mean()
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()

            action, log_prob = actor(batch["obs"])
            actor_loss = (alpha * log_prob - torch.min(*critic(batch["obs"], action))).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()

            alpha_loss = -log_alpha.exp() * (log_prob.detach().mean() - actions)
            alpha_optimizer.zero_grad()
            alpha_loss.backward()
            alpha_optimizer.step()

            for slow, fast in zip(slow_critic.parameters(), critic.parameters(), strict=True):
                slow.data.lerp_(fast.data, TAU)
            losses = {"critic_loss": critic_loss, "actor_loss": actor_loss, "temperature": alpha}
        run.update(warm.num_steps + collector.total_steps, stats.episode_returns, **losses)
    envs.close()


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--ere", action="store_true", help="emphasise recent experience (with --short: both, in turn)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    for ere in (False, True) if args.short else (args.ere,):
        with Run("SAC-ERE" if ere else "SAC", ENV, GOAL, args) as run:
            train(ere, args, run)
    print("Next: examples/dqn.py has priorities; docs/replay.md says what else a replay can do.")


if __name__ == "__main__":
    main()
