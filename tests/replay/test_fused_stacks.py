"""A batch of stacked frames that is drawn and read in one compiled call is the batch of the long way."""

from __future__ import annotations

import ctypes
import mmap
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import inside
from covering import covering
from drawing import EVERY_SAMPLER, World, assert_same, both, facts, filled, others_run_during, state
from effort import often
from forked import in_fork
from relive import FrameStack, NStep, Prioritized, Recent, Transition, Uniform
from relive.batches import Members
from relive.kernels import cpu, reference
from relive.kernels.tensor_calls import tensor_calls
from relive.memory.allocator import HUGE, SMALL, Recycled
from relive.replay.reader import Reader

pytestmark = pytest.mark.skipif(tensor_calls() is None, reason="this torch has no functions for compiled code")

KINDS = "large", "cameras"
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform, "prioritized": Prioritized, "recent": lambda: Recent(0.9, 2)
}  # fmt: skip
CAMERAS = "left", "depth"
VIEWS: dict[str, Callable[[], FrameStack]] = {
    "one frame": lambda: FrameStack(1),
    "repeat": lambda: FrameStack(3, NStep(2, 0.5)),
    "zeros": lambda: FrameStack(4, Transition(), "zeros"),
}


def stacks(kind: str, view: str) -> Callable[[], FrameStack]:
    """A view of VIEWS that stacks the large fields."""

    def make() -> FrameStack:
        made = VIEWS[view]()
        made.keys = CAMERAS if kind == "cameras" else None
        return made

    return make


# the same batches


@pytest.mark.parametrize(("sampler", "kind", "view", "seed"), covering(EVERY_SAMPLER, KINDS, VIEWS, range(3), full=2))
def test_the_fused_call_makes_the_stacks_of_the_long_way(sampler: str, kind: str, view: str, seed: int) -> None:
    worlds = both(kind, seed, 0, sampler=EVERY_SAMPLER[sampler], view=stacks(kind, view))
    for world in worlds:
        for turn in range(often(6, 12)):
            world.play(1)
            if turn % 3 == 2:
                world.buffer.view = stacks(kind, view)()
            if isinstance(world.buffer.view, FrameStack):
                world.buffer.view.depth = int(world.rng.integers(1, 5))
                world.look()
                world.look()
    assert_same(worlds[0].seen, worlds[1].seen)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(("sampler", "view", "kind"), covering(SAMPLERS, VIEWS, KINDS, full=2))
def test_large_frames_in_ram_are_read_in_the_fused_call(
    sampler: str, view: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = filled(kind, view=stacks(kind, view)(), sampler=SAMPLERS[sampler]())
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "read", refuse)
        for sampled in (buffer.sample(7), *buffer.batches(3, 7), *buffer.serve(7, count=2)):
            assert sampled.batch_size == (7,)
    buffer.view.depth = 2
    buffer.sample(7)  # the ring follows the view's new rule
    monkeypatch.setattr(Reader, "read", refuse)
    assert buffer.sample(2)["next_obs"].shape[:1] == (2,)


class MyStack(FrameStack):
    pass


class MyWindow(NStep):
    pass


class MyUniform(Uniform):
    pass


LONG: dict[str, Callable[[], Any]] = {
    "small frames": lambda: filled(view=FrameStack(2)),
    "small and large frames": lambda: filled("cameras", view=FrameStack(2)),
    "some of the large frames": lambda: filled("cameras", view=FrameStack(2, keys=("left",))),
    "each_reward": lambda: filled("large", view=FrameStack(2, NStep(2, each_reward=lambda rewards: rewards * 2))),
    "a window of the user's": lambda: filled("large", view=FrameStack(2, MyWindow(2))),
    "a view of the user's": lambda: filled("large", view=MyStack(2)),
    "no stacks": lambda: filled("large", view=NStep(2)),
    "a sampler of the user's": lambda: filled("large", view=FrameStack(2), sampler=MyUniform()),
}


@pytest.mark.parametrize("kind", LONG)
def test_other_stacks_are_read_the_long_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = LONG[kind]()
    monkeypatch.setattr(Members, "batch", refuse)
    assert buffer.sample(7).batch_size == (7,)


MODES: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.device("meta"), "inference": torch.inference_mode, "fake": FakeTensorMode,
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_give_the_same_stacks_either_way(mode: str) -> None:
    found = []
    for world in both("large", view=stacks("large", "repeat")):
        for _ in range(30):
            world.add()
        world.look()
        with MODES[mode](), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: the address of a fake tensor was asked for
            batch = world.buffer.sample(6)
        assert isinstance(batch["obs"], FakeTensor) == (mode == "fake")
        found.append([None if mode == "fake" else facts(batch), state(world.buffer), *world.seen])
    assert_same(*found)


# the kernels


@pytest.mark.parametrize(("view", "kind", "weighed"), covering(VIEWS, KINDS, [False, True], full=2))
def test_both_twins_draw_and_stack_the_same_frames(view: str, kind: str, weighed: bool) -> None:
    world = World(kind, 1, False, view=stacks(kind, view)(), sampler=Prioritized() if weighed else None)
    for _ in range(30):
        world.add()
    buffer, store = world.buffer, inside.ring(world.buffer).store
    buffer.sample(3)
    ready, weights = (
        inside.fused(inside.reader(buffer)),
        {"weights": inside.bound(buffer.sampler)().memory} if weighed else {},
    )
    plain = ready.batch._replace(ring=inside.ring(buffer).arrays, **weights)
    for count, depth, repeat in ((1, 1, True), (9, buffer.view.depth, False), (30, buffer.view.depth, True)):
        found = []
        for kernels, batch in ((cpu, ready.handle), (reference, plain)):
            rows, memory = (
                torch.zeros(count, ready.parts.rows.nbytes, dtype=torch.uint8),
                store.stack_memory(2 * count * depth),
            )
            into = ready.parts.members.empty()
            terms = (count, 0, True, 0.4, 0.0), 3, 0.9, depth, repeat
            for wrong in ((rows[:0], memory), (rows, memory[:-1]), (rows, memory[None]), (rows, rows)):
                assert not kernels.sample_stacks(batch, *terms, *map(id, wrong), id(into))
            assert not any(value is not None for members in into for value in members.values())
            assert kernels.sample_stacks(batch, *terms, id(rows), id(memory), id(into))
            batch_found = ready.parts.members.batch(into, count)
            pieces = [batch_found[path] for path in (*store.gathered, *(("next_obs", *x[1:]) for x in store.gathered))]
            assert all(piece.is_contiguous() for piece in pieces)
            found.append((rows.numpy().tobytes(), memory.numpy().tobytes(), facts(batch_found)))
        assert found[0] == found[1]


def guarded(count: int, width: int) -> Any:
    """Rows that end where memory ends: what comes after cannot be read."""
    size = -(-count * width // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return whole[size - count * width : size].reshape(count, width)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is protected as Linux does it")
def test_no_byte_outside_of_frames_and_stacks_is_read_or_written() -> None:
    def work() -> bool:
        rng = np.random.default_rng(0)
        for width in (1, 63, 255, 256, 700, 1024, 2305):
            source = guarded(9, width)
            source[...] = rng.integers(0, 256, source.shape)
            for depth in (1, 2, 4):
                first = rng.integers(0, 9 - depth, 5)
                first[[1, -1]] = 8 - depth  # the last next stack ends with the last row
                places = np.concatenate([first, first + 1])[:, None] + np.arange(depth)
                out = guarded(places.size, width)
                assert cpu.gather_pairs(source, places, out) == -1
                assert np.array_equal(out, source[places.reshape(-1)])
        return True

    assert in_fork(work)


def test_other_threads_run_while_frames_are_copied() -> None:
    buffer = filled("large", view=FrameStack(4))
    buffer.sample(2)
    ready, count = inside.fused(inside.reader(buffer)), 400
    rows, memory = (
        torch.zeros(count, ready.parts.rows.nbytes, dtype=torch.uint8),
        inside.ring(buffer).store.stack_memory(8 * count),
    )

    def work(number: int) -> Any:
        into = ready.parts.members.empty()
        assert cpu.sample_stacks(
            ready.handle, (number, 0, False, 0.0, 0.0), 1, 0.9, 4, True, id(rows), id(memory), id(into)
        )
        return into

    assert others_run_during(work)


# the memory


def test_the_memory_of_a_batch_is_used_again_once_it_is_dropped_and_not_before() -> None:
    buffer = filled("large", view=FrameStack(4))
    kept = buffer.sample(60)
    assert kept["obs"].nbytes > SMALL / 2
    wanted, obs, places = facts(kept), kept["obs"], set[int]()
    del kept["next_obs"]  # the other half keeps the memory of both
    for _ in range(20):
        batch = buffer.sample(60)
        places.add(batch["next_obs"].data_ptr())
        del batch
    assert len(places) == 1
    assert places.isdisjoint({obs.data_ptr(), obs.data_ptr() + obs.nbytes})
    assert dict(facts(kept)[-1])["obs"] == dict(wanted[-1])["obs"]
    reward = buffer.sample(60)["reward"]
    assert buffer.sample(60)["next_obs"].data_ptr() in places  # a small field keeps small memory
    del reward


def test_most_of_a_huge_page_is_all_of_it() -> None:
    sizes = [Recycled().take(nbytes).base.size for nbytes in (HUGE * 3 // 8, HUGE // 2, HUGE - 10**5, HUGE)]
    assert sizes == [HUGE * 3 // 8 * 9 // 8, HUGE, HUGE + HUGE // 8 - 10**5 * 9 // 8, HUGE + HUGE // 8]
