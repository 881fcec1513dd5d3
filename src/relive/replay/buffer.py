"""ReplayBuffer: the newest steps of each env. A sampler draws from them, and a view reads what was drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Never

import torch

from ..errors import FieldError, ParameterError
from ..memory.device import DeviceRows
from ..memory.estimate import StoragePlan, storage_plan
from ..memory.forks import shared_lock
from ..memory.home import MakeHome, in_ram, made_home
from ..memory.keeper import Keeper
from ..memory.ram import ReplayRows
from ..memory.store import Store
from ..names import add_hints
from ..parameters import FLAG_RULE, an_instance, is_own, refuse_class, require, seed_or_drawn, torch_device
from ..ring.ring import Ring
from ..samplers.contract import AnySampler, completed
from ..samplers.uniform import Uniform
from ..steps.changes import SchemaChanges
from ..steps.schema import Field, Schema, not_named
from ..steps.trees import Path
from ..views.transitions import Transition
from .arguments import require_alike
from .arrays import filled
from .direct import DirectSample
from .fields import stored_fields
from .locked import one_at_a_time
from .opening import OpenedReplay, opened
from .progress import Progress
from .ratings import Ratings
from .reader import Reader
from .restored import loaded, loaded_for
from .saving import Saver
from .typed import TRANSITION, UNIFORM, GivenSampler, GivenView, S_co, V_co
from .writer import Writer

__all__ = ["ReplayBuffer"]


class ReplayBuffer(OpenedReplay[S_co, V_co]):
    """The newest steps of each env, in a ring per env.

    ``add`` stores steps in the order in which they happened. ``sample`` draws transitions with a ``sampler`` and reads
    them through a ``view``. A transition can be drawn once its next observation is known: when the next step of its env
    comes, or at once if the transition ended its episode.

    Several threads may use a replay: one call ends before the next begins. ``with replay.lock`` groups calls. Only one
    thread at a time may play an env, since its steps make one stream.

    Type checkers know the sampler and the view of a replay: ``ReplayBuffer[Prioritized, NStep]``. If you replace the
    view by one of another kind, annotate ``replay: ReplayBuffer[Prioritized, View]``.

    Args:
        schema: the fields of a step; ``obs``, ``reward``, ``terminated`` and ``truncated`` are required.
        capacity: rows of all envs together; an episode of k transitions takes k + 1.
        num_envs: N.
        capacity_bytes: the memory of ``device`` to use, instead of ``capacity``; see :meth:`plan`.
        sampler: default :class:`relive.Uniform`.
        view: default :func:`relive.Transition`.
        ordered: False stores transitions without an order, each with a ``next_obs`` of its own.
        own_next_obs: store a ``next_obs`` with every step, although steps come in order. Observations take twice the
            memory. In return a step can be drawn as soon as it is added, and ``capacity`` counts transitions. Sequences
            and frame stacks cannot be read from such a replay.
        check_ends: warn if the first steps and episodes show that ends are missing or stored wrongly, or observations
            overwritten; see :class:`relive.errors.EpisodeEndWarning`. Refuse the latter if it is certain. Ends are not
            checked if ``ordered`` is False.
        store: keep all fields but rewards and flags in a store of your own, such as files. It is a function or class
            that is called with the fields (path -> :class:`relive.Field`) and the number of rows. It returns an object
            with the two methods of :class:`relive.memory.home.Home`.
        device: where rows and batches live. If it is not the CPU, rewards, flags and bookkeeping stay in RAM (32 bytes
            a row), and so does the sampler. Batches have the same values on every device.
        debug: refuse steps in which a reward, an action or an observation is NaN or infinite.
        seed: batch number t is a function of (seed, t) and of what is stored. None draws a seed from torch's default
            generator, and ``buffer.seed`` is that number. Each worker of a ``torch.utils.data.DataLoader`` draws
            different batches, which depend on its worker seed too.

    Raises:
        SchemaError: the schema lacks a required field, or has a field that batches add.
        ParameterError: the capacity is less than 2 rows per env or more than the free memory; or ``sampler`` is not a
            sampler, or ``view`` is not a view.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int | None = None,
        num_envs: int = 1,
        *,
        capacity_bytes: int | None = None,
        sampler: S_co | None = UNIFORM,
        view: V_co | None = TRANSITION,
        ordered: bool = True,
        own_next_obs: bool = False,
        check_ends: bool = True,
        store: MakeHome | Keeper | None = None,
        device: str | torch.device = "cpu",
        debug: bool = False,
        seed: int | None = None,
    ) -> None:
        require("ReplayBuffer", FLAG_RULE, ordered=ordered, own_next_obs=own_next_obs, debug=debug)
        self.schema, self.ordered = schema, ordered
        self.own_next_obs = own_next_obs or not ordered
        self.device, self._progress = torch_device("ReplayBuffer", device), Progress(seed_or_drawn(seed))
        stored = stored_fields(schema, self.own_next_obs)
        refuse_class("sampler", sampler)
        self._given_sampler = Uniform() if sampler is None else sampler  # one of the user's may have the length 0
        self._own_sampler = is_own(self._given_sampler)
        self._sampler = completed(self._given_sampler)
        near = stored.leaves if store is None or isinstance(store, Keeper) else in_ram(stored.leaves)
        plan = storage_plan(near, num_envs, capacity, capacity_bytes, self.device, self._sampler.nbytes)
        if not isinstance(store, Keeper):  # a Keeper takes its own space
            plan.require_memory()
        self._plan, self.num_envs = plan, plan.num_envs
        home = _home(stored.leaves, plan.rows, self.device, store)
        self._ring = Ring(self.num_envs, plan.rows // self.num_envs, home, ordered)
        self._writer = Writer(self._ring, self._sampler, schema, stored, self.device, self.own_next_obs, debug)
        self._ratings = Ratings(self._ring, self._sampler, self._progress)
        self.lock, self.extra = shared_lock(), None
        self._writer.watch_ends(check_ends)
        self._sampler.attach(self._ring)
        self._reader = Reader(self._ring, self._sampler, schema, Transition() if view is None else view)
        self._direct = DirectSample.of(self._ring, self._sampler, self._progress, schema) if self._own_sampler else None
        self._saver = Saver(self._writer, self._reader, self._progress, self.device)

    @staticmethod
    def plan(
        schema: Schema,
        capacity: int | None = None,
        num_envs: int = 1,
        *,
        capacity_bytes: int | None = None,
        sampler: AnySampler | None = None,
        ordered: bool = True,
        own_next_obs: bool = False,
        device: str | torch.device = "cpu",
    ) -> StoragePlan:
        """The memory that such a buffer would take, per field: ``print(ReplayBuffer.plan(schema, 10**6))``.

        Nothing is allocated, and ``sampler`` can be given to a buffer afterwards.

        Raises:
            SchemaError, ParameterError: as the constructor's.
        """
        require("plan", FLAG_RULE, ordered=ordered, own_next_obs=own_next_obs)
        leaves = stored_fields(schema, own_next_obs or not ordered).leaves
        kept = completed(Uniform() if sampler is None else sampler).nbytes
        return storage_plan(leaves, num_envs, capacity, capacity_bytes, torch_device("plan", device, here=False), kept)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], schema: Schema | None = None, **options: Any) -> ReplayBuffer:
        """A replay of one env with a data set's flat arrays ``[S, ...]``; see :func:`relive.replay.arrays.filled`."""
        return filled(cls, arrays, schema, options)

    # -- writing ------------------------------------------------------------------------------------------------

    def add(self, step: Mapping[str, Any] | None = None, /, *more: Never, envs: Any = None, **fields: Any) -> None:
        """Append one step of every env, or of some; NumPy or torch, given as a mapping, as keywords, or both.

        Args:
            step: field -> ``[N, ...]`` for every field of the schema; with one env the leading axis may be left out.
                ``next_obs``, ``[N, ...]``, is the true final observation where an episode ended; other rows of it are
                not read. With ``ordered=False`` or ``own_next_obs=True``, every row needs it. ``mask``, bool ``[N]``,
                leaves out the rows where it is False, such as the reset steps of ``NEXT_STEP`` autoreset.
            envs: int64 ``[K]``, which envs stepped, each at most once; all fields are then ``[K, ...]``.
            fields: like ``step``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema, or the final observation
                of an episode that ended is missing. Nothing is written.
            NotFiniteError: in debug mode, a number is NaN or infinite. Nothing is written.
            EnvError: the first steps show that the env overwrites its observations. The step is not written.
        """
        if more or not (step is None or hasattr(step, "keys")):
            raise FieldError(not_named(step))
        writer, values = self._writer, fields if step is None else {**step, **fields}
        chosen = writer.all_envs if envs is None else writer.chosen(envs)
        with self.lock:  # as one_at_a_time, which takes longer
            if self._ring.pending is not None or self._ahead is not None:
                self._prepare()
            writer.add(values, chosen)

    @one_at_a_time
    def extend(self, steps: Mapping[str, Any], *, envs: Any = None) -> None:
        """Append many steps in the order of time: every field is ``[T, N, ...]`` where :meth:`add` takes ``[N, ...]``.

        Raises:
            ShapeError: the fields differ in their number of steps. Nothing is written.
            FieldError, ShapeError, DTypeError, DeviceError, NotFiniteError: as :meth:`add`. Nothing is written.
        """
        self._writer.extend(steps, envs)

    @one_at_a_time
    def interrupt(self, envs: Any = None) -> None:
        """Cut the running episodes of all envs, or of ``envs``: the next steps start new ones.

        The newest step of such an episode has no next observation, so it is never drawn.
        """
        self._writer.interrupt(envs)

    @one_at_a_time
    def clear(self, *, rewind: bool = False) -> None:
        """Forget everything stored. Indices go on counting, so an old one never names a new transition.

        Args:
            rewind: store the next steps from each env's first row on, for code that reads :attr:`block` by position.
                It needs a next observation of its own in every step.

        Raises:
            LifecycleError: ``rewind`` is True, and steps share observations.
        """
        require("clear", FLAG_RULE, rewind=rewind)
        if rewind:  # after this, rows are not overwritten in the order of time
            self._saver.await_rows()
        self._writer.clear(rewind)

    # -- settings -----------------------------------------------------------------------------------------------

    @property
    def check_ends(self) -> bool:
        """Whether the first ends of episodes are checked. A Collector turns it off, since it stores them correctly."""
        return self._writer.check_ends

    @check_ends.setter
    def check_ends(self, check: bool) -> None:
        self._writer.watch_ends(check)

    @property
    def debug(self) -> bool:
        """Whether steps with NaN or infinity are refused. You may set it at any time."""
        return self._writer.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        require("ReplayBuffer", FLAG_RULE, debug=debug)
        self._writer.debug = debug

    @one_at_a_time
    def update_priorities(self, index: Any, td_error: Any, mask: Any = None) -> int:
        """Set the priorities of a batch from its TD errors; returns how many transitions were overwritten meanwhile.

        Args:
            index: int64 ``[B]``, ``batch["index"]``. If a transition occurs twice, its last error counts. A transition
                that was overwritten is ignored and counted.
            td_error: ``[B]``; the sign does not matter. If :attr:`view` reads sequences, ``[T, B]`` or ``[B, T]``, as
                its batches are. The sampler reduces these errors to one per sequence.
            mask: required for errors of sequences: ``batch["mask"]``, bool, of the shape of ``td_error``. It is True
                for the errors that count. The others may be NaN.

        Raises:
            LifecycleError: the sampler has no priorities.
            ShapeError: the shapes differ, or do not have the batch's layout.
            ParameterError: an index was never issued, or errors of sequences come without their mask.
            NotFiniteError: a TD error that counts is NaN or infinite. Nothing is changed in any of these cases.
        """
        self._reader.keep_rule()
        late = self._ratings.update(self._reader.view, index, td_error, mask)
        if self._coming is not None:
            self._coming.after_rating(self._reader.view)
        return late

    @one_at_a_time
    def append(self, other: ReplayBuffer, *, envs: Mapping[int, int] | None = None) -> None:
        """Add all complete transitions of ``other``, in the order in which they were completed there.

        The running episodes of the envs that get them are interrupted first.

        Args:
            other: a buffer of the same schema and order.
            envs: env of ``other`` -> env of this buffer, for some or all envs. Transitions are then added env after
                env, and their TD errors with them if both samplers are :class:`relive.Prioritized`. By default, every
                env keeps its number.

        Raises:
            SchemaError: the buffers differ in their schema or order; without ``envs``, also in their number of envs.
            ParameterError: there is no such env.
            LifecycleError: this buffer is in files, and ``envs`` is not given.
        """
        require(
            "append",
            (lambda other: isinstance(other, ReplayBuffer), "expected a ReplayBuffer; add(...) stores a step"),
            other=other,
        )
        require("append", an_instance(Mapping, "a mapping from envs of other to envs of this one"), envs=envs)
        require_alike(self, other, envs)
        if envs is None:
            self._refuse_files()
        with other.lock:
            other._writer.mend()
            self._saver.await_rows()
            self._saver.segments.forget()  # older rows get new stamps
            if envs is None:
                self._writer.append(other._ring)
            for env, to in (envs or {}).items():
                self._writer.append_env(other._ring, env, to)
                self._ratings.take_over(other._ratings, env, to)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device = "cpu",
        capacity: int | None = None,
        num_envs: int | None = None,
        sampler: GivenSampler | None = None,
        view: GivenView | None = None,
        seed: int | None = None,
        changes: SchemaChanges | None = None,
        store: MakeHome | None = None,
        **more: Never,
    ) -> ReplayBuffer[GivenSampler, GivenView]:
        """The buffer that was saved. It draws the batches that the saved one would have drawn next.

        Its :attr:`extra` is the value that was saved with it.

        Args:
            path: the directory.
            device: where its rows live from now on.
            capacity: another number of rows over all envs. If it is smaller, the newest rows of each env are kept.
            num_envs: another number of envs. It can change only if ``ordered`` is False. The transitions get new
                indices.
            sampler: needed if the saved one was your own. A sampler of another kind than the saved one starts empty.
            view: needed if the saved one was your own.
            seed: another seed; the next batch is then number 0. Give each process that loads the same save a seed of
                its own, or all of them draw the same batches.
            changes: fields to drop, rename, cast or add.
            store: as the constructor takes it. A save does not know where its rows were; the default is RAM.

        Raises:
            FileFormatError: there is no save, or it is damaged, foreign or of a later version. No saved code is run.
            SchemaError, ParameterError: the save has no such fields; or an argument, or a number to cast, is out of
                range.
        """
        if more:
            raise ParameterError(
                f"load({', '.join(f'{name}=...' for name in more)}): unknown; the save has its schema and sizes, and "
                "capacity, num_envs and changes=relive.SchemaChanges(...) change them"
            )
        require("load", an_instance(SchemaChanges, "relive.SchemaChanges(...)"), changes=changes)
        given: Any = cls, path, device, capacity, (sampler, view), changes, store
        buffer = loaded(*given) if num_envs is None else loaded_for(num_envs, *given)
        if seed is not None:
            buffer.seed = seed
        return buffer

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        schema: Schema | None = None,
        capacity: int | None = None,
        num_envs: int | None = None,
        *,
        sampler: GivenSampler | None = None,
        view: GivenView | None = None,
        ordered: bool | None = None,
        own_next_obs: bool | None = None,
        check_ends: bool = True,
        debug: bool = False,
        seed: int | None = None,
        flush: int | timedelta | None = None,
        verify: bool = False,
    ) -> ReplayBuffer[GivenSampler, GivenView]:
        """A replay that lives in the files of a directory: a new one, or the one that is there.

        Its rows may take more room than there is memory, and they outlive the process: after a kill, every step that
        ``add`` stored is there again. ``docs/durable.md`` has the promises in detail. One process at a time may have
        the replay open.

        Args:
            path: the directory.
            schema: the fields of a step. A new replay needs them. If a replay is there, None takes its schema, and any
                other schema than its own is an error.
            capacity: rows of all envs together; None as for ``schema``.
            num_envs: N; None as for ``schema``, and 1 for a new replay.
            sampler: what draws; by default the sampler that the replay had, or :class:`relive.Uniform`. A sampler of
                another kind than before starts anew.
            view: what reads; by default the view that the replay had, or :func:`relive.Transition`.
            ordered: see :class:`relive.ReplayBuffer`; None as for ``schema``.
            own_next_obs: see :class:`relive.ReplayBuffer`; None as for ``schema``.
            check_ends: see :class:`relive.ReplayBuffer`.
            debug: see :class:`relive.ReplayBuffer`.
            seed: another seed; the next batch is then number 0. By default the batches go on as they were.
            flush: call :meth:`flush` after this many rows, or after a ``timedelta``. None leaves it to you.
            verify: read all rows and test all invariants, which takes as long as reading the files.

        Raises:
            LifecycleError: the replay is open already, in another process or in this one.
            SchemaError, ParameterError: the replay that is there differs from an argument; or a new replay lacks one.
            FileFormatError: the directory holds something else, or the files are damaged or of several times.
            OSError: the disk is full or fails, or the directory may not be written to.
        """
        require("open", FLAG_RULE, verify=verify)
        wanted = {"schema": schema, "capacity": capacity, "num_envs": num_envs, "ordered": ordered}
        buffer = opened(cls, path, wanted | {"own_next_obs": own_next_obs}, sampler, view, seed, flush)
        buffer.check_ends, buffer.debug = check_ends, debug
        if verify:
            buffer._verify()
        return buffer


add_hints(ReplayBuffer)


def _home(leaves: Mapping[Path, Field], rows: int, device: torch.device, make: MakeHome | Keeper | None) -> Store:
    """Where the rows of a replay live."""
    if isinstance(make, Keeper):
        return ReplayRows(leaves, rows, keeper=make)
    if make is not None:
        return made_home(make, leaves, rows, device)
    return ReplayRows(leaves, rows) if device.type == "cpu" else DeviceRows(leaves, rows, device)
