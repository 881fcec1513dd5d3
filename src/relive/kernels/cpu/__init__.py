"""The hot loops in numba: one module for each of reference's, with the same names and results."""

from .random import permutation, uniforms
from .returns import discounted_return, gae, vtrace
from .ring import add_rows, anchors, append, draw, gather_rows, ids_of, live, plan, scatter_rows, stack_places, window
from .rows import copy_row
from .tree import tree_build, tree_find, tree_get, tree_offsets, tree_prefix, tree_set

__all__ = [
    "add_rows",
    "anchors",
    "append",
    "copy_row",
    "discounted_return",
    "draw",
    "gae",
    "gather_rows",
    "ids_of",
    "live",
    "permutation",
    "plan",
    "scatter_rows",
    "stack_places",
    "tree_build",
    "tree_find",
    "tree_get",
    "tree_offsets",
    "tree_prefix",
    "tree_set",
    "uniforms",
    "vtrace",
    "window",
]
