"""A batch of sequences that is drawn and read in one compiled call is the batch of the long way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import inside
from covering import covering
from drawing import World, assert_same, both, facts, filled, others_run_during, state
from relive import Prioritized, Recent, ReplayBuffer, Schema, Sequence, Uniform
from relive.batches import SequenceMembers
from relive.errors import EmptyError, SchemaError
from relive.kernels import cpu, reference
from relive.kernels.tensor_calls import tensor_calls
from relive.memory.allocator import SMALL
from relive.replay import reader
from relive.replay.reader import Reader
from replays import FLAGS

pytestmark = pytest.mark.skipif(tensor_calls() is None, reason="this torch has no functions for compiled code")

KINDS = "states", "recurrent", "flat", "odd", "deep", "large"
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "prioritized": lambda: Prioritized(beta=(0.2, 1.0, 7)),
    "prioritized, buffer": lambda: Prioritized(normalize="buffer"),
    "recent": lambda: Recent(0.9, 2),
    "recent, prioritized": lambda: Recent(0.9, 2, inner=Prioritized()),
}
VIEWS: dict[str, Callable[[], Sequence]] = {
    "one step": lambda: Sequence(1),
    "whole": lambda: Sequence(3, drop_tail=True),
    "burn-in": lambda: Sequence(3, 2, "none", n=2),
    "halves": lambda: Sequence(4, 1, "half", n=3, gamma=0.5, time_first=False),
}


# the same batches


@pytest.mark.parametrize(("kind", "sampler", "view", "seed"), covering(KINDS, SAMPLERS, VIEWS, range(3)))
def test_the_fused_call_makes_the_sequences_of_the_long_way(kind: str, sampler: str, view: str, seed: int) -> None:
    worlds = both(kind, seed, 12, sampler=SAMPLERS[sampler], view=VIEWS[view])
    assert_same(worlds[0].seen, worlds[1].seen)


@pytest.mark.parametrize("weigh", ["windows", "steps", "episodes"])
def test_windows_of_all_weights_are_those_of_the_long_way(weigh: Any) -> None:
    worlds = both("recurrent", 3, 12, sampler=Uniform, view=lambda: Sequence(4, overlap="half", weigh=weigh))
    assert_same(worlds[0].seen, worlds[1].seen)


@pytest.mark.parametrize("change", [{"overlap": "none"}, {"drop_tail": True}, {"length": 2, "burn_in": 3}, {"n": 3}])
def test_a_change_of_the_view_counts_from_the_next_batch_on(change: dict[str, Any]) -> None:
    found = []
    for long in (False, True):
        world = World("recurrent", 0, long, view=Sequence(4, 1))
        for _ in range(30):
            world.add()
        world.look()
        for name, value in change.items():
            setattr(world.buffer.view, name, value)
        world.look()
        found.append(world.seen)
    assert_same(*found)


# where it is taken


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(("sampler", "kind", "view"), covering(SAMPLERS, KINDS[:5], VIEWS))
def test_small_fields_and_states_in_ram_are_read_in_the_fused_call(
    sampler: str, kind: str, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = filled(kind, view=VIEWS[view](), sampler=SAMPLERS[sampler]())
    if "recent" in sampler:
        buffer.sampler.c_min = 1000  # draws among the newest take the long way
    monkeypatch.setattr(Reader, "read", refuse)
    for sampled in (buffer.sample(7), *buffer.batches(3, 7), *buffer.serve(7, count=2)):
        assert sampled.num_sequences == 7


class MySequence(Sequence):
    def read(self, ring: Any, places: Any, key: int | None = None) -> Any:
        return super().read(ring, places * 0 + places[0], key)


def test_a_view_of_the_users_own_kind_reads_in_its_own_way() -> None:
    batch = filled("recurrent", view=MySequence(3)).sample(9)
    assert len(set(batch["index"].tolist())) == 1


LONG: dict[str, Callable[[], Any]] = {
    "a large field": lambda: filled("large", view=Sequence(3)),
    "fields of the step before": lambda: filled("flat", view=Sequence(3, last=("action",))),
    "drawn by episodes": lambda: filled("flat", view=Sequence(3, weigh="episodes")),
    "more bytes of facts than one call makes": lambda: filled("flat", view=Sequence(3)),
}


@pytest.mark.parametrize("why", LONG)
def test_all_else_is_read_in_several_calls(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "bytes" in why:
        monkeypatch.setattr(reader, "LONG", 48)
    buffer = LONG[why]()
    monkeypatch.setattr(SequenceMembers, "batch", refuse)
    assert buffer.sample(7).num_sequences == 7


# errors


def test_an_error_is_that_of_the_long_way_and_leaves_the_same_behind() -> None:
    found = []
    for long in (False, True):
        world = World("recurrent", 0, long, view=Sequence(5, drop_tail=True))
        world.look()  # nothing is stored
        for _ in range(3):
            world.add()
            world.look()
        for _ in range(30):
            world.add()
        world.look()
        world.buffer.clear()
        world.look()
        assert world.seen[0][0] is EmptyError
        assert world.seen[-2][0] is EmptyError
        found.append(world.seen)
    assert_same(*found)


def test_a_field_of_a_name_that_batches_use_is_refused_as_on_the_long_way() -> None:
    found = []
    for long in (False, True):
        schema = Schema({"obs": (3,), "start": (), "reward": (), **FLAGS})
        buffer: Any = ReplayBuffer(schema, 9, check_ends=False, seed=0)
        buffer.view = Sequence(3)
        if long:
            inside.take_the_long_way(buffer)
        for _ in range(5):
            buffer.add(obs=np.zeros((1, 3), "f4"), start=[0.0], reward=[0.0], terminated=[False], truncated=[False])
        with pytest.raises(SchemaError, match="'start'") as caught:
            buffer.sample(2)
        found.append([str(caught.value), state(buffer)])
    assert_same(*found)


# the kernels


@pytest.mark.parametrize(("kind", "view", "sampler"), covering(KINDS[:5], VIEWS, ["uniform", "prioritized"]))
def test_both_twins_draw_and_read_the_same_sequences(kind: str, view: str, sampler: str) -> None:
    buffer = filled(kind, view=VIEWS[view](), sampler=SAMPLERS[sampler]())
    buffer.sample(3)
    weighed, ready, store = sampler != "uniform", inside.fused(inside.reader(buffer)), inside.ring(buffer).store
    memory = {"weights": inside.bound(buffer.sampler)().memory} if weighed else {}
    plain, cut = (
        ready.batch._replace(ring=inside.ring(buffer).arrays, **memory),
        inside.readers(buffer.view)[inside.ring(buffer)],
    )
    for count in (1, 2, 9, 30):
        found = []
        for kernels, batch in ((cpu, ready.handle), (reference, plain)):
            rows = torch.zeros(count, ready.parts.rows.nbytes, dtype=torch.uint8)
            steps, states = (store.memory(size).zero_() for size in (cut.shape(count), (count * cut.state_bytes,)))
            into, terms = ready.parts.members.empty(), ((count, 0, True, 0.4, 0.0), 0.9)
            fake = FakeTensorMode()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch: the address of a fake tensor was asked for
                for wrong in (
                    (rows[:0], steps, states), (rows.to("meta"), steps, states), (rows, steps[0], states),
                    (rows, fake.from_tensor(steps), states), (rows, steps, rows[0, :1]),
                ):  # fmt: skip
                    assert not kernels.sample_sequences(batch, *terms, *map(id, wrong), id(into))
            assert not any(value is not None for members in into for value in members.values())
            assert kernels.sample_sequences(batch, *terms, id(rows), id(steps), id(states), id(into))
            made = ready.parts.members.batch(into, count)
            found.append((rows.numpy().tobytes(), steps.numpy().tobytes(), states.numpy().tobytes(), facts(made)))
        assert found[0] == found[1]
    buffer.clear()
    for kernels, batch in ((cpu, ready.handle), (reference, plain)):
        assert not kernels.sample_sequences(batch, *terms, id(rows), id(steps), id(states), id(into))


def test_other_threads_run_while_sequences_are_read() -> None:
    buffer = filled("flat", view=Sequence(20, 10))
    buffer.sample(2)
    ready, count = inside.fused(inside.reader(buffer)), 400
    rows = torch.zeros(count, ready.parts.rows.nbytes, dtype=torch.uint8)
    store, cut = inside.ring(buffer).store, inside.readers(buffer.view)[inside.ring(buffer)]
    steps, states = store.memory(cut.shape(count)), store.memory((0,))

    def work(number: int) -> Any:
        into = ready.parts.members.empty()
        assert cpu.sample_sequences(
            ready.handle, (number, 0, False, 0.0, 0.0), 0.9, id(rows), id(steps), id(states), id(into)
        )
        return into

    assert others_run_during(work)


# the memory


def test_the_parts_of_a_batch_keep_only_their_own_memory() -> None:
    buffer = filled("recurrent", view=Sequence(4))
    count = SMALL // 400
    batch = buffer.sample(count)
    wanted, index, hidden = facts(batch), batch["index"], batch["hidden"]
    del batch
    for _ in range(5):
        buffer.sample(count)
    leaves, known, states = wanted[3:]
    assert facts(index) == dict(known)["index"]
    assert facts(hidden) == states
    assert index.untyped_storage().nbytes() < 80 * count
    assert hidden.untyped_storage().nbytes() == hidden.nbytes
    assert leaves


def test_states_lie_as_torch_expects_them() -> None:
    hidden = filled("states", view=Sequence(4)).sample(5)["hidden"]
    (layers, number), plain = hidden["a"], hidden["b"]
    assert (layers.shape, number.shape, plain.shape) == ((3, 5, 2, 2), (5,), (5, 4))
    assert all(state.is_contiguous() for state in (layers, number, plain))
