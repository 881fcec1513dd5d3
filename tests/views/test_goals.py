"""The functions of hindsight: what they are given, and what they may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relive import (
    Hindsight,
    ReplayBuffer,
)
from relive.errors import (
    DTypeError,
    FieldError,
    NotFiniteError,
    ParameterError,
    SchemaError,
    ShapeError,
)
from support import internals
from support.goal_plays import HerTwin, as_relabel, reached, view_of, worth
from support.twins import Twin, same_batches

# The functions: what they are given, and what they may return.


def test_functions_are_called_once_per_batch_with_the_relabelled_steps_alone() -> None:
    calls: list[tuple[Any, ...]] = []

    def reward(*args: Any) -> Any:
        calls.append(args)
        return worth(*args[:2])

    def three(achieved: Any, desired: Any, info: Any) -> Any:
        return reward(achieved, desired, info)

    for function, info in ((three, {}), (reward, None)):
        calls.clear()
        twin = HerTwin(1, 20, dress="goals", view=Hindsight(function, n=1)).play(*"." * 15)
        batch = twin.buffer.sample(64)
        ((achieved, desired, *more),) = calls
        assert more == ([] if info is None else [info])
        assert achieved.shape == desired.shape == (int(batch["relabelled"].sum()), 4)
        assert achieved.dtype == desired.dtype == np.float32
    calls.clear()
    twin.buffer.view.ratio = 0.0
    twin.buffer.sample(64)
    assert not calls


def test_a_stored_field_comes_as_info_and_what_a_function_writes_to_is_its_own() -> None:
    def reward(achieved: Any, desired: Any, info: Any) -> Any:
        value = worth(achieved, desired) + info["contact"]
        achieved[:], desired[:], info["contact"][:] = -5, -5, -5
        return value

    extras = lambda step: {"sensors": {"contact": np.float32(step["obs"][2]), "heat": np.zeros(2, np.float32)}}  # noqa: E731
    twin = HerTwin(1, 20, dress="goals", extras=extras, view=Hindsight(reward, ratio=1.0, info="sensors")).play(
        *"." * 15
    )
    for _ in range(2):
        batch = twin.buffer.sample(30)
        goals = batch["next_obs", "achieved_goal"].numpy(), batch["obs", "desired_goal"].numpy()
        assert np.array_equal(batch["reward"], worth(*goals) + batch["sensors", "contact"].numpy())
        assert torch.equal(batch["obs", "desired_goal"], batch["next_obs", "desired_goal"])


def test_a_function_may_write_to_its_goals_and_keep_them() -> None:
    kept: list[Any] = []

    def reward(achieved: Any, desired: Any) -> Any:
        value = worth(achieved, desired)
        kept.append((achieved, achieved.copy(), desired, desired.copy()))
        return value

    def spoiling(function: Any) -> Any:
        def spoiled(achieved: Any, desired: Any) -> Any:
            value = function(achieved, desired)
            achieved[:], desired[:] = -5, -5
            return value

        return spoiled

    for flags in ({}, {"terminated_fn": reached}):
        views = (
            Hindsight(reward, n=2, **flags),
            Hindsight(spoiling(worth), n=2, **{name: spoiling(function) for name, function in flags.items()}),
        )
        plain, spoiled = (HerTwin(1, 20, dress="goals", view=view).play(*"." * 15) for view in views)
        for _ in range(3):
            assert same_batches(plain.buffer.sample(16), spoiled.buffer.sample(16))
    for achieved, then, desired, aimed in kept:
        assert np.array_equal(achieved, then)
        assert np.array_equal(desired, aimed)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(np.float64),
        lambda x: np.repeat(x, 2)[::2],
        lambda x: np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32),
        lambda x: x.astype(">f4"),
        torch.from_numpy,
    ],
    ids=["float64", "gaps", "read-only and not aligned", "another byte order", "tensor"],
)
def test_rewards_may_come_in_any_array_of_numbers(change: Any) -> None:
    views = Hindsight(worth, n=2), Hindsight(lambda achieved, desired: change(worth(achieved, desired)), n=2)
    plain, other = (HerTwin(1, 20, dress="goals", view=view).play(*"." * 15) for view in views)
    assert same_batches(plain.buffer.sample(16), other.buffer.sample(16))


@pytest.mark.parametrize("key", [None, 3])
def test_a_place_that_is_no_row_is_refused(key: int | None) -> None:
    twin = HerTwin(1, 20, dress="goals", view=view_of()).play(*"." * 15)
    for wrong in (-1, 20):
        with pytest.raises(ParameterError, match=rf"places: entry 1 is {wrong}, which is not one of the 20 rows"):
            twin.buffer.view.read(internals.ring(twin.buffer), np.array([2, wrong]), key)


def test_a_stored_field_goes_to_those_functions_that_take_it() -> None:
    def reward(achieved: Any, desired: Any, info: Any = None) -> Any:
        return worth(achieved, desired) + (0 if info is None else info)

    def stopped(achieved: Any, desired: Any) -> Any:
        return np.zeros(len(achieved), np.bool_)

    extras = lambda step: {"contact": np.float32(step["obs"][2])}  # noqa: E731
    view = Hindsight(reward, ratio=1.0, info="contact", terminated_fn=stopped)
    twin = HerTwin(1, 20, dress="goals", extras=extras, view=view).play(*"." * 15)
    for info in ("contact", None):
        view.info = info
        batch = twin.buffer.sample(30)
        goals = batch["next_obs", "achieved_goal"].numpy(), batch["obs", "desired_goal"].numpy()
        contact = batch["contact"].numpy() if info else 0.0
        assert np.array_equal(batch["reward"], worth(*goals) + contact)


@pytest.mark.parametrize(
    ("functions", "error", "message"),
    [
        ({"reward_fn": lambda a, d: 0.0}, ShapeError, r"function of reward: expected \(\d+,\).*got \(\);.*axis=-1"),
        ({"reward_fn": lambda a, d: a - d}, ShapeError, r"function of reward: expected \(\d+,\).*got \(\d+, 4\)"),
        ({"reward_fn": lambda a, d: worth(a, d) + np.inf}, NotFiniteError, r"function of reward: step 0 of \d+"),
        ({"reward_fn": lambda a, d: np.full(len(a), "x")}, DTypeError, "function of reward: expected numbers, got <U1"),
        (
            {"terminated_fn": lambda a, d: np.zeros(len(a))},
            DTypeError,
            "function of terminated: expected bools, got float64",
        ),
        ({"truncated_fn": lambda a, d: False}, ShapeError, r"function of truncated: expected \(\d+,\)"),
    ],
)
def test_what_a_function_must_not_return_is_refused(functions: dict[str, Any], error: type, message: str) -> None:
    view = Hindsight(**{"reward_fn": worth, **functions})
    twin = HerTwin(1, 20, dress="goals", view=view).play(*"." * 15)
    with pytest.raises(error, match=message):
        twin.buffer.sample(30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass reward_fn .* or else relabel alone"),
        ({"reward_fn": worth, "relabel": print}, "pass reward_fn .* or else relabel alone"),
        ({"relabel": print, "info": "sensors"}, "pass reward_fn .* or else relabel alone"),
        ({"reward_fn": 3}, r"Hindsight\(reward_fn=3\): a function of arrays"),
        (
            {"reward_fn": worth, "strategy": "best"},
            r"strategy='best'\): strategy is one of future, final, episode, past",
        ),
        ({"reward_fn": worth, "k": 4, "ratio": 0.8}, "pass k, a number of at least 0, or ratio, not both"),
        ({"reward_fn": worth, "k": -1}, "pass k, a number of at least 0"),
        ({"reward_fn": worth, "ratio": 1.5}, "ratio, the share that is relabelled, is a number from 0 to 1"),
        ({"reward_fn": worth, "n": 0}, "n is a whole number of at least 1"),
        ({"reward_fn": worth, "n": 2**63}, r"n is a whole number of at least 1 and below 2\*\*30"),
        ({"reward_fn": worth, "gamma": 2}, "gamma is a number from 0 to 1"),
        ({"reward_fn": worth, "desired": None}, "the name of a member of the observation"),
        ({"reward_fn": worth, "finished_only": 1}, "finished_only is True or False"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Hindsight(**arguments)


def test_a_parameter_that_is_refused_later_changes_nothing() -> None:
    view = Hindsight(worth, k=3)
    assert view.ratio == 0.75
    with pytest.raises(ParameterError, match="strategy is one of"):
        view.strategy = "best"
    assert view.strategy == "future"
    assert repr(view).startswith("Hindsight(reward_fn=<function worth at")


@pytest.mark.parametrize(
    ("dress", "ordered", "options", "message"),
    [
        (
            "box",
            True,
            {},
            r"members of these names, of one shape and dtype that NumPy has, got .*'obs'",
        ),
        ("goals", True, {"achieved": "observation"}, "of one shape and dtype"),
        ("goals", True, {"desired": "wish"}, r"desired='wish'\): expected an observation with members of these names"),
        (
            "goals",
            True,
            {"info": "contact"},
            r"info='contact'\): the schema has no such field; it has action, obs, reward",
        ),
        ("goals", False, {}, "needs steps in order.*Hindsight.copies"),
    ],
)
def test_a_replay_without_goals_refuses_the_view_when_it_is_set(
    dress: str, ordered: bool, options: dict[str, Any], message: str
) -> None:
    twin = Twin(1, 10, dress=dress, ordered=ordered).play("..."[:1])
    before = twin.buffer.view
    with pytest.raises(SchemaError, match=message):
        twin.buffer.view = Hindsight(worth, **options)
    assert twin.buffer.view is before
    with pytest.raises(SchemaError, match=message):
        ReplayBuffer(twin.schema, 10, view=Hindsight(worth, **options), ordered=ordered)


def test_a_field_that_batches_get_is_no_field_of_a_step() -> None:
    extras = lambda step: {"relabelled": np.float32(0)}  # noqa: E731
    with pytest.raises(SchemaError, match=r"'relabelled'.*give yours another"):
        HerTwin(1, 10, dress="goals", extras=extras, view=view_of())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("dress", ["goals", "image goals", "goals and images"])
def test_a_function_of_steps_can_do_all_that_goals_do(n: int, dress: str) -> None:
    plays = ["..", ".T", "..", "U.", "..", ".."] * 3
    views = view_of("episode", n), Hindsight(strategy="episode", ratio=0.8, n=n, gamma=0.5, relabel=as_relabel)
    goals, steps = (HerTwin(2, 9, dress=dress, view=view).play(*plays) for view in views)
    for _ in range(3):
        assert same_batches(goals.buffer.sample(16), steps.buffer.sample(16))


def test_a_function_of_steps_is_shown_the_ends_of_the_episode_as_far_as_it_is_there() -> None:
    seen: list[Any] = []

    def look(steps: Any, initial: Any, final: Any, chosen: Any) -> dict[str, Any]:
        seen.append((steps, initial, final, chosen))
        return {"action": steps["action"] * 0 + 3, "reward": -steps["reward"]}

    twin = HerTwin(1, 8, view=Hindsight(strategy="final", ratio=1.0, relabel=look)).play(*"..T...........U..")
    batch = twin.buffer.sample(40)
    ((steps, initial, final, chosen),) = seen
    rows = {tuple(row.obs): row for row in twin.truth.live(0)}
    for b in range(40):
        row = rows[tuple(steps["obs"][b])]
        mine = [other.obs for other in twin.truth.live(0) if other.episode is row.episode]
        assert np.array_equal(steps["next_obs"][b], row.episode.next_obs(row.at))
        assert np.array_equal(initial[b], mine[0])
        assert np.array_equal(final[b], mine[-1])
        assert np.array_equal(chosen[b], mine[-1])
    assert (batch["action"] == 3).all()
    assert np.array_equal(batch["reward"], -steps["reward"])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (None, FieldError, "expected a dict of the fields that change"),
        ({"rewards": 0}, FieldError, "rewards.*did you mean 'reward'"),
        ({"reward": np.zeros(3)}, ShapeError, r"reward.*expected \(30,\), a row for each step, got \(3,\)"),
        ({"reward": np.full(30, np.nan)}, NotFiniteError, "step 0 of 30 has a reward of nan"),
        ({"terminated": np.zeros(30)}, DTypeError, "terminated.*expected torch.bool, got torch.float64"),
        ({"obs": {"observation": np.zeros((30, 4))}}, ShapeError, r"obs.observation.*\(30, 3\)"),
    ],
)
def test_what_a_function_of_steps_must_not_return_is_refused(changed: Any, error: type, message: str) -> None:
    view = Hindsight(relabel=lambda *_: changed, ratio=1.0)
    twin = HerTwin(1, 20, dress="goals", view=view).play(*"." * 15)
    with pytest.raises(error, match=message):
        twin.buffer.sample(30)
