"""Rings and windows of a rollout, in plain Python.

First places, numbers and which rows end a window; then adding rows: where they go, what they complete, which rows can
be drawn afterwards, and the note of how to undo that; then cutting the steps of a rollout into windows and copying
them; and last asking for pages of files. :mod:`relive.kernels.tables` describes the memory of a ring.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    UNDO_ROWS,
    UNFIT,
    USED_UP,
    DirectStep,
    RingArrays,
    StagedRows,
    env_entries,
    packed,
    row_entries,
    undo_size,
)
from .rows import accept_step, copy_step

__all__ = [
    "MINCORE",
    "PAGES",
    "WILLNEED",
    "Ints",
    "add_rows",
    "add_step",
    "all_anchors",
    "append",
    "ask_for",
    "ends_full",
    "ends_window",
    "episode_starts",
    "gather_windows",
    "kinds_of",
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


def oldest(e: int, ring: RingArrays) -> int:
    """The number of the oldest live row of an env; its HEAD, if no row is live."""
    return max(int(ring.state[e, TAIL]), int(ring.state[e, HEAD]) - ring.rows)


def place_of(number: Any, e: Any, rows: int) -> Any:
    """The place of row ``number`` of env e."""
    return e * rows + number % rows


def place_after(place: Any, begin: Any, rows: int) -> Any:
    """The place of the next row of an env whose first place is ``begin``."""
    return begin + (place - begin + 1) % rows


def row_at(place: int, ring: RingArrays) -> tuple[int, int, int]:
    """The env that owns a place, the env's first place, and the number of the newest row that was written there.

    Before the env's first round through its places, the number is negative where nothing was written.
    """
    rows = ring.rows
    e = place // rows
    head = int(ring.state[e, HEAD])
    return e, e * rows, next(number for number in range(head - rows, head) if place_of(number, e, rows) == place)


def window_start(at: Any, length: int, stride: int) -> Any:
    """The index of the first step of the window whose last is step ``at`` of an episode; ints or arrays of them.

    The window is the last of the episode so far: a full one, or a tail.
    """
    beyond = at + 1 - length
    return (beyond + stride - 1) // stride * stride * (beyond > 0)


def ends_full(at: Any, length: int, stride: int) -> Any:
    """True if step ``at`` of an episode is the last of a window of the whole ``length``; ints or arrays of them."""
    return (at + 1 >= length) & ((at + 1 - length) % stride == 0)


def ends_window(place: int, ring: RingArrays) -> bool:
    """True if a complete row is the last of a window.

    It ends a full one, or, where tails count, it is the last complete row of an episode that ended or was interrupted:
    the next row is not complete, and the one after begins another episode, or will.
    """
    rows, counters = ring.rows, ring.counters
    if ends_full(int(ring.step[place]), int(counters[LENGTH]), int(counters[STRIDE])):
        return True
    e = place // rows
    after = place_after(place, e * rows, rows)
    if not counters[TAILS] or ring.stamp[after] >= 0:
        return False
    if after == place_of(int(ring.state[e, HEAD]) - 1, e, rows):
        return bool(ring.state[e, NEXT] == 0)
    return bool(ring.step[place_after(after, e * rows, rows)] == 0)


def all_anchors(ring: RingArrays) -> list[tuple[int, int]]:
    """The (env, number) of every row that can be drawn, env by env in the order of time."""
    found: list[tuple[int, int]] = []
    history = int(ring.counters[HISTORY])
    for e in range(len(ring.state)):
        first = oldest(e, ring)
        for number in range(first, int(ring.state[e, HEAD])):
            place = place_of(number, e, ring.rows)
            ready = ring.stamp[place] >= 0 and number - min(int(ring.step[place]), history) >= first
            if ready and ends_window(place, ring):
                found.append((e, number))
    return found


def note_undo(ring: RingArrays, given: StagedRows, ended: Any) -> bool:
    """Note in ``undo`` what will change when these rows are added. ``ended`` is the kind of each row, ``[K]``.

    If :func:`relive.kernels.reference.ring.plan_rows` has noted the same rows, its note is kept.

    Returns:
        True if rows would be overwritten that are not in reserve, or if there is no room for the entries. Then nothing
        is noted.
    """
    undo, state, rows = ring.undo, ring.state, ring.rows
    if undo[UNDO_KIND] != UNDO_NONE:
        return False
    envs, heads, places = given.envs.tolist(), dict[int, int](), list[int]()
    if len(undo) < undo_size(len(state), len(envs)):
        return True
    entries = env_entries(undo, len(state))
    for e, end in zip(envs, ended, strict=True):
        if e not in heads:
            number = heads[e] = int(state[e, HEAD])
            entries[len(heads) - 1, :UNDO_AFTER] = e, *state[e]
            if number > 0:
                places.append(place_of(number - 1, e, rows))
        for _ in range(1 + (end == ENDED)):
            places.append(place_of(heads[e], e, rows))
            heads[e] += 1
    for entry, place in zip(row_entries(undo, len(state), len(places)), places, strict=True):
        entry[:] = place, ring.stamp[place], packed(int(ring.step[place]), int(ring.order[place]))
    for i, (e, head) in enumerate(heads.items()):
        if head - rows > ring.reserve[e]:
            return True
        entries[i, UNDO_AFTER] = head
    undo[UNDO_COUNTERS : UNDO_COUNTERS + COUNTERS] = ring.counters
    undo[UNDO_ENVS], undo[UNDO_ROWS] = len(heads), len(places)
    undo[UNDO_KIND] = UNDO_ADDING
    return False


def append(ring: RingArrays, given: StagedRows, ended: Any) -> int:
    """Issue an id for a new row of each env in turn, and one for the final observation where the episode ended.

    ``ended`` is the kind of each row. A row completes the transition before it, if that belongs to the same episode;
    the final observation of an ENDED row completes that row. A row with a next observation of its own (ALONE, LINKED,
    LAST) completes itself. After LONGEST steps an episode is cut. ``places`` gets where the rows go, ``finals`` where
    the final observations go, or -1. The rows that can be drawn from now on (1) or no longer (0) are listed in order in
    ``where`` and ``opens``, unless these have size 0; the number of these events is returned.
    """
    adding = _Adding(ring, given)
    state, counters, order = ring.state, ring.counters, ring.order
    for i, e in enumerate(given.envs.tolist()):
        index = int(state[e, NEXT]) if state[e, NEXT] < LONGEST else 0
        given.places[i], given.finals[i] = adding.write(e, index), -1
        state[e, NEXT] = following = index + 1 if index + 1 < LONGEST else 0
        if index > 0 and ended[i] < ALONE:
            adding.complete(e, int(state[e, HEAD]) - 2)
        order[given.places[i]] = _int32(int(state[e, COUNT]))
        if ended[i] >= ALONE:
            adding.complete(e, int(state[e, HEAD]) - 1)
            state[e, NEXT] = following if ended[i] == LINKED else 0
            counters[EPISODES] += int(ended[i] == LAST)
        elif ended[i]:
            final = adding.write(e, index + 1)
            state[e, NEXT] = 0
            adding.complete(e, int(state[e, HEAD]) - 2)
            ring.stamp[final] = -1 - counters[COMPLETED]
            order[final] = _int32(int(state[e, COUNT]))
            counters[EPISODES] += 1
            given.finals[i] = final
    return adding.events


class _Adding:
    """Rows that are written, transitions that are completed, and the events that follow from them."""

    def __init__(self, ring: RingArrays, given: StagedRows) -> None:
        self.ring, self.given, self.events = ring, given, 0

    def write(self, e: int, index: int) -> int:
        """Issue the env's next id, for a row of this index in its episode; gives its place."""
        ring, number = self.ring, int(self.ring.state[e, HEAD])
        place, before = place_of(number, e, ring.rows), self._drawable()
        ring.state[e, HEAD] = number + 1
        ring.step[place], ring.stamp[place] = index, -1 - ring.counters[COMPLETED]
        self._note(before)
        return place

    def complete(self, e: int, number: int) -> None:
        """Complete the transition of a row, unless the row has made way."""
        ring, place = self.ring, place_of(number, e, self.ring.rows)
        if number < oldest(e, ring):
            return
        before = self._drawable()
        ring.stamp[place] = ring.counters[COMPLETED]
        ring.counters[COMPLETED] += 1
        ring.order[place] = _int32(int(ring.state[e, COUNT]))
        ring.state[e, COUNT] += 1
        self._note(before)

    def _drawable(self) -> set[int]:
        return {place_of(n, e, self.ring.rows) for e, n in all_anchors(self.ring)}

    def _note(self, before: set[int]) -> None:
        """Count the rows that can be drawn, and list those that changed."""
        after = self._drawable()
        self.ring.counters[DRAWABLE] = len(after)
        changed = [(place, 0) for place in sorted(before - after)] + [(place, 1) for place in sorted(after - before)]
        for place, opens in changed if len(self.given.where) else []:
            self.given.where[self.events], self.given.opens[self.events] = place, opens
            self.events += 1


def _int32(count: int) -> int:
    """A count modulo 2**32, as the int32 of the same bits."""
    return (count + 2**31) % 2**32 - 2**31


def plan_rows(ring: RingArrays, given: StagedRows, mode: int) -> int:
    """Plan where :func:`add_rows` will store rows and their final observations: ``places``, ``finals``, ``tails``.

    Of the ring, only ``undo`` is changed, where there is one. Up to the number ``tails[i]`` rows of env i will have
    made way for all of them. What it returns is negative if :func:`add_rows` will refuse the rows, and then the same.
    """
    heads, envs = ring.state[:, HEAD].tolist(), given.envs.tolist()
    for i, e in enumerate(envs):
        ended = bool(given.terminated[i] | given.truncated[i])
        if ended and mode == NO_FINALS:
            return -1 - i
        given.places[i], given.finals[i] = place_of(heads[e], e, ring.rows), -1
        heads[e] += 1
        if ended and mode == FINALS:
            given.finals[i] = place_of(heads[e], e, ring.rows)
            heads[e] += 1
    given.tails[:] = [heads[e] - ring.rows for e in envs]
    if len(ring.undo) and note_undo(ring, given, kinds_of(given, mode)):
        return USED_UP
    return 0


def kinds_of(given: StagedRows, mode: int) -> Any:
    """The kind of each row, uint8 ``[K]``, of rows that are added in this way."""
    ended = np.full(given.envs.size, mode, np.uint8)
    if mode != ALONE:
        for i in range(given.envs.size):
            ended[i] = given.terminated[i] | given.truncated[i]
            if mode == LINKED:
                ended[i] += LINKED  # a done makes it LAST
    return ended


def add_rows(ring: RingArrays, given: StagedRows, mode: int) -> int:
    """Append one staged row per env, and store it: :func:`append` and :func:`scatter_rows` in one call.

    ``mode`` is NO_FINALS, FINALS, ALONE or LINKED. The ring's ``step_bytes`` of each row are stored, and its
    ``obs_bytes`` of a final observation where an episode ended.

    Returns the number of events; or, if an episode ended and its final observation is not given, -1 - i for the first
    such row i; or USED_UP, if rows would be overwritten that are not in reserve. In both cases nothing is changed.
    """
    ended = kinds_of(given, mode)
    if mode == NO_FINALS and ended.any():
        return -1 - int(ended.argmax())
    if len(ring.undo) and note_undo(ring, given, ended):
        return USED_UP
    events = append(ring, given, ended)
    scatter_rows(given.staged, given.places, ring.memory, ring.step_bytes)
    if mode == FINALS:
        scatter_rows(given.final, given.finals, ring.memory, ring.obs_bytes)
    ring.counters[NOT_FINITE] += np.count_nonzero(~np.isfinite(given.reward))
    return events


def add_step(step: int, direct: DirectStep) -> int:
    """Check a step, stage it and add its rows: :func:`accept_step`, :func:`copy_step` and :func:`add_rows` in one call.

    Large fields are not staged: they are copied to their blocks. The GIL is held while the step is checked.

    Args:
        step: the address (``id``) of a tuple with an item for each column of ``direct.table``.
        direct: the rest.

    Returns:
        what :func:`add_rows` returns, or UNFIT if the step cannot be copied as it is. If it is negative, nothing that
        is stored has changed.
    """
    table, given = direct.table, direct.given
    if accept_step(step, table) >= 0:
        return UNFIT
    copy_step(table, 0)
    events = add_rows(direct.ring, given, direct.mode)
    if events >= 0:
        for column, block, nbytes, is_final in direct.large.tolist():
            for i, place in enumerate((given.finals if is_final else given.places).tolist()):
                if place >= 0:
                    ctypes.memmove(block + place * nbytes, int(table[SOURCE, column]) + i * nbytes, nbytes)
    return events


def scatter_rows(source: Any, places: Ints, target: Any, nbytes: int) -> None:
    """The first ``nbytes`` bytes of successive rows of ``source`` to rows of ``target``; a negative place to none."""
    for i, place in enumerate(places.tolist()):
        if place >= 0:
            target[place, :nbytes] = source[i, :nbytes]


Bools = NDArray[np.uint8]


def episode_starts(done: Bools, real: Bools, ended: Bools, starts: Bools) -> None:
    """Mark the steps that are the first of their episode.

    A step that is not real and ends no episode changes nothing: it may be the one in which ``NEXT_STEP`` autoreset
    resets, or one that was left out in the middle of an episode.

    Args:
        done: ``[T, N]``, ``terminated | truncated``.
        real: ``[T, N]``, the mask.
        ended: ``[N]``, whether the episode before the first row had ended; overwritten by the same for the newest row.
        starts: ``[T, N]``, written.
    """
    for t in range(len(done)):
        for env in range(done.shape[1]):
            starts[t, env] = real[t, env] and ended[env]
            if done[t, env]:
                ended[env] = 1
            elif real[t, env]:
                ended[env] = 0


def plan_windows(
    done: Bools, real: Bools, starts: Bools, length: int, stride: int, tails: bool, complete: bool, windows: Ints
) -> int:
    """Cut runs into windows; a run is as many successive real steps of one episode as there are.

    The windows of a run begin at its steps 0, stride, 2 stride, ... as long as each has a step that no window before it
    has. A window has ``length`` steps, or as many as the run has left.

    Args:
        done: ``[T, N]``, as for :func:`episode_starts`; ``real`` and ``starts`` too.
        length: steps of a window.
        stride: steps from the start of one window to that of the next.
        tails: False leaves out windows of fewer than ``length`` steps.
        complete: True leaves out all but whole episodes.
        windows: ``[K, 5]``, written as far as there is room, env by env in the order of time: the env, the window's
            first step, how many steps it has, the episode's first step in this rollout or 0, and 1 if the episode
            begins there.

    Returns:
        The number of windows, which may be more than there is room for.
    """
    found = 0
    steps, envs = done.shape
    for env in range(envs):
        t = 0
        origin = begins = 0
        while t < steps:
            if starts[t, env]:
                origin, begins = t, 1
            if not real[t, env]:
                t += 1
                continue
            end = t
            while end + 1 < steps and not done[end, env] and real[end + 1, env]:
                end += 1
            whole = starts[t, env] and done[end, env]
            run = end + 1 - t
            starting = range(0, window_start(run - 1, length, stride) + 1, stride) if whole or not complete else ()
            for first in starting:
                size = min(length, run - first)
                if size == length or tails:
                    if found < len(windows):
                        windows[found] = env, t + first, size, origin, begins
                    found += 1
            t = end + 1
    return found


def gather_windows(
    source: Tensor, first: Tensor, step: int, lengths: Tensor, pad: Tensor, length: int, out: Tensor | None = None
) -> Tensor:
    """Copy windows out of rows, and fill each up with padding.

    Args:
        source: uint8 ``[R, W]``.
        first: ``[B]``, the first row of each window; its next rows are ``first + step``, ``first + 2 step``, ...
        step: the distance in rows from one step of a window to the next.
        lengths: ``[B]``, how many rows each window has.
        pad: uint8 ``[W]``, the row that fills a window up.
        length: rows of every window with its padding.
        out: a contiguous tensor of the result's shape, to write to instead of a fresh one.

    Returns:
        uint8 ``[B, length, W]``.
    """
    time = torch.arange(length, device=source.device)
    inside = time < lengths[:, None]
    index = torch.where(inside, first[:, None] + time * step, 0)
    rows = source.index_select(0, index.view(-1)).view(*index.shape, -1)
    found = torch.where(inside[..., None], rows, pad)
    return found if out is None else out.copy_(found)


def mark_windows(lengths: Tensor, burn_in: Tensor, is_start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Mark the rows of windows that begin an episode (only first rows can), and those that are steps to learn from.

    Args:
        lengths: ``[B]``, how many rows each window has; the rest is padding.
        burn_in: ``[B]``, how many of those are unrolled only for the state.
        is_start: ``[B]``, 1 where the first row begins an episode.
        length: rows of the batch.

    Returns:
        Both, bool ``[B, length]``.
    """
    time = torch.arange(length, device=lengths.device)
    return (time == 0) & (is_start[:, None] == 1), (time < lengths[:, None]) & (time >= burn_in[:, None])


PAGES = 256
"""The most pages of one question to the system."""

WILLNEED = 3
"""MADV_WILLNEED of ``madvise``, on Linux and macOS: start to read these pages."""

MINCORE = 0
"""Entry of ``calls`` with the address of the C function ``mincore``; that of ``madvise`` follows it."""


def ask_for(calls: Ints, parts: Ints, page: int, begins: Ints, ends: Ints) -> int:
    """Ask for the pages of some rows that are not in memory. Nothing is read and nothing is changed.

    The pages come while others are asked for, and after the call. A page that two runs share and that is on its way
    counts as missing for each of them.

    Args:
        calls: int64 ``[2]``: the addresses of the C functions ``mincore`` and ``madvise``.
        parts: int64 ``[P, 2]``: the address of the first row of an array, and the bytes of a row.
        page: the bytes of a page, a power of two.
        begins: int64 ``[K]``: the first row of each run, which exists in all parts.
        ends: int64 ``[K]``: the row after its last, at most the number of rows.

    Returns:
        how many pages were not in memory.
    """
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    mincore = ctypes.CFUNCTYPE(number, address, size, address)(int(calls[MINCORE]))
    madvise = ctypes.CFUNCTYPE(number, address, size, number)(int(calls[MINCORE + 1]))
    there, missing = np.zeros(PAGES, np.uint8), 0
    for first, last in _spans(parts, page, begins, ends):
        for low in range(first, last, PAGES * page):
            nbytes = min(last - low, PAGES * page)
            count = -(-nbytes // page)
            there[:count] = 0
            mincore(low, nbytes, there.ctypes.data)
            absent = count - int((there[:count] & 1).sum())
            if absent:
                madvise(low, nbytes, WILLNEED)
            missing += absent
    return missing


def _spans(parts: Ints, page: int, begins: Ints, ends: Ints) -> list[tuple[int, int]]:
    """The addresses of each run of rows in each part: of its first page, and after its last byte."""
    spans: list[Any] = []
    for start, width in parts.tolist():
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if end > begin:
                first = start + begin * width
                spans.append((first - first % page, start + end * width))
    return spans
