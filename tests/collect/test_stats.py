"""Returns and lengths of episodes."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from relive import Collector, RolloutBuffer, Schema
from relive.collect.collector import CollectStats
from support import tagged_envs
from support.tagged_collections import Echo, discrete, every_mode, make_buffer, policy

# Statistics


@every_mode
def test_returns_lengths_and_envs_are_those_of_whole_episodes_in_the_order_they_ended(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(3, mode, tagged_envs.drawn(8, longest=6))
    buffer = make_buffer(envs, 7)
    collector = Collector(envs, policy, buffer, seed=0)
    running, real = np.zeros((3, 2)), 0
    all_returns: list[float] = []
    for _ in range(6):
        stats = collector.collect()
        expected: list[tuple[float, int, int]] = []
        for t, n in itertools.product(range(7), range(3)):
            if buffer["mask"][t, n]:
                real += 1
                running[n] += (float(buffer["reward"][t, n]), 1)
                if buffer["terminated"][t, n] or buffer["truncated"][t, n]:
                    expected.append((running[n, 0], int(running[n, 1]), n))
                    running[n] = 0
        assert list(zip(stats.episode_returns, stats.episode_lengths, stats.episode_envs, strict=True)) == expected
        assert stats.num_episodes == len(expected)
        assert stats.num_steps == int(buffer["mask"].sum())
        assert stats.seconds > 0
        all_returns += stats.episode_returns
    assert collector.total_steps == real
    assert collector.total_episodes == len(all_returns) > 10
    assert list(collector.returns) == all_returns
    assert real < 126 if mode is AutoresetMode.NEXT_STEP else real == 126


def test_the_collector_remembers_the_last_hundred_episodes() -> None:
    envs = tagged_envs.make_tagged(
        2, AutoresetMode.SAME_STEP, tagged_envs.cycle([(1, "terminated")], [(2, "truncated")])
    )
    collector = Collector(envs, policy, make_buffer(envs, 90))
    stats = collector.collect()
    assert stats.num_episodes == 135
    assert list(collector.returns) == stats.episode_returns[-100:]
    assert list(collector.lengths) == stats.episode_lengths[-100:]
    again = collector.collect()
    assert list(collector.returns) == again.episode_returns[-100:]
    assert collector.total_episodes == 270


def test_statistics_of_thousands_of_episodes_print_as_one_line() -> None:
    stats = CollectStats(246_000, 0.3701, [-1.0, -3.0] * 4_000, [20, 30] * 4_000)
    assert repr(stats) == (
        "CollectStats: 246,000 steps in 0.37 s, 8,000 episodes ended with a mean return of -2 and a mean length of 25"
    )
    assert repr(CollectStats(8, 0.001)) == "CollectStats: 8 steps in 0.001 s, 0 episodes ended"


def test_rewards_of_float64_are_summed_without_loss() -> None:
    class Tiny(Echo):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            obs, _, terminated, _, info = super().step(action)
            return obs, 1e8 + 0.25, terminated, self.count == 8, info

    envs = SyncVectorEnv([partial(Tiny, gym.spaces.Discrete(2))], autoreset_mode=AutoresetMode.SAME_STEP)
    buffer = RolloutBuffer(Schema.from_env(envs), 16, 1)
    stats = Collector(envs, lambda obs: discrete(obs, 2), buffer).collect()
    assert stats.episode_returns == [8e8 + 2] * 2
