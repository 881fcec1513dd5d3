"""Ctrl-C at any line of a replay that is being served: no batch comes twice or out of order, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from relive import Prioritized, ReplayBuffer, WithoutReplacement
from support.effort import often
from support.interrupts import broken_off
from support.shared_buffers import IMAGES, replay_of, written
from support.twins import same_batches

DEPTH = 3


def numbers_of(batches: list[Any], plain: ReplayBuffer) -> list[int]:
    """Which batches of a replay these are."""
    known = [plain.sample(4) for _ in range(30)]
    return [next(k for k, batch in enumerate(known) if same_batches(batch, given)) for given in batches]


CALLS: dict[str, Callable[[ReplayBuffer, Any, list[Any]], Any]] = {
    "next": lambda replay, stream, taken: taken.append(next(stream)),
    "sample": lambda replay, stream, taken: taken.append(replay.sample(4)),
    "stats": lambda replay, stream, taken: replay.stats(),
    "close": lambda replay, stream, taken: stream.close(),
}


def assert_order_survives(name: str, sampler: Any, at: int) -> bool:
    """Break off one call at an event; whether it had so many. The batches that come afterwards must be in order."""
    replay, taken = replay_of(20, sampler=sampler()), list[Any]()
    stream = replay.serve(4, DEPTH)
    taken += [next(stream) for _ in range(2)]
    off = broken_off(lambda: CALLS[name](replay, stream, taken), at)
    if name != "close":
        taken += [next(stream) for _ in range(4)]
    stream.close()
    taken += [replay.sample(4) for _ in range(3)]
    replay.check()
    numbers = numbers_of(taken, replay_of(20, sampler=sampler()))
    order = sorted(numbers) if name != "sample" else sorted(set(numbers))
    assert len(set(numbers)) == len(numbers), f"{name} at {at}: {numbers}"
    assert name == "sample" or numbers == order, f"{name} at {at}: {numbers}"
    for t in range(20, 23):
        replay.add(written(IMAGES, 2, t))
    assert len(list(replay.serve(4, DEPTH, count=4))) == 4
    return off


PRIORITIZED, EPOCHS = partial(Prioritized, beta=(0.4, 1.0, 9)), WithoutReplacement


@pytest.mark.parametrize(
    ("name", "sampler"),
    [*((name, PRIORITIZED) for name in CALLS), *((name, EPOCHS) for name in CALLS if name != "sample")],
)
@pytest.mark.parametrize("every", [often(29, 11), pytest.param(1, marks=pytest.mark.slow)])
def test_a_call_broken_off_while_batches_are_served_leaves_their_order(
    name: str, sampler: Any, every: int, tried: Callable[..., None]
) -> None:
    every = 1 if name == "close" else every  # which has few lines
    at = list(CALLS).index(name) % every
    while assert_order_survives(name, sampler, at):
        tried("an exception at a line while batches are served")
        at += every
    assert at > every


def test_serving_that_was_broken_off_as_it_began_can_begin_again() -> None:
    at, replay, kept = 0, replay_of(20), list[Any]()
    while broken_off(lambda: kept.append(replay.serve(4, DEPTH)), at):
        replay.serve(4, DEPTH).close()
        at += 1
    assert at > 10
