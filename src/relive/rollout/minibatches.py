"""How many items, or steps, each minibatch of an epoch takes."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..parameters import is_count

__all__ = ["parts", "parts_by_steps", "require_epochs"]


def parts(
    total: int, batch_size: int | None, num_batches: int | None, drop_last: bool = False, items: str = "transitions"
) -> list[tuple[int, int]]:
    """(begin, end) of each minibatch of ``total`` items.

    Raises:
        ShapeError: sizes that do not fit.
    """
    if (batch_size is None) == (num_batches is None):
        raise ShapeError("pass either batch_size or num_batches")
    if num_batches is not None:
        if not (is_count(num_batches, 1) and num_batches <= total):
            raise ShapeError(f"num_batches={num_batches!r}: {total} {items} make 1 to {total} minibatches")
        size, more = divmod(total, num_batches)
        if drop_last:
            more = 0
        return list(pairwise(i * size + min(i, more) for i in range(num_batches + 1)))
    assert batch_size is not None
    if not is_count(batch_size, 1) or (drop_last and batch_size > total):
        raise ShapeError(f"batch_size={batch_size!r}: the rollout holds {total} {items}; ask for 1 to {total}")
    bounds = list(range(0, total + 1, batch_size))
    return list(pairwise(bounds if drop_last or bounds[-1] == total else [*bounds, total]))


def parts_by_steps(lengths: NDArray[np.int64], batch_steps: int) -> list[tuple[int, int]]:
    """(begin, end) of minibatches of at most ``batch_steps`` steps; an item that is longer comes alone.

    Raises:
        ShapeError: ``batch_steps`` is not positive.
    """
    if not is_count(batch_steps, 1):
        raise ShapeError(f"batch_steps={batch_steps!r}: ask for at least 1")
    until: list[int] = np.cumsum(lengths).tolist()
    begin, found = 0, list[tuple[int, int]]()
    while begin < len(lengths):
        before = until[begin - 1] if begin else 0
        end = max(bisect_right(until, before + batch_steps), begin + 1)
        found.append((begin, end))
        begin = end
    return found


def require_epochs(epochs: int) -> None:
    """Refuse what is no number of passes.

    Raises:
        ShapeError: likewise.
    """
    if not is_count(epochs, 1):
        raise ShapeError(f"epochs={epochs!r}: ask for at least 1 pass over the rollout")
