"""Writes the replays in files of tests/fixtures/durable-1, in the format that this release writes.

python tests/former_files.py

Once the format changes, a new directory comes beside that one, which stays as it is. ``closed`` was closed, and its
steps came through a lane. ``killed`` lost its process between two stores of a step.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relive import Field, Lanes, NStep, Prioritized, ReplayBuffer, Schema, WithoutReplacement
from relive.core.words import UNDO_KIND, UNDO_NONE
from support import internals

FILES = Path(__file__).parent / "fixtures" / "durable-1"
ENVS, ROWS = 2, 12
SCHEMA = Schema({
    "obs": {"camera": Field((40, 40), torch.uint8), "half": Field((3,), torch.bfloat16)},
    "action": Field((), torch.int64), "reward": (),
    "terminated": Field((), torch.bool), "truncated": Field((), torch.bool),
})  # fmt: skip


def obs(number: int) -> dict[str, Any]:
    camera = np.full((ENVS, 40, 40), number, np.uint8) + np.arange(ENVS, dtype=np.uint8)[:, None, None] * 100
    return {"camera": camera, "half": torch.full((ENVS, 3), float(number), dtype=torch.bfloat16)}


def step(number: int) -> dict[str, Any]:
    """The vector step of this number; what is in it follows from the number and the env. Env 0 ends, and env 1."""
    return {
        "obs": obs(number), "action": np.array([number, number + 100]),
        "reward": np.array([number, -number], np.float32),
        "terminated": np.array([number % 7 == 6, False]), "truncated": np.array([False, number % 5 == 4]),
        "next_obs": obs(number + 50),
    }  # fmt: skip


def closed(folder: Path) -> None:
    lanes = Lanes(SCHEMA, 1, ENVS)
    with ReplayBuffer.open(folder, SCHEMA, ENVS * ROWS, ENVS, sampler=WithoutReplacement(), seed=3) as replay:
        with lanes.writer(0) as writer:
            for number in range(17):
                writer.add(step(number))
                lanes.drain(replay)
        replay.sample(4)


def killed(folder: Path) -> None:
    options: dict[str, Any] = {"sampler": Prioritized(beta=(0.4, 1.0, 50)), "view": NStep(2, gamma=0.5), "seed": 4}
    replay = ReplayBuffer.open(folder, SCHEMA, ENVS * ROWS, ENVS, **options)
    for number in range(15):
        replay.add(step(number))
    batch = replay.sample(4)
    replay.update_priorities(batch["index"], batch["reward"])
    replay.flush()
    replay.add(step(15))
    replay.sampler.alpha = 0.5
    undo = internals.ring(replay).undo.words

    def trace(*_: Any) -> Any:
        if undo[UNDO_KIND] != UNDO_NONE:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    replay.add(step(16))


def main() -> None:
    for make in (closed, killed):
        shutil.rmtree(FILES / make.__name__, ignore_errors=True)
        child = os.fork()
        if not child:
            make(FILES / make.__name__)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) == (make is killed), status


if __name__ == "__main__":
    main()
