"""The hot loops spelt out: the definition that the fast twins must agree with, and the path for other devices."""

from .episodes import episode_starts, gather_windows, mark_windows, plan_windows
from .hindsight import choose_goals, relabel_windows
from .random import masses, permutation
from .returns import discounted_return, gae, refuse_missing, vtrace
from .ring import (
    add_rows,
    anchors,
    append,
    draw,
    gather_pairs,
    gather_rows,
    ids_of,
    live,
    plan_rows,
    scatter_rows,
    stack_places,
    window,
    windows,
)
from .rows import copy_row
from .sequences import ends_full, read_sequences, window_start
from .tree import (
    heaviest,
    magnitudes,
    tree_build,
    tree_cover,
    tree_find,
    tree_get,
    tree_lowest,
    tree_offsets,
    tree_set,
    tree_shares,
)

__all__ = [
    "add_rows",
    "anchors",
    "append",
    "choose_goals",
    "copy_row",
    "discounted_return",
    "draw",
    "ends_full",
    "episode_starts",
    "gae",
    "gather_pairs",
    "gather_rows",
    "gather_windows",
    "heaviest",
    "ids_of",
    "live",
    "magnitudes",
    "mark_windows",
    "masses",
    "permutation",
    "plan_rows",
    "plan_windows",
    "read_sequences",
    "refuse_missing",
    "relabel_windows",
    "scatter_rows",
    "stack_places",
    "tree_build",
    "tree_cover",
    "tree_find",
    "tree_get",
    "tree_lowest",
    "tree_offsets",
    "tree_set",
    "tree_shares",
    "vtrace",
    "window",
    "window_start",
    "windows",
]
