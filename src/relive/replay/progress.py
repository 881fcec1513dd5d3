"""Progress: how many batches a replay has drawn, and with which seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ..kernels.reference.random import key as stream
from ..samplers.contract import Sampler
from .progress_slots import ProgressSlots

__all__ = ["Drawn", "Progress", "stream_of"]


class Drawn(NamedTuple):
    """A batch that was drawn ahead of its learner."""

    number: int
    """Batch number t of its replay."""
    update: int
    """Its number in its round of updates, from 1."""
    rows: int
    """B."""
    draw_state: Any
    """The sampler's :meth:`~relive.samplers.contract.Sampler.draw_state` before the draw."""
    completed: int
    """How many transitions had been completed when it was drawn."""
    batch: Any
    """The batch as the view read it."""


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
    """Where a replay in files keeps the counts for the next process; None for any other replay."""
    ahead: deque[Drawn] = field(default_factory=deque[Drawn])
    """Batches that wait for their learner, in order. They are in ``draws`` and ``sampled`` already."""

    @property
    def draws_taken(self) -> int:
        """Batches drawn, without those that wait for their learner."""
        return self.draws - len(self.ahead)

    @property
    def rows_taken(self) -> int:
        """Rows drawn, without those of batches that wait for their learner."""
        return self.sampled - sum(drawn.rows for drawn in self.ahead)

    @property
    def counts(self) -> list[int]:
        """The counts for a save: ``draws``, ``sampled`` and ``late``, without batches that can be drawn again."""
        undone = (self.draws_taken, self.rows_taken) if self._is_undoable else (self.draws, self.sampled)
        return [int(count) for count in (*undone, self.late)]  # batch sizes may have been NumPy's

    def keep(self) -> None:
        """Keep the counts of a replay in files, so that its next process goes on with the batches that nobody took."""
        if self.slots is not None:
            self.slots.write(self.draws_taken, self.rows_taken, self.late)

    @contextmanager
    def undone(self, sampler: Sampler) -> Generator[None]:
        """Within this context, the sampler is as if it had drawn nothing ahead."""
        if not self._is_undoable:
            yield
            return
        now = sampler.draw_state()
        try:
            sampler.undo_draws(self.ahead[0].draw_state)
            yield
        finally:
            sampler.undo_draws(now)

    def undo(self, sampler: Sampler) -> None:
        """Undo the draws ahead, so that the next batches are those that nobody took.

        If other batches were drawn in between, this is not possible, and the numbers of all of them are used up.
        """
        if self._is_undoable:
            sampler.undo_draws(self.ahead[0].draw_state)
            self.draws, self.sampled = self.draws_taken, self.rows_taken
        self.ahead.clear()

    @property
    def _is_undoable(self) -> bool:
        """Whether nothing else was drawn since the first batch that waits."""
        return len(self.ahead) > 0 and self.ahead[0].number == self.draws_taken


def stream_of(seed: int) -> int:
    """The seed of the batches. Each worker of a ``DataLoader`` has a copy of the buffer, and a seed of its own."""
    worker = get_worker_info()
    return seed if worker is None else stream(seed, worker.seed)
