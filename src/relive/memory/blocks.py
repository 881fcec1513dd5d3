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
"""Blocks kept for later batches. More exist only while batches use them."""


SMALL = 2**19
"""Below this many bytes, malloc reuses memory by itself and is faster than a search for a block here."""


HUGE = 2**21
"""Bytes of a huge page."""


def zeroed(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory, on huge pages if possible: a random read spends most of its time finding the page.

    The memory is private, as from malloc: a parent never sees what its forked child writes. Shared memory would not
    get huge pages.
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
    """Within this context, memory that this thread takes and writes is on small pages; later writes use huge ones.

    So a few rows far apart take one small page each, not 2 MiB.
    """
    _LATER.memory = waiting = list[mmap.mmap]()
    try:
        yield
    finally:
        _LATER.memory = None
        for memory in waiting:
            memory.madvise(mmap.MADV_HUGEPAGE)


class Recycled:
    """Blocks of RAM for batches. A block is reused once nothing refers to it any more.

    Fresh memory of some megabytes costs more than filling it, as the system finds and clears each page on first touch.
    Arrays and tensors over a block keep it in use, as does what autograd saved.
    """

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []
        self._lock = shared_lock()

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """``nbytes`` uninitialised bytes."""
        with self._lock:
            return self._take(nbytes)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        blocks, smallest, fits = self._blocks, -1, -1
        for i in range(len(blocks)):
            if sys.getrefcount(blocks[i]) != UNUSED:
                continue
            size = blocks[i].size
            if smallest < 0 or size < blocks[smallest].size:
                smallest = i
            if size >= nbytes and (fits < 0 or size < blocks[fits].size):
                fits = i
        if fits >= 0:
            return blocks[fits][:nbytes]
        if len(blocks) >= KEPT and smallest >= 0:  # all free blocks are too small
            del blocks[smallest]
        size = nbytes + nbytes // 8  # batches differ a little in size
        block = zeroed(max(size, HUGE) if 2 * size >= HUGE else size)  # most of a huge page: then all of it
        self._blocks.append(block)
        return block[:nbytes]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
        """An uninitialised tensor in such memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.take(nbytes)).view(dtype).view(shape)

    def __reduce__(self) -> Any:
        return Recycled, ()


def _unused() -> int:
    """The result of ``sys.getrefcount``, called as above, for an array that only a list refers to."""
    blocks = [np.empty(1, np.uint8)]
    return next(sys.getrefcount(blocks[i]) for i in range(1))


UNUSED = _unused()
