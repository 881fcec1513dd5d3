"""One limit of samples per insert over shards: workers and the learner hold each other back, also when shards die."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relive import MinSize, SamplesPerInsert
from relive.cluster import replay as learner
from relive.cluster import writer as writers
from relive.cluster.replay import Replay, ShardLimit
from relive.cluster.shard import ShardTotals
from relive.errors import LifecycleError, ParameterError, WaitTimeoutError
from support import internals
from support.children import SECONDS
from support.clusters import LocalLink, check, local, steps
from support.effort import often


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    """Who waits looks again soon: the shards of these tests answer at once."""
    monkeypatch.setattr(learner, "PAUSE", 0.002)
    monkeypatch.setattr(learner, "LIMIT_PAUSE", 0.002)
    monkeypatch.setattr(writers, "PAUSE", 0.002)
    monkeypatch.setattr(writers, "LONGEST_PAUSE", 0.01)


def error_of(limit: SamplesPerInsert) -> float:
    stats = limit.stats()
    return (stats["inserts"] - limit.min_size) * limit.ratio - stats["samples"]


def stored(link: LocalLink) -> int:
    return sum(internals.ledger(shard).stored for shard in link.shards if shard is not None)


def test_workers_wait_for_the_learner_and_the_learner_for_them():
    limit = SamplesPerInsert(2, min_size=40, error_buffer=64)
    replay, link = local(limit=limit, limit_timeout=0.2)
    with pytest.raises(WaitTimeoutError, match="sample 16 rows after 0 inserts"):
        replay.sample(16)
    writer = replay.writer(timeout=0.1)
    writer.extend(steps(15))  # 60 of 40 + 64 / 2 steps
    writer.flush()
    with pytest.raises(WaitTimeoutError, match="the limit has not allowed"):
        writer.extend(steps(30, start=15))
    assert stored(link) <= 72
    for _ in range((2 * (stored(link) - 40) + 64) // 16):
        check(replay.sample(16))
        assert abs(error_of(limit)) <= 64
    with pytest.raises(WaitTimeoutError):
        replay.sample(16)
    assert stored(link) <= 72
    stats = replay.stats()
    assert stats["insert_waits"] == 2  # for each shard
    assert stats["insert_waited"] > 0.0
    assert stats["sample_waits"] == 2
    before = stored(link)
    with pytest.raises(WaitTimeoutError):
        writer.flush()  # what waited goes on, each step once
    assert stored(link) > before
    replay.close()


def test_a_writer_that_was_replaced_while_it_waited_hears_of_the_newer_one_and_its_wait_ends():
    limit = SamplesPerInsert(2, min_size=40, error_buffer=64)
    replay, _ = local(limit=limit, limit_timeout=0.2, shards=1)
    old = replay.writer(timeout=0.1)
    for start in (0, 15):
        with contextlib.suppress(WaitTimeoutError):
            old.extend(steps(15, start=start))
            old.flush()
    new = replay.writer()
    with pytest.raises(WaitTimeoutError):
        old.flush()  # the limit is all that holds it back
    new.interrupt()  # takes the envs
    with pytest.raises(LifecycleError, match="newer writer"):
        old.flush()
    with pytest.raises(LifecycleError, match="make a new one"):
        old.extend(steps(5, start=30))
    waited = replay.stats()["insert_waited"]
    assert waited > 0.0
    time.sleep(0.01)
    assert replay.stats()["insert_waited"] == waited
    replay.close()


def run(replay: Replay, writers: list[Any], rounds: int, batch_size: int, watch: Any) -> None:
    """Workers send in threads while this one samples."""
    over, failed = threading.Event(), list[BaseException]()

    def work(writer: Any) -> None:
        start = 0
        while not over.is_set():
            try:
                writer.extend(steps(8, writer.envs, start))
            except WaitTimeoutError:
                pass  # the steps wait there
            except BaseException as error:
                failed.append(error)
                return
            start += 8

    threads = [threading.Thread(target=work, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        for turn in range(rounds):
            check(replay.sample(batch_size))
            watch(turn)
    finally:
        over.set()
        for thread in threads:
            thread.join(SECONDS)
    assert not failed


@pytest.mark.parametrize("busy", [[[0, 1], [2, 3]], [[0, 1]]], ids=["all", "one shard"])
def test_threads_of_both_sides_keep_the_limit(busy: list[list[int]]):
    limit = SamplesPerInsert(1, min_size=20, error_buffer=40)
    replay, link = local(limit=limit, limit_timeout=SECONDS, capacity=4000)

    def watch(_: int) -> None:
        assert stored(link) <= 20 + 40 + limit.stats()["samples"]
        assert error_of(limit) >= -40

    run(replay, [replay.writer(envs, timeout=0.2) for envs in busy], often(10, 30), 32, watch)
    replay.close()


def test_shards_that_die_and_come_back_neither_block_the_others_nor_get_more_than_the_limit(tmp_path: Path):
    limit = SamplesPerInsert(1, min_size=20, error_buffer=40)
    replay, link = local(limit=limit, limit_timeout=SECONDS, capacity=4000, path=tmp_path / "replay")

    def watch(turn: int) -> None:
        if turn == often(2, 5):
            replay.save()
        if turn == often(4, 8):
            link.kill(1)
        if turn == often(8, 20):
            link.restart(1)
            time.sleep(0.01)  # more than a pause
        assert error_of(limit) >= -40
        assert error_of(limit) <= 40

    run(replay, [replay.writer(envs, timeout=0.5) for envs in ([0, 1], [2, 3])], often(14, 36), 32, watch)
    stats = replay.stats()
    assert (stats["restarts"], stats["shards_up"]) == (1, 2)
    replay.close()


def test_a_shard_that_was_restarted_does_not_keep_the_room_that_its_earlier_life_was_given():
    def totals(born: str, stored: int) -> ShardTotals:
        return ShardTotals(born, 0, 0, 0.0, math.inf, 0.0, stored)

    group: Any = SimpleNamespace(count=2, up=[0, 1], forgotten=[0, 0], totals=[totals("a", 0), totals("b", 0)])
    shared = ShardLimit(SamplesPerInsert(1, min_size=20, error_buffer=40), group, None)
    assert [told.steps for told in shared.allowances() if told] == [30, 30]
    group.totals = [totals("c", 0), totals("b", 30)]  # one was restarted, the other used its room
    for shard in (0, 1):
        shared.answered(shard, group.totals[shard])
    assert [told.steps for told in shared.allowances() if told] == [15, 45]


def test_a_minimal_size_holds_back_the_learner_alone_and_counts_are_saved(tmp_path: Path):
    replay, _ = local(limit=MinSize(30), limit_timeout=0.1, path=tmp_path / "replay")
    replay.extend(steps(7))
    with pytest.raises(WaitTimeoutError):
        replay.sample(8)
    replay.extend(steps(40, start=7))
    check(replay.sample(8))
    replay.save()
    replay.close()
    limit, links = SamplesPerInsert(1, 30, 200), list[LocalLink]()

    def connect(plans: Any) -> LocalLink:
        links.append(LocalLink(plans))
        return links[0]

    for shards in (2, 3):
        again = Replay.load(tmp_path / "replay", limit=limit, limit_timeout=0.1, shards=shards, connect=connect)
        assert limit.state_dict() == {"inserts": 188, "samples": 8}
        check(again.sample(8))
        again.extend(steps(3, start=50))
        again.sample(8)
        assert limit.state_dict() == {"inserts": 200, "samples": 24}
        again.close()
        links.clear()


def test_limits_that_could_hold_both_sides_for_ever_are_refused():
    replay, _ = local(limit=SamplesPerInsert(2, min_size=10, error_buffer=7))
    with pytest.raises(ParameterError, match="one step of 2 envs of a shard is more than the limit may ever allow"):
        replay.writer()
    replay.writer([0])
    with pytest.raises(ParameterError, match="8 rows at a time"):
        replay.sample(8)
    with pytest.raises(ParameterError, match="limit_timeout"):
        local(limit=MinSize(3), limit_timeout=-1)
