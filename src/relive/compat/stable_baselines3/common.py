"""What the buffers share: the host's modules, and its spaces as fields."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from ...schema import Field

__all__ = ["Array", "action_field", "buffers", "joined", "obs_fields", "observed", "samples"]

Array = NDArray[Any]

buffers: Any = import_module("stable_baselines3.common.buffers")
samples: Any = import_module("stable_baselines3.common.type_aliases")


def _field(shape: tuple[int, ...], dtype: Any) -> Field:
    return Field(tuple(shape), torch.from_numpy(np.zeros(1, dtype)).dtype)


def obs_fields(space: spaces.Space[Any], shape: Any) -> Any:
    """The fields of an observation: the host's shapes of it, ``(1,)`` for a Discrete one."""
    if isinstance(space, spaces.Dict):
        return {key: _field(shape[key], space[key].dtype) for key in space.spaces}
    return _field(shape, space.dtype)


def action_field(space: spaces.Space[Any], dim: int, *, narrow: bool = True) -> Field:
    """The field of an action, ``(dim,)``; the host's replays keep float64 as float32."""
    return _field((dim,), np.float32 if narrow and space.dtype == np.float64 else space.dtype)


def observed(space: spaces.Space[Any], shape: Any, obs: Any, num_envs: int) -> Any:
    """Observations ``[N, ...]`` of all envs, in the host's shapes."""
    if isinstance(space, spaces.Dict):
        return {key: observed(space[key], shape[key], obs[key], num_envs) for key in space.spaces}
    return np.asarray(obs).reshape((num_envs, *shape))


def joined(space: spaces.Space[Any], obs: Any) -> Any:
    """Observations of a batch: a dictionary in the order of the space, or the tensor."""
    return {key: obs[key] for key in space.spaces} if isinstance(space, spaces.Dict) else obs
