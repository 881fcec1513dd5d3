"""Arrays, and dictionaries of one level of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from torch import Tensor

__all__ = ["mapped", "mapped_with"]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of an array, or of each in a dictionary."""
    if type(value) in (Tensor, np.ndarray) or not isinstance(value, Mapping):
        return function(value)
    return {key: function(member) for key, member in cast("Mapping[str, Any]", value).items()}


def mapped_with(function: Callable[[Any, list[Any]], Any], value: Any, others: list[Any]) -> Any:
    """The same with what is in its place in ``others``."""
    if not isinstance(value, Mapping):
        return function(value, others)
    members = cast("Mapping[str, Any]", value)
    return {key: function(member, [other[key] for other in others]) for key, member in members.items()}
