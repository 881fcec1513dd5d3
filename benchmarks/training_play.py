"""What all trainings share: environments that cost next to nothing, small networks, and a clock for the storage."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

GAMMA, LAMBDA = 0.99, 0.95
R = TypeVar("R")


@dataclass
class Clock:
    """Adds up the time that is spent in the storage."""

    seconds: float = 0.0

    def __call__(self, call: Callable[..., R], *args: Any) -> R:
        start = time.perf_counter()
        result = call(*args)
        self.seconds += time.perf_counter() - start
        return result

    def each(self, batches: Iterable[R]) -> Iterator[R]:
        """The batches; only the time to get each one counts."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            self.seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch


@dataclass
class Env:
    """`num_envs` copies of a linear system with noise, which start again in the step that ends them.

    Episodes last `limit` steps; every other one ends in a terminal, the rest are truncated. The copies are out of step.
    """

    num_envs: int
    obs_dim: int
    action_dim: int
    limit: int = 200
    obs: Tensor = field(init=False)
    """What the next action is chosen for, `[N, D]`."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.noise = 0.1 * torch.randn(16, self.num_envs, self.obs_dim, generator=generator)
        self.mix = 0.1 * torch.randn(self.action_dim, self.obs_dim, generator=generator)
        self.obs, self.time = self.noise[0].clone(), 0
        self.age = torch.arange(self.num_envs) * 37 % self.limit
        self.episode = torch.arange(self.num_envs)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The observation after this step, even if it is an episode's last, `[N, D]`; reward; terminated; truncated."""
        self.time += 1
        after = 0.95 * self.obs + action.float() @ self.mix + self.noise[self.time % 16]
        self.age += 1
        ended, odd = self.age >= self.limit, self.episode % 2 == 1
        self.age *= ~ended
        self.episode += ended
        self.obs = torch.where(ended[:, None], self.noise[self.time % 7], after)
        return after, -after.square().mean(-1), ended & odd, ended & ~odd


def perceptron(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def improve(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of gradient descent."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def shapes_differ(batch: tuple[Tensor, ...], *shapes: tuple[int, ...]) -> str:
    """What is wrong with the shapes of a batch, if anything."""
    got = [tuple(tensor.shape) for tensor in batch]
    return "" if got == list(shapes) else f"shapes are {got}, not {list(shapes)}"


Step = tuple[Any, ...]  # reward, terminated, truncated, value, final_value: [N]


def mean_return(steps: list[Step], value: Tensor) -> float:
    """The mean of the returns that GAE gives, the plain way; `value` is that of the observations after the steps."""
    following, advantage, total = value.double(), torch.zeros(len(value), dtype=torch.float64), 0.0
    for reward, terminated, truncated, value, final_value in reversed(steps):
        if final_value is not None:
            following = torch.where(truncated, final_value.double(), following)
        delta = reward + GAMMA * following * ~terminated - value
        advantage = delta + GAMMA * LAMBDA * advantage * ~(terminated | truncated)
        total, following = total + float((advantage + value).mean()), value.double()
    return total / len(steps)


def returns_differ(returns: list[Tensor], wanted: float) -> str:
    """What is wrong with the returns of one epoch, if anything."""
    got = float(torch.cat([ret.flatten() for ret in returns]).mean())
    return "" if abs(got - wanted) < 1e-3 * abs(wanted) else f"the mean return is {got:.4g}, not {wanted:.4g}"
