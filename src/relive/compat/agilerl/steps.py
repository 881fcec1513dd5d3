"""A step as AgileRL's collector hands it over: what its spaces store, how it is shaped, what its done flags mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ... import returns
from ...steps.arrays import as_tensor, numpy_dtype
from ...steps.schema import Field
from ..errors import StepError

__all__ = [
    "FLAG",
    "FLAT",
    "Ends",
    "Fields",
    "action_field",
    "blank",
    "fitted",
    "numbered",
    "observation_fields",
    "recurrent_states",
    "vector",
]

Fields: TypeAlias = "dict[tuple[str, ...], Field]"
"""The members of something nested, by name; that of something that is not nested has the name ()."""

FLAT = Field()
FLAG = Field((), torch.bool)


def observation_fields(space: Any, keep_dtypes: bool) -> Fields:
    """What one environment's observation is stored as: Discrete gets an axis of 1, and all is float32.

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
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype if keep_dtypes and space.dtype else torch.float32
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return Field(tuple(int(size) for size in cast("Any", space).shape), dtype)
    if isinstance(space, spaces.Discrete):
        return Field((1,), dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return Field((len(cast("Any", space).nvec),), dtype)
    raise NotImplementedError(f"{space} observation space is not supported")


def action_field(space: Any, keep_dtypes: bool) -> Field:
    """What one environment's action is stored as: a vector, float32.

    Raises:
        NotImplementedError: a space that AgileRL does not store.
    """
    fixed, known = space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, known):
        raise NotImplementedError(f"{space} action space is not supported by AgileRL.")
    nvec = getattr(fixed, "nvec", None)
    size = prod(fixed.shape) if nvec is None else len(nvec)
    return Field((size,), torch.from_numpy(np.empty(0, fixed.dtype)).dtype if keep_dtypes else torch.float32)


def numbered(fields: Fields) -> Any:
    """The members as relive's schema has them: a tuple, since a name in AgileRL may have dots."""
    return fields[()] if () in fields else tuple(fields.values())


def blank(fields: Fields, num_envs: int) -> Any:
    """Zeros, nested likewise."""
    zeros = [np.zeros((num_envs, *field.shape), numpy_dtype(field.dtype)) for field in fields.values()]
    return zeros[0] if () in fields else tuple(zeros)


def vector(name: str, value: Any, num_envs: int, field: Field = FLAT) -> Any:
    """One value, or one vector, of each environment, as an array ``[N]`` or ``[N, A]`` of the field's dtype.

    Raises:
        StepError: it has another number of elements.
    """
    array, shape = _array(name, value, field), (num_envs, *field.shape)
    if array.shape == shape:
        return array
    if array.size != np.prod(shape):
        raise StepError(f"'{name}': expected {shape} (num_envs first), got {tuple(array.shape)}")
    return array.reshape(shape)


def fitted(name: str, value: Any, fields: Fields, num_envs: int) -> Any:
    """An observation: arrays ``[N, ...]``, nested as :func:`numbered` has them.

    Raises:
        AssertionError: one of a Dict space is no mapping.
        KeyError: a member that the space has not, or has and the observation has not.
        StepError: a shape does not fit.
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
    array, shape = _array(name, value, field), (num_envs, *field.shape)
    if array.shape == shape:
        return array
    # a single environment's without its axis, one of several axes in front, a number that stands for a vector of one
    if (array.size == np.prod(shape) and array.shape in (field.shape, shape[:-1])) or array.ndim == len(shape) + 1:
        return array.reshape((-1, *field.shape))
    raise StepError(f"'{name}': expected {shape} (num_envs first), got {tuple(array.shape)}")


def recurrent_states(hidden_state: Mapping[str, Any], fields: Fields, num_envs: int) -> Any:
    """Recurrent states ``[layers, N, size]`` as they are stored, ``[N, layers, size]`` each.

    Raises:
        StepError: one is missing, or its shape does not fit.
    """
    states: list[Tensor] = []
    for (key,), field in fields.items():
        if key not in hidden_state:
            raise StepError(f"'hidden_state': expected {[key for (key,) in fields]}, got {list(hidden_state)}")
        state, (layers, size) = torch.as_tensor(hidden_state[key]).detach().cpu(), field.shape
        if tuple(state.shape) != (layers, num_envs, size):
            raise StepError(
                f"'hidden_state[{key!r}]': expected {(layers, num_envs, size)} (layers first), got {tuple(state.shape)}"
            )
        states.append(state.transpose(0, 1).float())
    return tuple(states)


def _array(name: str, value: Any, field: Field) -> np.ndarray[Any, Any]:
    """Anything array-like as an array of the field's dtype; a copy only if it has another, or is on another device."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", field.dtype).numpy()
    if not isinstance(value, np.ndarray):
        value = as_tensor(value, name).numpy()
    return cast("Any", value).astype(numpy_dtype(field.dtype), copy=False)


@dataclass(frozen=True, slots=True)
class Ends:
    """Advantages and returns with AgileRL's arguments: an estimator for ``finish``.

    ``terminated`` is AgileRL's ``done``: it marks truncated steps as well, and ``truncated`` only those that were
    announced. ``newest`` (bool ``[N]``) is its ``last_done``: whether the newest step was terminal. If that step was
    done nevertheless, it was cut off, and the bootstrap value is that of what comes after.

    Args:
        newest: see above.
        gamma: discount per step.
        lam: λ of GAE; None for Monte-Carlo returns.
        follows: the step after a done one is a reset, whose value is that of the observation the episode ended on.
    """

    newest: Tensor
    gamma: float
    lam: float | None
    follows: bool

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns needed."""
        return ("reward", "value", "terminated", "truncated", "final_value", "mask")

    def __call__(self, **columns: Any) -> dict[str, Tensor]:
        """The columns ``advantage`` and ``return``, ``[T, N]``."""
        done, truncated, value = columns["terminated"], columns["truncated"].clone(), columns["value"]
        truncated[-1] |= done[-1]
        truncated[-1] &= ~self.newest
        terminated = done & ~truncated
        terminated[-1] |= self.newest
        final = columns["final_value"]
        final = torch.full_like(value[1:], float("nan")) if final is None else final.clone()
        after = slice(None) if self.follows else slice(-1, None)
        unknown = final[after].isnan()
        final[after] = torch.where(unknown, value[1:][after], final[after])
        options: dict[str, Any] = {"final_value": final, "mask": columns["mask"], "gamma": self.gamma}
        reward = columns["reward"]
        if self.lam is None:
            ret = returns.monte_carlo(reward, terminated, truncated, value=value, **options)
            return {"advantage": ret - value[:-1], "return": ret}
        advantage, ret = returns.gae(reward, value, terminated, truncated, lam=self.lam, **options)
        return {"advantage": advantage, "return": ret}
