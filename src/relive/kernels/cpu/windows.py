"""Reading n-step windows, rows and stacks of rings: reference/windows.py's names and, to the bit, results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ring_state import HEAD
from .jit import address_t, fetch, jit, memcpy
from .nstep import INDEX, REWARD, STAMP, STEP, TERMINATED, TRUNCATED, add_reward, typed, write_window
from .places import Ints, place_after, row_at

__all__ = ["gather_pairs", "gather_rows", "stack_places", "windows"]


@jit
def windows(
    places: Ints, rows: int, steps: int, gamma: float, state: Ints, source: Any, at: Ints, out: Any, to: Ints,
    sizes: Ints, last: Ints,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.windows.windows`.

    ``base`` and ``row`` are the first bytes of a row of ``source`` and of ``out``, ``here`` and ``there`` the addresses
    of both.
    """
    envs, inverse, own = state.shape[0], 1.0 / rows, sizes[2] < 0
    width, wide = source.shape[1], out.shape[1]
    bits, ints, words, floats = typed(source)
    target = typed(out)
    here, there = source.ctypes.data, out.ctypes.data
    for i in range(places.size):
        if not 0 <= places[i] < source.shape[0]:
            return i
        fetch(source, places[i] * width, 2 * width)
    for i in range(places.size):
        place, row = places[i], i * wide
        memcpy(address_t(there + row), address_t(here + place * width), np.intp(sizes[0]))
        env, begin, number = row_at(place, rows, inverse, state)
        newest = state[env, HEAD] - 1
        value, discount, k, terminal, cut = 0.0, 1.0, 0, np.uint8(0), np.uint8(0)
        while True:
            base = place * width
            value, discount = add_reward(value, discount, floats[(base + at[REWARD]) // 4], gamma)
            terminal, cut = bits[base + at[TERMINATED]], bits[base + at[TRUNCATED]]
            k += 1
            before, place = place, place_after(place, begin, rows)
            # the newest row is not complete, unless rows have next observations of their own: so k stays below rows
            if terminal | cut or k == steps or words[(place * width + at[STAMP]) // 8] < 0:
                break
            if own and (number + k > newest or ints[(place * width + at[STEP]) // 4] == 0):
                break
        last[i] = before if own else place
        target[2][(row + to[INDEX]) // 8] = number * envs + env
        write_window(target, row, to, (number + k - int(own)) * envs + env, k, value, discount, terminal, cut)
        if sizes[2] > 0:
            memcpy(address_t(there + row + sizes[1]), address_t(here + place * width), np.intp(sizes[2]))
        elif own and k > 1:
            memcpy(address_t(there + row + sizes[1]), address_t(here + before * width + sizes[3]), np.intp(sizes[4]))
    return -1


@jit
def gather_rows(source: Any, places: Ints, out: Any, start: int, nbytes: int) -> int:
    """See :func:`relive.kernels.reference.windows.gather_rows`."""
    here, there = source.ctypes.data, out.ctypes.data + start  # addresses; to them, bytes are added
    for i in range(places.size):
        target = there + i * out.shape[1]
        if places[i] >= source.shape[0]:
            return i
        if places[i] >= 0:
            memcpy(address_t(target), address_t(here + places[i] * source.shape[1]), np.intp(nbytes))
        else:
            out[i, start : start + nbytes] = 0
    return -1


@jit
def gather_pairs(source: Any, now: Ints, then: Ints, out_now: Any, out_then: Any) -> int:
    """See :func:`relive.kernels.reference.windows.gather_pairs`."""
    depth = now.shape[1]
    for i in range(now.shape[0]):
        item = slice(i * depth, (i + 1) * depth)
        bad = max(
            gather_rows(source, now[i], out_now[item], 0, source.shape[1]),
            gather_rows(source, then[i], out_then[item], 0, source.shape[1]),
        )
        if bad >= 0:
            return i
    return -1


@jit
def stack_places(places: Ints, rows: int, depth: int, repeat: bool, step: Any, out: NDArray[Any]) -> int:
    """See :func:`relive.kernels.reference.windows.stack_places`."""
    for i in range(places.size):
        place = places[i]
        if not 0 <= place < step.size:
            return i
        begin = place // rows * rows
        for back in range(depth):
            reach = min(back, step[place])  # no further than the first row of the episode
            offset = (place - begin - reach) % rows
            out[i, depth - 1 - back] = begin + offset if reach == back or repeat else -1
    return -1
