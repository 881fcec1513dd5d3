"""Snapshot: the rows of a ring at one instant. A save reads them in another thread while the ring goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from threading import Condition, Event, Lock
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .. import files
from ..errors import LifecycleError
from ..ring.ring import Ring
from ..ring.span import Span
from ..steps.arrays import Ints, numpy_view
from .saved_ring import RowField, row_fields
from .segments import SegmentPlan

__all__ = ["Snapshot"]


ASIDE = 1 << 25
"""The most bytes of rows that are set aside. At this limit, a thread that adds waits until the save has read more."""


AHEAD = 1 << 20
"""How many bytes of rows are set aside at once; more if one step overwrites more."""


class Aside(NamedTuple):
    """Rows that were copied before others took their places."""

    span: Span
    fields: dict[str, Any]
    """Each field of these rows as an array ``[K, *shape]``."""
    nbytes: int


class Snapshot:
    """The complete rows of a ring at the instant when this was made. They are read once, segment by segment.

    A complete row does not change until another row takes its place. Before that happens, the ring calls
    :meth:`make_way`, which copies the rows that the save has yet to read. Copies and reads exclude each other by a lock
    of their own. So neither waits for the replay's lock, nor for the disk.

    The caller holds the replay's lock while it makes and opens the snapshot, and calls :meth:`close` in the end.

    Args:
        ring: the rows.
        stable: the complete ones.
    """

    def __init__(self, ring: Ring, stable: Span) -> None:
        self._ring, self._stable, self._fields = ring, stable, row_fields(ring.store)
        self._row_bytes = sum(field.nbytes for field in self._fields.values())
        self._safe = stable.first.copy()
        """For each env, rows below this number may be overwritten: they were read, set aside, or are not needed."""
        self._aside: list[Aside] = []
        self._changed, self._process = Condition(Lock()), os.getpid()
        self.over = Event()
        """Set when no row is needed any more."""

    def open(self) -> None:
        """Let the ring call :meth:`make_way` from now on. After this, the ring may go on."""
        self._ring.before_overwriting = self.make_way

    # -- the thread that saves ----------------------------------------------------------------------------------

    def plan(self, plan: SegmentPlan) -> None:
        """Let go of all rows but those of new segments: only these will be read."""
        with self._changed:
            self._let_go(plan.new[0].span.first if plan.new else self._stable.until)

    def arrays(self, span: Span, prefix: str) -> dict[str, files.Streamed]:
        """The fields of a new segment's rows, as :func:`relive.replay.saved_ring.row_arrays` gives them."""
        left, size = set(self._fields), span.size
        return {
            f"{prefix}{name}": files.Streamed(
                (size, *field.shape), field.dtype, partial(self._parts, span, name, field, left)
            )
            for name, field in self._fields.items()
        }

    def close(self) -> None:
        """Let go of all rows: the save needs no more of them, or it failed."""
        with self._changed:
            self._ring.before_overwriting = None
            self._aside = []
            self.over.set()
            self._changed.notify_all()

    def _parts(self, span: Span, name: str, field: RowField, left: set[str]) -> Iterator[Any]:
        """One field of a segment, piece by piece. After the last field, the segment's rows are let go."""
        for low, high in field.pieces(span.size):
            with self._changed:
                if self.over.is_set():
                    raise LifecycleError(
                        "the call that began this save was interrupted, so there is no save; save again"
                    )
                part = self._read(span, low, high, name, field)
            yield part
        left.discard(name)
        if not left:
            with self._changed:
                self._let_go(span.until)

    def _read(self, span: Span, low: int, high: int, name: str, field: RowField) -> Any:
        """A copy of rows ``low`` to ``high`` of a span. Rows that were set aside are taken from there."""
        found = _copied(field.dump(span.places(self._ring.rows, low, high)))
        if (self._safe <= span.first).all():
            return found
        env, number = span.rows(low, high)
        late = np.flatnonzero(number < self._safe[env])  # overwritten, or about to be
        for aside in self._aside if len(late) else ():
            first, until = aside.span
            mine = late[(number[late] >= first[env[late]]) & (number[late] < until[env[late]])]
            begin = np.cumsum(until - first) - (until - first)
            _bits(found)[mine] = aside.fields[name][begin[env[mine]] + number[mine] - first[env[mine]]]
        return found

    def _let_go(self, until: Ints) -> None:
        """Let rows below these numbers be overwritten. The lock is held."""
        self._safe = np.maximum(self._safe, until)
        self._aside = [aside for aside in self._aside if (aside.span.until > np.maximum(until, aside.span.first)).any()]
        self._changed.notify_all()

    # -- threads that change the ring ---------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until no row is needed any more."""
        if self._process == os.getpid():
            self.over.wait()

    def make_way(self, envs: Ints) -> None:
        """Copy the rows that the next steps of ``envs`` overwrite, if the save has yet to read them.

        Each entry of ``envs`` stands for a step, which takes at most two rows.
        """
        if self._process != os.getpid():  # a fork has no thread that saves
            self._ring.before_overwriting = None
            return
        ring = self._ring
        upto = ring.heads - ring.rows + 2 * np.bincount(envs, minlength=ring.num_envs)
        if (np.minimum(upto, self._stable.until) > self._safe).any():
            with self._changed:
                self._set_aside(upto)

    def _set_aside(self, upto: Ints) -> None:
        """Copy rows below the numbers ``upto``, and some more. Wait while too many are set aside. The lock is held."""
        while True:
            span = self._due(upto)
            nbytes, held = span.size * self._row_bytes, sum(aside.nbytes for aside in self._aside)
            if self.over.is_set() or not nbytes:
                return
            if not held or held + nbytes <= ASIDE:
                break
            self._changed.wait()
        places = span.places(self._ring.rows)
        fields = {name: _bits(_copied(field.dump(places))) for name, field in self._fields.items()}
        self._aside.append(Aside(span, fields, nbytes))
        self._safe = np.maximum(self._safe, span.until)  # last: after an exception the next add copies them again

    def _due(self, upto: Ints) -> Span:
        """The rows to copy so that the rows before ``upto`` may be overwritten, and up to ``AHEAD`` bytes more."""
        first, end = self._safe, self._stable.until
        behind = np.minimum(upto, end) > first
        more = AHEAD // (self._row_bytes * max(np.count_nonzero(behind), 1))
        return Span(first, np.where(behind, np.minimum(np.maximum(upto, first + more), end), first))


def _copied(values: Any) -> Any:
    """A copy that shares no memory with the ring."""
    return values.clone() if isinstance(values, Tensor) else np.array(values)


def _bits(values: Any) -> Any:
    """An array over the memory of an array or a tensor."""
    return numpy_view(values) if isinstance(values, Tensor) else values
