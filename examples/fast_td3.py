"""FastTD3 (Seo et al. 2025): TD3 with thousands of environments, large batches and distributional critics.

    python examples/fast_td3.py                     512 point masses, on the CPU
    python examples/fast_td3.py --device cuda --num-envs 4096 --batch-size 32768

The simulator, the replay and the networks are on one device. On a GPU no step, batch or update of the loop waits for
it: the replay keeps its rows and all that it has to know of them there, and ``compile`` makes a few kernels of each
call. The returns of episodes are read once a round.

A simulator shows the observation after a reset, and hands the true final one out beside it. The collector stores that
where an episode ended, so a time limit bootstraps from where the episode really was.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import relive
from support.common import Goal, Run, command_line
from support.point_masses import PointMasses

ENV = "PointMasses"
GOAL = Goal(random=10, target=85, steps=600_000, short=(250_000, 70), stop=90)
NUM_ENVS = 512
ROWS = 1_000  # of each env in the replay
ROUND = 20  # vector steps between two looks at the returns
WARM_UP = 10  # vector steps before the first update
BATCH_SIZE = 1_024
UPDATES = 2  # after each vector step
DELAY = 2  # updates of the critics for one of the actor
N_STEPS, GAMMA = 3, 0.97
LEARNING_RATE = 1e-3
TAU = 0.05  # how far the target critics follow at each update
NOISE = 0.05, 0.6  # of actions: each env has a scale of its own
SMOOTHING = 0.1, 0.25  # noise of target actions, and its limit
ATOMS, LOWEST, HIGHEST = 51, 0.0, 40.0  # the values that critics give probabilities to


class Critics(nn.Module):
    """Two critics: each gives the logits of a distribution of returns (Bellemare et al. 2017)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.one, self.two = network(inputs, ATOMS), network(inputs, ATOMS)
        self.values: Tensor
        self.register_buffer("values", torch.linspace(LOWEST, HIGHEST, ATOMS))

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([obs, action], dim=-1)
        return self.one(x), self.two(x)

    def means(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        one, two = (logits.softmax(-1) @ self.values for logits in self(obs, action))
        return one, two

    def target(self, batch: dict[str, Tensor], action: Tensor) -> Tensor:
        """The distribution of reward + discount * value of the critic that expects less, on the same values."""
        one, two = (logits.softmax(-1) for logits in self(batch["next_obs"], action))
        chosen = torch.where((one @ self.values < two @ self.values)[:, None], one, two)
        moved = batch["reward"][:, None] + batch["discount"][:, None] * self.values
        place = (moved.clamp(LOWEST, HIGHEST) - LOWEST) / (HIGHEST - LOWEST) * (ATOMS - 1)
        below = place.floor().clamp(max=ATOMS - 2)
        share = place - below  # goes to the value above, the rest to the one below
        target = torch.zeros_like(chosen).scatter_add_(1, below.long(), chosen * (1 - share))
        return target.scatter_add_(1, below.long() + 1, chosen * share)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


def train(args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    simulator = PointMasses(args.num_envs or NUM_ENVS, args.device, seed=args.seed)
    schema = relive.Schema.from_env(simulator)  # obs, action, reward, terminated, truncated
    (inputs,), (actions,) = schema["obs"].shape, schema["action"].shape
    actor = nn.Sequential(network(inputs, actions), nn.Tanh()).to(args.device)
    critics = Critics(inputs + actions).to(args.device)
    slow_critics = copy.deepcopy(critics)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=LEARNING_RATE)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=LEARNING_RATE)
    scale = torch.linspace(*NOISE, simulator.num_envs, device=args.device)[:, None]

    def explore(obs: Tensor) -> Tensor:
        action = actor(obs)
        return (action + scale * torch.randn_like(action)).clamp(-1, 1)

    replay = relive.ReplayBuffer(
        schema,
        ROWS * simulator.num_envs,
        simulator.num_envs,
        view=relive.NStep(N_STEPS, GAMMA),
        device=args.device,
        seed=args.seed,
    )
    if replay.device.type != "cpu":
        replay.compile()
    collector = relive.Collector(simulator, explore, replay)
    collector.collect(WARM_UP)

    update, losses = 0, dict[str, Tensor]()
    while not run.over:
        rounds = []
        for _ in range(ROUND):
            rounds.append(collector.collect(1))
            for batch in replay.batches(UPDATES, args.batch_size):
                update += 1
                with torch.no_grad():
                    noise, limit = SMOOTHING
                    action = actor(batch["next_obs"])
                    action = action + (noise * torch.randn_like(action)).clamp(-limit, limit)
                    target = slow_critics.target(batch, action.clamp(-1, 1))
                logits = critics(batch["obs"], batch["action"])
                critic_loss = sum(-(target * x.log_softmax(-1)).sum(-1).mean() for x in logits)
                critic_optimizer.zero_grad()
                critic_loss.backward()
                critic_optimizer.step()
                if update % DELAY == 0:
                    actor_loss = -torch.min(*critics.means(batch["obs"], actor(batch["obs"]))).mean()
                    actor_optimizer.zero_grad()
                    actor_loss.backward()
                    actor_optimizer.step()
                    losses = {"critic_loss": critic_loss, "actor_loss": actor_loss}
                for slow, fast in zip(slow_critics.parameters(), critics.parameters(), strict=True):
                    slow.data.lerp_(fast.data, TAU)
        returns = [value for stats in rounds for value in stats.episode_returns]  # waits for the device
        run.update(collector.total_steps, returns, **losses)


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help=f"rows of a batch (default {BATCH_SIZE})")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    with Run("FastTD3", ENV, GOAL, args) as run:
        train(args, run)
    print("Next: examples/ppo_gpu.py plays the same simulator on-policy; docs/device.md says what stays on the device.")


if __name__ == "__main__":
    main()
