"""Sequence: windows of consecutive steps of one episode, read from a replay."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..batches.sequences import Overlap, padding, stride_of
from ..errors import SchemaError
from ..memory.layout import RowLayout, field_groups
from ..memory.store import Store, require_rows, vector
from ..parameters import GAMMA_RULE, checked, is_count, is_flag, is_names
from ..ring.ring import Ints, Ring
from ..ring.rule import Rule, Weigh
from ..steps.schema import Field
from ..steps.trees import Path

__all__ = ["FACTS", "Sequence"]


RESULTS = {
    ("next",): Field((), torch.int64),
    ("discount",): Field((), torch.float32),
    ("steps",): Field((), torch.int32),
    ("mask",): Field((), torch.bool),
}


FACTS = ("index", "lengths", "burn_in", "env", "start")
"""What the kernel notes of each window, in its order; and then the place of its row 0."""


READ = ("reward", "terminated", "truncated", "_stamp")


WRITTEN = ("reward", "terminated", "truncated", "discount", "steps", "next", "mask")
"""What the kernel reads and writes of a row, in its order."""


NEVER_LAST = ("obs", "hidden", "terminated", "truncated")
"""Fields that ``last`` cannot name."""


class _Batch:
    """The rows of a batch that the kernel makes: of a step what it can read, and what the n-step window comes to."""

    def __init__(self, store: Store, last: tuple[str, ...]) -> None:
        taken = {path[0] for path in store.leaves} & {"next", *FACTS}
        if taken:
            raise SchemaError(f"field {min(taken)!r}: Sequence gives batches a field of that name; give yours another")
        obs, others, _ = store.groups
        self.layout = RowLayout(obs, others, RESULTS)
        self.at, self.to = (
            np.array([layout.offsets[name,] for name in names], np.int64)
            for layout, names in ((store.layout, READ), (self.layout, WRITTEN))
        )
        self.sizes = np.array([self.layout.starts[2], self.layout.starts[1]], np.int64)
        blank = np.zeros((1, self.layout.nbytes), np.uint8)
        for path, array in self.layout.arrays(blank).items():
            array[...] = -1 if path == ("next",) else padding(path)
        self.blank = blank[0]
        made, leaves = self.layout.fields, store.leaves
        self.states = [path for path in leaves if path[0] == "hidden"]
        self.obs = [path for path in leaves if path[0] == "obs" and path not in made]
        self.others = [path for path in leaves if path[0] not in ("obs", "hidden") and path not in made]
        self.apart = bool(self.obs or self.others)
        self.last = last
        self.stored, self.derived = _lasts(store, last)
        small = field_groups(leaves, store.large)[:2]
        order = *RowLayout(*small, RESULTS).fields, ("is_start",), *((name,) for name in FACTS), *store.large
        order = *order, *self.derived
        self.order = list(dict.fromkeys(order))


def _lasts(store: Store, last: tuple[str, ...]) -> tuple[dict[Path, Path], dict[Path, Path]]:
    """``last_<name>`` -> ``<name>``, leaf by leaf: those that are fields of a step, and those that are not.

    Raises:
        SchemaError: there is no field ``<name>``, or ``last_<name>`` is one of another kind.
    """
    trees: dict[str, dict[Path, Field]] = {}
    for path, leaf in store.leaves.items():
        trees.setdefault(path[0], {})[path[1:]] = leaf
    known = [name for name in trees if name not in NEVER_LAST]
    kept = [name for name in known if trees.get(f"last_{name}") == trees[name]]
    for name in last:
        if name not in known:
            raise SchemaError(
                f"Sequence(last={last!r}): {name!r} is none of the fields that this can name: {', '.join(known)}"
            )
        if f"last_{name}" in trees and name not in kept:
            raise SchemaError(
                f"field 'last_{name}': Sequence(last={last!r}) gives batches a field of that name, as '{name}' is "
                "declared; declare yours like that, or give it another name"
            )

    def leaves_of(names: list[str]) -> dict[Path, Path]:
        return {(f"last_{name}", *inner): (name, *inner) for name in names for inner in trees[name]}

    return leaves_of(kept), leaves_of([name for name in last if name not in kept])


@cache
def _rule(history: int, length: int, overlap: Overlap, drop_tail: bool, weigh: Weigh) -> Rule:
    return Rule(int(history), int(length), int(stride_of(length, overlap)), not drop_tail, weigh)


@checked(
    length=(lambda length: is_count(length, 1), "length is a number of steps, at least 1"),
    burn_in=(is_count, "burn_in is a number of steps, at least 0"),
    overlap=(
        lambda overlap: overlap in ("none", "half", "max") or is_count(overlap),
        "overlap is 'none', 'half', 'max' or a number of steps less than length",
    ),
    n=(lambda n: is_count(n, 1), "n is at least 1"),
    gamma=GAMMA_RULE,
    drop_tail=(is_flag, "drop_tail is True or False"),
    time_first=(is_flag, "time_first is True or False"),
    weigh=(lambda weigh: weigh in get_args(Weigh), "weigh is 'windows', 'steps' or 'episodes'"),
    last=(is_names, "last is a tuple of names of fields, such as ('action', 'reward')"),
)
@dataclass(slots=True)
class Sequence:
    """Windows of consecutive steps of one episode, for recurrent networks (Kapturowski et al. 2019).

    The windows of an episode start at its steps 0, S, 2 S, ..., where S follows from ``overlap``. Each has ``length``
    steps, but for the last of an episode that ended or was interrupted, which has what is left. A window can be drawn
    once its last step is complete, and as long as the ``burn_in + length`` rows up to that are in the buffer, or all of
    the episode before it. Prioritized samplers rate windows, by the ``index`` of their last step.

    A batch is a :class:`relive.SequenceBatch` of T' = burn_in + length + n rows ``[T', B, ...]``. The first row of a
    sequence is ``burn_in`` steps before its window, or its episode's first; then comes the window, where ``mask`` is
    True, then the up to n rows that its n-step rewards reach beyond it, then padding. ``lengths`` counts the rows up
    to there. The row after an episode's last step holds the observation that it ended on, what ``last`` names, and
    nothing else. Besides the fields of a step, each row of burn-in and window has what :class:`relive.NStep` makes of
    it: ``reward``, ``discount`` and ``steps`` (int32) of up to n rewards, which may lie beyond the window,
    ``terminated`` and ``truncated`` of the last of those steps, and ``next`` (int64), the row of the batch that holds
    the observation after them: it is -1, and the others 0, in all further rows. The target is
    ``seq["reward"] + seq["discount"] * seq.bootstrap(value)``.

    Each sequence has ``index`` (int64 ``[B]``), ``lengths``, ``burn_in``, ``env``, ``start``, and ``hidden``, the
    recurrent state before its first row, if the schema has it: see :class:`relive.SequenceBatch`.

    Args:
        length: steps of a window, at least 1.
        burn_in: steps before it that are unrolled for the state alone.
        overlap: of successive windows: "none" (S = length), "half" (S = length // 2), "max" (S = 1), or how many steps.
        n: rewards per n-step window.
        gamma: discount per step.
        drop_tail: leave out windows of less than ``length`` steps.
        time_first: rows as ``[T', B, ...]``, or else as ``[B, T', ...]``.
        weigh: what :class:`relive.Uniform` draws equally often: "windows"; "steps", so that a window is drawn in
            proportion to its steps; "episodes", and then each window of the episode.
        last: fields of the step before, such as ("action", "reward"), for agents that see them beside the observation.
            Batches get ``last_action`` and ``last_reward`` (of one step, not of n): 0 where an episode starts, and
            those of its last step beside the observation that it ended on. One row more before the window must then
            be in the buffer. Where a step has a field ``last_action`` like its ``action``, that is read as it is
            stored; the row after an episode's last step gets the right one, even if this does not name it. All of
            these may be changed at any time.

    Raises:
        SchemaError: a parameter out of range, here or when it is set later; an overlap that does not fit the length,
            here or at the next batch.
    """

    length: int
    burn_in: int = 0
    overlap: Literal["none", "half", "max"] | int = "max"
    n: int = 1
    gamma: float = 0.99
    _: KW_ONLY
    drop_tail: bool = False
    time_first: bool = True
    weigh: Weigh = "windows"
    last: tuple[str, ...] = ()
    _layouts: WeakKeyDictionary[Store, _Batch] = field(
        default_factory=WeakKeyDictionary["Store", "_Batch"], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _ = self.rule

    @property
    def history(self) -> int:
        """The rows before a window's last."""
        return self.burn_in + self.length - 1 + bool(self.last)

    @property
    def rows(self) -> int:
        """T', the rows of every sequence of a batch."""
        return self.burn_in + self.length + self.n

    @property
    def rule(self) -> Rule:
        """Which rows end a window.

        Raises:
            SchemaError: an overlap that does not fit the length.
        """
        return _rule(self.history, self.length, self.overlap, self.drop_tail, self.weigh)

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[T', B, ...]`` of the windows that end at ``places``, and what is known of each, ``[B, ...]``.

        Raises:
            SchemaError: the ring's rule is that of another view, the schema has a field of a name given here, or not
                one that ``last`` names.
        """
        if ring.rule != self.rule:
            raise SchemaError(f"a view that reads through {self!r} has to have its `rule` and `time_first` too")
        store = ring.store
        batch = self._layouts.get(store)
        if batch is None or batch.last != tuple(self.last):
            batch = self._layouts[store] = _Batch(store, tuple(self.last))
        places = vector(places)
        count, rows = len(places), self.rows
        shape = (rows, count) if self.time_first else (count, rows)
        out, facts = np.empty((rows * count, batch.layout.nbytes), np.uint8), np.empty((6, count), np.int64)
        tabled = bool(batch.apart or batch.stored or batch.derived)
        table = np.empty(shape if tabled else 0, np.int64)
        bad = kernels.fast().read_sequences(
            places, ring.rows, self.burn_in, self.n, self.gamma, ring.state, ring.counters, ring.step, store.target,
            batch.at, self.time_first, out, batch.to, batch.sizes, batch.blank, facts, table.reshape(-1),
        )  # fmt: skip
        require_rows(places, bad, store.num_rows)
        starts = np.zeros(shape, np.bool_)
        starts[0 if self.time_first else (slice(None), 0)] = ring.step[facts[5]] == 0
        packed, is_start, known = store.tensors(out.reshape(*shape, batch.layout.nbytes), starts, facts[:5])
        fields = batch.layout.views(packed)
        fields |= {(name,): fact for name, fact in zip(FACTS, known.unbind(), strict=True)}
        fields["is_start",] = is_start
        fields |= self._apart(store, batch, facts[5], table)
        if batch.stored or batch.derived:
            self._complete(ring, batch, facts[5], table, fields)
        return {path: fields[path] for path in batch.order}

    def _apart(self, store: Store, batch: _Batch, first: Ints, table: Ints) -> dict[Path, Tensor]:
        """What the kernel does not make: hidden states before the ``first`` rows, other fields of all rows."""
        if not batch.apart:
            return store.gather(batch.states, *store.places(first)) if batch.states else {}
        # of the row that an episode ended on, only the observation means anything
        begin, seen, real = store.places(first, np.where(table < -1, -2 - table, table), table)
        fields = store.gather(batch.states, begin) | store.gather(batch.obs, seen) | store.gather(batch.others, real)
        masks = [path for path in batch.others if padding(path)]
        if masks:
            (blank,) = store.tensors(table < 0)
            for path in masks:
                fields[path].masked_fill_(blank.view(*blank.shape, *[1] * (fields[path].dim() - 2)), True)
        return fields

    def _complete(self, ring: Ring, batch: _Batch, first: Ints, table: Ints, fields: dict[Path, Tensor]) -> None:
        """Add what is derived from the step before each row; what steps are stored with, where an episode ended."""
        store, ended, before = ring.store, table < -1, np.empty_like(table)
        earlier, here = (before, table) if self.time_first else (before.T, table.T)
        earlier[1:] = np.where(here[1:] == -1, -1, here[:-1])
        begin = first // ring.rows * ring.rows
        earlier[0] = np.where(ring.step[first] == 0, -1, begin + (first - begin - 1) % ring.rows)
        fields |= _steps(store, batch.derived, before)
        if batch.stored and ended.any():
            (where,) = store.tensors(ended)
            for path, rows in _steps(store, batch.stored, before[ended]).items():
                fields[path][where] = rows


def _steps(store: Store, wanted: dict[Path, Path], places: Ints) -> dict[Path, Tensor]:
    """Fields of the steps at ``places``, by the names wanted; zeros where a place is negative."""
    if not wanted:
        return {}
    found = store.gather(list(wanted.values()), *store.places(places))
    return {name: found[path] for name, path in wanted.items()}
