"""Somebody resets or steps the envs of a collector between two collections: it is noticed where it can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers.vector import RescaleAction, TransformObservation

from relive import Collector, ReplayBuffer, Schema, errors
from support import tagged_envs
from support.tagged_collections import every_mode, make_buffer, policy

ACTS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda envs: envs.reset(),
    "reset with a seed": lambda envs: envs.reset(seed=0),
    "step": lambda envs: envs.step(envs.action_space.sample() * 0),
}


def still(obs: Any) -> Any:
    return obs[:, :1] * 0


def make(**options: Any) -> Any:
    return gym.make("Pendulum-v1", **options)


KINDS: dict[str, Callable[[], Any]] = {
    "sync": lambda: SyncVectorEnv([make] * 2),
    "sync without copies": lambda: SyncVectorEnv([make] * 2, copy=False),
    "wrapped": lambda: TransformObservation(
        RescaleAction(SyncVectorEnv([make] * 2), np.float32(-1), np.float32(1)), lambda obs: obs / 2
    ),
    "single": make,
}


@pytest.mark.parametrize("act", [*ACTS])
@pytest.mark.parametrize("kind", [*KINDS])
def test_who_plays_in_the_envs_between_two_collections_is_noticed(kind: str, act: str) -> None:
    envs = KINDS[kind]()
    n = getattr(envs, "num_envs", 1)
    replay = ReplayBuffer(Schema.from_env(envs), 100, n)
    collector = Collector(envs, still, replay, seed=0)
    collector.collect(3)
    collector.collect(3)
    ACTS[act](envs)
    for _ in range(2):
        with pytest.raises(errors.LifecycleError, match=r"somebody has reset or stepped .*or call reset\(\)"):
            collector.collect(3)
    collector.reset()
    collector.collect(3)
    collector.collect(3)
    assert len(replay) == (2 * 6 - 2) * n


def test_the_same_in_other_processes_and_in_chunks() -> None:
    envs = AsyncVectorEnv(
        [partial(tagged_envs.TaggedEnv, n, tagged_envs.always(5), check_actions=False) for n in range(2)]
    )
    try:
        collector = Collector(envs, lambda obs: policy(obs)["action"], seed=0)
        collector.steps(2)
        collector.steps(2)
        envs.step(np.zeros(2, np.int64))
        with pytest.raises(errors.LifecycleError, match="somebody has reset or stepped"):
            collector.steps(2)
    finally:
        envs.close()


@every_mode
@pytest.mark.parametrize("observations", ["box", "dict", "tuple"])
def test_a_reset_right_after_the_collectors_own_is_noticed_in_nested_observations(observations: Any, mode: Any) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.always(5), observations=observations, check_actions=False)
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    collector.reset()
    envs.reset()
    with pytest.raises(errors.LifecycleError, match="somebody has reset or stepped"):
        collector.collect()


@every_mode
def test_collections_of_any_length_go_on_if_nobody_else_plays(mode: Any) -> None:
    envs = tagged_envs.make_tagged(2, mode, tagged_envs.cycle([(2, "truncated")], [(3, "terminated")]))
    collector = Collector(envs, policy, make_buffer(envs, 4), seed=0)
    for count in (1, 1, 2, 4, 3, 1):
        collector.collect(count)
        envs.action_space.sample()
        envs.get_attr("spec")
