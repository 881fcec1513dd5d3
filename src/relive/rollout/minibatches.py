"""Minibatches: the transitions of a rollout in random order, divided into batches ``[B]``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import core
from ..batches import TURNS, Batch, Members
from ..errors import FieldError, ParameterError
from ..memory.allocator import SMALL, Recycled
from ..memory.graphs import Graphed, has_graphs
from ..memory.layout import LARGE_FIELD, RowLayout, typed
from ..parameters import COUNT_RULE, is_count, require, seed_or_drawn
from ..returns import scale
from ..steps.arrays import Ints, numpy_dtype
from ..steps.schema import Field, Path
from .columns import ADVANTAGE, Columns

__all__ = [
    "MANY",
    "Minibatches",
    "Permutations",
    "parts",
    "parts_by_steps",
    "require_advantage",
    "rows_of",
]


Bytes = NDArray[np.uint8]

MANY = 16
"""Packing costs as much as an epoch that gathers each field by itself. So it pays from the second epoch on, or if an
epoch has so many batches that their calls for each field cost more."""

FEW_ROWS = 2**15
"""Up to so many rows stay in the processor's caches, where a row costs what its cache lines cost; more cost what their
bytes cost."""

SHARED_WORK = 2**20
"""A batch of at least this many bytes is copied faster by torch's threads than by one thread."""

FEW_THREADS = 2
"""With at most this many threads, torch is slower than one thread that loads rows ahead."""


class Permutations:
    """Random orders: permutation number k is a function of (seed, k) alone.

    Args:
        seed: None draws one from torch's default generator.
    """

    seed: int
    draws: int

    def __init__(self, seed: int | None) -> None:
        self.restart(seed)
        self._graphed: Graphed | None = None
        """Makes them on a GPU."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graphed": None}

    def restart(self, seed: int | None) -> None:
        """The next permutation is number 0 of this seed."""
        self.seed, self.draws = seed_or_drawn(seed), 0

    def reserve(self, count: int) -> int:
        """The number of the first of the next ``count`` permutations, which the caller makes."""
        self.draws += count
        return self.draws - count

    def next(self, count: int, device: torch.device | None = None) -> Tensor:
        """The next permutation of ``count`` items, on a device; in RAM if None."""
        if device is not None and device.type != "cpu" and self._graphed is None and has_graphs(device):
            self._graphed = Graphed(core.permute_on_device, device, tuple)
        order = core.permutation(count, self.seed, self.draws, device, self._graphed)
        self.draws += 1
        return order


def parts(
    total: int, batch_size: int | None, num_batches: int | None, drop_last: bool = False, items: str = "transitions"
) -> list[tuple[int, int]]:
    """(begin, end) of each minibatch of ``total`` items.

    Raises:
        ParameterError: sizes that do not fit.
    """
    if (batch_size is None) == (num_batches is None):
        raise ParameterError(f"pass either batch_size or num_batches, got {batch_size=}, {num_batches=}")
    if num_batches is not None:
        if not (is_count(num_batches, 1) and num_batches <= total):
            raise ParameterError(f"num_batches={num_batches!r}: {total} {items} make 1 to {total} minibatches")
        size, more = divmod(total, num_batches)
        if drop_last:
            more = 0
        # The first ``more`` parts have one item more than the others.
        return list(pairwise(i * size + min(i, more) for i in range(num_batches + 1)))
    assert batch_size is not None
    if not is_count(batch_size, 1) or (drop_last and batch_size > total):
        raise ParameterError(f"batch_size={batch_size!r}: the rollout holds {total} {items}; ask for 1 to {total}")
    bounds = list(range(0, total + 1, batch_size))
    return list(pairwise(bounds if drop_last or bounds[-1] == total else [*bounds, total]))


def parts_by_steps(lengths: NDArray[np.int64], batch_steps: int) -> list[tuple[int, int]]:
    """(begin, end) of minibatches of at most ``batch_steps`` steps; a longer item has a batch of its own.

    Raises:
        ParameterError: ``batch_steps`` is not positive.
    """
    require("sequences", COUNT_RULE, batch_steps=batch_steps)
    until: list[int] = np.cumsum(lengths).tolist()
    begin, bounds = 0, list[tuple[int, int]]()
    while begin < len(lengths):
        before = until[begin - 1] if begin else 0
        # At least one item, so that one which is longer than a batch ends the loop too.
        end = max(bisect_right(until, before + batch_steps), begin + 1)
        bounds.append((begin, end))
        begin = end
    return bounds


def require_advantage(normalize_advantage: bool, wanted: list[Path]) -> None:
    """Refuse to normalise an advantage that is not among the columns.

    Raises:
        FieldError: there is no such column.
    """
    if normalize_advantage and ADVANTAGE not in wanted:
        raise FieldError(
            "normalize_advantage: this batch has no 'advantage'; call finish(...) first, and name it if you pass fields"
        )


class Minibatches:
    """Reads transitions of a rollout as batches ``[B]``.

    Args:
        columns: of the rollout.
        memory: gives the memory of batches, on the CPU.
    """

    def __init__(self, columns: Columns, memory: Recycled) -> None:
        self._columns, self._memory = columns, memory

    def batches(
        self,
        wanted: list[Path],
        bounds: list[tuple[int, int]],
        orders: Iterator[Tensor],
        *,
        pack: bool,
        normalize_advantage: bool,
        reuse: bool,
    ) -> Iterator[Batch]:
        """Epoch after epoch, the minibatches of its order.

        Args:
            wanted: the columns.
            bounds: (begin, end) of each minibatch in an order.
            orders: the flat rows ``t * N + n`` of each epoch, int64.
            pack: True if it pays to pack the columns first.
            normalize_advantage: normalise ``advantage`` within each minibatch.
            reuse: write packed fields to the same memory in turn.
        """
        rows, (name,) = self._rows(wanted, pack), ADVANTAGE
        standing = core.Standing(TURNS) if reuse else None
        for order in orders:
            places: Any = rows.places(order)
            for low, high in bounds:
                batch = rows.at(places[low:high], standing)[0]
                if normalize_advantage:
                    scale(batch[name])
                yield batch

    def _rows(self, wanted: list[Path], pack: bool) -> HostRows | DeviceRows:
        """The rows of a pass."""
        columns = self._columns
        if columns.device.type != "cpu":
            return DeviceRows(columns.select(wanted), pack)
        lines = columns.num_steps * columns.num_envs <= FEW_ROWS
        form = _form_of(tuple([columns.described(path) for path in wanted]), pack, lines)
        packed = {path: columns.rows(path) for path in form.layout.fields}
        return HostRows(form, packed, columns.select(form.apart), self._memory)

    def reader(self, wanted: list[Path], pack: bool) -> Callable[[Tensor], dict[Path, Tensor]]:
        """A function that reads the rows of an index (flat rows, int64 ``[B]``); ``pack`` as in :func:`rows_of`."""
        return self._rows(wanted, pack).gather


def rows_of(columns: Mapping[Path, Tensor], pack: bool = True, memory: Recycled | None = None) -> HostRows | DeviceRows:
    """A snapshot of columns, packed row by row, in RAM or on a device.

    Its ``gather`` reads the rows of an index (int64, ``[B]``) as fresh tensors ``[B, ...]``; small fields share one
    block.

    Args:
        columns: path -> contiguous ``[T, N, ...]``; row ``t * N + n`` is step ``t`` of env ``n``. A field of more
            than LARGE_FIELD bytes is read where it lies.
        pack: False reads every field where it lies.
        memory: gives the memory of batches, on the CPU; by default fresh memory.
    """
    if not all(column.is_cpu for column in columns.values()):
        return DeviceRows(columns, pack)
    form = _form_of(tuple([(path, tuple(x.shape[2:]), x.dtype) for path, x in columns.items()]), pack)
    packed = {path: columns[path].flatten(0, 1).contiguous() for path in form.layout.fields}
    return HostRows(form, packed, {path: columns[path] for path in form.apart}, memory or Recycled())


Parts = tuple[Batch, ...]
"""A batch, and those nested in it, as :class:`relive.batches.Members` has them."""


class Form(NamedTuple):
    """How the fields of a row are packed and read; every pass over fields of these shapes and dtypes needs it."""

    fields: dict[Path, Field]
    layout: RowLayout
    """The fields that are packed side by side."""
    packed: tuple[core.Fields, ...]
    """Make tensors of these, for each dict of :attr:`members`."""
    apart: dict[Path, int]
    """The other fields, which are read where they lie, and the bytes of each."""
    members: Members
    """Makes the batches."""

    def leaves(self, dicts: Parts) -> dict[Path, Tensor]:
        """The fields of a batch by their paths."""
        into = self.members.into
        return {path: dicts[into[path]][path[-1]] for path in self.fields}


@lru_cache(maxsize=64)
def _form_of(leaves: tuple[tuple[Path, tuple[int, ...], torch.dtype], ...], pack: bool, lines: bool = False) -> Form:
    fields = {path: Field(shape, dtype) for path, shape, dtype in leaves}
    layout, members = (
        RowLayout({path: x for path, x in fields.items() if pack and x.nbytes <= LARGE_FIELD}, lines=lines),
        Members(fields),
    )
    groups = [[path for path in layout.fields if members.into[path] == k] for k in range(len(members.empty()))]
    packed = tuple(layout.described(group, itemgetter(-1)) for group in groups)
    return Form(
        fields, layout, packed, {path: x.nbytes for path, x in fields.items() if path not in layout.fields}, members
    )


class DeviceRows:
    """Rows on a device: torch packs the small fields, and picks all rows.

    Args:
        columns: path -> ``[T, N, ...]``.
        pack: False reads every field where it lies.
    """

    def __init__(self, columns: Mapping[Path, Tensor], pack: bool) -> None:
        self.form: Form = _form_of(tuple([(path, tuple(x.shape[2:]), x.dtype) for path, x in columns.items()]), pack)
        self._flat, self._packed = {path: column.flatten(0, 1) for path, column in columns.items()}, None
        layout = self.form.layout
        if layout.fields:
            some = self._flat[next(iter(layout.fields))]
            self._packed = torch.empty((len(some), layout.nbytes), dtype=torch.uint8, device=some.device)
            for path, view in layout.views(self._packed).items():
                view.copy_(self._flat[path])

    def places(self, order: Tensor) -> Tensor:
        """An order of rows as :meth:`at` takes parts of it."""
        return order

    def at(self, places: Tensor, standing: Any = None) -> Parts:
        """The rows at these places."""
        dicts, into = self.form.members.empty(), self.form.members.into
        packed = {} if self._packed is None else self.form.layout.views(self._packed.index_select(0, places))
        for path, column in self._flat.items():
            dicts[into[path]][path[-1]] = packed[path] if path in packed else column.index_select(0, places)
        return dicts

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        """The rows of an index, as :func:`rows_of` says."""
        return self.form.leaves(self.at(index))


class HostRows:
    """Rows in RAM, as bytes: compiled code packs the small fields, and picks all rows.

    Args:
        form: of the rows.
        packed: path -> ``[T * N, ...]``, the columns that are packed, each in one piece.
        apart: path -> ``[T, N, ...]``, the others.
        memory: gives the memory of rows and batches.
    """

    form: Form

    def __init__(self, form: Form, packed: Mapping[Path, Any], apart: Mapping[Path, Tensor], memory: Recycled) -> None:
        self.form, self._memory = form, memory
        self._apart = {path: (apart[path].flatten(0, 1), nbytes) for path, nbytes in form.apart.items()}
        self._packed: Bytes | None = None
        for column in packed.values():
            self._packed = self._empty(len(column), form.layout.nbytes)
            form.layout.pack(packed, self._packed)
            break

    def places(self, order: Tensor) -> Ints:
        """An order of rows as :meth:`at` takes parts of it."""
        return order.numpy()

    def at(self, places: Ints, standing: Any = None) -> Parts:
        """The rows at these places."""
        form, packed = self.form, self._packed
        dicts, into = form.members.empty(), form.members.into
        if packed is None:
            pass
        elif _is_shared(places.size * form.layout.nbytes):
            rows = self._picked(packed, places)
            for part, found in zip(form.packed, dicts, strict=True):
                found.update(part.tensors(rows))
        else:
            bad = core.take_fields(packed, places, form.packed, dicts, self._memory, standing)
            self._require_found(bad, places, len(packed))
        few = torch.from_numpy(places)
        for path, (column, nbytes) in self._apart.items():
            # torch is quickest for a few rows
            picked = column.index_select(0, few) if len(places) * nbytes < SMALL else self._many(path, places)
            dicts[into[path]][path[-1]] = picked
        return dicts

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        """The rows of an index, as :func:`rows_of` says."""
        return self.form.leaves(self.at(index.numpy()))

    def _many(self, path: Path, places: Ints) -> Tensor:
        """Many rows of a field that is not packed."""
        field, (rows, nbytes) = self.form.fields[path], self._apart[path]
        source = rows.contiguous().view(-1).view(torch.uint8).numpy()
        picked = self._picked(source.reshape(len(rows), nbytes), places)
        return typed(picked.reshape(-1).view(numpy_dtype(field.dtype)).reshape(len(places), *field.shape), field.dtype)

    def _picked(self, source: Bytes, places: Ints) -> Bytes:
        """The rows of ``source`` at these places."""
        out = self._empty(places.size, source.shape[1])
        if _is_shared(out.size):
            torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(places), out=torch.from_numpy(out))
        else:
            self._require_found(core.take_rows(source, places, out), places, len(source))
        return out

    def _require_found(self, bad: int, places: Ints, count: int) -> None:
        if bad >= 0:
            raise IndexError(f"index {places[bad]} at place {bad}: there are {count} rows")

    def _empty(self, count: int, width: int) -> Bytes:
        return self._memory.take(count * width).reshape(count, width)


def _is_shared(nbytes: int) -> bool:
    """True if torch's threads copy so many bytes faster than one thread."""
    return nbytes >= SHARED_WORK and torch.get_num_threads() > FEW_THREADS
