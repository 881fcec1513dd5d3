"""What is served, beside what a plain loop draws ahead."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from relive import ReplayBuffer
from twins import same_batches

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
