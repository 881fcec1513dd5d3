"""Sequences of the rollouts of all ranks: equally many batches on every rank, weighted by their numbers of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...batches.sequences import Overlap, SequenceBatch
from ...parameters import COUNT_RULE, require
from ...returns.functions import EPS
from ...rollout.named import ADVANTAGE
from ...steps.arrays import Doubles
from .ranks import Ranks, Report

if TYPE_CHECKING:
    from ...rollout.buffer import RolloutBuffer

__all__ = ["sequences"]


def sequences(
    rollout: RolloutBuffer,
    length: int | None = None,
    *,
    num_batches: int = 1,
    overlap: Overlap = "none",
    complete: bool = False,
    drop_tail: bool = False,
    epochs: int = 1,
    shuffle: bool = True,
    fields: tuple[str, ...] | None = None,
    time_first: bool = True,
    normalize_advantage: bool = False,
    group: Any = None,
) -> Iterator[SequenceBatch]:
    """This rank's sequences, in equally many batches on all ranks.

    This is a collective call. So is the step to each next batch, which takes one small all-reduce. All ranks must read
    all of their batches.

    Each batch is one of :meth:`relive.RolloutBuffer.sequences` and has a ``weight`` (float32 ``[B]``), the same for all
    of its sequences. With a ``loss`` ``[L, B]``, average ``(seq["weight"] * loss * seq["mask"]).sum() /
    seq["mask"].sum()`` over the ranks, as DistributedDataParallel averages gradients. The result is the mean over the
    steps of all ranks in this batch.

    Args:
        rollout: this rank's rollout, complete and finished.
        length: steps of a window; None makes one window of each episode.
        num_batches: the number of batches in an epoch. Every rank must have at least as many sequences.
        normalize_advantage: normalise ``advantage`` over the steps of all ranks in each batch.
        group: the process group; None is the default one. If torch.distributed was not initialized, this process is
            the only rank.

    The other arguments are those of :meth:`relive.RolloutBuffer.sequences`.

    Raises:
        EmptyError, ParameterError, FieldError: as that method, on any rank; or ranks differ in an argument.
        LifecycleError: another rank raised an error. In each of these cases all ranks raise one.
    """
    ranks, found = Ranks(group), list[Iterator[SequenceBatch]]()

    def report() -> Report:
        require("sequences", COUNT_RULE, num_batches=num_batches, epochs=epochs)
        options: dict[str, Any] = {"overlap": overlap, "complete": complete, "drop_tail": drop_tail, "shuffle": shuffle}
        options |= {"num_batches": num_batches, "epochs": epochs, "fields": fields, "time_first": time_first}
        found.append(rollout.sequences(length, **options))
        if normalize_advantage:
            rollout["advantage"]  # its error names the columns that there are
        return Report({"num_batches": num_batches, "epochs": epochs, "normalize_advantage": normalize_advantage}, ())

    ranks.exchange("sequences", report)
    return _weighted(ranks, found[0], num_batches * epochs, normalize_advantage)


def _weighted(ranks: Ranks, batches: Iterator[SequenceBatch], count: int, normalize: bool) -> Iterator[SequenceBatch]:
    """The batches with their weights. Each is read within the exchange, so that all ranks raise an error of one."""
    for _ in range(count):
        read = list[SequenceBatch]()

        def report(read: list[SequenceBatch] = read) -> Report:
            read.append(next(batches))
            return Report({}, _moments(read[0], normalize))

        table = ranks.exchange("sequences: batch", report)
        batch, steps = read[0], table[:, 0]
        share = ranks.count * steps[ranks.rank] / steps.sum()
        weight = torch.full((batch.num_sequences,), float(share), device=batch["mask"].device)
        yield batch.changed({ADVANTAGE: _normalized(batch, table)} if normalize else {}, {"weight": weight})


def _moments(batch: SequenceBatch, normalize: bool) -> tuple[float, ...]:
    """Four numbers: steps; advantages; the mean of the advantages; the sum of their squared distances from it."""
    if not normalize:
        return float(batch.num_steps), 0.0, 0.0, 0.0
    entries = batch["advantage"][batch["mask"]].double()
    mean = entries.mean()
    return float(batch.num_steps), float(entries.numel()), mean.item(), (entries - mean).square().sum().item()


def _normalized(batch: SequenceBatch, table: Doubles) -> torch.Tensor:
    """The advantages of a batch, normalized over the steps of all ranks; 0 elsewhere.

    Moments of parts are joined as by Chan, Golub and LeVeque (1979), which loses no digits.
    """
    counts, means, squares = table[:, 1], table[:, 2], table[:, 3]
    mean = (counts * means).sum() / counts.sum()
    around = squares.sum() + (counts * np.square(means - mean)).sum()
    std = np.sqrt(around / max(counts.sum() - 1, 1))
    advantage, mask = batch["advantage"], batch["mask"]
    wide = mask.reshape(*mask.shape, *[1] * (advantage.dim() - 2))
    return torch.where(wide, (advantage.double() - mean) / (std + EPS), 0.0).to(advantage.dtype)
