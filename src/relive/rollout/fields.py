"""Fields: which columns a rollout has from the start, what fits each, and how much memory they take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from ..errors import FieldError, SchemaError
from ..memory.estimate import readable, require_free
from ..parameters import COUNT_RULE, Rule, require
from ..steps.arrays import Array, numpy_dtype
from ..steps.checker import StepChecker, refuse_unreadable
from ..steps.schema import Field, Schema, unknown_field
from ..steps.trees import Path, dotted

__all__ = ["KEPT_APART", "Fields", "as_size"]


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
