"""The ring: which rows are live, complete and drawable, its invariants, and what a watcher is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relive import Field, ReplayBuffer, Schema, Sequence, Transition
from relive.errors import FieldError, InvariantError, ParameterError, ReliveError
from relive.memory.ram import ReplayRows
from relive.ring import Ring, Rule
from support import internals
from support.effort import first_of, in_ci
from support.twins import KINDS, Twin, stacked

LEAVES = Schema(
    {
        "obs": Field((3,)),
        "reward": Field(),
        "terminated": Field((), torch.bool),
        "truncated": Field((), torch.bool),
    }
).leaves

HISTORIES = (0, 1, 2, 3, 7)

RULES = [
    *(Rule(history) for history in HISTORIES),
    *(
        Sequence(length, burn_in, overlap).rule
        for length, burn_in, overlap in ((2, 0, 0), (3, 2, 2), (4, 1, 2), (3, 0, 1))
    ),
    Sequence(3, 1, "half", drop_tail=True).rule,
    Sequence(9, 0, "none").rule,
    *(Rule(history, across=True) for history in HISTORIES[1:]),
]
"""Which rows can be drawn: all that have their history, or the last of windows."""


class Ruled:
    """A view of transitions by another rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.history = rule, rule.history

    def read(self, ring: Ring, places: Any, key: Any = None) -> Any:
        return Transition().read(ring, places, key)


# Which rows are live, complete and drawable: every play of a small world.


def plays(alphabet: str, longest: int) -> Iterator[tuple[str, ...]]:
    for length in range(longest + 1):
        yield from itertools.product(alphabet, repeat=length)


def check_anchors(num_envs: int, rows: int, play: tuple[str, ...]) -> None:
    """After a play, for every rule: the invariants, what can be drawn in which order, and which ids are live."""
    twin = Twin(num_envs, rows).play(*play)
    ring, truth = internals.ring(twin.buffer), twin.truth
    every = [row for env in range(num_envs) for row in truth.all_rows(env)]
    assert ring.heads.tolist() == [len(truth.all_rows(env)) for env in range(num_envs)]
    assert ring.completed == len(truth.completed)
    assert ring.episodes == sum(e.done for n in range(num_envs) for e in truth.experience.episodes(n))
    for rule in RULES:
        twin.buffer.view = Ruled(rule)
        twin.buffer.check()
        anchors = truth.anchors(*rule[:4], rule.across)
        places = ring.anchors()
        assert ring.drawable == len(anchors) == len(places)
        in_time = sorted(anchors, key=lambda row: (row.env, row.number))
        assert ring.index_of(places).tolist() == [truth.index(row) for row in in_time]
        assert places.tolist() == [row.env * rows + row.number % rows for row in in_time]
        assert ring.stamp[places].tolist() == [truth.completed.index((row.env, row.number)) for row in in_time]
        found, unknown = ring.find(np.array([truth.index(row) for row in every], np.int64))
        assert unknown == -1
        alive = {(row.env, row.number) for row in anchors}
        assert (found >= 0).tolist() == [(row.env, row.number) in alive for row in every]
    for env in range(num_envs):
        live = truth.live(env)
        places = ring.live_places(env)
        assert ring.index_of(places).tolist() == [truth.index(row) for row in live]
        assert ring.step[places].tolist() == [row.at for row in live]
        assert (ring.stamp[places] >= 0).tolist() == [row.complete for row in live]


@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.slow), in_ci(4)])
def test_every_short_play_of_one_env_leaves_exactly_the_anchors_of_the_list_of_episodes(rows: int) -> None:
    for play in plays(".TUB", 3):
        check_anchors(1, rows, play)
    for play in plays(".T", 5):
        check_anchors(1, rows, play)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_every_play_with_interruptions_and_clears_does_so_as_well(rows: int) -> None:
    for play in plays(".TUB|x", 5):
        check_anchors(1, rows, play)
    for play in plays(".T", 9):
        check_anchors(1, rows, play)


@pytest.mark.parametrize("seed", first_of(4, range(8)))
def test_plays_of_several_envs_that_wrap_at_different_times_do_so_as_well(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(8):
        num_envs, rows = int(rng.integers(1, 4)), int(rng.integers(2, 8))
        letters = "." * int(rng.integers(1, 8)) + "TUB"
        play = ["".join(rng.choice(list(letters), num_envs)) for _ in range(int(rng.integers(1, 25)))]
        for cut in rng.integers(0, len(play) + 1, int(rng.integers(0, 3))):
            play.insert(int(cut), str(rng.choice(["|", "x"])))
        check_anchors(num_envs, rows, tuple(play))


def test_numbers_grow_for_ever_and_are_never_reused() -> None:
    twin = Twin(2, 3)
    seen: set[int] = set()
    for play in (("..", ".T"), ("..", "x"), ("T.", ".."), ("|", ".."), ("..", "BU")):
        twin.play(*play)
        before = {twin.truth.index(row) for env in (0, 1) for row in twin.truth.live(env)}
        assert set(twin.buffer.data()["index"].tolist()) <= before
        seen |= before
    total = sum(len(twin.truth.all_rows(env)) for env in (0, 1))
    assert seen <= {number * 2 + env for env in (0, 1) for number in range(total)}
    assert internals.ring(twin.buffer).heads.tolist() == [len(twin.truth.all_rows(env)) for env in (0, 1)]


def test_a_ring_of_two_rows_holds_one_transition_at_a_time() -> None:
    twin = Twin(1, 2)
    sizes = []
    for letter in "..T.TU..":
        twin.add(letter)
        twin.check()
        sizes.append(len(twin.buffer))
    assert sizes == [0, 1, 1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(("num_envs", "rows"), [(0, 2), (1, 1), (-1, 5), (3, 0)])
def test_a_ring_that_can_hold_nothing_is_refused(num_envs: int, rows: int) -> None:
    with pytest.raises(ParameterError, match="at least 1 env and 2 rows"):
        Ring(num_envs, rows, ReplayRows(LEAVES, 4))


# check() finds what is wrong.


def damaged(where: str) -> Ring:
    """A sound ring of two envs, then one thing in it changed."""
    twin = Twin(2, 6).play("..", ".T", "..", "U.", "..", "..")
    ring = internals.ring(twin.buffer)
    ring.check()
    live = ring.live_places(0)
    complete = live[ring.stamp[live] >= 0]
    if where == "step":
        ring.step[complete[0]] += 5
    elif where == "newest complete":
        ring.stamp[live[-1]] = 99
    elif where == "order":
        ring.stamp[complete[:2]] = ring.stamp[complete[:2]][::-1].copy()
    elif where == "twice":
        other = ring.live_places(1)
        ring.stamp[other[ring.stamp[other] >= 0][-1]] = ring.stamp[complete[-1]]
    elif where == "never issued":
        ring.stamp[complete[-1]] = ring.completed
    elif where == "count":
        ring.counters[1] += 1
    elif where == "successor":
        boundary = next(p for p in live if ring.stamp[p] < 0)
        ring.stamp[boundary] = -1 - ring.stamp[boundary]
    return ring


@pytest.mark.parametrize(
    ("where", "invariant"),
    [
        ("step", "4"),
        ("newest complete", "5"),
        ("order", "5"),
        ("twice", "5"),
        ("never issued", "5"),
        ("count", "6"),
        ("successor", "5"),
    ],
)
def test_check_names_the_invariant_that_does_not_hold(where: str, invariant: str) -> None:
    with pytest.raises(InvariantError, match=f"^invariant {invariant}"):
        damaged(where).check()
    assert issubclass(InvariantError, ReliveError)
    assert issubclass(InvariantError, AssertionError)


def test_check_passes_a_ring_whose_rows_stand_alone_and_finds_damage_in_it() -> None:
    twin = Twin(2, 3, ordered=False).play("..", "TU", ".B")
    ring = internals.ring(twin.buffer)
    ring.check()
    ring.stamp[ring.live_places(1)[-1]] = -3
    with pytest.raises(InvariantError, match="invariant 5"):
        ring.check()


# Events: what a sampler that watches is told.


def applied(drawable: set[int], places: Any, opens: Any) -> set[int]:
    """What can be drawn after these events, one by one."""
    for place, opened in zip(places.tolist(), opens.tolist(), strict=True):
        assert (place in drawable) != bool(opened), f"place {place} {'opens' if opened else 'closes'} twice"
        drawable = drawable | {place} if opened else drawable - {place}
    return drawable


@given(st.integers(1, 3), st.integers(2, 8), st.sampled_from(RULES), st.data())
def test_events_in_their_order_lead_from_what_could_be_drawn_to_what_can(
    num_envs: int, rows: int, rule: Rule, data: st.DataObject
) -> None:
    told: list[tuple[Any, Any]] = []

    class Watcher:
        watches = True

        def attach(self, ring: Ring) -> None:
            self.ring = ring

        def draw(self, count: int, key: int, update: int, of: int) -> Any:
            return self.ring.anchors()[:count], {}

        def changed(self, places: Any, drawable: Any) -> None:
            told.append((places.copy(), drawable.copy()))

    twin = Twin(num_envs, rows, sampler=Watcher(), view=Ruled(rule))
    for kinds in data.draw(st.lists(st.text("...TUB", min_size=num_envs, max_size=num_envs), max_size=25)):
        before = set(internals.ring(twin.buffer).anchors().tolist())
        told.clear()
        if data.draw(st.integers(0, 9)):
            twin.add(kinds)
        else:
            twin.interrupt(data.draw(st.sampled_from([None, [0]])))
        for places, opens in told:
            before = applied(before, places, opens)
        assert before == set(internals.ring(twin.buffer).anchors().tolist())
        twin.buffer.check()


def test_clearing_tells_the_watcher_that_nothing_can_be_drawn() -> None:
    twin = Twin(1, 6).play(".", ".", "T", ".")
    told: list[Any] = []

    class Watcher:
        watches = True

        def attach(self, ring: Ring) -> None:
            pass

        def changed(self, places: Any, drawable: Any) -> None:
            told.extend(zip(places.tolist(), drawable.tolist(), strict=True))

    internals.writer(twin.buffer).sampler = Watcher()
    twin.buffer.clear()
    assert told == [(0, 0), (1, 0), (2, 0)]


def test_a_play_of_letters_gives_the_flags_that_they_stand_for() -> None:
    twin = Twin(4, 6)
    fields = twin.step(".TUB")
    assert list(KINDS) == list(".TUB")
    assert fields["terminated"].tolist() == [False, True, False, True]
    assert fields["truncated"].tolist() == [False, False, True, True]
    assert stacked([fields])["obs"].shape == (1, 4, 4)


# An add that is refused changes nothing.


def test_an_episode_that_ends_without_a_final_observation_is_refused_and_nothing_is_stored() -> None:
    schema = Schema({"obs": Field((2,)), **{n: f for (n,), f in LEAVES.items() if n != "obs"}})
    buffer = ReplayBuffer(schema, 12, 3)
    step = {
        "obs": np.ones((3, 2), np.float32),
        "reward": np.ones(3, np.float32),
        "terminated": np.array([False, False, True]),
        "truncated": np.array([False, True, False]),
    }
    buffer.add({**step, "terminated": np.zeros(3, bool), "truncated": np.zeros(3, bool)})
    before = (
        internals.ring(buffer).store.target.tobytes(),
        internals.ring(buffer).state.tobytes(),
        internals.ring(buffer).counters.tobytes(),
    )
    with pytest.raises(FieldError, match=r"next_obs.*env 1 ended.*Gymnasium's final_obs"):
        buffer.add(step)
    with pytest.raises(FieldError, match="env 2 ended"):
        buffer.add({name: value[[0, 2]] for name, value in step.items()}, envs=[0, 2])
    assert before == (
        internals.ring(buffer).store.target.tobytes(),
        internals.ring(buffer).state.tobytes(),
        internals.ring(buffer).counters.tobytes(),
    )
