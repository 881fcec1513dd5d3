"""How much a device is told to run by one call, eager and compiled. ``docs/device.md`` shows this table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tensordict  # noqa: F401  # it computes while it is imported
import torch

from relive import Field, FrameStack, NStep, Prioritized, ReplayBuffer, Schema, returns
from support.effort import CI
from support.launches import as_compiled, as_eager, as_on_device
from support.other_device import ELSEWHERE, far_device

N, ROWS, BATCH, T = 64, 32, 256, 24
"""Two counts depend on these: GAE has passes by the bits of T, and a priority has sums by the digits of all rows."""

SCHEMA = Schema({
    "obs": (48,),
    "action": (12,),
    "reward": (),
    "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


CPU = torch.device("cpu")


class Most(NamedTuple):
    """The most that one call may have a device run."""

    eager: int
    kernels: int
    external: int
    """Of the operations that the compiler leaves to torch, such as a running sum."""


def plain(n: int) -> dict[str, Any]:
    return {"view": NStep(n)}


def by_priority() -> dict[str, Any]:
    return {"view": NStep(3), "sampler": Prioritized()}


def stacked() -> dict[str, Any]:
    return {"view": FrameStack(4, NStep(3))}


def own() -> dict[str, Any]:
    return {"view": NStep(3), "own_next_obs": True}


CASES: list[tuple[str, str, Callable[[], dict[str, Any]], Most, bool]] = [
    # what, the call, the replay, the most, whether ``.ci/run`` compiles it
    ("a step", "add", partial(plain, 3), Most(72, 15, 3), True),
    ("a step with a next observation of its own", "add", own, Most(43, 11, 1), True),
    ("a step, by priority", "add", by_priority, Most(261, 29, 3), False),
    ("a batch of single steps", "sample", partial(plain, 1), Most(162, 13, 4), True),
    ("a batch of 3 steps", "sample", partial(plain, 3), Most(183, 16, 4), True),
    ("a batch of stacks", "sample", stacked, Most(233, 17, 5), False),
    ("a batch by priority", "sample", by_priority, Most(520, 12, 0), False),
    ("errors of a batch", "update", by_priority, Most(236, 17, 0), False),
    ("GAE", "gae", dict, Most(21, 5, 0), True),
]


class Job:
    """One call of the table."""

    def __init__(self, kind: str, options: dict[str, Any], device: torch.device = CPU) -> None:
        self.kind = kind
        if kind == "gae":
            x, value, flag = torch.zeros(T, N), torch.zeros(T + 1, N), torch.zeros(T, N, dtype=torch.bool)
            x, value, flag, other = (part.to(device) for part in (x, value, flag, flag.clone()))
            self.gae = partial(returns.gae, x, value, flag, other, final_value=x)
            return
        flag, obs = torch.zeros(N, dtype=torch.bool), torch.zeros(N, 48)
        self.step = {"obs": obs, "action": torch.zeros(N, 12), "reward": torch.zeros(N), "terminated": flag,
                     "truncated": flag, "next_obs": obs}  # fmt: skip
        options = {"check_ends": False, "seed": 0, **options}
        self.replay: ReplayBuffer = as_on_device(CPU, SCHEMA, N * ROWS, N, **options)
        for _ in range(10):
            self.replay.add(self.step)
        self.index, self.errors = self.replay.sample(BATCH)["index"], torch.ones(BATCH)

    def compiled(self, backend: Any) -> Callable[[], Any]:
        if self.kind == "gae":
            return torch.compile(self.gae, fullgraph=True, backend=backend)
        self.replay.compile(backend=backend)
        return self.call

    def call(self) -> Any:
        if self.kind == "add":
            return self.replay.add(self.step)
        if self.kind == "sample":
            return self.replay.sample(BATCH)
        if self.kind == "update":
            return self.replay.update_priorities(self.index, self.errors)
        return self.gae()


@pytest.mark.parametrize(
    ("kind", "options", "most"), [pytest.param(kind, options, most, id=what) for what, kind, options, most, _ in CASES]
)
def test_a_call_is_few_operations(kind: str, options: Callable[[], dict[str, Any]], most: Most) -> None:
    with far_device() if kind == "gae" else nullcontext():  # on the CPU it is one function of the core
        launches = as_eager(Job(kind, options(), ELSEWHERE if kind == "gae" else CPU).call)
    assert len(launches) <= most.eager, Counter(launches)


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        pytest.param(kind, options, most, id=what, marks=CI if in_ci else pytest.mark.slow)
        for what, kind, options, most, in_ci in CASES
    ],
)
def test_a_compiled_call_is_few_kernels(kind: str, options: Callable[[], dict[str, Any]], most: Most) -> None:
    launches = as_compiled(Job(kind, options()).compiled)
    assert launches.kernels <= most.kernels
    assert len(launches.external) <= most.external, launches.external


PAGE = Path(__file__).parents[2] / "docs" / "device.md"


def test_the_page_shows_this_table() -> None:
    rows = [f"| {what} | {most.eager} | {most.kernels} + {most.external} |" for what, _, _, most, _ in CASES]
    page = PAGE.read_text(encoding="utf-8")
    assert [row for row in rows if row not in page] == []
