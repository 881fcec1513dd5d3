"""Deep Q-learning, the better half of Rainbow (Hessel et al. 2018): double, 3-step, prioritized replay.

    python examples/dqn.py              CartPole-v1, until the mean return is well above 450
    python examples/dqn.py --seed 3     the same with another seed

It has three parts. Each takes one line here, because the batch has what it needs:

- 3-step targets (Sutton 1988): ``reward`` is r + γr' + γ²r'', and ``discount`` is γ³, or less where the episode ended
  sooner. It is 0 where the episode terminated, but not where it was truncated, since there the pole had not fallen.
- Prioritized replay (Schaul et al. 2016): surprising transitions are drawn more often; ``weight`` corrects for that.
- Double Q-learning (van Hasselt et al. 2016): one network chooses the next action, a slower one values it.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import torch
from torch import Tensor, nn

import relive
from support.common import Goal, Run, command_line

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=450, stop=475, steps=150_000, short=(40_000, 150))
NUM_ENVS = 8
CAPACITY = 50_000
WARM_UP = 1_000  # random transitions before the first gradient step
BATCH_SIZE = 128
UPDATES = 2  # gradient steps per vector step
GAMMA = 0.99
LEARNING_RATE = 1e-3
TAU = 0.005  # how far the target network follows at each gradient step
EXPLORE = 0.1  # the fraction of the run in which the share of random actions falls from 1 ...
EPSILON = 0.02  # ... to this


class Policy:
    """Epsilon-greedy: mostly the action of the largest Q-value, sometimes a random one."""

    def __init__(self, q: nn.Module, actions: int, device: str) -> None:
        self.q, self.actions, self.device, self.epsilon = q, actions, device, 1.0

    def __call__(self, obs: Tensor) -> Tensor:
        greedy = self.q(obs.to(self.device)).argmax(dim=1)
        random = torch.randint_like(greedy, self.actions)
        return torch.where(torch.rand(len(obs), device=greedy.device) < self.epsilon, random, greedy)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


def pick(values: Tensor, action: Tensor) -> Tensor:
    """The value of each row's action, ``[B]``, out of the values of all actions ``[B, A]``."""
    return values.gather(1, action.unsqueeze(1)).squeeze(1)


def train(args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    envs = gym.make_vec(ENV, args.num_envs or NUM_ENVS)
    inputs, actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    q, slow_q = network(inputs, actions).to(args.device), network(inputs, actions).to(args.device)
    slow_q.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE)

    schema = relive.Schema.from_env(envs)  # obs, action, reward, terminated, truncated
    draws = UPDATES * run.steps // envs.num_envs
    sampler = relive.Prioritized(alpha=0.6, beta=(0.4, 1.0, draws))
    view = relive.NStep(3, gamma=GAMMA)
    replay = relive.ReplayBuffer(schema, CAPACITY, envs.num_envs, sampler=sampler, view=view, seed=args.seed)
    policy = Policy(q, actions, args.device)
    collector = relive.Collector(envs, policy, replay, seed=args.seed)
    warm = collector.warm(replay, WARM_UP // envs.num_envs, seed=args.seed)  # random actions, in separate envs
    run.update(warm.num_steps, warm.episode_returns)

    while not run.over:
        policy.epsilon = max(EPSILON, 1 - (1 - run.remaining) / EXPLORE)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        stats = collector.collect(1)
        losses: dict[str, Tensor] = {}
        for batch in (drawn.to(args.device) for drawn in replay.batches(UPDATES, BATCH_SIZE, reuse=True)):
            with torch.no_grad():
                best = q(batch["next_obs"]).argmax(dim=1)
                target = batch["reward"] + batch["discount"] * pick(slow_q(batch["next_obs"]), best)
            value = pick(q(batch["obs"]), batch["action"])
            td_error = target - value
            loss = (batch["weight"] * nn.functional.huber_loss(value, target, reduction="none")).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q.parameters(), 10.0)
            optimizer.step()
            replay.update_priorities(batch["index"], td_error.detach())
            for slow, fast in zip(slow_q.parameters(), q.parameters(), strict=True):
                slow.data.lerp_(fast.data, TAU)
            losses = {"loss": loss, "q_value": value.mean()}
        run.update(warm.num_steps + collector.total_steps, stats.episode_returns, **losses)
    envs.close()


def main() -> None:
    args = command_line(__doc__, ENV).parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    with Run("DQN", ENV, GOAL, args) as run:
        train(args, run)
    print("Next: examples/sac.py has continuous actions; examples/dqn_pixels.py stacks frames that are stored once.")


if __name__ == "__main__":
    main()
