"""The minibatches of all ranks: equally many, every real transition once an epoch, and the mean over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from relive import GAE, Batch, Field, RolloutBuffer
from relive.cluster.distributed import minibatches
from relive.errors import EmptyError, FieldError, LifecycleError, ParameterError
from relive.returns import normalize
from support.ranks import Work, in_processes
from support.rollouts import SCHEMA, play

InThreads = Callable[[int, Work], list[Any]]
T = 12


def rollout_of(first: int, envs: int, *, masked: bool = False, total: int = 8, **options: Any) -> RolloutBuffer:
    """The rollout of some of all envs: those from ``first`` on. Actions name the step and the env."""
    rollout = RolloutBuffer(SCHEMA, T, envs, **{"seed": 5, **options})
    for step in play(T, total, seed=1, masked=masked):
        rollout.add({name: column[first : first + envs] for name, column in step.items()})
    rollout.set_last(value=torch.arange(first, first + envs) / 8)
    return rollout.finish(GAE())


def real(batch: Any) -> Any:
    return batch.rows(batch["weight"] > 0)


def joined(batches: Any) -> list[Any]:
    """Minibatch by minibatch, the rows of all ranks that count."""
    return [Batch.joined([real(batch) for batch in parts], set(parts[0]), {}) for parts in zip(*batches, strict=True)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_minibatches_of_several_ranks_are_those_of_one_with_as_many_blocks(
    ranks: int, masked: bool, in_threads: InThreads
):
    def work(rank: int, count: int) -> list[Any]:
        rollout = rollout_of(rank * 8 // count, 8 // count, masked=masked)
        options = {"epochs": 3, "blocks": 4, "normalize_advantage": True}
        found = [*minibatches(rollout, 20, **options), *minibatches(rollout, num_batches=5, epochs=1, blocks=4)]
        return [b.clone() for b in found]

    one, several = in_threads(1, work)[0], in_threads(ranks, work)
    assert {len(found) for found in several} == {len(one)}
    for alone, together in zip(one, joined(several), strict=True):
        alone = real(alone)
        for name in alone.keys():
            if name != "weight":
                assert torch.equal(alone[name], together[name]), name


@pytest.mark.parametrize("masked", [False, True])
def test_every_real_transition_comes_once_an_epoch_and_the_weights_make_the_mean(masked: bool, in_threads: InThreads):
    def work(rank: int, count: int) -> list[Any]:
        return [b.clone() for b in minibatches(rollout_of(2 * rank, 2, masked=masked), 13, epochs=2)]

    results = in_threads(4, work)
    found = joined(results)
    everything = Counter(rollout_of(0, 8, masked=masked).flat()["action"].tolist())
    half = len(found) // 2
    for epoch in (found[:half], found[half:]):
        assert Counter(torch.cat([batch["action"] for batch in epoch]).tolist()) == everything
    orders = [torch.cat([batch["action"] for batch in epoch]).tolist() for epoch in (found[:half], found[half:])]
    assert orders[0] != orders[1]
    for together, parts in zip(found, zip(*results, strict=True), strict=True):
        assert len(together) <= 13
        assert len({len(part) for part in parts}) == 1
        for part in parts:
            weight = part["weight"] / len(part) / 4
            assert weight[weight > 0].tolist() == pytest.approx([1 / len(together)] * int((weight > 0).sum()))
            if not masked:
                assert (part["weight"] == 1).all()


@pytest.mark.parametrize("masked", [False, True])
def test_advantages_are_normalized_over_the_minibatch_of_all_ranks(masked: bool, in_threads: InThreads):
    def work(rank: int, count: int) -> list[Any]:
        rollout = rollout_of(2 * rank, 2, masked=masked)
        rollout["advantage"] = rollout["advantage"] + 1000.0  # digits that a sum of squares would lose
        rollout["raw"] = rollout["advantage"].clone()
        return [b.clone() for b in minibatches(rollout, num_batches=7, epochs=2, normalize_advantage=True)]

    for batch in joined(in_threads(4, work)):
        assert batch["advantage"].tolist() == pytest.approx(normalize(batch["raw"]).tolist(), abs=1e-6)


def test_ranks_of_other_sizes_and_a_rank_without_a_real_transition_have_as_many_batches(in_threads: InThreads):
    def work(rank: int, count: int) -> list[Any]:
        rollout = rollout_of(0, 1 + rank)
        if rank == 1:
            rollout["mask"] = torch.zeros(T, 2, dtype=torch.bool)
        return [b.clone() for b in minibatches(rollout, 10, normalize_advantage=True)]

    results = in_threads(3, work)
    for parts in zip(*results, strict=True):
        assert len({len(part) for part in parts}) == 1
        assert (parts[1]["weight"] == 0).all()
        assert sum((part["weight"] / len(part) / 3).sum() for part in parts) == pytest.approx(1)
        assert all(torch.isfinite(part["advantage"]).all() for part in parts)
    assert sum(map(len, joined(results))) == T * 4


def test_an_error_of_one_rank_is_raised_by_all(in_threads: InThreads):
    def failing(options: Callable[[int], dict[str, Any]]) -> list[type]:
        return [type(error) for error in in_threads(2, lambda rank, _: minibatches(rollout_of(0, 2), **options(rank)))]

    assert failing(lambda rank: {"batch_size": 8 + rank}) == [ParameterError] * 2
    assert failing(lambda rank: {"batch_size": 8, "epochs": 1 - rank}) == [LifecycleError, ParameterError]
    assert failing(lambda rank: {"batch_size": 8, "fields": ("obs",) if rank else ("no",)}) == [
        FieldError,
        LifecycleError,
    ]
    assert failing(lambda rank: {"batch_size": 1}) == [ParameterError] * 2
    assert failing(lambda rank: {"num_batches": "many"}) == [ParameterError] * 2
    assert failing(lambda rank: {"batch_size": 8, "blocks": 3}) == [ParameterError] * 2
    assert failing(lambda rank: {"batch_size": 8, "blocks": 6}) == [ParameterError] * 2

    def unequal(rank: int, count: int) -> Any:
        return minibatches(rollout_of(0, 2, seed=rank), 8)

    assert [type(error) for error in in_threads(2, unequal)] == [ParameterError] * 2

    def empty(rank: int, count: int) -> Any:
        rollout = rollout_of(0, 2)
        rollout["mask"] = torch.zeros(T, 2, dtype=torch.bool)
        return minibatches(rollout, 8)

    assert [type(error) for error in in_threads(2, empty)] == [EmptyError] * 2


def test_a_column_named_weight_is_refused_unless_other_fields_are_asked_for():
    rollout = RolloutBuffer(SCHEMA, 1, 1, columns={"weight": Field(())}, seed=0)
    rollout.add(play(1, 1)[0])
    with pytest.raises(FieldError, match="weight"):
        minibatches(rollout, 1)
    assert next(minibatches(rollout, 1, fields=("obs",))).keys() == {"obs", "weight"}


def test_a_loaded_rollout_goes_on_with_other_orders(tmp_path: Path):
    rollout = rollout_of(0, 4)
    orders = [torch.cat([b["action"] for b in minibatches(rollout, 8)]) for _ in range(2)]
    assert not torch.equal(*orders)
    rollout.save(tmp_path / "rollout")
    again = RolloutBuffer.load(tmp_path / "rollout")
    for a, b in zip(minibatches(rollout, 8), minibatches(again, 8), strict=True):
        assert torch.equal(a["action"], b["action"])


# Real processes: under NEXT_STEP autoreset, ranks have other numbers of real transitions.


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def learned(model: nn.Module, rollout: RolloutBuffer) -> list[np.ndarray]:
    """The parameters after each of some steps of gradient descent."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), list[np.ndarray]()
    for batch in minibatches(rollout, 16, epochs=3, blocks=2, normalize_advantage=True):
        off = model(batch["obs"].double() / 10).squeeze(-1) - batch["advantage"].double()
        optimizer.zero_grad()
        (batch["weight"].double() * off.square()).mean().backward()
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy())
    return found


def of_rank(rank: int, count: int) -> Any:
    model: nn.Module = DistributedDataParallel(net())
    return learned(model, rollout_of(rank * 8 // count, 8 // count, masked=True))


def test_two_ranks_learn_what_one_learns_although_their_numbers_of_rows_differ(tmp_path: Path):
    counts = [len(rollout_of(4 * rank, 4, masked=True).flat()) for rank in range(2)]
    assert counts[0] != counts[1]
    alone = learned(net(), rollout_of(0, 8, masked=True))
    for found in in_processes(2, of_rank, tmp_path):
        assert np.array(found) == pytest.approx(np.array(alone), rel=1e-6, abs=1e-9)  # weights are float32
