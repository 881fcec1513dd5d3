"""Segments: the rows of a replay in files that later saves keep, since a row that is complete never changes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..kernels.ring_state import NEXT
from ..ring.ring import Ring
from ..ring.span import Span

__all__ = ["Segment", "SegmentPlan", "Segments", "is_segment", "new_segment", "plan_segments"]


LARGE_SHARE = 16
"""New rows are cut into segments of at most this share of the capacity. So the disk holds few rows that are gone."""


SMALL_SHARE = 128
"""Segments of up to this share of the capacity are joined with later ones, to keep their number low."""


SMALL_BYTES = 1 << 20
"""Segments of fewer bytes than this are joined, and rows of fewer bytes are not cut, whatever their share is."""


KNOWN = 4
"""For how many directories a buffer remembers the segments it has there."""


_NAME = re.compile("[0-9a-f]{16}")


class Segment(NamedTuple):
    """Rows in a file of their own."""

    name: str
    """16 hexadecimal digits, drawn at random. No two segments share a name, so equal names mean equal rows."""
    span: Span
    """Which rows. Some may have left the buffer since."""


class SegmentPlan(NamedTuple):
    """The rows of a save."""

    kept: list[Segment]
    """Segments of the save in place that the new one keeps."""
    new: list[Segment]
    """Segments to write, which follow the kept ones."""
    newest: Segment
    """The newest row of each env whose episode goes on. The next step will complete it, so no later save keeps it."""


class Segments:
    """Which segments of a buffer lie in which directories."""

    def __init__(self) -> None:
        self._known: dict[str, list[Segment]] = {}
        self._frozen = True

    def at(self, path: str | os.PathLike[str]) -> list[Segment]:
        """The segments in a directory, the oldest first, as far as they are known."""
        return self._known.get(os.path.realpath(path), []) if self._frozen else []

    def note(self, path: str | os.PathLike[str], segments: list[Segment]) -> None:
        """These are the segments in a directory now."""
        where = os.path.realpath(path)
        self._known.pop(where, None)
        self._known[where] = segments
        while len(self._known) > KNOWN:
            self._known.pop(next(iter(self._known)))

    def forget(self) -> None:
        """Rows that were stored before have changed, so no segment may be kept."""
        self._known = {}

    def give_up(self) -> None:
        """Rows may change at any time from now on, so no segment may ever be kept."""
        self._frozen = False


def is_segment(name: object) -> bool:
    """Whether this can be the name of a segment."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def new_segment(span: Span) -> Segment:
    """A segment of these rows, with a name of its own."""
    return Segment(os.urandom(8).hex(), span)


def plan_segments(ring: Ring, known: Iterable[Segment], row_bytes: int) -> SegmentPlan:
    """How to save the live rows of a ring whose directory holds the segments ``known``, the oldest first."""
    live = ring.span
    stable = Span(live.first, np.maximum(live.until - (ring.state[:, NEXT] > 0), live.first))
    kept = [segment for segment in known if segment.span.meet(live).size]
    stored = sum(segment.span.size for segment in kept)
    if stored - _shared(kept, live) > live.size:  # envs that stand still keep rows of the others on the disk
        kept = []
    new = Span(np.maximum(kept[-1].span.until, live.first) if kept else live.first, stable.until)
    capacity, least = ring.rows * ring.num_envs, max(SMALL_BYTES // row_bytes, 1)
    small, large = max(capacity // SMALL_SHARE, least), max(capacity // LARGE_SHARE, least)
    while kept and new.size:  # so segments below `small` at least halve in size from each to the next
        last = kept[-1].span.meet(live)
        if last.size > new.size or last.size + new.size > small:
            break
        new = Span(last.first, new.until)
        kept.pop()
    return SegmentPlan(
        kept, [new_segment(part) for part in _cut(new, large)], new_segment(Span(stable.until, live.until))
    )


def _shared(segments: Iterable[Segment], live: Span) -> int:
    """How many rows of the segments are live."""
    return sum(segment.span.meet(live).size for segment in segments)


def _cut(span: Span, most: int) -> Sequence[Span]:
    """About equal parts of at most about ``most`` rows; none if there are no rows."""
    parts, length = -(-span.size // most), span.until - span.first
    cuts = [span.first + length * k // max(parts, 1) for k in range(parts + 1)]
    return [Span(low, high) for low, high in pairwise(cuts)]
