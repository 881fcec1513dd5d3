"""relive beside what CleanRL's `ppo.py` does in its script, by the same operations."""

from pathlib import Path

import numpy as np
import torch

from harness import Effort
from storages import ADVANTAGES, BATCHES, EPOCHS, PASSES, STEP, Job, Way, Work, gae, report


def cleanrl(data: Work) -> Job:
    columns, last_value = data.columns(), data.last_value()
    rows = data.steps * data.envs
    stored = {name: torch.zeros_like(column) for name, column in columns.items()}
    added = 0

    def add(t: int | None = None) -> None:
        nonlocal added
        t = added % data.steps if t is None else t
        for name, column in columns.items():
            stored[name][t] = column[t]
        added += 1

    def passes() -> int:
        names = ("obs", "action", "log_prob", "value", "reward", "value")
        flat = [columns[name].reshape(rows, *columns[name].shape[2:]) for name in names]
        order, total, rng = np.arange(rows), 0, np.random.RandomState(0)  # what np.random.shuffle is a method of
        for _ in range(EPOCHS):
            rng.shuffle(order)
            for start in range(0, rows, rows // BATCHES):
                batch = [column[order[start : start + rows // BATCHES]] for column in flat]
                total += len(batch[0])
        return total

    if data.method == STEP:
        return Job(add, lambda: (add(data.steps - 1), stored["reward"][-1])[1])
    if data.method == ADVANTAGES:
        return Job(lambda: gae(columns, last_value), lambda: gae(columns, last_value))
    return Job(passes, lambda: torch.tensor(float(passes())))


def run(effort: Effort, folder: Path) -> None:
    """Measures the parts of an iteration and writes `cleanrl.json`."""
    way = Way("what ppo.py does", "torch", "peer", "columns of tensors, and loops", cleanrl)
    jobs = {job: [way] for job in (STEP, ADVANTAGES, PASSES)}
    report("cleanrl", "CleanRL's ppo.py, 8 envs, 128 steps", jobs, (128, 8, 17, 6), (effort, folder))
