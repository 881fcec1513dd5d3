"""What the shards of a replay are made from."""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

from ..kernels.reference.random import key
from ..parameters import COUNT_RULE, require
from ..replay.buffer import ReplayBuffer
from .checkpoints import Checkpoint
from .division import Division
from .homes import SavedShard, ShardPlan

__all__ = ["plans_of", "require_ring"]


def plans_of(
    state: Checkpoint,
    division: Division,
    path: str | os.PathLike[str] | None,
    sources: tuple[SavedShard, ...],
    most: int | None,
    durable: bool,
) -> list[ShardPlan]:
    """What to make the shards of a new run from.

    Args:
        state: the state of the whole replay.
        division: which shard has which envs.
        path: the directory of commits; None if there is none.
        sources: the saved shards that the replay begins with.
        most: the most steps of a chunk, under a limit; None without one.
        durable: whether the rings live in files.
    """
    starts, rows = division.starts.tolist(), division.rows(state.capacity).tolist()
    home, run = None if path is None else os.path.abspath(path), os.urandom(8).hex()
    return [
        ShardPlan(
            number=k,
            shards=state.shards,
            first_env=starts[k],
            num_envs=starts[k + 1] - starts[k],
            rows=rows[k],
            seed=key(state.seed, k),
            run=run,
            options=_options(state),
            home=home,
            sources=sources,
            most=most,
            durable=durable,
        )
        for k in range(state.shards)
    ]


def require_ring(state: Checkpoint) -> None:
    """Make a ring of one env, so that wrong arguments raise their error here and not in a shard."""
    require("Replay", COUNT_RULE, capacity=state.capacity)
    ReplayBuffer(capacity=state.capacity // state.num_envs, num_envs=1, seed=0, **deepcopy(_options(state)))


def _options(state: Checkpoint) -> dict[str, Any]:
    return {
        "schema": state.schema,
        "sampler": state.sampler,
        "view": state.view,
        "ordered": state.ordered,
        "own_next_obs": state.own_next_obs,
    }
