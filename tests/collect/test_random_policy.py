"""Random actions: legal, evenly spread, and of the space that was given."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from relive import Collector, Field
from support import tagged_envs
from support.tagged_collections import MASK, Echo, discrete, every_mode, make_buffer, policy


@every_mode
def test_random_actions_are_legal_under_the_mask_and_evenly_spread(mode: AutoresetMode) -> None:
    envs = tagged_envs.make_tagged(4, mode, tagged_envs.always(6), action_mask=True, check_actions=False)
    collector = Collector(envs, policy, make_buffer(envs, 5, action_mask=MASK), seed=0)
    extra = make_buffer(envs, 300, action_mask=MASK)
    collector.warm(extra, 300, seed=1)
    legal = extra["action_mask"].gather(2, extra["action"].unsqueeze(2)).squeeze(2)
    assert legal[extra["mask"]].all()
    rank = (extra["action_mask"].cumsum(2).gather(2, extra["action"].unsqueeze(2)).squeeze(2))[extra["mask"]]
    shares = torch.bincount(rank, minlength=4)[1:].float() / len(rank)
    # 1,028 draws or more out of three: five standard deviations are 0.074
    assert (shares - 1 / 3).abs().max() < 0.074
    assert not extra["value"].any()


def test_random_actions_start_where_their_space_does() -> None:
    class Masked(Echo):
        def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
            return super().reset(**kwargs)[0], {"action_mask": np.array([0, 1, 1], np.int8)}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return (*super().step(action)[:4], {"action_mask": np.array([0, 1, 1], np.int8)})

    def acting(obs: Tensor, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"action": discrete(obs, 2) + 11, "value": obs[:, 0]}

    make = partial(Masked, gym.spaces.Discrete(3, start=10))
    collector = Collector(make, acting, make_buffer(make(), 3))
    for extras in ({}, {"action_mask": Field((3,), torch.int8)}):
        extra = make_buffer(make(), 60, **extras)
        collector.warm(extra, 60, seed=0)
        assert set(extra["action"].flatten().tolist()) == ({11, 12} if extras else {10, 11, 12})
