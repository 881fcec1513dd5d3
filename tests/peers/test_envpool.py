"""A Collector in EnvPool's envs, which are no vector env of Gymnasium's own and reset in the next step."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from relive import GAE, Collector, ReplayBuffer, RolloutBuffer, Schema

envpool: Any = import_module("envpool")

N, LIMIT, STEPS = 4, 9, 90


class Step(NamedTuple):
    """A transition of one env."""

    obs: list[float]
    action: int
    reward: float
    terminated: bool
    truncated: bool
    next_obs: list[float]


def make() -> Any:
    """CartPole with a time limit that some episodes reach and others do not."""
    return envpool.make_gymnasium("CartPole-v1", num_envs=N, seed=3, max_episode_steps=LIMIT)


def act(obs: Tensor) -> Tensor:
    """Pushes in one direction, which let a pole fall after eight to ten steps."""
    return (obs[:, 1] > 0).long()


def played() -> list[list[Step]]:
    """By env, the transitions of a plain loop: an env whose episode has ended ignores the next action."""
    envs, steps = make(), [list[Step]() for _ in range(N)]
    obs, _ = envs.reset()
    over = np.zeros(N, bool)
    for _ in range(STEPS):
        obs, action = obs.copy(), act(torch.as_tensor(obs)).numpy()
        after, reward, terminated, truncated, _ = envs.step(action)
        for n in np.flatnonzero(~over):
            flags = bool(terminated[n]), bool(truncated[n])
            steps[n].append(Step(obs[n].tolist(), int(action[n]), float(reward[n]), *flags, after[n].tolist()))
        obs, over = after, terminated | truncated
    return steps


def test_a_replay_has_its_transitions_and_none_of_its_resets() -> None:
    expected = sum(played(), [])
    assert {(step.terminated, step.truncated) for step in expected} >= {(True, False), (False, True)}
    envs = make()
    replay = ReplayBuffer(Schema.from_env(envs), N * 200, N, own_next_obs=True)
    collector = Collector(envs, act, replay)
    collector.collect(STEPS)
    data = replay.data()
    columns = (data[name].tolist() for name in Step._fields)
    assert sorted(Step(*row) for row in zip(*columns, strict=True)) == sorted(expected)
    assert collector.total_steps == len(expected) < N * STEPS
    assert collector.total_episodes == sum(step.terminated or step.truncated for step in expected)


def test_a_rollout_values_its_final_observations() -> None:
    envs = make()
    rollout = RolloutBuffer(Schema.from_env(envs, value=()), STEPS, N)
    value = lambda obs: obs @ torch.tensor([1.0, 2.0, 4.0, 8.0])  # noqa: E731
    Collector(envs, lambda obs: {"action": act(obs), "value": value(obs)}, rollout).collect()
    for n, mine in enumerate(played()):
        real = rollout["mask"][:, n]
        assert int(real.sum()) == len(mine)
        for step, final in zip(mine, rollout["final_value"][real, n].tolist(), strict=True):
            if step.truncated and not step.terminated:
                assert final == pytest.approx(float(value(torch.tensor(step.next_obs))), rel=1e-6)
    rollout.finish(GAE())
