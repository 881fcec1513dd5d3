"""What the first final observations show: arrays that a reset filled again, and wrappers that forgot them."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from torch import Tensor

from relive import Collector, Field, ReplayBuffer, RolloutBuffer, Schema, errors
from support import tagged_envs
from support.tagged_collections import Edited, make_buffer, policy


class Line(gym.Env[Any, Any]):
    """Moves by one each step from a start of its own each episode; ``own`` returns its own array."""

    observation_space: Any = gym.spaces.Box(-1e4, 1e4, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, own: bool = False, length: int = 4, end: str = "truncated", stays: bool = False) -> None:
        self.own, self.length, self.end, self.stays = own, length, end, stays
        self.state, self.episode, self.count = np.zeros(1, np.float32), -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.count = self.episode + 1, 0
        self.state[0] = 0 if self.stays else 100 * self.episode
        return self._obs(), {}

    def _obs(self) -> Any:
        return self.state if self.own else self.state.copy()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.state[0] += not self.stays
        over = self.count == self.length
        return self._obs(), 1.0, over and self.end == "terminated", over and self.end == "truncated", {}


def valued(obs: Tensor) -> dict[str, Tensor]:
    return {"action": torch.zeros(len(obs), dtype=torch.int64), "value": obs.reshape(len(obs), -1)[:, 0].float()}


def play(envs: Any, kind: str, num_steps: int = 40) -> list[str]:
    """The warnings of a collection."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", errors.EpisodeEndWarning)
        schema, n = Schema.from_env(envs, value=()), getattr(envs, "num_envs", 1)
        if kind == "rollout":
            Collector(envs, valued, RolloutBuffer(schema, num_steps, n), seed=0).collect()
        elif kind == "replay":
            Collector(envs, valued, ReplayBuffer(schema, 1000, n), seed=0).collect(num_steps)
        else:
            Collector(envs, valued, schema=schema, seed=0).steps(num_steps)
    return [str(one.message) for one in caught if one.category is errors.EpisodeEndWarning]


KINDS = ["rollout", "replay", "chunks"]
SAME = AutoresetMode.SAME_STEP


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_envs", [1, 4])
def test_final_observations_that_a_reset_filled_again_are_found_once(kind: str, num_envs: int) -> None:
    (said,) = play(SyncVectorEnv([partial(Line, True)] * num_envs, autoreset_mode=SAME), kind)
    assert re.search(r"SyncVectorEnv.*SAME_STEP.*env 0.*obs\.copy\(\).*NEXT_STEP or DISABLED", said)


@pytest.mark.slow
def test_the_same_is_found_in_other_processes() -> None:
    envs = AsyncVectorEnv([partial(Line, True)] * 2, autoreset_mode=SAME)
    assert len(play(envs, "rollout")) == 1
    envs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_right_envs_are_not_spoken_of(kind: str) -> None:
    for mode in AutoresetMode:
        assert not play(SyncVectorEnv([Line] * 2, autoreset_mode=mode), kind)
        assert not play(SyncVectorEnv([partial(Line, stays=True)] * 2, autoreset_mode=mode), kind)  # a bandit
        assert not play(SyncVectorEnv([partial(Line, length=1)] * 2, autoreset_mode=mode), kind)
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):  # which read before the reset
        assert not play(SyncVectorEnv([partial(Line, True)] * 2, autoreset_mode=mode), kind)
    assert not play(Line(own=True), kind)


class Nameless(SyncVectorEnv):
    """Envs that have nothing to show before their first reset."""

    was_reset = False

    def reset(self, **options: Any) -> Any:
        self.was_reset = True
        return super().reset(**options)

    def __repr__(self) -> str:
        assert self.was_reset
        return "Nameless"


def test_envs_are_shown_only_in_a_warning() -> None:
    (said,) = play(Nameless([partial(Line, True)] * 2, autoreset_mode=SAME), "rollout")
    assert "that Nameless handed out" in said


class Scaled(VectorWrapper):
    """Scales observations to [0, 1], and with ``both`` the final ones, too."""

    def __init__(self, envs: Any, both: bool) -> None:
        super().__init__(envs)
        self.both = both
        self.single_observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        return obs / np.float32(1e4), info

    def step(self, actions: Any) -> Any:
        obs, *rest, info = self.env.step(actions)
        if self.both and "final_obs" in info:
            finals = [None if x is None else x / np.float32(1e4) for x in info["final_obs"]]
            info["final_obs"] = np.array([*finals, None], object)[:-1]
        return obs / np.float32(1e4), *rest, info


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapper_that_scales_observations_and_not_the_final_ones_is_found(kind: str) -> None:
    make = [partial(Line, length=4)] * 2
    (said,) = play(Scaled(SyncVectorEnv(make, autoreset_mode=SAME), both=False), kind)
    assert re.search(r"first \d+ final .*Scaled.*SAME_STEP.*outside its observation space.*info\['final_obs'\]", said)
    assert not play(Scaled(SyncVectorEnv(make, autoreset_mode=SAME), both=True), kind)
    assert not play(Scaled(SyncVectorEnv(make), both=False), kind)  # NEXT_STEP returns them as observations


def test_spaces_that_ordinary_observations_leave_say_nothing() -> None:
    class Stale(Line):
        observation_space = gym.spaces.Box(0, 1, (1,), np.float32)

    assert not play(SyncVectorEnv([Stale], autoreset_mode=SAME), "replay")


def test_bounds_of_nested_spaces_are_known() -> None:
    class Nested(Line):
        observation_space = gym.spaces.Dict(
            a=gym.spaces.Tuple((gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3))), b=gym.spaces.Box(0, 9, ())
        )

        def _obs(self) -> Any:
            return {"a": (np.zeros(2, np.float32), 1), "b": np.float32(self.count)}

    def raw(obs: Any, info: dict[str, Any]) -> Any:
        for final in info.get("final_obs", []):
            final["a"][0][:] = 255
        return obs, info

    def acting(obs: Any) -> Tensor:
        return torch.zeros(len(obs), dtype=torch.int64)

    envs = Edited(SyncVectorEnv([Nested], autoreset_mode=SAME), raw)
    with pytest.warns(errors.EpisodeEndWarning, match="outside its observation space"):
        Collector(envs, acting, ReplayBuffer(Schema.from_env(envs), 100)).collect(20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("final", "error", "said"),
    [
        (np.zeros(5, np.float32), errors.ShapeError, r"'obs': expected final observations \(1, 4\)"),
        (np.zeros((4, 1), np.float32), errors.ShapeError, r"'obs': expected final observations \(1, 4\)"),
        (np.zeros(4, np.complex64), errors.DTypeError, r"final observation .* does not fit: field 'obs'"),
        ({"other": np.zeros(4)}, errors.EnvError, r"'obs': missing from the final observations"),
    ],
)
def test_a_final_observation_of_another_shape_or_kind_is_refused(kind: str, final: Any, error: Any, said: str) -> None:
    def edit(obs: Any, info: dict[str, Any]) -> Any:
        if "final_obs" in info:
            info["final_obs"][np.flatnonzero(info["_final_obs"])[0]] = final
        return obs, info

    envs = Edited(tagged_envs.make_tagged(2, SAME, tagged_envs.cycle([(2, "truncated")], [(9, "truncated")])), edit)
    replay, acting = ReplayBuffer(Schema.from_env(envs), 100, 2), lambda obs: policy(obs)["action"]
    call = {
        "rollout": Collector(envs, policy, make_buffer(envs, 9)).collect,
        "replay": partial(Collector(envs, acting, replay).collect, 9),
        "chunks": partial(Collector(envs, acting).steps, 9),
    }[kind]
    with pytest.raises(error, match=said):
        call()


class Simulated:
    """A simulator whose final observations are ``shown``: "copied", in the memory that the reset fills, or "raw"."""

    num_envs, device = 3, torch.device("cpu")
    single_observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, shown: str) -> None:
        self.obs, self.count, self.shown = torch.zeros(3, 1), 0, shown

    def reset(self) -> Tensor:
        return self.obs

    def step(self, action: Tensor) -> Any:
        self.count += 1
        self.obs += 0.01
        done = torch.full((3,), self.count % 4 == 0)
        final = {"copied": self.obs.clone(), "raw": self.obs * 1000, "reused": self.obs}[self.shown]
        self.obs[done] = -self.count / 1000
        return self.obs, torch.ones(3), torch.zeros_like(done), done, {"final_obs": final}


@pytest.mark.parametrize(("shown", "said"), [("copied", ""), ("raw", "outside its obs"), ("reused", "equal the reset")])
@pytest.mark.parametrize("kind", ["rollout", "replay"])
def test_simulators_are_looked_at_as_well(kind: str, shown: str, said: str) -> None:
    flag = Field((), torch.bool)
    schema = Schema({"obs": (1,), "action": (), "reward": (), "terminated": flag, "truncated": flag, "value": ()})
    buffer: Any = RolloutBuffer(schema, 20, 3) if kind == "rollout" else ReplayBuffer(schema, 300, 3)

    def acting(obs: Tensor) -> dict[str, Tensor]:
        return {"action": obs[:, 0], "value": obs[:, 0]}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Collector(Simulated(shown), acting, buffer).collect(20)
    assert len(caught) == bool(said)
    assert all(said in str(one.message) for one in caught)
