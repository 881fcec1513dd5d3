"""The environments of the audit of libraries, and what several of its runs need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

SHORT = "CartPole15-v0"
"""CartPole cut off after 15 steps: about half of its episodes under a random policy end before."""

ENVS = ("CartPole-v1", "Pendulum-v1", SHORT)
"""Ends that are terminals, ends that are time limits, and both."""

gym.register(SHORT, "gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=15)


@dataclass(frozen=True)
class Run:
    """One loop of a library over one environment.

    Args:
        loop: what filled the buffer, as the page says it.
        env: the id of the environment.
        source: what is audited.
    """

    loop: str
    env: str
    source: Any


def vector(env: str, mode: AutoresetMode, count: int = 2, seed: int = 0) -> SyncVectorEnv:
    """Environments of Gymnasium; their actions are seeded."""
    envs = SyncVectorEnv([lambda: gym.make(env)] * count, autoreset_mode=mode)
    envs.action_space.seed(seed)
    return envs


def critic(seed: int = 0) -> Callable[[Any], torch.Tensor]:
    """A value function that nobody trained: values ``[N]`` of observations ``[N, D]``, about 5."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(16, 8, generator=generator)
    return lambda obs: 5 + torch.tanh(torch.as_tensor(obs).float() @ weights[: np.shape(obs)[-1]]).sum(-1)
