"""Progress: how many batches a replay has drawn, and with which seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any

from torch.utils.data import get_worker_info

from ..errors import InvariantError
from ..kernels.reference.random import key as stream

__all__ = ["Progress", "ProgressSlots", "stream_of"]


@dataclass(slots=True)
class Progress:
    """Counts of what a replay has drawn, and its seed. Saves contain all of it."""

    seed: int
    """The seed of the batches."""
    first: int = 0
    """How many batches were drawn before this seed was set."""
    draws: int = 0
    """Batches drawn."""
    sampled: int = 0
    """Rows drawn."""
    late: int = 0
    """Priorities that came after their transition was overwritten."""
    slots: ProgressSlots | None = None
    """Where the counts are kept for the next process, of a replay in files."""


class ProgressSlots:
    """The counts of a replay in files: two slots, written in turn, so that a kill leaves one of them whole.

    A slot is its number, the three counts and its number again. The slot with the larger number counts, of those whose
    two numbers agree.

    Args:
        words: int64 ``[10]``, in a file.
    """

    WORDS = 10

    def __init__(self, words: Any) -> None:
        self._bytes, self._slots = memoryview(words).cast("B"), (0, _SLOT.size)
        whole = [slot for slot in map(self._read, self._slots) if slot[0] == slot[-1]]
        self._number, *counts, _ = max(whole, default=(-1, 0, 0, 0, -1))
        if not whole or min(self._number, *counts) < 0:
            raise InvariantError(f"progress: {[*map(self._read, self._slots)]} are not two slots of counts")
        self.on_seed: Callable[[], object] = bool
        """Called when the seed was set, which is kept elsewhere."""
        self.counts: list[int] = counts
        """Batches drawn, rows drawn and late priorities, as they were when this was made."""

    def _read(self, at: int) -> tuple[int, ...]:
        return _SLOT.unpack_from(self._bytes, at)

    def write(self, draws: int, sampled: int, late: int) -> None:
        """Keep these counts."""
        number = self._number = self._number + 1
        _SLOT.pack_into(self._bytes, self._slots[number & 1], number, draws, sampled, late, number)


_SLOT = Struct("5q")


def stream_of(seed: int) -> int:
    """The seed of the batches. Each worker of a ``DataLoader`` has a copy of the buffer, and a seed of its own."""
    worker = get_worker_info()
    return seed if worker is None else stream(seed, worker.seed)
