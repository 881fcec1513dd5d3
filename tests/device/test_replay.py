"""Replays on a device give the batches of replays in RAM, to the bit, and ask the host for nothing on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import inside
import relive.replay.buffer
from effort import often
from elsewhere import ELSEWHERE, far_device, no_waiting
from relive import Field, FrameStack, NStep, Prioritized, ReplayBuffer, Schema, Uniform
from relive.memory.device import DeviceRows

SCHEMA = Schema({
    "obs": {"x": (5,), "camera": Field((3, 400), torch.uint8), "half": Field((3,), torch.bfloat16)},
    "action": (2,),
    "reward": (),
    "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip

PLACES = ["cpu", "stand-in", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Each device on which a replay has its rows; the CPU is made one."""
    if request.param == "stand-in":
        with far_device():
            yield ELSEWHERE
        return
    chosen = torch.empty(0, device=request.param).device
    if chosen.type == "cpu":
        monkeypatch.setattr(relive.replay.buffer, "DeviceRows", DeviceRows)
    yield chosen


class Twins:
    """A replay in RAM and one on a device, which are told the same; every step comes with a next observation."""

    def __init__(self, device: torch.device, envs: int, rows: int, seed: int, **options: Any) -> None:
        self.rng, self.envs, self.device = np.random.default_rng(seed), envs, device
        parts = lambda: {name: make() for name, make in options.items() if callable(make)}  # noqa: E731
        rest = {name: value for name, value in options.items() if not callable(value)}
        self.ram = ReplayBuffer(SCHEMA, envs * rows, envs, seed=seed, check_ends=False, **parts(), **rest)
        patch = pytest.MonkeyPatch()
        if device.type == "cpu":
            patch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, device))
        there = ReplayBuffer(SCHEMA, envs * rows, envs, seed=seed, check_ends=False, device=device, **parts(), **rest)
        patch.undo()
        self.there = there

    def step(self, odds: float) -> dict[str, Any]:
        def leaf(path: tuple[str, ...]) -> Tensor:
            field = SCHEMA.leaves[path]
            numbers = torch.from_numpy(self.rng.standard_normal((self.envs, *field.shape)))
            return numbers < -3 if field.dtype is torch.bool else (numbers * 50).to(field.dtype)

        step: dict[str, Any] = {name: SCHEMA.rebuild(name, leaf) for name in SCHEMA.names}
        step["next_obs"] = SCHEMA.rebuild("obs", leaf)
        for flag in ("terminated", "truncated"):
            step[flag] = torch.from_numpy(self.rng.random(self.envs) < odds)
        return step

    def add(self, odds: float = 0.05) -> None:
        step = self.step(odds)
        self.ram.add(step)
        self.there.add(self.far(step))

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

    def check(self) -> None:
        """All that is stored is the same."""
        self.there.check()
        assert self.there.stats() == self.ram.stats()
        assert_same(self.ram.data(), self.there.data())


def assert_same(ours: Any, theirs: Any) -> None:
    one, other = (dict(batch.items(include_nested=True, leaves_only=True)) for batch in (ours, theirs))
    assert list(one) == list(other)
    for name, tensor in one.items():
        there = other[name].cpu()
        assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape), name
        assert there.contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)), name


WORLDS = [
    # envs, rows, n, odds of an end
    (1, 4, 1, 0.3),
    (1, 50, 3, 0.05),
    (4, 9, 1, 0.5),
    (4, 64, 8, 0.1),
    (32, 7, 3, 0.02),
    (64, 20, 5, 0.0),
]


@pytest.mark.parametrize(("envs", "rows", "n", "odds"), WORLDS)
@pytest.mark.parametrize(("depth", "pad", "keys"), [(2, "repeat", None), (3, "zeros", ("camera",))])
def test_stacks_are_those_of_a_replay_in_ram(
    device: torch.device, depth: int, pad: Any, keys: Any, envs: int, rows: int, n: int, odds: float
) -> None:
    twins = Twins(device, envs, rows, seed=rows, view=lambda: FrameStack(depth, NStep(n, 0.9), pad, keys))
    for t in range(4 * rows):
        twins.add(odds)
        if t > 2 and len(twins.ram) * 3 > envs * min(t, rows):
            with no_waiting() as watch:
                watch.allow = not inside.is_ahead(twins.there)
                theirs = twins.there.sample(20)
            assert_same(twins.ram.sample(20), theirs)
    twins.check()


@pytest.mark.parametrize(("envs", "rows", "n", "odds"), WORLDS)
@pytest.mark.parametrize("form", ["shared", "own", "unordered"])
@pytest.mark.parametrize("sampler", [Uniform, Prioritized, lambda: Prioritized(0.7, (0.3, 1.0, 9), stratified=False)])
def test_batches_are_those_of_a_replay_in_ram(
    device: torch.device, sampler: Any, form: str, envs: int, rows: int, n: int, odds: float
) -> None:
    options: dict[str, Any] = {"own": {"own_next_obs": True}, "unordered": {"ordered": False}}.get(form, {})
    n = 1 if form == "unordered" else n
    twins = Twins(device, envs, rows, seed=envs * rows, sampler=sampler, view=lambda: NStep(n, 0.97), **options)
    for t in range(often(3, 9) * rows // 2 if rows > 9 else 5 * rows):
        twins.add(odds)
        if t < 2 or t % 3:
            continue
        with no_waiting() if t > 5 else no_waiting(allow=True):
            theirs = twins.there.sample(70)
        assert t < 6 or inside.is_ahead(twins.there)
        ours = twins.ram.sample(70)
        assert_same(ours, theirs)
        if twins.ram.has_priorities:
            twins.update(ours, theirs)
    twins.check()
    assert_same(*twins.batches(33))
