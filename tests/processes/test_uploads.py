"""Batches from slots to a device: one copy each, and no slot is given back before the device has read it."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Any

import pytest
import torch

from relive import ReplayServer, Sequence
from relive.errors import ParameterError
from relive.processes import server as uploads
from relive.processes.blocks import spec_of
from relive.processes.server import Slot, Uploads
from relive.processes.shared import SharedBlock
from support.children import SECONDS
from support.other_device import ELSEWHERE, far_device
from support.shared_buffers import replay_of
from support.twins import same_batches

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")


class Runtime:
    """CUDA's, as far as it is used here."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.locked = refuses, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if not self.refuses:
            self.locked[address] = nbytes
        return 712 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


class Event:
    """An event of CUDA, which notes what happens to it."""

    log: list[str]

    def record(self, stream: Any) -> None:
        self.log.append(f"record on {stream}")

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found, Event.log = Runtime(), []
    monkeypatch.setattr(uploads, "_runtime", lambda: found)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    return found


def slot_of(batch: Any) -> Slot:
    spec, tensors = spec_of(batch)
    block = SharedBlock.create(spec.nbytes + 4096)  # as one that held a larger batch
    slot = Slot(block.array, spec, block)
    slot.write(tensors)
    return slot


@pytest.mark.parametrize("view", [None, partial(Sequence, 4)], ids=["transitions", "sequences"])
def test_a_batch_is_one_copy_and_equal(view: Any):
    batch = replay_of(30, **({} if view is None else {"view": view()})).sample(8)
    (spec, expected), slot = spec_of(batch), slot_of(batch)
    with far_device() as traffic:
        found = Uploads(ELSEWHERE).upload(slot)
        assert traffic.out == [slot.spec.nbytes]
        moved_spec, moved = spec_of(found)
        assert all(tensor.device == ELSEWHERE for tensor in moved)
        slot.memory.zero_()  # the next batch comes
        back = dict(zip([part.path for part in moved_spec.parts], [tensor.cpu() for tensor in moved], strict=True))
    assert set(back) == {part.path for part in spec.parts}
    assert all(torch.equal(back[part.path], leaf) for part, leaf in zip(spec.parts, expected, strict=True))


def test_slots_are_locked_copied_without_a_wait_and_waited_for_before_they_go_back(runtime: Runtime):
    slot, up = slot_of(replay_of(30).sample(8)), Uploads(ELSEWHERE, pins=True)
    assert slot.block is not None
    up.pin(slot.block)
    assert runtime.locked == {slot.block.array.ctypes.data: slot.block.nbytes}
    assert up.pinned == 1
    with far_device():
        batch = up.upload(slot)
    assert Event.log == [f"record on the stream of {ELSEWHERE}"]
    up.wait()
    up.wait()
    assert Event.log[1:] == ["synchronize"]
    slot.block = None
    gc.collect()
    assert up.pinned == 0
    assert runtime.locked == {}
    assert batch is not None


def test_memory_that_cannot_be_locked_is_copied_the_ordinary_way(runtime: Runtime):
    runtime.refuses = True
    slot, up = slot_of(replay_of(30).sample(8)), Uploads(ELSEWHERE, pins=True)
    assert slot.block is not None
    up.pin(slot.block)
    with far_device():
        up.upload(slot)
    assert (up.pinned, Event.log) == (0, [])


def test_a_learner_hands_out_batches_of_its_device_that_stay_valid():
    with ReplayServer(partial(replay_of, 20), 4, 2, context="fork") as server:
        learner, plain = server.learner(timeout=SECONDS, device="cpu"), replay_of(20)
        batches = [next(learner) for _ in range(5)]
        assert all(same_batches(batch, plain.sample(4)) for batch in batches)
        assert learner.stats()["pinned"] == 0
        learner.close()
        with pytest.raises(ParameterError, match=r"learner\(device='nowhere'\): torch .* cannot use this device here"):
            server.learner(device="nowhere")
