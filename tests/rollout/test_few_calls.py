"""How few functions a finish and a first minibatch call, and that what they keep between calls is never out of date."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import walks
from relive import GAE, Field, RolloutBuffer, Schema
from relive.errors import FieldError, ParameterError
from walks import FLAGS, N, T

SCHEMA = Schema({"obs": (4,), "action": Field(()), "reward": (), **FLAGS, "value": (), "log_prob": ()})


def filled(rollout: RolloutBuffer, seed: int, cut: float = 0.0) -> RolloutBuffer:
    rng = np.random.default_rng(seed)
    for _ in range(T):
        step: dict[str, Any] = {name: rng.standard_normal(N) for name in ("action", "reward", "value", "log_prob")}
        rollout.add(step, obs=rng.standard_normal((N, 4)), terminated=np.zeros(N, bool),
                    truncated=rng.random(N) < cut, final_value=rng.standard_normal(N))  # fmt: skip
    rollout.set_last(value=np.zeros(N))
    return rollout


@pytest.mark.parametrize("cut", [0.0, 0.1])
def test_the_first_finish_makes_at_most_sixty_calls_and_the_next_ones_at_most_twenty_two(cut: float) -> None:
    rollout, estimator = RolloutBuffer(SCHEMA, T, N, seed=0), GAE()
    counts = list[int]()
    for turn in range(20):
        filled(rollout, turn, cut)
        counts.append(walks.traced(lambda: rollout.finish(estimator)).calls)
        rollout.clear()
    assert counts[0] <= 60
    assert max(counts[1:]) <= 22


def first_of(rollout: RolloutBuffer, options: Any, passes: list[Any]) -> None:
    """The first minibatch of a pass that is kept, so that its end is no part of the call."""
    passes.append(rollout.minibatches(32, **options))
    next(passes[-1])


@pytest.mark.parametrize("options", [{}, {"reuse": True}, {"epochs": 3}, {"fields": ("obs", "advantage")}], ids=str)
def test_a_first_minibatch_makes_few_calls_and_finds_its_columns_once(options: Any) -> None:
    for _ in range(2):  # the first rollout of its kind in a process makes what others share
        rollout, found, passes = RolloutBuffer(SCHEMA, T, N, seed=0), list[walks.Walk](), list[Any]()
        for turn in range(4):
            filled(rollout, turn).finish(GAE())
            found.append(walks.traced(partial(first_of, rollout, options, passes)))
            rollout.clear()
    assert found[0].calls <= 30
    assert max(walk.calls for walk in found[1:]) <= 20
    assert max(walk.returns for walk in found[1:]) <= 4


def test_a_finish_that_is_refused_leaves_no_advantage_and_the_next_one_is_right() -> None:
    rollout, other = (filled(RolloutBuffer(SCHEMA, T, N, seed=0), 3, 0.2) for _ in range(2))
    rollout.block["final_value"][:] = np.nan
    with pytest.raises(FieldError, match="has no value of its final observation"):
        rollout.finish(GAE())
    assert "advantage" not in rollout
    assert "return" not in rollout
    rollout.block["final_value"][:] = other.block["final_value"]
    rollout.finish(GAE())
    other["advantage"] = np.zeros((T, N), np.float64)  # of another dtype, so the columns are made again
    other.finish(GAE())
    for name in ("advantage", "return"):
        assert rollout[name].numpy().tobytes() == other[name].float().numpy().tobytes()


def test_an_estimator_other_than_gae_makes_no_columns_but_its_own() -> None:
    class Twice:
        reads = ("reward",)

        def __call__(self, **columns: Any) -> dict[str, Any]:
            return {"twice": columns["reward"] * 2}

    rollout = filled(RolloutBuffer(SCHEMA, T, N, seed=0), 3)
    before = rollout.keys()
    assert rollout.finish(Twice()).keys() == (*before, "twice")


def test_columns_of_a_batch_follow_what_is_attached_and_forgotten() -> None:
    rollout = filled(RolloutBuffer(SCHEMA, T, N, seed=0), 3)
    named = [*SCHEMA.names]
    for _ in range(2):
        assert [*next(rollout.minibatches(32)).keys()] == named
        rollout.finish(GAE())
        assert [*next(rollout.minibatches(32)).keys()] == [*named, "advantage", "return"]
        rollout["extra"] = np.ones((T, N, 2), np.float32)
        assert [*next(rollout.minibatches(32)).keys()] == [*named, "advantage", "return", "extra"]
        names: Any = ["extra", "obs"]
        assert [*next(rollout.minibatches(32, fields=names)).keys()] == names
        rollout.clear()
        filled(rollout, 4)
        with pytest.raises(FieldError, match="extra"):
            rollout.minibatches(32, fields=("extra",))


@pytest.mark.parametrize("wrong", [
    {"epochs": 0}, {"epochs": True}, {"epochs": 1.5}, {"shuffle": 1}, {"reuse": None}, {"drop_last": np.zeros(2)},
    {"num_batches": True}, {"num_batches": 1.0},
], ids=str)  # fmt: skip
def test_wrong_options_are_refused_as_ever(wrong: Any) -> None:
    rollout = filled(RolloutBuffer(SCHEMA, T, N, seed=0), 3)
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        rollout.minibatches(**{"num_batches": 2, **wrong})
    assert len([*rollout.minibatches(num_batches=np.int64(2), epochs=np.int64(1))]) == 2  # type: ignore[arg-type]
