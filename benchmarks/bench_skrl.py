"""relive beside skrl's memory and its advantages."""

import importlib
from pathlib import Path

import torch

from harness import Effort
from storages import (
    ADVANTAGES,
    BATCHES,
    EPOCHS,
    GAMMA,
    LAM,
    PASSES,
    REPLAY,
    REPLAY_BATCH,
    REPLAY_ENVS,
    REPLAY_STEPS,
    STEP,
    Job,
    Way,
    Work,
    report,
    served,
)

SKRL = {
    "obs": "observations", "action": "actions", "reward": "rewards", "value": "values", "next_obs": "next_observations"
}  # fmt: skip


def skrl(data: Work, replacement: bool = False) -> Job:
    kind = importlib.import_module("skrl.memories.torch").RandomMemory
    replay = data.method == REPLAY
    size = (REPLAY_STEPS, REPLAY_ENVS) if replay else (data.steps, data.envs)
    columns = {SKRL.get(name, name): c.reshape(*size, -1) for name, c in data.columns(*size).items()}
    memory = kind(memory_size=size[0], num_envs=size[1], device="cpu", replacement=replacement)
    for name, column in columns.items():
        memory.create_tensor(name=name, size=column.shape[-1], dtype=column.dtype)
    steps = [{name: column[t] for name, column in columns.items()} for t in range(size[0])]
    for step in steps:
        memory.add_samples(**step)
    added = 0

    def add() -> None:
        nonlocal added
        memory.add_samples(**steps[added % data.steps])
        added += 1

    def last() -> torch.Tensor:
        memory.reset()
        for step in steps:
            memory.add_samples(**step)
        return memory.get_tensor_by_name("rewards")[-1, :, 0]

    def advantages() -> torch.Tensor:
        module = importlib.import_module("skrl.agents.torch.ppo.ppo")
        names = {name: columns[name] for name in ("rewards", "terminated", "truncated", "values")}
        returns, _ = module.compute_gae(
            **names, last_values=data.last_value()[:, None], discount_factor=GAMMA, lambda_coefficient=LAM
        )
        return (returns - columns["values"])[..., 0]

    def passes() -> int:
        names = ["observations", "actions", "log_prob", "values", "rewards", "values"]
        rows = size[0] * size[1]
        return sum(served(memory.sample(names, batch_size=rows, mini_batches=BATCHES)) for _ in range(EPOCHS))

    def batch() -> int:
        names = ["observations", "actions", "rewards", "next_observations", "terminated"]
        return served(memory.sample(names, batch_size=REPLAY_BATCH))

    if data.method == STEP:
        return Job(add, last)
    if data.method == ADVANTAGES:
        return Job(advantages, advantages)
    count = passes if data.method == PASSES else batch
    return Job(count, lambda: torch.tensor(float(count())))


def run(effort: Effort, folder: Path) -> None:
    """Measures the parts of an iteration, and a batch of a replay, and writes `skrl.json`."""
    way = Way("skrl", "skrl", "peer", "RandomMemory", skrl)
    again = Way("skrl, replacement=True", "skrl", "peer", "RandomMemory", lambda data: skrl(data, replacement=True))
    jobs = {STEP: [way], ADVANTAGES: [way], PASSES: [way], REPLAY: [way, again]}
    report("skrl", "skrl's memory, 4096 envs, 24 steps", jobs, (24, 4096, 48, 12), (effort, folder))
