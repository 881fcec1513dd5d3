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
from ..steps.arrays import Ints
from ..steps.schema import Field, Path
from .ring import Ring

RESULTS = {
    ("next",): Field((), torch.int64),
    ("discount",): Field((), torch.float32),
    ("steps",): Field((), torch.int32),
    ("mask",): Field((), torch.bool),
    ("is_start",): Field((), torch.bool),
}


FACTS = ("index", "lengths", "burn_in", "env", "start")
"""Facts about each window in the kernel's order. Those of a draw by priority come after them."""


FACT_FIELDS: dict[Path, Field] = {(name,): Field((), torch.int64) for name in FACTS}


WINDOW_FACTS = RowLayout({**FACT_FIELDS, ("first",): Field((), torch.int64)}, WEIGHED)
"""A row of facts as the kernel has it: with the place of row 0, and with room for the weights of a draw."""


ROWS: Path = ("_rows",)
"""The name of packed rows that are to be sent to a device."""


WRITTEN = ("reward", "terminated", "truncated", "discount", "steps", "next", "mask", "is_start")
"""The fields of a row that the kernel writes, in its order."""


TIMESTEP: Path = ("timestep",)
"""The number of a row in its episode, in batches that have it."""


NEVER_LAST = ("obs", "hidden", "terminated", "truncated")
"""Fields that ``last`` cannot name."""


class Cut(NamedTuple):
    """The part of its episode that is read around a window, and its shape."""

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


class Sequences:
    """Reads the sequences of one ring. It keeps the layout of a batch's rows, which the kernel fills.

    Args:
        ring: the ring; each call gets the same one.
        cut: how windows are read.

    Raises:
        SchemaError: the schema has a field with a name that batches use, or it lacks a field that ``last`` names.
    """

    def __init__(self, ring: Ring, cut: Cut) -> None:
        self.cut = cut
        leaves, store = ring.leaves, ring.store
        clash = {path[0] for path in leaves} & {"next", *FACTS, *(TIMESTEP if cut.timestep else ())}
        if clash:
            raise SchemaError(f"field {min(clash)!r}: Sequence gives batches a field of that name; give yours another")
        stored, derived = lasts_of(leaves, cut.last)
        held, (obs, others, _) = store.layout.offsets, store.groups
        near = {path: leaves[source] for path, source in derived.items() if source in held}
        layout = RowLayout(obs, others, RESULTS, near)
        self.layout: RowLayout = layout
        # the bytes of a row of padding: -1 for the place of the next row, what `padding` says for masks, else zeros
        blank = np.zeros((1, layout.nbytes), np.uint8)
        for path, array in layout.arrays(blank).items():
            array[...] = -1 if path == ("next",) else padding(path)
        self.blank: NDArray[np.uint8] = blank[0]
        # what the kernel gives every row of the step before, and what only the rows after an episode's last step
        lasts = {path: source for path, source in (stored | derived).items() if source in held}
        self.stored: dict[Path, Path] = {path: source for path, source in stored.items() if path not in lasts}
        self.derived: dict[Path, Path] = {path: source for path, source in derived.items() if path not in lasts}
        made = layout.fields
        self.states: list[Path] = [path for path in leaves if path[0] == "hidden"]
        self.obs: list[Path] = [path for path in leaves if path[0] == "obs" and path not in made]
        self.others: list[Path] = [path for path in leaves if path[0] not in ("obs", "hidden") and path not in made]
        self.tabled: bool = bool(self.obs or self.others or self.stored or self.derived)
        """True if a batch has more than the kernel's rows and the states, so that the place of each row is needed."""
        small = RowLayout(*field_groups(leaves, store.large)[:2], RESULTS).fields
        self.order: list[Path] = list(dict.fromkeys((*small, *FACT_FIELDS, *store.large, *derived)))
        self.core_layout: core.SequenceLayout = core.SequenceLayout(
            **{name: layout.offsets[name,] for name in WRITTEN}, step_bytes=layout.starts[2],
            obs_bytes=layout.starts[1], burn_in=cut.burn_in, n=cut.n, time_first=cut.time_first,
            lasts=[(held[of], layout.offsets[path], leaves[of].nbytes, path in stored) for path, of in lasts.items()],
        )  # fmt: skip
        """The layout and the cut, as compiled code takes them."""
        rows, facts = layout.described([path for path in made if path not in near] + list(near)), list(FACT_FIELDS)
        if store.sends:
            rows = core.Fields([(ROWS, torch.uint8, (layout.nbytes,), 0)], layout.nbytes)
        self.core: core.SequenceWindows = core.SequenceWindows(
            ring.core, self.core_layout, cut.rows, rows, WINDOW_FACTS.described(facts),
            WINDOW_FACTS.described([*facts, *WEIGHED]), self.blank, self.tabled, ring.undo is not None,
        )  # fmt: skip
        """Draws and reads the packed rows."""

    def read(self, ring: Ring, places: Any, gamma: float) -> dict[Path, Tensor]:
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
        fields, first, table = found
        if self.cut.timestep:
            fields[TIMESTEP] = torch.from_numpy(self._timesteps(ring, first, fields["lengths",].numpy()))
        if not self.states and not self.tabled and not store.sends:
            return fields
        if store.sends:
            rows = fields.pop(ROWS)
            sent, *facts = store.tensors(rows.numpy(), *(fact.numpy() for fact in fields.values()))
            fields = self.layout.views(sent) | dict(zip(fields, facts, strict=True))
        weights = [path for path in WEIGHED if path in fields]
        if self.obs or self.others:
            fields |= self._large_fields(store, first, table)
        elif self.states:
            fields |= store.gather(self.states, *store.places(first))
        if self.stored or self.derived:
            self._complete(ring, first, table, fields)
        order = [*self.order, *weights, *([TIMESTEP] if self.cut.timestep else [])]
        return dict(zip(order, map(fields.__getitem__, order), strict=True))

    def _timesteps(self, ring: Ring, first: Ints, lengths: Ints) -> Ints:
        """The number of each row in its episode, and 0 in padding, given the places of rows 0."""
        t = np.arange(self.cut.rows)[:, None]
        numbers = np.where(t < lengths, ring.step[first] + t, 0)
        return numbers if self.cut.time_first else np.ascontiguousarray(numbers.T)

    def _large_fields(self, store: Store, first: Ints, table: Ints) -> dict[Path, Tensor]:
        """Fields that the kernel does not read: hidden states before the ``first`` rows, large fields of all rows."""
        # table < -1 marks the place -2 - table of a final observation; the row's other fields mean nothing
        begin, shown, real = store.places(first, np.where(table < -1, -2 - table, table), table)
        fields = store.gather(self.states, begin) | store.gather(self.obs, shown) | store.gather(self.others, real)
        masks = [path for path in self.others if padding(path)]
        if masks:
            (blank,) = store.tensors(table < 0)
            for path in masks:
                fields[path].masked_fill_(blank.view(*blank.shape, *[1] * (fields[path].dim() - 2)), True)
        return fields

    def _complete(self, ring: Ring, first: Ints, table: Ints, fields: dict[Path, Tensor]) -> None:
        """Add the derived fields of the step before each row, and correct the stored ones where an episode ended."""
        store, ended, before = ring.store, table < -1, np.empty_like(table)
        # the step before row t is row t - 1 of the same sequence; before padding there is none
        earlier, here = (before, table) if self.cut.time_first else (before.T, table.T)
        earlier[1:] = np.where(here[1:] == -1, -1, here[:-1])
        # before row 0 it is the place before in the ring of the env, unless the episode begins there
        begin = first // ring.rows * ring.rows
        earlier[0] = np.where(ring.step[first] == 0, -1, begin + (first - begin - 1) % ring.rows)
        fields |= steps_of(store, self.derived, before)
        if self.stored and ended.any():
            # the row after an episode's end holds what its final observation was stored with: bytes without meaning
            (where,) = store.tensors(ended)
            for path, rows in steps_of(store, self.stored, before[ended]).items():
                fields[path][where] = rows


def steps_of(store: Store, wanted: dict[Path, Path], places: Ints) -> dict[Path, Tensor]:
    """Fields of the steps at ``places`` under their new names; zeros where a place is negative."""
    if not wanted:
        return {}
    fields = store.gather(list(wanted.values()), *store.places(places))
    return {name: fields[path] for name, path in wanted.items()}


# The action and the reward before a row are read from the row before. To store them with the final observation would
# make every boundary row larger. The price: that row must still be stored.
def lasts_of(
    leaves: Mapping[Path, Field], last: tuple[str, ...], view: str = "Sequence"
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
