"""The note of how to take back a change of a ring in files, written by compiled code.

Names and results are those of ``reference/undo.py``, to the bit. An index into ``undo`` counts words of 64 bits, and is
below :func:`relive.kernels.undo_note.undo_size`: a few words for each env and for each row of a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ring_state import COUNT, COUNTERS, ENDED, HEAD, NEXT, TAIL, RingArrays, StagedRows
from ..undo_note import (
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
    first_row,
    packed,
    undo_size,
)
from .handles import Ints
from .jit import fence, jit
from .places import place_of

__all__ = ["note_undo"]

size_of, first_row_of, pack = jit(undo_size), jit(first_row), jit(packed)


@jit
def note_undo(ring: RingArrays, given: StagedRows, ended: Any) -> bool:
    """See :func:`relive.kernels.reference.undo.note_undo`."""
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
            undo[at], undo[at + 1], undo[at + 2] = e, number, state[e, TAIL]
            undo[at + 3], undo[at + 4] = state[e, NEXT], state[e, COUNT]
            at += UNDO_ENV
            if number > 0:
                row_at = _note_row(undo, row_at, place_of(number - 1, e, rows, inverse), ring)
        row_at = _note_row(undo, row_at, place_of(number, e, rows, inverse), ring)
        if ended[i] == ENDED:
            row_at = _note_row(undo, row_at, place_of(number + 1, e, rows, inverse), ring)
        heads[e] = number + 1 + np.int64(ended[i] == ENDED)
    for entry in range(UNDO_START, at, UNDO_ENV):
        head = heads[undo[entry]]
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
    undo[at + 2] = pack(np.int64(ring.step[place]), np.int64(ring.order[place]))
    return at + UNDO_ROW
