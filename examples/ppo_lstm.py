"""PPO with a memory: an LSTM, trained by truncated backpropagation through time, for a task that needs memory.

    python examples/ppo_lstm.py                   CartPole without its velocities: an LSTM, then the same without memory
    python examples/ppo_lstm.py --memory lstm     the LSTM alone
    python examples/ppo_lstm.py --memory none     the same without memory

A recurrent policy changes little in examples/ppo.py:

- ``hidden`` is in the schema. The collector passes the policy its state before each step, zeros where an episode
  starts, and stores it with the step. It values the final observation of a truncated episode with the episode's last
  state.
- ``rollout.sequences(16)`` replaces ``minibatches``. It gives windows of up to 16 steps of one episode,
  ``[L, B, ...]``, with the state that each starts in, as ``nn.LSTM`` takes it. Shorter windows are padded, so losses
  are means over ``mask``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

import relive
from support.common import Goal, Run, command_line, draw_together
from support.memory import HiddenVelocities

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=400, stop=475, steps=200_000, short=(40_000, 200))
NO_GOAL = Goal(random=22, target=-float("inf"), steps=GOAL.steps, short=(25_000, -float("inf")))
NUM_ENVS = 8
NUM_STEPS = 128  # of each env, per rollout
LENGTH = 16  # steps that gradients flow through
BATCH_SIZE, EPOCHS = 16, 10  # sequences
SIZE = 64  # of the LSTM's state
GAMMA, LAMBDA = 0.99, 0.95
CLIP = 0.2
LEARNING_RATE = 3e-3
REWARD_SCALE = 0.02  # actor and critic share the LSTM: errors of returns of 100 would drown the actor's gradient

Hidden = tuple[Tensor, Tensor]  # h and c, each [1, B, SIZE]


class Policy(nn.Module):
    """Actor and critic on top of an LSTM; ``unroll`` takes whole sequences, and ``forward`` plays one step."""

    def __init__(self, inputs: int, actions: int, memory: str) -> None:
        super().__init__()
        self.memory = nn.LSTM(inputs, SIZE) if memory == "lstm" else Forgetful(inputs, SIZE)
        self.actor, self.critic = head(actions, gain=0.01), head(1, gain=1.0)

    def unroll(self, obs: Tensor, hidden: Hidden, action: Tensor | None = None) -> tuple[dict[str, Tensor], Hidden]:
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

    def forward(self, obs: Tensor, hidden: Hidden) -> dict[str, Tensor | Hidden]:
        """One step of N envs, as a collector asks for it: a sequence of length 1."""
        fields, hidden = self.unroll(obs.unsqueeze(0), hidden)
        return {"hidden": hidden, **{name: x.squeeze(0) for name, x in fields.items()}}


class Forgetful(nn.Module):
    """Replaces the LSTM by a network of its size that sees only one step; it returns the state unchanged."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, size), nn.Tanh(), nn.Linear(size, size), nn.Tanh())

    def forward(self, obs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        return self.body(obs), hidden


def head(outputs: int, gain: float) -> nn.Sequential:
    last = nn.Linear(64, outputs)
    nn.init.orthogonal_(last.weight, gain)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(SIZE, 64), nn.Tanh(), last)


def train(memory: str, args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or NUM_ENVS
    envs = SyncVectorEnv([HiddenVelocities] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    state = relive.Field((1, SIZE), torch.float32)  # (layers, size), without the axis of envs
    schema = relive.Schema.from_env(envs, value=(), log_prob=(), hidden=(state, state))
    rollout = relive.RolloutBuffer(schema, NUM_STEPS, num_envs, device=args.device, seed=args.seed)
    policy = Policy(envs.single_observation_space.shape[0], envs.single_action_space.n, memory).to(args.device)
    collector = relive.Collector(envs, policy, rollout, seed=args.seed)
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
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            entropy = masked_mean(now["entropy"], seq["mask"])
            losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        run.update(collector.total_steps, stats.episode_returns, **losses)
    envs.close()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--memory", choices=("lstm", "none", "both"), default="both", help="of the policy")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    runs: dict[str, Run] = {}
    for memory in ("lstm", "none") if args.memory == "both" else (args.memory,):
        name, goal = ("PPO-LSTM", GOAL) if memory == "lstm" else ("PPO without memory", NO_GOAL)
        with Run(name, "CartPole without velocities", goal, args, drawn_later=True) as run:
            train(memory, args, run)
        runs[name] = run
    if args.plot or not args.short:
        path = args.plot or Path(f"runs/ppo_lstm-{args.memory}.png")
        draw_together(path, "CartPole-v1 without velocities", {name: [run] for name, run in runs.items()})
    if len(runs) == 2:
        lstm, none = (run.mean for run in runs.values())
        print(f"An LSTM is worth {lstm / none:.1f} times the return: {lstm:.4g} instead of {none:.4g}.")
        if args.short and lstm < 3 * none:
            raise SystemExit(1)
    print("Next: examples/ppo_lnn.py replaces the LSTM by a liquid network; docs/sequences.md explains windows.")


if __name__ == "__main__":
    main()
