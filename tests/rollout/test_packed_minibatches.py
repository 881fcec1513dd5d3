"""Minibatches of packed columns are, to the bit, those of columns that are read where they lie."""

from __future__ import annotations

import copy
import cProfile
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relive import GAE, Field, RolloutBuffer, Schema, core
from relive.batches import leaves_by_path
from relive.errors import LifecycleError
from relive.memory.allocator import SMALL
from relive.rollout import minibatches as reading
from support import internals
from support.fields import bits, noise
from support.interrupts import broken_off

FLAG = Field((), torch.bool)
ENDS: dict[str, Any] = {"reward": (), "terminated": FLAG, "truncated": FLAG, "value": ()}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {"obs": (5,), "action": Field((2,), torch.bfloat16), "byte": Field((3, 2), torch.uint8)},
    "nested": {"obs": {"camera": Field((4, 4), torch.uint8), "joints": (7,)}, "action": ()},
    "nested deeply": {"obs": {"camera": (3,), "body": {"joints": (7,), "arm": {"hand": ()}}}, "action": ()},
    "images": {"obs": {"large": Field((40, 40), torch.uint8), "small": Field((3,), torch.float64)}, "action": ()},
}
"""The fields of a step besides those that every step has."""


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the passes that begin from now on read each column where it lies, copied first if the rows have wrapped."""

    def rows(self: Any, wanted: list[Any], _: bool) -> Any:
        return reading.rows_of(internals.columns(self).select(wanted), pack=False)

    return lambda: monkeypatch.setattr(reading.Minibatches, "_rows", rows)


def rollout(
    kind: str, *, masked: bool = False, finished: bool = True, steps: int = 24, wrap: bool = False
) -> RolloutBuffer:
    """A rollout of noise."""
    schema = Schema({**SCHEMAS[kind], **ENDS})
    made, rng = RolloutBuffer(schema, steps, 3, seed=7, wrap=wrap), np.random.default_rng(1)
    leaves = [(path, field) for path, field in schema.leaves.items() if path[0] in SCHEMAS[kind]]
    for t in range(steps):
        step: dict[str, Any] = {name: rng.normal(size=3).astype(np.float32) for name in ("reward", "value")}
        for k, (path, field) in enumerate(leaves):
            branch = step
            for name in path[:-1]:
                branch = branch.setdefault(name, {})
            branch[path[-1]] = noise((3, *field.shape), field.dtype, 100 * t + k)
        mask = {"mask": rng.random(3) < 0.7} if masked else {}
        made.add(step, terminated=rng.random(3) < 0.1, truncated=np.zeros(3, bool), **mask)
    return made.finish(GAE(), last_value=np.zeros(3)) if finished else made


def told(batch: Any) -> list[Any]:
    """All that can be told of a batch."""
    leaves = leaves_by_path(batch).items()
    return [
        type(batch),
        [(name, x.dtype, x.shape, bits(x)) for name, x in leaves],
        list(batch.keys()),
    ]


@pytest.mark.parametrize("options", [
    {"num_batches": 4, "epochs": 3}, {"batch_size": 7, "epochs": 2, "drop_last": True},
    {"batch_size": 5, "epochs": 2, "reshuffle": False}, {"batch_size": 1}, {"batch_size": 72, "epochs": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_packed_minibatches_are_those_of_columns_that_are_not_packed(
    kind: str, masked: bool, options: dict[str, Any], unpacked: Callable[[], None]
) -> None:
    if masked and options.get("batch_size") == 72:
        options = options | {"batch_size": 40}
    source = rollout(kind, masked=masked)
    found = [told(batch) for batch in source.minibatches(**options)]
    source.seed = 7
    unpacked()
    assert [told(batch) for batch in source.minibatches(**options)] == found


def test_normalized_advantages_and_a_choice_of_fields_are_the_same(
    unpacked: Callable[[], None],
) -> None:
    source, found = rollout("nested"), []
    for _ in range(2):
        source.seed = 7
        for fields in (("advantage", "obs"), None, ("value", "advantage"), ("value", "advantage")):
            batches = source.minibatches(num_batches=3, epochs=2, normalize_advantage=True, fields=fields)
            found.append([told(batch) for batch in batches])
        unpacked()
    assert found[:4] == found[4:]


def test_columns_that_move_or_turn_are_followed(unpacked: Callable[[], None]) -> None:
    found = []
    for _ in range(2):
        source = rollout("flat", wrap=True)
        for turn in range(8):
            if turn in (1, 6, 7):  # another shape, and so other memory
                source["extra"] = np.full((source.steps, 3, *[2] * (turn - 5 if turn > 1 else 0)), turn, np.float32)
            elif turn == 2:
                source = copy.deepcopy(source)
            elif turn == 3:
                source.add({"obs": np.ones((3, 5)), "action": np.ones((3, 2)), "byte": np.ones((3, 3, 2), np.uint8)},
                           reward=np.ones(3), terminated=np.ones(3, bool), truncated=np.ones(3, bool),
                           value=np.ones(3))  # fmt: skip
            elif turn == 4:
                source.clear()
                source.add_fields(more=(2,))
            elif turn == 5:
                source = pickle.loads(pickle.dumps(source))
            if turn in (4, 5):
                step = {name: source.block[name][turn] for name in source.schema.names}
                source.add(step)
            found.append([told(batch) for batch in source.minibatches(num_batches=2, epochs=2)])
        unpacked()
    assert found[:8] == found[8:]


def test_a_column_that_gets_new_memory_is_found_there_after_an_interrupt() -> None:
    source, column, wide = rollout("flat", steps=2), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.float64)
    for at in itertools.count():
        source["advantage"] = wide
        list(source.minibatches(num_batches=2, epochs=2))  # notes where the columns lie
        off = broken_off(lambda: internals.columns(source).attach({("advantage",): column}), at)
        source["advantage"] = column * at
        for batch in source.minibatches(num_batches=2, epochs=2):
            assert torch.equal(batch["advantage"], torch.full((3,), float(at)))
        if not off:
            break


def test_a_rollout_without_real_steps_has_no_minibatches() -> None:
    source = RolloutBuffer(Schema(ENDS), 2, 1)
    for _ in range(2):
        zero, no = np.zeros(1, np.float32), np.zeros(1, bool)
        source.add(reward=zero, value=zero, terminated=no, truncated=no, mask=no)
    assert [*source.minibatches(4, epochs=2)] == []


def test_rows_that_do_not_begin_at_the_first_place_are_read(unpacked: Callable[[], None]) -> None:
    source = rollout("flat", wrap=True, finished=False)
    source.reserve(5)  # gives up the five oldest
    found = []
    for _ in range(2):
        source.seed = 7
        found.append([told(batch) for batch in source.minibatches(num_batches=3, epochs=2)])
        unpacked()
    assert (source.steps, internals.columns(source).start) == (19, 5)
    assert found[0] == found[1]


def test_two_passes_at_once_do_not_disturb_each_other() -> None:
    source = rollout("flat")
    want = [[told(batch) for batch in source.minibatches(num_batches=4, epochs=2)] for _ in range(2)]
    source.seed = 7
    passes = [source.minibatches(num_batches=4, epochs=2) for _ in range(2)]
    alone = [told(next(passes[0])) for _ in range(4)]
    assert alone == want[0][:4]
    assert [told(batch) for batch in passes[1]] != alone
    assert len([*passes[0]]) == 4


def test_without_the_exchange_of_torch_batches_are_the_same() -> None:
    want = [told(batch) for batch in rollout("nested").minibatches(num_batches=4, epochs=2)]
    before = internals.use_exchange(False)
    try:
        assert [told(batch) for batch in rollout("nested").minibatches(num_batches=4, epochs=2)] == want
    finally:
        internals.use_exchange(before)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_rows_are_read_alike_in_ram_and_on_a_device(kind: str, pack: bool) -> None:
    source, index = rollout(kind), torch.tensor([71, 0, 5, 5])
    columns = internals.columns(source).select(internals.columns(source).select_paths(None))
    here, there = reading.rows_of(columns, pack), reading.TensorRows(columns, pack)
    for one, other in zip(here.gather(index).items(), there.gather(index).items(), strict=True):
        assert (one[0], one[1].dtype, one[1].shape, bits(one[1])) == (
            other[0],
            other[1].dtype,
            other[1].shape,
            bits(other[1]),
        )
    assert told(there.at(index)[0]) == told(here.at(index.numpy())[0])  # pyright: ignore[reportArgumentType]


def test_a_row_that_is_none_is_refused() -> None:
    read = internals.minibatches(rollout("images")).reader([("reward",), ("obs", "large")], True)
    assert read(torch.tensor([71, 0]))["reward",].shape == (2,)
    for wrong in (72, -1):
        with pytest.raises(IndexError, match=f"index {wrong} at place 1: there are 72 rows"):
            read(torch.tensor([3, wrong]))


def test_a_missing_advantage_is_an_error_that_names_the_fields_there_are() -> None:
    (batch, *_) = rollout("flat", finished=False).minibatches(num_batches=2, epochs=2)
    with pytest.raises(KeyError, match="advantage"):
        batch["advantage"]


def test_a_batch_is_a_copy_and_outlives_the_pass() -> None:
    source = rollout("flat", steps=400)
    passed = source.minibatches(num_batches=2, epochs=2)
    first, second = next(passed), next(passed)
    kept = told(first), told(second)
    for column in source.block.values():
        column.zero_()
    rest = [told(batch) for batch in passed]
    del passed, source
    assert (told(first), told(second)) == kept
    assert kept not in rest


def test_the_memory_of_a_dropped_batch_is_used_again() -> None:
    envs = 1024
    source = RolloutBuffer(Schema({"obs": (60,), **ENDS}), 24, envs, seed=0)
    for _ in range(24):
        step = {"obs": np.zeros((envs, 60), np.float32)} | {x: np.zeros(envs, np.float32) for x in ("reward", "value")}
        source.add(step, terminated=np.zeros(envs, bool), truncated=np.zeros(envs, bool))
    assert 24 * envs * 60 * 4 / 4 > SMALL
    seen = set()
    for batch in source.minibatches(num_batches=4, epochs=6, fields=("obs", "value")):
        seen.add(batch["obs"].data_ptr())
    assert len(seen) <= 3


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_long_batches_are_left_to_the_threads_of_torch(kind: str, epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = rollout(kind)
    want = [told(batch) for batch in source.minibatches(num_batches=2, epochs=epochs)]
    monkeypatch.setattr(reading, "SHARED_WORK", 0)
    monkeypatch.setattr(reading, "FEW_THREADS", 0)
    for name in ("take_rows", "take_fields", "take_columns"):
        monkeypatch.setattr(core, name, lambda *_: pytest.fail("one thread copied the batch"))
    source.seed = 7
    assert [told(batch) for batch in source.minibatches(num_batches=2, epochs=epochs)] == want


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_memory_that_is_reused_holds_the_same_batches_and_large_fields_stand_too(kind: str, epochs: int) -> None:
    source, options = rollout(kind), {"batch_size": 14, "epochs": epochs, "normalize_advantage": True}
    want = [told(batch) for batch in source.minibatches(**options)]
    source.seed = 7
    found, addresses = [], list[dict[Any, int]]()
    for batch in source.minibatches(**options, reuse=True):
        found.append(told(batch))
        addresses.append({path: leaf.data_ptr() for path, leaf in leaves_by_path(batch).items()})
    assert found == want
    assert addresses[0] == addresses[3]  # each memory's turn comes again


def test_memory_that_is_reused_serves_the_next_pass_and_takes_back_what_the_last_one_gave() -> None:
    source, options = rollout("nested"), {"batch_size": 12, "epochs": 2}
    want = [told(batch) for batch in source.minibatches(**options)] * 2
    found, kept = list[Any](), list[Any]()
    for _ in range(2):
        source.seed = 7
        for batch in source.minibatches(**options, reuse=True):
            found.append(told(batch))
            kept.append((batch, batch["reward"].data_ptr()))
    assert found == want
    assert len({address for _, address in kept}) == 3
    for batch, _ in kept[:-3]:
        with pytest.raises(LifecycleError):
            batch["reward"]
    assert [told(batch) for batch, _ in kept[-3:]] == want[-3:]


def test_passes_at_once_reuse_memory_of_their_own_and_one_that_is_broken_off_leaves_its_own() -> None:
    source, options = rollout("nested"), {"batch_size": 12, "epochs": 2, "shuffle": False}
    want = [told(batch) for batch in source.minibatches(**options)]
    for _ in range(3):
        one, other = (source.minibatches(**options, reuse=True) for _ in range(2))
        pairs = [(told(ours), told(theirs)) for ours, theirs in itertools.islice(zip(one, other, strict=True), 5)]
        assert pairs == [(batch, batch) for batch in want[:5]]
        one.close()  # type: ignore[attr-defined]
        assert [told(batch) for batch in source.minibatches(**options, reuse=True)] == want
        assert [told(batch) for batch in other] == want[5:]


def test_a_minibatch_takes_at_most_ten_calls_of_functions_in_python() -> None:
    source = rollout("flat", steps=256)
    run = lambda: sum(1 for _ in source.minibatches(8, epochs=2))  # noqa: E731
    run()
    profile = cProfile.Profile()
    profile.enable()
    count = run()
    profile.disable()
    written = [
        entry for entry in profile.getstats()
        if not isinstance(entry.code, str) and "tensordict/" not in entry.code.co_filename.replace("\\", "/")
    ]  # fmt: skip
    assert sum(entry.callcount for entry in written if "torch" not in entry.code.co_filename) <= 10 * count
