"""``finish``: what estimators attach, and GAE in place: the same to the bit, all or nothing."""

from __future__ import annotations

import copy
import cProfile
import pickle
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

import relive
from relive import (
    GAE,
    Batch,
    Field,
    GroupAdvantage,
    MonteCarlo,
    RolloutBuffer,
    Schema,
    TDLambda,
    VTrace,
    errors,
    returns,
)
from support import oracle, tagged_envs
from support.rollouts import (
    LAST,
    NAN,
    SCHEMA,
    WITHOUT_VALUE,
    block_of,
    filled,
    holds,
    ids,
    play,
    same_data,
    stack,
    step,
    write_rows,
)

Change = Callable[[RolloutBuffer], RolloutBuffer | None]

T, N = 7, 11
ESTIMATOR = GAE(gamma=0.9, lam=0.8)


def played(steps: int = T, seed: int = 0, **options: Any) -> RolloutBuffer:
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
        other = played(seed=2)
        rollout.add({name: other[name][t] for name in other.keys()}, extra=np.zeros((N, 2), np.float32))
    rollout.set_last(value=np.ones(N, np.float32))


def rewarded(rollout: RolloutBuffer) -> None:
    rollout["reward"].fill_(2.0)


def share(rollout: RolloutBuffer) -> None:
    for name in ("advantage", "return", "reward"):
        rollout[name].share_memory_()


def shrink(rollout: RolloutBuffer) -> None:
    rollout.clear()
    other = played(5, seed=3)
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
    rollout = played()
    for _ in range(3):
        rollout.finish(ESTIMATOR)
        require_equal(rollout, expected(rollout))
    rollout = CHANGES[name](rollout) or rollout
    for _ in range(2):
        rollout.finish(ESTIMATOR, partial=True)
        require_equal(rollout, expected(rollout))


def test_a_copy_is_finished_in_its_own_memory() -> None:
    rollout = played()
    rollout.finish(ESTIMATOR).finish(ESTIMATOR)
    before, other = rollout["advantage"].clone(), copy.deepcopy(rollout)
    other["reward"] = torch.ones(T, N)
    other.finish(ESTIMATOR)
    assert torch.equal(rollout["advantage"], before)
    assert not torch.equal(other["advantage"], before)


def test_a_rollout_that_came_round_is_finished_in_the_order_of_time() -> None:
    rollout = played(2 * T + 3, wrap=True)
    for _ in range(2):
        rollout.finish(ESTIMATOR)
        require_equal(rollout, expected(rollout))


def test_steps_that_come_later_make_advantages_leave() -> None:
    rollout = played(T - 1)
    rollout.finish(ESTIMATOR, partial=True).finish(ESTIMATOR, partial=True)
    zeros = np.zeros(N, np.float32)
    rollout.add(reward=zeros, value=zeros, terminated=zeros > 0, truncated=zeros > 0)
    assert "advantage" not in rollout


def test_advantages_come_back_after_a_column_was_written_in_between() -> None:
    rollout, zeros = played(T - 1), np.zeros(N, np.float32)
    rollout.finish(ESTIMATOR, partial=True)
    rollout.add(reward=zeros, value=zeros, terminated=zeros > 0, truncated=zeros > 0)
    rollout["reward"] = torch.ones(T, N)
    assert "advantage" in rollout.finish(ESTIMATOR, last_value=zeros)


def test_a_refused_call_changes_nothing() -> None:
    rollout = played(columns={"advantage": relive.Field(())})
    rollout.finish(ESTIMATOR).finish(ESTIMATOR)
    before = rollout["advantage"].clone(), rollout["return"].clone()
    rollout["mask"][4, 9], rollout["terminated"][4, 9], rollout["truncated"][4, 9] = True, False, True
    rollout["final_value"][4, 9] = float("nan")
    rollout["reward"] = torch.ones(T, N)
    with pytest.raises(errors.FieldError, match="step 4 of env 9 was truncated"):
        rollout.finish(ESTIMATOR)
    require_equal(rollout, before)


def test_whole_numbers_as_parameters_give_the_same() -> None:
    rollout = played()
    for _ in range(2):
        rollout.finish(GAE(gamma=1, lam=0))
        require_equal(rollout, expected(rollout, GAE(gamma=1.0, lam=0.0)))


def test_a_normalized_advantage_agrees_with_the_function() -> None:
    rollout = played()
    rollout.finish(ESTIMATOR).finish(GAE(gamma=0.9, lam=0.8, normalize=True))
    advantage, ret = expected(rollout)
    require_equal(rollout, (returns.normalize(advantage, rollout["mask"]), ret))


def test_the_second_finish_makes_at_most_eight_calls() -> None:
    rollout = played()
    rollout.finish(ESTIMATOR).finish(ESTIMATOR)
    profile = cProfile.Profile()
    profile.enable()
    rollout.finish(ESTIMATOR)
    profile.disable()
    assert sum(entry.callcount for entry in profile.getstats()) <= 8  # one of them switches the profile off


# Finishing


ESTIMATORS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "gae": (GAE(gamma=0.9, lam=0.8), lambda c, **k: oracle.gae(**c, **k, gamma=0.9, lam=0.8)),
    "td lambda": (TDLambda(gamma=0.9, lam=0.7), lambda c, **k: oracle.lambda_returns(**c, **k, gamma=0.9, lam=0.7)),
    "monte carlo": (MonteCarlo(gamma=0.9), lambda c, **k: oracle.monte_carlo(**c, **k, gamma=0.9)),
    "vtrace": (
        VTrace(gamma=0.9, lam=0.9, rho_clip=1.5, c_clip=0.8),
        lambda c, **k: oracle.vtrace(**c, **k, gamma=0.9, lam=0.9, rho_clip=1.5, c_clip=0.8),
    ),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_attaches_what_the_oracle_says_of_the_same_steps(name: str, seed: int, masked: bool) -> None:
    estimator, slow = ESTIMATORS[name]
    steps = play(12, 3, seed=seed, masked=masked)
    rollout = filled(steps)
    more = {}
    if name == "vtrace":
        rng = np.random.default_rng(seed)
        target = rollout["log_prob"].numpy() + rng.normal(size=(12, 3)).astype(np.float32)
        rollout["target_log_prob"] = target
        more = {"log_rho": target - rollout["log_prob"].numpy()}
    assert rollout.finish(estimator, last_value=LAST) is rollout
    expected = slow(block_of(steps), **more)
    if isinstance(expected, tuple):
        advantage, ret = expected
    else:
        ret, real = expected, stack(steps, "mask")
        advantage = np.where(real, expected - stack(steps, "value"), 0)
    assert rollout["return"].dtype is rollout["advantage"].dtype is torch.float32
    np.testing.assert_allclose(rollout["return"], ret, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(rollout["advantage"], advantage, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_finishing_is_the_pure_function_on_the_columns(masked: bool) -> None:
    steps = play(9, 3, masked=masked)
    rollout = filled(steps).finish(GAE(), last_value=LAST)
    block = {name: torch.from_numpy(x) for name, x in block_of(steps).items()}
    block = {name: x.float() if x.is_floating_point() else x for name, x in block.items()}
    advantage, ret = relive.returns.gae(**block)
    assert torch.equal(rollout["advantage"], advantage)
    assert torch.equal(rollout["return"], ret)


def test_monte_carlo_without_a_critic_needs_no_value() -> None:
    rollout = RolloutBuffer(WITHOUT_VALUE, 3, 1)
    for t in range(3):
        rollout.add(reward=1.0 + t, terminated=False, truncated=t == 1)
    rollout.finish(MonteCarlo(gamma=0.5, critic=False))
    assert rollout["return"].tolist() == [[2.0], [2.0], [3.0]]


def test_the_group_estimator_narrows_the_mask_that_the_batches_follow() -> None:
    rollout = filled([step(0, terminated=[True, False]), step(1), step(2)]).finish(GroupAdvantage(2))
    assert rollout["mask"].tolist() == [[True, True], [False, True], [False, True]]
    assert len(rollout) == 4
    assert sorted(ids(list(rollout.minibatches(3)))) == [0, 1, 101, 201]
    rollout.clear()
    for t in range(3):
        rollout.add(step(t))
    assert len(rollout) == 6


def test_an_estimator_of_ones_own_is_given_the_columns_it_names_and_none_for_what_is_unused() -> None:
    seen: dict[str, Any] = {}

    class Mine:
        reads = ("obs", "value", "mask", "final_value", "extra")

        def __call__(self, **columns: Any) -> dict[str, Tensor]:
            seen.update(columns)
            return {"score": columns["obs"].sum(-1), "deep": columns["obs"][..., None, :]}

    rollout = filled([step(t) for t in range(3)])
    rollout["extra"] = torch.ones(3, 2, 5)
    rollout.finish(Mine(), last_value=[7, 8])
    assert list(seen) == ["obs", "value", "mask", "final_value", "extra"]
    assert (seen["mask"], seen["final_value"]) == (None, None)
    assert seen["value"].tolist() == [*stack([step(t) for t in range(3)], "value").tolist(), [7, 8]]
    assert rollout["score"].tolist() == [[t, t + 1] for t in range(3)]
    assert rollout.sample(1)["deep"].shape == (1, 1, 2)
    rollout["mask"] = np.array([[True, False]] * 3)
    rollout["truncated"][1, 1] = True
    rollout.set_final_value([1], [1], [4.0])
    rollout.finish(Mine())
    assert seen["mask"].tolist() == [[True, False]] * 3
    assert seen["final_value"][1, 1] == 4


def test_an_estimator_that_returns_a_column_of_another_shape_attaches_nothing() -> None:
    class Wrong:
        reads = ("reward",)

        def __call__(self, **columns: Any) -> dict[str, Tensor]:
            return {"advantage": columns["reward"] * 0, "return": columns["reward"][:-1]}

    rollout = filled([step(0), step(1)])
    with pytest.raises(errors.ShapeError, match="'return'"):
        rollout.finish(Wrong())
    assert "advantage" not in rollout


def test_steps_that_are_interrupted_are_worth_what_the_bootstrap_row_was_set_to_and_nothing_that_lay_there() -> None:
    rollout = filled([step(t) for t in range(4)], num_steps=4)
    rollout.clear()  # the values of four steps are still in the memory
    rollout.add(step(0))
    rollout.interrupt()
    assert rollout["truncated"].all()
    assert rollout["final_value"].isnan().all()
    rollout.add(step(1))
    with pytest.raises(errors.FieldError, match="step 0 of env 0 was truncated and has no value"):
        rollout.finish(GAE(), last_value=[0.0, 0.0], partial=True)
    rollout.set_last(value=[3.0, 4.0])
    rollout.interrupt()
    assert rollout["final_value"][1].tolist() == [3.0, 4.0]


def test_an_unfinished_rollout_is_refused_unless_a_part_will_do() -> None:
    rollout = filled(play(3), num_steps=5)
    with pytest.raises(errors.UnfinishedError, match=r"3 of 5 steps.*partial=True"):
        rollout.finish(GAE(), last_value=[1, 2])
    assert "advantage" not in rollout
    rollout.finish(GAE(), last_value=[1, 2], partial=True)
    assert same_data(rollout.flat(), filled(play(3)).finish(GAE(), last_value=[1, 2]).flat())


def test_a_missing_bootstrap_value_is_refused_by_the_env_that_goes_on() -> None:
    rollout = filled([step(0), step(1, terminated=[True, False])])
    with pytest.raises(errors.UnfinishedError, match=r"env 1 goes on after the last step.*last_value=V\(obs\[T\]\)"):
        rollout.finish(GAE())
    assert "advantage" not in rollout


def test_no_bootstrap_value_is_needed_where_every_env_has_just_ended_or_is_not_real() -> None:
    last = step(1, terminated=[True, False, False], truncated=[False, True, False], envs=3)
    last |= {"mask": [True, True, False], "final_value": [NAN, 4.0, NAN]}
    rollout = filled([step(0, 3), last])
    rollout.block["value"][2] = NAN
    rollout.finish(GAE(gamma=0.5, lam=1.0))
    want, _ = oracle.gae(
        stack([step(0, 3), last], "reward"),
        np.concatenate([stack([step(0, 3), last], "value"), [[0, 0, 0]]]),
        stack([step(0, 3), last], "terminated"),
        stack([step(0, 3), last], "truncated"),
        final_value=stack([step(0, 3), last], "final_value"),
        mask=stack([step(0, 3), last], "mask"),
        gamma=0.5,
        lam=1.0,
    )
    np.testing.assert_allclose(rollout["advantage"], want, rtol=1e-6)


def test_a_truncated_step_without_its_final_value_is_refused_by_its_place() -> None:
    rollout = filled([step(0), step(1, truncated=[False, True]), step(2)])
    with pytest.raises(errors.FieldError, match=r"'final_value': step 1 of env 1 was truncated.*final_obs"):
        rollout.finish(GAE(), last_value=[0, 0])
    assert "advantage" not in rollout
    rollout.set_final_value([1], [1], [2.0])
    rollout.finish(GAE(gamma=1.0, lam=0.0))
    assert rollout["advantage"][1, 1] == (1 + 1 / 8) + 2.0 - (-1 - 1 / 8)


def test_a_final_value_may_be_given_with_its_step_or_written_in_place() -> None:
    steps = play(6)
    added, placed, viewed = filled(steps), RolloutBuffer(SCHEMA, 6, 2), filled([step(t) for t in range(6)])
    write_rows(placed.reserve(), steps)
    placed.commit()
    for name in ("terminated", "truncated", "final_value"):
        viewed[name][:] = torch.from_numpy(stack(steps, name))
    for rollout in (added, placed, viewed):
        rollout.finish(GAE(), last_value=[1, 2])
        assert same_data(rollout.flat(), added.flat())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([0], [0], [1.0, 2.0]), errors.ShapeError),
        (([0, 1], [0], [1.0, 2.0]), errors.ShapeError),
        (([2], [0], [1.0]), errors.ParameterError),
        (([-1], [0], [1.0]), errors.ParameterError),
        (([0], [2], [1.0]), errors.ParameterError),
        (([0], [-1], [1.0]), errors.ParameterError),
        (([0], [0], [[1.0]]), errors.ShapeError),
        (([0], [0], np.array([1j])), errors.DTypeError),
        (([0.7], [0], [1.0]), errors.SchemaError),
    ],
    ids=str,
)
def test_final_values_that_do_not_fit_are_refused_and_nothing_is_written(
    arguments: Any, error: type[Exception]
) -> None:
    rollout = filled([step(0), step(1)], num_steps=3)
    with pytest.raises(error):
        rollout.set_final_value(*arguments)
    assert holds(rollout, [step(0), step(1)])


def test_a_single_final_value_is_written_whole_or_not_at_all() -> None:
    rollout = filled([step(0, truncated=[True, False])])
    try:
        rollout.set_final_value(0, 0, 1.5)
    except errors.ShapeError:
        assert rollout["final_value"].isnan().all()
    else:
        rollout.finish(GAE(gamma=1.0), last_value=[0, 0])
        assert rollout["advantage"][0, 0] == 1.5


def test_without_values_there_are_no_final_values() -> None:
    rollout = RolloutBuffer(WITHOUT_VALUE, 1, 1)
    row = {"reward": 1.0, "terminated": False, "truncated": True}
    with pytest.raises(errors.FieldError, match="final_value"):
        rollout.add(row, final_value=1.0)
    assert rollout.steps == 0
    rollout.add(row)
    with pytest.raises(errors.FieldError, match=r"add value=\(\)"):
        rollout.set_final_value([0], [0], [1.0])


@pytest.mark.parametrize("estimator", [GAE(), VTrace()], ids=lambda e: type(e).__name__)
def test_a_column_that_an_estimator_reads_and_the_rollout_lacks_is_named(estimator: Any) -> None:
    rollout = RolloutBuffer(WITHOUT_VALUE, 1, 1)
    rollout.add(reward=1.0, terminated=False, truncated=False)
    with pytest.raises(errors.FieldError, match=rf"{type(estimator).__name__} reads 'value': .* It has: .*schema$"):
        rollout.finish(estimator)
    full = filled([step(0)])
    if isinstance(estimator, VTrace):
        with pytest.raises(errors.FieldError, match=r"or set rollout\['target_log_prob'\] first$"):
            full.finish(estimator, last_value=[0, 0])


def test_values_may_be_float64_from_end_to_end() -> None:
    double = SCHEMA.extend(value=Field((), torch.float64), reward=Field((), torch.float64))
    rng = np.random.default_rng(0)
    steps = [
        each | {"value": rng.normal(size=3), "reward": rng.normal(size=3), "final_value": rng.normal(size=3)}
        for each in play(20, 3)
    ]
    rollout = RolloutBuffer(double, 20, 3)
    for each in steps:
        rollout.add(each)
    rollout.finish(GAE(gamma=0.97, lam=0.9), last_value=LAST)
    want, ret = oracle.gae(**block_of(steps), gamma=0.97, lam=0.9)
    assert rollout["final_value"].dtype is rollout["advantage"].dtype is rollout["return"].dtype is torch.float64
    assert np.array_equal(rollout["final_value"], stack(steps, "final_value"))
    np.testing.assert_allclose(rollout["advantage"], want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rollout["return"], ret, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_may_be_half_precision_and_advantages_are_float32(dtype: torch.dtype) -> None:
    rollout = RolloutBuffer(SCHEMA.extend(value=Field((), dtype)), 2, 2)
    for t in range(2):
        rollout.add(step(t, value=torch.tensor([t, t + 0.5], dtype=dtype)))
    rollout.finish(GAE(gamma=1.0, lam=1.0), last_value=torch.tensor([2.0, 4.0], dtype=dtype))
    assert rollout["advantage"].dtype is torch.float32
    assert rollout["return"].tolist() == [[0 + 1 + 2, 1 / 8 + 9 / 8 + 4], [1 + 2, 9 / 8 + 4]]


@pytest.mark.parametrize("estimator", ["gae", None, 5, {}], ids=str)
def test_what_is_no_estimator_is_refused_with_one_that_is(estimator: Any) -> None:
    with pytest.raises(errors.ParameterError, match=r"finish\(.*expected an estimator, such as relive\.GAE\("):
        filled([step(0), step(1)]).finish(estimator)


def test_a_batch_without_an_advantage_says_that_finish_has_to_be_called() -> None:
    rollout = filled([step(0), step(1)])
    batches: list[Any] = [
        next(rollout.minibatches(2)), rollout.flat(), rollout.sample(2), rollout.data(), rollout.block, rollout,
        next(rollout.sequences(2)), next(rollout.chunks(1)), next(rollout.env_batches(1)).steps,
    ]  # fmt: skip
    for batch in batches:
        for name in ("advantage", "return"):
            with pytest.raises((KeyError, errors.FieldError), match=rf"'{name}'.*finish\(relive\.GAE"):
                batch[name]
    for batch in (batches[0], pickle.loads(pickle.dumps(batches[0]))):
        assert type(batch) is Batch
        assert batch.get("advantage", None) is None
        assert batch.get("advantage", 5) == 5
        assert "advantage" not in batch.keys()
        with pytest.raises(KeyError, match=r"'rewards'.*did you mean 'reward'"):
            batch["rewards"]
    rollout.finish(GAE(), last_value=torch.zeros(2))
    assert next(rollout.minibatches(2))["advantage"].shape == (2,)


def test_an_advantage_that_the_user_attached_is_one() -> None:
    rollout = filled([step(0), step(1)])
    rollout["advantage"] = torch.ones(2, 2)
    assert next(rollout.minibatches(2))["advantage"].tolist() == [1, 1]


def test_a_class_in_place_of_an_estimator_is_refused() -> None:
    with pytest.raises(
        errors.ParameterError, match=r"estimator=GAE: expected an object, got its class; pass GAE\(\.\.\.\)"
    ):
        filled([step(0), step(1)]).finish(cast("Any", GAE))


BAD = float("nan"), float("inf")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("estimator", [GAE(), GAE(normalize=True), TDLambda(), MonteCarlo(), VTrace()], ids=repr)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("value", "'value': step 2 of env 1"),
        ("reward", "'reward': step 2 of env 1"),
        ("last", "'value': the bootstrap row"),
    ],
)
def test_a_number_that_would_spoil_the_advantages_is_named_and_there_are_none(
    bad: float, estimator: Any, name: str, says: str
) -> None:
    rollout = filled([step(t) for t in range(4)])
    rollout["target_log_prob"] = rollout["log_prob"]
    rollout.finish(estimator, last_value=[0.0, 0.0])
    if name != "last":
        rollout[name][2, 1] = bad
    with pytest.raises(errors.NotFiniteError, match=rf"{says}.*debug=True"):
        rollout.finish(estimator, last_value=[0.0, bad if name == "last" else 0.0])
    assert "advantage" not in rollout
    assert "return" not in rollout
    assert "target_log_prob" in rollout


@pytest.mark.parametrize("estimator", [GAE(), TDLambda(), MonteCarlo()], ids=lambda x: type(x).__name__)
def test_numbers_that_no_advantage_comes_from_may_be_anything(estimator: Any) -> None:
    steps = [step(0, terminated=[True, True]), step(1, mask=[False, True]), step(2, terminated=[True, True])]
    steps[1] |= {"reward": [NAN, 1.0], "value": [NAN, 1.0]}
    rollout = filled(steps).finish(estimator, last_value=[NAN, NAN])
    assert rollout["advantage"].isfinite()[rollout["mask"]].all()


@pytest.mark.parametrize("env", [0, 7, 8, 15, 16, 20])
@pytest.mark.parametrize("envs", [16, 21])
def test_a_number_that_spoils_an_advantage_is_found_in_each_of_many_envs(env: int, envs: int) -> None:
    rollout = filled([step(t, envs) for t in range(3)])
    rollout["value"][1, min(env, envs - 1)] = NAN
    with pytest.raises(errors.NotFiniteError, match=f"'value': step 1 of env {min(env, envs - 1)} is nan"):
        rollout.finish(GAE(), last_value=np.zeros(envs))


def test_an_advantage_that_is_too_large_for_its_dtype_is_named_itself() -> None:
    rollout = filled([step(0), step(1, reward=[0.0, 3e38]), step(2, reward=[0.0, 3e38])])
    with pytest.raises(errors.NotFiniteError, match=r"advantage of step 0 of env 1 is inf.*scale the rewards"):
        rollout.finish(GAE(1.0, 1.0), last_value=[0.0, 0.0])


def test_large_advantages_are_fine_although_their_squares_are_not() -> None:
    rollout = filled([step(0, reward=[1e30, -1e30])]).finish(GAE(), last_value=[0.0, 0.0])
    assert rollout["advantage"].isfinite().all()


def test_debug_mode_refuses_a_value_when_it_is_added() -> None:
    rollout = filled([step(0)], num_steps=3, debug=True)
    with pytest.raises(errors.NotFiniteError, match=r"'value': step 1 of env 1 is nan; fix the policy"):
        rollout.add(step(1, value=[0.0, NAN]))
    rollout.reserve(2)["value"].fill_(NAN)
    with pytest.raises(errors.NotFiniteError, match=r"'value': step 1 of env 0"):
        rollout.commit()
    assert rollout.steps == 1


def loop(mode: AutoresetMode, right: bool, cut: Any = slice(None), ended: str = "truncated", **more: Any) -> list[str]:
    """What a loop of the user's own hears that fills rollouts; ``right``, or without a mask under NEXT_STEP.

    Args:
        cut: which final observations the loop values, of all envs or of those that are cut.
        ended: how episodes end.
        more: for the rollout.
    """
    envs = tagged_envs.make_tagged(
        4, mode, tagged_envs.cycle([(3, ended), (2, ended), (4, ended)]), check_actions=False
    )
    net = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def value(obs: Any) -> Tensor:
        with torch.no_grad():
            return net(torch.as_tensor(obs, dtype=torch.float32)[:, :3] % 7).squeeze(1)

    rollout = RolloutBuffer(relive.Schema.from_env(envs, value=()), 8, 4, **more)
    obs, _ = envs.reset(seed=0)
    done = np.zeros(4, np.bool_)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for _ in range(8):
                action = tagged_envs.tagged_policy(obs)
                after, reward, terminated, truncated, info = envs.step(action)
                final, now = after.copy(), np.full(4, NAN, np.float32)
                for n in np.flatnonzero(truncated & ("final_obs" in info)):
                    final[n] = info["final_obs"][n]
                rows = np.flatnonzero(truncated) if isinstance(cut, str) else np.arange(4)
                now[rows] = value(final[rows]) if len(rows) else 0
                flags = {"terminated": terminated, "truncated": truncated}
                mask = {"mask": ~done} if right and mode is AutoresetMode.NEXT_STEP else {}
                rollout.add(obs=obs, action=action, reward=reward, value=value(obs), final_value=now, **flags, **mask)
                obs, done = after, terminated | truncated
                if mode is AutoresetMode.DISABLED and done.any():
                    obs, _ = envs.reset(options={"reset_mask": done})
            rollout.finish(GAE(), last_value=value(obs))
            rollout.finish(TDLambda())
            rollout.clear()
    assert all(one.category is errors.EpisodeEndWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("cut", ["cut alone", slice(None)])
def test_steps_that_next_step_autoreset_ignores_are_told_once_by_their_values(cut: Any) -> None:
    (message,) = loop(AutoresetMode.NEXT_STEP, False, cut)
    assert "mask=~ended" in message
    assert "rollout.check_ends = False" in message


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name.lower())
def test_a_right_loop_that_fills_rollouts_says_nothing(mode: AutoresetMode) -> None:
    assert loop(mode, True) == []
    assert loop(mode, True, ended="terminated") == []


def test_the_check_of_ends_can_be_turned_off_and_a_collector_does() -> None:
    rollout = filled([step(0)])
    assert rollout.check_ends is True
    rollout.check_ends = False
    assert (rollout.check_ends, copy.deepcopy(rollout).check_ends) == (False, False)
    with pytest.raises(errors.ParameterError, match="check_ends"):
        rollout.check_ends = cast("Any", "no")
    envs = tagged_envs.make_tagged(2, AutoresetMode.NEXT_STEP, tagged_envs.cycle([(3, "truncated")]))
    collected = RolloutBuffer(relive.Schema.from_env(envs, value=()), 8, 2)
    relive.Collector(envs, lambda obs: {"action": torch.zeros(2), "value": torch.zeros(2)}, collected)
    assert collected.check_ends is False


def test_a_critic_that_says_the_same_of_all_observations_shows_nothing() -> None:
    steps = [step(t, truncated=[t % 2 == 1] * 2, value=[1.0, 1.0], final_value=[1.0, 1.0]) for t in range(12)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filled(steps).finish(GAE(), last_value=[1.0, 1.0])


@pytest.mark.parametrize("seed", range(30))
def test_values_of_few_digits_are_alike_by_chance_and_say_nothing_of_ends(seed: int) -> None:
    """A critic in bfloat16, whose values lie near each other."""
    rng, flag = np.random.default_rng(seed), Field((), torch.bool)
    schema = Schema({"obs": (2,), "reward": (), "terminated": flag, "truncated": flag, "value": ()})
    rollout, none = RolloutBuffer(schema, 20, 8), np.zeros(8, bool)

    def near() -> Tensor:
        return torch.from_numpy(90 + rng.normal(0, 0.3, 8)).bfloat16().float()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for t in range(20):
                rollout.add(obs=np.zeros((8, 2)), reward=np.ones(8), terminated=none, truncated=none | (t % 10 == 9),
                            value=near(), final_value=near())  # fmt: skip
            rollout.finish(GAE(), last_value=near())
            rollout.clear()
