"""What `cleanrl`, `skrl` and `rl_games` measure, of which no drop-in exists, and relive's way to do it.

A rollout of T steps of N envs is filled, finished and read in minibatches; batches are drawn out of a full replay.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness import Contender, Effort, Workload, measure, write

GAMMA, LAM, EPOCHS, BATCHES = 0.99, 0.95, 4, 4
REPLAY_ENVS, REPLAY_STEPS, REPLAY_BATCH = 1024, 1000, 4096
STEP, ADVANTAGES, PASSES, REPLAY = "a step", "advantages", "4 epochs of 4 minibatches", "4096 of 1 M transitions"


@dataclass(frozen=True)
class Work:
    """A job, and the sizes of the rollout."""

    method: str
    steps: int
    envs: int
    obs: int
    actions: int

    def columns(self, steps: int | None = None, envs: int | None = None) -> dict[str, torch.Tensor]:
        """Steps by the names of relive, [T, N, ...]; one in 100 ends an episode."""
        shape, rng = (steps or self.steps, envs or self.envs), torch.Generator().manual_seed(0)
        numbers = {"obs": (self.obs,), "action": (self.actions,), "reward": (), "value": (), "log_prob": ()}
        drawn = {name: torch.randn(*shape, *size, generator=rng) for name, size in numbers.items()}
        ended = torch.rand(shape, generator=rng) < 0.01
        flags = {"terminated": ended, "truncated": torch.zeros(shape, dtype=torch.bool)}
        return drawn | flags | ({"next_obs": drawn["obs"].roll(-1, 0)} if self.method == REPLAY else {})

    def last_value(self) -> torch.Tensor:
        """V of the observations after the last step, [N]."""
        return torch.randn(self.envs, generator=torch.Generator().manual_seed(1))


class Job(NamedTuple):
    """What is timed, and the numbers that all contenders have to get: the advantages, or the rows that were served."""

    run: Callable[[], Any]
    numbers: Callable[[], torch.Tensor]


Make = Callable[[Work], Job]


@dataclass
class Way:
    """A contender: one library's way to do the job."""

    label: str
    package: str
    role: str
    note: str
    make: Make

    def setup(self, data: Work) -> None:
        self.job, self.expected = self.make(data), expected(data)

    def run(self) -> None:
        self.job.run()

    def check(self) -> str:
        numbers = self.job.numbers()
        if numbers.shape != self.expected.shape or not torch.allclose(numbers, self.expected, atol=1e-3):
            return "numbers differ"
        return ""


def expected(data: Work) -> torch.Tensor:
    """The last step's rewards; the advantages; how many rows a pass serves; how many a batch has."""
    if data.method == STEP:
        return data.columns()["reward"][-1]
    if data.method == ADVANTAGES:
        return gae(data.columns(), data.last_value())
    return torch.tensor(float(EPOCHS * data.steps * data.envs if data.method == PASSES else REPLAY_BATCH))


def gae(columns: dict[str, torch.Tensor], last_value: torch.Tensor) -> torch.Tensor:
    """Advantages by a loop over the steps, as in CleanRL's `ppo.py`; the columns have no time limits."""
    rewards, values, going_on = columns["reward"], columns["value"], 1 - columns["terminated"].float()
    advantages, trace = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        after = last_value if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + GAMMA * after * going_on[t] - values[t]
        advantages[t] = trace = delta + GAMMA * LAM * going_on[t] * trace
    return advantages


def served(batches: Any) -> int:
    """Goes through batches of tuples or mappings, and counts their rows."""
    return sum(len(batch["obs"] if not isinstance(batch, (list, tuple)) else batch[0]) for batch in batches)


def ours(data: Work) -> Job:
    relive = importlib.import_module("relive")
    flag = relive.Field((), torch.bool)
    numbers = {"obs": (data.obs,), "action": (data.actions,), "reward": (), "terminated": flag, "truncated": flag}
    if data.method == REPLAY:
        size = {"capacity": REPLAY_ENVS * REPLAY_STEPS, "num_envs": REPLAY_ENVS}
        replay = relive.ReplayBuffer(relive.Schema(numbers), **size, seed=0)
        steps = data.columns(REPLAY_STEPS, REPLAY_ENVS)
        replay.extend({name: steps[name] for name in (*numbers, "next_obs")})
        return Job(
            lambda: replay.sample(REPLAY_BATCH), lambda: torch.tensor(float(len(replay.sample(REPLAY_BATCH)["obs"])))
        )
    schema = relive.Schema({**numbers, "value": (), "log_prob": ()})
    rollout = relive.RolloutBuffer(schema, data.steps, data.envs, seed=0)
    columns, last_value = data.columns(), data.last_value()
    steps = [{name: column[t] for name, column in columns.items()} for t in range(data.steps)]
    added = 0

    def add() -> None:
        nonlocal added
        if added % data.steps == 0:
            rollout.clear()
        rollout.add(steps[added % data.steps])
        added += 1

    def filled() -> torch.Tensor:
        rollout.clear()
        for step in steps:
            rollout.add(step)
        return rollout["reward"][-1]

    def finish() -> Any:
        return rollout.finish(relive.GAE(gamma=GAMMA, lam=LAM), last_value=last_value)

    if data.method == STEP:
        return Job(add, filled)
    filled()
    finish()
    if data.method == ADVANTAGES:
        return Job(finish, lambda: finish()["advantage"])
    fields = ("obs", "action", "log_prob", "value", "return", "advantage")

    def passes() -> int:
        return served(rollout.minibatches(num_batches=BATCHES, epochs=EPOCHS, fields=fields))

    return Job(passes, lambda: torch.tensor(float(passes())))


OURS = Way("relive", "relive", "ours", "RolloutBuffer, with clear() once a rollout; ReplayBuffer", ours)


def report(name: str, title: str, jobs: dict[str, list[Way]], sizes: tuple[int, ...], run: tuple[Effort, Path]) -> None:
    """Measures each job, by our way and by the peers' that are named for it, and writes the report."""
    effort, folder = run
    workloads = []
    for method, peers in jobs.items():
        contenders: list[Contender] = [OURS, *peers]
        workloads.append(measure(Workload(method, Work(method, *sizes)), contenders, effort))
    write(name, title, workloads, folder)
