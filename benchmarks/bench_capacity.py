"""`sample` from 10 k to 10 M small transitions: the cost may grow by cache misses, as the floor's does, not by more."""

from dataclasses import replace
from pathlib import Path

import torch

from harness import Effort, Workload, measure, write
from replay_data import BATCH, GatherFloor, Line, Made, Transitions, relive_replay, td_errors

SIZES = {"10 k": 10_000, "100 k": 100_000, "1 M": 1_000_000, "10 M": 10_000_000}
ENVS = 100
ROW, NEXT = 48, 16  # bytes of a packed row with its bookkeeping, and of the next observation


def sampling(data: Transitions) -> Made:
    replay = relive_replay(data)

    def check() -> str:
        batch = replay.sample(BATCH)
        return data.wrong(batch["obs"], batch["reward"], batch["next_obs"])

    return lambda: replay.sample(BATCH), check


def prioritized(data: Transitions) -> Made:
    data = replace(data, prioritized=True)
    replay, errors = relive_replay(data), torch.from_numpy(td_errors())

    def run() -> None:
        replay.update_priorities(replay.sample(BATCH)["index"], errors)

    def check() -> str:
        batch = replay.sample(BATCH)
        return data.wrong(batch["obs"], batch["reward"], batch["next_obs"])

    return run, check


def run(effort: Effort, folder: Path) -> None:
    """Measures `sample` at four capacities and writes `capacity.json`."""
    lines = ("relive, uniform", "Uniform().sample", sampling), ("relive, prioritized", "and the update", prioritized)
    workloads = []
    for name, rows in SIZES.items():
        data = Transitions(rows, ENVS, obs_shape=(4,), action_dim=1)
        contenders = [Line(label, "relive", note, make, "ours") for label, note, make in lines]
        workloads.append(measure(Workload(name, data), [GatherFloor(ROW, NEXT), *contenders], effort))
    write("capacity", "256 transitions, obs 4, of", workloads, folder)
