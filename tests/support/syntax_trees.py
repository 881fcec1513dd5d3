"""Syntax trees, parsed once for all tests that read the sources."""

from __future__ import annotations

import ast
from functools import cache

__all__ = ["tree_of"]


@cache
def tree_of(source: str) -> ast.Module:
    """A module."""
    return ast.parse(source)
