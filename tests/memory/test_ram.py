"""Rows in RAM, and in a store of one's own: a replay over it is what the list of episodes says, as one in RAM."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, FrameStack, Hindsight, NStep, Prioritized, ReplayBuffer, Schema, Sequence
from relive.errors import DTypeError, LifecycleError, ParameterError, ShapeError
from relive.memory.allocator import SMALL
from relive.memory.ram import ReplayRows, _runs
from relive.steps.arrays import numpy_dtype
from support import internals, twins
from support.cases import covering


@pytest.mark.parametrize("places", [[], [3], [5, 4, 3], [*range(40, 60), *range(20), *range(90, 130)], [*range(32), 7]])
def test_rows_are_restored_in_runs_or_one_by_one_to_the_same_places(places: list[int]) -> None:
    wanted, target = np.array(places, np.int64), np.full(130, -1)
    for here, there in (runs := list(_runs(wanted))):
        target[there] = np.arange(len(places))[here]
    expected = np.full(130, -1)
    expected[wanted] = np.arange(len(places))
    assert np.array_equal(target, expected)
    assert all(isinstance(there, slice) for _, there in runs) == (len(places) != 1 and len(places) != 3)


# The memory of batches of large fields is used again, but never while somebody still holds it

FLAGS = {"terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}


def test_a_batch_keeps_its_frames_while_others_are_drawn_and_gives_its_memory_back() -> None:
    schema = Schema({"obs": Field((84, 84), torch.uint8), "reward": (), **FLAGS})
    replay = ReplayBuffer(schema, 100, view=FrameStack(4), seed=0)
    ended = np.zeros(1, np.bool_)
    for number in range(100):
        obs = np.full((1, 84, 84), number, np.uint8)
        replay.add(obs=obs, reward=np.full(1, number, np.float32), terminated=ended, truncated=ended)
    held = [replay.sample(32) for _ in range(3)]
    assert held[0]["obs"].nbytes > SMALL
    for batch in held:
        assert torch.equal(batch["obs"][:, -1, 0, 0].float(), batch["reward"])
        assert torch.equal(batch["next_obs"][:, -1, 0, 0].float(), batch["reward"] + 1)
    places = {batch[name].data_ptr() for batch in held for name in ("obs", "next_obs")}
    assert len(places) == 6
    del held, batch
    again = replay.sample(32)
    assert {again[name].data_ptr() for name in ("obs", "next_obs")} <= places


# A store of one's own

PLAYS = ("..", ".T", "..", "U.", "B.", "..", "TT", ".U", "..", "|", "..", "..", ".T", "..", "..", "T.", "..")


class Columns:
    """One array for each field; what was never written is no number."""

    def __init__(self, fields: Mapping[Any, Any], rows: int) -> None:
        self.arrays = {path: np.empty((rows, *field.shape), numpy_dtype(field.dtype)) for path, field in fields.items()}
        for array in self.arrays.values():
            array.view(np.uint8).fill(255) if array.ndim and array.dtype != np.bool_ else array.fill(True)

    def write(self, path: Any, rows: Any, values: Any) -> None:
        assert len(set(rows.tolist())) == len(rows)
        assert values.dtype == self.arrays[path].dtype
        self.arrays[path][rows] = values

    def read(self, path: Any, rows: Any) -> Any:
        return self.arrays[path][rows]


VIEWS = {**twins.VIEWS, "sequence": lambda: Sequence(3, burn_in=1)}


@pytest.mark.parametrize(("view", "dress"), covering(list(VIEWS), twins.DRESSES, full=2, quick=1))
def test_every_view_reads_what_the_oracle_says(dress: str, view: str) -> None:
    twin = twins.Twin(2, 9, dress=dress, view=VIEWS[view](), store=Columns)
    for plays in (PLAYS[:9], PLAYS[9:], PLAYS):
        twin.play(*plays)
        if len(twin.buffer):
            twin.check_batch(twin.buffer.sample(6))
    twin.buffer.check()
    if view != "sequence":
        twin.check()


@pytest.mark.parametrize("dress", ["box", "image", "mixed"])
def test_transitions_without_order(dress: str) -> None:
    twin = twins.Twin(2, 4, dress=dress, ordered=False, sampler=Prioritized(), store=Columns)
    twin.play(*(play for play in PLAYS if play != "|")).check()


def test_a_long_log_is_stored_like_single_steps() -> None:
    twin = twins.Twin(2, 7, dress="mixed", store=Columns)
    twin.extend(["..", ".T", "..", "U.", "..", "..", ".."])
    twin.check()


@pytest.mark.parametrize("dress", ["box", "mixed"])
def test_a_save_moves_from_a_store_to_ram_and_back(dress: str, tmp_path: File) -> None:
    twin = twins.Twin(2, 9, dress=dress, view=NStep(2, 0.5), store=Columns).play(*PLAYS)
    twin.buffer.save(tmp_path / "replay")
    want = twin.buffer.data()
    for options in ({}, {"store": Columns}):
        twin.buffer = ReplayBuffer.load(tmp_path / "replay", **options)
        twin.check()
    assert twins.same_batches(want, twin.buffer.data())


def test_hindsight_finds_its_goals_there() -> None:
    def reward(achieved: Any, desired: Any, info: Any) -> Any:
        return (achieved == desired).all(-1).astype(np.float32)

    def filled(**options: Any) -> ReplayBuffer:
        schema = twins.Schema.from_example({"obs": GOALS, "action": np.float32(0), "reward": np.float32(0),
                                            "terminated": np.bool_(), "truncated": np.bool_()})  # fmt: skip
        buffer = ReplayBuffer(schema, 20, view=Hindsight(reward), seed=0, **options)
        for t in range(12):
            obs = {name: np.full((1, 2), t, np.float32) for name in GOALS}
            buffer.add(obs=obs, action=np.zeros(1), reward=np.zeros(1), terminated=[False], truncated=[t % 5 == 4],
                       next_obs=obs)  # fmt: skip
        return buffer

    assert twins.same_batches(filled().sample(32), filled(store=Columns).sample(32))


GOALS = {name: np.zeros(2, np.float32) for name in ("observation", "achieved_goal", "desired_goal")}


class Full(Columns):
    """A disk that is full when it is told to be."""

    full = False

    def write(self, path: Any, rows: Any, values: Any) -> None:
        if self.full and path == ("action",):
            raise OSError("no space left")
        super().write(path, rows, values)


def test_a_write_that_fails_leaves_no_half_of_a_step() -> None:
    twin = twins.Twin(2, 9, store=Full).play(*PLAYS)
    step = twin.step("..")
    internals.home(internals.ring(twin.buffer).store).full = True
    with pytest.raises(OSError, match="no space"):
        twin.buffer.add(step)
    internals.home(internals.ring(twin.buffer).store).full = False
    twin.buffer.sample(4)
    twin.buffer.check()


class Short(Columns):
    def read(self, path: Any, rows: Any) -> Any:
        return super().read(path, rows)[1:]


class Wide(Columns):
    def read(self, path: Any, rows: Any) -> Any:
        return super().read(path, rows).astype(np.float64)


@pytest.mark.parametrize(("store", "error", "match"), [(Short, ShapeError, "shape"), (Wide, DTypeError, "float64")])
def test_what_a_store_gives_is_checked(store: Any, error: Any, match: str) -> None:
    twin = twins.Twin(2, 9, store=store).play("..", "..", "..")
    with pytest.raises(error, match=match):
        twin.buffer.sample(2)


def test_what_is_no_store_is_refused() -> None:
    for wrong in (3, lambda fields, rows: Columns):
        with pytest.raises(ParameterError, match="write and read"):
            twins.Twin(store=wrong)
    with pytest.raises(ParameterError, match="leave device out"):
        twins.Twin(store=Columns, device="meta")


def test_a_copy_and_a_pickle_are_in_ram_and_draw_the_same() -> None:
    twin = twins.Twin(2, 9, dress="mixed", store=Columns).play(*PLAYS)
    for other in (deepcopy(twin.buffer), pickle.loads(pickle.dumps(twin.buffer))):
        assert isinstance(internals.ring(other).store, ReplayRows)
        assert twins.same_batches(twin.buffer.data(), other.data())


def test_only_what_is_in_ram_counts_as_its_memory(tmp_path: File) -> None:
    twin = twins.Twin(2, 9, dress="image", store=Columns).play(*PLAYS)
    assert twin.buffer.nbytes == 18 * 32
    twin.buffer.save(tmp_path / "replay")
    assert ReplayBuffer.load(tmp_path / "replay", store=Columns, capacity=10).nbytes == 10 * 32


def test_the_block_of_a_store_is_refused() -> None:
    with pytest.raises(LifecycleError, match="slice"):
        _ = twins.Twin(store=Columns).buffer.block
