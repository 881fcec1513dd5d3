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
from ..errors import ParameterError, SchemaError
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
"""Facts about each window in the kernel's order; the place of its row 0 comes after them."""


READ = ("reward", "terminated", "truncated", "_stamp")


WRITTEN = ("reward", "terminated", "truncated", "discount", "steps", "next", "mask")
"""The fields of a row that the kernel reads and writes, in its order."""


NEVER_LAST = ("obs", "hidden", "terminated", "truncated")
"""Fields that ``last`` cannot name."""


class _Batch:
    """The layout of a batch's rows, which the kernel fills: the packed fields of a step, and its n-step results."""

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
        self.has_large = bool(self.obs or self.others)
        self.last = last
        self.stored, self.derived = _lasts(store, last)
        small = field_groups(leaves, store.large)[:2]
        order = *RowLayout(*small, RESULTS).fields, ("is_start",), *((name,) for name in FACTS), *store.large
        order = *order, *self.derived
        self.order = list(dict.fromkeys(order))


def _lasts(store: Store, last: tuple[str, ...]) -> tuple[dict[Path, Path], dict[Path, Path]]:
    """``last_<name>`` -> ``<name>``, leaf by leaf: first those stored with each step, then those to derive.

    Raises:
        SchemaError: there is no field ``<name>``, or ``last_<name>`` is declared in another way.
    """
    trees: dict[str, dict[Path, Field]] = {}
    for path, leaf in store.leaves.items():
        trees.setdefault(path[0], {})[path[1:]] = leaf
    known = [name for name in trees if name not in NEVER_LAST]
    kept = [name for name in known if trees.get(f"last_{name}") == trees[name]]
    for name in last:
        if name not in known:
            raise SchemaError(
                f"Sequence(last={last!r}): {name!r} is not one of the fields that last can name: {', '.join(known)}"
            )
        if f"last_{name}" in trees and name not in kept:
            raise SchemaError(
                f"field 'last_{name}': Sequence(last={last!r}) gives batches a field of that name, declared like "
                f"'{name}'; declare yours in the same way, or give it another name"
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
    steps. The last window of an ended or interrupted episode may be shorter. A window can be drawn once its last step
    is complete. The ``burn_in + length`` rows up to it, or all rows of the episode before it, must be in the buffer.
    Prioritized samplers give each window a priority, by the ``index`` of its last step.

    A batch is a :class:`relive.SequenceBatch` of T' = burn_in + length + n rows ``[T', B, ...]``. A sequence starts
    ``burn_in`` steps before its window, or at its episode's first step. Next come the window, where ``mask`` is True,
    then up to n rows for the n-step sums that reach beyond it, then padding. ``lengths`` counts the rows without
    padding. The row after an episode's last step holds its final observation and the fields of ``last``, nothing else.

    Each row of burn-in and window has the fields of a step and the n-step results of :class:`relive.NStep`:
    ``reward``, ``discount`` and ``steps`` (int32) of up to n rewards, even beyond the window. ``terminated`` and
    ``truncated`` are those of the last of these steps. ``next`` (int64) is the row of the batch with the observation
    after them. In all other rows ``next`` is -1 and the others are 0. The target is
    ``seq["reward"] + seq["discount"] * seq.bootstrap(value)``.

    Each sequence has ``index`` (int64 ``[B]``), ``lengths``, ``burn_in``, ``env``, ``start``, and ``hidden``, the
    recurrent state before its first row, if the schema has it: see :class:`relive.SequenceBatch`.

    Args:
        length: steps of a window, at least 1.
        burn_in: steps before the window, unrolled only for the state.
        overlap: steps that successive windows share: "none" (S = length), "half" (S = length // 2), "max" (S = 1), or
            a number.
        n: rewards per n-step sum.
        gamma: discount per step.
        drop_tail: leave out windows of less than ``length`` steps.
        time_first: rows as ``[T', B, ...]``, or else as ``[B, T', ...]``.
        weigh: the unit that :class:`relive.Uniform` draws with equal probability: "windows"; "steps", so that a
            window's chance grows with its steps; or "episodes", and then a window of the episode.
        last: fields of the previous step, such as ("action", "reward"), for agents that see them with the observation.
            Batches get ``last_action`` and ``last_reward`` (of one step, not of n). They are 0 at an episode's start;
            its final observation comes with those of its last step. One more row before the window must then be in the
            buffer. If steps have a field ``last_action`` declared like ``action``, the stored field is read. The row
            after an episode's last step gets the right one, even if ``last`` does not name it. All parameters may be
            changed at any time.

    Raises:
        ParameterError: a parameter is out of range, here or when it is set later; or the overlap does not fit the
            length, here or at the next batch.
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
        """The number of rows before a window's last."""
        return self.burn_in + self.length - 1 + bool(self.last)

    @property
    def rows(self) -> int:
        """T', the number of rows of every sequence in a batch."""
        return self.burn_in + self.length + self.n

    @property
    def rule(self) -> Rule:
        """The rule that says which rows end a window.

        Raises:
            ParameterError: the overlap does not fit the length.
        """
        return _rule(self.history, self.length, self.overlap, self.drop_tail, self.weigh)

    def read(self, ring: Ring, places: Ints, key: int | None = None) -> dict[Path, Tensor]:
        """The fields ``[T', B, ...]`` of the windows that end at ``places``, and facts about each window, ``[B, ...]``.

        Raises:
            ParameterError: the ring has the rule of another view.
            SchemaError: the schema has a field with a name that batches use, or lacks a field that ``last`` names.
        """
        if ring.rule != self.rule:
            raise ParameterError(f"a view that reads through {self!r} must also have its `rule` and `time_first`")
        store = ring.store
        batch = self._layouts.get(store)
        if batch is None or batch.last != tuple(self.last):
            batch = self._layouts[store] = _Batch(store, tuple(self.last))
        places = vector(places)
        count, rows = len(places), self.rows
        shape = (rows, count) if self.time_first else (count, rows)
        out, facts = np.empty((rows * count, batch.layout.nbytes), np.uint8), np.empty((6, count), np.int64)
        tabled = bool(batch.has_large or batch.stored or batch.derived)
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
        fields |= self._large_fields(store, batch, facts[5], table)
        if batch.stored or batch.derived:
            self._complete(ring, batch, facts[5], table, fields)
        return {path: fields[path] for path in batch.order}

    def _large_fields(self, store: Store, batch: _Batch, first: Ints, table: Ints) -> dict[Path, Tensor]:
        """Fields that the kernel does not read: hidden states before the ``first`` rows, large fields of all rows."""
        if not batch.has_large:
            return store.gather(batch.states, *store.places(first)) if batch.states else {}
        # table < -1 marks the place -2 - table of a final observation; the row's other fields mean nothing
        begin, seen, real = store.places(first, np.where(table < -1, -2 - table, table), table)
        fields = store.gather(batch.states, begin) | store.gather(batch.obs, seen) | store.gather(batch.others, real)
        masks = [path for path in batch.others if padding(path)]
        if masks:
            (blank,) = store.tensors(table < 0)
            for path in masks:
                fields[path].masked_fill_(blank.view(*blank.shape, *[1] * (fields[path].dim() - 2)), True)
        return fields

    def _complete(self, ring: Ring, batch: _Batch, first: Ints, table: Ints, fields: dict[Path, Tensor]) -> None:
        """Add the derived fields of the step before each row, and correct the stored ones where an episode ended."""
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
    """Fields of the steps at ``places`` under their new names; zeros where a place is negative."""
    if not wanted:
        return {}
    found = store.gather(list(wanted.values()), *store.places(places))
    return {name: found[path] for name, path in wanted.items()}
