"""Offline, then online: TD3+BC on a Minari data set (Fujimoto and Gu 2021), then half old and half new steps (RLPD).

    python examples/offline.py          Pendulum-v1: swing it up and hold it there; about -150 is as good as it gets

Three mean returns are printed, and each should beat the one before:

1. The data set: an operator knows what to do, but has an unsteady hand. Its steps become a Minari data set, which is
   read back from disk like any other. Every episode in it was truncated and none terminated, so `discount` is never 0.
2. Offline: TD3+BC learns from the data set alone. The actor maximizes Q, and a second term keeps it close to the
   actions in the data, where Q can be trusted. Observations are normalized by the mean and deviation of the data set.
3. Online: the agent goes on without the second term, and adds steps of its own. Half of each batch is from the data set
   and half from the new steps. Layer norm in the critics keeps Q from growing where there is no data. Both are ideas of
   RLPD (Ball et al. 2023), which has SAC with ten critics where this file stays with TD3 and two.

The first online episodes are worse than what was learned offline. The agent tries actions that the data set does not
have, and finds out what they are worth. The data set lies in a temporary folder, which is removed at the end.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RescaleAction
from torch import Tensor, nn

import relive
from relive import exchange
from support.common import draw_phases

ENV, EPISODE, NUM_ENVS = "Pendulum-v1", 200, 4
DATA_SET = "pendulum/unsteady-v0"
UNSTEADY = 1.0  # standard deviation of the noise on the operator's actions, which lie between -1 and 1
FULL, SHORT = (8_000, 2_000, 8_000), (8_000, 1_500, 3_400)  # steps in the data set, gradient steps, steps online
ROUND = 50  # vector steps between updates, online
BATCH_SIZE, GAMMA, LEARNING_RATE, TAU = 128, 0.99, 1e-3, 0.005
ALPHA = 2.5  # TD3+BC: the weight of Q, beside the distance to the actions of the data
TARGET_NOISE, NOISE_CLIP, DELAY = 0.2, 0.5, 2  # TD3
EXPLORATION = 0.2  # standard deviation of the noise on the agent's actions, online


def pendulum() -> gym.Env:
    return RescaleAction(gym.make(ENV), np.float32(-1), np.float32(1))


def vector(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([pendulum] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def network(inputs: int, outputs: int, norm: bool) -> nn.Sequential:
    between = [nn.LayerNorm(128) if norm else nn.Identity() for _ in range(2)]
    hidden = nn.Linear(inputs, 128), between[0], nn.ReLU(), nn.Linear(128, 128), between[1], nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(128, outputs))


class Agent(nn.Module):
    """TD3: an actor, two critics with layer norm, and slow copies of them for the targets."""

    def __init__(self, obs: Tensor, actions: int) -> None:
        super().__init__()
        inputs = obs.shape[1]
        self.mean, self.std = obs.mean(0), obs.std(0) + 1e-3
        self.actor = network(inputs, actions, norm=False)
        self.critics = nn.ModuleList(network(inputs + actions, 1, norm=True) for _ in range(2))
        self.slow_actor, self.slow_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=LEARNING_RATE)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=LEARNING_RATE)

    def forward(self, obs: Tensor) -> Tensor:  # [B, 3] -> actions in (-1, 1), [B, 1]
        return torch.tanh(self.actor((obs - self.mean) / self.std))

    @torch.no_grad()
    def explore(self, obs: Tensor) -> Tensor:
        return (self(obs) + EXPLORATION * torch.randn(len(obs), 1)).clamp(-1, 1)

    def learn(self, batches: Iterable[relive.Batch], imitate: bool) -> None:
        for k, batch in enumerate(batches):
            obs, next_obs = ((batch[name] - self.mean) / self.std for name in ("obs", "next_obs"))
            with torch.no_grad():
                noise = (torch.randn_like(batch["action"]) * TARGET_NOISE).clamp(-NOISE_CLIP, NOISE_CLIP)
                next_action = (torch.tanh(self.slow_actor(next_obs)) + noise).clamp(-1, 1)
                target = batch["reward"] + batch["discount"] * values(self.slow_critics, next_obs, next_action).amin(0)
            critic_loss = (values(self.critics, obs, batch["action"]) - target).square().mean(1).sum()
            step(self.critic_optimizer, critic_loss)
            if k % DELAY:
                continue
            action = torch.tanh(self.actor(obs))
            q = values(self.critics[:1], obs, action)
            actor_loss = -q.mean()
            if imitate:
                actor_loss = actor_loss * ALPHA / q.detach().abs().mean() + (action - batch["action"]).square().mean()
            step(self.actor_optimizer, actor_loss)
            for slow, fast in ((self.slow_actor, self.actor), (self.slow_critics, self.critics)):
                for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
                    old.data.lerp_(new.data, TAU)


def values(critics: nn.ModuleList, obs: Tensor, action: Tensor) -> Tensor:
    """What each critic says, ``[critics, B]``."""
    return torch.stack([critic(torch.cat([obs, action], dim=-1)).squeeze(-1) for critic in critics])


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def operator(obs: Tensor) -> Tensor:
    """Swing until there is enough energy, then hold it near the top, with an unsteady hand: actions ``[N, 1]``."""
    cos, sin, speed = obs.T
    angle, energy = torch.atan2(sin, cos), speed.square() / 6 + 5 * cos  # 5 is the energy at rest on top
    swing = torch.where(energy < 5, speed.sign(), -0.3 * speed.sign())
    wanted = torch.where(angle.abs() < 0.4, -5 * angle - speed, swing).clamp(-1, 1)
    return (wanted + UNSTEADY * torch.randn(len(obs))).clamp(-1, 1).unsqueeze(-1)


def write_data_set(size: int, seed: int) -> None:
    envs = vector(NUM_ENVS)
    replay = relive.ReplayBuffer(relive.Schema.from_env(envs), 2 * size, NUM_ENVS, seed=seed)
    relive.Collector(envs, operator, replay, seed=seed).collect(size // NUM_ENVS)
    exchange.to_minari(replay, DATA_SET, env=pendulum(), algorithm_name="a rule and noise")
    envs.close()


def evaluate(agent: Agent, seed: int) -> float:
    """The mean return of 20 episodes without noise. They begin in the same states each time."""
    envs = vector(20)
    obs, _ = envs.reset(seed=1000 + seed)
    total = 0.0
    with torch.no_grad():
        for _ in range(EPISODE):
            obs, reward, *_ = envs.step(agent(torch.as_tensor(obs)).numpy())
            total += reward.mean()
    envs.close()
    return total


def train(args: argparse.Namespace) -> list[tuple[str, int, float]]:
    """The learning curve: phase, gradient steps so far in it, mean return. The first point is the data set's own."""
    torch.manual_seed(args.seed)
    data_steps, offline_steps, online_steps = SHORT if args.short else FULL
    write_data_set(data_steps, args.seed)
    offline = exchange.from_minari(DATA_SET).replay(view=relive.Transition(GAMMA), seed=args.seed)
    assert relive.audit(offline).ok
    curve = [show("the data set", 0, relive.inspect(offline).returns["mean"])]

    agent, evaluations = Agent(offline.data()["obs"], actions=1), 2 if args.short else 20
    for k in range(evaluations):
        agent.learn(offline.batches(offline_steps // evaluations, BATCH_SIZE), imitate=True)
        curve.append(show("offline", offline_steps * (k + 1) // evaluations, evaluate(agent, args.seed)))

    envs = vector(NUM_ENVS)
    online = relive.ReplayBuffer(offline.schema, online_steps, NUM_ENVS, view=relive.Transition(GAMMA), seed=args.seed)
    half_and_half = relive.Mixture({"offline": offline, "online": online}, {"offline": 0.5, "online": 0.5})
    collector = relive.Collector(envs, agent.explore, online, seed=args.seed)
    while (played := collector.total_steps) < online_steps:
        new = collector.collect(ROUND).num_steps
        agent.learn(half_and_half.batches(new, BATCH_SIZE), imitate=False)  # one gradient step for each new step
        if (played + new) * evaluations // online_steps > played * evaluations // online_steps:
            curve.append(show("online", played + new, evaluate(agent, args.seed)))
    envs.close()
    return curve


def show(phase: str, steps: int, value: float) -> tuple[str, int, float]:
    print(f"  {phase:<12}  {steps:>6,} gradient steps  mean return {value:.0f}", flush=True)
    return phase, steps, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the envs, the networks and the batches (default 0)")
    parser.add_argument("--plot", type=Path, help=f"where the learning curve goes (default runs/offline-{ENV}.png)")
    parser.add_argument("--short", action="store_true", help="a run of seconds that fails if it has not learned")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    warnings.filterwarnings("ignore", module="minari")  # it asks for an e-mail address and the like
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        curve = train(args)
    if args.plot or not args.short:
        draw_phases(args.plot or Path(f"runs/offline-{ENV}.png"), f"TD3+BC on {ENV}, then online", curve)
    if args.short:
        reached = {phase: value for phase, _, value in curve}  # the last of each phase
        assert reached["the data set"] < reached["offline"] <= reached["online"], reached


if __name__ == "__main__":
    main()
