"""A replay in files of twice the size of memory, beside one in memory: batches, and steps of training.

No limit is set on the process, which not every machine lets us do. Instead half of the pages of the rows are in memory
at first. Before each turn, the pages that were not used for longest are put out until no more than half are in memory,
as a system does that has no more room. That is outside of the time that is measured, so the work of the system to
choose pages is left out. In exchange, a turn ends only when all rows that were asked for have arrived, which without a
limit would go on in the next turn. Putting pages out also empties the processor's caches, so the replay in memory gets
the same before each of its turns.

Reads with the pages around them (MADV_NORMAL) are left out. Their pages come into memory, but not into the page table
of this process, so that the system does not put them out when told to.

python benchmarks/bench_mapped_half.py --short    runs all of it small, in seconds, and prints the figures
"""

import ctypes
import gc
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_mapped import Job
from harness import Effort, alone, one_thread, write
from mapped_learners import Learn, dqn, sac, small, small_frames
from replay_data import EPISODE

SHARE = 0.5


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
        self._begin()
        self._last, self._used, self._turn = self.inside(), np.zeros(len(self._there), np.int64), 0

    def _begin(self) -> None:
        """Put all pages out, and bring half of the runs in."""
        self._ring.store.allocator.expect_random(True)
        count = len(self._there) // self._run
        self._ring.store.target.max()  # reads all; at once, as they may be in memory as large folios
        for block in self._ring.store.blocks.values():
            block.max()
        self._c.madvise(self._start, len(self._there) * mmap.PAGESIZE, self.OUT)
        for run in self._rng.choice(count, int(SHARE * count), replace=False).tolist():
            self._touch(run * self._run)

    def _touch(self, first: int, these: Any = None) -> None:
        """Read a byte of each page of a run, or of ``these`` of them: bool, for all pages."""
        for page in range(first, min(first + self._run, len(self._there))):
            if these is not None and not these[page]:
                continue
            ctypes.c_uint8.from_address(self._start + page * mmap.PAGESIZE).value  # noqa: B018 - reading is what matters

    def _put_out(self, firsts: Iterable[int]) -> None:
        """Put runs of pages out. The system puts only those out that are in the page table, so they are read first."""
        here = self.inside()  # a page that comes only now would stay
        for first in firsts:
            self._touch(first, here)
            self._c.madvise(self._start + first * mmap.PAGESIZE, self._run * mmap.PAGESIZE, self.OUT)

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

    def random_reads(self, count: int) -> float:
        """The seconds to read so many pages from the disk, in random runs: all are asked for at once, then touched.

        That is the deepest queue. In smaller portions it takes longer, as more is waited for.
        """
        runs = self._rng.choice(len(self._there) // self._run, -(-count // self._run), replace=False) * self._run
        self._put_out(runs.tolist())
        start = time.perf_counter()
        for first in runs.tolist():
            self._c.madvise(self._start + first * mmap.PAGESIZE, self._run * mmap.PAGESIZE, self.NEEDED)
        for first in runs.tolist():
            self._touch(first)
        return time.perf_counter() - start

    def keep(self, share: float) -> None:
        """Put the pages out that were not used for longest, until no more than this share is in memory."""
        here = self.inside()
        self._turn += 1
        self._used[here & ~self._last] = self._turn
        much = int(here.sum()) - int(share * len(here))
        if much > 0:
            runs = np.unique(np.flatnonzero(here) // self._run)
            last = self._run - 1 + runs * self._run  # a run is as old as its last use
            used = np.maximum(self._used[runs * self._run], self._used[np.minimum(last, len(self._used) - 1)])
            age = used + self._rng.random(len(runs))  # at random among those of one age
            self._put_out((runs[np.argsort(age)[: -(-much // self._run)]] * self._run).tolist())
            here = self.inside()
        if here.mean() > share + 0.1:
            raise RuntimeError(f"{here.mean():.0%} of the pages are in memory: this file system does not put them out")
        self._last = here


Turns = Iterator[tuple[float, Any]]
"""The seconds of each turn, and its batch."""


def training(job: Job, replay: Any, learner: Callable[[], Learn]) -> Turns:
    """Steps of training: a step of all envs, a batch, an update, and priorities."""
    torch.manual_seed(0)
    learn, steps = learner(), cycle([job.step(t) for t in range(EPISODE)])
    while True:
        start = time.perf_counter()
        replay.add(next(steps))
        batch = replay.sample(job.batch)
        errors = learn(batch)
        if job.prioritized:
            replay.update_priorities(batch["index"], errors)
        yield time.perf_counter() - start, batch


def batches(job: Job, replay: Any) -> Turns:
    """Batches, one right after the other."""
    while True:
        start = time.perf_counter()
        batch = replay.sample(job.batch)
        yield time.perf_counter() - start, batch


MEMORY, WITH = "in memory, all of it", "relive, in files"
ALONE = "relive, rows when they are needed"
NOTES = {
    MEMORY: "ReplayBuffer, with its caches emptied before each turn as those of the others",
    WITH: "ReplayBuffer.open",
    ALONE: "ReplayBuffer.open, nothing is asked for in advance, MADV_RANDOM",
}
DISK = "the disk alone, as many random pages at once"
TURNS = 8  # of one kind, one after the other


class Asked:
    """The rows that the look-ahead of a replay has asked for."""

    def __init__(self, replay: Any) -> None:
        store, self.missing = replay._ring.store, list[int]()
        self._parts = [store.target, *(block.reshape(len(block), -1) for block in store.blocks.values())]
        self._rows, self._ask = np.empty(0, np.int64), replay._reader.prefetch.ahead.ask
        replay._reader.prefetch.ahead.ask = self.ask

    def ask(self, begins: Any, ends: Any) -> int:
        self._rows = np.concatenate([np.arange(*run) for run in zip(begins, ends, strict=True)])
        self.missing.append(self._ask(begins, ends))
        return self.missing[-1]

    def arrival(self) -> float:
        """The seconds until all of them are there; they count, since pages are put out after them."""
        start = time.perf_counter()
        for part in self._parts:
            for column in (0, *range(mmap.PAGESIZE, part.shape[1], mmap.PAGESIZE), part.shape[1] - 1):
                part[self._rows, column].max(initial=0)
        self._rows = np.empty(0, np.int64)
        return time.perf_counter() - start


def half_in_memory(job: Job, what: Callable[[Job, Any], Turns], turns: int, place: Path) -> list[Any]:
    """The lines of a workload: batches or trainings over a ring that is half in memory."""
    replay = job.replay(place)
    replay.flush()
    looks, pages, asked = replay._reader.prefetch, Pages(replay), Asked(replay)
    kinds = {label: what(job, job.replay(None) if label == MEMORY else replay) for label in NOTES}
    took: dict[str, list[float]] = {label: [] for label in kinds}
    gc.collect()
    for turn in range(2 + turns):
        for label, one in kinds.items():
            replay._ring.store.allocator.expect_random(True)
            replay._reader.prefetch = looks if label == WITH else None
            if label != MEMORY:
                pages.keep(SHARE)
                next(one)  # notices that rows are missing, so that the next batches are asked for early
            found = list[float]()
            for _ in range(TURNS):
                pages.keep(SHARE)
                seconds, batch = next(one)
                found.append(seconds + (asked.arrival() if label == WITH else 0.0))
                if label != MEMORY:
                    pages.read(batch)
            took[label] += found if turn > 1 else []
    replay._reader.prefetch = looks
    missing = max(round(statistics.median(asked.missing)), 1)
    disk = [pages.random_reads(missing) for _ in range(3 * TURNS)]
    replay.close()
    best = statistics.median(took[MEMORY])
    lines = [(label, "floor" if label == MEMORY else "ours", NOTES[label], found) for label, found in took.items()]
    lines.append((DISK, "peer", f"{missing} pages of {mmap.PAGESIZE} bytes", disk))
    return [
        {"label": label, "role": role, "note": note, "status": "ok", **quartiles(found),
         "times_floor": statistics.median(found) / best}
        for label, role, note, found in lines
    ]  # fmt: skip


def quartiles(samples: list[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(samples, n=4)
    return {"median": median, "q1": q1, "q3": q3, "mean": statistics.fmean(samples)}


def run(effort: Effort, folder: Path) -> None:
    """Measures a ring that is larger than memory and writes `mapped_half.json`."""
    full, turns = effort.rounds > 5, 10 if effort.rounds > 5 else 2
    rows, frames = (2_000_000, 30_000) if full else (100_000, 2_000)
    vectors, stacks = Job(4, rows), Job(4, frames, frames=True, batch=32)
    jobs: dict[str, tuple[Job, Callable[[Job, Any], Turns]]] = {
        "a batch of 256": (vectors, batches),
        "a step of training, 64 transitions": (Job(4, rows, batch=64), partial(training, learner=small)),
        "256 transitions": (vectors, partial(training, learner=small)),
        "256, prioritized": (Job(4, rows, prioritized=True), partial(training, learner=small)),
        "256, SAC": (vectors, partial(training, learner=sac)),
        "32 stacks of 4 frames": (stacks, partial(training, learner=small_frames)),
        "32 stacks, DQN": (stacks, partial(training, learner=dqn)),
    }
    one_thread()
    works = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as place:
        for number, (name, (job, what)) in zip(count(), jobs.items(), strict=False):
            lines = half_in_memory(job, what, turns, Path(place) / str(number))
            works.append({"name": name, "rounds": turns * TURNS, "floor": MEMORY, "best_peer": None,
                          "best_peer_over_ours": None, "lines": lines})  # fmt: skip
            print(name, {line["label"]: f"{line['median'] * 1e3:.3g} ms, mean {line['mean'] * 1e3:.3g}"
                         for line in lines}, flush=True)  # fmt: skip
    write("mapped_half", "a ring that is twice the size of memory", works, folder)


if __name__ == "__main__":
    alone(run, "A replay in files of twice the size of memory.")
