"""Recurrent replay, R2D2 (Kapturowski et al. 2019): Q-learning that remembers, on sequences drawn from a replay.

    python examples/r2d2.py                   a T-maze: an LSTM, and then the same without memory
    python examples/r2d2.py --memory lstm     the LSTM alone

A sign at the start shows which way to turn at the far end of a corridor. Without memory the turn is a guess, and half
of the guesses are wrong. The batch has everything that the paper adds to deep Q-learning:

- ``Sequence(10, burn_in=5)``: windows of 10 steps with the LSTM's stored state, 5 rows earlier. The network has changed
  since then. Unrolling it over those 5 rows (the burn-in, where ``mask`` is False) refreshes the state.
- ``overlap="half"``: each step is in two windows.
- ``n=3``: the rewards of 3 steps, then ``seq.bootstrap`` of the target network's values, row by row.
- ``Prioritized(eta=0.9)``: the priority of a sequence mixes the largest of its TD errors with their mean.

Value rescaling is left out, since returns are 0 to 1 here.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

import relive
from support.common import Goal, Run, command_line, draw_together
from support.memory import TMaze

ENV = "T-maze"
GOAL = Goal(random=0.49, target=0.9, stop=0.97, steps=80_000, short=(40_000, 0.85))
NO_GOAL = Goal(random=0.49, target=-float("inf"), steps=40_000, short=(20_000, -float("inf")))
NUM_ENVS = 8
CAPACITY = 40_000
WARM_UP = 2_000  # transitions before the first gradient step
LENGTH, BURN_IN, N = 10, 5, 3
BATCH_SIZE = 32  # sequences
STEPS_PER_UPDATE = 4  # vector steps between two gradient steps
SIZE = 32  # of the LSTM's state
GAMMA = 0.95
LEARNING_RATE = 2e-3
TAU = 0.02  # how far the target network follows at each gradient step
EXPLORE = 0.25  # the fraction of the run in which the share of random actions falls from 1 ...
EPSILON = 0.01  # ... to this

Hidden = tuple[Tensor, Tensor]  # h and c, each [1, B, SIZE]


class QNetwork(nn.Module):
    """Values of the actions along sequences ``[L, B, inputs]``; without memory, it sees single steps."""

    def __init__(self, inputs: int, actions: int, memory: str) -> None:
        super().__init__()
        self.remembers = memory == "lstm"
        self.body = nn.LSTM(inputs, SIZE) if self.remembers else nn.Sequential(nn.Linear(inputs, SIZE), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, actions))

    def forward(self, obs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        x, hidden = self.body(obs, hidden) if self.remembers else (self.body(obs), hidden)
        return self.head(x), hidden


class Policy:
    """Epsilon-greedy: mostly the action of the largest Q-value, sometimes a random one; it returns the next state."""

    def __init__(self, q: QNetwork, actions: int) -> None:
        self.q, self.actions, self.epsilon = q, actions, 1.0

    def __call__(self, obs: Tensor, hidden: Hidden) -> dict[str, Tensor | Hidden]:
        values, hidden = self.q(obs.unsqueeze(0), hidden)
        greedy = values[0].argmax(dim=1)
        random = torch.randint_like(greedy, self.actions)
        action = torch.where(torch.rand(len(obs), device=greedy.device) < self.epsilon, random, greedy)
        return {"action": action, "hidden": hidden}


def pick(values: Tensor, action: Tensor) -> Tensor:
    """The value of each step's action, ``[L, B]``, out of the values of all actions ``[L, B, A]``."""
    return values.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def td_errors(q: QNetwork, slow_q: QNetwork, seq: relive.SequenceBatch) -> Tensor:
    """``[L, B]``; both networks are unrolled from the stored state over burn-in, window, and the rows after it."""
    values, _ = q(seq["obs"], seq["hidden"])
    with torch.no_grad():
        slow_values, _ = slow_q(seq["obs"], seq["hidden"])
        best = pick(slow_values, values.argmax(dim=-1))  # double Q-learning
        target = seq["reward"] + seq["discount"] * seq.bootstrap(best)
    return target - pick(values, seq["action"])


def train(memory: str, args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or NUM_ENVS
    envs = SyncVectorEnv([TMaze] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    inputs, actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    q = QNetwork(inputs, actions, memory).to(args.device)
    slow_q = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=LEARNING_RATE)

    state = relive.Field((1, SIZE), torch.float32)  # (layers, size), without the axis of envs
    schema = relive.Schema.from_env(envs, hidden=(state, state))
    sampler = relive.Prioritized(alpha=0.9, beta=0.6, eta=0.9)
    view = relive.Sequence(LENGTH, BURN_IN, overlap="half", n=N, gamma=GAMMA)
    replay = relive.ReplayBuffer(schema, CAPACITY, num_envs, sampler=sampler, view=view, seed=args.seed)
    policy = Policy(q, actions)
    collector = relive.Collector(envs, policy, replay, seed=args.seed)

    while not run.over:
        policy.epsilon = max(EPSILON, 1 - (1 - run.remaining) / EXPLORE)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        stats = collector.collect(STEPS_PER_UPDATE)
        losses: dict[str, Tensor] = {}
        if collector.total_steps >= WARM_UP:
            seq = replay.sample(BATCH_SIZE).to(args.device)
            td_error = td_errors(q, slow_q, seq) * seq["mask"]
            loss = (seq["weight"] * td_error.square()).sum() / seq["mask"].sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q.parameters(), 10.0)
            optimizer.step()
            replay.update_priorities(seq["index"], td_error.detach(), seq["mask"])
            for slow, fast in zip(slow_q.parameters(), q.parameters(), strict=True):
                slow.data.lerp_(fast.data, TAU)
            losses = {"loss": loss}
        run.update(collector.total_steps, stats.episode_returns, **losses)
    envs.close()


def main() -> None:
    parser = command_line(__doc__, ENV)
    parser.add_argument("--memory", choices=("lstm", "none", "both"), default="both", help="of the network")
    args = parser.parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    runs: dict[str, Run] = {}
    for memory in ("lstm", "none") if args.memory == "both" else (args.memory,):
        name, goal = ("R2D2", GOAL) if memory == "lstm" else ("R2D2 without memory", NO_GOAL)
        with Run(name, ENV, goal, args, drawn_later=True) as run:
            train(memory, args, run)
        runs[name] = run
    if args.plot or not args.short:
        path = args.plot or Path(f"runs/r2d2-{args.memory}.png")
        draw_together(path, "T-maze: the sign is at the start", {name: [run] for name, run in runs.items()})
    if len(runs) == 2:
        lstm, none = (run.mean for run in runs.values())
        print(f"With memory, {lstm:.0%} of the episodes end in success; without, {none:.0%}: a guess is right in 50%.")
        if args.short and lstm < none + 0.2:
            raise SystemExit(1)
    print("Next: examples/ppo_lstm.py remembers without a replay; docs/sequences.md explains windows.")


if __name__ == "__main__":
    main()
