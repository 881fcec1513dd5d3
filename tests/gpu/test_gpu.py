"""On a GPU: batches have the bits of a replay in RAM, no call waits, and all of them can be captured in a CUDA graph.

``make test-gpu`` runs these tests on a GPU, with those of other folders that take a device. Without one they are
skipped, and run on the CPU: there a watch raises where a call would wait, and a tape stands in for the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import tensordict  # noqa: F401  # it computes while it is imported
import torch
from torch import Tensor

from relive import (
    GAE,
    Field,
    FrameStack,
    NStep,
    Prioritized,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
    Uniform,
    returns,
)
from relive.batches import leaves_by_path
from support import internals
from support.device_twins import SCHEMA, assert_same
from support.effort import in_ci, often
from support.launches import as_on_device
from support.other_device import no_waiting, place
from support.tapes import Tape

N, ROWS, BATCH = 64, 40, 96
FLAG = Field((), torch.bool)

EXACT = {"emulate_precision_casts": True}
"""Options of the compiler for GPUs: without this one it joins a product and a sum, which then have other bits."""

REPLAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "uniform": lambda: {"sampler": Uniform(), "view": NStep(1)},
    "3 steps": lambda: {"sampler": Uniform(), "view": NStep(3, 0.97)},
    "own next": lambda: {"sampler": Uniform(), "view": NStep(3, 0.97), "own_next_obs": True},
    "stacks": lambda: {"sampler": Uniform(), "view": FrameStack(3, NStep(3, 0.9), "zeros", ("camera",))},
    "by priority": lambda: {"sampler": Prioritized(0.7, (0.3, 1.0, 20)), "view": NStep(3, 0.97)},
    "by priority, not stratified": lambda: {"sampler": Prioritized(stratified=False), "view": NStep(1)},
}


ON_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.fixture(params=[in_ci("cpu"), ON_GPU])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.empty(0, device=request.param).device


@contextmanager
def no_sync(device: torch.device) -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises an error."""
    if device.type != "cuda":
        with no_waiting():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(device: torch.device, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """What replays the operations of a call, and the tensors that it gives each time."""
    if device.type != "cuda":
        with Tape() as tape:
            result = call()
        return tape.replay, result
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


class Twins:
    """A replay in RAM and one on the device, which are told the same."""

    def __init__(self, device: torch.device, name: str, compiled: bool = False) -> None:
        self.device, self.rng = device, np.random.default_rng(3)
        options: dict[str, Any] = {"seed": 3, "check_ends": False}
        self.ram = ReplayBuffer(SCHEMA, N * ROWS, N, **options, **REPLAYS[name]())
        self.there = as_on_device(device, SCHEMA, N * ROWS, N, **options, **REPLAYS[name]())
        if compiled:
            self.there.compile(options=EXACT)

    def step(self) -> dict[str, Any]:
        def leaf(path: tuple[str, ...]) -> Tensor:
            field = SCHEMA.leaves[path]
            numbers = torch.from_numpy(self.rng.standard_normal((N, *field.shape)))
            return numbers < -1.5 if field.dtype is torch.bool else (numbers * 50).to(field.dtype)

        step: dict[str, Any] = {name: SCHEMA.rebuild(name, leaf) for name in SCHEMA.names}
        return step | {"next_obs": SCHEMA.rebuild("obs", leaf)}

    def errors(self) -> Tensor:
        return torch.from_numpy(self.rng.gamma(1.0, 2.0, BATCH).astype(np.float32))

    def turn(self, wait: bool = False) -> None:
        """A step, a batch and its errors in both; on the device without waiting for it, but for the first ones."""
        step, errors = self.step(), self.errors()
        far, far_errors = there(step, self.device), there(errors, self.device)
        if wait:
            late, batch = self.act(far, far_errors)
        else:
            with no_sync(self.device):
                late, batch = self.act(far, far_errors)
        self.ram.add(step)
        expected = self.ram.sample(BATCH)
        assert_same(expected, batch)
        if late is not None:
            assert int(late) == self.ram.update_priorities(expected["index"], errors)

    def act(self, step: dict[str, Any], errors: Tensor) -> tuple[Any, Any]:
        self.there.add(step)
        batch = self.there.sample(BATCH)
        rated = self.there.has_priorities
        return self.there.update_priorities(batch["index"], errors) if rated else None, batch

    def check(self) -> None:
        """All that is stored is the same."""
        self.there.check()
        assert self.there.stats() == self.ram.stats()
        assert_same(self.ram.data(), self.there.data())


def there(value: Any, device: torch.device) -> Any:
    """Copies on a device."""
    if isinstance(value, dict):
        return {name: there(part, device) for name, part in value.items()}
    return value.to(device, copy=True)


def begun(device: torch.device, name: str, compiled: bool = False) -> Twins:
    """Twins with some steps, whose calls are compiled and whose bookkeeping is on the device."""
    twins = Twins(device, name, compiled)
    for _ in range(6):
        step = twins.step()
        twins.ram.add(step)
        twins.there.add(there(step, device))
    for _ in range(3):
        twins.turn(wait=True)
    return twins


@pytest.mark.parametrize("name", REPLAYS)
def test_batches_are_those_in_ram_and_no_call_waits(device: torch.device, name: str) -> None:
    play(begun(device, name))


@pytest.mark.parametrize("name", REPLAYS)
@pytest.mark.parametrize("device", [ON_GPU], indirect=True)  # the CPU's are in tests/device
def test_compiled_batches_are_those_in_ram(device: torch.device, name: str) -> None:
    play(begun(device, name, compiled=True))


def play(twins: Twins) -> None:
    for _ in range(often(5, 12) * ROWS // 4):  # the ring wraps
        twins.turn()
    assert internals.is_ahead(twins.there)
    twins.check()
    twins.turn(wait=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", [ON_GPU], indirect=True)  # the CPU's are in tests/device
def test_calls_may_be_made_in_any_mode(device: torch.device, compiled: bool) -> None:
    """What is captured in one mode of torch serves in all."""
    twins = begun(device, "by priority", compiled)
    modes = [
        torch.inference_mode, torch.no_grad, torch.enable_grad,
        lambda: torch.autocast("cuda", torch.bfloat16), lambda: torch.cuda.stream(torch.cuda.Stream()),
    ]  # fmt: skip
    for mode in modes * 3:
        torch.cuda.synchronize()
        with mode():
            twins.turn()
    torch.cuda.synchronize()
    twins.check()


@pytest.mark.parametrize("name", REPLAYS)
def test_a_batch_is_the_callers(device: torch.device, name: str) -> None:
    """No later call writes to it, though a graph writes its batches to the same place."""
    twins, kept = begun(device, name), list[Any]()
    for _ in range(6):
        far = there(twins.step(), device)
        _, batch = twins.act(far, there(twins.errors(), device))
        kept.append((batch, batch.clone()))
    for batch, before in kept:
        assert_same(batch.to("cpu"), before.to("cpu"))


@pytest.mark.parametrize("name", REPLAYS)
def test_a_captured_graph_adds_draws_and_rates_as_in_ram(device: torch.device, name: str) -> None:
    """Batch t of a graph that is replayed is batch t of the replay in RAM."""
    twins = begun(device, name)
    step, errors = there(twins.step(), device), there(twins.errors(), device)
    twins.turn()
    replay, (late, batch) = captured(device, lambda: twins.act(step, errors))
    for _ in range(often(5, 12) * ROWS // 4):
        given, rates = twins.step(), twins.errors()
        write(step, given)
        errors.copy_(rates)
        replay()
        twins.ram.add(given)
        expected = twins.ram.sample(BATCH)
        assert_same(expected, batch)
        if late is not None:
            assert int(late) == twins.ram.update_priorities(expected["index"], rates)
    assert_same(twins.ram.data(), twins.there.data())
    assert twins.there.stats()["batches"] == twins.ram.stats()["batches"]
    twins.turn()  # and it goes on as ever


def write(into: Any, step: Any) -> None:
    """Write a step to the tensors that a graph reads."""
    for name, value in step.items():
        if isinstance(value, dict):
            write(into[name], value)
        else:
            into[name].copy_(value)


# Rollouts


T = 24

ROLLOUT = Schema({
    "obs": (48,), "action": (12,), "reward": (), "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool), "value": (), "log_prob": (),
})  # fmt: skip


@pytest.fixture(params=["stand-in", ON_GPU])
def far(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """On the CPU, a rollout is computed by the core; the stand-in has the operations of a device."""
    with place(request.param) as chosen:
        yield chosen


ESTIMATORS = [GAE(0.9, 0.8), GAE(0.9, 0.8, normalize=True), returns.TDLambda(0.9, 0.8), returns.MonteCarlo(0.9)]


def rollout_steps() -> list[dict[str, Tensor]]:
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal((N, *shape)).astype(np.float32))

    scalars = ("reward", "value", "log_prob", "final_value")
    return [
        {"obs": numbers(48), "action": numbers(12), "terminated": numbers() > 1.5, "truncated": numbers() > 1.5}
        | {name: numbers() for name in scalars}
        for _ in range(T)
    ]


def assert_close(ours: Any, theirs: Any) -> None:
    assert list(ours.keys()) == list(theirs.keys())
    for name in ours.keys():
        torch.testing.assert_close(theirs[name].cpu(), ours[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_an_iteration_of_a_rollout_does_not_wait(far: torch.device, estimator: Any) -> None:
    steps = rollout_steps()
    given, last = [there(step, far) for step in steps], torch.ones(N, device=far)
    ram = RolloutBuffer(ROLLOUT, T, N, seed=3)
    rollout = RolloutBuffer(ROLLOUT, T, N, seed=3, device=far)
    options: dict[str, Any] = {"num_batches": 4, "epochs": 2, "normalize_advantage": True}
    for turn in range(often(2, 3)):  # in the first one, constants go to the GPU
        for step in steps:
            ram.add(step)
        expected = list(ram.set_last(value=torch.ones(N)) or ram.finish(estimator).minibatches(**options))
        with no_sync(far) if turn else nullcontext():
            for step in given:
                rollout.add(step)
            rollout.set_last(value=last)
            batches = list(rollout.finish(estimator).minibatches(**options))
        assert len(batches) == len(expected)
        for one, other in zip(expected, batches, strict=True):
            assert_close(one, other)
        ram.clear()
        with no_sync(far):
            rollout.clear()


@pytest.mark.parametrize("every_step_real", [True, False])
def test_graphs_of_a_rollout_give_the_bits_of_the_same_operations_one_by_one(
    far: torch.device, every_step_real: bool
) -> None:
    """A finish is captured when it comes for the second time; minibatches have the bits of those in RAM."""
    rollout, ram = RolloutBuffer(ROLLOUT, T, N, seed=3, device=far), RolloutBuffer(ROLLOUT, T, N, seed=3)
    for turn in range(5):
        steps = rollout_steps()
        rng = np.random.default_rng(turn)
        for step in steps:
            step["reward"] = torch.from_numpy(rng.standard_normal(N).astype(np.float32))
            if not every_step_real:
                step["mask"] = torch.from_numpy(rng.random(N) < 0.9)
        given = [there(step, far) for step in steps]
        for buffer, each in ((rollout, given), (ram, steps)):
            buffer.clear()
            for step in each:
                buffer.add(step)
            buffer.set_last(value=torch.ones(N).to(buffer.device))
        estimator = GAE(0.9, 0.8)
        with no_sync(far) if turn else nullcontext():
            rollout.finish(estimator)
        columns = {name: rollout[name] for name in ("reward", "terminated", "truncated", "final_value", "mask")}
        if every_step_real:
            del columns["mask"]
        one_by_one = returns.gae(value=rollout.block["value"], **columns, gamma=0.9, lam=0.8)
        for name, expected in zip(("advantage", "return"), one_by_one, strict=True):
            assert rollout[name].cpu().numpy().tobytes() == expected.cpu().numpy().tobytes()
            ram[name] = rollout[name].cpu()
        options: dict[str, Any] = {"batch_size": T * N // 5, "epochs": 2}
        passes = (buffer.minibatches(**options, reuse=reuse) for buffer in (ram, rollout) for reuse in (False, True))
        seeds = [(buffer, buffer.seed) for buffer in (ram, rollout)]
        found = list[list[bytes]]()
        for k, batches in enumerate(passes):
            for buffer, seed in seeds:
                buffer.seed = seed
            found.append(
                [b"".join(x.cpu().contiguous().numpy().tobytes() for x in batch.values()) for batch in batches]
            )
            assert found[k] == found[0]


def test_returns_are_captured_in_a_graph(far: torch.device) -> None:
    steps = rollout_steps()
    columns = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    value = torch.cat([columns["value"], torch.zeros(1, N)])
    names = ("reward", "terminated", "truncated", "final_value")
    reward, terminated, truncated, final = (there(columns[name], far) for name in names)
    far_value = there(value, far)

    def call() -> tuple[Tensor, ...]:
        return returns.gae(reward, far_value, terminated, truncated, gamma=0.9, lam=0.8, final_value=final)

    call()
    replay, found = captured(far, call)
    reward.mul_(2)
    replay()
    expected = returns.gae(
        columns["reward"] * 2, value, columns["terminated"], columns["truncated"], gamma=0.9, lam=0.8,
        final_value=columns["final_value"],
    )  # fmt: skip
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_page_locked_memory_is_not_written_again_before_the_gpu_has_read_it() -> None:
    small = Schema({"obs": (5,), "action": (2,), "reward": (), "terminated": FLAG, "truncated": FLAG})

    def filled() -> ReplayBuffer:
        replay, ended = ReplayBuffer(small, ROWS * N, N, seed=0, check_ends=False), np.zeros(N, np.bool_)
        for t in range(ROWS):
            obs = np.arange(N * 5, dtype=np.float32).reshape(N, 5) + t
            step = {"obs": obs, "action": obs[:, :2], "reward": obs[:, 0], "terminated": ended, "truncated": ended}
            replay.add(step | {"next_obs": obs + 1})
        return replay

    there = list[Any]()
    for batch in filled().batches(12, BATCH, reuse="pinned"):
        assert all(leaf.is_pinned() for leaf in leaves_by_path(batch).values())
        torch.cuda._sleep(20_000_000)  # the GPU is busy for about ten milliseconds, and copies after that
        there.append(batch.to("cuda", non_blocking=True))
    for found, wanted in zip(there, filled().batches(12, BATCH), strict=True):
        for path, leaf in leaves_by_path(wanted).items():
            assert torch.equal(leaves_by_path(found)[path].cpu(), leaf), path
