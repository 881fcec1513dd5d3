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
from ..steps.arrays import Doubles
from .blocks import Block, joined_batch, unpacked
from .checkpoints import Checkpoint
from .division import Division
from .group import Group
from .plan import global_weights, shard_counts, shard_key, shard_masses
from .portion import Share

__all__ = ["Drawing"]


AGAIN = 1 << 62
"""Added to the number of an attempt, so that its counts never have the seed of a batch."""


class _Drawn(NamedTuple):
    """Rows that one shard drew for a batch."""

    shard: int
    mass: float
    """The mass of the shard when the counts were drawn."""
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
        """How many rows other shards gave in place of a shard that failed to give them."""

    def batch(self, state: Checkpoint, batch_size: int) -> Any:
        """Draw batch number ``state.draws``. The caller has just read the totals of the shards.

        The shards' masses decide how many rows each shard draws. Each then draws from the rows that it has when it is
        asked. The probability of a row is the product of the two chances. So it is exact even if rows come or get new
        priorities in between. If none do, a prioritized batch is the one that a single ring of all rows draws.

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
        """What each shard is to draw of ``count`` rows. With priorities, one tree of all rows would draw the same."""
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
        """The masses of the shards that answer, float64 ``[K]``; 0 for the others."""
        masses = np.zeros(self._group.count)
        for shard in self._group.up:
            totals = self._group.totals[shard]
            masses[shard] = totals.mass if totals is not None else 0.0
        return masses

    def _joined(self, state: Checkpoint, drawn: Sequence[_Drawn], whole: float) -> Any:
        """The batch of these rows. ``whole`` is the mass of all shards that they were drawn from."""
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
        """The ``weight`` and ``probability`` of rows with these priorities, as one ring of all shards gives them.

        A shard gives probabilities within the shard. Times the mass that the counts were drawn with, they are the
        ``priorities``.
        """
        least = float(priorities.min())
        if sampler.normalize == "buffer":
            known = [self._group.totals[shard] for shard in self._group.up]
            least = min([least, *(totals.least for totals in known if totals is not None)])
        weights = global_weights(priorities, least, sampler.beta_at(state.draws))
        return {"weight": torch.from_numpy(weights), "probability": torch.from_numpy(priorities / whole)}
