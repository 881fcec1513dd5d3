"""What an env returns beside its spaces: the error names the field, the space and what came."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from relive import Collector, RolloutBuffer, Schema, errors

FRAME = np.zeros(3, np.float32)
BOX = gym.spaces.Box(-1, 1, (3,), np.float32)


class Env(gym.Env[Any, Any]):
    def __init__(self, answer: tuple[Any, ...], first: Any = FRAME, space: Any = BOX) -> None:
        self.answer, self.first = answer, first
        self.observation_space, self.action_space = space, gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.first, {}

    def step(self, action: Any) -> Any:
        return *self.answer, {}


class Vector(gym.vector.VectorEnv[Any, Any, Any]):
    """One that somebody else wrote, and whose space is stale."""

    num_envs = 2
    single_observation_space = BOX
    observation_space = gym.vector.utils.batch_space(BOX, 2)
    single_action_space = gym.spaces.Discrete(2)
    action_space = gym.vector.utils.batch_space(gym.spaces.Discrete(2), 2)
    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return {"camera": np.zeros((2, 3), np.float32)}, {}


def play(envs: Any, num_envs: int) -> None:
    rollout = RolloutBuffer(Schema.from_env(envs), 4, num_envs)
    Collector(envs, lambda obs: torch.zeros(num_envs, dtype=torch.int64), rollout, seed=0).collect()


NESTED = {"camera": FRAME}
CASES: dict[str, tuple[Any, str]] = {
    "reward": ((FRAME, np.zeros(1, np.float32), False, False), r"field 'reward': step\(\) of env 0 .*one float"),
    "terminated": ((FRAME, 0.0, [False, True], False), r"field 'terminated': step\(\) of env 0 .*one bool"),
    "truncated": ((FRAME, 0.0, False, [False, True]), r"field 'truncated': step\(\) of env 0 .*one bool"),
    "obs, nested": ((NESTED, 0.0, False, False), r"field 'obs': env 0 returned a dict of \['camera'\].* has Box"),
    "obs, shape": ((FRAME[:2], 0.0, False, False), r"field 'obs': env 0 returned an array of shape \(2,\).* has Box"),
}


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "t"])
@pytest.mark.parametrize("single", [True, False])
def test_what_a_step_returns_beside_its_space_is_named(case: str, single: bool):
    answer, message = CASES[case]
    envs = Env(answer) if single else gym.vector.SyncVectorEnv([lambda: Env(answer)] * 2)
    with pytest.raises(errors.EnvError, match=message):
        play(envs, 1 if single else 2)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "t"])
def test_a_flag_of_several_values_is_named(case: str):
    answer, message = CASES[case]
    with pytest.raises(errors.EnvError, match=message):
        play(Env((answer[0], answer[1], *map(_several, answer[2:]))), 1)


def _several(flag: Any) -> Any:
    return np.array(flag) if isinstance(flag, list) else flag


@pytest.mark.parametrize(
    ("first", "space", "message"),
    [
        (NESTED, BOX, r"field 'obs': env 0 returned a dict of \['camera'\]"),
        (FRAME, gym.spaces.Dict(camera=BOX), r"field 'obs': env 0 returned an array of shape \(3,\).* has Dict"),
        ({"lidar": FRAME}, gym.spaces.Dict(camera=BOX), r"field 'obs.camera': env 0 returned none in a dict"),
        ({"camera": FRAME[:1]}, gym.spaces.Dict(camera=BOX), r"field 'obs.camera': .* shape \(1,\).* has Box"),
    ],
)
def test_what_a_reset_returns_beside_its_space_is_named(first: Any, space: Any, message: str):
    with pytest.raises(errors.EnvError, match=message):
        play(Env((first, 0.0, False, False), first, space), 1)


def test_nested_observations_of_another_vector_env_under_a_stale_box_are_named():
    with pytest.raises(errors.EnvError, match=r"field 'obs': the envs returned a dict of \['camera'\].*Field\(\(3,\)"):
        play(Vector(), 2)


def test_an_error_of_the_env_itself_stays_its_own():
    class Broken(Env):
        def step(self, action: Any) -> Any:
            raise ValueError("the motor is hot")

    with pytest.raises(ValueError, match=r"^the motor is hot$"):
        play(Broken((FRAME, 0.0, False, False)), 1)
