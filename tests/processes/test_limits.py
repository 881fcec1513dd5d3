"""Limits: Reverb's rule for several items at a time, never both sides blocked, processes counted exactly."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from relive import MinSize, SamplesPerInsert
from relive.core.words import SAMPLES
from relive.errors import ParameterError, WaitTimeoutError
from support import internals
from support.children import METHODS, SECONDS, done, kill, started
from support.limits import insert_some, sample_all, wait_for_ever

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")


class Plain:
    """Reverb's rule as its documentation says it, one item after another."""

    def __init__(self, ratio: float, min_size: int, error_buffer: float) -> None:
        self.ratio, self.min_size, self.error_buffer = ratio, min_size, error_buffer
        self.inserts = self.samples = 0

    def error(self, inserts: int, samples: int) -> float:
        return (inserts - self.min_size) * self.ratio - samples

    def insert(self, count: int) -> bool:
        after = self.inserts + count
        if after > self.min_size and self.error(after, self.samples) > self.error_buffer:
            return False
        self.inserts = after
        return True

    def sample(self, count: int) -> bool:
        if self.inserts < self.min_size or self.error(self.inserts, self.samples + count) < -self.error_buffer:
            return False
        self.samples += count
        return True


@pytest.mark.parametrize("seed", range(20))
def test_it_is_reverbs_rule_and_at_any_time_one_side_may_go_on(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ratio, rows, steps = float(rng.choice([0.25, 0.5, 1, 3, 32])), int(rng.integers(1, 40)), int(rng.integers(1, 9))
    buffer = max(1.0, ratio, rows, steps * ratio) * float(rng.choice([1, 1.5, 4]))
    limit, plain = SamplesPerInsert(ratio, int(rng.integers(1, 30)), buffer), None
    plain = Plain(ratio, limit.min_size, buffer)
    for _ in range(300):
        before = limit.state_dict()
        assert limit.may_sample(rows) == copy.copy(plain).sample(rows)
        assert limit.may_insert(steps) == copy.copy(plain).insert(steps)
        assert limit.state_dict() == before
        if rng.random() < 0.5:
            assert limit.try_to_sample(rows) == plain.sample(rows)
        else:
            assert limit.try_to_insert(steps) == plain.insert(steps)
        blocked = [not copy.copy(plain).sample(rows), not copy.copy(plain).insert(steps)]
        assert not all(blocked)
    assert (limit.stats()["inserts"], limit.stats()["samples"]) == (plain.inserts, plain.samples)


def test_asking_counts_nothing_and_answers_what_trying_then_does() -> None:
    limit = SamplesPerInsert(1, 1, 64)
    assert limit.may_insert()
    assert not limit.may_sample(1)
    note = np.zeros(1, np.int64)
    assert limit.admit_inserts(1, note)
    assert not limit.may_sample(64)  # the insert is not in the replay yet
    assert not limit.try_to_sample(64)
    limit.confirm(note)
    assert [limit.may_sample(64) for _ in range(3)] == [True] * 3
    assert limit.state_dict() == {"inserts": 1, "samples": 0}
    assert limit.try_to_sample(64)
    assert not limit.may_sample(1)
    limit.wait_to_insert(64)
    limit.wait_to_insert(64)
    assert not limit.may_insert()
    assert limit.stats()["sample_waits"] == 0


def test_a_minimal_size_holds_samples_back_and_nothing_else() -> None:
    limit = MinSize(5)
    limit.wait_to_insert(4)
    assert not limit.try_to_sample(1)
    limit.wait_to_insert(1)
    limit.wait_to_sample(10**9)
    limit.wait_to_insert(10**9)
    assert repr(limit) == "MinSize(5)"


def test_who_waits_is_woken_by_the_other_side_and_the_figures_say_who_waited() -> None:
    limit = SamplesPerInsert(1, 1, 4)
    waiting = threading.Thread(target=limit.wait_to_sample, args=(4, SECONDS))
    waiting.start()
    while not internals.bells(limit)[SAMPLES].word[0] & 1:  # until it is about to sleep
        time.sleep(0.001)
    time.sleep(0.05)
    began = time.monotonic()
    limit.wait_to_insert(1)
    waiting.join(SECONDS)
    assert time.monotonic() - began < SECONDS / 2
    with pytest.raises(WaitTimeoutError, match=r"0.02 s to sample 1 row after 1 inserts and 4 samples"):
        limit.wait_to_sample(1, timeout=0.02)
    limit.wait_to_insert(4)
    limit.wait_to_insert(4)
    with pytest.raises(TimeoutError, match="to insert 2 steps after 9 inserts and 4 samples"):
        limit.wait_to_insert(2, timeout=0.0)
    stats = limit.stats()
    assert (stats["sample_waits"], stats["insert_waits"], stats["insert_waited"]) == (2, 0, 0)
    assert 0.06 < stats["sample_waited"] < SECONDS
    assert stats["samples_per_insert"] == 4 / 8


def test_counts_are_taken_back_reset_and_continued() -> None:
    limit = SamplesPerInsert(2, 3, 8)
    limit.wait_to_insert(3)
    limit.wait_to_sample(8)
    assert not limit.try_to_sample(1)
    limit.uncount(samples=1)
    assert limit.try_to_sample(1)
    again = SamplesPerInsert(2, 3, 8)
    again.load_state_dict(limit.state_dict())
    assert again.state_dict() == limit.state_dict() == {"inserts": 3, "samples": 8}
    limit.reset()
    assert limit.state_dict() == {"inserts": 0, "samples": 0}
    for wrong in ({}, {"inserts": 1}, {"inserts": -1, "samples": 0}, {"inserts": 1.5, "samples": 0}):
        with pytest.raises(ParameterError, match="load_state_dict"):
            limit.load_state_dict(wrong)
    with pytest.raises(ParameterError, match="only 0 and 0 were counted"):
        limit.uncount(inserts=1)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SamplesPerInsert(0, 1, 1), "ratio=0.*above 0"),
        (lambda: SamplesPerInsert(float("nan"), 1, 1), "ratio=nan"),
        (lambda: SamplesPerInsert(4, 1, 3), "error_buffer is at least"),
        (lambda: SamplesPerInsert(1, 0, 3), "min_size=0"),
        (lambda: MinSize(0), "min_size=0"),
        (lambda: MinSize(1.5), "min_size=1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: SamplesPerInsert(1, 1, 4).try_to_sample(5), "5 rows at a time are more than error_buffer"),
        (lambda: SamplesPerInsert(2, 1, 4).try_to_insert(3), "3 steps at a time, 6 samples, are more"),
        (lambda: SamplesPerInsert(1, 1, 4).may_sample(5), "5 rows at a time are more than error_buffer"),
        (lambda: SamplesPerInsert(2, 1, 4).may_insert(3), "3 steps at a time, 6 samples, are more"),
        (lambda: MinSize(1).try_to_sample(0), "count=0"),
        (lambda: MinSize(1).may_sample(0), "count=0"),
        (lambda: MinSize(1).wait_to_insert(1, timeout=-1), "timeout=-1"),
    ],
)
def test_what_cannot_be_or_would_wait_for_ever_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        make()


def test_rings_that_share_a_limit_may_not_all_together_insert_what_would_wait_for_ever() -> None:
    limit = SamplesPerInsert(2, 1, 12)
    limit.share(3)
    assert limit.try_to_insert(2)
    with pytest.raises(ParameterError, match="3 steps at a time of 3 rings, 18 samples, are more"):
        limit.try_to_insert(3)
    assert limit.try_to_sample(12)  # samples are counted in one place


def test_the_most_inserts_at_once_are_never_more_than_the_limit_allows() -> None:
    limit = SamplesPerInsert(1.1, 1, 7.7)  # 7.7 / 1.1 is 7, and 7 * 1.1 is more than 7.7
    assert limit.most_at_once == 6
    assert limit.try_to_insert(6)
    with pytest.raises(ParameterError, match="7 steps at a time"):
        limit.try_to_insert(7)


def test_threads_of_both_sides_keep_the_ratio_and_end() -> None:
    limit, seen = SamplesPerInsert(8, 10, 64), list[float]()

    def insert() -> None:
        for _ in range(500):
            limit.wait_to_insert(2, SECONDS)

    def sample() -> None:
        for _ in range(248):
            limit.wait_to_sample(32, SECONDS)
            state = limit.state_dict()
            seen.append((state["inserts"] - 10) * 8 - state["samples"])

    threads = [threading.Thread(target=target) for target in (insert, insert, sample, sample)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert limit.state_dict() == {"inserts": 2000, "samples": 2 * 248 * 32}
    assert min(seen) >= -64 - 32  # the two counts are read one after the other


# Other processes


@pytest.mark.parametrize("method", METHODS)
def test_processes_count_exactly_what_is_allowed(method: str) -> None:
    limit = SamplesPerInsert(1000, 2, 4000)
    limit.wait_to_insert(4)
    for child in [started(method, sample_all, limit) for _ in range(3 if method == "fork" else 1)]:
        done(child)
    assert limit.state_dict() == {"inserts": 4, "samples": 2 * 1000 + 4000}
    writer = started(method, insert_some, limit, 20)
    for _ in range(20):
        limit.wait_to_sample(2000, SECONDS)
    done(writer)
    assert limit.state_dict() == {"inserts": 44, "samples": 46_000}


def test_a_process_that_is_killed_while_it_waits_holds_nobody_back() -> None:
    limit = SamplesPerInsert(1, 1, 4)
    child = started("fork", wait_for_ever, limit)
    while not internals.bells(limit)[SAMPLES].word[0] & 1:  # until it is about to sleep
        time.sleep(0.001)
    kill(child)
    limit.wait_to_insert(1, SECONDS)
    limit.wait_to_sample(4, SECONDS)
    assert limit.state_dict() == {"inserts": 1, "samples": 4}


def test_a_copy_and_a_pickle_are_the_same_limit() -> None:
    limit = SamplesPerInsert(2, 3, 8)
    for other in (pickle.loads(pickle.dumps(limit)), copy.deepcopy(limit)):
        other.wait_to_insert(1)
        assert repr(other) == repr(limit) == "SamplesPerInsert(2, min_size=3, error_buffer=8)"
    assert limit.state_dict() == {"inserts": 2, "samples": 0}
