"""Batches of sequences are the same however rows are stored, drawn and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relive import Prioritized, Recent, Schema, Sequence, Uniform
from relive.errors import EmptyError, SchemaError
from relive.memory.allocator import SMALL
from support.cases import covering
from support.effort import often
from support.random_draws import (
    OTHER_WAYS,
    SEEDED_WAYS,
    WAYS,
    World,
    assert_same,
    assert_same_in,
    facts,
    filled,
    seen_of,
    state,
)
from support.replays import FLAGS

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


@pytest.mark.parametrize(("kind", "sampler", "way", "view"), covering(KINDS, SAMPLERS, SEEDED_WAYS, VIEWS))
def test_sequences_are_the_same_in_every_way(kind: str, sampler: str, way: tuple[str, int], view: str) -> None:
    options = {"sampler": SAMPLERS[sampler], "view": VIEWS[view]}
    assert_same_in(way[:1], lambda world: world.play(often(8, 12)), kind, way[1], **options)


@pytest.mark.parametrize("weigh", ["windows", "steps", "episodes"])
def test_windows_of_all_weights_are_the_same_in_every_way(weigh: Any) -> None:
    options = {"sampler": Uniform, "view": lambda: Sequence(4, overlap="half", weigh=weigh)}
    assert_same_in(["places first", "in files"], lambda world: world.play(often(8, 12)), "recurrent", 3, **options)


@pytest.mark.parametrize("change", [{"overlap": "none"}, {"drop_tail": True}, {"length": 2, "burn_in": 3}, {"n": 3}])
def test_a_change_of_the_view_counts_from_the_next_batch_on(change: dict[str, Any]) -> None:
    before, after = {"length": 4, "burn_in": 1}, {"length": 4, "burn_in": 1} | change

    def play(world: World) -> None:
        world.fill()
        for name, value in after.items():
            setattr(world.buffer.view, name, value)
        world.look()

    changed = seen_of("in one call", play, "recurrent", view=lambda: Sequence(**before))
    new = seen_of("in one call", play, "recurrent", view=lambda: Sequence(**after))
    assert_same(changed[2:], new[2:])


class SameSequence(Sequence):
    pass


def test_a_class_of_the_users_that_changes_nothing_gives_the_same_sequences() -> None:
    found = [
        seen_of("in one call", World.fill, "recurrent", view=lambda v=v: v(3, 1)) for v in (Sequence, SameSequence)
    ]
    assert_same(*found)


class MySequence(Sequence):
    def read(self, ring: Any, places: Any, key: int | None = None) -> Any:
        return super().read(ring, places * 0 + places[0], key)


def test_a_view_of_the_users_own_kind_reads_in_its_own_way() -> None:
    batch = filled("recurrent", view=MySequence(3)).sample(9)
    assert len(set(batch["index"].tolist())) == 1


# errors


def test_nothing_is_drawn_before_a_sequence_is_complete_or_after_all_was_cleared() -> None:
    def play(world: World) -> None:
        world.look()  # nothing is stored
        for _ in range(3):
            world.add()
            world.look()
        world.fill()
        world.buffer.clear()
        world.look()
        assert [seen[0] is EmptyError for seen in world.seen[::2]] == [True, True, True, True, False, True]
        assert world.buffer.stats()["batches"] == 1

    assert_same_in(OTHER_WAYS, play, "recurrent", view=lambda: Sequence(5, drop_tail=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_field_of_a_name_that_batches_use_is_refused(way: str) -> None:
    with WAYS[way]() as make:
        schema = Schema({"obs": (3,), "start": (), "reward": (), **FLAGS})
        buffer: Any = make(schema, check_ends=False, seed=0)
        buffer.view = Sequence(3)
        two = {name: np.zeros(2, bool) for name in FLAGS}
        for _ in range(5):
            buffer.add(obs=np.zeros((2, 3), "f4"), start=[0.0, 0.0], reward=[0.0, 0.0], **two)
        before = state(buffer)
        with pytest.raises(SchemaError, match="'start'"):
            buffer.sample(2)
        buffer.view = Sequence(3)
        assert state(buffer)[0] == before[0]
        assert buffer.stats()["batches"] == 1


# the memory


def test_the_parts_of_a_batch_keep_only_their_own_memory() -> None:
    buffer = filled("recurrent", view=Sequence(4))
    count = SMALL // 400
    batch = buffer.sample(count)
    wanted, index, hidden = facts(batch), batch["index"], batch["hidden"]
    del batch
    for _ in range(5):
        buffer.sample(count)
    leaves, (_, known), states = wanted[3:]
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
