"""The note of how to take back a change of a ring in files: what each of its words means.

The note is int64, in a file like the rows, so that it survives the process. Its first word is its kind:

- UNDO_NONE: nothing is being changed;
- UNDO_ADDING: rows are being added. The counters follow, then an entry for each env that gets rows. There is room for N
  of these. Then comes an entry for each row whose bookkeeping may change: the rows that are written, and the newest row
  of each env before them, which the next step completes. Entries hold the values from before the change;
- UNDO_REBUILD: there are entries for all envs, and none for rows. After a kill, what can be drawn is found anew.

The kind is written after everything else, and set to UNDO_NONE once the change is done. So if a kill leaves one of the
other kinds, the entries are whole. If it leaves UNDO_NONE, no change was under way.

Functions without arrays are compiled, too, so they take int64 and return int64.
"""

from __future__ import annotations

from typing import Any

from .ring_state import COUNTERS

__all__ = [
    "UNDO_ADDING",
    "UNDO_AFTER",
    "UNDO_COUNTERS",
    "UNDO_ENV",
    "UNDO_ENVS",
    "UNDO_KIND",
    "UNDO_NONE",
    "UNDO_REBUILD",
    "UNDO_ROW",
    "UNDO_ROWS",
    "UNDO_START",
    "env_entries",
    "first_row",
    "packed",
    "row_entries",
    "undo_size",
    "unpacked",
]

UNDO_KIND = 0
"""The word with the kind: UNDO_NONE, UNDO_ADDING or UNDO_REBUILD. Written last, and cleared first."""
UNDO_ENVS = 1
"""How many envs have an entry."""
UNDO_ROWS = 2
"""How many rows have an entry."""
UNDO_COUNTERS = 3
"""Where the counters from before the change begin, COUNTERS words."""
UNDO_START = UNDO_COUNTERS + COUNTERS
"""Where the entries of envs begin. The entries of rows begin after room for N entries of envs."""
UNDO_ENV = 6
"""The words of an env's entry: the env; its HEAD, TAIL, NEXT and COUNT before the change; its HEAD after it."""
UNDO_AFTER = 5
"""The word of an env's entry with its HEAD after the change."""
UNDO_ROW = 3
"""The words of a row's entry: its place, ``stamp``, and ``step`` with ``order`` as :func:`packed`."""
UNDO_NONE = 0
"""A kind: nothing is being changed."""
UNDO_ADDING = 1
"""A kind: rows are being added."""
UNDO_REBUILD = 2
"""A kind: what can be drawn changes as a whole. After a kill it is found anew."""


def undo_size(num_envs: int, most: int) -> int:
    """The length of a note for a ring that gets up to ``most`` rows a call, each with a final observation."""
    return UNDO_START + UNDO_ENV * num_envs + UNDO_ROW * (2 * most + min(num_envs, most))


def first_row(num_envs: int) -> int:
    """Where the entries of rows begin, for a ring of ``num_envs`` envs."""
    return UNDO_START + UNDO_ENV * num_envs


def packed(step: Any, order: Any) -> Any:
    """A row's ``step`` in the upper and ``order`` in the lower 32 bits of one word."""
    return (step << 32) | (order & 0xFFFFFFFF)


def unpacked(words: Any) -> tuple[Any, Any]:
    """``step`` and ``order``, int32 ``[K]``, of the words ``[K]`` that :func:`packed` made."""
    return (words >> 32).astype("int32"), words.astype("int32")  # a cast to int32 keeps the lower 32 bits


def env_entries(note: Any, count: int) -> Any:
    """The first ``count`` entries of envs as a view ``[count, UNDO_ENV]``."""
    return note[UNDO_START : first_row(count)].reshape(count, UNDO_ENV)


def row_entries(note: Any, num_envs: int, count: int) -> Any:
    """The first ``count`` entries of rows as a view ``[count, UNDO_ROW]``."""
    begin = first_row(num_envs)
    return note[begin : begin + UNDO_ROW * count].reshape(count, UNDO_ROW)
