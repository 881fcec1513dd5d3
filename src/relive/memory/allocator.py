"""Allocator: gives a replay the memory of its arrays: private memory, or files that outlive the process.

Besides: memory on huge pages, memory for batches that is used again, locks that a fork finds free, and what a forked
child must not keep.
"""

from __future__ import annotations

import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock, local
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from ..core import Pool
from ..steps.arrays import Array


class Allocator(ABC):
    """Gives a replay the memory of its rows, of the state of its ring, and of its sampler's priorities."""

    durable = False
    """True if what the arrays hold outlives the process, so that a kill must never leave a change half done."""

    died = False
    """True if the process that had the arrays before ended without closing them."""

    @abstractmethod
    def take(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """An array of this shape and dtype. It holds zeros, or what an earlier process left under the name."""

    def has(self, name: str) -> bool:
        """True if an earlier process left something under the name."""
        return False

    def expect_scan(self) -> None:  # noqa: B027 - a default, not an omission
        """All rows are about to be read, one after another."""


class Ram(Allocator):
    """Private memory of this process."""

    def take(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Zeros."""
        # An array, not a tensor: moving a tensor to shared memory would move all tensors that share its storage.
        return zeroed(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


RAM = Ram()
"""The allocator of every replay that has no other."""


# -- memory on huge pages -------------------------------------------------------------------------------------

HUGE = 2**21
"""Bytes of a huge page."""


def zeroed(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory, on huge pages if possible: a random read spends most of its time finding the page.

    The memory is private, as from malloc: a parent never sees what its forked child writes.
    """
    # `mmap.mmap(-1, n)` alone is shared, and gets no huge pages on most systems: 4,096 of 1 M rows took 337 µs, not 218
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(nbytes, np.uint8)
    # whole huge pages: a part of one would be on small pages
    memory = mmap.mmap(-1, -(-nbytes // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    waiting: list[mmap.mmap] | None = getattr(_LATER, "memory", None)
    if waiting is None:
        memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        waiting.append(memory)
    return np.frombuffer(memory, np.uint8, nbytes)


_LATER = local()
"""Of each thread: the memory that gets its huge pages later, or None."""


@contextmanager
def small_pages() -> Generator[None]:
    """Within this context, memory that this thread takes and writes is on small pages; later writes use huge ones.

    So a few rows far apart take one small page each, not 2 MiB. A forged save of 8 kB could otherwise claim 930 MiB.
    """
    _LATER.memory = waiting = list[mmap.mmap]()
    try:
        yield
    finally:
        _LATER.memory = None
        for memory in waiting:
            memory.madvise(mmap.MADV_HUGEPAGE)


# -- memory for batches ---------------------------------------------------------------------------------------

SMALL = 2**19
"""Below this many bytes, malloc reuses memory by itself and is faster than a search for a block."""


class Recycled(Pool):
    """Blocks of RAM for batches: ``take(nbytes)`` gives one that nothing refers to any more.

    Fresh memory of some megabytes costs more than filling it, as the system finds and clears each page on first touch.
    Arrays and tensors over a block keep it in use, as does what autograd saved. 16 blocks are kept for later batches;
    more exist only while batches use them.
    """

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        """An uninitialised tensor in such memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self.take(nbytes)).view(dtype).view(shape)


# -- locks and forks ------------------------------------------------------------------------------------------

_locks: dict[int, ReferenceType[RLock]] = {}


class _Held(local):
    """The locks that the current thread took for a fork."""

    def __init__(self) -> None:
        self.locks: list[RLock] = []


_held = _Held()


def shared_lock() -> RLock:
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
    held = _held.locks
    while len(held) < len(locks):
        for lock in locks:
            if not lock.acquire(blocking=not held):  # waits for the first one alone
                _release()
                locks.remove(lock)
                locks.insert(0, lock)
                break
            held.append(lock)


def _release() -> None:
    while _held.locks:
        _held.locks.pop().release()


ONLY_HERE: WeakKeyDictionary[object, Callable[[Any], object]] = WeakKeyDictionary()
"""Objects whose files belong to this process alone, and for each the function that a forked child calls with it.

A child that kept an inherited file open would keep the lock or the connection of a parent that has ended.
"""


def _let_go() -> None:
    for owner, let_go in list(ONLY_HERE.items()):
        let_go(owner)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
    os.register_at_fork(after_in_child=_let_go)
