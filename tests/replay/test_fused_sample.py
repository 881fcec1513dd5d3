"""A batch that is drawn and read in one compiled call, or in two, is the batch of the long way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import inside
from covering import covering
from drawing import EVERY_SAMPLER, GOALS, KINDS, World, assert_same, both, facts, filled, state
from relabelling import worth
from relive import FrameStack, Hindsight, NStep, Prioritized, Recent, ReplayBuffer, Schema, Uniform
from relive.batches import Members
from relive.errors import SchemaError
from relive.kernels.tensor_calls import tensor_calls
from relive.memory.device import DeviceRows
from relive.replay import reader
from relive.replay.reader import Reader
from replays import FLAGS
from twins import SAMPLERS

pytestmark = pytest.mark.skipif(tensor_calls() is None, reason="this torch has no functions for compiled code")


# the same batches


@pytest.mark.parametrize(
    ("sampler", "kind", "own", "seed"),
    covering(
        EVERY_SAMPLER,
        [kind for kind in KINDS if kind != "goals"],
        ["own", "ordered", "unordered"],
        range(3),
        full=2,
        quick=1,
    ),
)
def test_the_fused_call_makes_the_batches_of_the_long_way(sampler: str, kind: str, own: str, seed: int) -> None:
    options = {"ordered": own != "unordered", "own_next_obs": own == "own"}
    one, other = both(kind, seed, 12, sampler=EVERY_SAMPLER[sampler], **options)
    assert_same(one.seen, other.seen)


@pytest.mark.parametrize(("sampler", "goals", "seed"), covering(EVERY_SAMPLER, GOALS, range(3), full=2, quick=1))
def test_relabelled_batches_are_those_of_the_long_way(sampler: str, goals: str, seed: int) -> None:
    one, other = both("goals", seed, 12, sampler=EVERY_SAMPLER[sampler], view=GOALS[goals])
    assert_same(one.seen, other.seen)


@pytest.mark.parametrize("kind", ["flat", "nested", "goals"])
def test_a_save_goes_on_with_the_same_batches(kind: str, tmp_path: Any) -> None:
    worlds = both(kind, 1, 10, sampler=EVERY_SAMPLER["beta by schedule"],
                  view=GOALS["past, info"] if kind == "goals" else lambda: NStep(3))  # fmt: skip
    for world in worlds:
        world.save(tmp_path / str(world.long))
        world.play(5)
    assert_same(worlds[0].seen, worlds[1].seen)


@pytest.mark.parametrize("size", [np.uint8(200), np.int64(3), np.int32(7)])
def test_a_size_that_is_a_numpy_integer_is_that_number(size: Any) -> None:
    for world in both("flat"):
        for _ in range(9):
            world.add()
        assert [facts(world.buffer.sample(size))[1:3] for _ in range(2)] == [((int(size),), [int])] * 2
        served = iter(world.buffer.serve(size, depth=3))
        assert [next(served).batch_size[0], next(served).batch_size[0]] == [size, size]
        assert world.buffer.stats()["sampled"] == 4 * int(size)


def test_windows_of_steps_without_order_are_refused_as_by_the_long_way() -> None:
    found = []
    for world in both("flat", ordered=False, sampler=Prioritized):
        world.add().look()
        for n in (2, 1):
            world.buffer.view.n = n
            world.look()
        assert world.seen[2][0] is SchemaError
        found.append(world.seen)
    assert_same(*found)


# where it is taken


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError


DIRECT: dict[str, Callable[[], Any]] = {
    "flat": filled,
    "nested": lambda: filled("nested", view=NStep(3)),
    "odd": lambda: filled("odd", sampler=Prioritized(normalize="buffer")),
    "unordered": lambda: filled(ordered=False),
    "own next_obs": lambda: filled(own_next_obs=True, view=NStep(2)),
    "recent": lambda: filled(sampler=Recent(0.9, 2)),
    "recent, prioritized": lambda: filled(sampler=Recent(1.0, 2, inner=Prioritized())),
    "loaded": lambda: copy.deepcopy(filled()),
    **{name: lambda goals=goals: filled("goals", view=goals()) for name, goals in GOALS.items()
       if name not in ("none", "steps")},
}  # fmt: skip


@pytest.mark.parametrize("kind", DIRECT)
def test_small_fields_in_ram_are_read_in_the_fused_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = DIRECT[kind]()
    monkeypatch.setattr(Reader, "read", refuse)
    for sampled in (buffer.sample(7), *buffer.batches(3, 7), *buffer.serve(7, count=2)):
        assert sampled.batch_size == (7,)


class MyNStep(NStep):
    def read(self, ring: Any, places: Any, key: int | None = None) -> Any:
        return super().read(ring, places * 0 + places[0], key)


class MyHindsight(Hindsight):
    pass


class MyUniform(Uniform):
    def draw(self, count: int, key: int, update: int, of: int) -> Any:
        places, extras = super().draw(count, key, update, of)
        return places * 0 + places[0], extras


class MyPrioritized(Prioritized):
    pass


def on_a_device() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        device = torch.device("cpu")  # stands for any
        patch.setattr("relive.replay.buffer.ReplayRows", lambda leaves, rows: DeviceRows(leaves, rows, device))
        return filled()


LONG: dict[str, Callable[[], Any]] = {
    "another device": on_a_device,
    "each_reward": lambda: filled(view=NStep(2, each_reward=lambda rewards: rewards * 2)),
    "a view of the user's": lambda: filled(view=MyNStep(2)),
    "goals of the user's": lambda: filled("goals", view=MyHindsight(worth)),
    "a sampler of the user's": lambda: filled(sampler=MyUniform()),
    "priorities of the user's": lambda: filled(sampler=MyPrioritized()),
    "inside of recent": lambda: filled(sampler=Recent(0.9, 2, inner=MyUniform())),
    "recent, some": lambda: filled(sampler=Recent(0.9, 2, inner=Prioritized())),
    "without replacement": lambda: filled(sampler=SAMPLERS["without replacement"]()),
    "stacks": lambda: filled(view=FrameStack(2)),
    "no goals": lambda: filled("goals", view=GOALS["none"]()),
    "whole steps": lambda: filled("goals", view=GOALS["steps"]()),
    "large": lambda: filled("large"),
    "deep": lambda: filled("deep"),
}


@pytest.fixture
def never_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is made by the fused call."""
    monkeypatch.setattr(Members, "batch", refuse)


@pytest.mark.usefixtures("never_fused")
@pytest.mark.parametrize("kind", LONG)
def test_all_else_is_read_the_long_way(kind: str) -> None:
    buffer = LONG[kind]()
    assert buffer.sample(7).batch_size == (7,)
    assert next(iter(buffer.batches(2, 7))).batch_size == (7,)


@pytest.mark.usefixtures("never_fused")
def test_a_replay_in_files_or_of_another_store_is_read_the_long_way(tmp_path: Any) -> None:
    def rows(fields: Any, count: int) -> Any:
        arrays = {path: torch.zeros(count, *field.shape, dtype=field.dtype).numpy() for path, field in fields.items()}
        return SimpleNamespace(read=lambda path, at: arrays[path][at], write=lambda path, at, x: None)

    schema = Schema({**KINDS["flat"], "reward": (), **FLAGS})
    with ReplayBuffer.open(tmp_path / "files", schema, 40, 2, seed=0) as files:
        for buffer in (files, ReplayBuffer(schema, 40, 2, store=rows)):
            world = World("flat", 0, False)
            world.take(buffer)
            world.add().add()
            assert buffer.sample(3).batch_size == (3,)


@pytest.mark.usefixtures("never_fused")
@pytest.mark.parametrize("goals", [None, "future"])
def test_workers_of_a_data_loader_draw_the_long_way(goals: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "batch", refuse, raising=True)
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", SimpleNamespace(seed=3))
    assert filled("goals", view=GOALS[goals]() if goals else None).sample(5).batch_size == (5,)


def test_a_batch_of_many_bytes_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (filled() for _ in range(2))
    monkeypatch.setattr(reader, "LONG", 10 * inside.fused(inside.reader(small)).parts.rows.nbytes)
    fused, make = list[int](), Members.batch
    monkeypatch.setattr(Members, "batch", lambda self, dicts, count: fused.append(count) or make(self, dicts, count))
    made = [small.sample(count) for count in (10, 11)]
    assert fused == [10]
    inside.take_the_long_way(large)
    again = [large.sample(count) for count in (10, 11)]
    assert fused == [10]
    assert_same([*map(facts, made), state(small)], [*map(facts, again), state(large)])


def test_where_torch_lacks_the_functions_the_long_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "tensor_calls", lambda: None)
    assert inside.calls(inside.reader(filled())) is None


MODES: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "fake": FakeTensorMode,
}


@pytest.mark.parametrize("goals", [None, "future"])
@pytest.mark.parametrize("mode", [*MODES, "vmap", "grad", "double"])
def test_modes_of_torch_give_the_same_tensors_either_way(mode: str, goals: str | None) -> None:
    found = []
    for world in both("goals", sampler=EVERY_SAMPLER["beta by schedule"], view=GOALS[goals] if goals else None):
        for _ in range(30):
            world.add()
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

            def inside(x: Tensor, world: World = world, drawn: list[Any] = drawn) -> Tensor:
                drawn.append(world.buffer.sample(6))
                return (x * 2).sum()

            getattr(torch.func, mode)(inside)(torch.ones(3))
        leaves = list(drawn[0].values(True, True))
        assert {type(x) for x in leaves} == {FakeTensor if mode == "fake" else Tensor}
        seen = [(x.dtype, x.shape) for x in leaves] if mode == "fake" else facts(drawn[0])
        world.look()
        found.append([seen, *world.seen])
    assert_same(*found)
