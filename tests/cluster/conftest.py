"""Ranks as threads, for tests of what several ranks do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from relive.cluster.distributed import Ranks
from support.ranks import SECONDS, Meeting, Work


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Work], list[Any]]:
    """Runs ``work`` on each rank in a thread of its own; an error of a rank is its result."""

    def run(count: int, work: Work) -> list[Any]:
        meeting, results = Meeting(count), [None] * count

        def start(ranks: Any, group: Any = None) -> None:
            ranks.rank, ranks.count = meeting.own.rank, count

        def summed(ranks: Any, sent: Any) -> Any:
            return meeting.sum(ranks, sent)

        def one(rank: int) -> None:
            meeting.own.rank = rank
            try:
                results[rank] = work(rank, count)
            except Exception as error:
                results[rank] = error

        monkeypatch.setattr(Ranks, "__init__", start)
        monkeypatch.setattr(Ranks, "_summed", summed)
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a rank waits for others"
        return results

    return run
