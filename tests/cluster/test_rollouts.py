"""Rollouts on their way to a learner: each is consumed once, whatever dies on the way."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from relive.cluster.messages import RolloutQueue
from relive.cluster.rollouts import Rollouts
from relive.errors import FieldError, LifecycleError, ParameterError
from support.clusters import sent
from support.effort import often


class QueueLink:
    """A queue in this process, whose answers can be lost, and that can die."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.queue = capacity, RolloutQueue(capacity)
        self.lose: list[str] = []
        """Methods whose next answer is lost, although they are run."""

    def call(self, shard: int, method: str, *arguments: Any) -> Any:
        try:
            answer = sent(getattr(self.queue, method)(*sent(arguments)))
        except LifecycleError as error:
            return error
        if method in self.lose:
            self.lose.remove(method)
            return None
        return [answer]

    def answers(self, calls: Any, timeout: float) -> Any:
        if isinstance(calls[0], Exception):
            raise calls[0]
        return ({}, {0}) if calls[0] is None else ({0: calls[0][0]}, set())

    def close(self) -> None: ...

    def restart(self) -> None:
        self.queue = RolloutQueue(self.capacity)


def made(**options: Any) -> tuple[Rollouts, QueueLink]:
    links: list[QueueLink] = []
    rollouts = Rollouts(connect=lambda n: links.append(QueueLink(n)) or links[0], **{"timeout": 0.5} | options)
    return rollouts, links[0]


def number(value: int) -> dict[str, Any]:
    return {"obs": np.full((2, 3), value, np.float32), "more": {"h": torch.tensor([value])}}


def got(rollouts: Rollouts, version: int = 0) -> int:
    rollout = rollouts.get(version, timeout=0.01)
    assert (rollout.data["obs"] == rollout.data["more"]["h"].item()).all()
    rollout.data["obs"].zero_()  # memory of its own
    return rollout.data["more"]["h"].item()


def empty(rollouts: Rollouts) -> None:
    with pytest.raises(LifecycleError, match="no rollout has come"):
        rollouts.get(0, timeout=0.0)


def test_rollouts_come_in_order_each_once():
    rollouts, _ = made()
    one, two = rollouts.sender("one"), rollouts.sender("two")
    for k in range(4):
        one.put(number(2 * k), 0)
        two.put(number(2 * k + 1), 0)
    assert [got(rollouts) for _ in range(8)] == list(range(8))
    empty(rollouts)
    assert rollouts.stats() == {"came": 8, "kept": 0, "received": 8, "stale": 0, "lost": 0, "repeated": 0}


def test_a_rollout_may_have_numbers_without_axes():
    rollouts, _ = made()
    rollouts.sender("one").put({"obs": np.zeros((2, 3)), "more": {"h": torch.tensor(7, dtype=torch.bfloat16)}}, 0)
    data = rollouts.get(0, timeout=0.01).data
    assert data["more"]["h"].shape == ()
    assert (data["more"]["h"].dtype, data["more"]["h"].item()) == (torch.bfloat16, 7)


def test_rollouts_that_are_too_old_are_dropped_and_counted():
    rollouts, _ = made(max_staleness=2)
    sender = rollouts.sender("one")
    for version in (0, 1, 2, 3):
        sender.put(number(version), version)
    assert got(rollouts, 4) == 2
    assert got(rollouts, 5) == 3
    assert rollouts.stats()["stale"] == 2
    assert rollouts.stats()["lost"] == 0


def test_a_full_queue_makes_its_workers_wait():
    rollouts, _ = made(capacity=2)
    sender = rollouts.sender("one")
    sender.put(number(0), 0)
    sender.put(number(1), 0)
    with pytest.raises(LifecycleError, match="full"):
        sender.put(number(2), 0, timeout=0.0)
    assert got(rollouts) == 0
    assert got(rollouts) == 1  # which settles the one before
    sender.put(number(2), 0, timeout=0.0)
    assert got(rollouts) == 2


@pytest.mark.parametrize("consumed", range(4))
def test_a_learner_that_comes_back_gets_what_its_state_lacks_and_nothing_else(consumed: int):
    rollouts, link = made(settle_each=False)
    sender = rollouts.sender("one")
    for k in range(5):
        sender.put(number(k), 0)
    assert [got(rollouts) for _ in range(consumed)] == list(range(consumed))
    saved = json.loads(json.dumps(rollouts.position()))
    assert got(rollouts) == consumed  # and it dies before the next save
    again = Rollouts(connect=lambda _: link, settle_each=False, timeout=0.5)
    again.resume(saved)
    assert [got(again) for _ in range(5 - consumed)] == list(range(consumed, 5))
    empty(again)
    again.settle()
    assert again.stats()["kept"] == 0


@pytest.mark.parametrize("method", ["put", "fetch", "room", "begin", "settle"])
def test_a_lost_answer_loses_and_doubles_nothing(method: str):
    rollouts, link = made()
    sender = rollouts.sender("one")
    found, count = [], often(2, 4)
    for k in range(count):
        link.lose = [method]
        sender.put(number(k), 0)
        found.append(got(rollouts))
    assert found == list(range(count))
    empty(rollouts)
    stats = rollouts.stats()
    assert (stats["came"], stats["repeated"]) == (count, count if method == "put" else 0)  # a rollout is kept once


def test_a_queue_that_dies_loses_what_is_in_it_and_this_is_counted():
    rollouts, link = made(timeout=0.05)
    sender = rollouts.sender("one")
    for k in range(3):
        sender.put(number(k), 0)
    assert got(rollouts) == 0
    link.restart()
    unanswered(sender, link, 3)
    assert got(rollouts) == 3
    assert rollouts.stats()["lost"] == 2
    link.restart()
    sender.put(number(3), 0)  # it was never told that the queue had it
    empty(rollouts)
    assert rollouts.stats()["repeated"] == 1


def unanswered(sender: Any, link: QueueLink, k: int) -> None:
    """Put a rollout that the queue takes, and never answers for."""
    link.lose = ["put"] * 1000
    with pytest.raises(LifecycleError, match="not answered put"):
        sender.put(number(k), 0)
    link.lose = []


@pytest.mark.parametrize("again", [False, True])
def test_a_rollout_that_was_never_answered_for_comes_once_and_costs_no_other(again: bool):
    rollouts, link = made(timeout=0.05)
    sender = rollouts.sender("one")
    sender.put(number(0), 0)
    unanswered(sender, link, 1)
    if again:
        sender.put(number(1), 0)
    sender.put(number(2), 0)
    sender.put(number(2), 0)  # answered for: equal data that is sent again is another rollout
    assert [got(rollouts) for _ in range(4)] == [0, 1, 2, 2]
    empty(rollouts)
    assert rollouts.stats()["lost"] == 0


def test_a_worker_that_is_started_again_goes_on_under_its_name():
    rollouts, _ = made()
    old = rollouts.sender("one")
    old.put(number(0), 0)
    new = rollouts.sender("one")
    new.put(number(1), 0)
    assert [got(rollouts), got(rollouts)] == [0, 1]
    with pytest.raises(LifecycleError, match="newer sender"):
        old.put(number(2), 0)


def test_arguments_are_checked():
    for wrong in ({"max_staleness": -1}, {"capacity": 0}, {"capacity": 1.5}):
        with pytest.raises(ParameterError):
            made(**wrong)
    rollouts, _ = made()
    for data in ({}, {"obs": [1.0]}, 3):
        with pytest.raises(FieldError, match="put"):
            rollouts.sender("one").put(data, 0)


@pytest.mark.parametrize("value", [np.zeros((2, 3)), object(), [[1], [1, 2]], -1.5, float("nan"), "text"])
def test_a_value_of_a_wrong_kind_is_refused_by_its_name(value: Any):
    rollouts, _ = made()
    for words, call in (
        ("settle_each", lambda: made(settle_each=value)),
        ("Rollouts.timeout", lambda: made(timeout=value)),
        ("worker", lambda: rollouts.sender(1 if isinstance(value, str) else value)),
        ("get.version", lambda: rollouts.get(value)),
        ("get.timeout", lambda: rollouts.get(0, value)),
        ("put.version", lambda: rollouts.sender("one").put(number(1), value)),
        ("resume", lambda: rollouts.resume(value)),
        ("resume", lambda: rollouts.resume({"place": ["", value], "seen": {}})),
    ):
        with pytest.raises(ParameterError, match=words):
            call()


def test_a_position_that_is_refused_changes_nothing():
    rollouts, _ = made()
    sender = rollouts.sender("one")
    for k in range(3):
        sender.put(number(k), 0)
    assert got(rollouts) == 0
    before = rollouts.position()
    for wrong in ({}, {"place": ["", 1]}, {"place": before["place"], "seen": {"one": ["life", "x"]}}):
        with pytest.raises(ParameterError, match="resume"):
            rollouts.resume(wrong)
    assert rollouts.position() == before
    assert [got(rollouts), got(rollouts)] == [1, 2]


def test_a_sender_that_did_not_reach_the_queue_begins_again():
    rollouts, link = made(timeout=0.1)
    old = rollouts.sender("one")
    old.put(number(0), 0)
    new = rollouts.sender("one")
    link.lose += ["begin"] * 9  # the queue hears it or not: no answer comes
    with pytest.raises(LifecycleError, match="has not answered begin"):
        new.put(number(1), 0)
    link.lose.clear()
    old_again = rollouts.sender("one")
    old_again.put(number(2), 0)
    new.put(number(1), 0)  # the last one that begins is the worker's
    assert [got(rollouts) for _ in range(3)] == [0, 2, 1]
