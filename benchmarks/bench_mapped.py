"""A replay in files beside one in memory: add, flush and open. A ring that is larger than memory: bench_mapped_half.

python benchmarks/bench_mapped.py --short    runs all of it small, in seconds, and prints the figures
"""

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import Effort, Workload, alone, measure, write
from replay_data import EPISODE, Line, Made

BATCH = 256
FLUSHED = 1000


@dataclass(frozen=True)
class Job:
    """What is stored: vectors or frames, in so many rows of so many envs."""

    envs: int
    rows: int
    frames: bool = False
    prioritized: bool = False
    batch: int = BATCH

    def step(self, t: int) -> dict[str, np.ndarray]:
        """One step of all envs; the next observation where an episode ends."""
        n, rng = self.envs, np.random.default_rng(t)
        ends = np.full(n, t % EPISODE == EPISODE - 1)
        obs = rng.integers(0, 256, (n, 84, 84), np.uint8) if self.frames else rng.random((n, 17), np.float32)
        action = np.zeros(n, np.int64) if self.frames else np.ones((n, 6), np.float32)
        found = {"obs": obs, "action": action, "reward": np.full(n, t, np.float32), "terminated": ends}
        return found | {"truncated": np.zeros(n, bool)} | ({"next_obs": obs} if ends.any() else {})

    def replay(self, folder: Path | None, fill: bool = True) -> Any:
        """A replay, full if ``fill``; in files if there is a folder."""
        relive = importlib.import_module("relive")
        flag = relive.Field((), torch.bool)
        obs = relive.Field((84, 84), torch.uint8) if self.frames else relive.Field((17,))
        action = relive.Field((), torch.int64) if self.frames else relive.Field((6,))
        schema = relive.Schema({"obs": obs, "action": action, "reward": (), "terminated": flag, "truncated": flag})
        sampler = relive.Prioritized() if self.prioritized else relive.Uniform()
        view = relive.FrameStack(4) if self.frames else relive.Transition()
        options = {"sampler": sampler, "view": view, "check_ends": False, "seed": 0}
        if folder is None:
            replay = relive.ReplayBuffer(schema, self.rows, self.envs, **options)
        else:
            replay = relive.ReplayBuffer.open(folder, schema, self.rows, self.envs, **options)
        if fill:
            self.fill(replay)
        return replay

    def fill(self, replay: Any) -> None:
        """Add episodes until the ring has wrapped."""
        steps = [self.step(t) for t in range(EPISODE)]
        names = [name for name in steps[0] if name != "next_obs"]
        episode = {name: np.stack([step[name] for step in steps]) for name in names}
        episode["next_obs"] = episode["obs"]
        for _ in range(0, self.rows // self.envs + EPISODE, EPISODE + 1):
            replay.extend(episode)


# what is measured by the harness


def adding(folder: Callable[[], Path | None]) -> Callable[[Job], Made]:
    def make(job: Job) -> Made:
        replay, steps = job.replay(folder()), cycle([job.step(t) for t in range(EPISODE)])

        def run() -> None:
            replay.add(next(steps))

        return run, lambda: ""

    return make


def flushing(folder: Callable[[], Path | None]) -> Callable[[Job], Made]:
    """Add some rows, then wait until they are on the disk."""

    def make(job: Job) -> Made:
        replay, steps = job.replay(folder()), [job.step(t) for t in range(FLUSHED // job.envs)]
        flush = replay.flush if replay._durable else lambda: None

        def run() -> None:
            for step in steps:
                replay.add(step)
            flush()

        return run, lambda: ""

    return make


def sampling(folder: Callable[[], Path | None]) -> Callable[[Job], Made]:
    def make(job: Job) -> Made:
        replay = job.replay(folder())

        def run() -> None:
            replay.sample(job.batch)

        return run, lambda: ""

    return make


def opening(folder: Callable[[], Path]) -> Callable[[Job], Made]:
    """Open what a process left that did not close it."""

    def make(job: Job) -> Made:
        relive = importlib.import_module("relive")
        path = folder()
        job.replay(path).flush()

        def run() -> None:
            relive.ReplayBuffer.open(path)

        return run, lambda: ""

    return make


def run(effort: Effort, folder: Path) -> None:
    """Measures replays in files and writes `mapped.json`."""
    full = effort.rounds > 5
    with tempfile.TemporaryDirectory() as place:
        number = count()

        def path() -> Path:
            return Path(place) / str(next(number))

        def both(make: Callable[..., Any]) -> list[Line]:
            return [
                Line("relive, in files", "relive", "ReplayBuffer.open", make(path), "ours"),
                Line("in memory", "", "ReplayBuffer", make(lambda: None), "floor"),
            ]

        works = [
            measure(Workload("add, 1 env", Job(1, 64_000)), both(adding), effort),
            measure(Workload("add, 64 envs", Job(64, 64_000)), both(adding), effort),
            measure(Workload("add, 64 envs, prioritized", Job(64, 64_000, prioritized=True)), both(adding), effort),
            measure(Workload("256 of 1 M", Job(4, 1_000_000 if full else 50_000)), both(sampling), effort),
            measure(Workload(f"add {FLUSHED} rows, flush", Job(1, 64_000)), both(flushing)[:1], effort),
            measure(
                Workload("open after a kill", Job(8, 1_000_000 if full else 50_000, prioritized=True)),
                [Line("relive, in files", "relive", "ReplayBuffer.open", opening(path), "ours")], effort,
            ),
        ]  # fmt: skip
        write("mapped", "a replay in files", works, folder)


if __name__ == "__main__":
    alone(run, "A replay in files beside one in memory.")
