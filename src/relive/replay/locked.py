"""One call of a replay at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from .buffer import ReplayBuffer

__all__ = ["one_at_a_time"]

P = ParamSpec("P")
R = TypeVar("R")


def one_at_a_time(method: Callable[Concatenate[ReplayBuffer, P], R]) -> Callable[Concatenate[ReplayBuffer, P], R]:
    """Let other threads wait, and first mend what an earlier call left half done.

    Kernels run without Python's own lock, so another thread could write a row while this one reads it.
    """

    @wraps(method)
    def alone(self: ReplayBuffer, *args: P.args, **kwargs: P.kwargs) -> R:
        mine: Any = self
        with mine.lock:
            if mine._ring.pending is not None:
                mine._writer.mend()
            return method(self, *args, **kwargs)

    return alone
