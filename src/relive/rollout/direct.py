"""DirectRows: minibatches of a rollout in RAM, each gathered and made tensors in one compiled call."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from .. import kernels
from ..batches.tensordicts import Members
from ..kernels.reference.fields import INTO
from ..kernels.reference.packing import PackedFields
from ..kernels.tensor_calls import tensor_calls
from ..memory.blocks import SMALL, Recycled
from ..memory.layout import LARGE_FIELD, RowLayout
from ..returns.functions import scaled
from ..steps.arrays import Ints
from ..steps.schema import Field
from ..steps.trees import Path
from .columns import Columns
from .named import ADVANTAGE
from .packed import FEW_THREADS, SHARED_WORK

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["DirectRows", "Packing"]

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
    table[:, INTO] = [members.into[path] for path in layout.fields]
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
