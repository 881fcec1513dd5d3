# pyright: strict
"""What type checkers know of a buffer: its sampler, its view, and what a batch of it is. `make lint` checks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import assert_type

from relive import (
    Batch,
    FrameStack,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
    Sequence,
    SequenceBatch,
    Uniform,
)
from relive.samplers import Sampler
from relive.views import View

SCHEMA = Schema.from_example(
    {"obs": np.zeros(2, np.float32), "reward": 0.0, "terminated": np.False_, "truncated": np.False_}
)


def filled(replay: ReplayBuffer) -> None:
    """A buffer of any kind is taken where nothing more is said of it."""
    zeros = np.zeros((9, 1), np.float32)
    flags = np.zeros((9, 1), np.bool_)
    replay.extend({"obs": np.zeros((9, 1, 2)), "reward": zeros, "terminated": flags, "truncated": flags})


def of_any_kind(replay: ReplayBuffer[Sampler, View]) -> int:
    return len(replay)


def test_a_buffer_has_the_sampler_and_the_view_that_it_was_made_with() -> None:
    plain = ReplayBuffer(SCHEMA, 100)
    assert_type(plain, ReplayBuffer[Uniform, NStep])
    plain.view.n = 5
    plain.view.gamma = 0.5

    rated = ReplayBuffer(SCHEMA, 100, sampler=Prioritized(), view=FrameStack(2))
    assert_type(rated, ReplayBuffer[Prioritized, FrameStack])
    rated.sampler.alpha = 0.5
    rated.view.window.n = 3
    rated.view.depth = 4

    recent = ReplayBuffer(SCHEMA, 100, sampler=Recent(0.99, 2, inner=Prioritized()))
    assert_type(recent, ReplayBuffer[Recent, NStep])
    recent.sampler.eta = 0.9
    recent.sampler.observe(1.0)
    for replay in (plain, rated, recent):
        filled(replay)
        assert of_any_kind(replay) == 8


def test_a_batch_is_of_sequences_where_the_view_reads_them() -> None:
    plain, windows = ReplayBuffer(SCHEMA, 100), ReplayBuffer(SCHEMA, 100, view=Sequence(3))
    for replay in (plain, windows):
        filled(replay)
    batch = assert_type(plain.sample(4), Batch)
    assert_type(plain.data(), Batch)
    assert_type(plain.batches(2, 4), Iterator[Batch])
    assert batch["obs"].shape == (4, 2)

    seq = assert_type(windows.sample(4), SequenceBatch)
    assert_type(windows.data(), SequenceBatch)
    assert_type(windows.batches(2, 4), Iterator[SequenceBatch])
    assert_type(seq["mask"], Tensor)
    flat = assert_type(seq.flat(), Batch)
    assert_type(seq.flat(seq["reward"]), Tensor)
    assert len(flat) == seq.num_steps
    target = assert_type(seq["reward"] + seq["discount"] * seq.bootstrap(seq["reward"]), Tensor)
    assert target.shape == (4, 4)
    assert_type(seq["obs"], Any)  # a batch where the field is nested
    assert seq["obs"].shape == (4, 4, 2)
    assert windows.view.length == 3


def test_a_view_of_another_kind_may_take_the_place_of_the_first() -> None:
    replay: ReplayBuffer[Uniform, View] = ReplayBuffer(SCHEMA, 100)
    filled(replay)
    replay.view = Sequence(3)
    assert len(replay) == 6
    both = Mixture({"a": replay, "b": ReplayBuffer(SCHEMA, 10, view=Sequence(3))}, {"a": 1, "b": 0})
    assert len(both.sample(2)["index"]) == 2


def test_a_loaded_buffer_has_what_was_passed(tmp_path: Path) -> None:
    saved = ReplayBuffer(SCHEMA, 100, sampler=Prioritized())
    filled(saved)
    saved.save(tmp_path / "replay")
    assert_type(ReplayBuffer.load(tmp_path / "replay"), ReplayBuffer[Any, Any])
    loaded = ReplayBuffer.load(tmp_path / "replay", sampler=Prioritized(), view=NStep(2))
    assert_type(loaded, ReplayBuffer[Prioritized, NStep])
    loaded.sampler.beta = 1.0
    assert len(loaded) == 8


class StepsOnly:
    """An estimator as docs/returns.md writes one: it names its columns as keywords."""

    reads = ("reward", "terminated")

    def __call__(self, *, reward: Tensor, terminated: Tensor) -> dict[str, Tensor]:
        return {"goal": reward * terminated}


def test_an_estimator_may_name_its_columns() -> None:
    rollout = RolloutBuffer(SCHEMA, 1, 1)
    rollout.add(obs=np.zeros(2), reward=2.0, terminated=True, truncated=False)
    rollout.finish(StepsOnly())
    assert rollout["goal"].item() == 2.0
