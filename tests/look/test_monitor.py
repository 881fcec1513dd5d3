"""The monitor's figures, each beside the slow, obvious way to compute it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive import Field, Monitor, Prioritized, Recent, ReplayBuffer, Schema, Sequence, errors
from support.effort import in_ci

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


def test_the_repr_of_a_monitor_is_the_call_that_makes_it() -> None:
    monitor = Monitor(made(), counts=True, every=7)
    again = eval(repr(monitor), {**vars(relive), "torch": torch})
    assert (again.counts, again.every, again.replay.capacity) == (True, 7, 60)
    assert repr(again) == repr(monitor)


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


def test_the_distance_of_batches_that_are_looked_at_grows_up_to_every() -> None:
    replay, rng = made(sampler=Prioritized()), np.random.default_rng(4)
    grow(replay, 10, rng)
    monitor, weights = Monitor(replay, every=4), []
    for k in range(20):
        batch = replay.sample(8)
        replay.update_priorities(batch["index"], torch.rand(8) * 5)
        monitor.update(batch)
        if k in (0, 1, 3, 7, 11, 15, 19):
            weights.append(batch["weight"].numpy().astype(np.float64))
    w, found = np.concatenate(weights), monitor.scalars()
    assert found["weight_min"] == w.min()
    assert found["weight_std"] == pytest.approx(w.std())
    assert found["weight_effective"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    assert found["batches_looked_at"] == 7
    assert monitor.scalars()["batches_looked_at"] == 0


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


def watched(**kwargs: Any) -> tuple[ReplayBuffer, Monitor, Counter[int]]:
    """A replay that came round, its monitor, and how often each index was drawn."""
    replay, rng, truth = made(**kwargs), np.random.default_rng(8), Counter[int]()
    monitor = Monitor(replay, counts=True)
    for _ in range(12):
        grow(replay, 5, rng)
        batch = replay.sample(16)
        truth.update(batch["index"].tolist())
        monitor.update(batch)
    return replay, monitor, truth


def drawn(replay: ReplayBuffer, truth: Counter[int]) -> list[int]:
    return [truth[i] for i in replay.data()["index"].tolist()]


def test_a_batch_that_comes_while_others_are_counted_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, monitor, truth = watched()
    late, joined = replay.sample(8), np.concatenate

    def meanwhile(parts: Any) -> Any:  # as another thread would
        monkeypatch.undo()
        together = joined(parts)
        monitor.update(late)
        return together

    monkeypatch.setattr(np, "concatenate", meanwhile)
    monitor.draws([int(late["index"][0])])
    truth.update(late["index"].tolist())
    assert monitor.draws(replay.data()["index"]).tolist() == drawn(replay, truth)


@pytest.mark.parametrize("capacity", [None, 30, 200])
def test_counts_go_on_after_a_save(tmp_path: Path, capacity: int | None) -> None:
    replay, monitor, truth = watched()
    replay.save(tmp_path / "save", extra={"monitor": monitor.state_dict(), "model": {"w": torch.ones(2)}})
    again = ReplayBuffer.load(tmp_path / "save", capacity=capacity)
    counting = Monitor(again, counts=True)
    counting.load_state_dict(again.extra["monitor"])
    assert counting.draws(again.data()["index"]).tolist() == drawn(again, truth)
    batch = again.sample(16)
    truth.update(batch["index"].tolist())
    counting.update(batch)
    assert counting.draws(again.data()["index"]).tolist() == drawn(again, truth)


def test_a_state_replaces_the_counts_of_a_monitor() -> None:
    replay, monitor, truth = watched()
    state = monitor.state_dict()
    monitor.update(replay.sample(300))
    monitor.load_state_dict(state)
    assert monitor.draws(replay.data()["index"]).tolist() == drawn(replay, truth)
    monitor.load_state_dict(Monitor(replay).state_dict())  # its monitor did not count
    assert monitor.scalars()["never_sampled"] == 1
    Monitor(replay).load_state_dict(Monitor(replay).state_dict())


@pytest.mark.parametrize(("counts", "message"), [
    ({"index": np.array([10**6]), "draws": np.array([1])}, "never issued"),
    ({"index": np.array([-1]), "draws": np.array([1])}, "never issued"),
    ({"index": np.array([170]), "draws": np.array([-1])}, "draws from 0 to"),
    ({"index": np.array([170]), "draws": np.array([2**32])}, "draws from 0 to"),
    ({"index": np.array([170]), "draws": np.array([1.5])}, r"whole numbers \[K\]"),
    ({"index": np.array([170, 171]), "draws": np.array([1])}, r"whole numbers \[K\]"),
    ({"index": np.array([[170]]), "draws": np.array([[1]])}, r"whole numbers \[K\]"),
    ({"index": np.array([170])}, "expected what Monitor.state_dict"),
    (3, "expected what Monitor.state_dict"),
])  # fmt: skip
def test_a_wrong_state_changes_nothing(counts: Any, message: str) -> None:
    replay, monitor, truth = watched()
    with pytest.raises(errors.ParameterError, match=message):
        monitor.load_state_dict({"kind": "relive.Monitor", "counts": counts})
    assert monitor.draws(replay.data()["index"]).tolist() == drawn(replay, truth)
    with pytest.raises(errors.ParameterError, match=r"expected what Monitor\.state_dict"):
        monitor.load_state_dict({"counts": monitor.state_dict()["counts"]})
    with pytest.raises(errors.LifecycleError, match="counts=True"):
        Monitor(replay).load_state_dict(monitor.state_dict())


@pytest.mark.parametrize("kwargs", [{}, {"sampler": Prioritized()}, {"view": Sequence(4)}, {"own_next_obs": True}])
def test_an_inspection_says_how_often_steps_were_drawn(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    replay, monitor, truth = watched(**kwargs)
    found = relive.inspect(monitor)
    assert not any("drawn" in lack for lack in found.lacks)
    of_index = dict(zip(replay.data()["index"].tolist(), drawn(replay, truth), strict=True))
    assert found.experience.place is not None
    expected = [of_index.get(i, -1) for i in found.experience.place.tolist()]  # -1: no sequence begins there
    assert found.steps(0, found.num_steps)["draws"].tolist() == expected
    counted = np.array([n for n in expected if n >= 0])
    assert found.draws is not None
    assert found.draws["mean"] == counted.mean()
    assert found.draws["max"] == counted.max()
    assert found.never_sampled == monitor.scalars()["never_sampled"] == np.mean(counted == 0)
    assert f"{found.never_sampled:.1%} were never drawn" in str(found)
    replay.save(tmp_path / "save", extra={"learner": {"watch": monitor.state_dict()}})
    assert relive.inspect(tmp_path / "save").to_dict()["draws"] == found.draws


def test_counts_of_another_replay_in_a_save_are_refused(tmp_path: Path) -> None:
    state = watched()[1].state_dict()
    replay = made()
    grow(replay, 3, np.random.default_rng(10))
    for extra in (state, {"kind": "relive.Monitor"}, {"a": {"b": {"kind": "relive.Monitor", "counts": 1}}}):
        replay.save(tmp_path / "save", extra=extra)
        with pytest.raises(errors.FileFormatError, match="counts of a monitor in the save's extra do not fit"):
            relive.inspect(tmp_path / "save")


def test_where_nobody_counted_an_inspection_says_so(tmp_path: Path) -> None:
    replay = made()
    grow(replay, 10, np.random.default_rng(9))
    for source in (replay, Monitor(replay)):
        found = relive.inspect(source)
        assert found.draws is None
        assert found.never_sampled is None
        assert "not known: how often each step was drawn" in str(found)
    replay.save(tmp_path / "save", extra=Monitor(replay).state_dict())
    assert relive.inspect(tmp_path / "save").draws is None
    empty = relive.inspect(Monitor(made(), counts=True))
    assert (empty.num_steps, empty.draws, empty.never_sampled) == (0, None, None)


@pytest.mark.parametrize("kwargs", [in_ci({}), {"sampler": Prioritized()}])
def test_the_picture_and_the_table_have_the_draws(kwargs: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    found = relive.inspect(watched(**kwargs)[1])
    labels = [axes.get_xlabel() for axes in found.plot().axes]
    assert len(labels) == 6
    assert labels[-1] == "times drawn"
    assert found.to_pandas()["draws"].tolist() == found.experience.draws.tolist()
    assert "never drawn" in found._repr_html_()
    relive.inspect(Monitor(made(), counts=True)).plot()
