"""Fresh with every view and inner sampler through all that happens to a replay, beside a list of what was served."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import (
    Chunks,
    Field,
    FrameStack,
    Fresh,
    Hindsight,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Sequence,
    Uniform,
)
from support.cases import covering
from support.effort import often

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = Schema({"obs": {"x": (), "achieved_goal": (2,), "desired_goal": (2,)}, "reward": (), **FLAGS})
PLAIN = Schema({"obs": (), "reward": (), **FLAGS})


def reward(achieved: Any, desired: Any) -> Any:
    return (achieved - desired)[:, 0]


VIEWS: dict[str, Callable[[], Any]] = {
    "3-step": lambda: NStep(3),
    "stacks": lambda: FrameStack(3, keys=("x",)),
    "goals": lambda: Hindsight(reward, "future"),
    "sequences": lambda: Sequence(4, 1, "half"),
    "whole sequences": lambda: Sequence(3, overlap="none", drop_tail=True),
    "chunks": lambda: Chunks(4),
}
INNER: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "prioritized": Prioritized,
    "recent, prioritized": lambda: Recent(0.9, 5, inner=Prioritized()),
}


class World:
    """A replay, and in plain lists what came to it and what was served as new."""

    def __init__(self, inner: str, view: str, seed: int, rows: int = 30) -> None:
        self.rng, self.num_envs = np.random.default_rng([seed, *f"{inner}{view}".encode()]), 2
        self.replay: Any = ReplayBuffer(
            SCHEMA, rows * 2, 2, sampler=Fresh(INNER[inner]()), view=VIEWS[view](), seed=seed, check_ends=False
        )
        self.view, self.came, self.done = view, set[int](), list[int]()

    def step(self) -> dict[str, Any]:
        two = self.rng.normal(size=(4, 2, 2)).astype(np.float32)
        obs = [{"x": x[:, 0], "achieved_goal": x, "desired_goal": x + 1} for x in two[:2]]
        ends = self.rng.random((2, 2)) < 0.1
        return {"obs": obs[0], "next_obs": obs[1], "reward": two[2, :, 0], "terminated": ends[0], "truncated": ends[1]}

    def add(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.replay.add(self.step())
            self.look()

    def look(self) -> list[int]:
        """What can be drawn, in the order of completion; data() has it so whatever the sampler does."""
        there = self.replay.data()["index"].tolist()
        self.came |= {*there}
        return there

    @property
    def waiting(self) -> list[int]:
        return [index for index in self.look() if index not in {*self.done}]

    def sample(self, count: int) -> None:
        if not self.look():
            return
        wanted = self.waiting[:count]
        batch = self.replay.sample(count)
        assert batch["index"][: len(wanted)].tolist() == wanted
        self.done += wanted
        if self.replay.has_priorities:
            errors = np.ones(count, np.float32)
            if "mask" in batch.keys():
                mask = batch["mask"]
                self.replay.update_priorities(batch["index"], mask.float(), mask)
            else:
                self.replay.update_priorities(batch["index"], errors)
            assert (batch["weight"][: len(wanted)] == 1).all()

    def check(self) -> None:
        sampler, waiting = self.replay.sampler, self.waiting
        assert (sampler.served, sampler.waiting) == (len(self.done), len(waiting))
        assert len({*self.done}) == len(self.done)
        assert sampler.lost == len(self.came - {*self.done} - {*waiting})
        self.replay.check()


def interrupted(world: World, path: Path) -> None:
    world.replay.interrupt([int(world.rng.integers(2))])
    world.look()


def loaded(world: World, path: Path) -> None:
    world.replay.save(path / "s")
    world.replay = ReplayBuffer.load(path / "s", view=VIEWS[world.view]())


def resized(world: World, path: Path) -> None:
    world.replay.save(path / "s")
    capacity = 2 * int(world.rng.integers(12, 40))
    world.replay = ReplayBuffer.load(path / "s", capacity=capacity, view=VIEWS[world.view]())


def served(world: World, path: Path) -> None:
    if not world.look():
        return
    with world.replay.serve(3, 3) as batches:
        for batch in batches:
            wanted = world.waiting[:3]
            assert batch["index"][: len(wanted)].tolist() == wanted
            world.done += wanted
            break
        world.replay.add(world.step())


def copied(world: World, path: Path) -> None:
    world.replay = copy.deepcopy(world.replay)


def pickled(world: World, path: Path) -> None:
    world.replay = pickle.loads(pickle.dumps(world.replay))


def cleared(world: World, path: Path) -> None:
    world.replay.clear()


EVENTS: list[Callable[[World, Path], None]] = [interrupted, loaded, resized, served, copied, pickled, cleared]


@pytest.mark.parametrize(("view", "inner"), covering(VIEWS, INNER, full=2, quick=1))
def test_each_new_one_is_served_once_whatever_happens(view: str, inner: str, tmp_path: Path) -> None:
    world = World(inner, view, seed=1)
    for turn in range(often(60, 300)):
        world.add(int(world.rng.integers(0, 6)))
        if world.rng.random() < 0.4:
            EVENTS[int(world.rng.integers(len(EVENTS)))](world, tmp_path)
            world.look()
        for _ in range(int(world.rng.integers(0, 3))):
            world.sample(int(world.rng.integers(1, 9)))
        if turn % 5 == 0:
            world.check()
    world.check()
    assert len(world.done) > 15


def test_a_batch_of_a_mixture_has_new_rows_of_each_and_serves_them_once() -> None:
    worlds = [World("prioritized", "3-step", seed) for seed in (1, 2)]
    mixture = Mixture({"a": worlds[0].replay, "b": worlds[1].replay}, {"a": 0.75, "b": 0.25})
    for turn in range(12):
        for world in worlds:
            world.add(turn % 3 + 2)
        wanted = [world.waiting[:n] for world, n in zip(worlds, (9, 3), strict=True)]
        batch = mixture.sample(12)
        assert batch["index"][: len(wanted[0])].tolist() == wanted[0]
        assert batch["index"][9 : 9 + len(wanted[1])].tolist() == wanted[1]
        for world, new in zip(worlds, wanted, strict=True):
            world.done += new
            world.check()


# Merging.


@pytest.mark.parametrize("view", ["3-step", "sequences"])
def test_what_is_appended_is_new_in_the_order_in_which_it_was_completed(view: str) -> None:
    one, other = World("uniform", view, 1, rows=60), World("uniform", view, 2, rows=60)
    one.add(8)
    one.sample(7)
    other.add(9)
    other.sample(5)
    one.replay.append(other.replay)
    one.look()
    one.sample(100)
    one.check()
    assert one.replay.sampler.waiting == 0


@pytest.mark.parametrize("view", ["3-step", "sequences", "chunks"])
def test_envs_that_move_to_another_replay_take_with_them_what_was_served(view: str) -> None:
    one, other = World("uniform", view, 1, rows=60), World("prioritized", view, 2, rows=60)
    other.add(20)
    other.sample(9)
    was_served = {*other.replay.data()["index"].tolist()} & {*other.done}
    data = other.replay.data()
    values = {x for x, i in zip(_values(data), data["index"].tolist(), strict=True) if i in was_served}
    one.replay.append(other.replay, envs={0: 1, 1: 0})
    sampler = one.replay.sampler
    assert sampler.lost == 0
    assert sampler.waiting >= other.replay.sampler.waiting  # a window that the move has ended is new
    batch = one.replay.sample(sampler.waiting)
    assert values.isdisjoint(_values(batch))
    everything = {*_values(one.replay.data())}
    assert everything == values | {*_values(batch)}
    # an env in which some wait already takes all as new
    one.add(3)
    waits = sampler.waiting
    one.replay.append(other.replay, envs={0: 1})
    assert sampler.waiting > waits


def _values(batch: Any) -> list[float]:
    """A number for each row, or window: its first observation."""
    x = np.asarray(batch["obs", "x"])
    return x[0].tolist() if x.ndim == 2 else x.tolist()


# Files.


def killed(path: Path, pipe: int, steps: int) -> None:
    """Add and learn, and say after each flush what was served up to it, until killed."""
    replay = opened(path)
    replay.sampler.skip()
    for t in range(steps):
        replay.add(numbered(t))
        if t > 2:
            batch = replay.sample(3)
            os.write(pipe, b"%d %d\n" % (t, int(batch["index"][0])))
        if t % 5 == 4:
            replay.flush()
            os.write(pipe, b"flushed %d\n" % replay.sampler.served)


def opened(path: Path) -> Any:
    return ReplayBuffer.open(path, PLAIN, 2000, 2, sampler=Fresh(Prioritized()), check_ends=False, seed=0)


def numbered(t: int) -> dict[str, Any]:
    flags = np.zeros(2, np.bool_)
    return {"obs": np.full(2, t), "reward": np.full(2, t), "terminated": flags, "truncated": flags}


@pytest.mark.parametrize("instant", range(often(3, 12)))
def test_after_a_kill_at_any_instant_nothing_is_missing(instant: int, tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        killed(tmp_path / "r", write, 500)
        os._exit(0)
    os.close(write)
    said = b""
    while said.count(b"\n") < 20 + 11 * instant:
        heard = os.read(read, 4096)
        assert heard, "the child has ended"
        said += heard
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    lines = said.decode().splitlines()
    flushed = [int(line.split()[1]) for line in lines if line.startswith("flushed")][-1]
    replay = opened(tmp_path / "r")
    sampler, stored = replay.sampler, replay.data()["index"].tolist()
    assert sampler.served >= flushed  # a flush after the last line may be in
    new = stored[sampler.served :]  # none, if it was killed right after a flush
    assert sampler.waiting == len(new)
    assert replay.sample(len(new) + 1)["index"][:-1].tolist() == new
    assert sampler.lost == 0
    replay.close()
