"""A signal handler that clears the replay at any line of a draw: a right batch, or an EmptyError that says why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relive import FrameStack, NStep, Transition
from relive import Sequence as SequenceView
from relive.cluster.plan import ShardSampler, Share
from relive.errors import EmptyError
from support.effort import often
from support.interrupts import broken_off
from support.twins import SAMPLERS, Twin, batch_leaves

VIEWS: dict[str, Callable[[], Any]] = {
    "transitions": lambda: Transition(0.5),
    "3-step": lambda: NStep(3, 0.5),
    "stacks": lambda: FrameStack(2, NStep(2, 0.5)),
    "sequences": lambda: SequenceView(2, 1, "none", 1, 0.5),
}


def filled(sampler: str, view: str) -> Twin:
    twin = Twin(2, 9, view=VIEWS[view](), sampler=SAMPLERS[sampler]())
    for kinds in ("..", ".T", "U.", "..", ".."):
        twin.add(kinds)
    return twin


def clears_at(twin: Twin, at: int, call: Callable[[], Any]) -> bool:
    """Make a call in which a handler clears the replay at event ``at``; False if the call has fewer."""
    reached = False

    def handler() -> None:
        nonlocal reached
        reached = True
        sys.settrace(None)  # nothing of the handler's own is traced
        twin.buffer.clear()

    broken_off(call, at, handler)
    return reached


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_replay_cleared_at_any_line_of_sample_gives_a_batch_from_before_or_says_what_happened(
    sampler: str, view: str
) -> None:
    outcomes, at, step = set[str](), 0, often(5, 1)

    def sample() -> None:
        before = twin.anchors()
        try:
            batch = twin.buffer.sample(4)
        except EmptyError as error:
            outcomes.add(str(error))
            return
        twin.check_batch(batch, among=before)
        weight = batch_leaves(batch).get(("weight",))
        assert weight is None or np.isfinite(weight).all()

    while clears_at(twin := filled(sampler, view), at, sample):
        twin.buffer.check()
        at += step
    assert at > 10 * step, "the handler ran at many lines"
    assert outcomes, "some were late enough to find nothing"
    allowed = ("add steps", "taken away while it was drawn")
    assert all(any(words in outcome for words in allowed) for outcome in outcomes), outcomes


@pytest.mark.parametrize("sampler", ["uniform", "prioritized, stratified"])
def test_a_shard_cleared_at_any_line_of_its_draw_draws_nothing(sampler: str) -> None:
    at, none = 0, 0

    def draw() -> None:
        nonlocal none
        drawn = ShardSampler(twin.buffer).draw_share(Share(3, 1, 6.0, np.array([0.5, 2.0, 4.0])))
        none += not len(drawn.places)

    while clears_at(twin := filled(sampler, "3-step"), at, draw):
        at += often(3, 1)
    assert none > 2
