"""Minibatches of the rollouts of all ranks: equally many on every rank, however many rows each has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...batches.sequences import padding
from ...errors import FieldError, ParameterError
from ...parameters import COUNT_RULE, is_count, require
from ...returns.functions import EPS
from ...rollout.minibatches import MANY, require_advantage
from ...rollout.named import ADVANTAGE
from ...steps.arrays import Doubles, Ints
from ...steps.trees import Path
from ..parts import bounds_of_parts, number_of_batches
from ..plan import shard_key
from .ranks import Ranks, Report

if TYPE_CHECKING:
    from tensordict import TensorDict

    from ...rollout.buffer import RolloutBuffer

__all__ = ["minibatches"]

WEIGHT: Path = ("weight",)


def minibatches(
    rollout: RolloutBuffer,
    batch_size: int | None = None,
    *,
    num_batches: int | None = None,
    epochs: int = 1,
    blocks: int | None = None,
    fields: tuple[str, ...] | None = None,
    normalize_advantage: bool = False,
    group: Any = None,
) -> Iterator[TensorDict]:
    """This rank's rows of the minibatches of all ranks. Every real transition of every rank comes once an epoch.

    This is a collective call: all ranks make it with the same arguments, and then each reads its own minibatches. All
    ranks have equally many minibatches, and minibatch number i has the same number of rows, m, on all ranks. So a loop
    that makes one backward pass of DistributedDataParallel for each of them never waits for a rank that has none left.

    Each batch has a ``weight`` (float32 ``[m]``). Average ``(batch["weight"] * loss).mean()`` over the ranks, as
    DistributedDataParallel averages gradients. The result is the mean over the rows that all ranks have in this
    minibatch. If all ranks have equally many real transitions, every weight is 1. Otherwise a rank with fewer repeats
    some of its rows, with weight 0.

    The envs of all ranks are divided into ``blocks`` of neighbouring envs. Each block is shuffled by itself, and every
    minibatch takes an equal share of each block. The order of a block depends on the rollout's seed, on the number of
    the block, and on how many permutations came before. So the minibatches do not depend on the number of ranks, if
    ``blocks`` stays the same.

    Args:
        rollout: this rank's rollout, complete and finished. All ranks have the same ``seed``; sizes may differ.
        batch_size: the most rows of a minibatch, over all ranks together.
        num_batches: the number of minibatches in an epoch, instead of ``batch_size``.
        epochs: passes over the rollouts, each in a new order.
        blocks: the number of blocks, a multiple of the number of ranks. The default is one block for each rank. The
            blocks of a rank must divide its envs evenly.
        fields: the columns wanted; default all but ``mask`` and ``final_value``.
        normalize_advantage: normalise ``advantage`` within each minibatch of all ranks.
        group: the process group; None is the default one. If torch.distributed was not initialized, this process is
            the only rank.

    Raises:
        EmptyError: no rank has a real transition.
        ParameterError: sizes do not fit the rollouts, or ranks differ in what must be the same.
        FieldError: an unknown column.
        LifecycleError: another rank raised an error. In each of these cases all ranks raise one.
    """
    ranks = Ranks(group)
    share = _Share(rollout, ranks, blocks)
    sizes = batch_size, num_batches, epochs
    ranks.exchange("minibatches", lambda: share.report(sizes, fields, normalize_advantage))
    return share.batches(*sizes, normalize_advantage)


class _Share:
    """This rank's share of the minibatches of all ranks."""

    def __init__(self, rollout: RolloutBuffer, ranks: Ranks, blocks: int | None) -> None:
        inside: Any = rollout
        self.rollout, self.ranks, self.blocks = rollout, ranks, ranks.count if blocks is None else blocks
        self._columns, self._permutations, self._minibatches = inside._named, inside._permutations, inside._minibatches

    def report(self, sizes: tuple[Any, ...], fields: tuple[str, ...] | None, normalize: bool) -> Report:
        """What all ranks must agree on. Also finds the rows of this rank's blocks."""
        batch_size, num_batches, epochs = sizes
        given = {"batch_size": batch_size, "num_batches": num_batches}
        given = {name: size for name, size in given.items() if size is not None}
        require("minibatches", COUNT_RULE, epochs=epochs, **given)
        each, rest = divmod(self.blocks, self.ranks.count) if is_count(self.blocks, 1) else (0, 1)
        if rest or self.rollout.num_envs % each:
            raise ParameterError(
                f"blocks={self.blocks!r}: expected a multiple of the {self.ranks.count} ranks, so that a rank's blocks "
                f"divide its {self.rollout.num_envs} envs"
            )
        self.wanted: list[Path] = self._columns.wanted(fields)
        require_advantage(normalize, self.wanted)
        if WEIGHT in self.wanted:
            raise FieldError("field 'weight': minibatches of ranks have one of their own; name the others as fields")
        self._columns.require_steps()
        self.rows = self._rows_of_blocks(each)
        same = {
            "the seed": self._permutations.seed % 2**53,
            "the number of permutations drawn": self._permutations.draws,
            "batch_size (or -1)": -1 if batch_size is None else batch_size,
            "num_batches (or -1)": -1 if num_batches is None else num_batches,
            "epochs": epochs,
            "blocks": self.blocks,
            "normalize_advantage": normalize,
        }
        return Report(same, ())

    def _rows_of_blocks(self, each: int) -> list[Tensor]:
        """The flat rows ``t * N + n`` of the real transitions in each of this rank's blocks."""
        mask = self._columns["mask"]
        number = torch.arange(mask.numel(), device=mask.device).view(mask.shape)
        width = mask.shape[1] // each
        parts = [slice(k * width, (k + 1) * width) for k in range(each)]
        return [number[:, part][mask[:, part]] for part in parts]

    def batches(
        self, batch_size: int | None, num_batches: int | None, epochs: int, normalize: bool
    ) -> Iterator[TensorDict]:
        """The minibatches, once all ranks have agreed. At most two more exchanges come, both before the first one."""
        counts, mean = self._counted(normalize)
        number = number_of_batches(counts, batch_size, num_batches)
        bounds = bounds_of_parts(counts, number)
        first = self._permutations.reserve(epochs)
        scales = self._scales(bounds, first, epochs, mean) if normalize else None
        sizes = np.diff(bounds).reshape(self.ranks.count, len(self.rows), number).sum(1)
        pack = epochs > 1 or number >= MANY
        return self._read(bounds[self._own], sizes, first, epochs, pack, scales)

    @property
    def _own(self) -> slice:
        """The numbers of this rank's blocks."""
        begin = self.ranks.rank * len(self.rows)
        return slice(begin, begin + len(self.rows))

    def _counted(self, normalize: bool) -> tuple[Ints, float]:
        """How many rows each block of all ranks has, int64 ``[S]``, and their mean advantage; 0 if it is not wanted."""

        def report() -> Report:
            sums = [float(self._advantage(rows).sum()) if normalize else 0.0 for rows in self.rows]
            return Report({}, (*map(len, self.rows), *sums))

        table = self.ranks.exchange("minibatches: rows", report)
        counts, sums = np.split(table, 2, 1)
        entries = counts.sum() * self._width if normalize else 1.0
        return counts.ravel().astype(np.int64), float(sums.ravel().sum() / max(entries, 1.0))

    @property
    def _width(self) -> int:
        """How many numbers the advantage of one transition has."""
        return self._columns["advantage"].shape[2:].numel()

    def _advantage(self, rows: Tensor) -> Doubles:
        """The advantages at flat rows, float64 ``[B, entries]``."""
        return self._columns["advantage"].flatten(0, 1)[rows].double().reshape(len(rows), self._width).cpu().numpy()

    def _order(self, number: int, k: int) -> Tensor:
        """The rows of the own block ``k`` in the order of permutation ``number``."""
        rows, block = self.rows[k], self._own.start + k
        order = kernels.permutation(len(rows), shard_key(self._permutations.seed, number, block), 0)
        return rows[order.to(rows.device)]

    def _scales(self, bounds: Ints, first: int, epochs: int, mean: float) -> tuple[Doubles, Doubles]:
        """The mean and the standard deviation of the advantages of each minibatch of all ranks, ``[epochs, K]`` each.

        The sums are taken around the mean of all advantages, so that they lose no digits. They are taken block by
        block, so that they are the same for any number of ranks.
        """
        number = bounds.shape[1] - 1
        shape = len(self.rows), 2, epochs, number

        def report() -> Report:
            sums = np.zeros(shape)
            for k, begins in enumerate(bounds[self._own]):
                some = int(np.count_nonzero(np.diff(begins)))  # the minibatches with rows of this block come first
                for epoch in range(epochs if some else 0):
                    centred = self._advantage(self._order(first + epoch, k)) - mean
                    sums[k, 0, epoch, :some] = np.add.reduceat(centred.sum(1), begins[:some])
                    sums[k, 1, epoch, :some] = np.add.reduceat(np.square(centred).sum(1), begins[:some])
            return Report({}, sums.ravel().tolist())

        table = self.ranks.exchange("minibatches: advantages", report)
        total, squares = table.reshape(-1, *shape[1:]).sum(0)
        entries = np.diff(bounds).sum(0) * self._width
        off = total / entries
        variance = (squares - entries * np.square(off)) / np.maximum(entries - 1, 1)
        return mean + off, np.sqrt(np.maximum(variance, 0.0))

    def _read(
        self, bounds: Ints, sizes: Ints, first: int, epochs: int, pack: bool, scales: tuple[Doubles, Doubles] | None
    ) -> Iterator[TensorDict]:
        """The minibatches one after another. ``sizes`` has the rows of each rank in each minibatch, ``[R, K]``."""
        gather = self._minibatches.reader(self.wanted, pack)
        for epoch in range(epochs):
            orders = [self._order(first + epoch, k) for k in range(len(self.rows))]
            for i, (rows, total) in enumerate(zip(sizes.max(0).tolist(), sizes.sum(0).tolist(), strict=True)):
                parts = [order[low:high] for order, (low, high) in zip(orders, bounds[:, i : i + 2], strict=True)]
                leaves = self._gathered(gather, torch.cat(parts), rows, rows * self.ranks.count / total)
                if scales is not None:
                    mean, std = scales[0][epoch, i], scales[1][epoch, i]
                    advantage = leaves[ADVANTAGE]
                    leaves[ADVANTAGE] = ((advantage.double() - mean) / (std + EPS)).to(advantage.dtype)
                yield self._columns.batch(leaves, (rows,))

    def _gathered(self, gather: Any, index: Tensor, rows: int, weight: float) -> dict[Path, Tensor]:
        """The fields of the rows ``index``, filled up to ``rows`` rows, and their weights."""
        count, column = len(index), torch.full((rows,), weight, device=index.device)
        if count < rows:
            column[count:] = 0.0
            others = index if count else torch.cat([*self.rows, index.new_zeros(1)])[:1]
            index = others.repeat(-(-rows // len(others)))[:rows]
        leaves = gather(index)
        if not count and not any(len(rows) for rows in self.rows):  # no row of this rank may be read
            leaves = {path: torch.full_like(leaf, padding(path)) for path, leaf in leaves.items()}
        leaves[WEIGHT] = column
        return leaves
