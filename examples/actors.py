"""Deep Q-learning with actors in processes of their own, as in Ape-X (Horgan et al. 2018): they play, this one learns.

    python examples/actors.py                 CartPole-v1: two actors of four environments each, one learner
    python examples/actors.py --actors 4      more of them

Three parts connect the processes, all of them in shared memory:

- Lanes: every actor writes its steps into a lane, and the learner drains all lanes into its replay. A lane that is full
  lets its actor wait. So the learner sets the pace, and every step is learned from equally often.
- Weights: the learner publishes the weights, and the actors fetch the newest before they play on.
- A pipe from each actor, for the returns of its episodes.

An actor may be killed at any time, here by --kill: a new one takes its lane, and no step is lost or torn.
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import gymnasium as gym
import torch
from torch import Tensor, nn

import relive
from support.common import Goal, Run, command_line

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=450, stop=475, steps=150_000, short=(40_000, 150))
ACTORS = 2
NUM_ENVS = 4  # of each actor
CAPACITY = 50_000
WARM_UP = 1_000  # transitions before the first gradient step
BATCH_SIZE = 128
PER_UPDATE = 4  # transitions for each gradient step
PUBLISH = 16  # gradient steps between two versions of the weights
LANE = 16  # vector steps that an actor may be ahead
GAMMA = 0.99
LEARNING_RATE = 1e-3
TAU = 0.005  # how far the target network follows at each gradient step
EXPLORE = 0.1  # the fraction of the run in which the share of random actions falls from 1 ...
EPSILON = 0.02  # ... to this


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def act(lanes: relive.Lanes, lane: int, weights: relive.Weights, returns: Connection, seed: int, explore: int) -> None:
    """An actor: plays until it is ended. Its share of random actions falls over its first ``explore`` vector steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    q, epsilon = network(), 1.0

    def policy(obs: Tensor) -> Tensor:  # [N, 4] -> [N]
        return torch.where(torch.rand(len(obs)) < epsilon, torch.randint(2, (len(obs),)), q(obs).argmax(dim=1))

    with lanes.writer(lane) as writer:
        collector = relive.Collector(gym.make_vec(ENV, lanes.num_envs), policy, writer, seed=seed)
        steps = 0
        while True:
            weights.fetch(q)
            epsilon = max(EPSILON, 1 - steps / explore)
            stats = collector.collect(4)  # waits while the lane is full
            steps += 4
            if stats.episode_returns:
                returns.send(stats.episode_returns)


def pick(values: Tensor, action: Tensor) -> Tensor:
    """The value of each row's action, ``[B]``, out of the values of all actions ``[B, A]``."""
    return values.gather(1, action.unsqueeze(1)).squeeze(1)


class Learner:
    """Double Q-learning with 3-step targets and prioritized replay, as in dqn.py."""

    def __init__(self, schema: relive.Schema, num_envs: int, draws: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.q, self.slow_q = network(), network()
        self.slow_q.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=LEARNING_RATE)
        sampler, view = relive.Prioritized(alpha=0.6, beta=(0.4, 1.0, draws)), relive.NStep(3, gamma=GAMMA)
        self.replay = relive.ReplayBuffer(schema, CAPACITY, num_envs, sampler=sampler, view=view, seed=seed)
        self.updates = 0

    def update(self) -> dict[str, Tensor]:
        """One gradient step."""
        batch = self.replay.sample(BATCH_SIZE)
        with torch.no_grad():
            best = self.q(batch["next_obs"]).argmax(dim=1)
            target = batch["reward"] + batch["discount"] * pick(self.slow_q(batch["next_obs"]), best)
        value = pick(self.q(batch["obs"]), batch["action"])
        loss = (batch["weight"] * nn.functional.huber_loss(value, target, reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10.0)
        self.optimizer.step()
        self.replay.update_priorities(batch["index"], (target - value).detach())
        for slow, fast in zip(self.slow_q.parameters(), self.q.parameters(), strict=True):
            slow.data.lerp_(fast.data, TAU)
        self.updates += 1
        return {"loss": loss, "q_value": value.mean()}


def train(args: argparse.Namespace, run: Run) -> None:
    num_envs = args.num_envs or NUM_ENVS
    schema = relive.Schema.from_env(gym.make_vec(ENV, num_envs))
    lanes = relive.Lanes(schema, args.actors, num_envs, steps=LANE)
    learner = Learner(schema, args.actors * num_envs, run.steps // PER_UPDATE, args.seed)
    weights = relive.Weights(learner.q)
    context = multiprocessing.get_context("spawn")
    explore = int(EXPLORE * run.steps / (args.actors * num_envs))

    def start(lane: int, seed: int) -> tuple[BaseProcess, Connection]:
        returns, sender = context.Pipe(duplex=False)
        process = context.Process(target=act, args=(lanes, lane, weights, sender, seed, explore), daemon=True)
        process.start()
        sender.close()  # the actor has it
        return process, returns

    actors = [start(lane, args.seed * args.actors + lane) for lane in range(args.actors)]
    steps, kill = 0, args.kill
    while not run.over:
        if not lanes.wait(timeout=60):
            raise RuntimeError("no actor has played for a minute")
        steps += lanes.drain(learner.replay)
        learner.optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        losses: dict[str, Tensor] = {}
        while steps > WARM_UP and learner.updates < (steps - WARM_UP) // PER_UPDATE:
            losses = learner.update()
            if learner.updates % PUBLISH == 0:
                weights.publish(learner.q)
        ended = list[float]()
        for _, returns in actors:
            while returns.poll():
                ended += returns.recv()
        run.update(steps, ended, **losses)
        if kill and steps > run.steps // 10:
            actors[0][0].kill()
            actors[0][0].join()
            actors[0], kill = start(0, args.seed + 1000), False
    for process, _ in actors:
        process.terminate()
        process.join()


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--actors", type=int, default=ACTORS, help=f"processes that play (default {ACTORS})")
    parser.add_argument("--kill", action="store_true", help="kill an actor after a tenth of the run, and start another")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    with Run("actors", ENV, GOAL, args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
