"""Other defaults of torch change nothing in a replay on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from relive import Field, FrameStack, Hindsight, NStep, Prioritized, Recent, Schema, Sequence, Transition, Uniform
from support.cases import covering
from support.defaults import OTHERS, play_under
from support.device_twins import Twins
from support.overwrites import Hands

FLAG = Field((), torch.bool)
GOALS = Schema({"obs": {"x": (5,), "achieved_goal": (2,), "desired_goal": (2,)}, "action": (2,), "reward": (),
                "terminated": FLAG, "truncated": FLAG})  # fmt: skip

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "prioritized": Prioritized,
    "recent": lambda: Recent(0.99),
}


def reward(achieved: Tensor, desired: Tensor) -> Tensor:
    return (achieved - desired).abs().sum(-1)


VIEWS: dict[str, Callable[[], Any]] = {
    "transition": Transition,
    "n steps": lambda: NStep(3, gamma=0.9),
    "frames": lambda: FrameStack(3),
    "sequences": lambda: Sequence(4, burn_in=1),
    "hindsight": lambda: Hindsight(reward, "future", n=3, gamma=0.9, tensors=True),
}


@pytest.mark.parametrize(("view", "sampler", "default"), covering(VIEWS, SAMPLERS, OTHERS, full=3, quick=1))
def test_a_replay_on_a_device_gives_the_same(view: str, sampler: str, default: str) -> None:
    def run(hands: Hands) -> None:
        twins = Twins(torch.device("cpu"), 4, 9, 1, GOALS, sampler=SAMPLERS[sampler], view=VIEWS[view])
        for t in range(25):
            twins.add(0.2)
            if t % 8 == 7:
                ours, theirs = twins.batches(6)
                hands.note("batch", theirs)
                if twins.ram.has_priorities:
                    twins.update(ours, theirs)
        twins.check()

    play_under(default, run)
