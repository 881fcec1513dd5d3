"""The hot loops spelt out: the definition that the fast twins must agree with, and the path for other devices."""

from .random import permutation
from .returns import discounted_return, gae, refuse_missing, vtrace
from .ring import add_rows, anchors, append, draw, gather_rows, ids_of, live, plan, scatter_rows, stack_places, window
from .rows import copy_row
from .tree import heaviest, tree_build, tree_find, tree_get, tree_offsets, tree_prefix, tree_set

__all__ = [
    "add_rows",
    "anchors",
    "append",
    "copy_row",
    "discounted_return",
    "draw",
    "gae",
    "gather_rows",
    "heaviest",
    "ids_of",
    "live",
    "permutation",
    "plan",
    "refuse_missing",
    "scatter_rows",
    "stack_places",
    "tree_build",
    "tree_find",
    "tree_get",
    "tree_offsets",
    "tree_prefix",
    "tree_set",
    "vtrace",
    "window",
]
