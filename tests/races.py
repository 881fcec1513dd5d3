"""Threads of one process that add, sample, update, save, load, serve and compute, for a run under ThreadSanitizer.

python tests/races.py          # exits with 66 if ThreadSanitizer saw a race
python tests/races.py planted  # the same with a race, which it has to see

`make tsan` runs both. Python itself is not compiled for ThreadSanitizer, which yet sees its locks, the GIL among them.
So this shows that what runs without the GIL, which is the core's long work alone, races with nothing else of the core.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive import GAE, Field, NStep, Prioritized, ReplayBuffer, RolloutBuffer, Schema
from relive.core import _core
from relive.returns import gae

N, WIDE = 8, 3000
"""Rows wide enough that each call of the core lets go of the GIL."""
SECONDS = 8.0
FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = Schema({"obs": (WIDE,), "action": Field((), torch.int64), "reward": (), **FLAGS})


def step(t: int) -> dict[str, Any]:
    fields = {"obs": np.full((N, WIDE), t % 100, np.float32), "action": np.zeros(N, np.int64)}
    return fields | {"reward": np.ones(N, np.float32)} | {name: np.zeros(N, bool) for name in FLAGS}


def replays(folder: Path) -> list[ReplayBuffer]:
    """A prioritized one, a uniform one, and one in files; each has some steps."""
    found = [
        ReplayBuffer(SCHEMA, 4000, num_envs=N, sampler=Prioritized(), view=NStep(3, gamma=0.99), seed=0),
        ReplayBuffer(SCHEMA, 4000, num_envs=N, seed=0),
        ReplayBuffer.open(folder / "durable", SCHEMA, 4000, num_envs=N, seed=0),
    ]
    for replay in found:
        for t in range(200):
            replay.add(step(t))
    return found


def tasks(folder: Path) -> list[Callable[[], Any]]:
    """What threads do again and again; several are of one replay."""
    prioritized, uniform, durable = replays(folder)
    served = prioritized.serve(64, depth=2)
    count = iter(range(10**9))

    def save() -> None:
        uniform.save(folder / "save", background=True).wait()

    uniform.save(folder / "save")

    def load() -> None:
        ReplayBuffer.load(folder / "save")

    def update() -> None:
        batch = next(served)
        prioritized.update_priorities(batch["index"], torch.rand(64))

    def rollout() -> None:
        buffer = RolloutBuffer(Schema({name: SCHEMA[name] for name in SCHEMA.names} | {"value": ()}), 16, N)
        for t in range(16):
            buffer.add(step(t), value=np.zeros(N, np.float32))
        buffer.finish(GAE(0.99, 0.95), last_value=np.zeros(N, np.float32))
        for batch in buffer.minibatches(32):
            batch["obs"].sum()

    def compute() -> None:
        none = torch.zeros(512, 256, dtype=torch.bool)
        gae(reward=torch.rand(512, 256), value=torch.rand(513, 256), terminated=none, truncated=none)

    both = [lambda replay=replay: replay.add(step(next(count))) for replay in (prioritized, uniform, durable)]
    return [*both, lambda: uniform.sample(64), lambda: durable.sample(64), update, save, load, rollout, compute,
            prioritized.stats]  # fmt: skip


def repeat(task: Callable[[], Any], until: float, failed: list[BaseException]) -> None:
    try:
        while time.monotonic() < until:
            task()
    except BaseException as error:
        failed.append(error)


def main(*planted: str) -> None:
    failed: list[BaseException] = []
    with tempfile.TemporaryDirectory() as folder:
        work = tasks(Path(folder)) if not planted else []
        if planted:
            number = np.zeros(1, np.int64)
            work = [lambda: _core.race(number)] * 2  # pyright: ignore[reportAttributeAccessIssue] # of that build alone
        until = time.monotonic() + (1.0 if planted else SECONDS)
        threads = [threading.Thread(target=repeat, args=(task, until, failed)) for task in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    print("no thread failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
