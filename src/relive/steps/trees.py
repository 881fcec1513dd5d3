"""Nested fields: a path names a leaf; these functions turn paths into nested dicts and back, and map over leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from torch import Tensor

__all__ = ["Path", "descend", "dotted", "map_leaves", "nest"]


Path: TypeAlias = tuple[str, ...]
"""The keys that lead to a leaf: ("obs",), ("obs", "camera"), ("hidden", "0")."""


def dotted(path: Path | str) -> str:
    """A path joined by dots: obs.camera. A name that is not text, which a message has to show, comes as its repr."""
    if not isinstance(cast("object", path), tuple | list):
        return path if isinstance(path, str) else repr(path)
    return ".".join(key if isinstance(cast("object", key), str) else repr(key) for key in path)


def descend(tree: Any, inner: Path) -> Any:
    """The leaf at a path of nested mappings and tuples."""
    for key in inner:
        if tree.__class__ is Tensor:  # torch takes text for a sequence of indices, with a warning
            raise KeyError(key)
        by_place = tree.__class__ is not dict and isinstance(cast("object", tree), tuple | list)
        tree = tree[int(key) if by_place else key]
    return tree


def nest(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Path -> value as nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """``function`` of each leaf of mappings and tuples at any depth, with that leaf of ``others``; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        members = cast("Mapping[str, Any]", tree).items()
        return {name: map_leaves(function, member, *[other[name] for other in others]) for name, member in members}
    if isinstance(tree, tuple):
        places = zip(cast("tuple[Any, ...]", tree), *others, strict=True)
        return tuple(map_leaves(function, *members) for members in places)
    return function(tree, *others)
