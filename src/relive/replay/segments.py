"""Segments: rows of a replay in files that later saves keep, because a complete row never changes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..ring.ring import Ring
from ..ring.span import Span

__all__ = ["Segment", "SegmentPlan", "Segments", "complete_rows", "is_segment", "new_segment", "plan_segments"]


LARGE_SHARE = 16
"""New rows are cut into segments of at most this share of the capacity. So the disk holds few rows that are gone."""


SMALL_SHARE = 128
"""Segments of up to this share of the capacity are joined with later ones, to keep their number low."""


SMALL_BYTES = 1 << 20
"""Segments of fewer bytes than this are joined, and rows of fewer bytes are not cut, whatever their share is."""


KNOWN = 4
"""For how many directories a buffer remembers its segments."""


_NAME = re.compile("[0-9a-f]{16}")


class Segment(NamedTuple):
    """Rows in a file of their own."""

    name: str
    """16 hexadecimal digits, drawn at random. No two segments share a name, so equal names mean equal rows."""
    span: Span
    """Which rows. Some may have left the buffer since."""


class SegmentPlan(NamedTuple):
    """The complete rows of a save."""

    kept: list[Segment]
    """Segments of the save in place that the new one keeps."""
    new: list[Segment]
    """Segments to write, which follow the kept ones."""


class Segments:
    """Which segments of a buffer lie in which directories."""

    def __init__(self) -> None:
        self._known: dict[str, list[Segment]] = {}
        self.frozen = True
        """Whether rows stay as they are once they are complete."""
        self.era = 0
        """How often :meth:`forget` was called."""

    def at(self, path: str | os.PathLike[str]) -> list[Segment]:
        """The segments in a directory, the oldest first, as far as they are known."""
        return self._known.get(os.path.realpath(path), []) if self.frozen else []

    def note(self, path: str | os.PathLike[str], segments: list[Segment], era: int | None = None) -> None:
        """Remember the segments that are in a directory now. They hold the rows as they were in ``era``, or are now."""
        where, known = os.path.realpath(path), self._known  # taken first: a thread may call `forget` at any time
        if era not in (None, self.era):
            return
        known.pop(where, None)
        known[where] = segments
        while len(known) > KNOWN:
            known.pop(next(iter(known)))

    def forget(self) -> None:
        """Forget all segments, because rows that were stored before have changed."""
        self.era += 1
        self._known = {}

    def give_up(self) -> None:
        """Never keep a segment again, because rows may change at any time from now on."""
        self.frozen = False


def is_segment(name: object) -> bool:
    """Whether this can be the name of a segment."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def new_segment(span: Span) -> Segment:
    """A segment of these rows, with a name of its own."""
    return Segment(os.urandom(8).hex(), span)


def complete_rows(ring: Ring) -> Span:
    """The live rows, without the newest row of each running episode, which the next step will complete."""
    live = ring.span
    return Span(live.first, np.maximum(live.until - ring.under_way, live.first))


def plan_segments(live: Span, stable: Span, known: Iterable[Segment], capacity: int, row_bytes: int) -> SegmentPlan:
    """How to save rows into a directory that holds the segments ``known``, the oldest first.

    Args:
        live: the rows to save.
        stable: the complete ones among these rows; see :func:`complete_rows`.
        known: the segments.
        capacity: rows of all envs together.
        row_bytes: bytes of a row in a file.
    """
    kept = [segment for segment in known if segment.span.meet(live).size]
    stored = sum(segment.span.size for segment in kept)
    if stored - _shared(kept, live) > live.size:  # envs that stand still keep rows of the others on the disk
        kept = []
    new = Span(np.maximum(kept[-1].span.until, live.first) if kept else live.first, stable.until)
    least = max(SMALL_BYTES // row_bytes, 1)
    small, large = max(capacity // SMALL_SHARE, least), max(capacity // LARGE_SHARE, least)
    while kept and new.size:  # so segments below `small` at least halve in size from each to the next
        last = kept[-1].span.meet(live)
        if last.size > new.size or last.size + new.size > small:
            break
        new = Span(last.first, new.until)
        kept.pop()
    return SegmentPlan(kept, [new_segment(part) for part in _cut(new, large)])


def _shared(segments: Iterable[Segment], live: Span) -> int:
    """How many rows of the segments are live."""
    return sum(segment.span.meet(live).size for segment in segments)


def _cut(span: Span, most: int) -> Sequence[Span]:
    """About equal parts of at most about ``most`` rows; none if there are no rows."""
    parts, length = -(-span.size // most), span.until - span.first
    cuts = [span.first + length * k // max(parts, 1) for k in range(parts + 1)]
    return [Span(low, high) for low, high in pairwise(cuts)]
