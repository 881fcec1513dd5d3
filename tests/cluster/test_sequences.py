"""Sequences of all ranks: equally many batches, weighted by their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from relive import GAE, RolloutBuffer
from relive.cluster.distributed import sequences
from relive.errors import EmptyError, FieldError, LifecycleError, ParameterError
from relive.returns import normalize
from support.ranks import Work
from support.rollouts import SCHEMA, play

InThreads = Callable[[int, Work], list[Any]]
ALL = 5


def rollout_of(rank: int, count: int = 3) -> RolloutBuffer:
    """Of the envs 0 and 1, 2 and 3, or 4 alone; all of them for one rank."""
    first, last = (0, ALL) if count == 1 else (2 * rank, min(2 * rank + 2, ALL))
    rollout = RolloutBuffer(SCHEMA, 12, last - first, seed=2)
    for step in play(12, ALL, seed=3, masked=True):
        rollout.add({name: column[first:last] for name, column in step.items()})
    rollout.set_last(value=torch.zeros(last - first))
    return rollout.finish(GAE())


def steps_of(seq: Any, name: str) -> torch.Tensor:
    return seq[name][seq["mask"]]


def test_every_step_of_every_rank_comes_once_and_the_weights_make_the_mean(in_threads: InThreads):
    def work(rank: int, count: int) -> list[Any]:
        return list(sequences(rollout_of(rank), 4, num_batches=3, epochs=2))

    results = in_threads(3, work)
    assert [len(batches) for batches in results] == [6] * 3
    everything = sorted(rollout_of(0, 1).flat()["action"].tolist())
    for epoch in (slice(0, 3), slice(3, 6)):
        found = [steps_of(seq, "action") for batches in results for seq in batches[epoch]]
        assert sorted(torch.cat(found).tolist()) == everything
    for parts in zip(*results, strict=True):
        wanted = torch.cat([steps_of(seq, "reward") for seq in parts]).mean()
        means = [(seq["weight"] * seq["reward"] * seq["mask"]).sum() / seq["mask"].sum() for seq in parts]
        assert torch.stack(means).mean().item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("time_first", [True, False])
def test_advantages_are_normalized_over_the_batch_of_all_ranks(time_first: bool, in_threads: InThreads):
    def work(rank: int, count: int) -> list[Any]:
        rollout = rollout_of(rank)
        rollout["advantage"] = rollout["advantage"] + 1000.0  # digits that a sum of squares would lose
        rollout["raw"] = rollout["advantage"].clone()
        return list(sequences(rollout, num_batches=2, normalize_advantage=True, time_first=time_first))

    for parts in zip(*in_threads(3, work), strict=True):
        found, raw = (torch.cat([steps_of(seq, name) for seq in parts]) for name in ("advantage", "raw"))
        assert found.tolist() == pytest.approx(normalize(raw).tolist(), abs=1e-6)
        assert all((seq["advantage"][~seq["mask"]] == 0).all() for seq in parts)


def test_an_error_of_one_rank_is_raised_by_all(in_threads: InThreads):
    def failing(**options: Any) -> list[type]:
        def work(rank: int, count: int) -> Any:
            return sequences(rollout_of(2 * rank), 4, **{name: value(rank) for name, value in options.items()})

        return [type(error) for error in in_threads(2, work)]

    assert failing(num_batches=lambda rank: 1 + rank) == [ParameterError] * 2
    assert failing(num_batches=lambda _: 10) == [LifecycleError, ParameterError]  # the second rank has one env
    assert failing(fields=lambda rank: ("no",) if rank else None) == [LifecycleError, FieldError]

    def empty(rank: int, count: int) -> Any:
        rollout = rollout_of(0)
        rollout.clear()
        return sequences(rollout, 4)

    assert [type(error) for error in in_threads(2, empty)] == [EmptyError] * 2
