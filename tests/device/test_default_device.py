"""Other defaults of torch change nothing in a replay on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from covering import covering
from defaults import OTHERS, play_under
from overwritten import Hands
from paired import Twins
from relive import FrameStack, NStep, Prioritized, Recent, Sequence, Transition, Uniform

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "prioritized": Prioritized,
    "recent": lambda: Recent(0.99),
}
VIEWS: dict[str, Callable[[], Any]] = {
    "transition": Transition,
    "n steps": lambda: NStep(3, gamma=0.9),
    "frames": lambda: FrameStack(3),
    "sequences": lambda: Sequence(4, burn_in=1),
}


@pytest.mark.parametrize(("view", "sampler", "default"), covering(VIEWS, SAMPLERS, OTHERS, full=3, quick=1))
def test_a_replay_on_a_device_gives_the_same(view: str, sampler: str, default: str) -> None:
    def run(hands: Hands) -> None:
        twins = Twins(torch.device("cpu"), 4, 9, seed=1, sampler=SAMPLERS[sampler], view=VIEWS[view])
        for t in range(25):
            twins.add(0.2)
            if t % 8 == 7:
                ours, theirs = twins.batches(6)
                hands.note("batch", theirs)
                if twins.ram.has_priorities:
                    twins.update(ours, theirs)
        twins.check()

    play_under(default, run)
