"""Sequences: what core refuses to read. What it reads is in views/test_sequences.py, each way in replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import Chunks, Sequence, core
from relive.ring.sequences import Cut, Sequences
from support import internals
from support.random_draws import others_run_during
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
    fields, first, table, before = windows.sample(what, gamma)
    found = {name: x.contiguous().numpy() for name, x in fields.items()}
    assert found["first"].tolist() == first.tolist()
    return found | {"facts": np.stack([found.pop(name) for name in FACTS]), "table": table, "before": before}


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
    assert found["before"].shape == (4, 0)


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


def test_columns_of_large_fields_and_states_that_do_not_fit_are_refused() -> None:
    ring, layout, places, blank = replay()
    rows = np.arange(18 * 24, dtype=np.uint64).view(np.uint8).reshape(18, -1)[:, :24].copy()

    def windows(columns: Any, states: Any, *sizes: int, held: int = 0, total: int = 4) -> Any:
        apart = [(f"large{i}", torch.uint8, (size,), None) for i, size in enumerate(sizes)]
        whole = core.Fields([("rows", torch.uint8, (len(blank),), 0), *apart], len(blank))
        state = [("state", torch.uint8, (held,), None)] * (held > 0)
        facts = core.Fields([("index", torch.int64, (), 0), *state], 64)
        return core.SequenceWindows(ring, layout, total, whole, facts, facts, blank, columns=columns, states=states)

    good = windows([(rows, False, rows, True, False), (rows, True, None, False, True)], [rows], 24, 24, held=24)
    found, first, table, before = good.sample(places, 0.9)
    assert (table, before) == (None, None)
    assert found["large0"].shape == found["large1"].shape == (4, len(places), 24)
    assert np.array_equal(found["state"].numpy(), rows[first])
    assert np.array_equal(found["large0"][0].numpy(), rows[first])
    for columns, states, sizes, held in (
        ([], [], (24,), 0), ([(rows, False, None, False, False)], [], (), 0), ([], [rows], (), 0), ([], [], (), 24),
        ([(rows, False, None, False, False)], [], (23,), 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="one for each field that lies apart"):
            windows(columns, states, *sizes, held=held)
    with pytest.raises(ValueError, match="of another size"):
        windows([(rows, False, rows[:, :8], False, False)], [], 24)
    with pytest.raises(ValueError, match="rows of bytes, before, final rows or None, before, fill"):
        windows([(rows, False)], [], 24)
    for wrong in ((rows.astype(np.int64), False, None, False, False), (rows, False, "rows", False, False)):
        with pytest.raises(TypeError, match="rows of bytes"):
            windows([wrong], [], 24)
    for columns, states, sizes, held in (
        ([(rows[1:], False, None, False, False)], [], (24,), 0), ([], [rows[1:]], (), 24),
        ([(rows, False, rows[1:], False, False)], [], (24,), 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="more rows"):
            windows(columns, states, *sizes, held=held).sample(places, 0.9)
    for count in (2**62, 2**50):
        with pytest.raises(MemoryError):
            good.sample(core.draw_by_chance(ring, count, 1), 0.9)


def test_chunks_of_less_than_two_rows_are_refused_and_anchors_of_none_answered_by_their_position() -> None:
    view = Chunks(4)
    play = Twin(2, 9, view=view).play(*[".."] * 4, "T.", *[".."] * 3)
    ring = internals.ring(play.buffer)
    reader = view.reader(ring)
    with pytest.raises(ValueError, match="at least 2 rows"):
        windows_of(ring.core, reader.core_layout, 1, reader.blank)
    anchors = ring.anchors()
    windows = windows_of(ring.core, reader.core_layout, 4, reader.blank)
    for place in range(18):
        bad = windows.sample(np.append(anchors, place), 1.0)
        assert (bad == len(anchors)) if place not in anchors else isinstance(bad, tuple)
    # more rows than there are, and rows that lie in the ring no more
    for total in (9, 10, 2**20):
        assert windows_of(ring.core, reader.core_layout, total, reader.blank).sample(anchors[:1], 1.0) == 0
    for beyond in (-1, 18, 2**62):
        assert windows.sample(np.append(anchors, beyond), 1.0) == len(anchors)
