"""New transitions once on a device: the host draws, and the batches are those of a replay in RAM."""

from __future__ import annotations

import pytest
import torch

from relive import Fresh, NStep, Prioritized, Sequence
from support.device_twins import Twins
from support.effort import often


@pytest.mark.parametrize("kind", ["transitions", "sequences", "priorities"])
def test_batches_are_those_of_a_replay_in_ram(device: torch.device, kind: str) -> None:
    view = (lambda: Sequence(4)) if kind == "sequences" else (lambda: NStep(2))
    sampler = (lambda: Fresh(Prioritized())) if kind == "priorities" else Fresh
    twins = Twins(device, 3, 20, seed=1, sampler=sampler, view=view)
    for t in range(often(20, 60)):
        for _ in range(3):
            twins.add(0.1)
        if t > 3:
            ours, theirs = twins.batches(8)
            if kind == "priorities":
                twins.update(ours, theirs)
    twins.check()
    ours, theirs = twins.ram.sampler, twins.there.sampler
    assert (ours.served, ours.waiting, ours.lost) == (theirs.served, theirs.waiting, theirs.lost)
    assert Fresh().bytes_on_device(1000) is None
