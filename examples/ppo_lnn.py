"""PPO with a liquid network: CfC (Hasani et al. 2022) or LTC (Hasani et al. 2021), for a task that needs memory.

    python examples/ppo_lnn.py                        CartPole without its velocities: a CfC, from five seeds in turn
    python examples/ppo_lnn.py --network ltc          an LTC instead, which solves its differential equation in steps
    python examples/ppo_lnn.py --seed 3 --seeds 1     that seed alone

Liquid networks come from ``ncps`` (``pip install ".[examples]"``). Their state is ``[B, units]``, without an axis of
layers, so ``hidden`` is a field of shape ``(units,)``. Everything else is as in examples/ppo_lstm.py. A gradient that
is not finite stops the run at once, so no seed diverges unnoticed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from ncps.torch import LTC, CfC
from torch import Tensor, nn
from torch.distributions import Categorical

import relive
from support.common import Goal, Run, command_line, draw_together
from support.memory import HiddenVelocities

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=400, stop=475, steps=200_000, short=(60_000, 150))
NUM_ENVS = 8
NUM_STEPS = 128  # of each env, per rollout
LENGTH = 16  # steps that gradients flow through
BATCH_SIZE, EPOCHS = 16, 10  # sequences
UNITS = 32
GAMMA, LAMBDA = 0.99, 0.95
CLIP = 0.2
LEARNING_RATE = 1e-3
REWARD_SCALE = 0.02  # actor and critic share the network: errors of returns of 100 would drown the actor's gradient


class Policy(nn.Module):
    """Actor and critic on top of a liquid network; ``unroll`` takes whole sequences, ``forward`` plays one step."""

    def __init__(self, inputs: int, actions: int, network: str) -> None:
        super().__init__()
        self.memory = (CfC if network == "cfc" else LTC)(inputs, UNITS, batch_first=False)
        self.actor, self.critic = head(actions, gain=0.01), head(1, gain=1.0)

    def unroll(self, obs: Tensor, hidden: Tensor, action: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """L steps of B sequences, ``[L, B, ...]``, from the state before their first step; and the state after them."""
        x, hidden = self.memory(obs, hidden)
        actions = Categorical(logits=self.actor(x), validate_args=False)
        action = actions.sample() if action is None else action
        fields = {
            "action": action,
            "value": self.critic(x).squeeze(-1),
            "log_prob": actions.log_prob(action),
            "entropy": actions.entropy(),
        }
        return fields, hidden

    def forward(self, obs: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """One step of N envs, as a collector asks for it: a sequence of length 1."""
        fields, hidden = self.unroll(obs.unsqueeze(0), hidden)
        return {"hidden": hidden, **{name: x.squeeze(0) for name, x in fields.items()}}


def head(outputs: int, gain: float) -> nn.Sequential:
    last = nn.Linear(64, outputs)
    nn.init.orthogonal_(last.weight, gain)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(UNITS, 64), nn.Tanh(), last)


def train(seed: int, args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(seed)
    num_envs = args.num_envs or NUM_ENVS
    envs = SyncVectorEnv([HiddenVelocities] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    state = relive.Field((UNITS,), torch.float32)  # no layers: the policy gets and returns [N, UNITS]
    schema = relive.Schema.from_env(envs, value=(), log_prob=(), hidden=state)
    rollout = relive.RolloutBuffer(schema, NUM_STEPS, num_envs, device=args.device, seed=seed)
    policy = Policy(envs.single_observation_space.shape[0], envs.single_action_space.n, args.network).to(args.device)
    collector = relive.Collector(envs, policy, rollout, seed=seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)

    while not run.over:
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        clip = CLIP * run.remaining
        stats = collector.collect()
        rollout["reward"] = REWARD_SCALE * rollout["reward"]
        rollout.finish(relive.GAE(gamma=GAMMA, lam=LAMBDA))

        losses: dict[str, Tensor] = {}
        for seq in rollout.sequences(LENGTH, batch_size=BATCH_SIZE, epochs=EPOCHS, normalize_advantage=True):
            now, _ = policy.unroll(seq["obs"], seq["hidden"], seq["action"])
            ratio = (now["log_prob"] - seq["log_prob"]).exp()
            gain = torch.min(ratio * seq["advantage"], ratio.clamp(1 - clip, 1 + clip) * seq["advantage"])
            policy_loss = -masked_mean(gain, seq["mask"])
            value_loss = masked_mean((now["value"] - seq["return"]).square(), seq["mask"])
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            norm = nn.utils.clip_grad_norm_(policy.parameters(), 0.5, error_if_nonfinite=True)
            optimizer.step()
            entropy = masked_mean(now["entropy"], seq["mask"])
            losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "gradient": norm}
        run.update(collector.total_steps, stats.episode_returns, **losses)
    envs.close()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--network", choices=("cfc", "ltc"), default="cfc", help="the liquid network (default cfc)")
    parser.add_argument("--seeds", type=int, help="how many, from --seed on (default 5, with --short 1)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    name, runs = {"cfc": "PPO-CfC", "ltc": "PPO-LTC"}[args.network], list[Run]()
    for seed in range(args.seed, args.seed + (args.seeds or (1 if args.short else 5))):
        with Run(name, f"CartPole without velocities, seed {seed}", GOAL, args, drawn_later=True) as run:
            train(seed, args, run)
        runs.append(run)
    if args.plot or not args.short:
        path = args.plot or Path(f"runs/ppo_lnn-{args.network}.png")
        draw_together(path, "CartPole-v1 without velocities", {f"{name}, {len(runs)} seeds": runs})
    means = [run.mean for run in runs]
    print(f"{name}, {len(means)} seeds: mean return {np.mean(means):.4g}, {min(means):.4g} in the worst")
    print("Next: examples/distill.py trains a memory without rewards; docs/sequences.md explains windows.")


if __name__ == "__main__":
    main()
