"""The ranks' replays draw as one ring of all rows would: batch by batch, weight by weight, and error by error.

Most tests let threads be the ranks, which exchange the same tables; the last ones start processes that gloo connects.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relive
from relive import Field, NStep, Prioritized, ReplayBuffer, RolloutBuffer, Schema, Sequence, Uniform
from relive.cluster.distributed import RankReport, Ranks, ShardedReplay, minibatches, sequences
from relive.errors import EmptyError, LifecycleError, NotFiniteError, ParameterError
from support import internals
from support.effort import in_ci
from support.ranks import SECONDS, Work, in_processes

InThreads = Callable[[int, Work], list[Any]]

FLAG = Field((), torch.bool)
SCHEMA = Schema({"obs": (2,), "action": (), "reward": (), "terminated": FLAG, "truncated": FLAG})


def replay_of(num_envs: int, rows: int = 50, **options: Any) -> ReplayBuffer:
    options = {"sampler": Prioritized(), "seed": 3, "check_ends": False, **options}
    return ReplayBuffer(SCHEMA, rows * num_envs, num_envs, **options)


def play(replay: ReplayBuffer, envs: np.ndarray, steps: range) -> None:
    """Steps that say their env and time in every field; each env ends its episodes at other times."""
    for t in steps:
        rows = np.stack([envs, np.full(len(envs), t)], 1).astype(np.float32)
        ends, none = (t + envs) % 7 == 0, np.zeros(len(envs), np.bool_)
        name = (1000 * envs + t).astype(np.float32)
        replay.add(obs=rows, action=name, reward=name, terminated=ends, truncated=none, next_obs=rows)


def envs_of(rank: int, count: int, total: int = 8) -> np.ndarray:
    return np.arange(total // count) + total // count * rank


def errors_of(batch: Any) -> torch.Tensor:
    """TD errors that look random, and are the same wherever a transition is."""
    return torch.sin(batch["action"]).abs() * 3


def facts(batch: Any, scale: float = 1.0) -> list[tuple[float, ...]]:
    """Names, weights and probabilities of the real rows."""
    real = (batch["index"] >= 0).tolist()
    values = zip(
        batch["action"].tolist(), (batch["weight"] * scale).tolist(), batch["probability"].tolist(), strict=True
    )
    return [value for value, is_real in zip(values, real, strict=True) if is_real]


def session(draw: Any, update: Any, replay: ReplayBuffer, envs: np.ndarray) -> list[Any]:
    """Play, draw, rate and play on, so that rings wrap and new transitions get the largest error."""
    found: list[Any] = []
    for round_ in range(12):
        play(replay, envs, range(9 * round_, 9 * round_ + 9))
        for batch_size in (32, 7):
            batch = draw(batch_size)
            found.append(batch)
            update(batch["index"], errors_of(batch))
            draw(5)  # what all have learned of the largest error
    return found


@pytest.mark.parametrize("ranks", [1, in_ci(2), 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": "buffer", "beta": (0.4, 1.0, 20)},
        {"stratified": False, "default_error": 0.3},
        {"stratified": False, "normalize": "buffer", "alpha": 1.0},
    ],
    ids=["default", "by the buffer, beta scheduled", "independent", "independent, by the buffer"],
)
def test_the_ranks_draw_the_batches_of_one_ring(ranks: int, options: dict[str, Any], in_threads: InThreads):
    whole = replay_of(8, sampler=Prioritized(**options))
    wanted = [facts(b) for b in session(whole.sample, whole.update_priorities, whole, envs_of(0, 1))]

    def work(rank: int, count: int) -> list[Any]:
        envs = envs_of(rank, count)
        replay = replay_of(len(envs), sampler=Prioritized(**options))
        shards = ShardedReplay(replay)
        drawn = session(shards.sample, shards.update_priorities, replay, envs)
        replay.check()
        sizes = [32, 7] * (len(drawn) // 2)
        return [facts(b, size / (len(b) * count)) for b, size in zip(drawn, sizes, strict=True)]

    results = in_threads(ranks, work)
    for t, batch in enumerate(wanted):
        found = [row for rank in range(ranks) for row in results[rank][t]]
        if whole.sampler.stratified:  # the masses of the batch go up from shard to shard
            assert [row[0] for row in found] == [row[0] for row in batch]
        assert np.array(sorted(found)) == pytest.approx(np.array(sorted(batch)), rel=1e-5)


def test_the_weights_of_all_ranks_make_the_mean_over_the_batch(in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        replay = replay_of(1 + rank, sampler=Uniform())
        play(replay, np.arange(1 + rank), range(20))
        batches = list(ShardedReplay(replay).batches(30, 25))
        return [(len(b), b["weight"], (b["index"] >= 0).sum()) for b in batches]

    for ranks in zip(*in_threads(3, work), strict=True):
        rows, weights, counts = zip(*ranks, strict=True)
        assert len(set(rows)) == 1
        assert rows[0] == max(counts)
        assert sum(counts) == 25
        for weight, count in zip(weights, counts, strict=True):
            assert (weight[count:] == 0).all()
            assert (weight[:count] / weight.numel() / 3).tolist() == pytest.approx([1 / 25] * int(count))


@pytest.mark.parametrize("sampler", [Prioritized, Uniform])
@pytest.mark.parametrize("sequences", [False, True])
def test_an_empty_rank_gets_zeros_that_do_not_count(sampler: Any, sequences: bool, in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        view = Sequence(3) if sequences else NStep(1)
        replay = replay_of(2, sampler=sampler(), view=view)
        shards = ShardedReplay(replay)
        with pytest.raises(EmptyError, match="no shard has a row"):
            shards.sample(8)
        if rank != 1:
            play(replay, np.arange(2), range(30))
        batch = shards.sample(8)
        loss = (batch["weight"] * batch["reward"].sum(0) if sequences else batch["weight"] * batch["reward"]).mean()
        if isinstance(replay.sampler, Prioritized):
            error = batch["reward"] if sequences else batch["reward"] / 100
            assert shards.update_priorities(batch["index"], error, batch["mask"] if sequences else None) == 0
        return len(batch["weight"]), (batch["index"] >= 0).sum().item(), loss.item()

    rows, real, losses = zip(*in_threads(3, work), strict=True)
    assert set(rows) == {max(real)}
    assert real[1] == 0
    assert sum(real) == 8
    assert losses[1] == 0
    assert all(math.isfinite(loss) for loss in losses)


def test_rows_that_fill_up_are_rows_drawn_and_keep_their_priorities(in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        replay = replay_of(1)
        play(replay, np.arange(1), range(40))
        replay.update_priorities(replay.data()["index"], torch.full((len(replay),), 1.0 + 9 * rank))
        shards = ShardedReplay(replay)
        batch = shards.sample(20)
        real = batch["index"] >= 0
        if rank == 0:
            assert 0 < real.sum() < len(batch)
            assert set(batch["action"][~real].tolist()) <= set(batch["action"][real].tolist())
        error = torch.where(real, 2.0, 1e6)
        assert shards.update_priorities(batch["index"], error) == 0
        return replay.stats()["priority_max"]

    assert max(in_threads(2, work)) < 100


def test_an_error_of_one_rank_is_raised_by_all_and_the_next_batch_is_that_of_one_ring(in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        replay = replay_of(4, sampler=Prioritized(default_error=1.0))
        play(replay, envs_of(rank, count), range(30))
        shards = ShardedReplay(replay)
        first = shards.sample(16)
        if rank == 1:
            with pytest.raises(ParameterError, match="batch_size=-1"):
                shards.sample(-1)
        else:
            with pytest.raises(LifecycleError, match="rank 1 raised an error"):
                shards.sample(16)
        return facts(first, 16 / (len(first) * count)), facts(shards.sample(16))

    whole = replay_of(8, sampler=Prioritized(default_error=1.0))
    play(whole, envs_of(0, 1), range(30))
    results = in_threads(2, work)
    for t in range(2):
        assert [row[0] for rank in results for row in rank[t]] == whole.sample(16)["action"].tolist()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (lambda rank: {"seed": rank}, "seed"),
        (lambda rank: {"sampler": Prioritized(alpha=0.5 + rank / 4)}, "alpha"),
        (lambda rank: {"sampler": Prioritized(normalize="buffer" if rank else "batch")}, "compare"),
        (lambda rank: {"sampler": Prioritized() if rank else Uniform()}, "priorities"),
    ],
    ids=["seed", "alpha", "normalize", "sampler"],
)
def test_ranks_that_differ_are_refused_by_all(options: Any, named: str, in_threads: InThreads):
    results = in_threads(2, lambda rank, _: ShardedReplay(replay_of(1, **options(rank))))
    assert all(isinstance(error, ParameterError) and named in str(error) for error in results)


def test_ranks_that_ask_for_other_batches_are_refused_by_all(in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        replay = replay_of(1)
        play(replay, np.arange(1), range(10))
        shards = ShardedReplay(replay)
        with pytest.raises(ParameterError, match="batch_size is 8 on rank 0 and 9 on rank 1"):
            shards.sample(8 + rank)
        if rank:
            replay.sample(3)
        shards.sample(8)

    results = in_threads(2, work)
    assert all(isinstance(error, ParameterError) and "batches drawn" in str(error) for error in results)


@pytest.mark.parametrize("sampler", [relive.Recent(), relive.WithoutReplacement()], ids=repr)
def test_samplers_that_need_the_order_of_all_rows_are_refused(sampler: Any):
    with pytest.raises(ParameterError, match=r"shards draw with Uniform\(\) or Prioritized"):
        ShardedReplay(replay_of(1, sampler=sampler))


def test_a_process_that_was_not_connected_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LifecycleError, match="init_process_group"):
        ShardedReplay(replay_of(1))


def test_loaded_shards_go_on_with_the_same_batches(in_threads: InThreads, tmp_path: Path):
    def work(rank: int, count: int) -> Any:
        replay = replay_of(2)
        play(replay, np.arange(2) + 2 * rank, range(30))
        shards = ShardedReplay(replay)
        shards.sample(10)
        replay.save(tmp_path / str(rank))
        again = ShardedReplay(ReplayBuffer.load(tmp_path / str(rank)))
        return facts(shards.sample(10)) == facts(again.sample(10))

    assert in_threads(2, work) == [True, True]


# What happens while a rank waits for the others.


def while_waiting(shards: ShardedReplay, *acts: Callable[[], Any]) -> None:
    """At each of the next exchanges, another thread does one of these before this rank meets the others."""
    ranks, to_come = internals.ranks(shards), iter(acts)
    meet = internals.summed(ranks)

    def late(sent: Any) -> Any:
        act = next(to_come, None)
        if act is not None:
            thread = threading.Thread(target=act, daemon=True)
            thread.start()
            thread.join(SECONDS / 6)
            assert not thread.is_alive(), "a call waits until the ranks have met"
        return meet(sent)

    ranks._summed = late


@pytest.mark.parametrize("sampler", [Uniform, Prioritized])
def test_steps_that_come_while_a_rank_waits_overwrite_no_row_of_its_batch(sampler: Any, in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        replay = replay_of(1, rows=20, sampler=sampler())
        play(replay, np.arange(1) + rank, range(19))
        shards = ShardedReplay(replay)
        if rank == 0:
            steps = [range(t, t + 13) for t in range(19, 80, 13)]
            while_waiting(shards, *(lambda t=t: play(replay, np.arange(1), t) for t in steps))
        for _ in range(2):
            batch = shards.sample(40)
            assert torch.equal(batch["action"], batch["obs"] @ torch.tensor([1000.0, 1.0]))
            assert torch.equal(batch["next_obs"][:, 1], (batch["obs"][:, 1] + ~batch["terminated"]))
            real = batch["index"][batch["index"] >= 0]
            assert len(real) > 0
        if rank == 0 and sampler is Prioritized:  # they lay in the ring at the first wait, and not after the second
            assert shards.update_priorities(real, torch.ones(len(real))) > 0
        replay.check()
        return True

    assert in_threads(2, work) == [True, True]


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_rows_that_come_while_a_rank_waits_are_drawn_and_the_chances_stay_exact(normalize: Any, in_threads: InThreads):
    sampler = {"alpha": 1.0, "eps": 0.5, "beta": 0.7, "default_error": 1.0, "normalize": normalize}
    size = 4096

    def work(rank: int, count: int) -> Any:
        replay = replay_of(1, sampler=Prioritized(**sampler))
        play(replay, np.arange(1), range(12))
        index = replay.data()["index"]
        replay.update_priorities(index, torch.arange(len(index)) + 1.0 + rank)
        planned, shards = replay.sampler.mass, ShardedReplay(replay)
        if rank == 0:
            while_waiting(shards, lambda: play(replay, np.arange(1), range(12, 30)))
        batch = shards.sample(size)
        chances = replay.priorities(replay.data()["index"]) / replay.sampler.mass
        return planned, chances.numpy(), replay.data()["index"], batch

    results = in_threads(2, work)
    whole = sum(planned for planned, *_ in results)
    every = torch.cat([batch["probability"][batch["index"] >= 0] for *_, batch in results])
    least = 1.5 if normalize == "buffer" else every.min().item() * whole
    for planned, chances, index, batch in results:
        expected = dict(zip(index.tolist(), chances * planned / whole, strict=True))
        real = batch["index"] >= 0
        drawn = batch["index"][real].tolist()
        probability = np.array([expected[i] for i in drawn])
        assert batch["probability"][real].numpy() == pytest.approx(probability, rel=1e-12)
        weight = (probability * whole / least) ** -0.7 * len(batch) * 2 / size
        assert batch["weight"][real].numpy() == pytest.approx(weight, rel=1e-5)
        for i, chance in expected.items():  # strata: each count is that of the chance, to less than 2
            assert abs(drawn.count(i) - size * chance) < 2


def test_a_batch_is_the_one_agreed_on_whatever_other_calls_do_while_a_rank_waits(in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        replay = replay_of(1, sampler=Prioritized(stratified=False))
        play(replay, np.arange(1), range(40))
        shards = ShardedReplay(replay)
        if rank == 0:
            while_waiting(shards, lambda: replay.sample(3))
        real = int((shards.sample(64)["index"] >= 0).sum())
        with pytest.raises(ParameterError, match="the number of batches drawn is 2 on rank 0 and 1 on rank 1"):
            shards.sample(64)
        return real

    assert sum(in_threads(2, work)) == 64


@pytest.mark.parametrize("sampler", [Uniform, Prioritized])
def test_a_rank_that_is_cleared_while_it_waits_gets_rows_that_do_not_count(sampler: Any, in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        replay = replay_of(1, sampler=sampler())
        play(replay, np.arange(1), range(30))
        shards = ShardedReplay(replay)
        if rank == 0:
            while_waiting(shards, replay.clear)
        batch = shards.sample(40)
        return len(batch), int((batch["index"] >= 0).sum()), float(batch["weight"].sum()) > 0

    (rows, none, counts), (others, some, others_count) = in_threads(2, work)
    assert rows == others
    assert none == 0
    assert not counts
    assert 0 < some < 40
    assert others_count


def test_threads_of_a_rank_draw_in_turn(in_threads: InThreads):
    def work(rank: int, count: int) -> Any:
        replay, found = replay_of(1), list[int]()
        play(replay, np.arange(1), range(40))
        shards = ShardedReplay(replay)

        def draw() -> None:
            for _ in range(20):
                found.append(int((shards.sample(16)["index"] >= 0).sum()))

        threads = [threading.Thread(target=draw, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS / 2)
        return sum(found)

    assert sum(in_threads(2, work)) == 3 * 20 * 16


# Real processes.


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["obs"]).squeeze(-1) - batch["reward"] / 1000).square()


def gradient(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(model: nn.Module, draw: Any, replay: ReplayBuffer, update: Any, envs: np.ndarray) -> list[Any]:
    found: list[Any] = []
    for round_ in range(3):
        play(replay, envs, range(20 * round_, 20 * round_ + 20))
        batch = draw(24)
        batch["obs"] = batch["obs"].double() / 50
        model.zero_grad()
        (batch["weight"] * losses(model, batch)).mean().backward()
        update(batch["index"], errors_of(batch))
        found.append(gradient(model))
    return found


def trained(rank: int, count: int) -> Any:
    replay = replay_of(8 // count, sampler=Prioritized(default_error=1.0))
    shards = ShardedReplay(replay)
    model: nn.Module = DistributedDataParallel(net())
    found = train(model, shards.sample, replay, shards.update_priorities, envs_of(rank, count))
    empty = ShardedReplay(replay_of(1))
    with pytest.raises(EmptyError):
        empty.sample(4)
    with pytest.raises(NotFiniteError if rank == count - 1 else LifecycleError):
        internals.ranks(shards).exchange("failing", lambda: failing(rank == count - 1))
    return found


def failing(fails: bool) -> Any:
    if fails:
        raise NotFiniteError("this rank alone")
    return RankReport({}, ())


@pytest.mark.parametrize("ranks", [2, in_ci(4)])
def test_the_gradient_that_ddp_averages_is_that_of_one_ring(ranks: int, tmp_path: Path):
    whole = replay_of(8, sampler=Prioritized(default_error=1.0))
    wanted = train(net(), whole.sample, whole, whole.update_priorities, envs_of(0, 1))
    for found in in_processes(ranks, trained, tmp_path):
        for one, all_ in zip(wanted, found, strict=True):
            for a, b in zip(one, all_, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)  # weights are float32


def at_other_calls(rank: int, count: int) -> None:
    """Every two calls meet, one on each rank; then the ranks draw together."""
    replay, rollout = replay_of(1), RolloutBuffer(SCHEMA, 4, 1, seed=0)
    play(replay, np.arange(1), range(30))
    for _ in range(4):
        flag = np.zeros(1, np.bool_)
        rollout.add(obs=np.zeros((1, 2)), action=[0.0], reward=[0.0], terminated=flag, truncated=flag)
    shards = ShardedReplay(replay)
    calls: list[Callable[[Any], Any]] = [
        lambda _: ShardedReplay(replay_of(1)),
        lambda _: shards.sample(8),
        lambda _: minibatches(rollout, 2),
        lambda _: sequences(rollout, 2),
        next,
        lambda _: Ranks().exchange("more than fits into the first message", lambda: RankReport({}, range(1000))),
    ]
    for pair in combinations(calls, 2):
        batches = sequences(rollout, 1, num_batches=2)
        with pytest.raises(LifecycleError, match=f"rank {rank} is here, and rank {1 - rank} is at another call"):
            pair[rank](batches)
    shards.sample(8)


def test_ranks_at_other_calls_learn_of_it_and_go_on(tmp_path: Path):
    in_processes(2, at_other_calls, tmp_path)


def left_alone(rank: int, count: int) -> Any:
    """What the others see if the last rank dies, and whether their replays are as before."""
    replay = replay_of(2)
    play(replay, np.arange(2), range(30))
    shards = ShardedReplay(replay)
    shards.sample(8)
    dist.barrier()
    if rank == count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LifecycleError, match="sample: the ranks cannot meet: one has died"):
        shards.sample(8)
    assert replay.stats()["batches"] == 1
    replay.check()
    replay.add(
        obs=np.zeros((2, 2)), action=[0.0, 0.0], reward=[0.0, 0.0], terminated=[False] * 2, truncated=[False] * 2
    )
    raise LifecycleError("the other ranks cannot meet any more, and saw what they should")


def test_a_rank_that_is_killed_stops_the_others_and_leaves_their_replays_whole(tmp_path: Path):
    with pytest.raises(AssertionError) as caught:
        in_processes(2, left_alone, tmp_path)
    first, last = str(caught.value).split("rank 1: ")
    assert "saw what they should" in first
    assert "did not end in time" in last
