"""Tensors whose numbers are not at their address: read as they are meant, or refused, and never read as garbage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import relive
from relive import Field, Prioritized, ReplayBuffer, RolloutBuffer, Schema, errors
from relive.compat import velora

N = 4
PRIVATE: Any = torch
SCHEMA = Schema({"obs": (3,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)})
Call = Callable[[Tensor], object]


def step(**changed: Any) -> dict[str, Any]:
    ended = torch.zeros(N, dtype=torch.bool)
    return {"obs": torch.ones(N, 3), "reward": torch.ones(N), "terminated": ended, "truncated": ended} | changed


def inside(wrap: Callable[..., Any], call: Call, x: Tensor) -> None:
    """Make the call with what a transform of torch.func makes of ``x``."""

    def function(given: Tensor) -> Tensor:
        call(given)
        return given.sum()

    wrap(function)(x)


def fake(call: Call, x: Tensor) -> None:
    with FakeTensorMode():
        made = torch.empty(x.shape)
    call(made)


def freed(call: Call, x: Tensor) -> None:
    given = x.clone()
    given.untyped_storage().resize_(0)
    call(given)


def quantized(call: Call, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that it will not have them forever
        given = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
    call(given)


UNREADABLE: dict[str, Callable[[Call, Tensor], None]] = {
    "vmap": lambda call, x: inside(torch.func.vmap, call, x[None]),
    "grad": lambda call, x: inside(torch.func.grad, call, x),
    "functionalize": lambda call, x: inside(torch.func.functionalize, call, x),
    "fake": fake,
    "freed": freed,
    "quantized": quantized,
}
READABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda x: PRIVATE._neg_view(-x),
    "part of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "zero": lambda x: PRIVATE._efficientzerotensor(x.shape),
}


class World:
    """Buffers that know how steps are given, and every way in for a tensor; ``wanted`` reads what got in."""

    def __init__(self) -> None:
        self.rollout = RolloutBuffer(SCHEMA.extend(value=()), 9, N)
        self.replay = ReplayBuffer(SCHEMA, 80, N, sampler=Prioritized(alpha=1.0), seed=0)
        for _ in range(3):  # by the third, tensors are copied by address
            self.rollout.add(step(value=torch.zeros(N)))
            self.replay.add(step())
        self.index = self.replay.sample(N)["index"]

    def rows(self) -> Tensor:
        return torch.stack([self.replay.slice(env)["obs"][-1] for env in range(N)])

    def enter(self, way: str, x: Tensor) -> None:
        """Give a tensor ``[N, 3]``, or ``[N]`` where there is one number for each env."""
        done = torch.ones(N, dtype=torch.bool)
        match way:
            case "rollout":
                self.rollout.add(step(obs=x, value=torch.zeros(N)))
            case "bootstrap":
                self.rollout.set_last(obs=x)
            case "replay":
                self.replay.add(step(obs=x))
            case "final":
                self.replay.add(step(next_obs=x, terminated=done))
            case "extend":
                self.replay.extend({name: given[None] for name, given in step(obs=x).items()})
            case _:
                self.replay.update_priorities(self.index, x)

    def wanted(self, way: str) -> Tensor:
        match way:
            case "rollout":
                return self.rollout["obs"][-1]
            case "bootstrap":
                return self.rollout.last["obs"]
            case _:
                return self.rows()


STEPS = "rollout", "bootstrap", "replay", "final", "extend"


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("way", [*STEPS, "priorities"])
def test_a_tensor_that_cannot_be_read_is_refused_by_name_and_changes_nothing(way: str, kind: str) -> None:
    if way == "extend" and kind == "freed":
        pytest.skip("torch itself refuses to make a view of it")
    world, x = World(), torch.ones(N, 3) if way in STEPS else torch.ones(N)
    before = world.replay.stats(), world.rollout.steps
    with pytest.raises(errors.DTypeError, match=r"obs|td_error|index"):
        UNREADABLE[kind](lambda given: world.enter(way, given), x)
    assert (world.replay.stats(), world.rollout.steps) == before
    world.replay.check()


@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.parametrize("way", STEPS)
def test_a_tensor_that_is_computed_lazily_arrives_with_its_numbers(way: str, kind: str) -> None:
    world, x = World(), READABLE[kind](torch.arange(1.0, 3 * N + 1).reshape(N, 3))
    world.enter(way, x)
    assert torch.equal(world.wanted(way), x + 0)


def test_td_errors_that_are_zero_without_memory_are_zero() -> None:
    zeros, lazy = World(), World()
    zeros.enter("priorities", torch.zeros(N))
    lazy.enter("priorities", PRIVATE._efficientzerotensor(N))
    assert lazy.replay.sampler.priorities().tolist() == zeros.replay.sampler.priorities().tolist()
    assert lazy.replay.sampler.priorities().min() < 0.1


@pytest.mark.parametrize("kind", UNREADABLE)
def test_returns_refuse_a_tensor_that_cannot_be_read(kind: str) -> None:
    ends, values = torch.zeros(N, 3, dtype=torch.bool), torch.zeros(N + 1, 3)
    with pytest.raises(errors.DTypeError, match="'reward'"):
        UNREADABLE[kind](lambda x: relive.returns.gae(x, values, ends, ends), torch.ones(N, 3))


@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.parametrize("shape", [(1, 1), (N, 3)])
def test_returns_of_a_tensor_that_is_computed_lazily(kind: str, shape: tuple[int, int]) -> None:
    ends, values = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape[0] + 1, shape[1])
    x = READABLE[kind](torch.ones(shape))
    for got, right in zip(
        relive.returns.gae(x, values, ends, ends), relive.returns.gae(x + 0, values, ends, ends), strict=True
    ):
        assert torch.equal(got, right)


@pytest.mark.parametrize("kind", READABLE)
def test_a_step_that_a_drop_in_copies_by_address_has_memory(kind: str) -> None:
    """The first step is checked field by field; those after it are copied."""
    buffer, value = velora.ReplayBuffer(4, 1, 1, 1), READABLE[kind](torch.ones(1))
    for given in (torch.full((1,), 7.0), torch.full((1,), 7.0), value):
        buffer.add(given, given, 1.0, given, False, given)
    for stored in (buffer.states, buffer.actions, buffer.next_states, buffer.hiddens):
        assert stored[:3, 0].tolist() == [7.0, 7.0, *(value + 0).tolist()]
