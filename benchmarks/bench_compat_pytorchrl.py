"""PyTorchRL's buffers and the drop-ins for them: each method of the one against the same method of the other."""

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from harness import Contender, Effort, Workload, measure, write

SIZE, ENVS, BATCH, SLICE, LENGTH = 50_000, 4, 256, 64, 16
NAMES = {"ReplayBuffer": "replay", "NStepReplayBuffer": "nstep", "PERBuffer": "per", "EREBuffer": "ere"}
OPTIONS: dict[str, dict[str, Any]] = {
    "ReplayBuffer": {},
    "NStepReplayBuffer": {"n_step": 3},
    "PERBuffer": {"alpha": 0.6, "beta": 0.4, "epsilon": 0.01},
    "EREBuffer": {"eta": 1.0},  # with any other, theirs fails
}
METHODS = {
    "insert": "insert_transition",
    "slice": "insert_data_slice of 64 steps",
    "learn": "insert_data_slice of 64 steps, and 16 batches of 256",
    "round": "a step, get_all_buffer_data, reset, insert_data_slice",
    "all": "get_all_buffer_data",
    "batch": "a batch of 256",
    "update": "a batch of 256, and its errors",
    "sequences": "a batch of 16 sequences of 16 steps",
}
WORKLOADS = [
    ("ReplayBuffer", "insert"), ("ReplayBuffer", "slice"), ("ReplayBuffer", "learn"), ("ReplayBuffer", "round"),
    ("ReplayBuffer", "batch"), ("ReplayBuffer", "sequences"),
    ("NStepReplayBuffer", "insert"), ("NStepReplayBuffer", "batch"), ("PERBuffer", "insert"), ("PERBuffer", "batch"),
    ("PERBuffer", "update"), ("EREBuffer", "batch"),
]  # fmt: skip


def host(name: str) -> Any:
    """PyTorchRL's class, without the environments of that package, which need an old gym."""
    spec = find_spec("pytorchrl")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("pytorchrl is not installed")
    for package in ("agent", "agent.storages", "agent.storages.off_policy"):
        module = sys.modules.setdefault(f"pytorchrl.{package}", ModuleType(f"pytorchrl.{package}"))
        module.__path__ = [str(Path(spec.submodule_search_locations[0], *package.split(".")))]
    if not hasattr(np, "Inf"):
        setattr(np, "Inf", np.inf)  # noqa: B010 - which its EREBuffer reads, and NumPy 2 no longer has
    return getattr(importlib.import_module(f"pytorchrl.agent.storages.off_policy.{NAMES[name]}_buffer"), name)


class Buffer:
    """One of two classes of one name."""

    def __init__(self, label: str, package: str, role: str) -> None:
        self.label, self.package, self.role, self.note = label, package, role, ""

    def setup(self, data: tuple[str, str]) -> None:
        name, method = data
        kind = getattr(importlib.import_module("relive.compat.pytorchrl"), name) if self.role == "ours" else host(name)
        actor = SimpleNamespace(is_recurrent=method == "sequences", sequence_overlap=0.0)
        algorithm = SimpleNamespace(gamma=0.99, update_every=LENGTH, _update_every=LENGTH)
        self.buffer = kind.create_factory(SIZE, **OPTIONS[name])("cpu", actor, algorithm, None)
        self.step = self.transition()
        self.buffer.insert_transition(dict(self.step))
        self.buffer.reset()
        self.slice = {
            key: self.repeated(value) for key, value in self.step.items() if value is not None and value != []
        }
        for _ in range(SIZE // SLICE):
            self.buffer.insert_data_slice(self.slice)
        self.buffer.before_gradients()
        self.run: Callable[[], Any] = {
            "insert": lambda: self.buffer.insert_transition(dict(self.step)),
            "slice": lambda: self.buffer.insert_data_slice(self.slice),
            "learn": self.learn,
            "round": self.round,
            "all": self.buffer.get_all_buffer_data,
            "batch": self.batch,
            "update": self.update,
            "sequences": self.batch,
        }[method]

    def transition(self) -> dict[str, Any]:
        obs, one = torch.rand(ENVS, 17), torch.zeros(ENVS, 1)
        states = {"rhs_act": torch.zeros(ENVS, 32)}
        return {
            "Observation": obs, "RecurrentHiddenStates": states, "Done": one, "Action": torch.rand(ENVS, 6),
            "Reward": one, "NextObservation": obs, "NextRecurrentHiddenStates": states, "NextDone": one,
        }  # fmt: skip

    def repeated(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.repeated(member) for key, member in value.items()}
        return np.repeat(value.numpy()[None], SLICE, 0)

    def batch(self) -> Any:
        return next(self.buffer.generate_batches(1, BATCH))

    def learn(self) -> None:
        self.buffer.insert_data_slice(self.slice)
        for batch in self.buffer.generate_batches(16, BATCH):
            assert len(batch["Reward"]) == BATCH

    def round(self) -> None:
        """What a learner that collects by itself does between two updates."""
        self.buffer.insert_transition(dict(self.step))
        data = self.buffer.get_all_buffer_data(data_to_cpu=False)
        self.buffer.reset()
        self.buffer.insert_data_slice(data)

    def update(self) -> None:
        batch = self.batch()
        self.buffer.after_gradients(batch, {"Algorithm": {"errors": torch.rand(BATCH, 1)}})

    def check(self) -> str:
        self.run()
        found = self.batch()["Observation"]
        known = {row.numpy().tobytes() for row in self.step["Observation"]}
        return "" if {row.numpy().tobytes() for row in found} <= known else "rows differ"


def run(effort: Effort, folder: Path) -> None:
    """Measures the methods and writes `compat_pytorchrl.json`."""
    workloads = []
    for name, method in WORKLOADS:
        contenders: list[Contender] = [
            Buffer("relive.compat.pytorchrl", "relive", "ours"),
            Buffer("pytorchrl", "pytorchrl", "peer"),
        ]
        workloads.append(measure(Workload(f"{name}: {METHODS[method]}", (name, method)), contenders, effort))
    write("compat_pytorchrl", "PyTorchRL's buffers", workloads, folder)
