"""Memory that stands: a few batches that are written to in turn, each valid until its turn comes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(eq=False)
class Turns(Generic[M]):
    """TURNS batches that are written to in turn.

    The memory and the batches that are still valid move together: each batch takes the next slot, so a pass that broke
    off within a batch must not be continued.
    """

    copies: Copies | None
    """Those out of page-locked memory; the first to go, since they are waited for while it is still there."""
    memory: M
    """The memory that batches are written to."""
    given: list[Batch | None]
    """The batch of each turn that is still valid."""
    turn: int = 0
    """The turn of the batch that was given last."""


class Copies:
    """The copies that GPUs make out of page-locked memory, while the learner goes on.

    The learner starts a copy on the current stream of the GPU that it copies to, before it asks for the next batch. So
    an event that is recorded there at that moment comes after the copy, and the memory must stay as it is until then.
    """

    def __init__(self) -> None:
        self._events: list[Sequence[torch.cuda.Event | torch.Event]] = [()] * TURNS

    def wait(self, turn: int) -> None:
        """Wait until the batch that was given at this turn was read. The one before it was given just now."""
        copied = torch.cuda.Event()
        copied.record()
        self._events[turn - 1] = [copied, *(stream.record_event() for stream in _other_streams())]
        for event in self._events[turn]:
            event.synchronize()

    def __del__(self) -> None:
        # torch gives page-locked memory that was dropped to somebody else, and knows of no copy out of its middle
        with suppress(RuntimeError):  # a forked process cannot ask, and has copied nothing
            if any(self._events):
                torch.cuda.synchronize()
                for stream in _other_streams():
                    stream.synchronize()


def _other_streams() -> Iterator[torch.cuda.Stream]:
    """The current streams of all GPUs in use but the current one: a learner on "cuda:1" need not make that current."""
    count = torch.cuda.device_count()
    here = torch.cuda.current_device() if count > 1 else 0
    for gpu in range(count):
        if gpu != here and _is_used(gpu):
            yield torch.cuda.current_stream(gpu)


def _is_used(gpu: int) -> bool:
    """True if this process uses a GPU. An event on another one would take its memory for a context there."""
    known: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # pyright: ignore[reportPrivateUsage]
    return known is None or known(gpu)


def page_locked(nbytes: int) -> NDArray[np.uint8]:
    """Memory that a GPU reads by itself."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()


class Spare(list[Turns[Any]]):
    """Turns that no pass uses now; the next pass goes on with them. They stay behind when their owner is copied."""

    def __reduce__(self) -> tuple[type[Spare], tuple[()]]:
        return Spare, ()


Source = tuple[Callable[[M], Iterator[B]], Spare, Callable[[Reuse], M]]
"""A function that gives the batches of a pass, each made when it is asked for, and written to this memory; what earlier
passes have left; and what makes memory where none is left, as :func:`standing_memory` does."""


def in_turn(start: Callable[[], Source[M, B]], count: int, reuse: Reuse) -> Iterator[B]:
    """The batches of a pass, each of which refuses all use once its memory may be written to again.

    Args:
        start: gives their source; called for the first batch.
        count: how many it gives.
        reuse: True or "pinned".
    """
    batches, spare, memory = start()
    try:
        turns: Turns[M] | None = spare.pop()
    except IndexError:  # the first pass; or one at the same time has taken what there was
        turns = None
    pinned = reuse == "pinned"
    if turns is None or pinned != (turns.copies is not None):
        turns = Turns(Copies() if pinned else None, memory(reuse), [None] * TURNS)
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
