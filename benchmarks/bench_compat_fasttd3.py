"""relive.compat.fasttd3 beside FastTD3: a step of all envs, and batches of 1, 3 and 8 steps, on the CPU.

FastTD3 is in no index: `make checkouts` gets its sources.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from harness import Contender, Effort, PiecewiseCopyFloor, Workload, measure, write

N, SIZE, OBS, ACTIONS, EACH = 1024, 1000, 48, 12, 32
"""A million transitions; a batch has 32 for each env."""
CRITIC = 60
CHAIN = 64
"""So many steps are added again and again."""
SOURCES = Path(__file__).parent.parent / "build/checkouts/FastTD3/fast_td3/fast_td3_utils.py"
METHODS = {"extend": 1, "sample": 1, "sample, 3 steps": 3, "sample, 8 steps": 8, "sample, playground": 3}


@dataclass(frozen=True)
class Work:
    method: str

    @property
    def seen(self) -> int:
        """Numbers of what is observed: by the critic, if it observes more."""
        return CRITIC if self.method.endswith("playground") else OBS

    def nbytes(self) -> int:
        """What is stored of a step of all envs, or read for a batch."""
        if self.method == "extend":
            return 4 * N * (self.seen + ACTIONS + 1)
        return 4 * N * EACH * (2 * self.seen + ACTIONS + METHODS[self.method])


class Buffer:
    """A contender: one class of buffer, full."""

    def kind(self) -> Any:
        raise NotImplementedError

    def setup(self, data: Work) -> None:
        self.method, playground = data.method, data.method.endswith("playground")
        rng = torch.Generator().manual_seed(0)
        seen = torch.rand(CHAIN, N, CRITIC, generator=rng)
        seen[..., 0] = torch.arange(CHAIN)[:, None]
        done = torch.rand(CHAIN, N, generator=rng) < 1 / 200
        after = torch.where(done[..., None], torch.rand(N, CRITIC, generator=rng), seen.roll(-1, 0))
        self.steps = []
        for t in range(CHAIN):
            following = {
                "observations": after[t, :, :OBS].contiguous(), "rewards": torch.full((N,), float(t)),
                "truncations": done[t].long(), "dones": done[t].long(),
            }  # fmt: skip
            step = {"observations": seen[t, :, :OBS].contiguous(), "actions": torch.rand(N, ACTIONS, generator=rng)}
            if playground:
                following["critic_observations"], step["critic_observations"] = after[t], seen[t]
            self.steps.append(TensorDict(step | {"next": following}, [N]))
        steps = METHODS[self.method]
        self.buffer = self.kind()(N, SIZE, OBS, ACTIONS, data.seen, playground, playground, n_steps=steps, gamma=0.99)
        self.added = 0
        for _ in range(SIZE + CHAIN):
            self.extend()

    def extend(self) -> None:
        self.buffer.extend(self.steps[self.added % CHAIN])
        self.added += 1

    def run(self) -> None:
        if self.method == "extend":
            self.extend()
        else:
            self.buffer.sample(EACH)

    def check(self) -> str:
        batch, steps = self.buffer.sample(EACH), METHODS[self.method]
        first, k = batch["observations"][:, 0], batch["next", "effective_n_steps"]
        first, k, got = (x[k == steps] for x in (first, k, batch["next", "rewards"]))
        each = torch.arange(steps)
        # a sum may go on over the end of the chain, and over the seam in FastTD3's
        expected = ((first[:, None] + each) % CHAIN * 0.99**each).sum(1)
        agree = torch.isclose(got, expected, rtol=1e-4).float().mean() if len(k) else torch.zeros(())
        return "" if agree > 0.95 else "sums differ"


class Ours(Buffer):
    label, package, role = "relive.compat.fasttd3", "relive", "ours"
    note = "SimpleReplayBuffer"

    def kind(self) -> Any:
        return importlib.import_module("relive.compat.fasttd3").SimpleReplayBuffer


class Theirs(Buffer):
    label, package, role = "FastTD3", "FastTD3", "peer"
    note = "SimpleReplayBuffer of commit 229ed59"

    def kind(self) -> Any:
        spec = importlib.util.spec_from_file_location("fast_td3_utils", SOURCES) if SOURCES.is_file() else None
        if spec is None or spec.loader is None:
            raise ImportError("FastTD3: call `make checkouts`", name="FastTD3")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.SimpleReplayBuffer


def run(effort: Effort, folder: Path) -> None:
    """Measures both methods and writes `compat_fasttd3.json`."""
    floor = PiecewiseCopyFloor(lambda data: data.nbytes(), "what is stored or read")
    workloads = []
    for method in METHODS:
        contenders: list[Contender] = [floor, Ours(), Theirs()]
        workloads.append(measure(Workload(method, Work(method)), contenders, effort))
    write("compat_fasttd3", "FastTD3's replay buffer, 1024 envs", workloads, folder)
