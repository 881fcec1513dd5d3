"""Priorities of the compiled core, held to their definition to the bit; a bad batch changes nothing."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from definitions import priorities as plain
from relive import core
from relive.core.words import ALPHA, LARGEST, UNUSUAL
from support.effort import first_of, often
from support.ratings import Pair


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.6, 1.3]), st.booleans(), st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_rows_are_rated_as_by_the_definition_and_what_is_gone_is_left_alone(
    seed: int, alpha: float, minima: bool, wide: bool
) -> None:
    pair = Pair(seed, alpha, minima)
    index = pair.index()
    if len(index):
        index = pair.rng.choice(index, int(pair.rng.integers(0, 40)))  # some twice
    gone = np.arange(min(pair.num_envs, int(pair.ring.oldest.min()) * pair.num_envs))
    index = pair.rng.permutation(np.concatenate([index, gone]))
    errors = pair.rng.normal(0, 3, len(index)).astype(np.float64 if wide else np.float32)
    assert pair.rate(index, errors) == len(gone)
    known = dict(zip(index.tolist(), np.abs(errors).astype(np.float32), strict=True))
    for given_, error in known.items():
        place = int(pair.ring.find(np.array([given_]))[0][0])
        if place >= 0:
            assert pair.plain.errors[place] == error
            assert math.isclose(pair.plain.nodes[place], (float(error) + 1e-6) ** alpha, rel_tol=1e-15)
    assert pair.plain.facts[LARGEST] >= max((error for i, error in known.items() if i not in gone), default=0.0)


def filled(seed: int) -> Pair:
    """Priorities of rows of which some can be drawn."""
    pair = Pair(seed)
    while not len(pair.index()):
        pair = Pair(int(pair.rng.integers(2**32)))
    return pair


@pytest.mark.parametrize("seed", first_of(1, range(5)))
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("wrong", ["negative", "never issued", "nan", "inf", "too large"])
def test_a_batch_with_something_unusual_changes_nothing(seed: int, wide: bool, wrong: str) -> None:
    pair = filled(seed + 100)
    index = pair.rng.choice(pair.index(), 6)
    errors = pair.rng.normal(0, 3, 6).astype(np.float64 if wide else np.float32)
    at = int(pair.rng.integers(6))
    if wrong in ("negative", "never issued"):
        index[at] = -1 if wrong == "negative" else int(pair.ring.heads.max()) * pair.num_envs + pair.num_envs
    elif wrong == "too large":
        for memory in (pair.plain, pair.memory):
            memory.facts[ALPHA], errors[at] = 10.0, 1e35
    else:
        errors[at] = math.nan if wrong == "nan" else -math.inf
    before = pair.state()
    assert pair.rate(index, errors) == UNUSUAL
    assert pair.state() == before


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=settings.default.max_examples // 2)
def test_changes_are_noted_as_by_the_definition_and_a_row_without_weight_is_looked_at(seed: int, minima: bool) -> None:
    pair = Pair(seed, minima=minima)
    places = pair.rng.integers(0, len(pair.plain.errors), int(pair.rng.integers(0, 20)))
    drawable = pair.rng.integers(0, 2, len(places)).astype(np.uint8)
    pair.core.note_drawable(places, drawable, 0.7, 0.3)
    plain.note_drawable(pair.plain, places.tolist(), drawable.tolist(), 0.7, 0.3)
    pair.agree()
    index = pair.ring.index_of(pair.ring.places())
    pair.rate(index, pair.rng.gamma(1.0, 3.0, len(index)).astype(np.float32))


@given(st.lists(st.floats(0, width=32), min_size=1, max_size=20), st.floats(0, 3), st.floats(1e-12, 1.0))
@settings(max_examples=settings.default.max_examples // 2)
def test_powers_are_those_of_the_definition(errors: list[float], alpha: float, eps: float) -> None:
    sizes, found = np.array(errors, np.float32), np.empty(len(errors))
    core.powers(sizes, alpha, eps, found)
    assert found.tolist() == [plain.power(size, alpha, eps) for size in sizes]


@pytest.mark.parametrize("time_first", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sequences_are_rated_as_by_the_definition(dtype: str, time_first: bool) -> None:
    for seed in range(often(7, 20)):
        pair = filled(seed)
        rng = pair.rng
        index, mask = rng.choice(pair.index(), 9), rng.random((9, 6)) < 0.7
        errors = torch.from_numpy(rng.normal(0, 3, (9, 6))).to(getattr(torch, dtype))
        if seed % 3 == 0:
            errors[rng.integers(9), rng.integers(6)] = rng.choice([math.nan, math.inf])
        given_ = [errors, torch.from_numpy(mask)]
        given_ = [x.T.contiguous() if time_first else x for x in given_]
        found = pair.core.rate(torch.from_numpy(index), *given_, time_first, 0.9)
        assert found == plain.rate_sequences(pair.plain, index.tolist(), errors.double().numpy(), mask, 0.9)
        pair.agree()


def test_what_is_no_batch_of_numbers_is_left_to_the_caller() -> None:
    pair = filled(1)
    index = pair.index()[:1]
    errors, before = np.ones(1, np.float32), pair.state()
    for which, sizes in (
        (index.astype(np.int32), errors), (index, errors.astype(np.int64)), (index, [1.0]), (None, errors),
        (index, errors[:, None]), (index[None], errors), (index, np.ones(2)), (index.astype(">i8"), errors),
        (index, torch.ones(1, device="meta")), (index, torch.ones(1, dtype=torch.bfloat16)),
        (np.ma.array(index), errors),
    ):  # fmt: skip
        assert pair.core.rate(which, sizes) == UNUSUAL
    for sizes, mask in (
        (errors, np.ones(1, bool)), (errors[:, None], np.ones(1, bool)), (errors[:, None], np.ones((1, 2), bool)),
        (errors[:, None], np.ones((1, 1), np.uint8)), (np.ones((2, 1)), np.ones((2, 1), bool)), (errors[:, None], 3),
    ):  # fmt: skip
        assert pair.core.rate(index, sizes, mask) == UNUSUAL
    pair.agree()
    assert pair.state() == before


def test_arrays_that_do_not_fit_are_refused() -> None:
    pair = filled(2)
    memory, none = pair.memory, np.empty(0)
    nodes = core.Tree(memory.nodes, len(memory.errors), none)
    ints, floats, doubles = np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(1)
    rest = pair.ring.core, memory.undo
    calls: list[Any] = [
        lambda: core.Priorities(nodes, memory.errors[1:], memory.facts, *rest),
        lambda: core.Priorities(nodes, memory.errors, memory.facts[1:], *rest),
        lambda: core.Priorities(nodes, memory.errors, memory.facts, pair.ring.core, np.zeros(1)),
        lambda: core.Priorities(core.Tree(np.zeros(9), 1, none), floats, memory.facts, *rest),
        lambda: pair.core.note_drawable(ints - 1, np.ones(1, np.uint8), 1.0, 1.0),
        lambda: pair.core.note_drawable(ints + len(memory.errors), np.ones(1, np.uint8), 1.0, 1.0),
        lambda: pair.core.note_drawable(ints, np.ones(2, np.uint8), 1.0, 1.0),
        lambda: core.powers(floats, 1.0, 1.0, doubles[1:]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"expected|fit"):
            call()
    for tree_, ring in ((None, pair.ring.core), (nodes, None)):
        with pytest.raises(TypeError):
            core.Priorities(cast("Any", tree_), memory.errors, memory.facts, cast("Any", ring), none)
    pair.agree()
