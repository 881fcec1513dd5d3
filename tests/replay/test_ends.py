"""The check of episode ends: the two mistakes of users' own loops are found in all of them, and in no right one."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from relive import Collector, Field, ReplayBuffer, RolloutBuffer, Schema
from relive.errors import EpisodeEndWarning
from support import internals, tagged_envs

SCHEDULE = tagged_envs.cycle([(3, "truncated"), (2, "terminated")], [(4, "truncated"), (1, "both"), (2, "terminated")])


def says() -> Any:
    return pytest.warns(EpisodeEndWarning, match=r"mask=~ended.*info\['final_obs'\].*check_ends=False")


def replay_of(envs: Any, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(Schema.from_env(envs), 2_000, envs.num_envs, seed=0, **options)


def steps(envs: Any, *, right: bool, num_steps: int = 40, tensors: bool = False) -> Iterator[dict[str, Any]]:
    """What a loop of the user's own adds, under NEXT_STEP or SAME_STEP; ``right``, or as it is most often written."""
    next_step = envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    obs, _ = envs.reset(seed=0)
    ended = np.zeros(envs.num_envs, np.bool_)
    for _ in range(num_steps):
        action = tagged_envs.tagged_policy(obs)
        after, reward, terminated, truncated, info = envs.step(action)
        final = after
        if right and "final_obs" in info:
            final = np.stack([x if x is not None else row for x, row in zip(info["final_obs"], after, strict=True)])
        step = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
        step = {name: torch.as_tensor(x.copy()) if tensors else x.copy() for name, x in step.items()}
        mask = {"mask": ~ended} if right and next_step else {}
        yield step | {"next_obs": final.copy()} | mask
        obs, ended = after, terminated | truncated


BOTH = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
KINDS: dict[str, dict[str, Any]] = {"shared": {}, "own": {"own_next_obs": True}}


def envs_of(mode: AutoresetMode, schedule: tagged_envs.Endings = SCHEDULE) -> SyncVectorEnv:
    return tagged_envs.make_tagged(2, mode, schedule, check_actions=False)


@pytest.mark.parametrize("mode", BOTH, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensors", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("pieces", [None, 1, 7, 40])
def test_traps_e5_and_e6_are_told_once_in_every_wrong_loop_and_in_no_right_one(
    mode: AutoresetMode, kind: str, tensors: bool, pieces: int | None
) -> None:
    for right in (True, False):
        envs = envs_of(mode)
        replay = replay_of(envs, **KINDS[kind])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            played = list(steps(envs, right=right, tensors=tensors))
            if pieces is None:
                for step in played:
                    replay.add(step)
            else:
                for low in range(0, len(played), pieces):
                    part = played[low : low + pieces]
                    replay.extend({name: stacked([step[name] for step in part]) for name in part[0]})
        kinds = [one.category for one in caught]
        assert kinds == ([] if right else [EpisodeEndWarning])
        assert caught == [] or pieces is not None or caught[0].filename == __file__
        replay.check()


@pytest.mark.parametrize("pieces", [1, 7])
def test_the_flags_of_steps_that_are_left_out_are_not_believed(pieces: int) -> None:
    """A wrapper of the user's own may leave any flag in the step that resets an env."""
    envs = envs_of(AutoresetMode.NEXT_STEP)
    replay = replay_of(envs)
    played = list(steps(envs, right=True))
    for step in played:
        step["terminated"] |= ~step["mask"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for low in range(0, len(played), pieces):
            part = played[low : low + pieces]
            replay.extend({name: stacked([step[name] for step in part]) for name in part[0]})
    replay.check()


def test_the_next_episode_of_an_env_is_looked_for_among_its_own_steps_also_where_a_step_is_left_out() -> None:
    envs = envs_of(AutoresetMode.SAME_STEP)
    replay = replay_of(envs)
    played = [step | {"mask": np.array([True, t > 0])} for t, step in enumerate(steps(envs, right=False))]
    with says():
        replay.extend({name: stacked([step[name] for step in played]) for name in played[0]})


def stacked(values: list[Any]) -> Any:
    return torch.stack(values) if isinstance(values[0], torch.Tensor) else np.stack(values)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("kind", [*KINDS, "unordered"])
def test_a_collector_never_gives_cause_even_where_an_env_does_end_where_it_starts(
    mode: AutoresetMode, kind: str
) -> None:
    class Circle(gym.Env[Any, Any]):
        observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.at = 0
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            self.at = (self.at + 1) % 4
            return np.full(1, self.at, np.float32), 1.0, self.at == 0, False, {}

    options = {"unordered": {"ordered": False}, **KINDS}[kind]

    def idle(obs: Any) -> Any:
        return torch.zeros(len(obs), dtype=torch.int64)

    def circles() -> SyncVectorEnv:
        return SyncVectorEnv([Circle] * 2, autoreset_mode=mode)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (circles, partial(envs_of, mode)):
            replay, warmed = replay_of(make(), **options), replay_of(make(), **options)
            collector = Collector(make, idle, replay, seed=0)
            collector.collect(60)
            collector.warm(warmed, 20, seed=1)


def circle(check: bool = True, **options: Any) -> ReplayBuffer:
    """A replay, and three episodes that do end where they start."""
    flag = Field((), torch.bool)
    schema = Schema({"obs": (2,), "reward": (), "terminated": flag, "truncated": flag})
    replay = ReplayBuffer(schema, 400, check_ends=check, **options)
    for t in range(9):
        at, done = t % 3, t % 3 == 2
        after = [[0.0, 0.0]] if done else [[at + 1, 0]]
        replay.add(obs=[[at, 0]], reward=[1], terminated=[done], truncated=[False], next_obs=after)
    return replay


def test_envs_that_end_where_they_start_are_told_apart_by_an_argument_that_saves_and_pickles(tmp_path: Any) -> None:
    def three_more(replay: ReplayBuffer) -> None:
        for t in range(12):
            at, done = t % 3, t % 3 == 2
            replay.add(
                obs=[[at, 0]], reward=[1], terminated=[done], truncated=[False], next_obs=[[0 if done else at + 1, 0]]
            )

    told = circle(True)
    with says():
        three_more(told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        three_more(told)  # once
        quiet = circle(False)
        three_more(quiet)
        quiet.save(tmp_path / "replay")
        for copy in (ReplayBuffer.load(tmp_path / "replay"), pickle.loads(pickle.dumps(quiet))):
            assert copy.check_ends is False
            three_more(copy)
        later = circle(True)
        later.check_ends = False
        three_more(later)
    later.check_ends = True
    with says():
        three_more(later)


@pytest.mark.parametrize("is_error", [False, True])
def test_nothing_is_left_of_the_checks_once_the_last_has_seen_enough(is_error: bool) -> None:
    flag = Field((), torch.bool)
    replay = ReplayBuffer(Schema({"obs": (2,), "reward": (), "terminated": flag, "truncated": flag}), 400)
    plain = {"obs": [[0, 0]], "reward": [1], "terminated": [False], "truncated": [False]}
    replay.add(plain)  # without next_obs: two of the three stop
    writer = internals.writer(replay)
    assert internals.first(writer, "ends") is not None
    assert internals.first(writer, "reuse") is internals.first(writer, "resets") is None
    step = {**plain, "terminated": [True], "next_obs": [[0, 0]], "obs": [[1, 0]]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error" if is_error else "always")
        found = 0
        for _ in range(20):
            try:
                replay.add(plain)
                replay.add(step)
            except EpisodeEndWarning:
                found += 1
    assert found + len(caught) == 1
    assert writer.first is None


def test_one_episode_that_begins_elsewhere_ends_the_check() -> None:
    replay = circle()
    replay.add(obs=[[5, 5]], reward=[1], terminated=[True], truncated=[False], next_obs=[[6, 6]])
    assert internals.first(internals.writer(replay), "ends") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            replay.add(obs=[[6, 6]], reward=[1], terminated=[True], truncated=[False], next_obs=[[6, 6]])


@pytest.mark.parametrize("length", [1, 4])
def test_of_observations_that_never_change_nothing_is_said_and_the_check_gives_up(length: int) -> None:
    flag = Field((), torch.bool)
    schema = Schema({"obs": (1,), "reward": (), "terminated": flag, "truncated": flag})
    replay = ReplayBuffer(schema, 400, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(30 * length):
            done = np.full(2, t % length == length - 1)
            replay.add(
                obs=np.zeros((2, 1)), reward=np.zeros(2), terminated=done, truncated=np.zeros(2, np.bool_),
                next_obs=np.zeros((2, 1)),
            )  # fmt: skip
    assert internals.first(internals.writer(replay), "ends") is None


def test_steps_without_an_order_are_not_compared() -> None:
    flag = Field((), torch.bool)
    schema = Schema({"obs": (1,), "reward": (), "terminated": flag, "truncated": flag})
    replay = ReplayBuffer(schema, 400, ordered=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(20):
            replay.add(obs=[[t]], reward=[0], terminated=[True], truncated=[False], next_obs=[[t + 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_observations_are_compared_as_they_are_stored_whatever_they_are_given_as(dtype: torch.dtype) -> None:
    flag = Field((), torch.bool)
    schema = Schema({"obs": {"x": Field((2,), dtype), "y": (1,)}, "reward": (), "terminated": flag, "truncated": flag})
    replay = ReplayBuffer(schema, 400)
    whole = dtype is torch.uint8
    numbers = [7, 9, 3, 5, 8] if whole else [0.1, 0.7, 0.3, 1.9, 2.3]
    with says():
        for now, then in itertools.pairwise(numbers):
            given = torch.tensor([[now, 1]], dtype=dtype)
            ended_on = np.array([[then, 1]], np.int64 if whole else np.float64)
            replay.add(
                obs={"x": given, "y": [[0.1]]}, reward=[1], terminated=[True], truncated=[False],
                next_obs={"x": ended_on, "y": np.array([[0.1]])},
            )  # fmt: skip


@pytest.mark.parametrize("wrong", [True, False])
def test_some_envs_at_a_time_are_followed_each_by_itself(wrong: bool) -> None:
    flag = Field((), torch.bool)
    schema = Schema({"obs": (1,), "reward": (), "terminated": flag, "truncated": flag})
    replay, at, heard = ReplayBuffer(schema, 400, 4), np.zeros(4), list[int]()
    for t in range(12):
        envs, done = np.array([t % 4, (t + 1) % 4]), np.ones(2, np.bool_)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            obs = (100 * envs + at[envs])[:, None]
            replay.add(obs=obs, reward=np.ones(2), terminated=done, truncated=~done, next_obs=obs + 1, envs=envs)
        at[envs] += 1 if wrong else 2
        heard += [t] * len(caught)
    # the envs of t = 0, 1, ... are 0 1, 1 2, 2 3, 3 0: one of each step begins an episode after an end
    assert heard == ([3] if wrong else [])


def test_a_warning_that_is_an_error_leaves_the_step_stored_and_comes_once() -> None:
    replay = circle()
    before = len(replay)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EpisodeEndWarning)
        fields: dict[str, Any] = {"obs": [[0, 0]], "reward": [1], "terminated": [False], "truncated": [False]}
        with pytest.raises(EpisodeEndWarning):
            replay.add(fields)
        replay.add(fields | {"obs": [[1, 0]]})
    assert len(replay) == before + 1
    replay.check()


def test_a_rollout_has_nothing_to_compare() -> None:
    envs = envs_of(AutoresetMode.NEXT_STEP)
    rollout = RolloutBuffer(Schema.from_env(envs), 40, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in steps(envs, right=False):
            rollout.add({name: x for name, x in step.items() if name != "next_obs"})
