"""Durable: keeps a replay in files safe: decides when it is on the disk, and repairs it after a kill or a power cut."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import ref

import numpy as np

from ..errors import FileFormatError, ParameterError
from ..files.format import MANIFEST
from ..files.sealed import damaged
from ..kernels.ring_state import COLUMNS, COUNTERS, HEAD
from ..memory.mapped import FileKeeper, MappedKeeper
from ..parameters import is_count
from ..printable import shown
from ..ring.ring import Ring
from ..ring.state import undo_words
from ..ring.undo import note_mark
from ..steps.arrays import Array, Ints
from .marks import Kind, Mark, mark_of
from .progress import Progress
from .progress_slots import ProgressSlots

__all__ = [
    "SMALL",
    "Durable",
    "FlushPolicy",
    "go_back",
    "is_here",
    "last_mark",
    "newest_of",
    "recover",
    "require_policy",
    "whereabouts",
]


FlushPolicy = int | timedelta | None
"""After how many rows, or how much time, a replay in files flushes by itself; None is never."""


SMALL = "facts", "progress"
"""The arrays that a mark holds besides those of the ring."""


RESERVE_SHARE = 16
"""One in this many rows of each env is in reserve: it may be overwritten without a new record in the journal."""


RESERVE_LEAST = 256
"""A small replay has this many rows of each env in reserve, or half of its rows, since a record takes milliseconds."""


def require_policy(flush: Any) -> None:
    """Require a policy of flushing.

    Raises:
        ParameterError: ``flush`` is not such a policy.
    """
    known = flush is None or is_count(flush, 1) or (isinstance(flush, timedelta) and flush > timedelta(0))
    if not known:
        raise ParameterError(
            f"flush: expected a number of rows, a timedelta, or None, got {flush!r}; pass flush=10_000"
        )


class Durable:
    """Writes the journal of a replay in files, and asks the system to write its pages. The caller holds its lock.

    Args:
        keeper: the memory.
        ring: the ring in it.
        progress: the counts of what was drawn.
        policy: when to flush without being asked.
        last: the mark of the last flush of the process before; None in a new replay.
    """

    def __init__(
        self, keeper: MappedKeeper, ring: Ring, progress: Progress, policy: FlushPolicy, last: Mark | None
    ) -> None:
        self.keeper, self.ring, self.progress = keeper, ring, progress
        self._policy, self._rows, self._flushed = policy, 0, time.monotonic()
        progress.slots = ProgressSlots(keeper.take("progress", (ProgressSlots.WORDS,), np.int64))
        progress.draws, progress.sampled, progress.late = progress.slots.counts
        progress.draws = max(progress.draws, progress.first)  # the seed is kept at once, the counts at a flush
        self._mark = last or self._marked()
        ring.arrays.reserve[:] = self._mark.dead
        if ring.undo is not None:
            me = ref(self)  # a buffer that is dropped is free at once, so the ring must not refer to it
            ring.undo.renew = lambda count: (found := me()) is not None and found._renew(count)

    def _marked(self) -> Mark:
        """The mark of the ring as it is, with the oldest rows in reserve."""
        taken = {name: self.keeper.kept(name) for name in SMALL}
        mark = mark_of(self.ring, {name: array.tolist() for name, array in taken.items() if array is not None})
        return mark._replace(dead=np.maximum(mark.dead, self.ring.heads - self.ring.rows + self._in_reserve()))

    def _in_reserve(self) -> int:
        rows = self.ring.rows
        return max(rows // RESERVE_SHARE, min(RESERVE_LEAST, rows // 2))

    def note(self, kind: Kind) -> None:
        """Append the mark to the journal."""
        self.keeper.directory.journal.append(self._mark.encode(kind, whereabouts(self.keeper)))

    def flush(self, kind: Kind = "flush") -> None:
        """Write everything through to the disk. Then append a record of it to the journal."""
        self.keeper.directory.flush()
        self._mark = self._marked()
        self.note(kind)
        self.ring.arrays.reserve[:] = self._mark.dead
        self._rows, self._flushed = 0, time.monotonic()

    def _renew(self, count: int) -> bool:
        """Declare more of the oldest rows dead, because ``count`` new rows come. False if enough are dead already."""
        wanted = self.ring.heads - self.ring.rows + 2 * count + self._in_reserve()
        if (wanted <= self._mark.dead).all():
            return False
        self._mark = self._mark._replace(dead=np.maximum(self._mark.dead, wanted))
        self.note("flush")
        self.ring.arrays.reserve[:] = self._mark.dead
        return True

    def is_due(self, count: int) -> bool:
        """Whether it is time to flush, after ``count`` more rows were added."""
        policy = self._policy
        self._rows += count
        if isinstance(policy, timedelta):
            return time.monotonic() - self._flushed >= policy.total_seconds()
        return policy is not None and self._rows >= policy


def whereabouts(keeper: FileKeeper) -> list[Any]:
    """What identifies this boot of the machine and these files. A copy of a directory has other files."""
    found = os.fstat(keeper.directory.memory("state").descriptor)
    return [_boot(), found.st_dev, found.st_ino]


@cache
def _boot() -> str:
    """The system's name for this boot; empty if it gives none."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def recover(keeper: FileKeeper, num_envs: int, rows: int) -> Mark:
    """Make ready the files that another process left, before anything uses them.

    After a clean end, the files are as the journal says. If only the process died, the files have everything that it
    wrote, and the ring takes back the call that was broken off. After a power cut, or in a copy of the directory, pages
    of several times may be mixed. Then the ring goes back to the last flush.

    Returns:
        the mark of the last flush.

    Raises:
        FileFormatError: the files contradict the journal.
    """
    mark, kind, where = last_mark(keeper, num_envs, rows)
    state = keeper.take("state", (num_envs, COLUMNS), np.int64)
    counters = keeper.take("counters", (COUNTERS,), np.int64)
    packed: Any = keeper.kept("rows")
    if kind == "close":
        if not (np.array_equal(state, mark.state) and np.array_equal(counters, mark.counters)):
            raise damaged(keeper.directory.path / "journal", "the cursors that it closed with", "files of another time")
        _require_unmixed(newest_of(packed, rows, mark.state), mark.newest)
        return mark
    keeper.died = True
    if not is_here(keeper, where):
        there = mark.dead < mark.state[:, HEAD]  # the next step changes the stamp of the newest row, nothing else
        _require_unmixed(newest_of(packed, rows, mark.state)[there, 1:], mark.newest[there, 1:])
        go_back(keeper, mark, rows)
    return mark


def last_mark(keeper: FileKeeper, num_envs: int, rows: int) -> tuple[Mark, str, list[Any]]:
    """The last mark of the journal, with its kind and where it was made, as :meth:`Mark.decode` gives them.

    Raises:
        FileFormatError: the files are not those of so many rows, or the journal has no mark.
    """
    directory = keeper.directory
    directory.check()  # before anything changes
    packed = keeper.kept("rows")
    if packed is None or packed.ndim != 2 or len(packed) != num_envs * rows:
        raise damaged(directory.path / MANIFEST, f"{num_envs * rows} rows", None if packed is None else packed.shape)
    if directory.last is None:
        raise damaged(directory.path / "journal", "a record", "none")
    return Mark.decode(directory.last.payload, num_envs)


def is_here(keeper: FileKeeper, where: list[Any]) -> bool:
    """Whether a mark was made on this boot of this machine, in these files: then they show all that was written."""
    here = whereabouts(keeper)
    return where == here and bool(here[0])


def go_back(keeper: FileKeeper, mark: Mark, rows: int) -> None:
    """Put the cursors back to a mark, and note for the ring which rows may have been overwritten since."""
    num_envs = len(mark.state)
    keeper.take("state", (num_envs, COLUMNS), np.int64)[:] = mark.state
    keeper.take("counters", (COUNTERS,), np.int64)[:] = mark.counters
    _restore_small(keeper, mark.small)
    heads = mark.state[:, HEAD]
    places = np.arange(num_envs) * rows + (heads - 1) % rows
    after = np.minimum(mark.dead, heads) + rows  # laps after the one in which all rows were overwritten change nothing
    note_mark(keeper.take("undo", (undo_words(num_envs, rows),), np.int64), mark.state, mark.counters,
              after, places, mark.newest)  # fmt: skip


def _restore_small(keeper: FileKeeper, small: Mapping[str, list[Any]]) -> None:
    for name in SMALL:
        array = keeper.kept(name)
        if array is None:
            continue
        if len(small.get(name, [])) != len(array):
            raise FileFormatError(f"the journal's last record has {shown(small.get(name))} for {name!r}")
        array[:] = small[name]
    noted = keeper.kept("errors.undo")
    if noted is not None:
        noted[:] = 0.0


def _require_unmixed(newest: Ints, known: Ints) -> None:
    """Refuse rows of another time than the cursors. Only the bookkeeping of each env's newest row is compared.

    Raises:
        FileFormatError: the rows are of another time.
    """
    if not np.array_equal(newest, known):
        raise FileFormatError("the newest rows are not those that the journal knows: files of several times are mixed")


def newest_of(packed: Array, rows: int, state: Ints) -> Ints:
    """Stamp, step and order ``[N, 3]`` of the newest row of each env, zeros if it has none, as marks have them.

    The bookkeeping of a row is in its last 16 bytes: stamp (int64), step and order (int32 each).
    """
    heads = state[:, HEAD]
    newest = packed[np.arange(len(heads)) * rows + (heads - 1) % rows, -16:]
    stamps, others = newest[:, :8].copy().view(np.int64), newest[:, 8:].copy().view(np.int32)
    found = np.concatenate([stamps, others.astype(np.int64)], axis=1)
    found[heads <= 0] = 0
    return found
