"""Memory that stands: a few batches that are written to in turn, each valid until its turn comes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from . import core
from .batches import B, Batch, take_back
from .errors import ParameterError
from .parameters import Rule, require

M = TypeVar("M")

Reuse = bool | Literal["pinned"]
"""Whether batches are written to memory that stands, and whether that is page-locked."""

REUSE_RULE: Rule = (
    lambda reuse: reuse is True or reuse is False or (isinstance(reuse, str) and reuse == "pinned"),
    "expected True, False or 'pinned'",
)

TURNS = 3
"""How many batches stand: each is valid until as many others were asked for."""


def require_reuse(call: str, reuse: Reuse) -> None:
    """Require the argument ``reuse`` of ``call``.

    Raises:
        ParameterError: it is none of its values, or page-locked memory is wanted and there is no GPU.
    """
    require(call, REUSE_RULE, reuse=reuse)
    if reuse == "pinned" and not torch.cuda.is_available():
        raise ParameterError(
            f"{call}(reuse='pinned'): page-locked memory needs a GPU, and torch.cuda.is_available() is False here; "
            "write reuse=True"
        )


def standing_memory(reuse: Reuse) -> core.Standing:
    """Memory in RAM to which TURNS batches are written in turn."""
    return core.Standing(TURNS, page_locked if reuse == "pinned" else None)


class Turns(Generic[M]):
    """TURNS batches that are written to in turn.

    The memory and the batches that are still valid move together: each batch takes the next slot, so a pass that broke
    off within a batch must not be continued.

    Args:
        memory: makes what batches are written to.
        reuse: True or "pinned".
    """

    def __init__(self, memory: Callable[[Reuse], M], reuse: Reuse) -> None:
        self.memory, self.reuse = memory(reuse), reuse
        self.given: list[Batch | None] = [None] * TURNS
        """The batch of each turn that is still valid."""
        self.turn: int = 0
        """The turn of the batch that was given last."""
        self.copies = Copies() if reuse == "pinned" else None


class Copies:
    """The copies that a GPU makes out of page-locked memory, while the learner goes on.

    The learner starts a copy on the current stream, before it asks for the next batch. So an event that is recorded
    there at that moment comes after the copy, and the memory must stay as it is until then.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event | None] = [None] * TURNS

    def wait(self, turn: int) -> None:
        """Wait until the batch that was given at this turn was read. The one before it was given just now."""
        self._events[turn - 1] = copied = torch.cuda.Event()
        copied.record()
        read = self._events[turn]
        if read is not None:
            read.synchronize()

    def __del__(self) -> None:
        # torch gives page-locked memory that was dropped to somebody else, and knows of no copy out of its middle
        with suppress(RuntimeError):  # a forked process cannot ask, and has copied nothing
            if any(self._events):
                torch.cuda.synchronize()


def page_locked(nbytes: int) -> NDArray[np.uint8]:
    """Memory that a GPU reads by itself."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


class Spare(list[Turns[Any]]):
    """Turns that no pass uses now; the next pass goes on with them. They stay behind when their owner is copied."""

    def __reduce__(self) -> tuple[type[Spare], tuple[()]]:
        return Spare, ()


def in_turn(
    batches: Callable[[M], Iterator[B]], count: int, spare: Spare, reuse: Reuse, memory: Callable[[Reuse], M]
) -> Iterator[B]:
    """The batches of a pass, each of which refuses all use once its memory may be written to again.

    Args:
        batches: a function that gives the batches, each made when it is asked for, and written to this memory.
        count: how many it gives.
        spare: what earlier passes have left.
        reuse: True or "pinned".
        memory: makes memory where none is left, as :func:`standing_memory` does.
    """
    try:
        turns: Turns[M] | None = spare.pop()
    except IndexError:  # the first pass; or one at the same time has taken what there was
        turns = None
    if turns is None or turns.reuse != reuse:
        turns = Turns(memory, reuse)
    given, copies, made = turns.given, turns.copies, batches(turns.memory)
    for _ in range(count):
        turns.turn = turn = (turns.turn + 1) % TURNS
        if copies is not None:
            copies.wait(turn)
        before, given[turn] = given[turn], None
        if before is not None:
            take_back(before)
        given[turn] = batch = next(made)  # if it fails, the turns are dropped: slots and batches no longer agree
        try:
            yield batch
        except BaseException:
            spare.append(turns)
            raise
    spare.append(turns)
