"""ReplayBuffer: the newest steps of each env. A sampler draws from them, and a view reads what was drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from itertools import repeat
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, cast
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from .. import core
from ..batches import Batch, as_batch, as_dataframe
from ..errors import FieldError, FileFormatError, LifecycleError, ParameterError
from ..files import SaveHandle
from ..files.disk import contradictions, target
from ..files.save import read_extra
from ..memory.allocator import Allocator, shared_lock, small_pages
from ..memory.device import DeviceRows
from ..memory.estimate import StoragePlan, free_memory, readable, storage_plan
from ..memory.layout import typed
from ..memory.mapped import MappedAllocator, can_look_ahead
from ..memory.ram import MakeStore, ReplayRows, in_ram, user_rows
from ..memory.store import Store
from ..names import add_hints
from ..parameters import (
    COUNT_RULE,
    FLAG_RULE,
    TIMEOUT_RULE,
    Rule,
    an_instance,
    is_count,
    is_whole,
    observe,
    parts_of,
    require,
    seed_or_drawn,
    torch_device,
)
from ..ring.ring import Ended, Ring
from ..samplers.contract import AnySampler, with_defaults
from ..samplers.prioritized import Prioritized
from ..samplers.uniform import Uniform, nothing_to_draw
from ..steps.arrays import Array, ArrayLike, whole_numbers
from ..steps.changes import DoesNotFitError, SchemaChanges
from ..steps.schema import Field, Path, Schema, described, not_named
from ..steps.summary import Summary, html, text
from ..turns import Reuse, Spare, in_turn, require_reuse, standing_memory
from ..views.contract import View, time_first_of
from ..views.transitions import Transition
from .arrays import Episode, EpisodeRows, columns_of, episode_at, episodes_of, filled
from .checks import MOST_ROWS, require_alike, require_rows, stored_fields
from .durable import Durable, FlushMark, FlushPolicy, open_arguments, read_sampler, require_policy, write_sampler
from .loading import (
    Source,
    changed_arguments,
    open_save,
    redistribute_envs,
    require_unordered,
    restore,
    saved_arguments,
)
from .mirror import DeviceMirror, bookkeeping_bytes
from .reader import Prefetch, Reader, require_parts
from .saving import Saver, describe
from .serving import DrawAhead, Drawn, Limit, Progress, Request, Served
from .typing import TRANSITION, UNIFORM, S_co, V_co, gives_batch, gives_batches, gives_served
from .writer import Writer

if TYPE_CHECKING:
    from typing import Self

    from .typing import GivenSampler, GivenView, P, R, Replay

WHOLE_RULE: Rule = (lambda number: number is None or is_whole(number), "expected a whole number, or None")


def one_at_a_time(method: Callable[Concatenate[Replay, P], R]) -> Callable[Concatenate[Replay, P], R]:
    """Make other threads wait while the method runs. Before it, repair what an earlier call left half done, and draw
    the served batches that are due.

    Long work runs without Python's own lock, so another thread could otherwise write a row while this one reads it.
    """

    @wraps(method)
    def exclusive(self: Replay, *args: P.args, **kwargs: P.kwargs) -> R:
        mine: Any = self
        with mine.lock:
            if mine._ring.pending is not None or mine._way is not None:
                mine._prepare()
            return method(self, *args, **kwargs)

    return exclusive


class ReplayBuffer(Generic[S_co, V_co]):
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
            with the two methods of :class:`relive.memory.ram.UserStore`.
        device: where rows and batches live. Batches have the same values on every device. Steps of all envs that are
            tensors there, with ``next_obs``, and the batches of most samplers and views never wait for the device. For
            all else the bookkeeping comes back to RAM first; see ``docs/device.md``.
        debug: refuse steps in which a reward, an action or an observation is NaN or infinite.
        seed: batch number t is a function of (seed, t) and of what is stored. None draws a seed from torch's default
            generator, and ``buffer.seed`` is that number. Each worker of a ``torch.utils.data.DataLoader`` draws
            different batches, which depend on its worker seed too.

    Raises:
        SchemaError: the schema lacks a required field, or has a field that batches add.
        ParameterError: the capacity is less than 2 rows per env or more than the free memory; or ``sampler`` is not a
            sampler, or ``view`` is not a view.
    """

    _durable: Durable | None = None
    """Keeps the files of the replay safe; None if the replay is in private memory."""
    _mirror: DeviceMirror | None = None
    """The ring on the replay's device; None if RAM alone knows of its rows."""
    _way: DeviceMirror | DrawAhead | None = None
    """The part that every call asks first: the batches drawn ahead of a learner while the replay is served, else the
    mirror; None if it is the ring in RAM at once. It answers None, or False, for what the ring in RAM has to do."""

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
        store: MakeStore | Allocator | None = None,
        device: str | torch.device = "cpu",
        debug: bool = False,
        seed: int | None = None,
    ) -> None:
        require("ReplayBuffer", FLAG_RULE, ordered=ordered, own_next_obs=own_next_obs, debug=debug)
        self.schema = schema
        self.ordered = ordered
        self.own_next_obs: bool = own_next_obs or not ordered
        self.device: torch.device = torch_device("ReplayBuffer", device)
        self._progress = Progress(seed_or_drawn(seed))
        stored = stored_fields(schema, self.own_next_obs)
        self._user_sampler: AnySampler = Uniform() if sampler is None else sampler  # a user's own may have the length 0
        self._sampler = with_defaults(self._user_sampler)
        self._prioritized: Prioritized | None = self._sampler.prioritized
        leaves = stored.leaves if store is None or isinstance(store, Allocator) else in_ram(stored.leaves)
        known_there = bookkeeping_bytes(self.device, self._sampler, num_envs)
        plan = storage_plan(leaves, num_envs, capacity, capacity_bytes, self.device, self._sampler.nbytes, known_there)
        if not isinstance(store, Allocator):  # an Allocator takes its own space
            plan.require_memory()
        self._plan = plan
        self.num_envs: int = plan.num_envs
        rows = _store(stored.leaves, plan.rows, self.device, store)
        self._ring = Ring(self.num_envs, plan.rows // self.num_envs, rows, ordered)
        self._ring.alone = partial(_alone, ref(self))
        self._writer = Writer(self._ring, self._sampler, schema, stored, self.device, debug)
        self.lock: AbstractContextManager[object] = shared_lock()
        self.extra: Any = None
        """In a buffer that was loaded, the value that was passed to :meth:`save` as ``extra``; otherwise None."""
        self._writer.watch_ends(check_ends)
        self._sampler.attach(self._ring)
        own_view = Transition() if view is None else view
        self._reader = Reader(self._ring, self._sampler, schema, own_view, self._progress)
        self._spare = Spare()
        self._saver = Saver(self._writer, self._reader, self._progress, self.device)
        self._mirror = self._way = DeviceMirror.of(self._writer, self._progress, self.lock)
        if self._mirror is not None:
            self._writer.invalidate_device = self._mirror.invalidate

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

        Args:
            schema: the fields of a step.
            capacity: rows of all envs together.
            num_envs: N.
            capacity_bytes: the memory to use, instead of ``capacity``.
            sampler: what it keeps for each row counts, too.
            ordered: as in the constructor.
            own_next_obs: as in the constructor.
            device: where the rows would live; it need not be there.

        Raises:
            SchemaError, ParameterError: as the constructor's.
        """
        require("plan", FLAG_RULE, ordered=ordered, own_next_obs=own_next_obs)
        leaves = stored_fields(schema, own_next_obs or not ordered).leaves
        whole = with_defaults(Uniform() if sampler is None else sampler)
        there = torch_device("plan", device, here=False)
        known_there = bookkeeping_bytes(there, whole, num_envs)
        return storage_plan(leaves, num_envs, capacity, capacity_bytes, there, whole.nbytes, known_there)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, object], schema: Schema | None = None, **options: object) -> ReplayBuffer:
        """A replay of one env with a data set's flat arrays ``[S, ...]``; see :func:`relive.replay.arrays.filled`.

        Args:
            arrays: name -> ``[S, ...]``, under relive's names of fields or under those of D4RL.
            schema: the fields to store; the default is what the arrays have.
            options: further arguments of the constructor.
        """
        return filled(cls, arrays, schema, options)

    @property
    def view(self) -> V_co:
        """The view that reads the batches. You may replace it, or change it (``replay.view.n = 5``), at any time.

        Raises:
            ParameterError: the new value is not a view.
            SchemaError: the view cannot read what is stored.
            LifecycleError: it is the view of another buffer.
        """
        return cast("V_co", self._reader.view)

    @view.setter
    @one_at_a_time
    def view(self, view: View) -> None:
        self._reader.read_through(view)
        self._keep_settings()

    @property
    def sampler(self) -> S_co:
        """The sampler that draws the batches. You may change its parameters at any time."""
        return cast("S_co", self._user_sampler)

    @property
    def seed(self) -> int:
        """The seed of the batches: batch number t is a function of (seed, t) and of what is stored.

        You may set it at any time (None draws one); the next batch is then number 0.
        """
        return self._progress.seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        progress, seed = self._progress, seed_or_drawn(seed)
        with self.lock:
            if self._way is not None:
                self._way.prepare()  # without a wait for a device
            progress.seed, progress.first = seed, progress.draws
            self._commit()

    @property
    def check_ends(self) -> bool:
        """True if the first ends of episodes are checked. A Collector turns it off, since it stores them correctly."""
        return self._writer.check_ends

    @check_ends.setter
    def check_ends(self, check: bool) -> None:
        self._writer.watch_ends(check)

    @property
    def debug(self) -> bool:
        """True if steps with NaN or infinity are refused. You may set it at any time."""
        return self._writer.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        require("ReplayBuffer", FLAG_RULE, debug=debug)
        self._writer.debug = debug

    @property
    def capacity(self) -> int:
        """Rows of all envs together, the same number for each env; an episode of k transitions takes k + 1."""
        return self._plan.rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of the full buffer's sampler, as :meth:`plan` computes them."""
        return replace(self._plan, sampler_bytes=self._sampler.nbytes(self._plan.rows)).total_bytes

    @property
    def has_priorities(self) -> bool:
        """True if :meth:`update_priorities` can be called."""
        return self._prioritized is not None

    # -- adding ---------------------------------------------------------------------------------------------------

    def add(
        self,
        step: Mapping[str, object] | None = None,
        /,
        *more: NoReturn,
        envs: ArrayLike | None = None,
        **fields: object,
    ) -> None:
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
        if more or not (step.__class__ is dict or step is None or hasattr(step, "keys")):
            raise FieldError(not_named(step))
        writer, values = self._writer, fields
        if step is not None:
            values = step if step.__class__ is dict and not fields else {**step, **fields}
        with self.lock:  # as one_at_a_time, which takes longer
            if envs is None and self._way is None and writer.first is None:  # most often one call is all there is
                adder = writer.adders["next_obs" in values]
                if adder is not None and adder.add(values, writer.debug):
                    return
            chosen = writer.all_envs if envs is None else writer.chosen(envs)
            if self._way is not None and self._way.add(values, chosen, self._reader.view):
                return
            if self._ring.pending is not None:
                writer.repair()
            writer.add(values, chosen)

    @one_at_a_time
    def extend(self, steps: Mapping[str, object], *, envs: ArrayLike | None = None) -> None:
        """Append many steps in the order of time: every field is ``[T, N, ...]`` where :meth:`add` takes ``[N, ...]``.

        Args:
            steps: field -> ``[T, N, ...]``, with ``next_obs`` and ``mask`` as in :meth:`add`.
            envs: int64 ``[K]``, which envs stepped, each at most once; all fields are then ``[T, K, ...]``.

        Raises:
            ShapeError: the fields differ in their number of steps. Nothing is written.
            FieldError, ShapeError, DTypeError, DeviceError, NotFiniteError: as :meth:`add`. Nothing is written.
        """
        self._writer.extend(steps, envs)

    @one_at_a_time
    def interrupt(self, envs: ArrayLike | None = None, *, next_obs: object = None) -> None:
        """Cut the running episodes of all envs, or of ``envs``: the next steps start new ones.

        The newest step of such an episode has no next observation, so it is never drawn, unless you give it here.

        Args:
            envs: int64 ``[K]``, whose episodes do not go on.
            next_obs: what the newest steps led to, ``[K, ...]``, if it is known. They are then stored as truncated, as
                if they had been added so. Rows of envs without a running episode are not read.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: ``next_obs`` does not fit the schema. Nothing is changed.
            NotFiniteError: in debug mode, a number of it is NaN or infinite. Nothing is changed.
        """
        self._writer.interrupt(envs, next_obs)

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
        if envs is None and self._durable is not None:  # a kill could leave half of the new order
            raise LifecycleError("append: a replay in files takes transitions env after env; pass envs={0: 0, ...}")
        with other.lock:
            other._writer.repair()
            self._saver.await_rows()
            self._saver.segments.forget()  # older rows get new stamps
            if envs is None:
                self._writer.append(other._ring)
            for env, to in (envs or {}).items():
                self._writer.append_env(other._ring, env, to)
                self._sampler.take_over(other._sampler, env, to)

    # -- drawing --------------------------------------------------------------------------------------------------

    @gives_batch
    def sample(self, batch_size: int) -> Batch:
        """One batch ``[batch_size]``: the fields that :attr:`view` reads, and those that the sampler adds (``weight``).

        Raises:
            EmptyError: there is no complete transition.
            ParameterError: ``batch_size`` is not positive.
        """
        return self._batch(batch_size, 1, 1)

    @gives_batches
    def batches(self, count: int, batch_size: int, *, reuse: Reuse = False) -> Iterator[Batch]:
        """``count`` batches. :class:`relive.Recent` counts them as one round of updates.

        Args:
            count: how many.
            batch_size: B.
            reuse: write them to the same memory in turn, which is faster. A batch is then valid until two others were
                given, by this call or by a later one, and refuses all use after the third; clone what you keep. Values
                are the same. "pinned" takes page-locked memory, from which a GPU copies while the learner goes on:
                ``batch.to("cuda", non_blocking=True)``, on the current stream, before the next batch is asked for.

        Raises:
            EmptyError: there is no complete transition. This call raises it, not the first batch.
            ParameterError: ``count`` or ``batch_size`` is not positive, or there is no GPU to pin memory for. This
                call raises it, too.
        """
        require("batches", COUNT_RULE, count=count)
        require_reuse("batches", reuse)
        require_rows(batch_size)
        self._require_some()
        rounds = repeat(batch_size), range(1, count + 1), repeat(count)

        def made(memory: core.Standing | None = None) -> Any:
            return map(self._batch, *rounds, repeat(memory))

        return in_turn(lambda: (made, self._spare, standing_memory), count, reuse) if reuse else made()

    def _require_some(self) -> None:
        """Require that something can be drawn.

        Raises:
            EmptyError: there is no complete transition.
        """
        # the length waits for the device
        if not (self._way is not None and self._way.maybe_drawable) and not len(self):
            raise nothing_to_draw(self._ring)

    def _batch(
        self, batch_size: int, update: int, of: int, standing: core.Standing | core.JoinedRows | None = None
    ) -> Batch:
        """The next batch, number ``update`` of the ``of`` batches of its round."""
        if batch_size.__class__ is not int or not 1 <= batch_size <= MOST_ROWS:  # without a call in the usual case
            require_rows(batch_size)
            batch_size = int(batch_size)  # a small NumPy integer could overflow
        with self.lock:
            if self._way is not None:
                fields = self._way.sample(batch_size, self._reader.view, update, of)
                if fields is not None:
                    return self._reader.assembled(fields, batch_size)
            if self._ring.pending is not None:
                self._writer.repair()
            return self._reader.sample(batch_size, update, of, standing)

    def _prepare(self) -> None:
        """Repair what an earlier call left half done, and draw the served batches that are due."""
        if self._ring.pending is not None:
            self._writer.repair()
        if self._way is not None:
            self._way.prepare()

    @property
    @one_at_a_time
    def batch_fields(self) -> tuple[str, ...]:
        """The names of a batch's fields with the current view and sampler, even if nothing is stored."""
        self._reader.keep_rule()
        return (*self._reader.read(np.empty(0, np.int64), {}, None).keys(), *self._sampler.extras)

    def update_priorities(self, index: ArrayLike, td_error: ArrayLike, mask: ArrayLike | None = None) -> int:
        """Set the priorities of a batch from its TD errors; returns how many transitions were overwritten meanwhile.

        Args:
            index: int64 ``[B]``, ``batch["index"]``. If a transition occurs twice, its last error counts. A transition
                that was overwritten is ignored and counted.
            td_error: ``[B]``; the sign does not matter. If :attr:`view` reads sequences, ``[T, B]`` or ``[B, T]``, as
                its batches are. The sampler reduces these errors to one per sequence.
            mask: required for errors of sequences: ``batch["mask"]``, bool, of the shape of ``td_error``. It is True
                for the errors that count. The others may be NaN.

        If all of this is on the replay's device, the number is a tensor there, and what would be an error is passed
        over and told of later, since the call does not wait.

        Raises:
            LifecycleError: the sampler has no priorities.
            ShapeError: the shapes differ, or do not have the batch's layout.
            ParameterError: an index was never issued, or errors of sequences come without their mask.
            NotFiniteError: a TD error that counts is NaN or infinite. Nothing is changed in any of these cases.
        """
        with self.lock:
            if self._way is not None:
                late: Any = self._way.set_errors(index, td_error, mask)
                if late is not None:
                    return late
            if self._ring.pending is not None:
                self._writer.repair()
            reader, sampler = self._reader, self._prioritized
            view = reader.view
            if getattr(view, "rule", None) is not self._ring.rule:  # in place of a call that most often changes nothing
                reader.keep_rule()
            if sampler is None:
                raise self._no_priorities()
            if self._mirror is not None:
                self._mirror.invalidate()
            late = sampler.rate(index, td_error, mask, time_first_of(view))
            if late:
                self._progress.late += late
                self._progress.keep()
            if reader.prefetch is not None:
                reader.prefetch.after_update(reader)
            return late

    def _no_priorities(self) -> LifecycleError:
        return LifecycleError(f"{self._sampler!r} has no priorities; create the buffer with sampler=Prioritized()")

    @one_at_a_time
    def priorities(self, index: ArrayLike) -> Tensor:
        """The priorities p = (abs(TD error) + eps)^alpha of transitions, float64 ``[B]``; draws are in proportion to p.

        Args:
            index: int64 ``[B]``, ``batch["index"]``. A transition that can no longer be drawn has priority 0.

        Raises:
            LifecycleError: the sampler has no priorities.
            ParameterError: an index was never issued.
        """
        self._reader.keep_rule()
        if self._prioritized is None:
            raise self._no_priorities()
        return torch.from_numpy(self._prioritized.priorities_of(whole_numbers(index, "index")))

    def compile(self, **options: Any) -> Self:
        """Compile what :meth:`add`, :meth:`sample` and :meth:`update_priorities` do on the device; returns this buffer.

        Each is compiled as a whole when it is first called, which takes some seconds, and again for another batch size.
        It then takes a small part of the launches: ``docs/device.md`` has a table.

        Args:
            options: of ``torch.compile``, such as ``mode="max-autotune-no-cudagraphs"``.

        Raises:
            LifecycleError: the bookkeeping of this replay is in RAM alone.
            ParameterError: the options ask for CUDA graphs of torch's; the replay makes its own.
        """
        if self._mirror is None:
            raise LifecycleError(
                f"compile: the bookkeeping of this replay is in RAM ({self._sampler!r}, device='{self.device}'); it is "
                "on a device with device='cuda', Uniform(), Prioritized(), Recent() or Fresh(), and 4 rows or more of "
                "each env"
            )
        with self.lock:
            self._mirror.compile(**options)
        return self

    # -- reading without a draw -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of transitions that can be drawn, or of sequences if the view reads sequences.

        It waits for the device, if the replay is on one.
        """
        with self.lock:
            if self._way is not None:
                count = self._way.drawable(self._reader.view)
                if count is not None:
                    return count
            if self._ring.pending is not None:
                self._writer.repair()
            self._reader.keep_rule()
            return self._ring.drawable

    @one_at_a_time
    def stats(self) -> dict[str, float]:
        """Figures about what is stored and how it is used.

        - ``size``: transitions that can be drawn; ``completed``: all transitions that ever could be drawn;
        - ``episodes``: episodes that have ended;
        - ``age_mean``, ``age_max``: the age of a transition is how many transitions were completed later;
        - ``batches``, ``sampled``: batches and rows drawn; ``replay_ratio``: rows drawn per completed transition;
        - ``late_updates``: priorities that came after their transition was overwritten;
        - ``not_finite_rewards``: NaN or infinite rewards ever added;
        - with priorities also ``priority_min``, ``priority_mean``, ``priority_max`` and ``effective_size``, which is
          (Σp)² / Σp²: the number of equal priorities that would spread draws as evenly.
        """
        ring, progress, size = self._ring, self._progress, len(self)
        ages, oldest = ring.ages()
        figures = {
            "size": float(size),
            "completed": float(ring.completed),
            "episodes": float(ring.episodes),
            "age_mean": ages / max(size, 1),
            "age_max": float(oldest),
            "batches": float(progress.draws_taken),
            "sampled": float(progress.rows_taken),
            "replay_ratio": progress.rows_taken / max(ring.completed, 1),
            "late_updates": float(progress.late),
            "not_finite_rewards": float(ring.not_finite),
        }
        if self._prioritized is not None and size:
            p = self._prioritized.positive()
            total = p.sum()
            figures |= {
                "priority_min": float(p.min()) if len(p) == size else 0.0,
                "priority_mean": float(total / size),
                "priority_max": float(p.max(initial=0.0)),
                "effective_size": float(total**2 / ((p**2).sum() or np.inf)),
            }
        return figures

    @gives_batch
    @one_at_a_time
    def data(self) -> Batch:
        """All transitions that can be drawn, in the order of completion, as :attr:`view` reads them."""
        self._reader.keep_rule()
        places = self._ring.anchors()
        return self._reader.read(places[np.argsort(self._ring.stamp[places], kind="stable")], {}, None)

    @one_at_a_time
    def slice(self, env: int, start: int = 0, stop: int | None = None) -> Batch:
        """Rows of one env in the order of time, ``[K]``, as they are stored; 0 is the oldest, -1 the newest.

        The fields are those of a step, ``index``, and ``complete`` (bool). ``complete`` is False for the newest step,
        whose next observation is unknown, and for the row of a final observation, where only ``obs`` is valid.

        Raises:
            ParameterError: there is no such env, or ``start`` or ``stop`` is not a whole number.
        """
        ring = self._ring
        if not (is_count(env) and env < ring.num_envs):
            raise ParameterError(
                f"slice: env is a whole number from 0 up to, not including, {ring.num_envs}, got {env}"
            )
        require("slice", WHOLE_RULE, start=start, stop=stop)
        places = ring.live_places(env)[slice(start, stop)]
        fields = ring.take(places)
        facts = ring.store.tensors(ring.stamp[places] >= 0, ring.index_of(places))
        fields["complete",], fields["index",] = facts
        return as_batch(fields)

    @one_at_a_time
    def at(self, rows: ArrayLike) -> Batch:
        """The transitions at ``rows`` of :attr:`block`, int64 ``[B]``, as :attr:`view` reads them.

        Raises:
            ParameterError: a row is out of range, or cannot be drawn.
        """
        self._reader.keep_rule()
        ring, places = self._ring, whole_numbers(rows, "rows")
        good = (places >= 0) & (places < ring.store.num_rows)
        if good.all():
            good = ring.find(ring.index_of(places))[0] == places
        if not good.all():
            raise ParameterError(f"at: row {places[np.argmin(good)]} cannot be drawn; pass complete transitions")
        return self._reader.read(places, {}, None)

    @one_at_a_time
    def episodes(self) -> Iterator[Episode]:
        """The stored episodes one by one, env by env in the order of time, whatever :attr:`view` is.

        Each episode is read when its turn comes. The replay may change meanwhile: steps that were overwritten by then
        are left out, and steps that were added after this call are not read.

        Raises:
            SchemaError: the transitions have no order.
        """
        return self._read_each(episodes_of(self._ring))

    def _read_each(self, episodes: Iterable[EpisodeRows]) -> Iterator[Episode]:
        for rows in episodes:
            with self.lock:
                self._writer.repair()
                episode = episode_at(self._ring, rows)
            if episode is not None:
                yield episode

    @property
    @one_at_a_time
    def block(self) -> Batch:
        """The schema's fields of all rows ``[rows]``, without a copy, in the order of memory.

        Row k of env e is at ``e * R + k % R``; each env has R rows. Rows that were never written are included, and so
        are those of final observations. Reward and flags are always in RAM.

        You can write to the rows, and :meth:`save` cannot see that. So once this was read, every save writes all rows.
        If the replay is on a device, the bookkeeping is in RAM alone from then on.
        """
        self._saver.segments.frozen = False
        self._saver.await_rows()
        self._writer.invalidate_device = None  # a mirror could not see what is written to rewards and flags
        self._way = None if self._way is self._mirror else self._way
        self._mirror = None
        return as_batch(self._ring.store.views())

    @one_at_a_time
    def to_pandas(self, *, next_obs: bool = False) -> Any:
        """All complete transitions as a ``pandas.DataFrame``, one row a step, env by env in the order of time.

        ``env``, ``episode`` (counted in this table), ``step`` (within the episode) and ``index`` come first, then the
        fields. A field of several numbers is a column for each: ``obs.0``, ``obs.1``. One of more than 64 is a column
        of arrays.

        Args:
            next_obs: add the observations after each step.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        return as_dataframe(columns_of(self._ring, next_obs))

    @one_at_a_time
    def check(self) -> None:
        """Test the invariants of the ring (:class:`relive.ring.Ring`) and of the sampler.

        Raises:
            InvariantError: names the first that does not hold.
        """
        self._ring.check()
        self._sampler.check()

    # -- serving --------------------------------------------------------------------------------------------------

    @gives_served
    def serve(
        self,
        batch_size: int,
        depth: int = 2,
        *,
        count: int | None = None,
        limit: Limit | None = None,
        timeout: float | None = None,
    ) -> Served[Batch]:
        """Batches ``[batch_size]`` that a thread draws while you learn: ``for batch in replay.serve(256): ...``.

        They are the batches that :meth:`sample` gives, in the same order. Batch t is drawn when the learner is done
        with batch t - depth, that is, when it asks for the batch after that one. So batch t has all steps and
        priorities that came before that moment, and none that came after: every other call of this replay waits for the
        draws that are due.

        Args:
            batch_size: B.
            depth: how many batches there are at most, the one in use included. 1 draws each when you ask for it.
            count: how many batches; they are one round of updates, as in :meth:`batches`. None is without end.
            limit: a :class:`relive.SamplesPerInsert` or :class:`relive.MinSize`; a batch is drawn when the limit
                allows it.
            timeout: seconds to wait for the limit; None is for ever.

        Returns:
            an iterator, with ``close()``, ``stats()`` and ``completed``; see :class:`relive.replay.serving.Served`. Its
            ``next`` raises what the draw raised, such as EmptyError, and WaitTimeoutError.

        Raises:
            ParameterError: an argument is out of range.
            LifecycleError: the replay is served already.
        """
        require_rows(batch_size)
        require("serve", COUNT_RULE, depth=depth, **({} if count is None else {"count": count}))
        require("serve", TIMEOUT_RULE, timeout=timeout)
        require("serve", an_instance(Limit, "a limit, such as relive.SamplesPerInsert(...)"), limit=limit)
        with self.lock:
            self._prepare()
            if isinstance(self._way, DrawAhead):
                raise LifecycleError("serve: this replay is served already; close() that first, or take its batches")
            batch_size, of = int(batch_size), 1 if count is None else count
            draw, undo = partial(self._draw_ahead, batch_size, of), self._end_serving
            ahead = DrawAhead(
                self._writer, self._progress, draw, undo, self.lock, Request(batch_size, depth, count, limit)
            )
            served = Served[Batch](ahead, timeout)
            self._way = ahead  # last: if this call breaks off, the iterator is dropped, which ends the serving
        return served

    def _draw_ahead(self, batch_size: int, of: int, update: int) -> None:
        """Draw a batch that waits for its learner. The caller holds the lock. A draw that fails does not count."""
        progress, draw_state = self._progress, self._sampler.draw_state()
        number, sampled, completed = progress.draws, progress.sampled, self._ring.completed
        try:
            batch = self._batch(batch_size, update if of > 1 else 1, of)
            progress.ahead.append(Drawn(number, update, batch_size, draw_state, completed, batch))
            progress.keep()
        except BaseException:
            if not (progress.ahead and progress.ahead[-1].number == number):
                progress.draws, progress.sampled = number, sampled
                self._sampler.set_draw_state(draw_state)
            raise

    def _end_serving(self, ahead: DrawAhead) -> None:
        """Put back the batches that nobody took, and end the serving. The caller holds the lock."""
        if ahead is self._way:
            ahead.give_back()
            self._progress.undo(self._sampler)
            self._way = self._mirror

    # -- saving, loading and copies -------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, extra: object = None, background: bool = False) -> SaveHandle:
        """Write everything stored, and the number of the next batch, to the directory ``path``.

        An earlier save there is replaced as a whole or not at all. If this buffer wrote or loaded that save, only new
        rows are written. ``docs/files.md`` describes the format.

        Args:
            path: the directory.
            extra: further values of the same instant, such as the ``state_dict`` of the model and the optimizer: nested
                dicts, lists and tuples of tensors, arrays, numbers, bools, text and bytes. They come back as
                :attr:`extra` of the loaded buffer, and from :func:`relive.load_extra`. Do not change them before this
                call returns.
            background: return at once, and write the present state in another thread. ``extra`` is copied. You may add,
                sample and train meanwhile, and change everything. A buffer has one such save at a time: the next call
                waits for it. If that save failed and :meth:`~relive.files.SaveHandle.wait` has not raised its error,
                the next call raises it.

        Returns:
            the save. ``save(path, background=True).wait()`` raises its error. Without ``background`` it is done.

        Raises:
            ParameterError: nothing is there, and ``path`` ends as a file, such as ``.pt``: a save is a directory.
            FileFormatError: ``path`` holds something else, or ``extra`` a value that cannot be stored; names its keys.
            OSError: the disk is full, or fails.
        """
        require("save", FLAG_RULE, background=background)
        saver, path = self._saver, target(path)
        saver.saves.wait()
        with ExitStack() as held:
            held.enter_context(self.lock)  # others wait until the rows are on their way, not for the disk
            saver.saves.wait()  # another thread may have begun one
            if self._ring.pending is not None or self._way is not None:
                self._prepare()
            return saver.start(path, extra) if background else saver.write(path, extra, held.close)

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
        store: MakeStore | None = None,
        **more: NoReturn,
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
        require_parts(sampler, view)
        parts, new_num_envs = (sampler, view), None
        if num_envs is not None:
            with open_save(path) as save:
                require_unordered(save.content, num_envs, store)
                new_num_envs = None if num_envs == save.content["num_envs"] else num_envs
        if new_num_envs is None:
            buffer: Any = cls._loaded(path, device, capacity, parts, changes, store)
        else:
            saved = cls._loaded(path, "cpu", None, deepcopy(parts), changes, None)
            arrays, content = saved._saver.whole_state()
            arrays, content = redistribute_envs(arrays, content, new_num_envs, capacity)
            buffer = cls._restored(arrays, content, device, *parts)
            buffer.extra = saved.extra
        if seed is not None:
            buffer.seed = seed
        return buffer

    @classmethod
    def _loaded(
        cls,
        path: str | os.PathLike[str],
        device: str | torch.device,
        capacity: int | None,
        parts: tuple[AnySampler | None, View | None],
        changes: SchemaChanges | None,
        store: MakeStore | None,
    ) -> Self:
        """The saved replay with as many envs. ``parts`` are a sampler and a view, or None for the saved ones."""
        with open_save(path) as save:
            source = Source.of_save(save)
            with contradictions(path):
                arguments = saved_arguments(source, device, *parts)
            origins = changed_arguments(arguments, device, capacity, changes, store)
            sparse = 2 * source.row_count < arguments["capacity"]  # huge pages are written faster, but only as a whole
            with contradictions(path, DoesNotFitError), small_pages() if sparse else nullcontext():
                buffer = cls(**arguments, store=store)
                restore(buffer._ring, buffer._sampler, buffer._progress, source, origins)
            buffer.extra = read_extra(save, free_memory())
        if changes is None:
            buffer._saver.segments.note(path, source.segments[:-1])
        return buffer

    @classmethod
    def _restored(
        cls,
        tensors: Mapping[str, Tensor],
        content: Mapping[str, object],
        device: str | torch.device,
        sampler: AnySampler | None,
        view: View | None,
    ) -> Self:
        """The buffer whose state this is, with a sampler and a view, or None for the saved ones."""
        source = Source.of_tensors(tensors, content)
        buffer = cls(**saved_arguments(source, device, sampler, view))
        restore(buffer._ring, buffer._sampler, buffer._progress, source)
        return buffer

    @one_at_a_time
    def __reduce__(self) -> tuple[object, ...]:
        """For pickle: the content of a save, and parts that are not relive's own."""
        return type(self)._unpickled, self._saver.pickled(self._user_sampler)

    @classmethod
    def _unpickled(
        cls,
        arrays: Mapping[str, tuple[Array, torch.dtype]],
        content: Mapping[str, object],
        device: str,
        sampler: AnySampler | None,
        view: View | None,
    ) -> Self:
        tensors = {name: typed(*array) for name, array in arrays.items()}
        return cls._restored(tensors, content, device, sampler, view)

    def __copy__(self) -> Self:
        """A deep copy, since two buffers cannot share memory, a sampler or a view."""
        return deepcopy(self)

    # -- in files -------------------------------------------------------------------------------------------------

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
        require_parts(sampler, view)
        require_policy(flush)
        wanted: dict[str, object] = {"schema": schema, "capacity": capacity, "num_envs": num_envs, "ordered": ordered}
        wanted |= {"own_next_obs": own_next_obs}
        allocator = MappedAllocator(path)
        directory = allocator.directory
        try:
            arguments, first, mark = open_arguments(allocator, wanted, sampler, view)
            if mark is None:
                arguments["seed"] = seed
            with nullcontext() if mark is None else contradictions(directory.path):
                buffer: Any = cls(**arguments, store=allocator)
                buffer._progress.first = first
                buffer._begin(allocator, flush, mark)
            if mark is not None and seed is not None:
                buffer.seed = seed
        except BaseException:
            directory.discard()
            raise
        buffer.check_ends, buffer.debug = check_ends, debug
        if verify:
            try:
                with contradictions(directory.path):
                    buffer.check()
            except FileFormatError:
                buffer._let_go("this replay was found damaged when it was opened")
                raise
        return buffer

    def _begin(self, allocator: MappedAllocator, flush: FlushPolicy, mark: FlushMark | None) -> None:
        """Start to use the memory of an allocator. ``mark`` is the last flush of the process before."""
        durable = self._durable = Durable(allocator, self._ring, self._progress, flush, mark)
        read_sampler(allocator.directory, self._ring, self._sampler)
        if flush is not None:
            me = ref(self)  # weakly: a replay is freed as soon as it is dropped
            self._writer.added = lambda count: (
                durable.is_due(count) and (buffer := me()) is not None and buffer._flush()
            )
        self._reader.prefetch = Prefetch(self._ring, allocator) if can_look_ahead() else None
        allocator.on_fork = partial(_end_in_child, ref(self._ring))
        if mark is None:
            durable.begin()
        self._ring.commit()
        self._commit()
        self._keep_settings()

    @one_at_a_time
    def flush(self) -> None:
        """Write everything that is stored through to the disk. All of it then survives a power cut.

        Raises:
            LifecycleError: this replay is not in files.
            FileFormatError: the directory is gone, or another one is at its path.
            OSError: the disk is full or fails.
        """
        if self._durable is None:
            raise LifecycleError("flush: this replay is not in files; make it with ReplayBuffer.open, or call save")
        self._flush()

    def _flush(self) -> None:
        if self._durable is not None:
            with self._progress.undone(self._sampler):  # batches drawn ahead that nobody took are drawn again
                self._commit()
                self._durable.flush()

    def close(self) -> None:
        """Flush, and let another process open the files. Every later call but this one is an error.

        A replay that is not in files has nothing to close.
        """
        with self.lock:
            if self._durable is None or isinstance(self._ring.pending, Ended):
                return
            self._prepare()
            if isinstance(self._way, DrawAhead):
                self._way.close()
                self._end_serving(self._way)
            self._saver.saves.wait()
            self._commit()
            self._durable.flush("close")
            self._let_go("this replay was closed; open its directory again with ReplayBuffer.open")

    def _let_go(self, why: str) -> None:
        """Let another process open the files, which stay as they are. Every later call is an error that says why."""
        self._ring.pending = Ended(why)
        self._spare.clear()
        if self._durable is not None:
            self._durable.allocator.directory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _commit(self) -> None:
        """Write the manifest of a replay in files, if anything in it has changed."""
        if self._durable is None:
            return
        directory, ring = self._durable.allocator.directory, self._ring
        content = {
            **self._saver.facts(),
            **self._settings(),
            "rows_per_env": ring.rows,
            "num_envs": ring.num_envs,
        }
        directory.require_held()
        write_sampler(directory, ring, self._sampler)
        if content != directory.content:
            directory.commit(content)

    def _settings(self) -> dict[str, object]:
        """The parameters of sampler and view as JSON."""
        return {"sampler": describe(self._sampler), "view": describe(self._reader.view)}

    def part_changed(self, part: object) -> None:
        """A parameter of ``part``, a sampler or a view, was set: if it is one of this replay, keep it at once."""
        if any(part is own for own in self._parts()):
            self._keep_settings()

    def _parts(self) -> list[object]:
        """The sampler and the view, and those inside of them."""
        return [*parts_of(self._sampler), *parts_of(self._reader.view)]

    def _keep_settings(self) -> None:
        """Keep the settings of a replay in files, and learn of later changes."""
        with self.lock:  # parameters are set by any thread, and the slots have one writer
            if self._durable is None or isinstance(self._ring.pending, Ended):
                return
            for part in self._parts():
                observe(part, self)
            if not self._durable.settings.keep(json.dumps(self._settings()).encode()):
                self._commit()  # they are too long for their place

    # -- printing -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"ReplayBuffer({self.schema!r}, capacity={self._plan.rows}, num_envs={self.num_envs}, "
            f"sampler={self._sampler!r}, view={self._reader.view!r}, ordered={self.ordered}, "
            f"own_next_obs={self.own_next_obs}, device='{self.device}', seed={self.seed})"
        )

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    @one_at_a_time
    def _summary(self) -> Summary:
        """The facts that printing shows."""
        ring, progress, plan = self._ring, self._progress, self._plan
        where = "in files" if ring.store.allocator.durable else "in RAM"
        memory = f"{readable(self.nbytes - plan.device_bytes)} {where}"
        facts = {
            "fields": described(ring.store.leaves),
            "to draw": f"{ring.drawable:,} of {ring.completed:,} ever completed, {ring.episodes:,} episodes ended",
            "memory": memory if not plan.device_bytes else f"{memory}, {readable(plan.device_bytes)} on {self.device}",
            "sampler": repr(self._sampler),
            "view": repr(self._reader.view),
            "seed": f"{progress.seed}, {progress.draws_taken:,} batches drawn",
        }
        return f"ReplayBuffer: {ring.rows_live:,} of {plan.rows:,} rows, {ring.num_envs:,} envs", facts


add_hints(ReplayBuffer)


def _store(leaves: Mapping[Path, Field], rows: int, device: torch.device, make: MakeStore | Allocator | None) -> Store:
    """The memory of a replay's rows."""
    if isinstance(make, Allocator):
        return ReplayRows(leaves, rows, allocator=make)
    if make is not None:
        return user_rows(make, leaves, rows, device)
    return ReplayRows(leaves, rows) if device.type == "cpu" else DeviceRows(leaves, rows, device)


@contextmanager
def _alone(reference: ReferenceType[ReplayBuffer]) -> Generator[None]:
    """See :attr:`relive.ring.Ring.alone`."""
    replay: Any = reference()
    if replay is None:
        yield
        return
    with replay.lock:
        replay._prepare()
        yield


def _end_in_child(reference: ReferenceType[Ring]) -> None:
    """Make every further call in this process, a forked child, an error."""
    ring = reference()
    if ring is not None:
        ring.pending = Ended(
            "this replay is in files that belong to the process that opened it, and a forked child may not use them; "
            "use it in the parent, or send the child batches"
        )
