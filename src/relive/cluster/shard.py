"""Shard: one ring of a replay that several processes hold together. Nothing here knows how its messages travel."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from math import prod
from operator import itemgetter
from pathlib import Path as FilePath
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batches import SequenceBatch, as_tensordict
from ..errors import FileFormatError, LifecycleError, ParameterError
from ..files import SaveHandle
from ..files.disk import Holder
from ..memory.layout import typed
from ..processes.lanes import Intake
from ..replay.buffer import ReplayBuffer
from ..replay.saving import load_extra
from ..samplers.prioritized import Prioritized
from ..samplers.uniform import Uniform
from ..steps.arrays import NUMPY_DTYPES, Array, as_host, numpy_dtype, numpy_view, torch_dtype
from ..steps.schema import Field, Path, Schema, descend, map_leaves
from .plan import Portion, Share

__all__ = [
    "Admission",
    "Allowance",
    "Block",
    "Chunk",
    "Home",
    "Ledger",
    "LedgerLog",
    "Origin",
    "Part",
    "Rank",
    "RingFiles",
    "SavedShard",
    "Shard",
    "ShardPlan",
    "Totals",
    "host_leaf",
    "joined",
    "joined_batch",
    "packed",
    "packed_batch",
    "require_shardable",
    "slot",
    "unpacked",
]


class Rank(NamedTuple):
    """The rank of a writer. If two writers claim one env, the writer of the higher rank has it."""

    number: int
    """One more than the number of the writer before it."""
    token: str
    """Drawn at random. It decides between two writers of the same number, which a failed shard may give twice."""


class Origin(NamedTuple):
    """Where a chunk of steps comes from."""

    rank: Rank
    envs: tuple[int, ...]
    """The envs of the shard that stepped. They are always the same for one writer."""
    start: int
    """How many steps of each env the writer sent before."""
    steps: int
    """How many steps of each env it sends now."""
    sure: int
    """How many steps of each env the shard has confirmed to the writer."""


class Admission(NamedTuple):
    """What to do with a chunk."""

    store: bool
    """Whether to store the chunk: it is the next one of its writer."""
    interrupt: bool
    """Whether the running episodes of its envs are interrupted: its first steps do not follow the last stored ones."""
    received: int
    """How many steps of each env the shard will have had from this writer after that."""


class Ledger:
    """Decides whether a chunk is the next one of its writer, and counts the steps that a failed shard has lost.

    A writer sends a chunk again until it is confirmed. So a chunk may come twice, and a later one before an earlier
    one. A shard that came back from its last commit has forgotten all later steps. Those steps are lost. They are
    counted, and no episode goes on over the gap.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Rank] = {}
        self._received: dict[str, int] = {}
        self.stored = 0
        """Steps that were ever stored."""
        self.lost = 0
        """Steps that were confirmed and are lost: they came after the commit from which the shard came back."""
        self.repeated = 0
        """Steps that came again and were left out."""

    def claim(self, envs: Sequence[int], token: str) -> Rank:
        """The rank of a new writer for these envs. The writers that had them before are refused from now on."""
        numbers = [self._owners[env].number for env in envs if env in self._owners]
        rank = Rank(1 + max(numbers, default=0), token)
        self._hand_over(envs, rank)
        return rank

    def admit(self, origin: Origin) -> Admission:
        """What to do with a chunk. Call :meth:`confirm` once it is stored.

        Raises:
            LifecycleError: a newer writer has one of its envs.
        """
        new = self._takes_over(origin)
        received = self._received.get(origin.rank.token, 0)
        gap = max(origin.sure - received, 0)  # steps that the shard confirmed once, and has forgotten since
        if new:
            self._hand_over(origin.envs, origin.rank)
        if gap:
            self.lost += gap * len(origin.envs)
            received = self._received[origin.rank.token] = origin.sure
        if origin.start < received:
            self.repeated += origin.steps * len(origin.envs)
            return Admission(False, bool(gap) or new, received)
        if origin.start > received:  # an earlier chunk is still on its way, or failed: the writer sends both again
            return Admission(False, bool(gap) or new, received)
        return Admission(True, bool(gap) or new, received + origin.steps)

    def confirm(self, origin: Origin) -> None:
        """Note that the steps of this chunk are stored."""
        self._received[origin.rank.token] = origin.start + origin.steps
        self.stored += origin.steps * len(origin.envs)

    def counts_after(self, origin: Origin) -> list[int]:
        """What :attr:`stored`, :attr:`lost` and :attr:`repeated` will be once a chunk is stored."""
        return [self.stored + origin.steps * len(origin.envs), self.lost, self.repeated]

    def adopt(self, origin: Origin, counts: Sequence[int]) -> None:
        """Note a chunk that the ring turned out to have. :meth:`counts_after` gave the ``counts`` before the chunk."""
        if any(self._owners.get(env) != origin.rank for env in origin.envs):
            self._hand_over(origin.envs, origin.rank)
        self.confirm(origin)
        self.stored, self.lost, self.repeated = counts

    def state(self) -> dict[str, Any]:
        """The whole ledger, for a save."""
        return {
            "owners": [[env, *rank] for env, rank in self._owners.items()],
            "received": dict(self._received),
            "counts": [self.stored, self.lost, self.repeated],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Ledger:
        """The ledger of a save."""
        ledger = cls()
        ledger._owners = {env: Rank(number, token) for env, number, token in state["owners"]}
        ledger._received = dict(state["received"])
        ledger.stored, ledger.lost, ledger.repeated = state["counts"]
        return ledger

    def _takes_over(self, origin: Origin) -> bool:
        """Whether the writer of this chunk gets its envs only now, because the shard has forgotten its claim.

        Raises:
            LifecycleError: a writer of a higher rank has one of the envs.
        """
        owners = [self._owners.get(env) for env in origin.envs]
        for env, owner in zip(origin.envs, owners, strict=True):
            if owner is not None and owner > origin.rank:
                raise LifecycleError(
                    f"env {env} of the shard has a newer writer, so the steps of the old one are refused; stop it, or "
                    "give each writer envs of its own"
                )
        return any(owner != origin.rank for owner in owners)

    def _hand_over(self, envs: Sequence[int], rank: Rank) -> None:
        self._owners |= dict.fromkeys(envs, rank)
        live = {owner.token for owner in self._owners.values()}
        self._received = {token: count for token, count in self._received.items() if token in live}


class LedgerLog:
    """Writes a ledger to numbered files in a directory. The file with the highest number counts.

    Args:
        folder: the directory.
    """

    def __init__(self, folder: FilePath) -> None:
        self._folder, self._descriptor = folder, -1
        self.lines = 0
        """How many lines were written since the last whole ledger."""

    @property
    def exists(self) -> bool:
        """Whether there is a ledger."""
        return bool(self._numbers())

    def restored(self, heads: int) -> Ledger:
        """The ledger of a ring that is on the disk and has this sum of heads. Further lines go to a new file.

        Raises:
            FileFormatError: no file begins with a whole ledger.
        """
        for number in sorted(self._numbers(), reverse=True):
            lines = list(_lines(self._path(number)))
            if not lines or "ledger" not in lines[0]:
                continue
            ledger = Ledger.restored(lines[0]["ledger"])
            for line in lines[1:]:
                if line["before"] >= heads:
                    break
                rank = Rank(*line["rank"])
                ledger.adopt(Origin(rank, tuple(line["envs"]), line["start"], line["steps"], 0), line["counts"])
            self.rewrite(ledger)  # without the lines whose steps are not in the ring
            return ledger
        raise FileFormatError(f"'{self._folder}': expected the ledger of a shard, found none; remove the directory")

    def append(self, origin: Origin, counts: list[int], heads: int) -> None:
        """Note that these steps come next.

        Args:
            origin: the steps.
            counts: those of the ledger after these steps.
            heads: the sum of the ring's heads before them.
        """
        line = {"rank": list(origin.rank), "envs": list(origin.envs), "start": origin.start, "steps": origin.steps}
        os.write(self._descriptor, _encoded(line | {"counts": counts, "before": heads}))
        self.lines += 1

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._descriptor)

    def rewrite(self, ledger: Ledger) -> None:
        """Begin a new file with a whole ledger. The caller has already flushed the ring to the disk."""
        old = self._numbers()
        number = 1 + max(old, default=0)
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / "draft"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        descriptor = os.open(draft, flags, 0o600)
        try:
            os.write(descriptor, _encoded({"ledger": ledger.state()}))
            os.fsync(descriptor)
            os.replace(draft, self._path(number))
        except BaseException:
            os.close(descriptor)
            raise
        before, self._descriptor, self.lines = self._descriptor, descriptor, 0
        if before >= 0:
            os.close(before)
        for stale in old:
            with suppress(OSError):
                self._path(stale).unlink()

    def __del__(self) -> None:
        if self.__dict__.get("_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def _numbers(self) -> list[int]:
        return [int(path.suffix[1:]) for path in self._folder.glob("ledger.*") if path.suffix[1:].isdecimal()]

    def _path(self, number: int) -> FilePath:
        return self._folder / f"ledger.{number}"


def _encoded(line: Any) -> bytes:
    text = json.dumps(line, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _lines(path: FilePath) -> Iterator[Any]:
    """The lines of a file, up to the first that is torn."""
    for raw in path.read_bytes().split(b"\n"):
        checksum, _, text = raw.partition(b" ")
        if len(checksum) != 8 or checksum != b"%08x" % crc32(text):
            return
        yield json.loads(text)


PATIENCE = 30.0
"""Seconds to wait until the process that had the files before is gone."""

LINES = 10_000
"""The number of lines after which the whole ledger is written anew."""


class RingFiles:
    """The files of one shard in one run: ``ring-<run>``, and ``ledger-<run>`` beside it.

    Args:
        folder: the directory of the shard.
        run: the name of the run.
    """

    def __init__(self, folder: FilePath, run: str) -> None:
        self._folder, self._ring = folder, folder / f"ring-{run}"
        self._log = LedgerLog(folder / f"ledger-{run}")
        self._replay: ReplayBuffer | None = None

    def restored(self, options: Mapping[str, Any]) -> tuple[ReplayBuffer, Ledger] | None:
        """The ring and the ledger as the last process of this run left them; None if there are none.

        Args:
            options: arguments of :meth:`relive.ReplayBuffer.open`.
        """
        if not self._log.exists:
            return None
        replay = _opened(lambda: ReplayBuffer.open(self._ring, **options))
        self._replay = replay
        replay.flush()  # before the ledger, which must not be ahead of the ring after a power cut
        return replay, self._log.restored(_heads(replay))

    def begun(self, saved: ReplayBuffer | None, options: Mapping[str, Any], seed: int) -> ReplayBuffer:
        """A new ring in files with the steps of ``saved``, if it is given. The rings of other runs are removed."""
        shutil.rmtree(self._ring, ignore_errors=True)  # what a process left that died before it was done
        self._folder.mkdir(parents=True, exist_ok=True)
        replay = ReplayBuffer.open(self._ring, **options, seed=seed)
        if saved is not None:
            replay.append(saved, envs={env: env for env in range(saved.num_envs)})
        replay.flush()
        self._log.rewrite(Ledger())
        self._replay = replay
        self._remove_others()
        return replay

    def flush(self, ledger: Ledger) -> None:
        """Write everything through to the disk."""
        assert self._replay is not None
        self._log.sync()  # first: the lines say which steps the ring has
        self._replay.flush()
        self._log.rewrite(ledger)

    def store(self, steps: Mapping[str, Any], origin: Origin, ledger: Ledger) -> None:
        """Store the steps of a chunk piece by piece, each with its line in the ledger."""
        replay = self._replay
        assert replay is not None
        intake = Intake(replay, np.array(origin.envs))
        for begin, end in _pieces(steps, origin.steps, intake.most):
            part = origin._replace(start=origin.start + begin, steps=end - begin)
            before = _heads(replay)
            self._log.append(part, ledger.counts_after(part), before)
            try:
                intake.add(map_leaves(itemgetter(slice(begin, end)), steps))
            except BaseException:
                if _heads(replay) > before:
                    ledger.confirm(part)
                self.flush(ledger)  # a new file drops the line, which would seem true once other steps are in
                raise
            ledger.confirm(part)
        if self._log.lines > LINES:
            self.flush(ledger)

    def _remove_others(self) -> None:
        """Remove the rings of other runs, unless a process has them open."""
        for path in self._folder.glob("ring-*"):
            if path == self._ring:
                continue
            with suppress(LifecycleError, FileFormatError, OSError):
                holder = Holder(path)
                try:
                    shutil.rmtree(path)
                    shutil.rmtree(path.with_name(path.name.replace("ring-", "ledger-")), ignore_errors=True)
                finally:
                    holder.release()


def _heads(replay: ReplayBuffer) -> int:
    """The sum of the heads of a ring."""
    return Intake(replay, np.arange(replay.num_envs)).head_sum()


def _opened(open_it: Callable[[], ReplayBuffer]) -> ReplayBuffer:
    """Open a ring in files, once the process that had it before is gone.

    Raises:
        LifecycleError: that process still has the ring after :data:`PATIENCE` seconds.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return open_it()
        except LifecycleError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _pieces(steps: Mapping[str, Any], count: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide ``count`` vector steps into pieces (begin, end). Each piece is stored as a whole or not at all.

    A row that is left out in the middle of an episode interrupts the episode, which takes a call of its own.
    """
    if "mask" in steps:
        kept = as_host(steps["mask"])
        done = as_host(steps["terminated"]) | as_host(steps["truncated"])
        goes_on = np.ones_like(kept)  # before the first step, nobody here knows
        goes_on[1:] = kept[:-1] & ~done[:-1]
        most = 1 if (goes_on & ~kept).any() else most
    return ((begin, min(begin + most, count)) for begin in range(0, count, most))


class SavedShard(NamedTuple):
    """A shard of a checkpoint."""

    path: str
    """The directory of its commit."""
    first_env: int
    """The number of its first env in the whole replay."""
    num_envs: int
    rows: int
    """Its capacity."""


class ShardPlan(NamedTuple):
    """What a shard is made from, in this life and in every later one."""

    number: int
    """k."""
    shards: int
    """K."""
    first_env: int
    """The number that the shard's first env has in the whole replay."""
    num_envs: int
    rows: int
    """Its capacity."""
    seed: int
    run: str
    """Names the run, so that a shard never comes back with the rows of another one."""
    options: dict[str, Any]
    """Further arguments of its ring: schema, sampler, view and so on."""
    home: str | None = None
    """The directory of its commits."""
    sources: tuple[SavedShard, ...] = ()
    """The saved shards that it begins with."""
    most: int | None = None
    """The most steps of a chunk, under a limit of samples per insert; None without one."""
    durable: bool = False
    """Whether the ring lives in files."""


def slot(home: str | os.PathLike[str], shard: int, cut: int | None) -> FilePath:
    """Where a shard saves its part of checkpoint ``cut``, or, for None, a commit of its own.

    Checkpoints take turns in two directories, because the old one still counts while the shards write the new one.
    """
    return FilePath(home) / f"shard-{shard}" / ("latest" if cut is None else str(cut % 2))


class Home:
    """The commits of one shard.

    Args:
        plan: the plan of the shard.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self.files = None if not plan.durable or plan.home is None else RingFiles(self._folder, plan.run)
        """The files of the ring, if it lives in files."""

    @property
    def _folder(self) -> FilePath:
        return slot(str(self._plan.home), self._plan.number, None).parent

    def save(
        self, replay: ReplayBuffer, ledger: Ledger, commit: int, cut: int | None, background: bool = False
    ) -> SaveHandle | None:
        """Make commit number ``commit``, as a part of checkpoint ``cut``, or of no checkpoint if that is None.

        Returns:
            the save, which is done unless it goes on in the ``background``. None if there was no save: a ring in files
            is only flushed, unless the commit is for a checkpoint.
        """
        plan = self._plan
        if plan.home is None:
            raise LifecycleError("commit(): this shard has no directory")
        if self.files is not None:
            self.files.flush(ledger)
            if cut is None:
                return None
        path = slot(plan.home, plan.number, cut)
        path.parent.mkdir(parents=True, exist_ok=True)
        note = {"run": plan.run, "commit": commit, "shard": plan.number, "ledger": ledger.state()}
        return replay.save(path, extra=note, background=background)

    def restored(self) -> tuple[ReplayBuffer, Ledger, int]:
        """The shard's ring, its ledger and the number of its last commit.

        A ring in files is as its process left it. Any other ring comes from the newest commit of this run. Without a
        commit, it comes from the saved shards that the plan names, or is empty, and the ledger is new.
        """
        if self.files is None:
            return self._saved()
        plan, numbers = self._plan, [note["commit"] for _, note in self._commits()]
        options = {**deepcopy(plan.options), "capacity": plan.rows, "num_envs": plan.num_envs, "check_ends": False}
        found = self.files.restored(options)
        if found is None:
            saved = self._begun() if plan.sources else None
            found = self.files.begun(saved, options, plan.seed), Ledger()
        return *found, max(numbers, default=0)

    def _commits(self) -> list[tuple[FilePath, dict[str, Any]]]:
        """The commits of this run, and what was noted with each."""
        found: list[tuple[FilePath, dict[str, Any]]] = []
        plan = self._plan
        # Numbers grow with each commit in all three directories, so the largest is the newest.
        slots = () if plan.home is None else [slot(plan.home, plan.number, turn) for turn in (0, 1, None)]
        for path in slots:
            with suppress(FileFormatError, OSError):
                note: Any = load_extra(path)
                if note is not None and (note["run"], note["shard"]) == (plan.run, plan.number):
                    found.append((path, note))
        return found

    def _saved(self) -> tuple[ReplayBuffer, Ledger, int]:
        """What :meth:`restored` gives: from the newest whole commit of this run, or else what the shard begins with."""
        for path, note in sorted(self._commits(), key=lambda candidate: -candidate[1]["commit"]):
            with suppress(FileFormatError):  # a damaged commit; the one before it may be whole
                return self._loaded(path), Ledger.restored(note["ledger"]), note["commit"]
        return self._begun(), Ledger(), 0

    def _begun(self) -> ReplayBuffer:
        """The ring that the shard begins with: a saved one as it was, or one with the envs of several saved ones."""
        plan, until = self._plan, self._plan.first_env + self._plan.num_envs
        sources: list[SavedShard] = [
            s for s in plan.sources if s.first_env < until and plan.first_env < s.first_env + s.num_envs
        ]
        if len(plan.sources) == plan.shards and len(sources) == 1 and sources[0][1:] == plan[2:5]:
            return self._loaded(sources[0].path)
        replay = ReplayBuffer(
            capacity=plan.rows, num_envs=plan.num_envs, seed=plan.seed, check_ends=False, **deepcopy(plan.options)
        )
        for source in sources:
            saved, shift = self._loaded(source.path), source.first_env - plan.first_env
            there = range(max(0, -shift), min(source.num_envs, plan.num_envs - shift))
            replay.append(saved, envs={env: env + shift for env in there})
        return replay

    def _loaded(self, path: str | os.PathLike[str]) -> ReplayBuffer:
        sampler, view = deepcopy((self._plan.options["sampler"], self._plan.options["view"]))
        return ReplayBuffer.load(path, sampler=sampler, view=view)


ALIGNMENT = 64
"""Every array begins at a multiple of so many bytes: a cache line, and enough for every dtype."""


class Part(NamedTuple):
    """One array of a block."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    axis: int
    """The axis that counts the rows of the batch: blocks are joined along it."""


class Block(NamedTuple):
    """Arrays one after another in one piece of memory. Pickle and Ray pass it on without a look inside."""

    parts: tuple[Part, ...]
    memory: NDArray[np.uint8]
    """uint8 ``[bytes]``. It may be read-only: what Ray returns lies in memory that several processes share."""
    time_first: bool | None = None
    """None for steps and transitions; for a batch of sequences, whether time is its first axis."""


def packed(leaves: Mapping[Path, Any], axes: Mapping[Path, int] | None = None, time_first: bool | None = None) -> Block:
    """A block of arrays and CPU tensors by path. Each byte is copied once.

    Args:
        leaves: path -> array or tensor.
        axes: path -> the axis that counts the rows of the batch, where it is not axis 0.
        time_first: as in :class:`Block`.
    """
    axes = axes or {}
    arrays = {path: _array(leaf) for path, leaf in leaves.items()}
    parts = tuple(Part(path, _dtype(leaf), arrays[path].shape, axes.get(path, 0)) for path, leaf in leaves.items())
    offsets, size = _offsets(parts)
    memory = np.empty(size, np.uint8)
    for part, offset in zip(parts, offsets, strict=True):
        np.copyto(_at(memory, offset, part), arrays[part.path])
    return Block(parts, memory, time_first)


def unpacked(block: Block) -> dict[Path, Array]:
    """The arrays of a block by path, over its memory. If NumPy lacks a dtype, the array holds its bits."""
    offsets, _ = _offsets(block.parts)
    return {part.path: _at(block.memory, offset, part) for part, offset in zip(block.parts, offsets, strict=True)}


def joined(blocks: Sequence[Block]) -> dict[Path, Tensor]:
    """The rows of several blocks of the same fields, one block after another, as tensors in memory of their own.

    Each byte is copied once. Nobody else has the new memory, so it may be written to, even if the blocks are read-only.
    """
    sources = [unpacked(block) for block in blocks]
    parts = [_sum(part, [source[part.path] for source in sources]) for part in blocks[0].parts]
    offsets, size = _offsets(parts)
    memory, found = np.empty(size, np.uint8), dict[Path, Tensor]()
    for part, offset in zip(parts, offsets, strict=True):
        target, end = _at(memory, offset, part), 0
        for source in sources:
            array = source[part.path]
            begin, end = end, end + array.shape[part.axis]
            np.copyto(target[(slice(None),) * part.axis + (slice(begin, end),)], array)
        found[part.path] = typed(target, part.dtype)
    return found


def packed_batch(batch: Any, schema: Schema) -> Block:
    """A batch that a replay of this schema drew: a TensorDict, or a SequenceBatch."""
    if not isinstance(batch, SequenceBatch):
        return packed({key if isinstance(key, tuple) else (key,): leaf for key, leaf in batch.items(True, True)})
    leaves, facts, hidden = batch.parts
    states = {path: descend(hidden, path[1:]) for path in schema.leaves if path[0] == "hidden"} if hidden else {}
    rows = 1 if batch.time_first else 0
    axes = {("rows", *path): rows for path in leaves}
    axes |= {("states", *path): int(state.dim() > 2) for path, state in states.items()}  # [layers, B, size]
    named = {("rows", *path): leaf for path, leaf in leaves.items()}
    named |= {("facts", name): fact for name, fact in facts.items()}
    named |= {("states", *path): state for path, state in states.items()}
    return packed(named, axes, batch.time_first)


def joined_batch(blocks: Sequence[Block], schema: Schema, extras: Mapping[str, Tensor]) -> Any:
    """The batch with the rows of several batches, one after another, and with further fields ``extras`` ``[B]``."""
    time_first, leaves = blocks[0].time_first, joined(blocks)
    if time_first is None:
        leaves |= {(name,): extra for name, extra in extras.items()}
        return as_tensordict(leaves, (leaves["reward",].shape[0],))
    of: dict[str, dict[Path, Tensor]] = {"rows": {}, "facts": {}, "states": {}}
    for path, leaf in leaves.items():
        of[path[0]][path[1:]] = leaf
    facts = {name: fact for (name,), fact in of["facts"].items()} | dict(extras)
    hidden = schema.rebuild("hidden", of["states"].__getitem__) if of["states"] else None
    return SequenceBatch(of["rows"], facts, hidden, time_first=time_first)


def _sum(part: Part, arrays: Iterable[Array]) -> Part:
    """A part with as many rows as all of these arrays together."""
    shape = list(part.shape)
    shape[part.axis] = sum(array.shape[part.axis] for array in arrays)
    return part._replace(shape=tuple(shape))


def _offsets(parts: Iterable[Part]) -> tuple[list[int], int]:
    """The byte at which each part begins, and where the last one ends."""
    offsets, end = list[int](), 0
    for part in parts:
        offsets.append(end)
        end += -(-prod(part.shape) * part.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _at(memory: NDArray[np.uint8], offset: int, part: Part) -> Array:
    """A part as an array over the memory of its block."""
    return np.ndarray(part.shape, numpy_dtype(part.dtype), memory.data, offset)


def _array(leaf: Any) -> Array:
    return numpy_view(leaf.detach()) if isinstance(leaf, Tensor) else np.asarray(leaf)


def _dtype(leaf: Any) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, Tensor) else torch_dtype(leaf.dtype)


def host_leaf(array: Array, dtype: torch.dtype) -> Any:
    """An array of a block as a replay takes it: as it is, or as a tensor if NumPy lacks the dtype."""
    return array if dtype in NUMPY_DTYPES else typed(array.copy(), dtype)  # torch warns of read-only memory


INDICES: set[Path] = {("index",), ("next_index",), ("facts", "index")}
"""The parts of a batch's block that name transitions."""


class Totals(NamedTuple):
    """What a shard has to draw from, at one version of its content."""

    born: str
    """The life of the shard: another one after every restart."""
    version: int
    """How many changes the shard has seen in this life. Equal versions of one life have the same content."""
    size: int
    """How many transitions can be drawn."""
    mass: float
    """The sum of their priorities; with a uniform sampler, their number."""
    least: float
    """The smallest priority if weights are normalized by the buffer; otherwise infinity."""
    largest: float
    """The largest TD error that the shard has seen; 0 without priorities."""
    stored: int
    """How many steps all its writers have ever stored. If a later life has a smaller number, it has lost the others."""


class Allowance(NamedTuple):
    """How many steps a shard may store under a limit of samples per insert."""

    born: str
    """The life of the shard that the allowance is for."""
    steps: int
    """The most steps that its ledger may have counted as stored."""


class Chunk(NamedTuple):
    """Steps on their way to a shard."""

    origin: Origin
    block: Block
    """The fields ``[T, K, ...]`` and ``mask``. If rows have no next observation of their own, ``next_obs`` ``[F, ...]``
    holds the final observations, and ``ended``, int64 ``[F]``, the rows t * K + k that they belong to."""


class Shard:
    """One ring, with the envs ``first_env`` up to ``first_env + num_envs`` of the whole replay.

    One call ends before the next begins.

    An index leaves a shard as ``index * K + k``, so that it also names the shard.

    Args:
        plan: what to make the shard from. If its home has a commit of this run, the shard comes back from the newest.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.plan, self.born = plan, os.urandom(8).hex()
        self._home, schema = Home(plan), plan.options["schema"]
        self._fields = schema.extend(next_obs=schema["obs"], mask=Field((), torch.bool))
        self._finals: dict[Path, Any] = {}
        self._version = self._dropped = self._commits = 0
        self._most = None if plan.most is None else 0
        """How many steps the ledger may count; None if there is no limit. It is 0 until the first allowance comes."""
        self._refused: dict[str, float] = {}
        """The time since which each writer waits for the limit, by the writer's token, in monotonic seconds."""
        self._waits, self._waited = 0, 0.0
        self._saving: tuple[int | None, SaveHandle | None] = None, None

    @cached_property
    def _content(self) -> tuple[ReplayBuffer, Ledger, int]:
        """The ring, the ledger and the number of the last commit, as the shard begins with them.

        They are read with the first message. If they cannot be read, the sender of that message gets the error.
        """
        return self._home.restored()

    @property
    def replay(self) -> ReplayBuffer:
        """The ring."""
        return self._content[0]

    @property
    def _ledger(self) -> Ledger:
        return self._content[1]

    # -- what there is to draw ----------------------------------------------------------------------------------

    def totals(self, largest: float = 0.0, allowance: Allowance | None = None) -> Totals:
        """What there is to draw now. The shard may hold other rows when it is asked to draw them.

        Args:
            largest: the largest TD error of all shards, which new transitions get in this shard, too.
            allowance: from now on, the shard stores no more steps than this allows; None changes nothing.
        """
        if allowance is not None and allowance.born == self.born:
            self._most = allowance.steps
        size, rated = len(self.replay), self.replay.sampler
        if not isinstance(rated, Prioritized):
            return Totals(self.born, self._version, size, float(size), np.inf, 0.0, self._ledger.stored)
        rated.largest_error = largest
        least = rated.smallest if rated.normalize == "buffer" else np.inf
        return Totals(self.born, self._version, size, rated.mass, least, rated.largest_error, self._ledger.stored)

    def sample(self, share: Share, largest: float = 0.0) -> tuple[Totals, Block | None]:
        """Draw a share of a batch from the rows that are here now.

        Returns:
            the totals that the rows were drawn from; and the rows, or None if there is nothing to draw.
        """
        totals, portion = self.totals(largest), Portion(self.replay)
        if not totals.mass > 0.0:
            return totals, None
        extras: dict[str, Any] = {}
        with portion.lock:
            drawn = portion.draw_share(share)
            if drawn.priorities is not None:
                extras = {"weight": np.empty(share.rows, np.float32), "probability": drawn.priorities / share.mass}
            portion.count_batch(share.rows)
            block = packed_batch(portion.read(drawn, share.stream, extras=extras), self.replay.schema)
        self._as_everywhere(block)
        return totals, block

    def update(self, born: str, index: Any, td_error: Any, mask: Any, largest: float = 0.0) -> int:
        """Set the TD errors of transitions drawn in the life ``born``; see ``ReplayBuffer.update_priorities``.

        Indices of an earlier life may name other transitions by now, so they change nothing and are counted.
        """
        if born != self.born:
            self._dropped += len(index)
            return len(index)
        self._version += 1
        late = self.replay.update_priorities(np.asarray(index) // self.plan.shards, td_error, mask)
        self.totals(largest)
        return late

    # -- steps --------------------------------------------------------------------------------------------------

    def claim(self, envs: tuple[int, ...], token: str) -> Rank:
        """Give these envs to a new writer, and interrupt their running episodes."""
        rank = self._ledger.claim(envs, token)
        self._version += 1
        self.replay.interrupt(envs)
        return rank

    def push(self, chunk: Chunk) -> int:
        """Store a chunk, unless it came before, an earlier one is missing, or the limit has no room for it.

        Returns how many steps of each env have come from this writer so far.

        Raises:
            LifecycleError: a newer writer has one of the envs.
            ReliveError: the steps do not fit, as :meth:`relive.ReplayBuffer.extend`. Nothing is stored.
        """
        admission = self._ledger.admit(chunk.origin)
        self._version += 1
        if admission.interrupt:
            self.replay.interrupt(chunk.origin.envs)
        if admission.store and not self.has_room(chunk.origin):
            return admission.received - chunk.origin.steps
        if admission.store and self._home.files is not None:
            self._home.files.store(self._steps(chunk), chunk.origin, self._ledger)
        elif admission.store:
            self.replay.extend(self._steps(chunk), envs=chunk.origin.envs)
            self._ledger.confirm(chunk.origin)
        return admission.received

    def has_room(self, origin: Origin) -> bool:
        """Whether the limit allows the steps of a chunk now. The time until it does counts as ``insert_waited``."""
        token = origin.rank.token
        if self._most is not None and self._ledger.stored + origin.steps * len(origin.envs) > self._most:
            self._refused.setdefault(token, time.monotonic())
            return False
        if token in self._refused:
            self._waits, self._waited = self._waits + 1, self._waited + time.monotonic() - self._refused.pop(token)
        return True

    def interrupt(self, envs: tuple[int, ...]) -> None:
        """Interrupt the running episodes of these envs: the next steps do not follow the last ones."""
        self._version += 1
        self.replay.interrupt(envs)

    # -- commits and figures ------------------------------------------------------------------------------------

    def commit(self, cut: int | None, background: bool = False) -> int:
        """Save everything, as a part of checkpoint ``cut``, or of no checkpoint if that is None.

        Returns the number of the commit. After a failure the shard comes back as it is now, unless there is a later
        commit. In the ``background`` the shard goes on at once, and :meth:`committed` says when the commit is on the
        disk.
        """
        replay, ledger, commits = self._content
        self._commits += 1
        number = commits + self._commits
        self._saving = cut, self._home.save(replay, ledger, number, cut, background)
        return number

    def committed(self, cut: int) -> bool:
        """Whether the commit for checkpoint ``cut`` is on the disk.

        Raises:
            LifecycleError: this life of the shard has not begun the commit.
            FileFormatError, OSError: the commit failed.
        """
        begun, handle = self._saving
        if begun != cut:
            raise LifecycleError(
                f"shard {self.plan.number} was restarted while it wrote checkpoint {cut}; the one before still counts"
            )
        if handle is None or handle.done:
            if handle is not None:
                handle.wait()
            return True
        return False

    def stats(self) -> dict[str, float]:
        """The figures of the ring and of failures: see :meth:`relive.cluster.Replay.stats`."""
        return self.replay.stats() | {
            "lost_steps": float(self._ledger.lost),
            "repeated_steps": float(self._ledger.repeated),
            "dropped_updates": float(self._dropped),
            "commits": float(self._commits),
            "insert_waits": float(self._waits + len(self._refused)),
            "insert_waited": self._waited + sum(time.monotonic() - since for since in self._refused.values()),
        }

    # -- inside -------------------------------------------------------------------------------------------------

    def _as_everywhere(self, block: Block) -> None:
        """Give the rows of a batch the indices and envs that they have in the whole replay."""
        plan = self.plan
        for path, array in unpacked(block).items():
            if path in INDICES:
                array[...] = np.where(array < 0, array, array * plan.shards + plan.number)
            elif path == ("facts", "env"):
                np.add(array, plan.first_env, out=array)

    def _steps(self, chunk: Chunk) -> dict[str, Any]:
        """The steps of a chunk as ``extend`` takes them."""
        arrays, dtypes = unpacked(chunk.block), {part.path: part.dtype for part in chunk.block.parts}
        ended = arrays.pop(("ended",), None)
        if ended is not None:
            front = chunk.origin.steps, len(chunk.origin.envs)
            for path in [path for path in arrays if path[0] == "next_obs"]:
                arrays[path] = self._dense(path, arrays[path], ended, front)
        leaves = {path: host_leaf(array, dtypes[path]) for path, array in arrays.items()}
        names = dict.fromkeys(path[0] for path in leaves)
        return {name: self._fields.rebuild(name, leaves.__getitem__) for name in names}

    def _dense(self, path: Any, finals: Any, ended: Any, front: tuple[int, int]) -> Any:
        """Spread final observations ``[F, ...]`` over ``[T, K, ...]``. Nobody reads the other rows.

        The memory is kept for the next chunk.
        """
        shape = (front[0] * front[1], *finals.shape[1:])
        rows = self._finals.get(path)
        if rows is None or rows.shape != shape:
            rows = self._finals[path] = np.zeros(shape, finals.dtype)
        rows[ended] = finals
        return rows.reshape(*front, *finals.shape[1:])


def require_shardable(sampler: Any, view: Any) -> None:
    """Refuse a sampler whose draws cannot be divided among shards.

    Raises:
        ParameterError: the sampler draws neither in proportion to priorities nor uniformly.
    """
    if type(sampler) not in (Uniform, Prioritized) or getattr(view, "weigh", "windows") != "windows":
        raise ParameterError(
            f"shards cannot draw with {sampler!r} and {view!r}: their draws are those of one ring only for Uniform() "
            "and Prioritized(), and for sequences of weigh='windows'; choose one of these"
        )
