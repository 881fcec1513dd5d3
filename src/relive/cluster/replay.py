"""Replay: several shards that draw and learn as one replay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import LifecycleError, ParameterError
from ..parameters import COUNT_RULE, FLAG_RULE, SECONDS_RULE, TIMEOUT_RULE, require, seed_or_drawn
from ..processes.rate import LIMIT_RULE, RateLimit
from ..replay.arguments import require_rows, whole_numbers
from ..replay.extra import load_extra as extra_of
from ..replay.ratings import by_item, doubles, magnitudes
from ..samplers.prioritized import Prioritized
from ..samplers.uniform import Uniform
from ..steps.arrays import as_host
from ..steps.schema import Schema
from ..views.contract import time_first_of
from ..views.transitions import Transition
from .checkpoints import Checkpoint, manifest_of, read_checkpoint, saved_shards
from .division import Division
from .drawing import Drawing
from .group import Connect, Group, Link
from .homes import SavedShard, ShardPlan
from .outbox import Outbox
from .pace import Pace
from .plans import plans_of, require_ring
from .saving import ClusterSave, Saver
from .shard import require_shardable
from .writer import Writer, chosen_envs

__all__ = ["Replay", "load_extra"]


START_TIMEOUT = 600.0
"""Seconds that a shard may take to begin."""


ADDED = (
    "size", "completed", "episodes", "late_updates", "not_finite_rewards", "lost_steps", "repeated_steps",
    "dropped_updates", "commits", "insert_waits", "insert_waited",
)  # fmt: skip
"""The figures that are added up over the shards."""


class _Options(NamedTuple):
    """The options of a learner."""

    commit_every: float | None
    durable: bool
    timeout: float
    limit: RateLimit | None
    limit_timeout: float | None


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
        sampler: :class:`relive.Uniform` (default) or :class:`relive.Prioritized`.
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
        sampler: Uniform | Prioritized | None = None,
        view: Any = None,
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
        if path is not None and manifest_of(path).exists():
            raise LifecycleError(f"'{path}' holds a replay; go on with Replay.load(path), or choose another directory")
        sampler, view = Uniform() if sampler is None else sampler, Transition() if view is None else view
        begun = Checkpoint(
            schema, capacity, num_envs, shards, ordered, own_next_obs, seed_or_drawn(seed), 0, 0, 0, sampler, view
        )
        self._begin(begun, path, _Options(commit_every, durable, timeout, limit, limit_timeout), connect, ())

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        shards: int | None = None,
        capacity: int | None = None,
        sampler: Uniform | Prioritized | None = None,
        view: Any = None,
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
        saved = read_checkpoint(path, sampler, view)
        wanted = saved._replace(
            shards=saved.shards if shards is None else shards, capacity=saved.capacity if capacity is None else capacity
        )
        replay = cls.__new__(cls)
        options = _Options(commit_every, durable, timeout, limit, limit_timeout)
        require("load", LIMIT_RULE, limit=limit)
        if limit is not None and saved.counted is not None:
            limit.load_state_dict(dict(zip(("inserts", "samples"), saved.counted, strict=True)))
        replay._begin(wanted, path, options, connect, saved_shards(path, saved))
        return replay

    def _begin(
        self,
        state: Checkpoint,
        path: str | os.PathLike[str] | None,
        options: _Options,
        connect: Connect | None,
        sources: tuple[SavedShard, ...],
    ) -> None:
        every, durable, timeout, limit, limit_timeout = options
        flags = {"ordered": state.ordered, "own_next_obs": state.own_next_obs, "durable": durable}
        require("Replay", FLAG_RULE, **flags)
        require("Replay", LIMIT_RULE, limit=limit)
        require("Replay", TIMEOUT_RULE, limit_timeout=limit_timeout)
        require("Replay", (lambda schema: isinstance(schema, Schema), "expected a relive.Schema"), schema=state.schema)
        if durable and path is None:
            raise ParameterError("Replay(durable=True): rings in files need a directory; pass path=...")
        require("Replay", SECONDS_RULE, timeout=timeout, commit_every=1.0 if every is None else every)
        division = Division(state.num_envs, state.shards)
        require_shardable(state.sampler, state.view)
        self._state, self._division, self._path = state, division, path
        self._most = Pace.most_of_a_chunk(limit, state.shards)
        require_ring(state)
        link = (connect or _actors)(plans_of(state, division, path, sources, self._most, durable))
        self._group = Group(link, state.shards, timeout)
        self._group.start(START_TIMEOUT)
        self._pace = None if limit is None else Pace(limit, self._group, limit_timeout)
        self._drawing, self._outbox = Drawing(self._group, division), Outbox(self._group)
        self._saver = Saver(self._group, self._outbox, path, every, state.cut)
        self._own_writer: Writer | None = None

    # -- writing ------------------------------------------------------------------------------------------------

    def writer(self, envs: Any = None, *, in_flight: int = 2, timeout: float = 300.0) -> Writer:
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
        state, chosen = self._state, chosen_envs(envs, self._state.num_envs)
        own = state.own_next_obs or not state.ordered
        link, most = self._group.link, self._most
        return Writer(link, state.schema, own, self._division, chosen, in_flight, timeout, most)

    def extend(self, steps: Mapping[str, Any]) -> None:
        """Store steps of all envs ``[T, N, ...]``, as :meth:`relive.ReplayBuffer.extend`; returns once they are stored.

        Raises:
            FieldError, ShapeError, DTypeError: the steps do not fit. Nothing is stored.
            LifecycleError: a shard does not answer; or an env has got a newer writer.
        """
        if self._own_writer is None:
            self._own_writer = self.writer(timeout=self._group.timeout)
        if self._pace is not None:
            self._group.refresh()  # brings the shards what the limit allows by now
        self._own_writer.extend(steps)
        self._own_writer.flush()

    # -- learning -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of transitions that can be drawn from the shards that answer."""
        totals = [self._group.totals[k] for k in self._group.refresh()]
        return sum(total.size for total in totals if total is not None)

    def sample(self, batch_size: int) -> Any:
        """One batch ``[batch_size]``, shard after shard, with the fields of :meth:`relive.ReplayBuffer.sample`.

        All TD errors passed before are in effect. If a shard does not answer, the others draw its rows instead.

        Raises:
            EmptyError: there is no complete transition.
            ParameterError: ``batch_size`` is not positive.
            LifecycleError: no shard answers.
            WaitTimeoutError: the limit did not allow the batch within ``limit_timeout``.
        """
        require_rows(batch_size)
        self._outbox.settle()
        self._saver.look()
        self._group.refresh()
        pace, state = self._pace, self._state
        if pace is not None:
            pace.await_batch(batch_size)
        try:
            batch = self._drawing.batch(state, batch_size)
        except BaseException:
            if pace is not None:
                pace.limit.count(samples=-batch_size)
            raise
        self._state = state._replace(draws=state.draws + 1, sampled=state.sampled + batch_size)
        return batch

    def update_priorities(self, index: Any, td_error: Any, mask: Any = None) -> None:
        """Set the priorities of a batch from its TD errors, as :meth:`relive.ReplayBuffer.update_priorities`.

        The errors are on their way when this returns, and in effect for every later :meth:`sample`. Errors that cannot
        be set, because the transition is gone or its shard was restarted or does not answer, are counted in
        :meth:`stats`.

        Raises:
            LifecycleError: the sampler has no priorities.
            ShapeError: the shapes differ, or do not have the batch's layout.
            ParameterError: an index was never issued.
            NotFiniteError: a TD error that counts is NaN or infinite. Nothing is changed in any of these cases.
        """
        if not isinstance(self._state.sampler, Prioritized):
            raise LifecycleError(f"{self._state.sampler!r} has no priorities; use sampler=Prioritized()")
        given, errors, view = whole_numbers(index, "index"), doubles(td_error), self._state.view
        real = None if mask is None else as_host(mask, "mask")
        magnitudes(by_item(view, given, errors, real)[0])  # raises before any shard is changed
        axis = 1 if errors.ndim == 2 and time_first_of(view) else 0
        group = self._group
        for life, (shard, at, inside) in self._division.of_index(given):
            born, part = group.born(shard, life), None if real is None else real.take(at, axis)
            if born is None:
                raise ParameterError(f"index: entry {at[0]}, {given[at[0]]}, was never issued; pass batch['index']")
            if not group.lives_in(shard, life):
                self._outbox.dropped += len(at)
                continue
            self._outbox.send(shard, len(at), "update", born, inside, errors.take(at, axis), part, group.largest)

    # -- saving -------------------------------------------------------------------------------------------------

    def save(self, *, extra: Any = None, background: bool = False) -> ClusterSave:
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
        self._outbox.settle(0)
        counted = None if self._pace is None else (*self._pace.limit.state_dict().values(),)
        return self._saver.save(self._state._replace(counted=counted), extra, background)

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
        - ``insert_waits``, ``sample_waits``: how often a writer and the learner had to wait for the limit;
          ``insert_waited``, ``sample_waited``: how many seconds in all.
        """
        self._outbox.settle()
        group, state = self._group, self._state
        group.refresh()
        each = group.ask(dict.fromkeys(group.up, ("stats",)))
        found = {name: sum(stats[name] for stats in each.values()) for name in ADDED}
        counted = {shard: stats["lost_steps"] for shard, stats in each.items()}
        lost = [max(counted.get(shard, 0.0), float(group.forgotten[shard])) for shard in range(group.count)]
        failures, limited = group.failures, {} if self._pace is None else self._pace.limit.stats()
        found["dropped_updates"] += self._outbox.dropped
        return found | {
            "batches": float(state.draws),
            "sampled": float(state.sampled),
            "shards": float(group.count),
            "shards_up": float(len(group.up)),
            "restarts": float(failures.restarts),
            "unanswered": float(failures.unanswered),
            "lost_steps": sum(lost),
            "redrawn": float(self._drawing.redrawn),
            "sample_waits": limited.get("sample_waits", 0.0),
            "sample_waited": limited.get("sample_waited", 0.0),
        }

    def close(self) -> None:
        """End the shards, after a save that is under way has come to its end. What was not saved is gone."""
        try:
            self._saver.settle()
        finally:
            self._group.link.close()

    def __repr__(self) -> str:
        s = self._state
        return (
            f"Replay({s.schema!r}, capacity={s.capacity}, num_envs={s.num_envs}, shards={s.shards}, "
            f"sampler={s.sampler!r}, view={s.view!r}, seed={s.seed})"
        )


def load_extra(path: str | os.PathLike[str]) -> Any:
    """What was passed as ``extra`` to the last :meth:`Replay.save` in this directory."""
    return extra_of(manifest_of(path))


def _actors(plans: list[ShardPlan]) -> Link:
    from .ray import actors

    return actors()(plans)
