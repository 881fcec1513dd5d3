"""Durable: keeps a replay in files safe: decides when it is on the disk, and repairs it after a kill or a power cut."""

from __future__ import annotations

import json
import os
import pathlib
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from struct import Struct
from typing import Any, Literal, NamedTuple, cast
from weakref import ref

import numpy as np
from torch.utils.data import get_worker_info

from ..errors import FileFormatError, InvariantError, ParameterError
from ..files.format import MANIFEST, damaged
from ..kernels.reference.priorities import key as stream
from ..kernels.tables import COLUMNS, COUNTERS, HEAD
from ..memory.mapped import DRAINED, SETTINGS, FileKeeper, MappedKeeper
from ..parameters import is_count
from ..printable import shown
from ..ring.ring import Ring, note_mark, undo_words
from ..samplers.contract import Sampler
from ..steps.arrays import Array, Ints

__all__ = [
    "AFTER",
    "BOOKKEEPING",
    "ENVS",
    "MARK",
    "SMALL",
    "SOURCE",
    "VOID",
    "Drawn",
    "Durable",
    "FlushPolicy",
    "Kind",
    "Mark",
    "Progress",
    "ProgressSlots",
    "Settings",
    "bookkeeping",
    "go_back",
    "is_here",
    "kept_settings",
    "last_mark",
    "mark_of",
    "newest_of",
    "recover",
    "require_policy",
    "stream_of",
    "whereabouts",
]


_SLOT = Struct("5q")


class ProgressSlots:
    """The counts of a replay in files: two slots, written in turn, so that a kill leaves one of them whole.

    A slot is its number, the three counts, and its number again. A slot whose two numbers differ is not whole. The
    whole slot with the larger number counts.

    Args:
        words: int64 ``[10]``, in a file.
    """

    WORDS = 10

    def __init__(self, words: Any) -> None:
        self._bytes, self._slots = memoryview(words).cast("B"), (0, _SLOT.size)
        whole = [slot for slot in map(self._read, self._slots) if slot[0] == slot[-1]]
        self._number, *counts, _ = max(whole, default=(-1, 0, 0, 0, -1))
        if not whole or min(self._number, *counts) < 0:
            raise InvariantError(f"progress: {[*map(self._read, self._slots)]} are not two slots of counts")
        self.on_seed: Callable[[], object] = bool
        """Called when the seed was set. The seed is kept elsewhere."""
        self.counts: list[int] = counts
        """Batches drawn, rows drawn and late priorities, as they were when this was made."""

    def _read(self, at: int) -> tuple[int, ...]:
        return _SLOT.unpack_from(self._bytes, at)

    def write(self, draws: int, sampled: int, late: int) -> None:
        """Keep these counts."""
        number = self._number = self._number + 1
        _SLOT.pack_into(self._bytes, self._slots[number & 1], number, draws, sampled, late, number)


class Drawn(NamedTuple):
    """A batch that was drawn ahead of its learner."""

    number: int
    """Batch number t of its replay."""
    update: int
    """Its number in its round of updates, from 1."""
    rows: int
    """B."""
    draw_state: Any
    """The sampler's :meth:`~relive.samplers.contract.Sampler.draw_state` before the draw."""
    completed: int
    """How many transitions had been completed when it was drawn."""
    batch: Any
    """The batch as the view read it."""


@dataclass(slots=True)
class Progress:
    """Counts of what a replay has drawn, and its seed. Saves contain all of it."""

    seed: int
    """The seed of the batches."""
    first: int = 0
    """How many batches were drawn before this seed was set."""
    draws: int = 0
    """Batches drawn."""
    sampled: int = 0
    """Rows drawn."""
    late: int = 0
    """Priorities that came after their transition was overwritten."""
    slots: ProgressSlots | None = None
    """Where a replay in files keeps the counts for the next process; None for any other replay."""
    ahead: deque[Drawn] = field(default_factory=deque[Drawn])
    """Batches that wait for their learner, in order. They are in ``draws`` and ``sampled`` already."""

    @property
    def draws_taken(self) -> int:
        """Batches drawn, without those that wait for their learner."""
        return self.draws - len(self.ahead)

    @property
    def rows_taken(self) -> int:
        """Rows drawn, without those of batches that wait for their learner."""
        return self.sampled - sum(drawn.rows for drawn in self.ahead)

    @property
    def counts(self) -> list[int]:
        """The counts for a save: ``draws``, ``sampled`` and ``late``, without batches that can be drawn again."""
        undone = (self.draws_taken, self.rows_taken) if self._is_undoable else (self.draws, self.sampled)
        return [int(count) for count in (*undone, self.late)]  # batch sizes may have been NumPy's

    def keep(self) -> None:
        """Keep the counts of a replay in files, so that its next process goes on with the batches that nobody took."""
        if self.slots is not None:
            self.slots.write(self.draws_taken, self.rows_taken, self.late)

    @contextmanager
    def undone(self, sampler: Sampler) -> Generator[None]:
        """Within this context, the sampler is as if it had drawn nothing ahead."""
        if not self._is_undoable:
            yield
            return
        now = sampler.draw_state()
        try:
            sampler.undo_draws(self.ahead[0].draw_state)
            yield
        finally:
            sampler.undo_draws(now)

    def undo(self, sampler: Sampler) -> None:
        """Undo the draws ahead, so that the next batches are those that nobody took.

        If other batches were drawn in between, this is not possible, and the numbers of all of them are used up.
        """
        if self._is_undoable:
            sampler.undo_draws(self.ahead[0].draw_state)
            self.draws, self.sampled = self.draws_taken, self.rows_taken
        self.ahead.clear()

    @property
    def _is_undoable(self) -> bool:
        """Whether nothing else was drawn since the first batch that waits."""
        return len(self.ahead) > 0 and self.ahead[0].number == self.draws_taken


def stream_of(seed: int) -> int:
    """The seed of the batches. Each worker of a ``DataLoader`` has a copy of the buffer, and a seed of its own."""
    worker = get_worker_info()
    return seed if worker is None else stream(seed, worker.seed)


Kind = Literal["open", "flush", "close"]


BOOKKEEPING = 3
"""How many numbers the bookkeeping of a row has: stamp, step and order."""
_LENGTH = struct.Struct("<I")


class Mark(NamedTuple):
    """The cursors of a replay at a moment when all of its rows were on the disk."""

    state: Ints
    """``[N, 4]``, as :class:`relive.ring.Ring` has it."""
    counters: Ints
    """``[9]``."""
    newest: Ints
    """``[N, 3]``: stamp, step and order of each env's newest row, which the next step changes."""
    dead: Ints
    """``[N]``: rows of each env below this number may have been overwritten since."""
    small: dict[str, list[Any]]
    """Further arrays by name, of a few numbers each."""

    def encode(self, kind: Kind, where: list[Any]) -> bytes:
        """The mark as bytes, with the ``kind`` of event and with ``where``, which identifies the boot and the files."""
        facts = {"kind": kind, "where": where, "num_envs": len(self.state), "small": self.small}
        text = json.dumps(facts, allow_nan=False).encode()
        arrays = (self.state, self.counters, self.newest, self.dead)
        return b"".join([_LENGTH.pack(len(text)), text, *(np.ascontiguousarray(x, "<i8").tobytes() for x in arrays)])

    @staticmethod
    def decode(payload: bytes, num_envs: int) -> tuple[Mark, str, list[Any]]:
        """The mark, the kind of event, and where it happened, as :meth:`encode` takes them.

        Raises:
            FileFormatError: these bytes are not a mark of a ring of ``num_envs`` envs.
        """
        try:
            (length,) = _LENGTH.unpack_from(payload)
            facts: Any = json.loads(payload[_LENGTH.size : _LENGTH.size + length])
            if set(facts) != {"kind", "where", "num_envs", "small"} or facts["num_envs"] != num_envs:
                raise ValueError(shown(facts))
            small = cast("dict[str, Any]", facts["small"])
            if not all(isinstance(x, list) and len(cast("list[Any]", x)) <= 64 for x in small.values()):
                raise ValueError(shown(small))
            if facts["kind"] not in ("open", "flush", "close") or not isinstance(facts["where"], list):
                raise ValueError(shown(facts))
            words = np.frombuffer(payload, "<i8", offset=_LENGTH.size + length).astype(np.int64)
            sizes = num_envs * COLUMNS, COUNTERS, num_envs * BOOKKEEPING, num_envs
            if len(words) != sum(sizes):
                raise ValueError(f"{len(words)} numbers for {sum(sizes)}")
        except (ValueError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise FileFormatError(f"the journal's last record makes no sense ({error!s:.200})") from error
        state, counters, newest, dead = np.split(words, np.cumsum(sizes)[:-1])
        arrays = state.reshape(num_envs, COLUMNS), counters, newest.reshape(num_envs, BOOKKEEPING), dead
        return Mark(*arrays, small), facts["kind"], facts["where"]


def mark_of(ring: Ring, small: dict[str, list[Any]]) -> Mark:
    """The mark of a ring as it is. Only rows that are gone are declared dead."""
    return Mark(ring.state.copy(), ring.counters.copy(), bookkeeping(ring, ring.heads - 1), ring.oldest, small)


def bookkeeping(ring: Ring, numbers: Ints) -> Ints:
    """Stamp, step and order ``[N, 3]`` of the rows with these numbers, one of each env; zeros for numbers below 0."""
    places = np.arange(ring.num_envs) * ring.rows + numbers % ring.rows
    found = np.stack([ring.stamp[places], ring.step[places], ring.order[places]], axis=1).astype(np.int64)
    found[ring.state[:, HEAD] == 0] = 0
    return found


FlushPolicy = int | timedelta | None
"""After how many rows, or how much time, a replay in files flushes by itself; None is never."""


SOURCE, AFTER, MARK, ENVS = range(4)
"""The words of a note of drained steps: where they come from, the number of the first step after the piece, the sum of
the heads of the envs that get it before it was stored, and how many envs these are, from the note's own env on."""


VOID = -1
"""The MARK of a note that says nothing: its piece was never stored, or another note is being written. A note that was
never written is all zeros, and no source has the number 0."""


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
        self.settings = Settings(self._later(SETTINGS, (2, Settings.BYTES), np.uint8))
        self._drained: Ints | None = keeper.kept(DRAINED)
        if self._drained is not None:
            self._void()

    def drained(self) -> Ints:
        """The notes of steps that came from elsewhere, ``[N, 4]``: one for each source, in the row of its first env.

        A note is written before its piece is stored. If a kill follows, the heads say whether the piece is in.
        """
        if self._drained is None:
            self._drained = self._later(DRAINED, (self.ring.num_envs, 4), np.int64)
        return self._drained

    def _later(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array that a replay which is there may lack. Then it is made, and the manifest names it."""
        directory = self.keeper.directory
        array = self.keeper.take(name, shape, dtype)
        if directory.content is not None and not directory.has(name):
            directory.commit(directory.content)
        return array

    def _void(self) -> None:
        """Drop the notes of pieces that are not in, before other steps move the heads."""
        assert self._drained is not None
        for env, (mark, count) in enumerate(self._drained[:, [MARK, ENVS]].tolist()):
            if mark == int(self.ring.heads[env : env + max(count, 0)].sum()):
                self._drained[env, MARK] = VOID

    def _marked(self) -> Mark:
        """The mark of the ring as it is, with the oldest rows in reserve."""
        taken = {name: self.keeper.kept(name) for name in SMALL}
        mark = mark_of(self.ring, {name: array.tolist() for name, array in taken.items() if array is not None})
        return mark._replace(dead=np.maximum(mark.dead, self.ring.heads - self.ring.rows + self._in_reserve()))

    def _in_reserve(self) -> int:
        rows = self.ring.rows
        return max(rows // RESERVE_SHARE, min(RESERVE_LEAST, rows // 2))

    def begin(self) -> None:
        """Append the first record to the journal of a new replay."""
        self._note(self._mark, "open")

    def _note(self, mark: Mark, kind: Kind) -> None:
        """Append a mark to the journal, and go by it from then on."""
        self.keeper.directory.journal.append(mark.encode(kind, whereabouts(self.keeper)))
        # Only now may the ring overwrite the rows that the record declares dead, and only after that does this mark
        # say so. If the disk fails or an exception comes in between, the next call writes the record again.
        self.ring.arrays.reserve[:] = mark.dead
        self._mark = mark

    def flush(self, kind: Kind = "flush") -> None:
        """Write everything through to the disk. Then append a record of it to the journal."""
        self.keeper.directory.flush()
        self._note(self._marked(), kind)
        self._rows, self._flushed = 0, time.monotonic()

    def _renew(self, count: int) -> bool:
        """Declare more of the oldest rows dead, because ``count`` new rows come. False if enough are dead already."""
        wanted = self.ring.heads - self.ring.rows + 2 * count + self._in_reserve()
        if (wanted <= self._mark.dead).all():
            return False
        self._note(self._mark._replace(dead=np.maximum(self._mark.dead, wanted)), "flush")
        return True

    def is_due(self, count: int) -> bool:
        """Whether it is time to flush, after ``count`` more rows were added."""
        policy = self._policy
        self._rows += count
        if isinstance(policy, timedelta):
            return time.monotonic() - self._flushed >= policy.total_seconds()
        return policy is not None and self._rows >= policy


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

    def __init__(self, words: Any) -> None:
        self._slots = words
        self._number, self.text = max((self._read(slot) for slot in words), default=(-1, b""))
        """The text that was kept last. It is empty if none was, or if the last one was too long for a slot."""

    def _read(self, slot: Any) -> tuple[int, bytes]:
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
            self._slots[number & 1, : len(raw)] = np.frombuffer(raw, np.uint8)
            self._number, self.text = number, text  # after the slot: a call that is broken off writes it again
        return fits


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


def kept_settings(keeper: FileKeeper, kind: str, where: list[Any]) -> bytes:
    """The settings since the last flush, as text; empty if those of the manifest are the ones to use.

    Args:
        keeper: the files.
        kind: of the journal's last record.
        where: the same record's.

    Raises:
        FileFormatError: their array has another size.
    """
    words = keeper.kept(SETTINGS)
    if kind == "close" or words is None or not is_here(keeper, where):
        return b""
    if words.shape != (2, Settings.BYTES) or words.dtype != np.uint8:
        raise damaged(keeper.directory.path / MANIFEST, "two slots of settings", f"{words.dtype} {words.shape}")
    return Settings(words).text


def recover(keeper: FileKeeper, num_envs: int, rows: int) -> tuple[Mark, bytes]:
    """Make ready the files that another process left, before anything uses them.

    After a clean end, the files are as the journal says. If only the process died, the files have everything that it
    wrote, and the ring takes back the call that was broken off. After a power cut, or in a copy of the directory, pages
    of several times may be mixed. Then the ring goes back to the last flush.

    Returns:
        the mark of the last flush, and :func:`kept_settings`.

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
        return mark, b""
    keeper.died = True
    if not is_here(keeper, where):
        there = mark.dead < mark.state[:, HEAD]  # the next step changes the stamp of the newest row, nothing else
        _require_unmixed(newest_of(packed, rows, mark.state)[there, 1:], mark.newest[there, 1:])
        go_back(keeper, mark, rows)
    return mark, kept_settings(keeper, kind, where)


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
    if (drained := keeper.kept(DRAINED)) is not None:
        drained[:, MARK] = VOID  # they are about heads that are no more
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
