"""One call of a replay at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["one_at_a_time"]

P = ParamSpec("P")
R = TypeVar("R")
Replay = TypeVar("Replay")


def one_at_a_time(method: Callable[Concatenate[Replay, P], R]) -> Callable[Concatenate[Replay, P], R]:
    """Make other threads wait while the method runs. Before it, mend what an earlier call left half done, and draw the
    served batches that are due.

    Kernels run without Python's own lock, so another thread could otherwise write a row while this one reads it.
    """

    @wraps(method)
    def alone(self: Replay, *args: P.args, **kwargs: P.kwargs) -> R:
        mine: Any = self
        with mine.lock:
            if mine._ring.pending is not None or mine._ahead is not None:
                mine._prepare()
            return method(self, *args, **kwargs)

    return alone
