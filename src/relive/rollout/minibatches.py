"""Minibatches: the transitions of a rollout in random order, divided into batches ``[B]``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import core
from ..batches import Batch, Members
from ..errors import FieldError, ParameterError
from ..memory.allocator import Recycled
from ..memory.copier import BoundedCache
from ..memory.graphs import Graphed, has_graphs
from ..memory.layout import LARGE_FIELD, RowLayout
from ..parameters import COUNT_RULE, is_count, require, seed_or_drawn
from ..returns import scale
from ..steps.arrays import Array, Ints, numpy_view
from ..steps.schema import Field, Path
from ..turns import TURNS, Reuse, Spare, in_turn, page_locked
from .columns import ADVANTAGE, Columns

Bytes = NDArray[np.uint8]

Passed = tuple[tuple[Path, ...], bool, int, int]
"""The columns of a pass, whether it packs them, the oldest row's place, and how many there are."""

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


# Number k is a function of (seed, k): the same on every device and version of torch, and two integers resume it.
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

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_graphed": None}

    def restart(self, seed: int | None) -> None:
        """The next permutation is number 0 of this seed."""
        self.seed, self.draws = seed_or_drawn(seed), 0

    def reserve(self, count: int) -> int:
        """The number of the first of the next ``count`` permutations, which the caller makes."""
        self.draws += count
        return self.draws - count

    def next(self, count: int, device: torch.device | None = None, rows: Tensor | None = None) -> Tensor:
        """The next permutation of ``count`` items, by their numbers or as ``rows`` has them; on a device, or in RAM."""
        if device is None or device.type == "cpu":  # as `core.permutation` makes it, in a call less
            numbers = np.empty(count, np.int64)
            core.permute(self.seed, self.draws, numbers)
            order = torch.from_numpy(numbers)
        else:
            if self._graphed is None and has_graphs(device):
                self._graphed = Graphed(core.permute_on_device, device, tuple)
            order = core.permutation(count, self.seed, self.draws, device, self._graphed)
        self.draws += 1
        return order if rows is None else rows[order]

    def orders(
        self, count: int, device: torch.device, rows: Tensor | None, epochs: int, reshuffle: bool
    ) -> Iterator[Tensor]:
        """The order of each epoch: a new permutation, as :meth:`next` gives it, or that of the first epoch again."""
        order = None
        for _ in range(epochs):
            if order is None or reshuffle:
                order = self.next(count, device, rows)
            yield order


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
        if not ((type(num_batches) is int or is_count(num_batches)) and 1 <= num_batches <= total):
            raise ParameterError(f"num_batches={num_batches!r}: {total} {items} make 1 to {total} minibatches")
        size, more = divmod(total, num_batches)
        if drop_last:
            more = 0
        # The first ``more`` parts have one item more than the others.
        return list(pairwise(i * size + min(i, more) for i in range(num_batches + 1)))
    assert batch_size is not None
    if not (type(batch_size) is int or is_count(batch_size)) or batch_size < 1 or (drop_last and batch_size > total):
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


def require_advantage(normalize_advantage: bool, paths: list[Path]) -> None:
    """Refuse to normalise an advantage that is not among the columns.

    Raises:
        FieldError: there is no such column.
    """
    if normalize_advantage and ADVANTAGE not in paths:
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
        self._sources = BoundedCache[Passed, tuple[RowForm, dict[Path, Array], Spare]]()
        """How the rows of some columns are read, where these lie, and what was reused; while they have one layout."""
        self._layout: object = None
        """That layout."""

    def __getstate__(self) -> dict[str, object]:
        sources: object = BoundedCache[object, object]()
        return {**self.__dict__, "_sources": sources, "_layout": None}

    def batches(
        self,
        paths: list[Path],
        bounds: list[tuple[int, int]],
        orders: Iterator[Tensor],
        count: int,
        pack: bool,
        normalize_advantage: bool,
        reuse: Reuse,
    ) -> Iterator[Batch]:
        """Epoch after epoch, the minibatches of its order.

        Args:
            paths: the columns.
            bounds: (begin, end) of each minibatch in an order.
            orders: the flat rows ``t * N + n`` of each epoch, int64.
            count: the minibatches of all epochs.
            pack: True if it pays to pack the columns first.
            normalize_advantage: normalise ``advantage`` within each minibatch.
            reuse: write to the same memory in turn.
        """
        (name,) = ADVANTAGE

        def batches(rows: ArrayRows | TensorRows | None = None, standing: Any = None) -> Iterator[Batch]:
            if rows is None:
                rows = self._rows(paths, pack)
            for order in orders:
                places: Any = rows.places(order)
                for low, high in bounds:
                    batch = rows.at(places[low:high], standing)[0]
                    if normalize_advantage:
                        scale(batch[name])
                    yield batch

        def start() -> tuple[Callable[[Any], Iterator[Batch]], Spare, Callable[[Reuse], Any]]:
            rows = self._rows(paths, pack)
            return partial(batches, rows), rows.spare, rows.standing

        # rows are packed for the first minibatch, not by this call: columns may change until then
        return in_turn(start, count, reuse) if reuse else batches()

    def _rows(self, paths: list[Path], pack: bool) -> ArrayRows | TensorRows:
        """The rows of a pass."""
        columns = self._columns
        if columns.device.type != "cpu":
            return TensorRows(columns.select(paths), pack)
        if self._layout is not columns.layout:
            self._sources.clear()
            self._layout = columns.layout
        key = (*paths,), pack, columns.start, columns.count
        source = self._sources.get(key)
        if source is None:
            lines = pack and columns.num_steps * columns.num_envs <= FEW_ROWS
            leaves, arrays = columns.sources(paths)
            source = _form_of(leaves, lines=lines), arrays, Spare()
            if columns.in_one_piece:  # else they are copies
                self._sources.keep(key, source)
        form, arrays, spare = source
        return ArrayRows(form, arrays, pack, self._memory, spare)

    def reader(self, paths: list[Path], pack: bool) -> Callable[[Tensor], dict[Path, Tensor]]:
        """A function that reads the rows of an index (flat rows, int64 ``[B]``); ``pack`` as in :func:`rows_of`."""
        return self._rows(paths, pack).gather


def rows_of(
    columns: Mapping[Path, Tensor], pack: bool = True, memory: Recycled | None = None
) -> ArrayRows | TensorRows:
    """A snapshot of columns, packed row by row, in RAM or on a device.

    Its ``gather`` reads the rows of an index (int64, ``[B]``) as fresh tensors ``[B, ...]``; small fields share one
    block.

    Args:
        columns: path -> contiguous ``[T, N, ...]``; row ``t * N + n`` is step ``t`` of env ``n``. A field of more
            than LARGE_FIELD bytes is read where it lies.
        pack: False reads every field where it lies, into memory of its own.
        memory: gives the memory of batches, on the CPU; by default fresh memory.
    """
    if not all(column.is_cpu for column in columns.values()):
        return TensorRows(columns, pack)
    form = _form_of(tuple([(path, tuple(x.shape[2:]), x.dtype) for path, x in columns.items()]), pack)
    flat = {path: numpy_view(x.detach().flatten(0, 1).contiguous()) for path, x in columns.items()}
    return ArrayRows(form, flat, pack, memory or Recycled())


Parts = tuple[Batch, ...]
"""A batch, and those nested in it, as :class:`relive.batches.Members` has them."""


class RowForm(NamedTuple):
    """How the fields of a row are packed and read; every pass over fields of these shapes and dtypes needs it."""

    fields: dict[Path, Field]
    layout: RowLayout
    """The small fields, which a batch has side by side."""
    whole: core.Fields
    """All of them."""
    parts: tuple[core.Fields, ...]
    """Make tensors of these, for each dict of :attr:`members`."""
    large: dict[Path, tuple[core.Fields, ...]]
    """The other fields; makes the tensor of each for its dict."""
    members: Members
    """Makes the batches."""

    def leaves(self, dicts: Parts) -> dict[Path, Tensor]:
        """The fields of a batch by their paths."""
        into = self.members.into
        return {path: dicts[into[path]][path[-1]] for path in self.fields}


@lru_cache(maxsize=64)
def _form_of(
    leaves: tuple[tuple[Path, tuple[int, ...], torch.dtype], ...], pack: bool = True, lines: bool = False
) -> RowForm:
    fields = {path: Field(shape, dtype) for path, shape, dtype in leaves}
    small = {path: field for path, field in fields.items() if pack and field.nbytes <= LARGE_FIELD}
    layout, members = RowLayout(small, lines=lines), Members(fields)
    groups = [[path for path in small if members.into[path] == k] for k in range(len(members.empty()))]
    parts = tuple([layout.described(group, itemgetter(-1)) for group in groups])
    large = {path: (_alone(path, field),) for path, field in fields.items() if path not in small}
    return RowForm(fields, layout, layout.described(layout.fields), parts, large, members)


def _alone(path: Path, field: Field) -> core.Fields:
    """A field as the only one of its rows."""
    return core.Fields([(path[-1], field.dtype, field.shape, 0)], field.nbytes)


class Turn(NamedTuple):
    """Memory of a batch on a device, and the tensors over it, which are made once."""

    copies: list[tuple[Tensor, Tensor]]
    """The tables that rows are picked from, and where the rows go."""
    fields: dict[Path, Tensor]


class TensorRows:
    """Rows on a device: torch packs the small fields, and picks all rows.

    Args:
        columns: path -> ``[T, N, ...]``.
        pack: False reads every field where it lies.
    """

    def __init__(self, columns: Mapping[Path, Tensor], pack: bool) -> None:
        self.form: RowForm = _form_of(tuple([(path, tuple(x.shape[2:]), x.dtype) for path, x in columns.items()]), pack)
        self.spare: Spare = Spare()
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

    def standing(self, _: Reuse) -> list[dict[int, Turn]]:
        """Memory that batches are written to in turn, for :meth:`at`: that of a turn, by the rows of a batch."""
        return [{} for _ in range(TURNS)]

    def at(self, places: Tensor, standing: list[dict[int, Turn]] | None = None) -> Parts:
        """The rows at these places."""
        dicts, into = self.form.members.empty(), self.form.members.into
        if standing is None:
            packed = {} if self._packed is None else self.form.layout.views(self._packed.index_select(0, places))
            fields = {
                path: packed[path] if path in packed else x.index_select(0, places) for path, x in self._flat.items()
            }
        else:
            standing.append(slot := standing.pop(0))  # the turns go round
            turn = slot.get(len(places)) or slot.setdefault(len(places), self._turn(len(places)))
            for source, out in turn.copies:
                torch.index_select(source, 0, places, out=out)
            fields = turn.fields
        for path, field in fields.items():
            dict.__setitem__(dicts[into[path]], path[-1], field)
        return dicts

    def _turn(self, count: int) -> Turn:
        """Memory for so many rows."""
        with torch.inference_mode(False):  # tensors that are made there cannot show that they have changed
            large = {path: x for path, x in self._flat.items() if path not in self.form.layout.fields}
            copies = [(x, torch.empty((count, *x.shape[1:]), dtype=x.dtype, device=x.device)) for x in large.values()]
            fields = {path: out for path, (_, out) in zip(large, copies, strict=True)}
            if self._packed is not None:
                width, device = self.form.layout.nbytes, self._packed.device
                copies.append((self._packed, torch.empty((count, width), dtype=torch.uint8, device=device)))
                fields |= self.form.layout.views(copies[-1][1])
        return Turn(copies, {path: fields[path] for path in self._flat})

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        """The rows of an index, as :func:`rows_of` says."""
        return self.form.leaves(self.at(index))


# Packed rows are whole cache lines where all rows stay in the caches: at (2048, 8) with rows of 112 bytes a minibatch
# takes 49 µs instead of 67. Where rows come from memory their bytes count, and padding took up to a third longer at
# (24, 4096). A minibatch is gathered and made tensors in one call: 107 µs instead of 132 in a loop, 249 instead of 316
# after a step of Adam.
class ArrayRows:
    """Rows in RAM, as bytes: compiled code packs the small fields, first or on the way, and picks all rows.

    Args:
        form: of the rows.
        columns: path -> ``[T * N, ...]`` in one piece, the bits where NumPy lacks the dtype.
        pack: True packs the small fields first.
        memory: gives the memory of rows and batches.
        spare: memory that an earlier pass has left; by default there was none.
    """

    form: RowForm
    spare: Spare

    def __init__(
        self,
        form: RowForm,
        columns: Mapping[Path, Array],
        pack: bool,
        memory: Recycled,
        spare: Spare | None = None,
    ) -> None:
        self.spare: Spare = Spare() if spare is None else spare
        self.form, self._columns, self._memory = form, columns, memory
        self._count = len(next(iter(columns.values()))) if columns else 0
        small, width = tuple([columns[path] for path in form.layout.fields]), form.layout.nbytes
        self._packed: Bytes | None = None
        self._take: Callable[..., int] | None = None
        """Takes places and what is written to; copies the small fields of these rows. None without small fields."""
        if small and pack:
            self._packed = packed = memory.take(self._count * width).reshape(self._count, width)
            form.whole.pack(small, packed)
            self._take = partial(core.take_fields, packed)
        elif small:
            self._take = partial(core.take_columns, small, form.whole)
        self._large = [(form.members.into[p], x, self._bytes(p)) for p, x in form.large.items()] if form.large else []
        """For each large field the number of its batch, what makes its tensor, and its rows."""
        self._shared = SHARED_WORK // width
        """So many rows are more than one thread should copy."""

    def places(self, order: Tensor) -> Ints:
        """An order of rows as :meth:`at` takes parts of it."""
        return order.numpy()

    def standing(self, reuse: Reuse) -> list[core.Standing]:
        """Memory that batches are written to in turn, for :meth:`at`: for the small fields, and for each large one."""
        take = page_locked if reuse == "pinned" else None
        return [core.Standing(TURNS, take) for _ in (None, *self.form.large)]

    def at(self, places: Ints, standing: Sequence[core.Standing] | None = None) -> Parts:
        """The rows at these places. Threads share the work if it is much, in memory that they take themselves."""
        form = self.form
        dicts, take = form.members.empty(), self._take
        if take is None:
            pass
        elif len(places) > self._shared and not (standing and standing[0].lent) and _has_threads():
            self._share(places, dicts)
        elif (bad := take(places, form.parts, dicts, self._memory, standing and standing[0])) >= 0:
            self._refuse(bad, places)
        if self._large:
            self._add_large(places, dicts, standing)
        return dicts

    def _add_large(self, places: Ints, dicts: Parts, standing: Sequence[core.Standing] | None) -> None:
        """Put the large fields of the rows at these places into a batch."""
        for k, (batch, fields, rows) in enumerate(self._large, 1):
            found = dicts[batch]
            turn = None if standing is None else standing[k]
            if places.size * rows.shape[1] >= SHARED_WORK and not (turn and turn.lent) and _has_threads():
                found.update(fields[0].tensors(self._picked(rows, places)))
            elif (bad := core.take_fields(rows, places, fields, (found,), self._memory, turn)) >= 0:
                self._refuse(bad, places)

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        """The rows of an index, as :func:`rows_of` says."""
        return self.form.leaves(self.at(index.numpy()))

    def _bytes(self, path: Path) -> Bytes:
        """The rows of one column as bytes, ``[T * N, W]``."""
        return self._columns[path].reshape(-1).view(np.uint8).reshape(self._count, self.form.fields[path].nbytes)

    def _share(self, places: Ints, dicts: Parts) -> None:
        """The small fields of many rows, which torch's threads copy."""
        form = self.form
        if self._packed is not None:
            rows = self._picked(self._packed, places)
            for part, found in zip(form.parts, dicts, strict=True):
                found.update(part.tensors(rows))
            return
        for path in form.layout.fields:
            alone = _alone(path, form.fields[path])
            dicts[form.members.into[path]].update(alone.tensors(self._picked(self._bytes(path), places)))

    def _picked(self, source: Bytes, places: Ints) -> Bytes:
        """The rows of ``source`` at these places, copied by torch's threads."""
        out = self._memory.take(places.size * source.shape[1]).reshape(places.size, source.shape[1])
        torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(places), out=torch.from_numpy(out))
        return out

    def _refuse(self, bad: int, places: Ints) -> NoReturn:
        raise IndexError(f"index {places[bad]} at place {bad}: there are {self._count} rows")


def _has_threads() -> bool:
    """True if torch's threads copy SHARED_WORK bytes faster than one thread."""
    return torch.get_num_threads() > FEW_THREADS
