"""Counters and bells that processes share: as they are defined, and no ring is lost between threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from definitions import counters as definition
from relive import core
from relive.core.words import (
    COMMITTED,
    CUT,
    DRAINED,
    FOLLOWED,
    INSERTS,
    LANE_ALONE,
    LANE_COUNTERS,
    MASKED,
    OTHERS,
    PENDING,
    SAMPLES,
    LaneArrays,
)
from relive.processes.limits import allows

LARGEST = 2**31 - 1


@pytest.mark.parametrize("module", [core, definition])
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
def test_a_bell_is_marked_and_rung_as_defined_also_where_it_wraps_around(value: int) -> None:
    outcomes = list[Any]()
    for module in (core, definition):
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
            if core.ring_bell(bells, 0):
                woken.append(1)
            done.wait(30)

    threads = [threading.Thread(target=ring) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(200):
        core.mark_bell(bells, 0)
        go.wait(30)
        done.wait(30)
        assert len(woken) == turn + 1
        assert bells[0] == 2 * (turn + 1)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("module", [core, definition])
def test_a_step_is_committed_with_its_marks_and_rings_when_enough_wait(module: Any) -> None:
    lane = lane_of(3, 2)
    commit = module.Lane(lane).commit
    lane.bell[:] = 1, 2  # somebody sleeps, until there are two steps
    assert commit(0, CUT) == 0
    assert commit(1, 0) == 1
    assert lane.counters[COMMITTED] == 2
    assert lane.bell.tolist() == [2, 2]
    lane.terminated[2, 1] = 1
    assert commit(2, 0) == -2
    assert lane.counters[COMMITTED] == 2
    assert commit(2, FOLLOWED) == 0
    lane.mask[0] = 0, 0
    assert commit(3, MASKED) == 0
    assert lane.marks.tolist() == [MASKED | LANE_ALONE, 0, FOLLOWED]  # env 0 was under way
    lane.mask[1] = 0, 1
    assert commit(4, MASKED) == 0
    assert lane.marks[1] == MASKED  # nobody was


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 2**32 - 1))
def test_steps_are_committed_as_defined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(30):
        lane, other = lane_of(3, 2), lane_of(3, 2)
        for array in (lane.terminated, lane.truncated, lane.mask):
            array[...] = rng.integers(0, 2, array.shape)
        lane.marks[:], lane.bell[:] = rng.integers(0, 8, 3), rng.integers(0, 4, 2)
        number, marks = int(rng.integers(1, 9)), int(rng.integers(0, 8))
        lane.counters[DRAINED] = number - int(rng.integers(0, 3))
        for mine, copied in zip(lane, other, strict=True):
            copied[...] = mine
        assert core.Lane(lane).commit(number, marks) == definition.Lane(other).commit(number, marks)
        assert all(np.array_equal(mine, copied) for mine, copied in zip(lane, other, strict=True))


def lane_of(steps: int, envs: int) -> LaneArrays:
    """A lane with nothing in it."""
    flags = [np.zeros((steps, envs), np.uint8) for _ in range(3)]
    return LaneArrays(np.zeros(LANE_COUNTERS, np.int64), np.zeros(2, np.int32), np.zeros(steps, np.uint8), *flags)


@pytest.mark.parametrize("seed", range(5))
def test_inserts_and_samples_are_admitted_as_defined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts, notes = np.zeros((2, 4), np.int64), np.zeros((2, 1), np.int64)
    counts[:, OTHERS] = rng.integers(3)
    rule = (
        float(rng.choice([0.3, 1, 7.7])),
        int(rng.integers(1, 9)),
        float(-rng.integers(0, 9)),
        float(rng.integers(60)),
    )
    for _ in range(300):
        side, count = int(rng.integers(2)), int(rng.integers(1, 5))
        inserts, samples, pending, others = counts[0].tolist()
        asked = allows(side, count, inserts + others if side == INSERTS else inserts - pending, samples, rule)
        assert core.admit(counts[0], side, count, *rule) == definition.admit(counts[1], side, count, *rule) == asked
        assert counts[0].tolist() == counts[1].tolist()
        both = zip((core, definition), counts, notes, strict=True)
        assert len({module.admit_noted(mine, note, count, *rule) for module, mine, note in both}) == 1
        assert notes[0] == notes[1] == counts[0, PENDING]
        end = rng.choice(["confirm", "take_back", "go on"])
        for module, mine, note in zip((core, definition), counts, notes, strict=True):
            getattr(module, end, lambda *_: None)(mine, note)
        assert counts[0].tolist() == counts[1].tolist()
    for module, mine in zip((core, definition), counts, strict=True):
        module.add_count(mine, SAMPLES, -3)
    assert counts[0].tolist() == counts[1].tolist()


def test_threads_add_to_a_count_and_none_is_lost() -> None:
    counts, note = np.zeros(4, np.int64), np.zeros(1, np.int64)

    def count() -> None:
        for _ in range(5000):
            core.add_count(counts, PENDING, 1)
            core.admit(counts, INSERTS, 2, 1.0, 2**40, 0.0, 0.0)

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.tolist() == [30_000, 0, 15_000, 0]
    assert core.admit_noted(counts, note, 3, 1.0, 2**40, 0.0, 0.0)
    core.take_back(counts, note)
    assert counts.tolist() == [30_000, 0, 15_000, 0]
    assert note[0] == 0


COUNTS, BELLS, NOTE = np.zeros(4, np.int64), np.zeros(2, np.int32), np.zeros(1, np.int64)
RULE = 1.0, 1, 0.0, 0.0


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (IndexError, lambda: core.publish(COUNTS, 4, 1, BELLS, 0)),
        (IndexError, lambda: core.publish(COUNTS, 0, 1, BELLS, 2)),
        (IndexError, lambda: core.published(COUNTS, -1)),
        (IndexError, lambda: core.mark_bell(BELLS, 2)),
        (IndexError, lambda: core.ring_bell(BELLS, -1)),
        (IndexError, lambda: core.add_count(COUNTS, 4, 1)),
        (TypeError, lambda: core.add_count(BELLS, 0, 1)),
        (TypeError, lambda: core.add_count(np.zeros(8, np.int64)[::2], 0, 1)),
        (ValueError, lambda: core.admit(COUNTS[:3], 0, 1, *RULE)),
        (ValueError, lambda: core.admit(COUNTS, 2, 1, *RULE)),
        (ValueError, lambda: core.admit(COUNTS, 0, 2**53, *RULE)),
        (ValueError, lambda: core.admit_noted(COUNTS, NOTE[:0], 1, *RULE)),
        (ValueError, lambda: core.confirm(COUNTS, NOTE[:0])),
        (ValueError, lambda: core.take_back(COUNTS[:2], NOTE)),
        (ValueError, lambda: core.Lane(lane_of(3, 2)).commit(-1, 0)),
        (ValueError, lambda: core.Lane(lane_of(3, 2)._replace(bell=np.zeros(1, np.int32)))),
        (ValueError, lambda: core.Lane(lane_of(3, 2)._replace(mask=np.zeros((3, 1), np.uint8)))),
        (TypeError, lambda: core.Lane(lane_of(3, 2)._replace(marks=np.zeros(3, np.int64)))),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(error: type[Exception], call: Any) -> None:
    with pytest.raises(error):
        call()
    assert not COUNTS.any()
    assert not BELLS.any()
    assert not NOTE.any()
