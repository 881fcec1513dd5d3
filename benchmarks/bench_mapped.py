"""A replay in files beside one in memory: add, flush, open, and batches whose rows are partly on the disk.

The last table is of a ring that is twice the size of memory. No limit is set on the process, which not every machine
lets us do. Instead half of the pages of the rows are in memory at first. After each turn, the pages that were not used
for longest are put out until no more than half are in memory, as a system does that has no more room. That is outside
of the time that is measured, so the work of the system to choose pages is left out. In exchange, a turn ends only when
all rows that were asked for have arrived, which without a limit would go on in the next turn.

python benchmarks/bench_mapped.py --short    runs all of it small, in seconds, and prints the figures
"""

import argparse
import ctypes
import gc
import importlib
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from harness import Effort, Workload, measure, one_thread, write
from replay_data import EPISODE, Line, Made

BATCH, SHARE = 256, 0.5
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


# a ring that is half in memory


class Pages:
    """The pages of the rows of a replay in files: which of them are in memory, and which are put out.

    Pages go out in the order in which they came or were last read by a batch. Those of large fields go by runs of 16,
    as the frames of a stack are read together and so grow old together.
    """

    OUT, NEEDED = 21, 3  # MADV_PAGEOUT, MADV_WILLNEED

    def __init__(self, replay: Any) -> None:
        self._c, self._rng, self._ring = ctypes.CDLL(None), np.random.default_rng(0), replay._ring
        for name, last in (("mincore", ctypes.c_void_p), ("madvise", ctypes.c_int)):
            getattr(self._c, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, last]
        store = replay._ring.store
        rows = next(iter(store.blocks.values()), store.target)
        self._start = rows.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        self._offset, self._width = rows.ctypes.data - self._start, rows.nbytes // len(rows)
        self._back, self._run = (3, 16) if store.blocks else (0, 1)
        self._there = np.empty(-(-rows.nbytes // mmap.PAGESIZE), np.uint8)
        self._last, self._used, self._turn = self.inside(), np.zeros(len(self._there), np.int64), 0

    def inside(self) -> Any:
        """Which pages are in memory, bool."""
        self._c.mincore(self._start, len(self._there) * mmap.PAGESIZE, self._there.ctypes.data)
        return (self._there & 1).astype(np.bool_)

    def read(self, batch: Any) -> None:
        """Note what a batch has read."""
        number, env = np.divmod(batch["index"].numpy(), self._ring.num_envs)
        places = env * self._ring.rows + number % self._ring.rows
        for k in range(-self._back, 2):
            at = self._offset + np.clip(places + k, 0, self._ring.store.num_rows - 1) * self._width
            for byte in range(0, self._width, mmap.PAGESIZE):
                self._used[(at + byte) // mmap.PAGESIZE] = self._turn
            self._used[(at + self._width - 1) // mmap.PAGESIZE] = self._turn

    def keep(self, share: float) -> None:
        """Put the pages out that were not used for longest, until no more than this share is in memory."""
        here = self.inside()
        self._turn += 1
        self._used[here & ~self._last] = self._turn
        much = int(here.sum()) - int(share * len(here))
        if much > 0:
            runs = np.unique(np.flatnonzero(here) // self._run)
            age = self._used[runs * self._run] + self._rng.random(len(runs))  # at random among those of one age
            out = runs[np.argsort(age)[: -(-much // self._run)]] * self._run
            for first in out.tolist():
                self._c.madvise(self._start + first * mmap.PAGESIZE, self._run * mmap.PAGESIZE, self.OUT)
            here = self.inside()
        self._last = here


def learner(job: Job) -> Callable[[Any], torch.Tensor]:
    """One update from a batch; returns the TD errors."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 16, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1296, 4)
    dense = nn.Linear(17, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
    net = nn.Sequential(*(conv if job.frames else dense))
    optimizer = torch.optim.Adam(net.parameters())

    def learn(batch: Any) -> torch.Tensor:
        now, then = (net(batch[name].float()) for name in ("obs", "next_obs"))
        td_error = batch["reward"] + now[:, 0] - then.amax(1).detach()
        optimizer.zero_grad()
        td_error.square().mean().backward()
        optimizer.step()
        return td_error.detach()

    return learn


def training(job: Job, replay: Any) -> Iterator[tuple[float, Any]]:
    """The seconds of each turn, and its batch: a step of all envs, a batch, an update, and priorities."""
    learn, steps = learner(job), cycle([job.step(t) for t in range(EPISODE)])
    while True:
        start = time.perf_counter()
        replay.add(next(steps))
        batch = replay.sample(job.batch)
        errors = learn(batch)
        if job.prioritized:
            replay.update_priorities(batch["index"], errors)
        yield time.perf_counter() - start, batch


def batches(job: Job, replay: Any) -> Iterator[tuple[float, Any]]:
    """The seconds of each batch, and the batch, one right after the other."""
    while True:
        start = time.perf_counter()
        batch = replay.sample(job.batch)
        yield time.perf_counter() - start, batch


MEMORY, WITH = "in memory, all of it", "relive, in files"
ALONE, AROUND = "relive, rows when they are needed", "relive, the same, with the pages around them"
NOTES = {
    MEMORY: "ReplayBuffer",
    WITH: "ReplayBuffer.open",
    ALONE: "ReplayBuffer.open, nothing is asked for in advance, MADV_RANDOM",
    AROUND: "ReplayBuffer.open, nothing is asked for in advance, MADV_NORMAL",
}
TURNS = 8  # of one kind, one after the other


def half_in_memory(
    job: Job, what: Callable[[Job, Any], Iterator[tuple[float, Any]]], turns: int, place: Path
) -> list[Any]:
    """The lines of a workload: batches or trainings over a ring that is half in memory."""
    replay = job.replay(place)
    replay.flush()
    looks, pages = replay._coming, Pages(replay)
    kinds = {label: what(job, job.replay(None) if label == MEMORY else replay) for label in NOTES}
    took: dict[str, list[float]] = {label: [] for label in kinds}
    gc.collect()
    for turn in range(2 + turns):
        for label, one in kinds.items():
            if label != MEMORY:
                replay._ring.store.keeper.expect_random(label != AROUND)
                replay._coming = looks if label == WITH else None
                pages.keep(SHARE)
                next(one)  # the first one tells what is missing; the others look ahead
            found = list[float]()
            for _ in range(TURNS):
                if label != MEMORY:
                    pages.keep(SHARE)
                seconds, batch = next(one)
                found.append(seconds + arrival(replay))
                pages.read(batch)
            took[label] += found if turn > 1 else []
    replay._coming = looks
    replay.close()
    best = statistics.median(took[MEMORY])
    return [
        {"label": label, "role": "floor" if label == MEMORY else "ours", "note": NOTES[label], "status": "ok",
         **quartiles(found), "times_floor": statistics.median(found) / best}
        for label, found in took.items()
    ]  # fmt: skip


def arrival(replay: Any) -> float:
    """The seconds until all rows that were asked for are there; they count, since pages are put out after them."""
    start = time.perf_counter()
    while replay._coming is not None and replay._coming.ahead.is_busy:
        time.sleep(1e-5)
    return time.perf_counter() - start


def quartiles(samples: list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(samples, n=4)
    return {"median": median, "q1": q1, "q3": q3, "mean": statistics.fmean(samples)}


def run(effort: Effort, folder: Path) -> None:
    """Measures replays in files and writes `mapped.json` and `mapped_half.json`."""
    full, turns = effort.rounds > 5, 10 if effort.rounds > 5 else 2
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
        rows, frames = (2_000_000, 30_000) if full else (100_000, 2_000)
        jobs: dict[str, tuple[Job, Any]] = {
            "a batch of 256": (Job(4, rows), batches),
            "a step of training, 64 transitions": (Job(4, rows, batch=64), training),
            "the same, 256 transitions": (Job(4, rows), training),
            "the same, 256, prioritized": (Job(4, rows, prioritized=True), training),
            "the same, 32 stacks of 4 frames": (Job(4, frames, frames=True, batch=32), training),
        }
        one_thread()
        works = []
        for name, (job, what) in jobs.items():
            lines = half_in_memory(job, what, turns, path())
            works.append({"name": name, "rounds": turns * TURNS, "floor": MEMORY, "best_peer": None,
                          "best_peer_over_ours": None, "lines": lines})  # fmt: skip
            print(
                name, {line["label"]: f"{line['median'] * 1e3:.3g} ms, mean {line['mean'] * 1e3:.3g}" for line in lines}
            )
        write("mapped_half", "a ring that is twice the size of memory", works, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="A replay in files beside one in memory.")
    parser.add_argument("--short", action="store_true", help="small, in seconds; changes no recorded result")
    short = parser.parse_args().short
    with tempfile.TemporaryDirectory() as place:
        run(Effort.quick() if short else Effort(), Path(place))


if __name__ == "__main__":
    sys.exit(main())
