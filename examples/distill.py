"""Distillation: a student that sees less imitates a teacher that sees everything.

    python examples/distill.py              CartPole-v1: a teacher, a student with a memory, and one without
    python examples/distill.py --seed 3     the same with another seed

examples/ppo.py trains the teacher on whole observations. Students see the two positions and no velocities. They play
by themselves (DAgger, Ross et al. 2011). At every step the teacher, which also sees the velocities (privileged
observations), gives the action it would have taken. That action is an ordinary field of the step. Students learn from
it alone: there is no reward here, and no value.

``rollout.chunks(16)`` gives all envs in the order of time, ``[L, N, ...]``, and continues across the ends of episodes.
The student unrolls its LSTM step by step, and resets its state where ``is_start`` marks the start of an episode.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

import ppo
import relive
from support.common import Goal, Run, command_line, draw_together
from support.memory import Privileged

ENV = "CartPole-v1"
GOAL = Goal(random=22, target=400, stop=475, steps=60_000, short=(25_000, 150), window=20)
NO_GOAL = Goal(random=22, target=-float("inf"), steps=30_000, short=(15_000, -float("inf")), window=20)
NUM_ENVS = 8
NUM_STEPS = 64  # of each env, per rollout
LENGTH = 16  # steps that gradients flow through
EPOCHS = 4
SIZE = 64  # of the LSTM's state
LEARNING_RATE = 3e-3

Hidden = tuple[Tensor, Tensor]  # h and c, each [1, N, SIZE]


class Student(nn.Module):
    """Scores of the actions, from a student's observations. Without memory, the state is reset at every step."""

    def __init__(self, inputs: int, actions: int, memory: bool) -> None:
        super().__init__()
        self.lstm, self.head, self.memory = nn.LSTM(inputs, SIZE), nn.Linear(SIZE, actions), memory

    def forward(self, obs: Tensor, hidden: Hidden, is_start: Tensor) -> tuple[Tensor, Hidden]:
        """L steps of N envs, ``[L, N, ...]``, from the state before the first; bool ``is_start`` is ``[L, N]``."""
        outputs: list[Tensor] = []
        for step, starts in zip(obs, is_start if self.memory else torch.ones_like(is_start), strict=True):
            h, c = (state.masked_fill(starts[:, None], 0) for state in hidden)
            output, hidden = self.lstm(step[None], (h, c))
            outputs.append(output)
        return self.head(torch.cat(outputs)), hidden


class Lesson:
    """The policy of the collector: the student acts, and the teacher gives the action it would have taken."""

    def __init__(self, student: Student, teacher: ppo.Policy) -> None:
        self.student, self.teacher = student, teacher

    def __call__(self, obs: Any, hidden: Hidden) -> dict[str, Any]:
        seen = obs["student"]
        going_on = torch.zeros(1, len(seen), dtype=torch.bool, device=seen.device)  # the collector resets the state
        scores, hidden = self.student(seen[None], hidden, going_on)
        advice = self.teacher.actor(obs["teacher"]).argmax(dim=-1)
        return {"action": scores[0].argmax(dim=-1), "teacher_action": advice, "hidden": hidden}


def train(teacher: ppo.Policy, memory: bool, args: argparse.Namespace, run: Run) -> None:
    torch.manual_seed(args.seed)
    num_envs = args.num_envs or NUM_ENVS
    envs = SyncVectorEnv([Privileged] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    state = relive.Field((1, SIZE), torch.float32)  # (layers, size), without the axis of envs
    advice = relive.Field((), torch.int64)
    schema = relive.Schema.from_env(envs, teacher_action=advice, hidden=(state, state))
    rollout = relive.RolloutBuffer(schema, NUM_STEPS, num_envs, device=args.device, seed=args.seed)
    seen = schema.leaves["obs", "student"].shape[0]
    student = Student(seen, envs.single_action_space.n, memory).to(args.device)
    collector = relive.Collector(envs, Lesson(student, teacher), rollout, seed=args.seed)
    optimizer = torch.optim.Adam(student.parameters(), lr=LEARNING_RATE)

    while not run.over:
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * run.remaining
        stats = collector.collect()
        losses: dict[str, Tensor] = {}
        for _ in range(EPOCHS):
            for seq in rollout.chunks(LENGTH):
                scores, _ = student(seq["obs"]["student"], seq["hidden"], seq["is_start"])
                loss = nn.functional.cross_entropy(seq.flat(scores), seq.flat(seq["teacher_action"]))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(student.parameters(), 0.5)
                optimizer.step()
                agreed = (scores.argmax(dim=-1) == seq["teacher_action"])[seq["mask"]].float().mean()
                losses = {"loss": loss, "agreement": agreed}
        run.update(collector.total_steps, stats.episode_returns, **losses)
    envs.close()


def main() -> None:
    args = command_line(__doc__, ENV).parse_args()
    torch.set_num_threads(1)  # networks this small are slower on several threads
    task = ppo.TASKS[ENV]
    with Run("Teacher", ENV, task.goal, args, drawn_later=True) as taught:
        teacher = ppo.train(task, args, taught)
    students: list[Run] = []
    for name, memory, goal in (("Student with memory", True, GOAL), ("Student without", False, NO_GOAL)):
        with Run(name, "CartPole without velocities", goal, args, drawn_later=True) as run:
            train(teacher, memory, args, run)
        students.append(run)
    remembering, forgetful = students
    if args.plot or not args.short:
        curves = {"student with memory": [remembering], "student without": [forgetful], "teacher, by PPO": [taught]}
        draw_together(args.plot or Path("runs/distill.png"), "Distillation on CartPole-v1", curves)
    print(
        f"Mean returns: the teacher {taught.mean:.4g} (it sees everything), the student with memory "
        f"{remembering.mean:.4g}, without {forgetful.mean:.4g}."
    )
    if args.short and remembering.mean < 2 * forgetful.mean:
        raise SystemExit(1)
    print("Next: examples/ppo_lstm.py learns as much without a teacher; docs/sequences.md explains chunks.")


if __name__ == "__main__":
    main()
