"""Saver: writes a replay to a directory, at once or in another thread, and keeps the rows that are there already.

Rows go into files of their own, the segments, which never change. A later save of the same buffer names the segments
that still hold live rows, and writes only the rows that came since. While a thread saves, a snapshot keeps the rows as
they were: it copies each row that is about to be overwritten and was not read yet. ``docs/files.md`` has the format.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from inspect import signature
from itertools import pairwise
from threading import Condition, Event, Lock
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .. import files
from ..core.words import RULE
from ..errors import FileFormatError, LifecycleError
from ..files import disk
from ..files.format import Array as Storable
from ..files.save import to_json
from ..memory.layout import row_layout
from ..memory.store import Store
from ..printable import shown
from ..ring.ring import Ring, Span
from ..samplers.contract import AnySampler, OwnSampler
from ..samplers.fresh import Fresh
from ..samplers.prioritized import Prioritized
from ..samplers.recent import Recent
from ..samplers.uniform import Uniform, WithoutReplacement
from ..steps.arrays import Array, Ints, Leaf, numpy_view, to_tensor
from ..steps.schema import dotted
from ..views.chunks import Chunks
from ..views.frames import FrameStack
from ..views.returns_to_go import ReturnsToGo
from ..views.sequences import Sequence as SequenceView
from ..views.transitions import NStep
from .reader import Reader
from .serving import Progress
from .writer import Writer

KIND = "relive.ReplayBuffer"


State = tuple[dict[str, Storable], dict[str, Any]]
"""Arrays by name, and what is JSON."""


class Saver:
    """The saving side of a replay: its state for files and for pickle. Its caller holds the replay's lock.

    Args:
        writer: stores the replay's steps.
        reader: reads its batches.
        progress: the counts of its draws.
        device: where its rows live.
    """

    def __init__(self, writer: Writer, reader: Reader, progress: Progress, device: torch.device) -> None:
        self._writer, self._reader, self._progress, self._device = writer, reader, progress, device
        self.segments: Segments = Segments()
        """The rows that lie in directories already."""
        self.saves: files.Saves = files.Saves()
        """The save under way."""
        self._snapshot: Snapshot | None = None

    def facts(self) -> dict[str, object]:
        """The description of a replay in its files, whether they are a save or mapped."""
        ring, progress = self._writer.ring, self._progress
        return {
            "kind": KIND,
            "schema": json.loads(self._writer.schema.to_json()),
            "ordered": ring.ordered,
            "own_next_obs": ring.own_next,
            "seed": progress.seed,
            "first": progress.first,
            "view": describe(self._reader.view),
        }

    def state(self) -> State:
        """The whole state of the replay, without its rows."""
        writer, progress = self._writer, self._progress
        facts = {
            **self.facts(),
            "first": progress.first_taken,
            "check_ends": writer.check_ends,
            "debug": writer.debug,
            "counts": progress.counts,
            "not_finite_rewards": writer.ring.not_finite,
        }
        with progress.undone(writer.sampler):  # a loaded replay draws again what the learner had not taken
            return ring_state(writer.ring, writer.sampler, facts)

    def whole_state(self) -> tuple[dict[str, Leaf], dict[str, Any]]:
        """The whole state of the replay, with all rows in memory."""
        ring, (arrays, content) = self._writer.ring, self.state()
        arrays = row_arrays(ring, ring.span) | arrays
        return {name: x.whole() if isinstance(x, files.Streamed) else x for name, x in arrays.items()}, content

    def pickled(self, sampler: AnySampler) -> tuple[object, ...]:
        """The arguments of the function that unpickles: the state, the device, and parts that are not relive's own.

        ``sampler`` is the one that the user gave.
        """
        arrays, content = self.whole_state()
        # a copy, since copy.copy would have both buffers read through one view
        view = copy(self._reader.view) if content["view"] is None else None
        own = sampler if content["sampler"] is None else None
        # arrays and their dtypes; no tensors, which multiprocessing would send as open files
        tensors = {name: to_tensor(value) for name, value in arrays.items()}
        return {name: (numpy_view(x), x.dtype) for name, x in tensors.items()}, content, str(self._device), own, view

    def write(self, path: str | os.PathLike[str], extra: object, on_read: Callable[[], object]) -> files.SaveHandle:
        """Write everything to the directory ``path``. Segments that are there already are kept.

        ``extra`` is the learner's state. ``on_read`` is called once nothing in memory is needed any more.
        """
        save = self._save(path, extra)
        files.update(path, save.change, on_read=on_read)
        self.segments.note(path, save.segments)  # after the save: a failed one leaves the segments of the one before
        return files.SaveHandle(path)

    def start(self, path: str | os.PathLike[str], extra: object) -> files.SaveHandle:
        """Write everything in another thread: the present state, while the caller's thread goes on.

        If rows may change unseen, or if two threads must not read them at once, all rows are read before this returns.
        """
        ring, era, save = self._writer.ring, self.segments.era, self._save(path, extra)
        there = disk.target(path).absolute()  # the process may change its directory meanwhile
        snapshot = Snapshot(ring, save.stable)
        save.detach(snapshot)

        def work() -> None:
            try:
                files.update(there, save.change, on_read=snapshot.close)
                self.segments.note(there, save.segments, era)
            finally:
                snapshot.close()

        handle = files.SaveHandle(path, work)
        try:
            self._snapshot = snapshot
            snapshot.open()  # before the thread: from its first read on, no row is overwritten unseen
            self.saves.begin(handle)
            if not (ring.store.read_aside and self.segments.frozen):
                snapshot.wait()
        except BaseException:
            snapshot.close()  # the thread, if it runs, then gives up at the next row that it wants to read
            self.saves.forget(handle)
            raise
        return handle

    def _save(self, path: str | os.PathLike[str], extra: object) -> ReplaySave:
        return ReplaySave(self._writer.ring, self.segments.at(path), *self.state(), extra)

    def await_rows(self) -> None:
        """Wait until the save under way, if there is one, has read all rows. Then rows may change in any way."""
        if self._snapshot is not None:
            self._snapshot.wait()
            self._snapshot = None


def ring_state(ring: Ring, sampler: OwnSampler, facts: Mapping[str, object]) -> State:
    """The cursors and the sampler's state, with ``facts``: arrays by name, and what is JSON.

    Arrays of the sampler with an entry for each row are saved for the live rows alone.
    """
    state = sampler.state_dict()
    arrays: dict[str, Array] = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    by_row = list(sampler.per_row)
    tensors: dict[str, Storable] = {f"sampler.{name}": x for name, x in arrays.items()}
    for name in by_row:
        value = arrays[name]
        field = RowField(value.shape[1:], value.dtype, value.__getitem__)
        tensors[f"sampler.{name}"] = _streamed(ring, ring.span, field)
    content = {
        **facts,
        "rows_per_env": ring.rows,
        "num_envs": ring.num_envs,
        "state": ring.state.tolist(),
        "counters": ring.counters[:RULE].tolist(),  # the rule follows by name, and the rest is counted again
        "rule": list(ring.rule if ring.rule.across else ring.rule[:5]),  # as ever where no rows across episodes count
        "sampler": describe(sampler),
        "sampler_state": {name: plain(value) for name, value in state.items() if name not in arrays},
        "sampler_rows": by_row,
    }
    return tensors, content


# -- one save ---------------------------------------------------------------------------------------------------


class ReplaySave:
    """The content of one save. The caller holds the replay's lock while it makes this.

    Complete rows never change, so they go into segments that later saves keep. The newest row of each running episode
    is completed by the next step, so these rows are a segment of their own that no later save keeps.

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
        self,
        ring: Ring,
        known: Iterable[Segment],
        arrays: Mapping[str, Storable],
        content: Mapping[str, object],
        extra: object,
    ) -> None:
        described, self._learner = to_json(extra)
        self._arrays, self._content = arrays, {**content, "extra": described}
        self._known, self._live = list(known), ring.span
        self.stable: Span = complete_rows(ring)
        self._last = _new_segment(Span(self.stable.until, self._live.until))
        self._newest: Mapping[str, Storable] = row_arrays(ring, self._last.span, segment_prefix(self._last.name))
        fields = row_fields(ring.store)
        self._parts = ["span", *fields]
        self._sizes = ring.rows * ring.num_envs, sum(field.nbytes for field in fields.values())
        self._ring = ring
        self._snapshot: Snapshot | None = None
        """Has the complete rows, if others may take their places before they are written."""
        self.segments: list[Segment] = []
        """The segments that later saves can keep, once :meth:`change` was called."""

    def detach(self, snapshot: Snapshot) -> None:
        """Copy everything but the complete rows, which a snapshot gives."""
        self._arrays, self._learner = files.detached(self._arrays), files.detached(self._learner)
        self._newest = files.detached(self._newest)
        self._snapshot = snapshot

    def change(self, present: files.Contents) -> files.NewSave:
        """The content that replaces the save which is present."""
        kept, new = plan_segments(self._live, self.stable, self._still_there(present), *self._sizes)
        rows: Callable[[Span, str], Mapping[str, Storable]] = partial(row_arrays, self._ring)
        if self._snapshot is not None:
            self._snapshot.plan(new)
            rows = self._snapshot.arrays
        self.segments = [*kept, *new]
        prefixes = tuple(segment_prefix(segment.name) for segment in kept)
        groups = [_with_span(part, rows(part.span, segment_prefix(part.name))) for part in new]
        # a group has files of its own: a later save can keep each new segment without the learner's state
        return files.NewSave(
            [*groups, self._learner, {**self._arrays, **_with_span(self._last, self._newest)}],
            {**self._content, "segments": [segment.name for segment in (*self.segments, self._last)]},
            present.of_tensors([name for name in present.specs if name.startswith(prefixes)]),
        )

    def _still_there(self, present: files.Contents) -> list[Segment]:
        """The first segments of a directory, up to the first one that is not there as it was written.

        Another buffer may have saved there. A segment's name is random, so a tensor of that name has the same rows.
        """
        for i, segment in enumerate(self._known):
            prefix = segment_prefix(segment.name)
            if not all(f"{prefix}{part}" in present.specs for part in self._parts):
                return self._known[:i]
        return self._known


def _with_span(segment: Segment, rows: Mapping[str, Storable]) -> dict[str, Storable]:
    """The tensors in the files of a segment."""
    return {f"{segment_prefix(segment.name)}span": np.stack(segment.span), **rows}


# -- rows as tensors --------------------------------------------------------------------------------------------

PIECE = 1 << 22
"""Bytes of rows that are copied at a time on their way to a file."""


class RowField(NamedTuple):
    """A tensor of a save with an entry for each row: the packed fields, or a large one."""

    shape: tuple[int, ...]
    dtype: np.dtype | torch.dtype
    dump: Callable[[Ints], Leaf]
    """Gives the entries ``[K, *shape]`` of the rows at places ``[K]``; they may lie in the ring's own memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of an entry."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """``size`` rows as ranges of a few MiB each."""
        rows = max(PIECE // max(self.nbytes, 1), 1)
        return ((low, min(low + rows, size)) for low in range(0, size, rows))


def row_fields(store: Store) -> dict[str, RowField]:
    """The fields that a save has of each row, by the names of their tensors."""
    layout, _ = row_layout(store.leaves)
    fields = {"rows": RowField((layout.nbytes,), np.dtype(np.uint8), store.dump)}
    for path in store.large:
        field = store.leaves[path]
        fields[f"block.{dotted(path)}"] = RowField(field.shape, field.dtype, partial(store.dump_large, path))
    return fields


def row_arrays(ring: Ring, span: Span, prefix: str = "") -> dict[str, files.Streamed]:
    """The rows of a span by name: the packed fields, and a block for each large one.

    If they are copied, then piece by piece while they are written. So they must not change before that.
    """
    return {f"{prefix}{name}": _streamed(ring, span, field) for name, field in row_fields(ring.store).items()}


# A copy took 137 MiB more for a million rows; streaming takes 30. Other threads wait until the system has the bytes,
# not for the disk.
def _streamed(ring: Ring, span: Span, field: RowField) -> files.Streamed:
    """One field of a span's rows, a few MiB at a time."""
    size, places = span.size, partial(span.places, ring.rows)
    return files.Streamed(
        (size, *field.shape), field.dtype, lambda: (field.dump(places(*p)) for p in field.pieces(size))
    )


# -- segments ---------------------------------------------------------------------------------------------------

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
    """Its rows. Some may have left the buffer since."""


# The random name of 64 bits says that this buffer wrote or loaded a segment. So two buffers that loaded one save never
# take each other's rows. If a user may have written to rows, or `append` renumbered them, the next save is a full one.
class Segments:
    """The segments of a buffer, by the directories that they lie in."""

    def __init__(self) -> None:
        self._known: dict[str, list[Segment]] = {}
        self.frozen = True
        """True while rows stay as they are once they are complete. Without that, no segment is ever kept."""
        self.era: int = 0
        """How often :meth:`forget` was called."""

    def at(self, path: str | os.PathLike[str]) -> list[Segment]:
        """The segments in a directory, the oldest first, as far as they are known."""
        return self._known.get(os.path.realpath(path), []) if self.frozen else []

    def note(self, path: str | os.PathLike[str], segments: list[Segment], era: int | None = None) -> None:
        """Remember the segments that are in a directory now. They hold the rows as they were in ``era``, or are now."""
        where, known = os.path.realpath(path), self._known  # taken first: a thread may call `forget` at any time
        if era not in (None, self.era):
            return
        known.pop(where, None)  # the directory moves to the end, so that the one saved to longest ago goes first
        known[where] = segments
        while len(known) > KNOWN:
            known.pop(next(iter(known)))

    def forget(self) -> None:
        """Forget all segments, because rows that were stored before have changed."""
        self.era += 1
        self._known = {}


def is_segment(name: object) -> bool:
    """True if this can be the name of a segment."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _new_segment(span: Span) -> Segment:
    """A segment of these rows, with a name of its own."""
    return Segment(os.urandom(8).hex(), span)


def segment_prefix(name: str) -> str:
    """The beginning of the names of a segment's tensors."""
    return f"segment.{name}."


def complete_rows(ring: Ring) -> Span:
    """The live rows, without the newest row of each running episode, which the next step will complete."""
    live = ring.span
    return Span(live.first, np.maximum(live.until - ring.under_way, live.first))


# Segments have at most 1/16 of the capacity, so the disk holds about 1/16 more than the buffer; small ones are merged.
# Priorities are written whole, 4 bytes a row: training changes them everywhere.
def plan_segments(
    live: Span, stable: Span, known: Iterable[Segment], capacity: int, row_bytes: int
) -> tuple[list[Segment], list[Segment]]:
    """How to save rows into a directory that holds the segments ``known``, the oldest first.

    Args:
        live: the rows to save.
        stable: the complete ones among these rows; see :func:`complete_rows`.
        known: the segments.
        capacity: rows of all envs together.
        row_bytes: bytes of a row in a file.

    Returns:
        the segments to keep, and those to write, which follow them.
    """
    kept = [segment for segment in known if segment.span.meet(live).size]
    gone = sum(segment.span.size - segment.span.meet(live).size for segment in kept)
    if gone > live.size:  # envs that stand still keep rows of the others on the disk
        kept = []
    # segments are in the order of time and have no gaps: the new rows begin where the last one ends, in every env
    new = Span(np.maximum(kept[-1].span.until, live.first) if kept else live.first, stable.until)
    least = max(SMALL_BYTES // row_bytes, 1)
    small, large = max(capacity // SMALL_SHARE, least), max(capacity // LARGE_SHARE, least)
    while kept and new.size:  # so segments below `small` at least halve in size from each to the next
        last = kept[-1].span.meet(live)
        if last.size > new.size or last.size + new.size > small:
            break
        new = Span(last.first, new.until)
        kept.pop()
    return kept, [_new_segment(part) for part in _cut(new, large)]


def _cut(span: Span, most: int) -> Sequence[Span]:
    """About equal parts of at most about ``most`` rows; none if there are no rows."""
    parts, length = -(-span.size // most), span.until - span.first
    # cut k is the same share of every env's rows, so each part begins where the one before ends
    cuts = [span.first + length * k // max(parts, 1) for k in range(parts + 1)]
    return [Span(low, high) for low, high in pairwise(cuts)]


# -- a save in another thread -----------------------------------------------------------------------------------

ASIDE = 1 << 25
"""The most bytes of rows that are set aside. At this limit, a thread that adds waits until the save has read more."""


AHEAD = 1 << 20
"""How many bytes of rows are set aside at once; more if one step overwrites more."""


class Aside(NamedTuple):
    """Rows that were copied before others took their places."""

    span: Span
    fields: dict[str, Array]
    """Each field of these rows as an array ``[K, *shape]``."""
    nbytes: int


# Complete rows never change but by being overwritten. The writer copies in pieces of 1 MiB and waits only at 32 MiB.
# Without a save, a step reads one attribute more.
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
        self.over: Event = Event()
        """Set when no row is needed any more."""

    def open(self) -> None:
        """Let the ring call :meth:`make_way` from now on. After this, the ring may go on."""
        self._ring.before_overwriting = self.make_way

    # the thread that saves

    def plan(self, new: list[Segment]) -> None:
        """Let go of all rows but those of new segments: only these will be read."""
        with self._changed:
            self._let_go(new[0].span.first if new else self._stable.until)

    def arrays(self, span: Span, prefix: str) -> dict[str, files.Streamed]:
        """The fields of a new segment's rows, as :func:`relive.replay.saving.row_arrays` gives them."""
        unread, size = set(self._fields), span.size
        return {
            f"{prefix}{name}": files.Streamed(
                (size, *field.shape), field.dtype, partial(self._read_pieces, span, name, field, unread)
            )
            for name, field in self._fields.items()
        }

    def close(self) -> None:
        """Let go of all rows: the save needs no more of them, or it failed."""
        with self._changed:
            self._ring.before_overwriting = None
            self._aside = []
            self.over.set()
            self._changed.notify_all()  # a thread may wait in `_set_aside`

    def _read_pieces(self, span: Span, name: str, field: RowField, unread: set[str]) -> Iterator[Leaf]:
        """One field of a segment, piece by piece. After the last field, the segment's rows are let go."""
        for low, high in field.pieces(span.size):
            with self._changed:  # for each piece: a thread that adds waits for a few MiB at most
                if self.over.is_set():
                    raise LifecycleError(
                        "the call that began this save was interrupted, so there is no save; save again"
                    )
                part = self._read(span, low, high, name, field)
            yield part  # without the lock: the disk may be slow
        unread.discard(name)
        if not unread:
            with self._changed:
                self._let_go(span.until)

    def _read(self, span: Span, low: int, high: int, name: str, field: RowField) -> Leaf:
        """A copy of rows ``low`` to ``high`` of a span. Rows that were set aside are taken from there."""
        rows = _copied(field.dump(span.places(self._ring.rows, low, high)))
        if (self._safe <= span.first).all():
            return rows
        env, number = span.rows(low, high)
        late = np.flatnonzero(number < self._safe[env])  # overwritten, or about to be
        for aside in self._aside if len(late) else ():
            first, until = aside.span
            mine = late[(number[late] >= first[env[late]]) & (number[late] < until[env[late]])]
            # row `number` of env e is entry begin[e] + number - first[e]: the envs' rows lie one after another
            begin = np.cumsum(until - first) - (until - first)
            _bits(rows)[mine] = aside.fields[name][begin[env[mine]] + number[mine] - first[env[mine]]]
        return rows

    def _let_go(self, until: Ints) -> None:
        """Let rows below these numbers be overwritten. The lock is held."""
        self._safe = np.maximum(self._safe, until)
        # copies of which every row is below `until` are read already
        self._aside = [aside for aside in self._aside if (aside.span.until > np.maximum(until, aside.span.first)).any()]
        self._changed.notify_all()

    # threads that change the ring

    def wait(self) -> None:
        """Wait until no row is needed any more."""
        if self._process == os.getpid():  # in a fork, nobody would ever set the event
            self.over.wait()

    def make_way(self, envs: Ints) -> None:
        """Copy the rows that the next steps of ``envs`` overwrite, if the save has yet to read them.

        Each entry of ``envs`` stands for a step, which takes at most two rows.
        """
        if self._process != os.getpid():  # a fork has no thread that saves
            self._ring.before_overwriting = None
            return
        ring = self._ring
        # row k takes the place of row k - rows, and an env with c steps gets rows up to heads + 2 c
        upto = ring.heads - ring.rows + 2 * np.bincount(envs, minlength=ring.num_envs)
        # without the lock: `_safe` is replaced as a whole and only grows, so with an old one the lock is taken in vain
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
            if not held or held + nbytes <= ASIDE:  # with nothing held there is no wait, however large the step is
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


def _copied(values: Leaf) -> Leaf:
    """A copy that shares no memory with the ring."""
    return values.clone() if isinstance(values, Tensor) else np.array(values)


def _bits(values: Leaf) -> Array:
    """An array over the memory of an array or a tensor."""
    return numpy_view(values) if isinstance(values, Tensor) else values


# -- samplers and views as JSON ------------------------------------------------------------------------------------

ATTRIBUTES: dict[tuple[type, str], str] = {(Recent, "eta"): "sharpest"}
"""Attributes that have another name than their argument of the constructor."""


LARGEST_PARAMETER = 2**53
"""Every whole number up to here is exactly a float."""


SAMPLERS = {part.__name__: part for part in (Uniform, WithoutReplacement, Prioritized, Recent, Fresh)}


VIEWS = {part.__name__: part for part in (NStep, FrameStack, ReturnsToGo, SequenceView, Chunks)}


PARAMETERS: dict[type, list[str]] = {
    part: [name for name in signature(part).parameters if name != "each_reward"]  # no file holds a function
    for part in (*SAMPLERS.values(), *VIEWS.values())
}
"""The constructor's arguments of samplers and views, which saves hold."""


PARTS: dict[str, dict[str, type]] = {"sampler": SAMPLERS, "inner": SAMPLERS, "view": VIEWS, "window": VIEWS}
"""The classes that a save may name, by their use."""


def describe(part: object) -> dict[str, object] | None:
    """One of relive's own samplers or views as JSON. None for a user's own part, or one that holds a user's function.

    The user passes such a part to ``load``.
    """
    kind = type(part)
    if kind not in PARAMETERS or getattr(part, "each_reward", None) is not None:  # a user's function
        return None
    values = {name: getattr(part, ATTRIBUTES.get((kind, name), name)) for name in PARAMETERS[kind]}
    inner = {name: describe(value) for name, value in values.items() if isinstance(value, tuple(PARAMETERS))}
    if None in inner.values():
        return None
    return {"part": kind.__name__, **{name: plain(value) for name, value in (values | inner).items()}}


def plain(value: object) -> object:
    """A parameter as JSON."""
    if isinstance(value, tuple):
        return [plain(member) for member in cast("tuple[object, ...]", value)]
    return cast("object", value.item()) if isinstance(value, np.generic) else value


def rebuild(data: object, what: str) -> Any:
    """The part that :func:`describe` described. ``what`` is its use: "sampler" or "view".

    Raises:
        FileFormatError: there is no such part, or its parameters are invalid.
    """
    given = dict(cast("dict[str, object]", data)) if isinstance(data, dict) else {}
    name = given.pop("part", None)
    part = PARTS.get(what, {}).get(name) if isinstance(name, str) else None
    if part is None:
        raise FileFormatError(
            f"the saved {what} is your own, or holds your own functions, which saves do not contain "
            f"({shown(data, 200)}); pass {what}=... to load or open"
        )
    try:
        if unknown := given.keys() - set(PARAMETERS[part]):
            raise ValueError(f"it has no {shown(min(unknown))}")
        return part(**{name: _value(value, name) for name, value in given.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise FileFormatError(f"the saved {what} has invalid parameters: {shown(given, 200)} ({error})") from error


def _value(value: object, name: str) -> object:
    if isinstance(value, dict):
        return rebuild(cast("object", value), name)
    if isinstance(value, list):
        return tuple(_value(member, name) for member in cast("list[object]", value))
    if type(value) is int and abs(value) > LARGEST_PARAMETER:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def kinds(part: Any) -> tuple[str, ...]:
    """The class names of a described sampler and of its inner one; () for a user's own sampler."""
    return () if part is None else (part["part"], *kinds(part.get("inner")))
