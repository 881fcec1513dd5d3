"""Rings and windows of a rollout: the names of ``reference/ring.py`` and, to the bit, its results.

In order: places and numbers; the note of how to undo; adding rows; cutting a rollout into windows and copying them;
asking for pages of files.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray
from torch import Tensor

from ..reference import ring as plain
from ..reference.ring import MINCORE, PAGES, WILLNEED
from ..step_table import SOURCE
from ..tables import (
    ALONE,
    COMPLETED,
    COUNT,
    COUNTERS,
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
    UNDO_ADDING,
    UNDO_AFTER,
    UNDO_COUNTERS,
    UNDO_ENV,
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    UNDO_ROW,
    UNDO_ROWS,
    UNDO_START,
    UNFIT,
    USED_UP,
    RingArrays,
    StagedRows,
    first_row,
    packed,
    undo_size,
)
from .jit import (
    ENTRIES,
    LINE,
    Bytes,
    address_t,
    addressed,
    fence,
    fetch,
    fill,
    inlined,
    intrinsic,
    jit,
    matrix_of,
    memcpy,
    open_ring,
    open_staged,
    prefetch,
    remainder,
    vector_of,
)
from .rows import accept_step, copy_step, release_gil, take_gil

__all__ = [
    "Ints",
    "add_rows",
    "add_step",
    "ask_for",
    "can_draw",
    "copy_windows",
    "ends_full",
    "ends_window",
    "episode_starts",
    "gather_windows",
    "mark_windows",
    "note_undo",
    "oldest",
    "place_after",
    "place_of",
    "plan_rows",
    "plan_windows",
    "row_at",
    "scatter_rows",
    "window_start",
]


Ints = NDArray[np.int64]


@jit
def oldest(e: Any, ring: RingArrays) -> Any:
    """See :func:`relive.kernels.reference.ring.oldest`."""
    return max(ring.state[e, TAIL], ring.state[e, HEAD] - ring.rows)


@jit
def place_of(number: Any, e: Any, rows: int, inverse: float) -> Any:
    """See :func:`relive.kernels.reference.ring.place_of`."""
    return e * rows + remainder(number, rows, inverse)


@jit
def place_after(place: Any, begin: Any, rows: int) -> Any:
    """See :func:`relive.kernels.reference.ring.place_after`."""
    return place + 1 if place + 1 < begin + rows else begin


@jit
def row_at(place: Any, inverse: float, ring: RingArrays) -> tuple[Any, Any, Any]:
    """See :func:`relive.kernels.reference.ring.row_at`."""
    rows = ring.rows
    offset = remainder(place, rows, inverse)  # in [0, rows)
    # the place at which the env's rows begin, e * rows
    begin = place - offset
    e = np.int64(np.float64(begin) * inverse + 0.5)  # e * rows / rows: rounding cannot be off by half
    newest = ring.state[e, HEAD] - 1  # -1 in an empty env; the remainder is rows - 1 then
    back = remainder(newest, rows, inverse) - offset  # how many rows ago the row was written, in (-rows, rows)
    return e, begin, newest - (back if back >= 0 else back + rows)


window_start = jit(plain.window_start)


@inlined
def ends_full(at: int, length: int, stride: int) -> bool:
    """See :func:`relive.kernels.reference.ring.ends_full`. A stride of 1, the most common, needs no division."""
    # ``at`` counts from 0, so a window that ends there has at + 1 steps before its end
    return at + 1 >= length and (stride == 1 or (at + 1 - length) % stride == 0)


@inlined
def ends_window(place: int, number: int, begin: int, head: int, following: int, ring: RingArrays) -> bool:
    """See :func:`relive.kernels.reference.ring.ends_window`.

    ``begin`` is the env's first place, ``head`` the number of its next row, which will have the index ``following``.
    """
    if ends_full(ring.step[place], ring.counters[LENGTH], ring.counters[STRIDE]):
        return True
    after = place_after(place, begin, ring.rows)
    if not ring.counters[TAILS] or ring.stamp[after] >= 0:
        return False
    if number + 2 == head:  # the row after is the newest, and none was written behind it
        return following == 0
    return ring.step[place_after(after, begin, ring.rows)] == 0


@inlined
def can_draw(place: Any, number: Any, e: Any, ring: RingArrays) -> bool:
    """True if a live row can be drawn."""
    history = ring.counters[HISTORY]
    # a negative stamp: not complete. Its history has to be live, as far as its episode goes
    if ring.stamp[place] < 0 or (history and number - min(ring.step[place], history) < oldest(e, ring)):
        return False
    return ends_window(place, number, e * ring.rows, ring.state[e, HEAD], ring.state[e, NEXT], ring)


size_of, first_row_of, pack = jit(undo_size), jit(first_row), jit(packed)


@jit
def note_undo(ring: RingArrays, given: StagedRows, ended: Any) -> bool:
    """See :func:`relive.kernels.reference.ring.note_undo`."""
    undo, state, rows, envs, inverse = ring.undo, ring.state, ring.rows, given.envs, 1.0 / ring.rows
    if undo[UNDO_KIND] != UNDO_NONE:
        return False
    if undo.size < size_of(state.shape[0], envs.size):
        return True
    heads, at, row_start = state[:, HEAD].copy(), UNDO_START, first_row_of(state.shape[0])
    row_at = row_start
    for i in range(envs.size):
        e = envs[i]
        number = heads[e]
        if number == state[e, HEAD]:  # the first row of this env in the call, as each raises ``heads``
            # an entry has UNDO_ENV words; the last, the HEAD after the change, is written below
            undo[at], undo[at + 1], undo[at + 2] = e, number, state[e, TAIL]
            undo[at + 3], undo[at + 4] = state[e, NEXT], state[e, COUNT]
            at += UNDO_ENV
            # the row before: this call completes it, so its stamp and order change
            if number > 0:
                row_at = _note_row(undo, row_at, place_of(number - 1, e, rows, inverse), ring)
        row_at = _note_row(undo, row_at, place_of(number, e, rows, inverse), ring)
        if ended[i] == ENDED:
            row_at = _note_row(undo, row_at, place_of(number + 1, e, rows, inverse), ring)
        heads[e] = number + 1 + np.int64(ended[i] == ENDED)
    for entry in range(UNDO_START, at, UNDO_ENV):
        head = heads[undo[entry]]
        # rows below head - rows are overwritten; a power cut may bring back only those that are not in reserve
        if head - rows > ring.reserve[undo[entry]]:
            return True
        undo[entry + UNDO_AFTER] = head
    for k in range(COUNTERS):
        undo[UNDO_COUNTERS + k] = ring.counters[k]
    undo[UNDO_ENVS], undo[UNDO_ROWS] = (at - UNDO_START) // UNDO_ENV, (row_at - row_start) // UNDO_ROW
    fence()  # first the entries are whole, then the kind says that they count
    undo[UNDO_KIND] = UNDO_ADDING
    fence()  # and the kind is written before anything else changes
    return False


@jit
def _note_row(undo: Ints, at: int, place: int, ring: RingArrays) -> int:
    """Note a row's bookkeeping in word ``at`` and the next two. Returns the word where the next entry begins."""
    undo[at], undo[at + 1] = place, ring.stamp[place]
    # step and order are int32, and the shift needs 64 bits
    undo[at + 2] = pack(np.int64(ring.step[place]), np.int64(ring.order[place]))
    return at + UNDO_ROW


Bools = NDArray[np.uint8]


@inlined
def append(ring: RingArrays, given: StagedRows, ended: Bools) -> int:
    """See :func:`relive.kernels.reference.ring.append`.

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
        # negative until it is complete: -1 - s for s completed before it, so the order of time stays
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
            # a boundary row has the length of its episode as ``step``, and never a stamp of its own
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
    # last, once for all rows: nothing else reads them before the call ends
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
    """See :func:`relive.kernels.reference.ring.plan_rows`."""
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
        # rows of lower numbers make way, whichever of the call's rows takes their place
        given.tails[i] = heads[envs[i]] - rows
    if ring.undo.size:
        ended = np.empty(envs.size, np.uint8)
        _note_kinds(given, mode, ended)
        if note_undo(ring, given, ended):
            return USED_UP
    return 0


@inlined
def _note_kinds(given: StagedRows, mode: int, ended: Bools) -> None:
    """Write what :func:`relive.kernels.reference.ring.kinds_of` gives."""
    for i in range(given.envs.size):
        ended[i] = ALONE
        if mode != ALONE:
            ended[i] = given.terminated[i] | given.truncated[i]
            if mode == LINKED:
                ended[i] += LINKED  # a done makes it LAST


@jit
def add_rows(ring_handle: Ints, staged_handle: Ints, mode: int) -> int:
    """See :func:`relive.kernels.reference.ring.add_rows`."""
    return _add(ring_handle, staged_handle, mode, np.empty(open_staged(staged_handle).envs.size, np.uint8))


@jit
def _add(ring_handle: Ints, staged_handle: Ints, mode: int, ended: Bools) -> int:
    """Add rows. ``ended`` is memory for the kind of each row, so that nothing here can fail for lack of it."""
    ring, given = open_ring(ring_handle), open_staged(staged_handle)
    envs, memory, rows = given.envs, ring.memory, ring.rows
    _note_kinds(given, mode, ended)
    for i in range(envs.size if mode == NO_FINALS else 0):
        if ended[i]:
            return -1 - i
    if envs.size > 1:  # so that those rows come while the first are written; of all envs in turn, most often
        inverse, width = 1.0 / rows, memory.shape[1]
        for i in range(envs.size):
            # a guess for the prefetch alone: where row i goes if all envs come in turn
            place = place_of(ring.state[envs[i], HEAD] + i // ring.state.shape[0], envs[i], rows, inverse)
            fetch(memory, place * width, width)
    if ring.undo.size and note_undo(ring, given, ended):
        return USED_UP
    # bookkeeping first, then bytes: both are inside of one compiled call, which nothing in Python can break off
    events = append(ring, given, ended)
    scatter_rows(given.staged, given.places, memory, ring.step_bytes)
    if mode == FINALS:
        scatter_rows(given.final, given.finals, memory, ring.obs_bytes)
    for i in range(envs.size):
        # counted, not refused: a reward that is not finite is a fact of the environment
        if not np.isfinite(given.reward[i]):
            ring.counters[NOT_FINITE] += 1
    return events


def _add_step(step: int, direct: Ints) -> int:
    """See :func:`relive.kernels.reference.ring.add_step`; ``direct`` is the handle of a :class:`DirectStep`."""
    table, ring, staged = matrix_of(direct, 0, np.int64), vector_of(direct, 1, np.int64), vector_of(direct, 2, np.int64)
    large, mode, hold = matrix_of(direct, 3, np.int64), direct[4 * ENTRIES], direct[5 * ENTRIES] != 0
    if accept_step(step, table) >= 0:
        return UNFIT
    ended = np.empty(open_staged(staged).envs.size, np.uint8)
    # from here to take_gil nothing may raise or touch a Python object; ``ended`` was made before
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
            # the caller holds the step's tuple, so these addresses stay good without the GIL
            source = addressed(table[SOURCE, large[k, 0]], (places.size, nbytes), np.uint8)
            scatter_rows(source, places, addressed(large[k, 1], (1, nbytes), np.uint8), nbytes)
    return events


@jit
def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """See :func:`relive.kernels.reference.ring.scatter_rows`."""
    here, there = source.ctypes.data, target.ctypes.data  # addresses; to them, bytes are added
    for i in range(places.size):
        if places[i] >= 0:
            row = address_t(there + places[i] * target.shape[1])
            memcpy(row, address_t(here + i * source.shape[1]), np.intp(nbytes))


add_step = jit(_add_step, nogil=False)


AHEAD = 1024
"""Bytes of a run that are loaded ahead; the processor itself loads the rest of a longer one."""
BLOCK = 8192
"""Bytes of padding that are written at once."""
LARGE = 8192
"""From so many bytes on, the system's own way to fill memory is quicker."""


@jit
def episode_starts(done: Bools, real: Bools, ended: Bools, starts: Bools) -> None:
    """See :func:`relive.kernels.reference.ring.episode_starts`."""
    for t in range(done.shape[0]):
        for env in range(done.shape[1]):
            starts[t, env] = real[t, env] & ended[env]
            ended[env] = done[t, env] | (ended[env] & (1 - real[t, env]))


@jit
def plan_windows(
    done: Bools, real: Bools, starts: Bools, length: int, stride: int, tails: bool, complete: bool, windows: Ints
) -> int:
    """See :func:`relive.kernels.reference.ring.plan_windows`."""
    found = 0
    steps, envs = done.shape
    for env in range(envs):
        t, origin, begins = 0, 0, 0
        while t < steps:
            if starts[t, env]:
                origin, begins = t, 1
            if not real[t, env]:
                t += 1
                continue
            end = t
            while end + 1 < steps and not done[end, env] and real[end + 1, env]:
                end += 1
            if not complete or (starts[t, env] and done[end, env]):
                found = _cut(env, t, end + 1 - t, origin, begins, length, stride, tails, windows, found)
            t = end + 1
    return found


@jit
def _cut(
    env: int, start: int, run: int, origin: int, begins: int, length: int, stride: int, tails: bool, windows: Ints,
    found: int,
) -> int:  # fmt: skip
    """Add the windows of one run; ``found`` is the number before, and the result the number after."""
    for first in range(0, window_start(run - 1, length, stride) + 1, stride):
        size = min(length, run - first)
        if size == length or tails:
            if found < len(windows):
                windows[found, 0], windows[found, 1], windows[found, 2] = env, start + first, size
                windows[found, 3], windows[found, 4] = origin, begins
            found += 1
    return found


def gather_windows(
    source: Tensor, first: Tensor, step: int, lengths: Tensor, pad: Tensor, length: int, out: Tensor | None = None
) -> Tensor:
    """See :func:`relive.kernels.reference.ring.gather_windows`."""
    # NumPy asks for huge pages and torch does not; mapping pages of 4 kB would take as long as the copy
    if out is None:
        out = torch.from_numpy(np.empty((len(first), length, source.shape[1]), np.uint8))
    copy_windows(source.numpy().reshape(-1), first.numpy(), step, lengths.numpy(), pad.numpy(), out.numpy())
    return out


@jit
def copy_windows(source: Any, first: Ints, step: int, lengths: Ints, pad: Bytes, out: Any) -> None:
    """Copy windows between arrays; ``source`` is flat, ``out`` is ``[B, length, W]``."""
    count, length, size = out.shape
    width, target, even = np.intp(size), out.ctypes.data, _is_even(pad)
    for b in range(count):
        here, steps = source.ctypes.data + first[b] * width, lengths[b]
        following = first[min(b + 1, count - 1)] * width
        if step == 1:  # one run of bytes: the processor loads its lines ahead, but not those of the next window
            for line in range(0, AHEAD, LINE):
                prefetch(source, following + line)
            memcpy(address_t(target), address_t(here), steps * width)
        else:
            for t in range(steps):
                for line in range(0, min(width, AHEAD), LINE):
                    prefetch(source, following + t * step * width + line)
                memcpy(address_t(target + t * width), address_t(here + t * step * width), width)
        padding = (length - steps) * width
        if even and padding >= LARGE:
            fill(address_t(target + steps * width), pad[0], np.intp(padding))
        else:
            _repeat(target + steps * width, padding, pad)
        # each window takes ``length`` rows with its padding
        target += length * width


@inlined
def _is_even(row: Bytes) -> bool:
    """True if all bytes of a row are alike, and there is one."""
    alike = row.size > 0
    for byte in row:
        alike &= byte == row[0]
    return alike


@jit
def _repeat(target: int, nbytes: int, row: Bytes) -> None:
    """Fill ``nbytes`` bytes at an address with copies of a row."""
    width = np.intp(row.size)
    # whole rows, so that every copy begins where a row does
    block = max(BLOCK // max(width, 1), 1) * width
    filled = min(width, nbytes)
    memcpy(address_t(target), address_t(row.ctypes.data), filled)
    while filled < nbytes:
        more = min(
            filled, nbytes - filled, block
        )  # copied from what is written already, a block that stays in the nearest cache
        memcpy(address_t(target + filled), address_t(target), more)
        filled += more


def mark_windows(lengths: Any, burn_in: Any, is_start: Any, length: int) -> tuple[Tensor, Tensor]:
    """See :func:`relive.kernels.reference.ring.mark_windows`; arrays do as well."""
    marks = np.empty((2, len(lengths), length), np.uint8)
    _mark(np.asarray(lengths), np.asarray(burn_in), np.asarray(is_start), marks[0], marks[1])
    starts, mask = torch.from_numpy(marks.view(np.bool_)).unbind()
    return starts, mask


@jit
def _mark(lengths: Ints, burn_in: Ints, is_start: Ints, starts: Bools, mask: Bools) -> None:
    starts[:] = 0
    mask[:] = 0
    for b in range(len(lengths)):
        if starts.shape[1]:
            starts[b, 0] = is_start[b]
        mask[b, burn_in[b] : lengths[b]] = 1


_ir: Any = cast("Any", cgutils).ir


@intrinsic
def call(_context: Any, function: Any, start: Any, nbytes: Any, last: Any) -> Any:
    """Call a C function of an address, a size and an int or an address; gives its int."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word, number = _ir.IntType(64), _ir.IntType(32)
        kind = _ir.FunctionType(number, [word, word, word])  # an int is the lower half of its register
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), list(args[1:]))

    return types.int32(types.int64, types.int64, types.int64, types.int64), codegen


@jit
def ask_for(calls: Ints, parts: Ints, page: int, begins: Ints, ends: Ints) -> int:
    """See :func:`relive.kernels.reference.ring.ask_for`."""
    there, missing = np.zeros(PAGES, np.uint8), 0
    for part in range(parts.shape[0]):
        for k in range(begins.size):
            low, last = _span(parts, part, page, begins[k], ends[k])
            while low < last:
                nbytes = min(last - low, PAGES * page)
                missing += _ask(calls, low, nbytes, -(-nbytes // page), there)
                low += PAGES * page
    return missing


@jit
def _span(parts: Ints, part: int, page: int, begin: int, end: int) -> tuple[int, int]:
    """The address of a run's first page, and that after its last byte."""
    first = parts[part, 0] + begin * parts[part, 1]
    # pages begin at multiples of their size; an empty run ends at 0, before it begins
    return first - first % page, parts[part, 0] + end * parts[part, 1] if end > begin else 0


@jit
def _ask(calls: Ints, low: int, nbytes: int, count: int, there: Any) -> int:
    """Ask for ``count`` successive pages, at most :data:`PAGES`, if one is missing; gives how many are."""
    there[:count] = 0
    # ``low`` is the start of a page, as mincore and madvise require
    call(calls[MINCORE], low, nbytes, there.ctypes.data)
    absent = count
    for k in range(count):
        absent -= there[k] & 1
    if absent:
        call(calls[MINCORE + 1], low, nbytes, WILLNEED)
    return absent
