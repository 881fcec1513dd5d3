"""A replay that is larger than the memory its process may take, and that survives the process.

    python examples/larger_than_memory.py           2 GB of frames in a process that may take 256 MiB more than it has
    python examples/larger_than_memory.py --short   100 MB, in one that may take 32 MiB

A worker plays under a limit on its memory. A replay in memory does not fit there; one in files does. The worker adds
frames and draws batches until it is killed, without a word. The next worker opens the files and goes on: every step
that the first one stored is there, and so are its priorities.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import relive

NUM_ENVS = 4
FLAGS = {name: relive.Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = relive.Schema({
    "obs": relive.Field((84, 84), torch.uint8), "action": relive.Field((), torch.int64), "reward": (), **FLAGS,
})  # fmt: skip
ROW = 84 * 84
BATCH_SIZE = 64
REPORT = 50  # steps between two messages of a worker


def step(number: int, rng: np.random.Generator) -> dict[str, Any]:
    """What the envs gave at this step; it stands for a game. The brightness of a frame says which step it is of."""
    goes_on = np.zeros(NUM_ENVS, bool)
    return {
        "obs": np.full((NUM_ENVS, 84, 84), number % 256, np.uint8),
        "action": rng.integers(0, 4, NUM_ENVS),
        "reward": np.full(NUM_ENVS, number, np.float32),
        "terminated": goes_on,
        "truncated": goes_on,
    }


def limit_memory(more: int) -> None:
    """Let this process take so many bytes of private memory, and no more; mapped files do not count."""
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + more, used + more))


def fits_in_memory(capacity: int) -> bool:
    """Whether a replay in private memory can be made."""
    try:
        relive.ReplayBuffer(SCHEMA, capacity, NUM_ENVS)
    except (MemoryError, OSError):
        return False
    return True


def work(path: Path, capacity: int, steps: int, memory: int, seed: int, tell: Connection) -> None:
    """Play and learn, from where the worker before stopped."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    replay = relive.ReplayBuffer.open(path, SCHEMA, capacity, NUM_ENVS, sampler=relive.Prioritized(), seed=seed)
    replay.add(step(0, rng))  # whatever is imported or starts threads comes before the limit
    replay.add(step(1, rng))
    replay.update_priorities(replay.sample(BATCH_SIZE)["index"], torch.ones(BATCH_SIZE))
    limit_memory(memory)
    tell.send(("fits", fits_in_memory(capacity)))
    for number in range(2, steps):
        replay.add(step(number, rng))
        if number % 8 == 0:
            batch = replay.sample(BATCH_SIZE)
            assert torch.equal(batch["obs"][:, 0, 0].float(), batch["reward"] % 256)
            replay.update_priorities(batch["index"], batch["reward"] / steps)
        if number % REPORT == 0:
            tell.send(("stored", replay.stats()["completed"]))
    replay.close()
    tell.send(("closed", 0))


def run(path: Path, capacity: int, steps: int, memory: int, seed: int, kill_at: int | None) -> dict[str, Any]:
    """Have a worker play, and kill it when it has come to a step; returns the last of each of its messages."""
    listen, tell = multiprocessing.Pipe(duplex=False)
    job = (path, capacity, steps, memory, seed, tell)
    worker = multiprocessing.get_context("spawn").Process(target=work, args=job)
    worker.start()
    tell.close()
    heard: dict[str, Any] = {}
    while "closed" not in heard:
        try:
            name, value = listen.recv()
        except EOFError:
            break
        heard[name] = value
        if kill_at is not None and name == "stored" and value >= kill_at:
            os.kill(worker.pid or 0, signal.SIGKILL)
            break
    worker.join()
    return heard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the actions and the batches (default 0)")
    parser.add_argument("--path", type=Path, help="a directory for the files (default: a temporary one)")
    parser.add_argument("--short", action="store_true", help="a run of seconds that fails if anything is lost")
    options = parser.parse_args()
    capacity, memory = (15_000, 2**25) if options.short else (300_000, 2**28)
    steps = capacity // NUM_ENVS * 3 // 4
    folder = Path(options.path or tempfile.mkdtemp())
    path = folder / "replay"
    print(f"{capacity * ROW / 1e6:,.0f} MB of frames, in a process that may take {memory / 2**20:.0f} MiB")
    try:
        first = run(path, capacity, steps, memory, options.seed, steps * NUM_ENVS // 2)
        print(f"in memory: {'fits' if first['fits'] else 'does not fit'}; in files: {first['stored']:,.0f} transitions")
        assert sys.platform != "linux" or not first["fits"], "the limit on memory does not hold"
        print("killed")
        with relive.ReplayBuffer.open(path, verify=True) as replay:
            found, drawn = replay.stats()["completed"], replay.stats()["batches"]
            assert found >= first["stored"], f"{found} of {first['stored']} transitions"
            batch = replay.sample(BATCH_SIZE)
            assert torch.equal(batch["obs"][:, 0, 0].float(), batch["reward"] % 256)
        print(f"opened again: {found:,.0f} transitions, the next batch is number {drawn:,.0f}")
        second = run(path, capacity, steps // 4, memory, options.seed, None)
        assert "closed" in second
        with relive.ReplayBuffer.open(path) as replay:
            assert replay.stats()["completed"] >= found + (steps // 4 - 1) * NUM_ENVS
            print(f"another worker went on: {replay.stats()['completed']:,.0f} transitions")
    finally:
        if options.path is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
