"""Errors that are ours and the other libraries' at once."""

from __future__ import annotations

from ..errors import ShapeError

__all__ = ["StepError"]


class StepError(ShapeError, RuntimeError):
    """A step does not fit: relive's error, and a RuntimeError, as torch raises it inside the libraries."""
