"""Reading rings: the names of ``reference/windows.py`` and, to the bit, its results.

In order: n-step windows; rows and stacks of frames; sequences; windows with other goals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.windows import (
    BURN,
    BURN_IN,
    CUT,
    DISCOUNT,
    ENV,
    EPISODE,
    FINAL,
    FINISHED,
    FIRST,
    FUTURE,
    GOAL_AT,
    GOAL_BYTES,
    GOALS,
    INDEX,
    INTO_NEXT,
    INTO_OBS,
    IS_START,
    LENGTHS,
    MARK,
    MASK,
    NEXT_AT,
    NEXT_BYTES,
    NEXT_INDEX,
    NEXT_ROW,
    OBS_BYTES,
    OWN_AT,
    OWN_BYTES,
    PAST,
    PER_INDEX,
    RANDOM,
    REACH,
    ROW_CUT,
    ROW_DISCOUNT,
    ROW_STEP_BYTES,
    ROW_STEPS,
    ROW_SUM,
    ROW_TERMINAL,
    START,
    STEP_BYTES,
    STEPS,
    STRATEGY,
    SUM,
    TERMINAL,
    TIME_FIRST,
    RelabelledSteps,
    Results,
)
from ..reference.windows import add_reward as plain_add_reward
from ..reference.windows import bootstrap as plain_bootstrap
from ..reference.windows import write_window as plain_write_window
from ..tables import COUNT, HEAD, LENGTH, NEXT, STRIDE, RingArrays
from .jit import (
    Ints,
    address_t,
    copy_ahead,
    copy_short,
    fetch,
    inlined,
    jit,
    matrix_of,
    memcpy,
    open_ring,
    prefetch,
    remainder,
    strided,
    vector_of,
)
from .priorities import uniform
from .ring import oldest, place_after, place_of, row_at, window_start

__all__ = [
    "add_reward",
    "bootstrap",
    "gather_pairs",
    "gather_rows",
    "notes_of",
    "open_steps",
    "plan_goals",
    "read_sequences",
    "read_windows",
    "relabel_windows",
    "results",
    "stack_places",
    "windows",
    "write_window",
]


add_reward = jit(plain_add_reward)
bootstrap = jit(plain_bootstrap)
write_window = jit(plain_write_window)


@inlined
def results(rows: Any, batch: Ints) -> Results:
    """See :func:`relive.kernels.reference.windows.results`.

    A row is ``wide`` bytes long, a multiple of 16, so the next one is ``wide`` // s elements of s bytes away.
    """
    count, wide, there = rows.shape[0], rows.shape[1], rows.ctypes.data
    return Results(
        strided(there + batch[INDEX], count, wide // 8, np.int64),
        strided(there + batch[NEXT_INDEX], count, wide // 8, np.int64),
        strided(there + batch[DISCOUNT], count, wide // 4, np.float32),
        strided(there + batch[STEPS], count, wide // 4, np.int32),
        strided(there + batch[SUM], count, wide // 4, np.float32),
        strided(there + batch[TERMINAL], count, wide, np.uint8),
        strided(there + batch[CUT], count, wide, np.uint8),
    )


FORESEEN = 1024
"""Bytes of a window that are loaded ahead; the processor itself loads what follows."""


@jit
def windows(ring_handle: Ints, batch: Ints, places: Ints, steps: int, gamma: float, out: Any, last: Ints) -> int:
    """See :func:`relive.kernels.reference.windows.windows`.

    ``here`` and ``there`` are the addresses of the ring's memory and of ``out``; to them, bytes are added.
    """
    ring, written = open_ring(ring_handle), results(out, batch)
    # ``own``: rows have next observations of their own, and nothing is copied from the row after
    rows, envs, inverse, own = ring.rows, ring.state.shape[0], 1.0 / ring.rows, batch[NEXT_BYTES] < 0
    step_bytes, next_at, next_bytes = batch[STEP_BYTES], batch[NEXT_AT], batch[NEXT_BYTES]
    width, wide = ring.memory.shape[1], out.shape[1]
    here, there = ring.memory.ctypes.data, out.ctypes.data
    # the rows of a window are neighbours, so one run of bytes loads all of it, up to FORESEEN
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
        # the row that holds the observation to bootstrap from
        last[i] = before if own else place
        written.index[i] = number * envs + env
        # a public index is number * N + env; the window has k steps, so the row after it is number + k
        next_index = (number + k - int(own)) * envs + env
        write_window(written, i, next_index, k, value, bootstrap(discount, terminal), terminal, cut)
        if not own:
            memcpy(address_t(row + next_at), address_t(here + place * width), np.intp(next_bytes))
        elif k > 1:
            # with k == 1 the anchor's own bytes have been copied with the step
            source = address_t(here + before * width + batch[OWN_AT])
            memcpy(address_t(row + next_at), source, np.intp(batch[OWN_BYTES]))
    return -1


@jit
def gather_rows(source: Any, places: Ints, out: Any, start: int, nbytes: int) -> int:
    """See :func:`relive.kernels.reference.windows.gather_rows`."""
    here, there = source.ctypes.data, out.ctypes.data + start  # addresses; to them, bytes are added
    for i in range(places.size):
        target = there + i * out.shape[1]
        # only the upper bound: negative places mean zeros
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
        # a stack and the one after it share all but one frame, which are in the cache the second time
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
    """True if these places follow one another, and all are among the first ``rows``."""
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
            # a step's index says how many frames of its episode lie before it
            reach = min(back, step[place])  # no further than the first row of the episode
            # may be negative before the remainder: the frame lies across the ring's seam
            offset = (place - begin - reach) % rows
            out[i, depth - 1 - back] = begin + offset if reach == back or repeat else -1
    return -1


AHEAD = 2
"""How many of its rows are asked for when it is known where a window starts."""
GROUP = 8
"""Windows that are written side by side."""
PLACE, BEGIN, OWN, KNOWN, OPENS, ENDS, CUTS = range(7)
"""The notes of each of them: the places of its next row and of the env's first, how many steps it has up to the
anchor, how many with those that their rewards reach to, whether the first begins its episode, and whether the last of
all terminated and was truncated."""


@jit
def read_sequences(
    ring_handle: Ints, batch: Ints, gamma: float, places: Ints, out: Any, blank: Any, per: Ints, table: Ints
) -> int:
    """See :func:`relive.kernels.reference.windows.read_sequences`."""
    if places.size == 0:
        return -1
    notes = notes_of(out.shape[0] // places.size, batch)
    return read_windows(open_ring(ring_handle), batch, gamma, places, out, blank, per, table, notes)


@jit
def notes_of(total: int, batch: Ints) -> Any:
    """Memory for what is noted of windows of ``total`` rows while they are read: their rewards, and their marks."""
    # the steps of a window, at most ``total``, have rewards that reach ``batch[REACH]`` - 1 further
    return np.empty((GROUP, total + batch[REACH])), np.empty((GROUP, 7), np.int64)


@jit
def read_windows(
    ring: RingArrays, batch: Ints, gamma: float, places: Ints, out: Any, blank: Any, per: Ints, table: Ints, notes: Any
) -> int:
    """:func:`read_sequences` of at least one place, in memory of the caller's. This raises nothing."""
    (rewards, marks), steps = notes, batch[REACH]
    count, total, width = places.size, out.shape[0] // places.size, ring.memory.shape[1]
    for b in range(count):  # so that the indices, which say where windows start, come for all of them at once
        if not 0 <= places[b] < ring.memory.shape[0]:
            return b
        fetch(ring.memory, places[b] * width, width)
    _find(places, batch[BURN], ring, per)
    for b in range(count):
        # checked before any row is read: a window that is not in the ring would be read across its seam
        if not 0 < per[LENGTHS, b] <= min(ring.rows, total):
            return b
    for b in range(count):
        fetch(ring.memory, per[FIRST, b] * width, AHEAD * width)
    group = GROUP if batch[TIME_FIRST] else 1
    for low in range(0, count, group):  # so that rows are written next to each other, and read one after another
        high = min(low + group, count)
        for b in range(low, high):
            _scan(per[FIRST, b], per[LENGTHS, b], steps, ring, rewards[b - low], marks[b - low])
            per[LENGTHS, b] = marks[b - low, KNOWN] + 1
        _write((low, high, total, ring.rows), gamma, (rewards, marks), ring.memory, out, batch, blank, per, table)
    return -1


@jit
def _find(places: Ints, burn_in: int, ring: RingArrays, per: Ints) -> None:
    """Fill ``per``, with the number of rows up to the anchor in place of the lengths."""
    length, stride, inverse = ring.counters[LENGTH], ring.counters[STRIDE], 1.0 / ring.rows
    for b in range(places.size):
        index = np.int64(ring.step[places[b]])
        env, begin, number = row_at(places[b], inverse, ring)
        start = window_start(index, length, stride)
        first = max(start - burn_in, 0)
        back = index - first  # how many rows before the anchor row 0 lies, less than ``rows`` if the window is live
        per[PER_INDEX, b], per[LENGTHS, b], per[BURN_IN, b] = (
            number * ring.state.shape[0] + env,
            back + 1,
            start - first,
        )
        # number - index is the number of the episode's first step
        per[ENV, b], per[START, b] = env, number - index + start
        # back < rows, so one turn of the ring at most lies in between
        per[FIRST, b] = places[b] - back + (ring.rows if places[b] - back < begin else 0)


@jit
def _scan(first: int, own: int, steps: int, ring: RingArrays, rewards: Any, marks: Ints) -> None:
    """Note a window's ``marks``, and the rewards of its ``own`` steps from ``first`` on and of those they reach to."""
    known, place, last = 0, first, first
    begin = first - remainder(first, ring.rows, 1.0 / ring.rows)
    # rewards beyond the anchor count only while rows are complete
    while known < own or (known < own + steps - 1 and ring.stamp[place] >= 0):
        rewards[known] = ring.reward[place]
        known, last = known + 1, place
        place = place_after(place, begin, ring.rows)
    marks[PLACE], marks[BEGIN], marks[OWN], marks[KNOWN] = first, begin, own, known
    marks[OPENS], marks[ENDS], marks[CUTS] = ring.step[first] == 0, ring.terminated[last], ring.truncated[last]


@jit
def _write(
    window: Any, gamma: float, scanned: Any, memory: Any, out: Any, batch: Ints, blank: Any, per: Ints, table: Ints
) -> None:
    """Windows ``low`` to ``high``, row by row: their steps, then the final observation if there is one, then blanks.

    Row t of window b is row t * B + b of ``out``, or b * T + t; its first byte is at the address ``base``. A row is
    ``wide`` bytes long, a multiple of 16, so the next one is ``wide`` // s elements of s bytes away.
    """
    (low, high, total, rows), (rewards, marks) = window, scanned
    count, width, wide, size = per.shape[1], memory.shape[1], out.shape[1], out.shape[0]
    here, there, nothing = memory.ctypes.data, out.ctypes.data, blank.ctypes.data
    sums = strided(there + batch[ROW_SUM], size, wide // 4, np.float32)
    terminals = strided(there + batch[ROW_TERMINAL], size, wide, np.uint8)
    cuts = strided(there + batch[ROW_CUT], size, wide, np.uint8)
    discounts = strided(there + batch[ROW_DISCOUNT], size, wide // 4, np.float32)
    counts = strided(there + batch[ROW_STEPS], size, wide // 4, np.int32)
    following = strided(there + batch[NEXT_ROW], size, wide // 8, np.int64)
    masks = strided(there + batch[MASK], size, wide, np.uint8)
    starts = strided(there + batch[IS_START], size, wide, np.uint8)
    step_bytes, obs_bytes, steps, time_first = batch[ROW_STEP_BYTES], batch[OBS_BYTES], batch[REACH], batch[TIME_FIRST]
    begin, listed = per[BURN_IN], table.size > 0
    for t in range(total):
        for b in range(low, high):
            g, row = b - low, t * count + b if time_first else b * total + t
            if b + high - low < count:  # so that the next windows' rows come while these are written
                fetch(memory, (per[FIRST, b + high - low] + t) * width, width)
            known, base, place = marks[g, KNOWN], there + row * wide, marks[g, PLACE]
            bounds = t == known and (marks[g, ENDS] | marks[g, CUTS]) != 0
            if t > known or bounds:
                copy_short(address_t(base), address_t(nothing), np.intp(wide))
            if listed:
                # the code of ``read_sequences``: -1 for nothing, -2 - place for a boundary row
                table[row] = -1 if t > known else (-2 - place if bounds else place)
            if t > known:
                continue
            nbytes = np.intp(obs_bytes if bounds else step_bytes)
            copy_short(address_t(base), address_t(here + place * width), nbytes)
            marks[g, PLACE] = place_after(place, marks[g, BEGIN], rows)
            k = min(steps, known - t) if t < marks[g, OWN] else 0  # so t + k <= known: within what was scanned
            value, discount, last = 0.0, 1.0, k > 0 and t + k == known
            for j in range(k):
                value, discount = add_reward(value, discount, rewards[g, t + j], gamma)
            terminal, cut = (marks[g, ENDS], marks[g, CUTS]) if last else (0, 0)
            sums[row] = value
            terminals[row], cuts[row] = terminal, cut
            discounts[row] = bootstrap(discount, k == 0 or terminal != 0)
            counts[row] = k
            following[row] = t + k if k else -1
            # burn-in and what comes after the anchor do not count
            masks[row] = begin[b] <= t < marks[g, OWN]
            starts[row] = t == 0 and marks[g, OPENS] != 0


SPAN_FIRST, SPAN_END, AIM = range(3)
"""The rows of ``spans`` in the end: the places of an episode's first and last live row, and of the goal."""
NUMBER, ENTRY, SPAN_ENV = range(3)
"""The rows of ``spans`` meanwhile: a row's number, the entry of ``ends`` for its episode, and its env."""


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
    """The ordinal, among the episodes of an env, of the one that a live row belongs to.

    ``order`` is kept modulo 2**32. At most ``rows`` transitions of the env are newer, so the difference fits.
    """
    # int64, while ``order`` is an int32
    count = ring.state[e, COUNT]
    return number - count + ((count - np.int64(ring.order[place])) & 0xFFFFFFFF)


@jit
def note_ends(ring: RingArrays) -> None:
    """Note all rows that are live and were not noted before; the last one of each episode stays noted."""
    inverse = 1.0 / ring.rows
    for e in range(ring.state.shape[0]):
        # only rows since the last batch: adding rows does not know of ``ends``
        for number in range(max(ring.seen[e], oldest(e, ring)), ring.state[e, HEAD]):
            episode = episode_of(e, place_of(number, e, ring.rows, inverse), number, ring)
            ring.ends[place_of(episode, e, ring.rows, inverse)] = number  # the lower 32 bits
        ring.seen[e] = ring.state[e, HEAD]


@jit
def _look_up(places: Ints, key: Any, ratio: float, ring: RingArrays, steps: RelabelledSteps) -> int:
    """The rows to be relabelled: in ``spans`` their numbers, envs, and entries of ``ends``, which are prefetched."""
    found, inverse, spans = 0, 1.0 / ring.rows, steps.spans
    for i in range(places.size):
        # numbers GOALS + 2i and the next belong to row i, so other rows do not change its goal
        if uniform(key, GOALS + 2 * i) >= ratio:
            continue
        place = places[i]
        e, _, number = row_at(place, inverse, ring)
        # a user's sampler may name a place whose row was never written
        if number < oldest(e, ring):
            continue
        entry = place_of(episode_of(e, place, number, ring), e, ring.rows, inverse)
        prefetch(ring.ends, entry)
        steps.which[found], spans[NUMBER, found], spans[ENTRY, found], spans[SPAN_ENV, found] = i, number, entry, e
        found += 1
    return found


@jit
def plan_goals(
    ring_handle: Ints, batch: Ints, places: Ints, n: int, gamma: float, key: Any, ratio: float, others: Ints, out: Any,
    last: Ints, steps_handle: Ints, pairs: Any,
) -> int:  # fmt: skip
    """See :func:`relive.kernels.reference.windows.plan_goals`. The ring's ends have been asked for."""
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
        number, noted, e = spans[NUMBER, m], np.int64(ring.ends[spans[ENTRY, m]]), spans[SPAN_ENV, m]
        # an episode may have begun before the oldest live row
        first = number - min(np.int64(ring.step[places[i]]), number - oldest(e, ring))
        end = number + ((noted - number) & 0xFFFFFFFF)  # ``noted`` has its lower 32 bits; an episode is shorter
        low, high = _choice(strategy, number, first, end)
        if high < low or (batch[FINISHED] and end == ring.state[e, HEAD] - 1 and ring.state[e, NEXT] > 0):
            continue
        if strategy == RANDOM:
            aim = place_after(others[i], others[i] - remainder(others[i], rows, inverse), rows)
        else:
            # uniform is below 1, so chosen <= high
            chosen = low + np.int64(uniform(key, GOALS + 2 * i + 1) * np.float64(high - low + 1))
            aim = place_of(chosen, e, rows, inverse)
        fetch(ring.memory, aim * width + batch[GOAL_AT], batch[GOAL_BYTES])
        # ``found`` <= m, so what is overwritten has been read
        which[found], spans[SPAN_FIRST, found] = i, place_of(first, e, rows, inverse)
        spans[SPAN_END, found], spans[AIM, found] = place_of(end, e, rows, inverse), aim
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
    """See :func:`relive.kernels.reference.windows.relabel_windows`."""
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
        # a window of the same length has its next observation already
        if next_bytes > 0 and k != written.steps[i]:
            memcpy(address_t(row + next_at), address_t(here + after[entry] * width), np.intp(next_bytes))
            memcpy(address_t(row + into_next), address_t(row + into_obs), np.intp(size))
        following = written.index[i] + k * envs  # the row k later in the same env
        write_window(written, i, following, k, value, bootstrap(discount, terminal), terminal, cut)
    return -1
