"""The figures of a replay: how much memory it takes, and what its stats say."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from relive import (
    Fresh,
    Prioritized,
    Recent,
    ReplayBuffer,
    Sequence,
    Transition,
    Uniform,
    WithoutReplacement,
)
from relive.errors import ParameterError
from support import internals
from support.replays import PLAIN, kept
from support.twins import DRESSES, SAMPLERS, Twin, contents

# What it takes.


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dress", DRESSES)
def test_the_plan_is_what_the_buffer_takes_to_the_byte(dress: str, ordered: bool) -> None:
    twin = Twin(3, 7, dress=dress, ordered=ordered)
    store = internals.ring(twin.buffer).store
    taken = store.target.nbytes + sum(block.nbytes for block in store.blocks.values())
    plan = ReplayBuffer.plan(twin.schema, 23, 3, ordered=ordered)
    assert plan.rows == store.num_rows == 21
    assert plan.total_bytes == taken == 21 * plan.row_bytes
    assert sum(plan.fields.values()) == plan.row_bytes
    assert all(size >= 0 for size in plan.fields.values())
    for path, field in store.leaves.items():
        assert plan.fields[".".join(path)] == field.nbytes
    text = str(plan)
    assert "21 rows, 7 for each of 3 envs" in text
    assert all(name in text for name in plan.fields)
    by_bytes = ReplayBuffer(twin.schema, num_envs=3, capacity_bytes=taken + 2, ordered=ordered)
    assert internals.ring(by_bytes).store.num_rows == 21
    assert ReplayBuffer.plan(twin.schema, None, 3, capacity_bytes=taken - 1, ordered=ordered).rows == 18


KEEPING: dict[str, Any] = {
    "uniform": Uniform,
    "without replacement": WithoutReplacement,
    "prioritized": Prioritized,
    "prioritized by the buffer": lambda: Prioritized(normalize="buffer"),
    "recent": Recent,
    "recent and prioritized": lambda: Recent(inner=Prioritized()),
    "fresh and prioritized": lambda: Fresh(Prioritized()),
}


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("rows", [2, 7, 8, 9, 63, 64, 65, 700])
def test_the_plan_and_nbytes_count_what_the_sampler_keeps_to_the_byte(name: str, rows: int) -> None:
    sampler = KEEPING[name]()
    plan = ReplayBuffer.plan(PLAIN, rows * 3, 3, sampler=sampler)
    buffer = ReplayBuffer(PLAIN, rows * 3, 3, sampler=sampler, seed=0)
    everything = np.arange(rows * 3 + 3).reshape(-1, 3)
    flags = np.zeros(everything.shape, bool)
    obs = np.stack([everything, everything], 2)
    buffer.extend({"obs": obs, "action": everything, "reward": everything, "terminated": flags, "truncated": flags})
    buffer.sample(3)
    store, per_row = internals.ring(buffer).store, 8 * 3 if name == "without replacement" else 0
    # an epoch's order holds what can be drawn: all but each env's newest row
    assert plan.sampler_bytes == kept(sampler) + per_row
    assert plan.total_bytes == buffer.nbytes == store.target.nbytes + kept(sampler) + per_row
    assert plan.total_bytes == plan.rows * plan.row_bytes + plan.sampler_bytes
    assert ("sampler" in str(plan)) == ("in all" in str(plan)) == (plan.sampler_bytes > 0)


@pytest.mark.parametrize("name", KEEPING)
def test_a_capacity_in_bytes_is_for_rows_and_sampler_together_and_nothing_more_would_fit(name: str) -> None:
    sampler = KEEPING[name]()
    for size in (1_000, 12_345, 99_999, 1_000_000):
        plan = ReplayBuffer.plan(PLAIN, capacity_bytes=size, sampler=sampler)
        assert plan.total_bytes <= size < ReplayBuffer.plan(PLAIN, plan.rows + 1, sampler=sampler).total_bytes
    buffer = ReplayBuffer(PLAIN, capacity_bytes=12_345, sampler=sampler)
    assert buffer.nbytes == ReplayBuffer.plan(PLAIN, capacity_bytes=12_345, sampler=KEEPING[name]()).total_bytes


def test_what_the_sampler_keeps_counts_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ReplayBuffer.plan(PLAIN, 10_000).total_bytes
    monkeypatch.setattr("relive.memory.estimate.free_memory", lambda: rows + 100)
    ReplayBuffer(PLAIN, 10_000)
    with pytest.raises(ParameterError, match=r"would take [\d,]+ bytes and [\d,]+ are free(.|\n)*sampler(.|\n)*in all"):
        ReplayBuffer(PLAIN, 10_000, sampler=Prioritized())


def test_the_weights_of_sequences_are_counted_once_there_are_any() -> None:
    buffer = ReplayBuffer(PLAIN, 1_000, view=Sequence(4))
    tree = internals.tree(internals.windows(cast("Any", buffer.sampler)))
    assert buffer.nbytes - ReplayBuffer.plan(PLAIN, 1_000).total_bytes == internals.nodes(tree).base.nbytes
    buffer.view = Transition()
    assert buffer.nbytes == ReplayBuffer.plan(PLAIN, 1_000).total_bytes


def test_minima_are_counted_once_they_are_asked_for() -> None:
    buffer = ReplayBuffer(PLAIN, 1_000, sampler=Prioritized())
    before = buffer.nbytes
    cast("Prioritized", buffer.sampler).normalize = "buffer"
    assert buffer.nbytes > before


def test_a_capacity_is_given_in_rows_or_in_bytes_and_has_to_fit_into_memory() -> None:
    for wrong in ({}, {"capacity": 10, "capacity_bytes": 10_000}, {"capacity_bytes": 50}, {"capacity_bytes": -1}):
        with pytest.raises(ParameterError, match="capacity"):
            ReplayBuffer(PLAIN, **wrong)
        with pytest.raises(ParameterError, match="capacity"):
            ReplayBuffer.plan(PLAIN, **wrong)
    with pytest.raises(
        ParameterError, match=r"would take [\d,]+ bytes and [\d,]+ are free; lower the capacity:\n.*rows"
    ):
        ReplayBuffer(PLAIN, 10**15)
    assert ReplayBuffer.plan(PLAIN, 10**15).rows == 10**15  # to plan costs nothing


# What it tells.


def test_stats_are_those_worked_out_by_hand_and_change_nothing() -> None:
    twin = Twin(2, 5, sampler=Prioritized(alpha=1.0, eps=1e-9))
    twin.play("..", ".T", "..", "U.", "..", "..")
    # env 0: steps 0 to 3, the boundary row 4, steps 5 and 6: rows 2 to 6 live, 2, 3 and 5 can be drawn.
    # env 1: 0, 1, boundary 2, 3, 4, 5, 6: rows 2 to 6 live, 3, 4 and 5 can be drawn.
    # Completed, in order: 0a 0b 1b | 1a | 2a 3a 3b | 4b | 5a 5b: ten.
    batch = twin.buffer.sample(4)
    twin.buffer.sample(8)
    index = twin.buffer.data()["index"].tolist()
    assert index == [4, 6, 7, 9, 10, 11]
    twin.buffer.update_priorities(index, [1.0, 2.0, 3.0, 4.0, 5.0, 0.0])
    before = contents(twin.buffer)
    stats = twin.buffer.stats()
    assert contents(twin.buffer) == before
    assert twin.buffer.stats() == stats
    completed = [twin.truth.completed.index((row.env, row.number)) for row in twin.anchors()]
    assert completed == [4, 5, 6, 7, 8, 9]
    assert stats == {
        "size": 6.0,
        "completed": 10.0,
        "episodes": 2.0,
        "age_mean": 2.5,
        "age_max": 5.0,
        "batches": 2.0,
        "sampled": 12.0,
        "replay_ratio": 1.2,
        "late_updates": 0.0,
        "not_finite_rewards": 0.0,
        "priority_min": pytest.approx(0.0, abs=1e-6),
        "priority_mean": pytest.approx(2.5),
        "priority_max": pytest.approx(5.0),
        "effective_size": pytest.approx(15**2 / 55),
    }
    twin.play("..", "..")
    late = twin.buffer.update_priorities(batch["index"], torch.zeros(4))
    assert twin.buffer.stats()["late_updates"] == late


def test_stats_of_a_buffer_without_priorities_and_of_an_empty_one_have_no_gaps() -> None:
    for sampler in SAMPLERS.values():
        twin = Twin(2, 5, sampler=sampler())
        empty = twin.buffer.stats()
        assert set(empty.values()) == {0.0}
        twin.play("..", "..", "..")
        twin.buffer.sample(2)
        stats = twin.buffer.stats()
        assert all(math.isfinite(value) for value in stats.values())
        assert ("effective_size" in stats) == twin.buffer.has_priorities
        if twin.buffer.has_priorities:
            assert stats["effective_size"] == pytest.approx(4)


def test_the_effective_size_is_of_the_weights_in_the_window_of_nothing_but_the_buffer() -> None:
    twin = Twin(1, 40, sampler=Recent(0.5, 2, inner=Prioritized(alpha=1.0)))
    for _ in range(31):
        twin.add(".")
    assert twin.buffer.stats()["effective_size"] == pytest.approx(30)
