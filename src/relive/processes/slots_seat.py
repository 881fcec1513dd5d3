"""A learner's seat at the owner of a served replay: its line, its slots, and what it is owed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..replay.progress import Drawn
from .shared import SharedBlock
from .slots import BatchForm, Slot
from .wire import Failure, Line

__all__ = ["Seat"]


@dataclass
class Seat:
    """A learner, as the owner sees it."""

    line: Line | None = None
    gone: bool = False
    """Whether it was connected once and has left. Then its turns are passed over; one that never came is waited for."""
    wants: bool = False
    """Whether it has asked for a batch, and was sent no error since."""
    slots: list[Slot | None] = field(default_factory=list[Any])
    free: deque[int] = field(default_factory=deque[int])
    ready: deque[Drawn] = field(default_factory=deque[Drawn])
    """Batches that were drawn for it, and that it has not asked for yet."""
    errors: int = 0
    """How many errors it was sent."""
    asked: int = 0
    """How many batches it has asked for that are not drawn yet."""
    unread: int = 0
    """How many errors of calls it was sent since it was last known to read."""
    late: deque[Failure] = field(default_factory=deque[Failure])
    """Errors of calls that are still to be sent."""

    def slot_for(self, form: BatchForm) -> tuple[int, Any]:
        """Make the learner's next free slot ready for a batch.

        Returns:
            the slot's number; and the name of its memory with the form of the batch if they are new to the learner,
            otherwise None.

        Raises:
            OSError, ParameterError: there is no memory for it, or too many files are open. Nothing has changed.
        """
        place = self.free[0]
        slot = self.slots[place]
        if slot is not None and slot.form == form:
            return place, None
        block = None if slot is None else slot.block
        if block is None or block.nbytes < form.nbytes:
            block = SharedBlock.create(max(form.nbytes, 1))
        self.slots[place] = Slot(block.array, form, block)
        return place, (block.name, form)
