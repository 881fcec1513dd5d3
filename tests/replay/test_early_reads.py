"""The rows of the next batch are asked for early: predictions, questions, and that no batch depends on them."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive
from definitions import pages as definition
from relive import (
    Field,
    FrameStack,
    NStep,
    Prioritized,
    Recent,
    ReplayBuffer,
    Schema,
    Uniform,
    WithoutReplacement,
    core,
)
from relive.core import key as stream
from relive.memory.mapped import QUIET_LOOKS, LookAhead, can_look_ahead
from relive.samplers.contract import likely_places
from support import internals
from support.cases import covering
from support.replays import assert_equal, rate

pytestmark = pytest.mark.skipif(not can_look_ahead(), reason="this system takes no advice")

FLAGS = {name: Field((), torch.bool) for name in ("terminated", "truncated")}
SCHEMA = Schema({"obs": (3,), "reward": (), **FLAGS})
IMAGES = Schema({"obs": Field((40, 40), torch.uint8), "reward": (), **FLAGS})

SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": Uniform,
    "without replacement": WithoutReplacement,
    "prioritized": Prioritized,
    "recent": lambda: Recent(0.9, 20),
    "recent, prioritized": lambda: Recent(0.9, 20, inner=Prioritized()),
}
VIEWS: dict[str, Callable[[], Any]] = {
    "3-step": lambda: NStep(3, gamma=0.5),
    "stacks": lambda: FrameStack(3),
    "sequences": lambda: relive.Sequence(4, burn_in=1),
}


def step(number: int, images: bool = False) -> dict[str, Any]:
    ends = np.array([number % 9 == 8, number % 7 == 6])
    obs = np.full((2, 40, 40), number % 251, np.uint8) if images else np.full((2, 3), number, np.float32)
    flags = {"terminated": ends, "truncated": np.zeros(2, bool)}
    return {"obs": obs, "next_obs": obs, "reward": np.full(2, number, np.float32), **flags}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch looks ahead, as if rows were always missing."""
    monkeypatch.setattr(LookAhead, "is_wanted", lambda self: True)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("sampler", "view"), covering(SAMPLERS, VIEWS))
def test_batches_are_those_of_a_replay_in_memory(sampler: str, view: str, tmp_path: Path) -> None:
    images = view == "stacks"
    schema = IMAGES if images else SCHEMA

    def options() -> Any:
        return {"sampler": SAMPLERS[sampler](), "view": VIEWS[view](), "check_ends": False, "seed": 2}

    replay = ReplayBuffer.open(tmp_path / "r", schema, 120, 2, **options())
    twin = ReplayBuffer(schema, 120, 2, **options())
    for number in range(150):
        for one in (replay, twin):
            one.add(step(number, images))
        if number > 40 and number % 3 == 0:
            for batch, other in zip(replay.batches(2, 6), twin.batches(2, 6), strict=True):
                assert_equal(batch, other)
                rate(replay, batch)
                rate(twin, other)
    assert replay.stats() == twin.stats()
    replay.close()


@pytest.mark.parametrize("name", ["uniform", "without replacement", "prioritized", "recent"])
@pytest.mark.parametrize("length", [1, 4])
def test_a_guess_is_what_is_drawn_if_nothing_comes_between(name: str, length: int) -> None:
    view = NStep(1) if length == 1 else relive.Sequence(length)
    replay = ReplayBuffer(SCHEMA, 120, 2, sampler=SAMPLERS[name](), view=view, check_ends=False, seed=0)
    assert likely_places(internals.sampler(replay), internals.ring(replay), 4, 1, 1, 1) is None
    for number in range(100):
        replay.add(step(number))
    if name == "prioritized":
        rate(replay, replay.sample(6))
    if name == "recent" and length > 1:
        assert likely_places(internals.sampler(replay), internals.ring(replay), 6, 1, 1, 2) is None
        return
    right = total = 0
    for update in (1, 2) * 6:
        key = stream(0, internals.progress(replay).draws)
        before = internals.sampler(replay).draw_state()
        guessed = likely_places(internals.sampler(replay), internals.ring(replay), 6, key, update, 2)
        assert np.array_equal(internals.sampler(replay).draw_state(), before)
        drawn, _ = internals.sampler(replay).draw(6, key, update, 2)
        internals.progress(replay).draws += 1
        if name == "without replacement" and not len(before):
            continue
        assert guessed is not None
        places = drawn[: len(guessed)]
        again = internals.ring(replay).stamp[guessed] < 0  # rows that cannot be drawn are drawn again
        right, total = right + int((guessed == places).sum()), total + len(guessed)
        assert (guessed == places)[~again].all()
    assert right > 0.7 * total > 0


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[tuple[Any, Callable[[], object]]]:
    """A mapped file of 300 pages, and what puts them out of memory."""
    size = 300 * mmap.PAGESIZE
    with (tmp_path / "file").open("w+b") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        memory = mmap.mmap(file.fileno(), size)

        def put_out() -> None:
            memory.madvise(21)  # MADV_PAGEOUT
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        memory.madvise(mmap.MADV_RANDOM)
        yield np.frombuffer(memory, np.uint8), put_out


def test_pages_are_asked_for_as_defined(mapped: Any) -> None:
    array, put_out = mapped
    first, second = array[: len(array) // 100 * 100].reshape(-1, 100), array[7 * mmap.PAGESIZE :].reshape(-1, 4096)
    begins, ends = np.array([0, 80, 4000, 5], np.int64), np.array([1, 85, 11_000, 5], np.int64)
    small, none = (begins[:2], ends[:2]), np.empty(0, np.int64)
    for _ in range(40):  # the system may bring pages by itself, between putting them out and asking
        found = list[list[int]]()
        for pages in (core.Pages, definition.Pages):
            one, both = pages([first]), pages([first, second])
            assert array.sum()  # reads all of it, and so waits until it is there: only then can it be put out
            put_out()
            missing = one.ask_for(begins, ends)
            assert array.sum()
            found.append([missing, one.ask_for(begins, ends)])
            put_out()
            found[-1] += [both.ask_for(*each) for each in (small, (none, none))]
        if found[0] == found[1] and found[0][0] in (0, 175) and found[0][2] in (0, 9):
            break
    assert found[0] == found[1]
    assert found[0][1:2] + found[0][3:] == [0, 0]
    if found[0][0]:  # some file systems keep what they are told to put out
        assert found[0] == [1 + 2 + 172, 0, 1 + 2 + 1 + 5, 0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fresh memory is looked at as Linux does it")
def test_of_very_many_pages_none_is_left_out() -> None:
    count = 600
    memory = mmap.mmap(-1, count * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(15)  # MADV_NOHUGEPAGE: only the pages that are written to are there
    array, there = np.frombuffer(memory, np.uint8), np.array([0, 3, 255, 256, 300, 511, 512, 599])
    array[there * mmap.PAGESIZE + 5] = 1
    begins, ends = np.array([1, 3 * mmap.PAGESIZE + 1]), np.array([len(array), 514 * mmap.PAGESIZE])
    missing = [pages([array]).ask_for(begins, ends) for pages in (core.Pages, definition.Pages)]
    assert missing[0] == missing[1]
    assert missing[0] in (0, count - 8 + 511 - 6)  # some systems say that all memory is there


def test_only_rows_that_exist_are_asked_for() -> None:
    rows = np.zeros((5, 3), np.uint8)
    pages = core.Pages([rows, np.zeros((4, 2, 3), np.float32)])
    assert pages.row_bytes == 3 + 24
    for begins, ends in (([-1], [2]), ([0], [5]), ([0, 1], [2])):
        with pytest.raises((IndexError, ValueError), match="rows"):
            pages.ask_for(np.array(begins, np.int64), np.array(ends, np.int64))
    with pytest.raises(TypeError, match="one piece"):
        core.Pages([rows[:, ::2]])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_replay_that_looked_ahead_is_free_at_once(how: str, tmp_path: Path) -> None:
    threads = threading.active_count()
    replay = ReplayBuffer.open(tmp_path / "r", SCHEMA, 60, 2, check_ends=False, seed=0)
    for number in range(20):
        replay.add(step(number))
    replay.sample(4)
    mapping = weakref.ref(replay)
    if how == "close":
        replay.close()
    del replay
    gc.collect()
    assert mapping() is None
    assert threading.active_count() == threads
    ReplayBuffer.open(tmp_path / "r").close()


def test_it_looks_ahead_only_while_rows_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert internals.prefetch(ReplayBuffer(SCHEMA, 60, 2)) is None
    with ReplayBuffer.open(tmp_path / "r", SCHEMA, 60, 2, check_ends=False, seed=0) as replay:
        for number in range(40):
            replay.add(step(number))
        allocator: Any = internals.ring(replay).store.allocator
        prefetch = internals.prefetch(replay)
        assert prefetch is not None
        ask = prefetch.ahead.ask
        waits = 5  # this thread may wait for the disk at any time, on a machine that lacks memory
        usage = type("Usage", (), {"ru_majflt": property(lambda self: waits)})
        monkeypatch.setattr("resource.getrusage", lambda who: usage())
        replay.sample(4)
        asked = list[int]()
        monkeypatch.setattr(prefetch.ahead, "ask", lambda *rows: asked.append(ask(*rows)))
        replay.sample(4)
        assert not asked
        assert not allocator.random
        waits = 6  # the thread of this batch waited for the disk
        for _ in range(3 * QUIET_LOOKS):
            replay.sample(4)
            if not allocator.random:
                break
            assert asked
        else:
            pytest.fail("it never ended, although nothing was missing")
        assert asked[-QUIET_LOOKS:] == [0] * QUIET_LOOKS
        waits = 7
        replay.sample(4)
        assert allocator.random
        replay.stats()  # reads all rows in order
        assert not allocator.random


def test_the_first_look_after_a_pause_does_not_ask_for_all_that_came_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReplayBuffer.open(tmp_path / "r", SCHEMA, 4000, 2, check_ends=False, seed=0) as replay:
        prefetch, most = internals.prefetch(replay), list[int]()
        assert prefetch is not None
        monkeypatch.setattr(prefetch, "_written", lambda: (np.empty(0, np.int64),) * 2)
        monkeypatch.setattr(prefetch.ahead, "ask", lambda begins, ends: most.append(int((ends - begins).max())))
        for wanted in (False, True, True, False, True):
            monkeypatch.setattr(LookAhead, "is_wanted", lambda self, wanted=wanted: wanted)
            for number in range(300):
                replay.add(step(number))
            replay.sample(4)
        assert [count < 10 for count in most] == [True, False, True]
        assert 300 < most[1] < 400


def test_few_rows_are_asked_for_before_they_are_overwritten_if_they_are_large(tmp_path: Path) -> None:
    with ReplayBuffer.open(tmp_path / "r", IMAGES, 4000, 2, view=FrameStack(3), check_ends=False, seed=0) as replay:
        assert internals.prefetch(replay) is not None
        begins, ends = internals.written(internals.prefetch(replay))()
        assert len(begins) == 2
        assert 1600 * (ends - begins).max() <= 2 * 2**16
