"""Turning the arguments of AgileRL's ``add`` into fields of relive: their dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ...steps.arrays import numpy_dtype, torch_dtype
from ...steps.schema import Field
from ..arrays import array_of
from ..errors import StepFieldError, StepShapeError

__all__ = [
    "FLAG",
    "Fields",
    "Steps",
    "action_field",
    "numbered",
    "observation_fields",
    "vector",
]

Fields: TypeAlias = "dict[tuple[str, ...], Field]"
"""Member -> field. What is not nested has one member, named ()."""

FLAT = Field()
FLAG = Field((), torch.bool)


def observation_fields(space: Any, keep_dtypes: bool) -> Fields:
    """The fields of one environment's observation. Discrete becomes a vector of one; all are float32, as in AgileRL.

    Raises:
        NotImplementedError: a space that AgileRL does not store.
        AssertionError: a Tuple space.
    """
    if isinstance(space, spaces.Tuple):
        raise AssertionError("Tuple observation spaces are not supported by the rollout buffer.")
    members: dict[tuple[str, ...], Any] = {(): space}
    if isinstance(space, spaces.Dict):
        members = {(name,): member for name, member in cast("dict[str, Any]", space.spaces).items()}
    return {path: _observation_field(member, keep_dtypes) for path, member in members.items()}


def _observation_field(space: Any, keep_dtypes: bool) -> Field:
    dtype = torch_dtype(space.dtype) if keep_dtypes and space.dtype else torch.float32
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return Field(tuple(int(size) for size in cast("Any", space).shape), dtype)
    if isinstance(space, spaces.Discrete):
        return Field((1,), dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return Field((len(cast("Any", space).nvec),), dtype)
    raise NotImplementedError(f"{space} observation space is not supported")


def action_field(space: Any, keep_dtypes: bool) -> Field:
    """The field of one environment's action: a float32 vector, as in AgileRL.

    Raises:
        NotImplementedError: a space that AgileRL does not store.
    """
    fixed, known = space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, known):
        raise NotImplementedError(f"{space} action space is not supported by AgileRL.")
    nvec = getattr(fixed, "nvec", None)
    size = prod(fixed.shape) if nvec is None else len(nvec)
    return Field((size,), torch_dtype(fixed.dtype) if keep_dtypes else torch.float32)


def numbered(fields: Fields) -> Any:
    """The fields for relive's schema. Members become a tuple, because AgileRL's names may contain dots."""
    return fields[()] if () in fields else tuple(fields.values())


def blank(fields: Fields, num_envs: int) -> Any:
    """Zeros ``[N, ...]`` for these fields."""
    zeros = [np.zeros((num_envs, *field.shape), numpy_dtype(field.dtype)) for field in fields.values()]
    return zeros[0] if () in fields else tuple(zeros)


def vector(name: str, value: Any, num_envs: int, field: Field = FLAT) -> Any:
    """One number or vector per environment, as an array ``[N]`` or ``[N, A]`` of the field's dtype.

    Raises:
        StepShapeError: it has another number of elements.
    """
    array, shape = array_of(name, value, field.dtype), (num_envs, *field.shape)
    if array.shape == shape:
        return array
    if array.size != np.prod(shape):
        raise StepShapeError(f"'{name}': expected {shape} (num_envs first), got {tuple(array.shape)}")
    return array.reshape(shape)


def fitted(name: str, value: Any, fields: Fields, num_envs: int) -> Any:
    """An observation as arrays ``[N, ...]``, nested like :func:`numbered`.

    Raises:
        AssertionError: the space is a Dict and the observation is no mapping.
        KeyError: the observation and the space have different members.
        StepShapeError: a shape does not fit.
    """
    if () in fields:
        return _leaf(name, value, fields[()], num_envs)
    if not isinstance(value, Mapping) and not hasattr(value, "keys"):
        raise AssertionError("Expected a dict observation for a Dict observation space.")
    members: dict[tuple[str, ...], Any] = {(key,): member for key, member in cast("Any", value).items()}
    if members.keys() != fields.keys():
        different = sorted(str(path[0]) for path in members.keys() ^ fields.keys())
        raise KeyError(f"'{name}': expected the members {[key for (key,) in fields]}, got others in {different}")
    return tuple(_leaf(f"{name}.{path[0]}", members[path], field, num_envs) for path, field in fields.items())


def _leaf(name: str, value: Any, field: Field, num_envs: int) -> Any:
    array, shape = array_of(name, value, field.dtype), (num_envs, *field.shape)
    if array.shape == shape:
        return array
    # Accepted besides: a single environment without its axis, two leading axes, a number for a vector of one.
    if (array.size == np.prod(shape) and array.shape in (field.shape, shape[:-1])) or array.ndim == len(shape) + 1:
        return array.reshape((-1, *field.shape))
    raise StepShapeError(f"'{name}': expected {shape} (num_envs first), got {tuple(array.shape)}")


def recurrent_states(hidden_state: Mapping[str, Any], fields: Fields, num_envs: int) -> Any:
    """Recurrent states ``[layers, N, size]`` in the order of the storage, ``[N, layers, size]`` each.

    Raises:
        StepFieldError: a state is missing.
        StepShapeError: a shape does not fit.
    """
    states: list[Tensor] = []
    for (key,), field in fields.items():
        if key not in hidden_state:
            names = [key for (key,) in fields]
            raise StepFieldError(f"'hidden_state': expected the states {names}, got {list(hidden_state)}")
        state, (layers, size) = torch.as_tensor(hidden_state[key]).detach().cpu(), field.shape
        if tuple(state.shape) != (layers, num_envs, size):
            raise StepShapeError(
                f"'hidden_state[{key!r}]': expected {(layers, num_envs, size)} (layers first), got {tuple(state.shape)}"
            )
        states.append(state.transpose(0, 1).float())
    return tuple(states)


class Steps:
    """Turns the arguments of AgileRL's ``add`` into a step ``[N, ...]`` of a rollout.

    Args:
        obs: the fields of an observation.
        action: the field of an action.
        hidden: the fields of the recurrent states; empty if there are none.
        num_envs: N.
    """

    def __init__(self, obs: Fields, action: Field, hidden: Fields, num_envs: int) -> None:
        self._obs, self._action, self._hidden, self._num_envs = obs, action, hidden, num_envs
        self._no_obs, self._no_state = blank(obs, num_envs), blank(hidden, num_envs)
        self._zeros, self._false = np.zeros(num_envs, np.float32), np.zeros(num_envs, np.bool_)

    def __call__(
        self, obs: Any, action: Any, reward: Any, done: Any, value: Any, log_prob: Any, next_obs: Any,
        hidden_state: Any, truncated: Any, final_value: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The step by relive's names. Arguments that are None become zeros; ``final_value`` is left out.

        Raises:
            StepFieldError: a recurrent state is missing.
            StepShapeError: a shape does not fit.
            AssertionError, KeyError: see :func:`fitted`.
        """
        n = self._num_envs
        ended = vector("done", done, n, FLAG)
        step: dict[str, Any] = {
            "obs": fitted("obs", obs, self._obs, n),
            "next_obs": self._no_obs if next_obs is None else fitted("next_obs", next_obs, self._obs, n),
            "action": vector("action", action, n, self._action),
            "reward": vector("reward", reward, n),
            "terminated": ended,
            "truncated": self._false if truncated is None else ended & vector("truncated", truncated, n, FLAG),
            "value": vector("value", value, n),
            "log_prob": vector("log_prob", log_prob, n),
            "advantage": self._zeros,
            "return": self._zeros,
        }
        if self._hidden:
            states = self._no_state if hidden_state is None else recurrent_states(hidden_state, self._hidden, n)
            step["hidden"] = states
        if final_value is not None:
            step["final_value"] = vector("final_value", final_value, n)
        return step
