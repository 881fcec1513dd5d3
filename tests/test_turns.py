"""Batches that take turns in the same memory: which stay valid, and when page-locked memory may be written again."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from relive import (
    Field,
    FrameStack,
    Mixture,
    NStep,
    Prioritized,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
    Sequence,
    Uniform,
    errors,
    turns,
)
from relive.batches import Batch, leaves_by_path
from relive.rollout import minibatches

FLAG = Field((), torch.bool)
ENDS: dict[str, Any] = {"reward": (), "terminated": FLAG, "truncated": FLAG}


def replay_of(sampler: Any = None, view: Any = None, seed: int = 0) -> ReplayBuffer:
    schema, parts = Schema({"obs": (3,), "action": (2,), **ENDS}), (sampler or Uniform(), view or NStep(1))
    replay = ReplayBuffer(schema, 100, 2, sampler=parts[0], view=parts[1], seed=seed, check_ends=False)
    for t in range(40):
        row = np.full((2, 3), t, np.float32)
        ended = np.array([t % 9 == 8, t % 7 == 6])
        replay.add(
            {
                "obs": row, "action": row[:, :2], "reward": row[:, 0], "terminated": ended, "truncated": ended & False,
                "next_obs": row + 1,
            }
        )  # fmt: skip
    return replay


def rollout() -> RolloutBuffer:
    schema = Schema({"obs": (3,), "image": Field((40, 40), torch.uint8), "value": (), **ENDS})
    buffer = RolloutBuffer(schema, 16, 4, seed=0)
    for t in range(16):
        ended = np.zeros(4, np.bool_)
        buffer.add(
            {
                "obs": np.full((4, 3), t, np.float32), "image": np.full((4, 40, 40), t, np.uint8),
                "value": np.zeros(4, np.float32), "reward": np.arange(4, dtype=np.float32), "terminated": ended,
                "truncated": ended,
            }
        )  # fmt: skip
    return buffer


SOURCES: dict[str, Callable[[], Callable[[Any], Iterator[Batch]]]] = {
    "uniform": lambda: lambda reuse: replay_of().batches(8, 6, reuse=reuse),
    "prioritized, 3-step": lambda: lambda reuse: replay_of(Prioritized(), NStep(3)).batches(8, 6, reuse=reuse),
    "sequences": lambda: lambda reuse: replay_of(view=Sequence(4)).batches(8, 6, reuse=reuse),
    "mixture": lambda: (
        lambda reuse: Mixture({"a": replay_of(), "b": replay_of(seed=1)}, {"a": 0.5, "b": 0.5}).batches(
            8, 6, reuse=reuse
        )
    ),
    "minibatches": lambda: lambda reuse: rollout().minibatches(8, reuse=reuse),
}


def told(batch: Batch) -> list[Any]:
    return [(path, leaf.dtype, leaf.tolist()) for path, leaf in leaves_by_path(batch).items()]


class Gpu:
    """A GPU that copies late: what was asked to be copied is read when somebody waits, and must be as it was then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: list[Any] = []
        self.started: list[tuple[Batch, list[Any]]] = []
        self.read = 0
        gpu = self

        class Event:
            def __init__(self) -> None:
                self.covers = 0

            def record(self) -> None:
                self.covers = len(gpu.started)

            def synchronize(self) -> None:
                gpu.finish(self.covers)

        def page_locked(nbytes: int) -> Any:
            memory = torch.empty(nbytes, dtype=torch.uint8)
            gpu.locked.append(memory)
            return memory.numpy()

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: gpu.finish(len(gpu.started)))
        for module in (turns, minibatches):
            monkeypatch.setattr(module, "page_locked", page_locked)

    def start(self, batch: Batch) -> None:
        """The learner starts a copy of a batch."""
        self.started.append((batch, told(batch)))

    def finish(self, count: int) -> None:
        for batch, content in self.started[self.read : count]:
            assert told(batch) == content
        self.read = max(self.read, count)

    def holds(self, leaf: torch.Tensor) -> bool:
        return any(
            memory.data_ptr() <= leaf.data_ptr() and leaf.data_ptr() + leaf.nbytes <= memory.data_ptr() + memory.nbytes
            for memory in self.locked
        )


@pytest.mark.parametrize("name", SOURCES)
def test_page_locked_memory_holds_the_same_batches_and_is_written_again_once_it_was_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = SOURCES[name]
    want = [told(batch) for batch in make()(False)]
    gpu = Gpu(monkeypatch)
    found = list[Any]()
    for batch in make()("pinned"):
        found.append(told(batch))
        assert all(map(gpu.holds, leaves_by_path(batch).values()))
        gpu.start(batch)  # nothing is read unless somebody waits
    assert found == want
    assert len(want) - 3 <= gpu.read <= len(want)  # the learner waits for no copy that need not be done


def test_a_copy_of_an_earlier_pass_is_waited_for_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, replay = Gpu(monkeypatch), replay_of()
    for _ in range(9):
        gpu.start(next(replay.batches(1, 6, reuse="pinned")))
    assert gpu.read == 6
    del replay
    assert gpu.read == 9  # before torch gives the memory to somebody else


def test_page_locked_memory_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mixture = Mixture({"a": replay_of()}, {"a": 1.0})
    for call in (replay_of().batches, mixture.batches):
        with pytest.raises(errors.ParameterError, match=r"batches\(reuse='pinned'\).*needs a GPU.*write reuse=True"):
            call(1, 4, reuse="pinned")
    with pytest.raises(errors.ParameterError, match=r"minibatches\(reuse='pinned'\).*needs a GPU"):
        rollout().minibatches(8, reuse="pinned")


@pytest.mark.parametrize("reuse", ["pin", 1, 0, None, "False", np.True_])
def test_any_other_value_of_reuse_is_refused(reuse: Any) -> None:
    for call in (lambda: replay_of().batches(1, 4, reuse=reuse), lambda: rollout().minibatches(8, reuse=reuse)):
        with pytest.raises(errors.ParameterError, match=r"reuse=.*expected True, False or 'pinned'"):
            call()


def test_a_later_call_goes_on_in_the_memory_of_an_earlier_one_and_takes_its_batches_back() -> None:
    replay, fresh = replay_of(), replay_of()
    want = [told(batch) for _ in range(4) for batch in fresh.batches(2, 6)]
    given = list[Batch]()
    for _ in range(4):
        given.extend(replay.batches(2, 6, reuse=True))
        assert [told(batch) for batch in given[-3:]] == want[max(0, len(given) - 3) : len(given)]
    assert len({batch["obs"].data_ptr() for batch in given[-3:]}) == 3
    for batch in given[:-3]:
        with pytest.raises(errors.LifecycleError, match="given back"):
            _ = batch["obs"]


def test_page_locked_memory_goes_after_its_copies_were_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told_of = Gpu(monkeypatch), list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told_of.append("read"))

    def page_locked(nbytes: int) -> Any:
        memory = np.zeros(nbytes + 64, np.uint8)
        weakref.finalize(memory, told_of.append, "gone")
        return memory[-memory.ctypes.data % 64 :][:nbytes]

    monkeypatch.setattr(turns, "page_locked", page_locked)
    replay = replay_of()
    gpu.start(next(replay.batches(1, 6, reuse="pinned")).clone())
    del replay
    gc.collect()
    assert told_of == ["read", "gone"]


class NoGpu(TorchFunctionMode):
    """Memory that would be page-locked is not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def test_page_locked_memory_is_made_in_ram_whatever_the_default_device_is() -> None:
    with NoGpu(), torch.device("meta"):
        assert turns.page_locked(128).shape == (128,)


@pytest.mark.parametrize("used", [True, False])
def test_copies_to_a_gpu_that_is_not_the_current_one_are_waited_for(
    used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies go to GPU 1, whose stream the events of GPU 0 know nothing of."""
    here, gpu = Gpu(monkeypatch), Gpu(monkeypatch)
    event = torch.cuda.Event

    class Event:
        def record(self) -> None:
            pass

        synchronize = record

    class Stream:
        def record_event(self) -> Any:
            recorded = event()
            recorded.record()
            return recorded

        def synchronize(self) -> None:
            gpu.finish(len(gpu.started))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: here.finish(0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", {1: Stream()}.__getitem__)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda number: used, raising=False)
    replay = replay_of()
    for batch in replay.batches(8, 6, reuse="pinned"):
        if used:
            gpu.start(batch)
    assert gpu.read == 5 * used
    del replay, batch
    assert gpu.read == 8 * used


def test_a_closed_replay_keeps_no_memory_of_batches(tmp_path: Path) -> None:
    schema = Schema({"obs": (3,), "action": (), **ENDS})
    replay = ReplayBuffer.open(tmp_path, schema, 40, check_ends=False)
    for t in range(9):
        replay.add({"obs": [[t] * 3], "action": [0], "reward": [0], "terminated": [False], "truncated": [False]})
    batch = next(replay.batches(1, 4, reuse=True))
    kept, tensor = told(batch), weakref.ref(batch["obs"])
    replay.close()
    assert told(batch) == kept
    del batch
    gc.collect()
    assert tensor() is None


def test_a_pass_that_fails_within_a_batch_leaves_every_batch_that_is_valid_as_it_is() -> None:
    replay = replay_of()
    given = list(replay.batches(2, 6, reuse=True))
    kept = [told(batch) for batch in given]
    sampler: Any = replay.sampler
    draw, sampler.draw = sampler.draw, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        next(replay.batches(1, 6, reuse=True))
    sampler.draw = draw
    for batch in islice(replay.batches(3, 6, reuse=True), 3):
        assert told(batch) == told(batch.clone())
    assert [told(batch) for batch in given] == kept


@pytest.mark.parametrize("again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_memory_that_stands_stays_behind_when_its_owner_is_copied(again: Callable[[Any], Any]) -> None:
    mixture = Mixture({"a": replay_of()}, {"a": 1.0})
    for source in (replay_of(), mixture):
        first = next(source.batches(1, 6, reuse=True))
        kept = told(first)
        for _ in again(source).batches(5, 6, reuse=True):
            pass
        assert told(first) == kept


@pytest.mark.parametrize("view", [lambda: NStep(2), lambda: Sequence(4), lambda: FrameStack(2)])
def test_a_view_that_is_set_again_and_again_does_not_gather_memory(view: Callable[[], Any]) -> None:
    replay, made = replay_of(), list[Any]()
    for _ in range(100):
        replay.view = view()
        made += [weakref.ref(batch["obs"]) for batch in replay.batches(3, 6, reuse=True)]
    gc.collect()
    assert len({id(tensor()) for tensor in made} - {id(None)}) < 100


@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"reuse": True}, {"epochs": 2, "reuse": True}])
def test_minibatches_are_of_the_columns_as_they_are_at_the_first_one(options: dict[str, Any]) -> None:
    buffer = rollout()
    buffer["weight"] = torch.zeros(16, 4)
    batches = buffer.minibatches(8, fields=("obs", "weight"), **options)
    buffer["weight"] = torch.ones(16, 4)
    assert (next(batches)["weight"] == 1).all()
