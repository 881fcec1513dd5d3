"""The check of reused arrays: an env that overwrites observations before they are added is found, a right loop not."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from relive import Collector, Field, ReplayBuffer, Schema, errors
from support import internals
from support.effort import every_nth

FLAGS = {"terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
KINDS: dict[str, dict[str, Any]] = {"shared": {}, "own": {"own_next_obs": True}, "unordered": {"ordered": False}}
Give = Callable[[Any], Any]


class Walk(gym.Env[Any, Any]):
    """A walk of ``length`` steps on a line; ``wall`` stops it there, and what it returns has one of the ``shapes``."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, kind: str = "vector", length: int = 7, wall: float = np.inf) -> None:
        number = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
        image = gym.spaces.Box(0, 255, (4, 4, 1), np.uint8)
        nested = gym.spaces.Dict({"x": number, "image": image})
        self.observation_space = {"vector": number, "image": image, "dict": nested}[kind]
        self.kind, self.length, self.wall, self.start = kind, length, wall, 0

    def obs(self) -> Any:
        at = min(self.at, self.wall)
        vector, image = np.array([at, 1], np.float32), np.full((4, 4, 1), at % 256, np.uint8)
        return {"vector": vector, "image": image, "dict": {"x": vector, "image": image}}[self.kind]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.start += 30
        self.at, self.until = self.start, self.start + self.length
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self.obs(), 1.0, False, self.at == self.until, {}


def mapped(function: Give, tree: Any) -> Any:
    return {name: mapped(function, x) for name, x in tree.items()} if isinstance(tree, dict) else function(tree)


def played(
    envs: Any, kind: str, *, before: Give = lambda x: x, given: Give = lambda x: x, final: Give = lambda x: x,
    steps: int = 40, **options: Any,
) -> tuple[list[str], ReplayBuffer]:  # fmt: skip
    """What a loop of the user's own hears, and its replay.

    Args:
        before: what the loop does to the observation before step().
        given: what it does to both observations before add().
        final: what it does to next_obs.
    """
    replay = ReplayBuffer(Schema.from_env(envs), 2_000, envs.num_envs, seed=0, **KINDS[kind], **options)
    obs, _ = envs.reset(seed=0)
    ended = np.zeros(envs.num_envs, np.bool_)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            obs, action = before(obs), np.zeros(envs.num_envs, np.int64)
            next_obs, reward, terminated, truncated, _ = envs.step(action)
            replay.add(
                obs=mapped(given, obs), next_obs=mapped(given, mapped(final, next_obs)), action=action, reward=reward,
                terminated=terminated, truncated=truncated, mask=~ended,
            )  # fmt: skip
            obs, ended = next_obs, terminated | truncated
    assert all(one.category is errors.EpisodeEndWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught], replay


def walks(kind: str = "vector", count: int = 3, mode: AutoresetMode = AutoresetMode.NEXT_STEP, **more: Any) -> Any:
    return SyncVectorEnv([lambda: Walk(kind, **more)] * count, copy=False, autoreset_mode=mode)


def twice(x: Any) -> Any:
    return np.array(x, np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", ["vector", "image", "dict"])
@pytest.mark.parametrize("count", [1, 3, 70])
@pytest.mark.parametrize("given", [lambda x: x, torch.from_numpy, lambda x: x[:]], ids=["arrays", "torch", "views"])
def test_an_env_that_overwrites_what_it_returned_is_noticed_within_the_first_steps(
    kind: str, space: str, count: int, given: Give
) -> None:
    if kind != "shared":  # a bandit may pass anything as the next observation that it has to give
        (message,), _ = played(walks(space, count), kind, given=given, steps=20)
        assert "obs = obs.copy()" in message
        return
    with pytest.raises(errors.EnvError, match=r"obs = obs\.copy\(\).*copy=True.*clear\(\)"):
        played(walks(space, count), kind, given=given, steps=5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_final_observation_that_is_a_copy_leaves_a_warning(kind: str, count: int) -> None:
    (message,), replay = played(walks("vector", count), kind, final=np.copy)
    assert "obs = obs.copy()" in message
    replay.check()


def test_equal_observations_are_a_sign_where_each_next_observation_is_stored() -> None:
    (message,), _ = played(walks(), "own", given=twice)
    assert "check_ends=False" in message
    assert played(walks(), "own", given=twice, check_ends=False)[0] == []
    # where next_obs is read at ends alone, a loop may pass obs in its place elsewhere
    assert played(walks(), "shared", given=twice)[0] == []


@pytest.mark.parametrize(
    ("kind", "space", "count", "wall", "length"),
    every_nth(5, KINDS, ["vector", "image", "dict"], [1, 3], [np.inf, 0, 33], [1, 7]),
)
def test_a_right_loop_says_nothing_whether_the_env_moves_stands_still_or_meets_a_wall(
    kind: str, space: str, count: int, wall: float, length: int
) -> None:
    envs = walks(space, count, wall=wall, length=length)
    heard, replay = played(envs, kind, before=copy.deepcopy, check_ends=True)
    assert heard == []
    assert wall != np.inf or length == 1 or internals.first(internals.writer(replay), "reuse") is None
    own_array = SyncVectorEnv([lambda: Walk(space, length, wall)] * count)  # copies
    assert played(own_array, kind)[0] == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_of_the_users_that_is_filled_before_each_step_says_nothing(kind: str) -> None:
    staging = np.zeros((3, 2), np.float32)

    def fill(obs: Any) -> Any:
        staging[:] = obs
        return staging

    assert played(walks(), kind, before=fill)[0] == []


def bandit(replay: ReplayBuffer, contexts: Any, ended: bool, interrupt: bool = False) -> None:
    for context in contexts:
        flags = np.full(1, ended)
        replay.add(obs=context, next_obs=context, reward=[1.0], terminated=flags, truncated=~flags & False)
        if interrupt:
            replay.interrupt()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bandit_may_pass_its_context_twice(kind: str) -> None:
    def heard(contexts: Any, **more: Any) -> list[Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bandit(ReplayBuffer(Schema({"obs": (2,), "reward": (), **FLAGS}), 400, **KINDS[kind]), contexts, **more)
        return caught

    rng, one = np.random.default_rng(0), np.zeros((1, 2), np.float32)

    def refilled() -> Any:
        for _ in range(80):
            one[:] = rng.random(2)
            yield one

    assert heard([one] * 80, ended=False) == []  # a single state
    assert heard(rng.random((80, 1, 2)), ended=True) == []
    assert heard(refilled(), ended=True) == []
    if kind != "unordered":  # without an order there is no other way to say that an episode is over
        assert heard(refilled(), ended=False, interrupt=True) == []
    if kind != "own":
        assert heard(rng.random((80, 1, 2)), ended=False) == []


def test_a_loop_that_passes_obs_where_no_episode_ends_says_nothing_in_a_replay_that_reads_only_ends() -> None:
    envs = SyncVectorEnv([Walk])
    replay = ReplayBuffer(Schema.from_env(envs), 400)
    obs, _ = envs.reset(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            next_obs, reward, terminated, truncated, _ = envs.step(np.zeros(1, np.int64))
            final = next_obs if truncated[0] else obs
            replay.add(obs=obs, next_obs=final, action=[0], reward=reward, terminated=terminated, truncated=truncated)
            obs = next_obs if not truncated[0] else envs.reset()[0]


def test_a_copy_begins_the_check_again_and_it_stops_by_itself() -> None:
    replay = ReplayBuffer(Schema({"obs": (2,), "reward": (), **FLAGS}), 400)
    still = np.zeros((1, 2), np.float32)
    bandit(replay, [still] * 3, ended=False)
    for again in (pickle.loads(pickle.dumps(replay)), copy.deepcopy(replay)):
        assert internals.held(internals.first(internals.writer(again), "reuse")) == (
            None,
            (),
        )  # none of the arrays is copied
        bandit(again, [still] * 3, ended=False)
    assert internals.first(internals.writer(replay), "reuse") is not None
    bandit(replay, [still] * 80, ended=False)
    assert internals.first(internals.writer(replay), "reuse") is None


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_stores_the_true_observations_of_an_env_that_reuses_its_array(
    kind: str, mode: AutoresetMode
) -> None:
    found = []
    for copies in (True, False):
        envs = SyncVectorEnv([Walk] * 2, copy=copies, autoreset_mode=mode)
        replay = ReplayBuffer(Schema.from_env(envs), 400, 2, seed=0, **KINDS[kind])
        Collector(envs, lambda obs: torch.zeros(len(obs), dtype=torch.int64), replay, seed=0).collect(30)
        found.append(replay.data())
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("obs", "next_obs", "reward"))


def test_steps_that_are_left_out_say_nothing_whatever_their_next_observation_is() -> None:
    """The env stands still, and moves on in every other step. That one is left out, so its next_obs may be anything."""
    replay, obs = ReplayBuffer(Schema({"obs": (1,), "reward": (), **FLAGS}), 400, ordered=False), np.zeros((1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(60):
            obs[:], real = t // 2, np.array([t % 2 == 0])
            replay.add(obs=obs, reward=[1], terminated=[False], truncated=[False], next_obs=obs.copy(), mask=real)
