"""The note of how to take back a change of a ring in files. :mod:`relive.kernels.undo_note` explains its words."""

from __future__ import annotations

from typing import Any

from ..ring_state import COUNTERS, ENDED, HEAD, RingArrays, StagedRows
from ..undo_note import (
    UNDO_ADDING,
    UNDO_AFTER,
    UNDO_COUNTERS,
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    UNDO_ROWS,
    env_entries,
    packed,
    row_entries,
    undo_size,
)
from .places import place_of

__all__ = ["note_undo"]


def note_undo(ring: RingArrays, given: StagedRows, ended: Any) -> bool:
    """Note in ``undo`` what will change when these rows are added. ``ended`` is the kind of each row, ``[K]``.

    If :func:`relive.kernels.reference.append.plan_rows` has noted the same rows, its note is kept.

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
