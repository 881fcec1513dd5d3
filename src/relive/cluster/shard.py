"""Shard: one ring of a replay that several processes hold together. Nothing here knows how its messages travel."""

from __future__ import annotations

import os
import time
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import LifecycleError, ParameterError
from ..files import SaveHandle
from ..replay.buffer import ReplayBuffer
from ..samplers.prioritized import Prioritized
from ..samplers.uniform import Uniform
from ..steps.schema import Field
from ..steps.trees import Path
from .blocks import Block, host_leaf, packed_batch, unpacked
from .homes import Home, ShardPlan
from .ledger import Ledger, Origin, Rank
from .portion import Portion, Share

__all__ = ["Allowance", "Chunk", "Shard", "Totals", "require_shardable"]


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
