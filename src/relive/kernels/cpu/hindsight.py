"""Hindsight: reference/hindsight.py's names and, to the bit, results.

The end of an episode is looked up, not searched. A row's number, less the number of the env's transitions that are
older, is how many older rows never became transitions. Every episode has exactly one such row, its last. So that
difference is the number of the row's episode within its env, and entry e * rows + episode % rows of ``ends`` notes the
number of the episode's last row, modulo 2**32. Rows are noted when they are first needed: ``seen[e]`` is the first of
env e that is not noted yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.hindsight import EPISODE, FINAL, FUTURE, GOALS, PAST, RANDOM
from ..ring_state import COUNT, HEAD, NEXT
from .jit import address_t, fetch, jit, memcpy, prefetch, remainder
from .nstep import INDEX, REWARD, STEPS, TERMINATED, TRUNCATED, add_reward, typed, write_window
from .places import Ints, oldest, place_after, place_of, row_at
from .random import uniform

__all__ = ["choose_goals", "note_ends", "relabel_windows"]

FIRST, END, AIM = range(3)
"""What the rows of ``spans`` are in the end: the places of an episode's first and last live row, and of the goal."""
NUMBER, ENTRY, ENV = range(3)
"""What they are meanwhile: a row's number, the entry of ``ends`` for its episode, and its env."""


@jit
def episode_of(e: Any, place: Any, number: Any, state: Ints, order: Any) -> Any:
    """Which of the episodes of an env a live row belongs to.

    ``order`` is kept modulo 2**32. At most ``rows`` transitions of the env are newer, so the difference fits.
    """
    return number - state[e, COUNT] + ((state[e, COUNT] - np.int64(order[place])) & 0xFFFFFFFF)


@jit
def note_ends(rows: int, state: Ints, order: Any, ends: Any, seen: Ints) -> None:
    """Note all rows that are live and were not noted before; the last one of each episode stays noted."""
    inverse = 1.0 / rows
    for e in range(state.shape[0]):
        for number in range(max(seen[e], oldest(e, rows, state)), state[e, HEAD]):
            episode = episode_of(e, place_of(number, e, rows, inverse), number, state, order)
            ends[place_of(episode, e, rows, inverse)] = number
        seen[e] = state[e, HEAD]


@jit
def _look_up(
    places: Ints, key: Any, ratio: float, rows: int, state: Ints, order: Any, ends: Any, which: Ints, spans: Ints
) -> int:
    """The rows to be relabelled: in ``spans`` their numbers, envs, and entries of ``ends``, which are prefetched."""
    found, inverse = 0, 1.0 / rows
    for i in range(places.size):
        if uniform(key, GOALS + 2 * i) >= ratio:
            continue
        place = places[i]
        e, _, number = row_at(place, rows, inverse, state)
        if number < oldest(e, rows, state):
            continue
        entry = place_of(episode_of(e, place, number, state, order), e, rows, inverse)
        prefetch(ends, entry)
        which[found], spans[NUMBER, found], spans[ENTRY, found], spans[ENV, found] = i, number, entry, e
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
        number, noted, e = spans[NUMBER, m], np.int64(ends[spans[ENTRY, m]]), spans[ENV, m]
        first = number - min(np.int64(step[places[i]]), number - oldest(e, rows, state))
        end = number + ((noted - number) & 0xFFFFFFFF)  # ``noted`` has its lower 32 bits; an episode is shorter
        low, high = _choice(strategy, number, first, end)
        if high < low or (finished and end == state[e, HEAD] - 1 and state[e, NEXT] > 0):
            continue
        if strategy == RANDOM:
            aim = place_after(others[i], others[i] - remainder(others[i], rows, inverse), rows)
        else:
            chosen = low + np.int64(uniform(key, GOALS + 2 * i + 1) * np.float64(high - low + 1))
            aim = place_of(chosen, e, rows, inverse)
        fetch(source, aim * width + goal[0], goal[1])
        # ``found`` <= m, so what is overwritten has been read
        which[found], spans[FIRST, found] = i, place_of(first, e, rows, inverse)
        spans[END, found], spans[AIM, found] = place_of(end, e, rows, inverse), aim
        found += 1
    lists = begin, now, after, rewards, flags, achieved, desired
    _list_steps(places, rows, source, at, out, to, goal, which[:found], spans, lists)
    return found


@jit
def _choice(strategy: int, number: int, first: int, end: int) -> tuple[Any, Any]:
    """The first and the last of the rows from which the goal of row ``number`` is drawn; none if the last is less."""
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
    places: Ints, rows: int, source: Any, at: Ints, out: Any, to: Ints, goal: Ints, which: Ints, spans: Ints, lists: Any
) -> None:
    """The steps of the windows of the rows ``which``. By now their goals, which were asked for, have come.

    ``byte`` is the first byte of a step's row, ``entry`` the step's entry in the lists. A window has as many steps as
    its row of ``out`` says, at most n, and the lists have room for n steps a row of the batch.
    """
    begin, now, after, rewards, flags, achieved, desired = lists
    width, inverse, entry, size = source.shape[1], 1.0 / rows, 0, goal[1]
    bits, _, _, floats = typed(source)
    counts = typed(out)[1]
    first, reached, wanted = source.ctypes.data + goal[0], achieved.ctypes.data, desired.ctypes.data
    begin[0] = 0
    for m in range(which.size):
        here = places[which[m]]
        base = here - remainder(here, rows, inverse)
        for _ in range(counts[(which[m] * out.shape[1] + to[STEPS]) // 4]):
            byte = here * width
            now[entry], rewards[entry] = here, floats[(byte + at[REWARD]) // 4]
            flags[0, entry], flags[1, entry] = bits[byte + at[TERMINATED]], bits[byte + at[TRUNCATED]]
            here = place_after(here, base, rows)
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
    target = typed(out)
    here, there, aims = source.ctypes.data, out.ctypes.data, desired.ctypes.data
    for m in range(which.size):
        row, value, discount, k, entry = which[m] * wide, 0.0, 1.0, 0, begin[m] - 1
        while entry + 1 < begin[m + 1]:
            entry += 1
            value, discount = add_reward(value, discount, rewards[entry], gamma)
            k += 1
            if terminated[entry] | truncated[entry]:
                break
        used[m], last[which[m]], mask[which[m]] = entry, after[entry], True
        if sizes[2] > 0 and k != target[1][(row + to[STEPS]) // 4]:
            memcpy(address_t(there + row + sizes[1]), address_t(here + after[entry] * width), np.intp(sizes[2]))
        following = target[2][(row + to[INDEX]) // 8] + k * envs  # the row k later in the same env
        write_window(target, row, to, following, k, value, discount, terminated[entry], truncated[entry])
        for g in range(goals.size):
            aim = address_t(aims + begin[m] * desired.shape[1])
            memcpy(address_t(there + row + goals[g]), aim, np.intp(desired.shape[1]))
