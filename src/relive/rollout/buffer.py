"""RolloutBuffer: a block of steps made by one policy, filled once, finished with advantages, read as permutations."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Never, cast

import torch

from ..batches import EnvBatch, Overlap, SequenceBatch
from ..errors import FieldError
from ..files import SaveHandle, Saves
from ..files.disk import contradictions
from ..memory.estimate import readable
from ..memory.keeper import Recycled
from ..names import add_hints
from ..parameters import FLAG_RULE, require, torch_device
from ..returns import Estimator
from ..steps.schema import Field, Schema, Spec, not_named
from ..steps.summary import Summary, described, html, text
from . import saving
from .columns import KEPT_APART, SCHEMA_RULE, Columns, Fields, Name, NamedColumns, as_size
from .finishing import Finisher
from .minibatches import Minibatches, Permutations
from .sequences import Sequences, splitter
from .writer import Episodes, KeptStates, Writer, kept_every

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ReadableRollout", "RolloutBuffer", "call", "summary"]


class ReadableRollout(ABC):
    """The reading half of :class:`relive.RolloutBuffer`, its only subclass."""

    _named: NamedColumns
    _minibatches: Minibatches
    _sequences: Sequences

    # -- columns ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of real transitions, as an epoch of minibatches serves them."""
        return self._named.count(self._named.real_rows())

    def __contains__(self, name: Name) -> bool:
        return name in self._named

    def keys(self) -> tuple[str, ...]:
        """The top-level columns of this rollout: the schema's, ``mask``, ``final_value``, and the attached ones."""
        return self._named.keys()

    def __getitem__(self, name: Name) -> Any:
        """A column ``[T, N, ...]`` of the steps written so far, oldest first; a TensorDict if it is nested.

        It is a view into the storage, or a copy once the buffer has wrapped round.
        """
        return self._named[name]

    @property
    def block(self) -> TensorDict:
        """All columns with their bootstrap row as views ``[T + 1, N]``, written or not."""
        return self._named.block()

    @property
    def env_major(self) -> TensorDict:
        """:attr:`block` as ``[N, T + 1]``; still views of the same memory."""
        return cast("TensorDict", self.block.transpose(0, 1))

    @property
    def last(self) -> TensorDict:
        """The bootstrap row as views ``[N]``."""
        return self._named.last()

    def data(self) -> TensorDict:
        """All columns of the steps written so far, ``[T, N]``, each as ``r[name]`` gives it."""
        return self._named.data()

    # -- batches ------------------------------------------------------------------------------------------------------

    def flat(self, fields: tuple[str, ...] | None = None) -> TensorDict:
        """All real transitions as one batch ``[B]``, time first (row ``t * N + n``), copied.

        Args:
            fields: the columns wanted; default all but ``mask`` and ``final_value``.
        """
        return self._minibatches.flat(fields)

    def sample(self, batch_size: int, fields: tuple[str, ...] | None = None) -> TensorDict:
        """One random minibatch ``[batch_size]``, drawn without replacement.

        Raises:
            EmptyError: no step was added.
            ParameterError: there are fewer real transitions, or ``batch_size`` is not positive.
        """
        return self._minibatches.sample(batch_size, fields)

    def minibatches(
        self,
        batch_size: int | None = None,
        *,
        num_batches: int | None = None,
        epochs: int = 1,
        drop_last: bool = False,
        reshuffle: bool = True,
        fields: tuple[str, ...] | None = None,
        normalize_advantage: bool = False,
    ) -> Iterator[TensorDict]:
        """All real transitions in random order, in minibatches ``[B]``; a new permutation every epoch.

        Every transition comes exactly once an epoch, unless ``drop_last`` is set; each epoch then drops others. Do not
        change columns while the minibatches are being read.

        Args:
            batch_size: transitions of a minibatch; the last one takes what remains.
            num_batches: instead, the number of minibatches in an epoch; their sizes differ by at most one.
            epochs: passes over the rollout.
            drop_last: leave out what does not fill a whole minibatch.
            reshuffle: False repeats the minibatches of the first epoch in all others.
            fields: the columns wanted; default all but ``mask`` and ``final_value``. Fewer are faster.
            normalize_advantage: normalise ``advantage`` within each minibatch.

        Raises:
            EmptyError: no step was added.
            ParameterError: sizes that do not fit the rollout.
            FieldError: an unknown column.
        """
        return self._minibatches.minibatches(
            batch_size, num_batches, epochs, drop_last, reshuffle, fields, normalize_advantage
        )

    def sequences(
        self,
        length: int | None = None,
        *,
        overlap: Overlap = "none",
        complete: bool = False,
        drop_tail: bool = False,
        batch_size: int | None = None,
        num_batches: int | None = None,
        batch_steps: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        fields: tuple[str, ...] | None = None,
        time_first: bool = True,
        normalize_advantage: bool = False,
    ) -> Iterator[SequenceBatch]:
        """Windows of consecutive steps for truncated backpropagation through time, padded, with their first states.

        A window never holds steps of two episodes. The windows of an episode start at its steps 0, s, 2s, ... in this
        rollout, as long as each has a step that no window before it has; only the last may be shorter than ``length``.
        Without overlap every real step comes exactly once an epoch. Sequences come in random order, a new one every
        epoch. Do not change columns while they are being read.

        Args:
            length: steps of a window; None makes one window of each episode (whole trajectories, cut at dones).
            overlap: how many steps successive windows share: "none" (s = length), "half" (s = length // 2), "max"
                (s = 1), or a number.
            complete: only episodes that began and ended in this rollout. There may be none, and then no batch.
            drop_tail: leave out windows shorter than ``length``; this too may leave none.
            batch_size: sequences of a batch; the last one takes what remains.
            num_batches: instead, the number of batches in an epoch; their sizes differ by at most one.
            batch_steps: instead, the most steps of a batch; a longer sequence comes alone. Without any of the three an
                epoch is one batch.
            epochs: passes over the rollout.
            shuffle: False keeps the order: env by env, in time.
            fields: the columns wanted; default all but ``mask``, ``final_value`` and ``hidden``, which comes anyway.
            time_first: batches are ``[L, B, ...]``; else ``[B, L, ...]``. L is ``length``, or the rollout's steps if
                those are fewer; without a length, the longest sequence of the batch sets it. ``hidden_every`` adds
                rows in front, which are unrolled only for the state.
            normalize_advantage: normalise ``advantage`` over each batch's steps.

        Raises:
            EmptyError: no step was added.
            ParameterError: a length, overlap or size that does not fit.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        windows = self._sequences.cut(length, overlap, complete, drop_tail, epochs)
        split = splitter(len(windows), batch_size, num_batches, batch_steps)
        return self._sequences.read(windows, split, length, epochs, shuffle, fields, time_first, normalize_advantage)

    def env_batches(
        self,
        batch_size: int | None = None,
        *,
        num_batches: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        sequences: tuple[str, ...] = ("obs",),
        fields: tuple[str, ...] | None = None,
    ) -> Iterator[EnvBatch]:
        """Batches of whole envs: their steps ``[T, B, ...]``, and some columns also as trajectories, cut at dones.

        This is for recurrent networks that take padded trajectories and put their outputs back into the order of time.
        Every env comes exactly once an epoch. Each call draws a new random order, and each epoch divides it from
        another place, so that its batches differ. Batches are views: of one copy in that order, or, without shuffling,
        ``steps`` of the storage. Do not change columns meanwhile.

        Args:
            batch_size: envs of a batch; the last one takes what remains.
            num_batches: instead, the number of batches in an epoch; their sizes differ by at most one.
            epochs: passes over the rollout.
            shuffle: False keeps the order of the envs.
            sequences: the columns wanted as trajectories, with ``hidden`` where there is one; padded to all T rows.
            fields: the columns wanted as they are; default all but those, ``mask``, ``final_value`` and ``hidden``.

        Raises:
            EmptyError: no step was added.
            ParameterError: sizes that do not fit the number of envs.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        return self._sequences.env_batches(batch_size, num_batches, epochs, shuffle, sequences, fields)

    def chunks(self, length: int | None = None, *, fields: tuple[str, ...] | None = None) -> Iterator[SequenceBatch]:
        """All envs in the order of time, ``length`` steps at a time: batches ``[L, N, ...]``, the last one shorter.

        Chunks run on over the ends of episodes, for distillation: ``seq["done"]`` is bool ``[L, N]``, and where
        ``seq["is_start"]``, bool ``[L, N]``, is set, the state before that step is an initial one. ``seq["hidden"]`` is
        the state before the chunk's first step. The columns are views.

        Args:
            length: steps of a chunk; by default one chunk holds all. 1 gives step after step.
            fields: the columns wanted; default all but ``mask``, ``final_value`` and ``hidden``.

        Raises:
            EmptyError: no step was added.
            ParameterError: a length below 1, or one that is no multiple of ``hidden_every``.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        return self._sequences.chunks(length, fields)


def call(fields: Fields, wrap: bool, debug: bool, seed: int) -> str:
    """The call that makes an empty buffer like this one."""
    further = f"columns={fields.further_by_name}, " if fields.further else ""
    return (
        f"RolloutBuffer({fields.schema!r}, num_steps={fields.num_steps}, num_envs={fields.num_envs}, "
        f"device='{fields.device}', wrap={wrap}, debug={debug}, "
        f"hidden_every={fields.every}, {further}seed={seed})"
    )


def summary(fields: Fields, columns: Columns, named: NamedColumns, permutations: Permutations) -> Summary:
    """How full a rollout is, what it holds, and how much memory that takes."""
    further = [name for name in named.keys() if name not in fields.schema and name not in KEPT_APART]
    size = readable(sum(fields.sizes(fields.all).values()))
    facts = {
        "fields": described(fields.schema.leaves),
        "attached": ", ".join(further) or "nothing; finish(...) attaches advantages",
        "memory": f"{size} {'in RAM' if columns.device.type == 'cpu' else f'on {columns.device}'}",
        "seed": f"{permutations.seed}, {permutations.draws:,} permutations drawn",
    }
    full = ", full" if columns.is_full else ""
    title = f"RolloutBuffer: {columns.count:,} of {columns.num_steps:,} steps, {columns.num_envs:,} envs{full}"
    return title, facts


class RolloutBuffer(ReadableRollout):
    """A rollout: ``num_steps`` consecutive steps of ``num_envs`` envs in columns ``[T + 1, N, ...]``.

    The row after the last step is the bootstrap row: the ``obs`` and ``value`` that the rollout ended on. ``r[name]``,
    :meth:`data`, :attr:`block`, :attr:`env_major`, :attr:`last` and :meth:`reserve` return views into the storage;
    :meth:`flat`, :meth:`sample` and :meth:`minibatches` return copies.

    Args:
        schema: the fields of a step. The buffer adds ``mask`` and ``final_value``.
        num_steps: T, time steps per rollout.
        num_envs: N.
        device: where the columns live.
        wrap: keep the newest ``num_steps`` instead of refusing to overfill.
        debug: refuse rewards and values that are not finite.
        hidden_every: k; keep the recurrent states of ``hidden`` only for steps 0, k, 2k, ..., to save memory.
            :meth:`sequences` then begin at a step whose state is kept.
        columns: name -> :class:`Field` of further columns that no step brings: there from the start, to be written in
            place, by ``r[name] = ...`` or by :meth:`finish`. What is not written holds what was there before.
        seed: of the permutations; permutation number k is a function of (seed, k) alone. None draws one number from
            torch's default generator, so that ``torch.manual_seed`` decides it; ``buffer.seed`` is the number.

    Raises:
        SchemaError: a schema that uses the buffer's own names.
        ParameterError: sizes that are not positive, or that need more than the free memory.
    """

    _preset = True
    """Whether the masks of all rows are written at once. :meth:`load` does not: a forged save could claim any size."""

    _saves: Saves | None = None

    extra: Any = None
    """What was passed to :meth:`save` as ``extra``, in a buffer that was loaded; else None."""

    def __init__(
        self,
        schema: Schema,
        num_steps: int,
        num_envs: int,
        *,
        device: str | torch.device = "cpu",
        wrap: bool = False,
        debug: bool = False,
        hidden_every: int = 1,
        columns: Mapping[str, Field] | None = None,
        seed: int | None = None,
    ) -> None:
        self.num_steps, self.num_envs = size = as_size(num_steps, num_envs)
        require("RolloutBuffer", FLAG_RULE, wrap=wrap, debug=debug)
        self.device, self.wrap = torch_device("RolloutBuffer", device), wrap
        require("RolloutBuffer", SCHEMA_RULE, schema=schema)
        self.hidden_every = kept_every(hidden_every, schema, wrap)
        fields = self._fields = Fields(schema, {} if columns is None else columns, size, self.device, self.hidden_every)
        self._columns = Columns(fields.own, *size, self.device, wrap)
        named = self._named = NamedColumns(fields, self._columns)
        self._states = KeptStates(fields, self._columns)
        self._episodes = Episodes(self._columns, named)
        self._permutations = Permutations(seed)
        self._writer = Writer(
            fields, self._columns, named, self._episodes, self._states, debug=debug, preset=self._preset
        )
        self._finisher = Finisher(self._columns, named, self._writer)
        memory = Recycled()
        self._minibatches = Minibatches(named, self.device, self._permutations, memory)
        self._sequences = Sequences(fields, named, self._episodes, self._states, self._permutations, memory)

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, step: Mapping[str, Any] | None = None, /, *more: Never, **fields: Any) -> None:
        """Append one vector step; NumPy or torch, given as a mapping, as keywords, or both.

        Args:
            step: field -> ``[N, ...]`` for every field of the schema; with one env the leading axis may be left out.
            fields: the same, as keywords. ``mask`` (bool ``[N]``, default all True) is False at steps that are not
                real, such as the reset step of ``NEXT_STEP`` autoreset; ``final_value`` (``[N]``) is read where
                ``truncated`` is set.

        Raises:
            FullError: the rollout is complete and does not wrap.
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema. Nothing is written.
            NotFiniteError: in debug mode, a reward or a value is NaN or infinite. Nothing is written.
        """
        if more or not (step is None or hasattr(step, "keys")):
            raise FieldError(not_named(step))
        self._writer.add(fields if step is None else {**step, **fields})

    def add_fields(self, **fields: Spec) -> None:
        """Add fields to the schema; they are zeros in the steps that were written before.

        Args:
            fields: as in a schema: a :class:`relive.Field`, a bare shape for float32, or a dict or tuple. A nested
                field of the schema may be given again with further members.

        Raises:
            SchemaError: there is a column of that name, or rows of it would be lost.
            ParameterError: memory is short.
            LifecycleError: rows are reserved, or hidden states are kept every few steps.
        """
        self._writer.add_fields(fields)

    def reserve(self, steps: int | None = None) -> TensorDict:
        """The next ``steps`` rows (all that are left, by default) as views ``[steps, N]`` to be written in place.

        They include ``mask``, preset to True, and with a value in the schema ``final_value``, preset to NaN. The rows
        become part of the rollout with :meth:`commit`. A buffer that wraps gives up as many of its oldest steps as it
        needs, at once. The views may be put into shared memory for other processes to write: :meth:`commit` then
        copies the rows from there.

        Raises:
            FullError: fewer rows are left in one piece.
        """
        return self._writer.reserve(steps)

    def commit(self, steps: int | None = None, *, last: bool = False) -> None:
        """Make the first reserved rows part of the rollout, once they are written.

        Args:
            steps: how many of the reserved rows, all by default; the rest is given back.
            last: the bootstrap row, the one after them, is written too.

        Raises:
            LifecycleError: fewer rows are reserved.
            NotFiniteError: in debug mode, a reward or a value is NaN or infinite; the rows stay reserved.
        """
        self._writer.commit(steps, last)

    def set_last(self, **fields: Any) -> None:
        """Write fields of the bootstrap row, the one after the newest step: ``set_last(obs=..., value=...)``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: a field does not fit. Nothing is written.
        """
        self._writer.set_last(fields)

    def set_final_value(self, steps: Any, envs: Any, values: Any) -> None:
        """Set V(true final observation) of truncated steps, where it is known only later: three vectors ``[K]``.

        Raises:
            FieldError: the schema has no ``value``.
            ParameterError: a step or env is out of range.
            ShapeError: the vectors differ in length.
        """
        self._writer.set_final_value(steps, envs, values)

    def clear(self) -> None:
        """Forget the rollout and its attached columns, such as advantages; the memory stays.

        The next step continues the episodes under way; call :meth:`interrupt` if it does not.
        """
        self._writer.clear()

    def interrupt(self) -> None:
        """Break off the episodes under way: the next step starts new ones in all envs.

        Their newest steps become truncated. The bootstrap row gives their values if it was set (:meth:`set_last`); if
        not, give them by :meth:`set_final_value`, or :meth:`finish` refuses them. A full rollout keeps its steps as
        they are, since the bootstrap row values them anyway.
        """
        self._writer.interrupt()

    def __setitem__(self, name: Name, column: Any) -> None:
        """Attach a column ``[T, N, ...]`` to this rollout, or overwrite one; :meth:`clear` forgets attached ones.

        Raises:
            ShapeError: the column does not have the rollout's steps and envs in front.
            DTypeError: the column overwrites one of the schema with another kind of dtype.
            DeviceError: the column is a tensor on another device.
            FieldError: the name is that of a nested field.
        """
        self._named.attach({name: column})

    def finish(self, estimator: Estimator, *, last_value: Any = None, partial: bool = False) -> RolloutBuffer:
        """Attach what ``estimator`` computes, such as ``advantage`` and ``return``; returns the buffer.

        Args:
            estimator: :class:`relive.GAE` and its like, or any :class:`relive.returns.Estimator`.
            last_value: V(obs[T]), ``[N]``; not needed if it was set already, or if every env just finished.
            partial: finish a rollout that is not full.

        Raises:
            ParameterError: ``estimator`` is not an estimator.
            EmptyError: no step was added.
            UnfinishedError: the rollout is not full, or the bootstrap value is missing.
            FieldError: a column that the estimator reads is missing, or a truncated step has no final value.
            NotFiniteError: an advantage would be NaN or infinite, such as those before a value that is. On other
                devices than the CPU only in debug mode, as it takes time there. There are no advantages then.
        """
        self._finisher.finish(estimator, last_value, partial)
        return self

    # -- settings and sizes --------------------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """The fields of a step."""
        return self._fields.schema

    @property
    def debug(self) -> bool:
        """Whether rewards and values that are not finite are refused; it may be set at any time."""
        return self._writer.debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        require("RolloutBuffer", FLAG_RULE, debug=debug)
        self._writer.debug = debug

    @property
    def check_ends(self) -> bool:
        """Whether :meth:`finish` warns if the first rollouts have steps that ``NEXT_STEP`` autoreset ignores.

        They show where truncated steps have a ``final_value``; see :class:`relive.errors.EpisodeEndWarning`. It may be
        set at any time. A Collector turns it off, since it stores ends correctly. Unused on other devices than the CPU,
        and if the buffer wraps.
        """
        return self._finisher.check_ends

    @check_ends.setter
    def check_ends(self, check: bool) -> None:
        self._finisher.check_ends = check

    @property
    def initial_hidden(self) -> Any:
        """The state that episodes start in, nested as ``hidden``, without the env axis; None is zeros.

        It is read with ``hidden_every``, and may be set at any time.
        """
        return self._states.initial

    @initial_hidden.setter
    def initial_hidden(self, initial: Any) -> None:
        self._states.initial = initial

    @property
    def seed(self) -> int:
        """The seed of the permutations. Setting it starts again at permutation number 0; None draws one."""
        return self._permutations.seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._permutations.restart(seed)

    @property
    def steps(self) -> int:
        """Time steps written so far, at most ``num_steps``."""
        return self._columns.count

    @property
    def is_full(self) -> bool:
        """Whether all ``num_steps`` are written."""
        return self._columns.is_full

    # -- files, copies and printing -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, extra: Any = None, background: bool = False) -> SaveHandle:
        """Write the rollout, its attached columns and the number of the next permutation to the directory ``path``.

        An older save there is replaced as a whole or not at all; ``docs/files.md`` has the format.

        Args:
            path: the directory.
            extra: the learner's state, as :meth:`relive.ReplayBuffer.save` takes it.
            background: copy everything, return, and write the copy in another thread; see the same.

        Returns:
            the save, as that of a replay.

        Raises:
            FileFormatError: ``path`` holds something else, or ``extra`` a value that cannot be stored; names its keys.
            OSError: the disk is full, or fails.
        """
        self._saves = self._saves or Saves()
        self._saves.settle()
        parts = self._episodes, self._states, self._writer, self._permutations
        handle = saving.save(path, self._fields, self._columns, *parts, extra, background)
        return self._saves.begin(handle)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> RolloutBuffer:
        """Read a saved buffer; it continues with the minibatches that the saved one would have given next.

        :attr:`extra` is what was saved with it.

        Raises:
            FileFormatError: there is no save, or it is damaged, foreign or of another version; nothing is ever run.
        """
        tensors, content, extra = saving.read(path)
        with contradictions(path):
            buffer = cls.__new__(cls)
            buffer._preset = False
            buffer.__init__(**saving.arguments(tensors, content), device=device)
            parts = buffer._episodes, buffer._states, buffer._writer, buffer._permutations
            saving.restore(tensors, content, buffer._columns, *parts)
        buffer.extra = extra
        return buffer

    def __copy__(self) -> RolloutBuffer:
        """The same as ``copy.deepcopy``: two buffers over one memory would overwrite each other's rows."""
        return deepcopy(self)

    def __repr__(self) -> str:
        return call(self._fields, self.wrap, self.debug, self.seed)

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    def _summary(self) -> Summary:
        return summary(self._fields, self._columns, self._named, self._permutations)


add_hints(RolloutBuffer)
