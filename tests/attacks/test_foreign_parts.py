"""Samplers and views that users wrote, and that name places of rows that there are not: refused, by their name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import relive.replay.buffer
from attacks.tally import record
from relive import FrameStack, Hindsight, NStep, Prioritized, Recent, ReplayBuffer, Transition, Uniform
from relive import Sequence as SequenceView
from relive.errors import ParameterError, ReliveError
from relive.memory.device import DeviceRows
from relive.ring import Ring, Rule
from support import internals, twins
from support.cases import covering
from support.twins import Twin

COUNT = 4

ROWS = 18
"""Of all envs together."""

WRONG: dict[str, Callable[[Any], Any]] = {
    "one beyond the last row": lambda good: np.full(COUNT, ROWS),
    "far beyond": lambda good: np.full(COUNT, 10**9),
    "as far as there is": lambda good: np.full(COUNT, 2**63 - 1),
    "negative": lambda good: np.full(COUNT, -1),
    "far before": lambda good: np.full(COUNT, -(2**62)),
    "one bad one": lambda good: np.append(good[:-1], ROWS + 5),
    "floats": lambda good: good.astype(np.float64),
    "NaN": lambda good: np.full(COUNT, np.nan),
    "bools": lambda good: good > 0,
    "objects": lambda good: good.astype(object),
    "addresses": lambda good: np.full(COUNT, 2**64 - 8, np.uint64),
    "nothing": lambda good: None,
    "text": lambda good: "0123",
    "a matrix": lambda good: good.reshape(2, 2),
    "a number": lambda good: good[0],
    "several lengths": lambda good: [[0], [1, 2]],
}
"""What is in place of int64 places, given good ones."""

FEWER: dict[str, Callable[[Any], Any]] = {
    "too few": lambda good: good[:-1],
    "too many": lambda good: np.append(good, good),
    "none": lambda good: good[:0],
    "the newest row": lambda good: np.full(COUNT, internals.ring(filled()).live_places(0)[-1]),
}

RIGHT: dict[str, Callable[[Any], Any]] = {
    "int32": lambda good: good.astype(np.int32),
    "strided": lambda good: np.repeat(good, 2)[::2],
    "backwards": lambda good: good[::-1].copy()[::-1],
    "a list": lambda good: good.tolist(),
    "big-endian": lambda good: good.astype(">i8"),
    "read only": lambda good: np.broadcast_to(good[:1], COUNT),
}
"""What means the same as int64 in one piece, and is taken for it."""


class Choosing:
    """A user's sampler that returns what it is told to."""

    watches = False
    per_row = ()

    def __init__(self, change: Callable[[Any], Any], extras: Any = None) -> None:
        self.change, self.extras = change, {} if extras is None else extras

    def attach(self, ring: Ring) -> None:
        self.ring = ring

    def nbytes(self, rows: int) -> int:
        return 0

    def draw(self, count: int, key: int, update: int, of: int) -> tuple[Any, Any]:
        return self.change(self.ring.anchors()[:count]), self.extras

    def __repr__(self) -> str:
        return "Choosing()"


class Reading:
    """A user's view that passes on what it is told to."""

    history = 0

    def __init__(self, through: Callable[[Ring, Any], Any], change: Callable[[Any], Any]) -> None:
        self.through, self.change = through, change

    def read(self, ring: Ring, places: Any, key: int | None = None) -> Any:
        self.through(ring, self.change(places))
        return Transition().read(ring, places, key)

    def __repr__(self) -> str:
        return "Reading()"


def goals(ring: Ring, places: Any) -> Any:
    judge = lambda achieved, desired: -np.abs(achieved - desired).reshape(len(achieved), -1).sum(1)  # noqa: E731
    return Hindsight(judge).read(ring, places, 5)


LARGE, SMALL = ("obs", "observation"), ("obs", "achieved_goal")
DOORS: dict[str, Callable[[Ring, Any], Any]] = {
    "ring.plan": lambda ring, places: ring.read(ring.plan(places, 2, 0.5)),
    "ring.frames": lambda ring, places: ring.frames(places, 3, True),
    "ring.take": lambda ring, places: ring.take(places),
    "store.read": lambda ring, places: ring.store.read(places),
    "store.read of one": lambda ring, places: ring.store.read(places, [LARGE]),
    "store.gather, small": lambda ring, places: ring.store.gather([SMALL], *ring.store.places(places)),
    "store.gather, large": lambda ring, places: ring.store.gather([LARGE], *ring.store.places(places)),
    "store.gather_stacks": lambda ring, places: ring.store.gather_stacks(
        LARGE, *ring.store.places(np.repeat(np.asarray(places), 2)[:, None])
    ),
    "ring.index_of": lambda ring, places: ring.index_of(places),
    "NStep": lambda ring, places: NStep(3).read(ring, places),
    "FrameStack": lambda ring, places: FrameStack(3, keys=("observation",)).read(ring, places),
    "Hindsight": goals,
}
"""By which a view reads rows."""

GATHERS = ("ring.take", "store.read", "store.gather", "store.gather_stacks")
TAKEN_BY_GATHERS = ("negative", "far before", "a matrix", "a number")
"""Negative places read as zeros there, and any shape is right."""


def filled(sampler: Any = None, view: Any = None, device: bool = False, **options: Any) -> ReplayBuffer:
    """A buffer of two envs whose rings have come round."""
    with pytest.MonkeyPatch.context() as patch:
        if device:
            cpu = torch.empty(0).device
            patch.setattr(relive.replay.buffer, "ReplayRows", lambda leaves, n: DeviceRows(leaves, n, cpu))
        twin = Twin(2, ROWS // 2, dress="goals and images", sampler=sampler, view=view, **options)
    return twin.play(*("..", ".T", "..", "..", "U.", "..", "..", "..", "..")).buffer


def outcome(call: Callable[[], Any], name: str) -> str:
    """What is wrong with what came of an attack: nothing, if it was refused by an error that names the part."""
    try:
        call()
    except ReliveError as error:
        return "" if name in str(error) else f"does not name {name}: {error}"
    except Exception as error:  # any other is a defect
        return f"{type(error).__name__}: {error}"
    return "taken"


@pytest.mark.parametrize(
    ("view", "device"),
    covering([Transition, lambda: FrameStack(3), lambda: SequenceView(3, 1)], [False, True], full=2, quick=1),
)
def test_a_users_sampler_that_names_no_rows_is_refused_by_name(view: Callable[[], Any], device: bool) -> None:
    found = {}
    for what, change in {**WRONG, **FEWER}.items():
        buffer = filled(Choosing(change), view(), device)
        found[what] = outcome(lambda buffer=buffer: buffer.sample(COUNT), "Choosing()")
        buffer.check()
    record("a user's sampler or view that names places outside the ring", len(found), sum(map(bool, found.values())))
    assert not any(found.values()), found


@pytest.mark.parametrize("what", RIGHT)
def test_places_of_a_users_sampler_may_be_of_any_integers(what: str) -> None:
    batch, same = (filled(Choosing(change)).sample(COUNT) for change in (RIGHT[what], lambda good: good))
    if what != "read only":
        assert twins.same_batches(batch, same)


@pytest.mark.parametrize(
    "extras",
    [{"w": np.zeros(COUNT + 1)}, {"w": np.zeros(())}, {"w": "abcd"}, {"w": np.array([None] * COUNT)}, [1], "x", 7],
    ids=repr,
)
def test_further_fields_of_a_users_sampler_are_one_for_each_place(extras: Any) -> None:
    assert outcome(lambda: filled(Choosing(lambda good: good, extras)).sample(COUNT), "Choosing()") == ""


def test_what_a_users_sampler_returns_is_places_and_fields() -> None:
    class Bare(Choosing):
        def draw(self, count: int, key: int, update: int, of: int) -> Any:
            return super().draw(count, key, update, of)[0]

    assert outcome(lambda: filled(Bare(lambda good: good)).sample(COUNT), "Choosing()") == ""


def test_what_is_derived_from_a_sampler_of_relives_is_looked_at_like_any_other() -> None:
    class Mine(Uniform):
        def draw_recent(self, count: int, key: int, newest: int) -> Any:
            return np.full(count, 10**9), {}

        def __repr__(self) -> str:
            return "Mine()"

    assert outcome(lambda: filled(Mine()).sample(COUNT), "Mine()") == ""
    assert outcome(lambda: filled(Recent(c_min=1, inner=Mine())).sample(COUNT), "Mine()") == ""


@pytest.mark.parametrize(("door", "device"), covering(DOORS, [False, True], full=2, quick=1))
def test_a_users_view_that_names_no_rows_is_refused_by_name(door: str, device: bool) -> None:
    found = {}
    for what, change in WRONG.items():
        if what in TAKEN_BY_GATHERS and door.startswith(GATHERS):
            continue
        if door == "store.gather_stacks" and what in ("nothing", "text", "several lengths", "a number", "a matrix"):
            continue  # which NumPy would not take in the test itself
        buffer = filled(view=Reading(DOORS[door], change), device=device)
        found[what] = outcome(lambda buffer=buffer: buffer.sample(COUNT), "Reading()")
        buffer.check()
    record("a user's sampler or view that names places outside the ring", len(found), sum(map(bool, found.values())))
    assert not any(found.values()), found


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", ["int32", "strided", "read only"])
def test_places_of_a_users_view_may_be_of_any_integers(door: str, what: str) -> None:
    batch = filled(view=Reading(DOORS[door], RIGHT[what])).sample(COUNT)
    assert len(batch) == COUNT


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("place", [ROWS, 10**9])
def test_a_plan_that_a_users_view_turned_to_no_rows_is_refused_by_name(place: int, device: bool) -> None:
    class Editing:
        def read(self, ring: Ring, places: Any, key: int | None = None) -> Any:
            plan = ring.plan(places)
            plan.last[1] = place
            return ring.read(plan)

        def __repr__(self) -> str:
            return "Editing()"

    buffer = filled(view=Editing(), device=device)
    assert outcome(lambda: buffer.sample(COUNT), "Editing()") == ""
    buffer.check()


def test_negative_places_read_as_zeros_where_that_is_said() -> None:
    ring = internals.ring(filled())
    places = np.array([0, -1, 3, -7])
    for path in (LARGE, SMALL):
        for read in (ring.store.gather([path], places)[path], ring.store.read(places, [path])[path]):
            assert not read[[1, 3]].any()
            assert read[[0, 2]].any()


class Ruling:
    """A user's view of what can be drawn by a rule of its own."""

    history = 0

    def __init__(self, *rule: Any) -> None:
        self.rule = Rule(*rule)

    def read(self, ring: Ring, places: Any, key: int | None = None) -> Any:
        return Transition().read(ring, places, key)


@pytest.mark.parametrize(
    "rule",
    [(-5,), (2**40,), (0.5,), (0, 0), (0, 3), (2, 3, 0), (2, 3, 4), (2, 3, -1), (2, 3, 1, 2), (2, 3, 1, True, "mine")],
    ids=str,
)
def test_a_rule_that_makes_no_sense_is_refused_and_the_one_before_stays(rule: Any) -> None:
    buffer = filled(Prioritized())
    before = twins.contents(buffer)
    with pytest.raises(ParameterError, match="rule"):
        buffer.view = Ruling(*rule)
    buffer.check()
    assert twins.contents(buffer) == before
    assert isinstance(buffer.view, NStep)


def test_a_view_of_sequences_is_refused_places_whose_window_is_not_there() -> None:
    buffer = filled(view=SequenceView(3, 1))
    ring = internals.ring(buffer)
    ring.step[ring.anchors()[0]] = -3  # as no ring has it
    with pytest.raises(ParameterError, match="places: entry 0"):
        buffer.view.read(ring, ring.anchors()[:1])
