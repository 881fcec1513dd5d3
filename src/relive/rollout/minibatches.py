"""Minibatches: the transitions of a rollout in random order, divided into batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..batches import Members, as_tensordict
from ..errors import FieldError, ParameterError
from ..kernels.reference.rows import LINE_INTO, PackedFields
from ..kernels.tensor_calls import tensor_calls
from ..memory.keeper import SMALL, Recycled
from ..memory.layout import LARGE_FIELD, RowLayout, typed
from ..parameters import COUNT_RULE, FLAG_RULE, is_count, require, seed_or_drawn
from ..returns import scaled
from ..steps.arrays import Ints, numpy_dtype
from ..steps.schema import Field, Path
from .columns import ADVANTAGE, Columns, NamedColumns, unfinished

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = [
    "MANY",
    "DirectRows",
    "Minibatches",
    "PackedRows",
    "Packing",
    "Permutations",
    "pack_columns",
    "parts",
    "parts_by_steps",
    "require_advantage",
]


Bytes = NDArray[np.uint8]

SHARED_WORK = 2**20
"""A batch of at least this many bytes is copied faster by torch's threads than by one thread."""
FEW_THREADS = 2
"""With at most this many threads, torch is slower than one thread that loads rows ahead."""


class PackedRows:
    """A snapshot of columns, packed row by row.

    Args:
        columns: path -> contiguous ``[T, N, ...]``; row ``t * N + n`` is step ``t`` of env ``n``. A field of more
            than LARGE_FIELD bytes is read where it lies.
        pack: False reads every field where it lies.
        memory: gives the memory of batches, on the CPU; by default fresh memory.
    """

    def __init__(self, columns: Mapping[Path, Tensor], pack: bool = True, memory: Recycled | None = None) -> None:
        flat = {path: column.flatten(0, 1) for path, column in columns.items()}
        fields, layout = _laid_out(tuple((path, x.shape[1:], x.dtype) for path, x in flat.items()), pack)
        on_host = all(x.is_cpu for x in flat.values())
        rows = _HostRows(flat, fields, layout, memory or Recycled()) if on_host else _DeviceRows(flat, layout)
        self.gather: Callable[[Tensor], dict[Path, Tensor]] = rows.gather
        """The rows of an index (int64, ``[B]``) as fresh tensors ``[B, ...]``; small fields share one block."""


@lru_cache(maxsize=64)
def _laid_out(
    leaves: tuple[tuple[Path, tuple[int, ...], torch.dtype], ...], pack: bool
) -> tuple[dict[Path, Field], RowLayout]:
    """The fields of columns with these shapes and dtypes, and the layout of a packed row; each pass asks again."""
    fields = {path: Field(tuple(shape), dtype) for path, shape, dtype in leaves}
    return fields, RowLayout({path: x for path, x in fields.items() if pack and x.nbytes <= LARGE_FIELD})


class _DeviceRows:
    """Rows on a device: torch packs the small fields, and picks all rows."""

    def __init__(self, flat: Mapping[Path, Tensor], layout: RowLayout) -> None:
        self._flat, self._layout, self._packed = flat, layout, None
        if layout.fields:
            some = flat[next(iter(layout.fields))]
            self._packed = torch.empty((len(some), layout.nbytes), dtype=torch.uint8, device=some.device)
            for path, view in layout.views(self._packed).items():
                view.copy_(flat[path])

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        packed = {} if self._packed is None else self._layout.views(self._packed.index_select(0, index))
        return {path: packed[path] if path in packed else x.index_select(0, index) for path, x in self._flat.items()}


class _HostRows:
    """Rows in RAM, as bytes: our kernels pack the small fields, and pick all rows."""

    def __init__(
        self, flat: Mapping[Path, Tensor], fields: Mapping[Path, Field], layout: RowLayout, memory: Recycled
    ) -> None:
        self._fields, self._layout, self._memory = fields, layout, memory
        self._take = kernels.fast().take_rows
        self._apart = {path: x for path, x in flat.items() if path not in layout.fields}
        if layout.fields:
            self._packed = self._empty(len(flat[next(iter(layout.fields))]), layout.nbytes)
            pack_columns(layout, flat, self._packed, 1)

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        places = index.numpy()
        packed = self._layout.tensors(self._taken(self._packed, places)) if self._layout.fields else {}
        return {path: packed[path] if path in packed else self._column(path, index) for path in self._fields}

    def _column(self, path: Path, index: Tensor) -> Tensor:
        """The rows of a field that is not packed; torch is quickest for a few."""
        field, rows = self._fields[path], self._apart[path]
        if len(index) * field.nbytes < SMALL:
            return rows.index_select(0, index)
        taken = self._taken(_bytes(rows, field.nbytes), index.numpy())
        return typed(taken.reshape(-1).view(numpy_dtype(field.dtype)).reshape(len(index), *field.shape), field.dtype)

    def _taken(self, source: Bytes, places: Ints) -> Bytes:
        count, width = places.size, source.shape[1]
        out = np.empty((count, width), np.uint8) if count * width < SMALL else self._empty(count, width)
        if out.size >= SHARED_WORK and torch.get_num_threads() > FEW_THREADS:
            torch.index_select(torch.from_numpy(source), 0, torch.from_numpy(places), out=torch.from_numpy(out))
            return out
        bad = self._take(source, places, out)
        if bad >= 0:
            raise IndexError(f"index {places[bad]} at place {bad}: there are {len(source)} rows")
        return out

    def _empty(self, count: int, width: int) -> Bytes:
        return self._memory.take(count * width).reshape(count, width)


def pack_columns(layout: RowLayout, flat: Mapping[Path, Tensor], rows: Bytes, steps: int) -> None:
    """Pack columns in RAM, ``[T * N, ...]`` each, env by env: step ``t`` of env ``n`` goes to row ``n * steps + t``.

    Args:
        layout: of a packed row.
        flat: path -> column; row ``t * N + n`` is step ``t`` of env ``n``.
        rows: uint8 ``[N * T, bytes]``, to be written.
        steps: T; with 1, every row keeps its place.
    """
    columns = [flat[path].contiguous() for path in layout.fields]  # kept while the kernel reads them by address
    kernels.fast().pack_rows(
        np.array([x.data_ptr() for x in columns], np.int64),
        np.array([field.nbytes for field in layout.fields.values()], np.int64),
        np.array([*layout.offsets.values()], np.int64),
        rows,
        steps,
    )


def _bytes(rows: Tensor, nbytes: int) -> Bytes:
    """Rows of ``nbytes`` bytes as uint8 ``[R, bytes]``."""
    return rows.contiguous().view(-1).view(torch.uint8).numpy().reshape(len(rows), nbytes)


_from_numpy: Any = cast("Any", torch).from_numpy  # its stubs do not say which arrays it takes


class _Batch(NamedTuple):
    """What is packed of a step, and what compiled code makes of a batch of such rows."""

    members: Members
    """The dicts of a batch."""
    width: int
    """W, the bytes of a row."""
    sizes: Ints
    """The bytes of each field."""
    offsets: Ints
    """Where each begins."""
    fields: PackedFields
    """What :attr:`handle` points to."""
    handle: Any
    """What compiled kernels take for :attr:`fields`."""
    names: tuple[str, ...]
    """The names that :attr:`fields` points to."""
    places: tuple[int, ...]
    """Which of the columns each field is."""


@lru_cache(maxsize=64)
def _batch_of(leaves: tuple[tuple[Path, tuple[int, ...], torch.dtype], ...]) -> _Batch | None:
    """What is made of columns with these shapes and dtypes; None if that takes more than one call."""
    fields = {path: Field(tuple(shape), dtype) for path, shape, dtype in leaves}
    calls, layout = tensor_calls(), RowLayout(fields)
    small = all(field.nbytes <= LARGE_FIELD for field in fields.values())
    if calls is None or layout.table is None or not small or not Members.suit(fields):
        return None
    members, table, names = Members(fields), layout.table.copy(), tuple(path[-1] for path in layout.fields)
    table[:, LINE_INTO] = [members.into[path] for path in layout.fields]
    packed = PackedFields(calls.describe, calls.lend, calls.adopt, table, id(names))
    sizes, offsets = [field.nbytes for field in layout.fields.values()], [*layout.offsets.values()]
    places = tuple([*fields].index(path) for path in layout.fields)
    handle = kernels.fast().handle_of(packed)
    return _Batch(
        members, layout.nbytes, np.array(sizes, np.int64), np.array(offsets, np.int64), packed, handle, names, places
    )


class Packing(NamedTuple):
    """Where some columns lie in RAM and what is made of them, as long as they have the same memory."""

    layout: object
    """That of the columns."""
    wanted: list[Path]
    """Which columns they are."""
    addresses: Ints
    """The address of each, in the order in which they are packed."""
    batch: _Batch | None
    """None if it takes more than one call."""

    def suits(self, count: int) -> bool:
        """Whether a batch of so many rows is made best in one call: torch's threads copy a long one faster."""
        batch = self.batch
        if batch is None:
            return False
        return count * batch.width < SHARED_WORK or torch.get_num_threads() <= FEW_THREADS

    @staticmethod
    def of(columns: Columns, wanted: list[Path]) -> Packing:
        """How these columns, which are in RAM, are packed and read."""
        batch = _batch_of(tuple(columns.described(path) for path in wanted))
        places = () if batch is None else batch.places
        return Packing(columns.layout, wanted, np.array([columns.address(wanted[i]) for i in places], np.int64), batch)


class DirectRows:
    """Columns of a rollout, packed row by row, and batches of them.

    Args:
        columns: of the rollout. They are in RAM, and their written rows in one piece.
        packing: that of some columns; it has a batch.
        memory: gives the memory of rows.
    """

    def __init__(self, columns: Columns, packing: Packing, memory: Recycled) -> None:
        batch, envs = packing.batch, columns.num_envs
        assert batch is not None
        count, addresses, fast = columns.count * envs, packing.addresses, kernels.fast()
        self._batch, self._memory, self._take = batch, memory, fast.take_batch
        self._rows = memory.take(count * batch.width).reshape(count, batch.width)
        if columns.start:
            addresses = addresses + columns.start * envs * batch.sizes
        fast.pack_rows(addresses, batch.sizes, batch.offsets, self._rows, 1)

    def take(self, places: Ints, normalize_advantage: bool) -> TensorDict | None:
        """The batch of these rows; None if that takes more than one call."""
        batch, count = self._batch, len(places)
        nbytes, members = count * batch.width, batch.members
        memory: NDArray[np.uint8] = np.empty(nbytes, np.uint8) if nbytes < SMALL else self._memory.take(nbytes)
        rows, found = _from_numpy(memory.reshape(count, batch.width)), members.empty()
        if self._take(batch.handle, self._rows, places, id(rows), id(found)) != -1:
            return None
        if normalize_advantage:
            (name,) = ADVANTAGE
            found[0][name] = scaled(found[0][name])
        return members.batch(found, count)


MANY = 16
"""Packing costs as much as an epoch that gathers each field by itself. So it pays from the second epoch on, or if an
epoch has so many batches that their calls for each field cost more."""


class Permutations:
    """Random orders: permutation number k is a function of (seed, k) alone.

    Args:
        seed: None draws one from torch's default generator.
    """

    def __init__(self, seed: int | None) -> None:
        self.restart(seed)

    def restart(self, seed: int | None) -> None:
        """The next permutation is number 0 of this seed."""
        self.seed, self.draws = seed_or_drawn(seed), 0

    def reserve(self, count: int) -> int:
        """The number of the first of the next ``count`` permutations, which the caller makes."""
        self.draws += count
        return self.draws - count

    def next(self, count: int) -> Tensor:
        """The next permutation of ``count`` items, on the CPU."""
        order = kernels.permutation(count, self.seed, self.draws)
        self.draws += 1
        return order


class Minibatches:
    """Reads the real transitions of a rollout, one by one, as batches ``[B]``.

    Args:
        columns: of the rollout.
        device: where they lie.
        permutations: the orders in which transitions are drawn.
        memory: gives the memory of batches, on the CPU.
    """

    def __init__(
        self, columns: NamedColumns, device: torch.device, permutations: Permutations, memory: Recycled
    ) -> None:
        self._columns, self._device, self._permutations, self._memory = columns, device, permutations, memory

    _packing: Packing | None = None
    """That of the last pass."""

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but where the columns lie."""
        return {**self.__dict__, "_packing": None}

    def flat(self, fields: tuple[str, ...] | None) -> TensorDict:
        """All of them, time first (row ``t * N + n``), copied."""
        self._columns.require_steps()
        rows = self._columns.real_rows()
        columns = self._flat_columns(fields)
        batch = {path: x.clone() if rows is None else x.index_select(0, rows) for path, x in columns.items()}
        return self._columns.batch(batch, (self._columns.count(rows),))

    def sample(self, batch_size: int, fields: tuple[str, ...] | None) -> TensorDict:
        """A random batch, drawn without replacement."""
        self._columns.require_steps()
        rows = self._columns.real_rows()
        total = self._columns.count(rows)
        if not (is_count(batch_size, 1) and batch_size <= total):
            raise ParameterError(f"sample({batch_size!r}): the rollout holds {total} transitions; ask for 1 to {total}")
        order = self._permutation(rows)[:batch_size]
        batch = {path: x.index_select(0, order) for path, x in self._flat_columns(fields).items()}
        return self._columns.batch(batch, (batch_size,))

    def minibatches(
        self,
        batch_size: int | None,
        num_batches: int | None,
        epochs: int,
        drop_last: bool,
        reshuffle: bool,
        fields: tuple[str, ...] | None,
        normalize_advantage: bool,
    ) -> Iterator[TensorDict]:
        """Epoch after epoch, all of them in random order; sizes and columns are checked at once."""
        self._columns.require_steps()
        require("minibatches", COUNT_RULE, epochs=epochs)
        flags = {"drop_last": drop_last, "reshuffle": reshuffle, "normalize_advantage": normalize_advantage}
        require("minibatches", FLAG_RULE, **flags)
        rows = self._columns.real_rows()
        bounds = parts(self._columns.count(rows), batch_size, num_batches, drop_last)
        wanted = self._columns.wanted(fields)
        require_advantage(normalize_advantage, wanted)
        orders = self._orders(rows, epochs, reshuffle)
        pack = epochs > 1 or len(bounds) >= MANY
        return self._batches(wanted, bounds, orders, pack, normalize_advantage)

    def reader(self, wanted: list[Path], pack: bool) -> Callable[[Tensor], dict[Path, Tensor]]:
        """What reads the rows of an index (flat rows, int64 ``[B]``); see :class:`PackedRows` for ``pack``."""
        return PackedRows(self._columns.ordered(wanted), pack, self._memory).gather

    def _direct(self, wanted: list[Path], count: int) -> DirectRows | None:
        """The packed rows, if a batch of so many of them takes one compiled call."""
        columns, packing = self._columns.in_ram, self._packing
        if columns is None:
            return None
        if packing is None or packing.layout is not columns.layout or packing.wanted != wanted:
            packing = self._packing = Packing.of(columns, wanted)
        return DirectRows(columns, packing, self._memory) if packing.suits(count) else None

    def _batches(
        self,
        wanted: list[Path],
        bounds: list[tuple[int, int]],
        orders: Iterator[Tensor],
        pack: bool,
        normalize_advantage: bool,
    ) -> Iterator[TensorDict]:
        low, high = bounds[0] if bounds else (0, 0)  # the longest
        direct, finished = self._direct(wanted, high - low) if pack else None, self._columns.is_finished
        gather = self.reader(wanted, pack) if direct is None else None
        for order in orders:
            places: Any = None if direct is None else order.numpy()
            for low, high in bounds:
                batch = None if direct is None else direct.take(places[low:high], normalize_advantage)
                if batch is None:
                    gather = self.reader(wanted, pack) if gather is None else gather
                    leaves = gather(order[low:high])
                    if normalize_advantage:
                        leaves[ADVANTAGE] = scaled(leaves[ADVANTAGE])
                    batch = as_tensordict(leaves, (high - low,))
                yield batch if finished else unfinished(batch)

    def _flat_columns(self, fields: tuple[str, ...] | None) -> dict[Path, Tensor]:
        wanted = self._columns.ordered(self._columns.wanted(fields))
        return {path: column.flatten(0, 1) for path, column in wanted.items()}

    def _permutation(self, rows: Tensor | None) -> Tensor:
        """The next permutation of the flat rows that are real."""
        order = self._permutations.next(self._columns.count(rows)).to(self._device)
        return order if rows is None else rows[order]

    def _orders(self, rows: Tensor | None, epochs: int, reshuffle: bool) -> Iterator[Tensor]:
        """The order of each epoch."""
        order = None
        for _ in range(epochs):
            order = self._permutation(rows) if order is None or reshuffle else order
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
        if not (is_count(num_batches, 1) and num_batches <= total):
            raise ParameterError(f"num_batches={num_batches!r}: {total} {items} make 1 to {total} minibatches")
        size, more = divmod(total, num_batches)
        if drop_last:
            more = 0
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
    begin, found = 0, list[tuple[int, int]]()
    while begin < len(lengths):
        before = until[begin - 1] if begin else 0
        end = max(bisect_right(until, before + batch_steps), begin + 1)
        found.append((begin, end))
        begin = end
    return found


def require_advantage(normalize_advantage: bool, wanted: list[Path]) -> None:
    """Refuse to normalise an advantage that is not among the columns.

    Raises:
        FieldError: there is no such column.
    """
    if normalize_advantage and ADVANTAGE not in wanted:
        raise FieldError(
            "normalize_advantage: this batch has no 'advantage'; call finish(...) first, and name it if you pass fields"
        )
