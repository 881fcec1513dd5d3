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

from ..reference.hindsight import (
    EPISODE,
    FINAL,
    FINISHED,
    FUTURE,
    GOAL_AT,
    GOAL_BYTES,
    GOALS,
    INTO_NEXT,
    INTO_OBS,
    MARK,
    PAST,
    RANDOM,
    STRATEGY,
    RelabelledSteps,
)
from ..reference.nstep import NEXT_AT, NEXT_BYTES
from ..ring_state import COUNT, HEAD, NEXT, RingArrays
from .handles import Ints, matrix_of, open_ring, vector_of
from .jit import address_t, fetch, jit, memcpy, prefetch, remainder
from .nstep import add_reward, bootstrap, results, write_window
from .places import oldest, place_after, place_of, row_at
from .random import uniform
from .windows import windows

__all__ = ["open_steps", "plan_goals", "relabel_windows"]

FIRST, END, AIM = range(3)
"""What the rows of ``spans`` are in the end: the places of an episode's first and last live row, and of the goal."""
NUMBER, ENTRY, ENV = range(3)
"""What they are meanwhile: a row's number, the entry of ``ends`` for its episode, and its env."""


@jit
def open_steps(handle: Ints) -> RelabelledSteps:
    """The arrays of relabelled steps; the numbers are the positions of :class:`RelabelledSteps`'s members."""
    return RelabelledSteps(
        vector_of(handle, 0, np.int64),
        vector_of(handle, 1, np.int64),
        vector_of(handle, 2, np.int64),
        vector_of(handle, 3, np.int64),
        matrix_of(handle, 4, np.int64),
        vector_of(handle, 5, np.float32),
        matrix_of(handle, 6, np.uint8),
        vector_of(handle, 7, np.int64),
        vector_of(handle, 8, np.int64),
        vector_of(handle, 9, np.int64),
    )


@jit
def episode_of(e: Any, place: Any, number: Any, ring: RingArrays) -> Any:
    """Which of the episodes of an env a live row belongs to.

    ``order`` is kept modulo 2**32. At most ``rows`` transitions of the env are newer, so the difference fits.
    """
    count = ring.state[e, COUNT]
    return number - count + ((count - np.int64(ring.order[place])) & 0xFFFFFFFF)


@jit
def note_ends(ring: RingArrays) -> None:
    """Note all rows that are live and were not noted before; the last one of each episode stays noted."""
    inverse = 1.0 / ring.rows
    for e in range(ring.state.shape[0]):
        for number in range(max(ring.seen[e], oldest(e, ring)), ring.state[e, HEAD]):
            episode = episode_of(e, place_of(number, e, ring.rows, inverse), number, ring)
            ring.ends[place_of(episode, e, ring.rows, inverse)] = number  # the lower 32 bits
        ring.seen[e] = ring.state[e, HEAD]


@jit
def _look_up(places: Ints, key: Any, ratio: float, ring: RingArrays, steps: RelabelledSteps) -> int:
    """The rows to be relabelled: in ``spans`` their numbers, envs, and entries of ``ends``, which are prefetched."""
    found, inverse, spans = 0, 1.0 / ring.rows, steps.spans
    for i in range(places.size):
        if uniform(key, GOALS + 2 * i) >= ratio:
            continue
        place = places[i]
        e, _, number = row_at(place, inverse, ring)
        if number < oldest(e, ring):
            continue
        entry = place_of(episode_of(e, place, number, ring), e, ring.rows, inverse)
        prefetch(ring.ends, entry)
        steps.which[found], spans[NUMBER, found], spans[ENTRY, found], spans[ENV, found] = i, number, entry, e
        found += 1
    return found


@jit
def plan_goals(
    ring_handle: Ints, batch: Ints, places: Ints, n: int, gamma: float, key: Any, ratio: float, others: Ints, out: Any,
    last: Ints, steps_handle: Ints, pairs: Any,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.hindsight.plan_goals`. The ring's ends have been asked for."""
    bad = windows(ring_handle, batch, places, n, gamma, out, last)
    if bad >= 0:
        return -1 - bad
    ring, steps = open_ring(ring_handle), open_steps(steps_handle)
    for i in range(places.size):
        out[i, batch[MARK]] = 0
    if ring.ends.size != ring.step.size:
        return 0
    note_ends(ring)
    found, rows, inverse, width = 0, ring.rows, 1.0 / ring.rows, ring.memory.shape[1]
    which, spans, strategy = steps.which, steps.spans, batch[STRATEGY]
    drawn = _look_up(places, key, ratio, ring, steps)
    for m in range(drawn):
        i = which[m]
        number, noted, e = spans[NUMBER, m], np.int64(ring.ends[spans[ENTRY, m]]), spans[ENV, m]
        first = number - min(np.int64(ring.step[places[i]]), number - oldest(e, ring))
        end = number + ((noted - number) & 0xFFFFFFFF)  # ``noted`` has its lower 32 bits; an episode is shorter
        low, high = _choice(strategy, number, first, end)
        if high < low or (batch[FINISHED] and end == ring.state[e, HEAD] - 1 and ring.state[e, NEXT] > 0):
            continue
        if strategy == RANDOM:
            aim = place_after(others[i], others[i] - remainder(others[i], rows, inverse), rows)
        else:
            chosen = low + np.int64(uniform(key, GOALS + 2 * i + 1) * np.float64(high - low + 1))
            aim = place_of(chosen, e, rows, inverse)
        fetch(ring.memory, aim * width + batch[GOAL_AT], batch[GOAL_BYTES])
        # ``found`` <= m, so what is overwritten has been read
        which[found], spans[FIRST, found] = i, place_of(first, e, rows, inverse)
        spans[END, found], spans[AIM, found] = place_of(end, e, rows, inverse), aim
        found += 1
    _list_steps(found, places, ring, results(out, batch).steps, batch, out, steps, pairs)
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
    found: int, places: Ints, ring: RingArrays, counts: Any, batch: Ints, out: Any, steps: RelabelledSteps, pairs: Any
) -> None:
    """The steps and goals of the windows of the ``found`` rows. By now these goals, which were asked for, have come.

    ``entry`` is the step's entry in the lists. A window of row i has ``counts[i]`` steps, at most n, and the lists have
    room for n steps a row of the batch. A goal is ``size`` bytes.
    """
    width, inverse, entry, rows = ring.memory.shape[1], 1.0 / ring.rows, 0, ring.rows
    size, first, there = batch[GOAL_BYTES], ring.memory.ctypes.data + batch[GOAL_AT], out.ctypes.data
    reached, wanted = pairs.ctypes.data, pairs.ctypes.data + pairs.shape[1] * size
    steps.begin[0] = 0
    for m in range(found):
        i, aim = steps.which[m], first + steps.spans[AIM, m] * width
        here = places[i]
        base = here - remainder(here, rows, inverse)
        if size:
            row = there + i * out.shape[1]
            memcpy(address_t(row + batch[INTO_OBS]), address_t(aim), np.intp(size))
            memcpy(address_t(row + batch[INTO_NEXT]), address_t(aim), np.intp(size))
        for _ in range(counts[i]):
            steps.now[entry], steps.rewards[entry] = here, ring.reward[here]
            steps.flags[0, entry], steps.flags[1, entry] = ring.terminated[here], ring.truncated[here]
            here = place_after(here, base, rows)
            steps.after[entry] = here
            if size:
                memcpy(address_t(reached + entry * size), address_t(first + here * width), np.intp(size))
                memcpy(address_t(wanted + entry * size), address_t(aim), np.intp(size))
            entry += 1
        steps.begin[m + 1] = entry


@jit
def relabel_windows(
    ring_handle: Ints, batch: Ints, gamma: float, found: int, judged: bool, out: Any, last: Ints, steps_handle: Ints,
    rewards: Any,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.hindsight.relabel_windows`."""
    ring, steps, written = open_ring(ring_handle), open_steps(steps_handle), results(out, batch)
    for entry in range(steps.begin[found] if judged else 0):
        if not np.isfinite(rewards[entry]):
            return entry
    width, wide, envs, size = ring.memory.shape[1], out.shape[1], ring.state.shape[0], batch[GOAL_BYTES]
    here, there, begin, after, flags = ring.memory.ctypes.data, out.ctypes.data, steps.begin, steps.after, steps.flags
    next_at, next_bytes, into_obs, into_next = batch[NEXT_AT], batch[NEXT_BYTES], batch[INTO_OBS], batch[INTO_NEXT]
    for m in range(found):
        i, value, discount, k, entry = steps.which[m], 0.0, 1.0, 0, begin[m] - 1
        row, terminal, cut = there + i * wide, np.uint8(0), np.uint8(0)
        while entry + 1 < begin[m + 1]:
            entry += 1
            value, discount = add_reward(value, discount, rewards[entry], gamma)
            terminal, cut = flags[0, entry], flags[1, entry]
            k += 1
            if terminal | cut:
                break
        steps.used[m], last[i], out[i, batch[MARK]] = entry, after[entry], 1
        if next_bytes > 0 and k != written.steps[i]:
            memcpy(address_t(row + next_at), address_t(here + after[entry] * width), np.intp(next_bytes))
            memcpy(address_t(row + into_next), address_t(row + into_obs), np.intp(size))
        following = written.index[i] + k * envs  # the row k later in the same env
        write_window(written, i, following, k, value, bootstrap(discount, terminal), terminal, cut)
    return -1
