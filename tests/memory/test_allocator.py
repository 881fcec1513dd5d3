"""A fork waits for threads that change a buffer, compile a kernel, or do both."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
from numba.core.compiler_lock import global_compiler_lock

from forked import in_fork
from relive.memory.allocator import shared_lock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")


def is_free(lock: Any) -> bool:
    free = lock.acquire(timeout=1)
    if free:
        lock.release()
    return free


def both_are_free(lock: Any) -> bool:
    return is_free(lock) and is_free(global_compiler_lock._lock)


@pytest.fixture(autouse=True)
def loaded() -> None:
    """The first fork loads the kernels."""
    assert in_fork(is_free, shared_lock())


def test_a_fork_waits_for_a_thread_that_compiles() -> None:
    began, lock = threading.Event(), shared_lock()

    def compiles() -> None:
        with global_compiler_lock:
            began.set()
            time.sleep(0.1)

    thread = threading.Thread(target=compiles)
    thread.start()
    began.wait()
    assert in_fork(both_are_free, lock)
    thread.join()
    assert both_are_free(lock)


def test_a_fork_lets_a_thread_that_changes_a_buffer_compile() -> None:
    began, lock = threading.Event(), shared_lock()

    def changes() -> None:
        with lock:
            began.set()
            time.sleep(0.1)
            with global_compiler_lock:
                time.sleep(0.1)

    thread = threading.Thread(target=changes, daemon=True)
    thread.start()
    began.wait()
    assert in_fork(both_are_free, lock)
    thread.join(5)
    assert not thread.is_alive()
