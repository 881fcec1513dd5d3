"""Memory on huge pages, and a pool that reuses the memory of dropped batches."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Generator
from contextlib import contextmanager
from threading import local
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .forks import shared_lock

__all__ = ["SMALL", "Recycled", "small_pages", "zeroed"]


KEPT = 16
"""Blocks that are kept for the next batches; more are there only while batches that use them are."""


SMALL = 2**19
"""Bytes below which malloc hands out what it has by itself, and sooner than a block is found here."""


HUGE = 2**21
"""Bytes of a huge page."""


def zeroed(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory, on huge pages where there are any: at random places most of a read is finding the page.

    It is private, as malloc's is: what a forked child writes to it, its parent never sees. Nor would the system give
    shared memory huge pages.
    """
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(nbytes, np.uint8)
    memory = mmap.mmap(-1, -(-nbytes // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    waiting: list[mmap.mmap] | None = getattr(_LATER, "memory", None)
    if waiting is None:
        memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        waiting.append(memory)
    return np.frombuffer(memory, np.uint8, nbytes)


_LATER = local()


@contextmanager
def small_pages() -> Generator[None]:
    """What is taken and written in here, by this thread, is on small pages; what is written later on huge ones again.

    So few rows that lie far from each other take a small page each, and not 2 MiB.
    """
    _LATER.memory = waiting = list[mmap.mmap]()
    try:
        yield
    finally:
        _LATER.memory = None
        for memory in waiting:
            memory.madvise(mmap.MADV_HUGEPAGE)


class Recycled:
    """Blocks of RAM for batches, each handed out again once nothing that was made of it is left.

    Fresh memory of some megabytes costs more than filling it does: the system finds and clears each of its pages on
    first touch. Views, also those of torch and what autograd saved, keep the block they look into in use.
    """

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []
        self._lock = shared_lock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """``nbytes`` bytes of whatever content."""
        with self._lock:
            return self._take(nbytes)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        free = [i for i in range(len(self._blocks)) if sys.getrefcount(self._blocks[i]) == UNUSED]
        fits = [i for i in free if self._blocks[i].size >= nbytes]
        if fits:
            return self._blocks[min(fits, key=lambda i: self._blocks[i].size)][:nbytes]
        if len(self._blocks) >= KEPT and free:  # those are too small
            del self._blocks[min(free, key=lambda i: self._blocks[i].size)]
        block = zeroed(nbytes + nbytes // 8)  # batches differ a little in size
        self._blocks.append(block)
        return block[:nbytes]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        """A tensor of that memory, of whatever content."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.take(nbytes)).view(dtype).view(shape)

    def __reduce__(self) -> Any:
        return Recycled, ()


def _unused() -> int:
    """What ``sys.getrefcount`` says of an array that a list alone refers to, asked as above."""
    blocks = [np.empty(1, np.uint8)]
    return next(sys.getrefcount(blocks[i]) for i in range(1))


UNUSED = _unused()
