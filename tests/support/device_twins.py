"""A replay in RAM and one on a device, which are told the same and have to give the same, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import relive.replay.buffer
from relive import Field, ReplayBuffer, Schema, SequenceBatch
from relive.batches import leaves_by_path
from relive.memory.device import DeviceRows
from relive.steps.arrays import numpy_view

SCHEMA = Schema({
    "obs": {"x": (5,), "camera": Field((3, 400), torch.uint8), "half": Field((3,), torch.bfloat16)},
    "action": (2,),
    "reward": (),
    "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip

WORLDS = [
    # envs, rows, n, odds of an end
    (1, 4, 1, 0.3),
    (1, 50, 3, 0.05),
    (4, 9, 1, 0.5),
    (4, 64, 8, 0.1),
    (32, 7, 3, 0.02),
    (64, 20, 5, 0.0),
]


class Twins:
    """A replay in RAM and one on a device, which are told the same; every step comes with a next observation."""

    def __init__(
        self, device: torch.device, envs: int, rows: int, seed: int, schema: Schema = SCHEMA, **options: Any
    ) -> None:
        self.schema = schema
        self.rng, self.envs, self.device = np.random.default_rng(seed), envs, device
        parts = lambda: {name: make() for name, make in options.items() if callable(make)}  # noqa: E731
        rest = {name: value for name, value in options.items() if not callable(value)}
        self.ram = ReplayBuffer(schema, envs * rows, envs, seed=seed, check_ends=False, **parts(), **rest)
        patch = pytest.MonkeyPatch()
        if device.type == "cpu":
            patch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, device))
        there = ReplayBuffer(schema, envs * rows, envs, seed=seed, check_ends=False, device=device, **parts(), **rest)
        patch.undo()
        self.there = there

    def step(self, odds: float) -> dict[str, Any]:
        def leaf(path: tuple[str, ...]) -> Tensor:
            field = self.schema.leaves[path]
            shape = self.envs, *field.shape
            if field.dtype is torch.uint8:  # wide frames: ten times as quick as normal numbers
                return torch.from_numpy(self.rng.integers(0, 256, shape, np.uint8))
            numbers = torch.from_numpy(self.rng.standard_normal(shape))
            return numbers < -3 if field.dtype is torch.bool else (numbers * 50).to(field.dtype)

        step: dict[str, Any] = {name: self.schema.rebuild(name, leaf) for name in self.schema.names}
        step["next_obs"] = self.schema.rebuild("obs", leaf)
        for flag in ("terminated", "truncated"):
            step[flag] = torch.from_numpy(self.rng.random(self.envs) < odds)
        return step

    def add(self, odds: float = 0.05) -> None:
        step = self.step(odds)
        self.ram.add(step)
        self.there.add(self.far(step))

    def add_to_some(self, envs: list[int], odds: float = 0.2) -> None:
        """A step of some envs alone, which is the host's turn."""
        some = {name: rows(value, envs) for name, value in self.step(odds).items()}
        self.ram.add(some, envs=envs)
        self.there.add(self.far(some), envs=envs)

    def far(self, step: Any) -> Any:
        if isinstance(step, dict):
            return {name: self.far(value) for name, value in step.items()}
        return torch.as_tensor(step).to(self.device)

    def batches(self, count: int) -> tuple[Any, Any]:
        """A batch of each, which are the same."""
        ours, theirs = self.ram.sample(count), self.there.sample(count)
        assert_same(ours, theirs)
        return ours, theirs

    def update(self, ours: Any, theirs: Any) -> None:
        """Errors for a batch, some rows of which come twice."""
        errors = torch.from_numpy(self.rng.gamma(1.0, 2.0, len(ours)).astype(np.float32))
        late = self.ram.update_priorities(ours["index"], errors)
        assert int(self.there.update_priorities(theirs["index"], self.far(errors))) == late

    def hold_compiled(self, count: int, adds: int, first: int) -> None:
        """So many steps; after the first ones some batches of a compiled replay, which are those of one in RAM."""
        torch.compiler.reset()  # else shapes of earlier tests become variables, which torch cannot always order
        self.there.compile()
        for t in range(adds):
            self.add(0.1)
            if t > first and t % 4 == 0:
                ours, theirs = self.batches(count)
                if self.ram.has_priorities:
                    self.update(ours, theirs)
        self.check()

    def check(self) -> None:
        """All that is stored is the same."""
        self.there.check()
        assert self.there.stats() == self.ram.stats()
        assert_same(self.ram.data(), self.there.data())


def assert_same(ours: Any, theirs: Any) -> None:
    one, other = tensors_of(ours), tensors_of(theirs)
    assert list(one) == list(other)
    for name, tensor in one.items():
        there = other[name].cpu()
        assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape), name
        assert bits(there) == bits(tensor), name


def tensors_of(batch: Any) -> dict[Any, Tensor]:
    if not isinstance(batch, SequenceBatch):
        return leaves_by_path(batch)
    leaves, facts, hidden = batch.parts
    return {**leaves, **facts, **{("hidden", name): state for name, state in (hidden or {}).items()}}


def bits(tensor: Tensor) -> bytes:
    return np.ascontiguousarray(numpy_view(tensor)).tobytes()


def rows(value: Any, chosen: list[int]) -> Any:
    return {name: rows(part, chosen) for name, part in value.items()} if isinstance(value, dict) else value[chosen]
