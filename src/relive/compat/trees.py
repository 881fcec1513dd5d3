"""Functions of each array in a dictionary, in nested dictionaries, or in a TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
from torch import Tensor

from ..steps.trees import Path

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["leaves_of", "mapped", "mapped_leaves"]


@overload
def mapped(function: Callable[[Any], Any], value: Any) -> Any: ...
@overload
def mapped(function: Callable[[Any, Any], Any], value: Any, other: Any, /) -> Any: ...
@overload
def mapped(function: Callable[..., Any], value: Any, *others: Any) -> Any: ...
def mapped(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """``function(value, *others)``; if ``value`` is a dictionary, that of each member with those of the same name."""
    if type(value) in (Tensor, np.ndarray) or not isinstance(value, Mapping):
        return function(value, *others)
    members = cast("Mapping[str, Any]", value).items()
    if not others:
        return {key: function(member) for key, member in members}
    return {key: function(member, *[other[key] for other in others]) for key, member in members}


def mapped_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``function`` of each leaf of mappings or TensorDicts at any depth, as nested dictionaries."""
    if hasattr(tree, "items"):  # asked of a TensorDict, single members would take longer
        return {key: mapped_leaves(function, member) for key, member in tree.items()}
    return function(tree)


def leaves_of(data: TensorDict) -> dict[Path, Any]:
    """Everything that a TensorDict holds at its leaves, by path."""
    found: dict[Path, Any] = {}
    leaves: Any = data.items(include_nested=True, leaves_only=True)
    for path, leaf in leaves:
        found[path if path.__class__ is tuple else (path,)] = leaf
    return found
