"""RolloutBuffer: a block of steps made by one policy, filled once, finished with advantages, read as permutations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import repeat
from operator import methodcaller
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import core
from ..batches import WHOLE, Batch, EnvBatch, Overlap, SequenceBatch, as_batch, stride_of
from ..core.returns import Grid, gae_in_place, refuse_missing, require_final_values
from ..errors import (
    DTypeError,
    FieldError,
    FullError,
    LifecycleError,
    NotFiniteError,
    ParameterError,
    SchemaError,
    ShapeError,
    UnfinishedError,
)
from ..files import SaveHandle, Saves
from ..files.disk import contradictions
from ..memory.allocator import Recycled
from ..memory.estimate import readable
from ..memory.graphs import Graphed, has_graphs
from ..memory.layout import LARGE_FIELD
from ..names import add_hints
from ..parameters import COUNT_RULE, FLAG_RULE, Rule, is_count, is_own, is_whole, refuse_class, require, torch_device
from ..returns import GAE, Estimator, ValueHeads
from ..steps.arrays import Array, Bools, Ints, Leaf, as_host, as_tensor, check_castable
from ..steps.checker import refuse_unreadable
from ..steps.ends import MOST, EndCheck
from ..steps.schema import Field, Path, Schema, Spec, described, dotted, not_named, unknown_field
from ..steps.summary import Summary, html, text
from ..turns import Reuse, require_reuse
from . import saving
from .columns import ADVANTAGE, BOOKKEEPING, WATCHED, Columns, Name
from .minibatches import MANY, Minibatches, Permutations, parts, require_advantage
from .sequences import ENDS, Flags, States, WindowReader, env_batches, plan_windows, splitter

RETURN: Path = ("return",)

GAE_READS = {
    "reward": torch.float32, "value": torch.float32, "terminated": torch.bool, "truncated": torch.bool,
    "final_value": torch.float32, "mask": torch.bool,
}  # fmt: skip
GAE_WRITES = {"advantage": torch.float32, "return": torch.float32}
"""The columns that ``core.fill_gae`` reads and writes, in the order of its arguments, and their dtypes."""

InPlace = tuple[Callable[[int, float, float], int], Callable[[], object]]
"""``core.fill_gae`` of the memory of columns, and a call that then counts the two that it wrote as attached."""

STEPS_RULE: Rule = (lambda steps: steps is None or is_whole(steps), "expected a whole number of steps, or None")


class RolloutBuffer:
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
        columns: name -> :class:`Field` of further columns that no step brings: there from the start, to be written in
            place, by ``r[name] = ...`` or by :meth:`finish`. Rows that are not written hold older numbers.
        seed: of the permutations; permutation number k is a function of (seed, k) alone. None draws one number from
            torch's default generator, so that ``torch.manual_seed`` decides it; ``buffer.seed`` is the number.

    Raises:
        SchemaError: a schema that uses the buffer's own names.
        ParameterError: sizes that are not positive, or that need more than the free memory.
    """

    num_steps: int
    num_envs: int
    device: torch.device
    wrap: bool

    # Whatever adds steps (a copy in one call, values that are checked one by one, `reserve` and `commit`) takes three
    # steps: `_make_room`, a write of whole rows, mask and final value included, `_advance`. So what a row held before
    # never matters. Ctrl-C may interrupt a call at any line: the rows that it overwrites leave the rollout in one line
    # before the first write, and those that it writes join in its last line.

    _preset = True
    """True if the masks of all rows are written at once. :meth:`load` does not: a forged save could claim any size."""

    _saves: Saves | None = None

    extra: Any = None
    """The ``extra`` that was passed to :meth:`save`, in a buffer that was loaded; else None."""

    def __init__(
        self,
        schema: Schema,
        num_steps: int,
        num_envs: int,
        *,
        device: str | torch.device = "cpu",
        wrap: bool = False,
        debug: bool = False,
        columns: Mapping[str, Field] | None = None,
        seed: int | None = None,
    ) -> None:
        # Attributes are set one by one, and never through `__dict__`: CPython 3.11 looks attributes up more slowly once
        # that was asked for, 1.75 µs a step instead of 1.45.
        require("RolloutBuffer", COUNT_RULE, num_steps=num_steps, num_envs=num_envs)
        self.num_steps, self.num_envs = size = int(num_steps), int(num_envs)
        require("RolloutBuffer", FLAG_RULE, wrap=wrap, debug=debug)
        self.device, self.wrap, self._debug = torch_device("RolloutBuffer", device), wrap, debug
        further: Mapping[str, Field] = {} if columns is None else columns
        self._columns = Columns(schema, further, size, self.device, wrap=wrap)
        self._permutations = Permutations(seed)
        self._memory = Recycled()
        """Gives the memory of batches, on the CPU."""
        self._minibatches = Minibatches(self._columns, self._memory)

        self._has_last = False
        """True if the value of the bootstrap row is written."""
        self._ended: Bools | Tensor = self._all_ended()
        """True where the episode before the first row had ended, ``[N]``; on the device, if there is one."""
        self._interrupted = False
        """True if the episodes of the newest row were broken off, although its flags do not say so."""
        self._reserved = 0
        """How many rows after the newest are reserved."""
        self._reserved_views: list[tuple[Path, Tensor, int]] = []
        """The path, the view and the address of each reserved column."""
        if self._preset:
            self._columns.write_bookkeeping(slice(None), {})
        self.check_ends = True
        self._gae_layout: object = None
        """The layout of the columns that ``_gae_in_place`` belongs to."""
        self._gae_in_place: InPlace | None = None
        """GAE in the memory of these columns; None if it cannot be computed there."""

    def __getstate__(self) -> dict[str, object]:
        """For pickle and deepcopy: everything but addresses and the views that :meth:`reserve` returned."""
        forgotten: dict[str, object] = {"_reserved_views": [], "_gae_layout": None, "_gae_in_place": None}
        return {**self.__dict__, **forgotten, "_ended": as_host(self._ended)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__dict__.pop("_bookkeeping_used", None)  # in older pickles
        self._set_ended(state["_ended"])

    # -- writing ------------------------------------------------------------------------------------------------------

    def add(self, step: Mapping[str, object] | None = None, /, *more: NoReturn, **fields: object) -> None:
        """Append one vector step; NumPy or torch, given as a mapping, as keywords, or both.

        Args:
            step: field -> ``[N, ...]`` for every field of the schema; with one env the leading axis may be left out.
            fields: further fields, as keywords. ``mask`` (bool ``[N]``, default all True) is False at steps that are
                not real, such as the reset step of ``NEXT_STEP`` autoreset; ``final_value`` (``[N]``) is read where
                ``truncated`` is set.

        Raises:
            FullError: the rollout is complete and does not wrap.
            FieldError, ShapeError, DTypeError, DeviceError: the step does not fit the schema. Nothing is written.
            NotFiniteError: in debug mode, a reward or a value is NaN or infinite. Nothing is written.
        """
        if more or not (step is None or hasattr(step, "keys")):
            raise FieldError(not_named(step))
        values: dict[str, object] = fields if step is None else {**step, **fields}
        columns, copier = self._columns, self._columns.copier
        full = columns.count == columns.num_steps
        if copier is not None and (not full or columns.wrap):
            before = self._make_room(1) if full or self._has_last else None
            row = (columns.start + columns.count) % columns.num_steps
            if copier.take(row, values, self._debug):
                self._advance(1)
                return
            if before is not None:
                self._ended, self._has_last, columns.start, columns.count = before
        self._add_checked(values)

    def _add_checked(self, values: dict[str, object]) -> None:
        """Check each part of a step, then write it; ``values`` is used up."""
        columns, bookkeeping = self._columns, dict[str, Leaf]()
        for name in BOOKKEEPING:
            if name in values:
                (bookkeeping[name],) = columns.checked(name, values.pop(name)).values()
        try:
            # a copier adds defaults of mask and final value; `write` has them, and what the step brought in their place
            checked = columns.check(values, columns.copier)[: len(columns.paths)]
        except (RuntimeError, TypeError):
            refuse_unreadable(values)
            raise
        row = columns.next_row
        if self._debug:
            self._refuse_nonfinite(values)
        self._make_room(1)
        columns.write(row, checked, bookkeeping)
        self._advance(1)

    def _make_room(self, steps: int) -> tuple[Bools | Tensor, bool, int, int]:
        """Take out of the rollout what the next ``steps`` rows hold: the bootstrap row, and the oldest of a full ring.

        Returns:
            what it changes, as it was: ``_ended``, ``_has_last``, and the columns' ``start`` and ``count``.
        """
        columns = self._columns
        before = self._ended, self._has_last, columns.start, columns.count
        self._has_last = False
        leaving = columns.count + steps - columns.num_steps
        if leaving > 0:
            self._give_up(slice(columns.start, columns.start + leaving))
        return before

    def _advance(self, rows: int, last: bool = False) -> None:
        """Take in the next rows, which are written; they belong to the rollout from the last line on."""
        columns = self._columns
        self._reserved_views = []
        columns.detach()
        columns.count, self._interrupted, self._reserved, self._has_last = columns.count + rows, False, 0, last

    def _give_up(self, rows: slice) -> None:
        """Drop the oldest rows, which lie at these places, and note which of their episodes had ended."""
        columns, count, ended = self._columns, rows.stop - rows.start, self._ended
        columns.forget_preset_final_values()
        if self._has_ends and count == 1 and columns.copier is not None:  # as below, in RAM, in fewer calls
            terminated, truncated, real = [columns.memory_of((name,))[rows.start] for name in ENDS]
            ended = np.logical_or(terminated, truncated) | (ended > real)
        elif self._has_ends:
            ended = Flags.of([columns.memory_of((name,))[rows] for name in ENDS], ended).ended
        start = (columns.start + count) % columns.num_steps
        self._ended, columns.start, columns.count = ended, start, columns.count - count  # all or none

    def _refuse_nonfinite(self, values: Mapping[str, object], steps: int = 1) -> None:
        """Refuse rewards and values of the next ``steps`` steps that are not finite; they fit otherwise."""
        for name, source in WATCHED.items():
            if name not in values or (name,) not in self._columns.own:  # it may be nested
                continue
            value = values[name]
            if isinstance(value, Tensor):
                finite = bool(value.isfinite().all())
            else:
                # ``all()`` comes to this, by way of a function in Python
                finite = bool(np.logical_and.reduce(np.isfinite(as_host(value, name)), None))
            if not finite:
                numbers, envs = as_host(value, name).reshape(-1), self.num_envs
                position = int(np.argmin(np.isfinite(numbers)))
                # A value may have several numbers an env: ``numbers.size / (steps * envs)`` of them.
                step, env = divmod(position * steps * envs // numbers.size, envs)
                raise NotFiniteError(
                    f"field '{name}': step {self._columns.count + step} of env {env} is {float(numbers[position])}; "
                    f"fix the {source}"
                )

    # Everything is prepared, and then swapped in one line. What is kept of the columns holds for a `layout`: with an
    # exception between new memory and a new layout, the core would write to the old memory.
    def add_fields(self, **fields: Spec) -> None:
        """Add fields to the schema; they are zeros in the steps that were written before.

        Args:
            fields: as in a schema: a :class:`relive.Field`, a bare shape for float32, or a dict or tuple. A nested
                field of the schema may be given again with further members.

        Raises:
            SchemaError: there is a column of that name, or rows of it would be lost.
            ParameterError: memory is short.
            LifecycleError: rows are reserved.
        """
        columns, schema = self._columns, self._columns.schema
        wider = schema.extend(**fields)
        clashing = [name for name in fields if name in BOOKKEEPING or (name in columns and name not in schema)]
        clashing += [dotted(path) for path, field in schema.leaves.items() if wider.leaves.get(path) != field]
        if clashing or wider.leaves == schema.leaves:
            name = (clashing or list(fields))[0]
            raise SchemaError(f"field '{name}': this rollout has such a column already; give it another name")
        if self._reserved:
            raise LifecycleError("add_fields(): rows are reserved; call it before reserve()")
        columns.require_memory({path: leaf for path, leaf in wider.leaves.items() if path not in schema.leaves})
        columns.extend(wider)

    def reserve(self, steps: int | None = None) -> Batch:
        """The next ``steps`` rows (all that are left, by default) as views ``[steps, N]`` to be written in place.

        They include ``mask``, preset to True, and with a value in the schema ``final_value``, preset to NaN. The rows
        become part of the rollout with :meth:`commit`. A buffer that wraps gives up as many of its oldest steps as it
        needs, at once. The views may be put into shared memory for other processes to write: :meth:`commit` then
        copies the rows from there.

        Raises:
            FullError: fewer rows are left in one piece.
        """
        columns = self._columns
        require("reserve", STEPS_RULE, steps=steps)
        row = columns.next_row
        left = columns.num_steps - row
        count = left if steps is None else int(steps)
        if not 1 <= count <= left:
            raise FullError(f"reserve({count}): {left} rows are left in one piece; reserve 1 to {left}")
        rows = slice(row, row + count)
        if columns.count + count > columns.num_steps:
            columns.detach()  # what was computed of all steps
        self._make_room(count)
        columns.write_bookkeeping(rows, {})
        columns.forget_preset_final_values()
        self._reserved = count
        tensors = {path: columns.view(path, rows) for path in columns.own}
        if columns.device.type == "cpu":
            self._reserved_views = [(path, tensor, tensor.data_ptr()) for path, tensor in tensors.items()]
        return as_batch(tensors)

    def commit(self, steps: int | None = None, *, last: bool = False) -> None:
        """Make the first reserved rows part of the rollout, once they are written.

        Args:
            steps: how many of the reserved rows, all by default; the rest is given back.
            last: the bootstrap row, the one after them, is written too.

        Raises:
            LifecycleError: fewer rows are reserved.
            NotFiniteError: in debug mode, a reward or a value is NaN or infinite; the rows stay reserved.
        """
        require("commit", STEPS_RULE, steps=steps)
        require("commit", FLAG_RULE, last=last)
        count = self._reserved if steps is None else int(steps)
        if not 1 <= count <= self._reserved:
            raise LifecycleError(
                f"commit({'' if steps is None else steps}): {self._reserved} rows are reserved; call reserve() "
                "and fill the rows before you commit them"
            )
        columns = self._columns
        rows = slice(columns.next_row, columns.next_row + count)
        for path, tensor, address in self._reserved_views:
            if tensor.data_ptr() != address:  # the view was shared or sent, so it was written elsewhere
                columns.put(path, rows, tensor[:count])
        if self._debug:
            watched = {path[0]: columns.view(path, rows) for path in columns.own if path[0] in WATCHED}
            self._refuse_nonfinite(watched, count)
        self._advance(count, last)

    def set_last(self, **fields: object) -> None:
        """Write fields of the bootstrap row, the one after the newest step: ``set_last(obs=..., value=...)``.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: a field does not fit. Nothing is written.
        """
        for name in BOOKKEEPING:
            if name in fields:
                raise FieldError(f"field '{name}': the bootstrap row is not a step and has none; pass it to add()")
        columns = self._columns
        checked = [columns.checked(name, value) for name, value in fields.items()]
        had, self._has_last = self._has_last, False  # a row that is half written does not count
        row = columns.last_row
        for path, value in columns.apart({path: value for leaves in checked for path, value in leaves.items()}).items():
            columns.put(path, row, value)
        self._has_last = had or "value" in fields

    def set_final_value(self, steps: object, envs: object, values: object) -> None:
        """Set V(true final observation) of truncated steps, where it is known only later: three vectors ``[K]``.

        Args:
            steps: the times of the steps, from 0 to T - 1.
            envs: their envs.
            values: V(true final observation) of each; ``[K, ...]`` if the value has several heads.

        Raises:
            FieldError: the schema has no ``value``.
            ParameterError: a step or env is out of range.
            ShapeError: the vectors differ in length.
        """
        columns = self._columns
        if ("final_value",) not in columns.bookkeeping:
            raise FieldError("field 'final_value': the schema has no 'value'; add value=() to it")
        target = columns.view(("final_value",))
        rows, at_envs = _numbers(steps, "steps"), _numbers(envs, "envs")
        final = values.detach() if isinstance(values, Tensor) else as_tensor(values, "final_value")
        vectors = rows.dim() == 1 and rows.shape == at_envs.shape == final.shape[:1]
        if not vectors or final.shape[1:] != target.shape[2:]:
            raise ShapeError(
                f"set_final_value: expected three vectors of one length, got {tuple(rows.shape)}, "
                f"{tuple(at_envs.shape)}, {tuple(final.shape)}"
            )
        count, num_envs = columns.count, columns.num_envs
        beyond = (rows < 0) | (rows >= count) | (at_envs < 0) | (at_envs >= num_envs)
        if bool(beyond.any()):
            step, env = (int(vector[beyond][0]) for vector in (rows, at_envs))
            raise ParameterError(
                f"set_final_value: got step {step} of env {env}; steps are 0 to {count - 1}, envs 0 to {num_envs - 1}"
            )
        check_castable(final, target.dtype, "final_value")
        rows = columns.place(rows).to(target.device)
        final = columns.apart({"final_value": final})["final_value"]
        target[rows, at_envs.to(target.device)] = final.to(device=target.device, dtype=target.dtype)

    def clear(self) -> None:
        """Forget the rollout and its attached columns, such as advantages; the memory stays.

        The next step continues the episodes under way; call :meth:`interrupt` if it does not.
        """
        columns, ended = self._columns, self._ended_now()
        self._has_last, self._reserved = False, 0
        columns.detach()
        self._ended, self._interrupted, columns.start, columns.count = ended, False, 0, 0  # all or none
        columns.write_bookkeeping(slice(None), {})  # :attr:`block` shows rows that are not written, too
        self._reserved_views = []

    def interrupt(self) -> None:
        """Break off the episodes under way: the next step starts new ones in all envs.

        Their newest steps become truncated. The bootstrap row gives their values if it was set (:meth:`set_last`); if
        not, give them by :meth:`set_final_value`, or :meth:`finish` refuses them. A full rollout keeps its steps as
        they are, since the bootstrap row values them anyway.
        """
        columns = self._columns
        if not columns.count:
            self._ended = self._all_ended()
        if not columns.count or (columns.is_full and not columns.wrap):
            self._interrupted = bool(columns.count)
            return
        truncated = columns["truncated"].clone()
        under_way = ~(columns["terminated"][-1] | truncated[-1])
        truncated[-1] |= under_way
        envs = (under_way & columns["mask"][-1]).nonzero().squeeze(1)
        if "value" in columns.schema and self._has_last and len(envs):  # before truncated is set, where it is read
            self.set_final_value(torch.full_like(envs, columns.count - 1), envs, self.last["value"][envs])
        columns.attach({"truncated": truncated})

    def __setitem__(self, name: Name, column: object) -> None:
        """Attach a column ``[T, N, ...]`` to this rollout, or overwrite one; :meth:`clear` forgets attached ones.

        Raises:
            ShapeError: the column does not have the rollout's steps and envs in front.
            DTypeError: the column overwrites one of the schema with another kind of dtype.
            DeviceError: the column is a tensor on another device.
            FieldError: the name is that of a nested field.
        """
        self._columns.attach({name: column})

    # -- episodes -----------------------------------------------------------------------------------------------------

    @property
    def _has_ends(self) -> bool:
        """True if the steps say where episodes end."""
        return {("terminated",), ("truncated",)} <= self._columns.own

    def _flags(self) -> Flags:
        """Where the episodes of the present steps start and end."""
        columns, paths = self._columns, [(name,) for name in ENDS]
        if not self._has_ends:  # they may be attached
            paths = [leaf for path in paths for leaf in columns.leaves(path)]
        return Flags.of([columns.flags(path) for path in paths], self._ended)

    def _all_ended(self) -> Bools | Tensor:
        """True for each env, where :attr:`_ended` is."""
        if self.device.type == "cpu":
            return np.ones(self.num_envs, np.bool_)
        return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    def _set_ended(self, ended: Bools) -> None:
        """Set :attr:`_ended` to what was saved of it."""
        self._ended = ended if self.device.type == "cpu" else torch.from_numpy(ended).to(self.device)

    def _ended_now(self) -> Bools | Tensor:
        """True where the next step starts an episode, ``[N]``."""
        if self._interrupted:
            return self._all_ended()
        return self._flags().ended if self._columns.count and self._has_ends else self._ended

    # -- finishing ----------------------------------------------------------------------------------------------------

    # Plain GAE is computed in place, by a call that is bound to the memory of its columns. That memory changes only
    # together with `columns.layout`, so the call is bound again where `layout` is another object. All other estimators
    # go by tensors, as does a rollout that has come round, which lies in two pieces. Where T is 3, and a time limit cut
    # step 1 off, the value after each step is:
    #
    #     step            0          1                 2
    #     value after it  value[1]   final_value[1]    value[3], the bootstrap row
    #
    # No value of another episode is read: value[2] is of the next one. value[3] may be missing only if step 2 ended the
    # episodes of all envs.
    def finish(self, estimator: Estimator, *, last_value: object = None, partial: bool = False) -> RolloutBuffer:
        """Attach the columns that ``estimator`` computes, such as ``advantage`` and ``return``; returns the buffer.

        Args:
            estimator: :class:`relive.GAE` and its like, or any :class:`relive.returns.Estimator`.
            last_value: V(obs[T]), ``[N]``, or ``[N, K]`` of K heads; not needed if it was set already, or if every env
                just finished.
            partial: finish a rollout that is not full.

        Raises:
            ParameterError: ``estimator`` is not an estimator.
            EmptyError: no step was added.
            UnfinishedError: the rollout is not full, or the bootstrap value is missing.
            FieldError: a column that the estimator reads is missing, or a truncated step has no final value.
            NotFiniteError: an advantage would be NaN or infinite, such as those before a value that is. There are no
                advantages then.

        On other devices than the CPU nobody looks for a missing final value, or for advantages that are not finite,
        unless ``debug`` is set: to look would wait. A missing final value is NaN there, and so are the advantages of
        the steps that lead to it.
        """
        columns = self._columns
        in_place = estimator if type(estimator) is GAE and not estimator.normalize else None
        if in_place is None:
            _require_estimator(estimator)
        if partial is not False:  # a call less where time counts
            require("finish", FLAG_RULE, partial=partial)
        if not columns.count:
            columns.require_steps()
        if not (columns.count == columns.num_steps or partial or columns.wrap):
            raise UnfinishedError(
                f"{columns.count} of {columns.num_steps} steps are written; add the rest, or finish(..., partial=True)"
            )
        if last_value is not None:
            self.set_last(value=last_value)
        check = self._end_check
        if check is not None and (partial or columns.is_finished):  # each rollout is checked once
            check = None
        if self._debug and columns.device.type != "cpu":  # there the numbers are looked at only for this
            in_place = None
        if in_place is not None and columns.layout is not self._gae_layout:
            self._bind_gae()
        if in_place is not None and self._gae_in_place is not None and not columns.start:
            if not self._has_last:
                self._require_all_ended(estimator)
            self._fill_gae(*self._gae_in_place, in_place)
        else:
            self._attach_estimate(estimator)
        if check is not None:
            self._check_final_values(check)
        return self

    # The columns stay bound as long as `layout` is the same object. GAE at 2048 x 8 takes 7.7 µs in place, and took 52
    # by tensors.
    def _bind_gae(self) -> None:
        """Bind GAE to its columns, if it can read and write them in place."""
        columns, self._gae_in_place = self._columns, None
        memory = columns.in_place(GAE_READS, GAE_WRITES)
        attach = columns.attaching((ADVANTAGE, RETURN))
        if memory is not None and columns.device.type == "cpu":
            self._gae_in_place = partial(core.fill_gae, *memory), attach
        elif memory is not None:
            call: Callable[..., object] = partial(gae_in_place, *memory)
            # the memory of a layout stays, so that nothing is copied into a graph or out of it
            if has_graphs(columns.device):
                call = Graphed(call, columns.device, tuple)
            self._gae_in_place = partial(_on_device, call, columns, memory[-len(GAE_WRITES) :]), attach
        self._gae_layout = columns.layout  # last: after an interrupt the next call starts again

    # Missing final values are found before anything is written, so a call that is refused changes nothing. Other
    # estimators, dtypes and devices go by tensors.
    def _fill_gae(self, fill: Callable[[int, float, float], int], attach: Callable[[], object], estimator: GAE) -> None:
        """Write advantages and returns into their columns, in compiled code; after an error there are none.

        An interrupt comes before or after it, so the two columns are both old or both new.
        """
        columns = self._columns
        wrong = fill(columns.count, estimator.gamma, estimator.lam)
        if wrong == core.SPOILT:
            self._refuse_spoilt(columns.ordered(ADVANTAGE), estimator, (ADVANTAGE, RETURN))
        if wrong >= 0:
            refuse_missing(wrong, columns.num_envs)
        attach()

    def _attach_estimate(self, estimator: Estimator) -> None:
        """Call the estimator with tensors, and attach the columns that it returns."""
        columns = self._columns
        for name in estimator.reads:
            if name not in BOOKKEEPING:
                self._require_column(name, type(estimator).__name__)
        if "value" in estimator.reads and not self._has_last:
            self._require_all_ended(estimator)
        heads = estimator.heads.values() if isinstance(estimator, ValueHeads) else ()
        own, host = is_own(estimator) and all(map(is_own, heads)), columns.device.type == "cpu"
        inputs = {name: self._estimator_input(name, host or not own) for name in estimator.reads}
        if own and self._debug and "final_value" in inputs:
            # heads have other columns in place of rewards
            grid: dict[str, Any] = {name: inputs.get(name) for name in Grid._fields}
            grid["final_value"] = _final_values(estimator, inputs["final_value"])
            require_final_values(Grid(**grid))
        result = estimator(**inputs)
        for name, advantage in result.items() if own and (host or self._debug) else ():
            if name.endswith("advantage") and not bool(advantage.isfinite().all()):
                self._refuse_spoilt(advantage, estimator, [(column,) for column in result])
        columns.attach(result)

    def _require_column(self, name: str, reader: str) -> None:
        """Refuse an estimator that reads a column which is not there."""
        if not self._columns.leaves_under((name,)):
            lacking = unknown_field(name, self._columns.keys(), "this rollout")
            instead = "" if name == "value" else f", or set rollout[{name!r}] first"
            raise FieldError(f"{reader} reads {name!r}: {lacking}. Declare it in the schema{instead}")
        self._columns.leaves((name,))

    def _estimator_input(self, name: str, may_wait: bool) -> Any:
        """A column as estimators take it: ``value`` with its bootstrap row, bookkeeping only where it matters.

        A look at the flags waits for the device. Without ``may_wait`` there is none, and bookkeeping always comes.
        """
        columns = self._columns
        if name == "mask" and (may_wait or columns.is_real) and not columns.has_mask():
            return None
        if name == "final_value" and (name not in columns or (may_wait and not columns.has_truncations())):
            return None
        return columns.with_last(("value",)) if name == "value" and name in columns else columns[name]

    def _require_all_ended(self, estimator: Estimator) -> None:
        """Without a bootstrap value every env must just have finished an episode, and every head must stop there."""
        columns = self._columns
        if isinstance(estimator, ValueHeads) and estimator.non_episodic:
            raise UnfinishedError(
                f"{estimator.non_episodic[0]!r} goes on after the last step, since no end of an episode stops it, and "
                "its bootstrap value is missing; pass finish(..., last_value=V(obs[T])), or set_last(value=...)"
            )
        under_way = ~(columns["terminated"][-1] | columns["truncated"][-1])
        if columns.has_mask():
            under_way &= columns["mask"][-1]
        if bool(under_way.any()):
            env = int(under_way.nonzero()[0])
            raise UnfinishedError(
                f"the episode of env {env} goes on after the last step and its bootstrap value is missing; "
                "pass finish(..., last_value=V(obs[T])), or set_last(value=...)"
            )

    def _refuse_spoilt(self, advantage: Tensor, estimator: Estimator, results: Iterable[Path]) -> None:
        """Refuse an advantage ``[T, N]`` that is not finite at a real step, by the number that it comes from.

        The columns ``results``, which the estimator would have attached, are not there then.

        Raises:
            NotFiniteError: names that field, its step and its env.
        """
        columns = self._columns
        terminated, truncated, real = (columns[name] for name in ENDS)
        wrong = ~advantage.isfinite() & real
        if not bool(wrong.any()):
            return
        columns.drop(results)
        valued = torch.cat([real, torch.zeros_like(real[:1])])
        valued[1:] |= real & ~(terminated | truncated)  # the value after a step that ended nothing
        if isinstance(estimator, ValueHeads) and estimator.non_episodic:
            valued[-1] = True
        used = {"value": valued, "final_value": real & truncated & ~terminated}
        for name in estimator.reads:
            if name in ENDS or name not in columns:
                continue
            column = columns.with_last(("value",)) if name == "value" else columns[name]
            if name == "final_value":
                column = _final_values(estimator, column)
            wrong_numbers = ~column.isfinite().reshape(*column.shape[:2], -1)  # a value may have several an env
            bad = (wrong_numbers & used.get(name, real).unsqueeze(-1)).nonzero()
            if len(bad):
                step, env, k = bad[0].tolist()
                where = f"step {step} of" if step < len(real) else "the bootstrap row (last_value) of"
                number = float(column[step, env].flatten()[k])
                raise NotFiniteError(
                    f"field '{name}': {where} env {env} is {number}, so advantages would not be "
                    "finite either; mend what gives it, the env or the policy, and create the buffer with debug=True "
                    "to find it when it is added"
                )
        step, env = wrong.nonzero()[0].tolist()
        raise NotFiniteError(
            f"the advantage of step {step} of env {env} is {float(advantage[step, env])}, although all that it comes "
            "from is finite: rewards or values are too large; scale the rewards"
        )

    def _check_final_values(self, check: EndCheck) -> None:
        """Check the ends of truncated episodes, after which a rollout knows the value of the final observation."""
        columns = self._columns
        self._checks_left -= 1
        final = columns.bookkeeping.get(("final_value",))
        if not self._checks_left or final is None or final.shape:
            self._end_check = None
            return
        terminated, truncated, real = (columns.memory_of((name,))[: columns.count].flatten() for name in ENDS)
        cut = truncated & ~terminated
        if not ((cut & real).any() or check.ended_on):
            return  # nothing has ended, and nothing is to be compared with an end
        value, final = (_coarse(columns.ordered((name,))) for name in ("value", "final_value"))
        if len(np.unique(value[real])) < np.count_nonzero(real) / 2:  # in bfloat16, say, values are alike by chance
            return
        envs = np.tile(np.arange(columns.num_envs), columns.count)
        if not check.observe(0, envs, [value, np.zeros_like(cut), cut], [final], real):
            self._end_check = None
            check.warn(of_values=True)

    # -- columns ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of real transitions, as an epoch of minibatches serves them."""
        return self._columns.num_real(self._columns.real_rows())

    def __contains__(self, name: Name) -> bool:
        return name in self._columns

    def keys(self) -> tuple[str, ...]:
        """The top-level columns of this rollout: the schema's, ``mask``, ``final_value``, and the attached ones."""
        return self._columns.keys()

    def __getitem__(self, name: Name) -> Any:
        """A column ``[T, N, ...]`` of the steps written so far, oldest first; a batch if it is nested.

        It is a view into the storage, or a copy once the buffer has wrapped round.
        """
        return self._columns[name]

    @property
    def block(self) -> Batch:
        """All columns with their bootstrap row as views ``[T + 1, N]``, written or not."""
        columns = self._columns
        return as_batch({path: columns.view(path) for path in columns.present})

    @property
    def env_major(self) -> Batch:
        """:attr:`block` as ``[N, T + 1]``; still views of the same memory."""
        return self.block.apply(methodcaller("transpose", 0, 1))

    @property
    def last(self) -> Batch:
        """The bootstrap row as views ``[N]``."""
        columns = self._columns
        return as_batch({path: columns.view(path, columns.last_row) for path in columns.paths})

    def data(self) -> Batch:
        """All columns of the steps written so far, ``[T, N]``, each as ``r[name]`` gives it."""
        columns = self._columns
        return as_batch(columns.select(columns.present))

    # -- batches ------------------------------------------------------------------------------------------------------

    def flat(self, fields: tuple[Name, ...] | None = None) -> Batch:
        """All real transitions as one batch ``[B]``, time first (row ``t * N + n``), copied.

        Args:
            fields: the columns wanted, as in :meth:`minibatches`; default all but ``mask`` and ``final_value``.
        """
        columns = self._columns
        columns.require_steps()
        rows = columns.real_rows()
        flat = self._flat_columns(fields)
        return as_batch({path: x.clone() if rows is None else x.index_select(0, rows) for path, x in flat.items()})

    def sample(self, batch_size: int, fields: tuple[Name, ...] | None = None) -> Batch:
        """One random minibatch ``[batch_size]``, drawn without replacement.

        Args:
            batch_size: B, at most the number of real transitions.
            fields: the columns wanted, as in :meth:`minibatches`; default all but ``mask`` and ``final_value``.

        Raises:
            EmptyError: no step was added.
            ParameterError: there are fewer real transitions, or ``batch_size`` is not positive.
        """
        columns = self._columns
        columns.require_steps()
        rows = columns.real_rows()
        total = columns.num_real(rows)
        if not (is_count(batch_size, 1) and batch_size <= total):
            raise ParameterError(f"sample({batch_size!r}): the rollout holds {total} transitions; ask for 1 to {total}")
        order = self._permutations.next(total, self.device, rows)[:batch_size]
        return as_batch({path: x.index_select(0, order) for path, x in self._flat_columns(fields).items()})

    def _flat_columns(self, fields: tuple[Name, ...] | None) -> dict[Path, Tensor]:
        """Columns of the steps written so far as rows ``t * N + n``."""
        columns = self._columns.select(self._columns.select_paths(fields))
        return {path: column.flatten(0, 1) for path, column in columns.items()}

    def minibatches(
        self,
        batch_size: int | None = None,
        *,
        num_batches: int | None = None,
        epochs: int = 1,
        drop_last: bool = False,
        shuffle: bool = True,
        reshuffle: bool = True,
        fields: tuple[Name, ...] | None = None,
        normalize_advantage: bool = False,
        reuse: Reuse = False,
    ) -> Iterator[Batch]:
        """All real transitions in minibatches ``[B]``, in random order: a new permutation every epoch.

        Every transition comes exactly once an epoch, unless ``drop_last`` is set; each epoch then drops others. Do not
        change columns while the minibatches are being read.

        Args:
            batch_size: transitions of a minibatch; the last one takes the rest.
            num_batches: instead, the number of minibatches in an epoch; their sizes differ by at most one.
            epochs: passes over the rollout.
            drop_last: leave out the transitions that do not fill a whole minibatch.
            shuffle: False keeps the order of the steps, as :meth:`flat` has them, in every epoch; no permutation is
                drawn.
            reshuffle: False repeats the minibatches of the first epoch in all others.
            fields: the columns wanted, members of nested ones by their paths, such as ``("obs", "camera")``; default
                all but ``mask`` and ``final_value``. Fewer are faster.
            normalize_advantage: normalise ``advantage`` within each minibatch.
            reuse: write minibatches to the same memory in turn, which is faster. One is then valid until two others
                were given, and refuses all use after the third; clone what you keep. "pinned" takes page-locked memory,
                as :meth:`relive.ReplayBuffer.batches` does.

        Raises:
            EmptyError: no step was added.
            ParameterError: sizes that do not fit the rollout.
            FieldError: an unknown column.
        """
        columns = self._columns
        if not columns.count:
            columns.require_steps()
        flags = {"drop_last": drop_last, "shuffle": shuffle, "reshuffle": reshuffle}
        flags["normalize_advantage"] = normalize_advantage
        if type(epochs) is not int or epochs < 1 or {*map(type, flags.values())} != {bool}:  # most often they are right
            require("minibatches", COUNT_RULE, epochs=epochs)
            require("minibatches", FLAG_RULE, **flags)
        if reuse is not False and reuse is not True:
            require_reuse("minibatches", reuse)
        rows = columns.real_rows()
        total = columns.count * columns.num_envs if rows is None else len(rows)
        paths = columns.select_paths(fields)
        bounds = parts(total, batch_size, num_batches, drop_last)
        if normalize_advantage:
            require_advantage(normalize_advantage, paths)
        if shuffle:
            orders = self._permutations.orders(total, self.device, rows, epochs, reshuffle)
        else:
            orders = repeat(torch.arange(total, device=self.device) if rows is None else rows, epochs)
        # On a device only calls count, and those of the second batch pay for packing.
        pack = epochs > 1 or len(bounds) >= (MANY if self.device.type == "cpu" else 2)
        return self._minibatches.batches(
            paths,
            bounds,
            orders,
            epochs * len(bounds),
            pack=pack,
            normalize_advantage=normalize_advantage,
            reuse=reuse,
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
        fields: tuple[Name, ...] | None = None,
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
            batch_size: sequences of a batch; the last one takes the rest.
            num_batches: instead, the number of batches in an epoch; their sizes differ by at most one.
            batch_steps: instead, the most steps of a batch; a longer sequence comes alone. Without any of the three an
                epoch is one batch.
            epochs: passes over the rollout.
            shuffle: False keeps the order: env by env, in time.
            fields: the columns wanted; default all but ``mask``, ``final_value`` and ``hidden``, which comes anyway.
            time_first: batches are ``[L, B, ...]``; else ``[B, L, ...]``. L is ``length``, or the rollout's steps if
                those are fewer; without a length, the longest sequence of the batch sets it.
            normalize_advantage: normalise ``advantage`` over each batch's steps.

        Raises:
            EmptyError: no step was added.
            ParameterError: a length, overlap or size that does not fit.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        columns = self._columns
        columns.require_steps()
        require("sequences", COUNT_RULE, epochs=epochs)
        require("sequences", FLAG_RULE, complete=complete, drop_tail=drop_tail)
        windows = plan_windows(
            self._flags(), length, stride_of(length, overlap), drop_tail=drop_tail, complete=complete
        )
        split = splitter(len(windows), batch_size, num_batches, batch_steps)
        flags = {"shuffle": shuffle, "time_first": time_first, "normalize_advantage": normalize_advantage}
        require("sequences", FLAG_RULE, **flags)
        paths = columns.select_sequence_paths(fields)
        require_advantage(normalize_advantage, paths)
        reader = self._reader(paths, LARGE_FIELD if epochs > 1 else 0)
        rows = None if length is None else min(length, columns.count)
        orders = (windows[self._order(len(windows), shuffle)] for _ in range(epochs))
        return (
            batch
            for order in orders
            for batch in reader.batches(
                order, split(order), rows=rows, time_first=time_first, normalize_advantage=normalize_advantage
            )
        )

    def env_batches(
        self,
        batch_size: int | None = None,
        *,
        num_batches: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        sequences: tuple[Name, ...] = ("obs",),
        fields: tuple[Name, ...] | None = None,
    ) -> Iterator[EnvBatch]:
        """Batches of whole envs: their steps ``[T, B, ...]``, and some columns also as trajectories, cut at dones.

        This is for recurrent networks that take padded trajectories and put their outputs back into the order of time.
        Every env comes exactly once an epoch. Each call draws a new random order, and each epoch divides it from
        another place, so that its batches differ. Batches are views: of one copy in that order, or, without shuffling,
        ``steps`` of the storage. Do not change columns meanwhile.

        Args:
            batch_size: envs of a batch; the last one takes the rest.
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
        columns = self._columns
        columns.require_steps()
        require("env_batches", COUNT_RULE, epochs=epochs)
        bounds = parts(columns.num_envs, batch_size, num_batches, items="envs")
        windows = plan_windows(self._flags(), None, WHOLE, drop_tail=False, complete=False)
        padded = columns.select_sequence_paths(sequences)
        as_stored = columns.select_sequence_paths(fields)
        if fields is None:
            as_stored = [path for path in as_stored if path not in padded]
        readers = self._reader(padded, 0), self._reader(as_stored, 0, with_states=False)
        order = self._order(columns.num_envs, shuffle) if shuffle else None
        return env_batches(*readers, windows, order, bounds, epochs)

    def chunks(self, length: int | None = None, *, fields: tuple[Name, ...] | None = None) -> Iterator[SequenceBatch]:
        """All envs in the order of time, ``length`` steps at a time: batches ``[L, N, ...]``, the last one shorter.

        Chunks run on over the ends of episodes, for distillation: ``seq["done"]`` is bool ``[L, N]``, and where
        ``seq["is_start"]``, bool ``[L, N]``, is set, the state before that step is an initial one. ``seq["hidden"]`` is
        the state before the chunk's first step. The columns are views.

        Args:
            length: steps of a chunk; by default one chunk holds all. 1 gives step after step.
            fields: the columns wanted; default all but ``mask``, ``final_value`` and ``hidden``.

        Raises:
            EmptyError: no step was added.
            ParameterError: a length below 1.
            FieldError: an unknown column, or no ``terminated`` and ``truncated`` in the schema.
        """
        columns = self._columns
        columns.require_steps()
        stride_of(length, "none")  # refuses a wrong length
        steps = columns.count
        size = steps if length is None else length
        reader = self._reader(columns.select_sequence_paths(fields), 0)
        flags = self._flags()
        return (reader.chunk(flags, low, min(low + size, steps)) for low in range(0, steps, size))

    def _reader(self, paths: list[Path], pack: int, with_states: bool = True) -> WindowReader:
        """Reads windows of these columns, and of the states if the schema has ``hidden``."""
        states = States(self._columns) if with_states and "hidden" in self.schema else None
        return WindowReader(self._columns, paths, states, pack, self._memory)

    def _order(self, count: int, shuffle: bool) -> Ints:
        """The next permutation of ``count`` items, or their own order."""
        return self._permutations.next(count).numpy() if shuffle else np.arange(count)

    # -- settings and sizes -------------------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """The fields of a step."""
        return self._columns.schema

    @property
    def debug(self) -> bool:
        """True if rewards and values that are not finite are refused; it may be set at any time."""
        return self._debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        require("RolloutBuffer", FLAG_RULE, debug=debug)
        self._debug = debug

    @property
    def check_ends(self) -> bool:
        """True if :meth:`finish` warns of steps that ``NEXT_STEP`` autoreset ignores, in the first rollouts.

        Such steps show where truncated steps have a ``final_value``; see :class:`relive.errors.EpisodeEndWarning`. It
        may be set at any time. A Collector turns it off, since it stores ends correctly. Unused on other devices than
        the CPU, and if the buffer wraps.
        """
        return self._check_ends

    @check_ends.setter
    def check_ends(self, check: bool) -> None:
        require("RolloutBuffer", FLAG_RULE, check_ends=check)
        leaves = {("obs",): Field(), **{(name,): Field((), torch.bool) for name in ("terminated", "truncated")}}
        # A rollout that wraps is finished again and again with the same ends; on a device it would wait.
        checks = check and not self.wrap and self.device.type == "cpu"
        self._check_ends = check
        self._end_check = EndCheck(leaves) if checks else None
        """Checks the first ends of episodes; None once there were enough of them."""
        self._checks_left = MOST
        """How many rollouts it may still check."""

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
        """True if all ``num_steps`` are written."""
        return self._columns.is_full

    # -- files, copies and printing -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, extra: object = None, background: bool = False) -> SaveHandle:
        """Write the rollout, its attached columns and the number of the next permutation to the directory ``path``.

        An older save there is replaced as a whole or not at all; ``docs/files.md`` has the format.

        Args:
            path: the directory.
            extra: the learner's state, as :meth:`relive.ReplayBuffer.save` takes it.
            background: copy everything, return, and write the copy in another thread, as
                :meth:`relive.ReplayBuffer.save` does.

        Returns:
            a handle of the save, as :meth:`relive.ReplayBuffer.save` returns it.

        Raises:
            ParameterError: nothing is there, and ``path`` ends as a file, such as ``.pt``: a save is a directory.
            FileFormatError: ``path`` holds something else, or ``extra`` a value that cannot be stored; names its keys.
            OSError: the disk is full, or fails.
        """
        self._saves = self._saves or Saves()
        self._saves.wait()
        progress = saving.RolloutState(
            debug=self._debug,
            seed=self._permutations.seed,
            draws=self._permutations.draws,
            has_last=self._has_last,
            interrupted=self._interrupted,
            ended=as_host(self._ended),
        )
        return self._saves.begin(saving.save(path, self._columns, progress, extra=extra, background=background))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> RolloutBuffer:
        """Read a saved buffer; it continues with the minibatches that the saved one would have given next.

        :attr:`extra` is the learner's state that was saved with it.

        Args:
            path: the directory.
            device: where its columns live from now on.

        Raises:
            FileFormatError: there is no save, or it is damaged, foreign or of another version; nothing is ever run.
        """
        tensors, content, extra = saving.read(path)
        with contradictions(path):
            buffer = cls.__new__(cls)
            buffer._preset = False
            buffer.__init__(**saving.arguments(tensors, content), device=device)
            progress = saving.restore(buffer._columns, tensors, content)
            buffer._set_ended(progress.ended)
            buffer._interrupted = progress.interrupted
            buffer._permutations.draws, buffer._has_last = progress.draws, progress.has_last
        buffer.extra = extra
        return buffer

    def __copy__(self) -> RolloutBuffer:
        """As ``copy.deepcopy``: two buffers over one memory would overwrite each other's rows."""
        return deepcopy(self)

    def __repr__(self) -> str:
        """The call that makes an empty buffer like this one."""
        further = {name: field for (name,), field in self._columns.further.items()}
        columns = f"columns={further}, " if further else ""
        return (
            f"RolloutBuffer({self.schema!r}, num_steps={self.num_steps}, num_envs={self.num_envs}, "
            f"device='{self.device}', wrap={self.wrap}, debug={self.debug}, "
            f"{columns}seed={self.seed})"
        )

    def __str__(self) -> str:
        return text(self._summary())

    def _repr_html_(self) -> str:
        return html(self._summary())

    def _summary(self) -> Summary:
        """How full the rollout is, what it holds, and how much memory that takes."""
        columns = self._columns
        besides = [name for name in columns.keys() if name not in columns.schema and name not in BOOKKEEPING]
        where = "in RAM" if columns.device.type == "cpu" else f"on {columns.device}"
        facts = {
            "fields": described(columns.schema.leaves),
            "attached": ", ".join(besides) or "nothing; finish(...) attaches advantages",
            "memory": f"{readable(columns.nbytes)} {where}",
            "seed": f"{self.seed}, {self._permutations.draws:,} permutations drawn",
        }
        full = ", full" if columns.is_full else ""
        title = f"RolloutBuffer: {columns.count:,} of {columns.num_steps:,} steps, {columns.num_envs:,} envs{full}"
        return title, facts


add_hints(RolloutBuffer)


def _require_estimator(estimator: object) -> None:
    """Refuse an argument that is no estimator, such as the class of one."""
    refuse_class("estimator", estimator)
    if not (callable(estimator) and hasattr(estimator, "reads")):
        raise ParameterError(f"finish({estimator!r}): expected an estimator, such as relive.GAE(gamma=0.99, lam=0.95)")


def _final_values(estimator: Estimator, final_value: Any) -> Any:
    """The final values that an estimator reads: with several heads those that an end of an episode stops."""
    if final_value is None or not isinstance(estimator, ValueHeads) or not estimator.non_episodic:
        return final_value
    read = [final_value[..., k] for k in estimator.episodic]
    return torch.stack(read, -1) if read else torch.zeros_like(final_value[..., 0])


def _on_device(
    call: Callable[..., object], columns: Columns, written: list[Tensor], steps: int, gamma: float, lam: float
) -> int:
    """GAE in place as ``core.fill_gae`` does it. Nobody looks at its numbers: that would wait."""
    columns.drop((ADVANTAGE, RETURN))  # they count as attached once both are written
    call(steps, columns.is_real, float(gamma), float(lam))
    increment_version(written)  # a graph does not tell autograd that it has written
    return -1


def _numbers(values: object, name: str) -> Tensor:
    """Numbers of steps or envs, int64 ``[K]``.

    Raises:
        ShapeError: this is no array.
        DTypeError: it has no whole numbers.
    """
    numbers = values if isinstance(values, Tensor) else as_tensor(values, name)
    if numbers.dtype is torch.bool or numbers.is_quantized or numbers.layout is not torch.strided:
        raise DTypeError(f"field '{name}': expected whole numbers, got {numbers.dtype} of layout {numbers.layout}")
    if numbers.numel():
        check_castable(numbers, torch.int64, name)
    return numbers.long()


def _coarse(values: Tensor) -> Array:
    """Values as float32 without the last 8 of 24 bits, flat.

    In those bits the values of one observation may differ from batch to batch.
    """
    bits: Array = values.float().flatten().numpy().view(np.int32)
    return ((bits + np.int32(128)) & np.int32(-256)).view(np.float32)  # rounded to the nearest
