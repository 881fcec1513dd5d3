"""Columns: the contents of a rollout, one column ``[T + 1, N, ...]`` for each field, read and written by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..batches import as_batch
from ..errors import DeviceError, EmptyError, FieldError, FullError, SchemaError, ShapeError
from ..memory.allocator import zeroed
from ..memory.copier import BoundedCache, StepCopier, copy_all
from ..memory.estimate import readable, require_free
from ..memory.layout import typed
from ..parameters import Rule, is_names, require
from ..steps.arrays import Array, Leaf, apart, check_castable, numpy_dtype, numpy_view, refuse_masked, to_tensor
from ..steps.checker import StepChecker, refuse_unreadable
from ..steps.schema import Field, Path, Schema, Spec, dotted, unknown_field

K = TypeVar("K")
V = TypeVar("V", bound=Leaf)
Name = str | Path

ADVANTAGE: Path = ("advantage",)

BOOKKEEPING: dict[str, bool | float] = {"mask": True, "final_value": math.nan}
"""The fields that the buffer adds to each step, and their defaults. A batch has them only on request."""

WATCHED = {"reward": "env", "value": "policy"}
"""The fields that have to be finite in debug mode, and the part of a user's code that computes them."""

SCHEMA_RULE: Rule = (lambda schema: isinstance(schema, Schema), "expected a relive.Schema")


def _are_fields(value: Any) -> bool:
    """True if this is a mapping from names to fields."""
    named = cast("Mapping[Any, Any]", value)
    return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, Field) for k, v in named.items())


COLUMNS_RULE: Rule = _are_fields, "expected a mapping from names to relive.Field(...)"


class Columns:
    """The columns ``[T + 1, N, ...]`` of a rollout: a ring of T rows in time, and after the newest the bootstrap row.

    There are four kinds:

    - the fields of a step, which the schema names;
    - ``mask`` and ``final_value``, which the buffer adds to each step (``bookkeeping``);
    - ``further`` columns, which no step brings;
    - attached columns, such as advantages. They belong to the present steps and leave with them.

    The first three exist from the start (``own``).

    :meth:`view`, :meth:`write` and :meth:`put` take the place of a row in storage. All other methods count rows from
    the oldest. After 6 steps in columns that wrap, with T = 4, places 0 to 3 hold the steps 4, 5, 2 and 3, ``start`` is
    2, and the bootstrap row is at place 4.

    On the CPU the memory is NumPy's, and every tensor that is handed out is a new one over it. ``share_memory_()`` and
    ``torch.multiprocessing`` move the memory of a tensor: they move that tensor alone, never the columns.

    Args:
        schema: the fields of a step.
        further: name -> field of the further columns.
        size: (T, N).
        device: where the columns live.
        wrap: True if a new step replaces the oldest once all T rows are written.

    Raises:
        SchemaError: the schema has a field of a name that the buffer adds.
        ParameterError: the columns need more than the free memory.
    """

    num_steps: int
    num_envs: int
    device: torch.device
    wrap: bool
    layout: object

    def __init__(
        self,
        schema: Schema,
        further: Mapping[str, Field],
        size: tuple[int, int],
        device: torch.device,
        wrap: bool = False,
    ) -> None:
        require("RolloutBuffer", SCHEMA_RULE, schema=schema)
        require("RolloutBuffer", COLUMNS_RULE, columns=further)
        for name in (*BOOKKEEPING, *further):
            if name in schema:
                raise SchemaError(f"field '{name}': the buffer adds this column itself; leave it out of the schema")
        (self.num_steps, self.num_envs), self.device, self.wrap = size, device, wrap
        self._on_host = device.type == "cpu"
        self.further: dict[Path, Field] = {(name,): field for name, field in further.items()}
        self.bookkeeping: dict[Path, Field] = {("mask",): Field((), torch.bool)}
        value = schema.leaves.get(("value",))
        if value is not None:
            # At least float32, as returns are computed in it.
            precise = value.dtype if value.dtype is torch.float64 else torch.float32
            self.bookkeeping["final_value",] = Field(value.shape, precise)
        self.require_memory(schema.leaves | self.bookkeeping | self.further)
        self._memory: dict[Path, Any] = {}
        self._dtypes: dict[Path, torch.dtype] = {}
        self._attached: set[Path] = set()
        """The attached columns; always the same set, as :meth:`attaching` refers to it."""
        self.own = frozenset[Path]()
        """The columns that exist from the start."""
        self.start = self.count = 0
        """The place of the oldest row, and the number of rows."""
        self._preset_at: dict[Path, int] = {}
        """How often torch had written to a column of bookkeeping when all its rows had the default; on devices."""
        self._set_schema(schema)

    # -- memory -------------------------------------------------------------------------------------------------------

    def extend(self, schema: Schema) -> None:
        """Have the fields of ``schema``; new columns begin as zeros, the others keep their memory.

        Either all attributes change or none, since a step's values are told by their position.
        """
        made = Columns.__new__(Columns)
        made.__dict__.update(self.__dict__)
        made._set_schema(schema)
        self.__dict__ = made.__dict__  # in one line

    def _set_schema(self, schema: Schema) -> None:
        """Set the attributes that depend on the schema. Dicts are replaced, not changed, as :meth:`extend` needs it."""
        self.schema = schema
        """The fields of a step."""
        self.paths: tuple[Path, ...] = tuple(schema.leaves)
        """The leaves of a step."""
        self.check: StepChecker = StepChecker(schema, self.num_envs, self.device)
        """Checks a whole step."""
        self._checkers: dict[str, StepChecker] | None = None
        leaves = {path: schema.leaves[path] for path in self.paths} | self.bookkeeping | self.further
        memory = {
            path: self._memory[path] if path in self.own else self._zeros(field.shape, field.dtype)
            for path, field in leaves.items()
        }
        self._memory = memory | {path: self._memory[path] for path in self._attached}
        self._dtypes = self._dtypes | {path: field.dtype for path, field in leaves.items()}
        self.own: frozenset[Path] = frozenset(leaves)
        self._wanted = BoundedCache[tuple[tuple[Name, ...] | None, frozenset[Path]], list[Path]]()
        """The answers of :meth:`select_paths`, by the columns that were asked for and those that were attached."""
        self._note_memory()

    # What changes the memory of columns changes it in one line, for the same reason: an exception in between would have
    # the core write to memory that is gone.
    def _note_memory(self) -> None:
        """Note where the own columns lie: on the CPU nobody else can move them."""
        self.layout = object()
        """A new object whenever a column gets new memory: addresses are valid while it is the same object."""
        paths = [path for path in self._memory if path in self.own]
        self._own_memory: list[Any] = [self._memory[path] for path in paths]
        self._defaults: dict[str, Array] = {}
        """On the CPU, the bookkeeping ``[N, ...]`` of a step that brings none."""
        self.copier: StepCopier | None = self._copier() if self._on_host else None
        """Writes steps on the CPU, mask and final value included, which a step may leave out; None on a device."""

    def _copier(self) -> StepCopier:
        """A copier that writes whole rows: what a row held before never matters."""
        self._defaults = {
            name: np.full((self.num_envs, *field.shape), BOOKKEEPING[name], numpy_dtype(field.dtype))
            for (name,), field in self.bookkeeping.items()
        }
        leaves = {path: self.schema.leaves[path] for path in self.paths} | self.bookkeeping
        targets = [self._memory[path] for path in leaves]
        watched = [(name,) for name in WATCHED]
        return StepCopier(leaves, targets, self.num_envs, watched, [*self._defaults.values()])

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Leaf:
        """Memory for one column."""
        full = self.num_steps + 1, self.num_envs, *shape
        if self._on_host:
            return zeroed(math.prod(full) * dtype.itemsize).view(numpy_dtype(dtype)).reshape(full)
        with torch.inference_mode(False):  # a tensor made there could never be written to outside of it
            return torch.zeros(full, dtype=dtype, device=self.device)

    def sizes(self, leaves: Mapping[Path, Field]) -> dict[str, int]:
        """Bytes of each column."""
        rows = (self.num_steps + 1) * self.num_envs
        return {dotted(path): rows * field.nbytes for path, field in leaves.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all columns that exist from the start."""
        return sum(self.sizes(self.schema.leaves | self.bookkeeping | self.further).values())

    def require_memory(self, leaves: Mapping[Path, Field]) -> None:
        """Require free memory for columns before it is allocated.

        Raises:
            ParameterError: memory is short.
        """
        sizes = self.sizes(leaves)
        fields = "".join(f"\n  {name}  {readable(size)}" for name, size in sizes.items())
        require_free(sum(sizes.values()), self.device, "the rollout", f"lower num_steps or num_envs:{fields}")

    def __getstate__(self) -> dict[str, object]:
        """Arrays, which pickle copies; tensors would be moved, or on a device handed over, by multiprocessing."""
        kept = self.__dict__.items()
        state = {name: value for name, value in kept if name not in ("_own_memory", "_defaults", "copier")}
        if not self._on_host:
            state["_memory"] = {path: numpy_view(column.cpu()) for path, column in self._memory.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._preset_at = {}
        if not self._on_host:
            columns = {path: typed(array, self._dtypes[path]) for path, array in self._memory.items()}
            self._memory = {path: column.to(self.device) for path, column in columns.items()}
        self._note_memory()

    def in_place(self, read: dict[str, torch.dtype], written: dict[str, torch.dtype]) -> list[Any] | None:
        """The memory of columns ``[T + 1, N]`` of these dtypes; None if one is missing, nested or another.

        The memory is the columns' while ``layout`` is the same object. Those that are ``written`` get some first if
        they had none.
        """
        found, names = list[Any](), [path[0] for path in self._memory]
        for name, dtype in (read | written).items():
            if name in written and name not in names:
                self._make((name,), (), dtype)
                names.append(name)
            memory = self._memory.get((name,))
            if memory is None or memory.ndim != 2 or self._dtypes[name,] is not dtype or names.count(name) != 1:
                return None
            found.append(memory)
        return found

    def memory_of(self, path: Path) -> Any:
        """The memory ``[T + 1, N, ...]`` of a column: an array in RAM, or a tensor; while ``layout`` is one object."""
        return self._memory[path]

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if all T rows are written."""
        return self.count == self.num_steps

    @property
    def in_one_piece(self) -> bool:
        """True if the columns are in RAM, and the written rows lie one after another."""
        return self._on_host and self.start + self.count <= self.num_steps

    @property
    def last_row(self) -> int:
        """Where the bootstrap row is: after the newest row, or behind the ring once that has no free row."""
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

    def place(self, rows: Tensor) -> Tensor:
        """Where rows, counted from the oldest, lie in storage."""
        return (rows + self.start) % self.num_steps

    def view(self, path: Path, rows: int | slice = slice(None)) -> Tensor:
        """Rows of a column ``[T + 1, N, ...]``, by their place in storage: a new tensor over its memory."""
        memory = self._memory[path][rows]
        if not self._on_host:
            return memory
        if not torch.is_inference_mode_enabled():
            return typed(memory, self._dtypes[path])
        with torch.inference_mode(False):  # as in _zeros
            return typed(memory, self._dtypes[path])

    def ordered(self, path: Path) -> Tensor:
        """The written rows ``[T, N, ...]``: a view, or a copy once the ring has wrapped."""
        end = self.start + self.count
        if end <= self.num_steps:
            return self.view(path, slice(self.start, end))
        # The oldest rows lie up to the end of the ring, the newest from its beginning on.
        parts = slice(self.start, self.num_steps), slice(end - self.num_steps)
        return torch.cat([self.view(path, rows) for rows in parts])

    def rows(self, path: Path) -> Array:
        """The written rows of a column in RAM as ``[T * N, ...]``, bit for bit and in one piece: a view or a copy."""
        if self.in_one_piece:
            array = self._memory[path][self.start : self.start + self.count]
        else:
            array = numpy_view(self.ordered(path))
        return array.reshape(self.count * self.num_envs, *array.shape[2:])

    def sources(
        self, paths: Sequence[Path]
    ) -> tuple[tuple[tuple[Path, tuple[int, ...], torch.dtype], ...], dict[Path, Array]]:
        """Columns in RAM as batches are read of them: path, shape and dtype, and :meth:`rows`, of each."""
        memory, dtypes, total = self._memory, self._dtypes, self.count * self.num_envs
        leaves = tuple([(path, tuple(memory[path].shape[2:]), dtypes[path]) for path in paths])
        if not self.in_one_piece:
            return leaves, {path: self.rows(path) for path in paths}
        written = slice(self.start, self.start + self.count)
        return leaves, {path: memory[path][written].reshape(total, *shape) for path, shape, _ in leaves}

    def with_last(self, path: Path) -> Tensor:
        """The written rows and the bootstrap row, ``[T + 1, N, ...]``."""
        if not self.start:
            return self.view(path, slice(self.count + 1))
        return torch.cat([self.ordered(path), self.view(path, slice(self.num_steps, None))])

    def write(self, row: int, values: Sequence[Any], bookkeeping: Mapping[str, Leaf]) -> None:
        """Write a whole row by its place in storage: a checked step, with what it brings of the bookkeeping."""
        if self.copier is not None:
            self.copier.write(row, (*values, *{**self._defaults, **bookkeeping}.values()))
            return
        bookkeeping = self.apart(bookkeeping)
        # the fields of a step are the first ones
        copy_all((tensor[row] for tensor in self._own_memory), apart(values, self._own_memory))
        self.write_bookkeeping(row, bookkeeping)

    def write_bookkeeping(self, rows: int | slice, given: Mapping[str, Leaf]) -> None:
        """Write the mask and the final values of rows: those ``given``, or the defaults where others may stand."""
        everywhere = rows == slice(None)
        for path in self.bookkeeping:
            (name,) = path
            if everywhere or name in given or not self._is_preset(path):
                self.put(path, rows, given.get(name, BOOKKEEPING[name]))
            if everywhere and not self._on_host:
                self._preset_at[path] = self._memory[path]._version

    def apart(self, values: Mapping[K, V]) -> dict[K, V]:
        """Checked values, copied where they lie in these columns: all are read before any is written."""
        return dict(zip(values, apart(values.values(), [*self._memory.values()]), strict=True))

    def put(self, path: Path, rows: int | slice, value: Leaf | float) -> None:
        """Assign to rows of one column, by their place in storage."""
        if self._on_host and isinstance(value, Tensor):
            value = numpy_view(value.detach())  # the bits, where NumPy lacks the dtype
        self._memory[path][rows] = value

    # -- checks of values ---------------------------------------------------------------------------------------------

    def checked(self, name: str, value: object) -> dict[Path, Leaf]:
        """The leaves ``[N, ...]`` of one field that is written by itself.

        Raises:
            FieldError, ShapeError, DTypeError, DeviceError: the value does not fit.
        """
        checkers = self._checkers
        if checkers is None:
            specs: dict[str, Spec] = {x: self.schema[x] for x in self.schema.names}
            specs |= {x: field for (x,), field in self.bookkeeping.items()}
            checkers = {x: StepChecker(Schema({x: spec}), self.num_envs, self.device) for x, spec in specs.items()}
            self._checkers = checkers
        if name not in checkers:
            raise FieldError(unknown_field(name, tuple(checkers), "this buffer"))
        leaves = [path for path in (*self.paths, *self.bookkeeping) if path[0] == name]
        try:
            return dict(zip(leaves, checkers[name]({name: value}), strict=True))
        except (RuntimeError, TypeError):
            refuse_unreadable({name: value})
            raise

    # -- names --------------------------------------------------------------------------------------------------------

    @property
    def present(self) -> list[Path]:
        """The columns of the present steps: own and attached ones."""
        return [path for path in self._memory if path in self.own or path in self._attached]

    def keys(self) -> tuple[str, ...]:
        """The top-level names of the present columns: the schema's, ``mask``, ``final_value``, further and attached."""
        return tuple(dict.fromkeys([path[0] for path in self.present]))

    def __contains__(self, name: Name) -> bool:
        return bool(self.leaves_under(_path(name)))

    def __getitem__(self, name: Name) -> Any:
        """A column ``[T, N, ...]`` of the steps written so far, oldest first; a batch if it is nested."""
        path = _path(name)
        leaves = self.leaves(path)
        if leaves == [path]:
            return self.ordered(path)
        inner = {leaf[len(path) :]: self.ordered(leaf) for leaf in leaves}
        return as_batch(inner)

    def leaves_under(self, path: Path) -> list[Path]:
        """The present leaves at or below a path."""
        if path in self.own or path in self._attached:
            return [path]
        return [leaf for leaf in self.present if leaf[: len(path)] == path]

    def leaves(self, path: Path) -> list[Path]:
        """The leaves at or below a path.

        Raises:
            FieldError: there is none.
        """
        leaves = self.leaves_under(path)
        if not leaves:
            message = unknown_field(path, self.keys(), "this rollout")
            members = [leaf[: leaf.index(path[-1], 1) + 1] for leaf in self.present if path[-1] in leaf[1:]]
            raise FieldError(f"{message}. A member is named by its path, {members[0]}" if members else message)
        return leaves

    def select_paths(self, fields: tuple[Name, ...] | None) -> list[Path]:
        """The leaves of a batch with these columns, each once; by default all but the bookkeeping.

        Raises:
            FieldError: an unknown column, or no names.
        """
        key = fields, frozenset(self._attached)
        try:
            found = self._wanted.get(key)
        except TypeError:  # it cannot be hashed, as names and tuples of them can
            return self._named(fields)
        return self._wanted.keep(key, self._named(fields)) if found is None else found

    def _named(self, fields: tuple[Name, ...] | None) -> list[Path]:
        """The leaves of :meth:`select_paths`, found by their names."""
        if fields is None and (leaves := [path for path in self.present if path[0] not in BOOKKEEPING]):
            return leaves
        if not fields or isinstance(fields, str):
            raise FieldError(f"fields={fields!r}: pass a tuple of column names, such as ('obs', 'action')")
        return list(dict.fromkeys([leaf for name in fields for leaf in self.leaves(_path(name))]))

    def select_sequence_paths(self, fields: tuple[Name, ...] | None) -> list[Path]:
        """The leaves of a batch of sequences, without ``hidden``, ``is_start`` and ``mask``, which all of them have."""
        always = "hidden", "is_start", "mask"
        if isinstance(fields, tuple) and fields:
            fields = tuple(name for name in fields if _path(name)[0] not in always)
            if not fields:
                return []
        return [path for path in self.select_paths(fields) if path[0] not in always]

    # -- attached columns ---------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """True if there is an advantage."""
        return ADVANTAGE in self.own or ADVANTAGE in self._attached

    def attach(self, columns: Mapping[Any, object]) -> None:
        """Attach columns ``[T, N, ...]`` by name, or overwrite them: all, or none if one does not fit.

        Raises:
            ShapeError, DTypeError, DeviceError, FieldError: one does not fit.
        """
        fitted = {_path(name): self._fitted(_path(name), column) for name, column in columns.items()}
        fitted = self.apart(fitted)  # a column may be another one, or itself a step further
        # They count as attached once all are written: an interrupted call leaves no column half new.
        self._attached.difference_update(fitted)
        for path, column in fitted.items():
            self._fill(path, column)
        self.mark_attached(fitted)

    def _fitted(self, path: Path, column: object) -> Tensor:
        """A column as it is stored, or an error."""
        refuse_unreadable(column, path)
        refuse_masked(column, f"column '{dotted(path)}'")
        try:
            fitted = column.detach() if isinstance(column, Tensor) else to_tensor(column).to(self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(f"column '{dotted(path)}': expected a tensor, an array or numbers ({error})") from error
        if fitted.device != self.device:
            raise DeviceError(f"column '{dotted(path)}': the buffer is on {self.device}, got {fitted.device}")
        expected = (self.count, self.num_envs, *fitted.shape[2:])
        if path in self.own:
            dtype = self._dtypes[path]
            expected = (self.count, self.num_envs, *self._memory[path].shape[2:])
            check_castable(fitted, dtype, dotted(path))
            fitted = fitted.to(dtype)
        elif any(path[:i] in self.present for i in range(1, len(path))):
            outer = next(path[:i] for i in range(1, len(path)) if path[:i] in self.present)
            raise FieldError(
                f"column '{dotted(path)}': '{dotted(outer)}' is a column without members; pick another name"
            )
        elif path not in self._attached and self.leaves_under(path):
            raise FieldError(f"column '{dotted(path)}' is nested; set its members, such as {self.leaves(path)[0]}")
        if tuple(fitted.shape) != expected:
            raise ShapeError(
                f"column '{dotted(path)}': expected {expected} (steps, envs, ...), got {tuple(fitted.shape)}"
            )
        return fitted

    def _fill(self, path: Path, column: Tensor) -> None:
        """Write a whole column, into new memory if it had none of this shape and dtype."""
        memory = self._memory.get(path)
        if memory is None or memory.shape[2:] != column.shape[2:] or self._dtypes[path] is not column.dtype:
            self._make(path, tuple(column.shape[2:]), column.dtype)
        target = self.view(path)
        split = min(self.num_steps - self.start, self.count)  # the rows before the end of the ring
        target[self.start : self.start + split].copy_(column[:split])
        if split < self.count:
            target[: self.count - split].copy_(column[split:])

    def _make(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """New memory for a column that is none of the present steps' yet."""
        made = self._zeros(shape, dtype)
        # In one line: after an interrupt, whoever noted the old address must see another layout.
        self.layout, self._dtypes[path], self._memory[path] = object(), dtype, made

    def mark_attached(self, paths: Iterable[Path]) -> None:
        """Count columns, all of whose rows are written, as attached to the present steps."""
        self._attached.update({*paths} - self.own)

    def attaching(self, paths: Iterable[Path]) -> Callable[[], object]:
        """:meth:`mark_attached` of these columns as a call of its own, while ``layout`` is the same object."""
        return partial(self._attached.update, {*paths} - self.own)

    def drop(self, paths: Iterable[Path]) -> None:
        """Forget columns that were attached."""
        self._attached.difference_update(paths)

    def detach(self) -> None:
        """Forget all columns that were attached."""
        if self._attached:
            self._attached.clear()

    # -- which steps are real -----------------------------------------------------------------------------------------

    def require_steps(self) -> None:
        """Refuse to read an empty rollout.

        Raises:
            EmptyError: no step was added.
        """
        if not self.count:
            raise EmptyError("the rollout has no steps; call add() or let a Collector fill it")

    @property
    def is_real(self) -> bool:
        """True if all steps are known to be real without asking a device."""
        return self._is_preset(("mask",))

    def _is_preset(self, path: Path) -> bool:
        """True if all rows of this column of bookkeeping have the default, as far as torch counts who writes to it."""
        written = self._preset_at.get(path)
        return written is not None and written == self._memory[path]._version

    def forget_preset_final_values(self) -> None:
        """Final values may be written, or were, by what torch does not count."""
        self._preset_at.pop(("final_value",), None)

    def has_mask(self) -> bool:
        """True if any step is not real; waits for a device unless :attr:`is_real`."""
        return not self.is_real and not self.flags(("mask",)).all()

    def has_truncations(self) -> bool:
        """True if any step was truncated, so that its final value is read."""
        return bool(self.flags(("truncated",)).any())

    def flags(self, path: Path) -> Leaf:
        """The written rows ``[T, N]`` of a column of flags: in RAM an array, as NumPy tests many at once."""
        return self.rows(path).reshape(self.count, self.num_envs) if self._on_host else self.ordered(path)

    def real_rows(self) -> Tensor | None:
        """The flat rows ``t * N + n`` of the real transitions; None if all are."""
        if self._on_host:
            mask, end = self._memory["mask",], self.start + self.count
            # ``all()`` comes to this, by way of a function in Python
            if np.logical_and.reduce(mask[self.start : end], None) and (
                end <= self.num_steps or np.logical_and.reduce(mask[: end - self.num_steps], None)
            ):
                return None
        elif self.is_real:
            return None
        rows = self["mask"].flatten().nonzero().squeeze(1)
        return rows if len(rows) < self.count * self.num_envs else None

    def num_real(self, rows: Tensor | None) -> int:
        """The number of real transitions, given the flat rows that :meth:`real_rows` returned."""
        return self.count * self.num_envs if rows is None else len(rows)

    # -- batches ------------------------------------------------------------------------------------------------------

    def select(self, paths: Iterable[Path]) -> dict[Path, Tensor]:
        """Columns ``[T, N, ...]`` of the steps written so far, oldest first."""
        return {path: self.ordered(path) for path in paths}


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
