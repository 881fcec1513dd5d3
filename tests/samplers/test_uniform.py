"""Uniform draws, with and without replacement: every transition equally often."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relive import (
    FrameStack,
    WithoutReplacement,
)
from relive.errors import (
    EmptyError,
    ParameterError,
)
from support.effort import first_of
from support.fit import check_fit, deviation, equal, many
from support.twins import SAMPLERS, Twin, contents
from support.worlds import WORLDS, check_fit_of_one_percent, uneven


@pytest.mark.parametrize("name", first_of(2, WORLDS))
def test_uniform_draws_every_anchor_equally_often_in_worlds(name: str) -> None:
    twin = WORLDS[name]()
    count = 300_000 if name == "almost without anchors" else 3_000_000
    drawn = many(twin, count)
    chances = equal([twin.truth.index(row) for row in twin.anchors()])
    if count < 1_000_000:
        assert set(drawn.tolist()) == set(chances)
        assert deviation(drawn, chances) < 5
    else:
        check_fit(drawn, chances)


def test_uniform_draws_of_successive_batches_are_equally_often_each_and_independent() -> None:
    twin = Twin(1, 9)
    for _ in range(20):
        twin.add(".")
    anchors = equal([twin.truth.index(row) for row in twin.anchors()])
    batches = [twin.buffer.sample(64)["index"].numpy() for _ in range(12_000)]
    drawn = np.concatenate(batches)
    check_fit_of_one_percent(drawn, anchors)
    first, second = (np.array([batch[i] for batch in batches]) for i in (0, 1))
    pairs = {a * 1000 + b: 1 / len(anchors) ** 2 for a in anchors for b in anchors}
    assert deviation(first * 1000 + second, pairs) < 5
    assert deviation(first[:-1] * 1000 + first[1:], pairs) < 5


def test_frames_that_have_left_are_no_reason_to_draw_some_anchors_more_often() -> None:
    twin = uneven(view=FrameStack(4))
    check_fit(many(twin, 3_000_000), equal([twin.truth.index(row) for row in twin.anchors()]))


# Without replacement.


def test_an_epoch_holds_every_transition_exactly_once_whatever_the_batch_size() -> None:
    twin = uneven(sampler=WithoutReplacement())
    every = sorted(twin.truth.index(row) for row in twin.anchors())
    for size in (1, 2, 5, 7, len(every)):
        fresh = uneven(sampler=WithoutReplacement())
        drawn = torch.cat([fresh.buffer.sample(size)["index"] for _ in range(4 * len(every) // size + 1)]).tolist()
        for epoch in range(len(drawn) // len(every)):
            assert sorted(drawn[epoch * len(every) : (epoch + 1) * len(every)]) == every
    orders = [tuple(twin.buffer.sample(len(every))["index"].tolist()) for _ in range(50)]
    assert len(set(orders)) == 50


def test_epochs_are_uniform_permutations() -> None:
    twin = Twin(1, 9, sampler=WithoutReplacement())
    for _ in range(6):
        twin.add(".")
    orders = np.stack([twin.buffer.sampler.draw(5, key, 1, 1)[0] for key in range(40_000)])  # places are indices here
    ranks = (orders * np.array([10_000, 1000, 100, 10, 1])).sum(1)
    chances = equal(sorted({int(rank) for rank in ranks}))
    assert len(chances) == 120
    check_fit_of_one_percent(ranks, chances)


def test_what_comes_during_an_epoch_waits_for_the_next_and_what_goes_is_passed_over() -> None:
    twin = Twin(1, 11, sampler=WithoutReplacement())
    for _ in range(11):
        twin.add(".")
    first = twin.buffer.sample(4)["index"].tolist()
    for _ in range(3):
        twin.add(".")  # three come, three go
    rest = [i for i in range(3, 10) if i not in first]
    drawn = twin.buffer.sample(len(rest))["index"].tolist()
    assert sorted(drawn) == rest
    assert sorted(twin.buffer.sample(10)["index"].tolist()) == list(range(3, 13))


def test_an_epoch_of_which_nothing_is_left_gives_way_to_the_next_at_once() -> None:
    for gone in (30, 300):
        twin = Twin(1, 30, sampler=WithoutReplacement())
        for _ in range(30):
            twin.add(".")
        twin.buffer.sample(1)
        for _ in range(gone):
            twin.add(".")
        for size in (1, 4, 24):
            batch = twin.buffer.sample(size)
            assert len(batch) == size
            twin.check_batch(batch)
        assert len(set(twin.buffer.sample(29)["index"].tolist())) == 29


def test_an_epoch_survives_a_clear_and_a_change_of_view() -> None:
    twin = Twin(1, 12, sampler=WithoutReplacement()).play(*[".."[0]] * 8)
    twin.buffer.sample(2)
    twin.clear()
    with pytest.raises(EmptyError):
        twin.buffer.sample(1)
    twin.play(".", ".", ".", "T")
    assert sorted(twin.buffer.sample(4)["index"].tolist()) == [8, 9, 10, 11]
    twin.play(*"." * 12)
    twin.buffer.sample(2)
    twin.buffer.view = FrameStack(5)
    for _ in range(6):
        twin.check_batch(twin.buffer.sample(3))


def test_more_than_there_is_cannot_be_drawn_without_replacement() -> None:
    twin = Twin(1, 12, sampler=WithoutReplacement()).play(".", ".", ".", "T")
    before = contents(twin.buffer)
    with pytest.raises(ParameterError, match=r"sample\(5\): there are 4 transitions"):
        twin.buffer.sample(5)
    assert contents(twin.buffer) == before
    assert sorted(twin.buffer.sample(4)["index"].tolist()) == [0, 1, 2, 3]


def test_neither_the_newest_row_nor_one_that_starts_nothing_is_ever_drawn() -> None:
    for make in SAMPLERS.values():
        twin = Twin(2, 6, sampler=make())
        for kinds in ("..", "T.", "..", ".U", "..", "B.", "..", ".."):
            twin.add(kinds)
            anchors = {twin.truth.index(row) for row in twin.anchors()}
            for _ in range(20):
                if anchors:
                    assert set(twin.buffer.sample(min(2, len(anchors)))["index"].tolist()) <= anchors
