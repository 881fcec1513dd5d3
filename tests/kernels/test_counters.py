"""Counters and bells that processes share: numba and plain Python do the same, and no ring is lost between threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relive.kernels import cpu, reference
from relive.kernels.tables import COMMITTED, CUT, DRAINED, FOLLOWED, LANE_ALONE, LANE_COUNTERS, MASKED, LaneArrays

LARGEST = 2**31 - 1


@pytest.mark.parametrize("module", [cpu, reference])
def test_a_counter_is_published_and_the_bell_says_whether_somebody_sleeps(module: Any) -> None:
    counters, bells = np.zeros(3, np.int64), np.zeros(2, np.int32)
    assert not module.publish(counters, 1, 2**40, bells, 1)
    assert counters.tolist() == [0, 2**40, 0]
    assert not bells.any()
    assert module.published(counters, 1) == 2**40
    assert module.mark_bell(bells, 1) == 1 == module.mark_bell(bells, 1)
    assert module.publish(counters, 1, 5, bells, 1)
    assert bells.tolist() == [0, 2]
    assert counters[1] == 5
    assert not module.ring_bell(bells, 1)
    assert bells.tolist() == [0, 2]


@pytest.mark.parametrize("value", [0, 1, 2, 3, LARGEST - 1, LARGEST, -LARGEST - 1, -LARGEST, -2, -1])
def test_the_twins_mark_and_ring_alike_also_where_a_bell_wraps_around(value: int) -> None:
    outcomes = list[Any]()
    for module in (cpu, reference):
        bells = np.array([value], np.int32)
        first = bool(module.ring_bell(bells, 0)), bells.tolist()
        marked = module.mark_bell(bells, 0), bells.tolist()
        outcomes.append((first, marked, bool(module.ring_bell(bells, 0)), bells.tolist()))
    assert outcomes[0] == outcomes[1]


def test_of_two_threads_that_ring_one_mark_only_one_wakes() -> None:
    bells, woken = np.zeros(1, np.int32), list[int]()
    go, done = threading.Barrier(3), threading.Barrier(3)

    def ring() -> None:
        for _ in range(200):
            go.wait(30)
            if cpu.ring_bell(bells, 0):
                woken.append(1)
            done.wait(30)

    threads = [threading.Thread(target=ring) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(200):
        cpu.mark_bell(bells, 0)
        go.wait(30)
        done.wait(30)
        assert len(woken) == turn + 1
        assert bells[0] == 2 * (turn + 1)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("module", [cpu, reference])
def test_a_step_is_committed_with_its_marks_and_rings_when_enough_wait(module: Any) -> None:
    lane = lane_of(3, 2)
    given = cpu.handle_of(lane) if module is cpu else lane
    lane.bell[:] = 1, 2  # somebody sleeps, until there are two steps
    assert module.commit_step(given, 0, CUT) == 0
    assert module.commit_step(given, 1, 0) == 1
    assert lane.counters[COMMITTED] == 2
    assert lane.bell.tolist() == [2, 2]
    lane.terminated[2, 1] = 1
    assert module.commit_step(given, 2, 0) == -2
    assert lane.counters[COMMITTED] == 2
    assert module.commit_step(given, 2, FOLLOWED) == 0
    lane.mask[0] = 0, 0
    assert module.commit_step(given, 3, MASKED) == 0
    assert lane.marks.tolist() == [MASKED | LANE_ALONE, 0, FOLLOWED]  # env 0 was under way
    lane.mask[1] = 0, 1
    assert module.commit_step(given, 4, MASKED) == 0
    assert lane.marks[1] == MASKED  # nobody was


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 2**32 - 1))
def test_the_twins_commit_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lanes = [lane_of(3, 2), lane_of(3, 2)]
    for lane in lanes:
        rng = np.random.default_rng(seed)
        for array in (lane.terminated, lane.truncated, lane.mask, lane.marks):
            array[...] = rng.integers(0, 2, array.shape)
        lane.bell[:] = rng.integers(0, 4, 2)
        number, marks = int(rng.integers(1, 9)), int(rng.integers(0, 8))
        lane.counters[DRAINED] = number - int(rng.integers(0, 3))
        given = cpu.handle_of(lane) if lane is lanes[0] else lane
        lane.counters[1] = (cpu if lane is lanes[0] else reference).commit_step(given, number, marks)
    for one, other in zip(*lanes, strict=True):
        assert np.array_equal(one, other)


def lane_of(steps: int, envs: int) -> LaneArrays:
    """A lane with nothing in it."""
    flags = [np.zeros((steps, envs), np.uint8) for _ in range(3)]
    return LaneArrays(np.zeros(LANE_COUNTERS, np.int64), np.zeros(2, np.int32), np.zeros(steps, np.uint8), *flags)
