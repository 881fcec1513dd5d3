"""ProgressSlots: the counts of what a replay in files has drawn, kept so that a kill leaves them whole."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

from ..errors import InvariantError

__all__ = ["ProgressSlots"]


_SLOT = Struct("5q")


class ProgressSlots:
    """The counts of a replay in files: two slots, written in turn, so that a kill leaves one of them whole.

    A slot is its number, the three counts, and its number again. A slot whose two numbers differ is not whole. The
    whole slot with the larger number counts.

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
        """Called when the seed was set. The seed is kept elsewhere."""
        self.counts: list[int] = counts
        """Batches drawn, rows drawn and late priorities, as they were when this was made."""

    def _read(self, at: int) -> tuple[int, ...]:
        return _SLOT.unpack_from(self._bytes, at)

    def write(self, draws: int, sampled: int, late: int) -> None:
        """Keep these counts."""
        number = self._number = self._number + 1
        _SLOT.pack_into(self._bytes, self._slots[number & 1], number, draws, sampled, late, number)
