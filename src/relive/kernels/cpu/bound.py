"""Adding rows over and over, to the same arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .append import add_rows, plan_rows
from .jit import addressed, jit

__all__ = ["add_bound", "bind_add", "plan_bound"]

Ints = NDArray[np.int64]


def bind_add(
    envs: Ints, staged: Any, final: Any, flags: Ints, sizes: Ints, target: Any, rows: int, state: Ints, counters: Ints,
    step: Any, stamp: Any, order: Any, places: Ints, finals: Ints, event_places: Ints, event_opens: Any,
    tails: Ints,
) -> Ints:  # fmt: skip
    """The arguments of ``add_rows`` and ``plan_rows``, but for their mode, as the two functions below take them.

    Handing over sixteen arrays takes longer than adding a row; here they are one array of their addresses and sizes.
    All of them have to live, where they are, for as long as that is used. The first entry is the address of ``envs``.
    """
    arrays = (
        envs, staged, final, flags, sizes, target, state, counters, step, stamp, order, places, finals, event_places,
        event_opens, tails,
    )  # fmt: skip
    numbers = len(envs), staged.shape[1], *target.shape, rows, len(state), len(counters), len(event_places)
    strides = (array.strides[0] // array.itemsize for array in (step, stamp, order))
    return np.array([*(array.ctypes.data for array in arrays), *numbers, *strides], np.int64)


@jit
def add_bound(bound: Ints, mode: int) -> int:
    """``add_rows`` of what :func:`bind_add` put together."""
    count, wide, num_rows, width, rows, num_envs, num_counters, events = bound[16:24]
    step, stamp, order = bound[24], bound[25], bound[26]
    return add_rows(
        addressed(bound[0], count, np.int64), mode,
        addressed(bound[1], (count, wide), np.uint8), addressed(bound[2], (count, wide), np.uint8),
        addressed(bound[3], 3, np.int64), addressed(bound[4], 2, np.int64),
        addressed(bound[5], (num_rows, width), np.uint8), rows,
        addressed(bound[6], (num_envs, 4), np.int64), addressed(bound[7], num_counters, np.int64),
        addressed(bound[8], (num_rows - 1) * step + 1, np.int32)[::step],
        addressed(bound[9], (num_rows - 1) * stamp + 1, np.int64)[::stamp],
        addressed(bound[10], (num_rows - 1) * order + 1, np.int32)[::order],
        addressed(bound[11], count, np.int64), addressed(bound[12], count, np.int64),
        addressed(bound[13], events, np.int64), addressed(bound[14], events, np.uint8),
    )  # fmt: skip


@jit
def plan_bound(bound: Ints, mode: int) -> int:
    """``plan_rows`` of what :func:`bind_add` put together."""
    count, wide, rows, num_envs = bound[16], bound[17], bound[20], bound[21]
    return plan_rows(
        addressed(bound[0], count, np.int64), mode, addressed(bound[1], (count, wide), np.uint8),
        addressed(bound[3], 3, np.int64), rows, addressed(bound[6], (num_envs, 4), np.int64),
        addressed(bound[11], count, np.int64), addressed(bound[12], count, np.int64),
        addressed(bound[15], count, np.int64),
    )  # fmt: skip
