"""Waiting without spinning: every ring is heard, time is kept, and other threads and signals get through."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from relive import core
from relive.processes import shared as waiting
from relive.processes.shared import Bell, SharedBlock
from support import internals
from support.children import METHODS, SECONDS, answer, done, ring_often, started

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs memory that processes share")


@pytest.fixture(params=["futex", "pauses"])
def bell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bell:
    """A bell that threads of this process wait for, in each way."""
    if request.param == "pauses":
        monkeypatch.setattr(waiting, "_futex", lambda: None)
    elif internals.futex(waiting)() is None:
        pytest.skip("needs Linux")
    return Bell(np.zeros(1, np.int32))


def test_what_is_so_already_is_not_waited_for(bell: Bell) -> None:
    assert bell.wait(lambda: True, 0)
    assert bell.wait(lambda: True)
    assert not bell.word[0]


def test_the_time_is_kept_and_hardly_any_of_it_is_worked(bell: Bell) -> None:
    began, looks = time.monotonic(), list[int]()
    assert not bell.wait(lambda: bool(looks.append(0)), 0.1)
    assert time.monotonic() - began >= 0.1
    assert len(looks) < 300


def test_a_ring_wakes_all_who_wait(bell: Bell) -> None:
    state, heard = list[int](), list[bool]()
    threads = [threading.Thread(target=lambda: heard.append(bell.wait(lambda: bool(state), SECONDS))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not bell.word[0] & 1:  # until one of them is about to sleep
        time.sleep(0.001)
    state.append(1)
    bell.ring()
    for thread in threads:
        thread.join(SECONDS)
    assert heard == [True] * 3


def test_who_sleeps_looks_again_though_nobody_rings(bell: Bell) -> None:
    state = list[int]()
    other = threading.Timer(0.05, lambda: state.append(1))
    other.start()
    began = time.monotonic()
    assert bell.wait(lambda: bool(state), SECONDS)
    assert time.monotonic() - began < SECONDS / 2
    other.join()


def test_an_error_of_the_condition_ends_the_wait_and_a_ring_without_sleepers_is_free(bell: Bell) -> None:
    def fail() -> bool:
        raise ValueError("the other is dead")

    with pytest.raises(ValueError, match="the other is dead"):
        bell.wait(fail)
    bell.ring()
    assert not bell.word[0]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
def test_ctrl_c_gets_through(bell: Bell) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            bell.wait(lambda: False, SECONDS)
        assert time.monotonic() - began < SECONDS / 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_wait_for_each_other(method: str) -> None:
    block = SharedBlock.create(64)
    words = block.array.view(np.int32)
    process = started(method, answer, block)
    words[1] = 1
    Bell(words[3:4]).ring()
    assert Bell(words[4:5]).wait(lambda: words[2] == 1, SECONDS)
    done(process)


def test_no_ring_is_lost_in_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "GLANCE", SECONDS)  # a ring that is lost is not made up for by a second look
    block, times = SharedBlock.create(64), 20_000
    counters, bell = block.array.view(np.int64), Bell(block.array[:4].view(np.int32))
    seen = 0
    process = started("fork", ring_often, block, times)
    while seen < times:
        before = seen
        assert bell.wait(lambda before=before: core.published(counters, 1) > before, SECONDS)
        seen = core.published(counters, 1)
    done(process)
