"""Ctrl-C at any line of any call that writes: afterwards a buffer is what it was, or what the call would have made it.

A trace function raises KeyboardInterrupt at one line after another of the package; signals come at random instants. The
oracle is then told of the steps that are in, and everything the buffer hands out is held to it."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from attacks.tally import record
from relive import Collector, Field, Prioritized, ReplayBuffer, RolloutBuffer, Schema
from support import internals, tagged_envs, twins
from support.cases import covering
from support.effort import in_ci, often
from support.interrupts import EVERY_SAMPLER, KINDS, Broken, broken_off, calls
from support.twins import KINDS as LETTERS
from support.twins import Twin


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("relive.files.mapped._sync_data", lambda descriptor: None)


def attack(kind: str, sampler: str, events: Sequence[int] | None, batches: int) -> tuple[int, list[str]]:
    """Break off every call at these events (None: at each it has); how many were, and what was wrong afterwards."""
    tried, failed = 0, list[str]()
    for name in calls(prepared(kind, sampler)):
        world, at = prepared(kind, sampler), -1
        for turn in range(10**6 if events is None else len(events)):
            at = turn if events is None else events[turn]
            if turn % 8 == 7:  # the oracle takes longer the more there was
                world = prepared(kind, sampler)
            world.turn = turn
            try:
                off = calls(world)[name](at)
                tried += off
                world.verify(batches)
                for play in ("..", ".T", ".."):
                    world.add(play)
                    world.see()
                if turn % 2:
                    world.verify(0)
            except Exception as error:  # whatever comes of it is what this looks for
                failed.append(f"{name} at {at}: {type(error).__name__}: {str(error)[:200]}")
                world, off = prepared(kind, sampler), True
            if not off and events is None:
                break
    return tried, failed


def prepared(kind: str, sampler: str) -> Broken:
    """A world whose rings have come round."""
    world = Broken(kind, sampler)
    for play in ("..", ".T", "..", "..", "U.", "..", "..", ".."):
        world.add(play)
        world.see()
    if world.prioritized is not None:
        world.updates(10**9)
    if len(world.buffer):
        world.buffer.sample(1)
    return world


CELLS = [(kind, sampler) for kind in KINDS for sampler in EVERY_SAMPLER]


@pytest.mark.parametrize(("kind", "sampler"), covering(KINDS, EVERY_SAMPLER))
def test_a_call_broken_off_at_some_lines_is_made_whole_by_the_next(kind: str, sampler: str) -> None:
    tried, failed = attack(kind, sampler, range(CELLS.index((kind, sampler)) % 31, 200, often(193, 97)), 1)
    record("an exception at a line of a call that writes, replay", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sampler"), CELLS)
def test_a_call_broken_off_at_any_line_is_made_whole_by_the_next(kind: str, sampler: str) -> None:
    at, of = list(KINDS).index(kind), list(EVERY_SAMPLER).index(sampler)
    # every line for each kind and each sampler, and one in thirty for every pair of them
    events = None if at % len(EVERY_SAMPLER) == of else range((3 * at + of) % 30, 900, 30)
    tried, failed = attack(kind, sampler, events, 2)
    record("an exception at a line of a call that writes, replay", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


# Collecting.


def playing(buffer: RolloutBuffer | ReplayBuffer | None, mode: AutoresetMode) -> Collector:
    """A collector of envs that say in every observation where it is from."""
    endings = tagged_envs.cycle([(3, "truncated"), (2, "terminated")], [(4, "both")])
    return Collector(
        tagged_envs.make_tagged(2, mode, endings),
        tagged_envs.tagged_policy,
        buffer,
        seed=3,
        value_fn=tagged_envs.tagged_value,
    )


TAGGED = Schema({
    "obs": (4,), "action": Field((), torch.int64), "reward": (), "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


def require_true(obs: Any, reward: Any, next_obs: Any) -> None:
    """Every transition happened: the reward is of its step, and the next observation is the one after it."""
    now, after = tagged_envs.decode(obs), tagged_envs.decode(next_obs)
    assert np.array_equal(after.step, now.step + 1)
    for name in ("env", "episode", "seed"):
        assert np.array_equal(getattr(now, name), getattr(after, name)), name
    assert np.array_equal(
        np.asarray(reward), np.asarray(tagged_envs.reward_of(now.env, now.episode, now.step), np.float32)
    )


def collected(kind: str, mode: AutoresetMode, at: int) -> bool:
    """Collect, be broken off, and collect again: everything in the buffer happened."""
    if kind == "rollout":
        rollout = RolloutBuffer(TAGGED.extend(value=()), 5, 2)
        collector = playing(rollout, mode)
        collector.policy = lambda obs: {
            "action": tagged_envs.tagged_policy(obs),
            "value": tagged_envs.tagged_value(obs),
        }
        collector.collect()
        off = broken_off(collector.collect, at)
        assert not off or rollout.steps in (0, 5)
        collector.collect()
        obs = rollout.block["obs"]
        goes_on = ~(rollout["terminated"] | rollout["truncated"]) & rollout["mask"]
        require_true(obs[:-1][goes_on], rollout["reward"][goes_on], obs[1:][goes_on])
        cut = rollout["truncated"] & ~rollout["terminated"] & rollout["mask"]
        after = tagged_envs.decode(obs[:-1][cut])
        want = tagged_envs.value_of(after._replace(step=after.step + 1))
        assert np.array_equal(rollout["final_value"][cut], np.asarray(want, np.float32))
        assert torch.equal(rollout.last["value"], tagged_envs.tagged_value(rollout.last["obs"]))
        return off
    replay = ReplayBuffer(TAGGED, 24, 2, seed=0, sampler=Prioritized())
    collector = playing(None if kind == "steps" else replay, mode)
    chunks = list[Any]()
    collect = collector.collect if kind == "replay" else lambda count: chunks.append(collector.steps(count))
    collect(7)
    off = broken_off(lambda: collect(3), at)
    if kind == "steps" and off and internals.obs(collector) is not None and not internals.under_way(collector):
        collector.reset()  # broken off at the return: the caller knows that a chunk is lost
    for steps in (1, 4, 9):
        while chunks:
            replay.extend(chunks.pop(0))
        replay.check()
        for batch in (replay.data(), replay.sample(16)):
            require_true(batch["obs"], batch["reward"], batch["next_obs"])
        collect(steps)
    return off


@pytest.mark.parametrize(("kind", "mode"), covering(["replay", "rollout", "steps"], AutoresetMode, full=2, quick=1))
@pytest.mark.parametrize("stride", [often(499, 211), pytest.param(3, marks=pytest.mark.slow)])
def test_a_collection_broken_off_at_any_line_leaves_nothing_that_did_not_happen(
    kind: str, mode: AutoresetMode, stride: int
) -> None:
    tried, failed = 0, list[str]()
    for at in range(0, 10**6, stride):
        try:
            off = collected(kind, mode, at)
        except Exception as error:  # whatever comes of it is what this looks for
            failed.append(f"{at}: {type(error).__name__}: {error}")
            off = True
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            failed.append(f"{at}: gradients are off")
        tried += off
        if not off:
            break
    record("an exception at a line of a call that writes, collector", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


@pytest.mark.parametrize("stride", [89, pytest.param(1, marks=pytest.mark.slow)])
def test_appending_a_buffer_that_is_broken_off_joins_nothing_that_did_not_follow(stride: int) -> None:
    other = Twin(2, 12).play("..", ".T", "..", "|", "..", "U.", "..", "..").buffer
    tried, failed = 0, list[str]()
    for at in range(0, 10**6, stride):
        mine = Twin(2, 9, sampler=Prioritized()).play("..", "..", ".T", "..")
        off = broken_off(lambda mine=mine: mine.buffer.append(other), at)
        tried += off
        try:
            for _ in range(2):
                mine.buffer.check()
                for batch in (mine.buffer.data(), mine.buffer.sample(8)):
                    require_true(batch["obs"], batch["reward"], batch["next_obs"])
                mine.interrupt()
                mine.play("..", "..", "B.")
        except Exception as error:  # whatever comes of it is what this looks for
            failed.append(f"{at}: {type(error).__name__}: {error}")
        if not off:
            break
    record("an exception at a line of a call that writes, replay", tried, len(failed))
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


# Signals.


@contextmanager
def armed(seconds: float) -> Iterator[None]:
    """SIGINT after so much time, unless this is over before."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, was)


def signalled(world: Broken, seconds: float, rng: np.random.Generator) -> float | None:
    """Add, extend and rate until a signal comes, and tell the oracle of the steps that are in; or how long it took."""
    before = copy.deepcopy((world.truth, world.lives))
    plays = ["".join(rng.choice(list("....TUB"), 2)) for _ in range(60)]
    steps = [world.step(kinds, final=True) for kinds in plays]
    pairs = [twins.stacked(steps[low : low + 2]) for low in range(0, 30, 2)]
    index, prioritized, began = list(world.known.errors), world.prioritized is not None, time.perf_counter()
    try:
        with armed(seconds):
            for pair in pairs:
                world.buffer.extend(pair)
                if prioritized and index:
                    world.buffer.update_priorities(index[:1], [2.0])
            for step in steps[30:]:
                world.buffer.add(step)
        return time.perf_counter() - began
    except KeyboardInterrupt:
        pass
    world.buffer.interrupt()  # as whoever stops a loop does
    world.truth, world.lives = before
    heads = internals.ring(world.buffer).heads.tolist()
    for kinds in plays:
        for env, letter in enumerate(kinds):
            if len(world.truth.all_rows(env)) < heads[env]:
                world.truth.add(env, **world._dressed(world.lives[env].step(LETTERS[letter])))
    assert world.row_counts(world.truth) == heads, "a step is half in"
    world.cut([0, 1])
    world.drop(4 if internals.ring(world.buffer).store.large else 0)
    return None


def interrupted(kind: str, sampler: str, times: int, seed: int) -> tuple[int, list[str]]:
    """So many signals at random instants; what was wrong afterwards."""
    rng, tried, failed = np.random.default_rng(seed), 0, list[str]()
    longest = min(signalled(prepared(kind, sampler), 1000.0, rng) or 0.0 for _ in range(2))
    for turn in range(20 * times):
        world = prepared(kind, sampler)
        try:
            if signalled(world, float(rng.uniform(1e-5, longest)), rng) is None:
                tried += 1
                world.buffer.check()
                world.check()
                for _ in range(2):
                    if len(world.buffer):
                        world.check_batch(world.buffer.sample(min(5, len(world.buffer))))
        except Exception as error:  # whatever comes of it is what this looks for
            failed.append(f"signal {turn}: {type(error).__name__}: {str(error)[:200]}")
        if tried == times:
            break
    return tried, failed


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [in_ci(*cell) if k % 2 else cell for k, cell in enumerate(CELLS[:: len(EVERY_SAMPLER) - 1])],
)
@pytest.mark.parametrize("times", [often(1, 3), pytest.param(400, marks=pytest.mark.slow)])
def test_a_signal_at_any_instant_leaves_every_step_in_or_out(kind: str, sampler: str, times: int) -> None:
    if "sequences" in kind and "prioritized" in sampler:
        sampler = "uniform"  # errors of sequences come in another shape
    tried, failed = interrupted(kind, sampler, times, times)
    record("SIGINT at a random instant", tried, len(failed))
    assert tried == times
    assert not failed, f"{len(failed)} of {tried}: {failed[:5]}"


def test_a_save_right_after_a_call_that_was_broken_off_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    fields = {"obs": Field((2000,), torch.uint8), "action": Field(()), "reward": Field(())}
    schema = Schema({**fields, "terminated": Field((), torch.bool), "truncated": Field((), torch.bool)})
    replay = ReplayBuffer(schema, 12, 2, sampler=Prioritized(), seed=0)
    none = np.zeros(2, np.bool_)

    def add(t: int) -> None:
        now = np.full(2, t, np.float32)
        image = np.full((2, 2000), t, np.uint8)  # a large field, which is written apart from the others
        replay.add(obs=image, action=now, reward=now, terminated=none, truncated=none)

    at = drawn = 0
    while True:
        for t in range(9):  # what a call that is broken off was about to overwrite can be drawn
            add(t)
        if not broken_off(partial(add, 9), at):
            break
        replay.save(tmp_path / "save")
        batch = ReplayBuffer.load(tmp_path / "save").data()
        assert torch.equal(batch["obs"][:, 0].float(), batch["reward"])
        at, drawn = at + 1, drawn + len(batch)
    assert drawn > at > 10


def test_a_transition_that_came_while_a_call_was_broken_off_has_the_priority_of_a_new_one() -> None:
    """Its place had one before, whose error is known: the sampler may not have been told that it left."""
    at = came = 0
    while True:
        twin = Twin(1, 4, sampler=Prioritized()).play(*"......")
        index = twin.buffer.data()["index"].tolist()
        twin.buffer.update_priorities(index, [0.25, 0.5, 3.0])
        known = dict(zip(index, [0.25, 0.5, 3.0], strict=True))
        step = twin.step("T", final=True)
        if not broken_off(partial(twin.buffer.add, step), at):
            break
        found = twin.buffer.data()["index"].tolist()
        errors = internals.errors(twin.buffer.sampler)[
            internals.ring(twin.buffer).find(np.array(found, np.int64))[0]
        ].tolist()
        assert errors == [known.get(i, 3.0) for i in found], f"at {at}: a new one has the largest"
        twin.buffer.check()
        at, came = at + 1, came + (6 in found)
    assert at > came > 0
