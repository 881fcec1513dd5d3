"""Group-relative policy optimisation (Shao et al. 2024, section 4.1): no critic, but envs to compare with.

    python examples/grpo.py                  CartPole-v1: each round has 8 starts, each played by a group of 8 envs
    python examples/grpo.py --per episode    one advantage for a whole episode instead of one for each step

The envs of a group start from the same seed, so their returns differ only by the policy's actions. An action is good if
its env got further than the others of the group. A round ends when every env has ended its first episode. Steps of
second episodes are masked. The update is that of examples/ppo.py, with a clipped ratio. (The paper also penalises
leaving a reference policy. That is for language models, which have one.)
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

import relive
from support.common import Goal, Run, command_line

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=475, stop=490, steps=1_000_000, short=(400_000, 200))
GROUP_SIZE = 8
NUM_ENVS = 8 * GROUP_SIZE
NUM_STEPS = 500  # the longest possible episode
BATCH_SIZE, EPOCHS = 512, 4
CLIP = 0.2
LEARNING_RATE = 2e-3


class Policy(nn.Module):
    """Only an actor. Without ``action``, ``forward`` draws actions to play; with it, it evaluates them."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions)
        )

    def forward(self, obs: Tensor, action: Tensor | None = None) -> dict[str, Tensor]:
        actions = Categorical(logits=self.actor(obs), validate_args=False)
        action = actions.sample() if action is None else action
        return {"action": action, "log_prob": actions.log_prob(action), "entropy": actions.entropy()}


def play_round(collector: relive.Collector, rollout: relive.RolloutBuffer) -> None:
    """Fill the rollout with one episode of every env. Each group has its own start."""
    starts = torch.randint(2**31, (rollout.num_envs // GROUP_SIZE,))
    rollout.clear()
    collector.reset(seed=starts.repeat_interleave(GROUP_SIZE).tolist())
    ended = False
    while not (ended or rollout.is_full):
        collector.collect(min(20, rollout.num_steps - rollout.steps))  # a few steps at a time, to notice the end
        ended = bool((rollout["terminated"] | rollout["truncated"]).any(dim=0).all())


def train(args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or NUM_ENVS
    if num_envs % GROUP_SIZE:
        raise SystemExit(f"--num-envs {num_envs}: groups of {GROUP_SIZE} need a multiple of {GROUP_SIZE}")
    envs = SyncVectorEnv([lambda: gym.make(ENV)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    schema = relive.Schema.from_env(envs, log_prob=())  # and no value, since there is no critic
    rollout = relive.RolloutBuffer(schema, NUM_STEPS, num_envs, device=args.device, seed=args.seed)
    policy = Policy(envs.single_observation_space.shape[0], envs.single_action_space.n).to(args.device)
    collector = relive.Collector(envs, policy, rollout)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)

    while not run.over:
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        play_round(collector, rollout)
        rollout.finish(relive.GroupAdvantage(GROUP_SIZE, per=args.per), partial=True)
        losses: dict[str, Tensor] = {}
        for batch in rollout.minibatches(BATCH_SIZE, epochs=EPOCHS):  # of first episodes; the mask leaves out the rest
            now = policy(batch["obs"], action=batch["action"])
            ratio = (now["log_prob"] - batch["log_prob"]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy_loss = -torch.min(ratio * batch["advantage"], clipped * batch["advantage"]).mean()
            optimizer.zero_grad()
            policy_loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            losses = {"policy_loss": policy_loss, "entropy": now["entropy"].mean()}
        first_returns = (rollout["reward"] * rollout["mask"]).sum(dim=0)
        run.update(collector.total_steps, first_returns.tolist(), **losses)
    envs.close()


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument(
        "--per", choices=("step", "episode"), default="step", help="one advantage per step or per episode"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    with Run("GRPO", ENV, GOAL, args) as run:
        train(args, run)
    print("Next: examples/ppo.py has a critic and needs fewer steps; docs/rollouts.md says what else a rollout can do.")


if __name__ == "__main__":
    main()
