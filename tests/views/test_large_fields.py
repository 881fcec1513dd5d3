"""Large fields and hidden states are read in one compiled call with all others, each into a column of its own."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, FrameStack, Hindsight, NStep, ReplayBuffer, Schema, core
from relive.batches import leaves_by_path
from relive.ring.ring import Stacks
from support import internals
from support.twins import same_batches

FLAG = Field((), torch.bool)
ENDS = {"reward": (), "terminated": FLAG, "truncated": FLAG}
FIELDS = {
    "obs": {"image": Field((70, 70), torch.uint8), "half": Field((601,), torch.bfloat16), "x": Field((3,))},
    "action": Field((1111,), torch.uint8), "hidden": {"h": Field((2, 4)), "c": Field((5,))},
}  # fmt: skip
ROWS = 40
VIEWS = {"n-step": lambda: NStep(3), "stacks": lambda: FrameStack(3), "some": lambda: FrameStack(2, keys=("half",))}


def replay_of(view: Any, own: bool = False, fields: Any = FIELDS) -> Any:
    schema, random = Schema({**fields, **ENDS}), torch.Generator().manual_seed(0)
    replay = ReplayBuffer(schema, 2 * ROWS, 2, seed=0, view=view, check_ends=False, own_next_obs=own)

    def rows(path: Any) -> Any:
        leaf = schema.leaves[path]
        return torch.randint(0, 100, (2, *leaf.shape), generator=random).to(leaf.dtype)

    for t in range(70):
        step = {name: schema.rebuild(name, rows) for name in schema.names}
        ends = {"terminated": np.array([t % 9 == 8, t % 7 == 6]), "truncated": np.zeros(2, np.bool_)}
        replay.add({**step, **ends, "next_obs": schema.rebuild("obs", rows)})
    return replay


def by_places(replay: Any, index: Any) -> dict[Any, Any]:
    """The stacks and rows of a batch, each read by its place: by no call that reads large fields of a batch."""
    ring, view = internals.ring(replay), replay.view
    numbers, envs = np.divmod(index["next_index"].numpy(), 2)
    then = envs * ROWS + numbers % ROWS
    numbers, envs = np.divmod(index["index"].numpy(), 2)
    now = envs * ROWS + numbers % ROWS
    own = ring.own_next
    stacked = view.stacks_of(ring).paths if isinstance(view, FrameStack) else ()
    expected = dict[Any, Any]()
    for path in ring.leaves:
        if path[0] not in ("obs", "next_obs", "action", "hidden"):
            continue
        ends = {path: now} if path[0] != "obs" or own else {path: now, ("next_obs", *path[1:]): then}
        if path[0] == "next_obs":  # of the row of the last step, which is the one before the next index
            ends = {path: envs * ROWS + (numbers + index["steps"].numpy() - 1) % ROWS}
        for name, places in ends.items():
            places = ring.frames(places, view.depth, True) if path in stacked else places
            expected[name] = ring.take(places, [path])[path]
    return expected


@pytest.mark.parametrize(("view", "own"), [*((view, False) for view in VIEWS), ("n-step", True)])
@pytest.mark.parametrize("exchange", [True, False])
def test_each_large_field_is_that_of_its_rows(view: str, own: bool, exchange: bool) -> None:
    replay, twin = replay_of(VIEWS[view](), own), replay_of(VIEWS[view](), own)
    before = internals.use_exchange(exchange)
    try:
        for batch, standing in zip(replay.batches(5, 7), twin.batches(5, 7, reuse=True), strict=True):
            leaves = leaves_by_path(batch)
            for path, leaf in by_places(replay, batch).items():
                assert leaves[path].dtype == leaf.dtype
                assert torch.equal(leaves[path], leaf), path
            assert same_batches(standing, batch)
    finally:
        internals.use_exchange(before)


@pytest.mark.parametrize("exchange", [True, False])
def test_each_large_field_of_hindsight_is_that_of_its_rows_where_the_new_goal_has_its_window_end(
    exchange: bool,
) -> None:
    def far(achieved: Any, desired: Any) -> Any:
        return (np.arange(len(achieved)) % 3) == 0

    view = Hindsight(
        lambda achieved, desired: np.ones(len(achieved)), terminated_fn=far, n=4, achieved="x", desired="y"
    )
    fields = {**FIELDS, "obs": {**FIELDS["obs"], "y": Field((3,))}}
    replay, before = replay_of(view, fields=fields), internals.use_exchange(exchange)
    try:
        for batch in chain((replay.sample(9) for _ in range(5)), replay.batches(5, 9, reuse=True)):
            leaves, expected = leaves_by_path(batch), by_places(replay, batch)
            for name in ("x", "y"):  # goals: those of `obs` and `next_obs` may be others
                del expected["obs", name], expected["next_obs", name]
            assert {("obs", "image"), ("next_obs", "image"), ("action",), ("hidden", "h")} <= expected.keys()
            for path, leaf in expected.items():
                assert torch.equal(leaves[path], leaf), path
    finally:
        internals.use_exchange(before)


def test_sums_of_rewards_that_a_function_gives_are_one_float32_for_each_window() -> None:
    replay = replay_of(NStep(2))
    ring, places = internals.ring(replay), internals.ring(replay).anchors()[:6]

    def doubled(anchors: Any, steps: Any) -> Any:
        assert (anchors.tolist(), anchors.dtype, steps.dtype) == (places.tolist(), np.int64, np.int32)
        assert replay.sample(3)["steps"].shape == (3,)  # the replay may be used meanwhile
        return steps.astype(np.float32) * 2

    found, plain = ring.windows(places, 2, 0.9, sums=doubled), ring.windows(places, 2, 0.9)
    assert torch.equal(found["reward",], 2.0 * found["steps",])
    for path in plain.keys() - {("reward",)}:
        assert torch.equal(found[path], plain[path]), path
    for wrong in (np.zeros(6), np.zeros(5, np.float32), np.zeros((6, 1), np.float32), [0.0] * 6, None):
        with pytest.raises(TypeError, match="sums of rewards: expected one for each window"):
            ring.windows(places, 2, 0.9, sums=lambda anchors, steps, wrong=wrong: wrong)
    with pytest.raises(ZeroDivisionError):
        ring.windows(places, 2, 0.9, sums=lambda anchors, steps: 1 // 0)


@pytest.mark.parametrize(("view", "own"), [*((view, False) for view in VIEWS), ("n-step", True)])
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_batches_without_rows_have_all_columns(view: str, own: bool, exchange: bool, stored: bool) -> None:
    replay = replay_of(VIEWS[view](), own)
    expected = replay.sample(2)
    if not stored:
        replay.clear()
    before = internals.use_exchange(exchange)
    try:
        assert replay.batch_fields == tuple(expected)
        found = replay.view.read(internals.ring(replay), np.zeros(0, np.int64))
        for path, leaf in leaves_by_path(expected).items():
            assert (found[path].shape, found[path].dtype) == ((0, *leaf.shape[1:]), leaf.dtype)
            assert found[path].is_contiguous()
    finally:
        internals.use_exchange(before)


def test_draws_of_no_rows_are_read_into_standing_memory_and_fresh() -> None:
    replay = replay_of(FrameStack(3))
    ring, standing = internals.ring(replay), core.Standing(1)
    for count, memory in ((0, standing), (4, standing), (0, standing), (0, None)):
        draw = core.draw_by_chance(ring.core, count, 3)
        draw.standing = memory
        batch = replay.view.read(ring, draw)
        assert batch["obs", "image"].shape == (count, 3, 70, 70)
        assert batch["hidden", "h"].shape == (count, 2, 4)


@pytest.mark.parametrize("pad", ["repeat", "zeros"])
def test_stacks_of_rows_with_forged_numbers_stay_in_their_env(pad: Any) -> None:
    """Of small fields and of large ones. Files may hold any numbers."""
    replay = replay_of(FrameStack(4, pad=pad))
    ring = internals.ring(replay)
    forged = np.random.default_rng(1).integers(-(2**31), 2**31, len(ring.step))
    ring.step[:] = np.where(np.arange(len(forged)) % 3, forged, -1)
    places = np.arange(len(forged))
    batch, then = replay.view.read(ring, places), replay.view.read(ring, places)
    for path in (("obs", "x"), ("obs", "half"), ("obs", "image")):
        rows, stacks = ring.take(places, [path])[path], batch[path]
        assert torch.equal(stacks[:, -1], rows)
        assert torch.equal(stacks, then[path])
        frames = ring.frames(places, 4, pad == "repeat")
        assert (frames < len(forged)).all()
        assert torch.equal(stacks[frames >= 0], rows[frames[frames >= 0]])
        assert (stacks[frames < 0] == 0).all()


def test_a_small_tensor_that_is_kept_does_not_keep_the_memory_of_large_ones() -> None:
    replay = replay_of(FrameStack(2))
    batch = replay.sample(64)
    kept, expected = batch["reward"], batch["reward"].clone()
    first = batch["obs"]["image"].data_ptr()
    del batch
    assert replay.sample(64)["obs"]["image"].data_ptr() == first
    assert torch.equal(kept, expected)


def test_what_autograd_saved_of_a_large_field_is_void_once_it_is_refilled() -> None:
    batches = replay_of(NStep()).batches(9, 4, reuse=True)
    weight = torch.ones(601, requires_grad=True)
    loss = (weight.bfloat16() * next(batches)["obs"]["half"]).sum()
    for _ in batches:
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_columns_that_do_not_fit_are_refused() -> None:
    ring = internals.ring(replay_of(NStep()))
    batch, rows = ring.store.batch, np.zeros((2 * ROWS, 16), np.uint8)
    facts = [("reward", torch.float32, (), batch.offsets["reward",])]

    def windows(large: Any, *columns: int, depth: int = 0) -> Any:
        apart = [(f"x{k}", torch.uint8, (size,), None) for k, size in enumerate(columns)]
        return core.Windows(
            ring.core, batch.core, core.Fields([*facts, *apart], batch.nbytes), large=large, depth=depth
        )

    good = windows([(rows, True, True, False), (rows, True, True, True)], 16, 16, 32, 32, depth=2)
    found = good.sample(np.array([0, 50]), 1, 0.9)
    assert found["x0"].shape == found["x1"].shape == (2, 16)
    assert found["x2"].shape == found["x3"].shape == (2, 32)
    for large, columns, depth in (
        ([], (16,), 0), ([(rows, True, False, False)], (), 0), ([(rows, True, False, False)], (15,), 0),
        ([(rows, True, True, False)], (16,), 0), ([(rows, True, True, True)], (16, 16), 2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="one for each field that lies apart"):
            windows(large, *columns, depth=depth)
    for one, depth in (
        ((rows, True, False, True), 1), ((rows, True, True, True), 0), ((rows, True, True, True), 2**60),
        ((rows[:, :8], True, False, False), 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="rows without gaps, or two stacks"):
            windows([one], 16, 16, depth=depth)
    with pytest.raises(ValueError, match="rows of bytes, now, then, stacked"):
        windows([(rows, True)], 16)
    with pytest.raises(TypeError, match="rows of bytes"):
        windows([(rows.astype(np.int64), True, False, False)], 16)
    with pytest.raises(ValueError, match="more rows"):
        windows([(rows[1:], True, False, False)], 16).sample(np.array([0]), 1, 0.9)
    with pytest.raises(MemoryError):
        good.sample(core.draw_by_chance(ring.core, 2**60, 1), 1, 0.9)


def test_fields_that_lie_apart_are_refused_where_rows_are_packed() -> None:
    ring = internals.ring(replay_of(NStep()))
    fields, rows = core.Fields([("x", torch.uint8, (4,), None)], 16), np.zeros((3, 16), np.uint8)
    columns, index = [np.zeros((3, 4), np.uint8)], np.zeros(2, np.int64)
    for call in (
        lambda: fields.tensors(rows),
        lambda: fields.pack(columns, rows),
        lambda: core.take_fields(rows, index, (fields,), ({},), core.Pool()),
        lambda: core.take_columns(
            [np.zeros((3, 4), np.uint8)], fields, np.zeros(2, np.int64), (fields,), ({},), core.Pool()
        ),
    ):
        with pytest.raises(ValueError, match="apart"):
            call()
    drawn = core.draw_by_chance(ring.core, 3, 7)
    layout = core.Fields([("source", torch.int64, (), 4096)], 4112)
    drawn.standing = core.JoinedRows(layout, 4096, 3, None, core.Pool())
    with pytest.raises(ValueError, match="no large fields"):
        ring.windows(drawn, 1, 0.9)


def test_a_stack_of_large_fields_is_followed_as_the_view_changes() -> None:
    replay = replay_of(FrameStack(2))
    for depth, pad in ((3, "zeros"), (2, "repeat"), (3, "zeros")):
        replay.view.depth, replay.view.pad = depth, pad
        assert replay.view.stacks_of(internals.ring(replay))[1:] == Stacks((), depth, pad == "repeat")[1:]
        assert replay.sample(3)["next_obs"]["image"].shape == (3, depth, 70, 70)
