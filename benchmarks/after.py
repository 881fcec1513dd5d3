"""Times single operations right after a learner's step, as a training does them.

In a loop of nothing else, an operation finds its code and its data in the processor's caches. In a training the
learner's step has just replaced both. A contender whose `run` does several operations goes through them by `steps` or
`batches`, which make room for a learner's step before each.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

BATCH, WIDTH, INPUTS, OUTPUTS = 256, 256, 17, 6


class Learner:
    """An update of a small network: two layers of 256, a batch of 256, Adam."""

    def __init__(self) -> None:
        layers = [nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, OUTPUTS)]
        self.network = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.inputs, self.targets = torch.randn(BATCH, INPUTS), torch.randn(BATCH, OUTPUTS)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step(self) -> None:
        loss = (self.network(self.inputs) - self.targets).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class Pace:
    """Takes the times of at least `wanted` operations, each right after a step of the learner."""

    def __init__(self, learner: Learner, wanted: int, units: int) -> None:
        self.learner, self.wanted, self.units = learner, wanted, units
        self.seconds: list[float] = []  # of a unit
        self.done, self.used = 0, False

    def steps(self, count: int) -> Iterator[int]:
        """0, 1, ...; what the loop's body takes is what counts."""
        self.used = True
        for number in range(min(count, self.wanted - self.done)):
            self.learner.step()
            start = time.perf_counter_ns()
            yield number
            self.seconds.append((time.perf_counter_ns() - start) * 1e-9)
            self.done += 1

    def batches(self, made: Iterable[Any]) -> Iterator[Any]:
        """The same batches; what making all of them takes is what counts, for the first one may work for all."""
        self.used = True
        source, total = iter(made), 0
        while True:
            self.learner.step()
            start = time.perf_counter_ns()
            batch = next(source, self)
            total += time.perf_counter_ns() - start
            if batch is self:
                break
            self.done += 1
            yield batch
        self.seconds.append(total * 1e-9 / self.units)

    def run(self, run: Callable[[], None]) -> list[float]:
        """Seconds of a unit; a `run` that uses neither `steps` nor `batches` is one operation."""
        while self.done < self.wanted:
            self.learner.step()
            start = time.perf_counter_ns()
            run()
            if not self.used:
                self.seconds.append((time.perf_counter_ns() - start) * 1e-9)
                self.done += 1
        return self.seconds


pace: Pace | None = None
"""What times the operations of a `run` one by one, while that is wanted."""


def steps(count: int) -> Iterable[int]:
    """`range(count)`, for a `run` that does one operation in the body of its loop."""
    return range(count) if pace is None else pace.steps(count)


def batches(made: Iterable[Any]) -> Iterable[Any]:
    """The same batches, for a `run` whose operations are to make the next one."""
    return made if pace is None else pace.batches(made)


def sample(run: Callable[[], None], learner: Learner, wanted: int, units: int) -> list[float]:
    """Seconds of a unit, of at least `wanted` operations that each follow a step of the learner."""
    global pace
    pace = Pace(learner, wanted, units)
    try:
        return pace.run(run)
    finally:
        pace = None
