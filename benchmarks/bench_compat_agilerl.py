"""AgileRL's rollout buffer and the drop-in for it: each method of the one against the same method of the other."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import Effort, Workload, measure, write
from rollout_data import box

STEPS, ENVS, OBS, ACTIONS, HIDDEN, LENGTH = 256, 64, 24, 4, 64, 16
DONE = 1 / 50
BATCHES = 4
METHODS = {
    "add": "add(...) of a step of 64 environments, recurrent; a full buffer is reset",
    "GAE": "compute_returns_and_advantages(...)",
    "batch of all": "get_tensor_batch()",
    "views of all": "get_tensor_batch(copy=False) of ours, get_tensor_batch() of AgileRL's",
    "batch of 256": "get_tensor_batch(256)",
    "get of 256": "get(256)",
    "chunks": "prepare_sequence_tensors(), CHUNKED, max_seq_len=16",
    "half overlap": "prepare_sequence_tensors(), FIFTY_PERCENT_OVERLAP",
    "all windows": "prepare_sequence_tensors(), MAXIMUM",
    "minibatches": "an epoch of get_minibatch_sequences, 4 batches of the chunks",
    "pickle": "pickle.dumps and loads",
}
KINDS = {"half overlap": "FIFTY_PERCENT_OVERLAP", "all windows": "MAXIMUM"}


@dataclass(frozen=True)
class Steps:
    """The same random steps for both."""

    method: str
    given: list[dict[str, Any]]

    @staticmethod
    def made(method: str) -> "Steps":
        rng = np.random.default_rng(0)

        def numbers(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        return Steps(
            method,
            [
                {
                    "obs": numbers(ENVS, OBS),
                    "action": numbers(ENVS, ACTIONS),
                    "reward": rng.normal(size=ENVS),
                    "done": rng.random(ENVS) < DONE,
                    "value": numbers(ENVS),
                    "log_prob": numbers(ENVS),
                    "next_obs": numbers(ENVS, OBS),
                    "hidden_state": {"actor": torch.from_numpy(numbers(1, ENVS, HIDDEN))},
                }
                for _ in range(STEPS)
            ],
        )


class Buffer:
    """One of the two classes."""

    def __init__(self, label: str, package: str, role: str, buffer: str, enum: str) -> None:
        self.label, self.package, self.role, self.note = label, package, role, f"{buffer}.RolloutBuffer"
        self._buffer, self._enum = buffer, enum

    def setup(self, data: Steps) -> None:
        kinds = importlib.import_module(self._enum).BPTTSequenceType
        self.buffer = importlib.import_module(self._buffer).RolloutBuffer(
            STEPS,
            box(OBS),
            box(ACTIONS),
            num_envs=ENVS,
            recurrent=True,
            hidden_state_architecture={"actor": (1, ENVS, HIDDEN)},
            max_seq_len=LENGTH,
            bptt_sequence_type=kinds[KINDS.get(data.method, "CHUNKED")],
        )
        for step in data.given:
            self.buffer.add(**step)
        self.value, self.done = data.given[0]["value"], data.given[-1]["done"]
        self.buffer.compute_returns_and_advantages(self.value, self.done)
        self.buffer.prepare_sequence_tensors()
        self.step, self._call = data.given[0], self.call(data.method)

    def run(self) -> None:
        self._call()

    def call(self, method: str) -> Callable[[], Any]:
        buffer = self.buffer
        if method == "add":
            return self.add
        if method == "minibatches":
            return self.epoch
        if method == "pickle":
            pickled = importlib.import_module("pickle")
            return lambda: pickled.loads(pickled.dumps(buffer))
        return {
            "GAE": lambda: buffer.compute_returns_and_advantages(self.value, self.done),
            "batch of all": buffer.get_tensor_batch,
            "views of all": self.views,
            "batch of 256": lambda: buffer.get_tensor_batch(256),
            "get of 256": lambda: buffer.get(256),
        }.get(method, buffer.prepare_sequence_tensors)

    def add(self) -> None:
        if self.buffer.full:
            self.buffer.reset()
        self.buffer.add(**self.step)

    def views(self) -> Any:
        return self.buffer.get_tensor_batch(**({"copy": False} if self.role == "ours" else {}))

    def epoch(self) -> None:
        for _ in self.buffer.get_minibatch_sequences(-(-self.buffer.num_sequences // BATCHES)):
            pass

    def check(self) -> str:
        """Whether the columns are those that were added; returns are AgileRL's own, and differ."""
        self.run()
        return (
            ""
            if torch.equal(self.buffer.buffer["actions"][0], torch.from_numpy(self.step["action"]))
            else "rows differ"
        )


def run(effort: Effort, folder: Path) -> None:
    """Measures the methods and writes `compat_agilerl.json`."""
    workloads = []
    for method in METHODS:
        contenders = [
            Buffer("relive.compat.agilerl", "relive", "ours", "relive.compat.agilerl", "relive.compat.agilerl"),
            Buffer("agilerl", "agilerl", "peer", "agilerl.components.rollout_buffer", "agilerl.typing"),
        ]
        workloads.append(measure(Workload(method, Steps.made(method)), contenders, effort))
    write("compat_agilerl", f"AgileRL's rollout buffer, ({STEPS}, {ENVS})", workloads, folder)
