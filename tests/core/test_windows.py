"""Gathered rows and frames; and what is refused of windows and stacks, of which views/test_transitions.py says more."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relive import core
from relive.core.words import ALONE, DRAWABLE, LENGTH, LINKED, STRIDE
from support.forks import in_fork
from support.ring_plays import RingPlay

KINDS = [0, ALONE, LINKED]


@pytest.mark.parametrize("beyond", [-1, -(2**62), "rows", 2**62])
def test_a_place_that_is_no_rows_is_answered_by_its_position(beyond: Any) -> None:
    play = RingPlay(np.random.default_rng(3), num_envs=2, rows=7).play(30)
    places = np.append(play.live(), 14 if beyond == "rows" else beyond)
    count, layout = len(places), play.window_layout()
    out, last = np.full((count, 192), 9, np.uint8), np.zeros(count, np.int64)
    assert core.read_windows(play.core, layout, places, 2, 0.9, out, last) == count - 1
    assert (out == 9).all()
    assert core.stack_places(play.core, places, 2, True, np.zeros((count, 2), np.int64)) == count - 1


@pytest.mark.parametrize("depth", [1, 3, 20])
@pytest.mark.parametrize("repeat", [True, False])
def test_whatever_number_a_row_has_in_its_episode_its_frames_are_those_of_its_env(depth: int, repeat: bool) -> None:
    play = RingPlay(np.random.default_rng(5), num_envs=3, rows=7).play(60)
    places = np.arange(21)
    for number in (-1, -8, -(2**31), 2**31 - 1):
        play.arrays.step[:] = number
        frames = np.full((21, depth), 77, np.int64)
        assert core.stack_places(play.core, places, depth, repeat, frames) == -1
        assert np.array_equal(frames[:, -1], places)
        env = places[:, None] // 7
        assert ((frames // 7 == env) | ((frames == -1) & (not repeat and number < 0))).all()


def test_batches_without_rows_are_read() -> None:
    play = RingPlay(np.random.default_rng(0))
    none, rows = np.zeros(0, np.int64), np.zeros((0, 192), np.uint8)
    assert core.read_windows(play.core, play.window_layout(), none, 1, 0.9, rows, none) == -1
    assert core.stack_places(play.core, none, 3, True, np.zeros((0, 3), np.int64)) == -1
    assert core.gather_rows(np.zeros((0, 5), np.uint8), none, np.zeros((0, 5), np.uint8), 0, 5) == -1


def test_arrays_that_do_not_fit_each_other_are_refused() -> None:
    play = RingPlay(np.random.default_rng(1), num_envs=1, rows=9).play(20)
    places, layout = play.live(), play.window_layout()
    count = len(places)
    out, last = np.zeros((count, 192), np.uint8), np.zeros(count, np.int64)
    narrow = out[:, :100].copy()
    for steps, rows, after in ((0, out, last), (1, out[1:], last), (1, out, last[1:]), (1, narrow, last)):
        with pytest.raises(ValueError, match="read_windows"):
            core.read_windows(play.core, layout, places, steps, 0.9, rows, after)
    names = ["index", "next_index", "discount", "steps", "reward", "terminated", "truncated", "step_bytes", "next_at",
             "next_bytes", "own_at", "own_bytes"]  # fmt: skip
    known = {name: getattr(layout, name) for name in names}
    changes: list[dict[str, int]] = [
        {"index": 185}, {"truncated": -1}, {"step_bytes": play.width + 1}, {"next_at": 192, "next_bytes": 1},
        {"next_bytes": play.width + 1}, {"next_bytes": -1, "own_at": play.width, "own_bytes": 1},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ValueError, match="beyond a row"):
            core.read_windows(play.core, core.WindowLayout(**(known | change)), places, 1, 0.9, out, last)
    assert core.read_windows(play.core, core.WindowLayout(**known), places, 1, 0.9, out, last) == -1
    source, rows = np.zeros((5, 8), np.uint8), np.zeros((3, 8), np.uint8)
    some = np.zeros(3, np.int64)
    for start, nbytes in ((0, 9), (1, 8), (-1, 4), (0, -1), (2**62, 2**62)):
        with pytest.raises(ValueError, match="no room"):
            core.gather_rows(source, some, rows, start, nbytes)
    with pytest.raises(ValueError, match="no room"):
        core.gather_rows(source, some, rows[1:], 0, 8)
    with pytest.raises(ValueError, match="stack_places"):
        core.stack_places(play.core, places, 2, True, np.zeros((count, 3), np.int64))
    with pytest.raises(TypeError):
        core.gather_rows(source, some.astype(np.int32), rows, 0, 8)


def stacks_of(play: RingPlay, source: Any, depth: int, repeat: bool, places: Any, standing: Any = None) -> Any:
    """The stacks of rows of ``source`` that end at places, and those after the steps there, uint8 ``[B, depth, W]``."""
    apart = [(name, torch.uint8, (depth, source.shape[1]), None) for name in ("now", "then")]
    fields = core.Fields([("reward", torch.float32, (), 104), *apart], 192)
    large = [(source, True, True, True)]
    windows = core.Windows(play.core, play.window_layout(), fields, large=large, depth=depth, repeat=repeat)
    given = places
    if standing is not None:
        given = core.draw_by_chance(play.core, len(places), 5)
        given.standing = standing
    found = windows.sample(given, 1, 0.9)
    return found["now"].numpy(), found["then"].numpy()


def expected_stacks(play: RingPlay, source: Any, depth: int, repeat: bool, places: Any) -> list[Any]:
    last = np.zeros(len(places), np.int64)
    rows = np.zeros((len(places), 192), np.uint8)
    assert core.read_windows(play.core, play.window_layout(), places, 1, 0.9, rows, last) == -1
    frames = np.zeros((2 * len(places), depth), np.int64)
    assert core.stack_places(play.core, np.append(places, last), depth, repeat, frames) == -1
    stacks = np.where(frames[..., None] >= 0, source[frames], 0)
    return [stacks[: len(places)], stacks[len(places) :]]


@given(st.integers(0, 2**32))
def test_gathered_stacks_are_the_rows_at_their_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    play = RingPlay(rng).play(int(rng.integers(0, 60)))
    depth, width, repeat = (
        int(rng.integers(1, 6)),
        int(rng.integers(1, rng.choice([40, 400, 1500]))),
        rng.random() < 0.5,
    )
    count = play.num_envs * play.rows
    source = rng.integers(0, 256, (count, width), np.uint8)
    places = rng.integers(0, count, int(rng.integers(0, 12)))
    found = stacks_of(play, source, depth, repeat, places)
    for one, wanted in zip(found, expected_stacks(play, source, depth, repeat, places), strict=True):
        assert np.array_equal(one, wanted)


@given(st.integers(0, 2**32))
def test_gathered_rows_are_those_of_their_places_and_nothing_else_is_written(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, count = int(rng.integers(1, 20)), int(rng.integers(1, rng.choice([40, 600]))), int(rng.integers(0, 12))
    source = rng.integers(0, 256, (rows, width), np.uint8)
    places = rng.integers(-1, rows, count)
    nbytes, start = int(rng.integers(0, width + 1)), int(rng.integers(0, 5))
    found, wanted = (np.full((count, start + nbytes + 3), 7, np.uint8) for _ in range(2))
    assert core.gather_rows(source, places, found, start, nbytes) == -1
    wanted[:, start : start + nbytes] = np.where(places[:, None] >= 0, source[places, :nbytes], 0)
    assert np.array_equal(found, wanted)
    room = np.zeros((count + 1, start + nbytes), np.uint8)
    assert core.gather_rows(source, np.append(places, rows), room, start, nbytes) == count


def guarded(count: int, width: int) -> Any:
    """Rows that end where memory ends: what comes after cannot be read."""
    size = -(-count * width // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return whole[size - count * width : size].reshape(count, width)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is protected as Linux does it")
def test_no_byte_outside_of_frames_and_stacks_is_read_or_written() -> None:
    def work() -> bool:
        rng = np.random.default_rng(0)
        for width in (1, 3, 4, 8, 15, 63, 255, 256, 257, 700, 1024, 2305):
            play = RingPlay(rng, num_envs=2, rows=9)
            play.arrays.counters[[LENGTH, STRIDE]] = 1
            play.play(40)
            play.arrays.counters[DRAWABLE] = core.anchors(play.core, np.zeros(18, np.int64))
            source = guarded(18, width)
            source[...] = rng.integers(0, 256, source.shape)
            for depth in (1, 2, 4):
                # 64 items, so that the last column of a batch ends where its memory does, which begins at a 64th byte
                memory: list[Any] = []
                standing = core.Standing(
                    1, lambda nbytes, memory=memory: memory.append(guarded(1, nbytes)) or memory[0][0]
                )
                drawn, _ = core.draw_by_chance(play.core, 64, 5)
                found = stacks_of(play, source, depth, True, drawn, standing)
                for one, wanted in zip(found, expected_stacks(play, source, depth, True, drawn), strict=True):
                    assert np.array_equal(one, wanted)
            places = rng.integers(0, 18, 40)
            places[-1] = 17
            out = guarded(40, width)
            assert core.gather_rows(source, places, out, 0, width) == -1
            assert np.array_equal(out, source[places])
        return True

    assert in_fork(work)
