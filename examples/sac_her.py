"""Soft actor-critic with hindsight experience replay (Andrychowicz et al. 2017): a robot arm that reaches for a point.

    python examples/sac_her.py                FetchReach-v4, with hindsight and without, in one plot
    python examples/sac_her.py --her yes      only with it

Every step costs 1 until the gripper is at the goal, and the reward does not show where the goal is. An arm that never
arrives has nothing to learn from. The two runs differ in one line, the replay's view. ``Hindsight`` gives four rows in
five of a batch another goal, which the arm reached later in the same episode. The environment's own ``compute_reward``
then gives the reward. Experience is stored once, unchanged.

The environment comes from gymnasium-robotics, which needs mujoco below 3.4.
"""

from __future__ import annotations

import argparse
import copy
import math
from functools import partial
from pathlib import Path

import gymnasium as gym
import gymnasium_robotics
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Normal

import relive
from support.common import Goal, Run, command_line, draw_together
from support.goals import Judged, successes

ENV = "FetchReach-v4"
GOAL = Goal(random=0, target=0.95, steps=12_000, short=(6_000, 0.6), stop=1.0, window=50, measure="success rate")
NO_GOAL = Goal(random=0, target=-math.inf, steps=12_000, short=(1_000, -math.inf), window=50, measure="success rate")
NUM_ENVS = 4
ROUND = 5  # vector steps between updates
CAPACITY = 100_000
WARM_UP = 800  # random transitions before the first update: four episodes of 50 steps in each env
BATCH_SIZE = 256
GAMMA = 0.95
LEARNING_RATE = 1e-3
TAU = 0.01  # how far the target critics follow at each update


class Actor(nn.Module):
    """A Gaussian, squashed by tanh: actions in (-1, 1), with their log probabilities."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.body = network(inputs, 2 * actions)

    def forward(self, obs: relive.Batch) -> tuple[Tensor, Tensor]:
        mean, log_std = self.body(flatten(obs)).chunk(2, dim=-1)
        normal = Normal(mean, log_std.clamp(-20, 2).exp(), validate_args=False)
        x = normal.rsample()
        squashed = 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))  # log(1 - tanh²x) without cancellation
        return torch.tanh(x), (normal.log_prob(x) - squashed).sum(dim=-1)


class Critic(nn.Module):
    """Two Q-functions; the smaller of their answers overestimates less."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.one, self.two = network(inputs + actions, 1), network(inputs + actions, 1)

    def forward(self, obs: relive.Batch, action: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([flatten(obs), action], dim=-1)
        return self.one(x).squeeze(-1), self.two(x).squeeze(-1)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


def flatten(obs: relive.Batch) -> Tensor:
    """The observation and the goal in one tensor; observations are float64."""
    return torch.cat([obs["observation"], obs["desired_goal"]], dim=-1).float()


def reach() -> Judged:
    return Judged(gym.make(ENV))


def view_of(envs: SyncVectorEnv, her: bool) -> relive.NStep | relive.Hindsight:
    if not her:
        return relive.Transition(gamma=GAMMA)
    return relive.Hindsight(envs.envs[0].unwrapped.compute_reward, strategy="future", k=4, gamma=GAMMA)


def train(her: bool, args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or NUM_ENVS
    envs = SyncVectorEnv([reach] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    members, actions = envs.single_observation_space.spaces, envs.single_action_space.shape[0]
    inputs = members["observation"].shape[0] + members["desired_goal"].shape[0]
    actor, critic = Actor(inputs, actions).to(args.device), Critic(inputs, actions).to(args.device)
    slow_critic = copy.deepcopy(critic)
    log_alpha = torch.full((), -1.0, device=args.device, requires_grad=True)  # of the temperature
    learned = actor.parameters(), critic.parameters(), [log_alpha]
    actor_optimizer, critic_optimizer, alpha_optimizer = (torch.optim.Adam(x, lr=LEARNING_RATE) for x in learned)

    schema = relive.Schema.from_env(envs)  # obs with its three members, action, reward, terminated, truncated
    replay = relive.ReplayBuffer(schema, CAPACITY, num_envs, view=view_of(envs, her), seed=args.seed)
    act = partial(acting, actor, args.device)
    collector = relive.Collector(envs, act, replay, seed=args.seed)
    warm = collector.warm(replay, WARM_UP // num_envs, seed=args.seed)  # random actions, in separate envs
    run.update(warm.num_steps, [])

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
        run.update(warm.num_steps + collector.total_steps, successes(envs), **losses)
    envs.close()


def acting(actor: Actor, device: str, obs: relive.Batch) -> Tensor:
    return actor({name: member.to(device) for name, member in obs.items()})[0]


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--her", choices=("yes", "no", "both"), default="both", help="with hindsight, or without")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    gym.register_envs(gymnasium_robotics)
    runs: dict[str, Run] = {}
    for her in (True, False) if args.her == "both" else (args.her == "yes",):
        name, goal = ("SAC with hindsight", GOAL) if her else ("SAC without", NO_GOAL)
        with Run(name, ENV, goal, args, drawn_later=True) as run:
            train(her, args, run)
        runs[name] = run
    if args.plot or not args.short:
        path = args.plot or Path(f"runs/sac_her-{ENV}.png")
        draw_together(path, f"{ENV}, sparse rewards", {name: [run] for name, run in runs.items()})
    print("Next: examples/dqn_her.py has episodes that end at the goal; docs/hindsight.md explains the view.")


if __name__ == "__main__":
    main()
