"""What a policy is given, and what it may answer."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorObservationWrapper, VectorWrapper
from torch import Tensor, nn

import relive
from relive import Collector, Field, RolloutBuffer, Schema, errors
from support import tagged_envs
from support.tagged_collections import every_mode, followed, gather, make_buffer, policy, truth

# What the policy is given, and what it answers


class Doubles(VectorWrapper):
    """A vector env that observes in float64, as MuJoCo does; counts the steps that it is asked for."""

    steps = 0

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        return obs.astype(np.float64), info

    def step(self, actions: Any) -> Any:
        self.steps += 1
        obs, *rest, info = self.env.step(actions)
        if "final_obs" in info:
            final = [None if x is None else np.asarray(x, np.float64) for x in info["final_obs"]]
            info = info | {"final_obs": np.array([*final, None], object)[:-1]}
        return obs.astype(np.float64), *rest, info


@every_mode
def test_the_policy_gets_observations_in_the_dtype_of_the_schema(mode: AutoresetMode) -> None:
    schedule = tagged_envs.cycle([(3, "truncated")], [(2, "terminated"), (5, "truncated")])
    envs = Doubles(tagged_envs.make_tagged(2, mode, schedule))
    network, seen = nn.Linear(4, 1), set[torch.dtype]()

    def act(obs: Tensor) -> dict[str, Any]:
        seen.add(obs.dtype)
        network(obs)  # "mat1 and mat2 must have the same dtype"
        return policy(obs)

    buffer = make_buffer(envs, 12)
    rows, _ = gather(Collector(envs, act, buffer, seed=0), [12, 5])
    assert seen == {torch.float32}
    assert rows == truth(schedule, [len(mine) for mine in rows], seed=0)
    replay = relive.ReplayBuffer(Schema.from_env(envs), 100, 2, own_next_obs=True, seed=0)
    Collector(envs, lambda obs: act(obs)["action"], replay, seed=0).collect(12)
    assert seen == {torch.float32}
    assert all(there == here._replace(step=here.step + 1) for here, there, *_ in followed(replay))


def test_a_float32_network_that_gets_float64_is_told_how_to_declare_float32() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3), check_actions=False)
    double = Schema.from_env(envs).extend(obs=Field((4,), torch.float64))
    network = nn.Linear(4, 2)

    def act(obs: Tensor) -> Tensor:
        return network(obs).argmax(-1)

    with pytest.raises(RuntimeError, match="dtype") as caught:
        Collector(envs, act, relive.ReplayBuffer(double, 100, 2)).collect()
    assert "as_float32()" in caught.value.__notes__[0]
    Collector(envs, act, relive.ReplayBuffer(double.as_float32(), 100, 2)).collect()


class Posed(VectorObservationWrapper):
    """A vector env whose observations are a dict with one member of float64."""

    def __init__(self, envs: Any) -> None:
        super().__init__(envs)
        pose = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
        self.single_observation_space = gym.spaces.Dict({"pose": pose})

    def observations(self, observations: Any) -> Any:
        return {"pose": observations.astype(np.float64)}


def test_float64_in_nested_observations_is_told_as_well() -> None:
    envs = Posed(tagged_envs.make_tagged(2, AutoresetMode.NEXT_STEP, tagged_envs.always(3), check_actions=False))
    network = nn.Linear(4, 2)

    def act(obs: relive.Batch) -> Tensor:
        return network(obs["pose"]).argmax(-1)

    with pytest.raises(RuntimeError, match="dtype") as caught:
        Collector(envs, act, relive.ReplayBuffer(Schema.from_env(envs), 100, 2)).collect()
    assert "as_float32()" in caught.value.__notes__[0]


def test_an_observation_that_the_schema_cannot_hold_is_refused_before_the_policy_sees_it() -> None:
    envs = Doubles(tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3)))
    schema = Schema.from_env(envs).extend(obs=Field((4,), torch.int64), value=())
    with pytest.raises(errors.DTypeError, match=r"'obs': expected torch\.int64, got torch\.float64"):
        Collector(envs, policy, RolloutBuffer(schema, 4, 2)).collect()
    assert envs.steps == 0


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (0, errors.ShapeError, r"'action': expected shape \(2, 1\).*got \(\)"),
    "nothing": (None, errors.ShapeError, r"'action': expected an array.*got NoneType"),
    "no axis for the action": (torch.zeros(2), errors.ShapeError, r"expected shape \(2, 1\).*got \(2,\)"),
    "an action and its probability": ((torch.zeros(2, 1), torch.zeros(2)), errors.ShapeError, r"'action'"),
    "a distribution": (torch.distributions.Normal(0.0, 1.0), errors.ShapeError, r"'action'.*got Normal"),
    "complex numbers": (torch.zeros(2, 1, dtype=torch.complex64), errors.DTypeError, r"'action'.*complex64"),
    "a mapping without actions": ({"value": torch.zeros(2)}, errors.FieldError, "lacks 'action'; it has 'value'"),
}


@pytest.mark.parametrize("answer", WRONG)
def test_an_answer_that_does_not_fit_is_refused_with_what_is_expected_before_the_env_sees_it(answer: str) -> None:
    given, error, says = WRONG[answer]
    envs = Doubles(gym.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync"))
    buffer = RolloutBuffer(Schema.from_env(envs).extend(obs=(3,)), 4, 2)
    with pytest.raises(error, match=says) as caught:
        Collector(envs, lambda obs: given, buffer).collect()
    assert "the policy's answer" in str(caught.value)
    assert envs.steps == 0
    assert buffer.steps == 0


def test_the_action_of_a_single_env_may_come_without_its_axis() -> None:
    played = RolloutBuffer(Schema.from_env(gym.make("Pendulum-v1")), 3, 1)
    for answer in (torch.zeros(1), torch.zeros(1, 1), np.zeros(1), [0.0], [[0.0]]):
        played.clear()
        Collector(gym.make("Pendulum-v1"), lambda obs, answer=answer: answer, played).collect()
        assert played["action"].tolist() == [[[0.0]]] * 3


@pytest.mark.parametrize("as_module", [False, True])
def test_a_policy_that_takes_a_state_and_a_schema_without_one_is_an_error_that_says_what_to_add(
    as_module: bool,
) -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))

    def takes(obs: Any, hidden: Any) -> dict[str, Any]:
        return policy(obs) | {"hidden": hidden}

    def stateless(obs: Any) -> dict[str, Any]:
        return policy(obs)

    class Module(nn.Module):
        def forward(self, obs: Any, hidden: Any) -> dict[str, Any]:
            return takes(obs, hidden)

    acting = Module() if as_module else takes
    with pytest.raises(errors.FieldError, match=r"policy\(obs\).*missing a required argument: 'hidden'.*add it to the"):
        Collector(envs, acting, make_buffer(envs, 4)).collect()
    with pytest.raises(errors.FieldError, match=r"policy\(obs, hidden=...\).*unexpected keyword argument 'hidden'"):
        Collector(envs, stateless, make_buffer(envs, 4, hidden=(3,))).collect()
    with pytest.raises(errors.FieldError, match="returns 'hidden', and the schema has no such field"):
        Collector(envs, lambda obs, hidden=None: policy(obs) | {"hidden": 1}, make_buffer(envs, 4)).collect()


def test_a_value_function_that_takes_a_state_the_schema_lacks_is_such_an_error_too() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))

    def value_fn(obs: Any, hidden: Any) -> Any:
        return tagged_envs.tagged_value(obs)

    with pytest.raises(errors.FieldError, match="missing a required argument: 'hidden'"):
        Collector(envs, policy, make_buffer(envs, 4), value_fn=value_fn).collect()


def test_a_type_error_of_the_policy_itself_stays_what_it_is() -> None:
    envs = tagged_envs.make_tagged(2, AutoresetMode.SAME_STEP, tagged_envs.always(3))

    def wrong(obs: Any) -> Any:
        return len(cast(Any, 3))

    with pytest.raises(TypeError, match=r"len\(\)"):
        Collector(envs, wrong, make_buffer(envs, 4)).collect()
