"""Sequences on a device: the batches are those of a replay in RAM, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relive import Field, Schema, Sequence
from support import internals
from support.device_twins import SCHEMA, Twins, assert_same
from support.effort import first_of, in_ci, often
from support.other_device import no_waiting, places
from support.tapes import TAPED

RECURRENT = Schema({
    **{name: SCHEMA[name] for name in SCHEMA.names},
    "hidden": {"h": (2, 3), "c": (2,)},
    "action_mask": Field((4,), torch.bool),
    "last_action": (2,),
    "picture": Field((2, 700), torch.uint8),
})  # fmt: skip

VIEWS: list[Any] = [
    lambda: Sequence(3),
    lambda: Sequence(4, 2, "none", n=3, time_first=False),
    lambda: Sequence(5, 3, "half", n=5, weigh="steps", last=("action", "reward", "picture")),
    lambda: Sequence(4, 1, 3, weigh="episodes", last=("action_mask",)),
    lambda: Sequence(2, 0, "max", weigh="episodes"),
    lambda: Sequence(1, 4, n=2, last=("reward",)),
    lambda: Sequence(1, weigh="episodes"),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("world", first_of(1, [(1, 30, 0.15), (4, 23, 0.4), (5, 64, 0.02)]))
def test_batches_are_those_of_a_replay_in_ram(device: torch.device, world: Any, view: Any) -> None:
    envs, size, odds = world
    twins = Twins(device, envs, size, seed=size, schema=RECURRENT, view=view)
    ahead = 0
    for t in range(often(2, 4) * size):
        twins.add(odds)
        if t < 11:
            continue
        if t % often(7, 4) == 3:
            with no_waiting() as watch:
                watch.allow = t < 16
                theirs = twins.there.sample(25)
            assert_same(twins.ram.sample(25), theirs)
            ahead += internals.is_ahead(twins.there)
    assert ahead > 4
    twins.check()
    twins.batches(25)


@pytest.mark.parametrize("device", places(in_ci(TAPED)), indirect=True)
def test_the_host_takes_its_turns_between(device: torch.device) -> None:
    twins = Twins(device, 4, 40, seed=3, schema=RECURRENT, view=lambda: Sequence(3, 2))
    turns: list[Any] = [
        lambda buffer: buffer.interrupt([1, 3]),
        lambda buffer: setattr(buffer.view, "overlap", "none"),
        lambda buffer: setattr(buffer.view, "weigh", "steps"),
        lambda buffer: setattr(buffer.view, "n", 4),
        lambda buffer: setattr(buffer.view, "weigh", "episodes"),
        lambda buffer: buffer.interrupt([0, 1, 2, 3]),
        lambda buffer: buffer.clear(),
        lambda buffer: setattr(buffer.view, "length", 5),
        lambda buffer: setattr(buffer.view, "last", ("reward",)),
        lambda buffer: setattr(buffer.view, "drop_tail", True),  # then the host draws
        lambda buffer: setattr(buffer.view, "drop_tail", False),
        lambda buffer: setattr(buffer, "view", Sequence(1)),
        lambda buffer: setattr(buffer, "view", Sequence(4, 1, "half")),
    ]
    for change in turns:
        for _ in range(14):
            twins.add(0.15)
        twins.batches(16)
        for _ in range(2):
            twins.add(0.2)
            twins.batches(16)
        assert internals.is_ahead(twins.there) or twins.there.view.drop_tail
        assert len(twins.there) == len(twins.ram)
        for buffer in (twins.ram, twins.there):
            change(buffer)
        twins.add_to_some([0, 2])
        twins.check()


@pytest.mark.parametrize("view", [in_ci(view) for view in VIEWS[2:4]])
def test_compiled_batches_are_those_of_a_replay_in_ram(view: Any) -> None:
    twins = Twins(torch.device("cpu"), 4, 30, seed=3, schema=RECURRENT, view=view)
    twins.hold_compiled(20, adds=50, first=20)
