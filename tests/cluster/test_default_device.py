"""Other defaults of torch change nothing in the batches of several ranks; this process is the only one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relive import GAE, Prioritized, ReplayBuffer, RolloutBuffer, Uniform
from relive.cluster.distributed import ShardedReplay, minibatches, sequences
from support.defaults import OTHERS, play_under
from support.overwrites import Hands
from support.rollouts import SCHEMA, filled, play

LAST = np.zeros(2, np.float32)


def rollout_of(seed: int) -> RolloutBuffer:
    return filled(play(9, 2, seed=seed, masked=True), seed=3).finish(GAE(), last_value=LAST)


def drawn(sampler: Any) -> list[Any]:
    replay = ReplayBuffer(SCHEMA, 60, 2, sampler=sampler, seed=3, check_ends=False)
    for each in play(20, 2):
        row = {name: each[name] for name in SCHEMA.names}
        replay.add(row, next_obs=each["obs"] + 1)
    shards, batches = ShardedReplay(replay), []
    for _ in range(3):
        batches.append(batch := shards.sample(8))
        if replay.has_priorities:
            shards.update_priorities(batch["index"], batch["reward"].abs())
    return batches


READS: dict[str, Callable[[], Any]] = {
    "minibatches": lambda: minibatches(rollout_of(1), 5, epochs=2),
    "minibatches, normalized": lambda: minibatches(rollout_of(2), num_batches=3, normalize_advantage=True),
    "sequences": lambda: sequences(rollout_of(1), 3, num_batches=2),
    "sequences, normalized": lambda: sequences(rollout_of(1), 3, num_batches=2, normalize_advantage=True),
    "uniform": lambda: drawn(Uniform()),
    "prioritized": lambda: drawn(Prioritized()),
    "prioritized, in the buffer": lambda: drawn(Prioritized(normalize="buffer", stratified=False)),
}


@pytest.mark.parametrize("default", OTHERS)
@pytest.mark.parametrize("read", READS)
def test_ranks_get_the_same(read: str, default: str) -> None:
    def run(hands: Hands) -> None:
        for batch in READS[read]():
            hands.note("batch", batch)

    play_under(default, run)
