"""A learner's step with batches that are drawn in it, by a thread, or by a process; and the load of Ape-X.

The floor of a step is the same step on one batch, again and again: what it takes if sampling is free. Batches drawn by
others can only help where two cores are free, so `run` this on a machine that does nothing else.

Ape-X (Horgan et al. 2018) reports 12.5 k transitions per second in and 19 batches of 512 per second out. The last table
is the time for one second of that load: below 1 s, it is held.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from harness import Effort, Workload, measure, write
from replay_data import Line, Made

BATCH, DEPTH = 256, 2
APEX_IN, APEX_OUT, APEX_BATCH, ACTORS = 12_500, 19, 512, 50


@dataclass(frozen=True)
class Job:
    """What is stored, how it is read, and how much of it there is."""

    kind: str
    envs: int
    steps: int
    batch: int = BATCH

    def step(self, t: int = 0) -> dict[str, np.ndarray]:
        """One step of all envs."""
        rng, n = np.random.default_rng(t), self.envs
        frames = self.kind == "frames"
        obs = rng.integers(0, 256, (n, 84, 84), np.uint8) if frames else rng.random((n, 17), np.float32)
        ends = np.full(n, t % 200 == 199)
        return {"obs": obs, "action": rng.integers(0, 4, n), "reward": rng.random(n, np.float32),
                "terminated": ends, "truncated": np.zeros(n, bool), "next_obs": obs}  # fmt: skip

    def replay(self) -> Any:
        """A replay that holds all of it."""
        relive = importlib.import_module("relive")
        flag, frames = relive.Field((), torch.bool), self.kind == "frames"
        obs = relive.Field((84, 84), torch.uint8) if frames else relive.Field((17,))
        action = relive.Field((), torch.int64)
        schema = relive.Schema({"obs": obs, "action": action, "reward": (), "terminated": flag, "truncated": flag})
        window = relive.NStep(3, 0.99)
        view = relive.FrameStack(4, window) if frames else window
        rows = self.envs * (self.steps + self.steps // 200 + 2)
        replay = relive.ReplayBuffer(
            schema, rows, self.envs, sampler=relive.Prioritized(), view=view, check_ends=False, seed=0
        )
        some = [self.step(t) for t in range(20)]
        for t, step in zip(range(self.steps), cycle(some), strict=False):
            replay.add({**step, "terminated": np.full(self.envs, t % 200 == 199)})
        return replay

    def learner(self) -> Callable[[Any], torch.Tensor]:
        """One update from a batch; returns the TD errors."""
        torch.manual_seed(0)
        conv = nn.Conv2d(4, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 16, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1296, 4)
        dense = nn.Linear(17, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
        net = nn.Sequential(*(conv if self.kind == "frames" else dense))
        optimizer = torch.optim.Adam(net.parameters())

        def learn(batch: Any) -> torch.Tensor:
            value = net(batch["obs"].float() / 255).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
            td_error = batch["reward"] - value
            optimizer.zero_grad()
            (batch["weight"] * td_error.square()).mean().backward()
            optimizer.step()
            return td_error.detach()

        return learn


def whole(batch: Any, size: int) -> str:
    """What is wrong with a batch."""
    return "" if len(batch["reward"]) == size and batch["weight"].max() == 1 else "the batch is not whole"


def nothing_to_draw(job: Job) -> Made:
    batch, learn = job.replay().sample(job.batch), job.learner()

    def run() -> None:
        learn(batch)

    return run, lambda: whole(batch, job.batch)


def in_the_learner(job: Job) -> Made:
    replay, learn = job.replay(), job.learner()

    def run() -> None:
        batch = replay.sample(job.batch)
        replay.update_priorities(batch["index"], learn(batch))

    return run, lambda: whole(replay.sample(job.batch), job.batch)


def by_a_thread(job: Job) -> Made:
    replay, learn = job.replay(), job.learner()
    served = replay.serve(job.batch, DEPTH)

    def run() -> None:
        batch = next(served)
        replay.update_priorities(batch["index"], learn(batch))

    return run, lambda: whole(next(served), job.batch)


def by_a_process(job: Job) -> Made:
    relive = importlib.import_module("relive")
    server, learn = relive.ReplayServer(job.replay, job.batch, DEPTH), job.learner()
    learner = server.learner()

    def run() -> None:
        batch = next(learner)
        learner.update_priorities(batch["index"], learn(batch))

    return run, lambda: whole(next(learner), job.batch) or server.pid * ""


# Ape-X


def copies(job: Job) -> Made:
    frame = np.zeros(84 * 84, np.uint8)
    into, out = np.zeros((APEX_IN, frame.size), np.uint8), np.zeros((APEX_BATCH * 8, frame.size), np.uint8)

    def run() -> None:
        into[:] = frame
        for _ in range(APEX_OUT):
            out[:] = into[: len(out)]

    return run, lambda: ""


def apex(job: Job, add: Callable[[Any], None], take: Callable[[], Any], rate: Callable[[Any, Any], Any]) -> Made:
    """One second: the transitions of all actors, spread evenly over the batches."""
    steps, errors = [job.step(t) for t in range(20)], torch.rand(APEX_BATCH)
    due = np.diff(np.linspace(0, APEX_IN // ACTORS, APEX_OUT + 1).astype(int))

    def run() -> None:
        for count in due:
            for t in range(count):
                add(steps[t])
            rate(take()["index"], errors)

    return run, lambda: whole(take(), APEX_BATCH)


def apex_in_one_process(job: Job) -> Made:
    replay = job.replay()
    return apex(job, replay.add, partial(replay.sample, APEX_BATCH), replay.update_priorities)


def apex_with_a_server(job: Job) -> Made:
    relive = importlib.import_module("relive")
    example = replace(job, steps=1).replay()
    lanes = relive.Lanes(example.schema, 1, job.envs, steps=512)
    server = relive.ReplayServer(job.replay, APEX_BATCH, DEPTH, lanes=lanes)
    writer, learner = lanes.writer(0), server.learner()
    run, check = apex(job, writer.add, partial(next, learner), learner.update_priorities)
    return run, lambda: check() or server.pid * ""


def run(effort: Effort, folder: Path) -> None:
    """Measures steps of learners and the load of Ape-X; writes `slots.json` and `apex.json`."""
    ways = [
        Line("the same batch again", "", "no sampling", nothing_to_draw, "floor"),
        Line("relive, sample", "relive", "replay.sample in the learner", in_the_learner, "ours"),
        Line("relive, serve", "relive", f"replay.serve(depth={DEPTH}), a thread", by_a_thread, "ours"),
        Line("relive, ReplayServer", "relive", f"depth={DEPTH}, a process", by_a_process, "ours"),
    ]
    jobs = {"256 of obs 17": Job("vectors", 8, 20_000), "256 stacks of 4 frames": Job("frames", 8, 2_000)}
    write(
        "slots",
        "a learner's step on",
        [measure(Workload(name, job), ways, effort) for name, job in jobs.items()],
        folder,
    )
    ways = [
        Line("copying the frames", "", "numpy copies of frames in and of stacks out", copies, "floor"),
        Line("relive, one process", "relive", "add, sample and update_priorities", apex_in_one_process, "ours"),
        Line("relive, ReplayServer and Lanes", "relive", "the owner drains and draws", apex_with_a_server, "ours"),
    ]
    job = Job("frames", ACTORS, 1_000, APEX_BATCH)
    load = Workload("12.5 k transitions in, 19 batches of 512 stacks out", job)
    write("apex", "one second of Ape-X's load", [measure(load, ways, effort)], folder)
