"""Division: which shard has which envs, and how an index names its shard and the life that it was drawn in."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ParameterError
from ..parameters import COUNT_RULE, Rule, is_count, require
from ..steps.arrays import Ints

__all__ = ["Division", "Parcel"]


BITS = 48
"""The lower bits of an index, which name a transition. The bits above, without the sign, name the life of the shard."""


LIVES = 2 ** (63 - BITS)
"""How many lives of a shard an index can name."""


class Parcel(NamedTuple):
    """The entries of a batch, or of a vector step, that belong to one shard."""

    shard: int
    at: Ints
    """int64 ``[K]``: the places of these entries in the whole."""
    inside: Ints
    """int64 ``[K]``: the indices, or the envs, as the shard counts them."""


ENVS_RULE: Rule = (
    lambda envs: is_count(envs, 1) and envs <= 2**31 - 1,  # its products with numbers of shards fit into int64
    "expected a whole number from 1 to 2**31 - 1",
)


class Division:
    """Shard k of K has the envs ``starts[k]`` up to ``starts[k + 1]``: as even a number as possible.

    Args:
        num_envs: N.
        shards: K, at most N, since an env has its steps in one place.
    """

    def __init__(self, num_envs: int, shards: int) -> None:
        require("Replay", ENVS_RULE, num_envs=num_envs)
        require("Replay", COUNT_RULE, shards=shards)
        if shards > num_envs:
            raise ParameterError(
                f"Replay(num_envs={num_envs}, shards={shards}): the steps of an env lie in one shard; use at most as "
                "many shards as there are envs"
            )
        self.num_envs, self.shards = num_envs, shards
        self.starts: Ints = np.arange(shards + 1, dtype=np.int64) * num_envs // shards

    def rows(self, capacity: int) -> Ints:
        """The rows of each shard, ``[K]``, if every env has equally many. Rows that this leaves over are not used."""
        return np.diff(self.starts) * (capacity // self.num_envs)

    def by_shard(self, envs: Ints) -> list[Parcel]:
        """Envs, int64 ``[K]``, sorted into one parcel for each shard that has some of them."""
        owner = self.starts.searchsorted(envs, "right") - 1
        return [
            Parcel(shard, at, envs[at] - self.starts[shard])
            for shard in np.unique(owner).tolist()
            for at in [np.flatnonzero(owner == shard)]
        ]

    def public(self, index: NDArray[np.int64], life: int) -> Ints:
        """Indices that a shard gave in one of its lives, as the learner sees them. -1, which names nothing, stays."""
        return np.where(index < 0, index, index | (life << BITS))

    def of_index(self, index: Ints) -> list[tuple[int, Parcel]]:
        """Public indices, int64 ``[B]``, by life and shard. A parcel's ``inside`` has the indices that the shard gave.

        Raises:
            ParameterError: one is negative.
        """
        if index.size and index.min() < 0:
            bad = int(np.argmin(index))
            raise ParameterError(f"index: entry {bad}, {index[bad]}, was never issued; pass batch['index']")
        inside, life = index & ((1 << BITS) - 1), index >> BITS
        whose = life * self.shards + inside % self.shards
        return [
            (which // self.shards, Parcel(which % self.shards, at, inside[at]))
            for which in np.unique(whose).tolist()
            for at in [np.flatnonzero(whose == which)]
        ]
