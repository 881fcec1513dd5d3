"""Reading n-step windows, rows and stacks of rings: reference/windows.py's names and, to the bit, results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.nstep import NEXT_AT, NEXT_BYTES, OWN_AT, OWN_BYTES, STEP_BYTES
from ..ring_state import HEAD
from .handles import Ints, open_ring
from .jit import address_t, copy_ahead, fetch, inlined, jit, memcpy
from .nstep import add_reward, bootstrap, results, write_window
from .places import place_after, row_at

__all__ = ["gather_pairs", "gather_rows", "stack_places", "windows"]

FORESEEN = 1024
"""Bytes of a window that are loaded ahead; the processor itself loads what follows."""


@jit
def windows(ring_handle: Ints, batch: Ints, places: Ints, steps: int, gamma: float, out: Any, last: Ints) -> int:
    """See :func:`relive.kernels.reference.windows.windows`.

    ``here`` and ``there`` are the addresses of the ring's memory and of ``out``; to them, bytes are added.
    """
    ring, written = open_ring(ring_handle), results(out, batch)
    rows, envs, inverse, own = ring.rows, ring.state.shape[0], 1.0 / ring.rows, batch[NEXT_BYTES] < 0
    step_bytes, next_at, next_bytes = batch[STEP_BYTES], batch[NEXT_AT], batch[NEXT_BYTES]
    width, wide = ring.memory.shape[1], out.shape[1]
    here, there = ring.memory.ctypes.data, out.ctypes.data
    ahead = max(2 * width, min((min(steps, FORESEEN) + 1) * width, FORESEEN))
    for i in range(places.size):
        if not 0 <= places[i] < ring.memory.shape[0]:
            return i
        fetch(ring.memory, places[i] * width, ahead)
    for i in range(places.size):
        place, row = places[i], there + i * wide
        memcpy(address_t(row), address_t(here + place * width), np.intp(step_bytes))
        env, begin, number = row_at(place, inverse, ring)
        newest = ring.state[env, HEAD] - 1
        value, discount, k, terminal, cut = 0.0, 1.0, 0, np.uint8(0), np.uint8(0)
        while True:
            value, discount = add_reward(value, discount, ring.reward[place], gamma)
            terminal, cut = ring.terminated[place], ring.truncated[place]
            k += 1
            before, place = place, place_after(place, begin, rows)
            # the newest row is not complete, unless rows have next observations of their own: so k stays below rows
            if terminal | cut or k == steps or ring.stamp[place] < 0:
                break
            if own and (number + k > newest or ring.step[place] == 0):
                break
        last[i] = before if own else place
        written.index[i] = number * envs + env
        next_index = (number + k - int(own)) * envs + env
        write_window(written, i, next_index, k, value, bootstrap(discount, terminal), terminal, cut)
        if not own:
            memcpy(address_t(row + next_at), address_t(here + place * width), np.intp(next_bytes))
        elif k > 1:
            source = address_t(here + before * width + batch[OWN_AT])
            memcpy(address_t(row + next_at), source, np.intp(batch[OWN_BYTES]))
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
def gather_pairs(source: Any, places: Ints, out: Any) -> int:
    """See :func:`relive.kernels.reference.windows.gather_pairs`.

    ``here`` and ``there`` are the addresses of ``source`` and of ``out``; to them, bytes are added. Most often the
    frames of a stack follow one another, and then they are one copy. Meanwhile the next stack is loaded.
    """
    count, depth, width = places.shape[0] // 2, places.shape[1], source.shape[1]
    here, there = source.ctypes.data, out.ctypes.data
    for i in range(count):
        for j in (i, count + i):
            if _is_run(places[j], source.shape[0]):
                target, frame = there + j * depth * width, here + places[j, 0] * width
                ahead = here + places[min(j + 1, 2 * count - 1), 0] * width
                copy_ahead(address_t(target), address_t(frame), np.intp(depth * width), address_t(ahead))
            elif gather_rows(source, places[j], out[j * depth : (j + 1) * depth], 0, width) >= 0:
                return j
    return -1


@inlined
def _is_run(places: Ints, rows: int) -> bool:
    """Whether these places follow one another, and all are among the first ``rows``."""
    first, together = places[0] if places.size else -1, True
    for k in range(1, places.size):
        together = together and places[k] == first + k
    return together and 0 <= first <= rows - places.size


@jit
def stack_places(ring_handle: Ints, places: Ints, depth: int, repeat: bool, out: NDArray[Any]) -> int:
    """See :func:`relive.kernels.reference.windows.stack_places`."""
    ring = open_ring(ring_handle)
    rows, step = ring.rows, ring.step
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
