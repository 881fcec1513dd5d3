"""Nested fields: a path names a leaf; these functions turn paths into nested dicts and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

__all__ = ["Path", "descend", "dotted", "nest"]


Path: TypeAlias = tuple[str, ...]
"""The keys that lead to a leaf: ("obs",), ("obs", "camera"), ("hidden", "0")."""


def dotted(path: Path | str) -> str:
    """A path joined by dots: obs.camera."""
    return path if isinstance(path, str) else ".".join(path)


def descend(tree: Any, inner: Path) -> Any:
    """The leaf at a path of nested mappings and tuples."""
    for key in inner:
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
