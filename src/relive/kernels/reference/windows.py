"""Reading rings, in plain Python: n-step windows, rows, and the frames of stacks.

:mod:`relive.kernels.reference.places` describes the memory of a ring.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ..ring_state import HEAD, RingArrays
from .nstep import NEXT_AT, NEXT_BYTES, OWN_AT, OWN_BYTES, STEP_BYTES, add_reward, bootstrap, results, write_window
from .places import Ints, place_after, place_of, row_at

__all__ = ["gather_pairs", "gather_rows", "stack_places", "windows"]


def windows(ring: RingArrays, batch: Ints, places: Ints, steps: int, gamma: float, out: Any, last: Ints) -> int:
    """The n-step windows that start at anchors, rₜ + γrₜ₊₁ + ... with up to ``steps`` rewards, as packed rows.

    A window stops at a done, at the newest row, and where the next row is not complete or does not go on from it.
    ``last`` is the place of the row that holds the observation it bootstraps from. If rows have next observations of
    their own, that is the row of the last transition; it is copied unless it is the anchor, whose bytes are there.

    ``batch`` is the layout of the rows ``out``, as :mod:`relive.kernels.reference.nstep` lists its entries.

    Returns the first of ``places`` that is not a row's, or -1.
    """
    own, envs, written = batch[NEXT_BYTES] < 0, len(ring.state), results(out, batch)
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(ring.memory):
            return i
        out[i, : batch[STEP_BYTES]] = ring.memory[place, : batch[STEP_BYTES]]
        env, begin, number = row_at(place, ring)
        newest = place_of(int(ring.state[env, HEAD]) - 1, env, ring.rows)
        here, value, discount, k = place, 0.0, 1.0, 0
        while True:
            value, discount = add_reward(value, discount, ring.reward[here], gamma)
            terminal, cut = ring.terminated[here], ring.truncated[here]
            k += 1
            before, here = here, place_after(here, begin, ring.rows)
            if terminal or cut or k == steps or before == newest or ring.stamp[here] < 0:
                break
            if own and ring.step[here] == 0:
                break
        last[i] = before if own else here
        _, _, following = row_at(int(last[i]), ring)
        written.index[i] = number * envs + env
        next_index, factor = following * envs + env, bootstrap(discount, terminal)
        write_window(written, i, next_index, k, value, factor, terminal, cut)
        if not own:
            out[i, batch[NEXT_AT] : batch[NEXT_AT] + batch[NEXT_BYTES]] = ring.memory[here, : batch[NEXT_BYTES]]
        elif before != place:
            source = ring.memory[before, batch[OWN_AT] : batch[OWN_AT] + batch[OWN_BYTES]]
            out[i, batch[NEXT_AT] : batch[NEXT_AT] + batch[OWN_BYTES]] = source
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


def gather_pairs(source: Any, places: Ints, out: Any) -> int:
    """:func:`gather_rows` of whole rows for places ``[2 B, depth]``, item B + i right after item i; a bad item, or -1.

    Stacks of frames before and after a step share all but one, which are still in the cache the second time.
    """
    count, depth = len(places) // 2, places.shape[1]
    for i in range(count):
        for j in (i, count + i):
            if gather_rows(source, places[j], out[j * depth : (j + 1) * depth], 0, source.shape[1]) >= 0:
                return j
    return -1


def stack_places(ring: RingArrays, places: Ints, depth: int, repeat: bool, out: NDArray[Any]) -> int:
    """Places ``[B, depth]`` of the frames that end at ``places``, oldest first, within their episode.

    Frames from before the episode are its first one if ``repeat``, else -1. Returns the first of ``places`` that is
    not a row's, or -1.
    """
    for i, place in enumerate(places.tolist()):
        if not 0 <= place < len(ring.step):
            return i
        begin = place // ring.rows * ring.rows
        for j in range(depth):
            back = depth - 1 - j
            reach = min(back, int(ring.step[place]))
            out[i, j] = begin + (place - begin - reach) % ring.rows if reach == back or repeat else -1
    return -1
