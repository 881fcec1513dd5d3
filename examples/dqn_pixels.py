"""Deep Q-learning from pixels: each frame is stored once, and stacks of four are made when a batch is read.

    python examples/dqn_pixels.py                   Freeway, from the picture alone: under an hour on one core
    python examples/dqn_pixels.py --env Pong        a million steps, hours on one core
    python examples/dqn_pixels.py --device cuda     the same with the network on a GPU
    python examples/dqn_pixels.py --short           seconds: measures bytes, and checks that the network changes

A transition of Atari (Mnih et al. 2015) is four pictures of 84 x 84 and the four that follow. A buffer that stores
observations as they come needs 56,448 bytes for it, or 56 GB for the usual million. But seven of the eight pictures
belong to other transitions, too. A replay with ``relive.FrameStack`` stores one picture per step and returns all
eight. Near the start of an episode it repeats the first one.

The policy needs stacks as well, and keeps the last frames itself. ``is_start``, a field of the schema that the
collector fills, shows it where episodes begin.

Otherwise this is examples/dqn.py without priorities. Pong is learned when the mean return is positive; the best is 21.
In Freeway every crossing of the road counts 1; a player that always walks up crosses about 21 times.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import ale_py
import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing
from torch import Tensor, nn

import relive
from support.common import Goal, Run, command_line

GAMES = {
    "Freeway": Goal(random=0, target=20, stop=24, steps=200_000, short=(5_000, -math.inf), window=8),
    "Pong": Goal(random=-20.4, target=10, stop=15, steps=1_000_000, short=(5_000, -math.inf), window=20),
}
NUM_ENVS = 4
DEPTH = 4  # frames per stack
CAPACITY, SHORT_CAPACITY = 200_000, 4_000  # the short run fills its replay, to measure a full one
WARM_UP = 4_000  # random transitions before the first gradient step
BATCH_SIZE = 32
UPDATES = 1  # gradient steps per vector step
GAMMA = 0.99
LEARNING_RATE = 2e-4
TAU = 0.005  # how far the target network follows at each gradient step
EXPLORE, EPSILON = 50_000, 0.02  # the share of random actions falls from 1 to EPSILON in this many steps

PLAIN_BYTES = 2 * DEPTH * 84 * 84  # of obs and next_obs, stored without sharing
MOST_BYTES = 7_300  # what this buffer may take, all fields included


def make(game: str) -> gym.Env:
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)  # the wrapper skips frames itself
    return AtariPreprocessing(env)


class Policy:
    """Epsilon-greedy on the last frames. It keeps these itself: observations ``[N, 84, 84]`` are single frames."""

    def __init__(self, q: nn.Module, actions: int, device: str) -> None:
        self.q, self.actions, self.device, self.epsilon = q, actions, device, 1.0
        self.frames: Tensor | None = None

    def __call__(self, obs: Tensor, is_start: Tensor) -> Tensor:
        newest = obs.to(self.device).unsqueeze(1)
        first = newest.expand(-1, DEPTH, -1, -1)  # as FrameStack pads
        starts = is_start.to(self.device).view(-1, 1, 1, 1)
        older = first if self.frames is None else self.frames
        self.frames = torch.where(starts, first, torch.cat([older[:, 1:], newest], dim=1))
        greedy = self.q(self.frames).argmax(dim=1)
        random = torch.randint_like(greedy, self.actions)
        return torch.where(torch.rand(len(obs), device=greedy.device) < self.epsilon, random, greedy)


class Network(nn.Module):
    """Q-values of a stack of frames, uint8 ``[B, DEPTH, 84, 84]`` (the network of Mnih et al. 2013)."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(DEPTH, 16, 8, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 4, stride=2), nn.ReLU()
        )
        self.judge = nn.Sequential(nn.Linear(32 * 9 * 9, 256), nn.ReLU(), nn.Linear(256, actions))

    def forward(self, frames: Tensor) -> Tensor:
        x = frames.to(torch.float32, memory_format=torch.channels_last) / 255  # twice as fast on a CPU
        return self.judge(self.see(x).flatten(1))


def pick(values: Tensor, action: Tensor) -> Tensor:
    """The value of each row's action, ``[B]``, out of the values of all actions ``[B, A]``."""
    return values.gather(1, action.unsqueeze(1)).squeeze(1)


def train(game: str, args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    envs = SyncVectorEnv([partial(make, game)] * (args.num_envs or NUM_ENVS), autoreset_mode=AutoresetMode.SAME_STEP)
    actions = int(envs.single_action_space.n)
    q, slow_q = Network(actions).to(args.device), Network(actions).to(args.device)
    slow_q.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE)

    schema = relive.Schema.from_env(envs, is_start=relive.Field((), torch.bool))
    capacity = SHORT_CAPACITY if run.short else CAPACITY
    plan = relive.ReplayBuffer.plan(schema, capacity, envs.num_envs)
    view = relive.FrameStack(DEPTH, relive.NStep(3, gamma=GAMMA))
    replay = relive.ReplayBuffer(schema, capacity, envs.num_envs, view=view, seed=args.seed)
    policy = Policy(q, actions, args.device)
    collector = relive.Collector(envs, policy, replay, seed=args.seed)
    warm = collector.warm(replay, WARM_UP // envs.num_envs, seed=args.seed)  # random actions, in separate envs
    probe = replay.sample(BATCH_SIZE)["obs"].to(args.device)
    before, loss = q(probe).detach(), torch.tensor(math.nan)
    run.update(warm.num_steps, warm.episode_returns)

    while not run.over:
        policy.epsilon = max(EPSILON, 1 - collector.total_steps / EXPLORE)
        stats = collector.collect(1)
        losses: dict[str, Tensor] = {}
        for batch in (drawn.to(args.device) for drawn in replay.batches(UPDATES, BATCH_SIZE, reuse=True)):
            with torch.no_grad():
                best = q(batch["next_obs"]).argmax(dim=1)
                target = batch["reward"] + batch["discount"] * pick(slow_q(batch["next_obs"]), best)
            value = pick(q(batch["obs"]), batch["action"])
            loss = nn.functional.huber_loss(value, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for slow, fast in zip(slow_q.parameters(), q.parameters(), strict=True):
                slow.data.lerp_(fast.data, TAU)
            losses = {"loss": loss, "q_value": value.mean()}
        run.update(warm.num_steps + collector.total_steps, stats.episode_returns, **losses)
    envs.close()

    taken = plan.total_bytes / len(replay)  # including the rows at the ends of episodes
    moved = (q(probe).detach() - before).abs().mean()
    print(f"{plan}\n{len(replay):,} transitions: {taken:,.0f} bytes each, where a plain buffer takes {PLAIN_BYTES:,}")
    print(f"loss {loss:.2g}; Q-values have moved by {moved:.2g} on average")
    if run.short:
        assert taken <= MOST_BYTES, f"a transition may take {MOST_BYTES:,} bytes"
        assert loss.isfinite(), "the loss is not finite"
        assert 0 < moved < math.inf, "the network did not learn"


def main() -> None:
    args = command_line(__doc__, *GAMES).parse_args()
    torch.set_num_threads(1)
    game = args.env or "Freeway"
    with Run("DQN-pixels", game, GAMES[game], args) as run:
        train(game, args, run)
    print("Next: examples/dqn.py has priorities, too; docs/replay.md says what else a replay can do.")


if __name__ == "__main__":
    main()
