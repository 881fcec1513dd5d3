"""Kills writers of a replay in files.

Each writer is a forked child. It opens the replay, and adds steps, draws batches and sets priorities until it is
killed: at a line of relive that is chosen in advance, or at a random instant. Before and after each step it notes in
shared memory how far it has come. Then this process opens the replay, and everything in it has to be what the numbers
of its steps say, up to the last step that was noted."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import relive
from relive import Field, NStep, Prioritized, ReplayBuffer, Schema
from relive.memory.mapped import LookAhead

PACKAGE = str(Path(relive.__file__).parent)
ENVS, ROWS = 2, 24
SCHEMA = Schema({
    "obs": (3,), "camera": Field((40, 40), torch.uint8), "reward": (), "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


def step(number: int) -> dict[str, Any]:
    """The vector step of this number; what is in it follows from the number alone."""
    ends = number % 11 == 10
    return {
        "obs": np.full((ENVS, 3), number, np.float32),
        "camera": np.full((ENVS, 40, 40), number % 251, np.uint8),
        "reward": np.full(ENVS, number, np.float32),
        "terminated": np.array([ends, False]),
        "truncated": np.array([False, ends]),
        "next_obs": np.full((ENVS, 3), number + 1, np.float32),
    }


def opened(folder: Path) -> ReplayBuffer:
    view = NStep(2, gamma=0.5)
    return ReplayBuffer.open(folder, SCHEMA, ENVS * ROWS, ENVS, sampler=Prioritized(), view=view, check_ends=False)


@contextmanager
def dying_at(line: int) -> Iterator[None]:
    """Kill this process at so many lines of relive from here on; not by itself if that is negative."""
    left = line

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return trace

    if line >= 0:
        sys.settrace(trace)
    yield


def write(folder: Path, noted: Any, at: int) -> None:
    """Add steps until the kill comes; at line ``at`` of relive, if that is not negative."""
    replay, number = opened(folder), int(noted[1])
    with dying_at(at):
        add_for_ever(replay, number, noted)


def add_for_ever(replay: ReplayBuffer, number: int, noted: Any) -> None:
    """Add steps from this number on, draw, and set priorities."""
    while True:
        noted[0] = number + 1  # it may be in from now on
        replay.add(step(number))
        noted[1] = number = number + 1  # it is in
        if number % 3 == 0:
            batch = replay.sample(4)
            replay.update_priorities(batch["index"], batch["reward"])
        if number % 50 == 0:
            replay.flush()


def verify(folder: Path, noted: Any) -> None:
    """Everything in the replay is right, and all that was noted is in, or overwritten since."""
    with ReplayBuffer.open(folder, verify=True) as replay:
        newest = -1
        for env in range(ENVS):
            rows = replay.slice(env)
            obs, camera, complete = (rows[name] for name in ("obs", "camera", "complete"))
            assert (obs == obs[:, :1]).all()
            assert (camera == camera[:, :1, :1]).all()
            assert torch.equal(camera[complete, 0, 0].long(), obs[complete, 0].long() % 251)
            numbers = obs[complete, 0].long().tolist()
            assert numbers == sorted(set(numbers))
            newest = max([newest, *rows["reward"][obs[:, 0] == rows["reward"]].long().tolist()])
        assert newest + 1 in (int(noted[0]), int(noted[1])), f"{newest} is in, noted {noted[:2].tolist()}"
        noted[:2] = newest + 1
        if len(replay):
            batch = replay.sample(16)
            assert torch.equal(batch["next_obs"][:, 0], batch["obs"][:, 0] + batch["steps"])


def main(folder: Path, times: int, seed: int) -> int:
    """Kill so many writers; how many steps they have added."""
    rng = np.random.default_rng(seed)
    LookAhead.is_wanted = lambda self: True  # every batch also asks for the rows of the next one
    noted: Any = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    with opened(folder / "replay") as replay:
        for number in range(3):
            replay.add(step(number))
        replay.update_priorities(replay.sample(2)["index"], [0.0, 1.0])
    noted[:2] = 3
    for turn in range(times):
        by_line = turn % 2 == 0
        at = int(rng.integers(0, 6000)) if by_line else -1
        child = os.fork()
        if child == 0:
            try:
                write(folder / "replay", noted, at)
            finally:
                os._exit(1)
        if not by_line:
            time.sleep(float(rng.uniform(0.0, 0.03)))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"writer {turn}, at {at}, ended by itself: {status}"
        verify(folder / "replay", noted)
    return int(noted[1])
