"""Replay: several shards that draw and learn as one replay.

The file reads from the outside in: the replay, its checkpoints, and then the shards as the learner sees them: the group
of them, the limit that all of them keep, and the messages that nobody waits for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .. import files
from ..batches import Batch, SequenceBatch
from ..core import key
from ..errors import FileFormatError, LifecycleError, ParameterError
from ..files import detached
from ..files.disk import entry, integers, usable
from ..files.format import Array
from ..files.save import to_json
from ..parameters import COUNT_RULE, FLAG_RULE, SECONDS_RULE, TIMEOUT_RULE, require, seed_or_drawn
from ..printable import add_note, shown
from ..processes.blocks import joined_batch
from ..processes.limits import LIMIT_RULE, RateLimit
from ..replay.buffer import ReplayBuffer
from ..replay.checks import require_rows
from ..replay.loading import load_extra as extra_of
from ..replay.saving import describe, rebuild
from ..samplers.prioritized import Prioritized, doubles, errors_by_item, require_float32
from ..samplers.uniform import Uniform
from ..steps.arrays import Bools, Doubles, Ints, as_host, whole_numbers
from ..steps.schema import Schema
from ..views.contract import View, time_first_of
from ..views.transitions import Transition
from .messages import PAUSE, Link
from .plan import LIVES, Partition, Shardable, Share, global_weights, plan, shard_key
from .shard import (
    Allowance,
    Connect,
    Received,
    RingOptions,
    SavedShard,
    ShardPlan,
    ShardRows,
    ShardTotals,
    commit_path,
    require_shardable,
)
from .writer import ClusterWriter, ShardSender, StepPacker

START_TIMEOUT = 600.0
"""Seconds that a shard may take to begin: it may have to load a save, or to compile."""

SAVE_TIMEOUT = 3600.0
"""Seconds that a shard may take to write its part of a checkpoint, or to begin it."""

AGAIN = 1 << 62
"""Added to the number of an attempt, so that its counts never have the seed of a batch."""

ADDED = (
    "size", "completed", "episodes", "late_updates", "not_finite_rewards", "lost_steps", "repeated_steps",
    "dropped_updates", "commits", "insert_waits", "insert_waited", "served", "waiting", "lost",
)  # fmt: skip
"""The figures that are added up over the shards."""


class _Options(NamedTuple):
    """The options of a learner, which a checkpoint does not keep."""

    commit_every: float | None
    durable: bool
    timeout: float
    limit: RateLimit | None
    limit_timeout: float | None
    connect: Connect | None


class Replay:
    """A replay whose envs are divided among shards: processes on one machine or many, each with a ring of its own.

    The learner makes the replay, draws from it, and passes TD errors back. Workers send steps with a :meth:`writer`.
    Together the shards draw as one :class:`relive.ReplayBuffer` of all steps would. ``docs/cluster.md`` says how
    exactly.

    Args:
        schema: the fields of a step, as :class:`relive.ReplayBuffer` takes them.
        capacity: rows of all shards together.
        num_envs: N, over all workers. All steps of an env lie in one shard.
        shards: K, at most N.
        sampler: :class:`relive.Uniform` (default), :class:`relive.Prioritized`, or a :class:`relive.Fresh` around one
            of them.
        view: any view; default :func:`relive.Transition`.
        ordered: as :class:`relive.ReplayBuffer` takes it.
        own_next_obs: as :class:`relive.ReplayBuffer` takes it.
        seed: as long as no shard fails, batch t is a function of (seed, t) and of what is stored at that time.
        path: the directory of :meth:`save`. All shards must reach it. Without a path, a shard that dies comes back
            empty.
        commit_every: seconds between commits of the shards, which :meth:`sample` starts; None is without commits.
        durable: keep each ring in files below ``path``, as :meth:`relive.ReplayBuffer.open` does. A shard that dies
            then comes back with all steps that it had confirmed; commits are for a power cut.
        timeout: seconds to wait for a shard. After that, the learner goes on without the shard until it answers.
        limit: how many rows may be drawn for each step of all workers, such as :class:`relive.SamplesPerInsert`. This
            replay counts both in the limit; do not use the limit anywhere else.
        limit_timeout: seconds that :meth:`sample` waits for the limit; None is for ever.
        connect: makes the shards and the link to them; default: :func:`relive.cluster.ray.actors`, with its defaults.

    Raises:
        ParameterError: an argument is out of range, or the sampler's draws cannot be divided.
        SchemaError: a replay cannot have this schema, or the view cannot read it.
        LifecycleError: ``path`` holds a checkpoint already; use :meth:`load`.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int,
        num_envs: int = 1,
        *,
        shards: int = 1,
        sampler: Shardable | None = None,
        view: View | None = None,
        ordered: bool = True,
        own_next_obs: bool = False,
        seed: int | None = None,
        path: str | os.PathLike[str] | None = None,
        commit_every: float | None = None,
        durable: bool = False,
        timeout: float = 60.0,
        limit: RateLimit | None = None,
        limit_timeout: float | None = None,
        connect: Connect | None = None,
    ) -> None:
        if path is not None and _manifest(path).exists():
            raise LifecycleError(f"'{path}' holds a replay; go on with Replay.load(path), or choose another directory")
        sampler, view = Uniform() if sampler is None else sampler, Transition() if view is None else view
        state = Checkpoint(
            schema, capacity, num_envs, shards, ordered, own_next_obs, seed_or_drawn(seed), 0, 0, 0, sampler, view
        )
        self._begin(state, path, _Options(commit_every, durable, timeout, limit, limit_timeout, connect), ())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        shards: int | None = None,
        capacity: int | None = None,
        sampler: Shardable | None = None,
        view: View | None = None,
        commit_every: float | None = None,
        durable: bool = False,
        timeout: float = 60.0,
        limit: RateLimit | None = None,
        limit_timeout: float | None = None,
        connect: Connect | None = None,
    ) -> Replay:
        """The replay of the last :meth:`save`. :func:`load_extra` gives what was saved with it.

        With as many shards as before, it draws the batches that the saved one would have drawn next. With another
        number of shards, whole envs move, with their steps and TD errors. Indices of earlier batches then mean nothing.
        New writers begin new episodes in any case.

        Args:
            path: the directory.
            shards: another number of shards.
            capacity: another number of rows; the newest of each env are kept.
            sampler: needed if the saved one was your own, or to change its parameters.
            view: needed if the saved one was your own.
            commit_every: as the constructor takes it.
            durable: as the constructor takes it. If True, steps and TD errors move into new files, as with another
                number of shards.
            timeout: as the constructor takes it.
            limit: as the constructor takes it. The limit goes on with the saved counts.
            limit_timeout: as the constructor takes it.
            connect: as the constructor takes it.

        Raises:
            FileFormatError: there is no checkpoint, or it is damaged.
            ParameterError: as the constructor.
        """
        saved = Checkpoint.read(path, sampler, view)
        state = saved._replace(
            shards=saved.shards if shards is None else shards, capacity=saved.capacity if capacity is None else capacity
        )
        replay = cls.__new__(cls)
        require("load", LIMIT_RULE, limit=limit)
        if limit is not None and saved.counted is not None:
            limit.load_state_dict(dict(zip(("inserts", "samples"), saved.counted, strict=True)))
        options = _Options(commit_every, durable, timeout, limit, limit_timeout, connect)
        replay._begin(state, path, options, saved.saved_shards(path))
        return replay

    def _begin(
        self,
        state: Checkpoint,
        path: str | os.PathLike[str] | None,
        options: _Options,
        sources: tuple[SavedShard, ...],
    ) -> None:
        """Check everything, and then start the shards."""
        every, durable, limit = options.commit_every, options.durable, options.limit
        flags = {"ordered": state.ordered, "own_next_obs": state.own_next_obs, "durable": durable}
        require("Replay", FLAG_RULE, **flags)
        require("Replay", LIMIT_RULE, limit=limit)
        require("Replay", TIMEOUT_RULE, limit_timeout=options.limit_timeout)
        require("Replay", (lambda schema: isinstance(schema, Schema), "expected a relive.Schema"), schema=state.schema)
        if durable and path is None:
            raise ParameterError("Replay(durable=True): rings in files need a directory; pass path=...")
        require("Replay", SECONDS_RULE, timeout=options.timeout, commit_every=1.0 if every is None else every)
        self._partition = Partition(state.num_envs, state.shards)
        require_shardable(state.sampler, state.view)
        require("Replay", COUNT_RULE, capacity=state.capacity)
        # a ring of one env, so that wrong arguments raise their error here and not in a shard
        ReplayBuffer(capacity=state.capacity // state.num_envs, num_envs=1, seed=0, **deepcopy(state.ring_options))
        self._state, self._path, self._commit_every = state, path, every
        most_at_once = None if limit is None else limit.most_at_once
        self._most = None if most_at_once is None else most_at_once // state.shards
        """The most steps that a shard may get at once, so that nobody waits for ever; None without a bound."""
        self._group = Group((options.connect or _actors)(self._plans(sources, durable)), state.shards, options.timeout)
        self._group.start(START_TIMEOUT)
        self._limit = None if limit is None else ShardLimit(limit, self._group, options.limit_timeout)
        self._outbox = Outbox(self._group)
        self._redrawn = 0
        """How many rows other shards gave in place of a shard that failed to give them."""
        self._own_writer: ClusterWriter | None = None
        self._cut, self._committed = state.cut, time.monotonic()
        """The number of the last checkpoint, and when the last commits were begun."""
        self._saving: ClusterSave | None = None
        """The last save in the background, until its end was seen."""

    def _plans(self, sources: tuple[SavedShard, ...], durable: bool) -> list[ShardPlan]:
        """The plans of the shards of a new run, which begin with the ``sources``."""
        state, path = self._state, self._path
        # absolute, as shards have working directories of their own; and a run that no earlier commit has
        home, run = None if path is None else os.path.abspath(path), os.urandom(8).hex()
        common: dict[str, Any] = {"shards": state.shards, "run": run, "options": state.ring_options, "home": home}
        common |= {"sources": sources, "most": self._most, "durable": durable}
        parts = enumerate(self._partition.parts(state.capacity))
        return [ShardPlan(k, *part, seed=key(state.seed, k), **common) for k, part in parts]

    # -- writing ------------------------------------------------------------------------------------------------

    def writer(
        self, envs: ArrayLike | Tensor | None = None, *, in_flight: int = 2, timeout: float = 300.0
    ) -> ClusterWriter:
        """A writer, which sends the steps of ``envs`` (default: all) to their shards. Pass it to the worker that plays.

        Args:
            envs: different whole numbers below N, such as ``range(8)``. A new writer replaces the old ones of its envs.
            in_flight: how many chunks may be on their way to a shard.
            timeout: seconds that a worker waits for a shard that does not answer.

        Raises:
            ParameterError: an argument is out of range.
        """
        require("writer", COUNT_RULE, in_flight=in_flight)
        require("writer", SECONDS_RULE, timeout=timeout)
        state, chosen = self._state, _chosen_envs(envs, self._state.num_envs)
        packer = StepPacker(state.schema, len(chosen), state.own_next_obs or not state.ordered)
        link = self._group.link
        senders = [ShardSender(link, part, in_flight, timeout) for part in self._partition.by_shard(chosen)]
        return ClusterWriter(packer, chosen, senders, self._most)

    def extend(self, steps: Mapping[str, object]) -> None:
        """Store steps of all envs ``[T, N, ...]``, as :meth:`relive.ReplayBuffer.extend`; returns once they are stored.

        Raises:
            FieldError, ShapeError, DTypeError: the steps do not fit. Nothing is stored.
            LifecycleError: a shard does not answer; or an env has got a newer writer.
        """
        if self._own_writer is None:
            self._own_writer = self.writer(timeout=self._group.timeout)
        if self._limit is not None:
            self._group.refresh()  # brings the shards what the limit allows by now
        self._own_writer.extend(steps)
        self._own_writer.flush()

    # -- drawing ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of transitions that can be drawn from the shards that answer."""
        return sum(self._group.totals[k].size for k in self._group.refresh())

    def sample(self, batch_size: int) -> Any:
        """One batch ``[batch_size]``, shard after shard, with the fields of :meth:`relive.ReplayBuffer.sample`.

        All TD errors passed before are in effect. If a shard does not answer, the others draw its rows instead. With
        :class:`relive.Fresh`, the part of each shard begins with its new rows.

        Raises:
            EmptyError: there is no complete transition.
            ParameterError: ``batch_size`` is not positive.
            LifecycleError: no shard answers.
            WaitTimeoutError: the limit did not allow the batch within ``limit_timeout``.
        """
        require_rows(batch_size)
        self._outbox.drain()
        self._look_at_saves()
        self._group.refresh()  # a shard reads its messages in order, so these totals have all TD errors sent before
        limit, state = self._limit, self._state
        if limit is not None:
            limit.await_batch(batch_size)
        received = self._group.received.copy()
        try:
            batch, new = self._draw(batch_size)
        except BaseException:
            self._group.received = received  # shards that gave rows serve the new ones again
            if limit is not None:
                limit.limit.count(samples=-batch_size)  # nothing was drawn of what await_batch() counted
            raise
        drawn, sampled, only_new = state.draws + 1, state.sampled + batch_size, state.only_new + (new == batch_size)
        self._state = state._replace(draws=drawn, sampled=sampled, only_new=only_new)
        return batch

    def _draw(self, batch_size: int) -> tuple[Batch | SequenceBatch, int]:
        """Draw the next batch; returns it, and how many of its rows are new.

        The caller has just read the totals of the shards.

        The shards' masses decide how many rows each shard draws. Each then draws from the rows that it has when it is
        asked. The probability of a row is the product of the two chances. So it is exact even if rows come or get new
        priorities in between. If none do, a prioritized batch is the one that a single ring of all rows draws.

        Raises:
            EmptyError: no shard that answers has anything to draw.
            LifecycleError: no shard answers, or none gives rows.
        """
        # two round trips: the learner plans the masses, and the shards find the rows. To plan with the masses of the
        # batch before would save one, but TD errors would count a batch late
        group, drawn, used = self._group, list[_Part](), dict[int, float]()
        patience = (group.count + 1) * group.timeout  # each shard may take its time
        missing, attempt, end = batch_size, 0, time.monotonic() + patience
        while missing:
            masses, waiting = np.zeros(group.count), np.zeros(group.count, np.int64)  # 0 for those that do not answer
            masses[group.up] = [group.totals[shard].mass for shard in group.up]
            waiting[group.up] = [group.totals[shard].waiting for shard in group.up]
            shares = self._shares(masses, waiting, missing, attempt)
            requests = {shard: ("sample", share, group.largest) for shard, share in shares.items()}
            for shard, (totals, given) in group.ask(requests).items():
                group.note(shard, totals)
                if given is not None:
                    group.received[shard] = Received(totals.born, totals.given)
                    drawn.append(_Part(shard, float(masses[shard]), group.life(shard, totals.born), given))
                    missing -= given.rows
            # each shard counts with the mass of its first attempt, also one that gave rows and died since
            used = {k: used.get(k, float(masses[k])) for k in {*group.up, *(part.shard for part in drawn)}}
            attempt += 1
            if missing:
                self._redrawn += missing
                if time.monotonic() > end:
                    raise LifecycleError(
                        f"the {group.count} shards answer, but have not given {missing} rows in {patience:g} s; look "
                        "into the logs of their processes"
                    )
                group.refresh()
        drawn.sort(key=lambda part: part.shard)
        batch = self._joined(drawn, sum(used[k] for k in sorted(used)))  # sorted: a sum of doubles depends on the order
        return batch, sum(part.given.new for part in drawn)

    def _shares(self, masses: Doubles, waiting: Ints, count: int, attempt: int) -> dict[int, Share]:
        """Divide ``count`` rows among the shards. With priorities, one tree of all rows would draw the same rows."""
        state = self._state
        sampler, t = state.sampler.prioritized, state.draws
        seed = key(state.seed, AGAIN + attempt) if attempt else state.seed
        stratified = sampler is not None and sampler.stratified
        planned = plan(masses, count, seed, t, stratified=stratified, waiting=waiting)
        counts, new = planned.counts().tolist(), planned.new.tolist()
        at = {k: np.empty(0) if sampler is None else planned.of(k) for k, rows in enumerate(counts) if rows}
        return {
            k: Share(counts[k] - new[k], shard_key(seed, t, k), float(masses[k]), masses_of_it, new[k])
            for k, masses_of_it in at.items()
        }

    def _joined(self, drawn: Sequence[_Part], mass: float) -> Batch | SequenceBatch:
        """The batch of these rows. ``mass`` is that of all shards that they were drawn from."""
        blocks = [part.given.block for part in drawn]
        facts = () if blocks[0].spec.time_first is None else ("facts",)
        arrays, extras = [block.arrays() for block in blocks], dict[str, Tensor]()
        if any(part.life for part in drawn):  # in its first life a shard's indices are public as they are
            for name in [name for name in ("index", "next_index") if (*facts, name) in arrays[0]]:
                indices = [of[(*facts, name)] for of in arrays]
                public = [self._partition.public(x, part.life) for x, part in zip(indices, drawn, strict=True)]
                extras[name] = torch.from_numpy(np.concatenate(public))
        sampler = self._state.sampler.prioritized
        if sampler is not None:
            # a shard gives probabilities within the shard; times the mass of the plan, they are priorities
            chances = [of[(*facts, "probability")] * part.mass for of, part in zip(arrays, drawn, strict=True)]
            by_chance = np.concatenate([np.arange(part.given.rows) >= part.given.new for part in drawn])
            extras |= self._weights(sampler, np.concatenate(chances), by_chance, mass)
        return joined_batch(blocks, extras)

    def _weights(self, sampler: Prioritized, priorities: Doubles, by_chance: Bools, mass: float) -> dict[str, Tensor]:
        """The ``weight`` and ``probability`` of rows with these priorities, as one ring of all shards gives them.

        Both are 1 for new rows, those that were not drawn ``by_chance``.
        """
        weight, probability = np.ones(len(priorities), np.float32), np.ones(len(priorities))
        drawn = priorities[by_chance]
        if len(drawn):
            least = float(drawn.min())
            if sampler.normalize == "buffer":
                least = min([least, *(self._group.totals[shard].least for shard in self._group.up)])
            beta = sampler.beta_at(self._state.draws - self._state.only_new)
            weight[by_chance], probability[by_chance] = global_weights(drawn, least, beta), drawn / mass
        return {"weight": torch.from_numpy(weight), "probability": torch.from_numpy(probability)}

    def update_priorities(
        self, index: ArrayLike | Tensor, td_error: ArrayLike | Tensor, mask: ArrayLike | Tensor | None = None
    ) -> None:
        """Set the priorities of a batch. Arguments are those of :meth:`relive.ReplayBuffer.update_priorities`.

        The errors are on their way when this returns, and in effect for every later :meth:`sample`. Errors that cannot
        be set, because the transition is gone or its shard was restarted or does not answer, are counted in
        :meth:`stats`.

        Raises:
            LifecycleError: the sampler has no priorities.
            ShapeError: the shapes differ, or do not have the batch's layout.
            ParameterError: an index was never issued.
            NotFiniteError: a TD error that counts is NaN or infinite. Nothing is changed in any of these cases.
        """
        if self._state.sampler.prioritized is None:
            raise LifecycleError(f"{self._state.sampler!r} has no priorities; use sampler=Prioritized()")
        indices, errors, view = whole_numbers(index, "index"), doubles(td_error), self._state.view
        real = None if mask is None else as_host(mask, "mask")
        by_item, _ = errors_by_item(time_first_of(view), indices, errors, real)
        require_float32(by_item)  # raises before any shard is changed
        axis = 1 if errors.ndim == 2 and time_first_of(view) else 0
        group = self._group
        for life, (shard, at, inside) in self._partition.of_index(indices):
            born, part = group.born(shard, life), None if real is None else real.take(at, axis)
            if born is None:
                raise ParameterError(f"index: entry {at[0]}, {indices[at[0]]}, was never issued; pass batch['index']")
            if not group.lives_in(shard, life):
                self._outbox.dropped += len(at)
                continue
            # with the life: the shard may be restarted before it reads this, and have other rows at these indices
            self._outbox.send(shard, len(at), "update", born, inside, errors.take(at, axis), part, group.largest)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(self, *, extra: object = None, background: bool = False) -> ClusterSave:
        """Write a checkpoint of all shards and of ``extra``, the learner's state, to the directory ``path``.

        The checkpoint holds the TD errors passed before this call, and for every writer the steps up to some chunk.
        Once every shard has written its part, the checkpoint as a whole takes the place of the last one.

        Args:
            extra: as :meth:`relive.ReplayBuffer.save` takes it.
            background: return once all shards have begun, and go on while they write. ``extra`` is copied. The
                checkpoint counts once a later call of this replay, or ``wait()`` of the returned save, finds that all
                shards are done. Only one such save is under way at a time: the next call waits for it.

        Raises:
            LifecycleError: there is no ``path``, or a shard does not answer. The last checkpoint still counts.
            FileFormatError: ``extra`` has a value that cannot be stored.
            OSError: a disk is full, or fails.
        """
        require("save", FLAG_RULE, background=background)
        self._outbox.drain(0)  # the shards have all TD errors before they are told to commit
        if self._path is None:
            raise LifecycleError("save(): this replay has no directory; create it with path=...")
        self._finish_save()  # two saves at a time would write into one of the two directories of a shard
        described, tensors = to_json(extra)
        tensors, group, cut = detached(tensors), self._group, self._cut + 1
        group.refresh()
        begun = group.ask(dict.fromkeys(group.up, ("commit", cut, background)), SAVE_TIMEOUT)
        missing = sorted(set(range(group.count)) - begun.keys())
        if missing:
            raise LifecycleError(f"save(): shards {missing} do not answer; the last checkpoint still counts, try again")
        counted = None if self._limit is None else (*self._limit.limit.state_dict().values(),)
        state = self._state._replace(counted=counted, cut=cut)
        saving = ClusterSave(group, self._path, state, (described, tensors), self._note_checkpoint)
        if background:
            self._saving = saving
        else:
            saving.wait()
        return saving

    def _finish_save(self) -> None:
        """Wait for the save that is under way, if there is one, and raise its error once."""
        saving, self._saving = self._saving, None
        if saving is not None:
            while not saving.done:
                time.sleep(PAUSE)
            saving.raise_unseen()

    def _look_at_saves(self) -> None:
        """Bring the save that is under way further, and start a commit if it is time."""
        if self._saving is not None:
            self._saving.look()
        now, every = time.monotonic(), self._commit_every
        if every is not None and self._path is not None and now - self._committed > every:
            self._committed = now
            for shard in self._group.up:
                self._outbox.send(shard, 0, "commit", None)

    def _note_checkpoint(self, cut: int) -> None:
        self._cut, self._committed = cut, time.monotonic()

    # -- figures, and the end -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Figures of the shards that answer, added up, and of what has failed.

        - ``size``, ``completed``, ``episodes``, ``late_updates``, ``not_finite_rewards``: as in
          :meth:`relive.ReplayBuffer.stats`;
        - ``batches``, ``sampled``: the batches and rows that this learner has drawn;
        - ``shards``, ``shards_up``: how many shards there are, and how many answer;
        - ``restarts``: how often a shard came back; ``unanswered``: calls without an answer;
        - ``redrawn``: rows of batches that another shard gave instead;
        - ``lost_steps``: steps that a restarted shard had confirmed and no longer has. The number is complete once its
          writers have come back to the shard. Before, it has at least the steps that this learner knew of;
        - ``repeated_steps``: steps that came twice and were stored once;
        - ``dropped_updates``: TD errors for a shard that was restarted or did not answer;
        - ``commits``: commits of the shards;
        - ``served``, ``waiting``, ``lost``: with :class:`relive.Fresh`, as that counts them;
        - ``insert_waits``, ``sample_waits``: how often a writer and the learner had to wait for the limit;
          ``insert_waited``, ``sample_waited``: how many seconds in all.
        """
        self._outbox.drain()
        group, state = self._group, self._state
        group.refresh()
        each = group.ask(dict.fromkeys(group.up, ("stats",)))
        figures = {name: sum(stats[name] for stats in each.values()) for name in ADDED}
        # a shard counts its loss when its writers come back, the group when the shard does: the larger one has both
        counted = {shard: stats["lost_steps"] for shard, stats in each.items()}
        lost = [max(counted.get(shard, 0.0), float(group.forgotten[shard])) for shard in range(group.count)]
        limited = {} if self._limit is None else self._limit.limit.stats()
        figures["dropped_updates"] += self._outbox.dropped
        return figures | {
            "batches": float(state.draws),
            "sampled": float(state.sampled),
            "shards": float(group.count),
            "shards_up": float(len(group.up)),
            "restarts": float(group.restarts),
            "unanswered": float(group.unanswered),
            "lost_steps": sum(lost),
            "redrawn": float(self._redrawn),
            "sample_waits": limited.get("sample_waits", 0.0),
            "sample_waited": limited.get("sample_waited", 0.0),
        }

    def close(self) -> None:
        """End the shards, after a save that is under way has come to its end. What was not saved is gone."""
        try:
            self._finish_save()
        finally:
            self._group.link.close()

    def __repr__(self) -> str:
        s = self._state
        return (
            f"Replay({s.schema!r}, capacity={s.capacity}, num_envs={s.num_envs}, shards={s.shards}, "
            f"sampler={s.sampler!r}, view={s.view!r}, seed={s.seed})"
        )


class _Part(NamedTuple):
    """The part of a batch that one shard drew."""

    shard: int
    mass: float
    """The mass of the shard when the counts were drawn."""
    life: int
    given: ShardRows


def load_extra(path: str | os.PathLike[str]) -> Any:
    """The ``extra`` of the last :meth:`Replay.save` in this directory.

    Args:
        path: the directory.
    """
    return extra_of(_manifest(path))


def _chosen_envs(envs: ArrayLike | Tensor | None, num_envs: int) -> Ints:
    """The envs of a writer, int64 ``[N]``.

    Raises:
        ParameterError: an env comes twice or does not exist, or none is given.
        ShapeError, DTypeError: this is no array.
    """
    chosen = np.arange(num_envs) if envs is None else as_host(envs, "writer(envs=...)")
    fits = chosen.ndim == 1 and chosen.size > 0 and chosen.dtype.kind in "iu" and len(np.unique(chosen)) == len(chosen)
    if not fits or chosen.min() < 0 or chosen.max() >= num_envs:
        raise ParameterError(
            f"writer(envs={envs!r:.80}): expected different whole numbers from 0 to {num_envs - 1}, such as range(8)"
        )
    return chosen.astype(np.int64)


def _actors(plans: list[ShardPlan]) -> Link:
    from .ray import actors

    return actors()(plans)


# Checkpoints


KIND = "relive.cluster.Replay"


class Checkpoint(NamedTuple):
    """The state of the learner's side."""

    schema: Schema
    capacity: int
    num_envs: int
    shards: int
    ordered: bool
    own_next_obs: bool
    seed: int
    draws: int
    """Batches drawn."""
    sampled: int
    """Rows drawn."""
    cut: int
    """The number of the shards' commits that belong to it."""
    sampler: Shardable
    view: View
    counted: tuple[int, int] | None = None
    """Steps and rows that its limit of samples per insert has counted; None without one."""
    only_new: int = 0
    """Batches that had new rows alone."""

    @property
    def ring_options(self) -> RingOptions:
        """Arguments of the ring of each shard."""
        return {
            "schema": self.schema,
            "sampler": self.sampler,
            "view": self.view,
            "ordered": self.ordered,
            "own_next_obs": self.own_next_obs,
        }

    def write(self, path: str | os.PathLike[str], extra: tuple[object, Mapping[str, Array]]) -> None:
        """Replace the checkpoint in a directory. The shards' commits of its number are on the disk already.

        Until this is done, the old checkpoint counts.

        Args:
            path: the directory.
            extra: what the user added, as :func:`relive.files.save.to_json` gives it.

        Raises:
            OSError: the disk is full, or fails.
        """
        described, tensors = extra
        content = {
            "kind": KIND,
            "schema": json.loads(self.schema.to_json()),
            "sizes": [self.capacity, self.num_envs, self.shards],
            "ordered": self.ordered,
            "own_next_obs": self.own_next_obs,
            "seed": self.seed,
            "counts": [self.draws, self.sampled, self.cut],
            "only_new": self.only_new,
            "sampler": describe(self.sampler),
            "view": describe(self.view),
            "extra": described,
            "limit": None if self.counted is None else list(self.counted),
        }
        files.write(_manifest(path), tensors, content)

    @classmethod
    def read(cls, path: str | os.PathLike[str], sampler: Shardable | None, view: View | None) -> Checkpoint:
        """The checkpoint in a directory, with this sampler and view where they are not None.

        Raises:
            FileFormatError: there is no checkpoint, or it is damaged or foreign; or its sampler or view was the user's
                own and is not given.
        """
        with files.Save(_manifest(path)) as save:
            content = save.content
        if content.get("kind") != KIND:
            raise FileFormatError(f"'{path}' is a save of {shown(content.get('kind'))}, not of a {KIND}")
        schema = Schema.from_json(json.dumps(content.get("schema")))
        capacity, num_envs, shards = integers(content, "sizes", 3).tolist()
        draws, sampled, cut = integers(content, "counts", 3).tolist()
        ordered, own = entry(content, "ordered", bool), entry(content, "own_next_obs", bool)
        seed = entry(content, "seed", int)
        parts = (
            rebuild(content.get("sampler"), "sampler") if sampler is None else sampler,
            rebuild(content.get("view"), "view") if view is None else view,
        )
        counted = None
        if content.get("limit") is not None:  # saves of earlier versions have none
            inserts, samples = integers(content, "limit", 2).tolist()
            counted = inserts, samples
        only_new = entry({"only_new": 0, **content}, "only_new", int)  # as above
        sizes = capacity, num_envs, shards
        return cls(schema, *sizes, ordered, own, seed, draws, sampled, cut, *parts, counted, only_new)

    def saved_shards(self, path: str | os.PathLike[str]) -> tuple[SavedShard, ...]:
        """The shards of this checkpoint, which is in directory ``path``."""
        home = os.path.abspath(path)  # shards have working directories of their own
        parts = Partition(self.num_envs, self.shards).parts(self.capacity)
        return tuple(SavedShard(str(commit_path(home, k, self.cut)), *part) for k, part in enumerate(parts))


def _manifest(path: str | os.PathLike[str]) -> Path:
    """The directory of the learner's side of a checkpoint."""
    return usable(path) / "replay"


class ClusterSave:
    """A checkpoint. The shards write their parts, and then one rename makes the whole checkpoint count.

    :meth:`relive.cluster.Replay.save` returns it. The later calls of the learner bring it to its end; so does
    :meth:`wait`. If the process ends earlier, the last checkpoint counts.
    """

    def __init__(
        self,
        group: Group,
        path: str | os.PathLike[str],
        state: Checkpoint,
        extra: tuple[object, Mapping[str, Array]],
        on_done: Callable[[int], object],
    ) -> None:
        """Watch the commits that all shards have begun.

        ``on_done`` is called with the number of the checkpoint once the checkpoint counts.
        """
        self.path: str = os.fspath(path)
        """The directory."""
        self._group, self._state, self._extra, self._on_done = group, state, extra, on_done
        self._calls = {shard: self._ask(shard) for shard in range(group.count)}
        """The call that asks each shard which is not done yet."""
        self._error: BaseException | None = None
        self._error_was_raised = False

    @property
    def done(self) -> bool:
        """True once the save is over: the checkpoint counts, or the save failed."""
        self.look()
        return not self._calls

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint counts.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            LifecycleError: a shard does not answer, or died while it wrote. The last checkpoint still counts.
            FileFormatError, OSError: a shard or the learner could not write its part.
            TimeoutError: the save is not done yet. It goes on.
        """
        require("wait", TIMEOUT_RULE, timeout=timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"the save into '{self.path}' is not done after {timeout} seconds; wait again")
            time.sleep(PAUSE)
        if self._error is not None:
            self._error_was_raised = True
            raise self._error

    def look(self) -> None:
        """Ask which shards are done. If all are, the checkpoint counts from now on."""
        if not self._calls:
            return
        try:
            answers, failed = self._group.link.answers(self._calls, 0.0)
            if failed:
                raise LifecycleError(f"shards {sorted(failed)} died while they wrote; the last checkpoint still counts")
            for shard, is_done in answers.items():
                del self._calls[shard]
                if not is_done:
                    self._calls[shard] = self._ask(shard)
            if not self._calls:
                self._state.write(self.path, self._extra)  # last: a crash before it leaves the old checkpoint whole
                self._on_done(self._state.cut)
        except Exception as error:
            self._error, self._calls = error, {}

    def raise_unseen(self) -> None:
        """Raise the error of a save that failed, unless :meth:`wait` has raised it."""
        if self._error is not None and not self._error_was_raised:
            self._error_was_raised = True
            add_note(self._error, "this is the error of the save before, in the background; now nothing was saved")
            raise self._error

    def _ask(self, shard: int) -> object:
        return self._group.link.call(shard, "committed", self._state.cut)

    def __repr__(self) -> str:
        state = "under way" if self._calls else "failed" if self._error else "done"
        return f"<save into {self.path!r}: {state}>"


# The shards as the learner sees them


class Group:
    """Asks shards, and goes on without those that do not answer until they do.

    Args:
        link: to the shards.
        count: K.
        timeout: seconds to wait for an answer.
    """

    link: Link
    count: int
    timeout: float

    def __init__(self, link: Link, count: int, timeout: float) -> None:
        self.link, self.count, self.timeout = link, count, timeout
        self.totals: list[ShardTotals] = []
        """The totals that each shard last gave; none before all have begun."""
        self.largest: float = 0.0
        """The largest TD error that any shard has seen."""
        self.received: dict[int, Received] = {}
        """The batches of each shard that have come here, and were not given up since. Sent with each question for its
        totals, so that new rows whose way here was lost are served again."""
        self.forgotten: list[int] = [0] * count
        """How many steps each shard has lost: it had them in its last totals, and not when it came back."""
        self.allowances: Callable[[], Sequence[Allowance | None]] = lambda: [None] * count
        """How many steps each shard may store. The shard learns it with each question for its totals."""
        self.answered: Callable[[int, ShardTotals], None] = lambda shard, totals: None
        """Called with the totals of a shard that has got its allowance."""
        self._lives: list[list[str]] = [[] for _ in range(count)]
        """The lives of each shard that were seen, in their order. Public indices name them by their numbers."""
        self._probes: dict[int, tuple[object, float]] = {}
        """Calls to the shards that are down, and when they were made."""
        self.unanswered: int = 0
        """Calls that a shard did not answer, in time or at all."""

    @property
    def up(self) -> list[int]:
        """The shards that answered the last question that they were asked."""
        return [shard for shard in range(self.count) if shard not in self._probes]

    @property
    def restarts(self) -> int:
        """How often a shard came back in a new life."""
        return sum(max(len(lives) - 1, 0) for lives in self._lives)

    def ask(self, calls: Mapping[int, tuple[Any, ...]], timeout: float | None = None) -> dict[int, Any]:
        """Call the shards in ``calls`` that are up, and return the answers that come in time."""
        sent = {k: self.link.call(k, *call) for k, call in calls.items() if k not in self._probes}
        answers, _ = self.link.answers(sent, self.timeout if timeout is None else timeout)
        for shard in sent.keys() - answers.keys():  # an answer that comes later is not read: the probe asks again
            self.unanswered += 1
            self._probe(shard)
        return answers

    def start(self, timeout: float) -> None:
        """Wait until all shards have begun. A shard may have to load a save, or to compile.

        Raises:
            LifecycleError: a shard has not begun within ``timeout`` seconds.
            ReliveError: a shard cannot load its save.
        """
        answers = self.ask(dict.fromkeys(range(self.count), ("totals",)), timeout)
        if self._probes:
            raise LifecycleError(f"shards {sorted(self._probes)} did not start; look into the logs of their processes")
        self.totals = [answers[shard] for shard in range(self.count)]
        for shard, totals in enumerate(self.totals):
            self.note(shard, totals)

    def refresh(self) -> list[int]:
        """Read the totals of all shards that answer, and return these shards. Those that came back are among them.

        Raises:
            LifecycleError: none answers within the timeout.
        """
        end = time.monotonic() + self.timeout
        while True:
            self._revive()
            allowances = self.allowances()
            requests = {shard: ("totals", self.largest, allowances[shard], self._received(shard)) for shard in self.up}
            for shard, totals in self.ask(requests).items():
                self.note(shard, totals)
                self.answered(shard, totals)
            if self.up:
                return self.up
            if time.monotonic() > end:
                raise LifecycleError(
                    f"none of the {self.count} shards has answered for {self.timeout:g} s; look into the logs of the "
                    "actors, or raise timeout"
                )
            time.sleep(PAUSE)

    def _received(self, shard: int) -> Received:
        """The batches of the last known life of a shard."""
        born, known = self.totals[shard].born, self.received.get(shard)
        return known if known is not None and known.born == born else Received(born, 0)

    def note(self, shard: int, totals: ShardTotals) -> None:
        """Note the totals that a shard gave."""
        before = self.totals[shard]
        if before.born != totals.born:
            self.forgotten[shard] += max(before.stored - totals.stored, 0)
        self.totals[shard], self.largest = totals, max(self.largest, totals.largest)
        lives = self._lives[shard]
        if totals.born not in lives:  # before an index of this life leaves the group
            if len(lives) == LIVES:  # no index could name this life
                raise LifecycleError(f"shard {shard} was restarted {LIVES} times; find out why, and load the last save")
            lives.append(totals.born)

    def life(self, shard: int, born: str) -> int:
        """The number of a life of a shard. The life was noted before."""
        return self._lives[shard].index(born)

    def born(self, shard: int, life: int) -> str | None:
        """The life with this number, or None if there was none."""
        lives = self._lives[shard]
        return lives[life] if life < len(lives) else None

    def lives_in(self, shard: int, life: int) -> bool:
        """True if a shard is still in this life, as far as is known here."""
        return life == len(self._lives[shard]) - 1 and shard not in self._probes

    def _probe(self, shard: int) -> None:
        """Ask a shard that is down for its totals. The answer is looked for with each :meth:`refresh`."""
        self._probes[shard] = self.link.call(shard, "totals", self.largest), time.monotonic()

    def _revive(self) -> None:
        """Note the shards that were down and have answered since.

        Raises:
            ReliveError: what a shard raised when it began again. It is raised once.
        """
        for shard, (probe, since) in list(self._probes.items()):
            try:
                answers, failed = self.link.answers({shard: probe}, 0.0)
            except BaseException:
                self._probe(shard)  # another question, since this one would raise the same error for ever
                raise
            if shard in answers:
                del self._probes[shard]  # it is up; its allowance comes with the next question
                self.note(shard, answers[shard])
            elif shard in failed and time.monotonic() - since > PAUSE:
                self._probe(shard)


LIMIT_PAUSE = 0.02
"""Seconds between two checks whether the shards have enough steps."""


class ShardLimit:
    """Holds the learner back, and gives each shard an allowance of steps, so that all together keep the limit.

    A shard stores steps up to its allowance. Allowances travel with the questions for totals. All allowances together
    stay within the limit. A full shard answers at once instead of waiting, since it has one thread. If a shard does not
    use its part, the part is taken away, and goes to other shards once that shard has answered. The allowance of a
    shard that does not answer any more is not counted, since the others would wait for it.

    Args:
        limit: counts the steps and rows of all shards.
        group: the shards.
        timeout: seconds that a batch may wait; None is for ever.
    """

    limit: RateLimit

    def __init__(self, limit: RateLimit, group: Group, timeout: float | None) -> None:
        self.limit, self._group, self._timeout = limit, group, timeout
        self._before = limit.counted()[0] - sum(total.stored for total in group.totals)
        """Steps that the limit had counted when this began, less those that the shards had stored."""
        self._bounds = [0] * group.count
        """The most steps that each shard may have stored by now, as the shard counts them."""
        self._allowed: list[Allowance | None] = [None] * group.count
        """The allowance that each shard was last sent."""
        group.allowances, group.answered = self.allowances, self.answered

    def allowances(self) -> list[Allowance | None]:
        """The allowance that each shard gets with the next question for its totals; None if the limit has no bound."""
        totals, up = self._group.totals, self._group.up
        stored = [total.stored for total in totals]
        room = self.limit.room(self._inserted(), self.limit.counted()[2])
        if room is None:
            return self._allowed
        # a shard may use an allowance until it has answered: what it may have stored counts as used
        bounds = [max(bound, have) for bound, have in zip(self._bounds, stored, strict=True)]
        free = room - sum(bounds[shard] - stored[shard] for shard in up)
        for shard in up:
            # an equal part of the room, and no more than older allowances of all shards leave free
            granted = min(stored[shard] + room // len(up), bounds[shard] + max(free, 0))
            free -= max(granted - bounds[shard], 0)
            self._allowed[shard] = Allowance(totals[shard].born, granted)
            bounds[shard] = max(bounds[shard], granted)
        self._bounds = bounds
        return self._allowed

    def answered(self, shard: int, totals: ShardTotals) -> None:
        """Note the totals of a shard that has got its allowance."""
        allowance = self._allowed[shard]
        # a shard that was restarted may store nothing yet
        used = allowance.steps if allowance is not None and allowance.born == totals.born else 0
        self._bounds[shard] = max(totals.stored, used)

    def await_batch(self, batch_size: int) -> None:
        """Wait until the limit allows a batch, and count it. The caller has just read the totals.

        Raises:
            WaitTimeoutError: the wait takes longer than the timeout.
            ParameterError: batches of this size could make both sides wait for ever.
            LifecycleError: no shard answers.
        """
        limit, begin = self.limit, time.monotonic()
        limit.require_samples(batch_size)
        waited = False
        while not self._allows(batch_size):
            waited = True
            if self._timeout is not None and time.monotonic() - begin > self._timeout:
                limit.note_sample_wait(time.monotonic() - begin)
                raise limit.late_sample(batch_size, self._timeout)
            time.sleep(LIMIT_PAUSE)
            self._group.refresh()
        if waited:
            limit.note_sample_wait(time.monotonic() - begin)
        limit.count(samples=batch_size)

    def _allows(self, batch_size: int) -> bool:
        """True if a batch may be drawn. First brings the limit's count of steps up to date."""
        limit, inserts = self.limit, self._inserted()
        limit.count(inserts=inserts - limit.counted()[0])  # the difference, so that the count is that of the shards
        return limit.allows_samples(batch_size, inserts, limit.counted()[2])

    def _inserted(self) -> int:
        """How many steps all shards have ever stored, with those that a shard has lost since."""
        return self._before + sum(total.stored for total in self._group.totals) + sum(self._group.forgotten)


MOST_SENT = 64
"""The most calls that may be on their way."""


class _Sent(NamedTuple):
    """A call whose answer nobody waits for."""

    shard: int
    call: object
    rows: int
    """How many TD errors the call carries; 0 if it is another call."""


class Outbox:
    """Sends messages to the shards of a group, and reads their answers later.

    Args:
        group: the shards.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._sent = group, list[_Sent]()
        self.dropped: int = 0
        """How many TD errors were lost, because the shard of the rows was restarted or did not answer."""

    def send(self, shard: int, rows: int, method: str, *arguments: object) -> None:
        """Send a message that carries TD errors for ``rows`` rows."""
        self._sent.append(_Sent(shard, self._group.link.call(shard, method, *arguments), rows))

    def drain(self, most: int = MOST_SENT) -> None:
        """Read the answers that have come. While more than ``most`` calls have none, wait for the oldest.

        Raises:
            ReliveError: what a shard raised. It is raised once.
        """
        group, surplus, waiting = self._group, len(self._sent) - most, list[_Sent]()
        try:
            while self._sent:
                sent = self._sent.pop(0)  # first, so that an error that it brings is raised once
                timeout = group.timeout if surplus > 0 else 0.0
                answers, failed = group.link.answers({sent.shard: sent.call}, timeout)
                if sent.shard in failed or (timeout and not answers):
                    self.dropped += sent.rows
                elif not answers:
                    waiting.append(sent)
                surplus -= 1
        finally:
            self._sent = waiting + self._sent
