"""The shards of a replay in one process: they draw as one ring, count each step once, and come back."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive import Batch, Chunks, NStep, Prioritized, ReplayBuffer, Sequence, Uniform
from relive.cluster.replay import Replay, load_extra
from relive.cluster.shard import ChunkOrigin, Ledger
from relive.errors import (
    EmptyError,
    FieldError,
    FileFormatError,
    LifecycleError,
    NotFiniteError,
    ParameterError,
    ShapeError,
)
from relive.processes.blocks import joined_batch, packed_batch
from support import internals
from support.clusters import SCHEMA, LocalLink, check, local, steps
from support.effort import in_ci
from support.fit import check_fit
from support.worlds import check_fit_of_one_percent


def whole(**options: Any) -> ReplayBuffer:
    """One ring with the steps of all shards."""
    return ReplayBuffer(SCHEMA, 400, 4, seed=0, check_ends=False, **options)


def complete(count: int) -> int:
    """How many of ``count`` steps of four envs can be drawn: all but the last ones of running episodes."""
    one = whole()
    one.extend(steps(count))
    return len(one)


def key_of(batch: Any) -> torch.Tensor:
    """A number for each transition that shards and one ring share: its action."""
    return batch["action"]


# -- draws ------------------------------------------------------------------------------------------------------------


SAMPLERS = [Uniform(), Prioritized(stratified=False), Prioritized()]


def shares(sampler: Any, count: int) -> tuple[np.ndarray, dict[int, float]]:
    """What three shards drew in 20 batches, and the chances of one ring of the same steps."""
    replay, _ = local(sampler=sampler, shards=3, capacity=24)
    one = ReplayBuffer(SCHEMA, 24, 4, sampler=type(sampler)(), check_ends=False, seed=0)
    for part in (replay, one):
        part.extend(steps(14))
        if isinstance(sampler, Prioritized):
            batch = one.data() if part is one else replay.sample(2000)
            part.update_priorities(batch["index"], 0.2 + (batch["action"] % 7).float())
    stored = one.data()
    assert len(replay) == len(one) == len(stored)
    chances = dict(zip(key_of(stored).tolist(), chances_of(one), strict=True))
    return np.concatenate([key_of(replay.sample(count // 20)).numpy() for _ in range(20)]), chances


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_shards_draw_with_the_chances_of_one_ring(sampler: Any):
    """It fails if 1 % of the draws go to the newest transition: check_fit_of_one_percent injects that."""
    check_fit_of_one_percent(*shares(sampler, 100_000))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_shards_draw_with_the_chances_of_one_ring_to_half_a_percent(sampler: Any):
    """It also fails if one half of the transitions are 1 % likelier than the others: check_fit injects both."""
    check_fit(*shares(sampler, 4_000_000))


def chances_of(one: ReplayBuffer) -> list[float]:
    """The probability of each transition of ``data()``."""
    if not isinstance(one.sampler, Prioritized):
        return [1 / len(one)] * len(one)
    p = (0.2 + (one.data()["action"] % 7).double() + one.sampler.eps) ** one.sampler.alpha
    return (p / p.sum()).tolist()


@pytest.mark.parametrize("options", [{}, {"stratified": False}, {"normalize": "buffer", "beta": (0.4, 1.0, 3)}])
def test_prioritized_batches_are_those_of_one_ring_with_the_same_seed(options: Any):
    options |= {"default_error": 1.0}  # the largest of all shards is known one call later
    replay, _ = local(sampler=Prioritized(**options), shards=3, view=NStep(3, 0.9))
    one = whole(sampler=Prioritized(**options), view=NStep(3, 0.9))
    for t in range(6):
        for part in (replay, one):
            part.extend(steps(25, start=25 * t))
        mine, its = replay.sample(64), one.sample(64)
        assert list(mine.keys()) == list(its.keys())
        order, other = key_of(mine).argsort(stable=True), key_of(its).argsort(stable=True)
        for name in mine.keys() - {"index", "next_index"}:  # one ring does not order its rows by shard
            torch.testing.assert_close(mine[name][order], its[name][other], rtol=1e-6, atol=0)
        for part, batch in ((replay, mine), (one, its)):
            part.update_priorities(batch["index"], batch["reward"])


@pytest.mark.parametrize("normalize", ["batch", "buffer"])
def test_weights_and_probabilities_are_those_of_one_ring(normalize: Any):
    sampler = Prioritized(0.7, (0.4, 1.0, 4), normalize=normalize)
    replay, _ = local(sampler=sampler)
    replay.extend(steps(60))
    for draws in range(6):
        batch = replay.sample(200)
        known = dict.fromkeys(batch["index"].tolist(), 1.0)
        del known
        replay.update_priorities(batch["index"], (batch["action"] % 5).float() + draws)
    every = replay.sample(8000)
    p = priorities_of(replay)
    chances = {action: value / sum(p.values()) for action, value in p.items()}
    want = np.array([chances[a] for a in key_of(every).tolist()])
    np.testing.assert_allclose(every["probability"].numpy(), want, rtol=1e-9)
    least = min(chances.values()) if normalize == "buffer" else want.min()
    np.testing.assert_allclose(every["weight"].numpy(), (want / least) ** -1.0, rtol=1e-5)  # beta is 1 by now


def priorities_of(replay: Replay) -> dict[int, float]:
    """The priority of each transition, by its action, read off the rings."""
    found: dict[int, float] = {}
    link: Any = internals.group(replay).link
    for shard in link.shards:
        of = shard.replay
        actions = of.at(internals.ring(of).anchors())["action"].tolist()
        found |= dict(zip(actions, of.sampler.priorities().tolist(), strict=True))
    return found


def test_a_new_transition_gets_the_largest_error_of_all_shards():
    replay, link = local(sampler=Prioritized(alpha=1.0, eps=1e-6))
    replay.extend(steps(10))
    batch = replay.sample(64)
    first = torch.tensor([i % 2 == 0 for i in batch["index"].tolist()])  # of shard 0
    replay.update_priorities(batch["index"][first], torch.full((int(first.sum()),), 9.0))
    replay.sample(8)
    replay.sample(8)  # the first one learned the largest error, this one passed it on
    replay.extend(steps(3, start=10))
    p = priorities_of(replay)
    assert {round(p[env * 1000 + 10], 4) for env in range(4)} == {9.0}
    assert link.shards[1] is not None


def test_batches_are_a_function_of_the_seed_and_their_number():
    def batches(seed: int) -> list[list[int]]:
        replay, _ = local(sampler=Prioritized(), seed=seed)
        replay.extend(steps(40))
        return [replay.sample(16)["action"].tolist() for _ in range(5)]

    assert batches(3) == batches(3)
    assert batches(3) != batches(4)


def test_an_update_is_in_effect_for_the_next_batch_and_late_ones_are_counted():
    replay, _ = local(sampler=Prioritized(alpha=1.0), capacity=80)
    replay.extend(steps(12))
    batch = replay.sample(400)
    wanted = batch["action"] == 2003
    assert wanted.any()
    replay.update_priorities(batch["index"], torch.where(wanted, 1e6, 0.0))
    assert (replay.sample(200)["action"] == 2003).all()
    replay.extend(steps(60, start=12))
    replay.update_priorities(batch["index"], torch.zeros(400))
    assert replay.stats()["late_updates"] == 400


def test_sequences_and_n_steps_come_as_from_one_ring():
    view = Sequence(length=4, burn_in=1, time_first=True)
    replay, _ = local(view=view, sampler=Prioritized())
    replay.extend(steps(40))
    batch = replay.sample(32)
    assert batch["obs"].shape == (6, 32, 3)
    assert batch["env"].tolist() == batch["obs"][0, :, 0].long().tolist()
    assert batch["weight"].shape == (32,)
    replay.update_priorities(batch["index"], torch.rand(6, 32), batch["mask"])
    one = whole(view=NStep(3, 0.9))
    many, _ = local(view=NStep(3, 0.9))
    for replay in (one, many):
        replay.extend(steps(40))
    known = {int(row["action"]): row for row in one.data().split(1)}
    for row in many.sample(100).split(1):
        same = known[int(row["action"])]
        for name in ("obs", "next_obs", "reward", "discount", "steps"):
            assert torch.equal(row[name], same[name])


def test_chunks_come_as_from_one_ring():
    one, (many, _) = whole(view=Chunks(5, last=("reward",))), local(view=Chunks(5, last=("reward",)))
    for replay in (one, many):
        replay.extend(steps(40))
    data, batch = one.data(), many.sample(50)
    known = {tuple(data["obs"][:, b, 1].tolist()) + (int(data["env"][b]),): b for b in range(len(data))}
    for b in range(50):
        same = known[(*batch["obs"][:, b, 1].tolist(), int(batch["env"][b]))]
        for name in ("obs", "action", "last_reward", "is_first", "is_last", "is_terminal", "mask"):
            assert torch.equal(batch[name][:, b], data[name][:, same])


def test_states_of_several_layers_are_joined_along_the_batch():
    schema = SCHEMA.extend(hidden={"h": relive.Field((2, 3)), "c": relive.Field((3,))})
    replay = ReplayBuffer(schema, 40, 1, view=Sequence(length=3, time_first=True), seed=0, check_ends=False)
    number = partial(np.random.default_rng(0).random, dtype=np.float32)
    given = {**steps(20, envs=[0]), "hidden": {"h": number((20, 1, 2, 3)), "c": number((20, 1, 3))}}
    replay.extend(given)
    batches = [replay.sample(3), replay.sample(2)]
    joined = joined_batch([packed_batch(batch) for batch in batches], {})
    assert joined["hidden"]["h"].shape == (2, 5, 3)
    for name in ("h", "c"):
        parts = [batch["hidden"][name] for batch in batches]
        assert torch.equal(joined["hidden"][name], torch.cat(parts, 1 if name == "h" else 0))
    assert torch.equal(joined["obs"], torch.cat([batch["obs"] for batch in batches], 1))


# -- steps ------------------------------------------------------------------------------------------------------------


def test_what_the_shards_hold_is_what_one_ring_would_hold():
    replay, link = local(shards=3, capacity=120)
    one = ReplayBuffer(SCHEMA, 120, 4, check_ends=False)
    masked = steps(9, start=50) | {"mask": np.arange(36).reshape(9, 4) % 5 > 0}
    for chunk in (steps(7), steps(1, start=7), steps(30, start=8), masked, steps(5, start=59)):
        one.extend(chunk)
        replay.extend(chunk)
    held = [shard.replay.data() for shard in link.shards if shard is not None]
    for name in ("obs", "action", "reward", "terminated", "truncated", "next_obs"):
        mine, its = torch.cat([part[name] for part in held]), one.data()[name]
        order, other = key_of(Batch.joined(held, set(held[0]), {})).argsort(), key_of(one.data()).argsort()
        assert torch.equal(mine[order], its[other])


def test_writers_of_some_envs_feed_the_shards_that_have_them():
    replay, _ = local(num_envs=6, shards=2, capacity=600)
    low, high = replay.writer([0, 1, 4]), replay.writer([5, 3, 2])
    low.extend(steps(20, [0, 1, 4]))
    high.extend(steps(20, [5, 3, 2]))
    low.flush()
    high.flush()
    batch = replay.sample(300)
    check(batch)
    assert set(batch["obs"][:, 0].tolist()) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("envs", [[0, 0], [4], [-1], [], [[0]], [0.5]])
def test_envs_of_a_writer_are_different_whole_numbers(envs: Any):
    with pytest.raises(ParameterError, match="writer"):
        local()[0].writer(envs)


def test_steps_that_do_not_fit_are_refused_where_they_are_made():
    replay, link = local()
    writer = replay.writer()
    for wrong, error in (
        ({"obs": np.zeros((5, 4, 2), np.float32)}, ShapeError),
        ({"reward": np.zeros((5, 4, 1))}, ShapeError),
        ({"other": np.zeros((5, 4))}, FieldError),
        ({"mask": np.zeros((5, 4), np.int64)}, ShapeError),
    ):
        with pytest.raises(error):
            writer.extend(steps(5) | wrong)
    ends = steps(9)
    del ends["next_obs"]
    with pytest.raises(FieldError, match="final observation"):
        writer.extend(ends)
    assert not link.calls[2:]
    writer.extend(steps(9))
    writer.flush()
    assert len(replay) == complete(9)


def test_only_final_observations_travel_besides_the_steps():
    replay, link = local(shards=1)
    seen: list[Any] = []
    call = link.call
    link.call = lambda shard, method, *given: (seen.append(given), call(shard, method, *given))[1]
    replay.extend(steps(14))
    (chunk,) = [given[0] for given in seen if given and hasattr(given[0], "block")]
    (finals,) = [part for part in chunk.block.spec.parts if part.path == ("next_obs",)]
    assert finals.shape == (8, 3)  # two ends of each env


@pytest.mark.parametrize("options", [{"ordered": False}, {"own_next_obs": True}])
def test_rows_with_next_observations_of_their_own_keep_them(options: Any):
    replay, _ = local(**options)
    replay.extend(steps(20))
    assert len(replay) == 80
    check(replay.sample(300))


# -- failures ---------------------------------------------------------------------------------------------------------


def test_the_learner_goes_on_without_a_shard_and_takes_it_back():
    replay, link = local(sampler=Prioritized())
    writer = replay.writer([0, 1])
    replay.extend(steps(40))
    old = replay.sample(64)
    link.kill(1)
    batch = replay.sample(64)
    check(batch)
    assert len(batch) == 64
    assert set(batch["obs"][:, 0].tolist()) <= {0.0, 1.0}
    assert batch["probability"].max() <= 1 / 10
    replay.update_priorities(old["index"], torch.ones(64))  # those of shard 1 go nowhere
    assert replay.stats()["dropped_updates"] == sum(index % 2 for index in old["index"].tolist())
    link.restart(1)
    internals.probe(internals.group(replay))(1)
    other = replay.writer([2, 3])
    other.extend(steps(30, [2, 3], start=100))
    other.flush()
    batch = replay.sample(400)
    check(batch)
    assert set(batch["obs"][:, 0].tolist()) == {0.0, 1.0, 2.0, 3.0}
    assert replay.stats()["restarts"] == 1
    again = batch["index"][batch["obs"][:, 0] > 1]
    assert len(set(again.tolist()) & set(old["index"].tolist())) == 0  # no index names two transitions
    late = replay.stats()["dropped_updates"]
    replay.update_priorities(old["index"], torch.full((64,), 1e9))
    assert replay.stats()["dropped_updates"] == late + sum(index % 2 for index in old["index"].tolist())
    assert writer.envs.tolist() == [0, 1]


def test_rows_of_a_shard_that_fails_within_a_batch_are_drawn_from_the_others():
    replay, link = local(timeout=0.1)
    replay.extend(steps(40))
    link.lose_answers_of = {"sample"}
    with pytest.raises(LifecycleError, match=r"have not given 32 rows in 0\.3 s"):
        replay.sample(32)
    link.lose_answers_of = set()
    replay.sample(8)
    call = link.call

    def failing(shard: int, method: str, *given: Any) -> Any:
        if (shard, method) == (0, "sample"):
            link.kill(0)
        return call(shard, method, *given)

    link.call = failing
    batch = replay.sample(32)
    check(batch)
    assert (batch["obs"][:, 0] >= 2).all()
    assert replay.stats()["redrawn"] >= 1


def test_an_error_with_which_a_shard_comes_back_is_raised_once():
    replay, link = local()
    replay.extend(steps(10))
    link.kill(1)
    assert len(replay) == complete(10) // 2
    link.restart(1)
    call, errors = link.call, [FileFormatError("the save of this shard is damaged")]

    def failing(shard: int, method: str, *given: Any) -> Any:
        return ("error", errors.pop()) if shard == 1 and errors else call(shard, method, *given)

    link.call = failing
    internals.probe(internals.group(replay))(1)
    with pytest.raises(FileFormatError, match="is damaged"):
        len(replay)
    assert len(replay) == complete(10) // 2
    assert replay.stats()["shards_up"] == 2


def test_no_shard_answers():
    replay, link = local()
    replay.extend(steps(4))
    link.silent = {0, 1}
    with pytest.raises(LifecycleError, match=r"none of the 2 shards has answered for 0\.3 s"):
        replay.sample(4)
    link.silent = set()
    link.restart(0)
    link.silent = {0, 1}
    with pytest.raises(LifecycleError, match="steps wait here"):
        replay.writer(timeout=0.1).extend(steps(4, start=4))


def test_a_chunk_whose_confirmation_is_lost_is_stored_once():
    replay, link = local(shards=1)
    writer = replay.writer()
    writer.extend(steps(5))
    link.lose_answers_of = {"push"}
    writer.extend(steps(5, start=5))
    link.lose_answers_of = set()
    writer.extend(steps(5, start=10))
    writer.flush()
    assert replay.stats()["repeated_steps"] == 40  # the chunk after it was sent again, too
    assert len(replay) == complete(15)
    check(replay.sample(100))


def test_steps_that_a_restarted_shard_lost_are_counted_and_no_episode_joins_over_the_gap(tmp_path: Path):
    replay, link = local(shards=1, path=tmp_path / "replay")
    writer = replay.writer()
    writer.extend(steps(10, length=100))
    writer.flush()
    replay.save()
    writer.extend(steps(6, start=10, length=100))
    writer.flush()
    link.restart(0)
    assert replay.stats()["lost_steps"] == 0  # the learner has not seen them
    writer.extend(steps(4, start=16, length=100))
    writer.flush()
    stats = replay.stats()
    assert stats["lost_steps"] == 24
    assert stats["restarts"] == 1
    times = set(replay.sample(2000)["obs"][:, 1].tolist())
    assert times == {*range(9), *range(16, 19)}  # 9 has lost its next observation, and 19 waits for it
    check(replay.sample(200))


def test_steps_that_no_writer_asks_for_any_more_are_counted_as_lost_too():
    replay, link = local()
    replay.extend(steps(10))
    assert len(replay)
    link.restart(1)
    assert replay.stats()["lost_steps"] == 20


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_while_a_chunk_is_sent_loses_and_doubles_nothing(when: str):
    """The call is interrupted before or after the shard has the chunk; the next flush sees to it."""
    replay, link = local(shards=1)
    writer, call = replay.writer(), link.call
    writer.extend(steps(5))

    def interrupted(shard: int, method: str, *given: Any) -> Any:
        link.call = call
        if when == "after":
            call(shard, method, *given)
        raise KeyboardInterrupt

    link.call = interrupted
    with pytest.raises(KeyboardInterrupt):
        writer.extend(steps(5, start=5))
    writer.extend(steps(5, start=10))
    writer.flush()
    assert len(replay) == complete(15)
    assert replay.stats()["completed"] == complete(15)
    check(replay.sample(200))


def test_a_new_writer_replaces_the_old_one():
    replay, link = local()
    old = replay.writer([0, 1])
    old.extend(steps(5, [0, 1]))
    old.flush()
    new = replay.writer([1, 0])
    new.extend(steps(5, [1, 0], start=50))
    new.flush()
    old.extend(steps(5, [0, 1], start=5))
    with pytest.raises(LifecycleError, match="newer writer"):
        old.flush()
    with pytest.raises(LifecycleError, match="make a new one"):
        old.extend(steps(5, [0, 1], start=10))
    link.restart(0)  # it forgets who has its envs
    new.extend(steps(5, [1, 0], start=55))
    new.flush()
    check(replay.sample(50))


def test_a_ledger_counts_each_step_once_whatever_the_order():
    """Every order of five messages, some twice, of a writer that sends a chunk again until it is confirmed."""
    for order in itertools.product(range(3), repeat=5):
        ledger = Ledger()
        rank = ledger.claim([0], "a")
        stored: list[int] = []
        for chunk in order:
            origin = ChunkOrigin(rank, (0,), 2 * chunk, 2, 0)
            if ledger.admit(origin).store:
                ledger.confirm(origin)
                stored.append(chunk)
        assert stored == sorted(set(stored)) == list(range(len(stored)))
        assert ledger.lost == 0


# -- checkpoints ------------------------------------------------------------------------------------------------------


def loaded(path: Path, **options: Any) -> tuple[Replay, LocalLink]:
    links: list[LocalLink] = []
    replay = Replay.load(path, connect=lambda plans: links.append(LocalLink(plans)) or links[0], timeout=0.3, **options)
    return replay, links[0]


def test_a_loaded_replay_draws_the_batches_that_the_saved_one_draws_next(tmp_path: Path):
    replay, _ = local(sampler=Prioritized(), view=NStep(3, 0.9), path=tmp_path / "r")
    replay.extend(steps(50))
    for _ in range(3):
        batch = replay.sample(32)
        replay.update_priorities(batch["index"], batch["reward"])
    replay.save(extra={"step": 7})
    again, _ = loaded(tmp_path / "r")
    assert load_extra(tmp_path / "r") == {"step": 7}
    for _ in range(3):
        mine, its = replay.sample(32), again.sample(32)
        for name in mine.keys():
            assert torch.equal(mine[name], its[name])


@pytest.mark.parametrize("shards", [1, in_ci(3), 4])
def test_a_replay_is_loaded_on_another_number_of_shards(tmp_path: Path, shards: int):
    replay, _ = local(sampler=Prioritized(), path=tmp_path / "r")
    replay.extend(steps(60))
    for _ in range(20):
        batch = replay.sample(64)
        replay.update_priorities(batch["index"], (batch["action"] % 11).float())
    replay.save()
    again, link = loaded(tmp_path / "r", shards=shards)
    assert len(link.shards) == shards
    assert priorities_of(again) == pytest.approx(priorities_of(replay), rel=1e-12)
    check(again.sample(500))
    again.extend(steps(10, start=60))
    check(again.sample(500))
    again.save()
    third, _ = loaded(tmp_path / "r")
    assert priorities_of(third) == priorities_of(again)


def test_shards_get_absolute_paths_since_they_have_working_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    replay, _ = local(path="r")
    replay.extend(steps(10))
    replay.save()
    _, link = loaded(Path("r"), shards=1)
    (plan,) = link.plans
    assert [source.path for source in plan.sources] == [str(tmp_path / "r" / f"shard-{k}" / "1") for k in (0, 1)]
    assert plan.home == str(tmp_path / "r")


def test_a_checkpoint_counts_once_all_shards_have_written_it(tmp_path: Path):
    replay, link = local(path=tmp_path / "r")
    replay.extend(steps(10))
    replay.save(extra=1)
    replay.extend(steps(10, start=10))
    link.lose_answers_of = {"commit"}
    with pytest.raises(LifecycleError, match="still counts"):
        replay.save(extra=2)
    link.lose_answers_of = set()
    again, _ = loaded(tmp_path / "r")
    assert load_extra(tmp_path / "r") == 1
    assert len(again) == complete(10)
    replay.save(extra=3)
    assert len(loaded(tmp_path / "r")[0]) == complete(20)


def test_a_shard_comes_back_from_its_newest_commit_of_this_run(tmp_path: Path):
    replay, link = local(path=tmp_path / "r", commit_every=1e-9)
    replay.extend(steps(10))
    replay.sample(4)  # commits
    replay.extend(steps(10, start=10))
    link.restart(0)
    link.restart(1)
    assert len(replay) == complete(10)
    replay.save()
    with pytest.raises(LifecycleError, match=r"Replay\.load"):
        local(path=tmp_path / "r")


def test_arguments_are_checked_before_any_shard_is_made():
    for wrong, error in (
        ({"shards": 5}, ParameterError),
        ({"shards": 0}, ParameterError),
        ({"capacity": 3}, ParameterError),
        ({"sampler": relive.Recent()}, ParameterError),
        ({"view": Sequence(length=4, weigh="steps")}, ParameterError),
        ({"timeout": 0}, ParameterError),
    ):
        with pytest.raises(error):
            local(**wrong)
    replay, _ = local(sampler=Prioritized())
    with pytest.raises(EmptyError):
        replay.sample(4)
    replay.extend(steps(10))
    batch = replay.sample(4)
    with pytest.raises(NotFiniteError):
        replay.update_priorities(batch["index"], torch.tensor([1.0, np.nan, 1.0, 1.0]))
    with pytest.raises(ShapeError):
        replay.update_priorities(batch["index"], torch.ones(4, 1))
    with pytest.raises(ParameterError, match="never issued"):
        replay.update_priorities([-3], torch.ones(1))
    with pytest.raises(ParameterError, match="never issued"):
        replay.update_priorities([1 << 60], torch.ones(1))
    with pytest.raises(LifecycleError, match="no priorities"):
        local()[0].update_priorities([0], [1.0])
    with pytest.raises(LifecycleError, match="path"):
        replay.save()


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name == "relive.cluster.ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'relive\[ray\]'"):
        Replay(SCHEMA, 400)
