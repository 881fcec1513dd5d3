"""Reading rings, in plain Python: n-step windows, rows, and the frames of stacks.

:mod:`relive.kernels.reference.places` describes the memory of a ring.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ring_state import HEAD
from .nstep import INDEX, REWARD, STAMP, STEP, TERMINATED, TRUNCATED, add_reward, read, write_window
from .places import Ints, place_after, place_of, row_at

__all__ = ["gather_pairs", "gather_rows", "stack_places", "windows"]


def windows(
    places: Ints, rows: int, steps: int, gamma: float, state: Ints, source: Any, at: Ints, out: Any, to: Ints,
    sizes: Ints, last: Ints,
) -> int:  # fmt: skip
    """The n-step windows that start at anchors, rₜ + γrₜ₊₁ + ... with up to ``steps`` rewards, as packed rows.

    A window stops at a done, at the newest row, and where the next row is not complete or does not go on from it.
    ``last`` is the place of the row that holds the observation it bootstraps from.

    ``at`` holds the bytes at which a row of ``source`` (uint8 ``[R, W]``) has its reward, terminated, truncated, stamp
    and step. The first ``sizes[0]`` bytes of the anchor go to the start of the row of ``out``, and the first
    ``sizes[2]`` of the row ``last`` to its byte ``sizes[1]``. The bytes ``to`` get the public indices of both, the
    discount (γᵏ, or 0 after a terminal), the number of rewards k, their sum, and the done bits of the last transition.

    If ``sizes[2]`` is negative, rows have next observations of their own. Then ``last`` is the row of the last
    transition, and its ``sizes[4]`` bytes from ``sizes[3]`` on go to the byte ``sizes[1]``, unless it is the anchor,
    whose bytes have been copied.

    Returns the first of ``places`` that is not a row's, or -1.
    """
    own = sizes[2] < 0
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(source):
            return i
        out[i, : sizes[0]] = source[place, : sizes[0]]
        env, begin, number = row_at(place, rows, state)
        newest = place_of(int(state[env, HEAD]) - 1, env, rows)
        here, value, discount, k = place, 0.0, 1.0, 0
        while True:
            row = source[here]
            value, discount = add_reward(value, discount, read(row, at[REWARD], np.float32), gamma)
            terminal, cut = row[at[TERMINATED]], row[at[TRUNCATED]]
            k += 1
            before, here = here, place_after(here, begin, rows)
            if terminal or cut or k == steps or before == newest or read(source[here], at[STAMP], np.int64) < 0:
                break
            if own and read(source[here], at[STEP], np.int32) == 0:
                break
        last[i] = before if own else here
        (_, _, following), envs = row_at(int(last[i]), rows, state), len(state)
        out[i, to[INDEX] : to[INDEX] + 8].view(np.int64)[0] = number * envs + env
        write_window(out[i], to, following * envs + env, k, value, discount, terminal, cut)
        if sizes[2] > 0:
            out[i, sizes[1] : sizes[1] + sizes[2]] = source[here, : sizes[2]]
        elif own and before != place:
            out[i, sizes[1] : sizes[1] + sizes[4]] = source[before, sizes[3] : sizes[3] + sizes[4]]
    return -1


def gather_rows(source: Any, places: Ints, out: Any, start: int, nbytes: int) -> int:
    """The first ``nbytes`` bytes of rows of ``source`` (uint8 ``[R, W]``) to successive rows of ``out``, at ``start``.

    A negative place gives zeros. Returns the first place beyond the last row, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if place >= len(source):
            return i
        out[i, start : start + nbytes] = source[place, :nbytes] if place >= 0 else 0
    return -1


def gather_pairs(source: Any, now: Ints, then: Ints, out_now: Any, out_then: Any) -> int:
    """:func:`gather_rows` of whole rows for places ``[B, depth]``, twice, item by item; the first bad item, or -1.

    Stacks of frames before and after a step share all but one, which are still in the cache the second time.
    """
    depth = now.shape[1]
    bad = [
        gather_rows(source, places.reshape(-1), out, 0, source.shape[1])
        for places, out in ((now, out_now), (then, out_then))
    ]
    return min((place // depth for place in bad if place >= 0), default=-1)


def stack_places(places: Ints, rows: int, depth: int, repeat: bool, step: Any, out: NDArray[Any]) -> int:
    """Places ``[B, depth]`` of the frames that end at ``places``, oldest first, within their episode.

    Frames from before the episode are its first one if ``repeat``, else -1. Returns the first of ``places`` that is
    not a row's, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(step):
            return i
        begin = place // rows * rows
        for j in range(depth):
            back = depth - 1 - j
            reach = min(back, int(step[place]))
            out[i, j] = begin + (place - begin - reach) % rows if reach == back or repeat else -1
    return -1
