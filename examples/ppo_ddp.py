"""PPO on several ranks: each plays its own envs, and DistributedDataParallel averages their gradients.

    python examples/ppo_ddp.py                           CartPole-v1 on two ranks of this machine
    python examples/ppo_ddp.py --ranks 1                 all envs on one rank: the same learning curve
    python examples/ppo_ddp.py --compare                 both, and how long their curves are the same
    torchrun --nproc-per-node 2 examples/ppo_ddp.py      the same under torchrun, which also connects machines

All ranks together have NUM_ENVS envs in BLOCKS blocks, each of which is shuffled by itself. An env's reset and the
noise of its actions depend on its number, so they are the same whichever rank plays it. What differs is the order in
which gradients are summed, and so their last digits. Such differences double with every rollout or so, and in the end
one of them changes an action. Until then the curves are equal; the networks compute in float64, to put that off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import gymnasium as gym
import torch
import torch.distributed as dist
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import relive
from relive.cluster import distributed
from support.common import Goal, Run, command_line

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=475, stop=490, steps=300_000, short=(60_000, 150))
NUM_ENVS, NUM_STEPS = 8, 64  # over all ranks; of each env, per rollout
BLOCKS = 4  # up to so many ranks give the same curve
BATCH_SIZE, EPOCHS = 256, 10  # over all ranks
LEARNING_RATE, GAMMA, LAM, CLIP = 1e-3, 0.98, 0.8, 0.2
SAME = 5_000  # for so many steps the curves must be equal


class Policy(nn.Module):
    """Actor and critic."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.actor, self.critic = network(inputs, outputs, gain=0.01), network(inputs, 1, gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the actions ``[B, outputs]``, and the values ``[B]``."""
        x = obs.double()
        return self.actor(x), self.critic(x).squeeze(-1)


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers = nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()


class Actor:
    """Draws actions with the noise of each env. All ranks draw that of all envs, so that it is the same everywhere."""

    def __init__(self, policy: Policy, actions: int, mine: slice, seed: int) -> None:
        self.policy, self.actions, self.mine = policy, actions, mine
        self.noise = torch.Generator().manual_seed(seed)

    def __call__(self, obs: Tensor) -> dict[str, Tensor]:
        logits, value = self.policy(obs)
        uniform = torch.rand((NUM_ENVS, self.actions), dtype=torch.float64, generator=self.noise)[self.mine]
        action = (logits - (-uniform.log()).log()).argmax(-1)  # a draw from softmax(logits), by Gumbel's trick
        return {"action": action, "value": value, "log_prob": Categorical(logits=logits).log_prob(action)}


def train(args: argparse.Namespace, run: Run, rank: int, ranks: int, most: int) -> None:
    torch.manual_seed(args.seed)
    mine = slice(rank * NUM_ENVS // ranks, (rank + 1) * NUM_ENVS // ranks)
    num_envs = mine.stop - mine.start
    envs = SyncVectorEnv([lambda: gym.make(ENV)] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
    double = relive.Field((), torch.float64)
    schema = relive.Schema.from_env(envs, value=double, log_prob=double)
    rollout = relive.RolloutBuffer(schema, NUM_STEPS, num_envs, seed=args.seed)
    policy = Policy(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    actor = Actor(policy, int(envs.single_action_space.n), mine, args.seed)
    collector = relive.Collector(envs, actor, rollout, value_fn=lambda obs: policy(obs)[1], seed=args.seed + mine.start)
    learner = DistributedDataParallel(policy) if ranks > 1 else policy
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)

    while not run.over and run.done < most:  # all ranks have the same figures, so they stop together
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        clip = CLIP * run.remaining
        stats = collector.collect()
        rollout.finish(relive.GAE(gamma=GAMMA, lam=LAM))
        losses: dict[str, Tensor] = {}
        # Under NEXT_STEP autoreset, reset steps do not count: ranks have different numbers of rows, and yet equally
        # many minibatches. The weights make the average of the ranks' losses the mean over the rows of all ranks.
        options = {"epochs": EPOCHS, "blocks": BLOCKS, "normalize_advantage": True}
        for batch in distributed.minibatches(rollout, BATCH_SIZE, **options):
            logits, value = learner(batch["obs"])
            ratio = (Categorical(logits=logits).log_prob(batch["action"]) - batch["log_prob"]).exp()
            advantage, weight = batch["advantage"], batch["weight"]
            policy_loss = -(weight * torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)).mean()
            value_loss = 0.5 * (weight * (value - batch["return"]).square()).mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()  # averages the gradients over the ranks
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            losses = {"policy_loss": policy_loss, "value_loss": value_loss}
        run.update(*of_all_ranks(collector.total_steps, stats.episode_returns, ranks), **losses)
    envs.close()


def of_all_ranks(steps: int, returns: list[float], ranks: int) -> tuple[int, list[float]]:
    """The steps of all ranks so far, and the returns of the episodes that ended in this rollout, in order of size."""
    parts: list[tuple[int, list[float]]] = [(steps, returns)] * ranks
    if ranks > 1:
        dist.all_gather_object(parts, (steps, returns))
    return sum(part[0] for part in parts), sorted(value for part in parts for value in part[1])


def work(rank: int, ranks: int, args: argparse.Namespace, folder: str, most: int) -> None:
    """What one rank does. ``folder`` is where ranks of this machine meet, and where the curve goes."""
    torch.set_num_threads(1)
    if ranks > 1:
        meeting = "env://" if args.ranks is None else f"file://{folder}/meeting"
        dist.init_process_group("gloo", meeting, rank=rank, world_size=ranks)
    run = Run(f"PPO-DDP-{ranks}", ENV, GOAL, args, drawn_later=rank > 0)
    if rank or most < run.steps:
        run.printed = sys.maxsize  # quiet: the first rank shows the progress of all
        train(args, run, rank, ranks, most)
    else:
        with run:
            train(args, run, rank, ranks, most)
    if rank == 0:
        (Path(folder) / "curve.json").write_text(json.dumps(run.episodes))


def leave() -> NoReturn:
    """End this rank's process at once.

    DistributedDataParallel keeps the threads of gloo; one that lets go of a tensor while Python shuts down would abort
    the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def spawned(rank: int, *rest: Any) -> None:
    """One rank, in a process of its own."""
    work(rank, *rest)
    leave()


def curve(ranks: int, args: argparse.Namespace, most: int = sys.maxsize) -> list[list[float]]:
    """Train on so many ranks of this machine; the return of every episode, with the steps at the rollout's end."""
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            work(0, 1, args, folder, most)
        else:
            spawn(spawned, (ranks, args, folder, most), ranks)
        return json.loads((Path(folder) / "curve.json").read_text())


def compare(one: list[list[float]], several: list[list[float]]) -> None:
    """Say how long two curves are the same."""
    pairs = zip(one, several, strict=False)
    steps = next((a[0] for a, b in pairs if a != b), min(one[-1][0], several[-1][0]))
    print(f"The curves of several ranks and of one are equal for the first {steps:,} steps.")
    assert steps >= SAME, f"they must be equal for {SAME:,} steps"


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine: 1, 2 or 4 (default 2)")
    parser.add_argument("--compare", action="store_true", help="train on one rank, too, and compare the curves")
    args = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        args.ranks = None
        with tempfile.TemporaryDirectory() as folder:
            work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args, folder, sys.maxsize)
        leave()
    several = curve(args.ranks, args)
    if args.compare or args.short:
        compare(curve(1, args, SAME if args.short else sys.maxsize), several)
    print("Next: examples/ppo.py is the same on one process.")


if __name__ == "__main__":
    main()
