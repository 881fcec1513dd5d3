"""A minibatch is gathered and made tensors in one compiled call, which gives to the bit what the long way gives."""

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
from hypothesis import given
from hypothesis import strategies as st

import inside
import relive
from fields import LEAVES, bits, noise
from interrupting import broken_off
from relive import GAE, Field, RolloutBuffer, Schema
from relive.kernels import cpu, reference
from relive.kernels.reference.rows import FIELD_DICT, PackedFields
from relive.kernels.tables import UNFIT
from relive.kernels.tensor_calls import tensor_calls
from relive.memory.allocator import SMALL
from relive.memory.layout import RowLayout
from relive.rollout import minibatches as direct
from relive.steps.schema import Path

pytestmark = pytest.mark.skipif(tensor_calls() is None, reason="this torch has no functions for compiled code")

FLAG = Field((), torch.bool)
ENDS: dict[str, Any] = {"reward": (), "terminated": FLAG, "truncated": FLAG, "value": ()}
SCHEMAS: dict[str, tuple[dict[str, Any], bool]] = {
    "flat": ({"obs": (5,), "action": Field((2,), torch.bfloat16), "byte": Field((3, 2), torch.uint8)}, True),
    "nested": ({"obs": {"camera": Field((4, 4), torch.uint8), "joints": (7,)}, "action": ()}, True),
    "nested deeply": ({"obs": {"body": {"joints": (7,)}, "camera": (3,)}, "action": ()}, False),
    "images": ({"obs": Field((40, 40), torch.uint8), "action": ()}, False),
}
"""A schema, and whether its batches take one call."""


@pytest.fixture
def the_long_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the passes that begin from now on gather and make tensors in several calls."""
    return lambda: monkeypatch.setattr(direct.Packing, "suits", lambda *_: False)


def rollout(
    kind: str, *, masked: bool = False, finished: bool = True, steps: int = 24, wrap: bool = False
) -> RolloutBuffer:
    """A rollout of noise."""
    schema = Schema({**SCHEMAS[kind][0], **ENDS})
    made, rng = RolloutBuffer(schema, steps, 3, seed=7, wrap=wrap), np.random.default_rng(1)
    leaves = [(path, field) for path, field in schema.leaves.items() if path[0] in SCHEMAS[kind][0]]
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
    leaves = batch.items(include_nested=True, leaves_only=True)
    return [
        tuple(batch.batch_size),
        batch.device,
        [(name, x.dtype, x.shape, x.stride(), bits(x)) for name, x in leaves],
        list(batch.keys()),
    ]


@pytest.mark.parametrize("options", [
    {"num_batches": 4, "epochs": 3}, {"batch_size": 7, "epochs": 2, "drop_last": True},
    {"batch_size": 5, "epochs": 2, "reshuffle": False}, {"batch_size": 1}, {"batch_size": 72, "epochs": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_one_call_gives_the_minibatches_of_the_long_way(
    kind: str, masked: bool, options: dict[str, Any], the_long_way: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if masked and options.get("batch_size") == 72:
        options = options | {"batch_size": 40}
    source, taken = rollout(kind, masked=masked), list[bool]()
    take = direct.CompiledRows.batch

    def noted(self: direct.CompiledRows, *places: Any) -> Any:
        found = take(self, *places)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(direct.CompiledRows, "batch", noted)
    found = [told(batch) for batch in source.minibatches(**options)]
    whole = options.get("epochs", 1) > 1 or options["batch_size"] == 1
    assert taken == [True] * len(found) * (SCHEMAS[kind][1] and whole)
    source.seed = 7
    the_long_way()
    taken.clear()
    assert [told(batch) for batch in source.minibatches(**options)] == found
    assert not taken


def test_normalized_advantages_and_a_choice_of_fields_are_those_of_the_long_way(
    the_long_way: Callable[[], None],
) -> None:
    source, found = rollout("nested"), []
    for _ in range(2):
        source.seed = 7
        for fields in (("advantage", "obs"), None, ("value", "advantage"), ("value", "advantage")):
            batches = source.minibatches(num_batches=3, epochs=2, normalize_advantage=True, fields=fields)
            found.append([told(batch) for batch in batches])
        the_long_way()
    assert found[:4] == found[4:]


def test_columns_that_move_or_turn_are_followed(the_long_way: Callable[[], None]) -> None:
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
        the_long_way()
    assert found[:8] == found[8:]


def test_a_column_that_gets_new_memory_is_found_there_after_an_interrupt() -> None:
    source, column, wide = rollout("flat", steps=2), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.float64)
    for at in itertools.count():
        source["advantage"] = wide
        list(source.minibatches(num_batches=2, epochs=2))  # notes where the columns lie
        off = broken_off(lambda: inside.columns(source).attach({("advantage",): column}), at)
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


def test_rows_that_do_not_begin_at_the_first_place_are_read(the_long_way: Callable[[], None]) -> None:
    source = rollout("flat", wrap=True, finished=False)
    source.reserve(5)  # gives up the five oldest
    found = []
    for _ in range(2):
        source.seed = 7
        found.append([told(batch) for batch in source.minibatches(num_batches=3, epochs=2)])
        the_long_way()
    assert (source.steps, inside.columns(source).start, inside.packing(inside.minibatches(source)) is None) == (
        19,
        5,
        False,
    )
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


def test_a_batch_that_cannot_be_made_directly_is_made_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    source, take, turn = rollout("nested"), direct.CompiledRows.batch, itertools.count()
    want = [told(batch) for batch in source.minibatches(num_batches=4, epochs=2, normalize_advantage=True)]
    monkeypatch.setattr(direct.CompiledRows, "batch", lambda *a: None if next(turn) % 3 == 1 else take(*a))
    source.seed = 7
    assert [told(batch) for batch in source.minibatches(num_batches=4, epochs=2, normalize_advantage=True)] == want


def test_without_the_functions_of_torch_batches_are_made_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    want = [told(batch) for batch in rollout("flat").minibatches(num_batches=4, epochs=2)]
    monkeypatch.setattr(direct, "tensor_calls", lambda: None)
    inside.form_of(direct).cache_clear()
    try:
        source = rollout("flat")
        assert [told(batch) for batch in source.minibatches(num_batches=4, epochs=2)] == want
        assert inside.packing(inside.minibatches(source)).form is None
    finally:
        inside.form_of(direct).cache_clear()


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


def test_long_batches_are_left_to_the_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    source = rollout("flat")
    want = [told(batch) for batch in source.minibatches(num_batches=2, epochs=2)]
    monkeypatch.setattr(direct, "SHARED_WORK", 0)
    monkeypatch.setattr(direct, "FEW_THREADS", 0)
    monkeypatch.setattr(cpu, "take_batch", lambda *_: pytest.fail("one thread copied the batch"))
    source.seed = 7
    assert [told(batch) for batch in source.minibatches(num_batches=2, epochs=2)] == want


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


# The kernel and the plain one

Source = tuple[PackedFields, np.ndarray]


def source_of(leaves: dict[Path, Field], count: int) -> tuple[Source, tuple[Any, ...], RowLayout]:
    """Packed rows of noise, what keeps their names alive, and their layout."""
    layout, calls = RowLayout(leaves), tensor_calls()
    assert calls is not None
    assert layout.table is not None
    table, names = layout.table.copy(), tuple(path[-1] for path in layout.fields)
    table[:, FIELD_DICT] = np.arange(len(table)) % 2
    rows = noise((count, layout.nbytes), torch.uint8, 5).numpy()
    return (PackedFields(calls.describe, calls.lend, calls.adopt, table, id(names)), rows), names, layout


def asked(twin: Any, source: Source, index: list[int], rows: Any) -> tuple[int, list[Any]]:
    """What a twin answers, and the tensors that it has made."""
    found: tuple[dict[str, Any], ...] = ({}, {})
    made_of, packed = source if twin is reference else (cpu.handle_of(source[0]), source[1])
    answer = twin.take_batch(made_of, packed, np.array(index, np.int64), id(rows), id(found))
    return answer, [[(name, x.dtype, x.shape, x.stride(), bits(x)) for name, x in into.items()] for into in found]


@given(LEAVES, st.integers(1, 6), st.data())
def test_both_twins_make_the_same_batch(leaves: dict[Path, Field], count: int, data: st.DataObject) -> None:
    source, _, layout = source_of(leaves, count)
    index = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9))
    answers = [
        asked(twin, source, index, torch.zeros((len(index), layout.nbytes), dtype=torch.uint8))
        for twin in (cpu, reference)
    ]
    assert answers[0][0] == -1
    assert answers[0] == answers[1]
    assert sum(map(len, answers[0][1])) == len(leaves)


def test_both_twins_make_nothing_of_wrong_rows_or_a_wrong_index() -> None:
    source, _, layout = source_of({("x",): Field((3,)), ("y",): Field((), torch.int64)}, 5)
    width = layout.nbytes
    good = torch.zeros((3, width), dtype=torch.uint8)
    for twin in (cpu, reference):
        for rows in (good[:2], good[:, :-1], good[0], good.to("meta"), torch.zeros((3, width, 1), dtype=torch.uint8)):
            assert asked(twin, source, [0, 1, 2], rows) == (UNFIT, [[], []])
        assert asked(twin, source, [0, 5, 2], good) == (1, [[], []])
        assert asked(twin, source, [0, 1, -1], good) == (2, [[], []])
    assert relive.kernels.fast().take_batch is cpu.take_batch
