"""Sequences: core reads the bytes that the definition says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from definitions import sequences as definition
from definitions.places import oldest
from relive import Sequence, core
from relive.core.words import LENGTH
from relive.ring.sequences import Cut, Sequences
from support import internals, oracle
from support.random_draws import others_run_during
from support.ring_plays import RingPlay
from support.twins import Twin

AT = {"reward": 96, "terminated": 100, "truncated": 101, "discount": 104, "steps": 108, "next": 112, "mask": 120,
      "is_start": 121}  # fmt: skip


def cut_of(view: Sequence) -> Cut:
    return Cut(view.rows, view.burn_in, view.n, view.time_first, view.last)


FACTS = ("index", "lengths", "burn_in", "env", "start", "first")


def facts_of(*more: tuple[str, Any, int], width: int = 64) -> core.Fields:
    names = [(name, torch.int64, 8 * i) for i, name in enumerate(FACTS)]
    return core.Fields([(name, dtype, (), at) for name, dtype, at in (*names, *more)], width)


def windows_of(ring: Any, layout: Any, total: int, blank: Any, **options: Any) -> core.SequenceWindows:
    """What reads sequences as bytes, and facts about them."""
    rows = core.Fields([("rows", torch.uint8, (len(blank),), 0)], len(blank))
    weighed = facts_of(("probability", torch.float64, 48), ("weight", torch.float32, 56))
    return core.SequenceWindows(ring, layout, total, rows, facts_of(), weighed, blank, **options)


def found_of(windows: Any, what: Any, gamma: float = 0.97) -> dict[str, Any]:
    """What is read, by name; with the draw's weights, if there are any."""
    fields, first, table = windows.sample(what, gamma)
    found = {name: x.contiguous().numpy() for name, x in fields.items()}
    assert found["first"].tolist() == first.tolist()
    return found | {"facts": np.stack([found.pop(name) for name in FACTS]), "table": table}


def wanted_of(arrays: Any, layout: Any, places: Any, total: int, blank: Any) -> dict[str, Any]:
    """The same by the definition, and which bytes of the rows mean something."""
    count = len(places)
    shape = (total, count) if layout.time_first else (count, total)
    facts, table, made = np.zeros((6, count), np.int64), np.zeros(count * total, np.int64), list[Any]()
    for fill in (0, 255):
        made.append(np.full((count * total, len(blank)), fill, np.uint8))
        assert definition.read_sequences(arrays, layout, 0.97, places, made[-1], blank, facts, table) == -1
    rows, written = made[0].reshape(*shape, len(blank)), (made[0] == made[1]).reshape(*shape, len(blank))
    return {"rows": rows, "written": written, "facts": facts, "table": table.reshape(shape)}


def check(ring: Any, arrays: Any, layout: Any, what: Any, places: Any, total: int, blank: Any, tabled: bool) -> None:
    """Core and the definition make the same of the same memory."""
    found = found_of(windows_of(ring, layout, total, blank, tabled=tabled), what)
    wanted = wanted_of(arrays, layout, places, total, blank)
    if not tabled:
        assert found["table"] is None
        found["table"] = wanted["table"]
    written = wanted.pop("written")
    found["rows"] = np.where(written, found["rows"], wanted["rows"])
    for name, array in wanted.items():
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name


@given(st.integers(0, 2**32))
def test_sequences_of_a_replay_are_as_defined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs, rows = int(rng.integers(1, 4)), int(rng.integers(2, 30))
    length = int(rng.integers(1, 9))
    view = Sequence(
        length, int(rng.integers(0, 5)), int(rng.integers(0, length)), int(rng.integers(1, 6)),
        time_first=bool(rng.integers(2)), last=("action", "reward") if rng.random() < 0.5 else (),
    )  # fmt: skip
    twin = Twin(num_envs, rows, dress="mixed" if seed % 2 else "dict", view=view)
    for _ in range(int(rng.integers(1, 70))):
        twin.add("".join(rng.choice(list("." * 9 + "TUB"), num_envs)))
        if rng.random() < 0.05:
            twin.interrupt([0])
    buffer, ring = twin.buffer, internals.ring(twin.buffer)
    buffer.data()
    reader, anchors = Sequences(ring, cut_of(view)), ring.anchors()
    check(ring.core, ring.arrays, reader.core_layout, anchors, anchors, view.rows, reader.blank, bool(seed % 3))


@given(st.integers(0, 2**32))
def test_sequences_of_bare_rings_are_as_defined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    play = RingPlay(rng).play(int(rng.integers(1, 100)))
    layout = core.SequenceLayout(
        **AT, step_bytes=16 * int(rng.integers(min(6, play.width // 16) + 1)), obs_bytes=16 * int(rng.integers(3)),
        burn_in=int(rng.integers(0, 5)), n=int(rng.integers(1, rng.choice([6, 60]))), time_first=bool(rng.integers(2)),
        lasts=[(int(rng.integers(0, 9)), at, 5, bool(rng.integers(2))) for at in (80, 86, 122)[: rng.integers(4)]],
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
    check(play.core, play.arrays, layout, places, places, total, blank, bool(rng.integers(2)))


@given(st.integers(0, 2**32), st.sampled_from(["chance", "weight", "priority"]))
def test_sequences_that_are_drawn_and_read_at_once_are_as_defined(seed: int, by: str) -> None:
    rng = np.random.default_rng(seed)
    twin = Twin(2, 30, view=Sequence(3, 1, "half", time_first=bool(seed % 2)))
    twin.play(*("".join(rng.choice(list("." * 9 + "TU"), 2)) for _ in range(40)))
    ring, view = internals.ring(twin.buffer), twin.buffer.view
    assert isinstance(view, Sequence)
    twin.buffer.data()
    reader, anchors, leaves = Sequences(ring, cut_of(view)), ring.anchors(), len(ring.step)
    tree = core.Tree(np.zeros(core.tree_offsets(leaves)[-1] + 1), leaves, np.empty(0))
    tree.set(anchors, rng.gamma(1.0, 2.0, len(anchors)))
    facts = np.array([0.6, 1e-6, 1.0, 0.0])
    memory = core.Priorities(tree, np.zeros(leaves, np.float32), facts, ring.core, np.zeros(0))
    drawn = {
        "chance": lambda: core.draw_by_chance(ring.core, 9, seed),
        "weight": lambda: core.draw_by_weight(tree, 9, seed),
        "priority": lambda: core.draw_by_priority(memory, 9, seed, True, 0.4, 0.0),
    }[by]()
    places, extras = drawn
    check(ring.core, ring.arrays, reader.core_layout, drawn, places, view.rows, reader.blank, bool(seed % 3))
    found = found_of(windows_of(ring.core, reader.core_layout, view.rows, reader.blank, in_files=True), drawn)
    assert {name: x.tolist() for name, x in extras.items()} == {name: found[name].tolist() for name in extras}
    assert ("weight" in found) == (by == "priority")


def replay() -> tuple[Any, Any, Any, Any]:
    view = Sequence(2, 1)
    twin = Twin(2, 9, view=view).play(*[".."] * 6)
    twin.buffer.data()
    ring = internals.ring(twin.buffer)
    reader = Sequences(ring, cut_of(view))
    return ring.core, reader.core_layout, ring.anchors(), reader.blank


@pytest.mark.parametrize("beyond", [-1, 18, 2**62])
def test_a_place_that_is_no_rows_is_answered_by_its_position(beyond: int) -> None:
    ring, layout, places, blank = replay()
    places[2] = beyond
    assert windows_of(ring, layout, 4, blank).sample(places, 0.9) == 2


def test_a_window_that_does_not_fit_is_answered_by_its_position() -> None:
    ring, layout, places, blank = replay()
    assert windows_of(ring, layout, 1, blank).sample(places, 0.9) >= 0


def test_batches_without_rows_are_read() -> None:
    ring, layout, places, blank = replay()
    found = found_of(windows_of(ring, layout, 4, blank, tabled=True), places[:0])
    assert (found["rows"].shape, found["facts"].shape, found["table"].shape) == ((4, 0, len(blank)), (6, 0), (4, 0))


def test_there_is_nothing_to_draw_from_a_ring_without_anchors() -> None:
    ring, layout, _, blank = replay()
    empty = internals.ring(Twin(2, 9).buffer)
    assert ring is not empty.core
    with pytest.raises(ValueError, match="nothing to draw"):
        windows_of(empty.core, layout, 4, blank).sample(core.draw_by_chance(empty.core, 3, 1), 0.9)


def test_other_threads_run_while_many_rows_are_read_and_only_then() -> None:
    ring, layout, places, blank = replay()
    many, few = np.resize(places, 5000), np.resize(places, 3)
    assert others_run_during(lambda _: windows_of(ring, layout, 4, blank).sample(many, 0.9))
    assert not others_run_during(lambda _: windows_of(ring, layout, 4, blank).sample(few, 0.9))
    assert others_run_during(lambda _: windows_of(ring, layout, 4, blank, in_files=True).sample(many[:1500], 0.9))


def test_what_does_not_fit_is_refused() -> None:
    ring, layout, places, blank = replay()
    for total, changed in ((0, blank), (4, blank[:16].copy())):
        with pytest.raises(ValueError, match="does not fit"):
            windows_of(ring, layout, total, changed)
    rows, facts = core.Fields([("rows", torch.uint8, (len(blank),), 0)], len(blank)), facts_of()
    for wrong in ((rows, facts, facts_of(width=80)), (rows, facts_of(width=80), facts)):
        with pytest.raises(ValueError, match="64 bytes"):
            core.SequenceWindows(ring, layout, 4, *wrong, blank)
    with pytest.raises(ValueError, match="does not fit"):
        core.SequenceWindows(ring, layout, 4, rows, facts, facts, blank[1:])
    for parts in ((None, layout, 4, rows, facts, facts), (ring, layout, 4, rows, None, facts)):
        with pytest.raises(TypeError):
            core.SequenceWindows(*parts, blank)
    windows = windows_of(ring, layout, 4, blank)
    for places_ in (places.astype(np.int32), places[None], None, places.tolist()):
        with pytest.raises(TypeError):
            windows.sample(places_, 0.9)
    for count in (2**62, 2**50):
        with pytest.raises(MemoryError):
            windows.sample(core.draw_by_chance(ring, count, 1), 0.9)


def test_fields_of_the_step_before_lie_within_their_rows() -> None:
    ring, layout, _, blank = replay()
    width = len(blank)
    known = {name: getattr(layout, name) for name in (*AT, "step_bytes", "obs_bytes", "burn_in", "n", "time_first")}
    for last in ((0, 0, 8), (0, width - 8, 8), (0, 0, 0)):
        windows_of(ring, core.SequenceLayout(**known, lasts=[(*last, False)]), 4, blank)
    for last in ((0, width - 7, 8), (-1, 0, 8), (0, -1, 8), (0, 0, -1), (2**62, 0, 8), (0, 2**62, 8), (0, 0, 2**62)):
        with pytest.raises(ValueError, match="does not fit"):
            windows_of(ring, core.SequenceLayout(**known, lasts=[(*last, False)]), 4, blank)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 60))
def test_windows_start_where_the_oracle_says(length: int, stride: int, steps: int) -> None:
    stride = min(stride, length)
    starts = oracle.window_starts(steps, length, stride)
    for at in range(steps):
        # the first window that the step is the last of, so far: what starts later does not reach it
        wanted = [start for start in starts if start <= at < start + length]
        assert not wanted or definition.window_start(at, length, stride) == wanted[0]
