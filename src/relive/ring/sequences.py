"""Sequences of a ring: the rows of windows of steps, found in RAM and then read, with facts about each window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import core
from ..batches import padding
from ..core import Draw
from ..errors import SchemaError
from ..memory.layout import WEIGHED, RowLayout, field_groups
from ..memory.store import Store, require_rows, vector
from ..steps.arrays import Bools, Ints
from ..steps.schema import Field, Path
from .ring import Ring

RESULTS = {
    ("next",): Field((), torch.int64),
    ("discount",): Field((), torch.float32),
    ("steps",): Field((), torch.int32),
    ("mask",): Field((), torch.bool),
    ("is_start",): Field((), torch.bool),
}
"""The fields that a row of a window has besides those of a step."""


FLAGS = ("is_first", "is_last", "is_terminal", "mask")
"""The flags of a row of a chunk."""


FACTS = ("index", "lengths", "burn_in", "env", "start")
"""Facts about each window in the kernel's order. Those of a draw by priority come after them."""


FACT_FIELDS: dict[Path, Field] = {(name,): Field((), torch.int64) for name in FACTS}


WINDOW_FACTS = RowLayout({**FACT_FIELDS, ("first",): Field((), torch.int64)}, WEIGHED)
"""A row of facts as the kernel has it: with the place of row 0, and with room for the weights of a draw."""


ROWS: Path = ("_rows",)
"""The name of packed rows that are to be sent to a device."""


WRITTEN = ("reward", "terminated", "truncated", "discount", "steps", "next", "mask", "is_start")
"""The fields of a window's row that the kernel writes."""


TIMESTEP: Path = ("timestep",)
"""The number of a row in its episode, in batches that have it."""


NEVER_LAST = ("obs", "hidden", "terminated", "truncated")
"""Fields that ``last`` cannot name."""


class Cut(NamedTuple):
    """The rows of a ring that are read as a sequence, and its shape."""

    rows: int
    """T', the rows of each sequence."""
    burn_in: int
    """Steps before a window that are read with it."""
    n: int
    """Rewards per n-step sum."""
    time_first: bool
    """True: the rows are ``[T', B]``; False: ``[B, T']``."""
    last: tuple[str, ...]
    """Fields of the step before each row, read as ``last_<name>``."""
    timestep: bool = False
    """True if batches get the number of each row in its episode."""
    across: bool = False
    """True for chunks: their rows are of any episode, and have flags in place of n-step sums."""


class Sequences:
    """Reads the sequences of one ring. It keeps the layout of a batch's rows, which the kernel fills.

    Args:
        ring: the ring; each call gets the same one.
        cut: how windows are read.

    Raises:
        SchemaError: the schema has a field with a name that batches use, or it lacks a field that ``last`` names; or
            windows are to be read of steps that do not share observations.
    """

    def __init__(self, ring: Ring, cut: Cut) -> None:
        self.cut = cut
        if ring.own_next and not cut.across:  # of one step, too: the row after it is no observation that it led to
            raise SchemaError("sequences need steps in order that share observations; here each has its own")
        leaves, store, who = ring.leaves, ring.store, "Chunks" if cut.across else "Sequence"
        given, results = ["next"], RESULTS
        if cut.across:  # their final observations are rows of their own, so there are no next ones
            given, results = [*FLAGS], {(name,): Field((), torch.bool) for name in FLAGS}
        if cut.timestep:
            given, results = [*given, *TIMESTEP], {**results, TIMESTEP: Field((), torch.int64)}
        clash = {path[0] for path in leaves} & {*given, *FACTS}
        if clash:
            raise SchemaError(f"field {min(clash)!r}: {who} gives batches a field of that name; give yours another")
        if cut.across:
            leaves = {path: field for path, field in leaves.items() if path[0] != "next_obs"}
        stored, derived = lasts_of(leaves, cut.last, who)
        held, (obs, others, _) = store.layout.offsets, store.groups
        near = {path: leaves[source] for path, source in derived.items() if source in held}
        layout = RowLayout(obs, others, results, near)
        self.layout: RowLayout = layout
        # the bytes of a row of padding: -1 for the place of the next row, what `padding` says for masks, else zeros
        blank = np.zeros((1, layout.nbytes), np.uint8)
        for path, array in layout.arrays(blank).items():
            array[...] = -1 if path == ("next",) else padding(path)
        self.blank: NDArray[np.uint8] = blank[0]
        # what the kernel gives every row of the step before, and what only the rows after an episode's last step
        lasts = {path: of for path, of in (stored | derived).items() if of in held and path in layout.fields}
        self.stored: dict[Path, Path] = {path: source for path, source in stored.items() if path not in lasts}
        self.derived: dict[Path, Path] = {path: source for path, source in derived.items() if path not in lasts}
        made = layout.fields
        self.states: list[Path] = [path for path in leaves if path[0] == "hidden"]
        self.obs: list[Path] = [path for path in leaves if path[0] == "obs" and path not in made]
        self.others: list[Path] = [path for path in leaves if path[0] not in ("obs", "hidden") and path not in made]
        self.finals: list[Path] = [("next_obs", *path[1:]) for path in self.obs] if ring.own_next else []
        """Where the final observations are of those."""
        self.tabled: bool = store.apart is None and bool(self.obs or self.others or self.stored or self.derived)
        """True if a batch has fields that are not in RAM, so that the place of each row is needed."""
        if cut.across:
            self.order: list[Path] = [*leaves, *derived, *results, *FACT_FIELDS]
        else:
            small = RowLayout(*field_groups(leaves, store.large)[:2], results).fields
            self.order = list(dict.fromkeys((*small, *FACT_FIELDS, *store.large, *derived)))
        offsets = {path[0]: at for path, at in layout.offsets.items() if len(path) == 1}
        written = {name: offsets[name] for name in (FLAGS[1:] if cut.across else WRITTEN)}
        if cut.across:
            written["is_start"] = offsets["is_first"]
        self.core_layout: core.SequenceLayout = core.SequenceLayout(
            **written, timestep=offsets[TIMESTEP[0]] if cut.timestep else -1, step_bytes=layout.starts[2],
            obs_bytes=layout.starts[1], own_at=store.layout.starts[2] if cut.across and ring.own_next else -1,
            burn_in=cut.burn_in, n=cut.n, time_first=cut.time_first, across=cut.across,
            lasts=[(held[of], layout.offsets[path], leaves[of].nbytes, path in stored) for path, of in lasts.items()],
        )  # fmt: skip
        """The layout and the cut, as compiled code takes them."""
        blocks = store.apart or {}
        columns = self._columns(blocks) if blocks else {}
        states = [path for path in self.states if path in blocks]
        shapes = leaves | {path: leaves[of] for path, of in (stored | derived).items()}
        apart = {path: (path, shapes[path].dtype, shapes[path].shape, None) for path in (*columns, *states)}
        rows = layout.described([path for path in self.order if path in made or path in columns], apart=apart)
        if store.sends:
            rows = core.Fields([(ROWS, torch.uint8, (layout.nbytes,), 0)], layout.nbytes)
        facts = [*FACT_FIELDS, *states]
        self.core: core.SequenceWindows = core.SequenceWindows(
            ring.core, self.core_layout, cut.rows, rows, WINDOW_FACTS.described(facts, apart=apart),
            WINDOW_FACTS.described([*facts, *WEIGHED], apart=apart), self.blank, self.tabled, ring.undo is not None,
            [columns[path] for path in self.order if path in columns], [blocks[path] for path in states],
        )  # fmt: skip
        """Draws and reads the packed rows."""

    def read(self, ring: Ring, places: Any, gamma: float = 1.0) -> dict[Path, Tensor]:
        """The fields ``[T', B, ...]`` of the sequences whose windows end at ``places``, and facts ``[B]`` about each.

        Places are those of anchors, or a draw; one by priority gives its ``weight`` and ``probability`` as well.

        Raises:
            ParameterError, ShapeError, DTypeError: they are not places of rows, or their windows are no longer stored.
        """
        store = ring.store
        if places.__class__ is not Draw:
            places = vector(places)
        found = self.core.sample(places, gamma)
        if found.__class__ is int:
            require_rows(places, found, store.num_rows)
        fields, first, table, before = found
        if store.apart is not None:
            return fields
        if store.sends:
            rows = fields.pop(ROWS)
            sent, *facts = store.tensors(rows.numpy(), *(fact.numpy() for fact in fields.values()))
            fields = self.layout.views(sent) | dict(zip(fields, facts, strict=True))
        if self.obs or self.others:
            fields |= self._gathered(store, first, table)
        elif self.states:
            fields |= store.gather(self.states, *store.places(first))
        fields |= steps_of(store, self.derived, before)
        if self.stored:
            # the row after an episode's end holds what its final observation was stored with: bytes without meaning
            _put(store, fields, table < -1, steps_of(store, self.stored, before[table < -1]))
        order = [*self.order, *(path for path in WEIGHED if path in fields)]
        return dict(zip(order, map(fields.__getitem__, order), strict=True))

    def _columns(self, blocks: Mapping[Path, Any]) -> dict[Path, Any]:
        """The large fields of rows as compiled code takes them, by path."""
        finals = dict(zip(self.obs, self.finals or self.obs, strict=True))
        columns = {path: (blocks[path], False, blocks[final], False, False) for path, final in finals.items()}
        columns |= {path: (blocks[path], False, None, False, padding(path)) for path in self.others}
        columns |= {path: (blocks[path], False, blocks[of], True, padding(path)) for path, of in self.stored.items()}
        return columns | {path: (blocks[of], True, blocks[of], True, False) for path, of in self.derived.items()}

    def _gathered(self, store: Store, first: Ints, table: Ints) -> dict[Path, Tensor]:
        """Fields that the kernel does not read: hidden states before the ``first`` rows, large fields of all rows."""
        # table < -1 marks the place -2 - table of a final observation; the row's other fields mean nothing
        begin, shown, real = store.places(first, np.where(table < -1, -2 - table, table), table)
        fields = store.gather(self.states, begin) | store.gather(self.obs, shown) | store.gather(self.others, real)
        if self.finals:
            ended = table < -1
            finals = store.gather(self.finals, *store.places(-2 - table[ended]))
            _put(store, fields, ended, dict(zip(self.obs, finals.values(), strict=True)))
        masks = [path for path in self.others if padding(path)]
        if masks:
            (blank,) = store.tensors(table < 0)
            for path in masks:
                fields[path].masked_fill_(blank.view(*blank.shape, *[1] * (fields[path].dim() - 2)), True)
        return fields


def _put(store: Store, fields: dict[Path, Tensor], where: Bools, rows: Mapping[Path, Tensor]) -> None:
    """Put rows of fields in place of those that are there."""
    if rows and where.any():
        (at,) = store.tensors(where)
        for path, values in rows.items():
            fields[path][at] = values


def steps_of(store: Store, wanted: Mapping[Path, Path], places: Ints) -> dict[Path, Tensor]:
    """Fields of the steps at ``places`` under their new names; zeros where a place is negative."""
    if not wanted:
        return {}
    fields = store.gather(list(wanted.values()), *store.places(places))
    return {name: fields[path] for name, path in wanted.items()}


# The action and the reward before a row are read from the row before. To store them with the final observation would
# make every boundary row larger. The price: that row must still be stored.
def lasts_of(
    leaves: Mapping[Path, Field], last: tuple[str, ...], view: str
) -> tuple[dict[Path, Path], dict[Path, Path]]:
    """``last_<name>`` -> ``<name>``, leaf by leaf: first those stored with each step, then those to derive.

    ``view`` is the name of the view in errors.

    Raises:
        SchemaError: there is no field ``<name>``, or ``last_<name>`` is declared in another way.
    """
    trees: dict[str, dict[Path, Field]] = {}
    for path, leaf in leaves.items():
        trees.setdefault(path[0], {})[path[1:]] = leaf
    known = [name for name in trees if name not in NEVER_LAST]
    stored = [name for name in known if trees.get(f"last_{name}") == trees[name]]
    for name in last:
        if name not in known:
            raise SchemaError(
                f"{view}(last={last!r}): {name!r} is not one of the fields that last can name: {', '.join(known)}"
            )
        if f"last_{name}" in trees and name not in stored:
            raise SchemaError(
                f"field 'last_{name}': {view}(last={last!r}) gives batches a field of that name, declared like "
                f"'{name}'; declare yours in the same way, or give it another name"
            )

    def leaves_of(names: list[str]) -> dict[Path, Path]:
        return {(f"last_{name}", *inner): (name, *inner) for name in names for inner in trees[name]}

    return leaves_of(stored), leaves_of([name for name in last if name not in stored])
