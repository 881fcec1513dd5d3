"""One limit of samples per insert over several ranks: it holds for all of them together, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, MinSize, ReplayBuffer, SamplesPerInsert, Schema
from relive.cluster.distributed import ShardedReplay
from relive.errors import EmptyError, LifecycleError, ParameterError, WaitTimeoutError
from support.effort import often
from support.ranks import SECONDS, Work, in_processes

InThreads = Callable[[int, Work], list[Any]]

ROUNDS = often(15, 40)
FLAG = Field((), torch.bool)
SCHEMA = Schema({"obs": (1,), "reward": (), "terminated": FLAG, "truncated": FLAG})


def replay_of() -> ReplayBuffer:
    return ReplayBuffer(SCHEMA, 5000, seed=0, check_ends=False)


def add(replay: ReplayBuffer) -> None:
    replay.add(obs=np.zeros((1, 1)), reward=[0.0], terminated=[False], truncated=[False])


@pytest.mark.parametrize("seed", range(6))
def test_the_room_is_the_most_that_may_be_inserted(seed: int):
    rng = np.random.default_rng(seed)
    ratio = float(rng.choice([0.1, 1 / 3, 1, 7.7, 1e6]))
    limit = SamplesPerInsert(ratio, int(rng.integers(1, 100)), max(1.0, ratio) * float(rng.uniform(1, 9)))
    for _ in range(50):
        inserts, samples = int(rng.integers(300)), int(rng.integers(300 * max(1, int(ratio))))
        room = limit.room(inserts, samples)
        again = SamplesPerInsert(ratio, limit.min_size, limit.error_buffer)
        again.count(inserts=inserts, samples=samples)
        assert room is not None
        if room:
            assert again.try_to_insert(1)
            again.uncount(inserts=1)
            again.count(inserts=room - 1)
            assert again.wait_for_room(1, 0.0)
            again.count(inserts=1)
        assert not again.wait_for_room(1, 0.0), room
    assert MinSize(3).room(5, 0) is None


def limited(rank: int, count: int, kind: str) -> tuple[int, int, list[float]]:
    """Each rank's thread adds as it may, and all draw; rank 0 adds nothing, or everything, or as much as the others."""
    replay, limit, over = replay_of(), SamplesPerInsert(4, min_size=30, error_buffer=128), threading.Event()
    shards = ShardedReplay(replay, limit=limit, limit_timeout=SECONDS / 3)
    idle = {"all": (), "one": range(1, count), "none of rank 0": (0,)}[kind]
    errors: list[float] = []

    def play() -> None:
        while not over.is_set():
            if limit.try_to_insert(1, 0.05):
                add(replay)

    player = threading.Thread(target=play)
    if rank not in idle:
        player.start()
    for _ in range(ROUNDS):
        assert (shards.sample(32)["index"] >= 0).sum() <= 32
        inserts, _, samples = limit.counted()
        errors.append(inserts)
    over.set()
    if rank not in idle:
        player.join(SECONDS)
    inserts, ready, samples = limit.counted()
    assert inserts == ready
    assert limit.stats()["samples"] == ROUNDS * 32
    return inserts, samples, errors


@pytest.mark.parametrize("kind", ["all", "one", "none of rank 0"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_together_keep_the_limit(ranks: int, kind: str, in_threads: InThreads):
    if ranks == 1 and kind != "all":
        return
    found = in_threads(ranks, lambda rank, count: limited(rank, count, kind))
    assert not [error for error in found if isinstance(error, Exception)], found
    inserts, samples = sum(each[0] for each in found), found[0][1]
    assert all(each[1] == samples for each in found)
    assert -128 <= (inserts - 30) * 4 - samples <= 128


def test_a_rank_of_one_thread_adds_or_draws_as_the_limit_says(in_threads: InThreads):
    def work(rank: int, _: int) -> int:
        replay, limit, drawn = replay_of(), SamplesPerInsert(2, 10, 64), 0
        shards = ShardedReplay(replay, limit=limit, limit_timeout=SECONDS / 3)
        while drawn < 30:
            if limit.try_to_insert():
                add(replay)
            else:
                shards.sample(16)
                drawn += 1
        return limit.counted()[0]

    inserts = in_threads(2, work)
    assert not [error for error in inserts if isinstance(error, Exception)], inserts
    assert abs((sum(inserts) - 10) * 2 - 30 * 16) <= 64


def test_a_wait_that_takes_too_long_ends_on_all_ranks(in_threads: InThreads):
    def work(rank: int, _: int) -> dict[str, float]:
        replay, limit = replay_of(), MinSize(10)
        shards = ShardedReplay(replay, limit=limit, limit_timeout=0.3 if rank else SECONDS)
        begin = time.monotonic()
        with pytest.raises(WaitTimeoutError, match=r"MinSize\(10\)"):
            shards.sample(4)
        assert time.monotonic() - begin < SECONDS / 4
        limit.wait_to_insert(5)
        with pytest.raises(EmptyError):  # counted, and never added
            shards.sample(4)
        assert limit.counted()[2] == 0
        for _ in range(5):
            add(replay)
        assert len(shards.sample(4)["index"]) <= 4
        return limit.stats()

    found = in_threads(2, work)
    assert all(isinstance(stats, dict) and stats["sample_waits"] == 1 and stats["samples"] == 4 for stats in found), (
        found
    )


def test_ranks_with_other_limits_and_impossible_batches_are_refused(in_threads: InThreads):
    def differ(rank: int, _: int) -> Any:
        return ShardedReplay(replay_of(), limit=SamplesPerInsert(1 + rank, 10, 64))

    assert all("the limit (as a checksum)" in str(error) for error in in_threads(2, differ))

    def alone(rank: int, _: int) -> Any:
        return ShardedReplay(replay_of(), limit=MinSize(3) if rank else None)

    assert all("the limit (as a checksum)" in str(error) for error in in_threads(2, alone))

    def impatient(rank: int, _: int) -> Any:
        return ShardedReplay(replay_of(), limit=MinSize(3), limit_timeout=-1 if rank else None)

    assert [type(error) for error in in_threads(2, impatient)] == [LifecycleError, ParameterError]

    def too_large(rank: int, _: int) -> Any:
        limit = SamplesPerInsert(1, 10, 64)
        shards = ShardedReplay(replay_of(), limit=limit)
        with pytest.raises(ParameterError, match="33 steps at a time of 2 rings, 66 samples, are more than"):
            limit.wait_to_insert(33)
        return shards.sample(65)

    assert all("65 rows at a time are more than error_buffer" in str(error) for error in in_threads(2, too_large))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "none of rank 0"])
def test_processes_that_gloo_connects_keep_the_limit(kind: str, tmp_path: Path):
    found = in_processes(2, lambda rank, count: limited(rank, count, kind), tmp_path)
    assert -128 <= (sum(each[0] for each in found) - 30) * 4 - found[0][1] <= 128
