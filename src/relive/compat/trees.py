"""Arrays, and dictionaries of one level of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from torch import Tensor

__all__ = ["mapped"]


def mapped(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """``function`` of an array, or of each in a dictionary; and of what is in its place in ``others``."""
    if type(value) in (Tensor, np.ndarray) or not isinstance(value, Mapping):
        return function(value, *others)
    members = cast("Mapping[str, Any]", value)
    return {key: function(member, *(other[key] for other in others)) for key, member in members.items()}
