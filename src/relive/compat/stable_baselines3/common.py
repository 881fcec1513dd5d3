"""What the buffers share: the host's modules, fields for its spaces, ``pos`` and ``full``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from ...steps.arrays import torch_dtype
from ...steps.schema import Field
from ..trees import mapped

__all__ = [
    "action_field",
    "as_flags",
    "buffers",
    "fitted",
    "joined",
    "obs_fields",
    "obs_shapes",
    "overridden",
    "require_dict",
    "samples",
    "set_full",
    "set_pos",
]

FLAG = np.dtype(np.bool_)

buffers: Any = import_module("stable_baselines3.common.buffers")
samples: Any = import_module("stable_baselines3.common.type_aliases")


def obs_fields(space: spaces.Space[Any], shape: Any) -> Any:
    """The fields of an observation in the host's shapes; a Discrete one is ``(1,)``."""
    if isinstance(space, spaces.Dict):
        return {key: Field(tuple(shape[key]), torch_dtype(space[key].dtype)) for key in space.spaces}
    return Field(tuple(shape), torch_dtype(space.dtype))


def action_field(space: spaces.Space[Any], dim: int, *, narrow: bool = True) -> Field:
    """The field ``(dim,)`` of an action. With ``narrow``, float64 becomes float32, as in the host's replays."""
    return Field((dim,), torch_dtype(np.float32 if narrow and space.dtype == np.float64 else space.dtype))


def obs_shapes(shape: Any, num_envs: int) -> Any:
    """The shapes ``(N, ...)`` of all envs' observations, for :func:`fitted`. ``shape`` is the host's, of one env."""
    return mapped(lambda inner: (num_envs, *inner), shape)


def fitted(values: Any, shape: Any) -> Any:
    """Arrays in the host's shapes. An array that has its shape, as most do, is returned itself."""
    if type(shape) is not dict:
        return values if getattr(values, "shape", None) == shape else np.asarray(values).reshape(shape)
    found: dict[str, Any] = {}
    for key, inner in cast("dict[str, Any]", shape).items():  # a comprehension takes twice as long
        value = values[key]
        found[key] = value if getattr(value, "shape", None) == inner else np.asarray(value).reshape(inner)
    return found


def as_flags(values: Any) -> Any:
    """Flags or numbers as a bool array."""
    return values if getattr(values, "dtype", None) is FLAG else np.asarray(values).astype(FLAG)


def joined(space: spaces.Space[Any], obs: Any, name: str = "obs") -> Any:
    """A field of a batch. Observations of a Dict space become a dictionary in the order of the space."""
    if isinstance(space, spaces.Dict) and name in ("obs", "next_obs"):
        return {key: obs[key] for key in space.spaces}
    return obs


def overridden(buffer: object, names: Sequence[str]) -> list[str]:
    """The methods among these that a user's subclass defines."""
    host = __name__.rpartition(".")[0], "stable_baselines3."
    users = [cls for cls in type(buffer).__mro__ if not cls.__module__.startswith(host)]
    return [name for name in names if any(name in vars(cls) for cls in users)]


def require_dict(space: object, name: str) -> None:
    """Refuse a space that is not a Dict, as the host does.

    Raises:
        AssertionError: names the class.
    """
    if not isinstance(space, spaces.Dict):
        raise AssertionError(f"{name} must be used with Dict obs space only")


def set_pos(buffer: Any, pos: int) -> None:
    """Set ``buffer.pos``: rows before it were written in place and count as steps from now on.

    Raises:
        AttributeError: there are more steps already, or fewer rows.
    """
    if pos != buffer.pos:
        buffer._declare(pos)


def set_full(buffer: Any, full: bool) -> None:
    """Set ``buffer.full``: all rows were written in place and count as steps from now on.

    Raises:
        AttributeError: ``full`` is False, and the buffer is full.
    """
    if full != buffer.full:
        buffer._declare(buffer.buffer_size if full else -1)
