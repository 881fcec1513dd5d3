"""Adding rows to rings: reference/append.py's names and results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ring_state import (
    ALONE,
    COMPLETED,
    COUNT,
    DRAWABLE,
    ENDED,
    EPISODES,
    FINALS,
    HEAD,
    HISTORY,
    LAST,
    LENGTH,
    LINKED,
    LONGEST,
    NEXT,
    NO_FINALS,
    NOT_FINITE,
    STRIDE,
    TAIL,
    TAILS,
    UNFIT,
    USED_UP,
    RingArrays,
    StagedRows,
)
from ..step_table import SOURCE
from .handles import ENTRIES, Ints, matrix_of, open_ring, open_staged, vector_of
from .jit import address_t, addressed, fetch, inlined, jit, memcpy
from .places import place_after, place_of
from .rows import accept_step, copy_step
from .rule import ends_full, ends_window
from .tensors import release_gil, take_gil
from .undo import note_undo

__all__ = ["add_rows", "add_step", "plan_rows", "scatter_rows"]

Bools = NDArray[np.uint8]


@inlined
def append(ring: RingArrays, given: StagedRows, ended: Bools) -> int:
    """See :func:`relive.kernels.reference.append.append`.

    What is counted stays in variables: reading it back at once would wait for the rows written before, one by one.
    """
    rows, state, counters, step, stamp, order = ring.rows, ring.state, ring.counters, ring.step, ring.stamp, ring.order
    envs, finals = given.envs, given.finals
    events, inverse, listed = 0, 1.0 / rows, given.where.size > 0
    completed, drawable, episodes = counters[COMPLETED], counters[DRAWABLE], counters[EPISODES]
    history, length, stride, tails = counters[HISTORY], counters[LENGTH], counters[STRIDE], counters[TAILS] > 0
    for i in range(envs.size):
        e = envs[i]
        number, tail, index, count, begin = state[e, HEAD], state[e, TAIL], state[e, NEXT], state[e, COUNT], e * rows
        index = index if index < LONGEST else 0  # so index + 1 still fits the int32 of ``step``
        place, cut = place_of(number, e, rows, inverse), index + 1 >= LONGEST and ended[i] == 0
        # ``old`` is the number of the row that lies at the place, negative in the first round; ``oldest`` that of the
        # oldest row which is live once ``number`` is written
        old, oldest = number - rows, max(tail, number + 1 - rows)
        closed = _close(place, old, number, begin, index, ring, given, events) if old >= tail else 0
        drawable, events = drawable - closed, events + (closed if listed else 0)
        step[place], stamp[place] = index, -1 - completed
        if index > 0 and ended[i] < ALONE:  # the row before is of the same episode, and is complete now
            before = (place if place > begin else begin + rows) - 1
            stamp[before], order[before] = completed, count
            completed, count = completed + 1, count + 1
            opens = number - 1 - min(index - 1, history) >= oldest
            opens = opens and ((cut and tails) or ends_full(index - 1, length, stride))
            opened = _open(before, opens, given, events)
            drawable, events = drawable + opened, events + (opened if listed else 0)
        order[place] = count  # the lower 32 bits
        number, index, finals[i] = number + 1, 0 if cut else index + 1, -1
        if ended[i] == ENDED:
            final = place_after(place, begin, rows)
            old, oldest = number - rows, max(tail, number + 1 - rows)
            closed = _close(final, old, number, begin, index, ring, given, events) if old >= tail else 0
            drawable, events = drawable - closed, events + (closed if listed else 0)
            # the transition at ``place`` counts as complete before it: one more than ``completed`` and ``count``
            step[final], stamp[final], order[final] = index, -2 - completed, count + 1
            number, finals[i] = number + 1, final
            episodes += 1
        if ended[i]:
            stamp[place] = completed
            completed, count = completed + 1, count + 1
            own = number - 1 - int(finals[i] >= 0)  # the number of the row at ``place``, whose index is index - 1
            opens = own - min(index - 1, history) >= oldest and (tails or ends_full(index - 1, length, stride))
            opened = _open(place, opens, given, events)
            drawable, events = drawable + opened, events + (opened if listed else 0)
            index = index if ended[i] == LINKED and index < LONGEST else 0
            episodes += int(ended[i] == LAST)
        given.places[i] = place
        state[e, HEAD], state[e, NEXT], state[e, COUNT] = number, index, count
    counters[COMPLETED], counters[DRAWABLE], counters[EPISODES] = completed, drawable, episodes
    return events


@inlined
def _close(
    place: int, old: int, number: int, begin: int, following: int, ring: RingArrays, given: StagedRows, events: int
) -> int:
    """Row ``old`` makes way for ``number``: how many rows can no longer be drawn, itself and those it was history of.

    Those are the row ``history`` after it; or, if it is the first of its episode, all of its episode up to that one.
    ``following`` is the index of row ``number`` in its episode. They are listed from entry ``events`` on, at most
    ``history`` + 1 of them, for which the ring has made room.
    """
    rows, closed, history = number - old, 0, ring.counters[HISTORY]
    other = old if ring.step[place] == 0 else old + history
    while other <= min(old + history, number - 1):
        at = place + (other - old)  # other - old < rows, so one turn brings it back
        at = at if at < begin + rows else at - rows
        if other - min(ring.step[at], history) != old:
            break
        if ring.stamp[at] >= 0 and ends_window(at, other, begin, number, following, ring):
            if given.where.size:
                given.where[events + closed], given.opens[events + closed] = at, 0
            closed += 1
        other += 1
    return closed


@inlined
def _open(place: int, opens: bool, given: StagedRows, events: int) -> int:
    """A transition is complete: 1 if it can be drawn now."""
    if opens and given.where.size:
        given.where[events], given.opens[events] = place, 1
    return int(opens)


@jit
def plan_rows(ring_handle: Ints, staged_handle: Ints, mode: int) -> int:
    """See :func:`relive.kernels.reference.append.plan_rows`."""
    ring, given = open_ring(ring_handle), open_staged(staged_handle)
    envs, heads, rows, inverse = given.envs, ring.state[:, HEAD].copy(), ring.rows, 1.0 / ring.rows
    for i in range(envs.size):
        e, ended = envs[i], given.terminated[i] | given.truncated[i]
        if ended and mode == NO_FINALS:
            return -1 - i
        given.places[i], given.finals[i] = place_of(heads[e], e, rows, inverse), -1
        heads[e] += 1
        if ended and mode == FINALS:
            given.finals[i] = place_of(heads[e], e, rows, inverse)
            heads[e] += 1
    for i in range(envs.size):
        given.tails[i] = heads[envs[i]] - rows
    if ring.undo.size:
        ended = np.empty(envs.size, np.uint8)
        _note_kinds(given, mode, ended)
        if note_undo(ring, given, ended):
            return USED_UP
    return 0


@inlined
def _note_kinds(given: StagedRows, mode: int, ended: Bools) -> None:
    """Write what :func:`relive.kernels.reference.append.kinds_of` gives."""
    for i in range(given.envs.size):
        ended[i] = ALONE
        if mode != ALONE:
            ended[i] = given.terminated[i] | given.truncated[i]
            if mode == LINKED:
                ended[i] += LINKED  # a done makes it LAST


@jit
def add_rows(ring_handle: Ints, staged_handle: Ints, mode: int) -> int:
    """See :func:`relive.kernels.reference.append.add_rows`."""
    return _add(ring_handle, staged_handle, mode, np.empty(open_staged(staged_handle).envs.size, np.uint8))


@jit
def _add(ring_handle: Ints, staged_handle: Ints, mode: int, ended: Bools) -> int:
    """The same; ``ended`` is memory for what ends each row, so that nothing here can fail for lack of it."""
    ring, given = open_ring(ring_handle), open_staged(staged_handle)
    envs, memory, rows = given.envs, ring.memory, ring.rows
    _note_kinds(given, mode, ended)
    for i in range(envs.size if mode == NO_FINALS else 0):
        if ended[i]:
            return -1 - i
    if envs.size > 1:  # so that those rows come while the first are written; of all envs in turn, most often
        inverse, width = 1.0 / rows, memory.shape[1]
        for i in range(envs.size):
            place = place_of(ring.state[envs[i], HEAD] + i // ring.state.shape[0], envs[i], rows, inverse)
            fetch(memory, place * width, width)
    if ring.undo.size and note_undo(ring, given, ended):
        return USED_UP
    events = append(ring, given, ended)
    scatter_rows(given.staged, given.places, memory, ring.step_bytes)
    if mode == FINALS:
        scatter_rows(given.final, given.finals, memory, ring.obs_bytes)
    for i in range(envs.size):
        if not np.isfinite(given.reward[i]):
            ring.counters[NOT_FINITE] += 1
    return events


def _add_step(step: int, direct: Ints) -> int:
    """See :func:`relive.kernels.reference.append.add_step`; ``direct`` is the handle of a :class:`DirectStep`."""
    table, ring, staged = matrix_of(direct, 0, np.int64), vector_of(direct, 1, np.int64), vector_of(direct, 2, np.int64)
    large, mode, hold = matrix_of(direct, 3, np.int64), direct[4 * ENTRIES], direct[5 * ENTRIES] != 0
    if accept_step(step, table) >= 0:
        return UNFIT
    ended = np.empty(open_staged(staged).envs.size, np.uint8)
    thread = 0 if hold else release_gil()
    events = _store(table, ring, staged, large, mode, ended)
    if not hold:
        take_gil(thread)
    return events


@jit
def _store(table: Ints, ring: Ints, staged: Ints, large: Ints, mode: int, ended: Bools) -> int:
    """Stage an accepted step and add its rows."""
    copy_step(table, 0)
    events = _add(ring, staged, mode, ended)
    if events >= 0 and large.shape[0]:
        given = open_staged(staged)
        for k in range(large.shape[0]):
            nbytes, places = large[k, 2], given.finals if large[k, 3] else given.places
            source = addressed(table[SOURCE, large[k, 0]], (places.size, nbytes), np.uint8)
            scatter_rows(source, places, addressed(large[k, 1], (1, nbytes), np.uint8), nbytes)
    return events


@jit
def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """See :func:`relive.kernels.reference.append.scatter_rows`."""
    here, there = source.ctypes.data, target.ctypes.data  # addresses; to them, bytes are added
    for i in range(places.size):
        if places[i] >= 0:
            row = address_t(there + places[i] * target.shape[1])
            memcpy(row, address_t(here + i * source.shape[1]), np.intp(nbytes))


add_step = jit(_add_step, nogil=False)
