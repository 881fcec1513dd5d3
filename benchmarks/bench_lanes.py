"""Steps of another process into a replay: lanes, beside a queue and a pipe of `multiprocessing`.

A process that was forked makes the same steps over and over. A run asks it for some hundred vector steps, and ends when
all of them are in the replay of this process. Times are per vector step, and all contenders fill the same replay.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import relive
from harness import CopyFloor, Effort, Workload, measure, write
from replay_data import Line, Made

COUNT = 512
CHUNK = 64  # vector steps that are sent at once, where they are
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Played:
    """Vector steps of `envs` envs, with observations of this shape and dtype."""

    envs: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def schema(self) -> relive.Schema:
        flags = {name: relive.Field((), torch.bool) for name in ("terminated", "truncated")}
        return relive.Schema({"obs": relive.Field(self.shape, self.dtype), "action": (6,), "reward": (), **flags})

    def step(self, *front: int) -> dict[str, np.ndarray]:
        """One vector step `[N, ...]`, or several with further axes in front."""
        rows = (*front, self.envs)
        return {
            "obs": torch.ones((*rows, *self.shape), dtype=self.dtype).numpy(),
            "action": np.ones((*rows, 6), np.float32),
            "reward": np.ones(rows, np.float32),
            "terminated": np.zeros(rows, np.bool_),
            "truncated": np.zeros(rows, np.bool_),
        }

    def replay(self) -> relive.ReplayBuffer:
        return relive.ReplayBuffer(self.schema(), 4096 * self.envs, self.envs, seed=0)


def nbytes(data: Played) -> int:
    """Bytes of a vector step."""
    return sum(array.nbytes for array in data.step().values())


class StepFloor(CopyFloor):
    """The bytes of all steps of a run, copied once."""

    def __init__(self) -> None:
        super().__init__(nbytes, "a step's bytes, once")

    def run(self) -> None:
        for _ in range(COUNT):
            super().run()


def asked(work: Callable[[], None]) -> Callable[[], None]:
    """A process that does this work each time it is asked to; returns what asks."""
    mine, its = FORK.Pipe()

    def serve() -> None:
        while its.recv_bytes():
            work()

    FORK.Process(target=serve, daemon=True).start()
    return lambda: mine.send_bytes(b"go")


def made(replay: relive.ReplayBuffer, ask: Callable[[], None], take: Callable[[], None]) -> Made:
    """`run` and `check`: ask for the steps, and take them all."""

    def run() -> None:
        ask()
        take()

    def check() -> str:
        before = int(replay._ring.heads.sum())
        run()
        stored = int(replay._ring.heads.sum()) - before
        return "" if stored == COUNT * replay.num_envs else f"{stored} rows came"

    return run, check


def through_lanes(data: Played) -> Made:
    replay, step = data.replay(), data.step()
    lanes = relive.Lanes(data.schema(), 1, data.envs, steps=1024)
    writers: list[Any] = []

    def work() -> None:
        if not writers:
            writers.append(lanes.writer(0))
        add = writers[0].add
        for _ in range(COUNT):
            add(step)

    def take() -> None:
        left = COUNT * data.envs
        while left:
            lanes.wait(60, steps=min(CHUNK, left // data.envs))  # the last steps may be fewer
            left -= lanes.drain(replay)

    return made(replay, asked(work), take)


def through_queue(data: Played) -> Made:
    replay, step, queue = data.replay(), data.step(), FORK.Queue()

    def work() -> None:
        for _ in range(COUNT):
            queue.put(step)

    def take() -> None:
        for _ in range(COUNT):
            replay.add(queue.get())

    return made(replay, asked(work), take)


def through_pipe(data: Played) -> Made:
    replay, step, (mine, its) = data.replay(), data.step(), FORK.Pipe(duplex=False)

    def work() -> None:
        for _ in range(COUNT):
            its.send(step)

    def take() -> None:
        for _ in range(COUNT):
            replay.add(mine.recv())

    return made(replay, asked(work), take)


def through_pipe_at_once(data: Played) -> Made:
    replay, step, (mine, its) = data.replay(), data.step(), FORK.Pipe(duplex=False)
    chunk = data.step(CHUNK)

    def work() -> None:
        for _ in range(COUNT // CHUNK):
            for t in range(CHUNK):
                for name, array in step.items():
                    chunk[name][t] = array
            its.send(chunk)

    def take() -> None:
        for _ in range(COUNT // CHUNK):
            replay.extend(mine.recv())

    return made(replay, asked(work), take)


SIZES = {
    "8 envs, obs 17": Played(8, (17,), torch.float32),
    "64 envs, obs 17": Played(64, (17,), torch.float32),
    "1 env, 84 × 84 × 4 bytes": Played(1, (4, 84, 84), torch.uint8),
}


def run(effort: Effort, folder: Path) -> None:
    """Measures three kinds of steps and writes `lanes.json`."""
    lines = [
        Line(
            "relive", "relive", "Lanes: writer.add of each step; wait(steps=64) and drain here", through_lanes, "ours"
        ),
        Line("pipe, 64 steps at once", "", "Connection.send of arrays [64, N, ...]; extend here", through_pipe_at_once),
        Line("pipe", "", "Connection.send of a step; add here", through_pipe),
        Line("queue", "", "multiprocessing.Queue.put of a step; add here", through_queue),
    ]
    workloads = [
        measure(Workload(f"{name}: {nbytes(data):,} B", data, units=COUNT), [StepFloor(), *lines], effort)
        for name, data in SIZES.items()
    ]
    write("lanes", "a vector step of another process into a replay", workloads, folder)
