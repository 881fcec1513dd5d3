"""Rows are added by compiled code as their definition says, to the bit; and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from definitions import adding as plain
from definitions.draws import anchors
from relive import core
from relive.core.words import ACROSS, LONGEST, NEXT, RULE, TAIL, TAILS, USED_UP, RingArrays, StagedRows, undo_size
from relive.ring import Rule

RULES = [
    *(Rule(history) for history in (0, 1, 2, 3, 7)), Rule(1, 2, 1), Rule(4, 3, 1), Rule(4, 4, 2), Rule(3, 3, 2),
    Rule(3, 3, 2, tails=False), Rule(8, 9, 9), *(Rule(history, across=True) for history in (1, 2, 3, 7)),
]  # fmt: skip


def column(rows: Any, byte: int, dtype: Any) -> Any:
    """The numbers at a byte of packed rows ``[R, W]``, over the same memory."""
    return rows[:, byte : byte + np.dtype(dtype).itemsize].view(dtype)[:, 0]


def flags_of(rows: Any) -> tuple[Any, Any, Any]:
    """The rewards and flags at the start of packed rows."""
    return column(rows, 0, np.float32), column(rows, 4, np.uint8), column(rows, 5, np.uint8)


class Play:
    """A ring that two ways add rows to: compiled code to the first of its arrays, the definition to the second.

    Rows begin with a reward and two flags; bookkeeping is in their last 16 bytes.
    """

    def __init__(self, rng: np.random.Generator, mode: int = 0) -> None:
        self.rng, self.mode = rng, mode
        self.num_envs, self.rows = int(rng.integers(1, 4)), int(rng.integers(2, 9))
        self.width = 16 * int(rng.integers(3, 6))
        rules = [rule for rule in RULES if rule.length == 1 or not mode]
        self.rule = rules[int(rng.integers(len(rules)))]
        # a ring that begins, or one that has seen very many rows and was cleared, of counts about to pass 2**32
        old = rng.integers(0, 2**50, self.num_envs) * int(rng.random() < 0.4)
        done = rng.choice([2**31 - 5, 2**32 - 5, 2**33], self.num_envs) * (old > 0)
        self.state = np.stack([old, old, np.zeros_like(old), done], axis=1)
        counters = np.zeros(9, np.int64)
        counters[0], counters[RULE : RULE + 4] = done.sum(), self.rule[:4]
        counters[TAILS] += ACROSS * self.rule.across
        sizes, self.undo, reserve = (self.width - 16, int(rng.integers(1, self.width - 16))), rng.random() < 0.5, old
        if self.undo:  # of some rings, not all rows may be overwritten
            some = rng.random() < 0.3
            reserve = old + rng.integers(0, 30, self.num_envs) if some else np.full(self.num_envs, 2**62)
        memory = rng.integers(0, 256, (self.num_envs * self.rows, self.width), np.uint8)
        memory[:, -16:], memory[:, 4:6] = 0, memory[:, 4:6] < 80
        self.rings = [self.ring(memory.copy(), sizes, counters.copy(), reserve) for _ in range(2)]
        self.core = core.Ring(self.rings[0])

    def ring(self, memory: Any, sizes: Any, counters: Any, reserve: Any) -> RingArrays:
        end, none = self.width - 16, np.zeros(0, np.int64)
        book = column(memory, end + 8, np.int32), column(memory, end, np.int64), column(memory, end + 12, np.int32)
        extra = (np.zeros(undo_size(self.num_envs, 2 * self.num_envs), np.int64), reserve) if self.undo else ()
        return RingArrays(self.rows, *sizes, self.state.copy(), counters, memory, *book, *flags_of(memory),
                          none.astype(np.int32), none, *extra)  # fmt: skip

    def bytes(self) -> list[list[bytes]]:
        return [[np.asarray(x).tobytes() for x in ring] for ring in self.rings]

    def add(self) -> None:
        """A few envs step, some twice; sometimes an ending's final observation is missing."""
        rng = self.rng
        envs = rng.permutation(self.num_envs)[: int(rng.integers(1, self.num_envs + 1))]
        if rng.random() < 0.2:
            envs = rng.integers(0, self.num_envs, int(rng.integers(1, 2 * self.num_envs + 1)))
        count = len(envs)
        staged, final = (rng.integers(0, 256, (count, self.width), np.uint8) for _ in range(2))
        reward, terminated, truncated = flags_of(staged)
        reward[:] = np.where(rng.random(count) < 0.05, rng.choice([np.inf, np.nan]), rng.standard_normal(count))
        terminated[:], truncated[:] = rng.random((2, count)) < 0.2
        mode, watch, plans = self.mode or int(rng.random() < 0.8), rng.random() < 0.8, rng.random() < 0.5
        room = count * (2 * self.rule.history + 4) if watch else 0
        before, found = set(anchors(self.rings[0])), list[Any]()
        for way, ring in enumerate(self.rings):
            ring.undo[:1] = 0
            given = StagedRows(envs.astype(np.int64), staged, final, *flags_of(staged),
                               *np.full((3, count), -9, np.int64), np.zeros(room, np.int64),
                               np.zeros(room, np.uint8))  # fmt: skip
            calls: Any = plain if way else core
            arguments = (ring, given) if way else (self.core, core.StagedRows(given))
            planned = calls.plan_rows(*arguments, mode) if plans else 0
            notes = [x.tolist() for x in given[6:9]]
            result = calls.add_rows(*arguments, mode)
            assert planned == (min(result, 0) if plans else 0)
            assert not plans or result < 0 or [x.tolist() for x in given[6:8]] == notes[:2]
            found.append((result, notes, *(x.tolist() for x in given[6:9])))
            if not way and watch and result >= 0:
                for place, opens in zip(given.where[:result].tolist(), given.opens[:result].tolist(), strict=True):
                    assert (place in before) != opens
                    before ^= {place}
        assert found[0] == found[1]
        assert self.bytes()[0] == self.bytes()[1]
        assert not watch or found[0][0] < 0 or before == set(anchors(self.rings[0]))

    def disturb(self) -> None:
        """An episode is interrupted, an env cleared, or an episode has gone on for very long."""
        chance, e = self.rng.random(), int(self.rng.integers(self.num_envs))
        more = LONGEST - int(self.rng.integers(1, 5)) - int(self.state[e, NEXT])
        for ring in self.rings:
            index, head = int(ring.state[e, NEXT]), int(ring.state[e, 0])
            if chance < 0.06:
                ring.state[e, NEXT] = 0
            elif chance < 0.1:
                ring.state[e, TAIL], ring.state[e, NEXT] = head, 0
            elif chance < 0.2 and 0 < index < 100 and self.mode != 2:
                ring.state[e, NEXT] += more - index
                ring.state[e, TAIL] = max(ring.state[e, TAIL], head - index)
                for number in range(head - min(index, self.rows), head):
                    ring.step[e * self.rows + number % self.rows] += more - index
            ring.counters[1] = len(anchors(ring))


@given(st.integers(0, 2**32), st.sampled_from([0, 0, 0, 2, 3]))
@settings(max_examples=2 * settings.default.max_examples)
def test_random_plays_lead_to_the_same_bits(seed: int, mode: int) -> None:
    play = Play(np.random.default_rng(seed), mode)
    for _ in range(20):
        play.add()
        play.disturb()


def test_refused_rows_change_nothing() -> None:
    refused = set[int]()
    for seed in range(60):
        play = Play(np.random.default_rng(seed))
        for _ in range(12):
            before = play.bytes()[0]
            staged = np.zeros((1, play.width), np.uint8)
            staged[0, 4] = 1
            given = StagedRows(np.zeros(1, np.int64), staged, staged, *flags_of(staged), *np.zeros((3, 1), np.int64),
                               np.zeros(0, np.int64), np.zeros(0, np.uint8))  # fmt: skip
            assert core.add_rows(play.core, core.StagedRows(given), 0) == -1
            assert play.bytes()[0] == before
            play.rings[0].undo[:1] = 0
            result = core.add_rows(play.core, core.StagedRows(given), 1)
            refused.add(result)
            if result < 0:  # the words of a note that does not count may be anything
                unnoted = len(play.rings[0]) - 2
                assert play.bytes()[0][:unnoted] == before[:unnoted]
                assert play.rings[0].undo[0] == 0
    assert refused == {0, USED_UP}


# What does not fit is refused


def staged_rows(play: Play, **changed: Any) -> Any:
    """Three rows of env 0, with some members changed."""
    staged, final = np.zeros((2, 3, play.width), np.uint8)
    given = StagedRows(np.zeros(3, np.int64), staged, final, *flags_of(staged), *np.zeros((3, 3), np.int64),
                       np.zeros(60, np.int64), np.zeros(60, np.uint8))  # fmt: skip
    return core.StagedRows(given._replace(**changed))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("envs", np.zeros(2, np.int64)), ("envs", np.zeros(3, np.int32)), ("staged", np.zeros((2, 48), np.uint8)),
        ("final", np.zeros((3, 47), np.uint8)), ("final", np.zeros((3, 48), np.int8)),
        ("reward", np.zeros(3)), ("reward", np.zeros(2, np.float32)), ("terminated", np.zeros(4, np.uint8)),
        ("truncated", np.zeros(3, np.int64)), ("places", np.zeros(2, np.int64)), ("finals", np.zeros(4, np.int64)),
        ("tails", np.zeros(6, np.int64)[::2]), ("opens", np.zeros(59, np.uint8)), ("where", [1]),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_each_other_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        staged_rows(Play(np.random.default_rng(3)), **{name: wrong})


def test_rows_of_another_ring_are_refused_before_anything_changes() -> None:
    play = Play(np.random.default_rng(1))
    before = play.bytes()
    wide = np.zeros((3, play.width + 16), np.uint8)
    small: dict[str, Any] = {"where": np.zeros(1, np.int64), "opens": np.zeros(1, np.uint8)}
    wrong: list[tuple[Any, int]] = [
        (staged_rows(play, envs=np.array([0, play.num_envs, 0])), 1),
        (staged_rows(play, envs=np.array([0, -1, 0])), 1),
        (staged_rows(play, staged=wide, final=wide), 1),
        (staged_rows(play, **small), 1),
        (staged_rows(play), 4),
        (staged_rows(play), -1),
    ]
    for rows, mode in wrong:
        for call in (core.add_rows, core.plan_rows):
            with pytest.raises((IndexError, ValueError)):
                call(play.core, rows, mode)
    assert play.bytes() == before


def test_other_envs_take_the_place_of_those_before() -> None:
    play = Play(np.random.default_rng(5))
    rows = staged_rows(play)
    for wrong in (np.zeros(2, np.int64), np.zeros(3, np.int32), [0, 0, 0], np.zeros(6, np.int64)[::2]):
        with pytest.raises((TypeError, ValueError)):
            rows.take_envs(wrong)
    last = play.num_envs - 1
    before = play.rings[0].state[:, 0].copy()
    rows.take_envs(np.full(3, last))  # nobody else holds this array
    play.rings[0].undo[:1] = 0
    if core.add_rows(play.core, rows, 1) >= 0:
        assert (play.rings[0].state[:, 0] - before).tolist() == [0] * last + [3]


@given(st.integers(0, 2**32))
def test_rows_are_scattered_to_their_places_and_nowhere_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, count = int(rng.integers(1, 20)), int(rng.integers(1, 300)), int(rng.integers(0, 12))
    source, nbytes = rng.integers(0, 256, (count, width), np.uint8), int(rng.integers(0, width + 1))
    places = np.where(rng.random(count) < 0.7, rng.permutation(rows + count)[:count], -1).astype(np.int64)
    fast, want = np.full((2, rows + count, width), 7, np.uint8)
    core.scatter_rows(source, places, fast, nbytes)
    plain.scatter_rows(source, places, want, nbytes)
    assert np.array_equal(fast, want)


def test_places_beyond_the_last_row_and_rows_that_are_too_short_are_refused() -> None:
    source, target, places = np.ones((3, 8), np.uint8), np.zeros((4, 8), np.uint8), np.array([0, 1, 2])
    for arguments in (
        (source, np.array([0, 4, 1]), target, 8), (source[:2], places, target, 8), (source, places, target, 9),
        (source[:, :4], places, target, 8), (source, places, target[:, :4], 8), (source, places, target, -1),
    ):  # fmt: skip
        with pytest.raises((IndexError, ValueError)):
            core.scatter_rows(*arguments)
    assert not target.any()
