"""Sequences: core reads the bytes that the definition says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import inside
import oracle
from definitions import sequences as definition
from definitions.places import oldest
from drawing import others_run_during
from relive import Sequence, core
from relive.core.words import LENGTH
from ring_plays import RingPlay
from twins import Twin

AT = {"reward": 96, "terminated": 100, "truncated": 101, "discount": 104, "steps": 108, "next": 112, "mask": 120,
      "is_start": 121}  # fmt: skip


def read_both(
    ring: Any, arrays: Any, layout: Any, places: Any, rows: int, blank: Any, listed: bool
) -> tuple[list[Any], list[Any]]:
    """What core and the definition make of the same memory."""
    answers: list[list[Any]] = []
    for taken, read in ((ring, core.read_sequences), (arrays, definition.read_sequences)):
        out = np.full((rows * len(places), len(blank)), 7, np.uint8)
        facts, table = np.full((6, len(places)), -9, np.int64), np.full(len(out) if listed else 0, -9, np.int64)
        assert read(taken, layout, 0.97, places, out, blank, facts, table) == -1
        answers.append([out.tobytes(), facts.tobytes(), table.tobytes()])
    return answers[0], answers[1]


@given(st.integers(0, 2**32))
def test_sequences_of_a_replay_are_as_defined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs, rows = int(rng.integers(1, 4)), int(rng.integers(2, 30))
    length = int(rng.integers(1, 9))
    view = Sequence(
        length, int(rng.integers(0, 5)), int(rng.integers(0, length)), int(rng.integers(1, 6)),
        time_first=bool(rng.integers(2)),
    )  # fmt: skip
    twin = Twin(num_envs, rows, dress="mixed" if seed % 2 else "dict", view=view)
    for _ in range(int(rng.integers(1, 70))):
        twin.add("".join(rng.choice(list("." * 9 + "TUB"), num_envs)))
        if rng.random() < 0.05:
            twin.interrupt([0])
    buffer, ring = twin.buffer, inside.ring(twin.buffer)
    buffer.data()
    batch = inside.readers(view)[ring]
    found, wanted = read_both(
        ring.core, ring.arrays, batch.core, ring.anchors(), view.rows, batch.blank, bool(seed % 3)
    )
    assert found == wanted


@given(st.integers(0, 2**32))
def test_sequences_of_bare_rings_are_as_defined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    play = RingPlay(rng).play(int(rng.integers(1, 100)))
    layout = core.SequenceLayout(
        **AT, step_bytes=16 * int(rng.integers(min(6, play.width // 16) + 1)), obs_bytes=16 * int(rng.integers(3)),
        burn_in=int(rng.integers(0, 5)), n=int(rng.integers(1, rng.choice([6, 60]))), time_first=bool(rng.integers(2)),
    )  # fmt: skip
    length, blank = int(play.arrays.counters[LENGTH]), rng.integers(0, 256, 128).astype(np.uint8)
    total = length + layout.burn_in + int(rng.integers(1, 9))
    windows = [(place, definition.window_of(play.arrays, layout, int(place), total)) for place in play.live()]
    # as a ring's history has it: all rows up to the anchor are live
    whole = [
        place
        for place, window in windows
        if window and window.number - window.anchor + window.first >= oldest(window.env, play.arrays)
    ]
    places = np.array(whole, np.int64)
    found, wanted = read_both(play.core, play.arrays, layout, places, total, blank, bool(rng.integers(2)))
    assert found == wanted


def replay() -> tuple[Any, Any, Any, Any]:
    view = Sequence(2, 1)
    twin = Twin(2, 9, view=view).play(*[".."] * 6)
    twin.buffer.data()
    ring = inside.ring(twin.buffer)
    batch = inside.readers(view)[ring]
    return ring.core, batch.core, ring.anchors(), batch.blank


@pytest.mark.parametrize("beyond", [-1, 18, 2**62])
def test_a_place_that_is_no_rows_is_answered_by_its_position(beyond: int) -> None:
    ring, layout, places, blank = replay()
    places[2] = beyond
    count = len(places)
    out, facts = np.full((4 * count, len(blank)), 7, np.uint8), np.zeros((6, count), np.int64)
    assert core.read_sequences(ring, layout, 0.9, places, out, blank, facts, np.zeros(0, np.int64)) == 2
    assert (out == 7).all()


def test_a_window_that_does_not_fit_is_answered_before_a_row_is_written() -> None:
    ring, layout, places, blank = replay()
    count = len(places)
    out, facts = np.full((count, len(blank)), 7, np.uint8), np.zeros((6, count), np.int64)
    assert core.read_sequences(ring, layout, 0.9, places, out, blank, facts, np.zeros(0, np.int64)) >= 0
    assert (out == 7).all()


def test_batches_without_rows_are_read() -> None:
    ring, layout, places, blank = replay()
    none = np.zeros(0, np.int64)
    out, facts = np.zeros((0, len(blank)), np.uint8), np.zeros((6, 0), np.int64)
    assert core.read_sequences(ring, layout, 0.9, places[:0], out, blank, facts, none) == -1


def test_other_threads_run_while_many_rows_are_read_and_only_then() -> None:
    ring, layout, places, blank = replay()

    def reads(count: int) -> Any:
        out, facts = np.zeros((4 * count, len(blank)), np.uint8), np.zeros((6, count), np.int64)
        arguments = np.resize(places, count), out, blank, facts, np.zeros(0, np.int64)
        return lambda _: core.read_sequences(ring, layout, 0.9, *arguments)

    assert others_run_during(reads(5000))
    assert not others_run_during(reads(3))


def test_arrays_that_do_not_fit_each_other_are_refused() -> None:
    ring, layout, places, blank = replay()
    count, none = len(places), np.zeros(0, np.int64)
    out, facts = np.zeros((4 * count, len(blank)), np.uint8), np.zeros((6, count), np.int64)
    for wrong in (
        (places, out[1:], blank, facts, none),
        (places, out, blank[1:], facts, none),
        (places, out, blank, facts[1:], none),
        (places, out, blank, facts[:, 1:].copy(), none),
        (places, out, blank, facts, np.zeros(3, np.int64)),
        (places, out[:, :16].copy(), blank[:16].copy(), facts, none),
        (places[:0], out, blank, facts[:, :0].copy(), none),
    ):
        with pytest.raises(ValueError, match="read_sequences"):
            core.read_sequences(ring, layout, 0.9, *wrong)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 60))
def test_windows_start_where_the_oracle_says(length: int, stride: int, steps: int) -> None:
    stride = min(stride, length)
    starts = oracle.window_starts(steps, length, stride)
    for at in range(steps):
        # the first window that the step is the last of, so far: what starts later does not reach it
        wanted = [start for start in starts if start <= at < start + length]
        assert not wanted or definition.window_start(at, length, stride) == wanted[0]
