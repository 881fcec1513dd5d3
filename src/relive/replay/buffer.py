"""ReplayBuffer: the newest steps of each env, kept over many policies, drawn by a sampler, read through a view."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import copy, deepcopy
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor

from ..batches.sequences import SequenceBatch
from ..batches.tensordicts import as_tensordict
from ..errors import FieldError, ParameterError, SchemaError
from ..files.entries import contradictions
from ..files.nested import read_extra
from ..kernels.reference.random import key as stream
from ..memory.blocks import small_pages
from ..memory.device import DeviceRows
from ..memory.estimate import StoragePlan, free_memory, storage_plan
from ..memory.forks import shared_lock
from ..memory.ram import ReplayRows
from ..memory.store import Store
from ..parameters import is_count, is_own, refuse_class, seed_or_drawn
from ..ring.ring import Ring
from ..samplers.contract import AnySampler, completed
from ..samplers.sequence_weights import nothing_to_draw
from ..samplers.uniform import Uniform
from ..steps.changes import DoesNotFitError, Origin, SchemaChanges
from ..steps.schema import Schema, not_named
from ..steps.summary import Summary, html, text
from ..steps.trees import Path
from ..views.contract import SequenceReader, View
from ..views.transitions import NStep, Transition
from .arguments import require_rows
from .ends import EndCheck
from .fields import stored_fields
from .figures import figures, summary
from .progress import Progress, stream_of
from .ratings import Ratings
from .reader import Reader, readable_draw
from .saving import (
    bare_arrays,
    changed_arguments,
    open_save,
    replay_state,
    restore_replay,
    saved_arguments,
    typed_tensors,
    whole_state,
    write_save,
)
from .segments import Segments
from .sources import Source
from .writer import Writer

if TYPE_CHECKING:
    from tensordict import TensorDict
    from typing_extensions import TypeVar as TypeVarWithDefault

__all__ = ["ReplayBuffer"]


if TYPE_CHECKING:
    S_co = TypeVarWithDefault("S_co", bound=AnySampler, covariant=True, default=Any)
    V_co = TypeVarWithDefault("V_co", bound=View, covariant=True, default=Any)
    GivenSampler = TypeVarWithDefault("GivenSampler", bound=AnySampler, default=Any)
    GivenView = TypeVarWithDefault("GivenView", bound=View, default=Any)
else:
    S_co, V_co = TypeVar("S_co", covariant=True), TypeVar("V_co", covariant=True)


P = ParamSpec("P")


R = TypeVar("R")


UNIFORM, TRANSITION = cast("Uniform", None), cast("NStep", None)
"""None, where no sampler or view is given; type checkers read off what the buffer has then."""


def _one_at_a_time(method: Callable[Concatenate[ReplayBuffer, P], R]) -> Callable[Concatenate[ReplayBuffer, P], R]:
    """Mend what an earlier call left half done, and let other threads wait.

    Kernels run without Python's own lock, and a row could be written while it is read.
    """

    @wraps(method)
    def alone(self: ReplayBuffer, *args: P.args, **kwargs: P.kwargs) -> R:
        mine: Any = self
        with mine.lock:
            if mine._ring.pending is not None:
                mine._writer.mend()
            return method(self, *args, **kwargs)

    return alone


class ReplayBuffer(Generic[S_co, V_co]):
    """A replay: for each env a ring of its newest steps.

    ``add`` stores what an env did, in the order it happened; ``sample`` draws transitions with a ``sampler`` and reads
    them through a ``view``. A transition can be drawn once its next observation is known: when the next step of its env
    comes, or at once if it ended its episode.

    Several threads may call it: each call is done before the next begins; ``with replay.lock`` makes one of several.

    Type checkers know its sampler and its view as those it was made with: ``ReplayBuffer[Prioritized, NStep]``. Where a
    view of another kind will take its place, annotate ``replay: ReplayBuffer[Prioritized, View]``.

    Args:
        schema: the fields of a step, ``obs``, ``reward``, ``terminated`` and ``truncated`` among them.
        capacity: rows over all envs; an episode of k transitions takes k + 1.
        num_envs: N.
        capacity_bytes: instead of ``capacity``, the memory of ``device`` to use; :meth:`plan` shows what that gives.
        sampler: default :class:`relive.Uniform`.
        view: default :func:`relive.Transition`.
        ordered: False stores transitions that come in no order, each with a ``next_obs`` of its own.
        own_next_obs: store a ``next_obs`` with every step, although steps come in order. That takes twice the memory of
            observations; in return a step can be drawn as soon as it is added, and ``capacity`` is that of transitions.
            Views of single transitions and n-step windows read it, sequences and frame stacks cannot.
        check_ends: look at the first ends of episodes, and warn if the next ones begin on what those ended on: see
            :class:`relive.errors.EpisodeEndWarning`. False for envs that do. Not done where steps have no order.
        device: where rows and batches live. Off the CPU rewards, flags and bookkeeping stay in RAM, 32 bytes a row,
            and so do samplers; the batches are the same.
        debug: refuse steps in which a reward, an action or an observation is NaN or infinite.
        seed: batch number t is a function of (seed, t) and of what is stored. None draws one number from torch's
            default generator, so that ``torch.manual_seed`` decides it; ``buffer.seed`` is the number. Each worker of
            a ``torch.utils.data.DataLoader`` draws batches of its own, which its worker seed decides besides.

    Raises:
        SchemaError: a schema without these fields.
        ParameterError: a capacity of less than 2 rows per env, or of more than the memory; or a part that is none.
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
        device: str | torch.device = "cpu",
        debug: bool = False,
        seed: int | None = None,
    ) -> None:
        self.schema, self.ordered = schema, ordered
        self.own_next_obs = own_next_obs or not ordered
        self.device = torch.empty(0, device=device).device
        self._progress = Progress(seed_or_drawn(seed))
        stored = stored_fields(schema, self.own_next_obs)
        refuse_class("sampler", sampler)
        self._given_sampler = sampler or Uniform()
        self._own_sampler = is_own(self._given_sampler)
        self._sampler = completed(self._given_sampler)
        plan = storage_plan(stored.leaves, num_envs, capacity, capacity_bytes, self.device, self._sampler.nbytes)
        plan.require_memory()
        self._plan, self.num_envs = plan, plan.num_envs
        rows, on_host = plan.rows, self.device.type == "cpu"
        store: Store = ReplayRows(stored.leaves, rows) if on_host else DeviceRows(stored.leaves, rows, self.device)
        self._ring = Ring(self.num_envs, rows // self.num_envs, store, ordered)
        self._writer = Writer(self._ring, self._sampler, schema, stored, self.device, self.own_next_obs, debug)
        self._ratings = Ratings(self._ring, self._sampler, self._progress)
        self.lock = shared_lock()
        self.check_ends = check_ends
        self._sampler.attach(self._ring)
        self._reader = Reader(self._ring, self._sampler, schema, view or Transition())
        self._segments = Segments()
        self.extra: Any = None
        """What was passed to :meth:`save` as ``extra``, in a buffer that was loaded; else None."""

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
        """What such a buffer will take, per field, without taking it: ``print(ReplayBuffer.plan(schema, 10**6))``.

        ``sampler`` is only asked how much it would keep, and can be given to a buffer afterwards.

        Raises:
            SchemaError, ParameterError: as the constructor's.
        """
        leaves, kept = stored_fields(schema, own_next_obs or not ordered).leaves, completed(sampler or Uniform()).nbytes
        return storage_plan(leaves, num_envs, capacity, capacity_bytes, torch.device(device), kept)

    # -- writing ------------------------------------------------------------------------------------------------

    def add(self, step: Mapping[str, Any] | None = None, /, *more: Never, envs: Any = None, **fields: Any) -> None:
        """Append one step of every env, or of some; NumPy or torch, given as a mapping, as keywords, or both.

        Args:
            step: field -> ``[N, ...]`` for every field of the schema; with one env the leading axis may be left out.
                ``next_obs`` is read where the episode ended: the true final observation, ``[N, ...]``. With
                ``ordered=False`` or ``own_next_obs=True`` every row needs it. ``mask`` (bool ``[N]``) False leaves a
                row out, such as the reset step of ``NEXT_STEP`` autoreset.
            envs: int64 ``[K]``, which envs stepped, each at most once; all fields are then ``[K, ...]``.
            fields: like ``step``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema, or the final observation
                of an episode that ended is missing. Nothing is written.
            NotFiniteError: in debug mode, a number is NaN or infinite. Nothing is written.
        """
        if more or not (step is None or hasattr(step, "keys")):
            raise FieldError(not_named(step))
        writer, values = self._writer, fields if step is None else {**step, **fields}
        chosen = writer.all_envs if envs is None else writer.chosen(envs)
        with self.lock:  # as _one_at_a_time, which takes longer
            if self._ring.pending is not None:
                writer.mend()
            writer.add(values, chosen)

    @_one_at_a_time
    def extend(self, steps: Mapping[str, Any], *, envs: Any = None) -> None:
        """Append many steps in the order of time: every field ``[T, N, ...]``, as :meth:`add` takes ``[N, ...]``.

        Raises:
            ShapeError: the fields do not have one number of steps.
            FieldError, ShapeError, DTypeError, DeviceError, NotFiniteError: as :meth:`add`. Nothing is written.
        """
        self._writer.extend(steps, envs)

    @_one_at_a_time
    def interrupt(self, envs: Any = None) -> None:
        """The episodes under way, in all envs or in ``envs``, will not go on: what comes next starts new ones.

        Their newest steps, whose next observation never became known, are never drawn.
        """
        self._writer.interrupt(envs)

    @_one_at_a_time
    def clear(self, *, rewind: bool = False) -> None:
        """Forget everything stored. Indices go on, so that an old one is never mistaken for a new one.

        Args:
            rewind: store the next steps from each env's first row on again, for code that reads :attr:`block` by
                position. Only where steps have next observations of their own.

        Raises:
            LifecycleError: ``rewind`` where steps share observations.
        """
        self._writer.clear(rewind)

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def view(self) -> V_co:
        """How batches are read; may be replaced, or changed (``replay.view.n = 5``), at any time.

        Each buffer has a view of its own.

        Raises:
            ParameterError: what is set is not a view.
            SchemaError: the view cannot read what is stored.
            LifecycleError: it is the view of another buffer.
        """
        return cast("V_co", self._reader.view)

    @view.setter
    @_one_at_a_time
    def view(self, view: View) -> None:
        self._reader.read_through(view)

    @property
    def sampler(self) -> S_co:
        """What draws; its parameters may be changed at any time."""
        return cast("S_co", self._given_sampler)

    @property
    def seed(self) -> int:
        """What batches are drawn with: number t is a function of (seed, t) and of what is stored.

        It may be set at any time, None draws one; the next batch is number 0 then.
        """
        return self._progress.seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._progress.seed, self._progress.first = seed_or_drawn(seed), self._progress.draws

    @property
    def check_ends(self) -> bool:
        """Whether the first ends of episodes are looked at; a Collector, which stores them rightly, turns it off."""
        return self._check_ends

    @check_ends.setter
    def check_ends(self, check: bool) -> None:
        self._check_ends = bool(check)
        self._writer.ends = EndCheck(self._ring.store.leaves) if check and self.ordered else None

    @property
    def debug(self) -> bool:
        """Whether steps with a NaN or an infinity are refused; may be set at any time."""
        return self._writer.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self._writer.debug = debug

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and of what the sampler keeps, once the buffer is full: those of :meth:`plan`."""
        return replace(self._plan, sampler_bytes=self._sampler.nbytes(self._plan.rows)).total_bytes

    @property
    def has_priorities(self) -> bool:
        """Whether :meth:`update_priorities` can be called."""
        return self._ratings.prioritized is not None

    @_one_at_a_time
    def __len__(self) -> int:
        """The number of transitions that can be drawn; of sequences, through a view that reads such."""
        self._reader.keep_rule()
        return self._ring.drawable

    @property
    @_one_at_a_time
    def batch_fields(self) -> tuple[str, ...]:
        """The names of the fields of a batch, as view and sampler are now; nothing has to be stored."""
        self._reader.keep_rule()
        return (*self._reader.read(np.empty(0, np.int64), {}, None).keys(), *self._sampler.extras)

    @overload
    def sample(self: ReplayBuffer[Any, NStep], batch_size: int) -> TensorDict: ...
    @overload
    def sample(self: ReplayBuffer[Any, SequenceReader], batch_size: int) -> SequenceBatch: ...
    @overload
    def sample(self, batch_size: int) -> TensorDict: ...
    def sample(self, batch_size: int) -> Any:
        """One batch ``[batch_size]``, as :attr:`view` reads it, with what the sampler adds (weight, probability).

        Raises:
            EmptyError: there is no complete transition.
            ParameterError: ``batch_size`` is not positive.
        """
        return self._batch(batch_size, 1, 1)

    @overload
    def batches(self: ReplayBuffer[Any, NStep], count: int, batch_size: int) -> Iterator[TensorDict]: ...
    @overload
    def batches(self: ReplayBuffer[Any, SequenceReader], count: int, batch_size: int) -> Iterator[SequenceBatch]: ...
    @overload
    def batches(self, count: int, batch_size: int) -> Iterator[TensorDict]: ...
    def batches(self, count: int, batch_size: int) -> Any:
        """``count`` batches; a sampler that emphasises recent experience takes them as one round of updates.

        Raises:
            EmptyError: there is no complete transition; from this call, not from the first batch.
            ParameterError: ``count`` or ``batch_size`` is not positive; also from this call.
        """
        if not is_count(count, 1):
            raise ParameterError(f"batches({count!r}, ...): ask for a whole number of batches, at least 1")
        require_rows(batch_size)
        if not len(self):
            raise nothing_to_draw(self._ring)
        return (self._batch(batch_size, k, count) for k in range(1, count + 1))

    @_one_at_a_time
    def update_priorities(self, index: Any, td_error: Any, mask: Any = None) -> int:
        """Tell a prioritizing sampler the TD errors of a batch; returns how many of them came too late.

        Args:
            index: int64 ``[B]``, ``batch["index"]``. Of a transition named twice the last error counts; one that was
                overwritten meanwhile is left alone, and counted.
            td_error: ``[B]``; their size counts, not their sign. Where :attr:`view` reads sequences also ``[T, B]`` or
                ``[B, T]``, as its batches are, which the sampler reduces to one error each.
            mask: bool, of the same shape: ``batch["mask"]``, the steps whose errors count; such errors need it. What
                the others are does not matter; they may be NaN.

        Raises:
            LifecycleError: the sampler knows no priorities.
            ShapeError: the shapes differ, or are not of the batch's layout.
            ParameterError: an index was never issued, or errors of sequences come without their mask.
            NotFiniteError: a TD error that counts is NaN or infinite. Nothing is changed in either case.
        """
        self._reader.keep_rule()
        return self._ratings.update(self._reader.view, index, td_error, mask)

    @_one_at_a_time
    def stats(self) -> dict[str, float]:
        """Figures on what is stored and how it is used; changes nothing.

        ``size`` transitions that can be drawn of ``completed`` ever; ``episodes`` ended; ``age_mean``, ``age_max`` in
        transitions completed since; ``batches`` and ``sampled`` rows drawn; ``replay_ratio`` rows drawn per transition
        completed, which is also how often each was drawn on average; ``late_updates`` of priorities that came after
        their transition was overwritten; ``not_finite_rewards`` ever added, NaN or infinite. With priorities also their
        ``priority_min``, ``_mean``, ``_max`` and ``effective_size``, (Σp)² / Σp²: of how many equal ones the buffer is
        worth.
        """
        ring, places = self._ring, self._ring.anchors()
        return figures(ring, places, len(self), self._progress, self._ratings.prioritized)

    @overload
    def data(self: ReplayBuffer[Any, NStep]) -> TensorDict: ...
    @overload
    def data(self: ReplayBuffer[Any, SequenceReader]) -> SequenceBatch: ...
    @overload
    def data(self) -> TensorDict: ...
    @_one_at_a_time
    def data(self) -> Any:
        """Every transition that can be drawn, in the order of completion, as :attr:`view` reads it."""
        return self._reader.data()

    @_one_at_a_time
    def slice(self, env: int, start: int = 0, stop: int | None = None) -> TensorDict:
        """Rows of one env in the order of time, ``[K]``, as they are stored; 0 is the oldest, -1 the newest.

        Besides the fields of a step there is ``index``, and ``complete`` (bool): False for the newest step, whose next
        observation is not known, and for the final observation after an episode, of which only ``obs`` means anything.

        Raises:
            ParameterError: there is no such env.
        """
        return self._reader.slice(env, start, stop)

    @_one_at_a_time
    def at(self, rows: Any) -> TensorDict:
        """The transitions that lie at ``rows`` of :attr:`block`, int64 ``[B]``, as :attr:`view` reads them.

        Raises:
            ParameterError: a row out of range, or one that cannot be drawn.
        """
        return self._reader.at(rows)

    @property
    def block(self) -> TensorDict:
        """The schema's fields of all rows as views ``[rows]``, in memory's order, whatever was written of them.

        Row k of env e is at ``e * R + k % R``, where R rows belong to each env. With ``ordered`` these are also the
        rows that hold the observation an episode ended on. Off the CPU, reward and flags are in RAM nevertheless.

        The views can be written to, and :meth:`save` cannot see that. So once this was read, every save is a full one.
        """
        self._segments.give_up()
        return as_tensordict(self._ring.store.views(), (self._plan.rows,))

    @_one_at_a_time
    def append(self, other: ReplayBuffer) -> None:
        """Add all transitions of another buffer, in the order in which they were completed there.

        Episodes under way here are interrupted, and what has no known next observation there stays out.

        Raises:
            SchemaError: the buffers do not have the same schema, number of envs and order.
        """
        for name in ("schema", "num_envs", "ordered", "own_next_obs"):
            if getattr(other, name) != getattr(self, name):
                raise SchemaError(
                    f"append: expected a buffer of {name}={getattr(self, name)!r}, got {getattr(other, name)!r}"
                )
        with other.lock:
            other._writer.mend()
            self._segments.forget()  # the older rows get new stamps
            self._writer.append(other._ring)

    def save(self, path: str | os.PathLike[str], *, extra: Any = None) -> None:
        """Write all that is stored, and how far the draws have come, to the directory ``path``.

        A save that is there already is replaced, whole or not at all; ``docs/files.md`` has the format. If this buffer
        wrote or loaded it, rows that it holds are kept, and only new ones are written.

        Args:
            path: the directory.
            extra: what else belongs to the same instant, such as the ``state_dict`` of the model and the optimizer:
                nested dicts, lists and tuples of tensors, arrays, numbers, bools, text and bytes. :meth:`load` and
                :func:`relive.load_extra` return it. Do not change it before this returns.

        Raises:
            FileFormatError: ``path`` holds something else, or ``extra`` a value that cannot be stored; names its keys.
            OSError: the disk is full, or fails.
        """
        with ExitStack() as held:
            held.enter_context(self.lock)  # others wait until the rows are on their way, not for the disk
            if self._ring.pending is not None:
                self._writer.mend()
            write_save(path, self._ring, self._saved(), extra, self._segments, held.close)

    @_one_at_a_time
    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Everything stored: arrays by name, and what is JSON."""
        return whole_state(self._ring, self._saved())

    def _saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same without the rows."""
        settings = {
            "ordered": self.ordered,
            "own_next_obs": self.own_next_obs,
            "check_ends": self.check_ends,
            "debug": self.debug,
        }
        return replay_state(self._ring, self._sampler, self.schema, self._reader.view, self._progress, settings)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: what :meth:`save` writes, and parts that are not relive's own."""
        state, content = self._state()
        sampler = self._given_sampler if content["sampler"] is None else None
        # a copy, since copy.copy would have both buffers read through one view
        view = copy(self._reader.view) if content["view"] is None else None
        arrays = bare_arrays(state)
        return type(self)._unpickled, (arrays, content, str(self.device), sampler, view)

    @classmethod
    def _unpickled(cls, arrays: Mapping[str, tuple[Any, torch.dtype]], *rest: Any) -> ReplayBuffer:
        return cls._restored(typed_tensors(arrays), *rest)

    def __copy__(self) -> ReplayBuffer:
        """As ``copy.deepcopy``: neither memory nor parts can belong to two buffers."""
        return deepcopy(self)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | torch.device = "cpu",
        capacity: int | None = None,
        sampler: GivenSampler | None = None,
        view: GivenView | None = None,
        seed: int | None = None,
        changes: SchemaChanges | None = None,
    ) -> ReplayBuffer[GivenSampler, GivenView]:
        """The buffer that was saved; it goes on with the batches that the saved one would have drawn next.

        :attr:`extra` is what was saved with it.

        Args:
            path: the directory.
            device: where its rows are to live, wherever the saved ones did.
            capacity: another number of rows over all envs. If it is smaller, the newest rows of each env are kept.
            sampler: needed if the saved one was not relive's own. One of another kind than the saved one starts empty,
                and so does another inner sampler of :class:`relive.Recent`.
            view: needed in the same case.
            seed: draw other batches than the saved buffer would have; number 0 comes next. Give each process that loads
                the same save a seed of its own, or all of them draw the same batches.
            changes: fields to drop, rename, cast or add.

        Raises:
            FileFormatError: there is no save, or it is damaged, foreign or of another version; nothing is ever run.
            SchemaError: an argument is out of range, or the save has no such fields.
            NotFiniteError: a stored number does not fit into the dtype that it is cast to.
        """
        with open_save(path) as save:
            source = Source.of_save(save)
            with contradictions(path):
                arguments = {**saved_arguments(source, sampler, view), "device": device}
            origins = changed_arguments(arguments, capacity, changes)
            with contradictions(path, DoesNotFitError), small_pages():
                buffer = cls._made(source, arguments, origins)
            buffer.extra = read_extra(save, free_memory())
        if seed is not None:
            buffer.seed = seed
        if changes is None:
            buffer._segments.note(path, source.segments[:-1])
        return buffer

    @classmethod
    def _restored(
        cls,
        tensors: Mapping[str, Tensor],
        content: Mapping[str, Any],
        device: str | torch.device,
        sampler: Any,
        view: Any,
    ) -> ReplayBuffer:
        """The buffer whose state this is."""
        source = Source.of_tensors(tensors, content)
        return cls._made(source, {**saved_arguments(source, sampler, view), "device": device})

    @classmethod
    def _made(
        cls, source: Source, arguments: Mapping[str, Any], origins: Mapping[Path, Origin] | None = None
    ) -> ReplayBuffer:
        """A buffer with these arguments, and the state of a source; its fields have these ``origins``."""
        buffer = cls(**arguments)
        restore_replay(buffer._ring, buffer._sampler, buffer._progress, source, origins)
        return buffer

    @_one_at_a_time
    def check(self) -> None:
        """Test the invariants of the ring (:class:`relive.ring.Ring`), and that the sampler knows what can be drawn.

        Raises:
            InvariantError: naming the first that does not hold.
        """
        self._ring.check()
        self._sampler.check()

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

    def _summary(self) -> Summary:
        ring, view, progress = self._ring, self._reader.view, self._progress
        return summary(ring, self._sampler, view, progress, self._plan, self.nbytes, str(self.device))

    # -- inside -------------------------------------------------------------------------------------------------

    def _batch(self, batch_size: int, update: int, of: int) -> Any:
        require_rows(batch_size)
        with self.lock:
            if self._ring.pending is not None:
                self._writer.mend()
            self._reader.keep_rule()
            come = self._progress
            key = stream(stream_of(come.seed), come.draws - come.first)
            drawn = self._sampler.draw(batch_size, key, update, of)
            if not self._own_sampler:
                drawn = readable_draw(self._ring, self._sampler, drawn, batch_size)
            places, extras = drawn
            come.draws += 1
            come.sampled += batch_size
            return self._reader.read(places, extras, key)
