"""Adding a step whose fields can be copied as they are takes one compiled call, and stores what the long way stores."""

from __future__ import annotations

import cProfile
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import inside
from relive import RolloutBuffer, errors
from rollouts import SCHEMA, Step, filled, holds, step

ADDED: dict[str, Any] = {"mask": lambda envs: np.arange(envs) % 2 > 0, "final_value": lambda envs: np.full(envs, 7.0)}
ASKED = [(), ("mask",), ("final_value",), ("mask", "final_value")]


def given(rng: np.random.Generator, t: int, names: tuple[str, ...]) -> Step:
    """A step with some of the fields that the buffer adds, as arrays, tensors and float64 arrays."""
    whole = step(t, truncated=rng.random(2) < 0.5) | {
        name: rng.random(2) < 0.5 if name == "mask" else rng.normal(size=2).astype(np.float32) for name in names
    }
    for name in [*whole]:
        how = rng.integers(6)
        if how == 0:
            whole[name] = torch.from_numpy(whole[name])
        elif how == 1 and whole[name].dtype == np.float32:
            whole[name] = whole[name].astype(np.float64)
    return whole


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("names", ASKED)
@pytest.mark.parametrize("envs", [2, 4096])  # the steps of 4,096 are copied without the GIL
def test_adding_a_step_takes_at_most_twelve_calls(envs: int, names: tuple[str, ...], debug: bool) -> None:
    rollout = RolloutBuffer(SCHEMA, 4, envs, debug=debug)
    values = step(0, envs) | {name: ADDED[name](envs) for name in names}
    rollout.add(values)
    rollout.add(values)
    profile = cProfile.Profile()
    profile.enable()
    rollout.add(values)
    profile.disable()
    written = [entry for entry in profile.getstats() if not isinstance(entry.code, str)]
    assert sum(entry.callcount for entry in written) <= (12 if debug else 8)
    assert holds(rollout, [values] * 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wrap", [False, True])
def test_what_is_added_in_one_call_is_what_the_long_way_stores(wrap: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    quick, slow = (RolloutBuffer(SCHEMA, 6, 2, wrap=wrap) for _ in range(2))
    for t in range(60):
        if quick.steps == 6 and (not wrap or rng.random() < 0.2):
            if rng.random() < 0.5:
                for rollout in (quick, slow):
                    rollout.set_final_value([0, 5], [0, 1], [8.0, 9.0])
                    rollout.set_last(value=[1.0, 2.0])
                    rollout["advantage"] = np.ones((6, 2), np.float32)
            quick.clear()
            slow.clear()
        if rng.random() < 0.1:
            quick.reserve(1)  # and not committed
        values = given(rng, t, ASKED[rng.integers(4)])
        slow.add({name: value.tolist() for name, value in values.items()})
        quick.add(values)
        for name in (*SCHEMA.names, "mask", "final_value"):
            assert quick[name].numpy().tobytes() == slow[name].numpy().tobytes(), name
    again = pickle.loads(pickle.dumps(quick))
    if not again.is_full:
        again.add(step(60, mask=np.array([False, True])))
        assert again["mask"][-1].tolist() == [False, True]


def test_what_was_written_to_a_row_that_was_given_back_does_not_stay_there() -> None:
    rollout = filled([step(0)] * 2, 6)
    views = rollout.reserve(3)
    views["mask"][:], views["final_value"][:] = False, 7
    for t in range(2, 5):
        rollout.add(step(t))
    assert holds(rollout, [step(0), step(0), *map(step, range(2, 5))])


@pytest.mark.parametrize("names", ASKED)
def test_what_does_not_fit_is_refused_as_by_the_long_way(names: tuple[str, ...]) -> None:
    values = step(0) | {name: ADDED[name](2) for name in names}
    rollout = filled([values] * 2, 4)
    wrong: list[dict[str, Any]] = [
        values | {"mask": np.ones(2, np.int64)},
        values | {"mask": np.ones(3, bool)},
        values | {"final_value": np.full(2, 1e300)},
        values | {"final_value": np.zeros((2, 1), np.float32)},
        values | {"other": np.zeros(2)},
        {name: value for name, value in values.items() if name != "value"},
        {name: value for name, value in values.items() if name != "value"} | {"other": np.zeros(2)},
        values | {"obs": torch.zeros(2, 2).to_sparse()},
    ]
    for each in wrong:
        with pytest.raises(errors.ReliveError) as long_way:
            inside.add_checked(filled([values], 4))(dict(each))
        with pytest.raises(errors.ReliveError) as found:
            rollout.add(each)
        assert (type(found.value), str(found.value)) == (type(long_way.value), str(long_way.value))
        assert holds(rollout, [values] * 2)
    rollout.add(values)
    assert holds(rollout, [values] * 3)


@pytest.mark.parametrize("names", ASKED)
def test_rewards_that_are_not_finite_are_refused_in_debug_mode_and_leave_no_trace(names: tuple[str, ...]) -> None:
    values = step(0) | {name: ADDED[name](2) for name in names}
    rollout = filled([values] * 2, 4, debug=True)
    for value in (np.inf, np.nan):
        reward = np.array([0, value], np.float32)
        for given_reward in (reward, reward.astype(np.float64), torch.from_numpy(reward)):
            with pytest.raises(errors.NotFiniteError, match=f"step 2 of env 1 is {value}; fix the env"):
                rollout.add(values | {"reward": given_reward})
    assert holds(rollout, [values] * 2)
    rollout.add(step(0))
    assert holds(rollout, [values, values, step(0)])
