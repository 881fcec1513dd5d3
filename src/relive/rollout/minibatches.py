"""Minibatches: the transitions of a rollout in random order, divided into batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..batches.tensordicts import as_tensordict
from ..errors import FieldError, ParameterError
from ..memory.blocks import Recycled
from ..parameters import COUNT_RULE, FLAG_RULE, is_count, require, seed_or_drawn
from ..returns.functions import scaled
from ..steps.trees import Path
from .direct import DirectRows, Packing
from .named import ADVANTAGE, NamedColumns, unfinished
from .packed import PackedRows

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

__all__ = ["MANY", "Minibatches", "Permutations", "parts", "parts_by_steps", "require_advantage"]

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
