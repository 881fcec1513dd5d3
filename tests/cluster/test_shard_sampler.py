"""One shard's part of a batch, without any communication."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relive import Chunks, NStep, Prioritized, ReplayBuffer, Sequence, Uniform
from relive.cluster.plan import ShardSampler, Share, shard_key
from support import internals
from support.fit import check_fit, counted
from support.replays import PLAIN

VIEWS: dict[str, Callable[[], Any]] = {
    "transitions": lambda: NStep(2),
    "sequences": lambda: Sequence(3, burn_in=1, overlap="none"),
    "chunks": lambda: Chunks(4),
    "sequences by steps": lambda: Sequence(3, overlap="none", weigh="steps"),
}
LENGTHS = (4, 13, 6)


def shard_samplers(sampler: Callable[[], Any], view: Callable[[], Any]) -> list[ShardSampler]:
    """Shards of one env each, with other numbers of steps."""
    found: list[ShardSampler] = []
    for steps in LENGTHS:
        replay = ReplayBuffer(PLAIN, 40, 1, sampler=sampler(), view=view(), seed=0, check_ends=False)
        for t in range(steps):
            end = np.array([t == steps - 1])
            replay.add(obs=np.zeros((1, 2)), action=[0], reward=[float(t)], terminated=end, truncated=~end & False,
                       next_obs=np.zeros((1, 2)))  # fmt: skip
        found.append(ShardSampler(replay))
    return found


def drawn(shards: list[ShardSampler], batches: int, batch_size: int) -> np.ndarray:
    """What all shards drew: 1,000 times the shard, plus the index."""
    masses, found = np.array([shard.totals().mass for shard in shards]), list[Any]()
    for t in range(batches):
        for k, shard in enumerate(shards):
            places = shard.draw(shard.plan(masses, batch_size, 7, t), k, shard_key(7, t, k)).places
            found.append(1000 * k + internals.ring(shard.replay).index_of(places))
    return np.concatenate(found)


@pytest.mark.parametrize("view", ["transitions", "sequences", "chunks"])
def test_uniform_draws_have_equal_chances_over_all_shards(view: str):
    # 3 M draws from 23 transitions: where half of them are 1 % likelier, the chi-square gains 11 times its spread.
    shards = shard_samplers(Uniform, VIEWS[view])
    rows = [1000 * k + i for k, shard in enumerate(shards) for i in shard.replay.data()["index"].tolist()]
    check_fit(drawn(shards, 3, 1_000_000), dict.fromkeys(rows, 1 / len(rows)))


def test_draws_of_sequences_have_the_chances_of_their_steps_over_all_shards():
    shards, steps = shard_samplers(Uniform, VIEWS["sequences by steps"]), dict[int, float]()
    for k, shard in enumerate(shards):
        data = shard.replay.data()
        counts = data["mask"].sum(0).tolist()
        steps |= {1000 * k + i: count for i, count in zip(data["index"].tolist(), counts, strict=True)}
    total = sum(steps.values())
    check_fit(drawn(shards, 3, 1_000_000), {i: count / total for i, count in steps.items()})


@pytest.mark.parametrize("stratified", [False, True])
def test_prioritized_draws_have_the_chances_of_their_priorities_over_all_shards(stratified: bool):
    shards = shard_samplers(lambda: Prioritized(alpha=1.0, eps=0.1, stratified=stratified), VIEWS["transitions"])
    errors: dict[int, float] = {}
    for k, shard in enumerate(shards):
        index = shard.replay.data()["index"]
        error = 0.1 + torch.arange(len(index)) % 3 + k
        shard.replay.update_priorities(index, error)
        errors |= {1000 * k + i: e + 0.1 for i, e in zip(index.tolist(), error.tolist(), strict=True)}
    total = sum(errors.values())
    chances = {i: error / total for i, error in errors.items()}
    if stratified:  # less spread than independent draws have; a bias of 1 % shows all the more
        counts = counted(drawn(shards, 1, 500_000), chances)
        assert counts == pytest.approx(500_000 * np.array([chances[i] for i in sorted(chances)]), rel=1e-3)
    else:
        check_fit(drawn(shards, 3, 1_000_000), chances)


def test_a_mass_at_the_very_end_of_a_shard_draws_its_last_row_whatever_the_mass_has_become_since():
    (shard, *_) = shard_samplers(lambda: Prioritized(alpha=1.0, eps=0.1), VIEWS["transitions"])
    last = shard.replay.data()["index"][-1].item()
    now = shard.totals().mass
    planned = now * np.random.default_rng(0).uniform(0.1, 10.0, 200)
    stretched = [math.nextafter(mass, 0.0) * (now / mass) for mass in planned]
    assert max(stretched) >= now  # some round up to it
    for mass in planned.tolist():
        drawn = shard.draw_share(Share(1, 0, mass, np.array([math.nextafter(mass, 0.0)])))
        assert internals.ring(shard.replay).index_of(drawn.places).tolist() == [last]
        assert drawn.priorities == pytest.approx(mass / now * 1.1)
