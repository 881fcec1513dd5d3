"""Lanes that are drained under a limit: the ratio holds to the step, and full lanes hold their writers back."""

from __future__ import annotations

import resource
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from relive import Lanes, MinSize, ReplayBuffer, SamplesPerInsert
from relive.errors import ParameterError, ShapeError, WaitTimeoutError
from support.children import SECONDS, done, started
from support.effort import often
from support.interrupts import broken_off
from support.lane_plays import COUNTED, counted, numbers, write_some

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")


def laned(writers: int = 1, num_envs: int = 1, count: int = 0, **options: Any) -> tuple[Lanes, ReplayBuffer, list[Any]]:
    """Lanes with so many steps in each, a replay for them, and their writers."""
    lanes = Lanes(COUNTED, writers, num_envs, **{"steps": 16} | options)
    ends = [lanes.writer(k, timeout=0) for k in range(writers)]
    for writer in ends:
        for t in range(count):
            writer.add(counted(t, num_envs))
    return lanes, ReplayBuffer(COUNTED, 1000, writers * num_envs), ends


def test_a_drain_moves_what_the_limit_allows_and_the_lane_holds_its_writer_back() -> None:
    lanes, replay, (writer,) = laned(count=16)
    limit = SamplesPerInsert(2, min_size=4, error_buffer=6)  # so 4 + 6 / 2 inserts before the first sample
    assert lanes.drain(replay, limit=limit) == 7
    assert lanes.waiting == [9]
    assert lanes.drain(replay, limit=limit) == 0
    for t in range(16, 23):
        writer.add(counted(t))
    with pytest.raises(WaitTimeoutError, match="lane 0 is full"):
        writer.add(counted(23))
    limit.wait_to_sample(4)
    assert lanes.drain(replay, limit=limit) == 2
    writer.add(counted(23))
    assert limit.stats()["inserts"] == 9
    assert limit.stats()["insert_waits"] == 1  # it was refused once, until it could go on
    assert lanes.drain(replay) == 15  # without a limit
    assert numbers(replay) == list(range(24))
    assert limit.stats()["inserts"] == 9


def test_each_lane_has_its_turn_where_the_limit_leaves_room_for_one() -> None:
    lanes, replay, _ = laned(writers=3, count=16)
    limit = SamplesPerInsert(1, min_size=1, error_buffer=4)
    assert lanes.drain(replay, limit=limit) == 5
    for _ in range(9):
        limit.wait_to_sample(4)
        assert lanes.drain(replay, limit=limit) == 4
    assert max(lanes.waiting) - min(lanes.waiting) <= 4


def test_masked_steps_are_not_counted_and_vector_steps_go_in_whole() -> None:
    lanes, replay, (writer,) = laned(num_envs=3)
    limit = SamplesPerInsert(1, min_size=1, error_buffer=4)
    for t in range(6):
        writer.add(counted(t, 3) | ({"mask": np.array([True, t == 0, False])} if t < 3 else {}))
    assert lanes.drain(replay, limit=limit) == 4  # 2 + 1 + 1 steps; three more would be above 5
    limit.wait_to_sample(4)
    assert lanes.drain(replay, limit=limit) == 3
    assert limit.stats()["inserts"] == 7
    assert lanes.waiting == [2]


def test_who_drains_sleeps_until_there_is_room() -> None:
    lanes, replay, _ = laned(count=16)
    limit = SamplesPerInsert(1, min_size=1, error_buffer=4)
    assert lanes.drain(replay, limit=limit, timeout=SECONDS) == 5
    begin, used = time.monotonic(), resource.getrusage(resource.RUSAGE_THREAD)
    assert lanes.drain(replay, limit=limit, timeout=0.3) == 0
    assert time.monotonic() - begin >= 0.3
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_utime - used.ru_utime < 0.15
    later = threading.Timer(0.1, limit.wait_to_sample, (3,))
    later.start()
    assert lanes.drain(replay, limit=limit, timeout=SECONDS) == 3
    later.join()
    assert limit.stats()["insert_waited"] >= 0.3


def test_a_limit_that_could_hold_both_sides_for_ever_is_refused() -> None:
    lanes, replay, _ = laned(num_envs=4, count=1)
    with pytest.raises(ParameterError, match="4 steps at a time"):
        lanes.drain(replay, limit=SamplesPerInsert(2, 1, 7))
    with pytest.raises(ParameterError, match="timeout"):
        lanes.drain(replay, limit=MinSize(1), timeout=-1)
    assert lanes.drain(replay, limit=MinSize(1)) == 4


def test_steps_that_the_replay_refuses_are_not_counted() -> None:
    lanes, replay, _ = laned(count=8)
    limit, extend = SamplesPerInsert(1, 1, 4), replay.extend

    def refuse(*_: Any, **__: Any) -> None:
        raise ShapeError("no")

    replay.extend = refuse
    with pytest.raises(ShapeError):
        lanes.drain(replay, limit=limit)
    assert limit.stats()["inserts"] == 0
    replay.extend = extend
    assert lanes.drain(replay, limit=limit) == 5


@pytest.mark.parametrize("stride", [often(89, 37), pytest.param(1, marks=pytest.mark.slow)])
def test_a_drain_that_is_broken_off_at_any_line_has_counted_exactly_what_is_in(stride: int) -> None:
    for at in range(0, 10**6, stride):
        lanes, replay, _ = laned(writers=2, count=11)
        limit = SamplesPerInsert(2, min_size=3, error_buffer=20)
        off = broken_off(lambda lanes=lanes, replay=replay, limit=limit: lanes.drain(replay, limit=limit), at)
        lanes.drain(replay, limit=limit)
        assert limit.stats()["inserts"] == 13, f"at {at}"
        assert len(numbers(replay, 0)) + len(numbers(replay, 1)) == 13, f"at {at}"
        if not off:
            break


def test_processes_write_one_drains_and_one_samples_and_the_error_stays_within_its_bounds() -> None:
    lanes, replay, writers = laned(writers=2, steps=32)
    for writer in writers:
        writer.close()
    limit = SamplesPerInsert(4, min_size=20, error_buffer=64)
    children = [started("fork", write_some, lanes, k, 0, 150) for k in range(2)]
    over = threading.Event()

    def fill() -> None:
        while not over.is_set():
            if lanes.wait(0.1):
                lanes.drain(replay, limit=limit, timeout=0.1)

    thread = threading.Thread(target=fill)
    thread.start()
    with replay.serve(32, limit=limit, timeout=SECONDS) as batches:
        for _ in range((300 - 20) * 4 // 32 - 1):
            assert len(next(batches)["reward"]) == 32
            inserts, samples = (limit.stats()[name] for name in ("inserts", "samples"))
            assert -64 - 32 <= (max(inserts, 20) - 20) * 4 - samples <= 64 + 32  # two reads, one after the other
    for child in children:
        done(child)
    over.set()
    thread.join(SECONDS)
    while lanes.drain(replay):
        pass
    assert [len(numbers(replay, k)) for k in range(2)] == [150, 150]
