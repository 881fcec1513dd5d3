"""Sequences of a rollout: exactly the windows that a list of episodes has, with nothing of another episode in them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle
from support.effort import in_ci, often
from support.window_worlds import (
    FACTS,
    RICH,
    World,
    both_pasts,
    check_all,
    check_batch,
    filled,
    found_in,
    patterns,
    strides,
    world_of,
    worlds,
)

LETTERS = ".TUBmM"

OVERLAPS = ("none", "half", "max")

# The oracle, and that everything is there


@pytest.mark.parametrize("length", range(1, 9))
def test_the_oracles_windows_are_those_of_both_definitions(length: int) -> None:
    """The definition by first steps, and the one by last steps that a replay goes by."""
    for count, stride in itertools.product(range(1, 20), range(1, length + 1)):
        found = oracle.windows(count, length, stride)
        firsts = [i for i in range(0, count, stride) if i == 0 or i + length - stride < count]
        assert found == [(i, min(length, count - i)) for i in firsts]
        ends = [j for j in range(count) if j >= length - 1 and (j - length + 1) % stride == 0]
        by_last = [(j - length + 1, length) for j in ends]
        if count - 1 not in ends:
            tail = 0 if count < length else stride * math.ceil((count - length) / stride)
            by_last.append((tail, count - tail))
        assert found == by_last
        assert oracle.windows(count, length, stride, drop_tail=True) == [w for w in found if w[1] == length]
        assert {t for first, steps in found for t in range(first, first + steps)} == set(range(count))


def check_every_window(world: World) -> None:
    rollout = filled(world)
    for options in ({}, {"complete": True}, {"drop_tail": True}, {"complete": True, "drop_tail": True}):
        whole = check_all(world, rollout, None, "none", len(world.letters), **options)
        assert whole, "no pattern ends"
        for length in range(1, len(world.letters) + 3):
            for overlap, stride in strides(length):
                check_all(world, rollout, length, overlap, stride, **options)


@pytest.mark.parametrize(("letters", "steps"), [(LETTERS, 1), (LETTERS, 2), (LETTERS, 3), in_ci(".TmM", 4)])
def test_every_short_pattern_has_exactly_the_windows_of_its_episodes(letters: str, steps: int) -> None:
    check_every_window(both_pasts(patterns(letters, steps)))


@pytest.mark.slow
@pytest.mark.parametrize(("letters", "steps"), [(LETTERS, 4), (".TmM", 5), (".T", 8)])
def test_every_longer_pattern_has_exactly_the_windows_of_its_episodes(letters: str, steps: int) -> None:
    check_every_window(both_pasts(patterns(letters, steps)))


def check_two_envs(pattern: tuple[str, ...], steps: int) -> None:
    world = world_of(np.array(pattern).reshape(steps, 2))
    if not world.mask.any():
        return
    rollout = filled(world)
    for length, (overlap, stride) in ((None, ("none", steps)), *((n, s) for n in (1, 2, 3) for s in strides(n))):
        check_all(world, rollout, length, overlap, stride)


def test_every_pattern_of_two_envs_has_exactly_the_windows_of_its_episodes() -> None:
    for pattern in [*itertools.product(".Tm", repeat=4)][:: often(7, 1)]:
        check_two_envs(pattern, 2)
    every = list(itertools.product(".TmM", repeat=6))
    for i in np.random.default_rng(0).choice(len(every), often(9, 40), replace=False):
        check_two_envs(every[i], 3)


@pytest.mark.slow
def test_every_longer_pattern_of_two_envs_has_exactly_the_windows_of_its_episodes() -> None:
    for pattern in itertools.product(".TmM", repeat=6):
        check_two_envs(pattern, 3)


@given(
    world=worlds(),
    length=st.one_of(st.none(), st.integers(1, 30)),
    share=st.floats(0, 0.999),
    complete=st.booleans(),
    drop_tail=st.booleans(),
)
def test_any_rollout_has_exactly_the_windows_of_its_episodes(
    world: World, length: int | None, share: float, complete: bool, drop_tail: bool
) -> None:
    overlap = "none" if length is None else int(share * length)
    stride = len(world.letters) if length is None else length - int(overlap)
    options = {"complete": complete, "drop_tail": drop_tail} if complete or drop_tail else {}
    if world.mask.any():
        check_all(world, filled(world), length, overlap, stride, **options)


@given(
    world=worlds(RICH, longest=12),
    length=st.sampled_from([None, 1, 3, 5, 13]),
    overlap=st.sampled_from(OVERLAPS),
    time_first=st.booleans(),
    sizes=st.sampled_from([{}, {"batch_size": 3}, {"num_batches": 1}, {"batch_steps": 7}]),
    epochs=st.integers(1, 3),
    some=st.booleans(),
)
def test_fields_of_any_nesting_dtype_and_size_are_what_they_were(
    world: World, length: int | None, overlap: Any, time_first: bool, sizes: Any, epochs: int, some: bool
) -> None:
    if not world.mask.any():
        return
    overlap = "none" if length is None else overlap
    stride = len(world.letters) if length is None else dict(strides(length))[overlap]
    rollout = filled(world)
    fields = ("obs", "action_mask") if some else None
    want = sorted(world.stretches(length, stride) * epochs)
    batches = list(
        rollout.sequences(length, overlap=overlap, time_first=time_first, epochs=epochs, fields=fields, **sizes)
    )
    assert sorted(found_in(batches)) == want
    for seq in batches:
        names = set(fields or set(RICH.names) - {"hidden"})
        assert set(seq) == names | FACTS | {"mask", "is_start", "hidden"}
        check_batch(world, seq, length, time_first=time_first)


@pytest.mark.parametrize("length", [1, 2, 3, 7, None])
def test_without_overlap_every_real_step_comes_exactly_once_an_epoch(length: int | None) -> None:
    world = world_of(["..T.mU.....", "T.T..M....m", "mm........U"], RICH)
    rollout = filled(world)
    for epoch in range(3):
        steps: Counter[tuple[int, int]] = Counter()
        for seq in rollout.sequences(length, batch_size=2):
            steps.update((env, start + i) for env, start, count, _ in found_in([seq]) for i in range(count))
        assert steps == Counter((n, t) for t, n in np.argwhere(world.mask).tolist()), epoch


def test_with_overlap_a_step_comes_as_often_as_there_are_windows_over_it() -> None:
    rollout = filled(world_of(["." * 9]))
    counts = {}
    for overlap in OVERLAPS:
        steps = [start + i for _, start, n, _ in found_in(rollout.sequences(4, overlap=overlap)) for i in range(n)]
        counts[overlap] = [steps.count(t) for t in range(9)]
    assert counts == {
        "none": [1] * 9,
        "half": [1, 1, 2, 2, 2, 2, 2, 2, 1],
        "max": [1, 2, 3, 4, 4, 4, 3, 2, 1],
    }
