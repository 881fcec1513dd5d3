"""``interrupt(next_obs=...)``: the newest steps are stored as truncated, as if they had been added so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import Field, FrameStack, Lanes, NStep, Prioritized, ReplayBuffer, Schema, Sequence, errors
from relive.batches import leaves_by_path
from support import internals
from support.other_device import place

FLAG = Field((), torch.bool)
REST: dict[str, Any] = {"action": (), "reward": (), "terminated": FLAG, "truncated": FLAG}
PLAIN = Schema({"obs": (2,), **REST})
SCHEMAS = {
    "plain": PLAIN,
    "large": Schema({"obs": Field((3, 40, 40), torch.uint8), **REST}),
    "nested": Schema({"obs": {"a": (2,), "b": Field((), torch.int64)}, **REST}),
    "bfloat16": Schema({"obs": Field((2,), torch.bfloat16), **REST}),
}
N = 2


def rows(schema: Schema, number: float, count: int = N, device: Any = "cpu") -> Any:
    """Observations that say their number."""
    return schema.rebuild(
        "obs",
        lambda path: torch.full(
            (count, *schema.leaves[path].shape), number, dtype=schema.leaves[path].dtype, device=device
        ),
    )


def step(replay: Any, number: float, truncated: bool = False, following: float | None = None) -> dict[str, Any]:
    device = replay.device
    fields = {name: torch.full((N,), float(number), device=device) for name in ("action", "reward")}
    fields |= {"terminated": torch.zeros(N, dtype=torch.bool, device=device)}
    fields |= {"truncated": torch.full((N,), truncated, device=device)}
    fields["obs"] = rows(replay.schema, number, device=device)
    if following is not None and (truncated or replay.own_next_obs):
        fields["next_obs"] = rows(replay.schema, following, device=device)
    return fields


LENGTHS = [3, 1, 5, 2, 4] * 2


def play(replay: Any, late: bool, lengths: list[int] = LENGTHS) -> None:
    """Episodes that are cut: each last step is truncated, or interrupted with what it led to."""
    for episode, length in enumerate(lengths):
        for t in range(length):
            number, last = 10 * episode + t, t == length - 1
            replay.add(step(replay, number, last and not late, number + 1))
        if late:
            replay.interrupt(next_obs=rows(replay.schema, 10 * episode + length, device=replay.device))


def held(replay: Any) -> dict[Any, Any]:
    """What is stored and can be drawn, by index: the order in which steps were completed differs."""
    batch = replay.data()
    order = batch["index"].argsort()
    return {path: leaf[order].cpu().float() for path, leaf in leaves_by_path(batch).items()}


def check_alike(right: Any, found: Any) -> None:
    assert len(right) == len(found)
    one, other = held(right), held(found)
    assert one.keys() == other.keys()
    for name, column in one.items():
        assert torch.equal(column, other[name]), name
    assert other["truncated",].any()
    assert right.stats()["episodes"] == found.stats()["episodes"]
    internals.ring(found).check()


@pytest.mark.parametrize("capacity", [200, 24])  # the ring wraps
@pytest.mark.parametrize("view", [lambda: None, lambda: NStep(3)], ids=["single", "three steps"])
@pytest.mark.parametrize("own_next_obs", [False, True])
@pytest.mark.parametrize("name", [*SCHEMAS])
def test_it_stores_what_a_truncated_step_would_have(name: str, own_next_obs: bool, view: Any, capacity: int) -> None:
    options: dict[str, Any] = {"own_next_obs": own_next_obs, "seed": 0, "check_ends": False}
    right, found = (ReplayBuffer(SCHEMAS[name], capacity, N, view=view(), **options) for _ in range(2))
    play(right, late=False)
    play(found, late=True)
    check_alike(right, found)


@pytest.mark.parametrize("view", [lambda: Sequence(2), lambda: Sequence(3, burn_in=1), lambda: FrameStack(2)])
def test_sequences_and_stacks_end_with_it(view: Any) -> None:
    right, found = (ReplayBuffer(PLAIN, 60, N, view=view(), seed=0, check_ends=False) for _ in range(2))
    play(right, late=False)
    play(found, late=True)
    assert len(right) == len(found)
    for env in range(N):
        one, other = right.slice(env), found.slice(env)
        complete = one["complete"]
        for name in one.keys():
            at = slice(None) if name in ("complete", "index", "obs") else complete  # a boundary row has nothing else
            assert torch.equal(one[name][at], other[name][at]), name
    internals.ring(found).check()


def test_a_sampler_by_priority_gets_them(tmp_path: Path) -> None:
    right, found = (
        ReplayBuffer(PLAIN, 60, N, sampler=Prioritized(), view=NStep(2), seed=0, check_ends=False) for _ in range(2)
    )
    play(right, late=False)
    play(found, late=True)
    for replay in (right, found):
        replay.update_priorities(replay.data()["index"], replay.data()["action"])
    index = right.data()["index"]
    assert torch.equal(right.priorities(index), found.priorities(index))
    found.save(tmp_path / "save")
    check_alike(right, ReplayBuffer.load(tmp_path / "save"))


def test_a_replay_in_files_keeps_them(tmp_path: Path) -> None:
    right = ReplayBuffer(PLAIN, 60, N, seed=0, check_ends=False)
    play(right, late=False)
    with ReplayBuffer.open(tmp_path / "files", PLAIN, capacity=60, num_envs=N, seed=0, check_ends=False) as found:
        play(found, late=True)
        check_alike(right, found)
    with ReplayBuffer.open(tmp_path / "files") as again:
        check_alike(right, again)


def test_a_replay_on_a_device_does_the_same() -> None:
    with place("stand-in") as device:
        right, found = (ReplayBuffer(PLAIN, 60, N, seed=0, check_ends=False, device=device) for _ in range(2))
        play(right, late=False)
        play(found, late=True)
        check_alike(right, found)


def test_only_the_envs_that_it_names_and_whose_episodes_are_under_way_are_completed() -> None:
    replay = ReplayBuffer(PLAIN, 60, N, seed=0, check_ends=False)
    replay.interrupt(next_obs=np.zeros((N, 2), np.float32))  # nothing is stored yet
    replay.add(step(replay, 0))
    replay.interrupt([1], next_obs=np.full((1, 2), 1, np.float32))
    assert replay.data()["index"].tolist() == [1]
    replay.add(step(replay, 5))
    batch = replay.data()
    assert batch["index"].tolist() == [1, 0]
    assert batch["next_obs"][:, 0].tolist() == [1, 5]
    assert batch["truncated"].tolist() == [True, False]
    replay.interrupt(next_obs=np.full((N, 2), 6, np.float32))
    replay.interrupt(next_obs=np.full((N, 2), 7, np.float32))  # no episode is under way any more
    assert sorted(replay.data()["next_obs"][:, 0].tolist()) == [1, 5, 6, 6]
    loose = ReplayBuffer(PLAIN, 60, N, ordered=False, seed=0)
    loose.add(step(loose, 0, following=1))
    loose.interrupt(next_obs=np.zeros((N, 2), np.float32))  # no episodes at all
    assert not loose.data()["truncated"].any()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    replay = ReplayBuffer(PLAIN, 60, N, seed=0, check_ends=False, debug=True)
    replay.add(step(replay, 0))
    replay.add(step(replay, 1))
    before = replay.state_dict() if hasattr(replay, "state_dict") else len(replay)
    with pytest.raises(errors.ShapeError, match=r"'next_obs': expected shape \(2, 2\)"):
        replay.interrupt(next_obs=np.zeros((N, 3), np.float32))
    with pytest.raises(errors.ShapeError, match=r"'next_obs': expected shape \(1, 2\)"):
        replay.interrupt([0], next_obs=np.zeros((N, 2), np.float32))
    with pytest.raises(errors.NotFiniteError, match="obs"):
        replay.interrupt(next_obs=np.full((N, 2), np.nan, np.float32))
    assert (replay.state_dict() if hasattr(replay, "state_dict") else len(replay)) == before
    replay.add(step(replay, 2))  # the episodes go on
    assert len(replay) == 4


@pytest.mark.parametrize("own_next_obs", [False, True])
@pytest.mark.parametrize("name", [*SCHEMAS])
def test_a_writer_of_a_lane_does_the_same(name: str, own_next_obs: bool) -> None:
    options: dict[str, Any] = {"own_next_obs": own_next_obs, "seed": 0, "check_ends": False}
    right, found = (ReplayBuffer(SCHEMAS[name], 200, N, **options) for _ in range(2))
    play(right, late=False)
    lanes = Lanes(SCHEMAS[name], 1, N, steps=64, own_next_obs=own_next_obs)
    with lanes.writer(0) as writer:
        writer.interrupt(next_obs=rows(SCHEMAS[name], 9))  # no episode is under way
        play(writer, late=True)
        writer.interrupt(next_obs=rows(SCHEMAS[name], 9))  # nor here
    assert lanes.drain(found) == sum(LENGTHS) * N
    check_alike(right, found)


def test_a_writer_refuses_what_does_not_fit() -> None:
    lanes = Lanes(PLAIN, 1, N, steps=8, debug=True)
    with lanes.writer(0) as writer:
        writer.add(step(writer, 0))
        with pytest.raises(errors.ShapeError, match="'obs': expected shape"):
            writer.interrupt(next_obs=np.zeros((N, 3), np.float32))
        with pytest.raises(errors.NotFiniteError, match="obs"):
            writer.interrupt(next_obs=np.full((N, 2), np.nan, np.float32))
        writer.add(step(writer, 1))  # the episodes go on
        replay = ReplayBuffer(PLAIN, 60, N, seed=0, check_ends=False)
        lanes.drain(replay)
    assert len(replay) == N
    with pytest.raises(errors.LifecycleError, match="closed"):
        writer.interrupt(next_obs=np.zeros((N, 2), np.float32))
