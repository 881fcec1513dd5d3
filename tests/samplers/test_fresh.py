"""Fresh: each new transition or window once, the first completed first, and the rest as the inner sampler draws it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relive import (
    Field,
    FrameStack,
    Fresh,
    Mixture,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Sequence,
    Uniform,
    WithoutReplacement,
)
from relive.errors import EmptyError, FileFormatError, LifecycleError, ParameterError
from support import internals
from support.cases import covering
from support.effort import often
from support.interrupts import broken_off
from support.twins import Twin, same_batches

INNER: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "without replacement": WithoutReplacement,
    "prioritized": lambda: Prioritized(beta=(0.4, 1.0, 9)),
    "recent": lambda: Recent(0.9, 3),
    "recent, prioritized": lambda: Recent(0.9, 3, inner=Prioritized(normalize="buffer")),
}
VIEWS: dict[str, Callable[[], Any]] = {
    "transitions": lambda: NStep(1, 0.5),
    "3-step": lambda: NStep(3, 0.5),
    "stacks": lambda: FrameStack(3, NStep(2, 0.5)),
    "sequences": lambda: Sequence(4, gamma=0.5),
    "sequences, half shared, whole ones": lambda: Sequence(4, 1, "half", gamma=0.5, drop_tail=True),
    "sequences by episodes": lambda: Sequence(2, gamma=0.5, weigh="episodes"),
}


class Served:
    """A twin with a sampler, one whose sampler is the inner one alone, and a list of what was served as new."""

    def __init__(self, inner: Callable[[], Any], view: Callable[[], Any], num_envs: int = 2, rows: int = 20) -> None:
        self.twin = Twin(num_envs, rows, sampler=Fresh(inner()), view=view())
        self.plain = Twin(num_envs, rows, sampler=inner(), view=view())
        self.came, self.done, self.fresh = set[int](), set[int](), list[list[int]]()

    @property
    def waiting(self) -> list[int]:
        return [index for row in self.twin.anchors() if (index := self.twin.truth.index(row)) not in self.done]

    def play(self, *plays: str) -> Served:
        for kinds in plays:
            self.twin.play(kinds)
            self.plain.play(kinds)
            self.came |= {self.twin.truth.index(row) for row in self.twin.anchors()}
        return self

    def sample(self, count: int) -> Any:
        """A batch, whose new rows are those of the list, and whose others are those of the inner sampler alone."""
        wanted, key = self.waiting[:count], internals.progress(self.plain.buffer)
        batch = self.twin.buffer.sample(count)
        index = batch["index"].tolist()
        assert index[: len(wanted)] == wanted
        if len(wanted) < count:
            rest = self.plain.buffer.sample(count - len(wanted))
            assert index[len(wanted) :] == rest["index"].tolist()
            for name in {"weight", "probability"} & rest.keys():
                assert torch.equal(
                    batch[name], torch.cat([torch.ones(len(wanted), dtype=rest[name].dtype), rest[name]])
                )
        else:
            key.draws += 1
            assert all((batch[name] == 1).all() for name in {"weight", "probability"} & batch.keys())
        self.twin.check_batch(batch)
        self.done |= {*wanted}
        self.fresh.append(wanted)
        return batch

    def check(self) -> None:
        sampler, waiting = self.twin.buffer.sampler, self.waiting
        assert (sampler.served, sampler.waiting) == (len(self.done), len(waiting))
        assert sampler.lost == len(self.came - self.done - {*waiting})


def letters(rng: np.random.Generator, num_envs: int) -> str:
    chance = rng.random()
    return "x" if chance < 0.02 else "|" if chance < 0.08 else "".join(rng.choice(list(".....TU"), num_envs))


@pytest.mark.parametrize(("inner", "view"), covering(INNER, VIEWS, full=2, quick=1))
@pytest.mark.parametrize("seed", range(often(3, 1)))
def test_each_that_is_new_comes_once_in_the_order_of_completion_and_the_rest_is_that_of_the_inner_sampler(
    inner: str, view: str, seed: int
) -> None:
    if inner not in ("uniform", "recent") and "episodes" in view:
        pytest.skip("only Uniform weighs by episodes")
    rng = np.random.default_rng([seed, *f"{inner}{view}".encode()])
    num_envs = int(rng.integers(1, 4))
    world = Served(INNER[inner], VIEWS[view], num_envs, int(rng.integers(8, 25)))
    for _ in range(120):
        world.play(*(letters(rng, num_envs) for _ in range(rng.integers(0, 5))))
        anchors = len(world.twin.anchors())
        if anchors:
            most = anchors if inner == "without replacement" else 12
            world.sample(int(rng.integers(1, most + 1)))
        world.check()
    batches = [index for batch in world.fresh for index in batch]
    assert len({*batches}) == len(batches) > 20


def test_a_window_that_an_interruption_ends_is_new_although_later_rows_of_other_envs_were_served() -> None:
    world = Served(Uniform, lambda: Sequence(4, overlap="none"))
    world.play(*[".."] * 7)
    assert len(world.sample(9)["index"]) == 9
    world.play("|")  # ends the second window of each env after two steps
    assert len(world.waiting) == 2
    world.sample(3)
    world.play(*[".."] * 5)
    world.sample(3)
    assert [len(new) for new in world.fresh] == [2, 2, 2]
    world.check()


def test_more_than_a_batch_holds_wait_and_what_is_overwritten_meanwhile_is_lost_and_counted() -> None:
    world = Served(Uniform, lambda: NStep(1), rows=6)
    world.play(*[".."] * 5)
    assert world.twin.buffer.sampler.waiting == 8
    world.sample(3)
    world.play(*[".."] * 4)
    assert (world.twin.buffer.sampler.served, world.twin.buffer.sampler.lost) == (3, 3)
    for _ in range(4):
        world.sample(3)
        world.check()
    assert [len(new) for new in world.fresh] == [3, 3, 3, 3, 1]


def test_a_view_with_other_windows_is_served_what_ends_after_the_last_that_was_served() -> None:
    twin = Twin(1, 40, sampler=Fresh(), view=NStep(1))
    twin.play(*["."] * 10)
    twin.buffer.sample(5)  # steps 0 to 4
    twin.buffer.view = Sequence(4, overlap="none")
    assert twin.buffer.sampler.waiting == 1
    assert twin.buffer.sample(2)["index"][0] == 7
    assert (twin.buffer.sampler.served, twin.buffer.sampler.lost) == (6, 0)


def test_what_was_skipped_is_not_new() -> None:
    twin = Twin(2, 9, sampler=Fresh()).play(*[".."] * 30)
    sampler = twin.buffer.sampler
    assert sampler.lost > 0
    sampler.skip()
    assert (sampler.served, sampler.waiting, sampler.lost) == (0, 0, 0)
    twin.play("..")  # completes the newest row of each env, which was not complete
    assert sampler.waiting == 2
    assert twin.buffer.sample(4)["index"][:2].tolist() == [58, 59]
    with pytest.raises(LifecycleError, match="skip: this sampler has no replay yet"):
        Fresh().skip()


def test_there_is_nothing_to_draw_from_an_empty_replay_and_nothing_counts_as_served() -> None:
    twin = Twin(1, 9, sampler=Fresh())
    with pytest.raises(EmptyError, match="there is no complete transition to draw"):
        twin.buffer.sample(2)
    assert (Fresh().waiting, Fresh().lost, Fresh().served) == (0, 0, 0)
    epochs = Twin(1, 9, sampler=Fresh(WithoutReplacement())).play(*"....")
    with pytest.raises(ParameterError, match="there are 3 transitions to draw without replacement"):
        epochs.buffer.sample(7)
    assert epochs.buffer.sampler.waiting == 3
    assert epochs.buffer.sample(6)["index"][:3].tolist() == [0, 1, 2]


@pytest.mark.parametrize("inner", [Fresh(), 3, Uniform])
def test_other_inner_samplers_are_refused(inner: Any) -> None:
    with pytest.raises(ParameterError, match=r"Fresh: inner is Uniform\(\), Prioritized\(\), Recent\(\) or Without"):
        Fresh(inner)
    with pytest.raises(AttributeError):
        Fresh().inner = Uniform()  # pyright: ignore[reportAttributeAccessIssue]
    assert repr(Fresh(Recent(0.9, 3))) == "Fresh(Recent(0.9, 3, inner=Uniform(), adapt=False))"


# Saves, copies, files.


def halfway(inner: str, view: str) -> Served:
    rng = np.random.default_rng([*f"{inner}{view}".encode()])
    world = Served(INNER[inner], VIEWS[view], 2, 20)
    for _ in range(15):
        world.play(*("".join(rng.choice(list("........TU"), 2)) for _ in range(4)))
        if world.twin.anchors():
            world.sample(1)
    return world


COPIES: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda buffer, path: (buffer.save(path / "s"), ReplayBuffer.load(path / "s"))[1],
    "pickle": lambda buffer, path: pickle.loads(pickle.dumps(buffer)),
    "deepcopy": lambda buffer, path: copy.deepcopy(buffer),
}


@pytest.mark.parametrize(("inner", "view", "how"), covering(INNER, [*VIEWS][:5], COPIES, full=2, quick=1))
def test_a_copy_goes_on_with_the_same_batches_and_counts(inner: str, view: str, how: str, tmp_path: Path) -> None:
    buffer = halfway(inner, view).twin.buffer
    again = COPIES[how](buffer, tmp_path)
    mine, theirs = buffer.sampler, again.sampler
    assert mine.waiting > 2
    for _ in range(5):
        assert (mine.served, mine.waiting, mine.lost) == (theirs.served, theirs.waiting, theirs.lost)
        assert same_batches(buffer.sample(3), again.sample(3))


def test_a_smaller_capacity_loses_what_it_has_no_room_for(tmp_path: Path) -> None:
    world = Served(Uniform, lambda: NStep(1), 2, 20).play(*[".."] * 12)
    world.sample(2)
    world.twin.buffer.save(tmp_path / "s")
    again = ReplayBuffer.load(tmp_path / "s", capacity=12)
    assert (again.sampler.served, again.sampler.waiting, again.sampler.lost) == (2, 10, 10)
    assert again.sample(10)["index"].tolist() == world.waiting[-10:]


def test_transitions_that_are_dealt_to_other_envs_wait_in_their_order(tmp_path: Path) -> None:
    twin = Twin(2, 20, sampler=Fresh(), ordered=False).play(*[".."] * 12)
    twin.buffer.sample(9)
    waiting = twin.buffer.data()["obs"][9:]
    twin.buffer.save(tmp_path / "s")
    again = ReplayBuffer.load(tmp_path / "s", num_envs=3)
    assert (again.sampler.served, again.sampler.waiting, again.sampler.lost) == (9, 15, 0)
    assert torch.equal(again.sample(15)["obs"], waiting)
    again.save(tmp_path / "s")
    assert ReplayBuffer.load(tmp_path / "s", num_envs=2).sampler.waiting == 0


def test_all_that_another_sampler_stored_is_new_until_it_is_skipped(tmp_path: Path) -> None:
    twin = Twin(2, 9, sampler=Uniform()).play(*[".."] * 12)
    twin.buffer.save(tmp_path / "s")
    again = ReplayBuffer.load(tmp_path / "s", sampler=Fresh())
    assert (again.sampler.served, again.sampler.waiting, again.sampler.lost) == (0, 16, 0)
    again.sampler.skip()
    assert again.sampler.waiting == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("served", -1), ("came", 0.5), ("waiting", None), ("completed", 2**63), ("next", np.array([-1]))],
)
def test_a_state_that_no_sampler_has_is_refused(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Fresh.state_dict
    monkeypatch.setattr(Fresh, "state_dict", lambda self: state(self) | {name: value})
    Twin(1, 9, sampler=Fresh()).play(*"..").buffer.save(tmp_path / "s")
    with pytest.raises(FileFormatError, match=f"the sampler's '{name}' is"):
        ReplayBuffer.load(tmp_path / "s")


FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = Schema({"obs": (), "reward": (), **FLAGS})


def step(number: int, num_envs: int = 2) -> dict[str, Any]:
    none = np.zeros(num_envs, np.bool_)
    numbers = np.full(num_envs, number, np.float32)
    return {"obs": numbers, "reward": numbers, "terminated": none, "truncated": none}


def opened(path: Path, **options: Any) -> Any:
    return ReplayBuffer.open(path, SCHEMA, 60, 2, check_ends=False, **options)


@pytest.mark.parametrize("inner", INNER)
def test_a_replay_in_files_goes_on_where_it_was_closed(inner: str, tmp_path: Path) -> None:
    replay = opened(tmp_path, sampler=Fresh(INNER[inner]()), seed=0)
    plain = ReplayBuffer(SCHEMA, 60, 2, check_ends=False, sampler=Fresh(INNER[inner]()), seed=0)
    for number in range(80):
        for one in (replay, plain):
            one.add(step(number))
        if number > 3 and number % 3:
            batch, other = replay.sample(4), plain.sample(4)
            assert same_batches(batch, other)
            for one in (replay, plain) if plain.has_priorities else ():
                one.update_priorities(batch["index"], batch["reward"])
        if number % 20 == 19:
            replay.close()
            replay = opened(tmp_path)
            assert repr(replay.sampler) == repr(plain.sampler)
            mine, theirs = replay.sampler, plain.sampler
            assert (mine.served, mine.waiting, mine.lost) == (theirs.served, theirs.waiting, theirs.lost)
    replay.close()


def killed(path: Path, flushed: int, served: int, inner: str) -> None:
    """Leave files as a killed process does."""
    replay = opened(path, sampler=Fresh(INNER[inner]()), seed=0)
    for number in range(11):
        replay.add(step(number))
    for count, many in ((2, flushed), (2, served - flushed)):
        for _ in range(many):
            batch = replay.sample(count)
            if replay.has_priorities:
                replay.update_priorities(batch["index"], batch["reward"] + 5)
        if many == flushed:
            replay.flush()
    internals.durable(replay).allocator.directory.release()  # without a flush


@pytest.mark.parametrize("inner", INNER)
def test_after_a_kill_what_was_served_since_the_last_flush_comes_again_and_nothing_is_missing(
    inner: str, tmp_path: Path
) -> None:
    killed(tmp_path, 3, 7, inner)
    replay = opened(tmp_path)
    assert internals.progress(replay).draws == 7
    assert (replay.sampler.served, replay.sampler.waiting, replay.sampler.lost) == (6, 14, 0)
    if replay.has_priorities:  # they are those of the kill, not of the flush
        data = replay.data()
        error = replay.sampler.prioritized.state_dict()["errors"]
        places, _ = internals.ring(replay).find(data["index"].numpy())
        assert error[places][:14].tolist() == pytest.approx((data["reward"][:14] + 5).tolist())
    assert replay.sample(14)["obs"].tolist() == [number for number in range(3, 10) for _ in range(2)]
    replay.close()


def test_windows_that_a_kill_ends_are_new_and_what_is_lost_later_is_counted(tmp_path: Path) -> None:
    replay = opened(tmp_path, sampler=Fresh(), view=Sequence(4, overlap="none"), seed=0)
    for number in range(7):
        replay.add(step(number))
    replay.sample(1)
    replay.flush()
    replay.sample(1)
    for number in range(7, 12):
        replay.add(step(number))
    internals.durable(replay).allocator.directory.release()
    with opened(tmp_path) as again:  # of each env: two windows, and the three steps of one that the kill ended
        assert (again.sampler.served, again.sampler.waiting, again.sampler.lost) == (1, 5, 0)
        assert again.sample(5)["lengths"].tolist() == [5, 5, 5, 4, 4]  # with the row after
        for number in range(50):
            again.add(step(number))
        assert again.sampler.lost + again.sampler.waiting == 2 * 12
        assert again.sampler.lost > 0


def test_rows_that_come_after_a_power_cut_are_new_although_the_state_is_of_later() -> None:
    one, other = (Twin(1, 30, sampler=Fresh()).play(*["."] * steps) for steps in (12, 6))
    one.buffer.sample(11)
    other.interrupt()
    other.buffer.sampler.load_state_dict(one.buffer.sampler.state_dict())
    assert other.buffer.sampler.waiting == 0
    other.play(*["."] * 4)
    assert other.buffer.sampler.waiting == 3


# The ways in which batches are made.


def test_the_rows_of_the_next_batch_are_those_that_wait_and_those_that_the_inner_sampler_would_draw() -> None:
    twin = Twin(2, 60, sampler=Fresh(Prioritized()), view=NStep(1)).play(*[".."] * 20)
    sampler, ring = twin.buffer.sampler, internals.ring(twin.buffer)
    twin.buffer.sample(36)
    twin.buffer.sample(2)
    assert len(sampler.likely(ring, 8, 5, 1, 1)) == 6  # as many new ones are expected as came last: 2
    twin.play("..", "..")
    assert sampler.likely(ring, 8, 5, 1, 1).tolist() == sampler.draw(8, 5, 1, 1)[0].tolist()
    twin.play(*[".."] * 20)
    assert sampler.likely(ring, 8, 5, 1, 1).tolist() == sampler.draw(8, 5, 1, 1)[0].tolist()
    assert sampler.served == 50


def test_batches_drawn_ahead_that_nobody_took_are_drawn_again() -> None:
    twin, plain = (Twin(2, 30, sampler=Fresh(), view=NStep(1)).play(*[".."] * 20) for _ in range(2))
    served = twin.buffer.serve(5, depth=3)
    for _ in range(2):
        assert same_batches(next(served), plain.buffer.sample(5))
    served.close()
    for one in (twin, plain):
        one.play("..")
    for _ in range(4):
        assert same_batches(twin.buffer.sample(5), plain.buffer.sample(5))
    assert (twin.buffer.sampler.served, twin.buffer.sampler.lost) == (30, 0)


@pytest.mark.parametrize("view", VIEWS)
def test_memory_that_is_used_in_turn_has_the_same_batches(view: str) -> None:
    one, other = (halfway("uniform", view).twin.buffer for _ in range(2))
    for mine, theirs in zip(one.batches(6, 2, reuse=True), other.batches(6, 2), strict=True):
        assert same_batches(mine, theirs)
    assert one.sampler.served == other.sampler.served


def test_a_mixture_has_the_new_rows_of_each_of_its_buffers() -> None:
    buffers = {name: Twin(2, 30, sampler=Fresh()).play(*[".."] * 6).buffer for name in ("own", "human")}
    buffers["old"] = Twin(2, 30, sampler=Uniform()).play(*[".."] * 6).buffer
    mixture = Mixture(buffers, {"own": 0.5, "human": 0.25, "old": 0.25})
    batch = mixture.sample(16)
    assert batch["index"][:8].tolist() == [*range(8)]
    assert batch["index"][8:12].tolist() == [*range(4)]
    assert [buffers[name].sampler.served for name in ("own", "human")] == [8, 4]


@pytest.mark.parametrize("view", ["transitions", "sequences"])
def test_an_addition_that_an_exception_breaks_off_leaves_no_new_one_out_and_serves_none_twice(view: str) -> None:
    at, again = 0, True
    while again:
        twin = Twin(2, 30, sampler=Fresh(), view=VIEWS[view]()).play(*[".."] * 9, "T.", *[".."] * 6)
        buffer, sampler = twin.buffer, twin.buffer.sampler
        served = buffer.sample(min(3, sampler.waiting))["index"].tolist()
        again = broken_off(partial(twin.play, "T.", *[".."] * 6), at)
        at += often(23, 5)
        buffer.add(twin.step(".."))
        served += buffer.sample(sampler.waiting)["index"].tolist()
        assert sorted(served) == sorted(buffer.data()["index"].tolist())
        assert (sampler.served, sampler.waiting, sampler.lost) == (len(served), 0, 0)
        came = set[int]()
        for _ in range(40):
            buffer.add(twin.step(".."))
            came |= {*buffer.data()["index"].tolist()}
        came -= {*served}
        assert sampler.lost == len(came) - sampler.waiting > 0


@pytest.mark.parametrize("way", ["sample", "batches", "in turn"])
@pytest.mark.parametrize("frames", [False, True])
def test_new_rows_of_a_batch_that_cannot_be_read_are_served_by_the_next(frames: bool, way: str) -> None:
    fails = [False]

    def doubled(reward: Any) -> Any:
        if fails[0]:
            raise ArithmeticError
        return 2 * reward

    inner = NStep(2, 0.9, each_reward=doubled)
    schema = Schema({"obs": (1,), "reward": (), **dict.fromkeys(("terminated", "truncated"), Field((), torch.bool))})
    replay = ReplayBuffer(schema, 100, sampler=Fresh(), view=FrameStack(2, inner) if frames else inner, seed=0)
    for t in range(12):
        replay.add(obs=[[t]], reward=[1.0], terminated=[False], truncated=[False])
    waiting = replay.sampler.waiting
    fails[0] = True
    with pytest.raises(ArithmeticError):
        replay.sample(4) if way == "sample" else next(iter(replay.batches(2, 4, reuse=way == "in turn")))
    fails[0] = False
    assert (replay.sampler.served, replay.sampler.waiting) == (0, waiting)
    assert replay.sample(4)["index"].tolist() == [0, 1, 2, 3]
