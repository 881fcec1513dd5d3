"""Batches are the same however rows are stored, drawn and read; and they are the caller's own."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from relive import FrameStack, Hindsight, NStep, Prioritized, Recent, Transition, Uniform, WithoutReplacement
from relive.batches import leaves_by_path
from relive.errors import EmptyError, SchemaError
from relive.replay.serving import Process
from relive.ring import Ring
from support import internals
from support.cases import covering
from support.effort import often
from support.forks import in_fork
from support.goal_plays import worth
from support.interrupts import broken_off
from support.random_draws import (
    EVERY_SAMPLER,
    GOALS,
    KINDS,
    OTHER_WAYS,
    SEEDED_WAYS,
    WAYS,
    World,
    assert_same,
    assert_same_in,
    facts,
    filled,
    others_run_during,
    seen_of,
    state,
)

PLAIN_KINDS = [kind for kind in KINDS if kind != "goals"]


def after_steps(count: int, work: Callable[[World], Any]) -> Callable[[World], Any]:
    """A play of so many steps and then ``work``."""

    def play(world: World) -> None:
        for _ in range(count):
            world.add()
        work(world)

    return play


# the same batches


TURNS = often(8, 12)


@pytest.mark.parametrize(
    ("sampler", "kind", "way", "own"),
    covering(EVERY_SAMPLER, PLAIN_KINDS, SEEDED_WAYS, ["own", "ordered", "unordered"], full=2, quick=1),
)
def test_batches_are_the_same_in_every_way(sampler: str, kind: str, way: tuple[str, int], own: str) -> None:
    options = {"ordered": own != "unordered", "own_next_obs": own == "own"}
    assert_same_in(way[:1], lambda world: world.play(TURNS), kind, way[1], sampler=EVERY_SAMPLER[sampler], **options)


@pytest.mark.parametrize(("sampler", "goals", "way"), covering(EVERY_SAMPLER, GOALS, SEEDED_WAYS, full=2, quick=1))
def test_relabelled_batches_are_the_same_in_every_way(sampler: str, goals: str, way: tuple[str, int]) -> None:
    options = {"sampler": EVERY_SAMPLER[sampler], "view": GOALS[goals]}
    assert_same_in(way[:1], lambda world: world.play(TURNS), "goals", way[1], **options)


@pytest.mark.parametrize("kind", ["flat", "nested", "goals"])
def test_a_save_goes_on_with_the_same_batches(kind: str, tmp_path: Any) -> None:
    view = GOALS["past, info"] if kind == "goals" else lambda: NStep(3)
    options = {"sampler": EVERY_SAMPLER["beta by schedule"], "view": view}
    found = []
    for way in ("in one call", "places first", "in files")[:: often(2, 1)]:
        for saved in (False, True):

            def play(world: World, to: Any = tmp_path / f"{way}, {saved}", saved: bool = saved) -> None:
                world.play(10)
                if saved:
                    world.save(to)
                world.play(5)

            found.append(seen_of(way, play, kind, 1, **options))
    for seen in found[1:]:
        assert_same(seen, found[0])


class PlainUniform(Uniform):
    pass


class PlainPrioritized(Prioritized):
    pass


class PlainEpochs(WithoutReplacement):
    pass


class PlainWindows(NStep):
    pass


class PlainGoals(Hindsight):
    pass


USERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "uniform": ("flat", {"sampler": Uniform}, {"sampler": PlainUniform}),
    "prioritized": ("nested", {"sampler": Prioritized}, {"sampler": PlainPrioritized}),
    "epochs": ("flat", {"sampler": WithoutReplacement}, {"sampler": PlainEpochs}),
    "inside of recent": (
        "flat", {"sampler": lambda: Recent(0.9, 2)}, {"sampler": lambda: Recent(0.9, 2, inner=PlainUniform())},
    ),
    "windows": ("odd", {"view": lambda: NStep(2)}, {"view": lambda: PlainWindows(2)}),
    "goals": ("goals", {"view": lambda: Hindsight(worth)}, {"view": lambda: PlainGoals(worth)}),
}  # fmt: skip


@pytest.mark.parametrize("which", USERS)
def test_a_class_of_the_users_that_changes_nothing_gives_the_same_batches(which: str) -> None:
    kind, plain, own = USERS[which]

    def play(world: World) -> None:
        for count in (1, 7, 19):
            world.look(count)
            world.rate()
            world.draw_more()

    assert_same(*(seen_of("in one call", after_steps(30, play), kind, 4, **options) for options in (plain, own)))


class FirstPlace(Uniform):
    """Draws the first of its places only."""

    def draw(self, count: int, key: int, update: int, of: int) -> Any:
        places, extras = super().draw(count, key, update, of)
        return places * 0 + places[0], extras


class FirstWindow(NStep):
    """Reads the first of its windows only."""

    def read(self, ring: Any, places: Any, key: int | None = None) -> Any:
        return super().read(ring, places * 0 + places[0], key)


@pytest.mark.parametrize("options", [{"sampler": FirstPlace}, {"view": FirstWindow}])
def test_a_class_of_the_users_draws_and_reads_in_its_own_way(options: dict[str, Any]) -> None:
    batch = filled(**{name: make() for name, make in options.items()}).sample(9)
    assert len(set(batch["index"].tolist())) == 1


@pytest.mark.parametrize("own", [False, True])
def test_rewards_that_a_function_leaves_as_they_are_give_the_same_batches(own: bool) -> None:
    def play(world: World) -> None:
        for count in (1, 7, 30):
            world.look(count)

    options = [{"view": lambda call=call: NStep(3, 0.5, each_reward=call)} for call in (None, lambda rewards: rewards)]
    found = [seen_of("in one call", after_steps(30, play), "flat", own_next_obs=own, **view) for view in options]
    assert_same(*found)


@pytest.mark.parametrize("size", [np.uint8(200), np.int64(3), np.int32(7)])
@pytest.mark.parametrize("way", ["in one call", "places first"])
def test_a_size_that_is_a_numpy_integer_is_that_number(size: Any, way: str) -> None:
    with WAYS[way]() as make:
        world = World("flat", 0, make)
        for _ in range(9):
            world.add()
        assert [len(world.buffer.sample(size)) for _ in range(2)] == [int(size)] * 2
        served = iter(world.buffer.serve(size, depth=3))
        assert [len(next(served)), len(next(served))] == [size, size]
        assert world.buffer.stats()["sampled"] == 4 * int(size)


# one call


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError


ONE_CALL: dict[str, Callable[[], Any]] = {
    "flat": filled,
    "nested": lambda: filled("nested", view=NStep(3)),
    "odd": lambda: filled("odd", sampler=Prioritized(normalize="buffer")),
    "deep": lambda: filled("deep", view=Transition()),
    "unordered": lambda: filled(ordered=False),
    "own next_obs": lambda: filled(own_next_obs=True, view=NStep(2)),
    "epochs": lambda: filled(sampler=WithoutReplacement()),
    "recent": lambda: filled(sampler=Recent(0.9, 2)),
    "recent, prioritized": lambda: filled(sampler=Recent(1.0, 2, inner=Prioritized())),
}


@pytest.mark.parametrize("kind", ONE_CALL)
def test_small_fields_in_ram_are_read_in_one_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ONE_CALL[kind]()
    for part in ("plan", "read", "take"):
        monkeypatch.setattr(Ring, part, refuse)
    for sampled in (buffer.sample(7), *buffer.batches(3, 7), *buffer.serve(7, count=2)):
        assert len(sampled) == 7


# what torch and other processes do


@pytest.mark.parametrize("goals", [None, "future"])
def test_each_worker_of_a_data_loader_draws_batches_of_its_own(
    goals: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(world: World) -> None:
        for seed in (3, 4, 3, None):
            info = seed if seed is None else SimpleNamespace(seed=seed)
            monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", info)
            monkeypatch.setattr(Process, "is_first", False)  # a worker is another process, which does not know it
            world.look(20)

    options = {"view": GOALS[goals] if goals else None}
    assert_same_in(["places first", "in files"], after_steps(30, play), "goals", **options)
    seen = seen_of("in one call", after_steps(30, play), "goals", **options)
    assert len({str(batch) for batch in seen[::2]}) == 4  # the third batch of seed 3 is another one than the first


LONG: dict[str, tuple[Callable[[], Any], int]] = {
    "windows": (filled, 5000),
    "stacks": (lambda: filled("large", view=FrameStack(4)), 400),
    "goals": (lambda: filled("goals", view=GOALS["future"]()), 3000),
}


@pytest.mark.parametrize("kind", LONG)
def test_other_threads_run_while_many_bytes_are_read_and_only_then(kind: str) -> None:
    make, count = LONG[kind]
    buffer = make()
    assert others_run_during(lambda _: buffer.sample(count))
    assert not others_run_during(lambda _: buffer.sample(5), often(300, 2000))


def test_many_rows_in_files_are_read_like_those_in_ram() -> None:
    assert_same_in(OTHER_WAYS, after_steps(30, lambda world: world.look(9000)), "odd", sampler=Prioritized)


MODES: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "fake": FakeTensorMode,
}


@pytest.mark.parametrize("goals", [None, "future"])
@pytest.mark.parametrize("mode", [*MODES, "vmap", "grad", "double"])
def test_modes_of_torch_give_the_same_tensors_in_every_way(mode: str, goals: str | None) -> None:
    def play(world: World) -> None:
        world.look()
        drawn, before = list[Any](), torch.get_default_dtype()
        if mode in MODES:
            with MODES[mode]():
                drawn.append(world.buffer.sample(6))
        elif mode == "double":
            torch.set_default_dtype(torch.float64)
            try:
                drawn.append(world.buffer.sample(6))
            finally:
                torch.set_default_dtype(before)
        else:

            def within(x: Tensor) -> Tensor:
                drawn.append(world.buffer.sample(6))
                return (x * 2).sum()

            getattr(torch.func, mode)(within)(torch.ones(3))
        leaves = list(leaves_by_path(drawn[0]).values())
        assert {type(x) for x in leaves} == {FakeTensor if mode == "fake" else Tensor}
        world.seen.append([(x.dtype, x.shape) for x in leaves] if mode == "fake" else facts(drawn[0]))
        world.look()

    options = {"sampler": EVERY_SAMPLER["beta by schedule"], "view": GOALS[goals] if goals else None}
    assert_same_in(["places first", "without the exchange"], after_steps(30, play), "goals", **options)


def test_a_forked_child_draws_the_same_batches() -> None:
    buffer = filled("goals", view=GOALS["final, 3-step, both flags"](), sampler=Prioritized())

    def child() -> Any:
        return facts(buffer.sample(9))

    assert in_fork(child) == child()


# errors


def test_windows_of_steps_without_order_are_refused_in_every_way() -> None:
    def play(world: World) -> None:
        world.add().look()
        for n in (2, 1):
            world.buffer.view.n = n
            world.look()
        assert world.seen[2][0] is SchemaError
        assert world.buffer.stats()["batches"] == 3  # a batch that the view cannot read counts as drawn

    assert_same_in(OTHER_WAYS, play, "flat", ordered=False, sampler=Prioritized)


@pytest.mark.parametrize("goals", [None, "future"])
@pytest.mark.parametrize("sampler", ["uniform", "beta by schedule", "prioritized, independent", "recent, uniform"])
def test_an_empty_replay_has_nothing_to_draw_and_nothing_is_counted(sampler: str, goals: str | None) -> None:
    def play(world: World) -> None:
        for full in (False, True, False):
            for _ in range(20 * full):
                world.add()
            if not full:
                world.buffer.clear()
            world.look()
        with pytest.raises(EmptyError):
            world.buffer.sample(3)
        assert world.buffer.stats()["batches"] == 1

    options = {"sampler": EVERY_SAMPLER[sampler], "view": GOALS[goals] if goals else None}
    assert_same_in(["places first", "without the exchange", "in files"], play, "goals", **options)


def test_priorities_of_zero_are_named_as_the_reason() -> None:
    buffer = filled(sampler=Prioritized(alpha=2.0, eps=1e-200))
    index = buffer.data()["index"]
    buffer.update_priorities(index, torch.zeros(len(index)))
    before = internals.progress(buffer).draws, buffer.sampler.draw_state()
    with pytest.raises(EmptyError, match="the priorities of all transitions are 0"):
        buffer.sample(3)
    assert (internals.progress(buffer).draws, buffer.sampler.draw_state()) == before


@pytest.mark.parametrize("goals", [None, "final, 3-step, both flags"])
def test_after_a_batch_that_is_broken_off_anywhere_the_next_ones_are_as_expected(goals: str | None) -> None:
    view = GOALS[goals]() if goals else NStep(2)
    buffer, at = filled("goals", sampler=EVERY_SAMPLER["beta by schedule"](), view=view), 0
    while broken_off(lambda: buffer.sample(5), at):
        at += often(11, 1)
        other = internals.check_draws(copy.deepcopy(buffer))
        if at % 3 == 0:
            buffer.sampler.alpha = other.sampler.alpha = at / 99  # new priorities: all is made ready again
        assert_same([facts(buffer.sample(5)), state(buffer)], [facts(other.sample(5)), state(other)])
    assert at > 5
    buffer.check()


# the memory


def test_a_batch_outlives_its_replay() -> None:
    buffer = filled("nested", sampler=Prioritized())
    batch, gone = buffer.sample(50), weakref.ref(buffer)
    wanted = facts(batch)
    del buffer
    gc.collect()
    assert gone() is None
    filler = [np.full(n, 255, np.uint8) for n in range(1000, 9000, 8)]
    assert facts(batch) == wanted
    del filler


@pytest.mark.parametrize("goals", [None, "future"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the size of memory is read as Linux tells it")
def test_many_batches_take_no_more_memory_than_few(goals: str | None) -> None:
    buffer, sizes = filled("goals", view=GOALS[goals]() if goals else NStep(2), sampler=Prioritized()), list[int]()
    for _ in range(3):
        for _ in range(1000):  # 9 MB if a batch in ten stayed
            batch = buffer.sample(400)
            buffer.update_priorities(batch["index"], batch["reward"])
        with open("/proc/self/statm") as statm:
            sizes.append(int(statm.read().split()[1]) * 4096)
    assert sizes[-1] - sizes[0] < 2**21


def test_threads_draw_and_drop_batches() -> None:
    buffer = filled("goals", view=GOALS["episode, 2-step"](), sampler=Prioritized())

    def work(_: int) -> int:
        batches = [buffer.sample(20) for _ in range(20)]
        return sum(bool(torch.isfinite(batch["reward"]).all()) for batch in batches)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [20] * 8
    assert buffer.stats()["batches"] == 161
    buffer.check()
