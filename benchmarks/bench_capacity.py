"""`sample` from 10 k to 10 M small transitions: the cost may grow by cache misses, as the floor's does, not by more."""

from dataclasses import replace
from pathlib import Path

import hand_written
from bench_replay_sample import EACH, relive_line, relive_prioritized
from harness import Effort, Workload, measure, write
from replay_data import GatherFloor, Line, Made, Transitions

SIZES = {"10 k": 10_000, "100 k": 100_000, "1 M": 1_000_000, "10 M": 10_000_000}
ENVS = 100
ROW, NEXT = 48, 16  # bytes of a packed row with its bookkeeping, and of the next observation


def prioritized(data: Transitions) -> Made:
    return relive_prioritized(reuse=False)(replace(data, prioritized=True))


def run(effort: Effort, folder: Path) -> None:
    """Measures `sample` at four capacities and writes `capacity.json`."""
    uniform = relive_line(envs=ENVS)
    lines = ("relive, uniform", "Uniform().sample", uniform), ("relive, prioritized", "and the update", prioritized)
    workloads = []
    for name, rows in SIZES.items():
        data = Transitions(rows, ENVS, obs_shape=(4,), action_dim=1)
        contenders = [Line(label, "relive", note, make, "ours") for label, note, make in lines]
        contenders += [hand_written.line("index_select", f"index_select {EACH}", hand_written.by_index_select)]
        workloads.append(measure(Workload(name, data, after=True), [GatherFloor(ROW, NEXT), *contenders], effort))
    write("capacity", "256 transitions, obs 4, of", workloads, folder)
