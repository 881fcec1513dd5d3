"""Double Q-learning with hindsight experience replay (Andrychowicz et al. 2017, section 3.1): flipping bits.

    python examples/dqn_her.py               15 bits, with hindsight and without, in one plot
    python examples/dqn_her.py --her yes     only with it

There are 32,768 goals, and nothing hints at where they are. Without hindsight the reward is -1 at every step.
Episodes end when the goal is reached, so their lengths differ, and ``terminated`` must be relabelled with the reward. A
step that reaches its new goal has reward 0 and no future: ``terminated_fn`` marks it as terminal, and its ``discount``
is 0. Targets are 2-step, and a window ends where the new goal is reached.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

import relive
from support.common import Goal, Run, command_line, draw_together
from support.goals import BitFlip, Judged, successes

BITS, SHORT_BITS = 15, 10
ENV = "BitFlip"
GOAL = Goal(random=0, target=0.95, steps=60_000, short=(12_000, 0.6), stop=0.99, measure="success rate")
NO_GOAL = Goal(random=0, target=-math.inf, steps=30_000, short=(4_000, -math.inf), measure="success rate")
NUM_ENVS = 4
CAPACITY = 100_000
WARM_UP = 1_000  # random transitions before the first gradient step
BATCH_SIZE = 128
ROUND = 4  # vector steps between updates
UPDATES = 4  # gradient steps after each round
GAMMA = 0.98
LEARNING_RATE = 1e-3
TAU = 0.01  # how far the target network follows at each gradient step
EXPLORE = 0.1  # the fraction of the run in which the share of random actions falls from 1 ...
EPSILON = 0.01  # ... to this


class Policy:
    """Epsilon-greedy: mostly the action of the largest Q-value, sometimes a random one."""

    def __init__(self, q: nn.Module, actions: int, device: str) -> None:
        self.q, self.actions, self.device, self.epsilon = q, actions, device, 1.0

    def __call__(self, obs: relive.Batch) -> Tensor:
        greedy = self.q(flatten(obs).to(self.device)).argmax(dim=1)
        random = torch.randint_like(greedy, self.actions)
        return torch.where(torch.rand(len(greedy), device=greedy.device) < self.epsilon, random, greedy)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


def flatten(obs: relive.Batch) -> Tensor:
    """The current bits and the goal's, in one tensor."""
    return torch.cat([obs["observation"], obs["desired_goal"]], dim=-1).float()


def pick(values: Tensor, action: Tensor) -> Tensor:
    """The value of each row's action, ``[B]``, out of the values of all actions ``[B, A]``."""
    return values.gather(1, action.unsqueeze(1)).squeeze(1)


def view_of(env: Any, her: bool) -> relive.NStep | relive.Hindsight:
    if not her:
        return relive.NStep(2, gamma=GAMMA)
    return relive.Hindsight(
        env.compute_reward, strategy="future", k=4, terminated_fn=env.compute_terminated, n=2, gamma=GAMMA
    )


def train(her: bool, args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    size, num_envs = SHORT_BITS if args.short else BITS, args.num_envs or NUM_ENVS
    makers = [lambda: Judged(BitFlip(size))] * num_envs
    envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    q, slow_q = network(2 * size, size).to(args.device), network(2 * size, size).to(args.device)
    slow_q.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE)

    schema = relive.Schema.from_env(envs)  # obs with its three members, action, reward, terminated, truncated
    view = view_of(envs.envs[0].unwrapped, her)
    replay = relive.ReplayBuffer(schema, CAPACITY, num_envs, view=view, seed=args.seed)
    policy = Policy(q, size, args.device)
    collector = relive.Collector(envs, policy, replay, seed=args.seed)
    warm = collector.warm(replay, WARM_UP // num_envs, seed=args.seed)  # random actions, in separate envs
    run.update(warm.num_steps, [])

    while not run.over:
        policy.epsilon = max(EPSILON, 1 - (1 - run.remaining) / EXPLORE)
        collector.collect(ROUND)
        losses: dict[str, Tensor] = {}
        for batch in (drawn.to(args.device) for drawn in replay.batches(UPDATES, BATCH_SIZE, reuse=True)):
            obs, next_obs = flatten(batch["obs"]), flatten(batch["next_obs"])
            with torch.no_grad():
                best = q(next_obs).argmax(dim=1)
                target = batch["reward"] + batch["discount"] * pick(slow_q(next_obs), best)
            value = pick(q(obs), batch["action"])
            loss = nn.functional.huber_loss(value, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for slow, fast in zip(slow_q.parameters(), q.parameters(), strict=True):
                slow.data.lerp_(fast.data, TAU)
            losses = {"loss": loss, "q_value": value.mean()}
        run.update(warm.num_steps + collector.total_steps, successes(envs), **losses)
    envs.close()


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--her", choices=("yes", "no", "both"), default="both", help="with hindsight, or without")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    runs: dict[str, Run] = {}
    for her in (True, False) if args.her == "both" else (args.her == "yes",):
        name, goal = ("DQN with hindsight", GOAL) if her else ("DQN without", NO_GOAL)
        with Run(name, ENV, goal, args, drawn_later=True) as run:
            train(her, args, run)
        runs[name] = run
    if args.plot or not args.short:
        title = f"Flipping {BITS} bits, sparse rewards"
        draw_together(args.plot or Path("runs/dqn_her.png"), title, {name: [run] for name, run in runs.items()})
    print("Next: examples/sac_her.py reaches for goals with a robot arm; docs/hindsight.md explains the view.")


if __name__ == "__main__":
    main()
