"""No address space is left: a call ends, with what was asked for or with an error, and never waits for ever.

A thread that finds no memory when it begins never says that it began, and ``Thread.start`` waits for that.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relive import ReplayBuffer, RolloutBuffer, Schema
from support.effort import in_ci
from support.forks import in_fork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")

STEP = {"obs": np.zeros(64, np.float32), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
LEFT = [0, in_ci(4096), in_ci(8192), in_ci(1 << 16), in_ci(1 << 20)]


def filled(rows: int = 100) -> ReplayBuffer:
    replay = ReplayBuffer(Schema.from_example(STEP), 10_000, seed=0)
    tags, flags = np.arange(rows)[:, None], np.zeros((rows, 1), np.bool_)
    replay.extend({"obs": np.repeat(tags[..., None], 64, 2), "action": tags, "reward": tags,
                   "terminated": flags, "truncated": flags})  # fmt: skip
    return replay


def full_rollout() -> RolloutBuffer:
    rollout = RolloutBuffer(Schema.from_example(STEP), 8, 1)
    for _ in range(8):
        rollout.add(STEP)
    return rollout


def with_only(left: int, call: Callable[[], Any]) -> str:
    """What comes of a call while the process may take only so many bytes more: "done", or its error."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + left, hard))
    try:
        call()
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        return f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return "done"


def saves(make: Callable[[], Any], path: Path, background: bool, left: int) -> str:
    buffer = make()
    buffer.save(path, background=True).wait()  # its thread leaves a stack, in which the next one can begin
    outcome = with_only(left, lambda: buffer.save(path, background=background).wait())
    type(buffer).load(path)  # the save before, or the new one
    return outcome


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("make", [filled, in_ci(full_rollout), in_ci(lambda: filled(9_000))])
def test_a_save_without_memory_for_a_thread_is_made_in_this_one_or_is_an_error(
    make: Callable[[], Any], background: bool, left: int, tmp_path: Path
) -> None:
    outcome = in_fork(saves, make, tmp_path / "save", background, left, seconds=20.0)
    if not background:
        assert outcome == "done"
    elif left < 1 << 20:
        assert outcome.startswith("MemoryError: no memory is left to start the thread")
        assert outcome.endswith("free some, or save without background=True")


def serves(left: int) -> tuple[str, list[int]]:
    replay, found = filled(), list[int]()
    replay.sample(4)
    served = iter(replay.serve(4))
    outcome = with_only(left, lambda: found.extend(i for _ in range(5) for i in next(served)["index"].tolist()))
    return outcome, found


@pytest.mark.parametrize("left", LEFT)
def test_a_served_replay_without_memory_for_a_thread_draws_when_it_is_asked(left: int) -> None:
    outcome, found = in_fork(serves, left, seconds=20.0)
    plain = filled()
    plain.sample(4)
    assert outcome == "done"
    assert found == [i for _ in range(5) for i in plain.sample(4)["index"].tolist()]
