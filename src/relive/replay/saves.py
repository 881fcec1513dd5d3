"""ReplaySave: what one save of a replay writes, all of one instant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from .. import files
from ..files.nested import to_json
from ..ring.ring import Ring
from ..ring.span import Span
from .saved_ring import row_arrays, row_fields
from .segments import Segment, SegmentPlan, complete_rows, new_segment, plan_segments
from .sources import segment_prefix

__all__ = ["ReplaySave"]


Rows = Callable[[Span, str], Mapping[str, Any]]
"""Gives the fields of the rows of a span by name, with a prefix."""


class ReplaySave:
    """What one save of a replay writes. The caller holds the replay's lock while it makes this.

    Args:
        ring: the ring.
        known: the segments that the directory is known to hold, the oldest first.
        arrays: everything in arrays but rows and ``extra``, by name.
        content: what of that is JSON.
        extra: the learner's state.

    Raises:
        FileFormatError, DTypeError, FieldError: ``extra`` has a value that cannot be stored.
    """

    def __init__(
        self, ring: Ring, known: Iterable[Segment], arrays: Mapping[str, Any], content: Mapping[str, Any], extra: Any
    ) -> None:
        described, self._learner = to_json(extra)
        self._arrays, self._content = arrays, {**content, "extra": described}
        self._known, self._live, self.stable = list(known), ring.span, complete_rows(ring)
        self._last = new_segment(Span(self.stable.until, self._live.until))
        self._newest: Mapping[str, Any] = row_arrays(ring, self._last.span, segment_prefix(self._last.name))
        fields = row_fields(ring.store)
        self._parts = ["span", *fields]
        self._sizes = ring.rows * ring.num_envs, sum(field.nbytes for field in fields.values())
        self._rows: Rows = partial(row_arrays, ring)
        self._planned: Callable[[SegmentPlan], object] | None = None
        self.segments: list[Segment] = []
        """The segments that later saves can keep, once :meth:`change` was called."""

    def detach(self, rows: Rows, planned: Callable[[SegmentPlan], object]) -> None:
        """Copy everything but the complete rows. ``rows`` gives those, and is preceded by a call of ``planned``."""
        self._arrays, self._learner = files.detached(self._arrays), files.detached(self._learner)
        self._newest = files.detached(self._newest)
        self._rows, self._planned = rows, planned

    def change(self, present: files.Contents) -> files.Change:
        """The content that replaces the save which is present."""
        planned = plan_segments(self._live, self.stable, self._still_there(present), *self._sizes)
        if self._planned is not None:
            self._planned(planned)
        self.segments = [*planned.kept, *planned.new]
        kept = {segment.name for segment in planned.kept}
        return files.Change(
            [
                *(
                    _with_span(segment, self._rows(segment.span, segment_prefix(segment.name)))
                    for segment in planned.new
                ),
                self._learner,
                {**self._arrays, **_with_span(self._last, self._newest)},
            ],
            {**self._content, "segments": [segment.name for segment in (*self.segments, self._last)]},
            present.of_tensors([name for name in present.specs if _segment_of(name) in kept]),
        )

    def _still_there(self, present: files.Contents) -> list[Segment]:
        """The first segments of a directory, up to the first one that is not there as it was written."""
        for i, segment in enumerate(self._known):
            prefix = segment_prefix(segment.name)
            if not all(f"{prefix}{part}" in present.specs for part in self._parts):
                return self._known[:i]
        return self._known


def _segment_of(name: str) -> str | None:
    """The name of the segment that a tensor belongs to; None if it belongs to none."""
    return name.split(".")[1] if name.startswith("segment.") else None


def _with_span(segment: Segment, rows: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors in the files of a segment."""
    return {f"{segment_prefix(segment.name)}span": np.stack(segment.span), **rows}
