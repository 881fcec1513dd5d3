"""Velora's replay buffer and the drop-in for it: each method of the one against the same method of the other.

Velora does not go with the other peers: `make hosts` makes .venv-velora, whose Python runs this one.
"""

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from harness import Effort, Workload, measure, write

CAPACITY, STATE, ACTION, HIDDEN, BATCH, ENVS = 1_000_000, 17, 6, 64, 256, 8
SAVED = 20_000
METHODS = {
    "add": "add of one transition",
    "add_multi": "add_multi of 8",
    "sample": "sample(256) of 1 M transitions",
    "save": "save of 20 k transitions",
    "load": "load of 20 k transitions",  # theirs maps the file, and reads what is asked for when it is
    "load, and 1000 batches": "load of 20 k transitions, and 1000 batches of 256",
}


class Buffer:
    """One of the two classes."""

    def __init__(self, label: str, package: str, role: str, module: str) -> None:
        self.label, self.package, self.role, self.note = label, package, role, f"{module}.ReplayBuffer"
        self._module = module

    def setup(self, data: str) -> None:
        method = data
        if self.package == "velora":
            importlib.import_module("velora.models")  # without which its buffer cannot be imported
        self.kind = importlib.import_module(self._module).ReplayBuffer
        of_files = method not in ("add", "add_multi", "sample")
        capacity = SAVED if of_files else CAPACITY
        self.buffer = self.kind(capacity, STATE, ACTION, HIDDEN)
        self.rows = [torch.rand(ENVS, size) for size in (STATE, ACTION, 1, STATE, 1, HIDDEN)]
        block = [rows.repeat(1000, 1) for rows in self.rows]
        for _ in range(capacity // len(block[0]) + 1):
            self.buffer.add_multi(*block)
        state, action, reward, following, _, hidden = (rows[:1] for rows in self.rows)
        self.row = state[0], action, reward.item(), following[0], False, hidden
        self.folder = Path(tempfile.mkdtemp())
        self.buffer.save(self.folder) if of_files else None
        self._call = self.call(method)

    def run(self) -> None:
        self._call()

    def call(self, method: str) -> Callable[[], Any]:
        if method.startswith("load"):
            metadata = json.loads((self.folder / "buffer_metadata.json").read_text())
            return lambda: self.load(metadata, 0 if method == "load" else 1000)
        return {
            "add": lambda: self.buffer.add(*self.row),
            "add_multi": lambda: self.buffer.add_multi(*self.rows),
            "sample": lambda: self.buffer.sample(BATCH),
            "save": lambda: self.buffer.save(self.folder),
        }[method]

    def load(self, metadata: dict[str, Any], batches: int) -> None:
        buffer = self.kind.load(self.folder / "buffer_state", metadata)
        for _ in range(batches):
            buffer.sample(BATCH)

    def check(self) -> str:
        self.run()
        known = set(self.rows[2].flatten().tolist())
        return "" if set(self.buffer.sample(BATCH).rewards.flatten().tolist()) <= known else "rows differ"

    def __del__(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)


def run(effort: Effort, folder: Path) -> None:
    """Measures the methods and writes `compat_velora.json`."""
    workloads = []
    for method in METHODS:
        contenders = [
            Buffer("relive.compat.velora", "relive", "ours", "relive.compat.velora"),
            Buffer("velora", "velora", "peer", "velora.buffer"),
        ]
        workloads.append(measure(Workload(method, method), contenders, effort))
    write("compat_velora", "Velora's replay buffer", workloads, folder)
