"""Batches of stacked frames are the same however rows are stored and drawn, and stay in bounds of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from relive import FrameStack, NStep, Transition
from relive.batches import leaves_by_path
from relive.memory.allocator import SMALL
from support.cases import covering
from support.effort import often
from support.random_draws import EVERY_SAMPLER, SEEDED_WAYS, World, assert_same, assert_same_in, facts, filled, seen_of

KINDS = "large", "cameras"
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


def play_stacks(kind: str, view: str) -> Callable[[World], None]:
    """A play in which the depth and the view change."""

    def play(world: World) -> None:
        for turn in range(often(6, 12)):
            world.play(1)
            if turn % 3 == 2:
                world.buffer.view = stacks(kind, view)()
            if isinstance(world.buffer.view, FrameStack):
                world.buffer.view.depth = int(world.rng.integers(1, 5))
                world.look()
                world.look()

    return play


@pytest.mark.parametrize(
    ("sampler", "way", "kind", "view"),
    covering(EVERY_SAMPLER, SEEDED_WAYS, KINDS, VIEWS, full=2, quick=1),
)
def test_stacks_are_the_same_in_every_way(sampler: str, way: tuple[str, int], kind: str, view: str) -> None:
    options = {"sampler": EVERY_SAMPLER[sampler], "view": stacks(kind, view)}
    assert_same_in(way[:1], play_stacks(kind, view), kind, way[1], **options)


class MyStack(FrameStack):
    pass


class MyWindow(NStep):
    pass


@pytest.mark.parametrize("make", [lambda: MyStack(3, NStep(2)), lambda: FrameStack(3, MyWindow(2))])
def test_a_class_of_the_users_that_changes_nothing_gives_the_same_stacks(make: Callable[[], Any]) -> None:
    wanted = seen_of("in one call", World.fill, "large", view=lambda: FrameStack(3, NStep(2)))
    assert_same(seen_of("in one call", World.fill, "large", view=make), wanted)


MODES: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.device("meta"), "inference": torch.inference_mode, "fake": FakeTensorMode,
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_give_the_same_stacks_in_every_way(mode: str) -> None:
    def play(world: World) -> None:
        world.fill()
        with MODES[mode]():
            batch = world.buffer.sample(6)
        assert {type(x) for x in leaves_by_path(batch).values()} == {FakeTensor if mode == "fake" else Tensor}
        world.seen.append(None if mode == "fake" else facts(batch))
        world.look()

    assert_same_in(["places first", "without the exchange"], play, "large", view=stacks("large", "repeat"))


def test_stacks_are_contiguous() -> None:
    batch = filled("cameras", view=stacks("cameras", "repeat")()).sample(9)
    stacked = [batch[name, camera] for name in ("obs", "next_obs") for camera in CAMERAS]
    assert all(x.is_contiguous() and x.shape[:2] == (9, 3) for x in stacked)


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
