"""NamedColumns: the columns of a rollout by their names, as a user reads, attaches and asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..batches.tensordicts import as_tensordict
from ..errors import DeviceError, EmptyError, FieldError, ShapeError
from ..parameters import is_names
from ..steps.arrays import check_castable, numpy_view, refuse_masked
from ..steps.checker import refuse_unreadable
from ..steps.schema import unknown_field
from ..steps.trees import Path, dotted
from .columns import Columns
from .fields import KEPT_APART, Fields

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ADVANTAGE", "Name", "NamedColumns", "unfinished"]


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
