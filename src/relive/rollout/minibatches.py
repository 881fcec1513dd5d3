"""Minibatches: the transitions of a rollout in random order, divided into batches ``[B]``."""

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
from ..kernels.reference.rows import FIELD_DICT, PackedFields
from ..kernels.tensor_calls import tensor_calls
from ..memory.allocator import SMALL, Recycled
from ..memory.layout import LARGE_FIELD, RowLayout, typed
from ..parameters import COUNT_RULE, is_count, require, seed_or_drawn
from ..returns import scaled
from ..steps.arrays import Ints, numpy_dtype
from ..steps.schema import Field, Path
from .columns import ADVANTAGE, Columns, unfinished

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "MANY",
    "Minibatches",
    "Permutations",
    "pack_columns",
    "parts",
    "parts_by_steps",
    "require_advantage",
    "rows_of",
]


Bytes = NDArray[np.uint8]

MANY = 16
"""Packing costs as much as an epoch that gathers each field by itself. So it pays from the second epoch on, or if an
epoch has so many batches that their calls for each field cost more."""

SHARED_WORK = 2**20
"""A batch of at least this many bytes is copied faster by torch's threads than by one thread."""

FEW_THREADS = 2
"""With at most this many threads, torch is slower than one thread that loads rows ahead."""


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

    _packing: Packing | None = None
    """How the columns of the last pass are packed."""

    def __init__(self, columns: Columns, memory: Recycled) -> None:
        self._columns, self._memory = columns, memory

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but where the columns lie."""
        return {**self.__dict__, "_packing": None}

    def batches(
        self,
        wanted: list[Path],
        bounds: list[tuple[int, int]],
        orders: Iterator[Tensor],
        *,
        pack: bool,
        normalize_advantage: bool,
    ) -> Iterator[TensorDict]:
        """Epoch after epoch, the minibatches of its order.

        Args:
            wanted: the columns.
            bounds: (begin, end) of each minibatch in an order; the first one is the longest.
            orders: the flat rows ``t * N + n`` of each epoch, int64.
            pack: True if it pays to pack the columns first.
            normalize_advantage: normalise ``advantage`` within each minibatch.
        """
        low, high = bounds[0] if bounds else (0, 0)
        rows = self._rows(wanted, pack, high - low)
        compiled, finished = rows if isinstance(rows, CompiledRows) else None, self._columns.is_finished
        for order in orders:
            places: Any = None if compiled is None else order.numpy()
            for low, high in bounds:
                batch = None if compiled is None else compiled.batch(places[low:high], normalize_advantage)
                if batch is None:
                    if isinstance(rows, CompiledRows):  # compiled code could not make a tensor
                        rows = rows_of(self._columns.select(wanted), pack, self._memory)
                    leaves = rows.gather(order[low:high])
                    if normalize_advantage:
                        leaves[ADVANTAGE] = scaled(leaves[ADVANTAGE])
                    batch = as_tensordict(leaves, (high - low,))
                yield batch if finished else unfinished(batch)

    def _rows(self, wanted: list[Path], pack: bool, longest: int) -> CompiledRows | HostRows | DeviceRows:
        """The rows of a pass whose longest batch has so many: the first of these three ways that can be taken.

        - :class:`CompiledRows`, one compiled call a batch: the columns are in RAM in one piece and worth packing, their
          fields are small and nested at most once, and torch's threads would not copy such a batch faster.
        - :class:`HostRows`, a call of Python or two for each field: all other columns in RAM.
        - :class:`DeviceRows`, two calls of torch for each field: columns on a device.
        """
        columns, packing = self._columns, self._packing
        if pack and columns.in_one_piece:
            if packing is None or packing.layout is not columns.layout or packing.wanted != wanted:
                packing = self._packing = Packing.of(columns, wanted)
            if packing.suits(longest):
                return CompiledRows(columns, packing, self._memory)
        return rows_of(columns.select(wanted), pack, self._memory)

    def reader(self, wanted: list[Path], pack: bool) -> Callable[[Tensor], dict[Path, Tensor]]:
        """A function that reads the rows of an index (flat rows, int64 ``[B]``); ``pack`` as in :func:`rows_of`."""
        return rows_of(self._columns.select(wanted), pack, self._memory).gather


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
    flat = {path: column.flatten(0, 1) for path, column in columns.items()}
    fields, layout = _laid_out(tuple([(path, x.shape[1:], x.dtype) for path, x in flat.items()]), pack)
    on_host = all(x.is_cpu for x in flat.values())
    return HostRows(flat, fields, layout, memory or Recycled()) if on_host else DeviceRows(flat, layout)


@lru_cache(maxsize=64)
def _laid_out(
    leaves: tuple[tuple[Path, tuple[int, ...], torch.dtype], ...], pack: bool
) -> tuple[dict[Path, Field], RowLayout]:
    """The fields of columns with these shapes and dtypes, and the layout of a packed row; every pass needs both."""
    fields = {path: Field(tuple(shape), dtype) for path, shape, dtype in leaves}
    return fields, RowLayout({path: x for path, x in fields.items() if pack and x.nbytes <= LARGE_FIELD})


class DeviceRows:
    """Rows on a device: torch packs the small fields, and picks all rows."""

    def __init__(self, flat: Mapping[Path, Tensor], layout: RowLayout) -> None:
        self._flat, self._layout, self._packed = flat, layout, None
        if layout.fields:
            some = flat[next(iter(layout.fields))]
            self._packed = torch.empty((len(some), layout.nbytes), dtype=torch.uint8, device=some.device)
            for path, view in layout.views(self._packed).items():
                view.copy_(flat[path])

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        """The rows of an index, as :func:`rows_of` says."""
        packed = {} if self._packed is None else self._layout.views(self._packed.index_select(0, index))
        return {path: packed[path] if path in packed else x.index_select(0, index) for path, x in self._flat.items()}


class HostRows:
    """Rows in RAM, as bytes: our kernels pack the small fields, and pick all rows."""

    def __init__(
        self, flat: Mapping[Path, Tensor], fields: Mapping[Path, Field], layout: RowLayout, memory: Recycled
    ) -> None:
        self._fields, self._layout, self._memory = fields, layout, memory
        self._take = kernels.fast().take_rows
        self._unpacked = {path: (x, fields[path].nbytes) for path, x in flat.items() if path not in layout.fields}
        if layout.fields:
            self._packed = self._empty(len(flat[next(iter(layout.fields))]), layout.nbytes)
            pack_columns(layout, flat, self._packed, 1)

    def gather(self, index: Tensor) -> dict[Path, Tensor]:
        """The rows of an index, as :func:`rows_of` says."""
        places = index.numpy()
        packed = self._layout.tensors(self._picked(self._packed, places)) if self._layout.fields else {}
        return {path: packed[path] if path in packed else self._column(path, index) for path in self._fields}

    def _column(self, path: Path, index: Tensor) -> Tensor:
        """The rows of a field that is not packed; torch is quickest for a few."""
        rows, width = self._unpacked[path]
        if len(index) * width < SMALL:
            return rows.index_select(0, index)
        field, source = self._fields[path], rows.contiguous().view(-1).view(torch.uint8).numpy()
        picked = self._picked(source.reshape(len(rows), width), index.numpy())
        return typed(picked.reshape(-1).view(numpy_dtype(field.dtype)).reshape(len(index), *field.shape), field.dtype)

    def _picked(self, source: Bytes, places: Ints) -> Bytes:
        """The rows of ``source`` at these places."""
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
    columns = [flat[path].contiguous() for path in layout.fields]  # alive while the kernel reads them by address
    kernels.fast().pack_rows(
        np.array([x.data_ptr() for x in columns], np.int64),
        np.array([field.nbytes for field in layout.fields.values()], np.int64),
        np.array([*layout.offsets.values()], np.int64),
        rows,
        steps,
    )


class CompiledRows:
    """Columns of a rollout, packed row by row; each batch of them takes one compiled call.

    Args:
        columns: of the rollout. They are in RAM, and their written rows in one piece.
        packing: of some of them; it has a batch.
        memory: gives the memory of rows.
    """

    def __init__(self, columns: Columns, packing: Packing, memory: Recycled) -> None:
        form, envs = packing.form, columns.num_envs
        assert form is not None
        count, addresses, fast = columns.count * envs, packing.addresses, kernels.fast()
        self._form, self._memory, self._take = form, memory, fast.take_batch
        self._rows = memory.take(count * form.width).reshape(count, form.width)
        if columns.start:  # the oldest row lies ``start`` steps behind the address of its column
            addresses = addresses + columns.start * envs * form.sizes
        fast.pack_rows(addresses, form.sizes, form.offsets, self._rows, 1)

    def batch(self, places: Ints, normalize_advantage: bool) -> TensorDict | None:
        """The batch of these rows; None if compiled code cannot make its tensors."""
        form, count = self._form, len(places)
        nbytes, members = count * form.width, form.members
        memory: NDArray[np.uint8] = np.empty(nbytes, np.uint8) if nbytes < SMALL else self._memory.take(nbytes)
        rows, leaves = _from_numpy(memory.reshape(count, form.width)), members.empty()
        # The kernel reads both objects by their ids, so both have to be alive until it returns.
        if self._take(form.handle, self._rows, places, id(rows), id(leaves)) != -1:
            return None
        if normalize_advantage:
            (name,) = ADVANTAGE
            leaves[0][name] = scaled(leaves[0][name])
        return members.batch(leaves, count)


_from_numpy: Any = cast("Any", torch).from_numpy  # its stubs do not say which arrays it takes


class Packing(NamedTuple):
    """Where some columns lie in RAM and what a batch of them looks like, as long as they have the same memory."""

    layout: object
    """The layout of the columns that this was made for."""
    wanted: list[Path]
    """The columns."""
    addresses: Ints
    """The address of each, in the order in which they are packed."""
    form: BatchForm | None
    """None if a batch takes more than one compiled call."""

    def suits(self, count: int) -> bool:
        """True if a batch of so many rows is made best in one call: torch's threads copy a long one faster."""
        form = self.form
        if form is None:
            return False
        return count * form.width < SHARED_WORK or torch.get_num_threads() <= FEW_THREADS

    @staticmethod
    def of(columns: Columns, wanted: list[Path]) -> Packing:
        """How these columns, which are in RAM, are packed and read."""
        form = _form_of(tuple([columns.described(path) for path in wanted]))
        places = () if form is None else form.places
        return Packing(columns.layout, wanted, np.array([columns.address(wanted[i]) for i in places], np.int64), form)


class BatchForm(NamedTuple):
    """How fields are packed into a row, and what compiled code makes of a batch of such rows."""

    members: Members
    """The dicts of a batch."""
    width: int
    """W, the bytes of a row."""
    sizes: Ints
    """The bytes of each field."""
    offsets: Ints
    """The byte of a row at which each field begins."""
    fields: PackedFields
    """The table that :attr:`handle` points to."""
    handle: Any
    """The form of :attr:`fields` that compiled kernels take."""
    names: tuple[str, ...]
    """The names that :attr:`fields` points to."""
    places: tuple[int, ...]
    """The number of each field's column among the wanted ones."""


@lru_cache(maxsize=64)
def _form_of(leaves: tuple[tuple[Path, tuple[int, ...], torch.dtype], ...]) -> BatchForm | None:
    """The batches of columns with these shapes and dtypes; None if a batch takes more than one compiled call."""
    fields = {path: Field(tuple(shape), dtype) for path, shape, dtype in leaves}
    calls, layout = tensor_calls(), RowLayout(fields)
    small = all(field.nbytes <= LARGE_FIELD for field in fields.values())
    if calls is None or layout.table is None or not small or not Members.suit(fields):
        return None
    members, table, names = Members(fields), layout.table.copy(), tuple(path[-1] for path in layout.fields)
    table[:, FIELD_DICT] = [members.into[path] for path in layout.fields]
    packed = PackedFields(calls.describe, calls.lend, calls.adopt, table, id(names))
    sizes, offsets = [field.nbytes for field in layout.fields.values()], [*layout.offsets.values()]
    places = tuple([*fields].index(path) for path in layout.fields)
    handle = kernels.fast().handle_of(packed)
    return BatchForm(
        members=members,
        width=layout.nbytes,
        sizes=np.array(sizes, np.int64),
        offsets=np.array(offsets, np.int64),
        fields=packed,
        handle=handle,
        names=names,
        places=places,
    )
