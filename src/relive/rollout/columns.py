"""Columns: the memory of a rollout, a column ``[T + 1, N, ...]`` for each field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from ..batches import as_tensordict
from ..errors import DeviceError, EmptyError, FieldError, FullError, SchemaError, ShapeError
from ..memory.copier import StepCopier
from ..memory.estimate import readable, require_free
from ..memory.keeper import zeroed
from ..memory.layout import typed
from ..parameters import COUNT_RULE, Rule, is_names, require
from ..steps.arrays import Array, check_castable, numpy_dtype, numpy_view, refuse_masked
from ..steps.checker import StepChecker, refuse_unreadable
from ..steps.schema import Field, Path, Schema, dotted, unknown_field

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ADVANTAGE", "KEPT_APART", "Columns", "Fields", "Name", "NamedColumns", "as_size", "unfinished"]


class Columns:
    """The columns ``[T + 1, N, ...]`` of a rollout: a ring of T rows, and after the newest the bootstrap row.

    ``own`` columns exist from the start. The others are attached to the present steps and leave with them.
    :meth:`view`, :meth:`write` and :meth:`put` take the place of a row in storage. All other methods count rows from
    the oldest.

    On the CPU the memory is NumPy's, and every tensor that is handed out is a new one over it. ``share_memory_()`` and
    ``torch.multiprocessing`` move the memory of a tensor: they move that tensor alone, never the columns.
    """

    def __init__(
        self, leaves: Mapping[Path, Field], num_steps: int, num_envs: int, device: torch.device, wrap: bool
    ) -> None:
        self.num_steps, self.num_envs, self.device, self.wrap = num_steps, num_envs, device, wrap
        self._on_host = device.type == "cpu"
        self._memory: dict[Path, Any] = {}
        self._dtypes: dict[Path, torch.dtype] = {}
        self._attached: set[Path] = set()
        self.layout = object()
        """A new object whenever a column gets new memory: addresses are valid while it is the same object."""
        self._own: list[Any] = []
        """The memory of the own columns, in their order."""
        self.copier: StepCopier | None = None
        """Writes steps on the CPU; None on a device."""
        self.start = self.count = 0
        """The place of the oldest row, and the number of rows."""
        self.own = frozenset[Path]()
        for name, value in self._with(leaves).items():
            setattr(self, name, value)  # once ``__dict__`` was asked for, Python looks every attribute up more slowly

    def including(self, leaves: Mapping[Path, Field]) -> dict[str, Any]:
        """The attributes of these columns once ``leaves``, in their order, are the own ones: those that exist stay, the
        others begin as zeros.
        """
        return self.__dict__ | self._with(leaves)

    def _with(self, leaves: Mapping[Path, Field]) -> dict[str, Any]:
        """Those attributes that are others then."""
        made = {
            path: self._memory[path] if path in self.own else self._zeros(field.shape, field.dtype)
            for path, field in leaves.items()
        }
        made |= {path: self._memory[path] for path in self._attached}
        dtypes = self._dtypes | {path: field.dtype for path, field in leaves.items()}
        found = {"_memory": made, "_dtypes": dtypes, "own": frozenset(leaves)}
        return found | self._found(made, dtypes, frozenset(leaves))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Memory for one column."""
        full = self.num_steps + 1, self.num_envs, *shape
        if self._on_host:
            return zeroed(math.prod(full) * dtype.itemsize).view(numpy_dtype(dtype)).reshape(full)
        with torch.inference_mode(False):  # a tensor made there could never be written to outside of it
            return torch.zeros(full, dtype=dtype, device=self.device)

    def _found(self, memory: dict[Path, Any], dtypes: dict[Path, torch.dtype], own: frozenset[Path]) -> dict[str, Any]:
        """What is noted of the memory of own columns: on the CPU nobody else can move it."""
        paths = [path for path in memory if path in own]
        arrays = [memory[path] for path in paths]
        copier = None
        if self._on_host:
            kinds, shapes = [dtypes[path] for path in paths], [array.shape[2:] for array in arrays]
            copier = StepCopier(kinds, arrays, self.num_envs, shapes)
        return {"layout": object(), "_own": arrays, "copier": copier}

    def __getstate__(self) -> dict[str, Any]:
        """Arrays, which pickle copies; tensors would be moved, or on a device handed over, by multiprocessing."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("_own", "copier")}
        if not self._on_host:
            state["_memory"] = {path: numpy_view(column.cpu()) for path, column in self._memory.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._on_host:
            columns = {path: typed(array, self._dtypes[path]) for path, array in self._memory.items()}
            self._memory = {path: column.to(self.device) for path, column in columns.items()}
        self.__dict__ |= self._found(self._memory, self._dtypes, self.own)

    def view(self, path: Path, rows: int | slice = slice(None)) -> Tensor:
        """Rows of a column ``[T + 1, N, ...]``, by their place in storage: a new tensor over its memory."""
        memory = self._memory[path][rows]
        if not self._on_host:
            return memory
        if not torch.is_inference_mode_enabled():
            return typed(memory, self._dtypes[path])
        with torch.inference_mode(False):  # as in _zeros
            return typed(memory, self._dtypes[path])

    @property
    def is_full(self) -> bool:
        """Whether all T rows are written."""
        return self.count == self.num_steps

    @property
    def last_row(self) -> int:
        """Where the bootstrap row is."""
        return self.num_steps if self.start or self.is_full else self.count

    @property
    def next_row(self) -> int:
        """Where the next step goes.

        Raises:
            FullError: there is no room and the columns do not wrap.
        """
        if self.count == self.num_steps and not self.wrap:
            raise FullError(
                f"the rollout already has its {self.num_steps} steps; call finish() and clear(), or create the "
                "buffer with wrap=True to keep the newest"
            )
        return (self.start + self.count) % self.num_steps

    def detach(self) -> None:
        """Forget what was attached."""
        if self._attached:
            self._attached.clear()

    def write(self, row: int, values: Sequence[Any]) -> None:
        """Assign a checked step to a row by its place in storage: values of the first own columns, in their order."""
        if self.copier is not None:
            self.copier.write(row, values)
            return
        for tensor, value in zip(self._own, values, strict=False):
            tensor[row].copy_(value, non_blocking=True)

    def put(self, path: Path, rows: int | slice, value: Any) -> None:
        """Assign to rows of one column, by their place in storage."""
        if self._on_host and isinstance(value, Tensor):
            value = numpy_view(value.detach())
        self._memory[path][rows] = value

    def place(self, rows: Tensor) -> Tensor:
        """Where rows, counted from the oldest, lie in storage."""
        return (rows + self.start) % self.num_steps

    @property
    def live(self) -> list[Path]:
        """The columns of the present steps: own and attached ones."""
        return [path for path in self._memory if path in self.own or path in self._attached]

    def __contains__(self, path: Path) -> bool:
        """Whether the present steps have a leaf of this path."""
        return path in self.own or path in self._attached

    def below(self, path: Path) -> list[Path]:
        """The live leaves at or below a path."""
        if path in self.own or path in self._attached:
            return [path]
        return [leaf for leaf in self.live if leaf[: len(path)] == path]

    def ordered(self, path: Path) -> Tensor:
        """The written rows ``[T, N, ...]``: a view, or a copy once the ring has wrapped."""
        end = self.start + self.count
        if end <= self.num_steps:
            return self.view(path, slice(self.start, end))
        parts = slice(self.start, self.num_steps), slice(end - self.num_steps)
        return torch.cat([self.view(path, rows) for rows in parts])

    def with_last(self, path: Path) -> Tensor:
        """The written rows and the bootstrap row, ``[T + 1, N, ...]``."""
        if not self.start:
            return self.view(path, slice(self.count + 1))
        return torch.cat([self.ordered(path), self.view(path, slice(self.num_steps, None))])

    def attach(self, columns: Mapping[Path, Tensor]) -> None:
        """Write whole columns ``[T, N, ...]``, new ones where there is none of that shape and dtype.

        They count as attached once all are written: an interrupted call leaves no column half new.
        """
        self._attached -= columns.keys()
        for path, column in columns.items():
            self._fill(path, column)
        self.keep(columns)

    def keep(self, paths: Iterable[Path]) -> None:
        """Count columns, all of whose rows are written, as attached to the present steps."""
        self._attached |= {*paths} - self.own

    def drop(self, paths: Iterable[Path]) -> None:
        """Forget columns that were attached."""
        self._attached -= {*paths}

    def is_plain(self, path: Path, dtype: torch.dtype) -> bool:
        """Whether a column ``[T + 1, N]`` of this dtype has memory in RAM, and no column is nested under its name."""
        memory = self._memory.get(path)
        plain = self._on_host and memory is not None and memory.ndim == 2 and self._dtypes[path] is dtype
        return plain and sum(known[0] == path[0] for known in self._memory) == 1

    @property
    def in_one_piece(self) -> bool:
        """Whether the columns are in RAM, and the written rows lie one after another."""
        return self._on_host and self.start + self.count <= self.num_steps

    def described(self, path: Path) -> tuple[Path, tuple[int, ...], torch.dtype]:
        """The path of a column, the shape of one env's step in it, and its dtype."""
        return path, tuple(self._memory[path].shape[2:]), self._dtypes[path]

    def address(self, path: Path) -> int:
        """The address of a column in RAM; it is valid while ``layout`` is the same object."""
        return self._memory[path].ctypes.data

    def _fill(self, path: Path, column: Tensor) -> None:
        known = self._memory.get(path)
        if known is None or known.shape[2:] != column.shape[2:] or self._dtypes[path] is not column.dtype:
            made = self._zeros(tuple(column.shape[2:]), column.dtype)
            self.layout, self._dtypes[path], self._memory[path] = object(), column.dtype, made  # at once
        target = self.view(path)
        split = min(self.num_steps - self.start, self.count)
        target[self.start : self.start + split].copy_(column[:split])
        if split < self.count:
            target[: self.count - split].copy_(column[split:])


KEPT_APART = {"mask": True, "final_value": math.nan}
"""The columns that the buffer itself adds, and what they hold by default. A batch has them only on request."""


def as_size(num_steps: int, num_envs: int) -> tuple[int, int]:
    """(T, N) of a rollout.

    Raises:
        ParameterError: they are not positive.
    """
    require("RolloutBuffer", COUNT_RULE, num_steps=num_steps, num_envs=num_envs)
    return int(num_steps), int(num_envs)


SCHEMA_RULE: Rule = (lambda schema: isinstance(schema, Schema), "expected a relive.Schema")


def _are_fields(value: Any) -> bool:
    """Whether this is a mapping from names to fields."""
    named = cast("Mapping[Any, Any]", value)
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, Field) for k, v in named.items())


COLUMNS_RULE: Rule = _are_fields, "expected a mapping from names to relive.Field(...)"


class Fields:
    """The columns that a rollout has from the start, and what fits each.

    There are three kinds: the fields of a step, which the schema names; ``mask`` and ``final_value``, which the buffer
    adds to each step (``apart``); and ``further`` columns, which no step brings.

    Args:
        schema: the fields of a step.
        further: name -> field of the further columns.
        size: (T, N).
        device: where the columns live.
        every: k; the recurrent states of ``hidden`` are kept only for every k-th step.

    Raises:
        SchemaError: the schema has a field of a name that the buffer adds.
        ParameterError: the columns need more than the free memory.
    """

    schema: Schema
    """The fields of a step."""
    check: StepChecker
    """Checks a whole step."""
    paths: tuple[Path, ...]
    """The leaves of a step that have a column."""

    def __init__(
        self, schema: Schema, further: Mapping[str, Field], size: tuple[int, int], device: torch.device, every: int
    ) -> None:
        require("RolloutBuffer", SCHEMA_RULE, schema=schema)
        require("RolloutBuffer", COLUMNS_RULE, columns=further)
        for name in (*KEPT_APART, *further):
            if name in schema:
                raise SchemaError(f"field '{name}': the buffer adds this column itself; leave it out of the schema")
        (self.num_steps, self.num_envs), self.device, self.every = size, device, every
        self.sparse = frozenset({"hidden"} if every > 1 else ())
        """The fields that are kept every few steps, and so have no column ``[T + 1, N, ...]``."""
        self.further: dict[Path, Field] = {(name,): field for name, field in further.items()}
        self.apart: dict[Path, Field] = {("mask",): Field((), torch.bool)}
        value = schema.leaves.get(("value",))
        if value is not None:
            precise = value.dtype if value.dtype is torch.float64 else torch.float32
            self.apart["final_value",] = Field(value.shape, precise)
        self.require_memory(schema.leaves | self.apart | self.further)
        self.schema, self.check, self.paths = self._of(schema)

    def following(self, schema: Schema) -> dict[str, Any]:
        """The attributes of these fields once a step has those of this schema; nothing else is kept of the old one."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("whole", "_checkers")}
        return kept | dict(zip(("schema", "check", "paths"), self._of(schema), strict=True))

    def _of(self, schema: Schema) -> tuple[Schema, StepChecker, tuple[Path, ...]]:
        """The schema, and what follows from it."""
        return schema, StepChecker(schema, self.num_envs, self.device), self._paths_of(schema)

    def _paths_of(self, schema: Schema) -> tuple[Path, ...]:
        """The leaves of a schema that have a column."""
        return tuple(path for path in schema.leaves if path[0] not in self.sparse)

    @cached_property
    def whole(self) -> tuple[StepChecker, dict[str, Array]]:
        """The check of a step with the fields that the buffer adds, and these fields where they are not given."""
        added: dict[str, Any] = {name: field for (name,), field in self.apart.items()}
        defaults = {
            name: np.full((self.num_envs, *field.shape), KEPT_APART[name], numpy_dtype(field.dtype))
            for name, field in added.items()
        }
        return StepChecker(self.schema.extend(**added), self.num_envs, self.device), defaults

    @property
    def all(self) -> dict[Path, Field]:
        """The fields of every kind, with those that are kept every few steps."""
        return self.schema.leaves | self.apart | self.further

    @property
    def own(self) -> dict[Path, Field]:
        """The fields of every kind that have a column, in the order of their columns."""
        return self.own_of(self.schema)

    def own_of(self, schema: Schema) -> dict[Path, Field]:
        """The same if a step has the fields of this schema."""
        return {path: schema.leaves[path] for path in self._paths_of(schema)} | self.apart | self.further

    @property
    def further_by_name(self) -> dict[str, Field]:
        """The further columns as the buffer was given them."""
        return {name: field for (name,), field in self.further.items()}

    def sizes(self, leaves: Mapping[Path, Field]) -> dict[str, int]:
        """Bytes of each column."""
        rows, kept = self.num_steps + 1, -(-self.num_steps // self.every) + 1
        return {
            dotted(path): (kept if path[0] in self.sparse else rows) * self.num_envs * field.nbytes
            for path, field in leaves.items()
        }

    def require_memory(self, leaves: Mapping[Path, Field]) -> None:
        """Require free memory for columns before it is allocated.

        Raises:
            ParameterError: memory is short.
        """
        taken = self.sizes(leaves)
        fields = "".join(f"\n  {name}  {readable(size)}" for name, size in taken.items())
        require_free(sum(taken.values()), self.device, "the rollout", f"lower num_steps or num_envs:{fields}")

    def checked(self, name: str, value: Any) -> dict[Path, Any]:
        """The leaves ``[N, ...]`` of one field that is written on its own.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the value does not fit.
        """
        checker = self._checkers.get(name)
        if checker is None:
            raise FieldError(unknown_field(name, tuple(self._checkers), "this buffer"))
        leaves = [path for path in (*self.paths, *self.apart) if path[0] == name]
        try:
            return dict(zip(leaves, checker({name: value}), strict=True))
        except (RuntimeError, TypeError):
            refuse_unreadable({name: value})
            raise

    @cached_property
    def _checkers(self) -> dict[str, StepChecker]:
        """A checker for each field that may be written on its own."""
        specs: dict[str, Any] = {name: self.schema[name] for name in self.schema.names if name not in self.sparse}
        specs |= {name: field for (name,), field in self.apart.items()}
        return {name: StepChecker(Schema({name: spec}), self.num_envs, self.device) for name, spec in specs.items()}


Name = str | Path


ADVANTAGE: Path = ("advantage",)


class NamedColumns:
    """The columns of a rollout by name, of all kinds: those from the start, and those attached to it."""

    def __init__(self, fields: Fields, columns: Columns) -> None:
        self._fields, self._columns = fields, columns

    def keys(self) -> tuple[str, ...]:
        """The top-level names: the schema's, ``mask``, ``final_value``, further and attached ones."""
        return tuple(dict.fromkeys(path[0] for path in self._columns.live))

    def __contains__(self, name: Name) -> bool:
        return bool(self._columns.below(_path(name)))

    def __getitem__(self, name: Name) -> Any:
        """A column ``[T, N, ...]`` of the steps written so far, oldest first; a TensorDict if it is nested."""
        path = _path(name)
        leaves = self.leaves(path)
        if leaves == [path]:
            return self._columns.ordered(path)
        inner = {leaf[len(path) :]: self._columns.ordered(leaf) for leaf in leaves}
        return as_tensordict(inner, (self._columns.count, self._columns.num_envs))

    def leaves(self, path: Path) -> list[Path]:
        """The leaves at or below a path.

        Raises:
            FieldError: there is none, or only some of its rows are kept.
        """
        leaves = self._columns.below(path)
        if path[0] in self._fields.sparse:
            every = self._fields.every
            raise FieldError(f"field 'hidden': kept every {every} steps; sequences() and chunks() give it")
        if not leaves:
            raise FieldError(unknown_field(path, self.keys(), "this rollout"))
        return leaves

    # -- attaching ----------------------------------------------------------------------------------------------

    def attach(self, columns: Mapping[Any, Any]) -> None:
        """Attach columns ``[T, N, ...]`` by name, or overwrite them: all, or none if one does not fit.

        Raises:
            ShapeError, DTypeError, DeviceError, FieldError: one does not fit.
        """
        self._columns.attach({_path(name): self._fitted(_path(name), column) for name, column in columns.items()})

    def _fitted(self, path: Path, column: Any) -> Tensor:
        """A column as it is stored, or an error."""
        device, front = self._columns.device, (self._columns.count, self._columns.num_envs)
        refuse_unreadable(column, path)
        refuse_masked(column, f"column '{dotted(path)}'")
        try:
            given = column.detach() if isinstance(column, Tensor) else torch.as_tensor(column).to(device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(f"column '{dotted(path)}': expected a tensor, an array or numbers ({error})") from error
        if given.device != device:
            raise DeviceError(f"column '{dotted(path)}': the buffer is on {device}, got {given.device}")
        expected = (*front, *given.shape[2:])
        if path in self._columns.own:
            target = self._columns.view(path)
            expected = (*front, *target.shape[2:])
            check_castable(given, target.dtype, dotted(path))
            given = given.to(target.dtype)
        elif any(path[:i] in self._columns.live for i in range(1, len(path))):
            outer = next(path[:i] for i in range(1, len(path)) if path[:i] in self._columns.live)
            raise FieldError(
                f"column '{dotted(path)}': '{dotted(outer)}' is a column without members; pick another name"
            )
        elif path not in self._columns.live and path in self:
            raise FieldError(f"column '{dotted(path)}' is nested; set its members, such as {self.leaves(path)[0]}")
        if tuple(given.shape) != expected:
            raise ShapeError(
                f"column '{dotted(path)}': expected {expected} (steps, envs, ...), got {tuple(given.shape)}"
            )
        return given

    # -- which columns, which rows ------------------------------------------------------------------------------

    def wanted(self, fields: tuple[str, ...] | None) -> list[Path]:
        """The leaves of a batch with these columns; by default all but the bookkeeping.

        Raises:
            FieldError: an unknown column, or no names.
        """
        names = tuple(name for name in self.keys() if name not in KEPT_APART) if fields is None else fields
        if not names or isinstance(names, str):
            raise FieldError(f"fields={fields!r}: pass a tuple of column names, such as ('obs', 'action')")
        return [leaf for name in names for leaf in self.leaves((name,))]

    def wanted_of_steps(self, fields: tuple[str, ...] | None) -> list[Path]:
        """The same for sequences, without ``hidden``, ``is_start`` and ``mask``, which every sequence has."""
        anyway = "hidden", "is_start", "mask"
        if isinstance(fields, tuple) and fields:
            fields = tuple(name for name in fields if name not in anyway)
            if not fields:
                return []
        return [path for path in self.wanted(fields) if path[0] not in anyway]

    @property
    def steps(self) -> int:
        """Time steps written so far."""
        return self._columns.count

    @property
    def is_finished(self) -> bool:
        """Whether there is an advantage."""
        return ADVANTAGE in self._columns

    @property
    def in_ram(self) -> Columns | None:
        """The columns, if they are in RAM and the written rows lie one after another."""
        return self._columns if self._columns.in_one_piece else None

    def require_steps(self) -> None:
        """Refuse to read an empty rollout.

        Raises:
            EmptyError: no step was added.
        """
        if not self._columns.count:
            raise EmptyError("the rollout has no steps; call add() or let a Collector fill it")

    def has_mask(self) -> bool:
        """Whether any step is not real."""
        mask = self._columns.ordered(("mask",))
        return not (numpy_view(mask) if mask.is_cpu else mask).all()  # NumPy tests many flags at once

    def has_truncations(self) -> bool:
        """Whether a final value may be needed."""
        truncated = self._columns.ordered(("truncated",))
        return bool((numpy_view(truncated) if truncated.is_cpu else truncated).any())

    def real_rows(self) -> Tensor | None:
        """The flat rows ``t * N + n`` of the real transitions; None if all are."""
        return self["mask"].flatten().nonzero().squeeze(1) if self.has_mask() else None

    def count(self, rows: Tensor | None) -> int:
        """The number of real transitions, given the flat rows that :meth:`real_rows` found."""
        return self._columns.count * self._columns.num_envs if rows is None else len(rows)

    def ordered(self, paths: list[Path]) -> dict[Path, Tensor]:
        """Columns ``[T, N, ...]`` of the steps written so far, oldest first."""
        return {path: self._columns.ordered(path) for path in paths}

    # -- as TensorDicts -----------------------------------------------------------------------------------------

    def batch(self, leaves: Mapping[Path, Tensor], size: tuple[int, ...]) -> TensorDict:
        """A batch; before ``finish``, its error for a missing advantage names the columns that there are."""
        batch = as_tensordict(leaves, size)
        return batch if ADVANTAGE in self._columns else unfinished(batch)

    def block(self) -> TensorDict:
        """All columns with their bootstrap row as views ``[T + 1, N]``, written or not."""
        leaves = {path: self._columns.view(path) for path in self._columns.live}
        return self.batch(leaves, (self._columns.num_steps + 1, self._columns.num_envs))

    def last(self) -> TensorDict:
        """The bootstrap row as views ``[N]``."""
        row = self._columns.last_row
        leaves = {path: self._columns.view(path, row) for path in self._fields.paths}
        return as_tensordict(leaves, (self._columns.num_envs,))

    def data(self) -> TensorDict:
        """All columns of the steps written so far, ``[T, N]``."""
        return self.batch(self.ordered(self._columns.live), (self._columns.count, self._columns.num_envs))


def _path(name: Name) -> Path:
    """The path of a column.

    Raises:
        FieldError: ``name`` is neither text nor a tuple of texts.
    """
    if isinstance(name, str):
        return (name,)
    if not isinstance(cast("object", name), tuple) or not name or not is_names(name):
        raise FieldError(f"a column's name is text or a path such as ('obs', 'camera'), got {name!r:.200}")
    return name


def unfinished(batch: TensorDict) -> TensorDict:
    """The batch, with an error for a missing column that names those that there are.

    TensorDict asks a private method for its error. Where it does not, the error is TensorDict's own.
    """
    cast("Any", batch)._default_get = partial(_missing, tuple(map(str, batch.keys())))
    return batch


def _missing(known: tuple[str, ...], key: Any, default: Any = None) -> Any:
    """Stand in for TensorDict's own method: the default of a type of this name stands for no default."""
    if type(default).__name__ != "_NoDefault":
        return default
    raise KeyError(unknown_field(key, known, "this batch"))
