"""Whole trainings: how long they take, and how much of that is spent in the storage.

Every library stores the same experience for the same learner, with the same networks and the same schedule. The
environments cost next to nothing, so the share of the storage is larger here than with real ones.
"""

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import harness
import training_dqn as dqn
import training_ppo as ppo
import training_r2d2 as r2d2
import training_recurrent as recurrent
import training_sac as sac
from training_play import Clock

FLOOR = "the same training with ready batches"
LIBRARIES = {
    "Relive": "relive", "StableBaselines3": "stable-baselines3", "Tianshou": "tianshou", "TorchRl": "torchrl",
    "RslRl": "rsl-rl-lib", "Cpprb": "cpprb",
}  # fmt: skip


@dataclass
class Training:
    """One library in one training."""

    label: str
    package: str
    role: str
    make: Callable[[], Any]
    """A new, empty storage."""
    walls: list[float] = field(default_factory=list[float])
    storages: list[float] = field(default_factory=list[float])
    status: str = "ok"
    check: str = ""

    def train(self, work: Any, kept: bool) -> None:
        """A whole training; the first one only warms up."""
        clock = Clock()
        storage = self.make()
        gc.collect()
        start = time.perf_counter()
        self.check = work.learn(storage, clock) or "agrees"
        if kept:
            self.walls.append(time.perf_counter() - start)
            self.storages.append(clock.seconds)

    def described(self) -> dict[str, Any]:
        """The JSON of its line."""
        adapter = self.make.func  # pyright: ignore[reportFunctionMemberAccess]
        note = f"{adapter.__module__}.{adapter.__name__}"
        line: dict[str, Any] = {"label": self.label, "role": self.role, "note": note, "status": self.status}
        if self.package:
            line["package"] = self.package
        if self.status != "ok":
            return line
        if self.package:
            line["version"] = harness.version_of(self.package)
        quarters = statistics.quantiles(self.walls, n=4) if len(self.walls) > 1 else self.walls * 3
        line |= {"median": statistics.median(self.walls), "q1": quarters[0], "q3": quarters[2]}
        if self.role != "floor":
            line |= {"storage": statistics.median(self.storages), "check": self.check}  # seconds
        return line


def train_in_turn(lines: list[Training], work: Any, rounds: int) -> None:
    """Every library trains once per round, each round beginning with another one; a first round warms up."""
    for number in range(rounds + 1):
        shift = number % len(lines)
        for line in [*lines[shift:], *lines[:shift]]:
            if line.status != "ok":
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    line.train(work, kept=number > 0)
            except Exception as error:
                print(f"{line.label}: {type(error).__name__}: {error}", file=sys.stderr)
                absent = isinstance(error, ImportError) and line.role != "ours"
                line.status = f"{'not installed' if absent else 'failed'}: {harness.reason(error)}"


def best_stored(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The peer whose storage takes the least time: all else is the same learner, and varies from run to run."""
    stored = {line["label"]: line["storage"] for line in lines if "storage" in line}
    ours = stored.pop("relive", None)
    best = min(stored, key=lambda label: stored[label], default=None)
    return {"best_peer": best, "best_peer_over_ours": stored[best] / ours if best and ours else None}


def measured(name: str, module: Any, work: Any, rounds: int) -> dict[str, Any]:
    """One column of the table."""
    lines = [Training(FLOOR, "", "floor", partial(module.Ready, work))]
    for adapter, package in LIBRARIES.items():
        if hasattr(module, adapter):
            role = "ours" if package == "relive" else "peer"
            label = "rsl-rl" if package == "rsl-rl-lib" else package
            lines.append(Training(label, package, role, partial(getattr(module, adapter), work)))
    train_in_turn(lines, work, rounds)
    described = [line.described() for line in lines]
    summary = harness.summarize(described) | best_stored(described)
    result = {"name": name, "rounds": rounds} | summary | {"lines": described}
    for line in described:
        wall = f"{line['median']:.3f} s, {line.get('storage', 0):.3f} s in storage" if "median" in line else ""
        print(f"  {name:<24}{line['label']:<44}{wall} {line.get('check', line['status'])}")
    return result


def run(effort: harness.Effort, folder: Path) -> None:
    """Trains everything and writes `trainings.json`."""
    harness.one_thread()
    rounds = 5 if effort.rounds > 10 else 1
    part = 1 if effort.rounds > 10 else 4  # a smoke run is a quarter as long
    trainings = [
        ("PPO, 8 envs", ppo, ppo.Ppo(8, 256, 17, 6, updates=12 // part)),
        ("PPO, 4096 envs", ppo, ppo.Ppo(4096, 24, 48, 12, updates=max(1, 6 // part))),
        ("recurrent PPO, 256 envs", recurrent, recurrent.RecurrentPpo(256, 64, 17, 6, max(1, 3 // part), epochs=3)),
        ("DQN, 8 envs", dqn, dqn.Dqn(8, 2000 // part)),
        ("SAC with hindsight", sac, sac.Sac(1000 // part)),
        ("R2D2, 16 envs", r2d2, r2d2.R2d2(16, 800 // part)),
    ]
    workloads = [measured(name, module, work, rounds) for name, module, work in trainings]
    harness.write("trainings", "a whole training", workloads, folder)
