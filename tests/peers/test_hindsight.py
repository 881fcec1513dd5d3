"""The traps of hindsight against the real packages: the peer does the wrong thing, then relive does the right one.

One env plays episodes of 7 steps. Its observation, and the goal achieved, is 100 times the episode plus the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from relive import Field, Hindsight, ReplayBuffer, Schema

torchrl: Any = import_module("torchrl.data")
stable_baselines3: Any = import_module("stable_baselines3")

LENGTH, ROWS, STEPS = 7, 23, 100
FLAG = Field((), torch.bool)
GOALS = {"observation": (1,), "achieved_goal": (1,), "desired_goal": (1,)}
SCHEMA = Schema({"obs": GOALS, "action": (1,), "reward": (), "terminated": FLAG, "truncated": FLAG})


def reached(achieved: Any, desired: Any) -> Any:
    return (achieved == desired).all(axis=-1)


def reward_of(achieved: Any, desired: Any, info: Any = None) -> Any:
    return reached(achieved, desired) - 1.0


def seen(tag: int) -> dict[str, np.ndarray]:
    now = np.full((1, 1), tag, np.float32)
    return {"observation": now, "achieved_goal": now, "desired_goal": now * 0 - 1}


def play(steps: int, length: int = LENGTH) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]]:
    """obs, next_obs ``[1, 1]`` and whether it was truncated ``[1]``, step by step."""
    for t in range(steps):
        tag = t // length * 100 + t % length
        yield seen(tag), seen(tag + 1), np.array([t % length == length - 1])


def ours(steps: int, rows: int, strategy: Any, length: int = LENGTH) -> ReplayBuffer:
    view = Hindsight(reward_of, strategy, ratio=1.0, terminated_fn=reached)
    replay = ReplayBuffer(SCHEMA, rows, view=view, seed=0)
    for obs, following, end in play(steps, length):
        replay.add(obs=obs, action=[[0.0]], reward=[-1.0], terminated=[False], truncated=end, next_obs=following)
    return replay


def torchrl_buffer(steps: int, strategy: str) -> Any:
    def judge(td: Any) -> torch.Tensor:
        return (td["next", "achieved_goal"] == td["desired_goal"]).float() - 1

    buffer = torchrl.HERReplayBuffer(
        judge, her_ratio=1.0, strategy=strategy, achieved_goal_key=("next", "achieved_goal"),
        storage=torchrl.LazyTensorStorage(ROWS), batch_size=2_000,
    )  # fmt: skip
    for obs, following, end in play(steps):
        now, after = ({name: torch.from_numpy(x[0]) for name, x in part.items()} for part in (obs, following))
        flags = {"done": torch.from_numpy(end), "terminated": torch.zeros(1, dtype=torch.bool)}
        buffer.add(TensorDict({**now, "next": {**after, **flags, "reward": torch.full((1,), -1.0)}}, []))
    return buffer


def sb3_buffer(steps: int, rows: int, length: int = LENGTH) -> Any:
    class Env:
        def env_method(self, _: str, achieved: Any, desired: Any, infos: Any, indices: Any) -> list[Any]:
            return [reward_of(achieved, desired)]

    box = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    buffer = stable_baselines3.HerReplayBuffer(
        rows, gym.spaces.Dict(dict.fromkeys(GOALS, box)), box, Env(), "cpu", 1, goal_selection_strategy="final"
    )
    for obs, following, end in play(steps, length):
        buffer.add(obs, following, np.zeros((1, 1)), np.array([-1.0]), end, [{"TimeLimit.truncated": bool(end[0])}])
    return buffer


@pytest.mark.parametrize("strategy", ["final", "episode"])
def test_torchrl_takes_goals_of_another_episode_once_the_buffer_has_wrapped(strategy: str) -> None:
    theirs = torchrl_buffer(STEPS, strategy).sample()
    astray = theirs["desired_goal"] // 100 != theirs["observation"] // 100
    assert astray.float().mean() > 0.02

    batch = ours(STEPS, ROWS, strategy).sample(2_000)
    assert torch.equal(batch["obs", "desired_goal"] // 100, batch["obs", "observation"] // 100)
    assert batch["relabelled"].all()


def test_the_reward_says_that_the_goal_was_reached_and_terminated_does_not() -> None:
    first = torchrl_buffer(20, "final").sample()
    arrived = first["next", "reward"] == 0
    assert arrived.any()
    assert not first["next", "terminated"][arrived].any()
    second = sb3_buffer(21, 30).sample(500)
    arrived = second.rewards == 0
    assert arrived.any()
    assert not second.dones[arrived].any()

    batch = ours(20, 30, "final").sample(500)
    arrived = batch["reward"] == 0
    assert arrived.any()
    assert torch.equal(batch["terminated"], arrived)
    assert torch.equal(batch["discount"] == 0, arrived)


def test_an_episode_as_long_as_the_buffer_cannot_be_sampled() -> None:
    theirs = sb3_buffer(ROWS, ROWS, ROWS)
    with pytest.raises(RuntimeError, match="Unable to sample before the end of the first episode"):
        theirs.sample(10)

    batch = ours(ROWS, ROWS, "final", ROWS).sample(1_000)
    live = [float(tag) for tag in range(1, ROWS)]  # the first step has made way for the observation it ended on
    assert batch["obs", "observation"].unique().tolist() == live
    assert (batch["obs", "desired_goal"] == ROWS).all()


def test_torchrl_draws_goals_from_the_global_generator() -> None:
    buffer = torchrl_buffer(20, "future")
    index = torch.arange(10)
    starts, ends = torch.zeros(10, dtype=torch.int64), torch.full((10,), 19)
    goals = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        goals.append(buffer._sample_goal_indices(index, starts, ends, 20))
    assert torch.equal(goals[0], goals[1])
    assert not torch.equal(goals[0], goals[2])

    batches = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        batches.append(ours(20, 30, "future").sample(50)["obs", "desired_goal"])
    assert torch.equal(*batches)
