"""The monitor's figures, each beside the slow, obvious way to compute it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive import Field, Monitor, Prioritized, Recent, ReplayBuffer, Schema, Sequence, errors

SCHEMA = Schema({
    "obs": (2,), "action": (1,), "reward": (), "terminated": Field((), torch.bool),
    "truncated": Field((), torch.bool),
})  # fmt: skip


def grow(replay: ReplayBuffer, steps: int, rng: Any) -> None:
    n = replay.num_envs
    for _ in range(steps):
        obs, end = rng.normal(size=(n, 2)), rng.random(n) < 0.1
        replay.add(obs=obs, action=obs[:, :1], reward=obs[:, 0], terminated=end, truncated=end & False,
                   next_obs=obs + 1)  # fmt: skip


def made(capacity: int = 60, **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(SCHEMA, capacity, num_envs=3, seed=0, check_ends=False, **kwargs)


@pytest.mark.parametrize("make", [
    made, lambda: made(sampler=Prioritized()), lambda: made(view=Sequence(4)), lambda: made(own_next_obs=True),
])  # fmt: skip
def test_counts_are_exact_while_rows_are_overwritten(make: Any) -> None:
    replay, rng, truth = make(), np.random.default_rng(0), Counter[int]()
    monitor = Monitor(replay, counts=True)
    grow(replay, 6, rng)
    for _ in range(30):
        grow(replay, 3, rng)
        for batch in replay.batches(2, 16):
            truth.update(batch["index"].tolist())
            monitor.update(batch)
    stored = replay.data()["index"]
    expected = np.array([truth[i] for i in stored.tolist()])
    np.testing.assert_array_equal(monitor.draws(stored), expected)
    found = monitor.scalars()
    assert found["never_sampled"] == np.mean(expected == 0)
    assert found["draws_mean"] == expected.mean()
    assert found["draws_max"] == expected.max()
    gone = min(set(truth) - set(stored.tolist()))
    assert monitor.draws([gone]).tolist() == [-1]


def test_counts_start_again_after_clear_and_after_a_rewind() -> None:
    replay, rng = made(own_next_obs=True), np.random.default_rng(1)
    monitor = Monitor(replay, counts=True)
    for rewind in (False, True):
        grow(replay, 10, rng)
        monitor.update(replay.sample(500))
        assert monitor.scalars()["never_sampled"] < 1
        replay.clear(rewind=rewind)
        assert "never_sampled" not in monitor.scalars()
        grow(replay, 10, rng)
        assert monitor.scalars()["never_sampled"] == 1


def test_many_batches_are_counted_together_and_none_is_lost() -> None:
    replay, rng = made(), np.random.default_rng(2)
    grow(replay, 15, rng)
    monitor, truth = Monitor(replay, counts=True), Counter[int]()
    for _ in range(300):
        batch = replay.sample(256)
        truth.update(batch["index"].tolist())
        monitor.update(batch)
    stored = replay.data()["index"]
    assert monitor.draws(stored).tolist() == [truth[i] for i in stored.tolist()]


def test_staleness_is_the_age_at_the_draw() -> None:
    replay, rng = made(own_next_obs=True), np.random.default_rng(3)
    monitor, ages = Monitor(replay, every=1), []
    order: list[int] = []
    for _ in range(12):
        known = set(order)
        grow(replay, 2, rng)
        order += [i for i in replay.data()["index"].tolist() if i not in known]
        batch = replay.sample(9)
        monitor.update(batch)
        ages += [len(order) - 1 - order.index(i) for i in batch["index"].tolist()]
    found = monitor.scalars()
    assert found["staleness_mean"] == pytest.approx(np.mean(ages))
    assert found["staleness_max"] == max(ages)
    assert found["staleness_p90"] == pytest.approx(np.quantile(ages, 0.9))
    assert "staleness_mean" not in monitor.scalars()  # nothing was drawn since


def test_only_every_so_many_batches_are_looked_at() -> None:
    replay, rng = made(sampler=Prioritized()), np.random.default_rng(4)
    grow(replay, 10, rng)
    monitor, weights = Monitor(replay, every=4), []
    for k in range(10):
        batch = replay.sample(8)
        replay.update_priorities(batch["index"], torch.rand(8) * 5)
        monitor.update(batch)
        if k % 4 == 0:
            weights.append(batch["weight"].numpy().astype(np.float64))
    w, found = np.concatenate(weights), monitor.scalars()
    assert found["weight_min"] == w.min()
    assert found["weight_std"] == pytest.approx(w.std())
    assert found["weight_effective"] == pytest.approx(w.sum() ** 2 / (24 * (w**2).sum()))


@pytest.mark.parametrize("sampler", [Prioritized, lambda: Recent(inner=Prioritized())])
def test_entropy_of_priorities(sampler: Any) -> None:
    replay = made(sampler=sampler())
    grow(replay, 10, np.random.default_rng(5))
    index = replay.data()["index"]
    even = Monitor(replay).scalars()
    assert even["priority_evenness"] == pytest.approx(1)
    assert even["effective_share"] == pytest.approx(1)
    replay.update_priorities(index, torch.arange(1, len(index) + 1))
    inner: Any = getattr(replay.sampler, "inner", replay.sampler)
    p = inner.priorities() / inner.priorities().sum()
    found = Monitor(replay).scalars()
    assert found["priority_entropy"] == pytest.approx(-(p * np.log(p)).sum())
    assert found["priority_evenness"] == pytest.approx(found["priority_entropy"] / np.log(len(p)))
    assert found["effective_share"] == pytest.approx(1 / (p**2).sum() / len(p))


def test_ages_and_ratios_and_the_prefix() -> None:
    replay, rng = made(own_next_obs=True), np.random.default_rng(6)
    monitor = Monitor(replay)
    assert monitor.scalars()["size"] == 0
    grow(replay, 10, rng)
    replay.sample(60)
    found = monitor.scalars("replay/")
    assert found["replay/replay_ratio_recent"] == 2
    assert found["replay/age_p50"] == pytest.approx(np.quantile(np.arange(30), 0.5))
    assert all(type(value) is float for value in found.values())
    assert "replay_ratio_recent" not in monitor.scalars()


def test_monitoring_changes_no_batch() -> None:
    one, two, drawn = made(sampler=Prioritized()), made(sampler=Prioritized()), []
    for replay, watch in ((one, True), (two, False)):
        monitor, rng = Monitor(replay, counts=True, every=1), np.random.default_rng(7)
        for _ in range(10):
            grow(replay, 4, rng)
            batch = replay.sample(8)
            replay.update_priorities(batch["index"], batch["reward"])
            if watch:
                monitor.update(batch)
                monitor.scalars()
            drawn.append(batch["index"])
    assert torch.equal(torch.stack(drawn[:10]), torch.stack(drawn[10:]))


def test_what_is_wrong_is_said() -> None:
    replay = made()
    with pytest.raises(errors.ParameterError, match=r"expected a relive\.ReplayBuffer, got dict"):
        Monitor({})
    with pytest.raises(errors.ParameterError, match="every=0"):
        Monitor(replay, every=0)
    monitor = Monitor(replay)
    with pytest.raises(errors.FieldError, match="batch with 'index'"):
        monitor.update({"obs": 1})
    with pytest.raises(errors.LifecycleError, match="counts=True"):
        monitor.draws([0])
    grow(replay, 4, np.random.default_rng(0))
    with pytest.raises(errors.ParameterError, match="never issued"):
        Monitor(replay).update({"index": torch.tensor([10**6])})
    assert Monitor(replay, counts=True).nbytes == 4 * 60
    assert monitor.nbytes == 0
    assert relive.Monitor is Monitor
