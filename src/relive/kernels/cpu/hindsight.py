"""Hindsight: reference/hindsight.py's names and, to the bit, results.

The end of an episode is looked up, not searched. A row's number in its env less the number of transitions that were
complete before it is how many rows before it never became transitions; as every episode has exactly one such row, its
last, that is the episode's own number in its env, and ``ends`` notes the last row of each by it. Rows are noted when
they are first needed: those of env e up to ``seen[e]`` are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.hindsight import EPISODE, FINAL, FUTURE, GOALS, PAST, RANDOM
from .jit import address_t, fetch, jit, memcpy, prefetch, remainder
from .random import uniform

__all__ = ["choose_goals", "note_ends", "relabel_windows"]

Ints = NDArray[np.int64]
HEAD, TAIL, NEXT, DONE = 0, 1, 2, 3
FIRST, END, AIM = 0, 1, 2


@jit
def episode_of(e: Any, place: Any, number: Any, state: Ints, order: Any) -> Any:
    """Which of the episodes of an env a live row belongs to; ``order`` is kept modulo 2**32."""
    return number - state[e, DONE] + ((state[e, DONE] - np.int64(order[place])) & 0xFFFFFFFF)


@jit
def note_ends(rows: int, state: Ints, order: Any, ends: Any, seen: Ints) -> None:
    """Note all rows that are live and were not noted before; of an episode the last one stays noted."""
    inverse = 1.0 / rows
    for e in range(state.shape[0]):
        for number in range(max(seen[e], state[e, TAIL], state[e, HEAD] - rows), state[e, HEAD]):
            episode = episode_of(e, e * rows + remainder(number, rows, inverse), number, state, order)
            ends[e * rows + remainder(episode, rows, inverse)] = number
        seen[e] = state[e, HEAD]


@jit
def _after(place: Any, begin: Any, rows: int) -> Any:
    return place + 1 if place + 1 < begin + rows else begin


@jit
def _look_up(
    places: Ints, key: Any, ratio: float, rows: int, state: Ints, order: Any, ends: Any, which: Ints, spans: Ints
) -> int:
    """The rows to be relabelled, with their numbers, their envs, and the entries of ``ends``, which come meanwhile."""
    found, inverse = 0, 1.0 / rows
    for i in range(places.size):
        if uniform(key, GOALS + 2 * i) >= ratio:
            continue
        place = places[i]
        offset = remainder(place, rows, inverse)
        e = np.int64(np.float64(place - offset) * inverse + 0.5)
        newest = state[e, HEAD] - 1
        back = remainder(newest, rows, inverse) - offset
        number = newest - (back if back >= 0 else back + rows)
        if number < max(state[e, TAIL], state[e, HEAD] - rows):
            continue
        entry = place - offset + remainder(episode_of(e, place, number, state, order), rows, inverse)
        prefetch(ends, entry)
        which[found], spans[FIRST, found], spans[END, found], spans[AIM, found] = i, number, entry, e
        found += 1
    return found


@jit
def choose_goals(
    places: Ints, key: Any, ratio: float, strategy: int, finished: bool, rows: int, state: Ints, step: Any, order: Any,
    ends: Any, seen: Ints, others: Ints, source: Any, at: Ints, out: Any, to: Ints, goal: Ints, which: Ints,
    begin: Ints, now: Ints, after: Ints, spans: Ints, rewards: Any, flags: Any, achieved: Any, desired: Any,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.hindsight.choose_goals`."""
    note_ends(rows, state, order, ends, seen)
    found, inverse, width = 0, 1.0 / rows, source.shape[1]
    drawn = _look_up(places, key, ratio, rows, state, order, ends, which, spans)
    for m in range(drawn):
        i = which[m]
        place, number, noted = places[i], spans[FIRST, m], np.int64(ends[spans[END, m]])
        e = spans[AIM, m]
        base, head = e * rows, state[e, HEAD]
        first = number - min(np.int64(step[place]), number - max(state[e, TAIL], head - rows))
        end = number + ((noted - number) & 0xFFFFFFFF)  # of which 32 bits are kept
        low, high = _choice(strategy, number, first, end)
        if high < low or (finished and end == head - 1 and state[e, NEXT] > 0):
            continue
        if strategy == RANDOM:
            aim = _after(others[i], others[i] - remainder(others[i], rows, inverse), rows)
        else:
            chosen = low + np.int64(uniform(key, GOALS + 2 * i + 1) * np.float64(high - low + 1))
            aim = base + remainder(chosen, rows, inverse)
        fetch(source, aim * width + goal[0], goal[1])
        which[found], spans[FIRST, found] = i, base + remainder(first, rows, inverse)
        spans[END, found], spans[AIM, found] = base + remainder(end, rows, inverse), aim
        found += 1
    _list_steps(
        places, rows, source, at, out, to, goal, which[:found], begin, now, after, spans, rewards, flags, achieved,
        desired,
    )  # fmt: skip
    return found


@jit
def _choice(strategy: int, number: int, first: int, end: int) -> tuple[Any, Any]:
    """The rows from which the goal of row ``number`` is drawn: from the one to the other."""
    if strategy == FUTURE:
        return number + 1, end
    if strategy == FINAL:
        return end, end
    if strategy == EPISODE:
        return first + 1, end
    if strategy == PAST:
        return first + 1, number
    return 0, 0


@jit
def _list_steps(
    places: Ints, rows: int, source: Any, at: Ints, out: Any, to: Ints, goal: Ints, which: Ints, begin: Ints, now: Ints,
    after: Ints, spans: Ints, rewards: Any, flags: Any, achieved: Any, desired: Any,
) -> None:  # fmt: skip
    """The steps of the windows of the rows ``which``, by which time their goals have come."""
    width, inverse, entry = source.shape[1], 1.0 / rows, 0
    bits, floats = source.reshape(-1), source.reshape(-1).view(np.float32)
    counts, size = out.reshape(-1).view(np.int32), goal[1]
    first, reached, wanted = source.ctypes.data + goal[0], achieved.ctypes.data, desired.ctypes.data
    begin[0] = 0
    for m in range(which.size):
        here = places[which[m]]
        base = here - remainder(here, rows, inverse)
        for _ in range(counts[(which[m] * out.shape[1] + to[3]) // 4]):
            byte = here * width
            now[entry], rewards[entry] = here, floats[(byte + at[0]) // 4]
            flags[0, entry], flags[1, entry] = bits[byte + at[1]], bits[byte + at[2]]
            here = _after(here, base, rows)
            after[entry] = here
            if size:
                memcpy(address_t(reached + entry * size), address_t(first + here * width), np.intp(size))
                memcpy(address_t(wanted + entry * size), address_t(first + spans[AIM, m] * width), np.intp(size))
            entry += 1
        begin[m + 1] = entry


@jit
def relabel_windows(
    which: Ints, begin: Ints, after: Ints, envs: int, gamma: float, rewards: Any, terminated: Any, truncated: Any,
    source: Any, out: Any, to: Ints, sizes: Ints, desired: Any, goals: Ints, last: Ints, used: Ints, mask: Any,
) -> None:  # fmt: skip
    """See :func:`relive.kernels.reference.hindsight.relabel_windows`."""
    width, wide = source.shape[1], out.shape[1]
    bits, words = out.reshape(-1), out.reshape(-1).view(np.int64)
    ints, floats = out.reshape(-1).view(np.int32), out.reshape(-1).view(np.float32)
    here, there, aims = source.ctypes.data, out.ctypes.data, desired.ctypes.data
    for m in range(which.size):
        row, value, factor, k, entry = which[m] * wide, 0.0, 1.0, 0, begin[m] - 1
        while entry + 1 < begin[m + 1]:
            entry += 1
            value += factor * np.float64(rewards[entry])
            factor *= gamma
            k += 1
            if terminated[entry] | truncated[entry]:
                break
        used[m], last[which[m]], mask[which[m]] = entry, after[entry], True
        if sizes[2] > 0 and k != ints[(row + to[3]) // 4]:
            memcpy(address_t(there + row + sizes[1]), address_t(here + after[entry] * width), np.intp(sizes[2]))
        words[(row + to[1]) // 8] = words[(row + to[0]) // 8] + k * envs
        floats[(row + to[2]) // 4] = 0.0 if terminated[entry] else factor
        ints[(row + to[3]) // 4] = k
        floats[(row + to[4]) // 4] = value
        bits[row + to[5]], bits[row + to[6]] = terminated[entry], truncated[entry]
        for g in range(goals.size):
            aim = address_t(aims + begin[m] * desired.shape[1])
            memcpy(address_t(there + row + goals[g]), aim, np.intp(desired.shape[1]))
