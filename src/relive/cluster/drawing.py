"""Drawing: one batch out of several shards, also while some of them fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import LifecycleError
from ..kernels.reference.random import key
from ..samplers.prioritized import Prioritized
from .blocks import Block, joined_batch, unpacked
from .checkpoints import Checkpoint
from .division import Division
from .group import Group
from .plan import Doubles, global_weights, shard_counts, shard_key, shard_masses
from .shard import Share

__all__ = ["Drawing"]


AGAIN = 1 << 62
"""Added to the number of an attempt: the seed of its counts is then that of no batch."""


class _Drawn(NamedTuple):
    """Rows that one shard drew for a batch."""

    shard: int
    mass: float
    """What the shard weighed when the counts were drawn."""
    life: int
    block: Block


class Drawing:
    """Draws batches from the shards that answer.

    Args:
        group: the shards.
        division: which envs they have.
    """

    def __init__(self, group: Group, division: Division) -> None:
        self._group, self._division = group, division
        self.redrawn = 0
        """Rows that a shard did not give, and that others gave instead."""

    def batch(self, state: Checkpoint, batch_size: int) -> Any:
        """Batch number ``state.draws``. The totals of the shards were just read.

        The shards' masses give the counts, and each shard draws from what it has by then. A row's probability is that
        of both together, so it is exact although rows may come or be rated in between. Without such rows a prioritized
        batch is the one that a single ring of all rows draws.

        Raises:
            EmptyError: no shard that answers has anything to draw.
            LifecycleError: no shard answers, or none gives rows.
        """
        group, drawn, used = self._group, list[_Drawn](), dict[int, float]()
        patience = (group.count + 1) * group.timeout  # each shard may take its time
        missing, attempt, end = batch_size, 0, time.monotonic() + patience
        while missing:
            masses = self._masses()
            shares = self._shares(state, masses, missing, attempt)
            asked = {shard: ("sample", share, group.largest) for shard, share in shares.items()}
            for shard, (totals, block) in group.ask(asked).items():
                group.note(shard, totals)
                if block is not None:
                    drawn.append(_Drawn(shard, float(masses[shard]), group.life(shard, totals.born), block))
                    missing -= shares[shard].rows
            used = {k: used.get(k, float(masses[k])) for k in {*group.up, *(part.shard for part in drawn)}}
            attempt += 1
            if missing:
                self.redrawn += missing
                if time.monotonic() > end:
                    raise LifecycleError(
                        f"the {group.count} shards answer, but have not given {missing} rows in {patience:g} s; look "
                        "into the logs of their processes"
                    )
                group.refresh()
        drawn.sort(key=lambda part: part.shard)
        return self._joined(state, drawn, sum(used[k] for k in sorted(used)))

    def _shares(self, state: Checkpoint, masses: Doubles, count: int, attempt: int) -> dict[int, Share]:
        """What each shard is to draw of ``count`` rows: with priorities, exactly what one tree of all would draw."""
        sampler, t = state.sampler, state.draws
        rated = isinstance(sampler, Prioritized)
        seed = key(state.seed, AGAIN + attempt) if attempt else state.seed
        options = {"stratified": rated and sampler.stratified}
        counts = shard_counts(masses, count, seed, t, **options).tolist()
        none = np.empty(0)
        return {
            shard: Share(
                mine,
                shard_key(seed, t, shard),
                float(masses[shard]),
                shard_masses(masses, shard, count, seed, t, **options) if rated else none,
            )
            for shard, mine in enumerate(counts)
            if mine
        }

    def _masses(self) -> Doubles:
        """What the shards that answer have to draw, float64 ``[K]``; 0 for the others."""
        masses = np.zeros(self._group.count)
        for shard in self._group.up:
            totals = self._group.totals[shard]
            masses[shard] = totals.mass if totals is not None else 0.0
        return masses

    def _joined(self, state: Checkpoint, drawn: Sequence[_Drawn], whole: float) -> Any:
        """The batch of these rows, which were drawn from a mass of ``whole``."""
        blocks = [part.block for part in drawn]
        facts = () if blocks[0].time_first is None else ("facts",)
        arrays, extras = [unpacked(block) for block in blocks], dict[str, Tensor]()
        if any(part.life for part in drawn):
            for name in [name for name in ("index", "next_index") if (*facts, name) in arrays[0]]:
                given = [of[(*facts, name)] for of in arrays]
                public = [self._division.public(x, part.life) for x, part in zip(given, drawn, strict=True)]
                extras[name] = torch.from_numpy(np.concatenate(public))
        if isinstance(state.sampler, Prioritized):
            chances = [of[(*facts, "probability")] * part.mass for of, part in zip(arrays, drawn, strict=True)]
            extras |= self._weighed(state, state.sampler, np.concatenate(chances), whole)
        return joined_batch(blocks, state.schema, extras)

    def _weighed(self, state: Checkpoint, sampler: Prioritized, priorities: Any, whole: float) -> dict[str, Tensor]:
        """The ``weight`` and ``probability`` of rows of these priorities, as one ring of all shards gives them.

        A shard's probabilities are its own; times the mass that the counts were drawn with, they are priorities.
        """
        least = float(priorities.min())
        if sampler.normalize == "buffer":
            known = [self._group.totals[shard] for shard in self._group.up]
            least = min([least, *(totals.least for totals in known if totals is not None)])
        weights = global_weights(priorities, least, sampler.beta_at(state.draws))
        return {"weight": torch.from_numpy(weights), "probability": torch.from_numpy(priorities / whole)}
