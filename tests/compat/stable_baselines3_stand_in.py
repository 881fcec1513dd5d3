"""As much of Stable-Baselines3 as its drop-in asks for, so that it can be tested where that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

DROP_IN = "relive.compat.stable_baselines3"


def obs_shape(space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: obs_shape(member) for key, member in space.spaces.items()}
    return (1,) if isinstance(space, spaces.Discrete) else space.shape


class BaseBuffer:
    def __init__(self, buffer_size: int, observation_space: Any, action_space: Any, device: Any, n_envs: int) -> None:
        self.buffer_size, self.n_envs, self.device = buffer_size, n_envs, torch.device("cpu")
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape = obs_shape(observation_space)
        self.action_dim = 1 if isinstance(action_space, spaces.Discrete) else prod(action_space.shape)
        self.pos, self.full = 0, False

    def sample(self, batch_size: int, env: Any = None) -> Any:
        rows = np.random.mtrand._rand.randint(0, self.buffer_size if self.full else self.pos, batch_size)
        return self._get_samples(rows, env=env)

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        raise NotImplementedError

    def _normalize_reward(self, reward: Any, env: Any = None) -> Any:
        return reward if env is None else env.normalize_reward(reward).astype(np.float32)


class ReplayBuffer(BaseBuffer):
    pass


class DictReplayBuffer(ReplayBuffer):
    pass


class NStepReplayBuffer(ReplayBuffer):
    pass


class HerReplayBuffer(DictReplayBuffer):
    pass


class RolloutBuffer(BaseBuffer):
    pass


class DictRolloutBuffer(RolloutBuffer):
    pass


class GoalSelectionStrategy(Enum):
    FUTURE = 0
    FINAL = 1
    EPISODE = 2


class ReplayBufferSamples(NamedTuple):
    observations: Any
    actions: Any
    next_observations: Any
    dones: Any
    rewards: Any
    discounts: Any = None


class DictReplayBufferSamples(NamedTuple):
    observations: Any
    actions: Any
    next_observations: Any
    dones: Any
    rewards: Any
    discounts: Any = None


class RolloutBufferSamples(NamedTuple):
    observations: Any
    actions: Any
    old_values: Any
    old_log_prob: Any
    advantages: Any
    returns: Any


class DictRolloutBufferSamples(NamedTuple):
    observations: Any
    actions: Any
    old_values: Any
    old_log_prob: Any
    advantages: Any
    returns: Any


KEY_TO_GOAL_STRATEGY = {strategy.name.lower(): strategy for strategy in GoalSelectionStrategy}
NAMES = {name: value for name, value in globals().items() if name[0].isupper()}
for value in NAMES.values():
    if isinstance(value, type) and value.__module__ == __name__:
        value.__module__ = "stable_baselines3.common.buffers"
WHERE = ("common.buffers", "common.type_aliases", "her.her_replay_buffer", "her.goal_selection_strategy")


@contextmanager
def installed() -> Iterator[Any]:
    """The drop-in over this instead of its host, even where that is installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith(DROP_IN)]:
            patch.delitem(sys.modules, name)
        for path in ("", ".common", ".her", *(f".{name}" for name in WHERE)):
            module = ModuleType(f"stable_baselines3{path}")
            module.__dict__.update(NAMES)
            patch.setitem(sys.modules, module.__name__, module)
        yield import_module(DROP_IN)
        for name in [name for name in sys.modules if name.startswith(DROP_IN)]:
            del sys.modules[name]
