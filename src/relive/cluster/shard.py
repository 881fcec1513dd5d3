"""Shard: one ring of a replay that several processes hold together. Nothing here knows how its messages travel.

The file reads from the outside in: the shard, the messages it takes, what it is made from, its ledger, and its files.

:class:`relive.processes.server.ReplayServer` gives batches of one ring to processes of the same machine in shared
memory. Its slots and sockets cannot leave a machine, and it has no ledger by which a ring that died goes on. So a shard
answers calls instead, whose blocks any transport may carry: Ray, or the caller's own process.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast
from zlib import crc32

import numpy as np
import torch

from ..errors import FileFormatError, LifecycleError, ParameterError
from ..files import SaveHandle
from ..files.disk import Holder, replace_file
from ..memory.layout import host_leaf
from ..parameters import is_own
from ..processes.blocks import Block, packed_batch
from ..processes.lanes import Intake
from ..replay.buffer import ReplayBuffer
from ..replay.loading import load_extra
from ..steps.arrays import Array, Doubles, Ints, as_host
from ..steps.schema import Field, Schema, map_leaves
from ..steps.schema import Path as FieldPath
from ..views.contract import View
from .messages import Link
from .plan import Shardable, ShardSampler, Share

INDICES: set[FieldPath] = {("index",), ("next_index",), ("facts", "index")}
"""The parts of a batch's block that name transitions."""

UNCONFIRMED = 16
"""So many of the last batches that a shard gave can be taken back. A batch of the learner has one of each shard, and
one more each time that a shard fails while it is drawn."""


class Shard:
    """One ring, with the envs ``first_env`` up to ``first_env + num_envs`` of the whole replay.

    One call ends before the next begins.

    An index leaves a shard as ``index * K + k``, so that it also names the shard.

    Args:
        plan: what to make the shard from. If there is a commit of this run, the shard comes back from the newest.
    """

    plan: ShardPlan
    born: str

    def __init__(self, plan: ShardPlan) -> None:
        self.plan, self.born = plan, os.urandom(8).hex()
        schema = plan.options["schema"]
        self._fields = schema.extend(next_obs=schema["obs"], mask=Field((), torch.bool))
        self._files: RingFiles | None = None
        """The files of the ring, if it lives in files and has been opened."""
        self._version = self._dropped = self._commits = 0
        self._most = None if plan.most is None else 0
        """How many steps the ledger may count; None if there is no limit. It is 0 until the first allowance comes."""
        self._refused: dict[str, float] = {}
        """The time since which each writer waits for the limit, by the writer's token, in monotonic seconds."""
        self._waits, self._waited = 0, 0.0
        self._given = 0
        """How many batches this life has given."""
        self._before = deque[Any](maxlen=UNCONFIRMED)
        """The sampler's state before each of the last of them."""
        self._saving: tuple[int, SaveHandle] | None = None
        """The last checkpoint that this life has begun, and its save."""

    @cached_property
    def _content(self) -> tuple[ReplayBuffer, Ledger, int]:
        """The ring, the ledger and the number of the last commit, as the shard begins with them.

        They are read with the first message. If they cannot be read, the sender of that message gets the error.
        """
        return self._restored()

    @property
    def replay(self) -> ReplayBuffer:
        """The ring."""
        return self._content[0]

    @property
    def _ledger(self) -> Ledger:
        return self._content[1]

    # -- what there is to draw ----------------------------------------------------------------------------------

    def totals(
        self, largest: float = 0.0, allowance: Allowance | None = None, received: Received | None = None
    ) -> ShardTotals:
        """The rows that can be drawn now. The shard may hold other rows when it is asked to draw them.

        Args:
            largest: the largest TD error of all shards, which new transitions get in this shard, too.
            allowance: from now on, the shard stores no more steps than this allows; None changes nothing.
            received: the batches of this shard that the learner has. New rows of later ones, whose answer was lost,
                are served again. None changes nothing.
        """
        if allowance is not None and allowance.born == self.born:  # one of an earlier life counts steps that are lost
            self._most = allowance.steps
        size, sampler = len(self.replay), ShardSampler(self.replay)
        if received is not None and received.born == self.born:
            lost = min(self._given - received.batches, len(self._before))
            if lost > 0:
                sampler.put_back(self._before[-lost])
            for _ in range(lost):
                self._before.pop()
            self._given = received.batches
        with sampler.lock:
            if sampler.prioritized is not None:
                sampler.prioritized.largest_error = largest
            mass, least, largest_error, waiting = sampler.totals()
            return ShardTotals(
                self.born, self._version, size, mass, least, largest_error, self._ledger.stored, waiting, self._given
            )

    def sample(self, share: Share, largest: float = 0.0) -> tuple[ShardTotals, ShardRows | None]:
        """Draw a share of a batch from the rows that are here now.

        Returns:
            the totals that the rows were drawn from; and the rows, or None if there is nothing to draw.
        """
        totals, sampler = self.totals(largest), ShardSampler(self.replay)
        extras: dict[str, Array] = {}
        with sampler.lock:  # for the draw and the read, so that no row is overwritten in between
            before, drawn = sampler.draw_state(), sampler.draw_share(share)
            rows = len(drawn.places)
            if not rows:
                return totals, None
            self._before.append(before)
            self._given += 1
            if drawn.priorities is not None:
                # the learner computes the weights, which depend on all shards, and knows which rows are new
                chances = np.concatenate([np.ones(drawn.new), drawn.priorities / (share.mass or 1.0)])
                extras = {"weight": np.empty(rows, np.float32), "probability": chances}
            sampler.count_batch(rows, rows > drawn.new)
            block = packed_batch(sampler.read(drawn, share.stream, extras=extras))
        self._name_globally(block)
        return totals._replace(given=self._given), ShardRows(rows, drawn.new, block)

    def update(self, born: str, index: Ints, td_error: Doubles, mask: Array | None, largest: float = 0.0) -> int:
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

    def claim(self, envs: tuple[int, ...], token: str, before: str | None = None, next_obs: object = None) -> Rank:
        """Give these envs to a new writer, and interrupt their running episodes.

        Args:
            envs: as the shard counts them.
            token: of the new writer.
            before: the token that this writer had until now.
            next_obs: what the newest steps of that token led to, ``[K, ...]``; None if that is not known.
        """
        still = before is not None and self._ledger.has_envs(before)  # else others came since, or this call came before
        rank = self._ledger.claim(envs, token)
        for waiting in [other for other in self._refused if not self._ledger.has_envs(other)]:
            self._end_wait(waiting)  # a writer that was replaced waits for nothing any more
        self._version += 1
        self.replay.interrupt(envs, next_obs=next_obs if still else None)
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
            return admission.received - chunk.origin.steps  # not confirmed, so the writer sends it again
        if admission.store and self._files is not None:
            self._files.store(self._steps(chunk), chunk.origin)
        elif admission.store:
            self.replay.extend(self._steps(chunk), envs=chunk.origin.envs)
            self._ledger.confirm(chunk.origin)  # after the ring has the steps: if extend() fails, they come again
        return admission.received

    def has_room(self, origin: ChunkOrigin) -> bool:
        """True if the limit allows the steps of a chunk now. The time until it does counts as ``insert_waited``.

        Raises:
            LifecycleError: a newer writer has one of the envs, so there will never be room for this one.
        """
        token = origin.rank.token
        self._ledger.takes_over(origin)
        if self._most is not None and self._ledger.stored + origin.steps * len(origin.envs) > self._most:
            self._refused.setdefault(token, time.monotonic())
            return False
        self._end_wait(token)
        return True

    def _end_wait(self, token: str) -> None:
        since = self._refused.pop(token, None)
        if since is not None:
            self._waits, self._waited = self._waits + 1, self._waited + time.monotonic() - since

    # -- commits and figures ------------------------------------------------------------------------------------

    def commit(self, cut: int | None, background: bool = False) -> int:
        """Save everything, as a part of checkpoint ``cut``, or of no checkpoint if that is None.

        Returns the number of the commit. After a failure the shard comes back as it is now, unless there is a later
        commit. In the ``background`` the shard goes on at once, and :meth:`committed` says when the commit is on the
        disk.
        """
        plan, ledger = self.plan, self._ledger
        if plan.home is None:
            raise LifecycleError("commit(): this shard has no directory")
        self._commits += 1
        number = self._content[2] + self._commits
        if self._files is not None:
            self._files.flush()
        if self._files is None or cut is not None:  # without a checkpoint, a ring in files is only flushed
            path = commit_path(plan.home, plan.number, cut)
            path.parent.mkdir(parents=True, exist_ok=True)
            # in one save with the ring: a ledger that is ahead of its ring would take lost steps for stored ones
            note = {"run": plan.run, "commit": number, "shard": plan.number, "ledger": ledger.state()}
            save = self.replay.save(path, extra=note, background=background)
            if cut is not None:  # a commit of the shard's own leaves the checkpoint that is under way as it is
                self._saving = cut, save
        return number

    def committed(self, cut: int) -> bool:
        """True if the commit for checkpoint ``cut`` is on the disk.

        Raises:
            LifecycleError: this life of the shard has not begun the commit.
            FileFormatError, OSError: the commit failed.
        """
        if self._saving is None or self._saving[0] != cut:
            raise LifecycleError(
                f"shard {self.plan.number} was restarted while it wrote checkpoint {cut}; the one before still counts"
            )
        save = self._saving[1]
        if save.done:
            save.wait()  # raises the error of a save that failed
            return True
        return False

    def stats(self) -> dict[str, float]:
        """The figures of the ring and of failures: see :meth:`relive.cluster.Replay.stats`."""
        sampler = cast("Shardable", self.replay.sampler)
        return self.replay.stats() | {
            "served": float(sampler.served),
            "waiting": float(sampler.waiting),
            "lost": float(sampler.lost),
            "lost_steps": float(self._ledger.lost),
            "repeated_steps": float(self._ledger.repeated),
            "dropped_updates": float(self._dropped),
            "commits": float(self._commits),
            "insert_waits": float(self._waits + len(self._refused)),
            "insert_waited": self._waited + sum(time.monotonic() - since for since in self._refused.values()),
        }

    # -- blocks -------------------------------------------------------------------------------------------------

    def _name_globally(self, block: Block) -> None:
        """Give the rows of a batch the indices and envs that they have in the whole replay."""
        plan = self.plan
        for path, array in block.arrays().items():
            if path in INDICES:
                array[...] = np.where(array < 0, array, array * plan.shards + plan.number)  # -1 names nothing
            elif path == ("facts", "env"):
                np.add(array, plan.first_env, out=array)

    def _steps(self, chunk: Chunk) -> dict[str, object]:
        """The steps of a chunk as ``extend`` takes them."""
        arrays, dtypes = chunk.block.arrays(), {part.path: part.dtype for part in chunk.block.spec.parts}
        ended = arrays.pop(("ended",), None)
        if ended is not None:
            steps, width = chunk.origin.steps, len(chunk.origin.envs)
            for path in [path for path in arrays if path[0] == "next_obs"]:
                finals = arrays[path]
                rows = np.zeros((steps * width, *finals.shape[1:]), finals.dtype)  # nobody reads the other rows
                rows[ended] = finals
                arrays[path] = rows.reshape(steps, width, *finals.shape[1:])
        leaves = {path: host_leaf(array, dtypes[path]) for path, array in arrays.items()}
        names = dict.fromkeys(path[0] for path in leaves)
        return {name: self._fields.rebuild(name, leaves.__getitem__) for name in names}

    # -- files --------------------------------------------------------------------------------------------------

    def _restored(self) -> tuple[ReplayBuffer, Ledger, int]:
        """The shard's ring, its ledger and the number of its last commit.

        A ring in files is as its process left it. Any other ring comes from the newest whole commit of this run.
        Without a commit, it comes from the saved shards that the plan names, or is empty, and the ledger is new.
        """
        plan, commits = self.plan, self._commits_of_run()
        if plan.durable and plan.home is not None:
            folder, first = commit_path(plan.home, plan.number, None).parent, self._first_ring if plan.sources else None
            self._files = RingFiles(folder, plan.run, self._ring_options, plan.seed, first)
            return self._files.replay, self._files.ledger, max((note["commit"] for _, note in commits), default=0)
        for path, note in sorted(commits, key=lambda commit: -commit[1]["commit"]):
            with suppress(FileFormatError):  # a damaged commit; the one before it may be whole
                return self._loaded(path), Ledger.restored(note["ledger"]), note["commit"]
        return self._first_ring(), Ledger(), 0

    def _commits_of_run(self) -> list[tuple[Path, dict[str, Any]]]:
        """The directories of the commits of this run, and what was noted with each."""
        commits = list[tuple[Path, dict[str, Any]]]()
        plan = self.plan
        # numbers grow with each commit in all three directories, so the largest is the newest
        paths = () if plan.home is None else [commit_path(plan.home, plan.number, turn) for turn in (0, 1, None)]
        for path in paths:
            with suppress(FileFormatError, OSError):
                note = load_extra(path)
                if note is not None and (note["run"], note["shard"]) == (plan.run, plan.number):
                    commits.append((path, note))
        return commits

    def _first_ring(self) -> ReplayBuffer:
        """The ring of a new run: a saved one as it was, or one with the envs of several saved ones."""
        plan, until = self.plan, self.plan.first_env + self.plan.num_envs
        sources: list[SavedShard] = [
            s for s in plan.sources if s.first_env < until and plan.first_env < s.first_env + s.num_envs
        ]
        # the shards are as many as before, so indices of the save keep their meaning
        one = sources[0] if len(sources) == 1 and len(plan.sources) == plan.shards else None
        if one is not None and (one.first_env, one.num_envs, one.rows) == (plan.first_env, plan.num_envs, plan.rows):
            return self._loaded(one.path)
        replay = ReplayBuffer(**self._ring_options, seed=plan.seed)
        for source in sources:
            saved, shift = self._loaded(source.path), source.first_env - plan.first_env
            shared = range(max(0, -shift), min(source.num_envs, plan.num_envs - shift))  # as the source counts its envs
            replay.append(saved, envs={env: env + shift for env in shared})
        return replay

    @property
    def _ring_options(self) -> ShardOptions:
        plan = self.plan
        return {**deepcopy(plan.options), "capacity": plan.rows, "num_envs": plan.num_envs, "check_ends": False}

    def _loaded(self, path: str | os.PathLike[str]) -> ReplayBuffer:
        sampler, view = deepcopy((self.plan.options["sampler"], self.plan.options["view"]))
        return ReplayBuffer.load(path, sampler=sampler, view=view)


# Messages


class ShardTotals(NamedTuple):
    """The rows that a shard can draw from, at one version of its content."""

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
    waiting: int = 0
    """With :class:`relive.Fresh`, how many rows were not served yet."""
    given: int = 0
    """How many batches the shard has given in this life."""


class ShardRows(NamedTuple):
    """The rows that a shard gives for a batch."""

    rows: int
    """How many."""
    new: int
    """So many of them, the first ones, are served as new."""
    block: Block


class Received(NamedTuple):
    """The batches of a shard that the learner has received."""

    born: str
    """The life of the shard that gave them."""
    batches: int
    """How many."""


class Allowance(NamedTuple):
    """How many steps a shard may store under a limit of samples per insert."""

    born: str
    """The life of the shard that the allowance is for."""
    steps: int
    """The most steps that its ledger may have counted as stored."""


class Rank(NamedTuple):
    """The rank of a writer. If two writers claim one env, the writer of the higher rank has it."""

    number: int
    """One more than the number of the writer before it."""
    token: str
    """Drawn at random. It decides between two writers of the same number, which a failed shard may give twice."""


class ChunkOrigin(NamedTuple):
    """The writer of a chunk of steps, and the chunk's place among that writer's steps."""

    rank: Rank
    envs: tuple[int, ...]
    """The envs of the shard that stepped. They are always the same for one writer."""
    start: int
    """How many steps of each env the writer sent before."""
    steps: int
    """How many steps of each env it sends now."""
    sure: int
    """How many steps of each env the shard has confirmed to the writer."""


class Chunk(NamedTuple):
    """Steps on their way to a shard."""

    origin: ChunkOrigin
    block: Block
    """The fields ``[T, K, ...]`` and ``mask``. If rows have no next observation of their own, ``next_obs`` ``[F, ...]``
    holds the final observations, and ``ended``, int64 ``[F]``, the rows t * K + k that they belong to."""


# The parts that a shard is made from


class SavedShard(NamedTuple):
    """A shard of a checkpoint."""

    path: str
    """The directory of its commit."""
    first_env: int
    """The number of its first env in the whole replay."""
    num_envs: int
    rows: int
    """Its capacity."""


class RingOptions(TypedDict):
    """Arguments of the ring of every shard, as :class:`relive.ReplayBuffer` takes them."""

    schema: Schema
    sampler: Shardable
    view: View
    ordered: bool
    own_next_obs: bool


class ShardOptions(RingOptions):
    """Arguments of the ring of one shard."""

    capacity: int
    num_envs: int
    check_ends: bool


class ShardPlan(NamedTuple):
    """The sizes, options and directories of a shard, the same in each of its lives."""

    number: int
    """k."""
    first_env: int
    """The number that the shard's first env has in the whole replay."""
    num_envs: int
    rows: int
    """Its capacity."""
    shards: int
    """K."""
    seed: int
    run: str
    """Names the run, so that a shard never comes back with the rows of another one."""
    options: RingOptions
    """Further arguments of its ring."""
    home: str | None = None
    """The directory of its commits."""
    sources: tuple[SavedShard, ...] = ()
    """The saved shards that it begins with."""
    most: int | None = None
    """The most steps of a chunk, under a limit of samples per insert; None without one."""
    durable: bool = False
    """True if the ring lives in files."""


Connect = Callable[[list[ShardPlan]], Link]
"""Makes the shards, and the link to them."""


def commit_path(home: str | os.PathLike[str], shard: int, cut: int | None) -> Path:
    """Where a shard saves its part of checkpoint ``cut``, or, for None, a commit of its own.

    Checkpoints take turns in two directories, because the old one still counts while the shards write the new one.
    """
    return Path(home) / f"shard-{shard}" / ("latest" if cut is None else str(cut % 2))


def require_shardable(sampler: Any, view: object) -> None:
    """Refuse a sampler whose draws cannot be divided among shards.

    Raises:
        ParameterError: the sampler draws neither in proportion to priorities nor uniformly.
    """
    if not (is_own(sampler) and sampler.can_be_shared) or getattr(view, "weigh", "windows") != "windows":
        raise ParameterError(
            f"shards cannot draw with {sampler!r} and {view!r}: their draws are those of one ring only for Uniform() "
            "and Prioritized(), alone or in Fresh(), and for sequences of weigh='windows'; choose one of these"
        )


# The ledger: every step exactly once


class Admission(NamedTuple):
    """A decision about a chunk."""

    store: bool
    """True to store the chunk: it is the next one of its writer."""
    interrupt: bool
    """True to interrupt the running episodes of its envs: its first steps do not follow the last stored ones."""
    received: int
    """How many steps of each env the shard will have had from this writer after that."""


class Ledger:
    """Decides whether a chunk is the next one of its writer, and counts the steps that a failed shard has lost.

    A writer sends a chunk again until it is confirmed. So a chunk may come twice, and a later one before an earlier
    one. A shard that came back from its last commit has forgotten all later steps. Those steps are lost. They are
    counted, and no episode goes on over the gap. A ring in files knows nothing of ledgers, which would tie replays to
    clusters.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Rank] = {}
        """The rank of the writer that has each env."""
        self._received: dict[str, int] = {}
        """How many steps of each env have come from each writer that has an env, by its token."""
        self.stored: int = 0
        """Steps that were ever stored."""
        self.lost: int = 0
        """Steps that were confirmed and are lost: they came after the commit from which the shard came back."""
        self.repeated: int = 0
        """Steps that came again and were left out."""

    def claim(self, envs: Sequence[int], token: str) -> Rank:
        """The rank of a new writer for these envs. The writers that had them before are refused from now on."""
        numbers = [self._owners[env].number for env in envs if env in self._owners]
        rank = Rank(1 + max(numbers, default=0), token)
        self._hand_over(envs, rank)
        return rank

    def admit(self, origin: ChunkOrigin) -> Admission:
        """Decide about a chunk. Call :meth:`confirm` once it is stored.

        Raises:
            LifecycleError: a newer writer has one of its envs.
        """
        new = self.takes_over(origin)
        received = self._received.get(origin.rank.token, 0)
        gap = max(origin.sure - received, 0)  # steps that the shard confirmed once, and has forgotten since
        if new:
            self._hand_over(origin.envs, origin.rank)
        if gap:
            self.lost += gap * len(origin.envs)
            # the writer has dropped what was confirmed, so these steps never come again: go on behind them
            received = self._received[origin.rank.token] = origin.sure
        if origin.start < received:
            self.repeated += origin.steps * len(origin.envs)
        # if it starts later, an earlier chunk is still on its way, or failed: the writer sends both again
        is_next = origin.start == received
        return Admission(is_next, bool(gap) or new, received + origin.steps * is_next)

    def confirm(self, origin: ChunkOrigin) -> None:
        """Note that the steps of this chunk are stored."""
        self._received[origin.rank.token] = origin.start + origin.steps
        self.stored += origin.steps * len(origin.envs)

    def counts_after(self, origin: ChunkOrigin) -> list[int]:
        """The values of :attr:`stored`, :attr:`lost` and :attr:`repeated` once a chunk is stored."""
        return [self.stored + origin.steps * len(origin.envs), self.lost, self.repeated]

    def adopt(self, origin: ChunkOrigin, counts: Sequence[int]) -> None:
        """Note a chunk that the ring turned out to have. :meth:`counts_after` gave the ``counts`` before the chunk."""
        if any(self._owners.get(env) != origin.rank for env in origin.envs):
            self._hand_over(origin.envs, origin.rank)
        self.confirm(origin)
        self.stored, self.lost, self.repeated = counts

    def state(self) -> dict[str, object]:
        """The whole ledger, for a save."""
        return {
            "owners": [[env, *rank] for env, rank in self._owners.items()],
            "received": dict(self._received),
            "counts": [self.stored, self.lost, self.repeated],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Ledger:
        """The ledger of a save."""
        ledger = cls()
        ledger._owners = {env: Rank(number, token) for env, number, token in state["owners"]}
        ledger._received = dict(state["received"])
        ledger.stored, ledger.lost, ledger.repeated = state["counts"]
        return ledger

    def has_envs(self, token: str) -> bool:
        """True if the writer with this token has an env."""
        return any(owner.token == token for owner in self._owners.values())

    def takes_over(self, origin: ChunkOrigin) -> bool:
        """True if the writer of this chunk gets its envs only now, because the shard has forgotten its claim.

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
        # counts of writers without envs go: the rank refuses their chunks, and the ledger stays small
        live = {owner.token for owner in self._owners.values()}
        self._received = {token: count for token, count in self._received.items() if token in live}


# Files: a ring that outlives its process, and the log of its ledger


REOPEN_SECONDS = 30.0
"""Seconds to wait until the process that had the files before is gone."""

REOPEN_PAUSE = 0.2
"""Seconds between two attempts to open them."""

LINES = 10_000
"""The number of lines after which the whole ledger is written anew."""


@contextmanager
def _given_up_if_it_fails(replay: Any) -> Generator[None]:
    """Let the files of a replay go if the block fails. Who holds the exception would hold them open with it."""
    try:
        yield
    except BaseException:
        replay._let_go("the files of this shard could not be opened")
        raise


class RingFiles:
    """The files of one shard in one run: ``ring-<run>``, and ``ledger-<run>`` beside it.

    The ring and the log cannot change in one instant. So each piece of steps has a line in the log before it goes into
    the ring, with the sum of the ring's heads. After a kill, the heads say whether the piece of the last line is in.

    Args:
        folder: the directory of the shard.
        run: the name of the run.
        options: arguments of :meth:`relive.ReplayBuffer.open`.
        seed: that of a new ring.
        first: makes the replay whose steps a new ring begins with; None for an empty ring.

    Raises:
        LifecycleError: another process still has the ring after :data:`REOPEN_SECONDS` seconds.
    """

    replay: ReplayBuffer
    ledger: Ledger

    def __init__(
        self, folder: Path, run: str, options: ShardOptions, seed: int, first: Callable[[], ReplayBuffer] | None
    ) -> None:
        self._ring, self._log = folder / f"ring-{run}", LedgerLog(folder / f"ledger-{run}")
        if self._log.exists:  # as the last process of this run left it
            self.replay = self._reopened(options)
            with _given_up_if_it_fails(self.replay):
                self.replay.flush()  # before the ledger, which must not be ahead of the ring after a power cut
                self.ledger = self._log.restored(_head_sum(self.replay))
            return
        shutil.rmtree(self._ring, ignore_errors=True)  # what a process left that died before it was done
        folder.mkdir(parents=True, exist_ok=True)
        saved = None if first is None else first()
        self.replay, self.ledger = ReplayBuffer.open(self._ring, **options, seed=seed), Ledger()
        with _given_up_if_it_fails(self.replay):
            if saved is not None:
                self.replay.append(saved, envs={env: env for env in range(saved.num_envs)})
            self.replay.flush()
            self._log.rewrite(self.ledger)  # after the ring is whole: a ring counts only if there is a ledger
        self._remove_others(folder)

    def _reopened(self, options: ShardOptions) -> ReplayBuffer:
        end = time.monotonic() + REOPEN_SECONDS
        while True:
            try:
                return ReplayBuffer.open(self._ring, **options)
            except LifecycleError:  # the process that had it before is not gone yet
                if time.monotonic() > end:
                    raise
                time.sleep(REOPEN_PAUSE)

    def flush(self) -> None:
        """Write everything through to the disk."""
        self._log.sync()  # first: the lines say which steps the ring has
        self.replay.flush()
        self._log.rewrite(self.ledger)

    def store(self, steps: Mapping[str, object], origin: ChunkOrigin) -> None:
        """Store the steps of a chunk piece by piece, each with its line in the ledger."""
        replay, ledger = self.replay, self.ledger
        intake = Intake(replay, np.array(origin.envs))
        for begin, end in _pieces(steps, origin.steps, intake.most):
            part = origin._replace(start=origin.start + begin, steps=end - begin)
            before = _head_sum(replay)
            self._log.append(part, ledger.counts_after(part), before)  # before the piece: see the class
            try:
                replay.extend(map_leaves(itemgetter(slice(begin, end)), steps), envs=intake.envs)
            except BaseException:
                if _head_sum(replay) > before:
                    ledger.confirm(part)
                self.flush()  # a new file drops the line, which would seem true once other steps are in
                raise
            ledger.confirm(part)
        if self._log.lines > LINES:
            self.flush()

    def _remove_others(self, folder: Path) -> None:
        """Remove the rings of other runs, unless a process has them open."""
        for path in folder.glob("ring-*"):
            if path == self._ring:
                continue
            with suppress(LifecycleError, FileFormatError, OSError):
                holder = Holder(path)  # locks the ring: nobody opens it while it is removed
                try:
                    shutil.rmtree(path)
                    shutil.rmtree(path.with_name(path.name.replace("ring-", "ledger-")), ignore_errors=True)
                finally:
                    holder.release()


def _head_sum(replay: ReplayBuffer) -> int:
    """The sum of the heads of a ring, over all envs."""
    return Intake(replay, np.arange(replay.num_envs)).head_sum()


def _pieces(steps: Mapping[str, object], count: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide ``count`` vector steps into pieces (begin, end). Each piece is stored as a whole or not at all.

    A row that is left out in the middle of an episode interrupts the episode, which takes a call of its own.
    """
    if "mask" in steps:
        stored = as_host(steps["mask"])
        done = as_host(steps["terminated"]) | as_host(steps["truncated"])
        goes_on = np.ones_like(stored)  # before the first step, nobody here knows
        goes_on[1:] = stored[:-1] & ~done[:-1]
        most = 1 if (goes_on & ~stored).any() else most
    return ((begin, min(begin + most, count)) for begin in range(0, count, most))


class LedgerLog:
    """Writes a ledger to a file in a directory.

    The file begins with a whole ledger. Each further line is a chunk that comes next. Each line has a checksum, so that
    a line that a kill has torn is noticed.

    Args:
        folder: the directory.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._descriptor = folder / "ledger", -1
        self.lines: int = 0
        """How many lines were written since the last whole ledger."""

    @property
    def exists(self) -> bool:
        """True if there is a ledger."""
        return self._path.exists()

    def restored(self, heads: int) -> Ledger:
        """The ledger of a ring that is on the disk and has this sum of heads. Further lines go to a new file.

        Raises:
            FileFormatError: there is no file, or it does not begin with a whole ledger.
        """
        lines = list(_lines(self._path)) if self.exists else []
        if not lines or "ledger" not in lines[0]:
            raise FileFormatError(
                f"'{self._path.parent}': expected the ledger of a shard, found none; remove the directory"
            )
        ledger = Ledger.restored(lines[0]["ledger"])
        for line in lines[1:]:
            if line["before"] >= heads:  # heads grow with each piece: this one and all later ones are not in
                break
            rank = Rank(*line["rank"])
            ledger.adopt(ChunkOrigin(rank, tuple(line["envs"]), line["start"], line["steps"], 0), line["counts"])
        self.rewrite(ledger)  # without the lines whose steps are not in the ring
        return ledger

    def append(self, origin: ChunkOrigin, counts: list[int], heads: int) -> None:
        """Note that these steps come next.

        Args:
            origin: the steps.
            counts: those of the ledger after these steps.
            heads: the sum of the ring's heads before them.
        """
        line = {"rank": list(origin.rank), "envs": list(origin.envs), "start": origin.start, "steps": origin.steps}
        # one write, so that a kill or a power cut tears at most the last line, and the checksum shows it
        _write_whole(self._opened(), _encoded(line | {"counts": counts, "before": heads}))
        self.lines += 1

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._opened())

    def rewrite(self, ledger: Ledger) -> None:
        """Begin a new file with a whole ledger. The caller has already flushed the ring to the disk."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # closed first: a line that went to the file before would be lost without an error
        before, self._descriptor, self.lines = self._descriptor, -1, 0
        if before >= 0:
            os.close(before)
        replace_file(self._path, self._path.with_name("draft"), _encoded({"ledger": ledger.state()}))

    def _opened(self) -> int:
        """The descriptor of the file; opened when it is first needed after a rewrite, whether that failed or not."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return self._descriptor

    def __del__(self) -> None:
        if self.__dict__.get("_descriptor", -1) >= 0:
            os.close(self._descriptor)


def _encoded(line: Mapping[str, object]) -> bytes:
    text = json.dumps(line, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _write_whole(descriptor: int, line: bytes) -> None:
    """Append a line to a file, all of it or nothing.

    Raises:
        OSError: the disk is full, or fails.
    """
    count = os.write(descriptor, line)
    if count < len(line):  # a part of a line would hide all the lines after it
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - count)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lines(path: Path) -> Iterator[Any]:
    """The lines of a file, up to the first that is torn."""
    for raw in path.read_bytes().split(b"\n"):
        checksum, _, text = raw.partition(b" ")
        if len(checksum) != 8 or checksum != b"%08x" % crc32(text):
            return
        yield json.loads(text)
