"""Noting how to take back a change of a ring in files, in case a kill breaks it off.

``undo`` is int64, in a file like the rows, so that it survives the process. Its first word says what it holds:

- UNDO_NONE: nothing is being changed;
- UNDO_ADDING: rows are being added. The counters follow, then an entry for each env that gets rows. After room for N
  of these comes an entry for each row whose bookkeeping may change: those that are written, and the newest row of each
  env before, which a next step completes. What an entry holds was so before the change;
- UNDO_REBUILD: entries of all envs, no rows. What can be drawn has to be found anew.

The kind is written after all else, and set to UNDO_NONE once the change is done. So where a kill leaves a kind, the
entries are whole, and where it leaves none, nothing was changed since.
"""

from __future__ import annotations

from typing import Any

from ..ring_state import (
    COUNTERS,
    ENDED,
    HEAD,
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
    RingArrays,
    StagedRows,
)
from .places import Ints, place_of

__all__ = ["note_undo", "undo_size"]


def undo_size(num_envs: int, most: int) -> int:
    """The length of ``undo`` for a ring that gets up to ``most`` rows a call, each with a final observation."""
    return UNDO_START + UNDO_ENV * num_envs + UNDO_ROW * (2 * most + min(num_envs, most))


def note_undo(ring: RingArrays, given: StagedRows, ended: Any) -> bool:
    """Note in ``undo`` what adding these rows will change. ``ended`` is the kind of each row.

    What :func:`relive.kernels.reference.append.plan_rows` noted of the same rows is kept.

    Returns:
        whether rows would be overwritten that are not in reserve, or that there is no room for the entries; then
        nothing is noted.
    """
    undo, state, rows = ring.undo, ring.state, ring.rows
    if undo[UNDO_KIND] != UNDO_NONE:
        return False
    envs, heads = given.envs.tolist(), dict[int, int]()
    if len(undo) < undo_size(len(state), len(envs)):
        return True
    row_at = row_start = UNDO_START + UNDO_ENV * len(state)
    for e, end in zip(envs, ended, strict=True):
        if e not in heads:
            number = heads[e] = int(state[e, HEAD])
            at = UNDO_START + UNDO_ENV * (len(heads) - 1)
            undo[at], undo[at + 1 : at + UNDO_AFTER] = e, state[e]
            if number > 0:
                row_at = _note_row(undo, row_at, place_of(number - 1, e, rows), ring)
        for _ in range(1 + (end == ENDED)):
            row_at = _note_row(undo, row_at, place_of(heads[e], e, rows), ring)
            heads[e] += 1
    for i, (e, head) in enumerate(heads.items()):
        if head - rows > ring.reserve[e]:
            return True
        undo[UNDO_START + UNDO_ENV * i + UNDO_AFTER] = head
    undo[UNDO_COUNTERS : UNDO_COUNTERS + COUNTERS] = ring.counters
    undo[UNDO_ENVS], undo[UNDO_ROWS] = len(heads), (row_at - row_start) // UNDO_ROW
    undo[UNDO_KIND] = UNDO_ADDING
    return False


def _note_row(undo: Ints, at: int, place: int, ring: RingArrays) -> int:
    """Note a row's bookkeeping; returns where the next entry goes."""
    packed = (int(ring.step[place]) << 32) | (int(ring.order[place]) & 0xFFFFFFFF)
    undo[at : at + UNDO_ROW] = place, int(ring.stamp[place]), packed
    return at + UNDO_ROW
