"""The hot loops in numba: one module for each of reference's, with the same names and results."""

from ..reference.tree import tree_build, tree_offsets  # not in a loop: one for both
from .advice import ask_for
from .append import add_rows, add_step, plan_rows, scatter_rows
from .cache import PROGRESS, load_target
from .counters import commit_step, mark_bell, publish, published, ring_bell
from .draw import anchors, draw, ids_of, live, window
from .episodes import copy_windows, episode_starts, gather_windows, mark_windows, plan_windows
from .fields import split_rows
from .handles import handle_of
from .hindsight import plan_goals, relabel_windows
from .jit import cache_folder
from .limits import add_count, admit, admit_noted, confirm, take_back
from .packing import pack_rows, take_batch, take_rows
from .priorities import (
    draw_weighted,
    note_drawable,
    powers,
    rate,
    rate_sequences,
    rate_tensors,
    reduce_errors,
    set_errors,
)
from .random import masses, permutation, uniforms
from .returns import PLACES, SPOILT, discounted_return, fill_gae, gae, vtrace
from .rows import accept_step, copy_row, copy_step, take_step
from .rule import ends_full, window_start
from .sample import finish_goals, sample_goals, sample_sequences, sample_stacks, sample_windows
from .sequences import read_sequences
from .tree import magnitudes, tree_cover, tree_find, tree_get, tree_lowest, tree_set, tree_shares
from .windows import gather_pairs, gather_rows, stack_places, windows

__all__ = [
    "PLACES",
    "PROGRESS",
    "SPOILT",
    "accept_step",
    "add_count",
    "add_rows",
    "add_step",
    "admit",
    "admit_noted",
    "anchors",
    "ask_for",
    "cache_folder",
    "commit_step",
    "confirm",
    "copy_row",
    "copy_step",
    "copy_windows",
    "discounted_return",
    "draw",
    "draw_weighted",
    "ends_full",
    "episode_starts",
    "fill_gae",
    "finish_goals",
    "gae",
    "gather_pairs",
    "gather_rows",
    "gather_windows",
    "handle_of",
    "ids_of",
    "live",
    "load_target",
    "magnitudes",
    "mark_bell",
    "mark_windows",
    "masses",
    "note_drawable",
    "pack_rows",
    "permutation",
    "plan_goals",
    "plan_rows",
    "plan_windows",
    "powers",
    "publish",
    "published",
    "rate",
    "rate_sequences",
    "rate_tensors",
    "read_sequences",
    "reduce_errors",
    "relabel_windows",
    "ring_bell",
    "sample_goals",
    "sample_sequences",
    "sample_stacks",
    "sample_windows",
    "scatter_rows",
    "set_errors",
    "split_rows",
    "stack_places",
    "take_back",
    "take_batch",
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
    "uniforms",
    "vtrace",
    "window",
    "window_start",
    "windows",
]
