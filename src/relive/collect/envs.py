"""Reading vector envs: their autoreset mode, their final observations and their infos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import EnvError
from ..steps.arrays import as_host
from ..steps.trees import Path, descend

__all__ = [
    "Bools",
    "autoreset_mode",
    "copied",
    "final_observations",
    "first_leaf",
    "info_field",
    "is_factory",
    "made_again",
    "nothing_known",
    "pick",
    "vectorized",
]


Bools = NDArray[np.bool_]


def is_factory(envs: Any) -> bool:
    """Whether this is a function that makes envs, rather than envs."""
    return callable(envs) and not hasattr(envs, "step")


def vectorized(envs: Any) -> Any:
    """A vector env as it is; a single env as a vector of one."""
    if hasattr(envs, "num_envs"):
        return envs
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv([lambda: envs], autoreset_mode=AutoresetMode.SAME_STEP)


def made_again(envs: Any, mode: str) -> Any:
    """New envs, made as these were, or None where that cannot be told."""
    makers: Any = cast("dict[str, Any]", vars(envs)).get("env_fns")
    if makers is not None:
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        fresh = SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))
        if not any(a.unwrapped is b.unwrapped for a, b in zip(fresh.envs, getattr(envs, "envs", ()), strict=False)):
            return fresh
    elif getattr(envs, "spec", None) is not None:
        import gymnasium

        try:
            if not hasattr(envs, "num_envs"):
                return gymnasium.make(envs.spec)
            if envs.unwrapped is envs:
                return gymnasium.make_vec(envs.spec)
        except (ValueError, gymnasium.error.Error):  # a wrapper that does not tell how it was made
            return None
    return None


def autoreset_mode(envs: Any, given: Any) -> str:
    """The value of the gymnasium.vector.AutoresetMode: "NextStep", "SameStep" or "Disabled".

    Raises:
        EnvError: the env does not say, or says something else.
    """
    metadata: dict[str, Any] = envs.metadata or {}
    told = metadata.get("autoreset_mode") if given is None else given
    mode: Any = getattr(told, "value", told)
    if mode not in ("NextStep", "SameStep", "Disabled"):
        raise EnvError(
            f"the vector env's metadata['autoreset_mode'] is {mode!r}; expected a gymnasium.vector.AutoresetMode. "
            "Without it the ends of episodes cannot be told: set it, or pass Collector(..., autoreset_mode=...)"
        )
    return mode


def final_observations(info: Mapping[str, Any], num_envs: int) -> tuple[Any, Bools]:
    """The final observations by env, under the names of all Gymnasium versions, and which envs have one."""
    for name in ("final_obs", "final_observation"):
        if name in info:
            return info[name], _present(info, name, num_envs)
    return None, np.zeros(num_envs, np.bool_)


def info_field(info: Mapping[str, Any], name: str, num_envs: int) -> tuple[Any, Bools]:
    """One entry of a vector env's info, None if there is none, and which envs report it."""
    if name not in info:
        return None, np.zeros(num_envs, np.bool_)
    return info[name], _present(info, name, num_envs)


def _present(info: Mapping[str, Any], name: str, num_envs: int) -> Bools:
    """Gymnasium puts the mask of an entry beside it; without one, None marks the envs that have nothing."""
    if f"_{name}" in info:
        return as_host(info[f"_{name}"]).astype(np.bool_)
    given = info[name]
    if isinstance(given, np.ndarray) and given.dtype == object:
        return np.array([row is not None for row in cast("Any", given)])
    return np.ones(num_envs, np.bool_)


def pick(given: Any, inner: Path, envs: NDArray[np.intp]) -> Tensor:
    """Rows of one leaf, whether they come as an object array by env or as a batch."""
    if isinstance(given, list) or (isinstance(given, np.ndarray) and given.dtype == object):
        by_env = cast("Any", given)
        return torch.stack([copied(descend(by_env[n], inner)) for n in envs])
    leaf = copied(descend(given, inner))
    return leaf[torch.as_tensor(envs, device=leaf.device)]


def copied(x: Any) -> Tensor:
    """A tensor of its own memory: many envs write their next observation where this one lies."""
    return x.clone() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))


def nothing_known(name: str, like: Tensor, count: int) -> Tensor:
    """Rows for an info field where no action follows: nothing forbidden for a mask, else 0."""
    fill = torch.ones if name == "action_mask" or like.dtype is torch.bool else torch.zeros
    return fill((count, *like.shape[1:]), dtype=like.dtype, device=like.device)


def first_leaf(tree: Any) -> Any:
    """Some leaf of nested mappings and tuples."""
    while isinstance(tree, Mapping | tuple):
        branches = cast("Any", tree.values() if isinstance(tree, Mapping) else tree)
        tree = next(iter(branches))
    return tree
