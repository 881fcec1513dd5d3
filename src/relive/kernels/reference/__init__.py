"""The hot loops spelt out: the definition that the fast twins must agree with, and the path for other devices."""

from .advice import ask_for
from .append import add_rows, add_step, plan_rows, scatter_rows
from .counters import commit_step, mark_bell, publish, published, ring_bell
from .draw import anchors, draw, ids_of, live, window
from .episodes import episode_starts, gather_windows, mark_windows, plan_windows
from .hindsight import choose_goals, relabel_windows
from .limits import add_count, admit, admit_noted, confirm, take_back
from .packing import pack_rows, take_rows
from .priorities import Priorities, draw_weighted, note_drawable, powers, rate, set_errors
from .random import masses, permutation
from .returns import Grid, discounted_return, gae, refuse_missing, vtrace
from .rows import accept_step, copy_row, copy_step, take_step
from .rule import ends_full, window_start
from .sequences import read_sequences
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
from .undo import note_undo
from .windows import gather_pairs, gather_rows, stack_places, windows

__all__ = [
    "Grid",
    "Priorities",
    "accept_step",
    "add_count",
    "add_rows",
    "add_step",
    "admit",
    "admit_noted",
    "anchors",
    "ask_for",
    "choose_goals",
    "commit_step",
    "confirm",
    "copy_row",
    "copy_step",
    "discounted_return",
    "draw",
    "draw_weighted",
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
    "mark_bell",
    "mark_windows",
    "masses",
    "note_drawable",
    "note_undo",
    "pack_rows",
    "permutation",
    "plan_rows",
    "plan_windows",
    "powers",
    "publish",
    "published",
    "rate",
    "read_sequences",
    "refuse_missing",
    "relabel_windows",
    "ring_bell",
    "scatter_rows",
    "set_errors",
    "stack_places",
    "take_back",
    "take_rows",
    "take_step",
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
