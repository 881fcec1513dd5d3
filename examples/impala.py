"""IMPALA (Espeholt et al. 2018): workers play with policies that are a little old; V-trace corrects for it.

    python examples/impala.py                  CartPole-v1, with Ray on this machine
    python examples/impala.py --address auto   on the Ray cluster that this machine belongs to

Two workers send whole rollouts, each with the number of the weights that it was played with. The learner takes each of
them once, in the order in which they come, and drops those that are more than MAX_STALENESS updates old. V-trace
weighs every step by how likely the learner's policy would have taken it: see docs/returns.md.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import ray
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import relive
from relive.cluster import Rollouts
from support.cluster import add_address, start_ray
from support.common import Goal, Run, command_line

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=450, stop=475, steps=600_000, short=(300_000, 150))
WORKERS = 2
NUM_ENVS = 16  # of each worker
NUM_STEPS = 32  # of each env, in a rollout
MAX_STALENESS = 8
GAMMA = 0.98
REWARD_SCALE = 0.1  # returns up to 50 would have the critic use up the gradient's norm
LEARNING_RATE = 1e-3
ENTROPY = 0.01


class Policy(nn.Module):
    """Actor and critic."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = network(inputs, actions), network(inputs, 1)

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        actions = Categorical(logits=self.actor(obs), validate_args=False)
        action = actions.sample()
        return {"action": action, "log_prob": actions.log_prob(action)}


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


@ray.remote(num_cpus=0.5)
class Worker:
    """Plays its envs and sends rollouts, with the newest weights that it has been given."""

    def __init__(self, sender, env: str, num_envs: int, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.sender, envs = sender, gym.make_vec(env, num_envs)
        self.policy = Policy(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
        schema = relive.Schema.from_env(envs, log_prob=())
        self.collector = relive.Collector(envs, self.policy, schema=schema, seed=seed)

    def play(self, weights: dict[str, Tensor], version: int) -> tuple[int, list[float]]:
        """Play and send a rollout; how many transitions it has, and the returns of the episodes that ended."""
        self.policy.load_state_dict(weights)
        collector = self.collector
        steps, episodes = collector.total_steps, collector.total_episodes
        self.sender.put(collector.steps(NUM_STEPS), version)
        ended = collector.total_episodes - episodes
        return collector.total_steps - steps, list(collector.returns)[len(collector.returns) - ended :]


def losses_of(policy: Policy, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The losses of a rollout ``[T, N]``. Rows where ``mask`` is False are no steps of the env."""
    pi = Categorical(logits=policy.actor(data["obs"]), validate_args=False)
    value, next_value = policy.critic(data["obs"]).squeeze(-1), policy.critic(data["next_obs"]).squeeze(-1).detach()
    log_prob, mask = pi.log_prob(data["action"]), data["mask"]
    advantage, target = relive.returns.vtrace(
        (log_prob - data["log_prob"]).detach(),
        REWARD_SCALE * data["reward"],
        torch.cat([value.detach(), next_value[-1:]]),  # [T + 1, N]
        data["terminated"],
        data["truncated"],
        final_value=next_value,
        mask=mask,
        gamma=GAMMA,
    )
    return {
        "policy_loss": -(log_prob * advantage)[mask].mean(),
        "value_loss": 0.5 * (value - target)[mask].square().mean(),
        "entropy": pi.entropy()[mask].mean(),
    }


def train(args: argparse.Namespace, run: Run) -> dict[str, float]:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or NUM_ENVS
    one = gym.make_vec(ENV, 1)
    policy = Policy(one.single_observation_space.shape[0], int(one.single_action_space.n))
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)

    rollouts = Rollouts(max_staleness=MAX_STALENESS, capacity=2 * WORKERS)
    senders = [rollouts.sender(f"worker {k}") for k in range(WORKERS)]
    workers = [Worker.remote(sender, ENV, num_envs, args.seed + k) for k, sender in enumerate(senders)]
    weights, version, transitions, staleness = ray.put(policy.state_dict()), 0, 0, 0
    playing = {worker.play.remote(weights, version): worker for worker in workers}
    losses: dict[str, Tensor] = {}
    while not run.over:
        (played,), _ = ray.wait(list(playing))
        worker, (steps, returns) = playing.pop(played), ray.get(played)
        playing[worker.play.remote(weights, version)] = worker  # it plays on while the learner learns
        transitions += steps
        run.update(transitions, returns, **losses)

        rollout = rollouts.get(version)
        staleness += version - rollout.version
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        losses = losses_of(policy, rollout.data)
        optimizer.zero_grad()
        (losses["policy_loss"] + 0.5 * losses["value_loss"] - ENTROPY * losses["entropy"]).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        weights, version = ray.put(policy.state_dict()), version + 1
    return rollouts.stats() | {"mean_staleness": staleness / max(version, 1)}


def main() -> None:
    parser = command_line(__doc__, ENV)
    add_address(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    start_ray(args.address)
    with Run("IMPALA", ENV, GOAL, args) as run:
        stats = train(args, run)
    print(
        f"  rollouts: {stats['received']:.0f} learned from, {stats['stale']:.0f} too old, {stats['lost']:.0f} lost; "
        f"mean age {stats['mean_staleness']:.1f} updates"
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
