"""The ring: which rows are live, complete and drawable, its invariants, and its kernels against each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import inside
from effort import first_of, in_ci
from fit import deviation
from relive import Field, ReplayBuffer, Schema, Sequence, Transition
from relive.errors import FieldError, InvariantError, ParameterError, ReliveError
from relive.kernels import cpu, reference
from relive.kernels.tables import LONGEST, USED_UP, RingArrays, StagedRows, undo_size
from relive.memory.ram import ReplayRows
from relive.ring import Ring, Rule
from twins import KINDS, Twin, stacked

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
    ring, truth = inside.ring(twin.buffer), twin.truth
    every = [row for env in range(num_envs) for row in truth.all_rows(env)]
    assert ring.heads.tolist() == [len(truth.all_rows(env)) for env in range(num_envs)]
    assert ring.completed == len(truth.completed)
    assert ring.episodes == sum(e.done for n in range(num_envs) for e in truth.experience.episodes(n))
    for rule in RULES:
        twin.buffer.view = Ruled(rule)
        twin.buffer.check()
        anchors = truth.anchors(*rule[:4])
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
    assert inside.ring(twin.buffer).heads.tolist() == [len(twin.truth.all_rows(env)) for env in (0, 1)]


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
    ring = inside.ring(twin.buffer)
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
    ring = inside.ring(twin.buffer)
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
        before = set(inside.ring(twin.buffer).anchors().tolist())
        told.clear()
        if data.draw(st.integers(0, 9)):
            twin.add(kinds)
        else:
            twin.interrupt(data.draw(st.sampled_from([None, [0]])))
        for places, opens in told:
            before = applied(before, places, opens)
        assert before == set(inside.ring(twin.buffer).anchors().tolist())
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

    inside.writer(twin.buffer).sampler = Watcher()
    twin.buffer.clear()
    assert told == [(0, 0), (1, 0), (2, 0)]


# The kernels against each other, bit for bit, on states that random plays lead to.


def ring_of(
    rows: int, width: int, state: np.ndarray, counters: Any, sizes: tuple[int, int], rng: Any = None
) -> RingArrays:
    """A ring whose rows hold a reward, two flags, and bookkeeping in the last 16 bytes."""
    memory = np.full((rows * len(state), width), 7, np.uint8)
    memory[:, -16:] = 0
    if rng is not None:
        memory[:, :4] = rng.standard_normal((len(memory), 1)).astype(np.float32).view(np.uint8)
        memory[:, 4:6] = rng.random((len(memory), 2)) < 0.3
    return over(memory, rows, sizes, state, np.array(counters))


def over(memory: np.ndarray, rows: int, sizes: Any, state: np.ndarray, counters: np.ndarray) -> RingArrays:
    """A ring whose columns are in this memory."""

    def column(byte: int, dtype: Any) -> Any:
        return memory[:, byte : byte + np.dtype(dtype).itemsize].view(dtype)[:, 0]

    end, none = memory.shape[1] - 16, np.zeros(0, np.int64)
    book = column(end + 8, np.int32), column(end, np.int64), column(end + 12, np.int32)
    flags = column(0, np.float32), column(4, np.uint8), column(5, np.uint8)
    return RingArrays(rows, *sizes, state, counters, memory, *book, *flags, none.astype(np.int32), none)


def copied(ring: RingArrays) -> RingArrays:
    sizes = ring.step_bytes, ring.obs_bytes
    made = over(ring.memory.copy(), ring.rows, sizes, ring.state.copy(), ring.counters.copy())
    return made._replace(undo=ring.undo.copy(), reserve=ring.reserve.copy())


def noted(ring: RingArrays, rng: np.random.Generator) -> RingArrays:
    """The ring as one whose memory outlives the process; of some, not all rows may be overwritten."""
    num_envs = len(ring.state)
    most = ring.state[:, 0] + rng.integers(0, 30, num_envs) if rng.random() < 0.3 else np.full(num_envs, 2**62)
    return ring._replace(undo=np.zeros(undo_size(num_envs, num_envs), np.int64), reserve=most)


class Pair:
    """One random state, kept by both twins."""

    def __init__(self, rng: np.random.Generator, alone: bool = False) -> None:
        self.rng = rng
        self.num_envs, self.rows = int(rng.integers(1, 4)), int(rng.integers(2, 9))
        rules = [rule for rule in RULES if rule.length == 1 or not alone]
        self.rule = rules[int(rng.integers(len(rules)))]
        self.width = int(rng.integers(3, 6)) * 16
        # a ring that begins, or one that has seen very many rows and was cleared, of counts about to pass 2**32
        old = rng.integers(0, 2**50, self.num_envs) * int(rng.random() < 0.4)
        done = rng.choice([2**31 - 5, 2**32 - 5, 2**33], self.num_envs) * (old > 0)
        begin = np.stack([old, old, np.zeros_like(old), done], axis=1)
        sizes = self.width - 16, int(rng.integers(1, self.width - 16))
        self.rings = [ring_of(self.rows, self.width, begin, [done.sum(), 0, 0, *self.rule[:4], 0, 0], sizes, rng)]
        if rng.random() < 0.5:
            self.rings[0] = noted(self.rings[0], rng)
        self.rings.append(copied(self.rings[0]))

    @property
    def num_rows(self) -> int:
        return self.num_envs * self.rows

    def each(self) -> Iterator[tuple[Any, Any, RingArrays]]:
        """The kernels of each twin, the ring as they take it, and its arrays."""
        fast, plain = self.rings
        return iter([(cpu, cpu.handle_of(fast), fast), (reference, plain, plain)])

    def agree(self) -> RingArrays:
        fast, plain = self.rings
        for name, one, other in zip(RingArrays._fields, fast, plain, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), f"{name}: {one}, {other}"
        return fast

    def drawable(self, ring: RingArrays) -> set[int]:
        out = np.empty(self.num_rows, np.int64)
        return set(out[: reference.anchors(ring, out)].tolist())

    def assert_steps_agree(self, alone: int = 0) -> None:
        """A few envs step; sometimes an ending's final observation is missing."""
        rng = self.rng
        envs = rng.permutation(self.num_envs)[: int(rng.integers(1, self.num_envs + 1))].astype(np.int64)
        staged = rng.integers(0, 256, (len(envs), self.width), np.uint8)
        final = rng.integers(0, 256, (len(envs), self.width), np.uint8)
        rewards = np.where(rng.random((len(envs), 1)) < 0.05, np.inf, rng.standard_normal((len(envs), 1)))
        staged[:, :4] = rewards.astype(np.float32).view(np.uint8)
        staged[:, 4:6] = rng.random((len(envs), 2)) < 0.2
        mode = alone or int(rng.random() < 0.8)
        watch = bool(rng.random() < 0.8)
        before, results = self.drawable(self.rings[0]), []
        for twin, ring, arrays in self.each():
            arrays.undo[:1] = 0
            old = copied(arrays)
            room = len(envs) * (2 * self.rule.history + 4) if watch else 0
            flags = staged[:, :4].view(np.float32)[:, 0], staged[:, 4], staged[:, 5]
            given = StagedRows(envs, staged, final, *flags, *(np.full(len(envs), -9, np.int64) for _ in range(3)),
                               np.zeros(room, np.int64), np.zeros(room, np.uint8))  # fmt: skip
            again = given._replace(**{name: getattr(given, name).copy() for name in ("places", "finals", "tails")})
            of_twin = cpu.handle_of if twin is cpu else lambda members: members
            refused = twin.plan_rows(of_twin(old), of_twin(again), mode)
            twin.plan_rows(ring, of_twin(given), mode)
            found = twin.add_rows(ring, of_twin(given), mode)
            planned = [array.tolist() for array in (again.places, again.finals, again.tails)]
            results.append((min(found, 0), *planned))
            assert found < 0 or [given.places.tolist(), given.finals.tolist()] == planned[:2]
            assert refused == min(found, 0)
            if found < 0:
                assert np.array_equal([x.tobytes() for x in arrays[3:]], [x.tobytes() for x in old[3:]])
                assert found == USED_UP or mode == 0
                assert found == USED_UP or staged[-1 - found, 4:6].any()
            elif watch:
                assert applied(before, given.where[:found], given.opens[:found]) == self.drawable(arrays)
            else:
                assert found == 0
        assert results[0] == results[1]
        ring = self.agree()
        assert ring.counters[1] == len(self.drawable(ring))
        assert not len(ring.undo) or ring.undo[0] == (results[0][0] == 0)
        assert not len(ring.undo) or (ring.state[:, 0] - ring.rows <= np.maximum(ring.reserve, 0)).all()

    def age(self) -> None:
        """The episodes under way have gone on for about as long as an int32 can count; all before them is gone."""
        for e in range(self.num_envs):
            index, head = int(self.rings[0].state[e, 2]), int(self.rings[0].state[e, 0])
            if not 0 < index < 100:
                continue
            more = LONGEST - int(self.rng.integers(1, 5)) - index
            for ring in self.rings:
                ring.state[e, 2] += more
                ring.state[e, 1] = max(ring.state[e, 1], head - index)
                for number in range(head - min(index, self.rows), head):
                    ring.step[e * self.rows + number % self.rows] += more
        for ring in self.rings:
            ring.counters[1] = len(self.drawable(ring))

    def live(self) -> np.ndarray:
        heads, tails = self.rings[0].state[:, 0], self.rings[0].state[:, 1]
        places = [
            e * self.rows + n % self.rows
            for e in range(self.num_envs)
            for n in range(max(tails[e], heads[e] - self.rows), heads[e])
        ]
        return np.array(places, np.int64)

    def assert_answers_agree(self, alone: int = 0) -> None:
        """Every question about the state."""
        rng, answers = self.rng, []
        live = self.live()
        complete = np.array(sorted(self.drawable(self.rings[0])), np.int64)
        key, newest = int(rng.integers(0, 2**63)), int(rng.integers(0, 20))
        heads = self.rings[0].state[:, 0]
        index = rng.integers(max(int(heads.min()) - self.rows, 0), int(heads.max()) + 1, 12) * self.num_envs
        index += rng.integers(0, self.num_envs, 12)
        if rng.random() < 0.3:
            index[rng.integers(12)] = rng.choice([-1, -(2**40), 2**62])
        n, gamma, wide = int(rng.integers(1, 7)), float(rng.random()), self.width - 16
        next_bytes = -1 if alone else int(rng.integers(0, wide + 1))
        own_at = int(rng.integers(0, 17))
        copied_bytes = int(rng.integers(0, 33)), 112, next_bytes, own_at, int(rng.integers(0, wide + 1 - own_at))
        batch = np.array([80, 88, 96, 100, 104, 108, 109, *copied_bytes])
        depth, repeat = int(rng.integers(1, 6)), bool(rng.integers(2))
        for twin, ring, _ in self.each():
            windows = []
            for size in range(len(complete) + 3):
                first, until = (np.full(self.num_envs, -9, np.int64) for _ in range(2))
                windows.append([twin.window(ring, size, first, until), *first, *until])
            drawn = [np.full(40, -9, np.int64) for _ in range(2)]
            there = [
                twin.draw(ring, np.uint64(key) if twin is cpu else key, which, places)
                for which, places in zip((0, newest), drawn, strict=True)
            ]
            anchors = np.full(self.num_rows, -9, np.int64)
            count = twin.anchors(ring, anchors)
            ids = np.full(len(live), -9, np.int64)
            none = twin.ids_of(ring, live, ids)
            wrong = np.append(live, self.num_rows if key % 2 else -1)
            assert none == -1
            assert twin.ids_of(ring, wrong, np.zeros(len(wrong), np.int64)) == len(live)
            found = np.full(len(index), -9, np.int64)
            bad = twin.live(ring, index, found)
            last, out = np.full(len(complete), -9, np.int64), np.full((len(complete), 192), 9, np.uint8)
            none = twin.windows(ring, batch, complete, n, gamma, out, last)
            room = np.zeros((len(wrong), 192), np.uint8), np.zeros(len(wrong), np.int64)
            assert none == -1
            assert twin.windows(ring, batch, wrong, n, gamma, *room) == len(live)
            frames = np.full((len(live), depth), -9, np.int64)
            none = twin.stack_places(ring, live, depth, repeat, frames)
            room = np.zeros((len(wrong), depth), np.int64)
            assert none == -1
            assert twin.stack_places(ring, wrong, depth, repeat, room) == len(live)
            answers.append(
                [
                    windows, *(d if t else t for t, d in zip(there, drawn, strict=True)), count,
                    anchors[:count], ids, bad, found[: bad if bad >= 0 else None], last, out, frames,
                ]
            )  # fmt: skip
        for number, (fast, plain) in enumerate(zip(*answers, strict=True)):
            assert np.asarray(fast).tobytes() == np.asarray(plain).tobytes(), f"answer {number}: {fast}, {plain}"
        for places in answers[0][1:3]:
            assert places is False or set(places.tolist()) <= set(complete.tolist())


@given(st.integers(0, 2**32))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_twins_agree_bit_for_bit_on_rows_in_order(seed: int) -> None:
    pair = Pair(np.random.default_rng(seed))
    for step in range(30):
        pair.assert_steps_agree()
        if step % 3 == 0:
            pair.assert_answers_agree()
        if pair.rng.random() < 0.05:  # an episode is interrupted, or everything cleared
            clear = pair.rng.random() < 0.5
            for ring in pair.rings:
                ring.state[:, 2] = 0
                if clear:
                    ring.state[:, 1] = ring.state[:, 0]
                ring.counters[1] = len(pair.drawable(ring))
        if pair.rng.random() < 0.1:
            pair.age()


@given(st.integers(0, 2**32), st.sampled_from([2, 3]))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_twins_agree_bit_for_bit_on_rows_with_next_observations_of_their_own(seed: int, mode: int) -> None:
    pair = Pair(np.random.default_rng(seed), alone=True)
    for _ in range(15):
        pair.assert_steps_agree(mode)
        pair.assert_answers_agree(mode)
        if pair.rng.random() < 0.1:
            for ring in pair.rings:
                ring.state[:, 2] = 0
        if mode == 3 and pair.rng.random() < 0.2:
            pair.age()


@given(st.integers(0, 2**32))
def test_the_twins_gather_the_same_stacks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, items, depth = (int(rng.integers(1, size)) for size in (20, rng.choice([40, 400]), 12, 5))
    source = rng.integers(0, 256, (rows, width), np.uint8)
    places = rng.integers(-1, rows, (2 * items, depth))
    if rows >= depth:  # most stacks are of rows that follow one another
        runs, firsts = rng.random(2 * items) < 0.6, rng.integers(-1, rows - depth + 1, (2 * items, 1))
        places[runs] = (firsts + np.arange(depth))[runs]
    for twin in (cpu, reference):
        out = np.full((places.size, width), 7, np.uint8)
        assert twin.gather_pairs(source, places, out) == -1
        assert np.array_equal(out, np.where(places.reshape(-1, 1) >= 0, source[places.reshape(-1)], 0))
        for bad in (items - 1, 2 * items - 1, int(rng.integers(2 * items))):
            beyond = places.copy()
            beyond[bad, -1] = rows
            assert twin.gather_pairs(source, beyond, np.zeros_like(out)) == bad
            beyond[bad] = rows - depth + 1 + np.arange(depth)  # a run that ends behind the last row
            assert twin.gather_pairs(source, beyond, np.zeros_like(out)) == bad


@given(st.integers(0, 2**32))
def test_the_twins_gather_and_scatter_the_same_bytes_and_no_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, count = int(rng.integers(1, 20)), int(rng.integers(1, 40)), int(rng.integers(0, 12))
    source = rng.integers(0, 256, (rows, width), np.uint8)
    places = rng.integers(-1, rows, count)
    nbytes = int(rng.integers(0, width + 1))
    start = int(rng.integers(0, 5))
    outs, targets = [], []
    order = rng.permutation(max(rows, count))[:count].astype(np.int64)  # no place twice: who wins is nobody's business
    for twin in (cpu, reference):
        out = np.full((count, start + nbytes + 3), 7, np.uint8)
        assert twin.gather_rows(source, places, out, start, nbytes) == -1
        room = np.zeros((count + 1, start + nbytes), np.uint8)
        assert twin.gather_rows(source, np.append(places, rows), room, start, nbytes) == count
        outs.append(out)
        target = np.full((max(rows, count), width), 7, np.uint8)
        staged = np.resize(source, (count, width))
        kept = np.where(places >= 0, order, -1)
        twin.scatter_rows(staged, kept, target, nbytes)
        targets.append(target)
    want = np.full_like(outs[0], 7)
    for i, place in enumerate(places.tolist()):
        want[i, start : start + nbytes] = source[place, :nbytes] if place >= 0 else 0
    assert np.array_equal(outs[0], want)
    assert np.array_equal(outs[1], want)
    assert np.array_equal(targets[0], targets[1])
    untouched = np.setdiff1d(np.arange(len(targets[0])), order[places >= 0])
    assert (targets[0][untouched] == 7).all()
    assert (targets[0][:, nbytes:] == 7).all()


def almost_without_anchors(rows: int, anchors: list[int]) -> RingArrays:
    """A ring of one env that is full, and whose rows can be drawn at these places alone."""
    count = len(anchors)
    state, counters = np.array([[rows, 0, 1, count]], np.int64), [count, count, 0, *Rule()[:4], 0]
    ring = ring_of(rows, 48, state, counters, (16, 16))
    older = np.searchsorted(anchors, np.arange(rows))  # how many anchors come before each row
    ring.stamp[:], ring.order[:] = -1 - older, older
    ring.stamp[anchors] = np.arange(count)
    return ring


def drawn_by(twin: Any, ring: RingArrays, key: int, newest: int, count: int) -> np.ndarray:
    """The places that a twin draws."""
    places = np.full(count, -9, np.int64)
    assert twin.draw(*((cpu.handle_of(ring), np.uint64(key)) if twin is cpu else (ring, key)), newest, places)
    return places


def test_the_twins_draw_alike_where_anchors_are_so_rare_that_they_are_counted_out() -> None:
    # One anchor among 5,000 rows, and a key by which a hundred draws in a row miss it.
    one, few = almost_without_anchors(5000, [3210]), almost_without_anchors(1000, [3, 400, 997])
    for newest in (0, 3000):
        results = [drawn_by(twin, one, 5, newest, 6).tolist() for twin in (cpu, reference)]
        assert results[0] == results[1] == [3210] * 6
        assert drawn_by(cpu, few, 5, newest, 200).tolist() == drawn_by(reference, few, 5, newest, 200).tolist()


def test_anchors_that_are_counted_out_have_equal_chances() -> None:
    # Three draws in four are counted out. If an anchor loses 5 % of its draws to another, each is 670 of 13,300 off.
    # That adds 2 · 670² / 13,300 = 67 to the chi-square, whose standard deviation is 2.
    places = [3, 400, 997]
    drawn = drawn_by(cpu, almost_without_anchors(1000, places), 5, 0, 40_000)
    chances = dict.fromkeys(places, 1 / 3)
    assert deviation(drawn, chances) < 5
    drawn[np.flatnonzero(drawn == places[-1])[: len(drawn) // 60]] = places[0]
    assert deviation(drawn, chances) > 5


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
        inside.ring(buffer).store.target.tobytes(),
        inside.ring(buffer).state.tobytes(),
        inside.ring(buffer).counters.tobytes(),
    )
    with pytest.raises(FieldError, match=r"next_obs.*env 1 ended.*Gymnasium's final_obs"):
        buffer.add(step)
    with pytest.raises(FieldError, match="env 2 ended"):
        buffer.add({name: value[[0, 2]] for name, value in step.items()}, envs=[0, 2])
    assert before == (
        inside.ring(buffer).store.target.tobytes(),
        inside.ring(buffer).state.tobytes(),
        inside.ring(buffer).counters.tobytes(),
    )
