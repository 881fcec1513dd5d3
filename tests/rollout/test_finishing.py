"""``finish(GAE())`` works in place where it can: with what it computes elsewhere to the bit, and all or nothing."""

from __future__ import annotations

import copy
import cProfile
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import relive
from relive import GAE, RolloutBuffer, errors, returns

Change = Callable[[RolloutBuffer], RolloutBuffer | None]

T, N = 7, 11
ESTIMATOR = GAE(gamma=0.9, lam=0.8)


def filled(steps: int = T, seed: int = 0, **options: Any) -> RolloutBuffer:
    """A rollout with terminals, truncations, and steps that are not real."""
    flag = relive.Field((), torch.bool)
    schema = relive.Schema({"reward": (), "terminated": flag, "truncated": flag, "value": ()})
    rollout, rng = RolloutBuffer(schema, T, N, **options), np.random.default_rng(seed)
    for _ in range(steps):
        draw = rng.random(N)
        rollout.add(
            reward=rng.standard_normal(N).astype(np.float32),
            value=rng.standard_normal(N).astype(np.float32),
            terminated=draw < 0.2,
            truncated=(draw > 0.1) & (draw < 0.3),
            final_value=np.where(draw < 0.4, rng.standard_normal(N), np.nan).astype(np.float32),
            mask=rng.random(N) > 0.2,
        )
    rollout.set_last(value=rng.standard_normal(N).astype(np.float32))
    return rollout


def expected(rollout: RolloutBuffer, estimator: GAE = ESTIMATOR) -> tuple[torch.Tensor, ...]:
    """What the function gives for copies of the columns."""
    names = ("reward", "terminated", "truncated", "final_value", "mask")
    value = torch.cat([rollout["value"], rollout.last["value"][None]])
    grids = {name: rollout[name].clone() for name in names}
    return returns.gae(value=value, **grids, gamma=estimator.gamma, lam=estimator.lam)


def require_equal(rollout: RolloutBuffer, want: tuple[torch.Tensor, ...]) -> None:
    for name, column in zip(("advantage", "return"), want, strict=True):
        assert torch.equal(rollout[name], column), name


def another_field(rollout: RolloutBuffer) -> None:
    rollout.clear()
    rollout.add_fields(extra=(2,))
    for t in range(T):
        other = filled(seed=2)
        rollout.add({name: other[name][t] for name in other.keys()}, extra=np.zeros((N, 2), np.float32))
    rollout.set_last(value=np.ones(N, np.float32))


def rewarded(rollout: RolloutBuffer) -> None:
    rollout["reward"].fill_(2.0)


def share(rollout: RolloutBuffer) -> None:
    for name in ("advantage", "return", "reward"):
        rollout[name].share_memory_()


def shrink(rollout: RolloutBuffer) -> None:
    rollout.clear()
    other = filled(5, seed=3)
    for t in range(5):
        rollout.add({name: other[name][t] for name in other.keys()})
    rollout.set_last(value=other.last["value"])


CHANGES: dict[str, Change] = {
    "nothing": lambda rollout: None,
    "a deep copy": copy.deepcopy,
    "a pickle": lambda rollout: pickle.loads(pickle.dumps(rollout)),
    "another field": another_field,
    "columns in shared memory": share,
    "columns of doubles": lambda rollout: rollout.__setitem__("advantage", torch.ones(T, N, dtype=torch.float64)),
    "fewer steps": shrink,
    "a reward written in place": rewarded,
}


@pytest.mark.parametrize("name", CHANGES)
def test_finishing_again_after_a_change_gives_what_the_function_gives(name: str) -> None:
    rollout = filled()
    for _ in range(3):
        rollout.finish(ESTIMATOR)
        require_equal(rollout, expected(rollout))
    rollout = CHANGES[name](rollout) or rollout
    for _ in range(2):
        rollout.finish(ESTIMATOR, partial=True)
        require_equal(rollout, expected(rollout))


def test_a_copy_is_finished_in_its_own_memory() -> None:
    rollout = filled()
    rollout.finish(ESTIMATOR).finish(ESTIMATOR)
    before, other = rollout["advantage"].clone(), copy.deepcopy(rollout)
    other["reward"] = torch.ones(T, N)
    other.finish(ESTIMATOR)
    assert torch.equal(rollout["advantage"], before)
    assert not torch.equal(other["advantage"], before)


def test_a_rollout_that_came_round_is_finished_in_the_order_of_time() -> None:
    rollout = filled(2 * T + 3, wrap=True)
    for _ in range(2):
        rollout.finish(ESTIMATOR)
        require_equal(rollout, expected(rollout))


def test_steps_that_come_later_make_advantages_leave() -> None:
    rollout = filled(T - 1)
    rollout.finish(ESTIMATOR, partial=True).finish(ESTIMATOR, partial=True)
    zeros = np.zeros(N, np.float32)
    rollout.add(reward=zeros, value=zeros, terminated=zeros > 0, truncated=zeros > 0)
    assert "advantage" not in rollout


def test_a_refused_call_changes_nothing() -> None:
    rollout = filled(columns={"advantage": relive.Field(())})
    rollout.finish(ESTIMATOR).finish(ESTIMATOR)
    before = rollout["advantage"].clone(), rollout["return"].clone()
    rollout["mask"][4, 9], rollout["terminated"][4, 9], rollout["truncated"][4, 9] = True, False, True
    rollout["final_value"][4, 9] = float("nan")
    rollout["reward"] = torch.ones(T, N)
    with pytest.raises(errors.FieldError, match="step 4 of env 9 was truncated"):
        rollout.finish(ESTIMATOR)
    require_equal(rollout, before)


def test_whole_numbers_as_parameters_give_the_same() -> None:
    rollout = filled()
    for _ in range(2):
        rollout.finish(GAE(gamma=1, lam=0))
        require_equal(rollout, expected(rollout, GAE(gamma=1.0, lam=0.0)))


def test_a_normalized_advantage_agrees_with_the_function() -> None:
    rollout = filled()
    rollout.finish(ESTIMATOR).finish(GAE(gamma=0.9, lam=0.8, normalize=True))
    advantage, ret = expected(rollout)
    require_equal(rollout, (returns.normalize(advantage, rollout["mask"]), ret))


def test_the_second_finish_makes_at_most_eight_calls() -> None:
    rollout = filled()
    rollout.finish(ESTIMATOR).finish(ESTIMATOR)
    profile = cProfile.Profile()
    profile.enable()
    rollout.finish(ESTIMATOR)
    profile.disable()
    assert sum(entry.callcount for entry in profile.getstats()) <= 8  # one of them switches the profile off
