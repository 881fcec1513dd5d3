"""Ape-X DQN (Horgan et al. 2018): two workers play, two shards store, one learner learns, all at the same time.

    python examples/apex_dqn.py                     CartPole-v1, with Ray on this machine
    python examples/apex_dqn.py --address auto      on the Ray cluster that this machine belongs to
    python examples/apex_dqn.py --path /mnt/replay  a shard that dies comes back from its last commit there

The learner never waits for an env: workers send chunks of steps to the shards of a prioritized replay, and the learner
draws large batches from them. Each env explores by its own amount, so that some play well and some see new things.
The last lines say what the shards have lost, if one died on the way.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym
import ray
import torch
from torch import Tensor, nn

import relive
from relive.cluster import Replay
from support.cluster import add_address, start_ray
from support.common import Goal, Run, command_line

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=400, stop=430, steps=300_000, short=(60_000, 100))
WORKERS = 2
SHARDS = 2
NUM_ENVS = 8  # of each worker
NUM_STEPS = 32  # of each env, in a chunk
CAPACITY = 100_000
WARM_UP = 1_000  # transitions before the first gradient step
BATCH_SIZE = 512  # as in the paper
TRANSITIONS = 8, 16  # for each gradient step: with fewer the learner waits for workers, with more they wait for it
GAMMA = 0.99
LEARNING_RATE = 1e-3
TAU = 0.01  # how far the target network follows at each gradient step
SEND = 10  # gradient steps between two sets of weights for the workers


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


def pick(values: Tensor, action: Tensor) -> Tensor:
    """The value of each row's action, ``[B]``, out of the values of all actions ``[B, A]``."""
    return values.gather(1, action.unsqueeze(1)).squeeze(1)


@ray.remote(num_cpus=0.5)
class Worker:
    """Plays its envs with the learner's weights and sends the steps to their shards."""

    def __init__(self, writer, env: str, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.writer, envs = writer, gym.make_vec(env, writer.num_envs)
        self.actions = int(envs.single_action_space.n)
        self.q = network(envs.single_observation_space.shape[0], self.actions)
        share = torch.arange(writer.num_envs) / max(writer.num_envs - 1, 1)
        self.epsilon = 0.2 ** (1 + 3 * share)  # of each env: from 0.2 to 0.0016
        self.collector = relive.Collector(envs, self.act, seed=seed)

    def act(self, obs: Tensor) -> Tensor:
        greedy = self.q(obs).argmax(dim=1)
        return torch.where(torch.rand(len(obs)) < self.epsilon, torch.randint_like(greedy, self.actions), greedy)

    def play(self, weights: dict[str, Tensor]) -> tuple[int, list[float]]:
        """Play and send a chunk; how many transitions it has, and the returns of the episodes that ended."""
        self.q.load_state_dict(weights)
        collector = self.collector
        steps, episodes = collector.total_steps, collector.total_episodes
        self.writer.extend(collector.steps(NUM_STEPS))
        ended = collector.total_episodes - episodes
        return collector.total_steps - steps, list(collector.returns)[len(collector.returns) - ended :]


def train(args: argparse.Namespace, run: Run) -> dict[str, float]:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or NUM_ENVS
    one = gym.make_vec(ENV, 1)
    inputs, actions = one.single_observation_space.shape[0], int(one.single_action_space.n)
    q, slow_q = network(inputs, actions), network(inputs, actions)
    slow_q.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE)

    replay = Replay(
        relive.Schema.from_env(one),
        CAPACITY,
        WORKERS * num_envs,
        shards=SHARDS,
        sampler=relive.Prioritized(alpha=0.6, beta=0.4),
        view=relive.NStep(3, gamma=GAMMA),
        seed=args.seed,
        path=args.path,
        commit_every=30.0,
    )
    writers = [replay.writer(range(k * num_envs, (k + 1) * num_envs)) for k in range(WORKERS)]
    workers = [Worker.remote(writer, ENV, args.seed + k) for k, writer in enumerate(writers)]
    weights = ray.put(q.state_dict())
    playing, idle = dict[Any, Any](), list(workers)
    transitions = updates = 0
    losses: dict[str, Tensor] = {}
    while not run.over:
        if transitions <= WARM_UP + TRANSITIONS[1] * updates:
            playing |= {worker.play.remote(weights): worker for worker in idle}
            idle = []
        ahead = transitions < max(WARM_UP, TRANSITIONS[0] * updates)
        for chunk in ray.wait(list(playing), timeout=None if ahead else 0)[0] if playing else ():
            idle.append(playing.pop(chunk))
            steps, returns = ray.get(chunk)
            transitions += steps
            run.update(transitions, returns, **losses)
        if ahead:
            continue
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        batch = replay.sample(BATCH_SIZE)
        with torch.no_grad():
            best = q(batch["next_obs"]).argmax(dim=1)
            target = batch["reward"] + batch["discount"] * pick(slow_q(batch["next_obs"]), best)
        value = pick(q(batch["obs"]), batch["action"])
        loss = (batch["weight"] * nn.functional.huber_loss(value, target, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        replay.update_priorities(batch["index"], (target - value).detach())
        updates += 1
        for slow, fast in zip(slow_q.parameters(), q.parameters(), strict=True):
            slow.data.lerp_(fast.data, TAU)
        if updates % SEND == 0:
            weights = ray.put(q.state_dict())
        losses = {"loss": loss, "q_value": value.mean()}
    ray.get(list(playing))
    return replay.stats()


def main() -> None:
    parser = command_line(__doc__, ENV)
    add_address(parser)
    parser.add_argument("--path", type=Path, help="where shards commit what they hold; all machines must reach it")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    start_ray(args.address)
    with Run("Ape-X", ENV, GOAL, args) as run:
        stats = train(args, run)
    names = ("sampled", "shards_up", "restarts", "lost_steps", "repeated_steps", "late_updates", "dropped_updates")
    print("  " + ", ".join(f"{name.replace('_', ' ')} {stats[name]:,.0f}" for name in names))
    ray.shutdown()


if __name__ == "__main__":
    main()
