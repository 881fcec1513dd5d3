"""Messages whose answers nobody waits for: what is lost with one is counted, and an error is raised once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from relive.cluster.replay import Outbox
from relive.errors import ParameterError


class Post:
    """A link whose calls are answered, fail, or stay without an answer, as their first argument says."""

    def call(self, _shard: int, _method: str, fate: str) -> str:
        return fate

    def answers(self, calls: dict[int, str], _wait: float) -> tuple[dict[int, Any], set[int]]:
        ((shard, fate),) = calls.items()
        if fate == "error":
            raise ParameterError("what the shard raised")
        return ({shard: None} if fate == "answer" else {}), ({shard} if fate == "failure" else set())


def outbox() -> Outbox:
    return Outbox(cast("Any", SimpleNamespace(link=Post(), timeout=1.0)))


def test_errors_that_did_not_arrive_are_counted_and_others_wait_for_their_answer() -> None:
    box = outbox()
    for rows, fate in ((3, "answer"), (5, "failure"), (7, "silence"), (0, "failure")):
        box.send(0, rows, "update", fate)
    box.drain()
    assert box.dropped == 5
    box.drain(0)  # now the oldest has to be answered
    assert box.dropped == 5 + 7
    box.drain(0)
    assert box.dropped == 5 + 7


def test_an_error_of_a_shard_is_raised_once_and_loses_no_other_message() -> None:
    box = outbox()
    for rows, fate in ((1, "silence"), (2, "error"), (4, "failure")):
        box.send(0, rows, "update", fate)
    with pytest.raises(ParameterError, match="what the shard raised"):
        box.drain()
    box.drain()
    assert box.dropped == 4
    box.drain(0)
    assert box.dropped == 4 + 1
