"""Lanes: a step that went in comes out once, whole, in order, and in the right env, whatever happens meanwhile."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks.tally import record
from relive import Collector, Field, Lanes, NStep, Prioritized, ReplayBuffer, Schema, errors
from relive import Sequence as SequenceView
from relive.processes import lanes as owning
from support import internals, tagged_envs
from support.children import SECONDS, done, kill, started
from support.effort import in_ci, often
from support.forks import in_fork
from support.interrupts import broken_off, die
from support.lane_plays import COUNTED, LanedTwin, counted, numbers, own_and_end, write_some
from support.twins import POISON, contents, mapped, recurrent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")

WORLDS: dict[str, dict[str, Any]] = {
    "small": {"view": NStep(2, 0.5)},
    "images": {"dress": "image"},
    "nested": {"dress": "mixed", "view": NStep(3, 0.5)},
    "tuples": {"dress": "tuple"},
    "sequences": {"extras": recurrent, "view": SequenceView(3, 2, "none", 2, 0.5)},
    "unordered": {"dress": "mixed", "ordered": False},
}


def world(kind: str, num_envs: int = 2, **options: Any) -> LanedTwin:
    facts = {**WORLDS[kind], **options}
    return LanedTwin(num_envs, 7, **{**facts, "view": copy.copy(facts.get("view"))})


# What comes out


PLAYS = st.lists(
    st.tuples(
        st.text("....TUB", min_size=2, max_size=2),
        st.none() | st.tuples(st.booleans(), st.booleans()),
        st.sampled_from(["add", "add", "add", "interrupt", "clear", "check"]),
    ),
    max_size=14,
)


@pytest.mark.parametrize("kind", WORLDS)
@settings(max_examples=settings.default.max_examples // 3)
@given(plays=PLAYS, drains=st.lists(st.booleans(), min_size=1, max_size=4), steps=st.integers(2, 6))
def test_what_went_in_by_a_lane_is_what_the_oracle_says(kind: str, plays: Any, drains: Any, steps: int) -> None:
    twin = world(kind, drains=drains, steps=steps)
    for kinds, mask, call in plays:
        twin.add(kinds, mask=mask)
        if call != "add":
            getattr(twin, call)()
    twin.check()


@pytest.mark.parametrize("kind", WORLDS)
def test_many_steps_at_once_are_the_same_as_one_by_one(kind: str) -> None:
    twin = world(kind, steps=8)
    twin.extend(["..", ".T", "..", "U.", ".."], [[True, True]] * 3 + [[True, False], [True, True]])
    twin.extend(["..", "BB", ".."])
    twin.check()


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("own", [False, True])
def test_a_collector_fills_a_lane_as_it_fills_the_replay(mode: AutoresetMode, own: bool) -> None:
    def make() -> Any:
        return tagged_envs.make_tagged(2, mode, tagged_envs.cycle([(3, "truncated"), (2, "terminated")], [(4, "both")]))

    schema = Schema.from_env(make())
    replays = [
        ReplayBuffer(schema, 24, 2, sampler=Prioritized(), check_ends=False, own_next_obs=own, seed=0) for _ in range(2)
    ]
    lanes = Lanes(schema, 1, 2, steps=7, own_next_obs=own)
    Collector(make(), tagged_envs.tagged_policy, replays[0], seed=3).collect(20)
    collector = Collector(make(), tagged_envs.tagged_policy, lanes.writer(0), seed=3)
    for count in (1, 5, 7, 3, 4):
        stats = collector.collect(count)
        assert stats.num_steps <= 2 * count
        lanes.drain(replays[1])
    assert contents(replays[0]) == contents(replays[1])


@pytest.mark.parametrize("own", [False, True])
def test_envs_that_record_themselves_write_what_the_oracle_says(own: bool) -> None:
    schedule = tagged_envs.cycle([(3, "truncated"), (2, "terminated")])
    env = tagged_envs.TaggedEnv(0, schedule)
    schema = Schema.from_env(env)
    lanes, replay = Lanes(schema, 1, own_next_obs=own), ReplayBuffer(schema, 100, own_next_obs=own, check_ends=False)
    recorded = lanes.recorded(env, 0)
    with pytest.raises(errors.LifecycleError, match=r"call reset\(\) first"):
        recorded.step(0)
    assert lanes.alive == [False]
    obs, _ = recorded.reset(seed=1)
    for t in range(16):
        obs, _, terminated, truncated, _ = recorded.step(
            tagged_envs.tagged_policy(torch.as_tensor(obs)[None])[0].numpy()
        )
        if terminated or truncated or t == 11:  # a reset in mid-episode
            obs, _ = recorded.reset()
    assert lanes.drain(replay) == 16
    recorded.close()
    assert lanes.alive == [False]
    data = replay.data()
    now, after = tagged_envs.decode(data["obs"]), tagged_envs.decode(data["next_obs"])
    assert np.array_equal(after.step, now.step + 1)
    assert np.array_equal(after.episode, now.episode)
    assert len(data) == (16 if own else 14)  # less the newest step, and the one before the reset
    with pytest.raises(errors.ParameterError, match=r"Lanes\(num_envs=1\), got 2"):
        Lanes(schema, 1, 2).recorded(env, 0)


def test_each_writer_has_its_envs_of_the_replay_and_the_count_is_of_steps() -> None:
    lanes, replay = Lanes(COUNTED, 3, 2), ReplayBuffer(COUNTED, 600, 6)
    writers = [lanes.writer(k) for k in range(3)]
    for t in range(4):
        writers[2].add(counted(100 + t, 2))
        writers[0].add(**counted(t, 2))
    writers[0].add(counted(4, 2) | {"mask": [True, False]})
    assert lanes.waiting == [5, 0, 4]
    assert lanes.drain(replay) == 17
    assert lanes.waiting == [0, 0, 0]
    assert numbers(replay, 0) == [0, 1, 2, 3, 4]
    assert numbers(replay, 1) == [1000, 1001, 1002, 1003]
    assert numbers(replay, 2) == numbers(replay, 3) == []
    assert numbers(replay, 5) == [1100, 1101, 1102, 1103]
    assert lanes.drain(replay) == 0


def test_dtypes_that_numpy_lacks_and_values_given_as_lists_take_a_lane_too() -> None:
    schema = COUNTED.extend(half=Field((3,), torch.bfloat16), action=Field((), torch.int64))
    lanes, replay = Lanes(schema, 1), ReplayBuffer(schema, 50)
    with lanes.writer(0) as writer:
        for t in range(5):
            writer.add(counted(t), half=torch.full((1, 3), t, dtype=torch.bfloat16), action=[t])
    lanes.drain(replay)
    assert replay.data()["half"][:, 0].tolist() == [0, 1, 2, 3]
    assert replay.data()["action"].tolist() == [0, 1, 2, 3]


def test_a_lane_may_be_larger_than_the_replay() -> None:
    lanes, replay = Lanes(COUNTED, 1, steps=1000), ReplayBuffer(COUNTED, 10)
    with lanes.writer(0) as writer:
        for t in range(777):
            writer.add(counted(t, end=t % 5 == 4))
    assert lanes.drain(replay) == 777
    replay.check()
    assert numbers(replay)[-3:] == [774, 775, 776]


# What is refused


BAD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda step: step.pop("reward"),
    "unknown": lambda step: step.update(rewards=1),
    "shape": lambda step: step.update(obs=np.zeros((3, 2))),
    "dtype": lambda step: step.update(terminated=np.zeros(2)),
    "sparse": lambda step: step.update(obs=torch.zeros(2, 2).to_sparse()),
    "final observation": lambda step: step.update(truncated=np.array([False, True])),
    "mask": lambda step: step.update(mask=[True]),
    "a masked end": lambda step: step.update(terminated=np.array([True, True]), mask=np.array([True, False])),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_bad_step_is_refused_by_the_writer_as_by_the_replay_and_nothing_is_written(mistake: str) -> None:
    lanes, replay = Lanes(COUNTED, 1, 2), ReplayBuffer(COUNTED, 40, 2)
    writer, step = lanes.writer(0), counted(1, 2)
    for target in (writer, replay):
        target.add(counted(0, 2))
    BAD[mistake](step)
    found = list[str]()
    for target in (writer, replay):
        with pytest.raises(errors.SchemaError) as error:
            target.add(step)
        found.append(f"{type(error.value).__name__}: {error.value}")
    assert found[0] == found[1]
    assert lanes.waiting == [1]
    writer.add(counted(1, 2))
    writer.add(counted(2, 2))
    lanes.drain(replay)
    assert len(replay) == 4  # the lane's first step starts new episodes, and its episodes went on after the mistake
    with pytest.raises(errors.FieldError, match="given by the names"):
        writer.add(3)


def test_nan_is_refused_in_the_writer_if_the_replay_refuses_it() -> None:
    lanes, replay = Lanes(COUNTED, 1, debug=True), ReplayBuffer(COUNTED, 40, debug=True)
    writer = lanes.writer(0)
    with pytest.raises(errors.NotFiniteError, match="field 'reward': row 0, of env 0"):
        writer.add(counted(0) | {"reward": np.array([np.nan])})
    writer.add(counted(0) | {"reward": np.array([np.nan]), "mask": np.array([False])})
    with pytest.raises(errors.NotFiniteError, match="field 'next_obs'"):
        writer.add(counted(0, end=True) | {"next_obs": np.full((1, 2), np.inf)})
    assert lanes.drain(replay) == 0
    with pytest.raises(errors.ParameterError, match=r"make Lanes\(debug=True\)"):
        Lanes(COUNTED, 1).drain(replay)


def test_a_replay_that_does_not_fit_is_refused() -> None:
    lanes = Lanes(COUNTED, 2, 3)
    for replay, message in (
        (ReplayBuffer(COUNTED, 40, 5), "2 writers of 3 envs need a replay of num_envs=6, got 5"),
        (ReplayBuffer(COUNTED.extend(value=()), 40, 6), "expected a replay of Schema"),
        (ReplayBuffer(COUNTED, 40, 6, ordered=False), r"make Lanes\(own_next_obs=True\)"),
    ):
        with pytest.raises(errors.SchemaError, match=message):
            lanes.drain(replay)


@pytest.mark.parametrize(
    "wrong",
    [{"writers": 0}, {"writers": 1.5}, {"num_envs": 0}, {"steps": 1}, {"own_next_obs": 1}, {"debug": None},
     {"steps": 2**40}],
)  # fmt: skip
def test_impossible_lanes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.ParameterError, match=rf"{next(iter(wrong))}|would take"):
        Lanes(COUNTED, **{"writers": 1, **wrong})
    with pytest.raises(errors.SchemaError, match="needs 'reward'"):
        Lanes(Schema({"obs": ()}), 1)


def test_arguments_of_calls_are_checked() -> None:
    lanes = Lanes(COUNTED, 2)
    for lane in (-1, 2, 0.5, None, True):
        with pytest.raises(errors.ParameterError, match=r"Lanes\.writer\(lane="):
            lanes.writer(lane)
    for timeout in (-1, "1", float("nan"), True):
        with pytest.raises(errors.ParameterError, match="timeout"):
            lanes.writer(0, timeout=timeout)
        with pytest.raises(errors.ParameterError, match="timeout"):
            lanes.wait(timeout)
    wrong: Any = 3
    with pytest.raises(errors.ParameterError, match=r"Lanes\.drain\(replay=3\)"):
        lanes.drain(wrong)
    with pytest.raises(errors.ParameterError, match=r"Lanes\.drain\(limit=3\)"):
        lanes.drain(ReplayBuffer(COUNTED, 10, 2), limit=wrong)
    assert lanes.alive == [False, False]


# Full lanes


def test_a_full_lane_refuses_a_step_after_its_timeout_and_takes_it_later() -> None:
    lanes, replay = Lanes(COUNTED, 1, steps=3), ReplayBuffer(COUNTED, 50)
    writer = lanes.writer(0, timeout=0.02)
    for t in range(3):
        writer.add(counted(t))
    for _ in range(2):
        with pytest.raises(
            errors.WaitTimeoutError, match=r"lane 0 is full: 3 steps wait for the owner to call drain\(\)"
        ):
            writer.add(counted(3))
    lanes.drain(replay)
    for t in (3, 4):
        writer.add(counted(t))
    lanes.drain(replay)
    assert replay.data()["reward"].tolist() == [0, 1, 2, 3]  # one episode, of which nothing was lost


def test_a_writer_and_an_owner_that_wait_for_each_other_both_go_on() -> None:
    lanes, replay, count = Lanes(COUNTED, 1, steps=2), ReplayBuffer(COUNTED, 2000), 400
    thread = threading.Thread(target=write_some, args=(lanes, 0, 0, count), daemon=True)
    thread.start()
    moved = 0
    while moved < count:
        assert lanes.wait(SECONDS)
        moved += lanes.drain(replay)
    thread.join(SECONDS)
    assert numbers(replay) == list(range(count))
    assert not lanes.wait(0)


def test_an_owner_that_wants_many_steps_is_woken_for_them_only() -> None:
    lanes, heard = Lanes(COUNTED, 2, steps=8), list[bool]()
    writers = [lanes.writer(k) for k in range(2)]
    thread = threading.Thread(target=lambda: heard.append(lanes.wait(SECONDS, steps=4)), daemon=True)
    thread.start()
    while not internals.filled(lanes).word[0] & 1:  # until it is about to sleep
        time.sleep(0.001)
    for t in range(3):
        for writer in writers:
            writer.add(counted(t))
    assert internals.filled(lanes).word[0] & 1
    assert not lanes.wait(0, steps=4)
    assert lanes.wait(0)
    internals.wanted(lanes)[0] = 4  # as the thread has it
    writers[1].add(counted(3))
    thread.join(SECONDS)
    assert heard == [True]
    for steps in (0, 9, 1.5, None):
        with pytest.raises(errors.ParameterError, match="a lane holds from 1 to 8 steps"):
            lanes.wait(0, steps=steps)


# Processes


@pytest.mark.parametrize(
    "methods", [("fork", "fork"), in_ci(("fork", "spawn")), pytest.param(("spawn", "spawn"), marks=pytest.mark.slow)]
)
def test_other_processes_write_and_this_one_drains(methods: tuple[str, str]) -> None:
    lanes, replay = Lanes(COUNTED, 2, 2, steps=8), ReplayBuffer(COUNTED, 4000, 4)
    processes = [started(method, write_some, lanes, k, 100 * k, 60) for k, method in enumerate(methods)]
    moved = 0
    while moved < 2 * 2 * 60:
        assert lanes.wait(SECONDS)
        moved += lanes.drain(replay)
    for process in processes:
        done(process)
    replay.check()
    assert numbers(replay, 1) == [1000 + t for t in range(60)]
    assert numbers(replay, 2) == [100 + t for t in range(60)]


def test_a_lane_has_one_writer_at_a_time_and_the_next_one_continues_behind_it() -> None:
    lanes, replay = Lanes(COUNTED, 2), ReplayBuffer(COUNTED, 60, 2)
    first = lanes.writer(1)
    assert lanes.alive == [False, True]
    with pytest.raises(errors.LifecycleError, match="lane 1 has a writer that is alive"):
        lanes.writer(1)
    with pytest.raises(errors.LifecycleError, match="lane 1 has a writer that is alive"):
        pickle.loads(pickle.dumps(lanes)).writer(1)
    first.add(counted(0))
    first.add(counted(1))
    first.close()
    with pytest.raises(errors.LifecycleError, match="lane 1 is closed"):
        first.add(counted(2))
    with lanes.writer(1) as second:
        second.add(counted(10))
        second.add(counted(11))
    third = lanes.writer(1)
    third.add(counted(20))
    third.add(counted(21))
    assert lanes.drain(replay) == 6
    assert numbers(replay, 1) == [0, 1, 10, 11, 20, 21]
    assert replay.data()["reward"].tolist() == [0, 10, 20]  # no episode goes from one writer to the next
    del third
    gc.collect()
    assert lanes.alive == [False, False]


def test_a_writer_stays_in_its_process() -> None:
    lanes = Lanes(COUNTED, 1)
    writer = lanes.writer(0)
    with pytest.raises(errors.LifecycleError, match="a writer belongs to its process"):
        pickle.dumps(writer)

    def child() -> None:
        with pytest.raises(errors.LifecycleError, match="was made before a fork"):
            writer.add(counted(0))

    in_fork(child)
    writer.add(counted(0))
    assert lanes.waiting == [1]


def test_lanes_have_one_owner_at_a_time() -> None:
    lanes, replay = Lanes(COUNTED, 1), ReplayBuffer(COUNTED, 60)
    lanes.drain(replay)
    other = pickle.loads(pickle.dumps(lanes))
    for call in (partial(other.drain, replay), partial(other.wait, 0)):
        with pytest.raises(errors.LifecycleError, match="another process drains these lanes"):
            call()
    assert repr(other) == repr(lanes)
    del lanes
    gc.collect()
    other.drain(replay)


def test_a_writer_that_waits_learns_that_the_owner_has_ended() -> None:
    lanes = Lanes(COUNTED, 1, steps=2)
    writer = lanes.writer(0)
    done(started("fork", own_and_end, lanes))
    writer.add(counted(0))
    writer.add(counted(1))
    with pytest.raises(errors.LifecycleError, match="the process that drained it has ended"):
        writer.add(counted(2))
    replay = ReplayBuffer(COUNTED, 60)
    lanes.drain(replay)  # this process takes its place
    writer.add(counted(2))
    lanes.drain(replay)
    assert numbers(replay) == [0, 1, 2]


def test_a_killed_writers_place_is_free_at_once() -> None:
    lanes, replay = Lanes(COUNTED, 1, steps=16), ReplayBuffer(COUNTED, 100)
    process = started("fork", write_some, lanes, 0, 0, 10**6)
    assert lanes.wait(SECONDS)
    kill(process)
    waiting = lanes.waiting[0]
    with lanes.writer(0, timeout=0) as writer:
        if waiting > lanes.steps - 2:  # there is no room for both
            lanes.drain(replay)
        writer.add(counted(5000))
        writer.add(counted(5001))
    lanes.drain(replay)
    found = numbers(replay)
    assert found == [*range(waiting), 5000, 5001]
    assert (replay.data()["next_obs"][:, 0] - replay.data()["reward"] == 1).all()


def own(lanes: Lanes, folder: Path, at: int | None) -> None:
    """Drain the lanes into a replay in files; die at event ``at`` of it, or after it.

    If ``at`` is None, die when the steps are stored, and the lane has not been told.
    """
    if at is None:
        at = 10**9
        owning.Lane.give_back = lambda lane, number: die()
    replay = ReplayBuffer.open(folder, COUNTED, 400, 4, check_ends=False)
    broken_off(lambda: lanes.drain(replay), at, die)
    die()


@pytest.mark.parametrize("stride", [often(701, 17), pytest.param(1, marks=pytest.mark.slow)])
def test_an_owner_of_a_replay_in_files_that_is_killed_at_any_line_stores_no_step_twice(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("relive.files.mapped._sync_data", lambda descriptor: None)
    before, tried = -1, 0
    for at in (None, *range(0, 10**6, stride)):
        folder, lanes = tmp_path / str(at), Lanes(COUNTED, 2, 2, steps=16)
        writers = [lanes.writer(k) for k in range(2)]
        for t in range(8):
            for k, writer in enumerate(writers):
                writer.add(counted(100 * k + t, 2, end=t == 3))
        for _ in range(2):  # killed, and killed again while it goes on
            owner = started("fork", own, lanes, folder, at)
            owner.join(SECONDS)
            assert owner.exitcode == -signal.SIGKILL
        tried, waiting = tried + 1, sum(lanes.waiting)
        for k, writer in enumerate(writers):
            writer.add(counted(100 * k + 8, 2))
        with ReplayBuffer.open(folder, COUNTED, 400, 4, check_ends=False) as replay:
            lanes.drain(replay)
            replay.check()
            for env in range(4):
                wanted = [1000 * (env % 2) + 100 * (env // 2) + t for t in range(9)]
                assert numbers(replay, env) == wanted, f"at {at}"
        if waiting == before == 0:
            break
        before = waiting
    record("the owner of lanes killed while it drains them into a replay in files", 2 * tried, 0)


def test_steps_that_were_refused_before_a_kill_are_drained_after_it(tmp_path: Path) -> None:
    """A note of a piece that never came in says nothing, whatever is added to its envs in another way."""
    lanes = Lanes(COUNTED, 1, steps=16)
    with lanes.writer(0) as writer:
        for t in range(3):
            writer.add(counted(t))
    done(started("fork", refuse, lanes, tmp_path / "replay"))
    with ReplayBuffer.open(tmp_path / "replay", check_ends=False) as replay:
        replay.add(counted(50))
        lanes.drain(replay)
        assert numbers(replay) == [50, 0, 1, 2]


def refuse(lanes: Lanes, folder: Path) -> None:
    replay = ReplayBuffer.open(folder, COUNTED, 400, check_ends=False)
    for kind in (MemoryError, KeyboardInterrupt):
        replay.extend = partial(_raise, kind)
        with pytest.raises(kind):
            lanes.drain(replay)


def _raise(kind: type[BaseException], *_: Any, **__: Any) -> None:
    raise kind


def test_counters_that_a_process_wrote_over_are_found() -> None:
    lanes, replay = Lanes(COUNTED, 1, steps=4), ReplayBuffer(COUNTED, 100)
    internals.counters(internals.lanes(lanes)[0])[0] = 5
    with pytest.raises(errors.InvariantError, match="5 committed and 0 drained"):
        lanes.drain(replay)


# Calls that are broken off


@pytest.mark.parametrize("stride", [often(151, 31), pytest.param(1, marks=pytest.mark.slow)])
def test_a_drain_that_is_broken_off_at_any_line_loses_no_step_and_stores_none_twice(stride: int) -> None:
    for at in range(0, 10**6, stride):
        lanes, replay = Lanes(COUNTED, 2, steps=16), ReplayBuffer(COUNTED, 200, 2)
        writers = [lanes.writer(k) for k in range(2)]
        for k, writer in enumerate(writers):
            for t in range(11):
                ends = t in (3, 7)
                writer.add(counted(100 * k + t, end=ends))
                if ends:  # the reset step of NEXT_STEP autoreset, and one that interrupts
                    writer.add(counted(POISON) | {"mask": np.array([False])})
        off = broken_off(lambda lanes=lanes, replay=replay: lanes.drain(replay), at)
        for k, writer in enumerate(writers):
            writer.add(counted(100 * k + 11))
        lanes.drain(replay)
        replay.check()
        for k in range(2):
            assert numbers(replay, k) == [100 * k + t for t in range(12)], f"at {at}"
        data = replay.data()
        after = data["next_obs"][:, 0] - data["reward"]
        assert torch.equal(after, torch.where(data["terminated"], 0.5, 1.0))
        assert len(data) >= 2 * 11 - 1, f"at {at}: {len(data)}"  # at most one lane's episode was interrupted
        if not off:
            break


def test_an_add_that_is_broken_off_at_any_line_is_in_or_not() -> None:
    for at in range(10**6):
        lanes, replay = Lanes(COUNTED, 1, steps=4), ReplayBuffer(COUNTED, 200)
        writer = lanes.writer(0)
        writer.add(counted(0))
        off = broken_off(lambda writer=writer: writer.add(counted(1)), at)
        writer.add(counted(2))
        writer.add(counted(3))
        lanes.drain(replay)
        found = numbers(replay)
        assert found in ([0, 1, 2, 3], [0, 2, 3])
        joined = set(replay.data()["reward"].tolist())
        if len(found) == 3:  # the step is not in; before the first line, the caller alone can know
            assert joined == {2} or (joined == {0, 2} and at <= 1)
        else:  # it is in; the next one follows it only if all was done
            assert joined in ({0, 2}, {0, 1, 2})
            assert off or joined == {0, 1, 2}
        if not off:
            break


def test_equal_leaves_of_a_nested_step_are_cut_in_time() -> None:
    schema = Schema(
        {"obs": {"a": (2,), "b": ((), (3,))}, "reward": (), **{k: COUNTED[k] for k in ("terminated", "truncated")}}
    )
    lanes, replay = Lanes(schema, 1, 2), ReplayBuffer(schema, 40, 2)
    steps = {
        "obs": {"a": np.arange(12.0).reshape(3, 2, 2), "b": (np.arange(6.0).reshape(3, 2), np.ones((3, 2, 3)))},
        "reward": torch.arange(6.0).reshape(3, 2), "terminated": np.zeros((3, 2), bool),
        "truncated": np.zeros((3, 2), bool),
    }  # fmt: skip
    with lanes.writer(0) as writer:
        writer.extend(steps)
        with pytest.raises(errors.ShapeError, match="in front of every field"):
            writer.extend(mapped(lambda x: x[:, :1], steps))
    lanes.drain(replay)
    assert replay.slice(1)["obs", "b", "0"].tolist() == [1, 3, 5]
