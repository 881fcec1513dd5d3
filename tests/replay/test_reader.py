"""Reading a replay: batches, everything in order, and what cannot be drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relive import (
    FrameStack,
    Prioritized,
    Recent,
    ReplayBuffer,
    Uniform,
    WithoutReplacement,
)
from relive.errors import EmptyError, ParameterError
from support import oracle
from support.replays import PLAIN, random_plays, three
from support.twins import DRESSES, SAMPLERS, Twin, contents, mapped, same_batches


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", None])
def test_batches_of_no_rows_are_refused(size: Any) -> None:
    twin = three()
    before = contents(twin.buffer)
    with pytest.raises(ParameterError, match="at least 1"):
        twin.buffer.sample(size)
    with pytest.raises(ParameterError, match="at least 1"):
        twin.buffer.batches(3, size)
    with pytest.raises(ParameterError, match="at least 1"):
        twin.buffer.batches(size, 4)
    assert contents(twin.buffer) == before


@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_is_drawn_before_a_transition_is_complete(name: str) -> None:
    twin = Twin(2, 6, sampler=SAMPLERS[name]())
    for kinds in (None, "..", "|", "..", "x", ".."):
        if kinds:
            twin.play(kinds)
        before = contents(twin.buffer)
        with pytest.raises(EmptyError, match="no complete transition to draw; add steps"):
            twin.buffer.sample(3)
        with pytest.raises(EmptyError, match="no complete transition to draw; add steps"):
            twin.buffer.batches(2, 3)  # at the call, not at the first batch
        assert contents(twin.buffer) == before
        assert len(twin.buffer) == len(twin.buffer.data()) == 0
        twin.check()
    twin.add("..")
    twin.check_batch(twin.buffer.sample(1))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_ring_with_fewer_rows_than_a_stack_has_frames_is_named_as_the_reason(name: str) -> None:
    twin = Twin(2, 6, sampler=SAMPLERS[name](), view=FrameStack(9))
    for _ in range(20):
        twin.add("..")
    assert len(twin.buffer) == 0
    with pytest.raises(EmptyError, match=r"none of the 10 complete transitions.* reads the 8 rows .* newest 6 rows"):
        twin.buffer.sample(3)


@pytest.mark.parametrize("count", [2**31, 2**63, 2**70])
@pytest.mark.parametrize("sampler", [Uniform, Prioritized, WithoutReplacement, Recent])
def test_batches_beyond_all_memory_are_refused_in_our_own_words(count: int, sampler: Any) -> None:
    replay = ReplayBuffer(PLAIN, 40, 2, sampler=sampler())
    for call in (lambda: replay.sample(count), lambda: replay.batches(2, count)):
        with pytest.raises(ParameterError, match=rf"batch_size={count}.*at most"):
            call()


def test_data_is_everything_that_can_be_drawn_in_the_order_of_completion() -> None:
    twin = Twin(3, 7).play("...", "T..", ".U.", "...")
    twin.add("..", [2, 1])
    twin.add("T", [0])
    rows = twin.anchors()
    order = [(row.env, row.number) for row in rows]
    assert order == [pair for pair in twin.truth.completed if pair in order]
    batch = twin.buffer.data()
    assert batch["index"].tolist() == [number * 3 + env for env, number in order]
    drawn, size = twin.buffer.stats()["sampled"], len(twin.buffer)
    assert (drawn, len(batch)) == (0, size)


def test_a_slice_is_every_row_of_an_env_in_the_order_of_time() -> None:
    for dress in DRESSES:
        twin = Twin(2, 9, dress=dress).play(*random_plays(4, 2, 30))
        for env in (0, 1):
            live = twin.truth.live(env)
            rows = twin.buffer.slice(env)
            assert rows["index"].tolist() == [twin.truth.index(row) for row in live]
            assert rows["complete"].tolist() == [row.complete for row in live]
            for start, stop in ((2, 5), (-3, None), (0, 0), (-100, 100), (4, -1)):
                part = twin.buffer.slice(env, start, stop)
                assert same_batches(part, rows.rows(slice(start, stop)))
            for row, got in zip(live, map(rows.rows, range(len(rows))), strict=True):
                want = mapped(np.asarray, row.obs)
                given_ = got["obs"]
                if isinstance(want, tuple):
                    want = {str(i): member for i, member in enumerate(want)}
                assert oracle.same(mapped(lambda x: x.numpy(), given_), want)
                if row.at < len(row.episode):
                    step = row.episode.steps[row.at]
                    assert got["reward"] == step.reward
                    assert (got["terminated"].item(), got["truncated"].item()) == (step.terminated, step.truncated)
    for env in (-1, 2):
        with pytest.raises(ParameterError, match="slice"):
            twin.buffer.slice(env)
