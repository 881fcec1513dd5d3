"""Errors that belong to relive and to the replaced libraries at once."""

from __future__ import annotations

from ..errors import FieldError, SchemaError, ShapeError

__all__ = ["StepError", "StepFieldError", "StepShapeError"]


class StepError(SchemaError, RuntimeError):
    """A step or a column does not fit the storage. Also a RuntimeError, which torch raises inside the libraries."""


class StepFieldError(StepError, FieldError):
    """A field of a step is missing or unknown."""


class StepShapeError(StepError, ShapeError):
    """The shape of a step or of a column is not the expected one."""
