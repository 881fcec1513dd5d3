"""relive.compat.embodichain beside EmbodiChain: collecting a rollout, GAE, the flat view, minibatches."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness import Contender, Effort, PiecewiseCopyFloor, Workload, measure, write

N, T, OBS, ACTIONS = 4096, 32, 48, 12
BATCH = 8192
FIELDS = OBS + ACTIONS + 5  # float32; flags apart


@dataclass(frozen=True)
class Work:
    method: str
    nbytes: int


class Buffer:
    """A contender: one module's buffer, filled with a rollout."""

    def parts(self) -> tuple[Any, Any, Any, Any]:
        """The class of the buffer, the view, the minibatches, GAE."""
        raise NotImplementedError

    def setup(self, data: Work) -> None:
        self.data = data
        buffer_class, self.view, self.minibatches, self.gae = self.parts()
        generator = torch.Generator().manual_seed(0)
        self.steps = {"obs": torch.rand(N, OBS, generator=generator), "action": torch.rand(N, ACTIONS)}
        self.steps |= {name: torch.rand(N, generator=generator) for name in ("sample_log_prob", "value", "reward")}
        self.steps |= {name: torch.rand(N, generator=generator) < 0.01 for name in ("terminated",)}
        self.steps |= {"truncated": torch.zeros(N, dtype=torch.bool), "done": self.steps["terminated"]}
        self.buffer = buffer_class(N, T, OBS, ACTIONS, torch.device("cpu"))
        self.rollout = self.collect()
        self.flat = self.view(self.rollout, flatten=True)

    def collect(self) -> Any:
        rollout = self.buffer.start_rollout()
        for t in range(T):
            for name, value in self.steps.items():
                rollout[name][:, t] = value
        rollout["obs"][:, T], rollout["value"][:, T] = self.steps["obs"], self.steps["value"]
        self.buffer.add(rollout)
        return self.buffer.get(flatten=False)

    def run(self) -> None:
        method = self.data.method
        if method == "collect":
            self.collect()
        elif method == "compute_gae":
            self.gae(self.rollout, 0.99, 0.95)
        elif method == "transition_view":
            self.view(self.rollout, flatten=True)
        else:
            for _ in self.minibatches(self.flat, BATCH, torch.device("cpu")):
                pass

    def check(self) -> str:
        advantage, _ = self.gae(self.rollout, 0.99, 0.95)
        total = sum(len(batch["obs"]) for batch in self.minibatches(self.flat, BATCH, torch.device("cpu")))
        expected = self.flat["reward"].view(N, T)[:, 0]
        finite = bool(advantage.isfinite().all()) and torch.equal(expected, self.steps["reward"])
        return "" if finite and total == N * T else "results differ"


class Ours(Buffer):
    label, package, role = "relive.compat.embodichain", "relive", "ours"
    note = "RolloutBuffer, compute_gae, transition_view(flatten=True), iterate_minibatches(8192)"

    def parts(self) -> tuple[Any, Any, Any, Any]:
        module = importlib.import_module("relive.compat.embodichain")
        return module.RolloutBuffer, module.transition_view, module.iterate_minibatches, module.compute_gae


class Theirs(Buffer):
    label, package, role = "embodichain", "embodichain", "peer"
    note = "the functions of the same names"

    def parts(self) -> tuple[Any, Any, Any, Any]:
        module = importlib.import_module("embodichain.learning.rl.buffer")
        common = importlib.import_module("embodichain.learning.rl.algo.common")
        return module.RolloutBuffer, module.transition_view, module.iterate_minibatches, common.compute_gae


def run(effort: Effort, folder: Path) -> None:
    """Measures the module's functions and writes `compat_embodichain.json`."""
    rollout = N * T * (4 * FIELDS + 3)
    sizes = {
        "collect": rollout,
        "compute_gae": N * T * 17,
        "transition_view": rollout,
        "iterate_minibatches": rollout,
    }
    floor = PiecewiseCopyFloor(lambda data: data.nbytes, "what is read or written")
    workloads = []
    for name, nbytes in sizes.items():
        contenders: list[Contender] = [floor, Ours(), Theirs()]
        workloads.append(measure(Workload(name, Work(name, nbytes)), contenders, effort))
    write("compat_embodichain", "EmbodiChain's rollouts, [4096, 32]", workloads, folder)
