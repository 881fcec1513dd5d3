"""Locks that a fork waits for. Otherwise a child could inherit a held lock and wait for it for ever."""

from __future__ import annotations

import os
import sys
from threading import RLock, local
from typing import Any
from weakref import ReferenceType, ref

__all__ = ["shared_lock"]


_locks: dict[int, ReferenceType[Any]] = {}


class _Held(local):
    """The locks that the current thread took for a fork."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _Held()


def shared_lock() -> Any:
    """A lock that threads may share. A fork takes it before the process is copied.

    So a child finds the lock free, and never sees half a change of what it guards.
    """
    lock = RLock()
    key = id(lock)
    _locks[key] = ref(lock, lambda _: _locks.pop(key, None))
    return lock


def _hold() -> None:
    """Take all locks. Release all before waiting for a busy one, so that its owner can take others."""
    locks = [lock for lock in (reference() for reference in list(_locks.values())) if lock is not None]
    locks += _compiler_lock()
    held = _held.locks
    busy = locks[:1]
    while busy:
        busy[0].acquire()
        held.append(busy[0])
        rest = [lock for lock in locks if lock is not busy[0]]
        busy = []
        for lock in rest:
            if not lock.acquire(blocking=False):
                busy = [lock]
                _release()
                break
            held.append(lock)


def _compiler_lock() -> list[Any]:
    """What a thread that compiles or loads a kernel holds, once numba is there. It may hold locks of ours as well."""
    module = sys.modules.get("numba.core.compiler_lock")
    lock = getattr(getattr(module, "global_compiler_lock", None), "_lock", None)
    return [] if lock is None else [lock]


def _release() -> None:
    while _held.locks:
        _held.locks.pop().release()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
