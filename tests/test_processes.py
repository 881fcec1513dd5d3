"""The edge of a process: what is sent, shared, forked or copied never takes a buffer's memory with it."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, IterableDataset

from relive import (
    GAE,
    Batch,
    Collector,
    Field,
    ReplayBuffer,
    RolloutBuffer,
    Schema,
)
from relive.memory import allocator as forks
from support import internals
from support.cases import covering
from support.effort import first_of, often
from support.forks import in_fork
from support.other_device import ELSEWHERE, far_device
from support.shared_buffers import IMAGES, LARGE, SAMPLERS, fill, holds, replay_of, sent, written
from support.twins import same_batches


def shared(thing: Any) -> None:
    if isinstance(thing, Batch):
        thing.apply(torch.Tensor.share_memory_)
    else:
        thing.share_memory_()


WAYS: dict[str, Callable[[RolloutBuffer], Any]] = {
    "the buffer is sent": sent,
    "data() is sent": lambda r: sent(r.data()),
    "one column is sent": lambda r: sent(r["obs"]),
    "a row of one column is sent": lambda r: sent(r["obs"][1]),
    "a column with an attached one is sent": lambda r: (sent(r["advantage"]), sent(r["mask"])),
    "block is shared": lambda r: shared(r.block),
    "env_major is sent": lambda r: sent(r.env_major),
    "the last row is shared": lambda r: shared(r.last),
    "one column is shared": lambda r: [shared(r[name]) for name in r.keys()],
    "the storage of a column is shared": lambda r: r["reward"].untyped_storage().share_memory_(),
    "minibatches are sent": lambda r: [sent(batch) for batch in r.minibatches(num_batches=3, epochs=2)],
    "minibatches are shared": lambda r: [shared(batch) for batch in r.minibatches(num_batches=3, epochs=2)],
    "chunks are sent": lambda r: [sent(seq["obs"]) for seq in r.chunks(1)],
    "sequences are sent": lambda r: [sent(seq) for seq in r.sequences(2, batch_size=2)],
    "batches of envs are shared": lambda r: [shared(b.steps) for b in r.env_batches(1, fields=("reward",))],
    "all at once": lambda r: [sent(x) for x in (r, r.data(), r.block, r["value"], r.last)],
}
"""Every way in which what a rollout hands out can change hands."""


@pytest.mark.parametrize(("way", "how"), covering(WAYS, ["add", "reserve"], full=2, quick=1))
def test_whatever_is_sent_or_shared_the_next_rollouts_are_right(way: str, how: str) -> None:
    rollout = RolloutBuffer(LARGE, 4, 3, seed=0)
    for k in range(3):
        fill(rollout, how, 50 * k)
        assert holds(rollout, 50 * k)
        WAYS[way](rollout)
        assert holds(rollout, 50 * k)
        rollout.clear()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["the buffer is sent", "data() is sent", "block is shared", "minibatches are shared"])
def test_the_same_of_rollouts_of_many_megabytes(way: str) -> None:
    rollout = RolloutBuffer(LARGE, 64, 1024, seed=0)
    for k in range(3):
        fill(rollout, "add", 50 * k)
        assert holds(rollout, 50 * k)
        WAYS[way](rollout)
        rollout.clear()


def test_a_large_column_that_was_shared_leaves_the_buffer_its_memory() -> None:
    rollout = RolloutBuffer(Schema({"obs": (256,)}), 16, 1024, seed=0)
    for k in range(3):
        for t in range(16):
            rollout.add(obs=np.full((1024, 256), 100 * k + t, np.float32))
        assert rollout["obs"][:, 0, 0].tolist() == [100 * k + t for t in range(16)]
        view = rollout["obs"]
        view.share_memory_()
        sent(rollout.data())
        rollout.clear()
        assert view[3, 5, 7] == 100 * k + 3


@pytest.mark.parametrize("way", first_of(5, WAYS))
def test_a_collector_fills_a_rollout_alike_whether_it_was_sent_or_not(way: str) -> None:
    def policy(obs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"action": (obs[:, 2] > 0).long(), "value": obs[:, 0]}

    rollouts: list[RolloutBuffer] = []
    for sends in (False, True):
        envs = gym.make_vec("CartPole-v1", num_envs=2)
        rollouts.append(RolloutBuffer(Schema.from_env(envs, value=()), 12, 2, seed=0))
        collector = Collector(envs, policy, rollouts[-1], seed=0)
        for _ in range(3):
            collector.collect()
            rollouts[-1].finish(GAE())
            if sends:
                WAYS[way](rollouts[-1])
        envs.close()
    plain, other = (rollout.data() for rollout in rollouts)
    assert all(torch.equal(plain[name], other[name]) for name in rollouts[0].keys() if name != "final_value")


@pytest.mark.parametrize("share", [shared, sent])
def test_reserved_rows_may_be_shared_and_written_where_they_went(share: Callable[[Any], Any]) -> None:
    rollout = RolloutBuffer(LARGE, 4, 3, seed=0)
    for k in range(2):
        for count in (1, 3):
            rows = rollout.reserve(count)
            share(rows)
            for t in range(count):
                number = 50 * k + rollout.steps + t
                for name, value in written(LARGE, 3, number).items():
                    rows[name][t] = torch.as_tensor(value)
            rollout.commit()
        rollout.set_last(value=torch.zeros(3))
        assert holds(rollout, 50 * k)
        rollout.clear()


def test_views_of_a_rollout_are_still_views() -> None:
    rollout = RolloutBuffer(LARGE, 4, 3, seed=0)
    fill(rollout, "add", 0)
    with torch.inference_mode():
        made_there = rollout["value"]
    for k, view in enumerate((rollout["value"], rollout.data()["value"], rollout.block["value"], made_there), 1):
        view[2] = 7.5 * k
        assert rollout["value"][2].tolist() == [7.5 * k] * 3
        assert rollout.env_major["value"][:, 2].tolist() == [7.5 * k] * 3
    rollout.last["value"][1] = -3.0
    assert rollout.block["value"][4].tolist() == [0.0, -3.0, 0.0]


@pytest.mark.parametrize(
    "way",
    [
        lambda r: shared(r.block),
        lambda r: sent(r.block),
        lambda r: sent(r.block["obs"]),
        lambda r: [sent(x) for x in (r, r.data(), r.slice(0), copy.copy(r).sample(5))],
        lambda r: [shared(x) for x in (r.data(), r.slice(0), copy.copy(r).sample(5))],
    ],
)
def test_a_replay_keeps_its_memory_whatever_is_sent_or_shared(way: Callable[[ReplayBuffer], Any]) -> None:
    replay, plain = replay_of(20), replay_of(20)
    outside = replay.block["obs"]
    way(replay)
    theirs = replay.block["obs"].share_memory_()
    theirs.fill_(99)  # by whoever it was sent to
    assert not torch.equal(theirs, replay.block["obs"])
    for t in range(20, 50):
        for each in (replay, plain):
            each.add(written(IMAGES, 2, t))
    assert same_batches(replay.data(), plain.data())
    assert same_batches(replay.sample(40), plain.sample(40))
    assert torch.equal(outside, replay.block["obs"])


# Forked children


BIG = Schema({"obs": (128,), "reward": (), "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)})


def test_what_a_forked_child_adds_its_parent_never_sees() -> None:
    replay = replay_of(10, 10_000, BIG)  # of more than two megabytes, which once were shared
    rollout = RolloutBuffer(BIG, 16, 1024, seed=0)
    for t in range(16):
        rollout.add(written(BIG, 1024, t))
    before, columns = replay.data().clone(), rollout.data().clone()

    def task() -> float:
        for t in range(6_000):
            replay.add(written(BIG, 2, 1000 + t))
        rollout.clear()
        rollout.add(written(BIG, 1024, 77))
        rollout["obs"][:] = 5
        return float(replay.sample(9)["obs"].min())

    assert in_fork(task) >= 0
    assert same_batches(replay.data(), before)
    assert same_batches(rollout.data(), columns)


def test_a_batch_in_recycled_memory_is_not_changed_by_a_forked_child() -> None:
    rollout = RolloutBuffer(BIG, 16, 1024, seed=0)
    for t in range(16):
        rollout.add(written(BIG, 1024, t))
    batch = next(rollout.minibatches(8192))
    kept = batch.clone()

    def task() -> int:
        for other in rollout.minibatches(8192, epochs=3):
            other["obs"].fill_(-1)
        batch["obs"].fill_(-1)
        return 1

    assert in_fork(task)
    assert same_batches(batch, kept)


@pytest.mark.parametrize("times", [often(2, 5), pytest.param(50, marks=pytest.mark.slow)])
def test_a_fork_while_another_thread_adds_leaves_the_child_a_buffer_that_works(times: int) -> None:
    replay, rollout = replay_of(0, 4096, BIG), RolloutBuffer(BIG, 16, 512, seed=0)
    steps = {name: torch.as_tensor(value)[None].expand(64, *value.shape) for name, value in written(BIG, 2, 3).items()}
    for t in range(16):
        rollout.add(written(BIG, 512, t))
    done = threading.Event()

    def adds() -> None:
        while not done.is_set():
            replay.extend(steps)

    def draws() -> None:
        while not done.is_set():
            for _ in rollout.minibatches(4096):
                pass

    threads = [threading.Thread(target=target, daemon=True) for target in (adds, draws)]
    for thread in threads:
        thread.start()
    while not len(replay):
        pass

    def task() -> int:
        replay.check()
        replay.add(written(BIG, 2, 1))
        assert len(next(rollout.minibatches(4096))) == 4096
        return len(replay.sample(16))

    try:
        assert [in_fork(task) for _ in range(times)] == [16] * times
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("times", [often(2, 5), pytest.param(50, marks=pytest.mark.slow)])
def test_a_fork_does_not_wait_for_a_thread_that_waits_for_the_fork(times: int) -> None:
    locks = [forks.shared_lock() for _ in range(3)]
    done = threading.Event()

    def takes(order: list[Any]) -> None:
        while not done.is_set():
            with order[0], order[1]:
                pass

    threads = [threading.Thread(target=takes, args=(locks[i : i + 2],), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()

    def task() -> bool:
        return all(lock.acquire(timeout=1) for lock in locks)

    try:
        for _ in range(times):
            assert in_fork(task)
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert all(lock.acquire(blocking=False) for lock in locks), "a fork kept a lock"


def test_a_lock_that_is_gone_is_forgotten() -> None:
    before = len(internals.locks(forks))
    locks = [forks.shared_lock() for _ in range(5)]
    assert len(internals.locks(forks)) == before + 5
    del locks
    assert len(internals.locks(forks)) == before


# Other processes, for real


def draws(replay: ReplayBuffer, answers: Any) -> None:
    """In another process: what is drawn before and after a step is added."""
    first = replay.sample(8)["small"].tolist()
    replay.add(written(IMAGES, 2, 99))
    replay.check()
    answers.put((first, len(replay)))


def plays(rollout: RolloutBuffer, answers: Any) -> None:
    """In another process: what came, and another rollout."""
    came = holds(rollout, 0)
    rollout.clear()
    fill(rollout, "add", 50)
    answers.put((came, holds(rollout, 50)))


CONTEXTS = ["fork", pytest.param("spawn", marks=pytest.mark.slow)]


@pytest.mark.parametrize("method", CONTEXTS)
@pytest.mark.parametrize("sampler", ["Uniform", "Wrapped", "Recent(Prioritized)"])
def test_a_replay_is_an_argument_of_a_process(method: str, sampler: str) -> None:
    context = mp.get_context(method)
    replay, answers = replay_of(30, sampler=SAMPLERS[sampler]()), context.SimpleQueue()
    process = context.Process(target=draws, args=(replay, answers))
    process.start()
    first, count = answers.get()
    process.join()
    assert count == len(replay) + 2
    assert first == replay.sample(8)["small"].tolist()
    replay.add(written(IMAGES, 2, 30))


@pytest.mark.parametrize("method", CONTEXTS)
def test_a_rollout_is_an_argument_of_a_process_and_goes_through_a_queue(method: str) -> None:
    context = mp.get_context(method)
    rollout, answers = RolloutBuffer(LARGE, 4, 3, seed=0), context.Queue()
    fill(rollout, "add", 0)
    process = context.Process(target=plays, args=(rollout, answers))
    process.start()
    assert answers.get(timeout=60) == (True, True)
    process.join()
    for thing in (rollout, rollout.data(), rollout["obs"], next(rollout.minibatches(4))):
        answers.put(thing)
        answers.get(timeout=60)
    assert holds(rollout, 0)
    for k in (1, 2):
        rollout.clear()
        fill(rollout, "reserve", 50 * k)
        assert holds(rollout, 50 * k)


class Batches(IterableDataset[Any]):
    """Four batches of a replay."""

    def __init__(self, replay: ReplayBuffer) -> None:
        self.replay = replay

    def __iter__(self) -> Iterator[Any]:
        return (self.replay.sample(8) for _ in range(4))


def as_it_is(batch: Any) -> Any:
    return batch


def loaded(replay: ReplayBuffer, workers: int, method: str | None = None) -> list[Any]:
    loader = DataLoader(
        Batches(replay), batch_size=None, num_workers=workers, collate_fn=as_it_is, multiprocessing_context=method
    )
    return [batch["small"].tolist() for batch in loader]


@pytest.mark.parametrize("method", CONTEXTS)
def test_each_worker_of_a_loader_draws_batches_of_its_own_that_a_seed_repeats(method: str) -> None:
    rounds: list[list[Any]] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        rounds.append(loaded(replay_of(30), 2, method))
    one, same, other = rounds
    assert one == same
    everything = [*one, *other]
    assert len(everything) == 16
    assert all(a != b for i, a in enumerate(everything) for b in everything[:i])


def test_a_loader_without_workers_draws_what_the_buffer_itself_would() -> None:
    replay = replay_of(30)
    assert loaded(replay_of(30), 0) == [replay.sample(8)["small"].tolist() for _ in range(4)]


def test_a_rollout_on_a_device_is_copied_by_way_of_ram() -> None:
    with far_device() as traffic:
        rollout = RolloutBuffer(LARGE, 4, 3, device=ELSEWHERE, seed=0)
        for t in range(4):
            rollout.add(written(LARGE, 3, t, arrays=True))
        traffic.clear()
        again = pickle.loads(pickle.dumps(rollout))
        assert len(traffic.back) == len(traffic.out) == len(rollout.keys()) + 1  # and how many episodes have ended
        again.clear()
        again.add(written(LARGE, 3, 50, arrays=True))
        for name in ("obs", "value", "half"):
            assert rollout[name][:, 0].flatten().cpu()[0] == 0
            assert again[name][:, 0].flatten().cpu()[0] == 50
