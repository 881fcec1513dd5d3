"""What is served, beside what a plain loop draws ahead."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from relive import Lanes, NStep, ReplayBuffer, ReplayServer
from support.shared_buffers import IMAGES, replay_of, written
from support.twins import same_batches

DEPTHS = (1, 2, 8)


class PlainAhead:
    """The rule in plain lines: ``depth`` batches are drawn before the first, and one after each that is done with."""

    def __init__(self, replay: ReplayBuffer, batch_size: int, depth: int) -> None:
        self.replay, self.batch_size, self.depth = replay, batch_size, depth
        self.waiting = deque[Any]()

    def __next__(self) -> Any:
        while len(self.waiting) < self.depth:
            self.waiting.append(self.replay.sample(self.batch_size))
        return self.waiting.popleft()


def draw_alike(one: ReplayBuffer, other: ReplayBuffer) -> bool:
    """Whether two replays draw the same batches next."""
    return all(same_batches(one.sample(4), other.sample(4)) for _ in range(3))


def errors_of(batch: Any) -> tuple[Any, ...]:
    """What ``update_priorities`` is given after a batch: errors that depend on it alone."""
    mask = batch["mask"] if "mask" in batch.keys() else None
    errors = (batch["index"] % 7 + 0.5).to(torch.float64)
    if mask is None:
        return batch["index"], errors
    axis = 1 if batch.time_first else 0
    spread = errors.unsqueeze(1 - axis).expand(mask.shape)
    return batch["index"], spread, mask


# What other processes do


def learn_in_rank(server: ReplayServer, rank: int, folder: Path) -> None:
    """Take ten batches, and keep their indices."""
    with server.learner(rank, timeout=60.0) as learner:
        torch.save([next(learner)["index"].clone() for _ in range(10)], folder / f"{rank}.pt")


def play_and_wait(server: ReplayServer, rank: int) -> None:
    """Take batches until killed."""
    for _ in server.learner(rank):
        time.sleep(0.001)


def write_steps(lanes: Lanes, lane: int, count: int) -> None:
    """Write steps through a lane."""
    with lanes.writer(lane, timeout=60.0) as writer:
        for t in range(count):
            writer.add(written(IMAGES, 1, t))


def replay_that_breaks() -> ReplayBuffer:
    """One whose view fails once more than twenty transitions are there."""
    return replay_of(10, view=Breaking())


class Breaking(NStep):
    """A view that fails later on."""

    def read(self, ring: Any, places: Any, key: int | None = None) -> Any:
        return self.breaks_after(20, ring) or super().read(ring, places, key)

    def breaks_after(self, count: int, ring: Any) -> None:
        if ring.drawable > count:
            raise ZeroDivisionError(f"more than {count}")
