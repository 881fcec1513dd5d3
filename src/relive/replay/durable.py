"""Durable: keeps a replay in the files of a directory safe, and repairs it after a kill or a power cut.

The files are mapped into memory, so they have all that a process wrote, even if it was killed. After a power cut, pages
of several times may be mixed. So a flush writes all pages through to the disk, and then appends a mark to the journal:
the cursors of that moment, and the rows that may be overwritten until the next mark. Whoever opens the files goes on
from what a killed process left, or back to the last mark. :func:`copied` reads the files beside the process that writes
to them. ``docs/durable.md`` has the format and the promises.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, cast
from weakref import ref

import numpy as np
import torch
from numpy.typing import DTypeLike

from .. import files
from ..core.words import (
    COLUMNS,
    COUNTERS,
    HEAD,
    UNDO_AFTER,
    UNDO_ENVS,
    UNDO_KIND,
    UNDO_NONE,
    env_entries,
    first_row,
)
from ..errors import (
    FieldError,
    FileFormatError,
    InvariantError,
    LifecycleError,
    NoSaveError,
    ParameterError,
    SchemaError,
)
from ..files.disk import contradictions, fitting, whole
from ..files.format import MANIFEST, damaged
from ..files.mapped import MappedCopy, MappedDirectory, MappedFiles
from ..memory.estimate import require_free
from ..memory.mapped import DRAINED, SETTINGS, FileAllocator, MappedAllocator
from ..parameters import is_count, is_own, parts_of
from ..printable import shown
from ..ring.ring import Ring, Span, Undo, undo_words
from ..samplers.contract import AnySampler, OwnSampler
from ..samplers.uniform import Uniform
from ..steps.arrays import Array, Ints
from ..views.contract import View
from ..views.transitions import Transition
from .loading import ReplayArguments, ring_arguments, sampler_state
from .saving import PARAMETERS, describe, kinds, ring_state
from .serving import Progress, ProgressSlots

T = TypeVar("T")
FlushPolicy = int | timedelta | None
"""After how many rows, or how much time, a replay in files flushes by itself; None is never."""


Kind = Literal["open", "flush", "close"]


RESERVE_SHARE = 16
"""One in this many rows of each env is in reserve: it may be overwritten without a new record in the journal."""


RESERVE_LEAST = 256
"""A small replay has this many rows of each env in reserve, or half of its rows, since a record takes milliseconds."""


SMALL = "facts", "progress"
"""The arrays that a mark holds besides those of the ring."""


SOURCE, AFTER, MARK, ENVS = range(4)
"""The words of a note of drained steps: where they come from, the number of the first step after the piece, the sum of
the heads of the envs that get it before it was stored, and how many envs these are, from the note's own env on."""


VOID = -1
"""The MARK of a note that says nothing: its piece was never stored, or another note is being written. A note that was
never written is all zeros, and no source has the number 0."""


# A row that a flush has counted may be overwritten only if the journal says so before. Take 1,000 rows of an env and a
# flush at head 5,000, when rows 4,000 to 4,999 are stored: its mark declares the rows below 4,256 dead, so that rows
# 5,000 to 5,255 may overwrite them, a reserve of 256. Row 5,256 needs a record with more dead rows first. After a power
# cut the env goes back to head 5,000 with rows 4,256 to 4,999, whatever pages of later rows have reached the disk.
#
# The order of writes is record, reserve, mark. Each can be repeated, so an exception between two repeats the first. A
# mark before its record promised a reserve that did not exist, and later `add`s were refused.
class Durable:
    """Writes the journal of a replay in files, and asks the system to write its pages. The caller holds its lock.

    Args:
        allocator: the memory.
        ring: the ring in it.
        progress: the counts of what was drawn.
        policy: when to flush without being asked.
        last: the mark of the last flush of the process before; None in a new replay.
    """

    def __init__(
        self, allocator: MappedAllocator, ring: Ring, progress: Progress, policy: FlushPolicy, last: FlushMark | None
    ) -> None:
        self.allocator = allocator
        self.ring = ring
        self._policy, self._rows, self._flushed = policy, 0, time.monotonic()
        progress.slots = ProgressSlots(allocator.take("progress", (ProgressSlots.WORDS,), np.int64))
        progress.draws, progress.sampled, progress.late = progress.slots.counts
        progress.draws = max(progress.draws, progress.first)  # the seed is kept at once, the counts at a flush
        self._mark = last or self._marked()
        # rows below the reserve may be overwritten: the last record in the journal says that they may be gone
        ring.arrays.reserve[:] = self._mark.dead
        if ring.undo is not None:
            me = ref(self)  # a buffer that is dropped is free at once, so the ring must not refer to it
            ring.undo.renew = lambda count: (owner := me()) is not None and owner._extend_reserve(count)
        self.settings: Settings = Settings(self._added(SETTINGS, (2, Settings.BYTES), np.uint8))
        self._drained: Ints | None = allocator.existing(DRAINED)
        if self._drained is not None:
            self._drop_unstored_notes()

    def drained(self) -> Ints:
        """The notes of steps that came from elsewhere, ``[N, 4]``: one for each source, in the row of its first env.

        A note is written before its piece is stored. If a kill follows, the heads say whether the piece is in.
        """
        if self._drained is None:
            self._drained = self._added(DRAINED, (self.ring.num_envs, 4), np.int64)
        return self._drained

    def _added(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """An array that the files of an earlier process may lack. Then it is made, and the manifest names it."""
        directory = self.allocator.directory
        array = self.allocator.take(name, shape, dtype)
        # at once: a file that no manifest names is removed when the directory is opened again
        if directory.content is not None and name not in directory.known:
            directory.commit(directory.content)
        return array

    def _drop_unstored_notes(self) -> None:
        """Drop the notes of pieces that are not in, before other steps move the heads."""
        assert self._drained is not None
        for env, (mark, count) in enumerate(self._drained[:, [MARK, ENVS]].tolist()):
            # heads only grow, and a piece that is in has moved them: the old sum means that it is not in
            if mark == int(self.ring.heads[env : env + max(count, 0)].sum()):
                self._drained[env, MARK] = VOID

    def _marked(self) -> FlushMark:
        """The mark of the ring as it is, with the oldest rows in reserve."""
        ring = self.ring
        arrays = {name: self.allocator.existing(name) for name in SMALL}
        small = {name: array.tolist() for name, array in arrays.items() if array is not None}
        newest = newest_of(ring.store.target, ring.rows, ring.state)
        # row k overwrites row k - rows, so the next `_in_reserve` rows of an env overwrite those below this number
        dead = np.maximum(ring.oldest, ring.heads - ring.rows + self._in_reserve())
        return FlushMark(ring.state.copy(), ring.counters.copy(), newest, dead, small)

    def _in_reserve(self) -> int:
        """How many of the oldest rows of each env are in reserve."""
        rows = self.ring.rows
        return max(rows // RESERVE_SHARE, min(RESERVE_LEAST, rows // 2))

    def begin(self) -> None:
        """Append the first record to the journal of a new replay."""
        self._note(self._mark, "open")

    def _note(self, mark: FlushMark, kind: Kind) -> None:
        """Append a mark to the journal, and go by it from then on."""
        self.allocator.directory.journal.append(mark.encode(kind, whereabouts(self.allocator)))
        # Only now may the ring overwrite the rows that the record declares dead, and only after that does this mark
        # say so. If the disk fails or an exception comes in between, the next call writes the record again.
        self.ring.arrays.reserve[:] = mark.dead
        self._mark = mark

    def flush(self, kind: Kind = "flush") -> None:
        """Write everything through to the disk. Then append a record of it to the journal."""
        self.allocator.directory.flush()  # first: a record says that every page of before it is on the disk
        self._note(self._marked(), kind)
        self._rows, self._flushed = 0, time.monotonic()

    def _extend_reserve(self, count: int) -> bool:
        """Declare more of the oldest rows dead, because ``count`` new rows come. False if enough are dead already."""
        # a step takes at most two rows; the reserve besides, so that the next steps need no record
        wanted = self.ring.heads - self.ring.rows + 2 * count + self._in_reserve()
        if (wanted <= self._mark.dead).all():
            return False
        # the mark of the last flush with more dead rows: nothing else of it has reached the disk since
        self._note(self._mark._replace(dead=np.maximum(self._mark.dead, wanted)), "flush")
        return True

    def is_due(self, count: int) -> bool:
        """True if it is time to flush, after ``count`` more rows were added."""
        policy = self._policy
        self._rows += count
        if isinstance(policy, timedelta):
            return time.monotonic() - self._flushed >= policy.total_seconds()
        return policy is not None and self._rows >= policy


def require_policy(flush: object) -> None:
    """Require a policy of flushing.

    Raises:
        ParameterError: ``flush`` is not such a policy.
    """
    known = flush is None or is_count(flush, 1) or (isinstance(flush, timedelta) and flush > timedelta(0))
    if not known:
        raise ParameterError(
            f"flush: expected a number of rows, a timedelta, or None, got {flush!r}; pass flush=10_000"
        )


# Parameters are kept when they are set, in two slots that are written in turn. To replace the manifest takes
# milliseconds, and some learners set `beta` before each batch.
class Settings:
    """The parameters of sampler and view of a replay in files, kept whenever one is set.

    They are part of what a batch's number means, so a kill must not take back an assignment that has returned. The
    manifest has them as of the last flush. Here they are in two slots, written in turn, so that a kill leaves one of
    them whole: a number, the length of a text, the checksum of both and of the text, and the text.

    Args:
        words: uint8 ``[2, BYTES]``, in a file.
    """

    BYTES = 4096
    _HEAD = struct.Struct("<qq")
    _CHECK = struct.Struct("<I")

    def __init__(self, words: Array) -> None:
        self._slots = words
        self._number, text = max((self._read(slot) for slot in words), default=(-1, b""))
        self.text: bytes = text
        """The text that was kept last. It is empty if none was, or if the last one was too long for a slot."""

    def _read(self, slot: Array) -> tuple[int, bytes]:
        """Number and text of a slot; (-1, b"") if it is not whole."""
        raw = slot.tobytes()
        number, length = self._HEAD.unpack_from(raw)
        begin = self._HEAD.size + self._CHECK.size
        text = raw[begin : begin + length] if 0 <= length <= self.BYTES - begin else b""
        whole = number >= 0 and self._CHECK.unpack_from(raw, self._HEAD.size) == (self._sum(number, text),)
        return (number, text) if whole and len(text) == length else (-1, b"")

    def _sum(self, number: int, text: bytes) -> int:
        return zlib.crc32(text, zlib.crc32(self._HEAD.pack(number, len(text)) + b"relive/s"))

    def keep(self, text: bytes) -> bool:
        """Keep a text. False if it is too long: then an empty one is kept."""
        fits = self._HEAD.size + self._CHECK.size + len(text) <= self.BYTES
        text = text if fits else b""
        if text != self.text or self._number < 0:
            number = self._number + 1
            raw = self._HEAD.pack(number, len(text)) + self._CHECK.pack(self._sum(number, text)) + text
            # the other slot than the last: a kill in between leaves that one whole
            self._slots[number & 1, : len(raw)] = np.frombuffer(raw, np.uint8)
            self._number, self.text = number, text  # after the slot: a call that is broken off writes it again
        return fits


# -- marks ----------------------------------------------------------------------------------------------------

NEWEST = 3
"""How many numbers a mark has of each env's newest row: stamp, step and order."""


MOST_SMALL = 64
"""The most numbers of one of a mark's small arrays."""


_LENGTH = struct.Struct("<I")


class FlushMark(NamedTuple):
    """The cursors of a replay at a moment when all of its rows were on the disk."""

    state: Ints
    """``[N, 4]``, as :class:`relive.ring.Ring` has it."""
    counters: Ints
    """``[9]``."""
    newest: Ints
    """``[N, 3]``: stamp, step and order of each env's newest row, which the next step changes."""
    dead: Ints
    """``[N]``: rows of each env below this number may have been overwritten since."""
    small: dict[str, list[float]]
    """Further arrays by name, of a few numbers each."""

    def encode(self, kind: Kind, where: list[object]) -> bytes:
        """The mark as bytes, with the ``kind`` of event and with ``where``, which identifies the boot and the files."""
        head = {"kind": kind, "where": where, "num_envs": len(self.state), "small": self.small}
        text = json.dumps(head, allow_nan=False).encode()
        arrays = (self.state, self.counters, self.newest, self.dead)
        return b"".join([_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(x, "<i8").tobytes() for x in arrays)])

    @staticmethod
    def decode(payload: bytes, num_envs: int) -> tuple[FlushMark, str, list[object]]:
        """The mark, the kind of event, and where it happened, as :meth:`encode` takes them.

        Raises:
            FileFormatError: these bytes are not a mark of a ring of ``num_envs`` envs.
        """
        try:
            (length,) = _LENGTH.unpack_from(payload)
            head = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
            if set(head) != {"kind", "where", "num_envs", "small"} or head["num_envs"] != num_envs:
                raise ValueError(shown(head))
            small: dict[str, Any] = head["small"]
            if not all(isinstance(x, list) and len(cast("list[object]", x)) <= MOST_SMALL for x in small.values()):
                raise ValueError(shown(small))
            if head["kind"] not in ("open", "flush", "close") or not isinstance(head["where"], list):
                raise ValueError(shown(head))
            # a copy, native: what is read from the payload is little-endian and cannot be written to
            words = np.frombuffer(payload, "<i8", offset=_LENGTH.size + length).astype(np.int64)
            sizes = num_envs * COLUMNS, COUNTERS, num_envs * NEWEST, num_envs
            if len(words) != sum(sizes):
                raise ValueError(f"{len(words)} numbers for {sum(sizes)}")
        except (ValueError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise FileFormatError(f"the journal's last record makes no sense ({error!s:.200})") from error
        state, counters, newest, dead = np.split(words, np.cumsum(sizes)[:-1])
        arrays = state.reshape(num_envs, COLUMNS), counters, newest.reshape(num_envs, NEWEST), dead
        return FlushMark(*arrays, small), head["kind"], head["where"]


def newest_of(packed: Array, rows: int, state: Ints) -> Ints:
    """Stamp, step and order ``[N, 3]`` of the newest row of each env, zeros if it has none, as marks have them.

    The bookkeeping of a row is in its last 16 bytes: stamp (int64), step and order (int32 each).
    """
    heads = state[:, HEAD]
    # the newest row has number head - 1; without a row that is -1, whose place is read and then blanked
    last = packed[np.arange(len(heads)) * rows + (heads - 1) % rows, -16:]
    stamps, others = last[:, :8].copy().view(np.int64), last[:, 8:].copy().view(np.int32)
    newest_rows = np.concatenate([stamps, others.astype(np.int64)], axis=1)
    newest_rows[heads <= 0] = 0
    return newest_rows


# -- opening after another process ----------------------------------------------------------------------------


def recover(allocator: FileAllocator, num_envs: int, rows: int) -> tuple[FlushMark, dict[str, object]]:
    """Make ready the files that another process left, before anything uses them.

    After a clean end, the files are as the journal says. If only the process died, the files have everything that it
    wrote, and the ring takes back the call that was broken off. After a power cut, or in a copy of the directory, pages
    of several times may be mixed. Then the ring goes back to the last flush.

    Returns:
        the mark of the last flush, and the settings since then, if there are any.

    Raises:
        FileFormatError: the files contradict the journal.
    """
    mark, kind, where = last_mark(allocator, num_envs, rows)
    state = allocator.take("state", (num_envs, COLUMNS), np.int64)
    counters = allocator.take("counters", (COUNTERS,), np.int64)
    packed: Any = allocator.existing("rows")
    if kind == "close":
        if not (np.array_equal(state, mark.state) and np.array_equal(counters, mark.counters)):
            raise damaged(
                allocator.directory.path / "journal", "the cursors that it closed with", "files of another time"
            )
        _require_unmixed(newest_of(packed, rows, mark.state), mark.newest)
        return mark, {}
    allocator.died = True  # the ring takes back what was broken off, and ends the episodes
    if is_same_boot(allocator, where):
        return mark, settings_since_flush(allocator)
    there = mark.dead < mark.state[:, HEAD]  # the next step changes the stamp of the newest row, nothing else
    _require_unmixed(newest_of(packed, rows, mark.state)[there, 1:], mark.newest[there, 1:])
    return_to_mark(allocator, mark, rows)
    return mark, {}


def last_mark(allocator: FileAllocator, num_envs: int, rows: int) -> tuple[FlushMark, str, list[object]]:
    """The last mark of the journal, with its kind and where it was made, as :meth:`FlushMark.decode` gives them.

    Raises:
        FileFormatError: the files are not those of so many rows, or the journal has no mark.
    """
    directory = allocator.directory
    directory.check()  # before anything changes
    packed = allocator.existing("rows")
    if packed is None or packed.ndim != 2 or len(packed) != num_envs * rows:
        raise damaged(directory.path / MANIFEST, f"{num_envs * rows} rows", None if packed is None else packed.shape)
    if directory.last is None:
        raise damaged(directory.path / "journal", "a record", "none")
    return FlushMark.decode(directory.last.payload, num_envs)


def is_same_boot(allocator: FileAllocator, where: list[object]) -> bool:
    """True if a mark was made on this boot of the machine, in these files: then they show all that was written."""
    here = whereabouts(allocator)
    return where == here and bool(here[0])  # a system without a name for its boots may have had a power cut


def whereabouts(allocator: FileAllocator) -> list[object]:
    """The identity of this boot of the machine and of these files. A copy of a directory has other files."""
    status = os.fstat(allocator.directory.memory("state").descriptor)
    return [_boot(), status.st_dev, status.st_ino]


@cache
def _boot() -> str:
    """The system's name for this boot; empty if it gives none."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


# Leaves are computed from errors, and all nodes above them anew: a tree is never trusted where it is in doubt. A window
# that the death of a process completes is new, and gets the priority of new transitions, not what its row had held
# before.
def return_to_mark(allocator: FileAllocator, mark: FlushMark, rows: int) -> None:
    """Put the cursors back to a mark, and note for the ring which rows may have been overwritten since."""
    num_envs = len(mark.state)
    allocator.take("state", (num_envs, COLUMNS), np.int64)[:] = mark.state
    allocator.take("counters", (COUNTERS,), np.int64)[:] = mark.counters
    _restore_small(allocator, mark.small)
    if (drained := allocator.existing(DRAINED)) is not None:
        drained[:, MARK] = VOID  # they are about heads that are no more
    # a kill on the way leads here again: the journal gets a record of this boot only afterwards
    heads = mark.state[:, HEAD]
    some = np.flatnonzero(heads > 0)  # envs with a newest row
    places = some * rows + (heads[some] - 1) % rows
    # Row k + rows overwrites row k: with 1,000 rows and dead rows below 4,256, the rows up to 5,255 may have been
    # written. Laps after the one in which all rows were overwritten change nothing further.
    after = np.minimum(mark.dead, heads) + rows
    undo = Undo(allocator.take("undo", (undo_words(num_envs, rows),), np.int64))
    undo.note_mark(mark.state, mark.counters, after, places, mark.newest[some])


def _restore_small(allocator: FileAllocator, small: Mapping[str, list[float]]) -> None:
    for name in SMALL:
        array = allocator.existing(name)
        if array is None:
            continue
        if len(small.get(name, [])) != len(array):
            raise FileFormatError(f"the journal's last record has {shown(small.get(name))} for {name!r}")
        array[:] = small[name]
    noted = allocator.existing("errors.undo")
    if noted is not None:
        noted[:] = 0.0  # a note of priorities that were being set, of another time than these rows


# `cp` beside a writer may take rows before a flush and the journal after it. Step and order of each env's newest row
# have to be those of the mark.
def _require_unmixed(newest: Ints, known: Ints) -> None:
    """Refuse rows of another time than the cursors. Only the bookkeeping of each env's newest row is compared.

    Raises:
        FileFormatError: the rows are of another time.
    """
    if not np.array_equal(newest, known):
        raise FileFormatError("the newest rows are not those that the journal knows: files of several times are mixed")


def settings_since_flush(allocator: FileAllocator) -> dict[str, object]:
    """The settings that were kept since the last flush; they take the place of those in the manifest's content.

    Raises:
        FileFormatError: their array has another size.
        InvariantError: they make no sense.
    """
    words = allocator.existing(SETTINGS)
    if words is None:
        return {}
    if words.shape != (2, Settings.BYTES) or words.dtype != np.uint8:
        raise damaged(allocator.directory.path / MANIFEST, "two slots of settings", f"{words.dtype} {words.shape}")
    settings: dict[str, object] = json.loads(Settings(words).text or b"{}")
    if type(settings) is not dict or settings.keys() - {"sampler", "view"}:
        raise InvariantError("settings: expected those of a sampler and a view")
    return settings


def open_arguments(
    allocator: MappedAllocator, wanted: Mapping[str, Any], sampler: AnySampler | None, view: View | None
) -> tuple[ReplayArguments, int, FlushMark | None]:
    """The constructor's arguments of the replay to open, the batches before its seed, and the mark of its last flush.

    ``wanted`` has arguments by name; None is the default or, if a replay is there, what that has. Without a replay, the
    mark is None.

    Raises:
        FieldError: a new replay lacks an argument.
        SchemaError, ParameterError: the replay that is there differs from an argument.
        FileFormatError: the files are damaged, or contradict each other.
    """
    directory, content = allocator.directory, allocator.directory.content
    if content is None:
        missing = [name for name in ("schema", "capacity") if wanted[name] is None]
        if missing:
            raise FieldError(
                f"'{directory.path}': expected {' and '.join(missing)}, as no replay is there yet; pass "
                "open(path, schema, capacity)"
            )
        given: Any = {name: value for name, value in wanted.items() if value is not None}
        return given | {"sampler": sampler, "view": view}, 0, None
    with contradictions(directory.path, ParameterError, SchemaError):
        _require_same(directory.path, ring_arguments(content, None, sampler, view), wanted)
    with contradictions(directory.path):
        first = whole(content, "first")
        mark, settings = recover(allocator, whole(content, "num_envs"), whole(content, "rows_per_env"))
    with contradictions(directory.path, ParameterError, SchemaError):
        arguments = ring_arguments(content | settings, None, sampler, view)
    with contradictions(directory.path):
        directory.journal.append(mark.encode("open", whereabouts(allocator)))  # before anything changes
    return arguments, first, mark


def _require_same(path: pathlib.Path, kept: ReplayArguments, wanted: Mapping[str, Any]) -> None:
    """Refuse arguments that differ from those of the replay that is there.

    Raises:
        SchemaError, ParameterError: names the first argument that differs.
    """
    there = dict(kept.items())
    for name, value in wanted.items():
        got = there[name]
        same = value == got
        if name == "capacity" and is_count(value):
            same = value // kept["num_envs"] * kept["num_envs"] == got
        if value is not None and not same:
            kind = SchemaError if name == "schema" else ParameterError
            raise kind(
                f"'{path}': the replay there has {name}={shown(got, 200)}, got {shown(value, 200)}; leave {name} out, "
                "or give another path"
            )


# -- the state of a sampler that is not in the mapped files ---------------------------------------------------

SAMPLER = "sampler"
"""The directory with the save of a sampler's state, inside that of the replay."""


def _is_in_files(sampler: OwnSampler | None) -> bool:
    """True for samplers that have no state outside the replay's files. One of the user may have, whatever it is."""
    return sampler is not None and is_own(sampler) and sampler.state_in_files


def write_sampler(directory: MappedDirectory, ring: Ring, sampler: OwnSampler) -> None:
    """Save the state of a sampler, if it has any that is not in the replay's files.

    Raises:
        OSError: the disk is full, or fails. Then the save before is still there.
    """
    parts = parts_of(sampler)
    within = next((depth for depth, part in enumerate(parts) if _is_in_files(part)), None)
    if within == 0:
        return
    arrays, content = ring_state(ring, sampler, {"run": directory.run})
    if within is not None:
        inside = "inner." * within
        arrays = {name: array for name, array in arrays.items() if not name.startswith(f"sampler.{inside}")}
        state = {name: value for name, value in content["sampler_state"].items() if not name.startswith(inside)}
        content |= {"sampler_state": state, "sampler_rows": []}
    _refuse_link(directory.path / SAMPLER)
    files.write(directory.path / SAMPLER, arrays | {"span": np.stack(ring.span)}, content)


def read_sampler(directory: MappedFiles, ring: Ring, sampler: OwnSampler) -> None:
    """Give a sampler the state that was saved last, if the sampler is of the same kind.

    Rows may have been added and overwritten since that save.

    Raises:
        FileFormatError: the save is damaged.
    """
    if _is_in_files(sampler):
        return
    _refuse_link(directory.path / SAMPLER)
    try:
        save = files.Save(directory.path / SAMPLER)
    except NoSaveError:
        return
    with save:
        content = save.content
        if content.get("run") != directory.run or kinds(content.get("sampler")) != kinds(describe(sampler)):
            return
        tensors = save.read()
        span = fitting(tensors, "span", (2, ring.num_envs), torch.int64).numpy()
    # rows were added and overwritten since: only those that are live still get their entries
    saved = Span(span[0], np.maximum(span[0], span[1]))
    sampler.load_state_dict(sampler_state(ring, content, tensors, saved, checked=type(sampler) in PARAMETERS))


def _refuse_link(path: pathlib.Path) -> None:
    """Refuse a symbolic link, which could lead to a save elsewhere.

    Raises:
        FileFormatError: the path is a symbolic link.
    """
    if path.is_symlink():
        raise FileFormatError(f"'{path}': expected a directory, got a symbolic link; copy the replay with its files")


# -- a copy beside the process that writes --------------------------------------------------------------------

TRIES = 5
"""How often the copy is begun again because the files changed in a way that spoiled it."""


PAUSE_SECONDS = 1.0
"""Seconds to wait for a moment at which no change is under way. A process that died in a change leaves it for ever."""


class _SpoiledError(Exception):
    """The files have changed while they were copied, so that the copy is of no moment."""


def copied(cls: type[T], path: str | os.PathLike[str]) -> T:
    """A replay of the class ``cls`` with what the files of a directory hold now, in private memory.

    The files stay as they are, and no lock is taken: another process may open them, and write to them. Rows that it
    overwrites during the copy are left out. As after a kill, the episodes under way end.

    A sampler or view that a user wrote is not in the files. A uniform one of single transitions takes its place.

    Raises:
        NoSaveError: the directory holds no replay.
        FileFormatError: the directory holds something else, or the files are damaged or of several times.
        LifecycleError: another process changes the files so fast that no copy is whole.
        ParameterError: less memory is free than the rows take.
        OSError: a file may not be read.
    """
    for _ in range(TRIES):
        directory = MappedCopy(path)
        try:
            return _copied(cls, directory)
        except _SpoiledError:
            continue
        except (FileFormatError, OSError):
            if not _reopened(directory):
                raise
        finally:
            directory.release()
    raise LifecycleError(
        f"'{path}': another process changes the files too fast to copy them; try again, or look at the replay in that "
        "process"
    )


def _copied(cls: Any, directory: MappedCopy) -> Any:
    allocator, content = FileAllocator(directory), cast("dict[str, object]", directory.content)
    with contradictions(directory.path):
        arguments = _arguments(content)
        num_envs = arguments["num_envs"]
        rows = arguments["capacity"] // num_envs
        _, kind, where = last_mark(allocator, num_envs, rows)
        alive = kind != "close" and is_same_boot(allocator, where)  # else the files are still: the last mark counts
        if alive:
            arguments = _arguments(content | settings_since_flush(allocator))
        state: Ints = allocator.take("state", (num_envs, COLUMNS), np.int64)
        allocator.take("counters", (COUNTERS,), np.int64)
        allocator.take("undo", (undo_words(num_envs, rows),), np.int64)
        now = _mark_now(directory, rows) if alive else None
    # the mark comes first and the dead rows last: what was overwritten during the copy is known then
    _take_rows(directory, num_envs, rows, (state if now is None else now.state)[:, HEAD])
    with contradictions(directory.path):
        if now is None:
            _require_unchanged(directory)
            recover(allocator, num_envs, rows)
        else:
            allocator.died = True
            return_to_mark(allocator, now._replace(dead=_dead_now(directory, rows, now)), rows)
        buffer = cls(**arguments, store=allocator)
        read_sampler(directory, buffer._ring, buffer._sampler)
        buffer._ring.commit()
    return buffer


def _arguments(content: Mapping[str, object]) -> ReplayArguments:
    """The constructor's arguments, with a sampler and a view in the place of a user's own."""
    return ring_arguments(content, None, *stand_ins(content))


def stand_ins(content: Mapping[str, object]) -> tuple[AnySampler | None, View | None]:
    """A sampler and a view in the place of a user's own, which is not in files; None in the place of relive's."""
    sampler = Uniform() if content.get("sampler") is None else None
    return sampler, Transition() if content.get("view") is None else None


def _mark_now(directory: MappedCopy, rows: int) -> FlushMark | None:
    """The mark of a replay as another process has it at this moment.

    Cursors only grow, so two looks that find the same numbers, and no change under way, saw one state.

    Returns:
        None if a change stays under way, as where the process died in it.
    """
    state, counters, undo = (directory.live(name) for name in ("state", "counters", "undo"))
    packed, until = directory.live("rows"), time.monotonic() + PAUSE_SECONDS
    while time.monotonic() < until:
        # first the kind of the note, then the cursors; and after all else both again
        idle, mine, counts = undo[UNDO_KIND] == UNDO_NONE, state.copy(), counters.copy()
        newest = newest_of(packed, rows, mine)
        small = {name: directory.live(name).tolist() for name in SMALL if name in directory.known}
        if idle and undo[UNDO_KIND] == UNDO_NONE and (counters == counts).all() and (state == mine).all():
            return FlushMark(mine, counts, newest, np.zeros(len(mine), np.int64), small)
        time.sleep(1e-4)
    return None


def _take_rows(directory: MappedCopy, num_envs: int, rows: int, heads: Ints) -> None:
    """Copy into private memory all that the live rows hold, and every array of the ring and the sampler.

    Raises:
        ParameterError: less memory is free.
    """
    known = directory.known.items()
    pairs = {name: (directory.take(name, spec.shape, spec.dtype), directory.live(name)) for name, spec in known}
    by_row = [pair for name, pair in pairs.items() if name in ("rows", "errors") or name.startswith("block.")]
    counts = np.clip(heads, 0, rows).tolist()  # a ring that is not full has its rows at its first places
    size = sum(sum(counts) * (mine.nbytes // len(mine)) for mine, _ in by_row)
    require_free(size, torch.device("cpu"), f"a copy of '{directory.path}'", "look at it on a larger machine")
    for mine, live in by_row:
        for e, count in enumerate(counts):
            mine[e * rows : e * rows + count] = live[e * rows : e * rows + count]
    for name, (mine, live) in pairs.items():
        if name not in ("rows", "errors") and not name.startswith("block."):
            mine[...] = live


def _dead_now(directory: MappedCopy, rows: int, mark: FlushMark) -> Ints:
    """Rows of each env below these numbers ``[N]`` may have been overwritten since the mark.

    A change is noted before it overwrites anything, and counted before its note goes. So the note is read first.

    Raises:
        _SpoiledError: these are all rows, or the replay was made again meanwhile.
    """
    undo, before = directory.live("undo")[: first_row(len(mark.state))], None
    while before is None or (before != undo).any():  # until it was not written to while it was copied
        before = undo.copy()
    heads = directory.live("state")[:, HEAD].copy()
    if (heads < mark.state[:, HEAD]).any():
        raise _SpoiledError
    if before[UNDO_KIND] != UNDO_NONE:
        # the note may be half written: its numbers are tested before they are used
        entries = env_entries(before, min(max(int(before[UNDO_ENVS]), 0), len(heads)))
        known = entries[(entries[:, 0] >= 0) & (entries[:, 0] < len(heads))]
        np.maximum.at(heads, known[:, 0], known[:, UNDO_AFTER])
    # row k overwrites row k - rows
    dead = np.minimum(heads - rows, mark.state[:, HEAD])
    if (mark.state[:, HEAD] > 0).any() and (dead == mark.state[:, HEAD]).all():
        raise _SpoiledError
    return dead


def _require_unchanged(directory: MappedCopy) -> None:
    """Require that nothing has changed since the files were opened, of a replay that no process seemed to have open.

    Raises:
        _SpoiledError: something has.
    """
    for name in ("undo", "counters", "state"):
        spec = directory.spec(name)
        if spec is not None and (directory.take(name, spec.shape, spec.dtype) != directory.live(name)).any():
            raise _SpoiledError
    if _reopened(directory):
        raise _SpoiledError


def _reopened(directory: MappedCopy) -> bool:
    """True if the journal has another last record than when the files were opened here."""
    try:
        return directory.record().number != directory.last.number
    except (FileFormatError, OSError):
        return False
