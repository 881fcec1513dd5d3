"""RolloutBuffer: a block of steps made by one policy, filled once, finished with advantages, read as permutations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Never, cast

import numpy as np
import torch
from torch import Tensor

from .. import files as persist
from .. import kernels
from ..batches.sequences import WHOLE, EnvBatch, Overlap, SequenceBatch, stride_of
from ..batches.tensordicts import as_tensordict
from ..errors import (
    DeviceError,
    EmptyError,
    FieldError,
    FileFormatError,
    FullError,
    LifecycleError,
    NotFiniteError,
    SchemaError,
    ShapeError,
    UnfinishedError,
)
from ..files.entries import contradictions, entry, fitting, whole
from ..memory.blocks import Recycled
from ..memory.estimate import free_memory, readable, require_free
from ..memory.layout import LARGE_FIELD
from ..parameters import is_count, refuse_class, seed_or_drawn
from ..returns.estimators import Estimator
from ..returns.functions import normalize
from ..steps.arrays import as_host, as_tensor, check_castable, numpy_view
from ..steps.checker import StepChecker, refuse_sparse
from ..steps.schema import Field, Schema, Spec, not_named, unknown_field
from ..steps.summary import Summary, described, html, text
from ..steps.trees import Path, descend, dotted
from .columns import Columns, unfinished
from .minibatches import parts, require_epochs
from .packed import PackedRows
from .saving import restore_columns, save_columns
from .states import States
from .windows import Flags, WindowReader, cut, env_batches, splitter

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["RolloutBuffer"]


Name = str | Path


KIND = "relive.RolloutBuffer"


KEPT_APART = ("mask", "final_value")
"""Bookkeeping columns that every buffer may have and that no batch carries unless asked to."""


class RolloutBuffer:
    """A rollout: ``num_steps`` consecutive steps of ``num_envs`` envs in columns ``[T + 1, N, ...]``.

    The row after the last step is the bootstrap row: the ``obs`` and ``value`` that the rollout ended on. Views into
    the storage are what ``r[name]``, :meth:`data`, :attr:`block`, :attr:`env_major`, :attr:`last` and :meth:`reserve`
    return; batches (:meth:`flat`, :meth:`sample`, :meth:`minibatches`) are always copies.

    Args:
        schema: the fields of a step. ``mask`` and ``final_value`` are added by the buffer.
        num_steps: T, time steps per rollout.
        num_envs: N.
        device: where the columns live.
        wrap: keep the newest ``num_steps`` instead of refusing to overfill.
        debug: refuse rewards that are not finite.
        hidden_every: keep the recurrent states of ``hidden`` for steps 0, k, 2k, ... alone, to save memory:
            :meth:`sequences` then start where one is kept.
        columns: name -> :class:`Field` of further columns that no step brings: there from the start, to be written in
            place, by ``r[name] = ...`` or by :meth:`finish`. What is not written holds what was there before.
        seed: of the permutations; permutation number k is a function of (seed, k) alone. None draws one number from
            torch's default generator, so that ``torch.manual_seed`` decides it; ``buffer.seed`` is the number.

    Raises:
        SchemaError: sizes that are not positive, a schema that uses the buffer's own names, or more than the memory.
    """

    _preset = True
    """Whether the masks of all rows are written beforehand, which takes memory for each; a save may promise many."""
    initial_hidden: Any = None
    """What episodes start in, nested as ``hidden`` without the env axis; None is zeros. Read with ``hidden_every``."""

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
        if not (is_count(num_steps, 1) and is_count(num_envs, 1)):
            raise SchemaError(
                f"num_steps and num_envs are whole numbers of at least 1, got {num_steps!r} and {num_envs!r}"
            )
        num_steps, num_envs = int(num_steps), int(num_envs)
        self._standing = {(name,): field for name, field in (columns or {}).items()}
        for name in (*KEPT_APART, *(columns or {})):
            if name in schema:
                raise SchemaError(f"field '{name}': the buffer adds it by itself; leave it out of the schema")
        self.schema, self.num_steps, self.num_envs = schema, num_steps, num_envs
        self.device = torch.empty(0, device=device).device
        self.wrap, self.debug = wrap, debug
        self._keep_states(hidden_every)
        apart = {("mask",): Field((), torch.bool)}
        value = schema.leaves.get(("value",))
        if value is not None:
            precise = value.dtype if value.dtype is torch.float64 else torch.float32
            apart["final_value",] = Field(value.shape, precise)
        self._apart = apart
        self._require_memory(self._fields())
        if self.hidden_every > 1:
            hidden = {path: field for path, field in schema.leaves.items() if path[0] == "hidden"}
            rows = -(-num_steps // self.hidden_every)
            self._states = Columns(hidden, rows, num_envs, self.device, False)
        self._columns = Columns({}, num_steps, num_envs, self.device, wrap)
        self._follow(schema)
        self._ended, self._interrupted = np.ones(num_envs, np.bool_), False
        self._seed, self._reserved, self._draws = seed_or_drawn(seed), 0, 0
        self._handed: list[tuple[Path, Tensor, int]] = []
        self._has_last, self._memory = False, Recycled()
        if self._preset:
            self._write_apart(slice(None), {})
        self._apart_used = not self._preset

    # -- writing ------------------------------------------------------------------------------------------------

    def add(self, step: Mapping[str, Any] | None = None, /, *more: Never, **fields: Any) -> None:
        """Append one vector step; NumPy or torch, given as a mapping, as keywords, or both.

        Args:
            step: field -> ``[N, ...]`` for every field of the schema; with one env the leading axis may be left out.
            fields: likewise. ``mask`` (bool ``[N]``, default all True) marks steps that are not real, such as the
                reset step of ``NEXT_STEP`` autoreset; ``final_value`` (``[N]``) is read where ``truncated`` is set.

        Raises:
            FullError: the rollout is complete and does not wrap.
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema. Nothing is written.
            NotFiniteError: in debug mode, a reward is NaN or infinite. Nothing is written.
        """
        if more or not (step is None or hasattr(step, "keys")):
            raise FieldError(not_named(step))
        values = fields if step is None else {**step, **fields}
        apart: dict[str, Any] = {}
        for name in KEPT_APART:
            if name in values:
                (apart[name],) = self._checked(name, values.pop(name)).values()
        try:
            checked = self._check(values)
        except (RuntimeError, TypeError):
            refuse_sparse(values)
            raise
        row = self._columns.next_row
        if self.debug and "reward" in values:
            reward = values["reward"]
            self._refuse_nonfinite(reward if isinstance(reward, Tensor) else as_tensor(reward, "reward"), 1)
        # A call may be broken off at any line (Ctrl-C): what it writes is no part of the rollout before the last one.
        self._has_last = False  # the bootstrap row may be the one that is written
        if self._states is not None:
            checked = self._write_states(row, checked)
        if self.wrap and self.is_full:
            self._give_up(slice(row, row + 1))
        self._columns.write(row, checked)
        if apart or self._apart_used:
            self._write_apart(row, apart)
        self._advance(1)

    def add_fields(self, **fields: Spec) -> None:
        """From now on a step has these fields as well; in the steps there are already they are zeros.

        Args:
            fields: as the schema has them: a :class:`relive.Field`, a bare shape for float32, or a dict or tuple. A
                nested field that is there already may be given with further members.

        Raises:
            SchemaError: a column of that name is there already, rows of it would be lost, or memory is short.
            LifecycleError: rows are reserved, or hidden states are kept every few steps.
        """
        wider = self.schema.extend(**fields)
        taken = [name for name in fields if name in KEPT_APART or (name in self and name not in self.schema)]
        taken += [dotted(path) for path, field in self.schema.leaves.items() if wider.leaves.get(path) != field]
        if taken or wider.leaves == self.schema.leaves:
            name = (taken or list(fields))[0]
            raise SchemaError(f"field '{name}': this rollout has such a column already; give it another name")
        if self._reserved or self._states is not None:
            raise LifecycleError("add_fields() finds rows reserved, or hidden_every above 1; call it before reserve()")
        self._require_memory({path: leaf for path, leaf in wider.leaves.items() if path not in self.schema.leaves})
        self._follow(wider)

    def reserve(self, steps: int | None = None) -> TensorDict:
        """The next ``steps`` rows (all that are left, by default) as views ``[steps, N]`` to be written in place.

        ``mask`` and, with a value in the schema, ``final_value`` are among them, preset to True and NaN. Call
        :meth:`commit` when the rows are written; until then they are not part of the rollout. A buffer that wraps
        gives up as many of its oldest steps as it needs, at once. The views may be put into shared memory, for other
        processes to write: :meth:`commit` then copies the rows from there.

        Raises:
            FullError: fewer rows are left in one piece.
        """
        if self._states is not None:
            raise LifecycleError("reserve() hands out every row; create the buffer with hidden_every=1, or use add()")
        row = self._columns.next_row
        left = self.num_steps - row
        count = left if steps is None else steps
        if not 1 <= count <= left:
            raise FullError(f"reserve({count}): {left} rows are left in one piece; reserve 1 to {left}")
        rows, leaving = slice(row, row + count), self.steps + count - self.num_steps
        self._has_last = False
        if leaving > 0:
            self._give_up(slice(row + count - leaving, row + count))
        self._write_apart(rows, {})
        self._reserved = count
        tensors = {path: self._columns.view(path, rows) for path in self._columns.own}
        if self.device.type == "cpu":
            self._handed = [(path, tensor, tensor.data_ptr()) for path, tensor in tensors.items()]
        return as_tensordict(tensors, (count, self.num_envs))

    def commit(self, steps: int | None = None, *, last: bool = False) -> None:
        """The first ``steps`` reserved rows (all of them, by default) are written.

        Args:
            steps: how many of the reserved rows; the rest is given back.
            last: the bootstrap row, the one after them, has been written as well.

        Raises:
            LifecycleError: fewer rows are reserved.
            NotFiniteError: in debug mode, a reward is NaN or infinite; the rows stay reserved.
        """
        count = self._reserved if steps is None else steps
        if not 1 <= count <= self._reserved:
            raise LifecycleError(
                f"commit({'' if steps is None else steps}): reserved are {self._reserved} rows; reserve rows and fill "
                "them before they are committed"
            )
        rows = slice(self._columns.next_row, self._columns.next_row + count)
        for path, tensor, place in self._handed:
            if tensor.data_ptr() != place:  # it was shared or sent meanwhile, and written elsewhere than here
                self._columns.put(path, rows, tensor[:count])
        if self.debug and ("reward",) in self._columns.own:
            self._refuse_nonfinite(self._columns.view(("reward",), rows), count)
        self._advance(count, last)

    def set_last(self, **fields: Any) -> None:
        """Write fields of the bootstrap row, the one after the newest step: ``set_last(obs=..., value=...)``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: a field does not fit. Nothing is written.
        """
        for name in KEPT_APART:
            if name in fields:
                raise FieldError(f"field '{name}': it belongs to a step, and the bootstrap row is none")
        checked = [self._checked(name, value) for name, value in fields.items()]
        had, self._has_last = self._has_last, False  # half of it is none
        for leaves in checked:
            for path, value in leaves.items():
                self._columns.put(path, self._columns.last_row, value)
        self._has_last = had or "value" in fields

    def set_final_value(self, steps: Any, envs: Any, values: Any) -> None:
        """V(true final observation) of truncated steps known only later: three vectors ``[K]``.

        Raises:
            FieldError: the schema has no ``value``.
            ShapeError: a step or env out of range, or different lengths.
        """
        if ("final_value",) not in self._apart:
            raise FieldError("field 'final_value': the schema has no 'value'; add value=() to it")
        target = self._columns.view(("final_value",))
        rows, columns = torch.as_tensor(steps), torch.as_tensor(envs)
        for name, index in (("steps", rows), ("envs", columns)):
            check_castable(index if index.numel() else index.long(), torch.int64, name)
        rows, columns = rows.long(), columns.long()
        given = values.detach() if isinstance(values, Tensor) else as_tensor(values, "final_value")
        vectors = rows.dim() == 1 and rows.shape == columns.shape == given.shape[:1]
        if not vectors or given.shape[1:] != target.shape[2:]:
            raise ShapeError(
                f"set_final_value: expected three vectors of one length, got {tuple(rows.shape)}, "
                f"{tuple(columns.shape)}, {tuple(given.shape)}"
            )
        beyond = (rows < 0) | (rows >= self.steps) | (columns < 0) | (columns >= self.num_envs)
        if bool(beyond.any()):
            raise ShapeError(f"set_final_value: steps are below {self.steps}, envs below {self.num_envs}")
        check_castable(given, target.dtype, "final_value")
        rows = self._columns.place(rows).to(self.device)
        target[rows, columns.to(self.device)] = given.to(device=self.device, dtype=target.dtype)

    def clear(self) -> None:
        """Forget the rollout; the memory stays. Advantages and other attached columns are gone with it.

        What is added next goes on with the episodes under way; call :meth:`interrupt` if it does not.
        """
        columns, ended = self._columns, self._ended_by_now()
        self._apart_used, self._has_last, self._reserved = True, False, 0
        columns.detach()
        self._ended, self._interrupted, columns.start, columns.count = ended, False, 0, 0  # at once
        self._write_apart(slice(None), {})  # always: masks may also have been written through a view
        self._apart_used = False
        self._handed = []

    def interrupt(self) -> None:
        """The episodes under way will not go on: the next step that is added starts new ones in all envs.

        Their newest steps become truncated, valued by the bootstrap row if that was set (:meth:`set_last`); if not,
        give their values by :meth:`set_final_value`, or :meth:`finish` refuses them. A rollout that is full keeps them
        as they are, since its bootstrap row values them anyway.
        """
        if not self.steps:
            self._ended = np.ones(self.num_envs, np.bool_)
        if not self.steps or (self.is_full and not self.wrap):
            self._interrupted = bool(self.steps)
            return
        truncated = self["truncated"].clone()
        going_on = ~(self["terminated"][-1] | truncated[-1])
        truncated[-1] |= going_on
        envs = (going_on & self["mask"][-1]).nonzero().squeeze(1)
        if "value" in self.schema and self._has_last and len(envs):  # first: it is read where a step is truncated
            self.set_final_value(torch.full_like(envs, self.steps - 1), envs, self.last["value"][envs])
        self["truncated"] = truncated

    # -- finishing ----------------------------------------------------------------------------------------------

    def finish(self, estimator: Estimator, *, last_value: Any = None, partial: bool = False) -> RolloutBuffer:
        """Attach what ``estimator`` computes, such as ``advantage`` and ``return``; returns the buffer.

        Args:
            estimator: :class:`relive.GAE` and its like, or any :class:`relive.returns.Estimator`.
            last_value: V(obs[T]), ``[N]``; not needed if it was set already, or if every env just finished.
            partial: finish a rollout that is not full.

        Raises:
            SchemaError: ``estimator`` is not an estimator.
            EmptyError: no step was added.
            UnfinishedError: the rollout is not full, or the bootstrap value is missing.
            FieldError: a column that the estimator reads is missing, or a truncated step has no final value.
        """
        refuse_class("estimator", estimator)
        if not (callable(estimator) and hasattr(estimator, "reads")):
            raise SchemaError(f"finish({estimator!r}): expected an estimator, such as relive.GAE(gamma=0.99, lam=0.95)")
        self._require_steps()
        if not (self.is_full or partial or self.wrap):
            raise UnfinishedError(
                f"{self.steps} of {self.num_steps} steps are written; add the rest, or finish(..., partial=True)"
            )
        if last_value is not None:
            self.set_last(value=last_value)
        for name in estimator.reads:
            if name not in KEPT_APART:
                self._leaves((name,))
        if "value" in estimator.reads:
            self._require_bootstrap()
        columns = estimator(**{name: self._for_estimator(name) for name in estimator.reads})
        fitted = {_path(name): self._fitted(_path(name), column) for name, column in columns.items()}
        self._columns.attach(fitted)
        return self

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """What permutations are drawn with: number k is a function of (seed, k).

        It may be set at any time, None draws one; the next permutation is number 0 then.
        """
        return self._seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        self._seed, self._draws = seed_or_drawn(seed), 0

    @property
    def steps(self) -> int:
        """Time steps written so far, at most ``num_steps``."""
        return self._columns.count

    @property
    def is_full(self) -> bool:
        """Whether all ``num_steps`` are written."""
        return self._columns.is_full

    def __len__(self) -> int:
        """The number of real transitions, which is also what an epoch of minibatches serves."""
        return int(self["mask"].sum()) if self._has_mask() else self.steps * self.num_envs

    def __contains__(self, name: Name) -> bool:
        return bool(self._columns.below(_path(name)))

    def keys(self) -> tuple[str, ...]:
        """The top-level columns of this rollout: the schema's, ``mask``, ``final_value``, and the attached ones."""
        return tuple(dict.fromkeys(path[0] for path in self._columns.live))

    def __getitem__(self, name: Name) -> Any:
        """A column ``[T, N, ...]`` of the steps written so far, oldest first; a TensorDict if it is nested.

        A view into the storage, or a copy once the buffer has wrapped round.
        """
        path = _path(name)
        leaves = self._leaves(path)
        if leaves == [path]:
            return self._columns.ordered(path)
        inner = {leaf[len(path) :]: self._columns.ordered(leaf) for leaf in leaves}
        return as_tensordict(inner, (self.steps, self.num_envs))

    def __setitem__(self, name: Name, column: Any) -> None:
        """Attach a column ``[T, N, ...]`` to this rollout, or overwrite one; :meth:`clear` forgets attached ones.

        Raises:
            ShapeError: the column does not have the rollout's steps and envs in front.
            DTypeError: the column overwrites one of the schema with another kind of dtype.
            DeviceError: the column is a tensor on another device.
            FieldError: the name is that of a nested field.
        """
        path = _path(name)
        self._columns.attach({path: self._fitted(path, column)})

    def _fitted(self, path: Path, column: Any) -> Tensor:
        """A column as it is stored, or an error."""
        refuse_sparse(column, path)
        try:
            given = column.detach() if isinstance(column, Tensor) else torch.as_tensor(column).to(self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(f"column '{dotted(path)}': expected a tensor, an array or numbers ({error})") from error
        if given.device != self.device:
            raise DeviceError(f"column '{dotted(path)}': the buffer is on {self.device}, got {given.device}")
        expected = (self.steps, self.num_envs, *given.shape[2:])
        if path in self._columns.own:
            target = self._columns.view(path)
            expected = (self.steps, self.num_envs, *target.shape[2:])
            check_castable(given, target.dtype, dotted(path))
            given = given.to(target.dtype)
        elif any(path[:i] in self._columns.live for i in range(1, len(path))):
            raise FieldError(f"column '{dotted(path)}': a column of that name without members is there already")
        elif path not in self._columns.live and path in self:
            raise FieldError(f"column '{dotted(path)}' is nested; set its members, such as {self._leaves(path)[0]}")
        if tuple(given.shape) != expected:
            raise ShapeError(
                f"column '{dotted(path)}': expected {expected} (steps, envs, ...), got {tuple(given.shape)}"
            )
        return given

    def _has_mask(self) -> bool:
        """Whether any step is not real."""
        mask = self._columns.ordered(("mask",))
        return not (numpy_view(mask) if mask.is_cpu else mask).all()  # NumPy's looks at many flags at once

    def _has_truncations(self) -> bool:
        """Whether a final value may be needed."""
        truncated = self._columns.ordered(("truncated",))
        return bool((numpy_view(truncated) if truncated.is_cpu else truncated).any())

    @property
    def block(self) -> TensorDict:
        """All columns with their bootstrap row as views ``[T + 1, N]``, whatever was written of them."""
        leaves = {path: self._columns.view(path) for path in self._columns.live}
        return self._batch(leaves, (self.num_steps + 1, self.num_envs))

    @property
    def env_major(self) -> TensorDict:
        """:attr:`block` with the axes the other way round, ``[N, T + 1]``; still views of the same memory."""
        return cast("TensorDict", self.block.transpose(0, 1))

    @property
    def last(self) -> TensorDict:
        """The bootstrap row as views ``[N]``."""
        row = self._columns.last_row
        return as_tensordict({path: self._columns.view(path, row) for path in self._paths}, (self.num_envs,))

    def data(self) -> TensorDict:
        """All columns of the steps written so far, ``[T, N]``: what ``r[name]`` gives, together."""
        leaves = {path: self._columns.ordered(path) for path in self._columns.live}
        return self._batch(leaves, (self.steps, self.num_envs))

    def flat(self, fields: tuple[str, ...] | None = None) -> TensorDict:
        """All real transitions as one batch ``[B]``, time first (row ``t * N + n``), copied.

        Args:
            fields: the columns wanted; default all but ``mask`` and ``final_value``.
        """
        self._require_steps()
        rows = self._real_rows()
        columns = self._flat_columns(fields)
        batch = {path: x.clone() if rows is None else x.index_select(0, rows) for path, x in columns.items()}
        return self._batch(batch, (len(self),))

    def sample(self, batch_size: int, fields: tuple[str, ...] | None = None) -> TensorDict:
        """One random minibatch ``[batch_size]``, drawn without replacement.

        Raises:
            EmptyError: no step was added.
            ShapeError: there are fewer real transitions, or ``batch_size`` is not positive.
        """
        self._require_steps()
        if not (is_count(batch_size, 1) and batch_size <= len(self)):
            raise ShapeError(
                f"sample({batch_size!r}): the rollout holds {len(self)} transitions; ask for 1 to {len(self)}"
            )
        rows = self._permutation(self._real_rows())[:batch_size]
        batch = {path: x.index_select(0, rows) for path, x in self._flat_columns(fields).items()}
        return self._batch(batch, (batch_size,))

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

        Every transition comes exactly once an epoch, unless ``drop_last`` is set; what is dropped then differs
        each time. Columns must not be changed while the minibatches are being read.

        Args:
            batch_size: transitions of a minibatch; the last one takes what remains.
            num_batches: instead, how many minibatches an epoch has; their sizes differ by at most one.
            epochs: passes over the rollout.
            drop_last: leave out what does not fill a whole minibatch.
            reshuffle: False repeats the minibatches of the first epoch in all others.
            fields: the columns wanted; default all but ``mask`` and ``final_value``. Fewer are faster.
            normalize_advantage: normalise ``advantage`` within each minibatch.

        Raises:
            EmptyError: no step was added.
            ShapeError: sizes that do not fit the rollout.
            FieldError: an unknown column.
        """
        self._require_steps()
        require_epochs(epochs)
        rows = self._real_rows()
        bounds = parts(self._count(rows), batch_size, num_batches, drop_last)
        wanted = self._wanted(fields)
        if normalize_advantage and ("advantage",) not in wanted:
            raise FieldError("normalize_advantage: there is no 'advantage'; call finish(...) first, or ask for it")
        orders = self._permutations(rows, epochs, reshuffle)
        return self._batches(wanted, bounds, orders, epochs > 1, normalize_advantage)

    # -- sequences ----------------------------------------------------------------------------------------------

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

        A window never holds steps of two episodes. Those of an episode's K steps in this rollout start at its steps
        0, s, 2s, ..., as long as each brings a step that no window before it has; only the last may be shorter than
        ``length``. Without overlap every real step comes exactly once an epoch. Sequences are in random order, a new
        one every epoch; columns must not be changed while they are being read.

        Args:
            length: steps of a window; None takes each episode's steps as one (whole trajectories, cut at dones).
            overlap: how many steps successive windows share: "none" (s = length), "half" (s = length // 2), "max"
                (s = 1), or their number.
            complete: only of episodes that began and ended in this rollout.
            drop_tail: leave out windows shorter than ``length``. With either there may be none, and then no batch.
            batch_size: sequences of a batch; the last one takes what remains.
            num_batches: instead, how many batches an epoch has; their sizes differ by at most one.
            batch_steps: instead, how many steps a batch has at most; a longer sequence comes alone. Without any of the
                three an epoch is one batch.
            epochs: passes over the rollout.
            shuffle: False keeps the order: env by env, in time.
            fields: the columns wanted; default all but ``mask``, ``final_value`` and ``hidden``, which comes anyway.
            time_first: batches are ``[L, B, ...]``; else ``[B, L, ...]``. L is ``length``, or the rollout's steps if
                those are fewer; without a length it is that of the batch's longest sequence. With ``hidden_every``
                there are further rows in front, which are unrolled for the state alone.
            normalize_advantage: normalise ``advantage`` over each batch's steps.

        Raises:
            EmptyError: no step was added.
            ShapeError: lengths, overlaps or sizes that make no sense.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        self._require_steps()
        require_epochs(epochs)
        windows = cut(self._flags(), length, stride_of(length, overlap), drop_tail, complete)
        split = splitter(len(windows), batch_size, num_batches, batch_steps)
        wanted = self._steps_wanted(fields)
        if normalize_advantage and ("advantage",) not in wanted:
            raise FieldError("normalize_advantage: there is no 'advantage'; call finish(...) first, or ask for it")
        reader = self._window_reader(wanted, LARGE_FIELD if epochs > 1 else 0)
        rows = None if length is None else reader.most_rows(windows, min(length, self.steps))
        epoch = partial(reader.batches, rows=rows, time_first=time_first, normalize_advantage=normalize_advantage)
        orders = (windows[self._order(len(windows), shuffle)] for _ in range(epochs))
        return (batch for order in orders for batch in epoch(order, split(order)))

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
        """Batches of whole envs: their steps ``[T, B, ...]``, and some columns cut into trajectories at dones as well.

        For recurrent networks that are given padded trajectories and put their outputs back into the order of time.
        Every env comes exactly once an epoch. They are put into a new random order with each call, which each epoch
        divides from another place on, so that its batches are others. Batches are views: of what was laid out in that
        order once, or, without shuffling, ``steps`` are of the storage. Columns must not be changed meanwhile.

        Args:
            batch_size: envs of a batch; the last one takes what remains.
            num_batches: instead, how many batches an epoch has; their sizes differ by at most one.
            epochs: passes over the rollout.
            shuffle: False keeps the order of the envs.
            sequences: the columns wanted as trajectories, with ``hidden`` where there is one; padded to all T rows.
            fields: the columns wanted as they are; default all but those, ``mask``, ``final_value`` and ``hidden``.

        Raises:
            EmptyError: no step was added.
            ShapeError: sizes that do not fit the number of envs.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        self._require_steps()
        require_epochs(epochs)
        bounds = parts(self.num_envs, batch_size, num_batches, items="envs")
        windows = cut(self._flags(), None, WHOLE, drop_tail=False, complete=False)
        padded = self._steps_wanted(sequences)
        own = self._steps_wanted(fields)
        if fields is None:
            own = [path for path in own if path not in padded]
        readers = self._window_reader(padded, 0), self._window_reader(own, 0, with_states=False)
        order = self._order(self.num_envs, shuffle) if shuffle else None
        batches = env_batches(*readers, windows, order, bounds, epochs)
        if ("advantage",) in self._columns.live:
            return batches
        return _without_advantage(batches)

    def chunks(self, length: int | None = None, *, fields: tuple[str, ...] | None = None) -> Iterator[SequenceBatch]:
        """All envs in the order of time, ``length`` steps at a time: batches ``[L, N, ...]``, the last one shorter.

        Chunks run on over the ends of episodes, as distillation wants it: ``seq["done"]`` is bool ``[L, N]``, and where
        ``seq["is_start"]``, bool ``[L, N]``, is set, the state before that step is an initial one. ``seq["hidden"]`` is
        the state before the chunk's first step. The columns are views.

        Args:
            length: steps of a chunk; default: one chunk of all. 1 gives step after step.
            fields: the columns wanted; default all but ``mask``, ``final_value`` and ``hidden``.

        Raises:
            EmptyError: no step was added.
            ShapeError: a length below 1, or one at which no state is kept (``hidden_every``).
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        self._require_steps()
        stride_of(length, "none")
        size = self.steps if length is None else length
        if self._states is not None and size % self.hidden_every and size < self.steps:
            raise ShapeError(
                f"chunks({size}): states are kept every {self.hidden_every} steps; ask for a multiple of them"
            )
        wanted = self._steps_wanted(fields)
        reader = self._window_reader(wanted, 0)
        flags = self._flags()
        return (reader.chunk(flags, low, min(low + size, self.steps)) for low in range(0, self.steps, size))

    # -- files --------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rollout, with what is attached and how far the permutations have come, to the directory ``path``.

        A save that is there already is replaced, whole or not at all; ``docs/files.md`` has the format.

        Raises:
            FileFormatError: ``path`` holds something else.
            OSError: the disk is full, or fails.
        """
        facts = {
            "kind": KIND,
            "schema": json.loads(self.schema.to_json()),
            "num_steps": self.num_steps,
            "num_envs": self.num_envs,
            "wrap": self.wrap,
            "debug": self.debug,
            "seed": self.seed,
            "draws": self._draws,
            "has_last": self._has_last,
            "hidden_every": self.hidden_every,
            "columns": json.loads(Schema(_named(self._standing)).to_json()) if self._standing else None,
            "interrupted": self._interrupted,
        }
        apart = {".ended": torch.from_numpy(self._ended)}
        if self._states is not None:
            apart |= {f".states.{dotted(name)}": self._states.view(name) for name in self._states.own}
            apart |= {f".initial.{dotted(name)}": self._initial(name) for name in self._states.own}
        save_columns(path, self._columns, facts, apart)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> RolloutBuffer:
        """The buffer that was saved; it goes on with the minibatches that the saved one would have given next.

        Raises:
            FileFormatError: there is no save, or it is damaged, foreign or of another version; nothing is ever run.
        """
        tensors, content = persist.read(path, most=free_memory())
        if content.get("kind") != KIND:
            raise FileFormatError(f"'{path}' is a save of {content.get('kind')!r}, not of a {KIND}")
        with contradictions(path):
            num_envs = whole(content, "num_envs")
            ended = fitting(tensors, ".ended", (num_envs,), torch.bool)  # before memory is taken for as many
            buffer = cls.__new__(cls)
            buffer._preset = False
            buffer.__init__(
                Schema.from_json(json.dumps(content.get("schema"))),
                whole(content, "num_steps"),
                num_envs,
                device=device,
                wrap=entry(content, "wrap", bool),
                debug=entry(content, "debug", bool),
                hidden_every=whole(content, "hidden_every"),
                columns=_standing(content),
                seed=entry(content, "seed", int),
            )
            restore_columns(buffer._columns, tensors, content)
            buffer._ended[:] = ended.numpy()
            buffer._interrupted = entry(content, "interrupted", bool)
            buffer._restore_states(tensors)
            buffer._draws, buffer._has_last = whole(content, "draws"), entry(content, "has_last", bool)
        return buffer

    def _restore_states(self, tensors: Mapping[str, Tensor]) -> None:
        """The hidden states of a save, if they are kept every few steps."""
        if self._states is None:
            return
        initial: dict[Path, Tensor] = {}
        for name in self._states.own:
            state, leaf = self._states.view(name), self.schema.leaves[name]
            state.copy_(fitting(tensors, f".states.{dotted(name)}", tuple(state.shape), state.dtype))
            initial[name] = fitting(tensors, f".initial.{dotted(name)}", leaf.shape, leaf.dtype)
        self.initial_hidden = self.schema.rebuild("hidden", initial.__getitem__)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but the reserved rows that somebody else may hold."""
        return {**self.__dict__, "_handed": []}

    def __copy__(self) -> RolloutBuffer:
        """As ``copy.deepcopy``: two buffers over one memory would write each other's rows."""
        return deepcopy(self)

    def __repr__(self) -> str:
        further = f"columns={_named(self._standing)}, " if self._standing else ""
        return (
            f"RolloutBuffer({self.schema!r}, num_steps={self.num_steps}, num_envs={self.num_envs}, "
            f"device='{self.device}', wrap={self.wrap}, debug={self.debug}, "
            f"hidden_every={self.hidden_every}, {further}seed={self.seed})"
        )

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    def _summary(self) -> Summary:
        further = [name for name in self.keys() if name not in self.schema and name not in KEPT_APART]
        size = readable(sum(self._sizes(self._fields()).values()))
        facts = {
            "fields": described(self.schema.leaves),
            "attached": ", ".join(further) or "nothing; finish(...) attaches advantages",
            "memory": f"{size} {'in RAM' if self.device.type == 'cpu' else f'on {self.device}'}",
            "seed": f"{self.seed}, {self._draws:,} permutations drawn",
        }
        full = ", full" if self.is_full else ""
        return f"RolloutBuffer: {self.steps:,} of {self.num_steps:,} steps, {self.num_envs:,} envs{full}", facts

    # -- inside -------------------------------------------------------------------------------------------------

    def _follow(self, schema: Schema) -> None:
        """Make room for the fields of this schema."""
        self.schema = schema
        self._check = StepChecker(schema, self.num_envs, self.device)
        self._paths = tuple(path for path in schema.leaves if not self._is_sparse(path))
        self._columns.include({path: schema.leaves[path] for path in self._paths} | self._apart | self._standing)
        self.__dict__.pop("_field_checkers", None)

    def _keep_states(self, every: int) -> None:
        """With ``hidden_every`` above 1, recurrent states have rows of their own, one for every k steps."""
        if not is_count(every, 1) or (every > 1 and (self.wrap or "hidden" not in self.schema)):
            raise SchemaError(
                f"hidden_every={every!r}: expected at least 1; more than that needs a field 'hidden', and no wrap"
            )
        self.hidden_every = int(every)
        self._states: Columns | None = None

    def _require_memory(self, leaves: Mapping[Path, Field]) -> None:
        """Ask for the memory of columns before it is taken.

        Raises:
            SchemaError: there is less.
        """
        taken = self._sizes(leaves)
        fields = "".join(f"\n  {name}  {readable(size)}" for name, size in taken.items())
        require_free(sum(taken.values()), self.device, "the rollout", f"lower num_steps or num_envs:{fields}")

    def _sizes(self, leaves: Mapping[Path, Field]) -> dict[str, int]:
        """Bytes of each column."""
        rows, kept = self.num_steps + 1, -(-self.num_steps // self.hidden_every) + 1
        return {
            dotted(path): (kept if self._is_sparse(path) else rows) * self.num_envs * field.nbytes
            for path, field in leaves.items()
        }

    def _fields(self) -> dict[Path, Field]:
        """All columns that are there from the start."""
        return self.schema.leaves | self._apart | self._standing

    def _is_sparse(self, path: Path) -> bool:
        return self.hidden_every > 1 and path[0] == "hidden"

    def _write_states(self, row: int, checked: list[Any]) -> list[Any]:
        """Keep the states of a step if it is their turn; what is left to store elsewhere."""
        assert self._states is not None
        sparse = [path[0] == "hidden" for path in self.schema.leaves]
        if row % self.hidden_every == 0:
            states = [value for value, apart in zip(checked, sparse, strict=True) if apart]
            self._states.write(row // self.hidden_every, states)
        return [value for value, apart in zip(checked, sparse, strict=True) if not apart]

    def _advance(self, rows: int, last: bool = False) -> None:
        """The next rows are written, and are part of the rollout from the last line on."""
        columns = self._columns
        self._apart_used |= self.wrap and self.is_full
        self._handed = []
        columns.detach()
        columns.count, self._interrupted, self._reserved, self._has_last = columns.count + rows, False, 0, last

    def _write_apart(self, rows: int | slice, given: Mapping[str, Any]) -> None:
        """Mask and final values of rows that are, or will be, written: as given, else True and NaN."""
        self._apart_used = True  # rows to come may hold something else than the defaults
        for (name,) in self._apart:
            default = True if name == "mask" else float("nan")
            self._columns.put((name,), rows, given.get(name, default))

    def _checked(self, name: str, value: Any) -> dict[Path, Any]:
        """The leaves ``[N, ...]`` of one field that is written on its own."""
        checker = self._field_checkers.get(name)
        if checker is None:
            raise FieldError(unknown_field(name, tuple(self._field_checkers), "this buffer"))
        leaves = [path for path in (*self._paths, *self._apart) if path[0] == name]
        try:
            return dict(zip(leaves, checker({name: value}), strict=True))
        except (RuntimeError, TypeError):
            refuse_sparse({name: value})
            raise

    @cached_property
    def _field_checkers(self) -> dict[str, StepChecker]:
        names = [name for name in self.schema.names if not self._is_sparse((name,))]
        specs: dict[str, Any] = {name: self.schema[name] for name in names}
        specs |= {name: field for (name,), field in self._apart.items()}
        return {name: StepChecker(Schema({name: spec}), self.num_envs, self.device) for name, spec in specs.items()}

    def _leaves(self, path: Path) -> list[Path]:
        leaves = self._columns.below(path)
        if self._is_sparse(path):
            raise FieldError(f"field 'hidden': kept every {self.hidden_every} steps; sequences() and chunks() give it")
        if not leaves:
            raise FieldError(unknown_field(path, self.keys(), "this rollout"))
        return leaves

    def _for_estimator(self, name: str) -> Any:
        if name == "mask" and not self._has_mask():
            return None
        if name == "final_value" and (name not in self or not self._has_truncations()):
            return None
        return self._columns.with_last(("value",)) if name == "value" and name in self else self[name]

    def _require_steps(self) -> None:
        if not self.steps:
            raise EmptyError("the rollout has no steps; call add() or let a Collector fill it")

    def _require_bootstrap(self) -> None:
        if self._has_last:
            return
        going_on = ~(self["terminated"][-1] | self["truncated"][-1])
        if self._has_mask():
            going_on &= self["mask"][-1]
        if bool(going_on.any()):
            env = int(going_on.nonzero()[0])
            raise UnfinishedError(
                f"the episode of env {env} goes on after the last step and its bootstrap value is missing; "
                "pass finish(..., last_value=V(obs[T])), or set_last(value=...)"
            )

    def _refuse_nonfinite(self, reward: Tensor, steps: int) -> None:
        """Look at the rewards of the next ``steps`` steps, checked already."""
        finite = reward.isfinite()
        if not bool(finite.all()):
            position = int((~finite).flatten().nonzero()[0])
            step, env = divmod(position * steps * self.num_envs // reward.numel(), self.num_envs)
            raise NotFiniteError(
                f"field 'reward': step {self.steps + step} of env {env} is "
                f"{float(reward.flatten()[position])}; mend the env"
            )

    def _wanted(self, fields: tuple[str, ...] | None) -> list[Path]:
        names = tuple(name for name in self.keys() if name not in KEPT_APART) if fields is None else fields
        if not names or isinstance(names, str):
            raise FieldError(f"fields={fields!r}: pass a tuple of column names, such as ('obs', 'action')")
        return [leaf for name in names for leaf in self._leaves((name,))]

    def _steps_wanted(self, fields: tuple[str, ...] | None) -> list[Path]:
        """The columns of sequences: ``hidden`` comes once for each, and ``is_start`` and ``mask`` anyway."""
        anyway = "hidden", "is_start", "mask"
        if isinstance(fields, tuple) and fields:
            fields = tuple(name for name in fields if name not in anyway)
            if not fields:
                return []
        return [path for path in self._wanted(fields) if path[0] not in anyway]

    def _flat_columns(self, fields: tuple[str, ...] | None) -> dict[Path, Tensor]:
        return {path: self._columns.ordered(path).flatten(0, 1) for path in self._wanted(fields)}

    def _real_rows(self) -> Tensor | None:
        return self["mask"].flatten().nonzero().squeeze(1) if self._has_mask() else None

    def _flags(self) -> Flags:
        """What cuts the rollout into episodes."""
        done = self._column("terminated") | self._column("truncated")
        return Flags(done, self._column("mask"), self._ended)

    def _column(self, name: str) -> Any:
        (path,) = self._leaves((name,))
        return as_host(self._columns.ordered(path))

    def _ended_by_now(self) -> Any:
        """Whether the next step of each env starts an episode, bool ``[N]``."""
        if self._interrupted:
            return np.ones(self.num_envs, np.bool_)
        known = {("terminated",), ("truncated",)} <= self._columns.own
        return self._flags().ended.view(np.bool_) if self.steps and known else self._ended

    def _give_up(self, rows: slice) -> None:
        """The oldest rows, at these places, are no more part of the rollout, but what they say of the next ones is."""
        columns, ended, count = self._columns, self._ended, rows.stop - rows.start
        if {("terminated",), ("truncated",)} <= columns.own:
            flags = (as_host(columns.view((name,), rows)) for name in ("terminated", "truncated", "mask"))
            terminated, truncated, real = flags
            ended = Flags(terminated | truncated, real, ended).ended.view(np.bool_)
        columns.detach()
        start = (columns.start + count) % self.num_steps
        self._ended, columns.start, columns.count = ended, start, columns.count - count  # at once

    def _window_reader(self, wanted: list[Path], pack: int, with_states: bool = True) -> WindowReader:
        columns = {path: self._columns.ordered(path) for path in wanted}
        hidden = [path for path in self.schema.leaves if path[0] == "hidden" and with_states]
        states = None
        if hidden and self._states is not None:
            initial = {path: self._initial(path) for path in hidden}
            states = States({path: self._states.view(path) for path in hidden}, self.hidden_every, initial)
        elif hidden:
            states = States({path: self._columns.ordered(path) for path in hidden}, 1, {})
        return WindowReader(columns, states, self.schema, (self.steps, self.num_envs), self.device, pack, self._memory)

    def _initial(self, path: Path) -> Tensor:
        leaf = self.schema.leaves[path]
        if self.initial_hidden is None:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.device)
        return torch.as_tensor(descend(self.initial_hidden, path[1:])).detach().to(self.device, leaf.dtype)

    def _order(self, count: int, shuffle: bool) -> Any:
        """The next permutation of ``count`` windows, or their own order."""
        if not shuffle:
            return np.arange(count)
        self._draws += 1
        return kernels.permutation(count, self._seed, self._draws - 1).numpy()

    def _count(self, rows: Tensor | None) -> int:
        """How many transitions are real, if these are."""
        return self.steps * self.num_envs if rows is None else len(rows)

    def _permutation(self, rows: Tensor | None) -> Tensor:
        """The next permutation of the flat rows that are real."""
        order = kernels.permutation(self._count(rows), self._seed, self._draws).to(self.device)
        self._draws += 1
        return order if rows is None else rows[order]

    def _permutations(self, rows: Tensor | None, epochs: int, reshuffle: bool) -> Iterator[Tensor]:
        order = None
        for _ in range(epochs):
            order = self._permutation(rows) if order is None or reshuffle else order
            yield order

    def _batches(
        self,
        wanted: list[Path],
        bounds: list[tuple[int, int]],
        orders: Iterator[Tensor],
        pack: bool,
        normalize_advantage: bool,
    ) -> Iterator[TensorDict]:
        # packing costs as much as one pass of gathering each field by itself
        rows = PackedRows({path: self._columns.ordered(path) for path in wanted}, pack, self._memory)
        for order in orders:
            for low, high in bounds:
                batch = rows.gather(order[low:high])
                if normalize_advantage:
                    batch["advantage",] = normalize(batch["advantage",])
                yield self._batch(batch, (high - low,))

    def _batch(self, leaves: Mapping[Path, Tensor], size: tuple[int, ...]) -> TensorDict:
        batch = as_tensordict(leaves, size)
        return batch if ("advantage",) in self._columns.live else unfinished(batch)


def _without_advantage(batches: Iterator[EnvBatch]) -> Iterator[EnvBatch]:
    for batch in batches:
        unfinished(cast("TensorDict", batch.steps))
        yield batch


def _named(columns: Mapping[Path, Field]) -> dict[str, Field]:
    return {name: field for (name,), field in columns.items()}


def _standing(content: Mapping[str, Any]) -> dict[str, Field] | None:
    """The further columns of a save; those of older ones have none."""
    saved = content.get("columns")
    return None if saved is None else _named(cast("Any", Schema.from_json(json.dumps(saved)).leaves))


def _path(name: Name) -> Path:
    return (name,) if isinstance(name, str) else name
