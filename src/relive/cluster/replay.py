"""Replay: several shards that draw and learn as one replay."""

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
from torch import Tensor

from .. import files
from ..errors import FileFormatError, LifecycleError, ParameterError
from ..files import detached
from ..files.disk import entry, integers, usable
from ..files.save import to_json
from ..kernels.reference.priorities import key
from ..parameters import COUNT_RULE, FLAG_RULE, SECONDS_RULE, TIMEOUT_RULE, require, seed_or_drawn
from ..printable import shown
from ..processes.limits import LIMIT_RULE, RateLimit
from ..replay.buffer import ReplayBuffer
from ..replay.checks import require_rows
from ..replay.saving import describe, rebuild
from ..replay.saving import load_extra as extra_of
from ..samplers.prioritized import Prioritized, doubles, errors_by_item, magnitudes
from ..samplers.uniform import Uniform
from ..steps.arrays import Doubles, as_host, whole_numbers
from ..steps.schema import Schema
from ..views.contract import time_first_of
from ..views.transitions import Transition
from .group import PAUSE, Connect, Group, Link, Pace
from .plan import Division, Share, global_weights, shard_counts, shard_key, shard_masses
from .shard import Block, SavedShard, ShardPlan, joined_batch, require_shardable, slot, unpacked
from .writer import Outbox, Writer, chosen_envs

__all__ = [
    "Checkpoint",
    "ClusterSave",
    "Drawing",
    "Replay",
    "Saver",
    "load_extra",
    "manifest_of",
    "plans_of",
    "read_checkpoint",
    "require_ring",
    "saved_shards",
    "write_checkpoint",
]


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
    sampler: Any
    view: Any
    counted: tuple[int, int] | None = None
    """Steps and rows that its limit of samples per insert has counted; None without one."""


def manifest_of(path: str | os.PathLike[str]) -> Path:
    """The directory of the learner's side of a checkpoint."""
    return usable(path) / "replay"


def write_checkpoint(path: str | os.PathLike[str], state: Checkpoint, extra: tuple[Any, Mapping[str, Any]]) -> None:
    """Replace the checkpoint. The shards' commits of its number are on the disk already. Until this is done, the old
    checkpoint counts.

    Args:
        path: the directory.
        state: the learner's side.
        extra: what the user added, as :func:`relive.files.save.to_json` gives it.

    Raises:
        OSError: the disk is full, or fails.
    """
    described, tensors = extra
    content = {
        "kind": KIND,
        "schema": json.loads(state.schema.to_json()),
        "sizes": [state.capacity, state.num_envs, state.shards],
        "ordered": state.ordered,
        "own_next_obs": state.own_next_obs,
        "seed": state.seed,
        "counts": [state.draws, state.sampled, state.cut],
        "sampler": describe(state.sampler),
        "view": describe(state.view),
        "extra": described,
        "limit": None if state.counted is None else list(state.counted),
    }
    files.write(manifest_of(path), tensors, content)


def read_checkpoint(path: str | os.PathLike[str], sampler: Any, view: Any) -> Checkpoint:
    """The checkpoint in a directory, with this sampler and view where they are not None.

    Raises:
        FileFormatError: there is no checkpoint, or it is damaged or foreign; or its sampler or view was the user's own
            and is not given.
    """
    with files.Save(manifest_of(path)) as save:
        content = save.content
    if content.get("kind") != KIND:
        raise FileFormatError(f"'{path}' is a save of {shown(content.get('kind'))}, not of a {KIND}")
    capacity, num_envs, shards = integers(content, "sizes", 3).tolist()
    draws, sampled, cut = integers(content, "counts", 3).tolist()
    counted: Any = None
    if content.get("limit") is not None:  # saves of earlier versions have none
        counted = tuple(integers(content, "limit", 2).tolist())
    return Checkpoint(
        Schema.from_json(json.dumps(content.get("schema"))),
        capacity,
        num_envs,
        shards,
        entry(content, "ordered", bool),
        entry(content, "own_next_obs", bool),
        entry(content, "seed", int),
        draws,
        sampled,
        cut,
        rebuild(content.get("sampler"), "sampler") if sampler is None else sampler,
        rebuild(content.get("view"), "view") if view is None else view,
        counted,
    )


def saved_shards(path: str | os.PathLike[str], state: Checkpoint) -> tuple[SavedShard, ...]:
    """Where the shards of a checkpoint lie."""
    division = Division(state.num_envs, state.shards)
    starts, rows = division.starts.tolist(), division.rows(state.capacity).tolist()
    return tuple(
        SavedShard(str(slot(path, k, state.cut)), starts[k], starts[k + 1] - starts[k], rows[k])
        for k in range(state.shards)
    )


AGAIN = 1 << 62
"""Added to the number of an attempt, so that its counts never have the seed of a batch."""


class _Drawn(NamedTuple):
    """Rows that one shard drew for a batch."""

    shard: int
    mass: float
    """The mass of the shard when the counts were drawn."""
    life: int
    block: Block


class Drawing:
    """Draws batches from the shards that answer.

    Args:
        group: the shards.
        division: which envs they have.
    """

    def __init__(self, group: Group, division: Division) -> None:
        self._group, self._division = group, division
        self.redrawn = 0
        """How many rows other shards gave in place of a shard that failed to give them."""

    def batch(self, state: Checkpoint, batch_size: int) -> Any:
        """Draw batch number ``state.draws``. The caller has just read the totals of the shards.

        The shards' masses decide how many rows each shard draws. Each then draws from the rows that it has when it is
        asked. The probability of a row is the product of the two chances. So it is exact even if rows come or get new
        priorities in between. If none do, a prioritized batch is the one that a single ring of all rows draws.

        Raises:
            EmptyError: no shard that answers has anything to draw.
            LifecycleError: no shard answers, or none gives rows.
        """
        group, drawn, used = self._group, list[_Drawn](), dict[int, float]()
        patience = (group.count + 1) * group.timeout  # each shard may take its time
        missing, attempt, end = batch_size, 0, time.monotonic() + patience
        while missing:
            masses = self._masses()
            shares = self._shares(state, masses, missing, attempt)
            asked = {shard: ("sample", share, group.largest) for shard, share in shares.items()}
            for shard, (totals, block) in group.ask(asked).items():
                group.note(shard, totals)
                if block is not None:
                    drawn.append(_Drawn(shard, float(masses[shard]), group.life(shard, totals.born), block))
                    missing -= shares[shard].rows
            used = {k: used.get(k, float(masses[k])) for k in {*group.up, *(part.shard for part in drawn)}}
            attempt += 1
            if missing:
                self.redrawn += missing
                if time.monotonic() > end:
                    raise LifecycleError(
                        f"the {group.count} shards answer, but have not given {missing} rows in {patience:g} s; look "
                        "into the logs of their processes"
                    )
                group.refresh()
        drawn.sort(key=lambda part: part.shard)
        return self._joined(state, drawn, sum(used[k] for k in sorted(used)))

    def _shares(self, state: Checkpoint, masses: Doubles, count: int, attempt: int) -> dict[int, Share]:
        """What each shard is to draw of ``count`` rows. With priorities, one tree of all rows would draw the same."""
        sampler, t = state.sampler, state.draws
        rated = isinstance(sampler, Prioritized)
        seed = key(state.seed, AGAIN + attempt) if attempt else state.seed
        options = {"stratified": rated and sampler.stratified}
        counts = shard_counts(masses, count, seed, t, **options).tolist()
        none = np.empty(0)
        return {
            shard: Share(
                mine,
                shard_key(seed, t, shard),
                float(masses[shard]),
                shard_masses(masses, shard, count, seed, t, **options) if rated else none,
            )
            for shard, mine in enumerate(counts)
            if mine
        }

    def _masses(self) -> Doubles:
        """The masses of the shards that answer, float64 ``[K]``; 0 for the others."""
        masses = np.zeros(self._group.count)
        for shard in self._group.up:
            totals = self._group.totals[shard]
            masses[shard] = totals.mass if totals is not None else 0.0
        return masses

    def _joined(self, state: Checkpoint, drawn: Sequence[_Drawn], whole: float) -> Any:
        """The batch of these rows. ``whole`` is the mass of all shards that they were drawn from."""
        blocks = [part.block for part in drawn]
        facts = () if blocks[0].time_first is None else ("facts",)
        arrays, extras = [unpacked(block) for block in blocks], dict[str, Tensor]()
        if any(part.life for part in drawn):
            for name in [name for name in ("index", "next_index") if (*facts, name) in arrays[0]]:
                given = [of[(*facts, name)] for of in arrays]
                public = [self._division.public(x, part.life) for x, part in zip(given, drawn, strict=True)]
                extras[name] = torch.from_numpy(np.concatenate(public))
        if isinstance(state.sampler, Prioritized):
            chances = [of[(*facts, "probability")] * part.mass for of, part in zip(arrays, drawn, strict=True)]
            extras |= self._weighed(state, state.sampler, np.concatenate(chances), whole)
        return joined_batch(blocks, state.schema, extras)

    def _weighed(self, state: Checkpoint, sampler: Prioritized, priorities: Any, whole: float) -> dict[str, Tensor]:
        """The ``weight`` and ``probability`` of rows with these priorities, as one ring of all shards gives them.

        A shard gives probabilities within the shard. Times the mass that the counts were drawn with, they are the
        ``priorities``.
        """
        least = float(priorities.min())
        if sampler.normalize == "buffer":
            known = [self._group.totals[shard] for shard in self._group.up]
            least = min([least, *(totals.least for totals in known if totals is not None)])
        weights = global_weights(priorities, least, sampler.beta_at(state.draws))
        return {"weight": torch.from_numpy(weights), "probability": torch.from_numpy(priorities / whole)}


SAVE_TIMEOUT = 3600.0
"""Seconds that a shard may take to write its part of a checkpoint, or to begin it."""


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
        extra: tuple[Any, dict[str, Any]],
        counts: Callable[[int], object],
    ) -> None:
        """Watch the commits that all shards have begun.

        ``counts`` is called with the number of the checkpoint once the checkpoint counts.
        """
        self.path = os.fspath(path)
        """The directory."""
        self._group, self._state, self._extra, self._counts = group, state, extra, counts
        self._calls = {shard: self._ask(shard) for shard in range(group.count)}
        self._error: BaseException | None = None
        self._seen = False

    @property
    def done(self) -> bool:
        """Whether the save is over: the checkpoint counts, or the save failed."""
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
            self._seen = True
            raise self._error

    def look(self) -> None:
        """See whether the shards are done. If all are, the checkpoint counts from now on."""
        if not self._calls:
            return
        try:
            found, failed = self._group.link.answers(self._calls, 0.0)
            if failed:
                raise LifecycleError(f"shards {sorted(failed)} died while they wrote; the last checkpoint still counts")
            for shard, is_done in found.items():
                del self._calls[shard]
                if not is_done:
                    self._calls[shard] = self._ask(shard)
            if not self._calls:
                write_checkpoint(self.path, self._state, self._extra)
                self._counts(self._state.cut)
        except Exception as error:
            self._error, self._calls = error, {}

    def raise_unseen(self) -> None:
        """Raise the error of a save that failed, unless :meth:`wait` has raised it."""
        if self._error is not None and not self._seen:
            self._seen = True
            self._error.add_note("this is the error of the save before, in the background; now nothing was saved")
            raise self._error

    def _ask(self, shard: int) -> Any:
        return self._group.link.call(shard, "committed", self._state.cut)

    def __repr__(self) -> str:
        state = "under way" if self._calls else "failed" if self._error else "done"
        return f"<save into {self.path!r}: {state}>"


class Saver:
    """Makes the shards commit: from time to time, and for checkpoints.

    Args:
        group: the shards.
        outbox: carries commits that nobody waits for.
        path: the directory; None for none.
        every: seconds between commits; None for none.
        cut: the number of the last checkpoint.
    """

    def __init__(
        self, group: Group, outbox: Outbox, path: str | os.PathLike[str] | None, every: float | None, cut: int
    ) -> None:
        self._group, self._outbox, self._path, self._every, self._cut = group, outbox, path, every, cut
        self._committed, self._last = time.monotonic(), None

    _last: ClusterSave | None
    """The last save in the background, until its end was seen."""

    def save(self, state: Checkpoint, extra: Any, background: bool) -> ClusterSave:
        """Write a checkpoint; see :meth:`relive.cluster.Replay.save`."""
        if self._path is None:
            raise LifecycleError("save(): this replay has no directory; create it with path=...")
        self.settle()
        described, tensors = to_json(extra)
        tensors, group, cut = detached(tensors), self._group, self._cut + 1
        group.refresh()
        begun = group.ask(dict.fromkeys(group.up, ("commit", cut, background)), SAVE_TIMEOUT)
        missing = sorted(set(range(group.count)) - begun.keys())
        if missing:
            raise LifecycleError(f"save(): shards {missing} do not answer; the last checkpoint still counts, try again")
        saving = ClusterSave(group, self._path, state._replace(cut=cut), (described, tensors), self._note)
        if background:
            self._last = saving
        else:
            saving.wait()
        return saving

    def settle(self) -> None:
        """Wait for the save that is under way, if there is one, and raise its error once."""
        saving, self._last = self._last, None
        if saving is not None:
            while not saving.done:
                time.sleep(PAUSE)
            saving.raise_unseen()

    def look(self) -> None:
        """Bring the save that is under way further, and start a commit if it is time."""
        if self._last is not None:
            self._last.look()
        now = time.monotonic()
        if self._every is not None and self._path is not None and now - self._committed > self._every:
            self._committed = now
            for shard in self._group.up:
                self._outbox.send(shard, 0, "commit", None)

    def _note(self, cut: int) -> None:
        self._cut, self._committed = cut, time.monotonic()


def plans_of(
    state: Checkpoint,
    division: Division,
    path: str | os.PathLike[str] | None,
    sources: tuple[SavedShard, ...],
    most: int | None,
    durable: bool,
) -> list[ShardPlan]:
    """What to make the shards of a new run from.

    Args:
        state: the state of the whole replay.
        division: which shard has which envs.
        path: the directory of commits; None if there is none.
        sources: the saved shards that the replay begins with.
        most: the most steps of a chunk, under a limit; None without one.
        durable: whether the rings live in files.
    """
    starts, rows = division.starts.tolist(), division.rows(state.capacity).tolist()
    home, run = None if path is None else os.path.abspath(path), os.urandom(8).hex()
    return [
        ShardPlan(
            number=k,
            shards=state.shards,
            first_env=starts[k],
            num_envs=starts[k + 1] - starts[k],
            rows=rows[k],
            seed=key(state.seed, k),
            run=run,
            options=_options(state),
            home=home,
            sources=sources,
            most=most,
            durable=durable,
        )
        for k in range(state.shards)
    ]


def require_ring(state: Checkpoint) -> None:
    """Make a ring of one env, so that wrong arguments raise their error here and not in a shard."""
    require("Replay", COUNT_RULE, capacity=state.capacity)
    ReplayBuffer(capacity=state.capacity // state.num_envs, num_envs=1, seed=0, **deepcopy(_options(state)))


def _options(state: Checkpoint) -> dict[str, Any]:
    return {
        "schema": state.schema,
        "sampler": state.sampler,
        "view": state.view,
        "ordered": state.ordered,
        "own_next_obs": state.own_next_obs,
    }


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
        magnitudes(errors_by_item(time_first_of(view), given, errors, real)[0])  # raises before any shard is changed
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
