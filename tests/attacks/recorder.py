"""Kills a robot's recorder.

It is a forked child, which opens a replay in files and adds a step at a time until it is killed: at a line of relive
that is chosen in advance, or at a random instant. A life begins with a reset, so with a new episode. After each death
this process opens the replay, and every step that was acknowledged has to be there, whole, once and in order. At last
it exports the episodes as a LeRobot data set, in which all of them have to be."""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attacks.map_killer import dying_at
from relive import Field, ReplayBuffer, Schema
from relive.exchange import from_lerobot, to_lerobot

FLAG = Field((), torch.bool)
SCHEMA = Schema({
    "obs": {"front": Field((4, 6, 3), torch.uint8), "joints": (2,)}, "action": (2,), "reward": (), "terminated": FLAG,
    "truncated": FLAG, "human": FLAG,
})  # fmt: skip
ROWS, LENGTH = 100_000, 9


def seen(number: int) -> dict[str, Any]:
    return {"front": np.full((1, 4, 6, 3), number % 251, np.uint8), "joints": np.full((1, 2), number, np.float32)}


def step(number: int, since: int) -> dict[str, Any]:
    """The step of this number, the ``since``-th of its life; what is in it follows from both."""
    ends = since % LENGTH == LENGTH - 1
    return {"obs": seen(number), "action": np.full((1, 2), -number, np.float32), "reward": [float(number)],
            "terminated": [ends and number % 2 == 0], "truncated": [ends and number % 2 == 1],
            "human": [number % 7 < 2], "next_obs": seen(number + 1)}  # fmt: skip


def opened(folder: Path) -> ReplayBuffer:
    return ReplayBuffer.open(folder, SCHEMA, ROWS, own_next_obs=True)


def record(folder: Path, noted: Any, at: int) -> None:
    """The loop of the robot, until the kill comes."""
    replay, number, since = opened(folder), int(noted[1]), 0
    with dying_at(at):
        while True:
            noted[0] = number + 1  # it may be in from now on
            replay.add(step(number, since))
            noted[1] = number = number + 1  # it is in
            since += 1


def verify(folder: Path, noted: Any) -> int:
    """All that was acknowledged is there; how many steps are."""
    with opened(folder) as replay:
        rows = replay.slice(0)
        assert rows["complete"].all()
        count = len(rows["reward"])
        assert count in (int(noted[0]), int(noted[1])), f"{count} are in, noted {noted[:2].tolist()}"
        numbers = torch.arange(count)
        assert torch.equal(rows["reward"].long(), numbers)
        assert torch.equal(rows["human"], numbers % 7 < 2)
        assert torch.equal(rows["obs"]["front"].long(), (numbers % 251)[:, None, None, None].expand(-1, 4, 6, 3))
        assert torch.equal(rows["next_obs"]["joints"], (numbers + 1.0)[:, None].expand(-1, 2))
        return count


def main(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill the recorder so often; how many steps and episodes it has exported."""
    rng = np.random.default_rng(seed)
    noted: Any = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    births = set[int]()
    for turn in range(times):
        by_line = turn % 2 == 0
        at = int(rng.integers(0, 6000)) if by_line else -1
        births.add(int(noted[1]))
        child = os.fork()
        if child == 0:
            try:
                record(folder / "replay", noted, at)
            finally:
                os._exit(1)
        if not by_line:
            time.sleep(float(rng.uniform(0.0, 0.03)))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"recorder {turn}, at {at}, ended by itself: {status}"
        noted[:2] = verify(folder / "replay", noted)
    count = int(noted[1])
    starts, since = list[int](), 0
    for number in range(count):
        since = 0 if number in births else since
        if since % LENGTH == 0:
            starts.append(number)
        since += 1
    with opened(folder / "replay") as replay:
        log = from_lerobot(to_lerobot(replay, folder / "set", fps=20, images="image"), images=True)
    fields, numbers = log.fields, np.arange(count)
    np.testing.assert_array_equal(fields["reward"], numbers)
    np.testing.assert_array_equal(fields["human"], numbers % 7 < 2)
    np.testing.assert_array_equal(fields["obs"]["front"][:, 0, 0, 0], numbers % 251)
    np.testing.assert_array_equal(fields["next_obs"]["front"][:, -1, -1, -1], (numbers + 1) % 251)
    np.testing.assert_array_equal(np.flatnonzero(fields["frame_index"] == 0), starts)
    return count, len(starts)
