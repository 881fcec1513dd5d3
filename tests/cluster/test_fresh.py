"""New rows once in shards: each shard serves its own, the counts of a batch are exact, and no answer loses any."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import Chunks, Field, Fresh, NStep, Prioritized, Recent, ReplayBuffer, Schema, Sequence, Uniform
from relive.cluster.distributed import ShardedReplay
from relive.cluster.messages import PAUSE
from relive.cluster.plan import ShardSampler, plan
from relive.cluster.replay import Replay
from relive.errors import EmptyError, LifecycleError, ParameterError
from support import internals
from support.clusters import SCHEMA, LocalLink, check, local, steps
from support.effort import often
from support.ranks import Work

InThreads = Callable[[int, Work], list[Any]]

FLAG = Field((), torch.bool)
SMALL = Schema({"obs": (2,), "action": (), "reward": (), "terminated": FLAG, "truncated": FLAG})
INNER: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "prioritized": lambda: Prioritized(beta=(0.4, 1.0, 20)),
    "independent, by the buffer": lambda: Prioritized(stratified=False, normalize="buffer"),
}


def test_the_counts_of_a_batch_are_exact_and_no_shard_waits_longer_than_others() -> None:
    rng = np.random.default_rng(0)
    for t in range(200):
        waiting = rng.integers(0, 30, rng.integers(1, 6))
        batch_size = int(rng.integers(1, 60))
        made = plan(rng.random(len(waiting)) + 0.1, batch_size, 3, t, waiting=waiting)
        assert made.counts().sum() == batch_size
        assert made.new.sum() == min(batch_size, waiting.sum())
        assert (made.new <= waiting).all()
        assert np.abs(made.new - waiting * min(1.0, batch_size / max(waiting.sum(), 1))).max() < 1
        assert made.counts().sum() - made.new.sum() == len(made.wanted)
    waiting = np.array([1, 900, 99])
    counts = sum(plan([1.0, 1.0, 1.0], 10, 3, t, waiting=waiting).new for t in range(20_000))
    assert np.asarray(counts) / 20_000 == pytest.approx([0.01, 9.0, 0.99], abs=0.003)


def test_rows_that_are_drawn_by_chance_are_those_of_a_smaller_batch_without_new_ones() -> None:
    masses = [2.0, 0.0, 5.0]
    with_new, without = plan(masses, 40, 3, 7, waiting=[4, 0, 11]), plan(masses, 25, 3, 7)
    assert with_new.wanted.tolist() == without.wanted.tolist()
    assert (with_new.counts() - with_new.new).tolist() == without.counts().tolist()
    assert plan([0.0, 0.0], 3, 1, 1, waiting=[2, 5]).new.sum() == 3  # nothing is left to be drawn by chance
    with pytest.raises(EmptyError, match="no shard has a row to draw"):
        plan([0.0, 0.0], 8, 1, 1, waiting=[2, 5])


# -- ranks ------------------------------------------------------------------------------------------------------------


def replay_of(num_envs: int, sampler: Any, rows: int = 50, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(SMALL, rows * num_envs, num_envs, sampler=sampler, seed=3, check_ends=False, **options)


def play(replay: ReplayBuffer, envs: np.ndarray, at: range) -> None:
    for t in at:
        rows = np.stack([envs, np.full(len(envs), t)], 1).astype(np.float32)
        ends, name = (t + envs) % 7 == 0, (1000 * envs + t).astype(np.float32)
        replay.add(obs=rows, action=name, reward=name, terminated=ends, truncated=ends & False, next_obs=rows)


def facts(batch: Any, scale: float = 1.0) -> list[tuple[float, ...]]:
    names = ("action", "weight", "probability") if "probability" in batch.keys() else ("action",)
    columns = [(batch[name] * (scale if name == "weight" else 1)).tolist() for name in names]
    real = (batch["index"] >= 0).tolist()
    return [row for row, is_real in zip(zip(*columns, strict=True), real, strict=True) if is_real]


def session(draw: Any, update: Any, replay: ReplayBuffer, envs: np.ndarray, size: int) -> list[Any]:
    found: list[Any] = []
    for turn in range(24):
        play(replay, envs, range(2 * turn, 2 * turn + 2))
        if turn % 5 < 3:
            batch = draw(size)
            found.append(batch)
            if replay.has_priorities:
                update(batch["index"], torch.sin(batch["action"]).abs() * 3)
                draw(40)
    return found


@pytest.mark.parametrize("inner", [*INNER][1:])
def test_the_ranks_draw_the_batches_of_one_ring(inner: str, in_threads: InThreads) -> None:
    """With priorities the rows drawn by chance are those of one ring, and all that wait fit into a batch."""
    whole = replay_of(8, Fresh(INNER[inner]()))
    wanted = [facts(b) for b in session(whole.sample, whole.update_priorities, whole, np.arange(8), 70)]

    def work(rank: int, count: int) -> Any:
        replay = replay_of(2, Fresh(INNER[inner]()))
        shards = ShardedReplay(replay)
        batches = session(shards.sample, shards.update_priorities, replay, 2 * rank + np.arange(2), 70)
        return [facts(b, 70 / (len(b) * count)) for b in batches], replay.sampler.served, replay.sampler.waiting

    results = in_threads(4, work)
    for t, batch in enumerate(wanted):
        found = [row for rank in range(4) for row in results[rank][0][t]]
        assert len(found) == len(batch) == 70
        assert np.array(sorted(found)) == pytest.approx(np.array(sorted(batch)), rel=1e-5)
    assert sum(result[1] for result in results) == whole.sampler.served > 300
    assert sum(result[2] for result in results) == whole.sampler.waiting


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("view", ["transitions", "sequences"])
def test_each_rank_serves_its_own_once_and_the_counts_are_exact(inner: str, view: str, in_threads: InThreads) -> None:
    """Ranks with other numbers of envs, and more rows than a batch has room for."""

    def work(rank: int, count: int) -> Any:
        made = NStep(2) if view == "transitions" else Sequence(3, overlap="none")
        replay = replay_of(1 + rank, Fresh(INNER[inner]()), view=made)
        shards, sampler, done, sizes = ShardedReplay(replay), replay.sampler, list[int](), list[int]()
        came = set[int]()
        for turn in range(30):
            play(replay, np.arange(1 + rank), range(3 * turn, 3 * turn + 3) if turn < 12 else range(0))
            came |= {*replay.data()["index"].tolist()}
            before = sampler.served
            batch = shards.sample(9)
            new, real = sampler.served - before, int((batch["index"] >= 0).sum())
            done += batch["index"][:new].tolist()
            sizes.append(real)
            weight = batch["weight"][:new] / (len(batch) * count / 9)
            assert weight.tolist() == pytest.approx([1.0] * new)
        assert (sampler.served, sampler.lost) == (len(done), 0)
        assert len(done) == len({*done})
        assert {*done} <= came
        assert sampler.waiting == len(came - {*done})
        replay.check()
        return sizes, sampler.waiting

    results = in_threads(3, work)
    assert {sum(sizes) for sizes in zip(*(result[0] for result in results), strict=True)} == {9}
    assert [result[1] for result in results if result[1]] == []  # in the end, all have had their turn


def test_the_batch_of_a_rank_whose_new_rows_were_overwritten_meanwhile_is_filled_up_by_chance() -> None:
    for inner in INNER.values():
        sampler = ShardSampler(replay_of(1, Fresh(inner()), rows=10))
        play(sampler.replay, np.arange(1), range(9))
        masses = np.array([sampler.totals().mass])
        planned = sampler.plan(masses, 12, 3, 0, [sampler.totals().waiting])
        assert planned.new.tolist() == [7]
        sampler.replay.clear()
        play(sampler.replay, np.arange(1), range(20, 24))
        drawn = sampler.draw(planned, 0, 5)
        assert (drawn.new, len(drawn.places)) == (3, 12)
        assert drawn.priorities is None or len(drawn.priorities) == 12 - drawn.new


def test_new_rows_of_a_batch_whose_ranks_do_not_meet_are_served_again(
    in_threads: InThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, count: int) -> Any:
        replay = replay_of(2, Fresh(Prioritized()))
        shards, play_on = ShardedReplay(replay), range(6)
        play(replay, np.arange(2), play_on)
        exchange, broken = internals.ranks(shards).exchange, [True]

        def breaks(call: str, report: Any) -> Any:
            table = exchange(call, report)
            if call == "sample: weights" and broken.pop():
                raise LifecycleError("a rank has died")
            return table

        monkeypatch.setattr(internals.ranks(shards), "exchange", breaks)
        waiting = replay.sampler.waiting
        with pytest.raises(LifecycleError, match="a rank has died"):
            shards.sample(30)
        assert (replay.sampler.served, replay.sampler.waiting) == (0, waiting)
        broken.append(False)
        batch = shards.sample(30)
        return batch["index"][:waiting].tolist() == replay.data()["index"].tolist(), replay.sampler.served

    for whole, served in in_threads(2, work):
        assert whole
        assert served > 0


def test_new_rows_of_a_batch_that_a_rank_cannot_read_are_served_again(in_threads: InThreads) -> None:
    def work(rank: int, count: int) -> Any:
        broken = [True]

        def breaks(reward: Any) -> Any:
            if broken[0]:
                raise ArithmeticError("the user's function")
            return reward

        replay = replay_of(2, Fresh(), view=NStep(2, each_reward=breaks))
        shards = ShardedReplay(replay)
        play(replay, np.arange(2), range(6))
        waiting = replay.sampler.waiting
        with pytest.raises(ArithmeticError):
            shards.sample(30)
        counts = replay.sampler.served, replay.sampler.waiting
        broken[0] = False
        wanted = replay.data()["index"].tolist()
        return counts == (0, waiting), shards.sample(30)["index"][:waiting].tolist() == wanted

    assert in_threads(1, work) == [(True, True)]


def test_a_rank_without_fresh_and_inner_samplers_that_need_one_ring_are_refused(in_threads: InThreads) -> None:
    def work(rank: int, count: int) -> Any:
        return ShardedReplay(replay_of(1, Uniform() if rank else Fresh()))

    for error in in_threads(2, work):
        assert isinstance(error, ParameterError)
        assert "whether new rows come first is 1 on rank 0 and 0 on rank 1" in str(error)
    with pytest.raises(ParameterError, match=r"shards draw with Uniform\(\) or Prioritized\(...\), or Fresh\(...\) ar"):
        ShardSampler(replay_of(1, Fresh(Recent())))
    with pytest.raises(ParameterError, match=r"shards cannot draw with Fresh\(Recent.*alone or in Fresh\(\)"):
        local(sampler=Fresh(Recent()))


# -- shards of other processes ----------------------------------------------------------------------------------------


def names(batch: Any) -> list[int]:
    return batch["action"].tolist()


def rows_of(batch: Any) -> list[tuple[float, ...]]:
    return [*zip(*(batch[name].tolist() for name in ("action", "weight", "probability")), strict=True)]


def waiting(replay: Replay) -> int:
    return int(replay.stats()["waiting"])


@pytest.mark.parametrize("inner", [*INNER][1:])
def test_batches_are_those_of_one_ring(inner: str) -> None:
    replay, _ = local(sampler=Fresh(INNER[inner]()), shards=3)
    one = ReplayBuffer(SCHEMA, 400, 4, sampler=Fresh(INNER[inner]()), check_ends=False, seed=0)
    for turn in range(15):
        for part in (replay, one):
            part.extend(steps(5, start=5 * turn))
        for size in (waiting(replay), 30, 12):  # the first one has new rows alone, with which beta does not move on
            ours, theirs = replay.sample(size), one.sample(size)
            check(ours)
            assert np.array(sorted(rows_of(ours))) == pytest.approx(np.array(sorted(rows_of(theirs))), rel=1e-5)
            for part, batch in ((replay, ours), (one, theirs)):
                part.update_priorities(batch["index"], (batch["action"] % 7).float() / 7)
    figures = replay.stats()
    assert (figures["served"], figures["waiting"], figures["lost"]) == (one.sampler.served, one.sampler.waiting, 0)


@pytest.mark.parametrize("view", ["transitions", "chunks"])
def test_whatever_answers_are_lost_each_new_row_comes_once(view: str) -> None:
    made = NStep(1) if view == "transitions" else Chunks(3)
    replay, link = local(sampler=Fresh(), view=made, shards=3, timeout=0.05, capacity=8000)
    rng, done, call, failed = np.random.default_rng(0), list[int](), link.call, 0

    def fails(shard: int, method: str, *given: Any) -> Any:
        """A message is lost on its way there, or its answer on its way back."""
        if method == "sample" and rng.random() < 0.1:
            return "failure", None
        answer = call(shard, method, *given)
        return ("failure", None) if method in ("sample", "totals") and rng.random() < 0.15 else answer

    joined, parts = internals.joined(replay), list[Any]()
    replay._joined = lambda drawn, mass: (parts.append(drawn), joined(drawn, mass))[1]  # pyright: ignore[reportAttributeAccessIssue]
    for turn in range(often(40, 200)):
        replay.extend(steps(2, start=2 * turn))
        size = int(rng.integers(1, 9))
        link.call = fails
        try:
            batch = replay.sample(size)
            assert batch["index"].shape == (size,)
            new = np.concatenate([np.arange(part.given.rows) < part.given.new for part in parts[-1]])
            done += batch["index"].numpy()[new].tolist()
        except LifecycleError:
            failed += 1
        link.call = call
        if turn % 8 == 7:
            while replay.stats()["shards_up"] < 3:
                time.sleep(PAUSE)
    assert replay.stats()["redrawn"] > 10
    while left := waiting(replay):
        done += replay.sample(min(left, 16))["index"].tolist()
    assert len({*done}) == len(done) == replay.stats()["served"]
    assert replay.stats()["lost"] == 0
    everything = [shard.replay.data()["index"].numpy() * 3 + k for k, shard in enumerate(link.shards) if shard]
    assert sorted(done) == sorted(np.concatenate(everything).tolist())


def test_a_batch_that_is_given_up_gives_back_what_some_shards_gave_for_it() -> None:
    replay, link = local(sampler=Fresh(), timeout=0.05)
    replay.extend(steps(10))
    call, all_wait = link.call, waiting(replay)

    def failing(shard: int, method: str, *given: Any) -> Any:
        answer = call(shard, method, *given)
        return ("failure", None) if (shard, method) == (1, "sample") else answer

    link.call = failing
    with pytest.raises(LifecycleError, match="have not given"):
        replay.sample(all_wait)
    link.call = call
    assert waiting(replay) == all_wait
    assert len({*names(replay.sample(all_wait))}) == all_wait


def loaded(path: Path, **options: Any) -> tuple[Replay, LocalLink]:
    links: list[LocalLink] = []

    def connect(plans: Any) -> LocalLink:
        links.append(LocalLink(plans))
        return links[0]

    return Replay.load(path, connect=connect, timeout=0.3, **options), links[0]


@pytest.mark.parametrize("shards", [2, 1, 3])
@pytest.mark.parametrize("durable", [False, True])
def test_a_loaded_replay_serves_what_was_not_served(shards: int, durable: bool, tmp_path: Path) -> None:
    replay, _ = local(sampler=Fresh(Prioritized(beta=(0.1, 0.9, 6))), path=tmp_path / "r")
    done = list[int]()
    for turn in range(4):
        replay.extend(steps(6, start=6 * turn))
        done += names(replay.sample(15))
    assert internals.checkpoint(replay).only_new == 4
    replay.save()
    again, _ = loaded(tmp_path / "r", shards=shards, durable=durable)
    assert internals.checkpoint(again).only_new == 4
    left = waiting(replay)
    assert waiting(again) == left > 20
    assert again.stats()["lost"] == 0
    batch = again.sample(left)
    if shards == 2 and not durable:
        other = replay.sample(left)
        assert names(batch) == names(other)
        assert torch.equal(again.sample(30)["weight"], replay.sample(30)["weight"])
    done += names(batch)
    assert Counter(done).most_common(1)[0][1] == 1


def test_a_shard_that_comes_back_serves_again_what_it_has_forgotten_to_have_served(tmp_path: Path) -> None:
    replay, link = local(sampler=Fresh(), path=tmp_path / "r", durable=True)
    replay.extend(steps(10))
    first = names(replay.sample(8))
    replay.save()
    second, left = names(replay.sample(8)), waiting(replay)
    link.kill(0)
    link.restart(0)
    again = names(replay.sample(1))
    again += names(replay.sample(waiting(replay)))
    assert not {*first} & {*again}
    assert {*again} & {*second}
    assert len(again) == left + len({*again} & {*second})


def test_two_learners_of_the_same_seed_draw_the_same() -> None:
    one, other = (local(sampler=Fresh(), shards=3)[0] for _ in range(2))
    for turn in range(6):
        for replay in (one, other):
            replay.extend(steps(7, start=7 * turn))
        for size in (5, 40):
            assert names(one.sample(size)) == names(other.sample(size))
